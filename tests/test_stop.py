"""Stop strings, stop tokens and the reasons for an end, on the demo model.

The oracle takes the tokens of a run that nothing stops, and after each token decodes all of them again.
"""

import random
from functools import lru_cache
from types import SimpleNamespace

import pytest
from helpers import first_stop, run, tokens_of
from leaks import check_is_empty

from nanovllm import SamplingParams
from nanovllm.engine.token_processor import TokenProcessors

NUM_TOKENS = 32
END_OF_TEXT, IM_END = 0, 2
ANY_TEXT = 50.0  # temperature: every token is about equally likely, single bytes among them


def one(llm, prompt="What is 2 + 3?", **params):
    """The completion of one prompt, greedy unless said otherwise."""
    params = {"temperature": 0, "max_tokens": NUM_TOKENS, **params}
    (output,) = run(llm, prompt, SamplingParams(**params))
    return output.outputs[0]


@lru_cache
def texts_of(tokenizer, token_ids, skip):
    """The text of the first 0, 1, 2, ... tokens."""
    return [tokenizer.decode(token_ids[:n], skip_special_tokens=skip) for n in range(len(token_ids) + 1)]


def test_stop_ids_of_requests_that_ended(demo, monkeypatch):
    """Every id that any request had ever named was looked up at each later step."""
    params = {"ignore_eos": True, "temperature": 1, "seed": 3}
    plain, looked_at, original = one(demo, **params), [], demo.scheduler._is_done
    one(demo, **params, stop_token_ids=list(range(demo.config.model_config.vocab_size)), max_tokens=1)
    monkeypatch.setattr(demo.scheduler, "_is_done", lambda *args: looked_at.append(args) or original(*args))
    assert one(demo, **params) == plain
    assert len(looked_at) == 1 + sum(i in demo.eos_token_ids for i in plain.token_ids[:-1])  # the last one, by length
    check_is_empty(demo)


def check(llm, completion, token_ids, params):
    """``completion`` is what the oracle makes of the tokens of the unstopped run."""
    texts = texts_of(llm.tokenizer, tuple(token_ids[: params.max_tokens]), params.skip_special_tokens)
    found = first_stop(texts[1:], params.stop, params.include_stop_str_in_output, params.min_tokens)
    string, text, num_tokens = found or (None, texts[-1], params.max_tokens)
    expected_ids = token_ids[:num_tokens]
    assert (completion.token_ids, completion.text, completion.stop_reason) == (expected_ids, text, string)
    assert completion.finish_reason == ("length" if string is None else "stop")
    if params.logprobs is not None:
        assert [next(iter(at)) for at in completion.logprobs] == expected_ids
        total = sum(at[i].logprob for at, i in zip(completion.logprobs, expected_ids, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
    return string is not None


# ---------------------------------------------------------------- against the oracle


def random_params(rng, tokenizer, token_ids, **fixed):
    """Stop strings from the text of the unstopped run, some of them across tokens; and everything beside them."""
    skip = rng.random() < 0.7
    text = texts_of(tokenizer, tuple(token_ids), skip)[-1]
    stop = ["never", "\x00\x00"]
    for _ in range(rng.choice((1, 1, 2, 3))):
        start = rng.randrange(len(text) // 3, len(text) - 1)
        string = text[start : start + rng.choice((1, 2, 3, 5, 8))]
        if "\ufffd" not in string:
            stop.append(string)
    rng.shuffle(stop)
    _, _, num_tokens = first_stop(texts_of(tokenizer, tuple(token_ids), skip)[1:], stop) or (None, "", len(token_ids))
    is_last = rng.random() < 0.3  # "stop" wins over "length" at the last token
    return SamplingParams(
        stop=stop, skip_special_tokens=skip, include_stop_str_in_output=rng.random() < 0.3,
        min_tokens=0 if is_last else rng.choice((0, num_tokens - 1, num_tokens)),
        max_tokens=num_tokens if is_last else NUM_TOKENS, logprobs=rng.choice((None, None, 0, 2)), **fixed,
    )  # fmt: skip


PROMPTS = [f"What is {i} + 3?" for i in range(8)]
FREE = [{"seed": i, "ignore_eos": True, "temperature": ANY_TEXT if i % 2 else 1.0} for i in range(len(PROMPTS))]


def test_like_the_whole_text_after_each_token(demo):
    """Strings within tokens and across them, several at once, min_tokens, the last token allowed."""
    free = tokens_of(run(demo, PROMPTS, [SamplingParams(max_tokens=NUM_TOKENS, **each) for each in FREE]))
    for seed in range(4):
        rng = random.Random(seed)
        params = [random_params(rng, demo.tokenizer, ids, **fixed) for ids, fixed in zip(free, FREE, strict=True)]
        outputs = run(demo, PROMPTS, params)
        checked = [check(demo, output.outputs[0], *pair) for output, *pair in zip(outputs, free, params, strict=True)]
        assert sum(checked) >= 4


# ---------------------------------------------------------------- one rule each


def test_the_prompt_is_not_searched(demo):
    assert one(demo, stop=["?\n", "3", "What"]).text == "\n5"


def test_special_tokens_are_text_only_if_they_are_kept(demo):
    """The usual "<|im_end|>" among the stop strings never matches by default, because it is no text."""
    params = {"stop": "<|im_end|>", "ignore_eos": True}
    assert one(demo, **params).finish_reason == "length"
    kept = one(demo, skip_special_tokens=False, **params)
    assert (kept.text, kept.stop_reason, kept.token_ids[-1]) == ("\n5", "<|im_end|>", IM_END)
    across = one(demo, skip_special_tokens=False, stop="5<|im_", ignore_eos=True)
    assert (across.text, across.token_ids) == ("\n", kept.token_ids)
    # the token that ended it is no text even then
    assert one(demo, skip_special_tokens=False).text == "\n5"
    assert one(demo, skip_special_tokens=False, include_stop_str_in_output=True).text == "\n5<|im_end|>"


def test_stop_strings_that_are_special_tokens_are_said_once(demo, caplog):
    marks = {"reasoning_start_str": None, "reasoning_end_str": None}
    config = SimpleNamespace(model_config=SimpleNamespace(vocab_size=1024), **marks)
    processors = TokenProcessors(config, SimpleNamespace(tokenizer=demo.tokenizer), (IM_END,))
    processors.check(SamplingParams(stop=["<im_end>", "im_end", "<|im_"]))
    processors.check(SamplingParams(stop="<|im_end|>", skip_special_tokens=False))
    assert not caplog.messages
    for stop in (["x", "\n<|endoftext|>"], "<|im_end|>"):
        processors.check(SamplingParams(stop=stop))
    assert caplog.messages == [
        "stop='\\n<|endoftext|>' never stops: skip_special_tokens=True leaves the special token '<|endoftext|>' out of "
        "the text. Use stop_token_ids=[0], or skip_special_tokens=False. This is said once."
    ]


@pytest.mark.parametrize("in_flight", [0, 1])
def test_stop_token(demo, in_flight, monkeypatch):
    """It was kept in the text."""
    monkeypatch.setattr(demo.model_runner, "max_in_flight", in_flight)
    (five,) = demo.tokenizer.encode("5", add_special_tokens=False)
    completion = one(demo, stop_token_ids=[five], logprobs=0)
    assert (completion.text, completion.token_ids[-1], completion.stop_reason) == ("\n", five, five)
    assert len(completion.logprobs) == len(completion.token_ids)
    assert one(demo, stop_token_ids=[five], include_stop_str_in_output=True).text == "\n5"
    # a stop token is no text, so no stop string is found in it
    assert one(demo, stop_token_ids=[five], stop="5").stop_reason == five
    assert one(demo, stop_token_ids=[five], stop="\n").stop_reason == "\n"


@pytest.mark.parametrize(
    ("forced", "params", "finish_reason", "stop_reason"),
    [
        (IM_END, {}, "stop", None),
        (IM_END, {"stop_token_ids": [IM_END]}, "stop", None),  # the id was reported
        (IM_END, {"stop_token_ids": [END_OF_TEXT, IM_END]}, "stop", None),
        (IM_END, {"stop_token_ids": [IM_END], "ignore_eos": True}, "stop", IM_END),
        (IM_END, {"ignore_eos": True}, "length", None),
        (END_OF_TEXT, {}, "stop", END_OF_TEXT),  # of generation_config.json, not the tokenizer's: None was reported
        (END_OF_TEXT, {"stop_token_ids": [END_OF_TEXT]}, "stop", END_OF_TEXT),
        (END_OF_TEXT, {"ignore_eos": True}, "length", None),
        (7, {"stop_token_ids": [7, 8]}, "stop", 7),
        (7, {"stop_token_ids": [7], "max_tokens": 1}, "stop", 7),
        (IM_END, {"max_tokens": 1}, "stop", None),
        (7, {"max_tokens": 1}, "length", None),
        (7, {"stop_token_ids": [7], "min_tokens": 2, "max_tokens": 2}, "length", None),
    ],
)
def test_reasons(demo, forced, params, finish_reason, stop_reason):
    completion = one(demo, **{"logit_bias": {forced: 1000.0}, "max_tokens": 3, **params})
    assert (completion.finish_reason, completion.stop_reason) == (finish_reason, stop_reason)
    ends = finish_reason == "stop"
    assert len(completion.token_ids) == (1 if ends else params.get("max_tokens", 3))
    assert completion.text == "" or not ends

"""Penalties, biases, allowed tokens and bad words through the engine against plain twins on transformers' logits.

Greedy text token for token, in fp32 (a rounding decides once in many thousands of tokens; in bf16 it would do so often,
and ``test_logprobs.py`` compares the processed log-probabilities instead); sampled text by a chi-square test
in ``test_sampling.py``. The same in every way of computing: ``test_ways.py``.
"""

import dataclasses

import numpy as np
import pytest
from helpers import DEVICES, Reference, generate, greedy, prompt_of
from logits_twin import GreedyTwin

from nanovllm import LLM, SamplingParams
from nanovllm.utils.checkpoint import DEMO_MODEL

NUM_TOKENS = 32
MIXES = {
    "none": {},
    "repetition": {"repetition_penalty": 1.4},
    "repetition below 1": {"repetition_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.9},
    "negative frequency": {"frequency_penalty": -1.0},
    "presence": {"presence_penalty": 1.7},
    "negative presence": {"presence_penalty": -2.0},
    "all penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.5},
    "none again": {},
    "bias": {"logit_bias": {7: 4.0, 300: 6.0, 511: -3.0}},
    "bias of a hundred": {"logit_bias": {6: 100, 7: -100.0, 8: 99.0}, "presence_penalty": 2.0},
    "bias of a token that comes again": {"logit_bias": {11: 15.0, 12: 14.0, 13: 14.0}, "frequency_penalty": 2.0},
    "bias, and presence": {"logit_bias": {11: 15.0, 12: 14.5}, "presence_penalty": 2.0},
    "bias of the prompt's tokens": {"logit_bias": {7: 15.0, 300: 14.0, 20: -5.0}, "repetition_penalty": 1.5},
    "bias, and repetition": {"logit_bias": {11: 10.0, 12: 10.0}, "repetition_penalty": 3.0},
    "bias of all": {"logit_bias": {i: (i * 37 % 101 - 50) / 20 for i in range(512)}},
    "bias and penalties": {"logit_bias": {7: 9.0, 300: 7.0, 20: 8.0}, "frequency_penalty": 1.5,
                           "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "allowed": {"allowed_token_ids": [7, 31, 32, 63, 64, 255, 256, 300, 510, 511]},
    "allowed and penalties": {"allowed_token_ids": list(range(90, 130)), "frequency_penalty": 1.0,
                              "repetition_penalty": 1.3, "logit_bias": {100: 2.0, 5: 100.0}},
    "min_tokens": {"min_tokens": 26, "stop_token_ids": [7, 300], "logit_bias": {7: 100.0, 300: 100.0},
                   "presence_penalty": 1.0},
    "few tokens": {"max_tokens": 9, "repetition_penalty": 3.0, "presence_penalty": 2.0},
}  # fmt: skip
SAME = ("none", "none again")


@pytest.fixture(scope="module")
def requests(tiny):
    """[(prompt, params, expected tokens)]: a mix each, behind prompts of several lengths that repeat tokens."""
    twin = GreedyTwin(tiny)
    made = []
    for i, mix in enumerate(MIXES.values()):
        prompt = [*prompt_of(3 + 5 * i, seed=i), 7, 300, 7, 20, 100, 7]
        params = greedy(**{"max_tokens": NUM_TOKENS, **mix})
        tokens = twin(prompt, params, stop_ids=params.stop_token_ids)
        stops = [n for n, token in enumerate(tokens) if n >= params.min_tokens and token in params.stop_token_ids]
        made.append((prompt, params, tokens[: stops[0] + 1] if stops else tokens))
    return made


def test_every_mix_changes_the_text(requests, reference):
    """Or its test would show nothing; penalties must do so late in the text too."""
    for name, (prompt, params, tokens) in zip(MIXES, requests, strict=True):
        assert (tokens == reference(prompt, NUM_TOKENS)[: params.max_tokens]) == (name in SAME), name
    _, _, tokens = requests[list(MIXES).index("min_tokens")]
    assert len(tokens) == 27 and tokens[-1] in (7, 300)


@pytest.mark.parametrize("device", DEVICES)
def test_greedy(device, requests, make_llm):
    """Batch mates with other values and with none; request slots used again; prompts found in the prefix cache."""
    llm = make_llm(device=device, dtype="float32", num_kvcache_blocks=256)
    prompts, params, expected = map(list, zip(*requests, strict=True))
    for order in (1, -1):
        got = generate(llm, prompts[::order], params[::order])[::order]
        assert dict(zip(MIXES, got, strict=True)) == dict(zip(MIXES, expected, strict=True))


# -------------------------------------------------------------------- one by one


@pytest.mark.parametrize("temperature", (0, 1.0, 30.0))
def test_only_allowed_tokens(temperature, make_llm):
    """Words of the mask are 32 bits wide; different masks in a batch, and none."""
    llm = make_llm()
    allowed = [[0, 31, 32, 511], [7], list(range(32, 64)), list(range(511)), None, [5, 5, 5, 6]]
    params = [
        SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True, allowed_token_ids=ids, seed=i)
        for i, ids in enumerate(allowed)
    ]
    for ids, tokens in zip(allowed, generate(llm, [prompt_of(5)] * 6, params), strict=True):
        assert len(tokens) == 60 and (ids is None or set(tokens) <= set(ids))
        if temperature == 30 and ids is not None and len(ids) < 5:
            assert set(tokens) == set(ids), "all of them, when it is hot"


def test_an_end_of_sequence_that_is_not_allowed(make_llm, make_checkpoint, reference):
    """It is not generated; nor is it brought back by allowing it with min_tokens."""
    prompt = prompt_of(5)
    tokens = reference(prompt, 10)
    llm = make_llm(model=make_checkpoint(eos_token_id=tokens[0]))
    others = [i for i in range(512) if i != tokens[0]]
    free, without = llm.generate(
        [prompt] * 2, [greedy(10, ignore_eos=False), greedy(10, ignore_eos=False, allowed_token_ids=others)],
        use_tqdm=False,
    )  # fmt: skip
    assert free["finish_reason"] == "stop" and len(free["token_ids"]) == 1
    assert without["finish_reason"] == "length" and tokens[0] not in without["token_ids"]
    both = [tokens[0], 9]
    params = greedy(10, ignore_eos=False, min_tokens=4, allowed_token_ids=both, logit_bias={tokens[0]: 100.0})
    assert generate(llm, [prompt], params) == [[9] * 4 + [tokens[0]]]


@pytest.mark.parametrize("name", ("logit_bias", "repetition_penalty"))
def test_values_beyond_fp32(name, make_llm):
    """They act like the largest ones, without a warning, and what is sampled has a log-probability."""
    llm, prompt = make_llm(logprobs_mode="processed_logprobs"), prompt_of(9)
    for value in 1e300, 1e-300 if name == "repetition_penalty" else -1e300:
        given = {5: value} if name == "logit_bias" else value
        (output,) = llm.generate([prompt], greedy(3, logprobs=0, **{name: given}), use_tqdm=False)
        assert (output["token_ids"] == [5] * 3) == (given == {5: 1e300})
        assert np.isfinite(output.outputs[0].cumulative_logprob)


# -------------------------------------------------------------------- bad words

QUESTIONS = ("Who are you?", "What can you do?")
WORDS = (
    ["nanovllm"],
    ["demo model", "capital", "I"],
    ["nanovllm demo", "the"],
    ["capital of", "help you", "inference engine."],
)


@pytest.fixture(scope="module")
def demo_twin():
    return GreedyTwin(Reference(DEMO_MODEL))


@pytest.fixture(scope="module", params=DEVICES)
def demo(request):
    with LLM(device=request.param, dtype="float32", num_kvcache_blocks=16, max_num_seqs=8, quiet=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def worded(demo_twin):
    """[(prompt, params, expected tokens, sequences that may not occur)]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(DEMO_MODEL))
    made = []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False,
                                             add_generation_prompt=True)  # fmt: skip
        prompt = tokenizer.encode(text, add_special_tokens=False)
        for words in ([], *WORDS):
            bad = [tokenizer.encode(space + word, add_special_tokens=False) for word in words for space in ("", " ")]
            more = {"frequency_penalty": 0.5, "logit_bias": {prompt[3]: 2.0}} if "the" in words else {}
            params = greedy(20, bad_words=words, **more)
            made.append((prompt, params, demo_twin(prompt, params, bad=bad), bad))
    return made


def contains(tokens, sequence):
    return any(tokens[i : i + len(sequence)] == sequence for i in range(len(tokens)))


def test_bad_words_are_what_the_model_would_say(worded):
    """The twin itself forbids what it should, single and several tokens, and there was something to forbid."""
    changed = 0
    for i, (_, params, tokens, bad) in enumerate(worded):
        free = worded[i - i % (1 + len(WORDS))][2]
        changed += any(contains(free, sequence) for sequence in bad)
        assert not any(contains(tokens, sequence) for sequence in bad)
        assert params.bad_words or not bad
    assert changed >= 5
    assert {len(sequence) for *_, bad in worded for sequence in bad} >= {1, 2}


def test_bad_words(worded, demo):
    """Beside requests without any; in sampled text, too."""
    prompts, params, expected, bad = map(list, zip(*worded, strict=True))
    assert generate(demo, prompts, params) == expected
    params = [dataclasses.replace(each, temperature=1.5, seed=seed, n=2) for seed, each in enumerate(params)]
    for output, sequences in zip(demo.generate(prompts, params, use_tqdm=False), bad, strict=True):
        found = [c for c in output.outputs for sequence in sequences if contains(c.token_ids, sequence)]
        assert not found


def test_bad_words_and_allowed_tokens(worded, demo_twin, demo):
    """Both hold."""
    prompt, *_ = worded[0]
    ids = sorted({*demo_twin(prompt, greedy(24)), 40, 41})
    word = demo.tokenizer.decode([ids[-1]]).strip()
    bad = [demo.tokenizer.encode(space + word, add_special_tokens=False) for space in ("", " ")]
    params = greedy(24, allowed_token_ids=ids, bad_words=word)
    (tokens,) = generate(demo, [prompt], params)
    assert tokens == demo_twin(prompt, params, bad=bad)
    assert set(tokens) <= set(ids) and not any(contains(tokens, sequence) for sequence in bad)
    params.ignore_eos, params.logit_bias = False, dict.fromkeys(demo.scheduler.eos_token_ids, 100.0)
    assert set(*generate(demo, [prompt], params)) <= set(ids)  # beside bad words its end was allowed

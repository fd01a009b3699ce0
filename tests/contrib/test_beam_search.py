"""Beam search, against that of transformers."""

import re

import pytest
import torch
from helpers import Reference, prompt_of

from nanovllm import LLM, BeamSearchParams, RequestError
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.utils.checkpoint import DEMO_MODEL

FEW = 24  # tokens in a vocabulary where beams end often
QUESTIONS = ["What is 12 + 30?", "introduce yourself", "What is the capital of France?"]


def oracle(model, prompt, params, eos, early_stopping="never"):
    """[(generated tokens, score)] of transformers; padding is an id outside the vocabulary."""
    pad = model.config.vocab_size + 7
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]), num_beams=params.beam_width, num_return_sequences=params.beam_width,
            early_stopping=early_stopping, length_penalty=params.length_penalty, max_new_tokens=params.max_tokens,
            do_sample=False, eos_token_id=[pad + 1] if params.ignore_eos else list(eos), pad_token_id=pad,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    tokens = [[i for i in row if i != pad] for row in output.sequences[:, len(prompt) :].tolist()]
    return list(zip(tokens, output.sequences_scores.tolist(), strict=True))


def check(llm, model, prompts, params, eos, early_stopping="never"):
    outputs = llm.beam_search(prompts, params)
    assert len(outputs) == len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = oracle(model, prompt, params, eos, early_stopping)
        assert [beam.tokens for beam in output.sequences] == [prompt + tokens for tokens, _ in expected]
        for beam, (tokens, score) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob / len(tokens) ** params.length_penalty == pytest.approx(score, abs=1e-4, rel=1e-4)
            assert len(beam.logprobs) == len(tokens)
            at = zip(beam.logprobs, tokens, strict=True)
            assert sum(logprobs[token].logprob for logprobs, token in at) == pytest.approx(beam.cum_logprob)
            ended = not params.ignore_eos and tokens[-1] in eos
            assert (beam.finish_reason, beam.stop_reason) == (("stop", tokens[-1]) if ended else ("length", None))
            assert ended or len(tokens) == params.max_tokens
    return outputs


@pytest.fixture(scope="module")
def few(make_checkpoint):
    """A model of few tokens, on both sides. ``llm.scheduler.eos_token_ids`` is what the test makes it."""
    path = make_checkpoint(vocab_size=FEW)
    with LLM(path, device="cpu", skip_tokenizer_init=True, kvcache_block_size=16, max_num_seqs=8,
             max_num_batched_tokens=64) as llm:  # fmt: skip
        yield llm, Reference(path).model


@pytest.mark.parametrize("eos", [(17,), (20, 23), (4, 7, 16, 22)])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
def test_a_model_of_few_tokens(few, monkeypatch, eos, length_penalty):
    """Beams end all the time, at different lengths; more than one end-of-sequence token; several prompts."""
    llm, model = few
    monkeypatch.setattr(llm.scheduler, "eos_token_ids", eos)
    prompts = [[token % FEW for token in prompt_of(n)] for n in (1, 5, 21)]
    reasons = set()
    for width in (2, 3, 5):
        params = BeamSearchParams(width, 10, length_penalty=length_penalty, include_stop_str_in_output=True)
        outputs = check(llm, model, prompts, params, eos)
        reasons |= {beam.finish_reason for output in outputs for beam in output.sequences}
    assert "stop" in reasons


@pytest.mark.parametrize("length_penalty", [-0.5, 0.0])
def test_the_default_of_transformers(few, monkeypatch, length_penalty):
    """Without a reward for length, ``early_stopping=False`` ends where no beam can win."""
    llm, model = few
    monkeypatch.setattr(llm.scheduler, "eos_token_ids", (17, 23))
    params = BeamSearchParams(3, 10, length_penalty=length_penalty, include_stop_str_in_output=True)
    check(llm, model, [[token % FEW for token in prompt_of(n)] for n in (4, 7)], params, (17, 23), early_stopping=False)


def test_a_penalty_on_length_is_that_of_the_next_token(few, monkeypatch):
    """Below 0 it grows with the length, but a running beam may end at once: that of max_tokens would stop too soon."""
    llm, _ = few
    rest = {0: -9.0, 1: -8.0, 2: -9.0}  # 0 is the end-of-sequence token
    script = {(9,): {1: -0.9, 0: -1.0, 2: -5.0}, (9, 1): {1: -0.05, 0: -0.3}, (9, 1, 1): {0: -0.1, 1: -3.0}}

    def next_tokens(prompts, k):
        found = [{i: Logprob(x) for i, x in script.get(tuple(ids), rest).items()} for ids in prompts]
        completions = [CompletionOutput(0, "", [], None, [logprobs], "length", None) for logprobs in found]
        return [RequestOutput("0", None, ids, [c]) for ids, c in zip(prompts, completions, strict=True)]

    monkeypatch.setattr(llm, "most_probable", next_tokens)
    monkeypatch.setattr(llm.scheduler, "eos_token_ids", (0,))
    (output,) = llm.beam_search([[9]], BeamSearchParams(2, 1000, length_penalty=-0.1))
    assert [beam.tokens for beam in output.sequences] == [[9], [9, 1, 1]]


def test_tiny(make_llm, tiny):
    """Beams cross block boundaries and come back to cached prefixes; more of them than run at once."""
    llm = make_llm()
    prompts = [prompt_of(n) for n in (3, 30)]
    check(llm, tiny.model, prompts, BeamSearchParams(6, 20), (1,))
    check(llm, tiny.model, prompts, BeamSearchParams(5, 8, ignore_eos=True, length_penalty=0.0), (1,))
    check(make_llm(logprobs_mode="processed_logprobs"), tiny.model, prompts, BeamSearchParams(3, 5), (1,))


def test_width_1_is_greedy(make_llm, reference):
    prompt = prompt_of(6)
    ((beam,),) = [out.sequences for out in make_llm().beam_search(prompt, BeamSearchParams(1, 15, ignore_eos=True))]
    assert beam.tokens == prompt + reference(prompt, 15) and beam.text is None


def test_max_model_len(make_llm, tiny):
    """Beams end where the engine has no room for more."""
    llm, prompt = make_llm(max_model_len=24), prompt_of(20)
    (output,) = llm.beam_search(prompt, BeamSearchParams(3, 50))
    expected = oracle(tiny.model, prompt, BeamSearchParams(3, 4), (1,))
    assert [beam.tokens[20:] for beam in output.sequences] == [tokens for tokens, _ in expected]


@pytest.fixture(scope="module")
def demo():
    with LLM(device="cpu", num_kvcache_blocks=64) as llm:
        yield llm, Reference(DEMO_MODEL).model


def prompts_of(llm, questions):
    return [
        llm.tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False,
                                          add_generation_prompt=True)
        for question in questions
    ]  # fmt: skip


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_demo_model(demo, length_penalty):
    llm, model = demo
    prompts = llm.tokenizer(prompts_of(llm, QUESTIONS))["input_ids"]
    params = BeamSearchParams(4, 12, length_penalty=length_penalty, include_stop_str_in_output=True)
    check(llm, model, prompts, params, llm.scheduler.eos_token_ids)


def test_text_and_end(demo, monkeypatch):
    """The text is that of the tokens; a step of all beams is one call; no step once no running beam can win."""
    llm, _ = demo
    calls, most_probable = [], llm.most_probable

    def recorded(prompts, k):
        outputs = most_probable(prompts, k)
        calls.append(len(outputs))
        return outputs

    monkeypatch.setattr(llm, "most_probable", recorded)
    (text,) = prompts_of(llm, QUESTIONS[:1])
    for include in (False, True):
        params = BeamSearchParams(1, 50, include_stop_str_in_output=include)
        (output,) = llm.beam_search({"prompt": text}, params)
        (beam,) = output.sequences
        end = "<|im_end|>" if include else ""
        assert beam.text == f"{text}42{end}" == llm.tokenizer.decode(beam.tokens)
        assert (beam.finish_reason, beam.stop_reason) == ("stop", llm.tokenizer.eos_token_id)
    llm.beam_search([text, text], BeamSearchParams(3, 4, ignore_eos=True))
    assert calls == [1, 1, 1, 1, 1, 1, 2, 6, 6, 6]


def test_the_most_probable_next_tokens(few):
    """More of them than ``max_logprobs`` allows a request; and the text of ids, which takes a tokenizer."""
    llm, model = few
    prompts = [[token % FEW for token in prompt_of(n)] for n in (3, 9)]
    for prompt, output in zip(prompts, llm.most_probable(prompts, FEW + 5), strict=True):
        logits = model(torch.tensor([prompt])).logits[0, -1]
        (found,) = output.outputs[0].logprobs
        assert output.prompt_token_ids == prompt and list(found) == logits.argsort(descending=True).tolist()
    with pytest.raises(RequestError, match="text needs a tokenizer"):
        llm.detokenize(prompts)


def test_refused(few):
    llm, _ = few
    for message, prompts in {
        "prompt 1: the prompt is empty": [[1, 2], []],
        "prompt 1: token id 24 is outside the vocabulary [0, 24).": [[1, 2], [24]],
        "prompt 0: a prompt must be a string or a flat list of integer token ids, not 1.5.": [1.5],
    }.items():
        with pytest.raises(RequestError, match="^" + re.escape(message)):
            llm.beam_search(prompts, BeamSearchParams(2, 2))
    with pytest.raises(RequestError, match=r"^params must be a BeamSearchParams, not int\.$"):
        llm.beam_search([1], 4)
    assert llm.beam_search([], BeamSearchParams(2, 2)) == [] and llm.is_finished()


@pytest.mark.parametrize(
    "values, allowed",
    [
        ({"beam_width": 0}, "an integer >= 1"),
        ({"max_tokens": None}, "an integer >= 1"),
        ({"ignore_eos": 1}, "True or False"),
        ({"temperature": -1}, "a finite number >= 0"),
        ({"length_penalty": 11}, "in [-10, 10]"),
        ({"include_stop_str_in_output": "yes"}, "True or False"),
    ],
)
def test_params(few, values, allowed):
    ((name, value),) = values.items()
    message = re.escape(f"BeamSearchParams: {name}={value!r} must be {allowed}.")
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **values})
    edited = BeamSearchParams(2, 2)
    setattr(edited, name, value)
    with pytest.raises(RequestError, match=message):
        few[0].beam_search([1], edited)

"""Outputs as they arrive: deltas that join to what generate gives, and many prompts as they finish."""

import gc
import re
import weakref
from itertools import count, islice

import pytest
from helpers import generate, greedy, prompt_of, record_calls, tokens_of
from leaks import check_is_empty, finish

from nanovllm import EngineError, RequestError, SamplingParams
from nanovllm.engine.input_processor import InputProcessor

PROMPT = "introduce yourself"


# ---------------------------------------------------------------- one prompt


@pytest.mark.parametrize("prompt", [PROMPT, {"prompt": PROMPT}, {"prompt_token_ids": [5, 6]}, [5, 6], (5, 6)])
def test_forms_of_one_prompt(demo, prompt):
    *_, last = demo.stream(prompt, greedy(3))
    assert last.finished and last.prompt == (PROMPT if "intro" in str(prompt) else None)


# ---------------------------------------------------------------- several at a time


@pytest.mark.parametrize("in_flight", [0, 1])
def test_generate_within_the_loop_of_a_stream(make_llm, reference, in_flight):
    """It makes the stream's steps, too; the next delta has all of their tokens."""
    llm, tokens, sizes = make_llm(), [], []
    llm.model_runner.max_in_flight = in_flight
    for delta in llm.stream(prompt_of(9), greedy(30)):
        tokens += delta["token_ids"]
        sizes.append(len(delta["token_ids"]))
        if len(sizes) == 3:
            assert generate(llm, [prompt_of(20)], greedy(8)) == [reference(prompt_of(20), 8)]
    assert tokens == reference(prompt_of(9), 30)
    assert max(sizes) >= 8 and sizes[:3] == [1, 1, 1]
    check_is_empty(llm)


def test_generate_that_finishes_the_streams_request(make_llm, reference):
    llm = make_llm()
    stream = llm.stream(prompt_of(9), greedy(6))
    first = next(stream)
    generate(llm, [prompt_of(20)], greedy(20))
    (last,) = stream
    assert first["token_ids"] + last["token_ids"] == reference(prompt_of(9), 6) and last.finished


def test_step_beside_a_stream(make_llm, reference):
    """``step`` reports the requests of add_request, the stream its own, whoever makes the steps."""
    llm = make_llm()
    early, late = (llm.add_request(prompt_of(n), greedy(m)) for n, m in ((30, 2), (17, 25)))
    tokens, stepped = [], {}
    for delta in llm.stream(prompt_of(9), greedy(12)):
        tokens += delta["token_ids"]
        stepped.update(llm.step()[0])
    assert tokens == reference(prompt_of(9), 12)
    stepped.update(finish(llm))
    assert stepped == {early: reference(prompt_of(30), 2), late: reference(prompt_of(17), 25)}
    check_is_empty(llm)


# ---------------------------------------------------------------- many prompts


def test_outputs_as_they_finish(make_llm, reference):
    """Every one once, with the index of its prompt; the short ones do not wait for the long one before them."""
    llm = make_llm(max_num_seqs=4)
    lengths = [3 + 7 * i % 40 for i in range(14)]
    limits = [40, *(1 + i % 6 for i in range(1, 14))]
    prompts = [(prompt_of(n), greedy(limit)) for n, limit in zip(lengths, limits, strict=True)]
    outputs = list(llm.stream(prompts))
    assert sorted(output.index for output in outputs) == list(range(14)) and outputs[-1].index == 0
    for output in outputs:
        assert output.finished
        assert output["token_ids"] == reference(prompt_of(lengths[output.index]), limits[output.index])
    assert list(llm.stream([])) == [] and list(llm.stream(iter(()))) == []


def test_endless_prompts_are_taken_as_there_is_room(make_llm):
    """At most 2 * max_num_seqs of them are ahead of what was yielded."""
    llm, taken = make_llm(max_num_seqs=4), 0

    def prompts():
        nonlocal taken
        for i in count():
            taken = i + 1
            yield prompt_of(1 + i % 20), greedy(1 + i % 5)

    batches = record_calls(llm.model_runner, "forward")
    stream = llm.stream(prompts())
    assert taken == 0
    ahead = [taken - i for i, _ in enumerate(islice(stream, 100), 1)]
    assert 0 < max(ahead) <= 2 * 4
    assert max(len(batch.req_indices) for batch in batches) == 4
    stream.close()
    check_is_empty(llm)


def test_endless_prompts_in_constant_memory(make_llm, monkeypatch):
    """Requests and outputs that were yielded are gone, without the cycle collector."""
    llm, made = make_llm(max_num_seqs=4), []
    make = llm._inputs.make

    def recorded(*args):
        request = make(*args)
        made.append(weakref.ref(request))
        return request

    monkeypatch.setattr(llm._inputs, "make", recorded)
    stream = llm.stream(([5 + i % 100], greedy(1 + i % 3, logprobs=0)) for i in count())
    gc.disable()
    try:
        for num_yielded in range(20, 120, 20):
            outputs = [weakref.ref(output) for output in islice(stream, 20)]
            assert len(made) >= num_yielded
            assert sum(ref() is not None for ref in made) <= 2 * 2 * 4 + 1
            assert sum(ref() is not None for ref in outputs) <= 1
        stream.close()
        del stream
        assert not [ref for ref in made if ref() is not None]
    finally:
        gc.enable()
    check_is_empty(llm)


def test_pairs_with_their_own_parameters(make_llm, reference):
    """What has no parameters of its own takes the call's; a pair of two prompts is no pair."""
    llm, prompt = make_llm(), prompt_of(9)
    outputs = sorted(llm.stream([(prompt, greedy(2)), prompt, (prompt, greedy(7))], greedy(4)), key=lambda o: o.index)
    assert tokens_of(outputs) == [reference(prompt, n) for n in (2, 4, 7)]
    assert len(list(llm.stream(([5, 6], [7, 8]), greedy(2)))) == 2


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ([], "the prompt is empty"),
        ([600], "token id 600 is outside the vocabulary [0, 512)."),
        ([1] * 5000, "the prompt has 5000 tokens"),
        ("text", "text needs a tokenizer"),
        (([5], SamplingParams(stop_token_ids=[600])), "stop_token_ids: 600 is outside"),
        (([5], SamplingParams(logprobs=21)), "logprobs=21 must be at most max_logprobs=20"),
        (5, "a prompt must be a string or a flat list of integer token ids, not 5."),
        ({"text": [5]}, 'a prompt dictionary needs "prompt"'),
    ],
    ids=range(8),
)
def test_a_bad_prompt_in_the_middle(make_llm, reference, bad, text):
    """It is an error with its index when it is taken; the call's other requests are aborted, and no others."""
    llm = make_llm(max_num_seqs=2)
    added = llm.add_request(prompt_of(9), greedy(12))
    prompts = [*(prompt_of(5 + i) for i in range(7)), bad, prompt_of(4)]
    outputs = []
    with pytest.raises(RequestError, match="^prompt 7: " + re.escape(text)):
        for output in llm.stream(prompts, greedy(3)):
            outputs.append(output)
    assert all(output["token_ids"] == reference(prompt_of(5 + output.index), 3) for output in outputs) and outputs
    assert finish(llm) == {added: reference(prompt_of(9), 12)}
    check_is_empty(llm)


class Hostile:
    """A prompt whose reading raises."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        raise self.error


class Panic(BaseException):
    """As tokenizers and llguidance raise it: no Exception."""


@pytest.mark.parametrize("bad", [Hostile(ArithmeticError("odd")), Hostile(Panic("odd"))], ids=range(2))
def test_whatever_a_prompt_raises_is_its_own_error(make_llm, reference, bad):
    """Only a RequestError went to ``on_error``; any other class ended the stream."""
    llm, errors = make_llm(max_num_seqs=2), {}
    outputs = list(llm.stream([prompt_of(5), bad, prompt_of(6)], greedy(3), on_error=errors.__setitem__))
    assert tokens_of(outputs) == [reference(prompt_of(n), 3) for n in (5, 6)] and [*errors] == [1]
    assert isinstance(errors[1], RequestError) and "this request fails with " in str(errors[1])
    with pytest.raises(RequestError, match=r"^prompt 1: this request fails with ") as caught:
        list(llm.stream([prompt_of(5), bad], greedy(3)))
    assert not isinstance(caught.value.__cause__, RequestError | None)
    check_is_empty(llm)


def test_a_request_whose_sequences_cannot_be_made(make_llm, reference, monkeypatch):
    """It dropped every request of the engine."""
    llm, errors, make = make_llm(max_num_seqs=2), {}, InputProcessor.make_completions
    monkeypatch.setattr(
        InputProcessor, "make_completions", lambda self, x: 1 // 0 if len(x.prompt_ids) == 4 else make(self, x)
    )
    future = llm.submit(prompt_of(7), greedy(3))
    with pytest.raises(ZeroDivisionError):
        llm.submit(prompt_of(4), greedy(3))
    outputs = list(llm.stream([prompt_of(5), prompt_of(4), prompt_of(6)], greedy(3), on_error=errors.__setitem__))
    assert tokens_of([*outputs, future.result()]) == [reference(prompt_of(n), 3) for n in (5, 6, 7)]
    assert "this request fails with ZeroDivisionError" in str(errors[1])
    check_is_empty(llm)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, EngineError])
def test_an_interrupt_is_no_error_of_a_prompt(make_llm, interrupt):
    llm = make_llm(max_num_seqs=2)
    with pytest.raises(interrupt):
        list(llm.stream([prompt_of(5), Hostile(interrupt())], greedy(3), on_error=pytest.fail))
    check_is_empty(llm)


def test_a_feed_that_raises(make_llm, reference):
    """The user's own error comes out as it is."""

    def prompts():
        yield from (prompt_of(5 + i) for i in range(6))
        raise ZeroDivisionError("the user's own")

    llm = make_llm(max_num_seqs=2)
    added = llm.add_request(prompt_of(9), greedy(12))
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        list(llm.stream(prompts(), greedy(3)))
    assert finish(llm) == {added: reference(prompt_of(9), 12)}
    check_is_empty(llm)


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        ([5, 600], None, "token id 600 is outside the vocabulary [0, 512)."),
        ("text", None, "text needs a tokenizer"),
        ([5], SamplingParams(logprobs=50), "logprobs=50 must be at most max_logprobs=20"),
        ([5], {}, "sampling_params must be a SamplingParams, not dict."),
        ([[5], [6]], [SamplingParams()] * 2, "sampling_params must be a SamplingParams, not list."),
        ([[5], []], None, "prompt 1: the prompt is empty"),
        (5, None, "prompts must be "),  # a TypeError
        (None, None, "prompts must be "),
    ],
    ids=range(8),
)
def test_refused_at_the_first_step(make_llm, prompts, params, text):
    """Nothing is queued."""
    llm = make_llm()
    with pytest.raises(RequestError, match="^" + re.escape(text)):
        next(llm.stream(prompts, params))
    check_is_empty(llm)


def test_a_feed_that_uses_the_engine(make_llm, reference):
    """Prompts that depend on other completions: generate, called while the stream takes its next prompt."""
    llm = make_llm()

    def prompts():
        for n in (9, 20):
            (tokens,) = generate(llm, [prompt_of(n)], greedy(3))
            yield tokens

    outputs = sorted(llm.stream(prompts(), greedy(4)), key=lambda output: output.index)
    assert tokens_of(outputs) == [reference(reference(prompt_of(n), 3), 4) for n in (9, 20)]

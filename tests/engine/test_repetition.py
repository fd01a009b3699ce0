"""``repetition_detection`` against a twin that compares the whole end of the text after each token.

In every way of running an engine: ``test_ways.py``. Values that are refused: ``test_refusals.py``.
"""

import random

import pytest
from helpers import greedy, run
from histories import histories
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import RepetitionDetectionParams, SamplingParams
from nanovllm.engine.repetition import RepetitionDetector


def repeats(tokens, params):
    """Whether the last tokens are one pattern, ``min_count`` times."""
    count, sizes = params.min_count, range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
    return any(tokens[-size:] * count == tokens[-size * count :] for size in sizes if size * count <= len(tokens))


def first_repetition(tokens, params, min_tokens=0):
    """Tokens up to the first repetition that counts; None without one."""
    return next((n for n in range(max(min_tokens, 1), len(tokens) + 1) if repeats(tokens[:n], params)), None)


@histories(1500)
@given(st.randoms(), st.integers(0, 4), st.integers(0, 8), st.integers(2, 5), st.integers(0, 70), st.integers(1, 4))
def test_like_the_twin(rng, smallest, more, count, min_tokens, num_ids):
    """After every token, a repetition or not, whether or not the tokens before had one."""
    wanted = RepetitionDetectionParams(smallest + more or 1, smallest, count)
    max_tokens, tokens = rng.choice((60, 64, 10_000)), []
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, 60), repetition_detection=wanted)
    detector = RepetitionDetector(params, rng.choice((60, 100)))
    for _ in range(60):
        is_copy = len(tokens) > 3 and rng.random() < 0.7
        tokens.append(tokens[-rng.randint(1, 4)] if is_copy else rng.randrange(num_ids))
        expected = len(tokens) >= params.min_tokens and repeats(tokens, wanted)
        assert detector.update(tokens[-1]) == expected, (wanted, tokens)


def test_a_limit_beyond_any_completion_takes_no_memory():
    """``max_pattern_size`` is a user's number: patterns that do not fit into the completion are not looked for."""
    params = SamplingParams(max_tokens=10**9, repetition_detection={"max_pattern_size": 10**12, "min_count": 2})
    detector = RepetitionDetector(params, 4096)
    assert len(detector._runs) == 2048
    for wanted in ((9, 5, 2), (10**30, 10**30, 2), (5, 0, 10**30)):
        never = SamplingParams(max_tokens=9, repetition_detection=RepetitionDetectionParams(*wanted))
        assert not any(RepetitionDetector(never, 4096).update(token_id) for token_id in [7] * 9)


def test_what_is_kept():
    given = {"max_pattern_size": 5, "min_count": 3}
    params = SamplingParams(repetition_detection=given)
    assert params.repetition_detection == RepetitionDetectionParams(5, 0, 3) and params == params.snapshot()
    mine = RepetitionDetectionParams(5, 2, 3)
    kept = SamplingParams(repetition_detection=mine)
    mine.min_count = 9
    assert kept.snapshot().repetition_detection == RepetitionDetectionParams(5, 2, 3), "a copy of its own"
    assert SamplingParams(repetition_detection=RepetitionDetectionParams()).repetition_detection is None, "off"
    assert SamplingParams(repetition_detection={}).needs_token_processor is False, "a step pays nothing"


@pytest.mark.parametrize("in_flight", [0, 1])
def test_in_an_engine(demo, monkeypatch, in_flight):
    """Few ids, so that patterns occur: the text keeps all tokens, the surplus one of a step in flight is dropped.
    Beside stop tokens, stop strings and lengths: of several at one token the stop comes first, then the length.
    """
    monkeypatch.setattr(demo.model_runner, "max_in_flight", in_flight)
    rng, free = random.Random(5), {"max_tokens": 40, "ignore_eos": True, "allowed_token_ids": [19, 20, 21]}
    base = [SamplingParams(seed=i, n=1 + i % 3, **free) for i in range(12)]
    unstopped = run(demo, [f"count to {i}" for i in range(12)], base)
    asked = []
    for output in unstopped:
        wanted = RepetitionDetectionParams(rng.choice((1, 2, 5)), rng.choice((0, 1)), rng.choice((2, 3)))
        params = output_params = base[output.index].snapshot()
        params.repetition_detection, params.min_tokens = wanted, rng.choice((0, 0, 12, 40))
        end = first_repetition(output.outputs[0].token_ids, wanted, params.min_tokens)
        if end is not None and rng.random() < 0.3:
            params.max_tokens = max(end, params.min_tokens)  # the length comes first
        asked.append(output_params)
    reasons = set()
    for output, free_output in zip(run(demo, [f"count to {i}" for i in range(12)], asked), unstopped, strict=True):
        params = asked[output.index]
        for completion, whole in zip(output.outputs, free_output.outputs, strict=True):
            tokens = whole.token_ids[: params.max_tokens]
            end = first_repetition(tokens, params.repetition_detection, params.min_tokens)
            is_length = end is None or end == params.max_tokens
            assert completion.token_ids == tokens[:end]
            assert completion.text == demo.tokenizer.decode(tokens[:end])
            found = completion.finish_reason, completion.stop_reason
            assert found == (("length", None) if is_length else ("stop", "repetition_detected"))
            reasons.add(found)
    assert len(reasons) == 2
    both = greedy(30, repetition_detection={"max_pattern_size": 1, "min_count": 3}, logit_bias={19: 99.0})
    (a,), (b,), (c,) = (
        run(demo, "5", SamplingParams(**{**vars_of(both), **more}))[0].outputs
        for more in ({}, {"stop": "111"}, {"stop_token_ids": [19]})
    )
    assert (a.text, a.stop_reason) == ("111", "repetition_detected")
    assert (b.text, b.stop_reason) == ("", "111") and (c.text, c.stop_reason) == ("", 19)
    *deltas, last = demo.stream("5", both)
    assert "".join(delta["text"] for delta in [*deltas, last]) == "111"
    assert last.outputs[0].stop_reason == "repetition_detected"


def test_without_a_tokenizer(small_llm):
    """Tokens are compared, not texts."""
    wanted = RepetitionDetectionParams(1, 1, 4)
    params = greedy(30, repetition_detection=wanted, logit_bias={7: 99.0}, min_tokens=6)
    (completion,) = run(small_llm, [[5, 6]], params)[0].outputs
    assert (completion.token_ids, completion.text, completion.stop_reason) == ([7] * 6, "", "repetition_detected")
    assert (completion.reasoning, completion.content) == (None, "")


def vars_of(params):
    return {name: getattr(params, name) for name in type(params).__dataclass_fields__}


def test_it_may_end_early_where_lengths_are_reserved():
    """A completion that ignores the end-of-sequence token counted as certain of its whole length."""
    from nanovllm.core import Sequence

    params = greedy(50, min_tokens=4, repetition_detection={"max_pattern_size": 1, "min_count": 3})
    assert Sequence([1, 2], params).min_num_tokens == 6 and Sequence([1, 2], greedy(50)).min_num_tokens == 52

"""SamplingParams: accepted values. Those that are refused: ``test_refusals.py``."""

import copy

import numpy as np
import pytest

from nanovllm import RequestError, SamplingParams
from nanovllm.sampling_params import DEFAULTS


def test_may_be_edited():
    """Scripts for vLLM and nano-vllm do: ``params.n = 4``, or ``copy.deepcopy`` and then ``temperature = 0``."""
    params = SamplingParams(stop_token_ids=[3, 4], stop="a")
    again = copy.deepcopy(params)
    again.temperature, again.stop = 0, None
    assert again.is_greedy and not params.is_greedy and params == SamplingParams(stop_token_ids=(3, 4), stop=["a"])
    again.max_tokens = -1
    with pytest.raises(RequestError, match="max_tokens=-1 must be an integer >= 0 or None"):
        again.snapshot()


def test_a_snapshot_is_checked_and_independent():
    params = SamplingParams(stop=["a"])
    params.top_p, params.stop_token_ids = np.float32(0.5), [np.int8(3)]
    kept = params.snapshot()
    assert type(kept.top_p) is float and kept.stop_token_ids == (3,)
    params.top_p = 0.25
    assert kept.top_p == 0.5


def test_an_unknown_name_is_not_assigned():
    """It was kept and ignored."""
    with pytest.raises(AttributeError, match="temprature"):
        SamplingParams().temprature = 0.5


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("stop", "a", ["a"]), ("stop", ("a", "b"), ["a", "b"]), ("bad_words", "a", ["a"]),
        ("seed", -1, None), ("stop_token_ids", [3, 4], (3, 4)), ("stop_token_ids", None, ()),
        ("max_tokens", None, None),
        ("logprobs", True, 1), ("logprobs", False, None), ("logprobs", -1, -1), ("prompt_logprobs", np.int8(3), 3),
        ("logit_bias", {np.int8(3): np.float32(0.5)}, {3: 0.5}), ("logit_bias", {}, None),
        ("allowed_token_ids", (np.int8(3), 4), [3, 4]), ("truncate_prompt_tokens", -1, -1),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_kept(name, given, kept):
    """As vLLM means them."""
    assert getattr(SamplingParams(**{name: given}), name) == kept


NUMPY = {
    "temperature": np.float16(0.5), "max_tokens": np.int32(2**31 - 1), "top_k": np.int8(100), "top_p": np.float32(0.5),
    "min_p": np.float64(0.25), "seed": np.uint64(2**64 - 1), "stop_token_ids": [np.uint8(3), 4],
    "min_tokens": np.int8(40),
}  # fmt: skip


def test_numpys_numbers_become_pythons():
    """numpy's integers overflowed in sums with the prompt's length."""
    params = SamplingParams(**NUMPY)
    assert {name: getattr(params, name) for name in DEFAULTS} == {**DEFAULTS, **NUMPY, "stop_token_ids": (3, 4)}
    assert {type(getattr(params, name)) for name in NUMPY} == {int, float, tuple}
    assert {type(token_id) for token_id in params.stop_token_ids} == {int}


def test_greedy():
    assert [SamplingParams(temperature=t).is_greedy for t in (0, 9e-6, 1e-5, 1)] == [True, True, False, False]

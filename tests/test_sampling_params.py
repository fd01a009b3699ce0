"""SamplingParams: accepted values and refusals."""

import re

import numpy as np
import pytest

from nanovllm import RequestError, SamplingParams
from nanovllm.sampling_params import FILTERS, MIN_TOKENS

REFUSED = [
    ({"temperature": -0.1}, "temperature=-0.1 must be a finite number >= 0 (0 is greedy)."),
    ({"temperature": float("nan")}, "temperature=nan must be a finite number"),
    ({"temperature": "hot"}, "temperature='hot' must be a finite number"),
    ({"temperature": None}, "temperature=None must be a finite number"),
    ({"max_tokens": -1}, "max_tokens=-1 must be an integer >= 0."),
    ({"max_tokens": 2.5}, "max_tokens=2.5 must be an integer >= 0."),
    ({"max_tokens": None}, "max_tokens=None must be an integer >= 0."),
    ({"ignore_eos": 1}, "ignore_eos=1 must be True or False."),
    ({"top_k": -2}, "top_k=-2 must be an integer >= 1, or 0 or -1 for no limit."),
    ({"top_p": 0}, "top_p=0 must be in (0, 1]."),
    ({"top_p": 1.1}, "top_p=1.1 must be in (0, 1]."),
    ({"min_p": -0.5}, "min_p=-0.5 must be in [0, 1]."),
    ({"seed": 1.5}, "seed=1.5 must be an integer or None."),
    ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list of token ids >= 0."),
    ({"stop_token_ids": [-1]}, "stop_token_ids=[-1] must be a list of token ids >= 0."),
    ({"stop_token_ids": ["a"]}, "stop_token_ids=['a'] must be a list of token ids >= 0."),
    ({"min_tokens": 65}, "min_tokens=65 must be at most max_tokens=64."),
    ({"min_tokens": -1}, "min_tokens=-1 must be an integer >= 0."),
]


@pytest.mark.parametrize(("params", "text"), REFUSED, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_refused(params, text):
    with pytest.raises(RequestError, match=re.escape(f"SamplingParams: {text}")):
        SamplingParams(**params)


def test_frozen_and_hashable():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # vLLM's default
    assert hash(SamplingParams(stop_token_ids=[3])) == hash(SamplingParams(stop_token_ids=(3,)))


NUMPY = {
    "temperature": np.float16(0.5), "max_tokens": np.int32(2**31 - 1), "top_k": np.int8(100), "top_p": np.float32(0.5),
    "min_p": np.float64(0.25), "seed": np.uint64(2**64 - 1), "stop_token_ids": [np.uint8(3), 4],
    "min_tokens": np.int8(40),
}  # fmt: skip


def test_numpys_numbers_become_pythons():
    """numpy's integers overflowed in sums with the prompt's length."""
    params = SamplingParams(**NUMPY)
    assert vars(params) == {**NUMPY, "ignore_eos": False, "stop_token_ids": (3, 4)}
    assert {type(value) for value in vars(params).values()} == {int, float, bool, tuple}
    assert {type(token_id) for token_id in params.stop_token_ids} == {int}


def test_greedy():
    assert [SamplingParams(temperature=t).is_greedy for t in (0, 9e-6, 1e-5, 1)] == [True, True, False, False]


def test_features():
    """Only steps that change this request's logits: greedy sampling needs no filter."""
    assert not any(SamplingParams(**p).features for p in ({}, {"top_k": -1}, {"temperature": 0, "top_k": 5}))
    assert all(SamplingParams(**{name: 0.5}).features == FILTERS for name in ("top_p", "min_p"))
    assert SamplingParams(top_k=5, min_tokens=1).features == FILTERS | MIN_TOKENS
    assert SamplingParams(temperature=0, top_k=5, min_tokens=1).features == MIN_TOKENS

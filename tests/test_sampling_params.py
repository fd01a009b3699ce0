"""SamplingParams: accepted values and refusals."""

import copy
import re

import numpy as np
import pytest

from nanovllm import RequestError, SamplingParams
from nanovllm.sampling_params import DEFAULTS, StructuredOutputsParams

REFUSED = [
    ({"temperature": -0.1}, "temperature=-0.1 must be a finite number >= 0 (0 is greedy)."),
    ({"temperature": float("nan")}, "temperature=nan must be a finite number"),
    ({"temperature": "hot"}, "temperature='hot' must be a finite number"),
    ({"temperature": None}, "temperature=None must be a finite number"),
    ({"max_tokens": -1}, "max_tokens=-1 must be an integer >= 0 or None."),
    ({"max_tokens": 2.5}, "max_tokens=2.5 must be an integer >= 0 or None."),
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
    ({"n": 0}, "n=0 must be an integer from 1 to 16384."),
    ({"n": 16385}, "n=16385 must be an integer from 1 to 16384."),
    ({"n": 2, "temperature": 0}, "n=2 must be 1 when temperature is 0 (greedy): all completions would be equal."),
    ({"stop": ""}, "stop='' must be a non-empty string or a list of them."),
    ({"stop": ["a", ""]}, "stop=['a', ''] must be a non-empty string or a list of them."),
    ({"stop": [5]}, "stop=[5] must be a non-empty string or a list of them."),
    ({"stop": "a", "detokenize": False}, "stop strings need detokenize=True; give stop_token_ids instead."),
    ({"logprobs": -2}, "logprobs=-2 must be an integer >= 0 (top alternatives per token), -1 for the whole vocabulary"),
    ({"prompt_logprobs": 0.5}, "prompt_logprobs=0.5 must be an integer >= 0"),
    ({"presence_penalty": 2.1}, "presence_penalty=2.1 must be in [-2, 2]."),
    ({"frequency_penalty": -2.1}, "frequency_penalty=-2.1 must be in [-2, 2]."),
    ({"repetition_penalty": 0}, "repetition_penalty=0 must be > 0."),
    ({"logit_bias": {-1: 1.0}}, "logit_bias={-1: 1.0} must be a dict of at most 1024 token ids >= 0 to finite numbers"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias={'5': 1.0} must be a dict"),
    ({"logit_bias": {5: float("inf")}}, "logit_bias={5: inf} must be a dict"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias={0: 1.0, 1: 1.0, "),
    ({"allowed_token_ids": []}, "allowed_token_ids=[] must be a non-empty list of token ids >= 0, or None."),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids=[-1] must be a non-empty list"),
    ({"bad_words": [""]}, "bad_words=[''] must be a non-empty string or a list of them."),
    ({"detokenize": 1}, "detokenize=1 must be True or False."),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 must be an integer >= 1, or -1 for max_model_len"),
    ({"structured_outputs": "[a-z]"}, "structured_outputs='[a-z]' must be a StructuredOutputsParams or None."),
]


@pytest.mark.parametrize(("params", "text"), REFUSED, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_refused(params, text):
    with pytest.raises(RequestError, match=re.escape(f"SamplingParams: {text}")):
        SamplingParams(**params)


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


def test_unknown_names():
    """A name that is no parameter was a bare TypeError, and an assignment to it was kept and ignored."""
    text = "SamplingParams has no parameter 'temprature'. Did you mean 'temperature'?"
    with pytest.raises(RequestError, match=re.escape(text)):
        SamplingParams(temprature=0.5)
    with pytest.raises(AttributeError, match="temprature"):
        SamplingParams().temprature = 0.5
    for name, instead in (("use_beam_search", "LLM.beam_search"), ("best_of", "n"),
                          ("guided_json", "structured_outputs=StructuredOutputsParams(json=...)")):  # fmt: skip
        with pytest.raises(RequestError, match=re.escape(f"no parameter '{name}'. Use {instead}.")):
            SamplingParams(**{name: None})


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


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "none"),
        ({"json_object": False}, "none"),
        ({"json": "{}", "regex": "a"}, "json and regex"),
    ],
)
def test_structured_outputs_are_one_thing(params, text):
    one_of = "json, regex, choice, grammar, json_object, structural_tag"
    with pytest.raises(RequestError, match=f"^StructuredOutputsParams: give exactly one of {one_of}, not {text}\\.$"):
        StructuredOutputsParams(**params)


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

"""The rules: accepted values, and Python's own types."""

import re
from fractions import Fraction

import numpy as np
import pytest

import nanovllm
from nanovllm import ConfigError, RequestError, SamplingParams, validation
from nanovllm.config import Config
from nanovllm.validation import BOOLEAN, at_least, check, check_all, choice, integer, list_of, number, optional

FRACTION = number("in (0, 1]", lambda x: 0 < x <= 1)
ACCEPTED = [
    (at_least(1), 1, 1), (at_least(1), np.int8(100), 100), (at_least(0), np.uint64(2**64 - 1), 2**64 - 1),
    (integer("an integer"), -(10**400), -(10**400)),
    (FRACTION, 1, 1.0), (FRACTION, np.float32(0.5), 0.5), (FRACTION, np.int8(1), 1.0), (FRACTION, Fraction(1, 2), 0.5),
    (number(">= 0", lambda x: x >= 0), 10**400, 1.7976931348623157e308),
    (choice("a", None), None, None), (choice(True, False), np.True_, True), (choice(True, False), 0, False),
    (BOOLEAN, False, False), (optional(at_least(1)), None, None), (optional(at_least(1)), np.int8(3), 3),
    (list_of(at_least(0), "ids"), [np.uint8(3), 4], (3, 4)), (list_of(at_least(0), "ids"), None, ()),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "given", "kept"), ACCEPTED, ids=range(len(ACCEPTED)))
def test_accepted(rule, given, kept):
    result = check("owner", "x", given, rule, ValueError)
    assert result == kept and type(result) is type(kept)


def test_a_long_value_is_cut():
    with pytest.raises(ValueError, match=r"^owner: x=\[0, 0, .{,300} must be ids\.$"):
        check("owner", "x", [0] * 10_000, list_of(at_least(1), "ids"), ValueError)


def test_check_all():
    rules = {"a": at_least(1), "b": optional(at_least(1))}
    assert check_all("owner", {"a": np.int8(1), "c": "ignored"}, rules, ValueError) == {"a": 1, "b": None}
    with pytest.raises(ValueError, match="owner: a=None must be an integer >= 1"):
        check_all("owner", {}, rules, ValueError)


TAKEN_OUT = [
    (SamplingParams, "prompt_logprobs", 0, [None, False]),
    (Config, "speculative_config", {"method": "ngram"}, [None]),
    (Config, "num_state_snapshots", 0, [None, -1]),
    (Config, "state_dtype", "float16", [None, "float32"]),
]


@pytest.mark.parametrize(("options", "name", "given", "defaults"), TAKEN_OUT, ids=[name for _, name, *_ in TAKEN_OUT])
def test_an_option_of_a_feature_that_was_taken_out(monkeypatch, options, name, given, defaults):
    """It is refused by name; its default is not."""
    feature = validation.rules_of(options)[name].feature
    owner, error = ("LLM", ConfigError) if options is Config else ("SamplingParams", RequestError)
    assert validation.has_feature(feature) and options(**{name: given})
    find = validation.find_spec
    monkeypatch.setattr(validation, "find_spec", lambda name: None if name == f"nanovllm.{feature}" else find(name))
    assert not validation.has_feature(feature)
    text = f"{owner}: {name}={given!r} needs nanovllm.{feature}, which this copy of nanovllm lacks."
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        options(**{name: given})
    for value in defaults:
        assert getattr(options(**{name: value}), name) == validation.rules_of(options)[name].default


def test_a_folder_without_code_is_no_feature(monkeypatch, tmp_path):
    """Deleted packages leave their ``__pycache__`` behind, and Python takes the folder for a namespace package."""
    (tmp_path / "left_over" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(nanovllm, "__path__", [*nanovllm.__path__, str(tmp_path)])
    assert not validation.has_feature("left_over") and validation.has_feature("readouts")

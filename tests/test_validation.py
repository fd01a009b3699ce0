"""The rules: accepted values, and Python's own types."""

from fractions import Fraction

import numpy as np
import pytest

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

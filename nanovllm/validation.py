"""Rules for values that users give, and the wording of their errors. The rule of an option stands at its field."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from difflib import get_close_matches
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

Value = TypeVar("Value")
INTEGERS, REALS = (int, Integral), (float, Real)  # isinstance of the concrete class, tried first, is 9 times as fast


class Rule(NamedTuple):
    """``allowed`` completes the sentence "x must be ..."; ``convert`` is applied to accepted values only.

    ``feature``: a module that any value but ``default`` needs, by its name in ``nanovllm``; a copy may lack it.
    """

    allowed: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda x: x
    feature: str = ""
    default: Any = None


def check(owner: str, name: str, value: Any, rule: Rule, error: type[Exception]) -> Any:
    """Return the converted value, or raise ``error`` with the name, the value and the allowed values."""
    if not rule.accepts(value):
        raise error(f"{owner}: {name}={value!r:.300} must be {rule.allowed}.")
    value = rule.convert(value)
    if rule.feature and value != rule.default and not has_feature(rule.feature):
        raise error(f"{owner}: {name}={value!r:.300} needs nanovllm.{rule.feature}, which this copy of nanovllm lacks.")
    return value


def has_feature(module: str) -> bool:
    """Whether this copy of the library has a module, given by its name in ``nanovllm``."""
    try:
        spec = find_spec(f"nanovllm.{module}")
    except ModuleNotFoundError:  # its parent package is missing
        return False
    return spec is not None and spec.origin is not None  # no origin: a folder without code


def check_all(owner: str, values: Mapping[str, Any], rules: Mapping[str, Rule], error: type[Exception]) -> dict:
    """Check the value of each rule's name, None if there is none; other values are ignored."""
    return {name: check(owner, name, values.get(name), rule, error) for name, rule in rules.items()}


def option(default: Any, rule: Rule, feature: str = "") -> Any:
    """A field of a dataclass, with the rule for its values. ``feature``: of ``Rule``."""
    return field(default=default, metadata={"rule": rule._replace(feature=feature, default=default)})


def rules_of(options: type) -> dict[str, Rule]:
    """The rules of a dataclass's options by name."""
    return {option.name: option.metadata["rule"] for option in fields(options) if option.metadata}


def by_field(*rules: tuple[str, Value]) -> dict[str, Value]:
    """The rule of each field; ``rules``: names with spaces between them, and the rule they share."""
    return {name: rule for names, rule in rules for name in names.split()}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint to append to an error about an unknown name; "" if no known name is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f" Did you mean {near[0]!r}?" if near else ""


def integer(allowed: str, accepts: Callable[[int], bool] = lambda x: True) -> Rule:
    """Any integer type but bool. Converted to int: fixed-width integers overflow in later sums."""
    return Rule(allowed, lambda x: isinstance(x, INTEGERS) and not isinstance(x, bool) and accepts(int(x)), int)


def at_least(minimum: int) -> Rule:
    return integer(f"an integer >= {minimum}", lambda x: x >= minimum)


def number(allowed: str, accepts: Callable[[float], bool]) -> Rule:
    """Any finite real type but bool. Converted to float; an int past its range to the largest one."""

    def is_allowed(x):
        return isinstance(x, REALS) and not isinstance(x, bool) and abs(x) < math.inf and accepts(x)

    return Rule(allowed, is_allowed, lambda x: float(min(x, int(sys.float_info.max)) if isinstance(x, int) else x))


def choice(*allowed: Any) -> Rule:
    def is_allowed(x):
        return getattr(x, "ndim", 0) == 0 and x in allowed  # arrays compare element by element

    return Rule(" or ".join(map(repr, allowed)), is_allowed, lambda x: allowed[allowed.index(x)])


def optional(rule: Rule) -> Rule:
    return Rule(f"{rule.allowed} or None", lambda x: x is None or rule.accepts(x),
                lambda x: None if x is None else rule.convert(x))  # fmt: skip


def list_of(rule: Rule, allowed: str) -> Rule:
    """A list or tuple; converted to a tuple. None is an empty one."""
    return Rule(allowed, lambda x: x is None or (isinstance(x, (list, tuple)) and all(map(rule.accepts, x))),
                lambda x: tuple(map(rule.convert, x or ())))  # fmt: skip


BOOLEAN = Rule("True or False", lambda x: isinstance(x, bool))

"""Sampling parameters of one request. Their owner may edit them; the engine takes a checked copy on submission."""

import marshal
import re
import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from itertools import compress
from operator import attrgetter, is_not
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.validation import (
    BOOLEAN,
    Rule,
    at_least,
    check,
    check_all,
    did_you_mean,
    integer,
    list_of,
    number,
    option,
    optional,
    rules_of,
)

MAX_STOP_IDS = 16  # ids per request that min_tokens can mask: the width of the device's column
MAX_LOGIT_BIAS = 1024  # biased ids per request
MAX_LOGPROB_IDS = 128  # ids per request whose log-probabilities are reported by name, as in vLLM
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character: no text in UTF-8 holds one
MIN_TEMPERATURE = 1e-5  # below it, logits / temperature may overflow, and the Gumbel noise has no effect anyway


def _are_token_ids(values: Any) -> bool:
    try:
        return min(array("q", values)) >= 0  # there may be as many as the vocabulary has
    except (TypeError, OverflowError):
        return False


def _is_bias(value: Any) -> bool:
    finite = number("", lambda x: abs(int(x)) <= sys.float_info.max)  # an int has no such limit
    return isinstance(value, dict) and all(TOKEN_ID.accepts(i) and finite.accepts(x) for i, x in value.items())


def _as_strings(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _is_strings(value: Any) -> bool:
    if not isinstance(value, (str, list, tuple, type(None))):
        return False
    return all(isinstance(text, str) and text and not LONE_SURROGATE.search(text) for text in _as_strings(value))


PENALTY = number("in [-2, 2]", lambda x: -2 <= x <= 2)
NUM_LOGPROBS = Rule(
    "an integer >= 0 (top alternatives per token), -1 for the whole vocabulary, or None",
    lambda x: x is None or isinstance(x, bool) or integer("", lambda k: k >= -1).accepts(x),
    lambda x: None if x is None or x is False else int(x),
)
TOKEN_ID = integer("", lambda x: 0 <= x < 1 << 63)
STRINGS = Rule("a non-empty string without lone surrogates, or a list of them", _is_strings, _as_strings)
SEED = Rule(
    "an integer or None",
    lambda x: x is None or integer("").accepts(x),
    lambda x: None if x is None or x == -1 else int(x),
)
LOGIT_BIAS = Rule(
    f"a dict of at most {MAX_LOGIT_BIAS} token ids >= 0 to finite numbers, or None",
    lambda x: x is None or (_is_bias(x) and len(x) <= MAX_LOGIT_BIAS),
    lambda x: {int(i): float(bias) for i, bias in x.items()} if x else None,
)
ALLOWED_TOKEN_IDS = Rule(
    "a non-empty list of token ids >= 0, or None",
    lambda x: x is None or (isinstance(x, (list, tuple)) and len(x) > 0 and _are_token_ids(x)),
    lambda x: None if x is None else array("q", x).tolist(),
)
LOGPROB_TOKEN_IDS = Rule(
    f"a list of 1 to {MAX_LOGPROB_IDS} token ids >= 0, or None",
    lambda x: x is None or (isinstance(x, (list, tuple)) and 0 < len(x) <= MAX_LOGPROB_IDS
                            and bool not in map(type, x) and _are_token_ids(x)),
    lambda x: None if x is None else list(dict.fromkeys(map(int, x))),
)  # fmt: skip
BUDGET = Rule(
    "an integer >= 0, -1 for no limit, or None",
    lambda x: x is None or at_least(-1).accepts(x),
    lambda x: None if x is None or x == -1 else int(x),
)
PROCESSORS = Rule(
    "a list of functions (token_ids, logits) -> logits, or None",
    lambda x: x is None or (isinstance(x, (list, tuple)) and all(map(callable, x))),
    lambda x: list(x) if x else None,
)


INSTEAD = {  # names that vLLM once had -> names here
    "best_of": "n", "use_beam_search": "LLM.beam_search", "length_penalty": "LLM.beam_search",
    "guided_decoding": "structured_outputs",
    **{f"guided_{kind}": f"structured_outputs=StructuredOutputsParams({kind}=...)"
       for kind in ("json", "regex", "choice", "grammar")},
}  # fmt: skip


class Parameters:
    """Base of dataclasses that users make: an unknown name is refused with the nearest that is known."""

    __slots__ = ()

    def __new__(cls, /, *args: Any, **values: Any):
        known = cls.__dataclass_fields__  # type: ignore[attr-defined]
        for name in values:
            if name not in known:
                hint = f" Use {INSTEAD[name]}." if name in INSTEAD else did_you_mean(name, known)
                raise RequestError(f"{cls.__name__} has no parameter {name!r}.{hint}")
        return object.__new__(cls)


@dataclass
class StructuredOutputsParams(Parameters):
    """A constraint on the completion: exactly one of the first six.

    Args:
        json: a JSON schema, as text or as a dictionary.
        regex: a regular expression that the whole text matches.
        choice: a list of strings, one of which the text is.
        grammar: a context-free grammar in EBNF.
        json_object: True for any JSON object.
        structural_tag: a JSON description of tags and the schemas between them.
        disable_any_whitespace: compact JSON only; else it may have whitespace wherever JSON does.
        whitespace_pattern: a regular expression for the whitespace in JSON.

    Raises:
        RequestError: none or several of the six are given.
    """

    json: str | dict | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

    def __post_init__(self) -> None:
        given = [kind for kind in self.KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"StructuredOutputsParams: give exactly one of {', '.join(self.KINDS)}, "
                f"not {' and '.join(given) or 'none'}."
            )

    @property
    def kind(self) -> str:
        return next(kind for kind in self.KINDS if getattr(self, kind) not in (None, False))


@dataclass
class RepetitionDetectionParams(Parameters):
    """A repetition that ends a completion: its last tokens are one pattern, ``min_count`` times in a row.

    Args:
        max_pattern_size: tokens of the longest pattern; 0 is off.
        min_pattern_size: tokens of the shortest; 0 is 1.
        min_count: how often it must stand there; at least 2.

    Raises:
        RequestError: a value is out of range.
    """

    max_pattern_size: int = option(0, at_least(0))
    min_pattern_size: int = option(0, at_least(0))
    min_count: int = option(0, at_least(0))

    def __post_init__(self) -> None:
        vars(self).update(check_all(type(self).__name__, vars(self), rules_of(type(self)), RequestError))
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError(
                f"RepetitionDetectionParams: min_pattern_size={self.min_pattern_size} must be at most "
                f"max_pattern_size={self.max_pattern_size}."
            )
        if self.max_pattern_size and self.min_count < 2:
            raise RequestError(f"RepetitionDetectionParams: min_count={self.min_count} must be an integer >= 2.")


def _is_repetition(value: Any) -> bool:
    is_object = isinstance(value, dict) and all(isinstance(name, str) for name in value)
    return is_object or isinstance(value, RepetitionDetectionParams)


def _as_repetition(value: Any) -> RepetitionDetectionParams | None:
    params = RepetitionDetectionParams(**value) if isinstance(value, dict) else replace(value)
    return params if params.max_pattern_size else None


@dataclass(slots=True)
class SamplingParams(Parameters):
    """Sampling parameters of one request. May be edited; checked when made and again when submitted.

    Order of the changes of the logits: allowed tokens, bad words and structured outputs; min_tokens; logits_processors;
    logit_bias; repetition, frequency and presence penalty; thinking_token_budget; temperature; top-k; top-p on the
    tokens it keeps; min-p, relative to the most probable token.

    Args:
        temperature: divides the logits; 0, or less than 1e-5, takes the most probable token (greedy).
        max_tokens: limit on generated tokens; 0 generates none, None is what ``max_model_len`` leaves.
        ignore_eos: continue past end-of-sequence tokens (``stop_token_ids`` still stop).
        top_k: sample among the k most probable tokens; 0 or -1 is off.
        top_p: sample among the fewest tokens whose probabilities reach this sum, in (0, 1]; 1 is off.
        min_p: drop tokens less probable than this fraction of the most probable one, in [0, 1]; 0 is off.
        seed: any integer; makes the tokens reproducible, whatever else runs in the batch. None or -1 derives one.
        stop_token_ids: token ids that end the generation, besides end-of-sequence; kept in ``token_ids``, not in
            the text.
        min_tokens: no end-of-sequence or stop token (at most 16 different ids), and no stop string, before this many.
        n: completions of the prompt; completion i of a seeded request is seeded with ``seed + i``.
        stop: strings that end the generation where the text first contains one; the text is cut before it. Special
            tokens are text with ``skip_special_tokens=False`` only.
        include_stop_str_in_output: keep the stop string, or the text of the stop token, in the text.
        logprobs: report the log-probability of each token and of this many most probable ones; 0 is the token alone.
        prompt_logprobs: ``logprobs`` of the prompt's tokens. Such a request does not read the prefix cache.
        presence_penalty: subtracted from the logits of generated tokens, in [-2, 2].
        frequency_penalty: the same, times how often each was generated.
        repetition_penalty: divides positive logits of tokens of prompt and completion, multiplies negative ones.
        logit_bias: token id -> addend of its logit; at most 1,024 ids.
        allowed_token_ids: no other token is generated.
        bad_words: texts that are not generated; each is tried with and without a leading space.
        detokenize: make the text; False saves the time and leaves it "".
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put spaces between special tokens in the text, where the tokenizer can.
        truncate_prompt_tokens: keep the last k tokens of the prompt; -1: limited by ``max_model_len``.
        logits_processors: functions, called in turn for each token, before it is sampled, with the ids generated so
            far (or with the prompt's and these, if they have three parameters) and the logits, a tensor f32 [V] on the
            device; they return the logits to go on with. What one raises ends its request (finish_reason "error"). One
            with a method ``clone()`` is cloned for each completion.
        structured_outputs: a constraint on the text; see ``StructuredOutputsParams``. A JSON schema allows whitespace
            wherever JSON does (a line break and 20 blanks each time), which many models fill until ``max_tokens``;
            ``disable_any_whitespace`` allows none.
        logprob_token_ids: at most 128 ids, whose log-probabilities are reported with that of each token, in place of
            the most probable ones and without ranks; ``logprobs`` is None then, or their number.
        thinking_token_budget: limit on the tokens of thoughts, those of a thought that the prompt leaves open included.
            Then the tokens of ``LLM(reasoning_end_str=...)`` follow, whatever else is asked for. 0 closes a thought at
            once; None or -1 is no limit. With it, structured outputs begin after the thoughts.
        repetition_detection: end the completion where its last tokens are one pattern several times in a row, once
            it has ``min_tokens`` (stop_reason "repetition_detected"); a ``RepetitionDetectionParams``, or a dict of its
            fields.

    Raises:
        RequestError: a name is unknown or a value out of range.
    """

    temperature: float = option(1.0, number("a finite number >= 0 (0 is greedy)", lambda x: x >= 0))
    max_tokens: int | None = option(64, optional(at_least(0)))
    ignore_eos: bool = option(False, BOOLEAN)
    top_k: int = option(0, integer("an integer >= 1, or 0 or -1 for no limit", lambda top_k: top_k >= -1))
    top_p: float = option(1.0, number("in (0, 1]", lambda top_p: 0 < top_p <= 1))
    min_p: float = option(0.0, number("in [0, 1]", lambda min_p: 0 <= min_p <= 1))
    seed: int | None = option(None, SEED)
    stop_token_ids: tuple[int, ...] | list[int] = option((), list_of(TOKEN_ID, "a list of token ids >= 0"))
    min_tokens: int = option(0, at_least(0))
    n: int = option(1, integer("an integer from 1 to 16384", lambda n: 1 <= n <= 16384))
    stop: str | list[str] | None = option(None, STRINGS)
    include_stop_str_in_output: bool = option(False, BOOLEAN)
    logprobs: int | None = option(None, NUM_LOGPROBS)
    prompt_logprobs: int | None = option(None, NUM_LOGPROBS, feature="readouts.prompt_logprobs")
    presence_penalty: float = option(0.0, PENALTY)
    frequency_penalty: float = option(0.0, PENALTY)
    repetition_penalty: float = option(1.0, number("> 0", lambda x: x > 0))
    logit_bias: dict[int, float] | None = option(None, LOGIT_BIAS)
    allowed_token_ids: list[int] | None = option(None, ALLOWED_TOKEN_IDS)
    bad_words: str | list[str] | None = option(None, STRINGS)
    detokenize: bool = option(True, BOOLEAN)
    skip_special_tokens: bool = option(True, BOOLEAN)
    spaces_between_special_tokens: bool = option(True, BOOLEAN)
    truncate_prompt_tokens: int | None = option(
        None, optional(integer("an integer >= 1, or -1 for max_model_len", lambda k: k >= 1 or k == -1))
    )
    logits_processors: list[Callable] | None = option(None, PROCESSORS)
    structured_outputs: StructuredOutputsParams | None = option(
        None, optional(Rule("a StructuredOutputsParams", lambda x: isinstance(x, StructuredOutputsParams), replace))
    )
    logprob_token_ids: list[int] | None = option(None, LOGPROB_TOKEN_IDS)
    thinking_token_budget: int | None = option(None, BUDGET)
    repetition_detection: RepetitionDetectionParams | dict[str, int] | None = option(
        None, optional(Rule("a RepetitionDetectionParams, or a dict of its fields", _is_repetition, _as_repetition))
    )

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check and normalise every value."""
        for name in compress(DEFAULTS, map(is_not, VALUES_OF(self), DEFAULTS.values())):  # the loop runs in C
            setattr(self, name, check("SamplingParams", name, getattr(self, name), RULES[name], RequestError))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"SamplingParams: min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}."
            )
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"SamplingParams: n={self.n} must be 1 when temperature is 0 (greedy): all completions would be equal."
            )
        if self.logprobs not in (None, self.num_logprobs):
            raise RequestError(
                f"SamplingParams: logprobs={self.logprobs} must be None or {self.num_logprobs}, the number of "
                "different logprob_token_ids, which are reported in place of the most probable tokens."
            )
        if self.stop and not self.detokenize:
            raise RequestError("SamplingParams: stop strings need detokenize=True; give stop_token_ids instead.")

    def snapshot(self) -> "SamplingParams":
        """A checked copy, for the engine to keep."""
        return SamplingParams(*VALUES_OF(self))

    def without_host_fields(self) -> "SamplingParams":
        """Without stop strings, bad words, grammars and logits processors. Only rank 0 reads these, and functions and
        strings of the user's own class (an ``Enum``) may be such that no other process can unpickle them."""
        if not (self.stop or self.bad_words or self.structured_outputs or self.logits_processors):
            return self
        return replace(self, stop=None, bad_words=None, structured_outputs=None, logits_processors=None)

    def key(self) -> tuple | int:
        """Equal for parameters whose values, and their types, are equal; else the identity."""
        try:
            values = VALUES_OF(self)  # version 2: bytes that depend on the values alone; arrays' have no type
            return marshal.dumps(values, 2), *map(type, values)
        except ValueError:  # an object, such as structured outputs
            return id(self)

    @property
    def is_constrained(self) -> bool:
        """Whether the tokens that it may sample depend on the tokens before."""
        return self.structured_outputs is not None or bool(self.bad_words)

    @property
    def needs_token_processor(self) -> bool:
        """Whether the host has a part in it: masks, budgets, stops, repetitions, log-probabilities, functions."""
        return self.is_constrained or bool(self.ends_by_content or self.logits_processors) or LOOKED_AT(self) != UNSET

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives reported with each token, named or most probable (-1: all); None: no log-probabilities."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    @property
    def ends_by_content(self) -> bool:
        """Whether its tokens as a whole may end it: a stop string, a complete grammar, a repetition."""
        return bool(self.stop or self.structured_outputs or self.repetition_detection)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


# values of further parameters that the host examines
LOOKED_AT = attrgetter("allowed_token_ids", "thinking_token_budget", "logprobs", "logprob_token_ids")
UNSET = (None,) * 4
RULES = rules_of(SamplingParams)
VALUES_OF = attrgetter(*(parameter.name for parameter in fields(SamplingParams)))
DEFAULTS = {parameter.name: parameter.default for parameter in fields(SamplingParams)}


def keyword_hint(name: str, known: Iterable[str], value: str = "...") -> str:
    """A hint to append to an error about an unknown keyword, for one whose place is in ``SamplingParams``, too."""
    if name in DEFAULTS:
        return f" It is a parameter of a request: SamplingParams({name}={value})."
    return did_you_mean(name, known)

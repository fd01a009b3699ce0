"""How one request is to be sampled: a frozen value, validated where it is made."""

import math
import sys
from dataclasses import dataclass, field
from numbers import Integral, Real

from nanovllm.errors import RequestError

MAX_FORBIDDEN = 16  # ids that min_tokens can hold back; the device keeps this many per sequence
LEAST_TEMPERATURE = 1e-5  # a logit over less than this may overflow, and drowns the noise anyway


def _require(ok: bool, name: str, given: object, allowed: str) -> None:
    if not ok:
        raise RequestError(f"SamplingParams({name}={given!r}): {name} must be {allowed}.")


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) < math.inf  # type: ignore[operator]


def _float(value: float) -> float:
    """A float keeps no integer beyond its range, but the largest float says as much."""
    try:
        return float(value)
    except OverflowError:
        return sys.float_info.max


# Bits of `SamplingParams.features`, one per logits step (layers/sampler.py)
MIN_TOKENS = 1
FILTERS = 2


@dataclass(frozen=True)
class SamplingParams:
    """How one request is to be sampled.

    The filters apply to the distribution after temperature, top-k first, then top-p on what it
    left; min-p is relative to the most probable token.

    Args:
        temperature: divides the logits; 0, or less than 1e-5, takes the most probable token (greedy). Default 1.0.
        max_tokens: most tokens to generate; 0 generates none. Default 64.
        ignore_eos: go on past end-of-sequence tokens (``stop_token_ids`` still stop). Default False.
        top_k: sample among the k most probable tokens; 0 or -1 is off. Default off.
        top_p: sample among the fewest tokens whose probabilities reach this sum, in (0, 1]. Default 1 (off).
        min_p: drop tokens less probable than this share of the most probable one, in [0, 1]. Default 0 (off).
        seed: an integer makes the draw reproducible, whatever else runs in the batch. Default: from the engine.
        stop_token_ids: further token ids that end the generation; they stay in ``token_ids``. Default (or None) none.
        min_tokens: no end-of-sequence or stop token before this many were generated. Default 0.

    Raises:
        RequestError: a value out of range; the message names the field and what is allowed.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | list[int] = field(default=())
    min_tokens: int = 0

    def __post_init__(self) -> None:
        _require(_is_real(self.temperature) and self.temperature >= 0, "temperature", self.temperature,
                 "a finite number >= 0 (0 is greedy)")
        _require(_is_int(self.max_tokens) and self.max_tokens >= 0, "max_tokens", self.max_tokens,
                 "an integer >= 0")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k,
                 "an integer >= 1, or 0 or -1 for no limit")
        _require(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.seed is None or _is_int(self.seed), "seed", self.seed, "an integer or None")
        stop_ids = () if self.stop_token_ids is None else self.stop_token_ids
        _require(isinstance(stop_ids, (tuple, list)) and all(_is_int(i) and i >= 0 for i in stop_ids),
                 "stop_token_ids", stop_ids, "a list of token ids >= 0")
        _require(_is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens, "min_tokens",
                 self.min_tokens, f"an integer in [0, max_tokens={self.max_tokens}]")
        # numpy's numbers would overflow in sums with the prompt's length
        for name in ("max_tokens", "min_tokens", "top_k"):
            object.__setattr__(self, name, int(getattr(self, name)))
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, _float(getattr(self, name)))
        object.__setattr__(self, "seed", None if self.seed is None else int(self.seed))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, stop_ids)))

    @property
    def features(self) -> int:
        """Bits of the logits steps that this request needs."""
        has_filter = not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        return (MIN_TOKENS if self.min_tokens > 0 else 0) | (FILTERS if has_filter else 0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

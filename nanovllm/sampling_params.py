"""Sampling parameters of one request: a frozen value, validated where it is made."""

from dataclasses import dataclass

from nanovllm.errors import RequestError
from nanovllm.validation import BOOLEAN, at_least, check_all, integer, list_of, number, optional

MAX_STOP_IDS = 16  # ids per request that min_tokens can mask: the width of the device's column
MIN_TEMPERATURE = 1e-5  # below it, logits / temperature may overflow, and the Gumbel noise has no effect anyway

RULES = {
    "temperature": number("a finite number >= 0 (0 is greedy)", lambda temperature: temperature >= 0),
    "max_tokens": at_least(0),
    "ignore_eos": BOOLEAN,
    "top_k": integer("an integer >= 1, or 0 or -1 for no limit", lambda top_k: top_k >= -1),
    "top_p": number("in (0, 1]", lambda top_p: 0 < top_p <= 1),
    "min_p": number("in [0, 1]", lambda min_p: 0 <= min_p <= 1),
    "seed": optional(integer("an integer")),
    "stop_token_ids": list_of(at_least(0), "a list of token ids >= 0"),
    "min_tokens": at_least(0),
}
MIN_TOKENS, FILTERS = 1, 2  # bits of `SamplingParams.features`, one per logits step (layers/sampler.py)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Filters apply to the distribution after temperature: top-k first, then top-p on the tokens it keeps. min-p is
    relative to the most probable token.

    Args:
        temperature: divides the logits; 0, or less than 1e-5, takes the most probable token (greedy).
        max_tokens: limit on generated tokens; 0 generates none.
        ignore_eos: continue past end-of-sequence tokens (``stop_token_ids`` still stop).
        top_k: sample among the k most probable tokens; 0 or -1 is off.
        top_p: sample among the fewest tokens whose probabilities reach this sum, in (0, 1]; 1 is off.
        min_p: drop tokens less probable than this fraction of the most probable one, in [0, 1]; 0 is off.
        seed: any integer; makes the tokens reproducible, whatever else runs in the batch. None derives one.
        stop_token_ids: token ids that end the generation, besides end-of-sequence; they stay in ``token_ids``.
        min_tokens: no end-of-sequence or stop token (at most 16 different ids) before this many tokens.

    Raises:
        RequestError: a value out of range.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | list[int] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        vars(self).update(check_all("SamplingParams", vars(self), RULES, RequestError))  # past the frozen __setattr__
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"SamplingParams: min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}."
            )

    @property
    def features(self) -> int:
        """Bits of the logits steps that this request needs."""
        has_filter = not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        return (MIN_TOKENS if self.min_tokens > 0 else 0) | (FILTERS if has_filter else 0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

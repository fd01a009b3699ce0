"""Rotary positions and their scalings: the fields of ``config.json``, all honoured or refused, and the frequencies.

``layers/rotary_embedding.py`` makes the tables of cosines and sines. Importing this imports no torch.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.errors import CheckpointError
from nanovllm.validation import BOOLEAN, Rule, by_field, check, check_all, choice, integer, list_of, number, optional

if TYPE_CHECKING:
    import torch

DEFAULT_MAX_POSITION = 32768  # for a config.json without max_position_embeddings
MAX_SIZE = 1 << 24  # a hundred times published ones; products of a few stay within 64 bits
OBJECT = optional(Rule("an object", lambda x: isinstance(x, dict)))
SIZE = integer("an integer >= 1 and at most 2**24", lambda x: 1 <= x <= MAX_SIZE)
POSITIVE = number("a positive number", lambda x: x > 0)
FRACTION = optional(number("a number in (0, 1]", lambda x: 0 < x <= 1))
FACTORS = Rule("a list of positive numbers", lambda x: isinstance(x, (list, tuple)) and all(map(POSITIVE.accepts, x)),
               list_of(POSITIVE, "").convert)  # fmt: skip
COMMON = {"rope_theta": POSITIVE, "partial_rotary_factor": FRACTION}
ORIGINAL = {"original_max_position_embeddings": optional(SIZE)}
ROPE_RULES = {  # rope_type -> its fields
    "default": COMMON,
    "linear": COMMON | {"factor": POSITIVE},
    "llama3": COMMON | ORIGINAL | by_field(("factor low_freq_factor high_freq_factor", POSITIVE)),
    "yarn": COMMON | ORIGINAL | by_field(
        ("rope_theta", number("a number > 1", lambda x: x > 1)),
        ("factor", POSITIVE),
        ("beta_fast beta_slow attention_factor", optional(POSITIVE)),
        ("truncate", optional(BOOLEAN)),
        ("mscale mscale_all_dim llama_4_scaling_beta", optional(number("a number >= 0", lambda x: x >= 0))),
    ),
    "longrope": COMMON | ORIGINAL | by_field(
        ("short_factor long_factor", FACTORS),
        ("factor attention_factor", optional(POSITIVE)),
    ),
    "proportional": COMMON | {"factor": optional(POSITIVE)},
}  # fmt: skip

MROPE = ("mrope_section", "mrope_interleaved")  # time, height and width are equal for text tokens
UNREAD = {  # rope_type -> fields that files have beside it, and transformers does not read
    "default": ("original_max_position_embeddings",),
    "yarn": ("max_position_embeddings",),
}


def supported(*allowed: Any) -> Rule:
    rule = choice(*allowed)
    return rule._replace(allowed=f"{rule.allowed} (others are not supported)")


@dataclass(frozen=True)
class RopeScaling:
    """Rotary positions and their scaling."""

    # "default", "linear" (positions divided by ``factor``), "llama3", "yarn" (arXiv:2309.00071), "longrope"
    # (arXiv:2402.13753), or "proportional" (the first share of the pairs turns by the frequencies of whole heads; the
    # others do not turn).
    kind: str = "default"
    theta: float = 1_000_000.0  # base of the rotary frequencies
    factor: float = 1.0  # context length over ``original_max_position``
    original_max_position: int = 0  # context length of the training (llama3, yarn, longrope)
    beta_fast: float = 32.0  # rotations within that context above which yarn keeps a frequency
    beta_slow: float = 1.0  # rotations below which it interpolates it fully
    attention_factor: float | None = None  # scale of cosines and sines (yarn, longrope); None: the method's formula
    truncate: bool = True  # yarn rounds the borders of its ramp to whole dimensions
    mscale: float = 0.0  # with both, yarn's attention_factor is the ratio of its formula for the two values
    mscale_all_dim: float = 0.0
    # Queries at position p are scaled by 1 + beta ln(1 + floor(p / original_max_position)).
    llama_4_scaling_beta: float = 0.0
    low_freq_factor: float = 1.0  # llama3's borders, with the next field, in rotations within the original context
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()  # longrope's divisor of each frequency, up to the original length
    long_factor: tuple[float, ...] = ()  # the divisors for longer contexts
    partial_rotary_factor: float = 1.0  # the share of a head's dimensions, the first ones, that is rotated
    is_long: bool = False  # longrope takes ``long_factor``

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "RopeScaling":
        """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (before)."""
        new, old = (
            check("config.json", name, raw.get(name), OBJECT, CheckpointError)
            for name in ("rope_parameters", "rope_scaling")
        )
        rope = _with_rope_type(new or old or {})
        # a long-context recipe may add rope_scaling to a file that has rope_parameters; their rope_theta may differ
        if new and old and {**rope, "rope_theta": None} != {**_with_rope_type(old), "rope_theta": None}:
            raise CheckpointError(
                f"config.json: rope_parameters={new} and rope_scaling={old} differ; write all into 'rope_parameters'."
            )
        defaults = {"rope_theta": 10_000.0, "partial_rotary_factor": None}
        rope = {name: raw.get(name, default) for name, default in defaults.items()} | rope
        kind = check("config.json", "rope_type", rope.pop("rope_type"), supported(*ROPE_RULES), CheckpointError)
        rules, unread = ROPE_RULES[kind], MROPE + UNREAD.get(kind, ())
        rope = {name: value for name, value in rope.items() if name not in unread}
        unknown = {name: value for name, value in rope.items() if name not in rules and value is not None}
        if unknown:
            raise CheckpointError(f"config.json: rope scaling {kind!r} with unsupported fields {unknown}.")
        checked = check_all(f"config.json: rope scaling {kind!r}", rope, rules, CheckpointError)
        given = {name: value for name, value in checked.items() if value is not None}
        max_position = raw.get("max_position_embeddings", DEFAULT_MAX_POSITION)
        original = given.pop("original_max_position_embeddings", max_position)
        # Phi-3 stores the original length next to the scaling, and transformers prefers that one
        outer = raw.get("original_max_position_embeddings") or original
        outer = check("config.json", "original_max_position_embeddings", outer, SIZE, CheckpointError)
        if kind == "longrope":  # as in transformers: the lengths decide unless there is a factor
            given.setdefault("factor", max_position / outer)
        return cls(kind, given.pop("rope_theta"), original_max_position=outer, **given)

    def rotated_dims(self, head_dim: int) -> int:
        """Rotated dimensions of a head, the first ones; "proportional" pairs all, and turns some pairs by 0."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial_rotary_factor)

    def check_head(self, head_dim: int) -> None:
        """Raise CheckpointError unless heads of this size can be rotated."""
        dims = self.rotated_dims(head_dim)
        if dims < 2 or dims % 2 or head_dim % 2:
            raise CheckpointError(f"config.json: heads of size {head_dim}, {dims} rotated; RoPE needs an even size.")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if self.kind == "longrope" and len(factors) != dims // 2:
                raise CheckpointError(
                    f"config.json: {name} has {len(factors)} entries for {dims} rotated dimensions, not {dims // 2}."
                )

    def for_length(self, max_model_len: int) -> "RopeScaling":
        """Adapt to requests of at most ``max_model_len`` tokens: as in vLLM, all use the same list of longrope."""
        is_long = max_model_len > self.original_max_position
        beta = self.llama_4_scaling_beta if is_long else 0.0
        return replace(self, is_long=self.kind == "longrope" and is_long, llama_4_scaling_beta=beta)

    def frequencies(self, head_dim: int) -> tuple["torch.Tensor", float]:
        """Inverse frequencies of a head's r rotated dimensions, fp32 [r/2] on the CPU; scale of cosines and sines."""
        import torch

        r = self.rotated_dims(head_dim)
        base = 1.0 / self.theta ** (torch.arange(0, r, 2, dtype=torch.float32, device="cpu") / r)
        original, scale = self.original_max_position, self.attention_factor
        if self.kind == "linear":
            return base / self.factor, 1.0
        if self.kind == "proportional":
            turns = torch.arange(r // 2, device="cpu") < int(r * self.partial_rotary_factor // 2)
            return base * turns / self.factor, 1.0
        if self.kind == "llama3":  # like yarn, with a ramp over the rotations within the original context
            rotations = original * base / (2 * math.pi)
            low, high = self.low_freq_factor, self.high_freq_factor
            kept = ((rotations - low) / (high - low)).clamp(0, 1)
            return base * (kept + (1 - kept) / self.factor), 1.0
        if self.kind == "longrope":
            divisors = torch.tensor(self.long_factor if self.is_long else self.short_factor, device="cpu")
            if scale is None:
                scale = math.sqrt(1 + math.log(self.factor) / math.log(original)) if self.factor > 1 else 1.0
            return base / divisors, scale
        if self.kind == "yarn":  # high frequencies stay, low ones are interpolated, in between a ramp over dimensions

            def dimension_of(rotations: float) -> float:
                """The dimension that turns this often within the original context."""
                return r * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

            low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, r - 1)
            ramp = ((torch.arange(r // 2, device="cpu") - low) / max(high - low, 1e-3)).clamp(0, 1)
            if scale is None:
                both = self.mscale and self.mscale_all_dim
                log = 0.1 * math.log(max(self.factor, 1.0))
                scale = (self.mscale * log + 1) / (self.mscale_all_dim * log + 1) if both else log + 1
            return base / self.factor * ramp + base * (1 - ramp), scale
        return base, 1.0

    def query_scales(self, max_position: int) -> "torch.Tensor | None":
        """Factors of queries at the positions, fp32 [max_position] on the CPU; None: all are 1."""
        import torch

        if not self.llama_4_scaling_beta:
            return None
        periods = torch.arange(max_position, device="cpu") // self.original_max_position
        return 1 + self.llama_4_scaling_beta * torch.log1p(periods.float())


def _with_rope_type(rope: dict[str, Any]) -> dict[str, Any]:
    """A copy in which "type", the older name, is "rope_type", and kinds have today's names.

    "mrope" has positions in time, height and width, which are the same for a token of a text.
    """
    rope = dict(rope)
    kind = rope.pop("type", "default")
    kind = rope.get("rope_type", kind)
    return {**rope, "rope_type": {"su": "longrope", "mrope": "default"}.get(str(kind), kind)}

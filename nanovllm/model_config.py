"""What ``config.json`` says of a Qwen3 model, checked; numbers only, no torch.

Every field that would change the computation is honoured or refused, never ignored.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import CheckpointError, ConfigError


def _is_integer(value: Any, at_least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _are_token_ids(value: Any) -> bool:
    return all(_is_integer(token_id, 0) for token_id in (value if isinstance(value, list) else [value]))


KINDS: dict[str, Callable[[Any], bool]] = {
    "a positive integer": _is_integer,
    "a positive number": _is_number,
    "true or false": lambda value: isinstance(value, bool),
    "an object": lambda value: isinstance(value, dict),
    "a list": lambda value: isinstance(value, list),
    "a token id or a list of them": _are_token_ids,
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# field -> its kind, and what it is where it is left out; if that is None it may be null as well, or it must be there
FIELDS = {
    **dict.fromkeys(SIZES, ("a positive integer", ...)),
    "num_key_value_heads": ("a positive integer", None),
    "head_dim": ("a positive integer", None),
    "max_position_embeddings": ("a positive integer", 32768),
    "rms_norm_eps": ("a positive number", 1e-6),
    "tie_word_embeddings": ("true or false", None),
    "attention_bias": ("true or false", None),
    "layer_types": ("a list", None),
    "eos_token_id": ("a token id or a list of them", None),
}
ROPE_SOURCES = {
    "rope_parameters": ("an object", None),
    "rope_scaling": ("an object", None),
    "max_position_embeddings": FIELDS["max_position_embeddings"],
}
ROPE_FIELDS = {
    "rope_theta": ("a positive number", ...),
    "factor": ("a positive number", None),
    "original_max_position_embeddings": ("a positive integer", None),
    "beta_fast": ("a positive number", None),
    "beta_slow": ("a positive number", None),
    "attention_factor": ("a positive number", None),
}


def checked(raw: dict[str, Any], fields: dict[str, tuple[str, Any]], file: str = "config.json") -> dict[str, Any]:
    """The values of these fields; raises CheckpointError for one of another kind."""
    values = {}
    for name, (kind, default) in fields.items():
        value = raw.get(name, None if default is ... else default)
        if not (KINDS[kind](value) or (value is None and default is None)):
            raise CheckpointError(f"{file}: {name}={value!r}, expected {kind}.")
        values[name] = value
    return values


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    """Without what both ways of writing it need not have in common."""
    return {"rope_type" if name == "type" else name: value for name, value in rope.items() if name != "rope_theta"}


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """None, one id or several, as JSON files have them."""
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


@dataclass(frozen=True)
class RopeScaling:
    """Rotary position scaling.

    Attributes:
        kind: "default", "linear" (positions divided by ``factor``) or "yarn" (arXiv:2309.00071).
        theta: base of the rotary frequencies.
        factor: how many times longer than ``original_max_position`` contexts may be.
        original_max_position: context the model was trained with (yarn).
        beta_fast, beta_slow: rotations at which yarn leaves a frequency as it is, or interpolates it fully.
        attention_factor: yarn's scale of cosines and sines; None takes ``0.1 ln(factor) + 1``.
    """

    kind: str = "default"
    theta: float = 1_000_000.0
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "RopeScaling":
        # transformers 5 writes one dict "rope_parameters"; before, "rope_theta" and "rope_scaling" stood apart
        sources = checked(raw, ROPE_SOURCES)
        new, old = sources["rope_parameters"], sources["rope_scaling"]
        # as when a recipe's "rope_scaling" is added to a file that has the other
        if new and old and _scaling(new) != _scaling(old):
            raise CheckpointError(
                f"config.json: rope_parameters={new} and rope_scaling={old} differ; write all into 'rope_parameters'."
            )
        rope = dict(new or old or {})
        rope.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
        given = {k: v for k, v in checked(rope, ROPE_FIELDS).items() if v is not None}
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        rope.pop("type", None)
        allowed = {
            "default": (),
            "linear": ("factor",),
            "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
        }
        if kind not in list(allowed):  # a list, for it may be of any type
            raise CheckpointError(
                f"config.json asks for rope scaling {kind!r}; supported are {', '.join(map(repr, allowed))}."
            )
        known = ("rope_theta", *allowed[kind])
        unknown = {k: v for k, v in rope.items() if k not in known and v is not None}
        if unknown:
            raise CheckpointError(f"config.json: rope scaling {kind!r} with unsupported fields {unknown}.")
        if kind != "default" and "factor" not in given:
            raise CheckpointError(f"config.json: rope scaling {kind!r} needs a 'factor'.")
        theta = float(given.pop("rope_theta"))
        if kind == "yarn" and theta <= 1:
            raise CheckpointError(f"config.json: rope_theta={theta}; rope scaling 'yarn' needs more than 1.")
        original = given.pop("original_max_position_embeddings", sources["max_position_embeddings"])
        return cls(kind=kind, theta=theta, original_max_position=original, **given)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a dense Qwen3 model (names as in ``config.json``)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str
    rope: RopeScaling
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "ModelConfig":
        """Read the dict of a ``config.json``; raises CheckpointError for what cannot be honoured."""
        given = checked(raw, FIELDS)
        refused = {
            "hidden_act": raw.get("hidden_act", "silu") != "silu",
            "use_sliding_window": bool(raw.get("use_sliding_window")),
            "layer_types": any(kind != "full_attention" for kind in given["layer_types"] or ()),
            "quantization_config": bool(raw.get("quantization_config")),
        }
        for name, is_refused in refused.items():
            if is_refused:
                raise CheckpointError(f"config.json: {name}={raw[name]!r} is not supported.")
        heads = given["num_attention_heads"]
        kv_heads = given["num_key_value_heads"] or heads
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} attention heads cannot be shared by {kv_heads} KV heads.")
        head_dim = given["head_dim"] or given["hidden_size"] // heads
        if head_dim < 2 or head_dim % 2:
            raise CheckpointError(f"config.json: heads of size {head_dim}; rotation takes an even size.")
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in ("bfloat16", "float16", "float32"):
            raise CheckpointError(f"config.json: dtype={dtype!r}; supported are bfloat16, float16 and float32.")
        rope, max_position = RopeScaling.from_json(raw), given["max_position_embeddings"]
        if rope.kind == "yarn":  # Qwen's recipe adds it to a config.json and leaves the shorter length there
            max_position = max(max_position, int(rope.factor * rope.original_max_position))
        return cls(
            architecture=raw["architectures"][0],
            **{name: given[name] for name in SIZES},
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rms_norm_eps=float(given["rms_norm_eps"]),
            tie_word_embeddings=bool(given["tie_word_embeddings"]),
            attention_bias=bool(given["attention_bias"]),
            dtype=dtype,
            rope=rope,
            eos_token_ids=token_ids(given["eos_token_id"]),
        )

    def check_tensor_parallel(self, size: int) -> None:
        """Raise ConfigError unless the model divides over ``size`` ranks (few KV heads are replicated)."""
        for what, count in (
            ("attention heads", self.num_attention_heads),
            ("vocabulary entries", self.vocab_size),
            ("intermediate units", self.intermediate_size),
        ):
            if count % size:
                raise ConfigError(
                    f"tensor_parallel_size={size} does not divide the model's {count} {what}; "
                    "choose a size that divides all of them."
                )
        kv_heads = self.num_key_value_heads
        if kv_heads % size and size % kv_heads:
            raise ConfigError(
                f"tensor_parallel_size={size} and the model's {kv_heads} KV heads: one must divide the other."
            )

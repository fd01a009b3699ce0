"""What ``config.json`` says of a Qwen3 model, checked; numbers only, no torch.

Every field that would change the computation is honoured or refused, never ignored.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm.errors import CheckpointError, ConfigError


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
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        theta = float(rope.pop("rope_theta", raw.get("rope_theta", 10_000.0)))
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        rope.pop("type", None)
        allowed = {
            "default": (),
            "linear": ("factor",),
            "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
        }
        if kind not in allowed:
            raise CheckpointError(
                f"config.json asks for rope scaling {kind!r}; supported are {', '.join(map(repr, allowed))}."
            )
        unknown = {k: v for k, v in rope.items() if k not in allowed[kind] and v is not None}
        if unknown:
            raise CheckpointError(f"config.json: rope scaling {kind!r} with unsupported fields {unknown}.")
        if kind != "default" and "factor" not in rope:
            raise CheckpointError(f"config.json: rope scaling {kind!r} needs a 'factor'.")
        original = rope.pop("original_max_position_embeddings", None) or raw.get("max_position_embeddings", 0)
        given = {k: v for k, v in rope.items() if v is not None}
        return cls(kind=kind, theta=theta, original_max_position=original, **given)


@dataclass(frozen=True)
class Qwen3Config:
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
    def from_json(cls, raw: dict[str, Any]) -> "Qwen3Config":
        """Read the dict of a ``config.json``; raises CheckpointError for what cannot be honoured."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            if not isinstance(raw.get(name), int) or raw[name] < 1:
                raise CheckpointError(f"config.json: {name}={raw.get(name)!r}, expected a positive integer.")
        refused = {
            "hidden_act": raw.get("hidden_act", "silu") != "silu",
            "use_sliding_window": bool(raw.get("use_sliding_window")),
            "layer_types": any(kind != "full_attention" for kind in raw.get("layer_types") or ()),
            "quantization_config": bool(raw.get("quantization_config")),
        }
        for name, is_refused in refused.items():
            if is_refused:
                raise CheckpointError(f"config.json: {name}={raw[name]!r} is not supported.")
        heads = raw["num_attention_heads"]
        kv_heads = raw.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} attention heads cannot be shared by {kv_heads} KV heads.")
        eos = raw.get("eos_token_id")
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in ("bfloat16", "float16", "float32"):
            raise CheckpointError(f"config.json: dtype={dtype!r}; supported are bfloat16, float16 and float32.")
        rope, max_position = RopeScaling.from_json(raw), raw.get("max_position_embeddings", 32768)
        if rope.kind == "yarn":  # Qwen's recipe adds it to a config.json and leaves the shorter length there
            max_position = max(max_position, int(rope.factor * rope.original_max_position))
        return cls(
            architecture=raw["architectures"][0],
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_position_embeddings=max_position,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            dtype=dtype,
            rope=rope,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,) if eos is not None else (),
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

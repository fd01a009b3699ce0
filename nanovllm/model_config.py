"""The model's shape, read from ``config.json``, and the table of supported architectures. Imports no torch.

Every field that would change the computation is honoured or refused, never ignored.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.validation import BOOLEAN, Rule, at_least, check, check_all, choice, list_of, number, optional


class Family(NamedTuple):
    """Differences between decoder architectures.

    Attributes:
        qk_norm: per-head RMSNorm of q and k before RoPE.
    """

    qk_norm: bool = False


FAMILIES = {
    "Qwen3ForCausalLM": Family(qk_norm=True),
}
DTYPES = ("bfloat16", "float16", "float32")


def _supported(*allowed: Any) -> Rule:
    rule = choice(*allowed)
    return rule._replace(allowed=f"{rule.allowed} (others are not supported)")


def _as_list(value: Any) -> Any:
    return value if value is None or isinstance(value, list) else [value]


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
POSITIVE = number("a positive number", lambda x: x > 0)
FLAG = Rule("true or false", optional(BOOLEAN).accepts, bool)
OBJECT = optional(Rule("an object", lambda x: isinstance(x, dict)))
UNSUPPORTED = Rule("absent or false (it is not supported)", lambda x: not x)
IDS = list_of(at_least(0), "a token id or a list of them")
TOKEN_IDS = IDS._replace(accepts=lambda x: IDS.accepts(_as_list(x)), convert=lambda x: IDS.convert(_as_list(x)))
RULES = {
    "architectures": _supported(*([name] for name in FAMILIES)),
    "quantization_config": UNSUPPORTED,
    "use_sliding_window": UNSUPPORTED,
    "layer_types": list_of(choice("full_attention"), "a list of 'full_attention' (others are not supported)"),
    "hidden_act": _supported("silu"),
    **dict.fromkeys(SIZES, at_least(1)),
    "num_key_value_heads": optional(at_least(1)),
    "head_dim": optional(at_least(1)),
    "max_position_embeddings": at_least(1),
    "rms_norm_eps": POSITIVE,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "dtype": _supported(*DTYPES),
    "eos_token_id": TOKEN_IDS,
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
}
# of absent fields; the others must be there, unless their rule allows None
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}

ROPE_RULES = {
    "rope_theta": POSITIVE,
    "factor": optional(POSITIVE),
    "original_max_position_embeddings": optional(at_least(1)),
    "beta_fast": optional(POSITIVE),
    "beta_slow": optional(POSITIVE),
    "attention_factor": optional(POSITIVE),
}
ROPE_FIELDS = {  # kind -> its fields besides rope_theta
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary positions.

    Attributes:
        kind: "default", "linear" (positions divided by ``factor``) or "yarn" (arXiv:2309.00071).
        theta: base of the rotary frequencies.
        factor: context length over ``original_max_position``.
        original_max_position: context length of the training (yarn).
        beta_fast, beta_slow: rotations within that context above which yarn keeps a frequency, and below which it
            interpolates it fully.
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
        """Read both layouts: ``rope_parameters`` of transformers 5, ``rope_theta`` and ``rope_scaling`` before."""
        sources = ("rope_parameters", "rope_scaling", "max_position_embeddings")
        new, old, max_position = _check({**DEFAULTS, **raw}, {name: RULES[name] for name in sources}).values()
        if new and old and _without_theta(new) != _without_theta(old):  # a recipe's rope_scaling added to a new file
            raise CheckpointError(
                f"config.json: rope_parameters={new} and rope_scaling={old} differ; write all into 'rope_parameters'."
            )
        rope = {"rope_theta": raw.get("rope_theta", 10_000.0), **(new or old or {})}
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        check("config.json", "rope_type", kind, _supported(*ROPE_FIELDS), CheckpointError)
        given = {name: value for name, value in _check(rope, ROPE_RULES).items() if value is not None}
        known = ("rope_theta", *ROPE_FIELDS[kind])
        unknown = {name: value for name, value in rope.items() if name not in known and value is not None}
        if unknown:
            raise CheckpointError(f"config.json: rope scaling {kind!r} with unsupported fields {unknown}.")
        if kind != "default" and "factor" not in given:
            raise CheckpointError(f"config.json: rope scaling {kind!r} needs a 'factor'.")
        theta = given.pop("rope_theta")
        if kind == "yarn" and theta <= 1:
            raise CheckpointError(f"config.json: rope_theta={theta}; rope scaling 'yarn' needs more than 1.")
        original = given.pop("original_max_position_embeddings", max_position)
        return cls(kind=kind, theta=theta, original_max_position=original, **given)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a dense decoder; names as in ``config.json``."""

    family: Family
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
        """Read the dict of a ``config.json``; raises CheckpointError for a field that cannot be honoured."""
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        given = _check({**DEFAULTS, **raw, "dtype": dtype}, RULES)
        heads = given["num_attention_heads"]
        kv_heads = given["num_key_value_heads"] or heads
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} attention heads cannot be shared by {kv_heads} KV heads.")
        head_dim = given["head_dim"] or given["hidden_size"] // heads
        if head_dim < 2 or head_dim % 2:
            raise CheckpointError(f"config.json: heads of size {head_dim}; RoPE needs an even size.")
        rope, max_position = RopeScaling.from_json(raw), given["max_position_embeddings"]
        if rope.kind == "yarn":  # Qwen's recipe adds rope_scaling to a config.json and leaves max_position_embeddings
            max_position = max(max_position, int(rope.factor * rope.original_max_position))
        given |= {
            "family": FAMILIES[given["architectures"][0]],
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": max_position,
            "rope": rope,
            "eos_token_ids": given["eos_token_id"],
        }
        return cls(**{field.name: given[field.name] for field in fields(cls)})

    def check_tensor_parallel(self, size: int) -> None:
        """Raise ConfigError unless the model divides over ``size`` ranks (KV heads fewer than ranks are replicated)."""
        for what, count in (
            ("attention heads", self.num_attention_heads),
            ("vocabulary entries", self.vocab_size),
            ("intermediate units", self.intermediate_size),
        ):
            if count % size:
                raise ConfigError(f"tensor_parallel_size={size} must divide the model's {count} {what}.")
        if self.num_key_value_heads % size and size % self.num_key_value_heads:
            raise ConfigError(
                f"tensor_parallel_size={size} must divide the model's {self.num_key_value_heads} KV heads, "
                "or be a multiple of their number."
            )


def _check(values: dict[str, Any], rules: dict[str, Rule]) -> dict[str, Any]:
    return check_all("config.json", values, rules, CheckpointError)


def _without_theta(rope: dict[str, Any]) -> dict[str, Any]:
    """In either layout, for comparison: the older one keeps rope_theta elsewhere and calls rope_type "type"."""
    return {"rope_type" if name == "type" else name: value for name, value in rope.items() if name != "rope_theta"}

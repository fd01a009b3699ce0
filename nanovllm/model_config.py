"""The model's shape, read from ``config.json``, and the table of supported architectures. Imports no torch.

Every field that would change the computation is honoured or refused, never ignored.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.validation import BOOLEAN, Rule, at_least, check, check_all, choice, list_of, number, optional


class Family(NamedTuple):
    """Differences between decoder architectures."""

    qk_norm: bool  # per-head RMSNorm of q and k before RoPE


FAMILIES = {
    "Qwen3ForCausalLM": Family(qk_norm=True),
}
DTYPES = ("bfloat16", "float16", "float32")


def _supported(*allowed: Any) -> Rule:
    rule = choice(*allowed)
    return rule._replace(allowed=f"{rule.allowed} (others are not supported)")


SIZE = at_least(1)
POSITIVE = number("a positive number", lambda x: x > 0)
FLAG = Rule("true or false", optional(BOOLEAN).accepts, bool)
OBJECT = optional(Rule("an object", lambda x: isinstance(x, dict)))
UNSUPPORTED = Rule("absent or false (it is not supported)", lambda x: not x)
ID = at_least(0)
IDS = list_of(ID, "a token id or a list of them")
TOKEN_IDS = Rule(
    IDS.allowed, lambda x: ID.accepts(x) or IDS.accepts(x), lambda x: IDS.convert([x] if ID.accepts(x) else x)
)
RULES = {
    "architectures": _supported(*([name] for name in FAMILIES)),
    "quantization_config": UNSUPPORTED,
    "use_sliding_window": UNSUPPORTED,
    "layer_types": list_of(choice("full_attention"), "a list of 'full_attention' (others are not supported)"),
    "hidden_act": _supported("silu"),
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": SIZE,
    "num_attention_heads": SIZE,
    "num_key_value_heads": optional(SIZE),
    "head_dim": optional(SIZE),
    "max_position_embeddings": SIZE,
    "rms_norm_eps": POSITIVE,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "dtype": _supported(*DTYPES),
    "eos_token_id": TOKEN_IDS,
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
}
# of absent fields; any other field is required unless its rule allows None
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}

ROPE_RULES = {  # rope_type -> its fields
    "default": {"rope_theta": POSITIVE},
    "linear": {"rope_theta": POSITIVE, "factor": POSITIVE},
    "yarn": {
        "rope_theta": number("a number > 1", lambda x: x > 1),
        "factor": POSITIVE,
        "original_max_position_embeddings": optional(SIZE),
        "beta_fast": optional(POSITIVE),
        "beta_slow": optional(POSITIVE),
        "attention_factor": optional(POSITIVE),
    },
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
        """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (before)."""
        new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
        rope = _with_rope_type(new or old or {})
        # a long-context recipe may add rope_scaling to a file that has rope_parameters; their rope_theta may differ
        if new and old and {**rope, "rope_theta": None} != {**_with_rope_type(old), "rope_theta": None}:
            raise CheckpointError(
                f"config.json: rope_parameters={new} and rope_scaling={old} differ; write all into 'rope_parameters'."
            )
        rope = {"rope_theta": raw.get("rope_theta", 10_000.0), **rope}
        kind = check("config.json", "rope_type", rope.pop("rope_type"), _supported(*ROPE_RULES), CheckpointError)
        rules = ROPE_RULES[kind]
        unknown = {name: value for name, value in rope.items() if name not in rules and value is not None}
        if unknown:
            raise CheckpointError(f"config.json: rope scaling {kind!r} with unsupported fields {unknown}.")
        checked = check_all(f"config.json: rope scaling {kind!r}", rope, rules, CheckpointError)
        given = {name: value for name, value in checked.items() if value is not None}
        max_position = raw.get("max_position_embeddings", DEFAULTS["max_position_embeddings"])
        original = given.pop("original_max_position_embeddings", max_position)
        return cls(kind=kind, theta=given.pop("rope_theta"), original_max_position=original, **given)


def _with_rope_type(rope: dict[str, Any]) -> dict[str, Any]:
    """A copy in which "type", the older name, is "rope_type"."""
    rope = dict(rope)
    return {"rope_type": rope.pop("type", "default"), **rope}


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts in the layers outside ``dense_layers``.

    Attributes:
        num_experts: routed experts of a layer.
        top_k: experts of a token.
        expert_size: intermediate units of an expert.
        scoring: "softmax" over all experts, or "sigmoid".
        renormalize: the weights of the chosen experts sum to 1.
        routed_scale: a factor of all weights.
        num_groups, top_groups: experts are chosen from the best ``top_groups`` of ``num_groups`` equal groups.
        has_correction_bias: a bias per expert counts for the choice, and not for the weight.
        shared_size: intermediate units of the shared expert, which every token passes; 0: none.
        has_shared_gate: a sigmoid gate scales the shared expert.
        dense_layers: layers with an ordinary MLP.
    """

    num_experts: int
    top_k: int
    expert_size: int
    scoring: str = "softmax"
    renormalize: bool = True
    routed_scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    has_correction_bias: bool = False
    shared_size: int = 0
    has_shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()


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
        given = check_all("config.json", {**DEFAULTS, **raw, "dtype": dtype}, RULES, CheckpointError)
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

"""Fields of ``config.json`` that an architecture spells in its own way, for ``Family.spelled``. Imports no torch."""

from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.models.rope import POSITIVE, SIZE
from nanovllm.validation import BOOLEAN, Rule, by_field, check_all, choice, list_of, optional

LFM2 = by_field(
    ("norm_eps block_ffn_dim_multiplier", optional(POSITIVE)),
    ("block_ff_dim block_multiple_of intermediate_size", optional(SIZE)),
    ("block_auto_adjust_ff_dim tie_embedding", optional(BOOLEAN)),
    ("use_expert_bias", optional(choice(True))),
)
# Names of the same field of Mamba-2; the first is ours, and mostly that of Granite and Falcon; the last is Nemotron's.
MAMBA2_NAMES = (
    ("mamba_n_heads", "mamba_num_heads"), ("mamba_d_head", "mamba_head_dim"), ("mamba_n_groups", "n_groups"),
    ("mamba_d_state", "ssm_state_size"), ("mamba_d_conv", "conv_kernel"), ("mamba_conv_bias", "use_conv_bias"),
    ("layer_types", "layers_block_type"),
    ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
)  # fmt: skip
MAMBA2 = by_field(
    ("mamba_n_heads hidden_size num_hidden_layers", optional(SIZE)), ("mamba_d_ssm mamba_expand", optional(SIZE)),
    ("position_embedding_type", choice(None, "nope", "rope")),
    ("hybrid_override_pattern", Rule("letters M, E, * and -", lambda x: x is None or set(x) <= {*"ME*-"})),
)
OLD_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}  # in files older than transformers 5
MAMBA_OR_ATTENTION = (*OLD_TYPES, *OLD_TYPES.values())
LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


# Fields of Falcon-H1; other classes do not read them.
FALCONS = dict.fromkeys((
    "mamba_norm_before_gate", "mamba_rms_norm", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier",
))  # fmt: skip


def of_granite_h(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of Granite 4; its class does not read the fields of Falcon-H1."""
    return of_mamba2(raw, *MAMBA_OR_ATTENTION) | FALCONS


def of_falcon_h1(raw: dict[str, Any]) -> dict[str, Any]:
    return of_mamba2(raw, "hybrid")


def of_mamba2(raw: dict[str, Any], *kinds_in_files: str) -> dict[str, Any]:
    """Translate names of fields and kinds of layers; derive the size of a head and the layers that have RoPE."""
    named = {names[0]: next((raw[x] for x in names if raw.get(x) is not None), None) for names in MAMBA2_NAMES}
    kind = choice(*kinds_in_files)
    rules = MAMBA2 | {"layer_types": list_of(kind, f"a list of {kind.allowed} (others are not supported)")}
    given = check_all("config.json", raw | named, rules, CheckpointError)
    kinds = given["layer_types"] or [LETTERS[letter] for letter in given["hybrid_override_pattern"] or ""]
    num_layers = len(kinds) or given["num_hidden_layers"] or 0
    width = given["mamba_d_ssm"] or (given["mamba_expand"] or 2) * (given["hidden_size"] or 0)
    if named["mamba_d_head"] in (None, "auto"):
        named["mamba_d_head"] = width // (given["mamba_n_heads"] or 1)
    is_rotated = int(given["position_embedding_type"] == "rope")
    return named | {
        "layer_types": [OLD_TYPES.get(kind, kind) for kind in kinds], "num_hidden_layers": num_layers,
        "no_rope_layers": [is_rotated] * num_layers,
    }  # fmt: skip


# Fields that would change the numbers of Nemotron-H, and the values that do not.
NEMOTRON_H = by_field(
    ("mlp_bias use_bias residual_in_fp32", optional(choice(False))), ("moe_latent_size", choice(None)),
    ("mamba_hidden_act", choice(None, "silu")),
    # transformers clamps time steps to this minimum in prefill, but not in decode; training had no such limit
    ("time_step_min", Rule("a number <= 0.001 or None", lambda x: x is None or x <= 0.001)),
)


def of_nemotron_h(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of Nemotron-H, whose layers have a mixer or an MLP, not both."""
    check_all("config.json", raw, NEMOTRON_H, CheckpointError)
    named = of_mamba2(raw, *MAMBA_OR_ATTENTION, "moe", "mlp")
    alone = {"linear_attention": "only_mamba", "full_attention": "only_attention"}
    return named | FALCONS | {
        "layer_types": [alone.get(kind, kind) for kind in named["layer_types"]],
        "hidden_act": raw.get("mlp_hidden_act") or raw["hidden_act"],
        "rms_norm_eps": raw.get("layer_norm_epsilon") or 1e-5,
    }  # fmt: skip


def of_lfm2(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of LFM2: the MLP has two thirds of the given width, rounded up, unless the file disables this."""
    given = check_all("config.json", raw, LFM2, CheckpointError)
    size, factor = given["block_ff_dim"] or given["intermediate_size"], raw.get("block_ffn_dim_multiplier", 1.0)
    if size and given["block_auto_adjust_ff_dim"]:
        size, multiple = int(2 * size / 3), given["block_multiple_of"] or 256
        size = size if factor is None else -(-int(factor * size) // multiple) * multiple
    is_tied = raw.get("tie_word_embeddings") if given["tie_embedding"] is None else given["tie_embedding"]
    return {"intermediate_size": size, "rms_norm_eps": given["norm_eps"] or 1e-5, "tie_word_embeddings": is_tied,
            "hidden_act": "silu"}  # fmt: skip

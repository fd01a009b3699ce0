"""The rows of ``MODELS``: the ways in which the decoder of an architecture differs from Llama's. Imports no torch."""

from typing import Any, NamedTuple


class Family(NamedTuple):
    """How an architecture differs from Llama's: pre-norm, gated MLP, rotary halves, full attention.

    Attributes:
        qk_norm: RMSNorm of q and k before RoPE: "head" (of each head), "full" (of all heads at once), or "".
        norms_rotated: that norm comes after RoPE.
        qkv_bias, o_bias: biases of these projections; None: as ``attention_bias`` says.
        pre_norm, post_norm: norms of the input of attention and MLP, and of their results before they are added.
        norm_offset: added to the weight of every norm.
        embed_scaled: embeddings are scaled by the square root of the hidden size.
        interleaved: RoPE rotates the pairs (2i, 2i + 1) of a head, not (i, i + r / 2) of its r rotated dimensions.
        windows: which layers slide where ``layer_types`` does not say it: "all", "late" (from ``max_window_layers``
            on), "pattern" (all but every ``sliding_window_pattern``-th), "unrotated"; "" takes no window at all.
        plain_window_rope: the scaling of RoPE is for layers without a window; layers with a window rotate by
            ``rope_local_base_freq``, if there is one, else by ``rope_theta``.
        rotates_windows_only: in a model with windows, layers without one have no RoPE.
        experts: scores of a mixture of experts: "softmax" or "sigmoid"; "": dense.
        has_correction_bias: a bias of each expert counts for the choice, and not for its weight.
        has_shared_gate: a sigmoid gate scales the shared expert.
        experts_transposed: tensors of all experts are [E, C, 2I] and [E, I, C] as published; transformers 5 writes the
            usual order, [E, 2I, C] and [E, C, I].
        gpt_oss_experts: they and their router have biases and ``reference.clamped_swiglu``; tensors of all experts
            are [E, C, 2I], gate and up taking turns, and [E, I, C], or MXFP4.
        recurrent: mixer of the layers that ``layer_types`` calls "linear_attention", a key of ``MIXERS``.
        groups_delta_inputs: the checkpoint stores the projections of a gated delta net head by head.
        sinks: each query head of a layer has a learned score that joins the sum of the softmax, and nothing else.
        output_gate: the result of attention is multiplied by the sigmoid of a gate, which ``q_proj`` has beside each
            query head.
        reads: fields of ``SWITCHES`` that this family honours.
        defaults: fields that published files leave out.
        renamed: (in the checkpoint, here) parts of tensor names, replaced in this order.
        skipped: regular expression of the names of tensors that are not part of the decoder.
    """

    qk_norm: str = ""
    norms_rotated: bool = False
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    pre_norm: bool = True
    post_norm: bool = False
    norm_offset: float = 0.0
    embed_scaled: bool = False
    interleaved: bool = False
    windows: str = ""
    plain_window_rope: bool = False
    rotates_windows_only: bool = False
    experts: str = ""
    has_correction_bias: bool = False
    has_shared_gate: bool = False
    experts_transposed: bool = False
    gpt_oss_experts: bool = False
    recurrent: str = ""
    groups_delta_inputs: bool = False
    sinks: bool = False
    output_gate: bool = False
    reads: tuple[str, ...] = ()
    defaults: dict[str, Any] = {}  # noqa: RUF012 (read only)
    renamed: tuple[tuple[str, str], ...] = ()
    skipped: str = ""


# Fields that change the numbers in some families -> values without effect. Elsewhere any other value is refused.
SWITCHES: dict[str, tuple] = {
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "partial_rotary_factor": (None, 1),
    "no_rope_layers": (None, []),
    "rope_local_base_freq": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "use_qk_norm": (None, False),
    "attention_out_bias": (None, False),
    "routed_scaling_factor": (None, 1),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
    "llama_4_scaling": (None,),
    "moe_norm_min": (None, 1e-12),
    "attention_sinks": (None, False),
    "add_cross_attention": (None, False),
    "attn_output_gate": (None, False),
    "output_gate_type": (None, "swish", "silu"),
    "layer_scale": (None, False),
    "swiglu_limit": (None,),
    "swiglu_alpha": (None, 1.702),
    "mamba_ssm_dtype": (None, "float32"),
}

# ---------------------------------------------------------------- shared by several rows

QWEN: dict[str, Any] = {
    "windows": "late", "reads": ("sliding_window", "use_sliding_window"),
    "defaults": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "vocab_size": 256_000,
    "eos_token_id": 1, "max_position_embeddings": 8192,
}  # fmt: skip
GEMMA_NORMS = (
    ("post_attention_layernorm", "mixer_post_norm"),
    ("pre_feedforward_layernorm", "post_attention_layernorm"),
    ("post_feedforward_layernorm", "mlp_post_norm"),
)
GEMMA2 = Family(
    post_norm=True, norm_offset=1.0, embed_scaled=True, windows="pattern",
    reads=("sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    defaults=GEMMA | {
        "sliding_window": 4096, "sliding_window_pattern": 2, "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "num_key_value_heads": 4,
    },
    renamed=GEMMA_NORMS,
)  # fmt: skip
GEMMA3 = Family(
    qk_norm="head", post_norm=True, norm_offset=1.0, embed_scaled=True, windows="pattern", plain_window_rope=True,
    reads=("sliding_window", "rope_local_base_freq", "query_pre_attn_scalar"),
    defaults=GEMMA | {
        "sliding_window": 4096, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    renamed=GEMMA_NORMS,
)  # fmt: skip
POST = (("post_attention_layernorm", "mixer_post_norm"), ("post_feedforward_layernorm", "mlp_post_norm"))
EPS = {"rms_norm_eps": 1e-5}
OLMO2 = Family(qk_norm="full", pre_norm=False, post_norm=True, defaults=EPS, renamed=POST)
GLM = {"partial_rotary_factor": 0.5, "head_dim": 128}
VISION: dict[str, Any] = {
    "renamed": (("language_model.", ""),), "skipped": r".*(vision_tower|multi_modal_projector|visual)\..*",
}  # fmt: skip
MIXTRAL = ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."))
CORRECTION = ".mlp.gate.e_score_correction_bias"
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MINISTRAL3 = Family(
    windows="all", reads=("sliding_window", "llama_4_scaling_beta"),
    defaults=EPS | {"head_dim": 128, "rope_parameters": MINISTRAL3_ROPE, "max_position_embeddings": 262_144,
                    "eos_token_id": 2},
)
GPT_OSS_ROPE = {
    "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "truncate": False,
}  # fmt: skip
GPT_OSS = Family(
    sinks=True, windows="pattern", experts="softmax", gpt_oss_experts=True, reads=("sliding_window", "swiglu_limit"),
    defaults=EPS | {
        "attention_bias": True, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2,
        "rope_parameters": GPT_OSS_ROPE, "max_position_embeddings": 131_072, "swiglu_limit": 7.0,
    },
    renamed=((".mlp.router.", ".mlp.gate."),),
)  # fmt: skip
QWEN3_NEXT = Family(
    qk_norm="head", norm_offset=1.0, recurrent="gated_delta_net", groups_delta_inputs=True, output_gate=True,
    reads=("partial_rotary_factor", "attn_output_gate"),
    defaults={
        "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    renamed=((".conv1d.weight", ".conv_weight"), ("in_proj_qkvz", "in_proj")), skipped=r"mtp\..*",
)
QWEN3_NEXT_MOE: dict[str, Any] = {
    "experts": "softmax", "has_shared_gate": True,
    "defaults": QWEN3_NEXT.defaults | {"shared_expert_intermediate_size": 512},
}  # fmt: skip
QWEN3_5 = QWEN3_NEXT._replace(
    groups_delta_inputs=False,
    renamed=(("language_model.", ""), (".conv1d.weight", ".conv_weight")), skipped=r"mtp\..*|model\.visual\..*"
)

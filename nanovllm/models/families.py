"""A row of ``MODELS``: the ways in which the decoder of an architecture differs from Llama's. Imports no torch."""

from collections.abc import Callable
from typing import Any, NamedTuple

from nanovllm.validation import by_field

# tensors of vision towers and projectors
TOWER = (
    r"(?:model\.)?(?:visual|vision_tower|multi_modal_projector|vision_encoder|vision_projection|mlp_AR|projector|"
    r"embed_vision|vision_embedder)\..+"
)


class Family(NamedTuple):
    """How an architecture differs from Llama's: pre-norm, gated MLP, rotary halves, full attention."""

    qk_norm: str = ""  # RMSNorm of q and k before RoPE: "head" (of each head), "full" (of all heads at once), or ""
    v_norm: bool = False  # values get an RMSNorm, each head by itself and without a weight
    qkv_bias: bool | None = None  # biases of these projections; None: as ``attention_bias`` says
    o_bias: bool | None = None  # likewise
    pre_norm: bool = True  # norms of the inputs of attention and MLP
    post_norm: bool = False  # norms of their results, before the residual addition
    norm_offset: float = 0.0  # added to the weight of every norm
    embed_scaled: bool = False  # embeddings are scaled by the square root of the hidden size
    # RoPE rotates the pairs (2i, 2i + 1) of a head, not (i, i + r / 2) of its r rotated dimensions.
    interleaved: bool = False
    # Which layers slide where ``layer_types`` does not say it: "all", "late" (from ``max_window_layers`` on), "pattern"
    # (all but every ``sliding_window_pattern``-th), "unrotated"; "" takes no window at all.
    windows: str = ""
    # The scaling of RoPE is for layers without a window; layers with a window rotate by ``rope_local_base_freq``, if
    # there is one, else by ``rope_theta``.
    plain_window_rope: bool = False
    rotates_windows_only: bool = False  # in a model with windows, layers without one have no RoPE
    ungated: bool = False  # MLPs and experts have no gate; their activation is relu(x)^2
    decoder: str = "plain"  # a key of ``DECODERS``
    sparse_mlp: str = "experts"  # MLP of the sparse layers, a key of ``MLPS``
    without_experts: "Family | None" = None  # row for the family's models without experts
    experts: str = ""  # scores of a mixture of experts: "softmax" or "sigmoid"; "": dense
    has_correction_bias: bool = False  # a bias of each expert counts for the choice, and not for its weight
    choice_eps: float = 1e-20  # added to the sum by which the weights of the chosen experts are divided
    has_shared_gate: bool = False  # a sigmoid gate scales the shared expert
    # Tensors of all experts are [E, C, 2I] and [E, I, C] as published; transformers 5 writes the usual order,
    # [E, 2I, C] and [E, C, I].
    experts_transposed: bool = False
    # Experts and router have biases and use ``reference.clamped_swiglu``; tensors of all experts are [E, C, 2I], gate
    # and up interleaved, and [E, I, C], or MXFP4.
    gpt_oss_experts: bool = False
    recurrent: str = ""  # kind of the layers with states, a key of ``RECURRENT``
    groups_delta_inputs: bool = False  # the checkpoint stores the projections of a gated delta net head by head
    # Each query head of a layer has a learned score that joins the softmax's sum and nothing else.
    sinks: bool = False
    # The result of attention is multiplied by the sigmoid of a gate, which ``q_proj`` stores next to each query head.
    output_gate: bool = False
    reads: tuple[str, ...] = ()  # fields of ``SWITCHES`` that this family honours
    # fields of this family's config.json -> the same fields under the names that other families use
    spelled: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    defaults: dict[str, Any] = {}  # noqa: RUF012 (read only)  # fields that published files leave out
    renamed: tuple[tuple[str, str], ...] = ()  # (in the checkpoint, here) parts of tensor names, replaced in this order
    skipped: str = ""  # regular expression of the names of tensors that nothing here uses
    tower: str = ""  # regular expression of the names of the vision tower's tensors; "" has none


# Fields that change the numbers, but no tensor, in some families (here or in transformers) -> values without effect. A
# missing field has no effect either. Families that do not read a field reject its other values.
SWITCHES: dict[str, tuple] = by_field(
    ("sliding_window rope_local_base_freq query_pre_attn_scalar attention_multiplier clip_qkv llama_4_scaling", ()),
    ("attn_logit_softcapping final_logit_softcapping swiglu_limit", ()),
    ("use_sliding_window use_qk_norm attention_out_bias use_bidirectional_attention attention_sinks", (False,)),
    ("use_double_wide_mlp", (False,)),
    ("global_head_dim num_global_key_value_heads", ()),
    ("per_layer_config", ({},)),
    ("add_cross_attention attn_output_gate layer_scale", (False,)),
    ("is_causal", (True,)),
    ("partial_rotary_factor embedding_multiplier residual_multiplier logits_scaling", (1,)),
    ("routed_scaling_factor n_group topk_group", (1,)),
    ("no_rope_layers", ([],)),
    ("moe_norm_min", (1e-12,)),
    ("output_gate_type", ("swish", "silu")),
    ("swiglu_alpha", (1.702,)),
    ("mamba_ssm_dtype", ("float32",)),
    ("logit_scale logits_mup_width_multiplier lm_head_multiplier scale_emb embedding_scale residual_scale", (1,)),
    ("attention_in_multiplier attention_out_multiplier key_multiplier attention_value_scale rotary_pct", (1,)),
    ("mlp_multipliers", ([1, 1],)),
    ("scale_depth logits_soft_cap output_logit_soft_cap moe_router_logit_softcapping mlp_gate_softcap", (0,)),
    ("mlp_up_softcap attention_chunk_size num_kv_shared_layers zero_expert_num hidden_size_per_layer_input", (0,)),
    ("qk_l2_clip_threshold activation_sparsity_pattern layer_rope_theta", ()),
    ("alibi parallel_attn use_parallel_residual scale_embedding mup_enabled use_cla prefix_lm is_moe", (False,)),
    ("attn_temperature_tuning attention_k_eq_v is_encoder_decoder enable_moe_block qk_layernorm", (False,)),
    ("position_embedding_type", ("rope", "absolute")),  # files of classes that do not read it say "absolute"
)

"""A row of ``MODELS``: the ways in which the decoder of an architecture differs from Llama's. Imports no torch."""

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

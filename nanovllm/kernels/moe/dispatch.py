"""A mixture of experts with the norm before it fused in.

Owns `fused_moe` and `chosen_experts`: the choice of kernels by the number of tokens. Knows nothing of layers or shards;
reference.py says what is computed.

    1 to 4     gemv.py, row by row
    5 and up   grouped_gemm.py, rows grouped by expert; in 16 bits on Hopper, from 128 rows of an expert on the mean,
               grouped_gemm_sm90.py

With e4m3 weights up to 4 tokens are multiplied in their own 16 bits (W8A16). From 5 on, on Hopper, rows are quantized
to e4m3 as well, each by itself, before both products (W8A8); elsewhere tiles of the weights are widened in registers.
MXFP4 weights, 4-bit integers and NVFP4 are widened in registers everywhere (W4A16).
The references do not quantize rows. If Triton cannot convert e4m3, or a scale's number of channels is not a multiple
of 16, all experts are dequantized at each call, which is correct but slow.
"""

import torch

from ...quantization.int4.numbers import MIN_TILE
from ..launch import has_large_shared_memory, is_sm90
from ..linear.dequantize import dequantized, has_e4m3
from ..linear.dispatch import fused_linear
from ..linear.norm import SplitKPartials, quantize_tokens, rms_norm
from ..linear.reference import Tokens, Weight
from .gemv import down_rows, gate_up_rows
from .grouped_gemm import grouped_config, grouped_gemm, scale_group, sum_rows
from .route import MAX_TOKENS_ROUTER, group_rows, route, router_partials
from .unpack import padded, reordered

try:
    from . import grouped_gemm_sm90
except ImportError:  # an untested version of Triton, see gluon_compat.py
    grouped_gemm_sm90 = None  # type: ignore[assignment]

# Measured on an H200 (docs/experiments.md, "Mixture of experts").
MAX_TOKENS_GEMV = 4
MIN_ROWS_SM90 = 128  # rows of an expert on the mean
MAX_TOKENS_FP32 = 256  # keep the experts' results in fp32 up to here; beyond, the extra bytes cost too much


def fused_moe(residual, norm_weight, eps, router_weight, correction_bias, gate_up, down, routing, slot_mapping,
              act="silu", add_residual=True, allow_split_k=False, base=None, biases=None, limit=0.0,
              shared=None, router_norm_weight=None, expert_scales=None):  # fmt: skip
    """See reference.fused_moe. May overwrite `residual`, or, with `allow_split_k`, return SplitKPartials of it.

    Rows of padding (slot -1) of the result are undefined.
    """
    num_tokens, in_fp32 = len(residual), routing.scoring == "sigmoid" or correction_bias is not None
    x, residual = residual, residual.residual if isinstance(residual, SplitKPartials) else residual
    base = residual if base is None else base
    of_router, of_gate_up, of_down = biases or (None, None, None)
    gate_up, down = usable(gate_up, residual.dtype), usable(down, residual.dtype)
    if num_tokens > 1 or in_fp32 or x is not residual or gate_up.scale is not None:
        x, norm_weight = x if norm_weight is None else rms_norm(x, norm_weight, eps), None
    # Sigmoid or biased scores are of fp32 logits, as in transformers.
    logits_dtype = torch.float32 if in_fp32 else residual.dtype
    routed, routed_norm = (x, norm_weight) if router_norm_weight is None else (residual, router_norm_weight)
    if routed_norm is not None and num_tokens > 1:
        routed, routed_norm = rms_norm(routed, routed_norm, eps), None
    has_partials = num_tokens <= MAX_TOKENS_ROUTER or (in_fp32 and routed.element_size() == 2)
    if has_partials and routed_norm is None:
        logits = router_partials(routed, router_weight, of_router)
    else:
        logits = fused_linear(routed, Weight(router_weight), of_router, routed_norm, eps)
    shared_gate = None if shared is None else (x, norm_weight if shared.gate is not None else None, eps, shared.gate)
    ids, weights = route(logits, correction_bias, routing, slot_mapping, expert_scales, logits_dtype, shared_gate)
    return chosen_experts(
        x, gate_up, down, ids, weights, act, norm_weight, eps, base if add_residual else None, allow_split_k,
        (of_gate_up, of_down), limit, shared,
    )  # fmt: skip


def chosen_experts(x, gate_up, down, ids, weights, act="silu", norm_weight=None, eps=0.0, base=None,
                   allow_split_k=False, biases=(None, None), limit=0.0, shared=None):  # fmt: skip
    """See reference.chosen_experts. May return SplitKPartials of `base` with `allow_split_k`.

    A norm, or a `shared` expert (an additional id of each token), is only allowed for the batches that gemv.py takes.
    """
    (num_tokens, num_channels), (of_gate_up, of_down) = x.shape, biases
    gate_up, down = usable(gate_up, x.dtype), usable(down, x.dtype)
    if num_tokens <= MAX_TOKENS_GEMV and act != "relu2":
        shared_gate_up, shared_down = (None, None) if shared is None else (shared.gate_up.data, shared.down.data)
        h = gate_up_rows(x, norm_weight, eps, gate_up, ids, act, of_gate_up, limit, shared_gate_up)
        return down_rows(h, down, ids, weights, base, of_down, shared_down)
    assert shared is None and norm_weight is None
    num_experts, top_k = len(gate_up.data), ids.shape[1]
    rows, counts = group_rows(ids, num_experts)
    num_units = padded(down.num_channels) if down.is_mxfp4 else down.num_channels
    h = torch.empty((num_tokens * top_k, num_units), dtype=x.dtype, device=x.device)
    multiply(tokens_for(x, gate_up), gate_up, rows, counts, h, top_k, act, bias=of_gate_up, limit=limit)
    parts_dtype = torch.float32 if num_tokens <= MAX_TOKENS_FP32 else x.dtype
    parts = torch.empty((top_k, num_tokens, num_channels), dtype=parts_dtype, device=h.device)
    h = Tokens(h, h.dtype) if down.is_mxfp4 else tokens_for(h, down)  # h is in the tiles' order already
    multiply(h, down, rows, counts, parts, top_k, weights=weights, bias=of_down)
    if base is not None and allow_split_k and num_tokens > 1:  # products of one token take a plain residual
        return SplitKPartials(base, parts)
    return sum_rows(parts, base, x.dtype)


def multiply(x, weight, rows, counts, y, top_k, act=None, weights=None, bias=None, limit=0.0):
    """See grouped_gemm_kernel of grouped_gemm.py. x: Tokens, weight: Weight."""
    num_experts, num_rows = len(weight.data), rows.shape[1] * top_k
    has_many = grouped_gemm_sm90 is not None and num_rows >= MIN_ROWS_SM90 * num_experts
    if has_many and grouped_gemm_sm90.supports(x, weight, y, bias, limit):
        return grouped_gemm_sm90.grouped_gemm(x, weight, rows, counts, y, top_k, act, weights)
    is_gated, has_large = act not in (None, "relu2"), has_large_shared_memory(y.device)
    kinds = x.scale is not None, weight.is_mxfp4, has_large, weight.has_words
    config = grouped_config(num_rows, num_experts, is_gated, *kinds)
    return grouped_gemm(config, x, weight, rows, counts, y, top_k, act, weights, bias, limit)


def takes_shared_expert(num_tokens, gate_up, shared_gate_up, routing):
    """See reference.takes_shared_expert. For more tokens a dense kernel computes it; in FP8 taking it was no faster
    (docs/experiments.md)."""
    is_alike = gate_up.data.shape[1:] == shared_gate_up.data.shape and gate_up.data.dtype == shared_gate_up.data.dtype
    has_groups = routing.top_groups < routing.num_groups
    return num_tokens <= MAX_TOKENS_GEMV and is_alike and gate_up.scale is None and not has_groups


def takes_mxfp4():
    """See reference.takes_mxfp4."""
    return True


def usable(weight, dtype):
    """The Weight as it is if the kernels can widen it, else in `dtype`."""
    if weight.scale is None or weight.is_mxfp4:
        return weight
    if not weight.has_words and scale_group(weight) % 16 == 0 and has_e4m3(weight.data.device):
        return weight
    if weight.has_words:
        return weight if weight.tile >= MIN_TILE else dequantized(weight, dtype)
    flat = Weight(weight.data.flatten(0, 1), weight.scale.flatten(0, 1))
    flat = dequantized(flat, dtype)
    return flat._replace(data=flat.data.view(weight.data.shape))


def tokens_for(x, weight):
    """Tokens of x in the form that `grouped_gemm` multiplies.

    e4m3 if the tensor cores take it, else x's dtype; with MXFP4 in the order of its tiles.
    """
    if weight.is_mxfp4:
        return Tokens(reordered(x), x.dtype)
    takes_fp8 = scale_group(weight) % 32 == 0 < scale_group(weight) and not weight.has_words
    in_fp8 = takes_fp8 and is_sm90(x.device) and x.element_size() == 2
    return quantize_tokens(x) if in_fp8 else Tokens(x, x.dtype)

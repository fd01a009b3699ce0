"""A mixture of experts with the norm before it fused in.

Owns `fused_moe`: the choice of kernels by the number of tokens. Knows nothing of layers or shards; reference.py
says what is computed.

    1 to 4     gemv.py, row by row
    5 and up   grouped_gemm.py, rows grouped by expert
"""

import torch
import torch.nn.functional as F

from ..linear.dispatch import fused_linear
from ..linear.norm import SplitKPartials, rms_norm
from ..linear.reference import Weight
from .gemv import down_rows, gate_up_rows
from .grouped_gemm import grouped_config, grouped_gemm, sum_rows
from .route import group_rows, route, router_partials

# Measured on an H200 (docs/experiments.md, "Mixture of experts").
MAX_TOKENS_GEMV = 4
MAX_TOKENS_ROUTER = 256
MAX_TOKENS_FP32 = 256  # of the experts' results; beyond, their bytes cost more than their rounding


def fused_moe(residual, norm_weight, eps, router_weight, correction_bias, gate_up, down, routing, slot_mapping,
              act="silu", add_residual=True, allow_split_k=False):  # fmt: skip
    """See reference.fused_moe. May overwrite `residual`, or return SplitKPartials of it with `allow_split_k`.

    Rows of padding (slot -1) of the result are undefined.
    """
    num_tokens, in_fp32 = len(residual), routing.scoring == "sigmoid" or correction_bias is not None
    x, residual = residual, residual.residual if isinstance(residual, SplitKPartials) else residual
    if num_tokens > 1 or in_fp32 or x is not residual:
        x, norm_weight = x if norm_weight is None else rms_norm(x, norm_weight, eps), None
    # Sigmoid or biased scores are of fp32 logits, as in transformers.
    logits_dtype = torch.float32 if in_fp32 else residual.dtype
    if num_tokens <= MAX_TOKENS_ROUTER and norm_weight is None:
        logits = router_partials(x, router_weight)
    elif in_fp32:
        logits = F.linear(x.float(), router_weight.float())
    else:
        logits = fused_linear(x, Weight(router_weight), None, norm_weight, eps)
    ids, weights = route(logits, correction_bias, routing, slot_mapping, logits_dtype)
    if num_tokens <= MAX_TOKENS_GEMV:
        h = gate_up_rows(x, norm_weight, eps, gate_up, ids, act)
        return down_rows(h, down, ids, weights, residual if add_residual else None)
    num_channels = residual.shape[1]
    num_experts, top_k = len(gate_up), routing.top_k
    rows, counts = group_rows(ids, num_experts)
    h = torch.empty((num_tokens * top_k, down.shape[2]), dtype=x.dtype, device=x.device)
    grouped_gemm(grouped_config(len(h), num_experts, True), x, gate_up, rows, counts, h, top_k, act)
    parts_dtype = torch.float32 if num_tokens <= MAX_TOKENS_FP32 else x.dtype
    parts = torch.empty((top_k, num_tokens, num_channels), dtype=parts_dtype, device=x.device)
    grouped_gemm(grouped_config(len(h), num_experts, False), h, down, rows, counts, parts, top_k, weights=weights)
    if add_residual and allow_split_k:
        return SplitKPartials(residual, parts)
    return sum_rows(parts, residual if add_residual else None, x.dtype)

"""Triton: the experts' products for few tokens, each row by itself.

Owns `gate_up_rows`, which also routes, and `down_rows`. Bound by reading the weights of the chosen experts; with few
tokens hardly two rows share one. Legend: route.py; C channels, I intermediate units of an expert.

PDL (launch.py): `gate_up_rows` signals launch_dependents only after its wait. So when a program of `down_rows` starts,
the router's logits are complete; it finds the experts itself, and requests their weights before its own wait.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from .route import rank_experts, routing_options

VECTOR = tl.constexpr(8)  # channels that a thread loads at once


@triton.jit(do_not_specialize=["num_tokens"])
def gate_up_rows_kernel(
    x_ptr,  # [T, C] contiguous, written by a kernel before
    norm_weight_ptr,  # [C], only with HAS_NORM
    weight_ptr,  # [E, 2 I, C]
    logits_ptr,  # as of `rank_experts`, written by the kernel before
    bias_ptr,
    slot_mapping_ptr,  # i32[T]
    h_ptr,  # [T * k, I], written here
    num_tokens,
    eps,
    NUM_CHANNELS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_I units of one row, all channels."""
    row = tl.program_id(1)
    token, choice = row // TOP_K, row % TOP_K
    unit = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    exists = (unit < NUM_UNITS)[:, None, None]
    c = tl.arange(0, BLOCK_C // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [BLOCK_C / V, V]
    offs = unit.to(tl.int64)[:, None, None] * NUM_CHANNELS + c[None, :, :]
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    if tl.load(slot_mapping_ptr + token) < 0:
        return
    _, ranks = rank_experts(
        logits_ptr, bias_ptr, token, num_tokens, SPLIT_K, NUM_EXPERTS, SIGMOID, HAS_BIAS, DTYPE, BLOCK_E
    )
    expert = tl.sum(tl.where(ranks == choice, tl.arange(0, BLOCK_E), 0), 0)
    expert = tl.minimum(expert, NUM_EXPERTS - 1).to(tl.int64)  # NaN logits rank all alike
    gate_ptrs = weight_ptr + expert * (2 * NUM_UNITS * NUM_CHANNELS) + offs
    up_ptrs = gate_ptrs + NUM_UNITS * NUM_CHANNELS
    x_ptrs = x_ptr + token.to(tl.int64) * NUM_CHANNELS + c
    gate = tl.zeros((BLOCK_I, BLOCK_C // VECTOR), tl.float32)
    up = tl.zeros((BLOCK_I, BLOCK_C // VECTOR), tl.float32)
    squares = tl.zeros((BLOCK_C // VECTOR,), tl.float32)
    for first in tl.static_range(0, NUM_CHANNELS, BLOCK_C):
        inside = first + c < NUM_CHANNELS
        gate_weight = tl.load(gate_ptrs + first, mask=exists & inside[None, :, :], other=0.0)
        up_weight = tl.load(up_ptrs + first, mask=exists & inside[None, :, :], other=0.0)
        x = tl.load(x_ptrs + first, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(x * x, axis=1)
            x *= tl.load(norm_weight_ptr + first + c, mask=inside, other=0.0).to(tl.float32)
        gate += tl.sum(x[None, :, :] * gate_weight.to(tl.float32), axis=2)
        up += tl.sum(x[None, :, :] * up_weight.to(tl.float32), axis=2)
    g, u = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / NUM_CHANNELS + eps)
        g, u = g * rstd, u * rstd
    h = g / (1.0 + tl.exp(-g)) * u
    tl.store(h_ptr + row.to(tl.int64) * NUM_UNITS + unit, h.to(h_ptr.dtype.element_ty), mask=unit < NUM_UNITS)


@triton.jit(do_not_specialize=["num_tokens"])
def down_rows_kernel(
    h_ptr,  # [T * k, I] contiguous, written by the kernel before
    weight_ptr,  # [E, C, I]
    logits_ptr,  # as of `rank_experts`, complete when a program starts
    bias_ptr,
    slot_mapping_ptr,  # i32[T]
    residual_ptr,  # [T, C] contiguous, only with HAS_RESIDUAL
    y_ptr,  # [T, C], written here
    num_tokens,
    routed_scale,
    NUM_CHANNELS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,  # TOP_K, up to a power of two
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N channels of one token, all its experts, all their units."""
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_K)
    i = tl.arange(0, BLOCK_I // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [BLOCK_I / V, V]
    is_live = tl.load(slot_mapping_ptr + token) >= 0
    scores, ranks = rank_experts(
        logits_ptr, bias_ptr, token, num_tokens, SPLIT_K, NUM_EXPERTS, SIGMOID, HAS_BIAS, DTYPE, BLOCK_E
    )
    is_choice = ranks[:, None] == j[None, :]  # [E, BLOCK_K]
    experts = tl.sum(tl.where(is_choice, tl.arange(0, BLOCK_E)[:, None], 0), 0)
    experts = tl.minimum(experts, NUM_EXPERTS - 1).to(tl.int64)
    shares = tl.sum(tl.where(is_choice, scores[:, None], 0.0), 0) * routed_scale
    if RENORMALIZE:
        shares = shares / (tl.sum(tl.where(ranks < TOP_K, scores, 0.0), 0) + 1e-20)
    limit = tl.where(is_live & (j < TOP_K), NUM_UNITS, 0)
    inside = i[None, :, :] < limit[:, None, None]  # [BLOCK_K, BLOCK_I / V, V]
    rows = experts[None, :] * NUM_CHANNELS + n[:, None]  # [BLOCK_N, BLOCK_K]
    weight_ptrs = weight_ptr + (rows * NUM_UNITS)[:, :, None, None] + i[None, None, :, :]
    weight = tl.load(weight_ptrs, mask=(n < NUM_CHANNELS)[:, None, None, None] & inside[None, :, :, :], other=0.0)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    h_rows = (token * TOP_K + j).to(tl.int64) * NUM_UNITS
    h = tl.load(h_ptr + h_rows[:, None, None] + i[None, :, :], mask=inside, other=0.0).to(tl.float32)
    products = tl.sum(h[None, :, :, :] * weight.to(tl.float32), axis=3)  # [BLOCK_N, BLOCK_K, BLOCK_I / V]
    y = tl.sum(tl.sum(products, axis=2) * shares[None, :], axis=1)
    offs = token.to(tl.int64) * NUM_CHANNELS + n
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + offs, mask=n < NUM_CHANNELS, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=n < NUM_CHANNELS)


def gate_up_rows(x, norm_weight, eps, weight, routed, slot_mapping, block_i=2, num_warps=8):
    """act(gate) * up of every row, [T * k, I], of [rms_norm] (x); rows of padding are left unwritten.

    routed: (logits, correction_bias, routing, dtype), as of `route`.
    """
    logits, bias, routing, _ = routed
    num_tokens, num_channels = x.shape
    num_units = weight.shape[1] // 2
    assert x.is_contiguous() and weight.is_contiguous() and logits.is_contiguous()
    h = torch.empty((num_tokens * routing.top_k, num_units), dtype=x.dtype, device=x.device)
    block_c = min(triton.next_power_of_2(num_channels), 2048)
    launch(
        gate_up_rows_kernel, (triton.cdiv(num_units, block_i), len(h)),
        x, norm_weight, weight, logits, bias, slot_mapping, h, num_tokens, eps,
        NUM_CHANNELS=num_channels, NUM_UNITS=num_units, HAS_NORM=norm_weight is not None, BLOCK_I=block_i,
        BLOCK_C=block_c, num_warps=num_warps, **routing_options(*routed), **launch_options(x.device),
    )  # fmt: skip
    return h


def down_rows(h, weight, routed, slot_mapping, residual, block_n=2, num_warps=8):
    """[residual +] sum over a token's rows of weight * down(h), [T, C]; runs after `gate_up_rows` only (PDL)."""
    logits, bias, routing, _ = routed
    num_tokens, (_, num_channels, num_units) = len(slot_mapping), weight.shape
    assert h.is_contiguous() and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    y = torch.empty((num_tokens, num_channels), dtype=h.dtype, device=h.device)
    launch(
        down_rows_kernel, (triton.cdiv(num_channels, block_n), num_tokens),
        h, weight, logits, bias, slot_mapping, residual, y, num_tokens, float(routing.routed_scale),
        NUM_CHANNELS=num_channels, NUM_UNITS=num_units, HAS_RESIDUAL=residual is not None, BLOCK_N=block_n,
        BLOCK_I=triton.next_power_of_2(num_units), BLOCK_K=triton.next_power_of_2(routing.top_k),
        num_warps=num_warps, **routing_options(*routed), **launch_options(h.device),
    )  # fmt: skip
    return y

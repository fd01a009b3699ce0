"""Triton: the experts' products for few tokens, each row by itself.

Owns `gate_up_rows` and `down_rows`. Bound by reading the weights of the chosen experts; with few tokens hardly two rows
share one. Legend: route.py; C channels, I intermediate units of an expert.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from ..linear.gemv import activate

# Channels that a thread loads at once. Vectors are the first dimension, so that neighbouring threads hold neighbouring
# vectors of x and of the weight.
VECTOR = tl.constexpr(8)


@triton.jit
def gate_up_rows_kernel(
    x_ptr,  # [T, C] contiguous, written by a kernel before
    norm_weight_ptr,  # [C], only with HAS_NORM
    weight_ptr,  # [E, 2 I, C]
    ids_ptr,  # i32[T * k], written by the kernel before
    h_ptr,  # [T * k, I], written here
    eps,
    TOP_K: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_I units of one row, all channels."""
    pdl_launch_dependents(USE_PDL)
    row = tl.program_id(1)
    local = tl.arange(0, 2 * BLOCK_I)
    unit = tl.program_id(0) * BLOCK_I + local % BLOCK_I
    feature = unit + local // BLOCK_I * NUM_UNITS  # gate, then as many of up
    exists = (unit < NUM_UNITS)[None, :, None]
    c = tl.arange(0, BLOCK_C // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [BLOCK_C / V, V]
    offs = feature.to(tl.int64)[None, :, None] * NUM_CHANNELS + c[:, None, :]  # [BLOCK_C / V, 2 BLOCK_I, V]
    x_ptrs = x_ptr + (row // TOP_K).to(tl.int64) * NUM_CHANNELS + c
    pdl_wait(USE_PDL)
    expert = tl.load(ids_ptr + row).to(tl.int64)
    if expert < 0:
        return
    weight_ptrs = weight_ptr + expert * (2 * NUM_UNITS * NUM_CHANNELS) + offs
    acc = tl.zeros((BLOCK_C // VECTOR, 2 * BLOCK_I), tl.float32)
    squares = tl.zeros((BLOCK_C // VECTOR,), tl.float32)
    for first in tl.static_range(0, NUM_CHANNELS, BLOCK_C):
        inside = first + c < NUM_CHANNELS
        weight = tl.load(weight_ptrs + first, mask=exists & inside[:, None, :], other=0.0)
        # Returns at once. ptxas moves no load across it: those of the weight are all in flight before the first is used.
        pdl_wait(USE_PDL)
        x = tl.load(x_ptrs + first, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(x * x, axis=1)
            x *= tl.load(norm_weight_ptr + first + c, mask=inside, other=0.0).to(tl.float32)
        acc += tl.sum(x[:, None, :] * weight.to(tl.float32), axis=2)
    y = tl.sum(acc, axis=0)
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / NUM_CHANNELS + eps)
    g, u = tl.split(tl.permute(tl.reshape(y, (2, BLOCK_I)), (1, 0)))
    unit = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    h = activate(g, ACT) * u
    tl.store(h_ptr + row.to(tl.int64) * NUM_UNITS + unit, h.to(h_ptr.dtype.element_ty), mask=unit < NUM_UNITS)


@triton.jit
def down_rows_kernel(
    h_ptr,  # [T * k, I] contiguous, written by the kernel before
    weight_ptr,  # [E, C, I]
    ids_ptr,  # i32[T, k]
    weights_ptr,  # fp32 [T, k]
    residual_ptr,  # [T, C] contiguous, only with HAS_RESIDUAL
    y_ptr,  # [T, C], written here
    TOP_K: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N channels of one token, all its experts, all their units."""
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = (n < NUM_CHANNELS)[None, :, None]
    i = tl.arange(0, BLOCK_I // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [BLOCK_I / V, V]
    offs = n.to(tl.int64)[None, :, None] * NUM_UNITS + i[:, None, :]  # [BLOCK_I / V, BLOCK_N, V]
    pdl_wait(USE_PDL)
    y = tl.zeros((BLOCK_I // VECTOR, BLOCK_N), tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + j).to(tl.int64)
        share = tl.load(weights_ptr + token * TOP_K + j)
        weight_ptrs = weight_ptr + expert * (NUM_CHANNELS * NUM_UNITS) + offs
        h_ptrs = h_ptr + (token * TOP_K + j) * NUM_UNITS + i
        for first in tl.static_range(0, NUM_UNITS, BLOCK_I):
            inside = i < tl.where(expert >= 0, NUM_UNITS - first, 0)
            weight = tl.load(weight_ptrs + first, mask=inside[:, None, :] & exists, other=0.0)
            pdl_wait(USE_PDL)  # as above
            h = tl.load(h_ptrs + first, mask=inside, other=0.0).to(tl.float32)
            y += tl.sum(h[:, None, :] * weight.to(tl.float32), axis=2) * share
    total = tl.sum(y, axis=0)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + token * NUM_CHANNELS + n, mask=n < NUM_CHANNELS, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * NUM_CHANNELS + n, total.to(y_ptr.dtype.element_ty), mask=n < NUM_CHANNELS)


def gate_up_rows(x, norm_weight, eps, weight, ids, act, block_i=2, num_warps=8):
    """act(gate) * up of every row, [T * k, I], of [rms_norm] (x); rows of padding are left unwritten."""
    num_tokens, num_channels = x.shape
    num_units, top_k = weight.shape[1] // 2, ids.shape[1]
    assert x.is_contiguous() and weight.is_contiguous()
    h = torch.empty((num_tokens * top_k, num_units), dtype=x.dtype, device=x.device)
    launch(
        gate_up_rows_kernel, (triton.cdiv(num_units, block_i), len(h)), x, norm_weight, weight, ids, h, eps,
        TOP_K=top_k, NUM_CHANNELS=num_channels, NUM_UNITS=num_units, HAS_NORM=norm_weight is not None,
        BLOCK_I=block_i, BLOCK_C=min(triton.next_power_of_2(num_channels), 2048), ACT=act, num_warps=num_warps,
        **launch_options(x.device),
    )  # fmt: skip
    return h


def down_rows(h, weight, ids, weights, residual, block_n=1, num_warps=1):
    """[residual +] sum over a token's rows of weight * down(h), [T, C]."""
    (num_tokens, top_k), (_, num_channels, num_units) = ids.shape, weight.shape
    assert h.is_contiguous() and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    y = torch.empty((num_tokens, num_channels), dtype=h.dtype, device=h.device)
    launch(
        down_rows_kernel, (triton.cdiv(num_channels, block_n), num_tokens),
        h, weight, ids, weights, residual, y,
        TOP_K=top_k, NUM_CHANNELS=num_channels, NUM_UNITS=num_units, HAS_RESIDUAL=residual is not None,
        BLOCK_N=block_n, BLOCK_I=min(triton.next_power_of_2(num_units), 2048),
        num_warps=num_warps, **launch_options(h.device),
    )  # fmt: skip
    return y

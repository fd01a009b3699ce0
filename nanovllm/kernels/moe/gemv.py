"""Triton: the experts' products for few tokens, each row by itself.

Owns `gate_up_rows` and `down_rows`. Bound by reading the weights of the chosen experts; with few tokens hardly two rows
share one. An e4m3 weight is multiplied as in linear/gemv.py: in fp16 on NVIDIA GPUs, where four e4m3, or two numbers of
16 bits, are loaded as an int32. Legend: route.py; C channels, I intermediate units of an expert.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from ..linear.gemv import activate, dot_fp8, load_group_scale, load_pairs, multiplies_in_fp16, unpack

# Of a program where weights are e4m3: units of gate and up, channels of down. By the bytes in flight; not measured.
FP8_UNITS = 4
FP8_CHANNELS = 4


@triton.jit
def tile_of(weight_ptr, BLOCK: tl.constexpr):
    """BLOCK channels as vectors that a thread loads at once: channels to compare with their number, and the offsets
    [V, n] of loaded numbers in a row of the weight.

    Vectors are the first dimension, so that neighbouring threads hold neighbouring vectors of x and of the weight.
    """
    if weight_ptr.dtype.element_ty == tl.int32:
        vector = tl.arange(0, BLOCK // 16)[:, None]
        return vector * 16, vector * 4 + tl.arange(0, 4)[None, :]
    else:
        c = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
        return c, c


@triton.jit
def dot_fours(x_ptr, num_channels, weight, IS_BF16: tl.constexpr):
    """Dot products fp32 [V, N] of vectors of 16 channels: x of pairs, of which num_channels are left, and e4m3 weight,
    int32 [V, N, 4] of fours.
    """
    vector = tl.arange(0, weight.shape[0])[:, None]
    pairs_1, pairs_2 = load_pairs(x_ptr, vector * 8 + tl.arange(0, 4)[None, :], vector * 16 < num_channels)
    x_0, x_1 = unpack(pairs_1, IS_BF16)
    x_2, x_3 = unpack(pairs_2, IS_BF16)
    dot, grow = dot_fp8(x_0, x_1, x_2, x_3, weight)
    return dot * grow


@triton.jit
def gate_up_rows_kernel(
    x_ptr,  # [T, C] contiguous, written by a kernel before; of pairs where the weight is of fours
    norm_weight_ptr,  # [C], only with HAS_NORM
    weight_ptr,  # [E, 2 I, C]; fours of e4m3 are int32 [E, 2 I, C / 4]
    scale_ptr,  # fp32 [E, 2 I, NUM_GROUPS], only with NUM_GROUPS
    ids_ptr,  # i32[T * k], written by the kernel before
    h_ptr,  # [T * k, I], written here
    eps,
    TOP_K: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # of channels with a scale; 0: no scales
    HAS_NORM: tl.constexpr,  # not with fours
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_I units of one row, all channels."""
    pdl_launch_dependents(USE_PDL)
    IS_FOURS: tl.constexpr = weight_ptr.dtype.element_ty == tl.int32
    PACK: tl.constexpr = 4 if IS_FOURS else 1
    VECTOR: tl.constexpr = 16 if IS_FOURS else 8
    row = tl.program_id(1)
    local = tl.arange(0, 2 * BLOCK_I)
    unit = tl.program_id(0) * BLOCK_I + local % BLOCK_I
    feature = unit + local // BLOCK_I * NUM_UNITS  # gate, then as many of up
    exists = unit < NUM_UNITS
    c, offs_c = tile_of(weight_ptr, BLOCK_C)
    # [BLOCK_C / VECTOR, 2 BLOCK_I, n]
    offs = feature.to(tl.int64)[None, :, None] * (NUM_CHANNELS // PACK) + offs_c[:, None, :]
    x_ptr += (row // TOP_K).to(tl.int64) * (NUM_CHANNELS // (2 if IS_FOURS else 1))
    x_ptrs = x_ptr + c
    pdl_wait(USE_PDL)
    expert = tl.load(ids_ptr + row).to(tl.int64)
    if expert < 0:
        return
    weight_ptrs = weight_ptr + expert * (2 * NUM_UNITS * NUM_CHANNELS // PACK) + offs
    acc = tl.zeros((BLOCK_C // VECTOR, 2 * BLOCK_I), tl.float32)
    squares = tl.zeros((BLOCK_C // VECTOR,), tl.float32)
    for first in tl.static_range(0, NUM_CHANNELS, BLOCK_C):
        inside = first + c < NUM_CHANNELS
        weight = tl.load(weight_ptrs + first // PACK, mask=exists[None, :, None] & inside[:, None, :], other=0.0)
        if NUM_GROUPS > 0:
            scale = load_group_scale(
                scale_ptr + expert * (2 * NUM_UNITS * NUM_GROUPS), feature, exists, first, NUM_CHANNELS, NUM_GROUPS,
                BLOCK_C, VECTOR,
            )  # fmt: skip
        # Returns at once. ptxas moves no load across it: all those of the weight are in flight before one is used.
        pdl_wait(USE_PDL)
        if IS_FOURS:
            dot = dot_fours(x_ptr + first // 2, NUM_CHANNELS - first, weight, h_ptr.dtype.element_ty == tl.bfloat16)
        else:
            x = tl.load(x_ptrs + first, mask=inside, other=0.0).to(tl.float32)
            if HAS_NORM:
                squares += tl.sum(x * x, axis=1)
                x *= tl.load(norm_weight_ptr + first + c, mask=inside, other=0.0).to(tl.float32)
            dot = tl.sum(x[:, None, :] * weight.to(tl.float32), axis=2)
        if NUM_GROUPS > 0:
            dot *= scale
        acc += dot
    y = tl.sum(acc, axis=0)
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / NUM_CHANNELS + eps)
    g, u = tl.split(tl.permute(tl.reshape(y, (2, BLOCK_I)), (1, 0)))
    unit = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    h = activate(g, ACT) * u
    tl.store(h_ptr + row.to(tl.int64) * NUM_UNITS + unit, h.to(h_ptr.dtype.element_ty), mask=unit < NUM_UNITS)


@triton.jit
def down_rows_kernel(
    h_ptr,  # [T * k, I] contiguous, written by the kernel before; of pairs where the weight is of fours
    weight_ptr,  # [E, C, I]; fours of e4m3 are int32 [E, C, I / 4]
    scale_ptr,  # fp32 [E, C, NUM_GROUPS], only with NUM_GROUPS
    ids_ptr,  # i32[T, k]
    weights_ptr,  # fp32 [T, k]
    residual_ptr,  # [T, C] contiguous, only with HAS_RESIDUAL
    y_ptr,  # [T, C], written here
    TOP_K: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # of units with a scale; 0: no scales
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N channels of one token, all its experts, all their units."""
    pdl_launch_dependents(USE_PDL)
    IS_FOURS: tl.constexpr = weight_ptr.dtype.element_ty == tl.int32
    PACK: tl.constexpr = 4 if IS_FOURS else 1
    VECTOR: tl.constexpr = 16 if IS_FOURS else 8
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = n < NUM_CHANNELS
    i, offs_i = tile_of(weight_ptr, BLOCK_I)
    # [BLOCK_I / VECTOR, BLOCK_N, n]
    offs = n.to(tl.int64)[None, :, None] * (NUM_UNITS // PACK) + offs_i[:, None, :]
    pdl_wait(USE_PDL)
    y = tl.zeros((BLOCK_I // VECTOR, BLOCK_N), tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + j).to(tl.int64)
        share = tl.load(weights_ptr + token * TOP_K + j)
        weight_ptrs = weight_ptr + expert * (NUM_CHANNELS * NUM_UNITS // PACK) + offs
        h_row_ptr = h_ptr + (token * TOP_K + j) * (NUM_UNITS // (2 if IS_FOURS else 1))
        h_ptrs = h_row_ptr + i
        for first in tl.static_range(0, NUM_UNITS, BLOCK_I):
            num_left = tl.where(expert >= 0, NUM_UNITS - first, 0)
            inside = i < num_left
            weight = tl.load(weight_ptrs + first // PACK, mask=inside[:, None, :] & exists[None, :, None], other=0.0)
            if NUM_GROUPS > 0:
                is_scaled = n < tl.where(expert >= 0, NUM_CHANNELS, 0)
                scale = load_group_scale(
                    scale_ptr + expert * (NUM_CHANNELS * NUM_GROUPS), n, is_scaled, first, NUM_UNITS, NUM_GROUPS,
                    BLOCK_I, VECTOR,
                )  # fmt: skip
            pdl_wait(USE_PDL)  # as above
            if IS_FOURS:
                dot = dot_fours(h_row_ptr + first // 2, num_left, weight, y_ptr.dtype.element_ty == tl.bfloat16)
            else:
                h = tl.load(h_ptrs + first, mask=inside, other=0.0).to(tl.float32)
                dot = tl.sum(h[:, None, :] * weight.to(tl.float32), axis=2)
            if NUM_GROUPS > 0:
                dot *= scale
            y += dot * share
    total = tl.sum(y, axis=0)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + token * NUM_CHANNELS + n, mask=n < NUM_CHANNELS, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * NUM_CHANNELS + n, total.to(y_ptr.dtype.element_ty), mask=n < NUM_CHANNELS)


def operands(x, weight):
    """x and the data of a Weight as the kernels take them, the scale, and the number of its groups."""
    data, scale = weight.data, weight.scale
    assert x.is_contiguous() and data.is_contiguous() and (scale is None or scale.is_contiguous())
    if multiplies_in_fp16(x, weight, None):
        x, data = x.view(torch.int32), data.view(torch.int32)
    return x, data, scale, 0 if scale is None else scale.shape[2]


def block_of(num_channels):
    return min(max(16, triton.next_power_of_2(num_channels)), 2048)


def warps_of(num_channels):
    """A thread holds a vector of 16 of a step's channels: so x and an e4m3 weight have one layout."""
    return max(1, block_of(num_channels) // 512)


def gate_up_rows(x, norm_weight, eps, weight, ids, act):
    """act(gate) * up of every row, [T * k, I], of [rms_norm] (x); rows of padding are left unwritten.

    No norm with a scale.
    """
    (num_tokens, num_channels), (num_units, top_k) = x.shape, (weight.data.shape[1] // 2, ids.shape[1])
    assert weight.scale is None or norm_weight is None
    h = torch.empty((num_tokens * top_k, num_units), dtype=x.dtype, device=x.device)
    x, data, scale, num_groups = operands(x, weight)
    block_i, num_warps = (2, 8) if scale is None else (FP8_UNITS, warps_of(num_channels))
    launch(
        gate_up_rows_kernel, (triton.cdiv(num_units, block_i), len(h)), x, norm_weight, data, scale, ids, h, eps,
        TOP_K=top_k, NUM_CHANNELS=num_channels, NUM_UNITS=num_units, NUM_GROUPS=num_groups,
        HAS_NORM=norm_weight is not None, BLOCK_I=block_i, BLOCK_C=block_of(num_channels), ACT=act,
        num_warps=num_warps, **launch_options(x.device),
    )  # fmt: skip
    return h


def down_rows(h, weight, ids, weights, residual):
    """[residual +] sum over a token's rows of weight * down(h), [T, C]."""
    (num_tokens, top_k), (_, num_channels, num_units) = ids.shape, weight.data.shape
    assert residual is None or residual.is_contiguous()
    y = torch.empty((num_tokens, num_channels), dtype=h.dtype, device=h.device)
    h, data, scale, num_groups = operands(h, weight)
    block_n, num_warps = (1, 1) if scale is None else (FP8_CHANNELS, warps_of(num_units))
    launch(
        down_rows_kernel, (triton.cdiv(num_channels, block_n), num_tokens),
        h, data, scale, ids, weights, residual, y,
        TOP_K=top_k, NUM_CHANNELS=num_channels, NUM_UNITS=num_units, NUM_GROUPS=num_groups,
        HAS_RESIDUAL=residual is not None, BLOCK_N=block_n, BLOCK_I=block_of(num_units),
        num_warps=num_warps, **launch_options(h.device),
    )  # fmt: skip
    return y

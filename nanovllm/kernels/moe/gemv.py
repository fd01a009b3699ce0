"""Triton: the experts' products for few tokens, each row by itself.

Owns `gate_up_rows` and `down_rows`. Bound by reading the weights of the chosen experts; with few tokens hardly two rows
share one. An e4m3 weight is multiplied as in linear/gemv.py: in fp16 on NVIDIA GPUs, where four e4m3, or two numbers of
16 bits, are loaded as an int32. An MXFP4 weight likewise, eight numbers an int32 (unpack.py).

Legend: route.py; C channels, I intermediate units of an expert. In 16 bits, with a shared expert of the same size, k
counts it: it is expert E, the last of each token, and its weights are tensors of their own.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from ..linear.gemv import activate, dot_fp8, load_group_scale, load_pairs, multiplies_in_fp16, unpack
from .unpack import dot_mxfp4, dot_mxfp4_plain, e8m0

# Of a program where weights are e4m3: units of gate and up, channels of down. By the bytes in flight; not measured.
FP8_UNITS = 4
FP8_CHANNELS = 4
# Where they are MXFP4; and channels (units) of a step, 32 of which a thread loads at once.
MXFP4_UNITS = 4
MXFP4_CHANNELS = 4
MXFP4_BLOCKS = 1024, 4096  # of gate and up, of down


@triton.jit
def gated(gate, up, ACT: tl.constexpr, LIMIT: tl.constexpr):
    """act(gate) * up; with LIMIT reference.clamped_swiglu. NaN stays NaN."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        return activate(gate, ACT) * up


@triton.jit
def tile_of(weight_ptr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """BLOCK channels as vectors that a thread loads at once: channels to compare with their number, and the offsets
    [V, n] of loaded numbers in a row of the weight.

    Vectors are the first dimension, so that neighbouring threads hold neighbouring vectors of x and of the weight.
    """
    if VECTOR == 32 and weight_ptr.dtype.element_ty == tl.uint8:
        vector = tl.arange(0, BLOCK // 32)[:, None]
        return vector * 32, vector * 16 + tl.arange(0, 16)[None, :]
    elif VECTOR == 32:
        vector = tl.arange(0, BLOCK // 32)[:, None]
        return vector * 32, vector * 4 + tl.arange(0, 4)[None, :]
    elif weight_ptr.dtype.element_ty == tl.int32:
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
def load_mxfp4_scale(
    scale_ptr, features, exists, first_c, num_channels, NUM_FEATURES: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Scales fp32 [BLOCK_C / 32, BLOCK_N] of the vectors from channel first_c on."""
    c = first_c + tl.arange(0, BLOCK_C // 32) * 32
    mask = (c < num_channels)[:, None] & exists[None, :]
    return e8m0(tl.load(scale_ptr + (c // 32)[:, None] * NUM_FEATURES + features[None, :], mask=mask, other=0))


@triton.jit
def gate_up_rows_kernel(
    x_ptr,  # [T, C] contiguous, written by a kernel before; of pairs where the weight is int32
    norm_weight_ptr,  # [C], only with HAS_NORM
    weight_ptr,  # [E, 2 I, C]; fours of e4m3 are int32 [E, 2 I, C / 4]; of MXFP4 uint8 [E, 2 I, C / 2] or int32
    scale_ptr,  # fp32 [E, 2 I, NUM_GROUPS], of MXFP4 uint8 [E, NUM_GROUPS, 2 I]; only with NUM_GROUPS
    bias_ptr,  # [E, 2 I] or None
    shared_ptr,  # [2 I, C], the shared expert's weight, or None
    ids_ptr,  # i32[T * k], written by the kernel before
    h_ptr,  # [T * k, I], written here
    eps,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # of channels with a scale; 0: no scales
    MXFP4: tl.constexpr,
    HAS_NORM: tl.constexpr,  # not with scales
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACT: tl.constexpr,
    LIMIT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_I units of one row, all channels."""
    pdl_launch_dependents(USE_PDL)
    IS_PAIRS: tl.constexpr = weight_ptr.dtype.element_ty == tl.int32
    IS_FOURS: tl.constexpr = IS_PAIRS and not MXFP4
    PACK: tl.constexpr = (8 if IS_PAIRS else 2) if MXFP4 else 4 if IS_FOURS else 1
    VECTOR: tl.constexpr = 32 if MXFP4 else 16 if IS_FOURS else 8
    row = tl.program_id(1)
    local = tl.arange(0, 2 * BLOCK_I)
    unit = tl.program_id(0) * BLOCK_I + local % BLOCK_I
    feature = unit + local // BLOCK_I * NUM_UNITS  # gate, then as many of up
    exists = unit < NUM_UNITS
    c, offs_c = tile_of(weight_ptr, BLOCK_C, VECTOR)
    # [BLOCK_C / VECTOR, 2 BLOCK_I, n]
    offs = feature.to(tl.int64)[None, :, None] * (NUM_CHANNELS // PACK) + offs_c[:, None, :]
    x_ptr += (row // TOP_K).to(tl.int64) * (NUM_CHANNELS // (2 if IS_PAIRS else 1))
    x_ptrs = x_ptr + c
    pdl_wait(USE_PDL)
    expert = tl.load(ids_ptr + row).to(tl.int64)
    if expert < 0:
        return
    weight_ptr += expert * (2 * NUM_UNITS * NUM_CHANNELS // PACK)
    if NUM_GROUPS > 0:
        scale_ptr += expert * (2 * NUM_UNITS * NUM_GROUPS)
    if shared_ptr is not None:
        weight_ptr = tl.where(expert == NUM_EXPERTS, shared_ptr, weight_ptr)
    weight_ptrs = weight_ptr + offs
    acc = tl.zeros((BLOCK_C // VECTOR, 2 * BLOCK_I), tl.float32)
    squares = tl.zeros((BLOCK_C // VECTOR,), tl.float32)
    for first in tl.static_range(0, NUM_CHANNELS, BLOCK_C):
        inside = first + c < NUM_CHANNELS
        weight = tl.load(weight_ptrs + first // PACK, mask=exists[None, :, None] & inside[:, None, :], other=0.0)
        if MXFP4:
            scale = load_mxfp4_scale(scale_ptr, feature, exists, first, NUM_CHANNELS, 2 * NUM_UNITS, BLOCK_C)
        elif NUM_GROUPS > 0:
            scale = load_group_scale(
                scale_ptr, feature, exists, first, NUM_CHANNELS, NUM_GROUPS, BLOCK_C, VECTOR
            )  # fmt: skip
        # Returns at once. ptxas moves no load across it: all those of the weight are in flight before one is used.
        pdl_wait(USE_PDL)
        if MXFP4 and IS_PAIRS:
            dot = dot_mxfp4(x_ptr + first // 2, NUM_CHANNELS - first, weight, h_ptr.dtype.element_ty == tl.bfloat16)
        elif MXFP4:
            dot = dot_mxfp4_plain(x_ptr + first, NUM_CHANNELS - first, weight)
        elif IS_FOURS:
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
    if bias_ptr is not None:
        y += tl.load(bias_ptr + expert * (2 * NUM_UNITS) + feature, mask=exists, other=0.0).to(tl.float32)
    g, u = tl.split(tl.permute(tl.reshape(y, (2, BLOCK_I)), (1, 0)))
    unit = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    h = gated(g, u, ACT, LIMIT)
    tl.store(h_ptr + row.to(tl.int64) * NUM_UNITS + unit, h.to(h_ptr.dtype.element_ty), mask=unit < NUM_UNITS)


@triton.jit
def down_rows_kernel(
    h_ptr,  # [T * k, I] contiguous, written by the kernel before; of pairs where the weight is int32
    weight_ptr,  # [E, C, I]; fours of e4m3 are int32 [E, C, I / 4]; of MXFP4 uint8 [E, C, I / 2] or int32
    scale_ptr,  # fp32 [E, C, NUM_GROUPS], of MXFP4 uint8 [E, NUM_GROUPS, C]; only with NUM_GROUPS
    bias_ptr,  # [E, C] or None
    shared_ptr,  # [C, I], the shared expert's weight, or None
    ids_ptr,  # i32[T, k]
    weights_ptr,  # fp32 [T, k]
    residual_ptr,  # [T, C] contiguous, only with HAS_RESIDUAL
    y_ptr,  # [T, C], written here
    TOP_K: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # of units with a scale; 0: no scales
    MXFP4: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N channels of one token, all its experts, all their units."""
    pdl_launch_dependents(USE_PDL)
    IS_PAIRS: tl.constexpr = weight_ptr.dtype.element_ty == tl.int32
    IS_FOURS: tl.constexpr = IS_PAIRS and not MXFP4
    PACK: tl.constexpr = (8 if IS_PAIRS else 2) if MXFP4 else 4 if IS_FOURS else 1
    VECTOR: tl.constexpr = 32 if MXFP4 else 16 if IS_FOURS else 8
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = n < NUM_CHANNELS
    i, offs_i = tile_of(weight_ptr, BLOCK_I, VECTOR)
    # [BLOCK_I / VECTOR, BLOCK_N, n]
    offs = n.to(tl.int64)[None, :, None] * (NUM_UNITS // PACK) + offs_i[:, None, :]
    pdl_wait(USE_PDL)
    y = tl.zeros((BLOCK_I // VECTOR, BLOCK_N), tl.float32)
    if bias_ptr is not None:
        biases = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + j).to(tl.int64)
        share = tl.load(weights_ptr + token * TOP_K + j)
        expert_ptr = weight_ptr + expert * (NUM_CHANNELS * NUM_UNITS // PACK)
        if NUM_GROUPS > 0:
            expert_scale_ptr = scale_ptr + expert * (NUM_CHANNELS * NUM_GROUPS)
        if shared_ptr is not None and j == TOP_K - 1:
            expert_ptr = shared_ptr
        weight_ptrs = expert_ptr + offs
        h_row_ptr = h_ptr + (token * TOP_K + j) * (NUM_UNITS // (2 if IS_PAIRS else 1))
        h_ptrs = h_row_ptr + i
        for first in tl.static_range(0, NUM_UNITS, BLOCK_I):
            num_left = tl.where(expert >= 0, NUM_UNITS - first, 0)
            inside = i < num_left
            weight = tl.load(weight_ptrs + first // PACK, mask=inside[:, None, :] & exists[None, :, None], other=0.0)
            if MXFP4:
                scale = load_mxfp4_scale(
                    expert_scale_ptr, n, exists, first, num_left + first, NUM_CHANNELS, BLOCK_I
                )  # fmt: skip
            elif NUM_GROUPS > 0:
                is_scaled = n < tl.where(expert >= 0, NUM_CHANNELS, 0)
                scale = load_group_scale(
                    expert_scale_ptr, n, is_scaled, first, NUM_UNITS, NUM_GROUPS, BLOCK_I, VECTOR
                )  # fmt: skip
            pdl_wait(USE_PDL)  # as above
            if MXFP4 and IS_PAIRS:
                dot = dot_mxfp4(h_row_ptr + first // 2, num_left, weight, y_ptr.dtype.element_ty == tl.bfloat16)
            elif MXFP4:
                dot = dot_mxfp4_plain(h_row_ptr + first, num_left, weight)
            elif IS_FOURS:
                dot = dot_fours(h_row_ptr + first // 2, num_left, weight, y_ptr.dtype.element_ty == tl.bfloat16)
            else:
                h = tl.load(h_ptrs + first, mask=inside, other=0.0).to(tl.float32)
                dot = tl.sum(h[:, None, :] * weight.to(tl.float32), axis=2)
            if NUM_GROUPS > 0:
                dot *= scale
            y += dot * share
        if bias_ptr is not None:
            has_bias = n < tl.where(expert >= 0, NUM_CHANNELS, 0)
            bias = tl.load(bias_ptr + expert * NUM_CHANNELS + n, mask=has_bias, other=0.0)
            biases += bias.to(tl.float32) * share
    total = tl.sum(y, axis=0)
    if bias_ptr is not None:
        total += biases
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + token * NUM_CHANNELS + n, mask=n < NUM_CHANNELS, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * NUM_CHANNELS + n, total.to(y_ptr.dtype.element_ty), mask=n < NUM_CHANNELS)


def operands(x, weight):
    """x and the data of a Weight as the kernels take them, the scale, and the number of its groups."""
    data, scale = weight.data, weight.scale
    assert x.is_contiguous() and data.is_contiguous() and (scale is None or scale.is_contiguous())
    if multiplies_in_fp16(x, weight, None):
        x, data = x.view(torch.int32), data.view(torch.int32)
    return x, data, scale, 0 if scale is None else scale.shape[1 if weight.is_mxfp4 else 2]


def tile_and_warps(weight, plain, features, mxfp4_features, mxfp4_block):
    """(output features, channels) of a program's step, and its warps; `plain`: features and warps of 16 bits."""
    block = max(16, triton.next_power_of_2(weight.num_channels))
    # A thread holds a vector of 16 or 32 of a step's channels: so x and a weight with scales have one layout.
    if weight.is_mxfp4:
        block = max(32, min(block, mxfp4_block))
        return mxfp4_features, block, max(1, block // 1024)
    block = min(block, 2048)
    return (plain[0], block, plain[1]) if weight.scale is None else (features, block, max(1, block // 512))


def gate_up_rows(x, norm_weight, eps, weight, ids, act, bias=None, limit=0.0, shared=None):
    """act(gate) * up of every row, [T * k, I], of [rms_norm] (x); rows of padding are left unwritten.

    No norm with a scale. bias [E, 2I] or None; `limit` as in reference.fused_moe; shared: the shared expert's weight.
    """
    num_tokens, num_channels = x.shape
    num_units, top_k = weight.data.shape[1] // 2, ids.shape[1]
    assert (weight.scale is None or norm_weight is None) and num_channels == weight.num_channels
    h = torch.empty((num_tokens * top_k, num_units), dtype=x.dtype, device=x.device)
    x, data, scale, num_groups = operands(x, weight)
    block_i, block_c, num_warps = tile_and_warps(weight, (2, 8), FP8_UNITS, MXFP4_UNITS, MXFP4_BLOCKS[0])
    launch(
        gate_up_rows_kernel, (triton.cdiv(num_units, block_i), len(h)), x, norm_weight, data, scale, bias,
        shared, ids, h, eps,
        TOP_K=top_k, NUM_EXPERTS=len(data), NUM_CHANNELS=num_channels, NUM_UNITS=num_units, NUM_GROUPS=num_groups,
        MXFP4=weight.is_mxfp4, HAS_NORM=norm_weight is not None, BLOCK_I=block_i, BLOCK_C=block_c, ACT=act, LIMIT=limit,
        num_warps=num_warps, **launch_options(x.device),
    )  # fmt: skip
    return h


def down_rows(h, weight, ids, weights, residual, bias=None, shared=None):
    """[residual +] sum over a token's rows of weight * (down(h) [+ bias]), [T, C]; bias [E, C]."""
    (num_tokens, top_k), num_channels, num_units = ids.shape, weight.data.shape[1], weight.num_channels
    assert residual is None or residual.is_contiguous()
    y = torch.empty((num_tokens, num_channels), dtype=h.dtype, device=h.device)
    h, data, scale, num_groups = operands(h, weight)
    block_n, block_i, num_warps = tile_and_warps(weight, (1, 1), FP8_CHANNELS, MXFP4_CHANNELS, MXFP4_BLOCKS[1])
    launch(
        down_rows_kernel, (triton.cdiv(num_channels, block_n), num_tokens),
        h, data, scale, bias, shared, ids, weights, residual, y,
        TOP_K=top_k, NUM_CHANNELS=num_channels, NUM_UNITS=num_units, NUM_GROUPS=num_groups, MXFP4=weight.is_mxfp4,
        HAS_RESIDUAL=residual is not None, BLOCK_N=block_n, BLOCK_I=block_i,
        num_warps=num_warps, **launch_options(h.device),
    )  # fmt: skip
    return y

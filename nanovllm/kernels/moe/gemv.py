"""Triton: the experts' products for few tokens, each row by itself.

Owns `gate_up_rows` and `down_rows`. Bound by reading the weights of the chosen experts; with few tokens hardly two rows
share one. An e4m3 weight is multiplied as in linear/gemv.py: in fp16 on NVIDIA GPUs, where four e4m3, or two numbers of
16 bits, are loaded as an int32. An MXFP4 weight likewise, eight numbers an int32 (unpack.py), and 4-bit integers
and NVFP4 (linear/unpack_int4.py, linear/unpack_nvfp4.py).

Legend: route.py; C channels, I intermediate units of an expert. In 16 bits, with a shared expert of the same size, k
counts it: it is expert E, the last of each token, and its weights are tensors of their own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from ..linear.gemv import activate, dot_fp8, load_pairs, multiplies_in_fp16, unpack
from ..linear.unpack_int4 import VECTOR, dot_int4, load_x, load_zero, uses_asm
from ..linear.unpack_nvfp4 import dot_nvfp4, load_vector_scales
from .unpack import dot_mxfp4, dot_mxfp4_plain, e8m0


class RowsConfig(NamedTuple):
    """How the products are cut into programs; changes only the order of summation."""

    units: int  # units per program of the first product
    vectors: int  # per step and row (a unit has two); a vector has 8 channels, in fp16 16, in 4 bits 32
    warps: int
    channels: int  # channels per program of the second product
    down_vectors: int  # vectors per step, for each channel
    down_warps: int


# By bits of a weight's number; tuned in engines of Qwen3-30B-A3B and gpt-oss-20b on an H100 (docs/experiments.md).
CONFIGS = {
    16: RowsConfig(2, 256, 8, 8, 256, 4),
    8: RowsConfig(1, 128, 4, 2, 256, 2),
    4: RowsConfig(4, 32, 1, 4, 128, 4),
}
INT4, INT4_OF_ONE_TOKEN = RowsConfig(4, 32, 1, 8, 64, 2), RowsConfig(4, 32, 1, 8, 256, 8)


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
def dot_fours(x_ptr, channel, mask, weight, IS_BF16: tl.constexpr):
    """Dot products fp32 [V, N] of vectors of 16 channels.

    x has pairs, from the even channels [V, 1] on where mask [V, 1]; the e4m3 weight, int32 [V, N, 4], has fours.
    """
    pairs_1, pairs_2 = load_pairs(x_ptr, channel // 2 + tl.arange(0, 4)[None, :], mask)
    x_0, x_1 = unpack(pairs_1, IS_BF16)
    x_2, x_3 = unpack(pairs_2, IS_BF16)
    dot, grow = dot_fp8(x_0, x_1, x_2, x_3, weight)
    return dot * grow


@triton.jit
def load_scale(
    scale_ptr, features, mask, channel,
    NUM_FEATURES: tl.constexpr, NUM_CHANNELS: tl.constexpr, NUM_GROUPS: tl.constexpr, MXFP4: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Load scales fp32 [V, N] of features [1, N] and of the vectors that begin at channel [V, 1].

    All are one expert's; with scale_ptr [V, 1] each vector has its own expert. One expert with one group gives [1, N]:
    [V, N] would take a layout that has to be converted. Scales of NVFP4 are int32 [V, N, 2].
    """
    if scale_ptr.dtype.element_ty == tl.int32:
        mask &= channel < NUM_CHANNELS
        return load_vector_scales(scale_ptr + features * NUM_GROUPS, channel, mask, TILE)
    elif MXFP4:
        mask &= channel < NUM_CHANNELS
        return e8m0(tl.load(scale_ptr + (channel // 32 * NUM_FEATURES + features), mask=mask, other=0))
    elif NUM_GROUPS == 1:
        return tl.load(scale_ptr + features, mask=mask, other=0.0)
    else:
        mask &= channel < NUM_CHANNELS
        GROUP: tl.constexpr = NUM_CHANNELS // NUM_GROUPS
        return tl.load(scale_ptr + (features * NUM_GROUPS + channel // GROUP), mask=mask, other=0.0)


@triton.jit
def gate_up_rows_kernel(
    x_ptr,  # [T, C] contiguous, written by a kernel before; pairs if the weight is int32
    norm_weight_ptr,  # [C] or None; None with scales
    weight_ptr,  # [E, 2 I, C]; fours of e4m3 are int32 [E, 2 I, C / 4]; of MXFP4 uint8 [E, 2 I, C / 2] or int32
    scale_ptr,  # fp32 or of INT4 [E, 2 I, NUM_GROUPS], of MXFP4 uint8 [E, NUM_GROUPS, 2 I]; only with NUM_GROUPS
    zero_ptr,  # int8 [E, 2 I, NUM_GROUPS] or None, of INT4
    factor_ptr,  # fp32 [E, 2 I], of NVFP4, or None; scales are then int32, and INT4 describes the words
    bias_ptr,  # [E, 2 I] or None
    shared_ptr,  # [2 I, C], the shared expert's weight, or None
    ids_ptr,  # i32[T * k], written by the kernel before
    h_ptr,  # [T * k, I], written here
    eps,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # scales per feature; 0: none
    MXFP4: tl.constexpr,
    INT4: tl.constexpr,  # the channels of a tile, or 0; the weight is int32 [E, 2 I, C / 8]
    USE_ASM: tl.constexpr,  # with INT4 only
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACT: tl.constexpr,
    LIMIT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_I units of one row, all channels."""
    pdl_launch_dependents(USE_PDL)
    IS_PAIRS: tl.constexpr = weight_ptr.dtype.element_ty == tl.int32 and INT4 == 0
    PACK: tl.constexpr = 8 if INT4 > 0 else (8 if IS_PAIRS else 2) if MXFP4 else 4 if IS_PAIRS else 1
    VECTOR: tl.constexpr = 32 if MXFP4 or INT4 > 0 else 16 if IS_PAIRS else 8
    IS_BF16: tl.constexpr = h_ptr.dtype.element_ty == tl.bfloat16
    row = tl.program_id(1)
    local = tl.arange(0, 2 * BLOCK_I)
    unit = tl.program_id(0) * BLOCK_I + local % BLOCK_I
    feature = unit + local // BLOCK_I * NUM_UNITS  # gate, then the same number of up
    exists = unit < NUM_UNITS
    channel = tl.arange(0, BLOCK_C // VECTOR)[:, None] * VECTOR  # first channel of each vector; see linear/gemv.py
    lane = tl.arange(0, VECTOR // PACK)[None, :]
    c = channel + lane if PACK == 1 else channel
    # [BLOCK_C / VECTOR, 2 BLOCK_I, VECTOR / PACK]
    offs = feature[None, :, None] * (NUM_CHANNELS // PACK) + (channel // PACK + lane)[:, None, :]
    x_ptr += (row // TOP_K).to(tl.int64) * (NUM_CHANNELS // (2 if IS_PAIRS else 1))
    pdl_wait(USE_PDL)
    expert = tl.load(ids_ptr + row).to(tl.int64)
    if expert < 0:
        return
    weight_ptr += expert * (2 * NUM_UNITS * NUM_CHANNELS // PACK)
    if NUM_GROUPS > 0:
        scale_ptr += expert * (2 * NUM_UNITS * NUM_GROUPS)
    if zero_ptr is not None:
        zero_ptr += expert * (2 * NUM_UNITS * NUM_GROUPS)
    if shared_ptr is not None:
        weight_ptr = tl.where(expert == NUM_EXPERTS, shared_ptr, weight_ptr)
    weight_ptrs = tl.max_contiguous(weight_ptr + offs, [2, 1, VECTOR // PACK])  # see linear/gemv.py
    acc = tl.zeros((BLOCK_C // VECTOR, 2 * BLOCK_I), tl.float32)
    squares = tl.zeros((BLOCK_C // VECTOR,), tl.float32)
    for first in tl.static_range(0, NUM_CHANNELS, BLOCK_C):
        inside = first + c < NUM_CHANNELS
        weight = tl.load(weight_ptrs + first // PACK, mask=exists[None, :, None] & inside[:, None, :], other=0.0)
        if NUM_GROUPS > 0:
            scale = load_scale(
                scale_ptr, feature[None, :], exists[None, :], first + channel,
                2 * NUM_UNITS, NUM_CHANNELS, NUM_GROUPS, MXFP4, INT4,
            )  # fmt: skip
        # Returns at once. ptxas moves no load across it: all loads of the weight are in flight before one is used.
        pdl_wait(USE_PDL)
        if factor_ptr is not None:
            vectors, grow, _, _ = load_x(x_ptr, None, first + channel, inside, INT4, USE_ASM)
            dot = dot_nvfp4(vectors, grow, weight, scale, USE_ASM)
        elif INT4 > 0:
            groups = feature[None, :] * NUM_GROUPS + (first + channel) // (NUM_CHANNELS // NUM_GROUPS)
            zero = load_zero(zero_ptr, groups, exists[None, :] & inside)
            vectors, grow, sums, _ = load_x(x_ptr, None, first + channel, inside, INT4, USE_ASM)
            dot = dot_int4(vectors, grow, sums, weight, zero, USE_ASM)
        elif MXFP4 and IS_PAIRS:
            dot = dot_mxfp4(x_ptr, first + channel, inside, weight, IS_BF16)
        elif MXFP4:
            dot = dot_mxfp4_plain(x_ptr, first + channel, inside, weight)
        elif IS_PAIRS:
            dot = dot_fours(x_ptr, first + channel, inside, weight, IS_BF16)
        else:
            x = tl.load(x_ptr + first + c, mask=inside, other=0.0).to(tl.float32)
            if norm_weight_ptr is not None:
                squares += tl.sum(x * x, axis=1)
                x *= tl.load(norm_weight_ptr + first + c, mask=inside, other=0.0).to(tl.float32)
            dot = tl.sum(x[:, None, :] * weight.to(tl.float32), axis=2)
        if NUM_GROUPS > 0 and factor_ptr is None:
            dot *= scale
        acc += dot
    y = tl.sum(acc, axis=0)
    if norm_weight_ptr is not None:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / NUM_CHANNELS + eps)
    if factor_ptr is not None:
        y *= tl.load(factor_ptr + expert * (2 * NUM_UNITS) + feature, mask=exists, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + expert * (2 * NUM_UNITS) + feature, mask=exists, other=0.0).to(tl.float32)
    g, u = tl.split(tl.permute(tl.reshape(y, (2, BLOCK_I)), (1, 0)))
    unit = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    h = gated(g, u, ACT, LIMIT)
    tl.store(h_ptr + row.to(tl.int64) * NUM_UNITS + unit, h.to(h_ptr.dtype.element_ty), mask=unit < NUM_UNITS)


@triton.jit
def down_rows_kernel(
    h_ptr,  # [T * k, I] contiguous, written by the kernel before; pairs if the weight is int32
    weight_ptr,  # [E, C, I]; fours of e4m3 are int32 [E, C, I / 4]; of MXFP4 uint8 [E, C, I / 2] or int32
    scale_ptr,  # fp32 or of INT4 [E, C, NUM_GROUPS], of MXFP4 uint8 [E, NUM_GROUPS, C]; only with NUM_GROUPS
    zero_ptr,  # int8 [E, C, NUM_GROUPS] or None, of INT4
    factor_ptr,  # fp32 [E, C], of NVFP4, or None; likewise
    bias_ptr,  # [E, C] or None
    shared_ptr,  # [C, I], the shared expert's weight, or None
    ids_ptr,  # i32[T, k]
    weights_ptr,  # fp32 [T, k]
    residual_ptr,  # [T, C] contiguous, or None
    y_ptr,  # [T, C], written here
    TOP_K: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # scales per channel; 0: none
    MXFP4: tl.constexpr,
    INT4: tl.constexpr,  # the units of a tile, or 0; the weight is int32 [E, C, I / 8]
    USE_ASM: tl.constexpr,  # with INT4 only
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N channels of one token. Its experts' units lie end to end, BLOCK_V vectors of them a step, so
    that the loads of all experts are in flight together."""
    pdl_launch_dependents(USE_PDL)
    IS_PAIRS: tl.constexpr = weight_ptr.dtype.element_ty == tl.int32 and INT4 == 0
    PACK: tl.constexpr = 8 if INT4 > 0 else (8 if IS_PAIRS else 2) if MXFP4 else 4 if IS_PAIRS else 1
    VECTOR: tl.constexpr = 32 if MXFP4 or INT4 > 0 else 16 if IS_PAIRS else 8
    VECTORS: tl.constexpr = (NUM_UNITS + VECTOR - 1) // VECTOR  # vectors of an expert
    IS_BF16: tl.constexpr = y_ptr.dtype.element_ty == tl.bfloat16
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = n < NUM_CHANNELS
    lane = tl.arange(0, VECTOR // PACK)[None, :]
    h_ptr += token * (TOP_K * NUM_UNITS // (2 if IS_PAIRS else 1))
    ids_ptr += token * TOP_K
    weights_ptr += token * TOP_K
    pdl_wait(USE_PDL)
    acc = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
    for first in tl.static_range(0, TOP_K * VECTORS, BLOCK_V):
        vector = first + tl.arange(0, BLOCK_V)[:, None]
        choice, unit = vector // VECTORS, vector % VECTORS * VECTOR  # [BLOCK_V, 1]
        expert = tl.load(ids_ptr + choice, mask=choice < TOP_K, other=-1).to(tl.int64)
        share = tl.load(weights_ptr + choice, mask=choice < TOP_K, other=0.0)
        expert_ptr = weight_ptr + expert * (NUM_CHANNELS * NUM_UNITS // PACK)
        if shared_ptr is not None:
            expert_ptr = tl.where(choice == TOP_K - 1, shared_ptr, expert_ptr)
        inside = (expert >= 0) & ((unit + lane if PACK == 1 else unit) < NUM_UNITS)
        # [BLOCK_V, BLOCK_N, VECTOR / PACK]
        offs = n[None, :, None] * (NUM_UNITS // PACK) + (unit // PACK + lane)[:, None, :]
        weight_ptrs = tl.max_contiguous(expert_ptr[:, None, :] + offs, [2, 1, VECTOR // PACK])  # see linear/gemv.py
        weight = tl.load(weight_ptrs, mask=inside[:, None, :] & exists[None, :, None], other=0.0)
        if NUM_GROUPS > 0:
            expert_scale_ptr = scale_ptr + expert * (NUM_CHANNELS * NUM_GROUPS)
            scale = load_scale(
                expert_scale_ptr, n[None, :], (expert >= 0) & exists[None, :], unit,
                NUM_CHANNELS, NUM_UNITS, NUM_GROUPS, MXFP4, INT4,
            )  # fmt: skip
        pdl_wait(USE_PDL)  # as above
        in_h = choice * NUM_UNITS + unit
        if factor_ptr is not None:
            vectors, grow, _, _ = load_x(h_ptr, None, in_h, inside, INT4, USE_ASM)
            is_here = (expert >= 0) & exists[None, :]
            factor = tl.load(factor_ptr + expert * NUM_CHANNELS + n[None, :], mask=is_here, other=0.0)
            dot = dot_nvfp4(vectors, grow, weight, scale, USE_ASM) * factor
        elif INT4 > 0:
            groups = (expert * NUM_CHANNELS + n[None, :]) * NUM_GROUPS + unit // (NUM_UNITS // NUM_GROUPS)
            zero = load_zero(zero_ptr, groups, inside & exists[None, :])
            vectors, grow, sums, _ = load_x(h_ptr, None, in_h, inside, INT4, USE_ASM)
            dot = dot_int4(vectors, grow, sums, weight, zero, USE_ASM)
        elif MXFP4 and IS_PAIRS:
            dot = dot_mxfp4(h_ptr, in_h, inside, weight, IS_BF16)
        elif MXFP4:
            dot = dot_mxfp4_plain(h_ptr, in_h, inside, weight)
        elif IS_PAIRS:
            dot = dot_fours(h_ptr, in_h, inside, weight, IS_BF16)
        else:
            h = tl.load(h_ptr + in_h + lane, mask=inside, other=0.0).to(tl.float32)
            dot = tl.sum(h[:, None, :] * weight.to(tl.float32), axis=2)
        if NUM_GROUPS > 0 and factor_ptr is None:
            dot *= scale
        acc += dot * share
    total = tl.sum(acc, axis=0)
    if bias_ptr is not None:
        choice = tl.arange(0, BLOCK_K)[:, None]
        expert = tl.load(ids_ptr + choice, mask=choice < TOP_K, other=-1).to(tl.int64)
        share = tl.load(weights_ptr + choice, mask=choice < TOP_K, other=0.0)
        bias = tl.load(
            bias_ptr + expert * NUM_CHANNELS + n[None, :], mask=(expert >= 0) & exists[None, :], other=0.0
        )  # fmt: skip
        total += tl.sum(bias.to(tl.float32) * share, axis=0)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + token * NUM_CHANNELS + n, mask=exists, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * NUM_CHANNELS + n, total.to(y_ptr.dtype.element_ty), mask=exists)


def operands(x, weight, num_tokens):
    """Arguments of the kernels: x, data and scale of a Weight, number of groups, channels of a vector, the config."""
    data, scale = weight.data, weight.scale
    assert x.is_contiguous() and data.is_contiguous() and (scale is None or scale.is_contiguous())
    num_groups = 0 if scale is None else scale.shape[1 if weight.is_mxfp4 else 2]
    if weight.has_words:
        assert weight.tile >= VECTOR and (weight.zero is None or weight.zero.is_contiguous())
        if weight.factor is not None:
            scale, num_groups = scale.view(torch.int32), num_groups // 4
        return x, data, scale, num_groups, VECTOR, INT4_OF_ONE_TOKEN if num_tokens == 1 else INT4
    config = CONFIGS[4 if weight.is_mxfp4 else 8 if data.element_size() == 1 else 16]
    vector = 32 if weight.is_mxfp4 else 8
    if multiplies_in_fp16(x, weight, None):
        x, data, vector = x.view(torch.int32), data.view(torch.int32), max(vector, 16)
    assert num_groups <= 1 or weight.num_channels // num_groups % vector == 0  # a vector has one scale
    return x, data, scale, num_groups, vector, config


def gate_up_rows(x, norm_weight, eps, weight, ids, act, bias=None, limit=0.0, shared=None):
    """act(gate) * up of every row, [T * k, I], of [rms_norm] (x); rows of padding are left unwritten.

    No norm with a scale. bias [E, 2I] or None; `limit` as in reference.fused_moe; shared: the shared expert's weight.
    """
    num_tokens, num_channels = x.shape
    num_units, top_k = weight.data.shape[1] // 2, ids.shape[1]
    assert (weight.scale is None or norm_weight is None) and num_channels == weight.num_channels
    h = torch.empty((num_tokens * top_k, num_units), dtype=x.dtype, device=x.device)
    x, data, scale, num_groups, vector, config = operands(x, weight, num_tokens)
    num_vectors = min(config.vectors, triton.next_power_of_2(triton.cdiv(num_channels, vector)))
    launch(
        gate_up_rows_kernel, (triton.cdiv(num_units, config.units), len(h)), x, norm_weight, data, scale,
        weight.zero, weight.factor, bias, shared, ids, h, eps,
        TOP_K=top_k, NUM_EXPERTS=len(data), NUM_CHANNELS=num_channels, NUM_UNITS=num_units, NUM_GROUPS=num_groups,
        MXFP4=weight.is_mxfp4, INT4=weight.tile if weight.has_words else 0, USE_ASM=uses_asm(h), BLOCK_I=config.units,
        BLOCK_C=num_vectors * vector,
        ACT=act, LIMIT=limit, num_warps=fitting_warps(config.warps, num_vectors), **launch_options(x.device),
    )  # fmt: skip
    return h


def down_rows(h, weight, ids, weights, residual, bias=None, shared=None):
    """[residual +] sum over a token's rows of weight * (down(h) [+ bias]), [T, C]; bias [E, C]."""
    (num_tokens, top_k), num_channels, num_units = ids.shape, weight.data.shape[1], weight.num_channels
    assert residual is None or residual.is_contiguous()
    y = torch.empty((num_tokens, num_channels), dtype=h.dtype, device=h.device)
    h, data, scale, num_groups, vector, config = operands(h, weight, num_tokens)
    num_vectors = min(config.down_vectors, triton.next_power_of_2(top_k * triton.cdiv(num_units, vector)))
    launch(
        down_rows_kernel, (triton.cdiv(num_channels, config.channels), num_tokens),
        h, data, scale, weight.zero, weight.factor, bias, shared, ids, weights, residual, y,
        TOP_K=top_k, NUM_CHANNELS=num_channels, NUM_UNITS=num_units, NUM_GROUPS=num_groups, MXFP4=weight.is_mxfp4,
        INT4=weight.tile if weight.has_words else 0, USE_ASM=uses_asm(y), BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_N=config.channels,
        BLOCK_V=num_vectors, num_warps=fitting_warps(config.down_warps, num_vectors), **launch_options(h.device),
    )  # fmt: skip
    return y


def fitting_warps(num_warps, num_vectors):
    """At most one thread for each vector of a step."""
    return max(1, min(num_warps, num_vectors // 32))

"""Triton: products with weights of 4-bit integers or NVFP4 (quantization/), and such a weight in 16 bits.

Owns `fused_linear` of these: the choice of kernel by the number of tokens, fewer than MIN_TOKENS_DENSE or not.

    1          GEMV over packed words, with norm, bias, activation and residual fused in
    2 to 64    tiles unpacked in registers; programs share the channels, and a second kernel adds their sums
    more       dequantized, then as 16 bits

Codes become numbers in registers (unpack_int4.py, unpack_nvfp4.py). Words and rows of a tile are loaded in the order
in which the tensor cores take them. Scales of integers multiply a group's sums, in fp32; integers with groups of fewer
than 32 channels are dequantized. Where a kernel has factors the weight is NVFP4: scales multiply codes, and factors a
feature's sum; rows of channels that are no multiple of 64 are dequantized.

T tokens, N output features, C input channels, G groups; I outputs: N, or N / 2 with act_mul; V vectors of a step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...quantization.int4.numbers import CODES, MIN_TILE
from ..launch import launch, launch_options, num_sms, pdl_launch_dependents, pdl_wait
from .gemv import activate, add_bias_and_activate, output_features
from .norm import SplitKPartials, rms_norm
from .reference import Weight
from .silu_and_mul import launch_by_rows
from .unpack_int4 import (
    VECTOR,
    dot_int4,
    group_of,
    in_order,
    load_x,
    load_zero,
    place_in_tile,
    unpack_tile,
    uses_asm,
)
from .unpack_nvfp4 import TILE_FACTOR, dot_nvfp4, load_vector_scales, tile_scales
from .unpack_nvfp4 import unpack_tile as unpack_nvfp4

MIN_TOKENS_DENSE = 65


@triton.jit
def load_vectors(
    words_ptr, scale_ptr, zero_ptr, place, features, exists, NUM_CHANNELS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Load words int32 [V, N, 4], scales fp32 [V, N] and zeros of the vectors from place [V, 1] on.

    Scales of NVFP4 are int32 [V, N, 2]; zeros then have no meaning.
    """
    mask = (place < NUM_CHANNELS) & exists[None, :]
    offs = features[None, :, None] * (NUM_CHANNELS // 8) + (place // 8 + tl.arange(0, 4)[None, :])[:, None, :]
    words_ptrs = tl.max_contiguous(words_ptr + offs, [2, 1, 4])  # see gemv.py
    words = tl.load(words_ptrs, mask=mask[:, :, None], other=0)
    if scale_ptr.dtype.element_ty == tl.int32:
        scale = load_vector_scales(scale_ptr + features[None, :] * (NUM_CHANNELS // 64), place, mask, TILE)
        return words, scale, load_zero(None, place, mask)
    else:
        group = features[None, :] * NUM_GROUPS + place // (NUM_CHANNELS // NUM_GROUPS)
        scale = tl.load(scale_ptr + group, mask=mask, other=0.0).to(tl.float32)
        return words, scale, load_zero(zero_ptr, group, mask)


@triton.jit
def int4_gemv_kernel(
    x_ptr,  # [1, C], written by the kernel before
    words_ptr,  # int32 [N, C / 8]
    scale_ptr,  # [N, G]
    zero_ptr,  # int8 [N, G] or None
    factor_ptr,  # fp32 [N], of NVFP4, or None; scales are then int32 [N, C / 64]
    bias_ptr,  # [N] or None
    norm_weight_ptr,  # [C] or None
    residual_ptr,  # [1, I] or None
    y_ptr,  # [1, I], written here
    num_outputs,
    eps,
    NUM_CHANNELS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    ACT_MUL: tl.constexpr,  # "silu", "gelu_tanh" or None
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    USE_ASM: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N output features at a time, all channels, BLOCK_V vectors a step.

    The words of the next step, or of the next features, are in flight during this one. If one step covers all channels,
    x stays in registers.
    """
    pdl_launch_dependents(USE_PDL)
    BLOCK_I: tl.constexpr = BLOCK_N // 2 if ACT_MUL is not None else BLOCK_N
    STEPS: tl.constexpr = (NUM_CHANNELS + BLOCK_V * 32 - 1) // (BLOCK_V * 32)
    place = tl.arange(0, BLOCK_V)[:, None] * 32
    features, exists = output_features(tl.program_id(0), num_outputs, ACT_MUL, BLOCK_N)
    words, scale, zero = load_vectors(
        words_ptr, scale_ptr, zero_ptr, place, features, exists, NUM_CHANNELS, NUM_GROUPS, TILE
    )
    pdl_wait(USE_PDL)
    if STEPS == 1:
        x, grow, sums, squares = load_x(x_ptr, norm_weight_ptr, place, place < NUM_CHANNELS, TILE, USE_ASM)
    for tile in range(tl.program_id(0), tl.cdiv(num_outputs, BLOCK_I), tl.num_programs(0)):
        features, exists = output_features(tile, num_outputs, ACT_MUL, BLOCK_N)
        acc = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
        total_squares = tl.zeros((BLOCK_V, 1), tl.float32)
        if factor_ptr is not None:
            factor = tl.load(factor_ptr + features, mask=exists, other=0.0)
        for step in range(STEPS):  # not unrolled: all loads would move up, and take more registers than there are
            step_words, step_scale, step_zero = words, scale, zero
            next_tile = tl.where(step + 1 < STEPS, tile, tile + tl.num_programs(0))
            next_place = tl.where(step + 1 < STEPS, step + 1, 0) * (BLOCK_V * 32) + place
            next_features, next_exists = output_features(next_tile, num_outputs, ACT_MUL, BLOCK_N)
            words, scale, zero = load_vectors(
                words_ptr, scale_ptr, zero_ptr, next_place, next_features, next_exists, NUM_CHANNELS, NUM_GROUPS,
                TILE,
            )
            if STEPS > 1:
                here = step * (BLOCK_V * 32) + place
                x, grow, sums, squares = load_x(x_ptr, norm_weight_ptr, here, here < NUM_CHANNELS, TILE, USE_ASM)
            if factor_ptr is not None:
                acc += dot_nvfp4(x, grow, step_words, step_scale, USE_ASM)
            else:
                acc += dot_int4(x, grow, sums, step_words, step_zero, USE_ASM) * step_scale
            total_squares += squares
        y = tl.sum(acc, axis=0)
        if norm_weight_ptr is not None:
            y *= tl.rsqrt(tl.sum(total_squares) / NUM_CHANNELS + eps)
        if factor_ptr is not None:
            y *= factor
        y = add_bias_and_activate(y, bias_ptr, features, exists, ACT_MUL)
        offs_i = tile * BLOCK_I + tl.arange(0, BLOCK_I)
        if residual_ptr is not None:
            y += tl.load(residual_ptr + offs_i, mask=offs_i < num_outputs, other=0.0).to(tl.float32)
        tl.store(y_ptr + offs_i, y.to(y_ptr.dtype.element_ty), mask=offs_i < num_outputs)


@triton.jit
def load_halves(
    scale_ptrs, zero_ptr, zero_offs, channel, GROUP: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Load scales and zeros of the tile at a channel, and with PAIRS of the next tile too.

    Scales of NVFP4 are int16 [N, TILE / 8]; it has no zeros.
    """
    group = channel // GROUP
    if scale_ptrs.dtype.element_ty == tl.int16:
        scale = tl.load(scale_ptrs + channel // 32)
        return scale, zero_offs, tl.load(scale_ptrs + (channel + TILE) // 32) if PAIRS else scale, zero_offs
    elif PAIRS and GROUP < 2 * TILE:
        scale, zero = tl.load(scale_ptrs + group), load_zero(zero_ptr, zero_offs + group, zero_offs >= 0)
        group = (channel + TILE) // GROUP
        return scale, zero, tl.load(scale_ptrs + group), load_zero(zero_ptr, zero_offs + group, zero_offs >= 0)
    else:
        scale, zero = tl.load(scale_ptrs + group), load_zero(zero_ptr, zero_offs + group, zero_offs >= 0)
        return scale, zero, scale, zero


@triton.jit
def dot_tile(
    x, words, zero, WARPS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, USE_ASM: tl.constexpr
):  # fmt: skip
    """Products fp32 [N, M] of the words int32 [N, TILE / 8] of a tile with x [M, TILE]. The weight is in registers."""
    weight = in_order(unpack_tile(words, zero, x.dtype, USE_ASM), WARPS, TILE)
    return tl.dot(weight, tl.trans(x), input_precision=PRECISION)


@triton.jit
def add_tile(
    acc, x, words, scale, zero, WARPS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
    USE_ASM: tl.constexpr,
):  # fmt: skip
    """acc + the products of `dot_tile`, scaled: scales of integers [N], of NVFP4 int16 [N, TILE / 8]."""
    if scale.dtype == tl.int16:
        weight = in_order(unpack_nvfp4(words, scale, x.dtype, USE_ASM), WARPS, TILE)
        # The factor is here to keep acc out of the product, where ptxas would wait for each wgmma of the tile.
        return acc + tl.dot(weight, tl.trans(x), input_precision=PRECISION) * TILE_FACTOR
    else:
        return acc + dot_tile(x, words, zero, WARPS, TILE, PRECISION, USE_ASM) * scale.to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def int4_gemm_kernel(
    x_ptr,  # [T, C] contiguous, written by the kernel before
    words_ptr,  # int32 [N, C / 8]
    scale_ptr,  # [N, G]
    zero_ptr,  # int8 [N, G] or None
    factor_ptr,  # fp32 [N], of NVFP4, or None; scales are then int16 [N, K / 32]
    parts_ptr,  # fp32 [SPLIT_K, T, N], written here
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,  # a step has two tiles: 128 bytes of a row are read at once
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_ASM: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N features of BLOCK_M tokens, every SPLIT_K-th step of channels.

    The weight is operand A: wgmma takes its 64 rows from registers.
    """
    pdl_launch_dependents(USE_PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    TILES: tl.constexpr = 2 if PAIRS else 1
    k, word = tl.arange(0, TILE), tl.arange(0, TILES * TILE // 8)
    # rows beyond the last feature repeat earlier ones and are not stored
    row = (tl.program_id(0) * BLOCK_N + place_in_tile(tl.arange(0, BLOCK_N), WARPS)) % N
    words_ptrs = words_ptr + row.to(tl.int64)[:, None] * (K // 8) + word[None, :]
    x_ptrs = x_ptr + (m % num_tokens).to(tl.int64)[:, None] * K + k[None, :]
    if factor_ptr is not None:
        offs = row[:, None] * (K // 32) + tile_scales(TILE // 8, TILE)[None, :]
        scale_ptrs, zero_offs = scale_ptr + tl.max_contiguous(offs, [1, TILE // 32]), row
    else:
        scale_ptrs, zero_offs = scale_ptr + n % N * (K // GROUP), row * (K // GROUP)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    STEP: tl.constexpr = SPLIT_K * TILES * TILE
    first = tl.program_id(1) * (TILES * TILE)
    halves = load_halves(scale_ptrs, zero_ptr, zero_offs, first, GROUP, TILE, PAIRS)
    pdl_wait(USE_PDL)
    for step in range(first, K, STEP):
        # Triton's pipeline takes no load below 4 bytes: the next step's are in flight during this one.
        scale, zero, more_scale, more_zero = halves
        following = tl.minimum(step + STEP, K - TILES * TILE)
        x, words = tl.load(x_ptrs + step), tl.load(words_ptrs + step // 8)
        if PAIRS:
            more_x = tl.load(x_ptrs + step + TILE)
            words, more_words = tl.split(words.reshape((BLOCK_N, 2, TILE // 8)).permute((0, 2, 1)))
        halves = load_halves(scale_ptrs, zero_ptr, zero_offs, following, GROUP, TILE, PAIRS)
        acc = add_tile(acc, x, words, scale, zero, WARPS, TILE, PRECISION, USE_ASM)
        if PAIRS:
            acc = add_tile(acc, more_x, more_words, more_scale, more_zero, WARPS, TILE, PRECISION, USE_ASM)
    if factor_ptr is not None:
        acc *= tl.load(factor_ptr + n % N)[:, None]
    parts_ptrs = parts_ptr + (tl.program_id(1).to(tl.int64) * num_tokens + m)[:, None] * N + n[None, :]
    tl.store(parts_ptrs, tl.trans(acc), mask=(m < num_tokens)[:, None] & (n < N)[None, :])


@triton.jit
def load_sums(parts_ptr, bias_ptr, column, mask, stride, SPLIT_K: tl.constexpr):
    """Sum a column of the fp32 parts [SPLIT_K, *], which lie `stride` apart, and the bias."""
    total = tl.zeros(column.shape, tl.float32)
    for i in tl.static_range(SPLIT_K):
        total += tl.load(parts_ptr + i * stride + column, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def sum_parts_kernel(
    y_ptr,  # [T, I] contiguous, written here
    parts_ptr,  # fp32 [SPLIT_K, T, N], written by the kernel before
    bias_ptr,  # [N] or None
    residual_ptr,  # [T, I], tokens strided, or None
    residual_stride,
    num_tokens,
    num_outputs,
    SPLIT_K: tl.constexpr,
    ACT_MUL: tl.constexpr,  # "silu", "gelu_tanh" or None
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, num_features = column < num_outputs, num_outputs if ACT_MUL is None else 2 * num_outputs
    parts_ptr, stride = parts_ptr + token * num_features, num_tokens.to(tl.int64) * num_features
    y = load_sums(parts_ptr, bias_ptr, column, mask, stride, SPLIT_K)
    if ACT_MUL is not None:
        y = activate(y, ACT_MUL) * load_sums(parts_ptr, bias_ptr, num_outputs + column, mask, stride, SPLIT_K)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + token * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * num_outputs + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def int4_dequantize_kernel(
    words_ptr,  # int32 [N, C / 8]
    scale_ptr,  # [N, G]
    zero_ptr,  # int8 [N, G] or None
    factor_ptr,  # fp32 [N], of NVFP4, or None; scales are then int16 [N, C / 32]
    y_ptr,  # [N, C], written here
    num_words,
    num_groups,
    TILE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    USE_ASM: tl.constexpr,  # with factors only
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_W words of an output feature. A product with the scale, or the factor, is rounded once."""
    pdl_launch_dependents(USE_PDL)
    feature = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = w < num_words
    words = tl.load(words_ptr + feature * num_words + w, mask=mask, other=0)
    if factor_ptr is not None:
        offs = w // (TILE // 8) * (TILE // 32) + w % (TILE // 32)
        scale = tl.load(scale_ptr + feature * (num_words // 4) + offs, mask=mask, other=0)
        dtype: tl.constexpr = y_ptr.dtype.element_ty
        numbers = unpack_nvfp4(words[None, :], scale[None, :], dtype, USE_ASM).to(tl.float32)
        numbers = (numbers * (tl.load(factor_ptr + feature) * TILE_FACTOR)).to(dtype)
        numbers = numbers.reshape((BLOCK_W * 8 // TILE, 4, TILE // 32, 4, 2)).permute((0, 2, 3, 1, 4))
    else:
        group = feature * num_groups + w // (num_words // num_groups)
        scale = tl.load(scale_ptr + group, mask=mask, other=0.0).to(tl.float32)
        zero = load_zero(zero_ptr, group, mask)
        codes = (words[:, None] >> (tl.arange(0, 8) * 4)[None, :]) & 15
        numbers = ((codes - zero[:, None]).to(tl.float32) * scale[:, None]).to(y_ptr.dtype.element_ty)
        if TILE >= 32:  # from the order of words to that of channels
            numbers = numbers.reshape((BLOCK_W * 8 // TILE, 4, TILE // 32, 2, 4)).permute((0, 2, 4, 1, 3))
    channel = tl.program_id(1) * (BLOCK_W * 8) + tl.arange(0, BLOCK_W * 8)
    pdl_wait(USE_PDL)  # the output may reuse memory that the kernel before reads
    y_ptrs = y_ptr + feature * (num_words * 8) + channel
    tl.store(y_ptrs, numbers.reshape((BLOCK_W * 8,)), mask=channel < num_words * 8)


def arguments(weight, dtype=torch.int16):
    """Words, scale, zero and factor of a Weight; scales of NVFP4 in words of `dtype`."""
    tensors = weight.data, weight.scale, weight.zero, weight.factor
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return tensors if weight.factor is None else (weight.data, weight.scale.view(dtype), None, weight.factor)


def dequantized(weight, dtype):
    """The Weight in 16 bits; also that of all experts."""
    num_words, num_groups = weight.data.shape[-1], weight.scale.shape[-1]
    if weight.factor is not None and weight.tile < MIN_TILE:
        return Weight(weight.dequantize(dtype), is_temporary=True)  # by torch: no model has such rows
    shape = (*weight.data.shape[:-1], num_words * CODES)
    y = torch.empty(shape, dtype=dtype, device=weight.data.device)
    block_w = min(512, max(weight.tile // CODES, triton.next_power_of_2(num_words)))
    launch(
        int4_dequantize_kernel, (weight.data.numel() // num_words, triton.cdiv(num_words, block_w)),
        *arguments(weight), y, num_words, num_groups, TILE=weight.tile, BLOCK_W=block_w,
        USE_ASM=uses_asm(y), num_warps=max(1, block_w // 128),
        **launch_options(y.device),
    )  # fmt: skip
    return Weight(y, is_temporary=True)


class Int4GemvConfig(NamedTuple):
    """How an INT4 GEMV is cut into programs."""

    block_n: int  # output features
    block_v: int  # vectors of a step
    num_warps: int
    num_programs: int


class Int4GemmConfig(NamedTuple):
    """How an INT4 GEMM is cut into programs."""

    block_m: int  # tokens of a program
    block_n: int  # output features, 16 for each warp
    num_warps: int
    num_stages: int
    split_k: int  # programs that share the channels
    pairs: bool  # two tiles a step


# Swept on an H100 over the layers of Qwen3-8B and 32B (docs/experiments.md, "Four bits").


def gemv_config(num_features, num_channels, sms):
    num_vectors, num_tiles = num_channels // VECTOR, triton.cdiv(num_features, 8)
    if num_vectors <= 128:  # one step, so x stays in registers
        block_v = max(32, triton.next_power_of_2(num_vectors))
        num_warps = block_v // 32
        is_one_wave = num_tiles * num_warps <= 16 * sms
        return Int4GemvConfig(8, block_v, num_warps, num_tiles if is_one_wave else 12 // num_warps * sms)
    for block_v in (128, 64, 32):
        idle = triton.cdiv(num_vectors, block_v) * block_v - num_vectors
        if idle <= 0.3 * num_vectors and num_tiles * (block_v // 32) <= 16 * sms:  # all programs run at once
            return Int4GemvConfig(8, block_v, block_v // 32, num_tiles)
    return Int4GemvConfig(16, 64, 2, 4 * sms)


def nvfp4_gemv_config(num_features, num_channels, sms):
    """Measured on an H200 over the layers of Qwen3-8B. A thread takes 128 registers, so 16 warps run on an SM; with 8
    features it would take 168 where each step loads x again.
    """
    num_vectors, num_tiles = num_channels // VECTOR, triton.cdiv(num_features, 8)
    if num_vectors <= 128:  # one step
        block_v = max(32, triton.next_power_of_2(num_vectors))
        num_warps = block_v // 32
        return Int4GemvConfig(8, block_v, num_warps, min(num_tiles, 16 // num_warps * sms))
    idle = {block_v: triton.cdiv(num_vectors, block_v) * block_v - num_vectors for block_v in (128, 64, 32)}
    block_v = next(block_v for block_v in idle if idle[block_v] <= 0.3 * num_vectors)
    num_tiles, num_programs = triton.cdiv(num_features, 4), 16 // (block_v // 32) * sms
    return Int4GemvConfig(4, block_v, block_v // 32, num_tiles if num_tiles <= 2 * num_programs else num_programs)


def gemm_config(num_tokens, num_features, num_steps, sms):
    block_m, block_n = min(64, max(16, triton.next_power_of_2(num_tokens))), 64
    num_tiles = triton.cdiv(num_features, block_n)
    # With more tokens, partial sums take more time.
    split_k = max(1, min(8, num_steps // 4, 128 // block_m * sms // num_tiles))
    split_k = 1 << split_k.bit_length() - 1
    pairs = block_m <= 32 and num_steps % 2 == 0 and num_steps >= 8 * split_k
    return Int4GemmConfig(block_m, block_n, 4, 3, split_k, pairs)


def int4_gemv(x, weight, bias, norm_weight, eps, residual, act_mul):
    """reference.fused_linear of one token, x [1, C]."""
    num_features, num_channels = len(weight.data), weight.num_channels
    assert x.shape == (1, num_channels) and x.stride(1) == 1
    num_outputs = num_features // 2 if act_mul else num_features
    y = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    choose = gemv_config if weight.factor is None else nvfp4_gemv_config
    config = choose(num_features, num_channels, num_sms(x.device))
    launch(
        int4_gemv_kernel, (config.num_programs,),
        x, *arguments(weight, torch.int32), bias, norm_weight, residual, y, num_outputs, eps,
        NUM_CHANNELS=num_channels, NUM_GROUPS=weight.scale.shape[1], TILE=weight.tile, ACT_MUL=act_mul,
        BLOCK_N=config.block_n, BLOCK_V=config.block_v, USE_ASM=uses_asm(x), num_warps=config.num_warps,
        **launch_options(x.device),
    )  # fmt: skip
    return y


def int4_gemm(x, weight):
    """fp32 partial sums [S, T, N] of x W^T, x [T, C] of 1 to 64 tokens."""
    (num_tokens, num_channels), num_features = x.shape, len(weight.data)
    x = x.contiguous()
    config = gemm_config(num_tokens, num_features, num_channels // weight.tile, num_sms(x.device))
    grid = triton.cdiv(num_features, config.block_n), config.split_k, triton.cdiv(num_tokens, config.block_m)
    parts = torch.empty((config.split_k, num_tokens, num_features), dtype=torch.float32, device=x.device)
    launch(
        int4_gemm_kernel, grid, x, *arguments(weight), parts, num_tokens, N=num_features, K=num_channels,
        GROUP=group_of(weight), TILE=weight.tile, PAIRS=config.pairs, SPLIT_K=config.split_k, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, WARPS=config.num_warps, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        USE_ASM=uses_asm(x), num_warps=config.num_warps, num_stages=config.num_stages if x.element_size() == 2 else 2,
        **launch_options(x.device),
    )  # fmt: skip
    return parts


def sum_parts(parts, bias, residual, act_mul, dtype):
    """[residual +] [act_and_mul] (parts.sum(0) [+ bias]), [T, I], in `dtype`; parts fp32 [S, T, N]."""
    split_k, num_tokens, num_features = parts.shape
    num_outputs = num_features // 2 if act_mul else num_features
    y = torch.empty((num_tokens, num_outputs), dtype=dtype, device=parts.device)
    launch_by_rows(
        sum_parts_kernel, num_outputs, y, parts, bias, residual, 0 if residual is None else residual.stride(0),
        num_tokens, num_outputs, SPLIT_K=split_k, ACT_MUL=act_mul,
    )  # fmt: skip
    return y


def multiplies(num_tokens, weight):
    """Whether a kernel multiplies the packed words by this number of tokens, without dequantizing the weight."""
    return 1 <= num_tokens < MIN_TOKENS_DENSE and weight.tile >= MIN_TILE


def fused_linear(x, weight, bias=None, norm_weight=None, eps=0.0, residual=None, act_mul=None, allow_split_k=False):
    """See reference.fused_linear; for numbers of tokens that `multiplies` accepts."""
    if isinstance(residual, SplitKPartials):
        residual = residual.residual
    if isinstance(x, SplitKPartials) or (norm_weight is not None and (len(x) > 1 or weight.order is not None)):
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if len(x) == 1:
        return int4_gemv(x, weight, bias, norm_weight, eps, residual, act_mul)
    parts = int4_gemm(x, weight)
    if allow_split_k and residual is not None and bias is act_mul is None:
        return SplitKPartials(residual, parts)
    return sum_parts(parts, bias, residual, act_mul, x.dtype)

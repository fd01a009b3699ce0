"""Triton: the experts' products for many tokens, rows grouped by expert.

Owns `grouped_gemm` and its tiles, and `sum_rows`, which adds a token's rows. Legend: route.py; C channels,
I intermediate units.

The grid is fixed by the number of tokens (CUDA graphs): split_m programs share the row tiles of an expert and of a
tile of its weight; those that find no rows return. Programs that share a weight tile are neighbours: it is read once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import has_large_shared_memory, launch, launch_options, pdl_launch_dependents, pdl_wait
from ..linear.unpack_int4 import in_order, load_zero, place_in_tile, uses_asm
from ..linear.unpack_int4 import unpack_tile as unpack_int4
from ..linear.unpack_nvfp4 import TILE_FACTOR, tile_scales
from ..linear.unpack_nvfp4 import unpack_tile as unpack_nvfp4
from .gemv import gated
from .unpack import column_of, load_scales, unpack_tile

SMALL_BYTES = 96 << 10  # for the tiles of all steps in flight, on devices with 99 KB of shared memory per program


@triton.jit
def load_weight(ptrs, step, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    if K % BLOCK_K == 0:
        return tl.load(ptrs + step)
    else:
        return tl.load(ptrs + step, mask=(step + k < K)[None, :], other=0.0)


@triton.jit
def load_tile(
    ptrs, scale_ptr, zero_ptr, rows, step, k, K: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    INT4: tl.constexpr, DTYPE: tl.constexpr, WARPS: tl.constexpr, USE_ASM: tl.constexpr,
):  # fmt: skip
    """Load a weight's tile [BLOCK_N, BLOCK_K]; of 4-bit integers or NVFP4 in DTYPE, from the words of rows [BLOCK_N].

    NVFP4 has no GROUP, because its scales multiply the codes here.
    """
    if INT4 and GROUP == 0:
        offs = rows[:, None] * (K // 32) + tile_scales(BLOCK_K // 8, BLOCK_K)[None, :]
        scale = tl.load(scale_ptr + tl.max_contiguous(offs, [1, BLOCK_K // 32]) + step // 32)
        words = tl.load(ptrs + step // 8)
        return in_order(unpack_nvfp4(words, scale, DTYPE, USE_ASM), WARPS, BLOCK_K)
    elif INT4:
        zero = load_zero(zero_ptr, rows * (K // GROUP) + step // GROUP, rows >= 0)
        words = tl.load(ptrs + step // 8)
        return in_order(unpack_int4(words, zero, DTYPE, USE_ASM), WARPS, BLOCK_K)
    else:
        return load_weight(ptrs, step, k, K, BLOCK_K)


@triton.jit
def load_scale(scale_ptr, features, step, K: tl.constexpr, GROUP: tl.constexpr):
    """Scales [BLOCK_N] of a loop step's channels, all of one group."""
    if GROUP > 0:
        return tl.load(scale_ptr + features * (K // GROUP) + step // GROUP)
    else:
        return 1.0


@triton.jit
def dot_tile(
    x, weight, scale, acc, GROUP: tl.constexpr, SWAP_AB: tl.constexpr, PRECISION: tl.constexpr, NVFP4: tl.constexpr
):  # fmt: skip
    """acc + x weight^T, [BLOCK_M, BLOCK_N]; transposed with SWAP_AB: wgmma takes 64 rows, and the weight has them.

    With GROUP the weight is widened, unless x is e4m3 too, and a step's sum is scaled before it is added in fp32.
    """
    if NVFP4:  # as in ../linear/int4.py
        return acc + tl.dot(weight, tl.trans(x), input_precision=PRECISION) * TILE_FACTOR
    elif GROUP == 0:
        if SWAP_AB:
            return tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
        else:
            return tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
    elif SWAP_AB:
        return acc + tl.dot(weight.to(x.dtype), tl.trans(x), input_precision=PRECISION) * scale[:, None]
    else:
        return acc + tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision=PRECISION) * scale[None, :]


@triton.jit
def dot_mxfp4(x, words, scale, acc, WARPS: tl.constexpr, PRECISION: tl.constexpr, USE_ASM: tl.constexpr):
    """acc + weight x^T of a step's channels, [BLOCK_N, BLOCK_M]: the unpacked weight stays in registers."""
    weight = in_order(unpack_tile(words, scale, x.dtype, USE_ASM), WARPS)
    return tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens", "split_m"])
def grouped_gemm_kernel(
    x_ptr,  # [*, X_CHANNELS] contiguous, written by a kernel before
    x_scale_ptr,  # fp32 [*], only where x is e4m3
    weight_ptr,  # [E, N, K]; with GATED [E, 2 N, K], gate before up features; of MXFP4 and INT4 int32, K / 8
    scale_ptr,  # fp32 or of INT4 [E, N or 2 N, K / GROUP], of MXFP4 int32 [E, K / 32, N / 4 or N / 2]; with GROUP
    zero_ptr,  # int8 [E, N or 2 N, K / GROUP] or None, of INT4
    factor_ptr,  # fp32 [E, N or 2 N], of NVFP4, or None; scales are then int16 [E, N or 2 N, K / 32]
    bias_ptr,  # [E, N or 2 N] or None
    rows_ptr,  # i32[E, T]
    counts_ptr,  # i32[E]
    weights_ptr,  # fp32 [T * k], not with OF_TOKENS
    y_ptr,  # with OF_TOKENS [T * k, Y_CHANNELS], else [k, T, N]; written here
    num_tokens,
    split_m,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    X_CHANNELS: tl.constexpr,  # K; of MXFP4 see `reordered`
    Y_CHANNELS: tl.constexpr,  # N; of MXFP4, with GATED, likewise
    GROUP: tl.constexpr,  # channels of a scale of the weight, a multiple of BLOCK_K, or all; 0: no scales
    MXFP4: tl.constexpr,
    INT4: tl.constexpr,
    USE_ASM: tl.constexpr,  # with MXFP4 and INT4
    ACT: tl.constexpr,  # with OF_TOKENS
    LIMIT: tl.constexpr,  # with GATED
    OF_TOKENS: tl.constexpr,  # x is [T, K], the result an activation; else x is [T * k, K], the result weight * y
    GATED: tl.constexpr,  # the activation is act(gate) * up; else it is relu(x)^2
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP_AB: tl.constexpr,  # always with MXFP4 and INT4
    WARPS: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_launch_dependents(USE_PDL)
    expert = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) % split_m * BLOCK_M
    n = tl.program_id(0) // split_m * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    offs_m = tl.arange(0, BLOCK_M)
    NUM_FEATURES: tl.constexpr = 2 * N if GATED else N
    features = expert * NUM_FEATURES + n % N
    PACK: tl.constexpr = 8 if INT4 else 1
    if not MXFP4:
        place = tl.program_id(0) // split_m * BLOCK_N + place_in_tile(tl.arange(0, BLOCK_N), WARPS) if INT4 else n
        feature = place % N
        rows = expert * NUM_FEATURES + feature
        weight_ptrs = weight_ptr + expert * (NUM_FEATURES * (K // PACK)) + feature.to(tl.int64)[:, None] * (K // PACK)
        weight_ptrs += tl.arange(0, BLOCK_K // PACK)[None, :]
    else:
        word, group = tl.arange(0, BLOCK_K // 8), tl.arange(0, BLOCK_K // 32)
        first_n = tl.program_id(0) // split_m * BLOCK_N
        feature = (first_n + place_in_tile(tl.arange(0, BLOCK_N), WARPS)) % N
        fours = (first_n + place_in_tile(tl.arange(0, BLOCK_N // 4) * 4, WARPS)) % N // 4
        weight_ptrs = weight_ptr + (expert * NUM_FEATURES + feature)[:, None] * (K // 8) + word[None, :]
        scale_ptr += expert * (NUM_FEATURES // 4 * (K // 32))
        scale_ptrs = scale_ptr + fours[:, None] + group[None, :] * (NUM_FEATURES // 4)
    pdl_wait(USE_PDL)
    count = tl.load(counts_ptr + expert)
    for start in range(first, count, split_m * BLOCK_M):
        is_row = start + offs_m < count
        row = tl.load(rows_ptr + expert * num_tokens + start + offs_m, mask=is_row, other=0)
        x_row = row // TOP_K if OF_TOKENS else row
        x_ptrs = x_ptr + x_row.to(tl.int64)[:, None] * X_CHANNELS + k[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
        up = acc
        if MXFP4:
            for step in range(0, K, BLOCK_K):
                scale = load_scales(scale_ptrs, step, NUM_FEATURES, K, BLOCK_K)
                x = tl.load(x_ptrs + step)  # padded with zeros; missing rows hold another row's values
                words = load_weight(weight_ptrs, step // 8, word, K // 8, BLOCK_K // 8)
                acc = dot_mxfp4(x, words, scale, acc, WARPS, PRECISION, USE_ASM)
                if GATED:
                    scale = load_scales(scale_ptrs + N // 4, step, NUM_FEATURES, K, BLOCK_K)
                    words = load_weight(weight_ptrs + N * (K // 8), step // 8, word, K // 8, BLOCK_K // 8)
                    up = dot_mxfp4(x, words, scale, up, WARPS, PRECISION, USE_ASM)
        else:
            for step in range(0, K, BLOCK_K):
                # Both scales here: no load moves above the wait for a product.
                scale = load_scale(scale_ptr, features, step, K, GROUP)
                if GATED:
                    up_scale = load_scale(scale_ptr, features + N, step, K, GROUP)
                x = tl.load(x_ptrs + step, mask=is_row[:, None] & (step + k < K)[None, :], other=0.0)
                weight = load_tile(
                    weight_ptrs, scale_ptr, zero_ptr, rows, step, k, K, BLOCK_K, GROUP, INT4, x.dtype, WARPS, USE_ASM
                )
                acc = dot_tile(x, weight, scale, acc, GROUP, SWAP_AB, PRECISION, factor_ptr is not None)
                if GATED:
                    weight = load_tile(
                        weight_ptrs + N * (K // PACK), scale_ptr, zero_ptr, rows + N, step, k, K, BLOCK_K, GROUP, INT4,
                        x.dtype, WARPS, USE_ASM,
                    )
                    up = dot_tile(x, weight, up_scale, up, GROUP, SWAP_AB, PRECISION, factor_ptr is not None)
        if factor_ptr is not None:
            acc *= tl.load(factor_ptr + features)[:, None]
            if GATED:
                up *= tl.load(factor_ptr + features + N)[:, None]
        if x_scale_ptr is not None:
            x_scale = tl.load(x_scale_ptr + x_row, mask=is_row, other=0.0)
            acc *= x_scale[None, :] if SWAP_AB else x_scale[:, None]
            up *= x_scale[None, :] if SWAP_AB else x_scale[:, None]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + features).to(tl.float32)
            acc += bias[:, None] if SWAP_AB else bias[None, :]
            if GATED:
                bias = tl.load(bias_ptr + features + N).to(tl.float32)
                up += bias[:, None] if SWAP_AB else bias[None, :]
        if GATED:
            acc = gated(acc, up, ACT, LIMIT)
        elif OF_TOKENS:
            acc = tl.maximum(acc, 0.0)
            acc *= acc
        else:
            share = tl.load(weights_ptr + row, mask=is_row, other=0.0)
            acc *= share[None, :] if SWAP_AB else share[:, None]
        y = tl.trans(acc) if SWAP_AB else acc
        y_row = row if OF_TOKENS else row % TOP_K * num_tokens + row // TOP_K
        column, exists = n, n < N
        if MXFP4 and GATED:
            y = tl.where(exists[None, :], y, 0.0)
            column, exists = column_of(n), n < Y_CHANNELS
        y_ptrs = y_ptr + y_row.to(tl.int64)[:, None] * Y_CHANNELS + column[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def sum_rows_kernel(
    parts_ptr,  # [k, T, C] contiguous, written by the kernel before
    residual_ptr,  # [T, C], tokens strided, or None
    y_ptr,  # [T, C] contiguous, written here
    num_tokens,
    residual_stride,
    TOP_K: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one token."""
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask = offs_c < NUM_CHANNELS
    pdl_wait(USE_PDL)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(parts_ptr + (j * num_tokens + token) * NUM_CHANNELS + offs_c, mask=mask, other=0.0)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + token * residual_stride + offs_c, mask=mask, other=0.0)
    tl.store(y_ptr + token * NUM_CHANNELS + offs_c, total.to(y_ptr.dtype.element_ty), mask=mask)


class GroupedConfig(NamedTuple):
    """How a grouped GEMM is cut into programs."""

    block_m: int  # rows of a program
    block_n: int  # output features (with a gate: of gate and of up each)
    block_k: int  # channels of a loop step
    num_warps: int
    num_stages: int


def grouped_config(
    num_rows, num_experts, gated, is_fp8=False, is_mxfp4=False, large_shared_memory=True, is_int4=False
):
    """Choose by the mean number of rows per expert; swept on an H200 at 128 experts of 768 units, 2,048 channels.

    `is_fp8`: tokens and weights are e4m3, by count of bytes in flight; a sweep on an H100 found no better. `is_mxfp4`:
    the weights, swept on an H100 with gpt-oss-20b's; less memory as in launch.py. `is_int4`: the weights, swept there
    with Qwen3-30B-A3B's.
    """
    mean = num_rows / num_experts
    if is_int4:
        if mean <= 8:
            return GroupedConfig(16, 64, 128, 4, 4)
        if mean <= 32:
            return GroupedConfig(32, 64, 128, 4, 3)
        return GroupedConfig(64, 64 if gated else 128, 128, 4, 3)
    if is_mxfp4:
        if mean <= 8:
            return GroupedConfig(16, 128, 128, 4, 3 if gated else 4)
        if mean <= 64:
            return GroupedConfig(32, 128, 128, 4, 3 if gated else 4)
        num_stages = 4 if large_shared_memory else 3
        if gated:
            return GroupedConfig(128, 128, 128, 8, num_stages)
        if mean <= 256 or not large_shared_memory:
            return GroupedConfig(64, 128, 128, 4, num_stages)
        return GroupedConfig(128, 128, 128, 4, 3)
    if is_fp8:  # a step of 128 channels has one scale; the sums of a step take registers of their own
        if mean <= 8:
            return GroupedConfig(16, 64, 128, 4, 5)
        if mean <= 32:
            return GroupedConfig(32, 64, 128, 4, 5)
        return GroupedConfig(128, 64, 128, 8, 4) if gated else GroupedConfig(128, 128, 128, 8, 4)
    if mean <= 8:
        return GroupedConfig(16, 64, 128, 4, 3)
    if mean <= 32:
        return GroupedConfig(32, 64, 128, 4, 5 if gated else 3)
    if mean <= 96:
        return GroupedConfig(128, 128, 64, 8, 4) if gated else GroupedConfig(64, 128, 64, 4, 4)
    return GroupedConfig(128, 128, 64, 8, 3) if gated else GroupedConfig(128, 256, 64, 8, 4)


def scale_group(weight):
    """Channels per scale of a Weight, also of 4-bit integers; 0: it has no scales, or is MXFP4 or NVFP4."""
    is_float = weight.is_mxfp4 or weight.factor is not None
    return 0 if weight.scale is None or is_float else weight.num_channels // weight.scale.shape[2]


def grouped_gemm(config, x, weight, rows, counts, y, top_k, act=None, weights=None, bias=None, limit=0.0):
    """See `grouped_gemm_kernel`; `act` activates the results, else `weights` scale them. x: Tokens, weight: Weight."""
    (num_experts, num_features, _), num_channels = weight.data.shape, weight.num_channels
    gated, group, is_mxfp4 = act not in (None, "relu2"), scale_group(weight), weight.is_mxfp4
    num_outputs = num_features // 2 if gated else num_features
    assert x.data.is_contiguous() and weight.data.is_contiguous() and y.is_contiguous()
    assert weight.scale is None or weight.scale.is_contiguous()
    # a step may reach beyond the channels, but not into another group
    block_k = min(config.block_k, group & -group) if 0 < group < num_channels else config.block_k
    block_k = weight.tile if weight.has_words else block_k
    data, scale = weight.data, weight.scale
    if is_mxfp4:  # whole tiles of x, and with a gate also of y
        assert config.block_k == 128 and (not gated or config.block_n % 128 == 0)
        data, scale = data.view(torch.int32), scale.view(torch.int32)
    if weight.factor is not None:
        scale = scale.view(torch.int16)
    num_tokens = rows.shape[1]  # an expert has each token at most once
    usual_rows = min(num_tokens, 2 * num_tokens * top_k // num_experts + 1)
    split_m = triton.cdiv(usual_rows, config.block_m)
    num_stages = config.num_stages if x.data.element_size() < 4 else 2  # in fp32, shared memory holds one step's tiles
    if not has_large_shared_memory(y.device):
        of_weight = config.block_n * (2 if gated else 1) * data.element_size() * data.shape[2] // num_channels
        step_bytes = block_k * (config.block_m * x.data.element_size() + of_weight)
        num_stages = min(num_stages, 1 + SMALL_BYTES // step_bytes)
    launch(
        grouped_gemm_kernel, (triton.cdiv(num_outputs, config.block_n) * split_m, num_experts),
        x.data, x.scale, data, scale, weight.zero, weight.factor, bias, rows, counts, weights, y, num_tokens, split_m,
        TOP_K=top_k, N=num_outputs, K=num_channels, X_CHANNELS=x.data.shape[1], Y_CHANNELS=y.shape[-1], GROUP=group,
        MXFP4=is_mxfp4, INT4=weight.has_words, USE_ASM=(is_mxfp4 or weight.has_words) and uses_asm(x.data), ACT=act,
        LIMIT=limit, OF_TOKENS=act is not None, GATED=gated, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        SWAP_AB=is_mxfp4 or weight.has_words or config.block_m < 64,
        PRECISION="ieee" if x.data.dtype == torch.float32 else "tf32",
        WARPS=config.num_warps, num_warps=config.num_warps, num_stages=num_stages, **launch_options(y.device),
    )  # fmt: skip
    return y


def sum_rows(parts, residual, dtype):
    """[residual +] parts.sum(0), [T, C], parts [k, T, C]."""
    top_k, num_tokens, num_channels = parts.shape
    y = torch.empty((num_tokens, num_channels), dtype=dtype, device=parts.device)
    block_c = triton.next_power_of_2(num_channels)
    launch(
        sum_rows_kernel, (num_tokens,), parts, residual, y, num_tokens, 0 if residual is None else residual.stride(0),
        TOP_K=top_k, NUM_CHANNELS=num_channels, BLOCK_C=block_c, num_warps=min(16, max(1, block_c // 256)),
        **launch_options(parts.device),
    )  # fmt: skip
    return y

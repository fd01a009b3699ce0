"""Triton: matrix products of few rows, with the norm before and the activation or residual after fused in.

Owns `fused_linear` and the choice between its kernels and cuBLAS. Knows nothing of layers or shards; the plain
twin is in reference.py.

A decode step reads every weight once and does little else, so the kernels are built around the stream of weights:
enough programs to keep all of the memory busy, and each asks for its weights *before* it waits for the kernel that
makes its input (see inputs.py on chained launches): weights depend on nobody.

M rows of x (tokens), N rows of the weight (outputs; twice as many as results where SiLU and a product follow),
C channels, summed over. I results per token: N, or N / 2 with silu_mul.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .activation import silu_and_mul
from .inputs import launch_options
from .norm import rms_norm


class Tiling(NamedTuple):
    """How a product is cut into programs; None of it changes what is computed, save for the order of sums."""

    kernel: str  # "vector" (multiply and add) or "matrix" (tensor cores)
    block_n: int  # weight rows of a program
    block_c: int  # channels of one step of its loop
    split_c: int  # programs that share a tile's channels, "matrix" only
    num_warps: int
    num_stages: int = 1  # depth of the loop's pipeline, "matrix" only


def tiling(num_tokens, num_rows, num_channels):
    """The measured choice for one NVIDIA H200, or None where cuBLAS is as good; see benchmarks/kernels.py."""
    if num_tokens <= 2:
        return Tiling("vector", 4, 1024, 1, 4)
    if num_tokens <= 256:
        return Tiling("matrix", 64, 128, 4, 4, 4)
    return None


def prefers_fused(num_tokens, num_rows, num_channels):
    """Whether fused_linear runs its own kernel at this shape, rather than cuBLAS with unfused neighbours."""
    return tiling(num_tokens, num_rows, num_channels) is not None


@triton.jit
def weight_rows(tile, num_results, SILU_MUL: tl.constexpr, BLOCK_N: tl.constexpr):
    """(weight rows, whether they exist) of a tile, i64[BLOCK_N]; with SILU_MUL half gate, then as many up rows."""
    local = tl.arange(0, BLOCK_N)
    if SILU_MUL:
        result = tile * (BLOCK_N // 2) + local % (BLOCK_N // 2)
        row = result + (local // (BLOCK_N // 2)) * num_results
    else:
        result = tile * BLOCK_N + local
        row = result
    return row.to(tl.int64), result < num_results


@triton.jit
def finish(
    product,  # fp32 [BLOCK_M, BLOCK_N]
    squares,  # fp32 [BLOCK_M], the sum of x * x; only with HAS_NORM
    bias_ptr,
    residual_ptr,
    y_ptr,
    tile,
    num_tokens,
    num_results,
    num_channels,
    residual_stride,
    y_stride,
    eps,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """All that follows the sum over channels: rstd, bias, activation, residual, store."""
    if HAS_NORM:
        # The same for all channels, so it can wait until after the product.
        product = product * tl.rsqrt(squares / num_channels + eps)[:, None]
    if HAS_BIAS:
        rows, exists = weight_rows(tile, num_results, SILU_MUL, BLOCK_N)
        product += tl.load(bias_ptr + rows, mask=exists, other=0.0).to(tl.float32)[None, :]
    BLOCK_I: tl.constexpr = BLOCK_N // 2 if SILU_MUL else BLOCK_N
    if SILU_MUL:
        gate, up = tl.split(tl.permute(tl.reshape(product, (BLOCK_M, 2, BLOCK_I)), (0, 2, 1)))
        product = gate / (1.0 + tl.exp(-gate)) * up
    offs_m = tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    offs_i = tile * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
    mask = (offs_m < num_tokens) & (offs_i < num_results)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offs_m * residual_stride + offs_i, mask=mask, other=0.0)
        product += residual.to(tl.float32)
    tl.store(y_ptr + offs_m * y_stride + offs_i, product.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def vector_kernel(
    x_ptr,  # [M, C], rows strided, written by the kernel before
    weight_ptr,  # [N, C] contiguous
    bias_ptr,  # [N], only with HAS_BIAS
    norm_weight_ptr,  # [C], only with HAS_NORM
    residual_ptr,  # [M, I], only with HAS_RESIDUAL; may be y
    y_ptr,  # [M, I], written here
    num_tokens,
    num_results,
    x_stride,
    residual_stride,
    y_stride,
    eps,
    NUM_CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program: BLOCK_N weight rows, all channels, all tokens, by multiply and add."""
    tile = tl.program_id(0)
    rows, exists = weight_rows(tile, num_results, SILU_MUL, BLOCK_N)
    offs_c = tl.arange(0, BLOCK_C)
    weight_ptrs = weight_ptr + rows[:, None] * NUM_CHANNELS + offs_c[None, :]
    offs_m = tl.arange(0, BLOCK_M)
    x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * x_stride + offs_c[None, :]
    NUM_STEPS: tl.constexpr = (NUM_CHANNELS + BLOCK_C - 1) // BLOCK_C

    if CHAINED:
        gdc_launch_dependents()
    weight = tl.load(weight_ptrs, mask=exists[:, None] & (offs_c < NUM_CHANNELS)[None, :], other=0.0)
    if CHAINED:
        gdc_wait()
    product = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for step in tl.static_range(NUM_STEPS):
        c = step * BLOCK_C + offs_c
        inside = (offs_m < num_tokens)[:, None] & (c < NUM_CHANNELS)[None, :]
        x = tl.load(x_ptrs + step * BLOCK_C, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_weight_ptr + c, mask=c < NUM_CHANNELS, other=0.0).to(tl.float32)[None, :]
        this_weight = weight
        if step + 1 < NUM_STEPS:
            left = (c + BLOCK_C < NUM_CHANNELS)[None, :]
            weight = tl.load(weight_ptrs + (step + 1) * BLOCK_C, mask=exists[:, None] & left, other=0.0)
        product += x[:, None, :] * this_weight.to(tl.float32)[None, :, :]
    finish(
        tl.sum(product, axis=2), tl.sum(squares, axis=1), bias_ptr, residual_ptr, y_ptr, tile, num_tokens,
        num_results, NUM_CHANNELS, residual_stride, y_stride, eps,
        HAS_BIAS, HAS_NORM, HAS_RESIDUAL, SILU_MUL, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def prefetch(ptrs, mask):
    """Ask for the cache lines at `ptrs` to be brought into L2."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [ptrs.to(tl.int64), mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def matrix_kernel(
    x_ptr,  # [M, C], rows strided, written by the kernel before
    weight_ptr,  # [N, C] contiguous
    bias_ptr,  # [N], only with HAS_BIAS
    norm_weight_ptr,  # [C], only with HAS_NORM
    residual_ptr,  # [M, I], only with HAS_RESIDUAL; may be y
    y_ptr,  # [M, I], written here
    partial_ptr,  # fp32 [tiles, SPLIT_C, BLOCK_N + 1, BLOCK_M], sums over a share of channels; last row: squares
    arrived_ptr,  # i32[tiles], zero before and after: how many programs of a tile are done
    num_tokens,
    num_results,
    x_stride,
    residual_stride,
    y_stride,
    eps,
    NUM_CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT_C: tl.constexpr,
    CHAINED: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: BLOCK_N weight rows times one share of the channels, all tokens, on tensor cores.

    The weights are the left operand: their tile has the 64 rows that Hopper's matrix instruction wants, and the
    tokens, however few, are its columns. The last program of a tile to arrive adds up the shares, always in the
    same order, so that results do not depend on who was last.
    """
    tile = tl.program_id(0)
    share = tl.program_id(1)
    STEPS: tl.constexpr = (NUM_CHANNELS + BLOCK_C * SPLIT_C - 1) // (BLOCK_C * SPLIT_C)
    EVEN: tl.constexpr = NUM_CHANNELS % (BLOCK_C * SPLIT_C) == 0
    first_c = share * (STEPS * BLOCK_C)
    rows, exists = weight_rows(tile, num_results, SILU_MUL, BLOCK_N)
    if CHAINED:
        gdc_launch_dependents()
        if PREFETCH > 0:
            LINE: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
            c = first_c + tl.arange(0, PREFETCH) * LINE
            wanted = exists[:, None] & (c < min(NUM_CHANNELS, first_c + STEPS * BLOCK_C))[None, :]
            prefetch(weight_ptr + rows[:, None] * NUM_CHANNELS + c[None, :], wanted)
        gdc_wait()

    offs_m = tl.arange(0, BLOCK_M)
    is_token = offs_m < num_tokens
    offs_c = first_c + tl.arange(0, BLOCK_C)
    weight_ptrs = weight_ptr + rows[:, None] * NUM_CHANNELS + offs_c[None, :]
    x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * x_stride + offs_c[None, :]
    product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        if EVEN:
            weight = tl.load(weight_ptrs + step * BLOCK_C, mask=exists[:, None], other=0.0)
            x = tl.load(x_ptrs + step * BLOCK_C, mask=is_token[:, None], other=0.0)
        else:
            inside = (offs_c + step * BLOCK_C < NUM_CHANNELS)[None, :]
            weight = tl.load(weight_ptrs + step * BLOCK_C, mask=exists[:, None] & inside, other=0.0)
            x = tl.load(x_ptrs + step * BLOCK_C, mask=is_token[:, None] & inside, other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            c = offs_c + step * BLOCK_C
            norm_weight = tl.load(norm_weight_ptr + c, mask=c < NUM_CHANNELS, other=0.0)
            x = (wide * norm_weight.to(tl.float32)[None, :]).to(x.dtype)
        product = tl.dot(weight, tl.trans(x), product, input_precision="ieee")

    last = True
    if SPLIT_C > 1:
        SHARE: tl.constexpr = (BLOCK_N + 1) * BLOCK_M
        partial_ptr += tile.to(tl.int64) * (SPLIT_C * SHARE)
        offs = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + offs_m[None, :]
        tl.store(partial_ptr + share * SHARE + offs, product)
        if HAS_NORM:
            tl.store(partial_ptr + share * SHARE + BLOCK_N * BLOCK_M + offs_m, squares)
        tl.debug_barrier()  # every thread has written before one of them says so
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT_C - 1
        if last:
            tl.store(arrived_ptr + tile, 0)
            product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            squares = tl.zeros((BLOCK_M,), tl.float32)
            for other in tl.static_range(SPLIT_C):
                product += tl.load(partial_ptr + other * SHARE + offs, cache_modifier=".cg")
                if HAS_NORM:
                    squares += tl.load(partial_ptr + other * SHARE + BLOCK_N * BLOCK_M + offs_m, cache_modifier=".cg")
    if last:
        finish(
            tl.trans(product), squares, bias_ptr, residual_ptr, y_ptr, tile, num_tokens,
            num_results, NUM_CHANNELS, residual_stride, y_stride, eps,
            HAS_BIAS, HAS_NORM, HAS_RESIDUAL, SILU_MUL, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@functools.cache
def arrival_counters(device):
    """Zeros for matrix_kernel to count on; it leaves zeros. Shared by all launches: they run one after another."""
    return torch.zeros(8192, dtype=torch.int32, device=device)


def fused_linear(x, weight, bias=None, norm_weight=None, eps=0.0, residual=None, silu_mul=False, out=None):
    """See reference.fused_linear. `out` may be `residual`. Large products go to cuBLAS, the rest unfused."""
    num_tokens, num_channels = x.shape
    num_rows = weight.shape[0]
    num_results = num_rows // 2 if silu_mul else num_rows
    chosen = tiling(num_tokens, num_rows, num_channels)
    if chosen is None:
        if norm_weight is not None:
            x = rms_norm(x, norm_weight, eps)
        y = F.linear(x, weight, bias)
        if silu_mul:
            y = silu_and_mul(y)
        if residual is not None:
            return torch.add(residual, y, out=out)
        return y if out is None else out.copy_(y)
    y = torch.empty((num_tokens, num_results), dtype=x.dtype, device=x.device) if out is None else out
    if num_tokens > 0:
        launch(chosen, x, weight, bias, norm_weight, eps, residual, silu_mul, y)
    return y


def launch(chosen, x, weight, bias, norm_weight, eps, residual, silu_mul, y, chained=True):
    """Run the kernel of a Tiling; fused_linear and the benchmark's search call this."""
    num_tokens, num_channels = x.shape
    num_results = y.shape[1]
    assert x.stride(1) == 1 and y.stride(1) == 1 and weight.is_contiguous()
    assert residual is None or residual.stride(1) == 1
    num_tiles = triton.cdiv(weight.shape[0], chosen.block_n)
    shared_arguments = dict(
        NUM_CHANNELS=num_channels,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm_weight is not None,
        HAS_RESIDUAL=residual is not None,
        SILU_MUL=silu_mul,
        BLOCK_N=chosen.block_n,
        BLOCK_C=chosen.block_c,
        num_warps=chosen.num_warps,
        **(launch_options(x.device) if chained else {"CHAINED": False}),
    )
    tensors = (x, weight, bias, norm_weight, residual, y)
    residual_stride = 0 if residual is None else residual.stride(0)
    numbers = (num_tokens, num_results, x.stride(0), residual_stride, y.stride(0), eps)
    block_m = triton.next_power_of_2(num_tokens)
    if chosen.kernel == "vector":
        vector_kernel[(num_tiles,)](*tensors, *numbers, BLOCK_M=block_m, **shared_arguments)
        return
    block_m = max(16, block_m)
    partial = None
    if chosen.split_c > 1:
        shape = (num_tiles, chosen.split_c, chosen.block_n + 1, block_m)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    per_line = 128 // weight.element_size()
    channels_of_program = triton.cdiv(num_channels, chosen.split_c)
    matrix_kernel[(num_tiles, chosen.split_c)](
        *tensors,
        partial,
        arrival_counters(x.device),
        *numbers,
        BLOCK_M=block_m,
        SPLIT_C=chosen.split_c,
        PREFETCH=min(64, triton.next_power_of_2(triton.cdiv(channels_of_program, per_line))),
        STAGES=chosen.num_stages,
        **shared_arguments,
    )

"""Triton: matrix products of few rows, with the norm before and the activation or residual after fused in.

Owns `fused_linear` and the choice between its kernels and cuBLAS. Knows nothing of layers or shards; the plain
twin is in reference.py.

A decode step reads every weight once and does little else, so the kernels are built around the stream of weights:
enough programs to keep all of the memory busy, and each asks for its weights *before* it waits for the kernel that
makes its input (see inputs.py on chained launches), because weights depend on nobody. What is left between the end of
one kernel and the end of the next is a load of x from L2, the arithmetic and a store: so everything that can be is
loaded before the wait, and the rest right after it.

M rows of x (tokens), N rows of the weight (outputs; twice as many as results where SiLU and a product follow),
C channels, summed over. I results per token: N, or N / 2 with silu_mul.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .activation import silu_and_mul
from .inputs import after_predecessor, has_large_shared_memory, launch_options, launcher, let_successor_start
from .norm import rms_norm


class Tiling(NamedTuple):
    """How a product is cut into programs. None of it changes what is computed, save for the order of sums."""

    kernel: str  # "vector": one token, multiply and add; "matrix": tensor cores
    block_m: int  # tokens of a program; where others take the rest, they read the same weights, from L2
    block_n: int  # weight rows of a program
    block_c: int  # channels of one step of its loop
    num_warps: int
    max_registers: int | None = None  # of a thread


def tiling(num_tokens, num_rows, num_channels, itemsize):
    """The choice measured on an NVIDIA H200 with 16 bits, or None where cuBLAS with unfused neighbours is as good."""
    num_bytes = num_rows * num_channels * itemsize
    block_c = max(8, triton.next_power_of_2(num_channels))
    if num_tokens == 1:
        # Many small programs for many rows: the more of the next kernel's are there early, the better.
        if num_channels <= 1024:
            return Tiling("vector", 1, 2, block_c, 1) if num_rows > 4096 else Tiling("vector", 1, 4, block_c, 4)
        if num_bytes < 40e6:
            return Tiling("vector", 1, 2, 2048 if num_channels % 2048 == 0 else min(block_c, 4096), 4)
        if num_rows < num_channels:
            return Tiling("vector", 1, 2, 2048, 2)
        return Tiling("vector", 1, 4, 512, 1) if num_bytes < 100e6 else Tiling("vector", 1, 2, 1024, 1, 96)
    # Not for fp32: tensor cores do not multiply it in full, and its tiles would not fit.
    if num_tokens <= 16 and num_bytes <= 16e6 and itemsize == 2:
        if num_channels > 1024:
            return Tiling("matrix", 8, 16, 2048, 8)
        block_m = 8 if num_tokens <= 8 else 16
        return Tiling("matrix", block_m, 16, 1024 if num_rows <= 4096 else 512, 4)
    return None


@triton.jit
def weight_rows(tile, num_results, SILU_MUL: tl.constexpr, BLOCK_N: tl.constexpr):
    """(weight rows i64, whether they exist) of a tile, [BLOCK_N]; with SILU_MUL half gate, then as many up rows."""
    local = tl.arange(0, BLOCK_N)
    if SILU_MUL:
        result = tile * (BLOCK_N // 2) + local % (BLOCK_N // 2)
        row = result + (local // (BLOCK_N // 2)) * num_results
    else:
        result = tile * BLOCK_N + local
        row = result
    return row.to(tl.int64), result < num_results


@triton.jit
def result_offsets(offs_m, tile, num_tokens, num_results, stride, BLOCK_I: tl.constexpr):
    """(offsets, mask) of a tile's results in a tensor [M, I], [BLOCK_M, BLOCK_I]."""
    offs_i = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    offs = offs_m.to(tl.int64)[:, None] * stride + offs_i[None, :]
    return offs, (offs_m < num_tokens)[:, None] & (offs_i < num_results)[None, :]


@triton.jit
def load_residual(
    residual_ptr,  # [M, I], may be y
    offs_m,
    tile,
    num_tokens,
    num_results,
    residual_stride,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    if HAS_RESIDUAL:
        offs, mask = result_offsets(offs_m, tile, num_tokens, num_results, residual_stride, BLOCK_I)
        return tl.load(residual_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.zeros((BLOCK_M, BLOCK_I), tl.float32)


@triton.jit
def finish(
    product,  # fp32 [BLOCK_M, BLOCK_N]
    rstd,  # fp32 [BLOCK_M], 1 without a norm
    residual,  # fp32 [BLOCK_M, BLOCK_I], 0 without one
    bias_ptr,
    y_ptr,
    offs_m,
    tile,
    num_tokens,
    num_results,
    y_stride,
    HAS_BIAS: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """All that follows the sum over channels."""
    product *= rstd[:, None]  # the same for all channels, so it could wait until after the sum
    if HAS_BIAS:
        rows, exists = weight_rows(tile, num_results, SILU_MUL, BLOCK_N)
        product += tl.load(bias_ptr + rows, mask=exists, other=0.0).to(tl.float32)[None, :]
    if SILU_MUL:
        gate, up = tl.split(tl.permute(tl.reshape(product, (BLOCK_M, 2, BLOCK_I)), (0, 2, 1)))
        product = gate / (1.0 + tl.exp(-gate)) * up
    offs, mask = result_offsets(offs_m, tile, num_tokens, num_results, y_stride, BLOCK_I)
    tl.store(y_ptr + offs, (product + residual).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_norm_weight(norm_weight_ptr, c, num_channels, HAS_NORM: tl.constexpr):
    if HAS_NORM:
        return tl.load(norm_weight_ptr + c, mask=c < num_channels, other=0.0).to(tl.float32)
    else:
        return 1.0


@triton.jit
def vector_kernel(
    x_ptr,  # [1, C], written by the kernel before
    weight_ptr,  # [N, C] contiguous
    bias_ptr,  # [N], only with HAS_BIAS
    norm_weight_ptr,  # [C], only with HAS_NORM
    residual_ptr,  # [1, I], only with HAS_RESIDUAL; may be y
    y_ptr,  # [1, I], written here
    num_results,
    eps,
    NUM_CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program: BLOCK_N weight rows, all channels of the one token, by multiply and add.

    Channels are taken VECTOR at a time, what a thread loads at once and adds up by itself: it keeps one sum per vector
    and row, needs few registers, and so much of the next kernel fits beside this one and loads its weights.
    """
    let_successor_start(CHAINED)
    tile = tl.program_id(0)
    BLOCK_I: tl.constexpr = BLOCK_N // 2 if SILU_MUL else BLOCK_N
    STEPS: tl.constexpr = (NUM_CHANNELS + BLOCK_C - 1) // BLOCK_C
    VECTOR: tl.constexpr = 8
    rows, exists = weight_rows(tile, num_results, SILU_MUL, BLOCK_N)
    c = tl.arange(0, BLOCK_C // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [BLOCK_C/V, V]
    weight_ptrs = weight_ptr + rows[:, None, None] * NUM_CHANNELS + c[None, :, :]  # [BLOCK_N, BLOCK_C/V, V]
    weight = tl.load(weight_ptrs, mask=exists[:, None, None] & (c < NUM_CHANNELS)[None, :, :], other=0.0)
    norm_weight = load_norm_weight(norm_weight_ptr, c, NUM_CHANNELS, HAS_NORM)
    offs_i = tile * BLOCK_I + tl.arange(0, BLOCK_I)

    after_predecessor(CHAINED)
    residual = tl.zeros((BLOCK_I,), tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offs_i, mask=offs_i < num_results, other=0.0).to(tl.float32)
    product = tl.zeros((BLOCK_N, BLOCK_C // VECTOR), tl.float32)
    squares = tl.zeros((BLOCK_C // VECTOR,), tl.float32)
    for step in tl.static_range(STEPS):
        x = tl.load(x_ptr + c, mask=c < NUM_CHANNELS, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(x * x, axis=1)
            x *= norm_weight
        this_weight = weight
        c += BLOCK_C
        if step + 1 < STEPS:
            weight_ptrs += BLOCK_C
            weight = tl.load(weight_ptrs, mask=exists[:, None, None] & (c < NUM_CHANNELS)[None, :, :], other=0.0)
            norm_weight = load_norm_weight(norm_weight_ptr, c, NUM_CHANNELS, HAS_NORM)
        product += tl.sum(x[None, :, :] * this_weight.to(tl.float32), axis=2)
    total = tl.sum(product, axis=1)
    if HAS_NORM:
        total *= tl.rsqrt(tl.sum(squares) / NUM_CHANNELS + eps)
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, mask=exists, other=0.0).to(tl.float32)
    if SILU_MUL:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, BLOCK_I)), (1, 0)))
        total = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + offs_i, (total + residual).to(y_ptr.dtype.element_ty), mask=offs_i < num_results)


@triton.jit
def matrix_kernel(
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
    GROUPS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program: BLOCK_N weight rows, all channels, all tokens, on tensor cores.

    With so few rows and tokens there is one small product to make, so it is the channels that the warps divide
    among themselves: a batch of GROUPS products over BLOCK_C / GROUPS channels each, added up at the end.
    """
    let_successor_start(CHAINED)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(1)
    BLOCK_I: tl.constexpr = BLOCK_N // 2 if SILU_MUL else BLOCK_N
    STEPS: tl.constexpr = (NUM_CHANNELS + BLOCK_C - 1) // BLOCK_C
    GROUP_C: tl.constexpr = BLOCK_C // GROUPS
    rows, exists = weight_rows(tile, num_results, SILU_MUL, BLOCK_N)
    c = tl.arange(0, GROUPS)[:, None, None] * GROUP_C + tl.arange(0, GROUP_C)[None, None, :]  # [G, 1, C/G]
    weight_ptrs = weight_ptr + rows[None, :, None] * NUM_CHANNELS + c  # [G, BLOCK_N, C/G]
    weight = tl.load(weight_ptrs, mask=exists[None, :, None] & (c < NUM_CHANNELS), other=0.0)
    if HAS_NORM:
        # On the weights, not on x: this is done before the wait.
        norm_weight = load_norm_weight(norm_weight_ptr, c, NUM_CHANNELS, HAS_NORM)
        weight = (weight.to(tl.float32) * norm_weight).to(weight.dtype)

    after_predecessor(CHAINED)
    residual = load_residual(
        residual_ptr, offs_m, tile, num_tokens, num_results, residual_stride, HAS_RESIDUAL, BLOCK_M, BLOCK_I
    )
    x_rows = x_ptr + offs_m.to(tl.int64)[None, :, None] * x_stride  # [1, BLOCK_M, 1]
    product = tl.zeros((GROUPS, BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((GROUPS, BLOCK_M), tl.float32)
    for step in tl.static_range(STEPS):
        is_x = (offs_m < num_tokens)[None, :, None] & (c < NUM_CHANNELS)
        x = tl.load(x_rows + c, mask=is_x, other=0.0)  # [G, BLOCK_M, C/G]
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=2)
        this_weight = weight
        c += BLOCK_C
        if step + 1 < STEPS:
            weight_ptrs += BLOCK_C
            weight = tl.load(weight_ptrs, mask=exists[None, :, None] & (c < NUM_CHANNELS), other=0.0)
            if HAS_NORM:
                norm_weight = load_norm_weight(norm_weight_ptr, c, NUM_CHANNELS, HAS_NORM)
                weight = (weight.to(tl.float32) * norm_weight).to(weight.dtype)
        product = tl.dot(this_weight, tl.permute(x, (0, 2, 1)), product, input_precision="ieee")
    rstd = tl.full((BLOCK_M,), 1.0, tl.float32)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / NUM_CHANNELS + eps)
    finish(
        tl.trans(tl.sum(product, axis=0)), rstd, residual, bias_ptr, y_ptr, offs_m, tile, num_tokens, num_results,
        y_stride, HAS_BIAS, SILU_MUL, BLOCK_M, BLOCK_N, BLOCK_I,
    )  # fmt: skip


def fused_linear(x, weight, bias=None, norm_weight=None, eps=0.0, residual=None, silu_mul=False, out=None):
    """See reference.fused_linear. `out` may be `residual`; without `out`, `residual` may be overwritten.

    Large products go to cuBLAS, which adds in place at no cost, with the norm and the activation apart.
    """
    num_tokens, num_channels = x.shape
    num_rows = weight.shape[0]
    num_results = num_rows // 2 if silu_mul else num_rows
    chosen = tiling(num_tokens, num_rows, num_channels, weight.element_size())
    if chosen is None or (chosen.kernel == "matrix" and not has_large_shared_memory(x.device)):
        if norm_weight is not None:
            x = rms_norm(x, norm_weight, eps)
        if residual is not None and bias is None and not silu_mul:
            return torch.addmm(residual, x, weight.t(), out=residual if out is None else out)
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


def launch(chosen, x, weight, bias, norm_weight, eps, residual, silu_mul, y):
    """Run the kernel of a Tiling."""
    num_tokens, num_channels = x.shape
    assert x.stride(1) == 1 and y.stride(1) == 1 and weight.is_contiguous()
    assert residual is None or residual.stride(1) == 1
    num_tiles = triton.cdiv(weight.shape[0], chosen.block_n)
    options = {
        "NUM_CHANNELS": num_channels,
        "HAS_BIAS": bias is not None,
        "HAS_NORM": norm_weight is not None,
        "HAS_RESIDUAL": residual is not None,
        "SILU_MUL": silu_mul,
        "BLOCK_N": chosen.block_n,
        "BLOCK_C": chosen.block_c,
        "num_warps": chosen.num_warps,
        **launch_options(x.device),
    }
    if chosen.max_registers is not None and torch.version.hip is None:
        options["maxnreg"] = chosen.max_registers
    if chosen.kernel == "vector":
        assert num_tokens == 1
        launcher(vector_kernel, (num_tiles,))(x, weight, bias, norm_weight, residual, y, y.shape[1], eps, **options)
        return
    launcher(matrix_kernel, (triton.cdiv(num_tokens, chosen.block_m), num_tiles))(
        x,
        weight,
        bias,
        norm_weight,
        residual,
        y,
        num_tokens,
        y.shape[1],
        x.stride(0),
        0 if residual is None else residual.stride(0),
        y.stride(0),
        eps,
        BLOCK_M=chosen.block_m,
        GROUPS=chosen.num_warps,
        **options,
    )

"""Gluon, Triton's lower level: matrix products of 2 to 256 tokens on NVIDIA Hopper.

Owns `ring_product` and how it is cut into programs. Knows nothing of layers, nor of what is done with the parts of a
sum; `linear.py` decides where it runs, and what runs elsewhere.

A program keeps a ring of stages in shared memory, of BLOCK_C channels each, which asynchronous copies fill and tensor
cores read. It takes nearly all of a multiprocessor's shared memory, because the weights of all its stages are asked
for before it waits for the kernel that makes x (see inputs.py on chained launches): with few tokens nearly all of the
weights are there when x is. So there is one wave of programs, at most one to a multiprocessor.

Where there are too few weight rows to occupy the device, SPLITS programs share the channels of a tile, and each writes
its part of the sums. Whoever reads the result next adds the parts up (`norm.add_rms_norm`), which costs a few loads.

M rows of x (tokens), N rows of the weight, C channels; I results per token: N, or N / 2 with silu_mul.
"""

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gluon_names import (
    async_load,
    commit_group,
    fence_async_shared,
    wait_group,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from .inputs import is_hopper, launch_options, launcher

RING_BYTES = 200 << 10  # of the 227 KB that a program may have
PROGRAM_BYTES = 1.6e6  # of x and weights, that a program reads one stage after the other: beyond, cuBLAS is faster


class RingTiling(NamedTuple):
    """How a product is cut into programs. None of it changes what is computed, save for the order of sums."""

    block_m: int  # tokens of a program
    block_n: int  # weight rows of a program
    block_c: int  # channels of a stage
    splits: int  # programs that share the channels
    stages: int
    num_warps: int


def ring_tiling(num_tokens, num_rows, num_channels, may_split, num_multiprocessors):
    """The smallest tiles that fit the device in one wave; None where none do, or where cuBLAS was faster on an H200."""
    block_c = 128 if num_channels % 128 == 0 else 64
    if num_channels % block_c:
        return None
    few = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    for block_m, block_n in ((few, 64), (few, 128), (128, 128)):
        num_programs = triton.cdiv(num_tokens, block_m) * triton.cdiv(num_rows, block_n)
        if num_programs <= num_multiprocessors:
            break
    else:
        return None
    splits = 1
    while may_split and splits < 4 and 2 * splits * num_programs <= num_multiprocessors:
        if num_channels % (2 * splits * block_c):
            break
        splits *= 2
    split_c = num_channels // splits
    if num_tokens > 64 and (block_m + block_n) * split_c * 2 > PROGRAM_BYTES:
        return None
    stages = min(split_c // block_c, RING_BYTES // ((block_m + block_n) * block_c * 2))
    return RingTiling(block_m, block_n, block_c, splits, stages, 4 if block_m * block_n <= 8192 else 8)


@gluon.jit
def weight_rows(tile, num_results, SILU_MUL: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Weight rows i64[BLOCK_N] of a tile; with SILU_MUL eight of gate, the same eight of up, and so on.

    For in the accumulators of tensor cores a thread holds rows, or columns, r and r + 8: so gate meets up there.
    Rows past the end are the last one again, and are not stored.
    """
    local = gl.arange(0, BLOCK_N, layout=layout)
    if SILU_MUL:
        result = tile * (BLOCK_N // 2) + local // 16 * 8 + local % 8
        row = gl.minimum(result, num_results - 1) + (local // 8 % 2) * num_results
    else:
        row = gl.minimum(tile * BLOCK_N + local, num_results - 1)
    return row.to(gl.int64)


@gluon.jit
def multiply(weights, xs, slot, product, SWAP: gl.constexpr):
    """One stage's product, asynchronous, added to `product`."""
    fence_async_shared()
    if SWAP:
        return warpgroup_mma(weights.index(slot), xs.index(slot).permute((1, 0)), product, is_async=True)
    else:
        return warpgroup_mma(xs.index(slot), weights.index(slot).permute((1, 0)), product, is_async=True)


@gluon.jit(do_not_specialize=["num_tokens"])
def ring_kernel(
    x_ptr,  # [M, C], rows strided, written by the kernel before
    weight_ptr,  # [N, C] contiguous
    bias_ptr,  # [N], only with HAS_BIAS
    residual_ptr,  # [M, I], rows strided, only with HAS_RESIDUAL
    y_ptr,  # [M, I], or fp32 [SPLITS, M, I]; written here
    num_tokens,
    num_results,
    x_stride,
    residual_stride,
    NUM_CHANNELS: gl.constexpr,  # a multiple of SPLITS * BLOCK_C
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    SILU_MUL: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_C: gl.constexpr,
    STAGES: gl.constexpr,
    CHAINED: gl.constexpr,
):
    """One program: BLOCK_N weight rows, BLOCK_M tokens, a SPLITS-th of the channels."""
    if CHAINED:
        gdc_launch_dependents()
    dtype: gl.constexpr = weight_ptr.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_I: gl.constexpr = BLOCK_N // 2 if SILU_MUL else BLOCK_N
    SPLIT_C: gl.constexpr = NUM_CHANNELS // SPLITS
    STEPS: gl.constexpr = SPLIT_C // BLOCK_C
    RESIDENT: gl.constexpr = STAGES >= STEPS  # every step has a stage of its own
    AHEAD: gl.constexpr = STEPS if RESIDENT else STAGES - 1  # steps under way at a time
    SLOTS: gl.constexpr = STEPS if RESIDENT else STAGES
    # wgmma takes 64 rows and 8 to 256 columns: fewer tokens than that are the columns, and the weights the rows.
    SWAP: gl.constexpr = BLOCK_M < 64
    ROWS: gl.constexpr = BLOCK_N if SWAP else BLOCK_M
    COLUMNS: gl.constexpr = BLOCK_M if SWAP else BLOCK_N
    ROW_WARPS: gl.constexpr = 4 * min(WARPS // 4, ROWS // 64)
    COLUMN_WARPS: gl.constexpr = WARPS // ROW_WARPS
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROW_WARPS, COLUMN_WARPS], [16, COLUMNS // COLUMN_WARPS, 16])
    LANES: gl.constexpr = min(16, BLOCK_C // 8)  # of a warp side by side, with 16 bytes each
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    weights = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_N, BLOCK_C], shared)
    xs = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_M, BLOCK_C], shared)

    tile = gl.program_id(1)
    split = gl.program_id(2)
    c = split * SPLIT_C + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, copies))
    rows = weight_rows(tile, num_results, SILU_MUL, BLOCK_N, gl.SliceLayout(1, copies))
    weight_ptrs = weight_ptr + rows[:, None] * NUM_CHANNELS + c[None, :]
    for step in gl.static_range(AHEAD):
        async_load(weights.index(step), weight_ptrs + step * BLOCK_C)
    token = gl.program_id(0) * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, copies))
    x_ptrs = x_ptr + token.to(gl.int64)[:, None] * x_stride + c[None, :]
    is_token = (token < num_tokens)[:, None] & (c < NUM_CHANNELS)[None, :]
    if CHAINED:
        gdc_wait()
    for step in gl.static_range(AHEAD):
        async_load(xs.index(step), x_ptrs + step * BLOCK_C, mask=is_token)
        commit_group()

    product = gl.zeros((ROWS, COLUMNS), gl.float32, layout=sums)
    if RESIDENT:
        for step in gl.static_range(STEPS):
            wait_group(STEPS - 1 - step)
            product = multiply(weights, xs, step, product, SWAP)
    else:
        product = warpgroup_mma_init(product)
        weight_ptrs += AHEAD * BLOCK_C
        x_ptrs += AHEAD * BLOCK_C
        for step in range(STEPS):
            # All warps are past the product before, so its slot is free, and this step's copies are there.
            product = warpgroup_mma_init(warpgroup_mma_wait(0, [product]))
            wait_group(AHEAD - 1)
            product = multiply(weights, xs, step % SLOTS, product, SWAP)
            if step + AHEAD < STEPS:
                free = (step + AHEAD) % SLOTS
                async_load(weights.index(free), weight_ptrs)
                async_load(xs.index(free), x_ptrs, mask=is_token)
                weight_ptrs += BLOCK_C
                x_ptrs += BLOCK_C
            commit_group()
    product = warpgroup_mma_wait(0, [product])

    if HAS_BIAS:
        along: gl.constexpr = gl.SliceLayout(1, sums) if SWAP else gl.SliceLayout(0, sums)
        bias = gl.load(bias_ptr + weight_rows(tile, num_results, SILU_MUL, BLOCK_N, along)).to(gl.float32)
        if SWAP:
            product += bias[:, None]
        else:
            product += bias[None, :]
    if SILU_MUL:
        if SWAP:
            pairs = product.reshape((BLOCK_N // 16, 2, 8, BLOCK_M)).permute((0, 2, 3, 1))
            gate, up = gl.split(pairs)
            product = (gate / (1.0 + gl.exp(-gate)) * up).reshape((BLOCK_I, BLOCK_M))
        else:
            pairs = product.reshape((BLOCK_M, BLOCK_N // 16, 2, 8)).permute((0, 1, 3, 2))
            gate, up = gl.split(pairs)
            product = (gate / (1.0 + gl.exp(-gate)) * up).reshape((BLOCK_M, BLOCK_I))
    if SWAP:
        product = product.permute((1, 0))
    VECTOR: gl.constexpr = 16 // (y_ptr.dtype.element_ty.primitive_bitwidth // 8)
    STORE_LANES: gl.constexpr = min(32, BLOCK_I // VECTOR)
    stores: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // STORE_LANES, STORE_LANES], [WARPS, 1], [1, 0])
    product = gl.convert_layout(product, stores)
    y_token = gl.program_id(0) * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, stores))
    i = tile * BLOCK_I + gl.arange(0, BLOCK_I, layout=gl.SliceLayout(0, stores))
    mask = (y_token < num_tokens)[:, None] & (i < num_results)[None, :]
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + y_token.to(gl.int64)[:, None] * residual_stride + i[None, :]
        product += gl.load(residual_ptrs, mask=mask, other=0.0).to(gl.float32)
    offs = (split * num_tokens + y_token).to(gl.int64)[:, None] * num_results + i[None, :]
    gl.store(y_ptr + offs, product.to(y_ptr.dtype.element_ty), mask=mask)


def ring_product(tiling, x, weight, y, bias=None, residual=None, silu_mul=False):
    """y = [residual +] [silu_and_mul] (x W^T [+ bias]), written to y [M, I] or, with several splits, in parts.

    weight [N, C] and y are of x's dtype. The parts are fp32 [splits, M, N], the result is their sum over
    splits, and bias, residual and activation are not for them.
    """
    num_tokens, num_channels = x.shape
    assert takes(x) and weight.is_contiguous() and y.is_contiguous()
    assert residual is None or residual.stride(1) == 1
    assert tiling.splits == 1 or (bias is None and residual is None and not silu_mul and len(y) == tiling.splits)
    grid = triton.cdiv(num_tokens, tiling.block_m), triton.cdiv(weight.shape[0], tiling.block_n), tiling.splits
    launcher(ring_kernel, grid)(
        x,
        weight,
        bias,
        residual,
        y,
        num_tokens,
        y.shape[-1],
        x.stride(0),
        0 if residual is None else residual.stride(0),
        NUM_CHANNELS=num_channels,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        SILU_MUL=silu_mul,
        SPLITS=tiling.splits,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_C=tiling.block_c,
        STAGES=tiling.stages,
        num_warps=tiling.num_warps,
        **launch_options(x.device),
    )
    return y


def takes(x):
    """Whether `ring_product` takes this x: where it runs, of 16 bits, and each row where Triton knows it aligned."""
    aligned = x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    return aligned and x.element_size() == 2 and is_hopper(x.device)

"""Gluon, Triton's lower level: matrix products of 2 to 256 tokens on NVIDIA Hopper.

Owns `decode_gemm`, `decode_qkv_gemm` and how they are cut into programs. Knows nothing of layers, nor of what is done with
the parts of a sum; `linear.py` decides where it runs, and what runs elsewhere.

A program keeps a ring of stages in shared memory, of BLOCK_C channels each, which asynchronous copies fill and tensor
cores read. It takes nearly all of a multiprocessor's shared memory, because the weights of all its stages are asked
for before it waits for the kernel that makes x (see inputs.py on pdl launches): with few tokens nearly all of the
weights are there when x is. So there is one wave of programs, at most one to a multiprocessor.

Where there are too few weight rows to occupy the device, SPLITS programs share the channels of a tile, and each writes
its part of the sums. Whoever reads the result next adds the parts up (`norm.add_rms_norm`), which costs a few loads.

Where a tile has 128 weight rows, which are those of one head of q, k or v, `decode_qkv_gemm` ends with what norm_rope_store
does. All that it needs besides the product is loaded before the wait, once the weights were asked for: positions and
slots, and the angles of these positions. So behind the last product nothing is left but arithmetic and the stores.

M rows of x (tokens), N rows of the weight, C channels; I results per token: N, or N / 2 with silu_mul; H query heads, K
key-value heads.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_compat import (
    async_load,
    commit_group,
    fence_async_shared,
    thread_barrier,
    wait_group,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from ..launch import is_sm90, launch, launch_options
from .qkv_epilogue_sm90 import HEAD_SIZE, angles, halves, look_up, norm, norm_weights, rotate

RING_BYTES = 200 << 10  # of the 227 KB that a program may have
PROGRAM_BYTES = 1.6e6  # of x and weights, that a program reads one stage after the other: beyond, cuBLAS is faster


class DecodeGemmConfig(NamedTuple):
    """How a product is cut into programs. None of it changes what is computed, save for the order of sums."""

    block_m: int  # tokens of a program
    block_n: int  # weight rows of a program
    block_c: int  # channels of a stage
    splits: int  # programs that share the channels
    stages: int
    num_warps: int


def decode_gemm_config(num_tokens, num_rows, num_channels, allow_split_k, num_sms):
    """The smallest tiles that fit the device in one wave; None where none do, or where cuBLAS was faster on an H200."""
    block_c = 128 if num_channels % 128 == 0 else 64
    if num_channels % block_c:
        return None
    few = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    for block_m, block_n in ((few, 64), (few, 128), (128, 128)):
        num_programs = triton.cdiv(num_tokens, block_m) * triton.cdiv(num_rows, block_n)
        if num_programs <= num_sms:
            break
    else:
        return None
    splits = 1
    while allow_split_k and splits < 4 and 2 * splits * num_programs <= num_sms:
        if num_channels % (2 * splits * block_c):
            break
        splits *= 2
    split_c = num_channels // splits
    if num_tokens > 64 and (block_m + block_n) * split_c * 2 > PROGRAM_BYTES:
        return None
    stages = min(split_c // block_c, RING_BYTES // ((block_m + block_n) * block_c * 2))
    return DecodeGemmConfig(block_m, block_n, block_c, splits, stages, 4 if block_m * block_n <= 8192 else 8)


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


@gluon.jit
def whole(left, right):
    """What `halves` took apart."""
    rows: gl.constexpr = left.shape[0]
    width: gl.constexpr = left.shape[1]
    return gl.join(left, right).permute((0, 2, 1)).reshape([rows, 2 * width])


@gluon.jit(do_not_specialize=["num_tokens"])
def decode_gemm_kernel(
    x_ptr,  # [M, C], rows strided, written by the kernel before
    weight_ptr,  # [N, C] contiguous
    bias_ptr,  # [N], only with HAS_BIAS
    residual_ptr,  # [M, I], rows strided, only with HAS_RESIDUAL
    y_ptr,  # [M, I], or fp32 [SPLITS, M, I], or with NUM_HEADS q [M, H * HEAD_SIZE]; written here
    q_weight_ptr,  # [HEAD_SIZE], only with HAS_NORM
    k_weight_ptr,  # [HEAD_SIZE], only with HAS_NORM
    eps,
    cos_sin_ptr,  # fp32 [max_position, HEAD_SIZE]; this and the next four only with NUM_HEADS
    positions_ptr,  # [M]
    slot_mapping_ptr,  # i32[M]
    k_cache_ptr,  # [slots, K, HEAD_SIZE], written here
    v_cache_ptr,
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
    NUM_HEADS: gl.constexpr,  # 0: y is the product
    NUM_KV_HEADS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """One program: BLOCK_N weight rows, BLOCK_M tokens, a SPLITS-th of the channels."""
    if USE_PDL:
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
    VECTOR: gl.constexpr = 16 // (y_ptr.dtype.element_ty.primitive_bitwidth // 8)
    STORE_LANES: gl.constexpr = min(32, BLOCK_I // VECTOR)
    stores: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // STORE_LANES, STORE_LANES], [WARPS, 1], [1, 0])

    tile = gl.program_id(1)
    first = gl.program_id(0) * BLOCK_M
    split = gl.program_id(2)
    c = split * SPLIT_C + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, copies))
    rows = weight_rows(tile, num_results, SILU_MUL, BLOCK_N, gl.SliceLayout(1, copies))
    weight_ptrs = weight_ptr + rows[:, None] * NUM_CHANNELS + c[None, :]
    for step in gl.static_range(AHEAD):
        async_load(weights.index(step), weight_ptrs + step * BLOCK_C)
    token = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, copies))
    x_ptrs = x_ptr + token.to(gl.int64)[:, None] * x_stride + c[None, :]
    is_token = (token < num_tokens)[:, None] & (c < NUM_CHANNELS)[None, :]
    if NUM_HEADS > 0:
        gl.static_assert(BLOCK_N == HEAD_SIZE and ROW_WARPS == WARPS and SPLITS == 1)
        is_q, is_rotated = tile < NUM_HEADS, tile < NUM_HEADS + NUM_KV_HEADS
        thread_barrier()  # else the assembler has weights asked for after these loads, or even after positions came
        position = look_up(positions_ptr, first, num_tokens, is_rotated, BLOCK_M, WARPS)
        y_token = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, stores))
        is_y_token = y_token < num_tokens
        # Where a token's head is stored: its row of q, or its slot of a cache; -1: nowhere.
        place = gl.load(slot_mapping_ptr + y_token, mask=is_y_token & ~is_q, other=gl.where(is_y_token, y_token, -1))
        if HAS_NORM:
            head_weights = norm_weights(gl.where(is_q, q_weight_ptr, k_weight_ptr), WARPS)
        cos, sin = angles(cos_sin_ptr, position)
    if USE_PDL:
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
    if NUM_HEADS > 0:
        x_1, x_2 = halves(product)
        if is_rotated:
            if HAS_NORM:
                x_1, x_2 = norm(x_1, x_2, head_weights, eps, dtype)
            x_1, x_2 = rotate(x_1, x_2, cos, sin)
        product = gl.convert_layout(whole(x_1.to(dtype), x_2.to(dtype)), stores)
        head_ptr = gl.where(is_q, y_ptr, gl.where(is_rotated, k_cache_ptr, v_cache_ptr))
        head_ptr += gl.where(is_q, tile, (tile - NUM_HEADS) % NUM_KV_HEADS) * HEAD_SIZE
        offs = place.to(gl.int64) * (gl.where(is_q, NUM_HEADS, NUM_KV_HEADS) * HEAD_SIZE)
        d = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, stores))
        gl.store(head_ptr + offs[:, None] + d[None, :], product, mask=(place >= 0)[:, None] & (d < HEAD_SIZE)[None, :])
    else:
        product = gl.convert_layout(product, stores)
        y_token = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, stores))
        i = tile * BLOCK_I + gl.arange(0, BLOCK_I, layout=gl.SliceLayout(0, stores))
        mask = (y_token < num_tokens)[:, None] & (i < num_results)[None, :]
        if HAS_RESIDUAL:
            residual_ptrs = residual_ptr + y_token.to(gl.int64)[:, None] * residual_stride + i[None, :]
            product += gl.load(residual_ptrs, mask=mask, other=0.0).to(gl.float32)
        offs = (split * num_tokens + y_token).to(gl.int64)[:, None] * num_results + i[None, :]
        gl.store(y_ptr + offs, product.to(y_ptr.dtype.element_ty), mask=mask)


def decode_gemm(tiling, x, weight, y, bias=None, residual=None, silu_mul=False):
    """y = [residual +] [silu_and_mul] (x W^T [+ bias]), written to y [M, I] or, with several splits, in parts.

    weight [N, C] and y are of x's dtype. The parts are fp32 [splits, M, N], the result is their sum over
    splits, and bias, residual and activation are not for them.
    """
    assert residual is None or residual.stride(1) == 1
    assert tiling.splits == 1 or (bias is None and residual is None and not silu_mul and len(y) == tiling.splits)
    return _launch_decode_gemm(tiling, x, weight, y, bias, residual, silu_mul)


def decode_qkv_gemm(
    tiling, x, weight, bias, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, k_cache, v_cache,
    num_heads, num_kv_heads,
):  # fmt: skip
    """reference.norm_rope_store of x W^T [+ bias], for what `takes_heads` says it takes; returns q, [M, H * HEAD_SIZE].

    weight [(H + 2K) * HEAD_SIZE, C]. Keys and values go to the caches only, and nowhere where the slot is -1. The
    product is not rounded before the norm and the rotation.

    Positions and slots are read early: an unchained launch has to lie between this one and the one that wrote them.
    """
    assert takes_heads(tiling, x, weight, k_cache)
    assert len(weight) == (num_heads + 2 * num_kv_heads) * HEAD_SIZE.value and (q_weight is None) == (k_weight is None)
    assert cos_sin.is_contiguous() and cos_sin.dtype.is_floating_point
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and v_cache.dtype == x.dtype
    q = torch.empty((len(x), num_heads * HEAD_SIZE.value), dtype=x.dtype, device=x.device)
    heads = (q_weight, k_weight, eps, cos_sin, positions, slot_mapping, k_cache, v_cache)
    return _launch_decode_gemm(tiling, x, weight, q, bias, None, False, heads, num_heads, num_kv_heads)


def _launch_decode_gemm(tiling, x, weight, y, bias, residual, silu_mul, heads=(None,) * 8, num_heads=0, num_kv_heads=0):
    num_tokens, num_channels = x.shape
    assert takes(x) and weight.is_contiguous() and y.is_contiguous()
    grid = triton.cdiv(num_tokens, tiling.block_m), triton.cdiv(weight.shape[0], tiling.block_n), tiling.splits
    launch(
        decode_gemm_kernel,
        grid,
        x,
        weight,
        bias,
        residual,
        y,
        *heads,
        num_tokens,
        weight.shape[0] // (2 if silu_mul else 1),
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
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HAS_NORM=heads[0] is not None,
        num_warps=tiling.num_warps,
        **launch_options(x.device),
    )
    return y


def takes(x):
    """Whether `decode_gemm` takes this x: where it runs, of 16 bits, and each row where Triton knows it aligned."""
    aligned = x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    return aligned and x.element_size() == 2 and is_sm90(x.device)


def takes_heads(tiling, x, weight, k_cache):
    """Whether `decode_qkv_gemm` can, with this tiling: each program makes a head, of which a warp has whole rows."""
    one_head = tiling.splits == 1 and tiling.block_n == HEAD_SIZE.value and tiling.block_m == 16 * tiling.num_warps
    has_cache = k_cache is not None and k_cache.numel() > 0
    return takes(x) and one_head and has_cache and k_cache.shape[-1] == HEAD_SIZE.value and k_cache.dtype == x.dtype

"""Gluon, Triton's lower level: matrix products of thousands of tokens on NVIDIA Hopper, with what follows fused in.

Owns `prefill_gemm` (plain, or with SiLU and the product with up) and `prefill_qkv_gemm` (with per-head RMSNorm, rotary
embedding and the store of keys and values), and what they take. Knows nothing of layers, nor of what runs elsewhere.

One program per multiprocessor stays for the whole launch and computes every num_programs-th tile: CONSUMERS * 64 tokens
by 256 weight rows. Its parts run at their own pace:

    producer (1 warp)        loads x and weights by TMA into a ring of STAGES slots of 64 channels each
    consumers (4 warps)      64 of the tokens each, by all 256 weight rows: products on tensor cores, then the epilogue
                             in registers, and its result through shared memory by TMA

A consumer may be as far ahead of another one as the ring is long: while it is in a tile's epilogue, the products of the
others go on. Two barriers belong to each slot of the ring, used as in hopper_prefill.py: `full`, on which the copies'
bytes arrive, and `free`, on which every consumer arrives when its product of that slot is done.

In the accumulators of 64 x 256 a thread holds the same two columns of every 8, hence c + 64 and c + 128 where it holds
c. With SiLU one half of a tile's columns is of gate and the other one of up; otherwise the halves are two heads of 128,
whose own halves the rotation pairs. So none of it moves between threads, save for the sum of a head's squares.

M tokens, N rows of the weight, C channels; I results per token: N, or N / 2 with silu_mul; H query heads, K key-value
heads, D = 128.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_compat import (
    fence_async_shared,
    mbarrier,
    thread_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..launch import is_sm90, launch, launch_options, num_sms
from .qkv_epilogue_sm90 import HEAD_SIZE, angles, halves, look_up, norm, norm_weights, rotate

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # tokens of a consumer
WARPS = gl.constexpr(4)  # of a consumer
COLUMNS = gl.constexpr(256)  # weight rows of a tile
BLOCK_C = gl.constexpr(64)  # channels of a stage: 128 bytes, a row of the swizzled layout
PIECE = gl.constexpr(64)  # columns of a store
GROUP = gl.constexpr(16)  # blocks of tokens whose tiles follow each other
LOG2_E = gl.constexpr(1.4426950408889634)
# from so many tokens on it was faster than cuBLAS and what follows, on an H200
FEWEST = 1024
FEWEST_FOR_HEADS = 2048


@gluon.jit
def place(tile, num_blocks, num_columns):
    """(block of tokens, block of weight rows) of a tile: what runs at a time reads few of both, which L2 keeps."""
    first = tile // (GROUP * num_columns) * GROUP
    size = gl.minimum(num_blocks - first, GROUP)
    local = tile - first * num_columns
    return first + local % size, local // size


@gluon.jit
def produce(rings, x_desc, weight_desc, shape, row_stride, half_stride, STAGES: gl.constexpr):
    xs, weights, full, free = rings
    num_tokens, num_columns, num_steps = shape
    num_blocks = (num_tokens + CONSUMERS * ROWS - 1) // (CONSUMERS * ROWS)
    HALF: gl.constexpr = COLUMNS // 2
    n = 0  # steps so far
    for tile in range(gl.program_id(0), num_blocks * num_columns, gl.num_programs(0)):
        block, column = place(tile, num_blocks, num_columns)
        row = column * row_stride
        for step in range(num_steps):
            slot = n % STAGES
            c = step * BLOCK_C
            mbarrier.wait(free.index(slot), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), (CONSUMERS * ROWS + COLUMNS) * BLOCK_C * 2)
            for i in gl.static_range(CONSUMERS):
                x = xs.index(slot * CONSUMERS + i)
                tma_load(x_desc, [(block * CONSUMERS + i) * ROWS, c], full.index(slot), x)
            weight = weights.index(slot)
            tma_load(weight_desc, [row, c], full.index(slot), weight.slice(0, HALF))
            tma_load(weight_desc, [row + half_stride, c], full.index(slot), weight.slice(HALF, HALF))
            n += 1


@gluon.jit
def inverse(x):
    """1 / x by the hardware's approximation, which is off by one unit in the last place at most; 0 from 2**126 on."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def stage(staging, left, right, WHO: gl.constexpr):
    """Both [ROWS, PIECE] to a consumer's part of `staging`, once the stores before have read it."""
    tma_store_wait(0)
    thread_barrier()
    staging.index(2 * WHO).store(left.to(staging.dtype))
    staging.index(2 * WHO + 1).store(right.to(staging.dtype))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def store(y_desc, staging, row, column, WHO: gl.constexpr):
    """What is staged, to row, column and right of it; returns before it is done."""
    tma_store(y_desc, [row, column], staging.index(2 * WHO))
    tma_store(y_desc, [row, column + PIECE], staging.index(2 * WHO + 1))


@gluon.jit
def finish_heads(
    acc, cos, sin, heads, q_desc, staging, row, column, num_tokens,
    WHO: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """From a product with two heads' weights, be they of q, k or v, to what attention reads."""
    q_weight_ptr, k_weight_ptr, eps, slot_mapping_ptr, k_cache_ptr, v_cache_ptr = heads
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copies))
    d = gl.arange(0, PIECE, layout=gl.SliceLayout(0, copies))
    cache_slot = gl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(gl.int64)
    both = halves(acc)
    for i in gl.static_range(2):
        head = 2 * column + i
        x_1, x_2 = halves(both[i])
        if head < NUM_HEADS + NUM_KV_HEADS:
            if HAS_NORM:
                weight_ptr = q_weight_ptr
                if head >= NUM_HEADS:
                    weight_ptr = k_weight_ptr
                x_1, x_2 = norm(x_1, x_2, norm_weights(weight_ptr, WARPS), eps, staging.dtype)
            x_1, x_2 = rotate(x_1, x_2, cos, sin)
        stage(staging, x_1, x_2, WHO)
        if head < NUM_HEADS:
            store(q_desc, staging, row, head * HEAD_SIZE, WHO)
        else:
            cache_ptr = k_cache_ptr
            kv_head = head - NUM_HEADS
            if kv_head >= NUM_KV_HEADS:
                cache_ptr = v_cache_ptr
                kv_head -= NUM_KV_HEADS
            ptrs = cache_ptr + ((cache_slot * NUM_KV_HEADS + kv_head) * HEAD_SIZE)[:, None] + d[None, :]
            is_stored = (cache_slot >= 0)[:, None] & (d < PIECE)[None, :]
            gl.store(ptrs, staging.index(2 * WHO).load(copies), mask=is_stored)
            gl.store(ptrs + PIECE, staging.index(2 * WHO + 1).load(copies), mask=is_stored)


@gluon.jit
def consume(
    rings, staging, y_desc, shape, cos_sin_ptr, positions_ptr, heads,
    WHO: gl.constexpr, SILU_MUL: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    HAS_NORM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    xs, weights, full, free = rings
    num_tokens, num_columns, num_steps = shape
    num_blocks = (num_tokens + CONSUMERS * ROWS - 1) // (CONSUMERS * ROWS)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    n = 0  # steps so far
    for tile in range(gl.program_id(0), num_blocks * num_columns, gl.num_programs(0)):
        block, column = place(tile, num_blocks, num_columns)
        row = (block * CONSUMERS + WHO) * ROWS
        if NUM_HEADS > 0:
            is_rotated = 2 * column < NUM_HEADS + NUM_KV_HEADS
            position = look_up(positions_ptr, row, num_tokens, is_rotated, ROWS, WARPS)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout=sums)
        for step in range(num_steps):
            slot = n % STAGES
            mbarrier.wait(full.index(slot), (n // STAGES) & 1)
            x = xs.index(slot * CONSUMERS + WHO)
            acc = warpgroup_mma(x, weights.index(slot).permute((1, 0)), acc, is_async=True)
            # The product before is done, this one goes on.
            acc = warpgroup_mma_wait(1, [acc])
            thread_barrier()
            mbarrier.arrive(free.index((n + STAGES - 1) % STAGES), pred=step > 0)
            n += 1
        if NUM_HEADS > 0:
            cos, sin = angles(cos_sin_ptr, position)  # while the last product goes on
        acc = warpgroup_mma_wait(0, [acc])
        thread_barrier()
        mbarrier.arrive(free.index((n + STAGES - 1) % STAGES))

        # The branch also keeps the assembler from moving the arithmetic before the arrival.
        if row < num_tokens:
            if NUM_HEADS > 0:
                finish_heads(
                    acc, cos, sin, heads, y_desc, staging, row, column, num_tokens,
                    WHO, NUM_HEADS, NUM_KV_HEADS, HAS_NORM,
                )  # fmt: skip
            else:
                left, right = halves(acc)
                if SILU_MUL:
                    first, second = halves(left * inverse(1.0 + gl.exp2(left * -LOG2_E)) * right)
                    stage(staging, first, second, WHO)
                    store(y_desc, staging, row, column * (COLUMNS // 2), WHO)
                else:
                    first, second = halves(left)
                    stage(staging, first, second, WHO)
                    store(y_desc, staging, row, column * COLUMNS, WHO)
                    first, second = halves(right)
                    stage(staging, first, second, WHO)
                    store(y_desc, staging, row, column * COLUMNS + COLUMNS // 2, WHO)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["num_tokens", "num_columns", "num_steps"])
def product_kernel(
    x_desc,  # [M, C], in blocks of [ROWS, BLOCK_C]
    weight_desc,  # [N, C], [COLUMNS / 2, BLOCK_C]
    y_desc,  # [M, I], [ROWS, PIECE]; written here
    num_tokens,
    num_columns,  # blocks of COLUMNS weight rows
    num_steps,
    row_stride,  # from a block of weight rows to the next
    half_stride,  # from the first half of a block to the second
    q_weight_ptr,  # [D], only with HAS_NORM
    k_weight_ptr,  # [D], only with HAS_NORM
    eps,
    cos_sin_ptr,  # fp32 [max_position, D]; this and the rest only with NUM_HEADS
    positions_ptr,  # [M]
    slot_mapping_ptr,  # i32[M]
    k_cache_ptr,  # [slots, K, D], written here
    v_cache_ptr,
    SILU_MUL: gl.constexpr,
    NUM_HEADS: gl.constexpr,  # 0: y is the product
    NUM_KV_HEADS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """See above."""
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_desc.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    xs = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, BLOCK_C], shared)
    weights = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, BLOCK_C], shared)
    staging = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, ROWS, PIECE], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    fence_async_shared()
    if USE_PDL:
        gdc_wait()

    rings = (xs, weights, full, free)
    shape = (num_tokens, num_columns, num_steps)
    heads = (q_weight_ptr, k_weight_ptr, eps, slot_mapping_ptr, k_cache_ptr, v_cache_ptr)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                consume,
                (
                    rings, staging, y_desc, shape, cos_sin_ptr, positions_ptr, heads,
                    ZERO, SILU_MUL, NUM_HEADS, NUM_KV_HEADS, HAS_NORM, STAGES,
                ),
            ),
            (
                consume,
                (
                    rings, staging, y_desc, shape, cos_sin_ptr, positions_ptr, heads,
                    ONE, SILU_MUL, NUM_HEADS, NUM_KV_HEADS, HAS_NORM, STAGES,
                ),
            ),
            (produce, (rings, x_desc, weight_desc, shape, row_stride, half_stride, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------- launching


def takes(x, weight):
    """Whether `prefill_gemm` can, and whether there are tokens enough for it to be worth it."""
    num_rows, num_channels = weight.shape
    return (
        is_sm90(x.device)
        and x.element_size() == 2
        and x.dtype == weight.dtype
        and x.shape[0] >= FEWEST
        and num_channels % BLOCK_C.value == num_rows % COLUMNS.value == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        and weight.is_contiguous()
    )


def takes_heads(x, weight, k_cache):
    """Whether `prefill_qkv_gemm` can, and whether it is worth it."""
    has_pages = k_cache is not None and k_cache.numel() > 0
    return (
        x.shape[0] >= FEWEST_FOR_HEADS
        and takes(x, weight)
        and has_pages
        and k_cache.dtype == x.dtype
        and k_cache.shape[-1] == HEAD_SIZE.value
    )


def blocks(x, rows, columns):
    """A descriptor of x, of which blocks of rows by columns are copied."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], gl.NVMMASharedLayout(128, 16, 2))


def _launch_prefill_gemm(x, weight, y, *heads, silu_mul=False, num_heads=0, num_kv_heads=0):
    num_tokens, num_channels = x.shape
    num_rows, columns = weight.shape[0], COLUMNS.value
    assert y.is_contiguous() and y.shape[0] == num_tokens
    num_tiles = triton.cdiv(num_tokens, CONSUMERS.value * ROWS.value) * (num_rows // columns)
    launch(
        product_kernel,
        (min(num_sms(x.device), num_tiles),),
        blocks(x, ROWS.value, BLOCK_C.value),
        blocks(weight, columns // 2, BLOCK_C.value),
        blocks(y, ROWS.value, PIECE.value),
        num_tokens,
        num_rows // columns,
        num_channels // BLOCK_C.value,
        columns // 2 if silu_mul else columns,
        num_rows // 2 if silu_mul else columns // 2,
        *(heads or [None] * 8),
        SILU_MUL=silu_mul,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HAS_NORM=bool(heads) and heads[0] is not None,
        STAGES=4,
        num_warps=4,
        **launch_options(x.device),
    )
    return y


def prefill_gemm(x, weight, y, silu_mul=False):
    """y = [silu_and_mul] (x W^T), written to y [M, I]; for what `takes` says it takes.

    weight [N, C] and y are of x's dtype; what lies between is kept in fp32. Without silu_mul it is as fast as cuBLAS,
    which is used instead, and is there to be compared with it.
    """
    assert y.shape[1] == weight.shape[0] // (2 if silu_mul else 1)
    return _launch_prefill_gemm(x, weight, y, silu_mul=silu_mul)


def prefill_qkv_gemm(
    x, weight, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, k_cache, v_cache, num_heads, num_kv_heads
):
    """reference.norm_rope_store of x W^T, for what `takes_heads` says it takes; returns q alone, [M, H * D].

    weight [(H + 2K) * D, C]. Keys and values go to the caches only, and nowhere where the slot is -1. The product is
    not rounded before the norm and the rotation.
    """
    assert weight.shape[0] == (num_heads + 2 * num_kv_heads) * HEAD_SIZE.value
    assert (q_weight is None) == (k_weight is None)
    assert cos_sin.is_contiguous() and cos_sin.dtype.is_floating_point
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.dtype == v_cache.dtype == x.dtype
    q = x.new_empty((x.shape[0], num_heads * HEAD_SIZE.value))
    heads = (q_weight, k_weight, eps, cos_sin, positions, slot_mapping, k_cache, v_cache)
    return _launch_prefill_gemm(x, weight, q, *heads, num_heads=num_heads, num_kv_heads=num_kv_heads)

"""Gluon, Triton's lower level: matrix products of thousands of tokens on NVIDIA Hopper, with what follows fused in.

Owns `hopper_product` and what it takes. Knows nothing of layers; `linear.py` decides where it runs, and what runs
elsewhere.

One program per multiprocessor stays for the whole launch and computes every num_programs-th tile: CONSUMERS * 64 tokens
by 256 weight rows. Its parts run at their own pace:

    producer (1 warp)        loads x and weights by TMA into a ring of STAGES slots of 64 channels each
    consumers (4 warps)      64 of the tokens each, by all 256 weight rows: products on tensor cores, then the epilogue
                             in registers, and its result through shared memory by TMA

A consumer may be as far ahead of another one as the ring is long: while it is in a tile's epilogue, the products of the
others go on. Two barriers belong to each slot of the ring, used as in hopper_prefill.py: `full`, on which the copies'
bytes arrive, and `free`, on which every consumer arrives when its product of that slot is done.

In the accumulators of 64 x 256 a thread holds the same two columns of every 8, hence columns c and c + 128, and c + 64
as well: with SiLU the first half of a tile is of gate and the second of up.

M tokens, N rows of the weight, C channels; I results per token: N, or N / 2 with silu_mul.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gluon_names import (
    fence_async_shared,
    mbarrier,
    thread_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .inputs import is_hopper, launch_options, launcher, num_multiprocessors

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # tokens of a consumer
COLUMNS = gl.constexpr(256)  # weight rows of a tile
BLOCK_C = gl.constexpr(64)  # channels of a stage: 128 bytes, a row of the swizzled layout
PIECE = gl.constexpr(64)  # columns of a store
GROUP = gl.constexpr(16)  # blocks of tokens whose tiles follow each other
LOG2_E = gl.constexpr(1.4426950408889634)


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
def halves(x):
    """The left and the right half of x, whose columns a thread holds in both alike: nothing is moved."""
    width: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    left, right = gl.split(x.reshape([ROWS, 2, width]).permute((0, 2, 1)))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def store(y_desc, staging, left, right, row, column, WHO: gl.constexpr):
    """Both [ROWS, PIECE] to row, column and right of it; returns before it is done."""
    tma_store_wait(0)
    thread_barrier()
    staging.index(2 * WHO).store(left.to(y_desc.dtype))
    staging.index(2 * WHO + 1).store(right.to(y_desc.dtype))
    fence_async_shared()
    thread_barrier()
    tma_store(y_desc, [row, column], staging.index(2 * WHO))
    tma_store(y_desc, [row, column + PIECE], staging.index(2 * WHO + 1))


@gluon.jit
def consume(rings, staging, y_desc, shape, WHO: gl.constexpr, SILU_MUL: gl.constexpr, STAGES: gl.constexpr):
    xs, weights, full, free = rings
    num_tokens, num_columns, num_steps = shape
    num_blocks = (num_tokens + CONSUMERS * ROWS - 1) // (CONSUMERS * ROWS)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    n = 0  # steps so far
    for tile in range(gl.program_id(0), num_blocks * num_columns, gl.num_programs(0)):
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
        acc = warpgroup_mma_wait(0, [acc])
        thread_barrier()
        mbarrier.arrive(free.index((n + STAGES - 1) % STAGES))

        block, column = place(tile, num_blocks, num_columns)
        row = (block * CONSUMERS + WHO) * ROWS
        # The branch also keeps the assembler from moving the arithmetic before the arrival.
        if row < num_tokens:
            left, right = halves(acc)
            if SILU_MUL:
                first, second = halves(left / (1.0 + gl.exp2(left * -LOG2_E)) * right)
                store(y_desc, staging, first, second, row, column * (COLUMNS // 2), WHO)
            else:
                first, second = halves(left)
                store(y_desc, staging, first, second, row, column * COLUMNS, WHO)
                first, second = halves(right)
                store(y_desc, staging, first, second, row, column * COLUMNS + COLUMNS // 2, WHO)
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
    SILU_MUL: gl.constexpr,
    STAGES: gl.constexpr,
    CHAINED: gl.constexpr,
):
    """See above."""
    if CHAINED:
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
    if CHAINED:
        gdc_wait()

    rings = (xs, weights, full, free)
    shape = (num_tokens, num_columns, num_steps)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gl.warp_specialize(
        [
            (consume, (rings, staging, y_desc, shape, ZERO, SILU_MUL, STAGES)),
            (consume, (rings, staging, y_desc, shape, ONE, SILU_MUL, STAGES)),
            (produce, (rings, x_desc, weight_desc, shape, row_stride, half_stride, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )


# ----------------------------------------------------------------------------------------------------- launching


def takes(x, weight):
    """Whether `hopper_product` can, and whether there are tokens enough for it to be worth it."""
    num_rows, num_channels = weight.shape
    return (
        is_hopper(x.device)
        and x.element_size() == 2
        and x.dtype == weight.dtype
        and x.shape[0] >= 1024
        and num_channels % BLOCK_C.value == num_rows % COLUMNS.value == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        and weight.is_contiguous()
    )


def blocks(x, rows, columns):
    """A descriptor of x, of which blocks of rows by columns are copied."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], gl.NVMMASharedLayout(128, 16, 2))


def hopper_product(x, weight, y, silu_mul=False, stages=4):
    """y = [silu_and_mul] (x W^T), written to y [M, I]; for what `takes` says it takes.

    weight [N, C] and y are of x's dtype; what lies between is kept in fp32.
    """
    num_tokens, num_channels = x.shape
    num_rows, columns = weight.shape[0], COLUMNS.value
    assert y.shape == (num_tokens, num_rows // 2 if silu_mul else num_rows) and y.is_contiguous()
    num_tiles = triton.cdiv(num_tokens, CONSUMERS.value * ROWS.value) * (num_rows // columns)
    launcher(product_kernel, (min(num_multiprocessors(x.device), num_tiles),))(
        blocks(x, ROWS.value, BLOCK_C.value),
        blocks(weight, columns // 2, BLOCK_C.value),
        blocks(y, ROWS.value, PIECE.value),
        num_tokens,
        num_rows // columns,
        num_channels // BLOCK_C.value,
        columns // 2 if silu_mul else columns,
        num_rows // 2 if silu_mul else columns // 2,
        SILU_MUL=silu_mul,
        STAGES=stages,
        num_warps=4,
        **launch_options(x.device),
    )
    return y

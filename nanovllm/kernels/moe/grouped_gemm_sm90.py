"""Gluon: the experts' products for many tokens on NVIDIA Hopper, persistent and warp-specialized, in 16 bits.

Owns this `grouped_gemm`, and says what it `supports`; dispatch.py decides between it and grouped_gemm.py. Pipeline and
order of tiles are those of ../linear/prefill_gemm_sm90.py, but an expert's rows are not neighbours in memory:

    producer (4 warps)             gathers 128 rows of x with cp.async, and loads 256 rows of the weight with TMA
    2 consumer warpgroups          64 rows by 256 features each: wgmma, the epilogue in registers, stores by rows

Every warp finds a program's tiles from the experts' numbers of rows, so the grid is fixed (CUDA graphs). A consumer
without rows multiplies nothing, and where at most 128 features are left, a tile has 128.

T tokens, E experts, k of a token, K input channels, N output features.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_compat import async_load, copies_arrive, hopper, mbarrier, thread_barrier, tma_load
from ..launch import is_sm90, launch, launch_options, num_sms
from ..linear.prefill_gemm_sm90 import (
    BLOCK_M,
    BLOCK_N,
    CONSUMER_M,
    LINE_BYTES,
    NUM_CONSUMERS,
    STORE_N,
    act_and_mul,
    descriptor,
    split_halves,
    tile_coords,
)

PRODUCER_WARPS = gl.constexpr(4)
STEP = gl.constexpr(LINE_BYTES.value // 2)  # channels of a stage
MAX_EXPERTS = 256  # more counts of rows spill the producer's 40 registers


@gluon.jit
def load_counts(counts_ptr, NUM_EXPERTS: gl.constexpr, WIDTH: gl.constexpr):
    """Rows of each expert [WIDTH], and the number of row tiles up to its last; each warp has all of them."""
    layout: gl.constexpr = gl.BlockedLayout([WIDTH // 32], [32], [4], [0])
    expert = gl.arange(0, WIDTH, layout=layout)
    counts = gl.load(counts_ptr + expert, mask=expert < NUM_EXPERTS, other=0)
    return counts, gl.associative_scan((counts + BLOCK_M - 1) // BLOCK_M, 0, add)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def find_tile(tile, counts, ends, TILES_N: gl.constexpr):
    """(expert, its first row in the tile, its number of rows, tile_n)"""
    is_before = ends <= tile // TILES_N
    expert = gl.sum(is_before.to(gl.int32), 0)
    first = gl.max(gl.where(is_before, ends, 0), 0)
    last = gl.min(gl.where(is_before, 1 << 30, ends), 0)
    count = gl.max(gl.where(ends == last, counts, 0), 0)  # experts after it without rows have the same end
    tile_m, tile_n = tile_coords(tile - first * TILES_N, last - first, TILES_N)
    return expert, tile_m * BLOCK_M, count, tile_n


@gluon.jit
def produce(pipeline, x_ptr, weight_desc, rows_ptr, counts_ptr, num_tokens,
            TILES_N: gl.constexpr, HAS_HALF: gl.constexpr, NUM_EXPERTS: gl.constexpr, WIDTH: gl.constexpr,
            N: gl.constexpr, K: gl.constexpr, DIVISOR: gl.constexpr, GATED: gl.constexpr,
            STAGES: gl.constexpr):  # fmt: skip
    x_smem, weight_smem, full, empty = pipeline
    HALF: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [PRODUCER_WARPS, 1], [1, 0])
    offs_m = gl.arange(0, CONSUMER_M, layout=gl.SliceLayout(1, layout))
    offs_k = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))
    counts, ends = load_counts(counts_ptr, NUM_EXPERTS, WIDTH)
    n = 0  # steps over all tiles
    for tile in range(gl.program_id(0), gl.max(ends, 0) * TILES_N, gl.num_programs(0)):
        expert, first, count, tile_n = find_tile(tile, counts, ends, TILES_N)
        rows_of_expert = rows_ptr + expert.to(gl.int64) * num_tokens
        row_1 = gl.load(rows_of_expert + gl.minimum(first + offs_m, count - 1)) // DIVISOR
        row_2 = gl.load(rows_of_expert + gl.minimum(first + CONSUMER_M + offs_m, count - 1)) // DIVISOR
        ptrs_1 = x_ptr + row_1.to(gl.int64)[:, None] * K + offs_k[None, :]
        ptrs_2 = x_ptr + row_2.to(gl.int64)[:, None] * K + offs_k[None, :]
        is_whole = tile_n < (TILES_N - 1 if HAS_HALF else TILES_N)
        feature = expert * (2 * N if GATED else N) + tile_n * (HALF if GATED else BLOCK_N)
        for step in range(0, K, STEP):
            stage = n % STAGES
            mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BLOCK_N * LINE_BYTES, pred=is_whole)
            if HAS_HALF:
                mbarrier.expect(full.index(stage), HALF * LINE_BYTES, pred=tile_n == TILES_N - 1)
            weight = weight_smem.index(stage)
            tma_load(weight_desc, [feature, step], full.index(stage), weight.slice(0, HALF))
            right = [feature + (N if GATED else HALF), step]
            tma_load(weight_desc, right, full.index(stage), weight.slice(HALF, HALF), pred=is_whole)
            async_load(x_smem.index(stage * NUM_CONSUMERS), ptrs_1 + step)
            async_load(x_smem.index(stage * NUM_CONSUMERS + 1), ptrs_2 + step)
            copies_arrive(full.index(stage), increment_count=False)
            n += 1


@gluon.jit
def store_rows(staging, left, right, y_ptr, y_row, is_row, column, N: gl.constexpr, CONSUMER: gl.constexpr):
    """Store two tiles [CONSUMER_M, STORE_N] to rows of y, by way of shared memory: whole lines of a row."""
    layout: gl.constexpr = y_row.type.layout.parent
    thread_barrier()
    staging.index(2 * CONSUMER).store(left.to(staging.dtype))
    staging.index(2 * CONSUMER + 1).store(right.to(staging.dtype))
    thread_barrier()
    offs_n = column + gl.arange(0, STORE_N, layout=gl.SliceLayout(0, layout))
    ptrs = y_ptr + y_row.to(gl.int64)[:, None] * N + offs_n[None, :]
    gl.store(ptrs, staging.index(2 * CONSUMER).load(layout), mask=is_row[:, None] & (offs_n < N)[None, :])
    mask = is_row[:, None] & (offs_n + STORE_N < N)[None, :]
    gl.store(ptrs + STORE_N, staging.index(2 * CONSUMER + 1).load(layout), mask=mask)


@gluon.jit
def accumulate(n, acc, pipeline, CONSUMER: gl.constexpr, first: gl.constexpr, last: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    """Add the product of the channels from first to last; n: steps before. One MMA stays in flight."""
    x_smem, weight_smem, full, empty = pipeline
    for step in range(first, last, STEP):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        hopper.fence_async_shared()  # cp.async writes as the threads do, wgmma reads as the copy engine does
        x = x_smem.index(stage * NUM_CONSUMERS + CONSUMER)
        weight = weight_smem.index(stage).slice(0, acc.shape[1])
        acc = hopper.warpgroup_mma(x, weight.permute((1, 0)), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, [acc])
        thread_barrier()
        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), pred=step > 0)  # the stage of the MMA before
        n += 1
    return n, acc


@gluon.jit
def consume(pipeline, staging, y_ptr, rows_ptr, counts_ptr, weights_ptr, num_tokens,
            TILES_N: gl.constexpr, HAS_HALF: gl.constexpr, NUM_EXPERTS: gl.constexpr, WIDTH: gl.constexpr,
            N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr,
            STAGES: gl.constexpr, CONSUMER: gl.constexpr):  # fmt: skip
    full, empty = pipeline[2], pipeline[3]
    counts, ends = load_counts(counts_ptr, NUM_EXPERTS, WIDTH)
    n = 0  # steps over all tiles
    for tile in range(gl.program_id(0), gl.max(ends, 0) * TILES_N, gl.num_programs(0)):
        expert, first, count, tile_n = find_tile(tile, counts, ends, TILES_N)
        first += CONSUMER * CONSUMER_M
        y = (staging, y_ptr, rows_ptr + expert.to(gl.int64) * num_tokens, weights_ptr, num_tokens)
        if first >= count:
            for _ in range(0, K, STEP):
                mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
                mbarrier.arrive(empty.index(n % STAGES))
                n += 1
        elif HAS_HALF and tile_n == TILES_N - 1:
            n = multiply(n, pipeline, y, first, count, tile_n, N, K, TOP_K, ACT, GATED, STAGES, CONSUMER, BLOCK_N // 2)
        else:
            n = multiply(n, pipeline, y, first, count, tile_n, N, K, TOP_K, ACT, GATED, STAGES, CONSUMER, BLOCK_N)


@gluon.jit
def multiply(n, pipeline, y, first, count, tile_n, N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr,
             ACT: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr, CONSUMER: gl.constexpr,
             COLUMNS: gl.constexpr):  # fmt: skip
    """Multiply, and store, a consumer's rows of a tile with its first COLUMNS. n: steps before; returns those after."""
    HALF: gl.constexpr = BLOCK_N // 2
    empty = pipeline[3]
    staging, y_ptr, rows_ptr, weights_ptr, num_tokens = y
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # Loads that the epilogue needs, issued so early that none is waited for.
    place = first + gl.arange(0, CONSUMER_M, layout=gl.SliceLayout(1, store_layout))
    y_row = gl.load(rows_ptr + gl.minimum(place, count - 1))
    of_acc = gl.minimum(first + gl.arange(0, CONSUMER_M, layout=gl.SliceLayout(1, half_layout)), count - 1)
    row = gl.load(rows_ptr + of_acc)
    acc = gl.zeros([CONSUMER_M, COLUMNS], gl.float32, layout=acc_layout)
    EARLY: gl.constexpr = STEP if K > STEP else 0
    n, acc = accumulate(n, acc, pipeline, CONSUMER, 0, EARLY, STAGES)
    share = None
    if ACT is None:
        share = gl.load(weights_ptr + row)
    n, acc = accumulate(n, acc, pipeline, CONSUMER, EARLY, K, STAGES)
    acc = hopper.warpgroup_mma_wait(0, [acc])
    thread_barrier()
    mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES))
    if ACT is None:
        y_row = y_row % TOP_K * num_tokens + y_row // TOP_K
    if GATED:
        left, right = split_halves(acc)
        left, right = split_halves(act_and_mul(left, right, ACT))
        store_rows(staging, left, right, y_ptr, y_row, place < count, tile_n * HALF, N, CONSUMER)
    elif COLUMNS == HALF:
        store_half(acc, share, staging, y_ptr, y_row, place < count, tile_n * BLOCK_N, N, CONSUMER)
    else:
        left, right = split_halves(acc)
        store_half(left, share, staging, y_ptr, y_row, place < count, tile_n * BLOCK_N, N, CONSUMER)
        store_half(right, share, staging, y_ptr, y_row, place < count, tile_n * BLOCK_N + HALF, N, CONSUMER)
    return n


@gluon.jit
def store_half(x, share, staging, y_ptr, y_row, is_row, column, N: gl.constexpr, CONSUMER: gl.constexpr):
    """Store share * x, or without shares relu(x)^2."""
    if share is not None:
        x *= share[:, None]
    else:
        x = gl.maximum(x, 0.0)
        x *= x
    left, right = split_halves(x)
    store_rows(staging, left, right, y_ptr, y_row, is_row, column, N, CONSUMER)


@gluon.jit(do_not_specialize=["num_tokens"])
def grouped_gemm_sm90_kernel(
    x_ptr,  # [*, K] contiguous, written by a kernel before
    weight_desc,  # [E * N, K], with GATED [E * 2 N, K], gate before up features, in blocks of [BLOCK_N / 2, STEP]
    rows_ptr,  # i32[E, T]
    counts_ptr,  # i32[E]
    weights_ptr,  # fp32 [T * k], only without ACT
    y_ptr,  # with ACT [T * k, N], else [k, T, N]; written here
    num_tokens,
    TILES_N: gl.constexpr,
    HAS_HALF: gl.constexpr,  # the last of the tiles along N has at most half of the columns; not with GATED
    NUM_EXPERTS: gl.constexpr,
    WIDTH: gl.constexpr,  # a power of two, at least NUM_EXPERTS and 32
    N: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    ACT: gl.constexpr,  # x is [T, K], the result an activation; None: x is [T * k, K], the result weight * y
    GATED: gl.constexpr,  # the activation is act(gate) * up; else it is relu(x)^2
    STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = weight_desc.dtype
    smem_layout: gl.constexpr = gl.NVMMASharedLayout(LINE_BYTES, 16, 2)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * NUM_CONSUMERS, CONSUMER_M, STEP], smem_layout)
    weight_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, STEP], smem_layout)
    staging = gl.allocate_shared_memory(dtype, [2 * NUM_CONSUMERS, CONSUMER_M, STORE_N], smem_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * PRODUCER_WARPS)
        mbarrier.init(empty.index(i), count=NUM_CONSUMERS)
    hopper.fence_async_shared()
    if USE_PDL:
        gdc_wait()
    pipeline = (x_smem, weight_smem, full, empty)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    DIVISOR: gl.constexpr = 1 if ACT is None else TOP_K
    gl.warp_specialize(
        [
            (consume, (pipeline, staging, y_ptr, rows_ptr, counts_ptr, weights_ptr, num_tokens, TILES_N,
                       HAS_HALF, NUM_EXPERTS, WIDTH, N, K, TOP_K, ACT, GATED, STAGES, ZERO)),
            (consume, (pipeline, staging, y_ptr, rows_ptr, counts_ptr, weights_ptr, num_tokens, TILES_N,
                       HAS_HALF, NUM_EXPERTS, WIDTH, N, K, TOP_K, ACT, GATED, STAGES, ONE)),
            (produce, (pipeline, x_ptr, weight_desc, rows_ptr, counts_ptr, num_tokens, TILES_N,
                       HAS_HALF, NUM_EXPERTS, WIDTH, N, K, DIVISOR, GATED, STAGES)),
        ],
        [4, PRODUCER_WARPS],
        [232, 40],
    )  # fmt: skip


def supports(x, weight, y, bias, limit):
    """Whether `grouped_gemm` takes these Tokens, Weight and result: 16 bits, whole steps of channels, no biases."""
    (num_experts, num_features, num_channels), x = weight.data.shape, x.data
    return (
        is_sm90(x.device)
        and weight.scale is bias is None
        and not limit
        and x.element_size() == 2
        and x.dtype == weight.data.dtype == y.dtype
        and num_channels % STEP.value == num_features % 16 == weight.data.data_ptr() % 16 == x.data_ptr() % 16 == 0
        and num_experts <= MAX_EXPERTS
    )


def grouped_gemm(x, weight, rows, counts, y, top_k, act=None, weights=None):
    """See `grouped_gemm_sm90_kernel`, and grouped_gemm.py, where `supports`."""
    num_experts, num_features, num_channels = weight.data.shape
    is_gated = act not in (None, "relu2")
    num_outputs = num_features // 2 if is_gated else num_features
    assert x.data.is_contiguous() and weight.data.is_contiguous() and y.is_contiguous()
    width = BLOCK_N.value // 2
    tile_outputs = width if is_gated else 2 * width
    launch(
        grouped_gemm_sm90_kernel, (num_sms(y.device),),
        x.data, descriptor(weight.data.view(-1, num_channels), width, STEP.value), rows, counts, weights, y,
        rows.shape[1], TILES_N=triton.cdiv(num_outputs, tile_outputs),
        HAS_HALF=not is_gated and 0 < num_outputs % tile_outputs <= width, NUM_EXPERTS=num_experts,
        WIDTH=max(32, triton.next_power_of_2(num_experts)), N=num_outputs, K=num_channels, TOP_K=top_k, ACT=act,
        GATED=is_gated, STAGES=4, num_warps=4, **launch_options(y.device),
    )  # fmt: skip
    return y

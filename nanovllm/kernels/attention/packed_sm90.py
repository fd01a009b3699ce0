"""Attention in both directions within packed segments, for Hopper (sm_90), in Gluon: D 64 to 80, or 128.

Owns the kernel and the inputs it `supports`; packed.py runs everything else. The pipeline is prefill_sm90.py's: a
producer warp loads tiles of BLOCK_N keys and values by TMA into rings of STAGES slots, two consumers of 64 query rows
each multiply by WGMMA and keep the softmax in registers; one's MMAs run during the other's softmax. Work is simpler
here: without block tables and causal masks every tile of 128 query rows costs the same, so program i takes every
num_programs-th one, head by head.

A head of 72 or 80 is multiplied as 64 + 16 channels, in rings of their own, and not as 128. The last 8 of the 16
belong to the next head where D is 72: zeros in q cancel those of keys, and those of values are not stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_compat import (
    async_load,
    commit_group,
    fence_async_shared,
    mbarrier,
    thread_barrier,
    tma_load,
    wait_group,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..launch import is_sm90, launch, launch_options, num_sms
from .paging import LOG2_E, LOWEST
from .prefill_sm90 import ROWS, make_barriers, online_softmax_update, quad_view

TILE_ROWS = 2 * ROWS.value
TAIL = gl.constexpr(16)  # channels of a head after the first 64
BLOCK_N = gl.constexpr(128)


@gluon.jit
def load_work_item(tiles_ptr, item, num_tiles):
    """(head, first row, begin and end of the segment) of a work item."""
    row = tiles_ptr + item % num_tiles * 3
    return item // num_tiles, gl.load(row), gl.load(row + 1), gl.load(row + 2)


@gluon.jit
def load_keys_or_values(descs, row, column, ring, full, empty, n, STAGES: gl.constexpr):
    """TMA load of use n of the K or V rings: all channels of BLOCK_N rows."""
    slot = n % STAGES
    main, tail = ring
    WIDTH: gl.constexpr = main.shape[2]
    mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), BLOCK_N * (WIDTH if tail is None else WIDTH + TAIL) * 2)
    tma_load(descs[0], [row, column], full.index(slot), main.index(slot))
    if tail is not None:
        tma_load(descs[1], [row, column + WIDTH], full.index(slot), tail.index(slot))


@gluon.jit
def producer(rings, k_descs, v_descs, tiles_ptr, num_tiles, num_items, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr):
    _qs, ks, vs, k_full, k_empty, v_full, v_empty = rings
    n = 0  # use of the rings
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, _row, begin, end = load_work_item(tiles_ptr, item, num_tiles)
        num_key_tiles = (end - begin + BLOCK_N - 1) // BLOCK_N
        first = begin + (num_key_tiles - 1) * BLOCK_N
        # K of a tile, then V of the tile before: the order in which consumers wait for them.
        for tile in range(0, num_key_tiles):
            load_keys_or_values(k_descs, first, head * HEAD_SIZE, ks, k_full, k_empty, n, STAGES)
            if tile > 0:
                load_keys_or_values(v_descs, first + BLOCK_N, head * HEAD_SIZE, vs, v_full, v_empty, n - 1, STAGES)
            first -= BLOCK_N
            n += 1
        load_keys_or_values(v_descs, first + BLOCK_N, head * HEAD_SIZE, vs, v_full, v_empty, n - 1, STAGES)


@gluon.jit
def load_q(qs, q_ptr, head, row, end, stride, FIRST: gl.constexpr, HEAD_SIZE: gl.constexpr):
    """Start the copy of a consumer's rows of q from channel FIRST on, zeros where there is no token or channel."""
    WIDTH: gl.constexpr = qs.shape[1]
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copies))
    d = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, copies))
    ptrs = q_ptr + (rows.to(gl.int64) * stride)[:, None] + (head * HEAD_SIZE + d)[None, :]
    async_load(qs, ptrs, mask=(rows < end)[:, None] & (d < HEAD_SIZE)[None, :])


@gluon.jit
def load_query_rows(qs, q_ptr, head, row, end, stride, WARPGROUP: gl.constexpr, HEAD_SIZE: gl.constexpr):
    main, tail = qs
    load_q(main.index(WARPGROUP), q_ptr, head, row, end, stride, 0, HEAD_SIZE)
    if tail is not None:
        load_q(tail.index(WARPGROUP), q_ptr, head, row, end, stride, main.shape[2], HEAD_SIZE)
    commit_group()


@gluon.jit
def start_scores(q, q_tail, ks, slot, no_scores):
    """Start Q K^T of a tile."""
    main, tail = ks
    s = warpgroup_mma(q, main.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    if tail is not None:
        s = warpgroup_mma(q_tail, tail.index(slot).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def zero_rows(values, num_rows, WIDTH: gl.constexpr):
    """Zero the rows of a tile from num_rows on: 0 * NaN of another segment would be NaN. Consumers write the same."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    for i in gl.static_range(BLOCK_N // 16):
        if i * 16 + 16 > num_rows:
            v = values.slice(i * 16, 16)
            row = i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
            v.store(gl.where((row < num_rows)[:, None], v.load(layout), 0.0))


@gluon.jit
def store_rows(acc, out_ptr, head, row, end, stride, FIRST: gl.constexpr, HEAD_SIZE: gl.constexpr):
    WIDTH: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    d = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    ptrs = out_ptr + (rows.to(gl.int64) * stride)[:, None] + (head * HEAD_SIZE + d)[None, :]
    result = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), layout)
    gl.store(ptrs, result, mask=(rows < end)[:, None] & (d < HEAD_SIZE)[None, :])


@gluon.jit
def consumer(
    rings, q_ptr, out_ptr, tiles_ptr, num_tiles, num_items, scale_log2e, stride_q, stride_out,
    WARPGROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    qs, ks, vs, k_full, k_empty, v_full, v_empty = rings
    dtype: gl.constexpr = ks[0].dtype
    WIDTH: gl.constexpr = ks[0].shape[2]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    tail_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
    q_operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    p_operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    p_tail_operand: gl.constexpr = gl.DotOperandLayout(0, tail_sums, 2)
    HAS_TAIL: gl.constexpr = ks[1] is not None
    PENDING: gl.constexpr = 2 if HAS_TAIL else 1  # MMAs of a tile's P V

    n = 0  # use of the rings
    item = gl.program_id(0)
    head, row, begin, end = load_work_item(tiles_ptr, item, num_tiles)
    load_query_rows(qs, q_ptr, head, row + WARPGROUP * ROWS, end, stride_q, WARPGROUP, HEAD_SIZE)
    while item < num_items:
        wait_group(0)
        fence_async_shared()
        thread_barrier()
        q = qs[0].index(WARPGROUP).load(q_operand)
        q_tail = q
        if HAS_TAIL:
            q_tail = qs[1].index(WARPGROUP).load(q_operand)
        num_key_tiles = (end - begin + BLOCK_N - 1) // BLOCK_N
        num_last = end - begin - (num_key_tiles - 1) * BLOCK_N  # keys of the last tile
        no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=scores)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, layout=sums)
        acc_tail = gl.zeros([ROWS, TAIL], gl.float32, layout=tail_sums)
        row_max = gl.full([ROWS], LOWEST, gl.float32, layout=gl.SliceLayout(1, scores))
        row_sum = gl.sum(gl.sum(quad_view(no_scores), 1), 2)

        # The last key tile.
        slot = n % STAGES
        mbarrier.wait(k_full.index(slot), (n // STAGES) & 1)
        s = start_scores(q, q_tail, ks, slot, no_scores)
        s = warpgroup_mma_wait(0, [s])
        thread_barrier()
        mbarrier.arrive(k_empty.index(slot))
        key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores))
        s = gl.where((key < num_last)[None, :], s, -float("inf"))
        p, _, row_max, row_sum = online_softmax_update(s, row_max, row_sum, scale_log2e)
        p = gl.convert_layout(p.to(dtype), p_operand)
        if num_last < BLOCK_N:
            mbarrier.wait(v_full.index(slot), (n // STAGES) & 1)
            zero_rows(vs[0].index(slot), num_last, WIDTH)
            if HAS_TAIL:
                zero_rows(vs[1].index(slot), num_last, TAIL)
            fence_async_shared()
            thread_barrier()

        mbarrier.wait(k_full.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=num_key_tiles > 1)
        for i in range(1, num_key_tiles):
            v_slot = n % STAGES
            slot = (n + 1) % STAGES
            s = start_scores(q, q_tail, ks, slot, no_scores)
            mbarrier.wait(v_full.index(v_slot), (n // STAGES) & 1)
            acc = warpgroup_mma(p, vs[0].index(v_slot), acc, is_async=True)
            if HAS_TAIL:
                p_tail = gl.convert_layout(p, p_tail_operand, assert_trivial=True)
                acc_tail = warpgroup_mma(p_tail, vs[1].index(v_slot), acc_tail, is_async=True)
            s = warpgroup_mma_wait(PENDING, [s])
            thread_barrier()
            mbarrier.arrive(k_empty.index(slot))
            p32, correction, row_max, row_sum = online_softmax_update(s, row_max, row_sum, scale_log2e)
            # Placed here to keep ptxas from moving the softmax after the wait for acc.
            mbarrier.wait(k_full.index((n + 2) % STAGES), ((n + 2) // STAGES) & 1, pred=i + 1 < num_key_tiles)
            acc, acc_tail, p32 = warpgroup_mma_wait(0, [acc, acc_tail, p32])
            thread_barrier()
            mbarrier.arrive(v_empty.index(v_slot))
            acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, sums))[:, None]
            if HAS_TAIL:
                acc_tail = acc_tail * gl.convert_layout(correction, gl.SliceLayout(1, tail_sums))[:, None]
            p = gl.convert_layout(p32.to(dtype), p_operand)
            n += 1

        slot = n % STAGES
        mbarrier.wait(v_full.index(slot), (n // STAGES) & 1)
        acc = warpgroup_mma(p, vs[0].index(slot), acc, is_async=True)
        if HAS_TAIL:
            p_tail = gl.convert_layout(p, p_tail_operand, assert_trivial=True)
            acc_tail = warpgroup_mma(p_tail, vs[1].index(slot), acc_tail, is_async=True)
        # Prefetch the next q: all warps have read this one to registers, before the barriers above.
        item += gl.num_programs(0)
        this_head, this_row, this_end = head, row + WARPGROUP * ROWS, end
        if item < num_items:
            head, row, begin, end = load_work_item(tiles_ptr, item, num_tiles)
            load_query_rows(qs, q_ptr, head, row + WARPGROUP * ROWS, end, stride_q, WARPGROUP, HEAD_SIZE)
        acc, acc_tail = warpgroup_mma_wait(0, [acc, acc_tail])
        thread_barrier()
        mbarrier.arrive(v_empty.index(slot))
        n += 1

        inverse = 1.0 / gl.sum(row_sum, 1)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, sums))[:, None]
        store_rows(acc, out_ptr, this_head, this_row, this_end, stride_out, 0, HEAD_SIZE)
        if HAS_TAIL:
            acc_tail = acc_tail * gl.convert_layout(inverse, gl.SliceLayout(1, tail_sums))[:, None]
            store_rows(acc_tail, out_ptr, this_head, this_row, this_end, stride_out, WIDTH, HEAD_SIZE)


@gluon.jit(do_not_specialize=["num_tiles", "num_items"])
def packed_attention_kernel(
    q_ptr,  # [T, H * D]
    k_desc, k_tail_desc,  # [T, H * D]; the tail's is None unless D is above 64 and no power of two
    v_desc, v_tail_desc,
    out_ptr,  # [T, H * D]
    tiles_ptr,  # i32[N, 3]: first row of a query tile, begin and end of its segment
    num_tiles, num_items, scale_log2e, stride_q, stride_out,
    HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = k_desc.dtype
    WIDTH: gl.constexpr = k_desc.block_type.shape[1]
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tail_shared: gl.constexpr = gl.NVMMASharedLayout(2 * TAIL, 16, 2)
    qs = (gl.allocate_shared_memory(dtype, [2, ROWS, WIDTH], shared), None)
    ks = (gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, WIDTH], shared), None)
    vs = (gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, WIDTH], shared), None)
    if k_tail_desc is not None:
        qs = (qs[0], gl.allocate_shared_memory(dtype, [2, ROWS, TAIL], tail_shared))
        ks = (ks[0], gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, TAIL], tail_shared))
        vs = (vs[0], gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, TAIL], tail_shared))
    k_full, v_full = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    k_empty, v_empty = make_barriers(STAGES, 2), make_barriers(STAGES, 2)
    fence_async_shared()
    if USE_PDL:
        gdc_wait()
    rings = (qs, ks, vs, k_full, k_empty, v_full, v_empty)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gl.warp_specialize(
        [
            (consumer, (rings, q_ptr, out_ptr, tiles_ptr, num_tiles, num_items, scale_log2e, stride_q, stride_out,
                        ZERO, HEAD_SIZE, STAGES)),
            (consumer, (rings, q_ptr, out_ptr, tiles_ptr, num_tiles, num_items, scale_log2e, stride_q, stride_out,
                        ONE, HEAD_SIZE, STAGES)),
            (producer, (rings, (k_desc, k_tail_desc), (v_desc, v_tail_desc), tiles_ptr, num_tiles, num_items,
                        HEAD_SIZE, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def supports(q, rows):
    """Whether the kernel can run, for tiles of this number of query rows."""
    return (
        is_sm90(q.device)
        and q.element_size() == 2
        and q.shape[2] in (64, 72, 80, 128)
        and rows == TILE_ROWS
        and q.stride(0) % 8 == q.data_ptr() % 16 == 0
    )


def packed_attention_sm90(q, k, v, tiles, scale, out):
    """`packed_attention` for inputs that it `supports`."""
    _, num_heads, head_size = q.shape
    width = 128 if head_size == 128 else 64
    num_items = num_heads * len(tiles)
    launch(
        packed_attention_kernel, (min(num_sms(q.device), num_items),),
        q, *descriptors(k, width), *descriptors(v, width), out, tiles, len(tiles), num_items, scale * LOG2_E.value,
        q.stride(0), out.stride(0), HEAD_SIZE=head_size, STAGES=256 // width, num_warps=4,
        **launch_options(q.device),
    )  # fmt: skip


def descriptors(x, width):
    """TMA descriptors of keys or values [T, H, D]: of ``width`` channels, and of a tail or None."""
    shape, strides = [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1]
    main = TensorDescriptor(x, shape, strides, [BLOCK_N.value, width], gl.NVMMASharedLayout(128, 16, 2))
    if x.shape[2] == width:
        return main, None
    tail = gl.NVMMASharedLayout(2 * TAIL.value, 16, 2)
    return main, TensorDescriptor(x, shape, strides, [BLOCK_N.value, TAIL.value], tail)

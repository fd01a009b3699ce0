"""Paged prefill attention for Hopper (sm_90), in Gluon, Triton's lower level: D 64, 128, 256 or 512. Legend: paging.py.

Persistent kernel: producer/consumer warp specialization, mbarrier full/empty rings (as FlashAttention-3,
arXiv:2407.08608). Owns the kernel and the inputs it `supports`; prefill.py runs everything else.

    producer (1 warp)         pops work items from a counter in global memory, publishes each in the ring `work_items`,
                              and loads its K and V tiles of BLOCK_N tokens by TMA into rings of STAGES slots
    consumer 0, 1 (4 warps)   64 rows each: WGMMA, online softmax in registers

With an FP8 KV cache the MMAs run in fp16, as do q and P. The producer's rings then hold e4m3, in RAW_STAGES slots:

    converter (4 warps)       each tile to fp16 in the rings of STAGES slots, in the order in which it was loaded

The converter pops the work items too. It is the only consumer of the producer's rings, and the consumers' producer.
Scales of keys multiply the scores; scales of values multiply the result. Attention sinks join the sum at the end.

A work item is a query tile of one KV head: M = 128 rows (token, head of the group), cut at positions that are multiples
of TOKENS = M // GQA_GROUP; with 7 heads to a group 126 rows are used. One consumer's WGMMA runs during the other's
softmax, and P V of a tile during the softmax of the next. Key tiles go from last to first. Where BLOCK_N is a multiple
of TOKENS, only the last tile needs the causal mask. A window cuts the first tiles; those before it are not read.

Heads of 512 are HALVES of 256 in the rings, and M = 64: the sum of a consumer's rows would not fit into its registers.
Both consumers compute the scores of the same rows, and each adds up one half of the values. Each loads one half of q,
which both read: `q_full` and `q_empty` take an arrival of each consumer.

Use n of a ring of R slots is slot n % R. A full barrier takes 1 arrival (the producer, plus the bytes of K or V), an
empty barrier 2 (the consumers): one more for a work item if there is a converter, and only 1 for e4m3 tiles. The
producer waits for `empty` with the opposite parity, which a new barrier satisfies. All sides count the same uses: a
work item takes `key_tiles` slots of K, and the same number of V.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...quantization.fp8.numbers import E4M3
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
from ..launch import is_sm90, launch, launch_options, num_sms, zero_counters
from .paging import LOG2_E, LOWEST

MAX_SEQS = gl.constexpr(256)  # per launch
ROWS = gl.constexpr(64)  # per consumer
# KV head (-1: end of work), token of row 0, the sequence's first token and end, position of row 0
ITEM_FIELDS = gl.constexpr(5)
ITEM_STAGES = gl.constexpr(2)


@gluon.jit
def key_tiles(p0, token0, q_begin, q_end, WINDOW: gl.constexpr, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr):
    """(last key tile, number of key tiles) of a work item, p0 the position of its row 0."""
    last = p0 // BLOCK_N
    if BLOCK_N % TOKENS != 0:  # the rows may end in a later tile than they begin in, but not beyond the context
        last = (p0 + gl.minimum(q_end - token0, TOKENS) - 1) // BLOCK_N
    num_tiles = last + 1
    if WINDOW > 0:
        # From the window of the first row that holds a token: blocks before it may be gone, and 0 * NaN is NaN.
        num_tiles -= gl.maximum(p0 + gl.maximum(q_begin - token0, 0) - WINDOW + 1, 0) // BLOCK_N
    return last, num_tiles


@gluon.jit
def part_range(
    PART: gl.constexpr, p0, last, num_tiles, WINDOW: gl.constexpr, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Tiles begin .. end - 1, counted down from the last one, of a part of a consumer's key loop."""
    begin = 1
    if BLOCK_N % TOKENS != 0:  # tiles before `begin` have keys after p0
        begin = gl.maximum(last - (p0 + 1) // BLOCK_N + 1, 1)
    end = num_tiles
    if WINDOW > 0:  # tiles from `end` on have keys that the last row does not attend
        cut = (gl.maximum(p0 + TOKENS - WINDOW, 0) + BLOCK_N - 1) // BLOCK_N
        end = gl.maximum(gl.minimum(last - cut + 1, num_tiles), begin)
    if PART == 0:
        begin, end = 1, gl.minimum(begin, num_tiles)
    if PART == 2:
        begin, end = end, num_tiles
    return begin, end


@gluon.jit
def _load_field(work_items, index):
    return gl.sum(work_items.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def pop_work_item(work_items, item_full, item_empty, t):
    """Use t of the ring: read the work item, then release its slot."""
    slot = t % ITEM_STAGES
    mbarrier.wait(item_full.index(slot), (t // ITEM_STAGES) & 1)
    kv_head = _load_field(work_items, slot * ITEM_FIELDS)
    token0 = _load_field(work_items, slot * ITEM_FIELDS + 1)
    q_begin = _load_field(work_items, slot * ITEM_FIELDS + 2)
    q_end = _load_field(work_items, slot * ITEM_FIELDS + 3)
    p0 = _load_field(work_items, slot * ITEM_FIELDS + 4)
    thread_barrier()
    mbarrier.arrive(item_empty.index(slot))
    return kv_head, token0, q_begin, q_end, p0


@gluon.jit
def holds_token(m, token, q_begin, q_end, GQA_GROUP: gl.constexpr, M: gl.constexpr):
    """Mask of the rows m of a work item that hold a token of the sequence."""
    is_token = (token >= q_begin) & (token < q_end)
    if M % GQA_GROUP != 0:  # the rows left over belong to the next work item
        is_token &= m < M // GQA_GROUP * GQA_GROUP
    return is_token


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _load_tile(desc, row, column, ring, full, empty, n,
               HALVES: gl.constexpr, BYTES: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """TMA load of use n of a K or V ring."""
    slot = n % STAGES
    mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    for half in gl.static_range(HALVES):
        tma_load(desc, [row, column + half * 256], full.index(slot), ring.index(slot * HALVES + half))


@gluon.jit
def producer(
    rings, k_desc, v_desc, batch,
    GQA_GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _, ks, vs, work_items, k_full, k_empty, v_full, v_empty, item_full, item_empty, _q_full, _q_empty = rings
    (cu_seqlens_ptr, req_indices_ptr, context_lens_ptr, tables_ptr, counter_ptr, num_seqs, num_kv_heads,
     stride_table) = batch  # fmt: skip
    HALVES: gl.constexpr = 2 if HEAD_SIZE == 512 else 1
    TOKENS: gl.constexpr = 2 * ROWS // HALVES // GQA_GROUP
    BYTES: gl.constexpr = BLOCK_N * HEAD_SIZE * (ks.dtype.primitive_bitwidth // 8)
    seqs: gl.constexpr = gl.BlockedLayout([MAX_SEQS // 32], [32], [1], [0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])

    # i32[MAX_SEQS]: query tiles of each sequence. Order of work: head by head, so that a head's keys and values stay in
    # L2; within a head longest first: level q holds tile q of every sequence that has one, and levels go down.
    s = gl.arange(0, MAX_SEQS, layout=seqs)
    begins = gl.load(cu_seqlens_ptr + s, mask=s < num_seqs, other=0)
    num_new = gl.load(cu_seqlens_ptr + s + 1, mask=s < num_seqs, other=0) - begins
    contexts = gl.load(context_lens_ptr + s, mask=s < num_seqs, other=0)
    q_tiles = gl.where(num_new > 0, (contexts - 1) // TOKENS - (contexts - num_new) // TOKENS + 1, 0)
    num_items = gl.sum(q_tiles, 0) * num_kv_heads
    max_q_tiles = gl.max(q_tiles, 0)

    item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    kv_head = 0
    level = max_q_tiles - 1
    level_begin = 0
    level_size = gl.sum((q_tiles > level).to(gl.int32), 0)
    t = 0  # use of the ring of work items
    n = 0  # use of the rings of K and V
    while item < num_items:
        while item >= level_begin + level_size:
            level_begin += level_size
            kv_head = gl.where(level == 0, kv_head + 1, kv_head)
            level = gl.where(level == 0, max_q_tiles, level) - 1
            level_size = gl.sum((q_tiles > level).to(gl.int32), 0)
        rank = gl.associative_scan((q_tiles > level).to(gl.int32), 0, _add)
        seq = gl.sum((rank <= item - level_begin).to(gl.int32), 0)

        q_begin = gl.load(cu_seqlens_ptr + seq)
        q_end = gl.load(cu_seqlens_ptr + seq + 1)
        context = gl.load(context_lens_ptr + seq)
        table_ptr = tables_ptr + gl.load(req_indices_ptr + seq).to(gl.int64) * stride_table
        num_cached = context - (q_end - q_begin)
        p0 = (num_cached // TOKENS + level) * TOKENS

        slot = t % ITEM_STAGES
        mbarrier.wait(item_empty.index(slot), ((t // ITEM_STAGES) & 1) ^ 1)
        work_items.index(slot * ITEM_FIELDS).store(gl.full([1], kv_head, gl.int32, one))
        work_items.index(slot * ITEM_FIELDS + 1).store(gl.full([1], q_begin - num_cached + p0, gl.int32, one))
        work_items.index(slot * ITEM_FIELDS + 2).store(gl.full([1], q_begin, gl.int32, one))
        work_items.index(slot * ITEM_FIELDS + 3).store(gl.full([1], q_end, gl.int32, one))
        work_items.index(slot * ITEM_FIELDS + 4).store(gl.full([1], p0, gl.int32, one))
        thread_barrier()
        mbarrier.arrive(item_full.index(slot))
        t += 1

        # K of a tile, then V of the tile before: the order in which consumers wait for them.
        column = kv_head * HEAD_SIZE
        last, num_tiles = key_tiles(p0, q_begin - num_cached + p0, q_begin, q_end, WINDOW, TOKENS, BLOCK_N)
        first = last * BLOCK_N
        v_row = 0
        next_item = item
        for tile in range(0, num_tiles):
            row = gl.load(table_ptr + first // BLOCK_SIZE) * BLOCK_SIZE + first % BLOCK_SIZE
            _load_tile(k_desc, row, column, ks, k_full, k_empty, n, HALVES, BYTES, STAGES)
            if tile == 0:
                next_item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
            else:
                _load_tile(v_desc, v_row, column, vs, v_full, v_empty, n - 1, HALVES, BYTES, STAGES)
            v_row = row
            first -= BLOCK_N
            n += 1
        _load_tile(v_desc, v_row, column, vs, v_full, v_empty, n - 1, HALVES, BYTES, STAGES)
        item = next_item

    # Each program pops one item past the end; the last of them resets the counter for the next launch.
    if item == num_items + gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
    slot = t % ITEM_STAGES
    mbarrier.wait(item_empty.index(slot), ((t // ITEM_STAGES) & 1) ^ 1)
    work_items.index(slot * ITEM_FIELDS).store(gl.full([1], -1, gl.int32, one))
    thread_barrier()
    mbarrier.arrive(item_full.index(slot))


@gluon.jit
def load_q(
    qs, q_ptr, kv_head, token0, q_begin, q_end, stride_q_token, stride_q_head,
    ROW0: gl.constexpr, D0: gl.constexpr, GQA_GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Start the copy of a consumer's rows, or half, of q, zeros where there is no token."""
    WIDTH: gl.constexpr = 256 if HEAD_SIZE == 512 else HEAD_SIZE
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    m = ROW0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copies))
    d = D0 + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, copies))
    token = token0 + m // GQA_GROUP
    offs = token.to(gl.int64) * stride_q_token + (kv_head * GQA_GROUP + m % GQA_GROUP) * stride_q_head
    ptrs = q_ptr + offs[:, None]
    is_token = holds_token(m, token, q_begin, q_end, GQA_GROUP, M)
    async_load(qs, ptrs + d[None, :], mask=is_token[:, None] & (d < HEAD_SIZE)[None, :])
    commit_group()


@gluon.jit
def mask_scores(
    s, p0, first, ROW0: gl.constexpr, GQA_GROUP: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Set scores to -inf for the keys from `first` on that a row, at its position, does not attend."""
    key = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))
    position = p0 + (ROW0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout))) // GQA_GROUP
    attended = key[None, :] <= position[:, None]
    if WINDOW > 0:
        attended &= key[None, :] > position[:, None] - WINDOW
    return gl.where(attended, s, -float("inf"))


@gluon.jit
def start_scores(q, qs, ks, slot, no_scores, HALVES: gl.constexpr):
    """Start the WGMMAs of a tile of scores, with q or both its halves."""
    if HALVES == 1:
        s = warpgroup_mma(q, ks.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    else:
        s = warpgroup_mma(qs.index(0), ks.index(slot * 2).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma(qs.index(1), ks.index(slot * 2 + 1).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def quad_view(x):
    """[ROWS, BLOCK_N] as [ROWS, BLOCK_N / 8, 4, 2]; the 4 are threads of a quad: only that dimension needs shuffles."""
    return x.reshape([ROWS, x.shape[1] // 8, 4, 2])


@gluon.jit
def online_softmax_update(s, row_max, row_sum, scale_log2e):
    """P of a tile of scores, the rescale factor of the accumulator, new row_max and row_sum.

    row_sum [ROWS, 4] is reduced across threads at the end only.
    """
    tile_max = gl.max(gl.max(gl.max(quad_view(s), 1), 2), 1)
    new_max = gl.maximum(row_max, gl.convert_layout(tile_max, row_max.type.layout, assert_trivial=True) * scale_log2e)
    p = gl.exp2(s * scale_log2e - new_max[:, None])
    correction = gl.exp2(row_max - new_max)
    sums = gl.sum(gl.sum(quad_view(p), 1), 2)
    rows: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    row_sum = row_sum * gl.convert_layout(correction, rows, assert_trivial=True)[:, None] + sums
    return p, correction, new_max, row_sum


@gluon.jit
def consumer(
    tensors, rings, WARPGROUP: gl.constexpr, GQA_GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    (q_ptr, out_ptr, kv_scale_ptr, sinks_ptr, num_kv_heads, scale_log2e,
     stride_q_token, stride_q_head, stride_out_token, stride_out_head) = tensors  # fmt: skip
    qs, ks, vs, work_items, k_full, k_empty, v_full, v_empty, item_full, item_empty, q_full, q_empty = rings
    HALVES: gl.constexpr = 2 if HEAD_SIZE == 512 else 1
    WIDTH: gl.constexpr = HEAD_SIZE // HALVES
    M: gl.constexpr = 2 * ROWS // HALVES
    ROW0: gl.constexpr = WARPGROUP * ROWS if HALVES == 1 else 0
    MY_HALF: gl.constexpr = WARPGROUP if HALVES == 2 else 0
    D0: gl.constexpr = MY_HALF * WIDTH
    dtype: gl.constexpr = ks.dtype  # dtype of the MMAs; with an FP8 cache fp16
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    q_operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    sum_rows: gl.constexpr = gl.SliceLayout(1, sums)
    stores: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    TOKENS: gl.constexpr = M // GQA_GROUP
    # Parts of the key loop after its first tile: tiles with a causal mask, tiles without a mask, tiles cut by a window.
    BEGIN_PART: gl.constexpr = 1 if BLOCK_N % TOKENS == 0 else 0
    END_PART: gl.constexpr = 3 if WINDOW > 0 else 2
    my_q = qs.index(WARPGROUP)

    t = 0  # use of the ring of work items
    n = 0  # use of the rings of K and V
    kv_head, token0, q_begin, q_end, p0 = pop_work_item(work_items, item_full, item_empty, t)
    if kv_head >= 0:
        load_q(my_q, q_ptr, kv_head, token0, q_begin, q_end, stride_q_token, stride_q_head,
               ROW0, D0, GQA_GROUP, HEAD_SIZE, M)  # fmt: skip
    while kv_head >= 0:
        wait_group(0)
        fence_async_shared()
        thread_barrier()
        if HALVES == 2:
            mbarrier.arrive(q_full.index(0))
            mbarrier.wait(q_full.index(0), t & 1)
        # Heads of 256 and more: q has no room in registers beside the accumulator.
        q = my_q if HEAD_SIZE > 128 else my_q.load(q_operand).to(dtype)
        score_scale = scale_log2e
        if kv_scale_ptr is not None:
            score_scale *= gl.load(kv_scale_ptr + kv_head)
        last, num_tiles = key_tiles(p0, token0, q_begin, q_end, WINDOW, TOKENS, BLOCK_N)
        no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=scores)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, layout=sums)
        row_max = gl.full([ROWS], LOWEST, gl.float32, layout=gl.SliceLayout(1, scores))
        row_sum = gl.sum(gl.sum(quad_view(no_scores), 1), 2)

        # The last key tile.
        slot = n % STAGES
        mbarrier.wait(k_full.index(slot), (n // STAGES) & 1)
        s = start_scores(q, qs, ks, slot, no_scores, HALVES)
        s = warpgroup_mma_wait(0, [s])
        thread_barrier()
        mbarrier.arrive(k_empty.index(slot))
        first = last * BLOCK_N
        s = mask_scores(s, p0, first, ROW0, GQA_GROUP, WINDOW, BLOCK_N)
        p, _, row_max, row_sum = online_softmax_update(s, row_max, row_sum, score_scale)
        p = gl.convert_layout(p.to(dtype), p_operand)
        context = p0 + (q_end - token0)
        if first + BLOCK_N > context:
            # 0 * NaN of a stale slot would be NaN. Both consumers write the same values, or one half each.
            mbarrier.wait(v_full.index(slot), (n // STAGES) & 1)
            for i in gl.static_range(BLOCK_N // 16):
                if first + i * 16 + 16 > context:
                    v = vs.index(slot * HALVES + MY_HALF).slice(i * 16, 16)
                    v_key = first + i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, stores))
                    v.store(gl.where((v_key < context)[:, None], v.load(stores), 0.0))
            fence_async_shared()
            thread_barrier()

        mbarrier.wait(k_full.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=num_tiles > 1)
        for PART in gl.static_range(BEGIN_PART, END_PART):
            begin, end = part_range(PART, p0, last, num_tiles, WINDOW, TOKENS, BLOCK_N)
            for i in range(begin, end):
                v_slot = n % STAGES
                slot = (n + 1) % STAGES
                s = start_scores(q, qs, ks, slot, no_scores, HALVES)
                mbarrier.wait(v_full.index(v_slot), (n // STAGES) & 1)
                acc = warpgroup_mma(p, vs.index(v_slot * HALVES + MY_HALF), acc, is_async=True)
                s = warpgroup_mma_wait(1, [s])
                thread_barrier()
                mbarrier.arrive(k_empty.index(slot))
                if PART != 1:
                    s = mask_scores(s, p0, (last - i) * BLOCK_N, ROW0, GQA_GROUP, WINDOW, BLOCK_N)
                p32, correction, row_max, row_sum = online_softmax_update(s, row_max, row_sum, score_scale)
                # Placed here to keep ptxas from moving the softmax after the wait for acc.
                mbarrier.wait(k_full.index((n + 2) % STAGES), ((n + 2) // STAGES) & 1, pred=i + 1 < num_tiles)
                acc, p32 = warpgroup_mma_wait(0, [acc, p32])
                thread_barrier()
                mbarrier.arrive(v_empty.index(v_slot))
                acc = acc * gl.convert_layout(correction, sum_rows)[:, None]
                p = gl.convert_layout(p32.to(dtype), p_operand)
                n += 1

        slot = n % STAGES
        mbarrier.wait(v_full.index(slot), (n // STAGES) & 1)
        acc = warpgroup_mma(p, vs.index(slot * HALVES + MY_HALF), acc, is_async=True)
        if sinks_ptr is not None:
            heads = (ROW0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, row_sum.type.layout))) % GQA_GROUP
            sinks = gl.load(sinks_ptr + kv_head * GQA_GROUP + heads).to(gl.float32)
        # Prefetch the next q: all warps have read this one, or their WGMMAs have, before the barriers above.
        if HALVES == 2:  # the other consumer's have, too
            mbarrier.arrive(q_empty.index(0))
            mbarrier.wait(q_empty.index(0), t & 1)
        t += 1
        next_head, next_token0, next_begin, next_end, next_p0 = pop_work_item(work_items, item_full, item_empty, t)
        if next_head >= 0:
            load_q(my_q, q_ptr, next_head, next_token0, next_begin, next_end, stride_q_token, stride_q_head,
                   ROW0, D0, GQA_GROUP, HEAD_SIZE, M)  # fmt: skip
        acc = warpgroup_mma_wait(0, [acc])
        thread_barrier()
        mbarrier.arrive(v_empty.index(slot))
        n += 1

        total = gl.sum(row_sum, 1)
        if sinks_ptr is not None:  # see paging.sink_weights
            distance = sinks * LOG2_E - gl.convert_layout(row_max, total.type.layout, assert_trivial=True)
            total += gl.exp2(gl.minimum(distance, 126.0))
        acc = acc * gl.convert_layout(1.0 / total, sum_rows)[:, None]
        if kv_scale_ptr is not None:
            acc *= gl.load(kv_scale_ptr + num_kv_heads + kv_head)
        result = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), stores)
        m = ROW0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, stores))
        d = D0 + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, stores))
        token = token0 + m // GQA_GROUP
        offs = token.to(gl.int64) * stride_out_token + (kv_head * GQA_GROUP + m % GQA_GROUP) * stride_out_head
        is_token = holds_token(m, token, q_begin, q_end, GQA_GROUP, M)
        gl.store(out_ptr + offs[:, None] + d[None, :], result, mask=is_token[:, None])
        kv_head, token0, q_begin, q_end, p0 = next_head, next_token0, next_begin, next_end, next_p0


@gluon.jit
def convert_tile(raw, raw_full, raw_empty, ring, full, empty, n, BLOCK_N: gl.constexpr, HEAD_SIZE: gl.constexpr,
                 RAW_STAGES: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Convert use n of both rings, an e4m3 tile [BLOCK_N, HEAD_SIZE], to fp16."""
    ROWS_AT_ONCE: gl.constexpr = 32  # bounds the registers
    # Eight numbers per thread: adjacent stores of 16 bytes. With 16 numbers they conflict in the same banks.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0])
    raw_slot = n % RAW_STAGES
    slot = n % STAGES
    mbarrier.wait(raw_full.index(raw_slot), (n // RAW_STAGES) & 1)
    mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
    for i in gl.static_range(BLOCK_N // ROWS_AT_ONCE):
        x = raw.index(raw_slot).slice(i * ROWS_AT_ONCE, ROWS_AT_ONCE).load(layout)
        ring.index(slot).slice(i * ROWS_AT_ONCE, ROWS_AT_ONCE).store(x.to(gl.float16))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(raw_empty.index(raw_slot))
    mbarrier.arrive(full.index(slot))


@gluon.jit
def converter(raw_rings, rings, WINDOW: gl.constexpr, GQA_GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr,
              BLOCK_N: gl.constexpr, RAW_STAGES: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    (_, raw_ks, raw_vs, work_items, raw_k_full, raw_k_empty, raw_v_full, raw_v_empty, item_full, item_empty,
     _, _) = raw_rings  # fmt: skip
    _, ks, vs, _, k_full, k_empty, v_full, v_empty, _, _, _, _ = rings
    t = 0  # use of the ring of work items
    n = 0  # use of the rings of K and V
    kv_head, token0, q_begin, q_end, p0 = pop_work_item(work_items, item_full, item_empty, t)
    while kv_head >= 0:
        _last, num_tiles = key_tiles(p0, token0, q_begin, q_end, WINDOW, 2 * ROWS // GQA_GROUP, BLOCK_N)
        for tile in range(0, num_tiles):
            convert_tile(raw_ks, raw_k_full, raw_k_empty, ks, k_full, k_empty, n,
                         BLOCK_N, HEAD_SIZE, RAW_STAGES, STAGES)  # fmt: skip
            if tile > 0:
                convert_tile(raw_vs, raw_v_full, raw_v_empty, vs, v_full, v_empty, n - 1,
                             BLOCK_N, HEAD_SIZE, RAW_STAGES, STAGES)  # fmt: skip
            n += 1
        convert_tile(raw_vs, raw_v_full, raw_v_empty, vs, v_full, v_empty, n - 1,
                     BLOCK_N, HEAD_SIZE, RAW_STAGES, STAGES)  # fmt: skip
        t += 1
        kv_head, token0, q_begin, q_end, p0 = pop_work_item(work_items, item_full, item_empty, t)


@gluon.jit
def make_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit(do_not_specialize=["num_seqs", "num_kv_heads"])
def prefill_kernel(
    q_ptr,  # [T, H, D]
    k_desc,  # [NB * BS, K * D]
    v_desc,  # [NB * BS, K * D]
    kv_scale_ptr,  # fp32 [2, K], None unless the cache is e4m3
    sinks_ptr,  # [H], None without attention sinks
    cu_seqlens_ptr,  # i32[S + 1]
    req_indices_ptr,  # i32[S]
    context_lens_ptr,  # i32[S]
    tables_ptr,  # i32[R, max_blocks]
    out_ptr,  # [T, H, D]
    counter_ptr,  # i32[1], zero between launches
    num_seqs, num_kv_heads, scale_log2e,
    stride_q_token, stride_q_head, stride_table, stride_out_token, stride_out_head,
    GQA_GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Registers per thread: 40 for the producer and 232 for each consumer; with a converter, 56 for it and 208 each."""
    if USE_PDL:
        gdc_launch_dependents()
    IS_FP8: gl.constexpr = kv_scale_ptr is not None
    dtype: gl.constexpr = gl.float16 if IS_FP8 else k_desc.dtype  # dtype of the MMAs
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALVES: gl.constexpr = 2 if HEAD_SIZE == 512 else 1
    WIDTH: gl.constexpr = HEAD_SIZE // HALVES
    qs = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2, ROWS, WIDTH], shared)
    ks = gl.allocate_shared_memory(dtype, [STAGES * HALVES, BLOCK_N, WIDTH], shared)
    vs = gl.allocate_shared_memory(dtype, [STAGES * HALVES, BLOCK_N, WIDTH], shared)
    if IS_FP8:
        RAW_STAGES: gl.constexpr = STAGES // 2
        raw_shared: gl.constexpr = gl.NVMMASharedLayout(HEAD_SIZE, 8, 2)
        raw_ks = gl.allocate_shared_memory(k_desc.dtype, [RAW_STAGES, BLOCK_N, HEAD_SIZE], raw_shared)
        raw_vs = gl.allocate_shared_memory(k_desc.dtype, [RAW_STAGES, BLOCK_N, HEAD_SIZE], raw_shared)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work_items = gl.allocate_shared_memory(gl.int32, [ITEM_STAGES * ITEM_FIELDS, 1], plain)
    k_full, v_full = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    k_empty, v_empty = make_barriers(STAGES, 2), make_barriers(STAGES, 2)
    if IS_FP8:
        raw_k_full, raw_v_full = make_barriers(RAW_STAGES, 1), make_barriers(RAW_STAGES, 1)
        raw_k_empty, raw_v_empty = make_barriers(RAW_STAGES, 1), make_barriers(RAW_STAGES, 1)
    item_full, item_empty = make_barriers(ITEM_STAGES, 1), make_barriers(ITEM_STAGES, 3 if IS_FP8 else 2)
    q_full, q_empty = item_full, item_empty  # not used
    if HALVES == 2:
        q_full, q_empty = make_barriers(1, 2), make_barriers(1, 2)
    fence_async_shared()
    if USE_PDL:
        gdc_wait()

    tensors = (
        q_ptr, out_ptr, kv_scale_ptr, sinks_ptr, num_kv_heads, scale_log2e, stride_q_token, stride_q_head,
        stride_out_token, stride_out_head,
    )  # fmt: skip
    rings = (qs, ks, vs, work_items, k_full, k_empty, v_full, v_empty, item_full, item_empty, q_full, q_empty)
    batch = (
        cu_seqlens_ptr, req_indices_ptr, context_lens_ptr, tables_ptr, counter_ptr, num_seqs, num_kv_heads, stride_table
    )  # fmt: skip
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    if IS_FP8:
        raw_rings = (
            qs, raw_ks, raw_vs, work_items, raw_k_full, raw_k_empty, raw_v_full, raw_v_empty, item_full, item_empty,
            q_full, q_empty,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (consumer, (tensors, rings, ZERO, GQA_GROUP, HEAD_SIZE, WINDOW, BLOCK_N, STAGES)),
                (consumer, (tensors, rings, ONE, GQA_GROUP, HEAD_SIZE, WINDOW, BLOCK_N, STAGES)),
                (converter, (raw_rings, rings, WINDOW, GQA_GROUP, HEAD_SIZE, BLOCK_N, RAW_STAGES, STAGES)),
                (producer, (
                    raw_rings, k_desc, v_desc, batch, GQA_GROUP, HEAD_SIZE, BLOCK_SIZE, WINDOW, BLOCK_N, RAW_STAGES
                )),
            ],
            [4, 4, 1],
            [208, 56, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (tensors, rings, ZERO, GQA_GROUP, HEAD_SIZE, WINDOW, BLOCK_N, STAGES)),
                (consumer, (tensors, rings, ONE, GQA_GROUP, HEAD_SIZE, WINDOW, BLOCK_N, STAGES)),
                (producer, (rings, k_desc, v_desc, batch, GQA_GROUP, HEAD_SIZE, BLOCK_SIZE, WINDOW, BLOCK_N, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


def tiling(max_seqlen_q, head_size, is_fp8):
    """(BLOCK_N, STAGES): short tiles mask fewer scores, long ones cost less each. Figures: docs/experiments.md.

    With a converter and heads of 128 a consumer's registers hold the scores of 64 keys, not of 128.
    """
    if head_size >= 256:
        return (64, 2) if head_size == 256 else (32, 2)
    block_n = 128 if max_seqlen_q >= 1024 and not (is_fp8 and head_size == 128) else 64
    return block_n, (256 // block_n) * (128 // head_size)


def supports(q, k_cache, max_seqlen_q, softcap=0.0):
    """Whether the kernel can run and is faster than prefill.py's, which wins where sequences have few rows."""
    _, block_size, num_kv_heads, head_size = k_cache.shape
    gqa_group = q.shape[1] // num_kv_heads
    return (
        is_sm90(q.device)
        and q.element_size() == 2
        and k_cache.dtype in (q.dtype, E4M3)
        and (head_size in (64, 128) or (head_size in (256, 512) and k_cache.dtype == q.dtype))  # no room for e4m3, too
        and not softcap
        and gqa_group <= 16
        and max_seqlen_q * gqa_group > 64
        and block_size % tiling(max_seqlen_q, head_size, k_cache.dtype == E4M3)[0] == 0
        and k_cache.is_contiguous()
        and q.stride(0) % 16 == q.stride(1) % 16 == q.data_ptr() % 16 == 0
    )


def prefill_attention_sm90(
    q, k_cache, v_cache, cu_seqlens_q, req_indices, context_lens, block_tables, scale, max_seqlen_q, window, kv_scale,
    out, sinks=None,
):  # fmt: skip
    """`paged_prefill_attention` for inputs that it `supports`, in launches of at most MAX_SEQS sequences."""
    num_blocks, block_size, num_kv_heads, head_size = k_cache.shape
    gqa_group = q.shape[1] // num_kv_heads
    is_fp8 = k_cache.dtype == E4M3
    block_n, stages = tiling(max_seqlen_q, head_size, is_fp8)
    shape, strides = [num_blocks * block_size, num_kv_heads * head_size], [num_kv_heads * head_size, 1]
    layout = gl.NVMMASharedLayout(head_size, 8, 2) if is_fp8 else gl.NVMMASharedLayout(128, 16, 2)
    box = [block_n, min(head_size, 256)]
    k_desc, v_desc = (TensorDescriptor(x, shape, strides, box, layout) for x in (k_cache, v_cache))
    tokens = (128 if head_size <= 256 else 64) // gqa_group
    for first in range(0, req_indices.shape[0], MAX_SEQS.value):
        num_seqs = min(MAX_SEQS.value, req_indices.shape[0] - first)
        max_items = num_seqs * num_kv_heads * ((max_seqlen_q + 2 * tokens - 2) // tokens)
        launch(
            prefill_kernel, (min(num_sms(q.device), max_items),),
            q, k_desc, v_desc, kv_scale if is_fp8 else None, sinks, cu_seqlens_q[first:], req_indices[first:],
            context_lens[first:], block_tables, out, zero_counters(1, q.device), num_seqs, num_kv_heads,
            scale * LOG2_E.value,
            q.stride(0), q.stride(1), block_tables.stride(0), out.stride(0), out.stride(1),
            GQA_GROUP=gqa_group, HEAD_SIZE=head_size, BLOCK_SIZE=block_size, WINDOW=window,
            BLOCK_N=block_n, STAGES=stages, num_warps=4, **launch_options(q.device),
        )  # fmt: skip
    return out

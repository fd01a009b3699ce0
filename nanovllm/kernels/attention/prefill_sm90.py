"""Gluon, Triton's lower level: prefill attention on NVIDIA Hopper, for 16 bits and a head size of 128.

Owns `prefill_attention_sm90` and what it takes; `prefill_attention.py` decides where it runs, and has what runs
elsewhere.

One program per multiprocessor stays for the whole launch. Its work items are runs of query tokens with all query heads
that share a KV head: 128 rows (token, head of the group), cut at positions that are multiples of TOKENS = 128 / GROUP.
Three parts of the program run at their own pace:

    producer (1 warp)          takes items from a counter in global memory, announces each in `items`, and loads its K
                               and V tiles of BLOCK_N tokens into rings of STAGES slots, the last tile of keys first
    consumer 0, 1 (4 warps)    64 of the rows each: products on tensor cores, softmax in registers

While one consumer computes exponentials the other one's products run; and within a consumer the product P V of a tile
runs during the softmax of the next. Only an item's last keys need the causal mask (BLOCK_N is a multiple of TOKENS),
and they come first, so the loop over the others has no masks.

Every ring is used in the same order by all who touch it. Use number n of a ring of R slots is slot n % R, in its round
n // R. Two barriers belong to each slot:

    full    1 arrival per round, from the producer (for K and V the copy's bytes as well).
            A consumer waits for round n // R, whose parity is (n // R) & 1.
    free    2 arrivals per round, one from each consumer when all its warps are done with use n.
            The producer waits for round n // R - 1, parity ((n // R) & 1) ^ 1; a new barrier counts as if a round of
            parity 1 had just ended, hence the first use of a slot waits for nothing.

Consumers and producer count the same uses: every item has position // BLOCK_N + 1 tiles for each of them, where
position is that of its row 0, and each tile is one use of the K ring and one of the V ring.

T packed query tokens, S sequences, H query heads, K KV heads, GROUP = H / K, NB blocks of BS tokens, D = 128.
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
from ..launch import is_sm90, launch, launch_options, num_sms, zero_counters
from .paging import LOG2_E, LOWEST

HEAD_SIZE = gl.constexpr(128)
ROWS = gl.constexpr(64)  # of a consumer
# of an item: KV head, or -1 at the end; token of row 0; the sequence's first token and its end; position of row 0
FIELDS = gl.constexpr(5)
ITEMS = gl.constexpr(2)  # slots
MAX_SEQS = gl.constexpr(256)  # of a launch


# ------------------------------------------------------------------------------------------------------ producer


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def produce(
    rings, k_desc, v_desc, cu_seqlens_ptr, req_indices_ptr, context_lens_ptr, tables_ptr, counter_ptr, num_seqs, num_kv_heads,
    stride_table, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _, ks, vs, items, k_full, k_free, v_full, v_free, item_full, item_free = rings
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    BYTES: gl.constexpr = BLOCK_N * HEAD_SIZE * 2
    seqs: gl.constexpr = gl.BlockedLayout([MAX_SEQS // 32], [32], [1], [0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])

    # i32[MAX_SEQS]: runs of a sequence. Their order: head by head, so that a head's keys and values stay in the L2
    # cache, and within it the longest first: the last run of the longest sequence, ..., the first run of every one.
    s = gl.arange(0, MAX_SEQS, layout=seqs)
    begins = gl.load(cu_seqlens_ptr + s, mask=s < num_seqs, other=0)
    num_new = gl.load(cu_seqlens_ptr + s + 1, mask=s < num_seqs, other=0) - begins
    contexts = gl.load(context_lens_ptr + s, mask=s < num_seqs, other=0)
    runs = gl.where(num_new > 0, (contexts - 1) // TOKENS - (contexts - num_new) // TOKENS + 1, 0)
    num_items = gl.sum(runs, 0) * num_kv_heads
    most_runs = gl.max(runs, 0)

    item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    kv_head = 0
    level = most_runs - 1  # run `level` of all sequences that have as many
    level_begin = 0
    level_size = gl.sum((runs > level).to(gl.int32), 0)
    t = 0  # items so far
    n = 0  # tiles so far
    while item < num_items:
        while item >= level_begin + level_size:
            level_begin += level_size
            kv_head = gl.where(level == 0, kv_head + 1, kv_head)
            level = gl.where(level == 0, most_runs, level) - 1
            level_size = gl.sum((runs > level).to(gl.int32), 0)
        rank = gl.associative_scan((runs > level).to(gl.int32), 0, _plus)
        seq = gl.sum((rank <= item - level_begin).to(gl.int32), 0)

        q_begin = gl.load(cu_seqlens_ptr + seq)
        q_end = gl.load(cu_seqlens_ptr + seq + 1)
        context = gl.load(context_lens_ptr + seq)
        table_ptr = tables_ptr + gl.load(req_indices_ptr + seq).to(gl.int64) * stride_table
        old = context - (q_end - q_begin)
        p0 = (old // TOKENS + level) * TOKENS

        slot = t % ITEMS
        mbarrier.wait(item_free.index(slot), ((t // ITEMS) & 1) ^ 1)
        items.index(slot * FIELDS).store(gl.full([1], kv_head, gl.int32, one))
        items.index(slot * FIELDS + 1).store(gl.full([1], q_begin - old + p0, gl.int32, one))
        items.index(slot * FIELDS + 2).store(gl.full([1], q_begin, gl.int32, one))
        items.index(slot * FIELDS + 3).store(gl.full([1], q_end, gl.int32, one))
        items.index(slot * FIELDS + 4).store(gl.full([1], p0, gl.int32, one))
        thread_barrier()
        mbarrier.arrive(item_full.index(slot))
        t += 1

        # K of a tile, then V of the tile before: as the consumers ask for them.
        column = kv_head * HEAD_SIZE
        first = p0 // BLOCK_N * BLOCK_N
        v_row = 0
        following = item
        for tile in range(0, p0 // BLOCK_N + 1):
            row = gl.load(table_ptr + first // BLOCK_SIZE) * BLOCK_SIZE + first % BLOCK_SIZE
            slot = n % STAGES
            mbarrier.wait(k_free.index(slot), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(k_full.index(slot), BYTES)
            tma_load(k_desc, [row, column], k_full.index(slot), ks.index(slot))
            if tile == 0:
                following = gl.atomic_add(counter_ptr, 1, sem="relaxed")
            else:
                slot = (n - 1) % STAGES
                mbarrier.wait(v_free.index(slot), (((n - 1) // STAGES) & 1) ^ 1)
                mbarrier.expect(v_full.index(slot), BYTES)
                tma_load(v_desc, [v_row, column], v_full.index(slot), vs.index(slot))
            v_row = row
            first -= BLOCK_N
            n += 1
        slot = (n - 1) % STAGES
        mbarrier.wait(v_free.index(slot), (((n - 1) // STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(slot), BYTES)
        tma_load(v_desc, [v_row, column], v_full.index(slot), vs.index(slot))
        item = following

    # Every program asks once more than it gets: whoever asks last leaves the counter as the next launch expects it.
    if item == num_items + gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
    slot = t % ITEMS
    mbarrier.wait(item_free.index(slot), ((t // ITEMS) & 1) ^ 1)
    items.index(slot * FIELDS).store(gl.full([1], -1, gl.int32, one))
    thread_barrier()
    mbarrier.arrive(item_full.index(slot))


# ----------------------------------------------------------------------------------------------------- consumers


@gluon.jit
def _field(items, index):
    return gl.sum(items.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def take_item(items, item_full, item_free, t):
    """Item number t; then it is another's turn to write the slot."""
    slot = t % ITEMS
    mbarrier.wait(item_full.index(slot), (t // ITEMS) & 1)
    kv_head = _field(items, slot * FIELDS)
    token0 = _field(items, slot * FIELDS + 1)
    q_begin = _field(items, slot * FIELDS + 2)
    q_end = _field(items, slot * FIELDS + 3)
    p0 = _field(items, slot * FIELDS + 4)
    thread_barrier()
    mbarrier.arrive(item_free.index(slot))
    return kv_head, token0, q_begin, q_end, p0


@gluon.jit
def load_q(
    qs, q_ptr, kv_head, token0, q_begin, q_end, stride_q_token, stride_q_head, WHO: gl.constexpr, GROUP: gl.constexpr
):
    """Asks for a consumer's rows of q, zeros where there is no token."""
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    m = WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copies))
    d = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, copies))
    token = token0 + m // GROUP
    ptrs = q_ptr + (token.to(gl.int64) * stride_q_token + (kv_head * GROUP + m % GROUP) * stride_q_head)[:, None]
    is_token = (token >= q_begin) & (token < q_end)
    async_load(qs, ptrs + d[None, :], mask=is_token[:, None] & (d < HEAD_SIZE)[None, :])
    commit_group()


@gluon.jit
def quarters(x):
    """[ROWS, BLOCK_N] as [ROWS, BLOCK_N / 8, 4, 2]: of the four, a thread of the accumulators holds one."""
    return x.reshape([ROWS, x.shape[1] // 8, 4, 2])


@gluon.jit
def softmax(s, row_max, row_sum, scale_log2e):
    """Of a tile of scores; and by what all that was summed before is to be multiplied.

    row_sum, [ROWS, 4], is added up across threads at the end only.
    """
    tile_max = gl.max(gl.max(gl.max(quarters(s), 1), 2), 1)
    new_max = gl.maximum(row_max, gl.convert_layout(tile_max, row_max.type.layout, assert_trivial=True) * scale_log2e)
    p = gl.exp2(s * scale_log2e - new_max[:, None])
    correction = gl.exp2(row_max - new_max)
    sums = gl.sum(gl.sum(quarters(p), 1), 2)
    rows: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    row_sum = row_sum * gl.convert_layout(correction, rows, assert_trivial=True)[:, None] + sums
    return p, correction, new_max, row_sum


@gluon.jit
def consume(
    tensors, rings, WHO: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
):
    q_ptr, out_ptr, scale_log2e, stride_q_token, stride_q_head, stride_out_token, stride_out_head = tensors
    qs, ks, vs, items, k_full, k_free, v_full, v_free, item_full, item_free = rings
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    p_operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    q_operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    sum_rows: gl.constexpr = gl.SliceLayout(1, sums)
    stores: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    my_q = qs.index(WHO)

    t = 0  # items so far
    n = 0  # tiles so far
    kv_head, token0, q_begin, q_end, p0 = take_item(items, item_full, item_free, t)
    if kv_head >= 0:
        load_q(my_q, q_ptr, kv_head, token0, q_begin, q_end, stride_q_token, stride_q_head, WHO, GROUP)
    while kv_head >= 0:
        wait_group(0)
        fence_async_shared()
        thread_barrier()
        q = my_q.load(q_operand)
        num_tiles = p0 // BLOCK_N + 1
        no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=scores)
        acc = gl.zeros([ROWS, HEAD_SIZE], gl.float32, layout=sums)
        row_max = gl.full([ROWS], LOWEST, gl.float32, layout=gl.SliceLayout(1, scores))
        row_sum = gl.sum(gl.sum(quarters(no_scores), 1), 2)

        # The last keys, not all of which all rows see.
        slot = n % STAGES
        mbarrier.wait(k_full.index(slot), (n // STAGES) & 1)
        s = warpgroup_mma(q, ks.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        thread_barrier()
        mbarrier.arrive(k_free.index(slot))
        first = p0 // BLOCK_N * BLOCK_N
        key = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores))
        position = p0 + (WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores))) // GROUP
        s = gl.where(key[None, :] <= position[:, None], s, -float("inf"))
        p, _, row_max, row_sum = softmax(s, row_max, row_sum, scale_log2e)
        p = gl.convert_layout(p.to(dtype), p_operand)
        context = p0 + (q_end - token0)
        if first + BLOCK_N > context:
            # 0 * NaN of a stale slot would be NaN. Both consumers write the same zeros, and elsewhere what is there.
            mbarrier.wait(v_full.index(slot), (n // STAGES) & 1)
            for i in gl.static_range(BLOCK_N // 16):
                if first + i * 16 + 16 > context:
                    part = vs.index(slot).slice(i * 16, 16)
                    v_key = first + i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, stores))
                    part.store(gl.where((v_key < context)[:, None], part.load(stores), 0.0))
            fence_async_shared()
            thread_barrier()

        mbarrier.wait(k_full.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=num_tiles > 1)
        for i in range(1, num_tiles):
            v_slot = n % STAGES
            slot = (n + 1) % STAGES
            s = warpgroup_mma(q, ks.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_slot), (n // STAGES) & 1)
            acc = warpgroup_mma(p, vs.index(v_slot), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            thread_barrier()
            mbarrier.arrive(k_free.index(slot))
            p32, correction, row_max, row_sum = softmax(s, row_max, row_sum, scale_log2e)
            # Waited for already here, because it keeps the assembler from moving the softmax behind the wait for acc.
            mbarrier.wait(k_full.index((n + 2) % STAGES), ((n + 2) // STAGES) & 1, pred=i + 1 < num_tiles)
            acc, p32 = warpgroup_mma_wait(0, [acc, p32])
            thread_barrier()
            mbarrier.arrive(v_free.index(v_slot))
            acc = acc * gl.convert_layout(correction, sum_rows)[:, None]
            p = gl.convert_layout(p32.to(dtype), p_operand)
            n += 1

        slot = n % STAGES
        mbarrier.wait(v_full.index(slot), (n // STAGES) & 1)
        acc = warpgroup_mma(p, vs.index(slot), acc, is_async=True)
        # The next item's q, while this one ends: all warps are past the last product with q.
        t += 1
        next_head, next_token0, next_begin, next_end, next_p0 = take_item(items, item_full, item_free, t)
        if next_head >= 0:
            load_q(
                my_q, q_ptr, next_head, next_token0, next_begin, next_end, stride_q_token, stride_q_head, WHO, GROUP
            )
        acc = warpgroup_mma_wait(0, [acc])
        thread_barrier()
        mbarrier.arrive(v_free.index(slot))
        n += 1

        acc = acc * gl.convert_layout(1.0 / gl.sum(row_sum, 1), sum_rows)[:, None]
        result = gl.convert_layout(acc.to(dtype), stores)
        m = WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, stores))
        d = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, stores))
        token = token0 + m // GROUP
        offs = token.to(gl.int64) * stride_out_token + (kv_head * GROUP + m % GROUP) * stride_out_head
        is_token = (token >= q_begin) & (token < q_end)
        gl.store(out_ptr + offs[:, None] + d[None, :], result, mask=is_token[:, None])
        kv_head = next_head
        token0 = next_token0
        q_begin = next_begin
        q_end = next_end
        p0 = next_p0


@gluon.jit(do_not_specialize=["num_seqs", "num_kv_heads"])
def prefill_kernel(
    q_ptr,  # [T, H, D]
    k_desc,  # [NB * BS, K * D]
    v_desc,  # [NB * BS, K * D]
    cu_seqlens_ptr,  # i32[S + 1]
    req_indices_ptr,  # i32[S]
    context_lens_ptr,  # i32[S]
    tables_ptr,  # i32[R, max_blocks]
    out_ptr,  # [T, H, D]
    counter_ptr,  # i32[1], zero between launches
    num_seqs,
    num_kv_heads,
    scale_log2e,
    stride_q_token,
    stride_q_head,
    stride_table,
    stride_out_token,
    stride_out_head,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """See above. The consumers' registers are what the producer leaves them."""
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    qs = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_SIZE], shared)
    ks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], shared)
    vs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], shared)
    items = gl.allocate_shared_memory(gl.int32, [ITEMS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    item_full = gl.allocate_shared_memory(gl.int64, [ITEMS, 1], mbarrier.MBarrierLayout())
    item_free = gl.allocate_shared_memory(gl.int64, [ITEMS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    for i in gl.static_range(ITEMS):
        mbarrier.init(item_full.index(i), count=1)
        mbarrier.init(item_free.index(i), count=2)
    fence_async_shared()
    if USE_PDL:
        gdc_wait()

    tensors = (q_ptr, out_ptr, scale_log2e, stride_q_token, stride_q_head, stride_out_token, stride_out_head)
    rings = (qs, ks, vs, items, k_full, k_free, v_full, v_free, item_full, item_free)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gl.warp_specialize(
        [
            (consume, (tensors, rings, ZERO, GROUP, BLOCK_N, STAGES)),
            (consume, (tensors, rings, ONE, GROUP, BLOCK_N, STAGES)),
            (
                produce,
                (
                    rings, k_desc, v_desc, cu_seqlens_ptr, req_indices_ptr, context_lens_ptr, tables_ptr, counter_ptr,
                    num_seqs, num_kv_heads, stride_table, GROUP, BLOCK_SIZE, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------- launching


def tiles(max_seqlen_q):
    """(BLOCK_N, STAGES): fewer masked scores for short prompts, fewer and longer tiles for long ones."""
    return (128, 2) if max_seqlen_q >= 1024 else (64, 4)


def takes(q, k_cache, max_seqlen_q):
    """Whether `prefill_attention_sm90` can, and is faster than Triton's: not where a sequence has few rows."""
    _, num_heads, head_size = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    block_n, _ = tiles(max_seqlen_q)
    return (
        is_sm90(q.device)
        and q.element_size() == 2
        and q.dtype == k_cache.dtype
        and head_size == 128
        and group in (1, 2, 4, 8, 16)
        and max_seqlen_q * group > 64
        and block_n % (128 // group) == 0
        and block_size % block_n == 0
        and k_cache.is_contiguous()
        and q.stride(0) % 16 == q.stride(1) % 16 == q.data_ptr() % 16 == 0
    )


def prefill_attention_sm90(
    q, k_cache, v_cache, cu_seqlens_q, rows, context_lens, block_tables, scale, max_seqlen_q, out
):
    """See prefill_attention.paged_prefill_attention; for what `takes` says it takes."""
    _, num_heads, head_size = q.shape
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    group, most = num_heads // num_kv_heads, MAX_SEQS.value
    assert q.stride(2) == out.stride(2) == 1 and v_cache.is_contiguous()
    block_n, stages = tiles(max_seqlen_q)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    shape, strides = [num_blocks * block_size, num_kv_heads * head_size], [num_kv_heads * head_size, 1]
    tokens = 128 // group
    for first in range(0, rows.shape[0], most):
        num_seqs = min(most, rows.shape[0] - first)
        most_items = num_seqs * num_kv_heads * ((max_seqlen_q + 2 * tokens - 2) // tokens)
        launch(
            prefill_kernel,
            (min(num_sms(q.device), most_items),),
            q,
            TensorDescriptor(k_cache, shape, strides, [block_n, head_size], layout),
            TensorDescriptor(v_cache, shape, strides, [block_n, head_size], layout),
            cu_seqlens_q[first:],
            rows[first:],
            context_lens[first:],
            block_tables,
            out,
            zero_counters(1, q.device),
            num_seqs,
            num_kv_heads,
            scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            block_tables.stride(0),
            out.stride(0),
            out.stride(1),
            GROUP=group,
            BLOCK_SIZE=block_size,
            BLOCK_N=block_n,
            STAGES=stages,
            num_warps=4,
            **launch_options(q.device),
        )
    return out

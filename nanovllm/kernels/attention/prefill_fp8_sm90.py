"""prefill_sm90.py's kernel for an FP8 KV cache: one more stage, which converts tiles to fp16 for the MMAs.

Owns the converter and the launch. Producer and consumers are those of prefill_sm90.py.

    producer (1 warp)         TMA of e4m3 tiles into rings of RAW_STAGES slots
    converter (4 warps)       each tile to fp16 in the rings of STAGES slots, in the order in which it was loaded
    consumer 0, 1 (4 warps)   as there, with q and P in fp16; scales of keys in the scores, of values at the end

The converter pops the work items too: their ring's empty barriers take 3 arrivals. Towards the producer it is the only
consumer, towards the consumers the producer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_compat import fence_async_shared, mbarrier, thread_barrier
from ..launch import is_sm90, launch, launch_options, num_sms, zero_counters
from .paging import LOG2_E
from .prefill_items_sm90 import ITEM_FIELDS, ITEM_STAGES, ROWS, key_tiles, pop_work_item
from .prefill_sm90 import MAX_SEQS, consumer, producer
from .prefill_sm90 import tiling as tiling_of_16_bits


@gluon.jit
def convert_tile(raw, raw_full, raw_empty, ring, full, empty, n, BLOCK_N: gl.constexpr, HEAD_SIZE: gl.constexpr,
                 RAW_STAGES: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Use n of both rings: e4m3 tile [BLOCK_N, HEAD_SIZE] to fp16."""
    ROWS_AT_ONCE: gl.constexpr = 32  # bounds the registers
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [512 // HEAD_SIZE, HEAD_SIZE // 16], [4, 1], [1, 0])
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
    _, raw_ks, raw_vs, work_items, raw_k_full, raw_k_empty, raw_v_full, raw_v_empty, item_full, item_empty = raw_rings
    _, ks, vs, _, k_full, k_empty, v_full, v_empty, _, _ = rings
    t = 0  # use of the ring of work items
    n = 0  # use of the rings of K and V
    kv_head, token0, q_begin, q_end, p0 = pop_work_item(work_items, item_full, item_empty, t)
    while kv_head >= 0:
        _last, num_tiles = key_tiles(p0, token0, q_begin, q_end, WINDOW, GQA_GROUP, BLOCK_N)
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
def prefill_fp8_kernel(
    q_ptr,  # [T, H, D]
    k_desc,  # e4m3 [NB * BS, K * D]
    v_desc,  # e4m3 [NB * BS, K * D]
    kv_scale_ptr,  # fp32 [2, K]
    cu_seqlens_ptr,  # i32[S + 1]
    req_indices_ptr,  # i32[S]
    context_lens_ptr,  # i32[S]
    tables_ptr,  # i32[R, max_blocks]
    out_ptr,  # [T, H, D]
    counter_ptr,  # i32[1], zero between launches
    num_seqs, num_kv_heads, scale_log2e,
    stride_q_token, stride_q_head, stride_table, stride_out_token, stride_out_head,
    GQA_GROUP: gl.constexpr, HEAD_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, RAW_STAGES: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Registers per thread: 40 for the producer, 56 for the converter, which leaves 208 for each consumer."""
    if USE_PDL:
        gdc_launch_dependents()
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    raw_shared: gl.constexpr = gl.NVMMASharedLayout(HEAD_SIZE, 8, 2)
    fp8: gl.constexpr = k_desc.dtype
    qs = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2, ROWS, HEAD_SIZE], shared)
    ks = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, HEAD_SIZE], shared)
    vs = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, HEAD_SIZE], shared)
    raw_ks = gl.allocate_shared_memory(fp8, [RAW_STAGES, BLOCK_N, HEAD_SIZE], raw_shared)
    raw_vs = gl.allocate_shared_memory(fp8, [RAW_STAGES, BLOCK_N, HEAD_SIZE], raw_shared)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work_items = gl.allocate_shared_memory(gl.int32, [ITEM_STAGES * ITEM_FIELDS, 1], plain)
    k_full, v_full = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    k_empty, v_empty = make_barriers(STAGES, 2), make_barriers(STAGES, 2)
    raw_k_full, raw_v_full = make_barriers(RAW_STAGES, 1), make_barriers(RAW_STAGES, 1)
    raw_k_empty, raw_v_empty = make_barriers(RAW_STAGES, 1), make_barriers(RAW_STAGES, 1)
    item_full, item_empty = make_barriers(ITEM_STAGES, 1), make_barriers(ITEM_STAGES, 3)
    fence_async_shared()
    if USE_PDL:
        gdc_wait()

    tensors = (
        q_ptr, out_ptr, kv_scale_ptr, num_kv_heads, scale_log2e, stride_q_token, stride_q_head, stride_out_token,
        stride_out_head,
    )  # fmt: skip
    rings = (qs, ks, vs, work_items, k_full, k_empty, v_full, v_empty, item_full, item_empty)
    raw_rings = (
        qs, raw_ks, raw_vs, work_items, raw_k_full, raw_k_empty, raw_v_full, raw_v_empty, item_full, item_empty
    )  # fmt: skip
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gl.warp_specialize(
        [
            (consumer, (tensors, rings, ZERO, GQA_GROUP, HEAD_SIZE, WINDOW, BLOCK_N, STAGES)),
            (consumer, (tensors, rings, ONE, GQA_GROUP, HEAD_SIZE, WINDOW, BLOCK_N, STAGES)),
            (converter, (raw_rings, rings, WINDOW, GQA_GROUP, HEAD_SIZE, BLOCK_N, RAW_STAGES, STAGES)),
            (producer, (
                raw_rings, k_desc, v_desc, cu_seqlens_ptr, req_indices_ptr, context_lens_ptr, tables_ptr, counter_ptr,
                num_seqs, num_kv_heads, stride_table, GQA_GROUP, HEAD_SIZE, BLOCK_SIZE, WINDOW, BLOCK_N, RAW_STAGES,
            )),
        ],
        [4, 4, 1],
        [208, 56, 40],
    )  # fmt: skip


def tiling(max_seqlen_q, head_size):
    """(BLOCK_N, STAGES). With heads of 128 a consumer's registers hold the scores of 64 keys, not of 128."""
    return (64, 4) if head_size == 128 else tiling_of_16_bits(max_seqlen_q, head_size)


def supports(q, k_cache, max_seqlen_q):
    """Whether the kernel can run and is faster than prefill.py's, which wins where sequences have few rows."""
    _, block_size, num_kv_heads, head_size = k_cache.shape
    gqa_group = q.shape[1] // num_kv_heads
    block_n, _ = tiling(max_seqlen_q, head_size) if head_size in (64, 128) else (0, 0)
    return (
        is_sm90(q.device)
        and q.element_size() == 2
        and k_cache.element_size() == 1
        and head_size in (64, 128)
        and gqa_group <= 16
        and max_seqlen_q * gqa_group > 64
        and block_size % block_n == 0
        and k_cache.is_contiguous()
        and q.stride(0) % 16 == q.stride(1) % 16 == q.data_ptr() % 16 == 0
    )


def prefill_attention_fp8_sm90(
    q, k_cache, v_cache, cu_seqlens_q, req_indices, context_lens, block_tables, scale, max_seqlen_q, window, kv_scale,
    out,
):  # fmt: skip
    """`paged_prefill_attention` for inputs that it `supports`, in launches of at most MAX_SEQS sequences."""
    num_blocks, block_size, num_kv_heads, head_size = k_cache.shape
    gqa_group = q.shape[1] // num_kv_heads
    block_n, stages = tiling(max_seqlen_q, head_size)
    shape, strides = [num_blocks * block_size, num_kv_heads * head_size], [num_kv_heads * head_size, 1]
    k_desc, v_desc = (
        TensorDescriptor(cache, shape, strides, [block_n, head_size], gl.NVMMASharedLayout(head_size, 8, 2))
        for cache in (k_cache, v_cache)
    )
    tokens = 128 // gqa_group
    for first in range(0, req_indices.shape[0], MAX_SEQS.value):
        num_seqs = min(MAX_SEQS.value, req_indices.shape[0] - first)
        max_items = num_seqs * num_kv_heads * ((max_seqlen_q + 2 * tokens - 2) // tokens)
        launch(
            prefill_fp8_kernel, (min(num_sms(q.device), max_items),),
            q, k_desc, v_desc, kv_scale, cu_seqlens_q[first:], req_indices[first:], context_lens[first:], block_tables,
            out, zero_counters(1, q.device), num_seqs, num_kv_heads, scale * LOG2_E,
            q.stride(0), q.stride(1), block_tables.stride(0), out.stride(0), out.stride(1),
            GQA_GROUP=gqa_group, HEAD_SIZE=head_size, BLOCK_SIZE=block_size, WINDOW=window,
            BLOCK_N=block_n, RAW_STAGES=stages // 2, STAGES=stages, num_warps=4, **launch_options(q.device),
        )  # fmt: skip
    return out

"""Attention of one query token per sequence over the paged KV cache, in Triton.

Owns how the work is cut into programs, and the scratch memory that this needs. Knows nothing of models, of how keys
and values got into the pages (they are all there, those of the new tokens too), or of who holds which page: it follows
the block tables, and reads no slot at or beyond a sequence's context. Legend: see pages.py.

The contexts of all sequences, cut into tiles of BLOCK_N tokens and laid end to end, are one list of tiles.
It is divided into equal shares; program (k, i) attends share i for KV head k. So the load is balanced
whatever the contexts are, one long among many short included, without the host knowing any of them:

    sequences   |--- 0 ---|- 1 -|---------------- 2 ----------------|- 3 -|     tiles, end to end
    shares      |----- 0 -----|----- 1 -----|----- 2 -----|----- 3 -----|

A sequence inside one share is written to `out` at once. One that several shares touch leaves a partial
result (accumulator, maximum, sum) per share in scratch; whichever of them finishes last adds them up. The
shares that touch sequence s are consecutive, hence share i keeps its part of s in scratch slot i + s: no
two meet there, and the parts of one sequence lie side by side.

There are just as many programs as run at once: a program's loads then run ahead of its arithmetic from
its first tile to its last, and all programs end together.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import (
    has_large_shared_memory,
    launch,
    launch_options,
    num_sms,
    pdl_launch_dependents,
    pdl_wait,
    zero_counters,
)
from .paging import LOG2_E, LOWEST, load_block_ids, slot_offsets


@triton.jit(do_not_specialize=["num_seqs"])
def _decode_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [NB, BS, K, D]
    v_ptr,  # [NB, BS, K, D]
    req_indices_ptr,  # i32[B]
    context_lens_ptr,  # i32[B]
    tables_ptr,  # i32[R, max_blocks]
    out_ptr,  # [B, H, D]
    part_acc_ptr,  # f32[shares + B, K, GROUP, D]
    part_stat_ptr,  # f32[shares + B, K, GROUP, 2]: maximum, sum
    counters_ptr,  # i32[>= B * K], zero between launches
    num_seqs,
    scale_log2e,
    stride_q_seq,
    stride_q_head,
    stride_block,
    stride_table,
    stride_out_seq,
    stride_out_head,
    STRIDE_SLOT: tl.constexpr,
    STRIDE_KV_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    share = tl.program_id(1)

    # i32[BLOCK_B]: tiles per sequence. An empty context has one too, or nobody would write its zeros.
    offs_b = tl.arange(0, BLOCK_B)
    lens = tl.load(context_lens_ptr + offs_b, mask=offs_b < num_seqs, other=0)
    tiles = tl.where(offs_b < num_seqs, tl.maximum(tl.cdiv(lens, BLOCK_N), 1), 0)
    tile_ends = tl.cumsum(tiles, 0)
    num_tiles = tl.sum(tiles, 0)
    share_tiles = tl.cdiv(num_tiles, tl.num_programs(1))
    begin = share * share_tiles
    end = tl.minimum(begin + share_tiles, num_tiles)
    if begin >= end:
        return
    first_seq = tl.sum((tile_ends <= begin).to(tl.int32), 0)
    last_seq = tl.sum((tile_ends < end).to(tl.int32), 0)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    group_mask = (offs_m < GROUP)[:, None] & (offs_d < HEAD_SIZE)[None, :]
    head_offs = (kv_head * GROUP + offs_m)[:, None]
    k_head_ptr = k_ptr + kv_head * STRIDE_KV_HEAD
    v_head_ptr = v_ptr + kv_head * STRIDE_KV_HEAD

    # Only the first and the last sequence of a share can be split. From and to which tile they go is looked up
    # now, because nobody waits for it here.
    first_seq_begin = tl.max(tl.where(offs_b < first_seq, tile_ends, 0), 0)
    first_seq_end = tl.max(tl.where(offs_b <= first_seq, tile_ends, 0), 0)
    last_seq_begin = tl.max(tl.where(offs_b < last_seq, tile_ends, 0), 0)
    last_seq_end = tl.max(tl.where(offs_b <= last_seq, tile_ends, 0), 0)

    # Where the share begins: in sequence `seq`, whose tiles end at `seq_end`, at its token `first`.
    seq = first_seq
    seq_end = first_seq_end
    context = tl.load(context_lens_ptr + seq)
    row = tl.load(req_indices_ptr + seq)
    first = (begin - first_seq_begin) * BLOCK_N
    pages = load_block_ids(tables_ptr + row.to(tl.int64) * stride_table, first, context, BLOCK_SIZE, BLOCK_N)

    # So far everything came from tables that the step began with; q and the newest keys and values come from
    # the launches before this one.
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    # Summed over the columns at a sequence's end only: a sum across threads per tile would cost time.
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # One loop over tiles, whichever sequences they belong to, so that loads run ahead across borders too.
    for tile in range(begin, end):
        # [BLOCK_M, BLOCK_D]: the query heads of this KV head, padded with zero rows to what a dot takes.
        # Loaded for every tile, 16 rows from the L2 cache at most: so it is pipelined like keys and values.
        q_ptrs = q_ptr + seq * stride_q_seq + head_offs * stride_q_head
        q = tl.load(q_ptrs + offs_d[None, :], mask=group_mask, other=0.0)
        # [BLOCK_N, BLOCK_D] each, zero outside the context: 0 * NaN of a stale slot would be NaN.
        offs = slot_offsets(pages, first, stride_block, STRIDE_SLOT, BLOCK_SIZE, BLOCK_N)
        in_context = first + offs_n < context
        tile_mask = in_context[:, None] & (offs_d < HEAD_SIZE)[None, :]
        k = tl.load(k_head_ptr + offs[:, None] + offs_d[None, :], mask=tile_mask, other=0.0)
        v = tl.load(v_head_ptr + offs[:, None] + offs_d[None, :], mask=tile_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2e
        scores = tl.where(in_context[None, :], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.exp2(scores - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        sums = sums * correction[:, None] + p
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)
        row_max = new_max

        ended = tile + 1 == seq_end
        if ended | (tile + 1 == end):
            row_sum = tl.sum(sums, 1)
            begun = tile - first // BLOCK_N >= begin
            if begun & ended:
                result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
                out_ptrs = out_ptr + seq * stride_out_seq + head_offs * stride_out_head
                tl.store(out_ptrs + offs_d[None, :], result.to(out_ptr.dtype.element_ty), mask=group_mask)
            else:
                part = ((share + seq) * num_kv_heads + kv_head) * GROUP + offs_m
                tl.store(part_acc_ptr + part[:, None] * HEAD_SIZE + offs_d[None, :], acc, mask=group_mask)
                tl.store(part_stat_ptr + part * 2, row_max, mask=offs_m < GROUP)
                tl.store(part_stat_ptr + part * 2 + 1, row_sum, mask=offs_m < GROUP)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
            sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

        # On to the next tile, of this sequence or of the next one.
        seq += ended.to(tl.int32)
        first = tl.where(ended, 0, first + BLOCK_N)
        fetch = ended & (seq < num_seqs)
        context = tl.where(ended, tl.load(context_lens_ptr + seq, mask=fetch, other=0), context)
        row = tl.where(ended, tl.load(req_indices_ptr + seq, mask=fetch, other=0), row)
        seq_end += tl.where(ended, tl.maximum(tl.cdiv(context, BLOCK_N), 1), 0)
        pages = load_block_ids(tables_ptr + row.to(tl.int64) * stride_table, first, context, BLOCK_SIZE, BLOCK_N)

    # The stores of all threads come before the release by one of them, or the share that finishes last might miss
    # some.
    tl.debug_barrier()
    for seq in range(first_seq, last_seq + 1, tl.maximum(last_seq - first_seq, 1)):
        seq_begin = tl.where(seq == first_seq, first_seq_begin, last_seq_begin)
        seq_end = tl.where(seq == last_seq, last_seq_end, first_seq_end)
        if seq_begin < begin or seq_end > end:
            first_share = seq_begin // share_tiles
            last_share = (seq_end - 1) // share_tiles
            counter_ptr = counters_ptr + seq * num_kv_heads + kv_head
            arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
            if arrived == last_share - first_share:
                _add_parts(
                    part_acc_ptr,
                    part_stat_ptr,
                    out_ptr + seq * stride_out_seq + kv_head * GROUP * stride_out_head,
                    first_share + seq,
                    last_share + seq + 1,
                    kv_head,
                    num_kv_heads,
                    stride_out_head,
                    GROUP,
                    HEAD_SIZE,
                    BLOCK_D,
                    BLOCK_G,
                    BLOCK_P,
                )
                tl.store(counter_ptr, 0)  # as the next launch, or the next replay of a graph, expects it


@triton.jit
def _add_parts(
    part_acc_ptr,
    part_stat_ptr,
    out_seq_ptr,
    first_slot,
    end_slot,
    kv_head,
    num_kv_heads,
    stride_out_head,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Merge the partial results in slots first_slot .. end_slot - 1 and write one sequence's GROUP heads."""
    offs_p = tl.arange(0, BLOCK_P)
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    total_max = tl.full([BLOCK_G], LOWEST, tl.float32)
    total_sum = tl.zeros([BLOCK_G], tl.float32)
    for slot in range(first_slot, end_slot, BLOCK_P):
        slots = slot + offs_p
        # [BLOCK_P, BLOCK_G] index of a (slot, KV head, head of the group); written by other programs of this
        # launch, so the loads go to the L2 cache, past this multiprocessor's own.
        index = (slots.to(tl.int64) * num_kv_heads + kv_head)[:, None] * GROUP + offs_g[None, :]
        mask = (slots < end_slot)[:, None] & (offs_g < GROUP)[None, :]
        part_max = tl.load(part_stat_ptr + index * 2, mask=mask, other=LOWEST, cache_modifier=".cg")
        part_sum = tl.load(part_stat_ptr + index * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(
            part_acc_ptr + index[:, :, None] * HEAD_SIZE + offs_d[None, None, :],
            mask=mask[:, :, None] & (offs_d < HEAD_SIZE)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(total_max, tl.max(part_max, 0))
        weight = tl.exp2(part_max - new_max[None, :])
        correction = tl.exp2(total_max - new_max)
        total_sum = total_sum * correction + tl.sum(part_sum * weight, 0)
        acc = acc * correction[:, None] + tl.sum(part_acc * weight[:, :, None], 0)
        total_max = new_max
    result = acc / tl.where(total_sum > 0.0, total_sum, 1.0)[:, None]
    tl.store(
        out_seq_ptr + offs_g[:, None] * stride_out_head + offs_d[None, :],
        result.to(out_seq_ptr.dtype.element_ty),
        mask=(offs_g < GROUP)[:, None] & (offs_d < HEAD_SIZE)[None, :],
    )


class DecodeConfig(NamedTuple):
    """How a decode batch is cut. Measured by benchmarks/attention.py --sweep."""

    block_n: int  # tokens per tile
    num_warps: int
    num_stages: int  # tiles in shared memory: one in use, the others on their way
    programs_per_sm: int  # as many as fit at once


def decode_config(num_seqs: int, num_kv_heads: int, head_size: int, itemsize: int) -> DecodeConfig:
    """The configuration for a batch. Contexts are not known here: they change between graph replays."""
    if num_seqs * num_kv_heads <= 16:
        # Latency is all: the smallest pieces.
        config = DecodeConfig(32, num_warps=2, num_stages=3, programs_per_sm=2)
    elif num_seqs <= 16:
        config = DecodeConfig(128, num_warps=4, num_stages=3, programs_per_sm=1)
    else:
        config = DecodeConfig(64, num_warps=2, num_stages=3, programs_per_sm=2)
    # Tiles of as many bytes where a row has more than the 256 that this was measured with.
    block_n = config.block_n * 256 // max(256, triton.next_power_of_2(head_size) * itemsize)
    return config._replace(block_n=max(16, block_n))


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_context: int | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Attend one new token per sequence to its context. Can be captured in a CUDA graph: no host reads.

    q: [B, H, D], the last dimension contiguous. k_cache, v_cache: [NB, BS, K, D] of one layout, BS a
    multiple of 16, H / K at most 16. rows: i32[B], each batch position's row of `block_tables`
    i32[R, max_blocks]. context_lens: i32[B], tokens to attend, the new one included; 0 gives zeros.
    scale: factor on q·k.
    max_context: no context is longer (default: what a table row holds); a hint that avoids idle programs.
    pdl: start before the launch before has ended, where the hardware can (see inputs.py). Only where an
    unchained launch lies between this one and the one that wrote rows, context_lens or block_tables.
    Returns [B, H, D] like q, or `out`.

    The cuts between shares depend on the whole batch, so batch mates may change the order of fp32 sums and
    the scale at which probabilities are rounded, nothing more.
    One stream at a time per device: launches share the counters.
    """
    num_seqs, num_heads, head_size = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty((num_seqs, num_heads, head_size), dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == q.stride(2) == out.stride(2) == 1
    assert block_size % 16 == 0 and group * num_kv_heads == num_heads and group <= 16

    config = decode_config(num_seqs, num_kv_heads, head_size, k_cache.element_size())
    if not has_large_shared_memory(q.device):
        config = config._replace(block_n=min(config.block_n, 64))
    if max_context is None:
        max_context = block_tables.shape[1] * block_size
    max_tiles = num_seqs * max(1, -(-max_context // config.block_n))
    num_shares = config.programs_per_sm * num_sms(q.device) // num_kv_heads
    num_shares = max(1, min(num_shares, max_tiles))

    part_shape = (num_shares + num_seqs, num_kv_heads, group)
    part_acc = torch.empty((*part_shape, head_size), dtype=torch.float32, device=q.device)
    part_stat = torch.empty((*part_shape, 2), dtype=torch.float32, device=q.device)
    block_d = triton.next_power_of_2(head_size)
    block_g = triton.next_power_of_2(group)
    launch(
        _decode_kernel,
        (num_kv_heads, num_shares),
        q,
        k_cache,
        v_cache,
        rows,
        context_lens,
        block_tables,
        out,
        part_acc,
        part_stat,
        zero_counters(num_seqs * num_kv_heads, q.device),
        num_seqs,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        STRIDE_SLOT=k_cache.stride(1),
        STRIDE_KV_HEAD=k_cache.stride(2),
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        # Two sizes up to 512, not every power of two: each is a compilation at start-up.
        BLOCK_B=16 if num_seqs <= 16 else max(512, triton.next_power_of_2(num_seqs)),
        BLOCK_M=16,
        BLOCK_N=config.block_n,
        BLOCK_D=block_d,
        BLOCK_G=block_g,
        BLOCK_P=max(1, 4096 // (block_g * block_d)),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(q.device, pdl),
    )
    return out

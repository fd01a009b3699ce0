"""Paged decode attention in Triton: one query token per sequence, or a few in a verify step.

Owns the work partition and its scratch memory. Knows neither block owners nor how keys and values were stored; those of
the new tokens are in the cache already. Reads no slot at or beyond a context. Legend: paging.py.

Stream-K work partition: the contexts, cut into tiles of BLOCK_N tokens, laid end to end and divided into equal splits;
program (k, i) attends split i for KV head k, or for a part of its query heads. The load is balanced for any mix of
contexts, and the host needs to know none of them (CUDA graphs):

    sequences   |--- 0 ---|- 1 -|---------------- 2 ----------------|- 3 -|     tiles, end to end
    splits      |----- 0 -----|----- 1 -----|----- 2 -----|----- 3 -----|

With a window a sequence's tiles begin with the one that holds the window's first token; blocks before it are not read.
With shared prefixes (prefix.py) its tiles begin after the prefix, and its first tile starts from the prefix's softmax
state instead of an empty one, so nothing is merged afterwards. Attention sinks join a sequence's sum where its result
is written, once, however many partial results were merged.

A sequence within one split is written to `out` at once. Otherwise each of its splits leaves a partial result
(accumulator, maximum, sum) in scratch slot split + sequence, and the last split to finish merges them. The splits of a
sequence are consecutive, so slots never collide and the partials of one sequence are contiguous. With few sequences and
heads of 512 that merge would take longer than all else (66 results of 16 KB), so a second kernel merges in parallel.

The grid is one wave: loads run ahead of arithmetic across all of a program's tiles, and all programs end together.

In a verify step a sequence has NUM_ROWS query tokens, each with a context of its own. The heads of all of them are
columns of the same products, so keys and values are read once.

Tensor cores pad the rows of a product to 16, its columns to 8. So the query heads of a KV head are columns, and tokens
and channels rows, where arithmetic costs time: with an FP8 cache, and in verify steps. In 16 bits, bound by bytes,
heads are rows: probabilities then need no change of layout between the products.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...quantization.fp8.numbers import E4M3
from ..launch import (
    has_inline_asm,
    launch,
    launch_options,
    num_sms,
    pdl_launch_dependents,
    pdl_wait,
    shared_kib,
    zero_counters,
)
from .paging import (
    LOWEST,
    attention_shape,
    load_block_ids,
    load_sinks,
    score_scales,
    sink_weights,
    slot_offsets,
    soft_cap,
    widen,
    widen_pairs,
)
from .prefix import prefix_attention
from .reference import SHARED_TOKENS


@triton.jit
def first_tile(context, shared, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile of the first token that the query at context - 1 attends here, after ``shared`` tokens of a prefix."""
    if WINDOW > 0:
        return tl.maximum(context - WINDOW, 0) // BLOCK_N
    else:
        return shared // BLOCK_N


@triton.jit
def num_attended_tiles(context, shared, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Number of tiles of a sequence; an empty context has one, because its zeros must be written."""
    return tl.maximum(tl.cdiv(context, BLOCK_N) - first_tile(context, shared, WINDOW, BLOCK_N), 1)


@triton.jit
def column_heads(kv_head, offs, GQA_GROUP: tl.constexpr, NUM_ROWS: tl.constexpr):
    """Query head of each column. In a verify step heads go row by row, and GQA_GROUP counts those of all rows."""
    if NUM_ROWS > 1:
        return kv_head * (GQA_GROUP // NUM_ROWS) + offs % (GQA_GROUP // NUM_ROWS)
    else:
        return kv_head * GQA_GROUP + offs


@triton.jit
def load_shared(shared_lens_ptr, seq, mask):
    """Tokens of the prefix that prefix.py has attended for these sequences; 0 without shared prefixes."""
    if shared_lens_ptr is None:
        return 0
    else:
        return tl.load(shared_lens_ptr + seq, mask=mask, other=0)


@triton.jit
def tile_ends_of(context_lens_ptr, shared_lens_ptr, offs_b, num_seqs, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """i32[BLOCK_B], where the tiles of each sequence end when all are laid end to end; and the number of tiles."""
    lens = tl.load(context_lens_ptr + offs_b, mask=offs_b < num_seqs, other=0)
    shared_lens = load_shared(shared_lens_ptr, offs_b, offs_b < num_seqs)
    tiles = tl.where(offs_b < num_seqs, num_attended_tiles(lens, shared_lens, WINDOW, BLOCK_N), 0)
    return tl.cumsum(tiles, 0), tl.sum(tiles, 0)


@triton.jit
def of_heads(x, COLUMNS: tl.constexpr):
    """Expand a vector of query heads to broadcast with queries, scores and results; or one of tokens, with values."""
    return x[None, :] if COLUMNS else x[:, None]


@triton.jit
def of_others(x, COLUMNS: tl.constexpr):
    """Expand a vector of tokens to broadcast with scores; or one of channels, with queries, values and results."""
    return x[:, None] if COLUMNS else x[None, :]


@triton.jit
def add_values(p, v, acc, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """acc + p v, or transposed acc + v p."""
    return tl.dot(v, p, acc, input_precision=PRECISION) if COLUMNS else tl.dot(p, v, acc, input_precision=PRECISION)


@triton.jit
def zeros(HEADS: tl.constexpr, OTHERS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros([OTHERS, HEADS] if COLUMNS else [HEADS, OTHERS], tl.float32)


@triton.jit
def start_from_prefix(
    row_max, sums, prefix_acc_ptr, prefix_stats_ptr, seq, is_fetched, is_shared, head_offs, num_heads,
    GQA_GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The softmax state of ``seq`` after its shared prefix; the given, empty state if it shares none."""
    # Fetched before is_shared is known, or two latencies would add up; undefined where nothing is shared.
    offs_d = tl.arange(0, BLOCK_D)
    states = seq * num_heads + head_offs
    mask = of_heads(tl.arange(0, BLOCK_H) < tl.where(is_fetched, GQA_GROUP, 0), COLUMNS)
    acc_ptrs = prefix_acc_ptr + states * HEAD_SIZE + of_others(offs_d, COLUMNS)
    prefix_acc = tl.load(acc_ptrs, mask=mask & of_others(offs_d < HEAD_SIZE, COLUMNS), other=0.0)
    prefix_max = tl.load(prefix_stats_ptr + states * 2, mask=mask, other=LOWEST)
    prefix_sum = tl.load(prefix_stats_ptr + states * 2 + 1, mask=mask, other=0.0)
    acc = tl.where(is_shared, prefix_acc, 0.0)
    row_max = tl.where(is_shared, tl.reshape(prefix_max, [BLOCK_H]), row_max)
    is_first = of_others(tl.arange(0, BLOCK_N) == 0, COLUMNS)
    sums = tl.where(is_shared, tl.where(is_first, prefix_sum, 0.0), sums)
    return acc, row_max, sums


@triton.jit
def prefetch_to_l2(rows, HEAD_SIZE: tl.constexpr):
    """Prefetch the HEAD_SIZE elements at each pointer, in lines of 128 bytes."""
    ASM: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    for first in tl.static_range(0, HEAD_SIZE, LINE):
        tl.inline_asm_elementwise(ASM, "=r,l", [rows + first], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["num_seqs"])
def _decode_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [NB, BS, K, D]
    v_ptr,  # [NB, BS, K, D]
    req_indices_ptr,  # i32[B]
    context_lens_ptr,  # i32[B]
    tables_ptr,  # i32[R, max_blocks]
    out_ptr,  # [B, H, D]
    partial_acc_ptr,  # f32[splits + B, K, GQA_GROUP, D]
    partial_stats_ptr,  # f32[splits + B, K, GQA_GROUP, 2]: maximum, sum
    counters_ptr,  # i32[>= B * K], zero between launches
    shared_lens_ptr,  # i32[B], or None without shared prefixes: multiples of BLOCK_N below the contexts
    prefix_acc_ptr, prefix_stats_ptr,  # f32[B, H, D], f32[B, H, 2] after the shared prefixes, or None
    kv_scale_ptr,  # f32[2, K], None unless the cache is FP8
    sinks_ptr,  # [H], None without attention sinks
    row_lens_ptr,  # i32[B * NUM_ROWS], None unless a sequence has several rows
    num_seqs, scale_log2e, cap_scale,  # None without a soft cap
    stride_q_seq, stride_q_head, stride_block, stride_table, stride_out_seq, stride_out_head,
    STRIDE_SLOT: tl.constexpr, STRIDE_KV_HEAD: tl.constexpr,
    GQA_GROUP: tl.constexpr, KV_HEAD_PROGRAMS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    V_PAIRS: tl.constexpr, COLUMNS: tl.constexpr, PREFETCH: tl.constexpr, NUM_ROWS: tl.constexpr, MERGE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    # With NUM_ROWS GQA_GROUP counts the heads of all rows, and stride_q_seq and stride_out_seq step over all rows. The
    # window of the first row begins before that of the last.
    REACH: tl.constexpr = WINDOW + NUM_ROWS - 1 if WINDOW > 0 else 0
    ROW_HEADS: tl.constexpr = GQA_GROUP // NUM_ROWS
    # COLUMNS: query heads are the columns of the products, else the rows.
    # V_PAIRS, only with COLUMNS: values are read two at a time, as int16. Even and odd channels have an accumulator
    # each.
    # PREFETCH: the first tile is requested before the wait. L2 is coherent: the newest token may be there too early.
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    split = tl.program_id(1)

    # i32[BLOCK_B]
    offs_b = tl.arange(0, BLOCK_B)
    tile_ends, num_tiles = tile_ends_of(context_lens_ptr, shared_lens_ptr, offs_b, num_seqs, REACH, BLOCK_N)
    split_tiles = tl.cdiv(num_tiles, tl.num_programs(1))
    begin = split * split_tiles
    end = tl.minimum(begin + split_tiles, num_tiles)
    if begin >= end:
        return
    first_seq = tl.sum((tile_ends <= begin).to(tl.int32), 0)
    last_seq = tl.sum((tile_ends < end).to(tl.int32), 0)

    offs_h = tl.arange(0, BLOCK_H)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    group_mask = of_heads(offs_h < GQA_GROUP, COLUMNS) & of_others(offs_d < HEAD_SIZE, COLUMNS)
    head_offs = of_heads(column_heads(kv_head, offs_h, GQA_GROUP, NUM_ROWS), COLUMNS)
    k_head_ptr = k_ptr + kv_head // KV_HEAD_PROGRAMS * STRIDE_KV_HEAD
    v_head_ptr = v_ptr + kv_head // KV_HEAD_PROGRAMS * STRIDE_KV_HEAD

    if kv_scale_ptr is not None:
        if cap_scale is not None:
            cap_scale *= tl.load(kv_scale_ptr + kv_head // KV_HEAD_PROGRAMS)
        else:
            scale_log2e *= tl.load(kv_scale_ptr + kv_head // KV_HEAD_PROGRAMS)
        v_scale = tl.load(kv_scale_ptr + (num_kv_heads + kv_head) // KV_HEAD_PROGRAMS)
    if sinks_ptr is not None:
        sinks = load_sinks(sinks_ptr, column_heads(kv_head, offs_h, GQA_GROUP, NUM_ROWS), offs_h < GQA_GROUP)

    # Only the first and last sequence of a split can be cut. Their bounds, for the merge, are computed here,
    # before the wait, to overlap the previous kernel.
    first_seq_begin = tl.max(tl.where(offs_b < first_seq, tile_ends, 0), 0)
    first_seq_end = tl.max(tl.where(offs_b <= first_seq, tile_ends, 0), 0)
    last_seq_begin = tl.max(tl.where(offs_b < last_seq, tile_ends, 0), 0)
    last_seq_end = tl.max(tl.where(offs_b <= last_seq, tile_ends, 0), 0)

    # The split begins at token `first` of sequence `seq`, whose tiles end at `seq_end`.
    seq = first_seq
    seq_end = first_seq_end
    context = tl.load(context_lens_ptr + seq)
    req_idx = tl.load(req_indices_ptr + seq)
    shared = load_shared(shared_lens_ptr, seq, seq < num_seqs)
    first = (begin - first_seq_begin + first_tile(context, shared, REACH, BLOCK_N)) * BLOCK_N
    block_ids = load_block_ids(tables_ptr + req_idx.to(tl.int64) * stride_table, first, context, BLOCK_SIZE, BLOCK_N)

    if PREFETCH:
        offs = slot_offsets(block_ids, first, stride_block, STRIDE_SLOT, BLOCK_SIZE, BLOCK_N)
        prefetch_to_l2(k_head_ptr + offs, HEAD_SIZE)
        prefetch_to_l2(v_head_ptr + offs, HEAD_SIZE)
    # Lengths and tables were written before the layers ran; q and the newest keys and values by the previous kernels.
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)

    acc = zeros(BLOCK_H, BLOCK_D // 2 if V_PAIRS else BLOCK_D, COLUMNS)
    if V_PAIRS:
        acc_odd = zeros(BLOCK_H, BLOCK_D // 2, COLUMNS)
    row_max = tl.full([BLOCK_H], LOWEST, tl.float32)
    # Reduced over tokens at a sequence's end only: a cross-thread sum per tile costs time.
    sums = zeros(BLOCK_H, BLOCK_N, COLUMNS)
    if shared_lens_ptr is not None:
        is_start = begin == first_seq_begin  # else another split starts from the prefix
        acc, row_max, sums = start_from_prefix(
            row_max, sums, prefix_acc_ptr, prefix_stats_ptr, seq, is_start, is_start & (shared > 0), head_offs,
            num_kv_heads * GQA_GROUP, GQA_GROUP, HEAD_SIZE, BLOCK_H, BLOCK_N, BLOCK_D, COLUMNS,
        )  # fmt: skip
        if V_PAIRS:
            acc, acc_odd = tl.split(tl.permute(tl.reshape(acc, [BLOCK_D // 2, 2, BLOCK_H]), (0, 2, 1)))
    # One flat loop over the tiles of all sequences, so that loads run ahead across sequence borders too.
    for tile in range(begin, end):
        # [BLOCK_D, BLOCK_H] or the reverse: the group's query heads, zero-padded to the smallest dot. Loaded for every
        # tile (from L2), so that the load is pipelined like those of keys and values.
        q_ptrs = q_ptr + seq * stride_q_seq + head_offs * stride_q_head
        if NUM_ROWS > 1:
            q_ptrs += of_heads(offs_h // ROW_HEADS * (stride_q_seq // NUM_ROWS), COLUMNS)
        q = tl.load(q_ptrs + of_others(offs_d, COLUMNS), mask=group_mask, other=0.0)
        # [BLOCK_N, BLOCK_D] each, values with COLUMNS [BLOCK_D, BLOCK_N]; zero where not attended: 0 * NaN of a stale
        # slot would be NaN.
        offs = slot_offsets(block_ids, first, stride_block, STRIDE_SLOT, BLOCK_SIZE, BLOCK_N)
        attended = first + offs_n < context
        if WINDOW > 0:
            attended &= first + offs_n >= context - REACH
        k_mask = attended[:, None] & (offs_d < HEAD_SIZE)[None, :]
        k = tl.load(k_head_ptr + offs[:, None] + offs_d[None, :], mask=k_mask, other=0.0)
        if V_PAIRS:
            offs_pair = tl.arange(0, BLOCK_D // 2)
            pair_ptrs = (v_head_ptr + offs).to(tl.pointer_type(tl.int16))[None, :] + offs_pair[:, None]
            pair_mask = attended[None, :] & (offs_pair < HEAD_SIZE // 2)[:, None]
            v_pairs = tl.load(pair_ptrs, mask=pair_mask, other=0)
        else:
            v_mask = of_heads(attended, COLUMNS) & of_others(offs_d < HEAD_SIZE, COLUMNS)
            v = tl.load(v_head_ptr + of_heads(offs, COLUMNS) + of_others(offs_d, COLUMNS), mask=v_mask, other=0.0)
        if kv_scale_ptr is not None:
            dtype: tl.constexpr = q_ptr.dtype.element_ty
            q, k = widen(q, dtype), widen(k, dtype)
            if V_PAIRS:
                v, v_odd = widen_pairs(v_pairs)
            else:
                v = widen(v, dtype)
        if COLUMNS:
            scores = tl.dot(k, q, input_precision=PRECISION)
        else:
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = soft_cap(scores, cap_scale) * scale_log2e
        if NUM_ROWS > 1:
            row_len_ptrs = row_lens_ptr + seq * NUM_ROWS + offs_h // ROW_HEADS
            row_lens = tl.load(row_len_ptrs, mask=offs_h < GQA_GROUP, other=0)
            behind = of_others(first + offs_n, COLUMNS) - of_heads(row_lens, COLUMNS)  # < 0: attended
            scores = tl.where((behind < 0) & (behind >= -WINDOW) if WINDOW > 0 else behind < 0, scores, -float("inf"))
        else:
            scores = tl.where(of_others(attended, COLUMNS), scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0 if COLUMNS else 1))
        p = tl.exp2(scores - of_heads(new_max, COLUMNS))
        correction = tl.exp2(row_max - new_max)
        sums = sums * of_heads(correction, COLUMNS) + p
        p = p.to(v.dtype)
        acc = add_values(p, v, acc * of_heads(correction, COLUMNS), COLUMNS, PRECISION)
        if V_PAIRS:
            acc_odd = add_values(p, v_odd, acc_odd * of_heads(correction, COLUMNS), COLUMNS, PRECISION)
        row_max = new_max

        ended = tile + 1 == seq_end
        if ended | (tile + 1 == end):
            row_sum = tl.sum(sums, 0 if COLUMNS else 1)
            if V_PAIRS:
                acc = tl.reshape(tl.permute(tl.join(acc, acc_odd), (0, 2, 1)), [BLOCK_D, BLOCK_H])
            if kv_scale_ptr is not None:
                acc *= v_scale
            begun = tile - (first // BLOCK_N - first_tile(context, shared, REACH, BLOCK_N)) >= begin
            if begun & ended:
                if sinks_ptr is not None:
                    row_sum += sink_weights(sinks, row_max)
                result = acc / of_heads(tl.where(row_sum > 0.0, row_sum, 1.0), COLUMNS)
                out_ptrs = out_ptr + seq * stride_out_seq + head_offs * stride_out_head
                if NUM_ROWS > 1:
                    out_ptrs += of_heads(offs_h // ROW_HEADS * (stride_out_seq // NUM_ROWS), COLUMNS)
                out_ptrs += of_others(offs_d, COLUMNS)
                tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=group_mask)
            else:
                partial = ((split + seq) * num_kv_heads + kv_head) * GQA_GROUP + offs_h
                partial_ptrs = partial_acc_ptr + of_heads(partial, COLUMNS) * HEAD_SIZE + of_others(offs_d, COLUMNS)
                tl.store(partial_ptrs, acc, mask=group_mask)
                tl.store(partial_stats_ptr + partial * 2, row_max, mask=offs_h < GQA_GROUP)
                tl.store(partial_stats_ptr + partial * 2 + 1, row_sum, mask=offs_h < GQA_GROUP)
            acc = zeros(BLOCK_H, BLOCK_D // 2 if V_PAIRS else BLOCK_D, COLUMNS)
            if V_PAIRS:
                acc_odd = zeros(BLOCK_H, BLOCK_D // 2, COLUMNS)
            row_max = tl.full([BLOCK_H], LOWEST, tl.float32)
            sums = zeros(BLOCK_H, BLOCK_N, COLUMNS)
            if shared_lens_ptr is not None:
                is_next = ended & (seq + 1 < num_seqs)
                is_shared = load_shared(shared_lens_ptr, seq + 1, is_next) > 0
                acc, row_max, sums = start_from_prefix(
                    row_max, sums, prefix_acc_ptr, prefix_stats_ptr, seq + 1, is_next, is_shared, head_offs,
                    num_kv_heads * GQA_GROUP, GQA_GROUP, HEAD_SIZE, BLOCK_H, BLOCK_N, BLOCK_D, COLUMNS,
                )  # fmt: skip
                if V_PAIRS:
                    acc, acc_odd = tl.split(tl.permute(tl.reshape(acc, [BLOCK_D // 2, 2, BLOCK_H]), (0, 2, 1)))

        # Advance to the next tile, of this sequence or the next.
        seq += ended.to(tl.int32)
        first = tl.where(ended, 0, first + BLOCK_N)
        fetch = ended & (seq < num_seqs)
        context = tl.where(ended, tl.load(context_lens_ptr + seq, mask=fetch, other=0), context)
        req_idx = tl.where(ended, tl.load(req_indices_ptr + seq, mask=fetch, other=0), req_idx)
        if shared_lens_ptr is not None:
            shared = tl.where(ended, load_shared(shared_lens_ptr, seq, fetch), shared)
        if WINDOW > 0 or shared_lens_ptr is not None:
            first = tl.where(ended, first_tile(context, shared, REACH, BLOCK_N) * BLOCK_N, first)
        seq_end += tl.where(ended, num_attended_tiles(context, shared, REACH, BLOCK_N), 0)
        table_ptr = tables_ptr + req_idx.to(tl.int64) * stride_table
        block_ids = load_block_ids(table_ptr, first, context, BLOCK_SIZE, BLOCK_N)

    if not MERGE:
        return
    # All threads store before one of them releases the counter, or the merging program may miss some partials.
    tl.debug_barrier()
    for seq in range(first_seq, last_seq + 1, tl.maximum(last_seq - first_seq, 1)):
        seq_begin = tl.where(seq == first_seq, first_seq_begin, last_seq_begin)
        seq_end = tl.where(seq == last_seq, last_seq_end, first_seq_end)
        if seq_begin < begin or seq_end > end:
            first_split = seq_begin // split_tiles
            last_split = (seq_end - 1) // split_tiles
            counter_ptr = counters_ptr + seq * num_kv_heads + kv_head
            arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
            if arrived == last_split - first_split:
                _merge_partials(
                    partial_acc_ptr, partial_stats_ptr,
                    out_ptr + seq * stride_out_seq + kv_head * ROW_HEADS * stride_out_head,
                    first_split + seq, last_split + seq + 1, kv_head, num_kv_heads, stride_out_seq, stride_out_head,
                    sinks_ptr, tl.arange(0, BLOCK_G), offs_d, GQA_GROUP, HEAD_SIZE, BLOCK_P, NUM_ROWS,
                )  # fmt: skip
                tl.store(counter_ptr, 0)  # for the next launch or graph replay


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def _merge_kernel(
    context_lens_ptr, shared_lens_ptr,  # as in _decode_kernel, which wrote the partial results
    partial_acc_ptr, partial_stats_ptr, sinks_ptr, out_ptr, num_seqs, num_splits, num_kv_heads, stride_out_seq,
    stride_out_head,
    GQA_GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, WINDOW: tl.constexpr, NUM_ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: merge BLOCK_D channels of one head, if its sequence is split."""
    REACH: tl.constexpr = WINDOW + NUM_ROWS - 1 if WINDOW > 0 else 0
    pdl_launch_dependents(USE_PDL)
    seq = tl.program_id(0)
    kv_head = tl.program_id(1) // GQA_GROUP
    offs_b = tl.arange(0, BLOCK_B)
    tile_ends, num_tiles = tile_ends_of(context_lens_ptr, shared_lens_ptr, offs_b, num_seqs, REACH, BLOCK_N)
    split_tiles = tl.cdiv(num_tiles, num_splits)
    first_split = tl.max(tl.where(offs_b < seq, tile_ends, 0), 0) // split_tiles
    last_split = (tl.max(tl.where(offs_b <= seq, tile_ends, 0), 0) - 1) // split_tiles
    pdl_wait(USE_PDL)
    if first_split < last_split:
        _merge_partials(
            partial_acc_ptr, partial_stats_ptr,
            out_ptr + seq * stride_out_seq + kv_head * (GQA_GROUP // NUM_ROWS) * stride_out_head,
            first_split + seq, last_split + seq + 1, kv_head, num_kv_heads, stride_out_seq, stride_out_head, sinks_ptr,
            tl.program_id(1) % GQA_GROUP + tl.arange(0, 1), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D),
            GQA_GROUP, HEAD_SIZE, BLOCK_P, NUM_ROWS,
        )  # fmt: skip


@triton.jit
def _merge_partials(
    partial_acc_ptr, partial_stats_ptr, out_seq_ptr, first_slot, end_slot, kv_head, num_kv_heads, stride_out_seq,
    stride_out_head, sinks_ptr, offs_g, offs_d, GQA_GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr, NUM_ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the partials in scratch slots first_slot .. end_slot - 1, and write a sequence's result for heads offs_g
    of the group and channels offs_d."""
    offs_p = tl.arange(0, BLOCK_P)
    BLOCK_G: tl.constexpr = offs_g.shape[0]
    acc = tl.zeros([BLOCK_G, offs_d.shape[0]], tl.float32)
    total_max = tl.full([BLOCK_G], LOWEST, tl.float32)
    total_sum = tl.zeros([BLOCK_G], tl.float32)
    if sinks_ptr is not None:
        total_max = load_sinks(sinks_ptr, column_heads(kv_head, offs_g, GQA_GROUP, NUM_ROWS), offs_g < GQA_GROUP)
        total_sum += 1.0
    for slot in range(first_slot, end_slot, BLOCK_P):
        slots = slot + offs_p
        # [BLOCK_P, BLOCK_G] index of (slot, KV head, head of the group). Other programs of this launch wrote the
        # partials: .cg loads from L2, past this SM's L1.
        index = (slots.to(tl.int64) * num_kv_heads + kv_head)[:, None] * GQA_GROUP + offs_g[None, :]
        mask = (slots < end_slot)[:, None] & (offs_g < GQA_GROUP)[None, :]
        partial_max = tl.load(partial_stats_ptr + index * 2, mask=mask, other=LOWEST, cache_modifier=".cg")
        partial_sum = tl.load(partial_stats_ptr + index * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        partial_acc = tl.load(
            partial_acc_ptr + index[:, :, None] * HEAD_SIZE + offs_d[None, None, :],
            mask=mask[:, :, None] & (offs_d < HEAD_SIZE)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_max = tl.maximum(total_max, tl.max(partial_max, 0))
        weight = tl.exp2(partial_max - new_max[None, :])
        correction = tl.exp2(total_max - new_max)
        total_sum = total_sum * correction + tl.sum(partial_sum * weight, 0)
        acc = acc * correction[:, None] + tl.sum(partial_acc * weight[:, :, None], 0)
        total_max = new_max
    result = acc / tl.where(total_sum > 0.0, total_sum, 1.0)[:, None]
    out_offs = offs_g[:, None] * stride_out_head
    if NUM_ROWS > 1:
        ROW_HEADS: tl.constexpr = GQA_GROUP // NUM_ROWS
        out_offs = (offs_g // ROW_HEADS * (stride_out_seq // NUM_ROWS) + offs_g % ROW_HEADS * stride_out_head)[:, None]
    out_ptrs = out_seq_ptr + out_offs + offs_d[None, :]
    result = result.to(out_seq_ptr.dtype.element_ty)
    tl.store(out_ptrs, result, mask=(offs_g < GQA_GROUP)[:, None] & (offs_d < HEAD_SIZE)[None, :])


MAX_HEAD_PROGRAMS = 8  # programs per KV head in a verify step, each with some of its query heads


class DecodeConfig(NamedTuple):
    """Work partition of a decode batch. Measured by benchmarks/attention.py --sweep."""

    block_n: int  # tokens per tile
    num_warps: int
    num_stages: int  # tiles in shared memory
    programs_per_sm: int  # all resident at once
    kv_head_programs: int = 1  # programs that share the query heads of a KV head
    merged: int = 4096  # fp32 elements of partial results that a merge loads at a time
    columns: bool = True  # query heads are columns of the products, else rows
    merge_apart: bool = False  # a second kernel merges, with programs for each head


def decode_config(num_seqs: int, num_kv_heads: int, gqa_group: int, head_size: int, itemsize: int,
                  num_rows: int = 1, shared_kib: int = 227) -> DecodeConfig:
    """Choose by batch size, heads and GPU alone: contexts change between replays of a graph."""
    num_pairs = num_seqs * num_kv_heads  # (sequence, KV head) pairs
    block_d = triton.next_power_of_2(head_size)
    head_bytes = block_d * itemsize  # bytes of a token's keys in one KV head
    has_large_partials = triton.next_power_of_2(gqa_group) * block_d >= 512  # 2 KB and more
    # One warp needs no barriers for the maximum of a row; a smaller merge saves registers.
    one_warp = DecodeConfig(32, num_warps=1, num_stages=3, programs_per_sm=4, merged=2048)
    # In 16 bits, heads are rows: columns are as fast alone, but an 0.6B engine was 2.4 % slower (docs/experiments.md).
    # Heads of 64 in groups of 8 were measured as columns only, in an engine.
    columns = itemsize == 1 or num_rows > 1 or block_d > 256 or (head_bytes <= 128 and gqa_group >= 8)
    if num_pairs <= 16:  # latency-bound: programs share a group's heads, and all read the same keys and values
        wanted = min(gqa_group // 2, 32 // num_pairs)
        programs = next(n for n in range(1, gqa_group + 1) if gqa_group % n == 0 and n >= wanted)
        config = DecodeConfig(32, num_warps=2, num_stages=3, programs_per_sm=2, kv_head_programs=programs, merged=8192)
        if block_d == 256 and itemsize == 2 and programs == 1:  # half as many partial results: 9.1 -> 8.0 us
            config = DecodeConfig(64, num_warps=4, num_stages=3, programs_per_sm=1, merged=8192)
    elif head_bytes <= 128 and (num_pairs <= 128 if itemsize == 1 else columns or num_seqs <= 16):
        config = one_warp
    elif head_bytes <= 128:
        # two stages for FP8, except with heads of 64 or groups of 2 (docs/experiments.md)
        num_stages = 2 if itemsize == 1 and block_d == 128 and gqa_group >= 4 else 3
        config = DecodeConfig(64, num_warps=2, num_stages=num_stages, programs_per_sm=4)
    elif head_bytes == 256 and num_pairs <= 128:
        config = DecodeConfig(32, num_warps=2, num_stages=3, programs_per_sm=2, merged=8192)
    elif head_bytes == 256 and block_d == 128 and has_large_partials:
        config = one_warp
    else:
        config = DecodeConfig(64, num_warps=2, num_stages=3, programs_per_sm=2)
    if num_rows > 1:  # partial results hold all rows; with many heads the merge takes longer than the tiles
        programs = next(n for n in range(min(gqa_group, MAX_HEAD_PROGRAMS), gqa_group + 1) if gqa_group % n == 0)
        config = DecodeConfig(32, num_warps=2, num_stages=3, programs_per_sm=2, kv_head_programs=programs, merged=8192)
    if block_d > 256:  # with two warps accumulators exceed the registers, and three fp32 tiles exceed 99 KB
        is_large, has_few_heads = shared_kib >= 200, gqa_group <= 8
        block_n, per_sm = 64, 1 + (is_large and (has_few_heads or num_rows > 1))
        if is_large and has_few_heads and num_rows == 1 and itemsize == 2:
            block_n, per_sm = 128, 1
        config = config._replace(block_n=block_n, num_warps=4, num_stages=2 if itemsize == 4 else 3,
                                 programs_per_sm=per_sm)  # fmt: skip
        # Sixteen columns do not fit into 99 KB.
        divisors = [n for n in range(1, gqa_group + 1) if gqa_group % n == 0]
        programs = next((n for n in divisors if gqa_group // n * num_rows <= 8), gqa_group) if shared_kib < 160 else 1
        if num_rows == 1:
            # With few sequences, a merge by one program would take longer than the computation.
            config = config._replace(kv_head_programs=programs, merge_apart=num_pairs <= 16)
        else:
            config = config._replace(kv_head_programs=max(config.kv_head_programs, programs))
    block_n = max(16, config.block_n * 256 // max(256, head_bytes))  # wider heads: the same number of bytes
    return config._replace(block_n=block_n, columns=columns)


def paged_decode_attention(
    q, k_cache, v_cache, req_indices, context_lens, block_tables, scale, max_context, pdl=False, window=0,
    kv_scale=None, groups=None, sinks=None, softcap=0.0, row_lens=None,
):  # fmt: skip
    """See reference.paged_decode_attention. Reads nothing on the host: fit for CUDA graphs.

    pdl: launch with PDL where the hardware has it (launch.py). Legal only if a launch without PDL lies between this one
    and the writers of req_indices, context_lens, block_tables and groups.

    The other sequences of the batch shift the split boundaries, which changes only fp32 rounding. Launches share the
    counters: one stream at a time per device.
    """
    num_seqs = len(context_lens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    num_kv_heads, gqa_group, head_size, block_size = attention_shape(q, k_cache, v_cache)

    num_rows = len(q) // num_seqs
    itemsize = k_cache.element_size()
    config = decode_config(
        num_seqs, num_kv_heads, gqa_group, head_size, itemsize, num_rows, shared_kib(q.device)
    )  # fmt: skip
    num_kv_heads, gqa_group = num_kv_heads * config.kv_head_programs, gqa_group // config.kv_head_programs * num_rows
    shared_lens = prefix_acc = prefix_stats = None
    if groups is not None:
        assert window == 0 and num_rows == 1 and SHARED_TOKENS % config.block_n == 0
        shared_lens = groups.shared_lens
        prefix_acc, prefix_stats = prefix_attention(
            q, k_cache, v_cache, block_tables, scale, groups, pdl, kv_scale, softcap
        )
    max_attended = min(max_context, window + num_rows - 1 + config.block_n) if window else max_context
    max_tiles = num_seqs * max(1, triton.cdiv(max_attended, config.block_n))
    num_splits = config.programs_per_sm * num_sms(q.device) // num_kv_heads
    num_splits = max(1, min(num_splits, max_tiles))

    partial_shape = (num_splits + num_seqs, num_kv_heads, gqa_group)
    partial_acc = torch.empty((*partial_shape, head_size), dtype=torch.float32, device=q.device)
    partial_stats = torch.empty((*partial_shape, 2), dtype=torch.float32, device=q.device)
    is_fp8 = k_cache.dtype == E4M3
    options = launch_options(q.device, pdl)
    block_d, block_g = triton.next_power_of_2(head_size), triton.next_power_of_2(gqa_group)
    # Two sizes up to 512, not every power of two: each is a compilation at start-up.
    block_b = 16 if num_seqs <= 16 else max(512, triton.next_power_of_2(num_seqs))
    launch(
        _decode_kernel, (num_kv_heads, num_splits),
        q, k_cache, v_cache, req_indices, context_lens, block_tables, out, partial_acc, partial_stats,
        zero_counters(num_seqs * num_kv_heads, q.device), shared_lens, prefix_acc, prefix_stats,
        kv_scale if is_fp8 else None, sinks, row_lens,
        num_seqs, *score_scales(scale, softcap),
        q.stride(0) * num_rows, q.stride(1), k_cache.stride(0), block_tables.stride(0), out.stride(0) * num_rows,
        out.stride(1),
        STRIDE_SLOT=k_cache.stride(1), STRIDE_KV_HEAD=k_cache.stride(2),
        GQA_GROUP=gqa_group, KV_HEAD_PROGRAMS=config.kv_head_programs, HEAD_SIZE=head_size, BLOCK_SIZE=block_size,
        BLOCK_B=block_b, COLUMNS=config.columns, BLOCK_H=max(8 if config.columns else 16, block_g),
        BLOCK_N=config.block_n, BLOCK_D=block_d, BLOCK_G=block_g,
        BLOCK_P=max(1, config.merged // (block_g * block_d)), WINDOW=window,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        V_PAIRS=is_fp8 and q.element_size() == 2 and has_inline_asm(q.device),
        PREFETCH=num_seqs <= 8 and has_inline_asm(q.device), NUM_ROWS=num_rows, MERGE=not config.merge_apart,
        num_warps=config.num_warps, num_stages=config.num_stages, **options,
    )  # fmt: skip
    if config.merge_apart:
        part = min(block_d, 128)
        launch(
            _merge_kernel, (num_seqs, num_kv_heads * gqa_group, block_d // part),
            context_lens, shared_lens, partial_acc, partial_stats, sinks, out, num_seqs, num_splits, num_kv_heads,
            out.stride(0) * num_rows, out.stride(1),
            GQA_GROUP=gqa_group, HEAD_SIZE=head_size, BLOCK_B=block_b, BLOCK_N=config.block_n, BLOCK_D=part,
            BLOCK_P=64, WINDOW=window, NUM_ROWS=num_rows, num_warps=4, **options,
        )  # fmt: skip
    return out

"""Attention of a decode batch over prefixes that several sequences share, in Triton: a group reads its prefix once.

Owns this first half of decode attention. It leaves the state of the online softmax (accumulator, maximum, sum) of every
member's query heads in fp32; decode.py starts a sequence from it, at the sequence's first own token. Does not look for
shared prefixes: runner/cascade.py finds the groups. Legend: paging.py; G groups.

    members      group 0: sequences 4, 0, 7, ...     group 1: ...
    rows         members x query heads of a KV head, in tiles of BLOCK_M     every row attends every key: no causal mask
    splits       the group's keys, in equal parts, if there are fewer tiles than programs

Programs (k, ...) compute the work items of KV head k, each a (group, row tile, split), in turn. They find them from the
groups on the device: the grid is one wave, whatever the groups (CUDA graphs). If a tile has several splits, the last
program to finish merges their partial states.
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
from .paging import LOWEST, attention_shape, load_block_ids, score_scales, slot_offsets, soft_cap, widen


@triton.jit(do_not_specialize=["num_groups"])
def _prefix_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [NB, BS, K, D]
    v_ptr,  # [NB, BS, K, D]
    members_ptr,  # i32[B], positions in the batch, group by group
    begins_ptr, sizes_ptr,  # i32[G] each: a group's range of `members`
    lens_ptr,  # i32[G], tokens that its members share
    owners_ptr,  # i32[G], a row of `tables` that begins with the shared blocks
    tables_ptr,  # i32[R, max_blocks]
    acc_ptr,  # f32[B, H, D]
    stats_ptr,  # f32[B, H, 2]: maximum, sum
    partial_acc_ptr,  # f32[items, K, BLOCK_M, D]
    partial_stats_ptr,  # f32[items, K, BLOCK_M, 2]
    counters_ptr,  # i32[>= items * K], zero between launches
    kv_scale_ptr,  # f32[2, K], None unless the cache is FP8
    num_groups, scale_log2e, cap_scale,  # None without a soft cap
    stride_q_seq, stride_q_head, stride_block, stride_table,
    STRIDE_SLOT: tl.constexpr, STRIDE_KV_HEAD: tl.constexpr,
    GQA_GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLIT_TILES: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)

    # i32[BLOCK_G]: every group's row tiles, and the splits of its keys: enough to give each program an item.
    offs_g = tl.arange(0, BLOCK_G)
    group_mask = offs_g < num_groups
    sizes = tl.load(sizes_ptr + offs_g, mask=group_mask, other=0)
    lens = tl.load(lens_ptr + offs_g, mask=group_mask, other=0)
    begins = tl.load(begins_ptr + offs_g, mask=group_mask, other=0)
    owners = tl.load(owners_ptr + offs_g, mask=group_mask, other=0)
    row_tiles = tl.cdiv(sizes * GQA_GROUP, BLOCK_M)
    key_tiles = tl.cdiv(lens, BLOCK_N)
    num_tiles = tl.maximum(tl.sum(row_tiles * key_tiles, 0), 1)
    splits = tl.minimum(key_tiles * tl.num_programs(1) // num_tiles, key_tiles // SPLIT_TILES)
    split_tiles = tl.cdiv(key_tiles, tl.maximum(splits, 1))
    splits = tl.cdiv(key_tiles, tl.maximum(split_tiles, 1))
    item_ends = tl.cumsum(row_tiles * splits, 0)
    num_items = tl.sum(row_tiles * splits, 0)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_head_ptr = k_ptr + kv_head * STRIDE_KV_HEAD
    v_head_ptr = v_ptr + kv_head * STRIDE_KV_HEAD

    if kv_scale_ptr is not None:  # decode.py applies the values' scale, at a sequence's end
        if cap_scale is not None:
            cap_scale *= tl.load(kv_scale_ptr + kv_head)
        else:
            scale_log2e *= tl.load(kv_scale_ptr + kv_head)

    # Groups and tables were written before the layers ran; q by the previous kernel.
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)

    for item in range(tl.program_id(1), num_items, tl.num_programs(1)):
        is_group = offs_g == tl.sum((item_ends <= item).to(tl.int32), 0)
        size = tl.sum(tl.where(is_group, sizes, 0), 0)
        num_splits = tl.sum(tl.where(is_group, splits, 0), 0)
        split_len = tl.sum(tl.where(is_group, split_tiles, 0), 0) * BLOCK_N
        first_item = tl.sum(tl.where(is_group, item_ends - row_tiles * splits, 0), 0)
        row_tile = (item - first_item) // num_splits
        split = (item - first_item) % num_splits
        begin = split * split_len
        end = tl.minimum(begin + split_len, tl.sum(tl.where(is_group, lens, 0), 0))

        rows = row_tile * BLOCK_M + offs_m
        row_mask = rows < size * GQA_GROUP
        members = tl.sum(tl.where(is_group, begins, 0), 0) + rows // GQA_GROUP
        seqs = tl.load(members_ptr + members, mask=row_mask, other=0)
        heads = kv_head * GQA_GROUP + rows % GQA_GROUP
        mask = row_mask[:, None] & (offs_d < HEAD_SIZE)[None, :]
        table_ptr = tables_ptr + tl.sum(tl.where(is_group, owners, 0), 0).to(tl.int64) * stride_table
        block_ids = load_block_ids(table_ptr, begin, end, BLOCK_SIZE, BLOCK_N)

        # [BLOCK_M, BLOCK_D]
        q_ptrs = q_ptr + (seqs.to(tl.int64) * stride_q_seq + heads * stride_q_head)[:, None] + offs_d[None, :]
        q = tl.load(q_ptrs, mask=mask, other=0.0)
        if kv_scale_ptr is not None:
            q = widen(q, q_ptr.dtype.element_ty)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        for first in range(begin, end, BLOCK_N):
            # [BLOCK_N, BLOCK_D] each: all tokens of a shared block are computed.
            offs = slot_offsets(block_ids, first, stride_block, STRIDE_SLOT, BLOCK_SIZE, BLOCK_N)
            if HEAD_SIZE == BLOCK_D:
                k = tl.load(k_head_ptr + offs[:, None] + offs_d[None, :])
                v = tl.load(v_head_ptr + offs[:, None] + offs_d[None, :])
            else:
                head_mask = (offs_n >= 0)[:, None] & (offs_d < HEAD_SIZE)[None, :]
                k = tl.load(k_head_ptr + offs[:, None] + offs_d[None, :], mask=head_mask, other=0.0)
                v = tl.load(v_head_ptr + offs[:, None] + offs_d[None, :], mask=head_mask, other=0.0)
            if kv_scale_ptr is not None:
                k, v = widen(k, q_ptr.dtype.element_ty), widen(v, q_ptr.dtype.element_ty)
            block_ids = load_block_ids(table_ptr, first + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores = soft_cap(scores, cap_scale) * scale_log2e
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            p = tl.exp2(scores - new_max[:, None])
            correction = tl.exp2(row_max - new_max)
            row_sum = row_sum * correction + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)
            row_max = new_max

        # i64[BLOCK_M], rows of acc and stats; and rows of the partial states of this tile's first split.
        states = seqs.to(tl.int64) * (num_kv_heads * GQA_GROUP) + heads
        tile_item = item - split
        partials = (tile_item * num_kv_heads + kv_head).to(tl.int64) * BLOCK_M + offs_m
        if num_splits == 1:
            _store_state(acc_ptr, stats_ptr, states, acc, row_max, row_sum, mask, row_mask, HEAD_SIZE, BLOCK_D)
        else:
            own = partials + split * num_kv_heads * BLOCK_M
            _store_state(
                partial_acc_ptr, partial_stats_ptr, own, acc, row_max, row_sum, mask, row_mask, HEAD_SIZE, BLOCK_D
            )
            # All threads store before one of them releases the counter.
            tl.debug_barrier()
            counter_ptr = counters_ptr + tile_item * num_kv_heads + kv_head
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_splits - 1:
                acc, row_max, row_sum = _merge_splits(
                    partial_acc_ptr, partial_stats_ptr, partials, num_splits, num_kv_heads, mask, row_mask,
                    HEAD_SIZE, BLOCK_M, BLOCK_D,
                )  # fmt: skip
                _store_state(acc_ptr, stats_ptr, states, acc, row_max, row_sum, mask, row_mask, HEAD_SIZE, BLOCK_D)
                tl.store(counter_ptr, 0)  # for the next launch or graph replay


@triton.jit
def _store_state(
    acc_ptr, stats_ptr, rows, acc, row_max, row_sum, mask, row_mask, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):
    tl.store(acc_ptr + rows[:, None] * HEAD_SIZE + tl.arange(0, BLOCK_D)[None, :], acc, mask=mask)
    tl.store(stats_ptr + rows * 2, row_max, mask=row_mask)
    tl.store(stats_ptr + rows * 2 + 1, row_sum, mask=row_mask)


@triton.jit
def _merge_splits(
    partial_acc_ptr, partial_stats_ptr, rows, num_splits, num_kv_heads, mask, row_mask,
    HEAD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge the partial states of a row tile's splits, which other programs of this launch wrote."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for _ in range(num_splits):
        # .cg loads from L2, past this SM's L1.
        part_max = tl.load(partial_stats_ptr + rows * 2, mask=row_mask, other=LOWEST, cache_modifier=".cg")
        part_sum = tl.load(partial_stats_ptr + rows * 2 + 1, mask=row_mask, other=0.0, cache_modifier=".cg")
        part_ptrs = partial_acc_ptr + rows[:, None] * HEAD_SIZE + tl.arange(0, BLOCK_D)[None, :]
        part_acc = tl.load(part_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(row_max, part_max)
        correction = tl.exp2(row_max - new_max)
        weight = tl.exp2(part_max - new_max)
        row_sum = row_sum * correction + part_sum * weight
        acc = acc * correction[:, None] + part_acc * weight[:, None]
        row_max = new_max
        rows += num_kv_heads * BLOCK_M
    return acc, row_max, row_sum


class PrefixConfig(NamedTuple):
    """Tiles of a launch."""

    block_m: int  # rows: members x heads of a KV head
    block_n: int  # keys
    num_warps: int
    num_stages: int  # key tiles in shared memory
    programs_per_sm: int  # all resident at once
    split_tiles: int  # fewest key tiles of a split


def prefix_config(head_size: int, itemsize: int) -> PrefixConfig:
    if itemsize == 4:  # no tensor cores: the products are FMAs on registers
        block_n = 32 if head_size <= 256 else 16
        return PrefixConfig(16, block_n, num_warps=4, num_stages=2, programs_per_sm=4, split_tiles=8)
    if head_size > 256:
        return PrefixConfig(64, 16, num_warps=8, num_stages=3, programs_per_sm=1, split_tiles=16)
    if triton.next_power_of_2(head_size) > 128:
        return PrefixConfig(64, 32, num_warps=8, num_stages=3, programs_per_sm=1, split_tiles=8)
    return PrefixConfig(64, 64, num_warps=4, num_stages=3, programs_per_sm=1, split_tiles=8)


def prefix_attention(q, k_cache, v_cache, block_tables, scale, groups, pdl=False, kv_scale=None, softcap=0.0):
    """See reference.prefix_attention. Reads nothing on the host: fit for CUDA graphs. pdl: as in decode.py."""
    num_kv_heads, gqa_group, head_size, block_size = attention_shape(q, k_cache, v_cache)
    num_seqs, num_heads, _ = q.shape
    acc = torch.empty((num_seqs, num_heads, head_size), dtype=torch.float32, device=q.device)
    stats = torch.empty((num_seqs, num_heads, 2), dtype=torch.float32, device=q.device)
    config = prefix_config(head_size, q.element_size())
    if not has_large_shared_memory(q.device):
        config = config._replace(num_stages=2)
    num_groups = len(groups.sizes)
    num_programs = max(1, config.programs_per_sm * num_sms(q.device) // num_kv_heads)
    # At most one item for each program, and one for each row tile: the full tiles, and a last one of each group.
    num_items = num_programs + num_seqs * gqa_group // config.block_m + num_groups
    block_m = config.block_m
    partial_acc = torch.empty((num_items, num_kv_heads, block_m, head_size), dtype=torch.float32, device=q.device)
    partial_stats = torch.empty((num_items, num_kv_heads, block_m, 2), dtype=torch.float32, device=q.device)
    launch(
        _prefix_kernel, (num_kv_heads, num_programs),
        q, k_cache, v_cache, groups.members, groups.begins, groups.sizes, groups.lens, groups.owners, block_tables,
        acc, stats, partial_acc, partial_stats, zero_counters(num_items * num_kv_heads, q.device),
        None if q.dtype == k_cache.dtype else kv_scale, num_groups, *score_scales(scale, softcap),
        q.stride(0), q.stride(1), k_cache.stride(0), block_tables.stride(0),
        STRIDE_SLOT=k_cache.stride(1), STRIDE_KV_HEAD=k_cache.stride(2),
        GQA_GROUP=gqa_group, HEAD_SIZE=head_size, BLOCK_SIZE=block_size,
        BLOCK_G=triton.next_power_of_2(num_groups), BLOCK_M=block_m, BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(head_size), SPLIT_TILES=config.split_tiles,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages, **launch_options(q.device, pdl),
    )  # fmt: skip
    return acc, stats

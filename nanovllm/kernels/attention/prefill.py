"""Paged prefill attention in Triton: many query tokens per sequence.

Owns the work partition, and the choice between this kernel and the one for Hopper (prefill_sm90.py). Legend: paging.py.

Program (sequence and KV head, i) attends query tile i with all query heads of the KV head at once: row m of the tile is
head m % GQA_GROUP of token m // GQA_GROUP. So tiles are full even where a prefix hit leaves few new tokens, and keys
and values are read once per group.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...quantization.fp8.numbers import E4M3
from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait, shared_kib
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
)

try:
    from . import prefill_sm90
except ImportError:  # a Triton version whose Gluon was not tested
    prefill_sm90 = None  # type: ignore[assignment]


@triton.jit
def _prefill_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [NB, BS, K, D]
    v_ptr,  # [NB, BS, K, D]
    cu_seqlens_ptr,  # i32[S + 1]
    req_indices_ptr,  # i32[S]
    context_lens_ptr,  # i32[S]
    tables_ptr,  # i32[R, max_blocks]
    out_ptr,  # [T, H, D]
    kv_scale_ptr,  # f32[2, K], None unless the cache is FP8
    sinks_ptr,  # [H], None without attention sinks
    num_kv_heads, scale_log2e, cap_scale,  # None without a soft cap
    stride_q_token, stride_q_head, stride_block, stride_table, stride_out_token, stride_out_head,
    STRIDE_SLOT: tl.constexpr, STRIDE_KV_HEAD: tl.constexpr,
    GQA_GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    TOKENS: tl.constexpr = BLOCK_M // GQA_GROUP
    kv_head = tl.program_id(0) % num_kv_heads
    seq = tl.program_id(0) // num_kv_heads
    # Last tokens first: they have the most keys, and no long program is left over at the end.
    q_tile = tl.num_programs(1) - 1 - tl.program_id(1)

    q_begin = tl.load(cu_seqlens_ptr + seq)
    num_new = tl.load(cu_seqlens_ptr + seq + 1) - q_begin
    if q_tile * TOKENS >= num_new:
        return
    context = tl.load(context_lens_ptr + seq)
    table_ptr = tables_ptr + tl.load(req_indices_ptr + seq).to(tl.int64) * stride_table

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    token = q_tile * TOKENS + offs_m // GQA_GROUP
    head = kv_head * GQA_GROUP + offs_m % GQA_GROUP
    row_mask = (offs_m < TOKENS * GQA_GROUP) & (token < num_new)
    io_mask = row_mask[:, None] & (offs_d < HEAD_SIZE)[None, :]
    q_token = (q_begin + token).to(tl.int64)
    # [BLOCK_M, BLOCK_D]
    q_ptrs = q_ptr + (q_token * stride_q_token + head * stride_q_head)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=io_mask, other=0.0)
    if kv_scale_ptr is not None:
        q = widen(q, q_ptr.dtype.element_ty)
        if cap_scale is not None:
            cap_scale *= tl.load(kv_scale_ptr + kv_head)
        else:
            scale_log2e *= tl.load(kv_scale_ptr + kv_head)

    position = context - num_new + token  # i32[BLOCK_M]: a row attends keys up to position, the last WINDOW of them
    first_position = context - num_new + q_tile * TOKENS
    seen = tl.minimum(first_position + TOKENS, context)  # keys that any row attends
    seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
    # With a window: first tile that any row attends, and first that no row's window cuts.
    lowest, uncut = 0, 0
    if WINDOW > 0:
        lowest = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        uncut = tl.cdiv(tl.maximum(first_position + TOKENS - WINDOW, 0), BLOCK_N) * BLOCK_N
        uncut = tl.minimum(uncut, seen_by_all)

    k_head_ptr = k_ptr + kv_head * STRIDE_KV_HEAD
    v_head_ptr = v_ptr + kv_head * STRIDE_KV_HEAD
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    block_ids = load_block_ids(table_ptr, lowest, context, BLOCK_SIZE, BLOCK_N)
    # Online softmax: tiles that the window cuts, tiles that every row attends whole, tiles that need the causal mask.
    for PART in tl.static_range(0 if WINDOW > 0 else 1, 3):
        begin, end = uncut, seen_by_all
        if PART == 0:
            begin, end = lowest, uncut
        if PART == 2:
            begin, end = seen_by_all, seen
        for first in range(begin, end, BLOCK_N):
            offs = slot_offsets(block_ids, first, stride_block, STRIDE_SLOT, BLOCK_SIZE, BLOCK_N)
            block_ids = load_block_ids(table_ptr, first + BLOCK_N, context, BLOCK_SIZE, BLOCK_N)
            key_position = first + tl.arange(0, BLOCK_N)
            k_ptrs = k_head_ptr + offs[:, None] + offs_d[None, :]
            v_ptrs = v_head_ptr + offs[:, None] + offs_d[None, :]
            # [BLOCK_N, BLOCK_D] each, written by the KV store of this or an earlier step.
            if PART != 1:
                in_reach = key_position < context
                if WINDOW > 0:
                    in_reach &= key_position > first_position - WINDOW
                load_mask = in_reach[:, None] & (offs_d < HEAD_SIZE)[None, :]
                k = tl.load(k_ptrs, mask=load_mask, other=0.0)
                v = tl.load(v_ptrs, mask=load_mask, other=0.0)
            elif HEAD_SIZE != BLOCK_D:
                k = tl.load(k_ptrs, mask=(offs_d < HEAD_SIZE)[None, :], other=0.0)
                v = tl.load(v_ptrs, mask=(offs_d < HEAD_SIZE)[None, :], other=0.0)
            else:
                k = tl.load(k_ptrs)
                v = tl.load(v_ptrs)
            if kv_scale_ptr is not None:
                k, v = widen(k, q_ptr.dtype.element_ty), widen(v, q_ptr.dtype.element_ty)
            scores = soft_cap(tl.dot(q, tl.trans(k), input_precision=PRECISION), cap_scale)
            if PART != 1:
                attended = key_position[None, :] <= position[:, None]
                if WINDOW > 0:
                    attended &= key_position[None, :] > position[:, None] - WINDOW
                scores = tl.where(attended, scores, -float("inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2e)
            p = tl.exp2(scores * scale_log2e - new_max[:, None])
            correction = tl.exp2(row_max - new_max)
            row_sum = row_sum * correction + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)
            row_max = new_max

    if kv_scale_ptr is not None:
        acc *= tl.load(kv_scale_ptr + num_kv_heads + kv_head)
    if sinks_ptr is not None:
        row_sum += sink_weights(load_sinks(sinks_ptr, head, row_mask), row_max)
    result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    out_ptrs = out_ptr + (q_token * stride_out_token + head * stride_out_head)[:, None] + offs_d[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=io_mask)


class PrefillConfig(NamedTuple):
    """Tile shape of a prefill. Measured by benchmarks/attention.py --sweep."""

    block_m: int  # rows (token, head of the group) per program
    block_n: int  # keys per tile
    num_warps: int
    num_stages: int


def prefill_config(max_rows: int, head_size: int, itemsize: int, shared_kib: int) -> PrefillConfig:
    """Choose by `max_rows`, query tokens * GQA_GROUP of the longest sequence, by heads and by shared memory."""
    if itemsize > 2:
        block_m, block_n = 32 if head_size <= 256 else 16, 32 if head_size <= 128 else 16
        return PrefillConfig(block_m, block_n, num_warps=4, num_stages=2)
    if head_size > 256:  # the accumulator takes half of the registers
        if shared_kib >= 200:
            return PrefillConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)
        return PrefillConfig(block_m=64, block_n=16, num_warps=8, num_stages=3 if shared_kib >= 160 else 2)
    if head_size > 128:
        if shared_kib >= 200 and max_rows > 64:
            return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)
        if shared_kib >= 160 and max_rows > 64:
            return PrefillConfig(block_m=128, block_n=32, num_warps=8, num_stages=3)
        return PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
    if max_rows <= 64:
        return PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    return PrefillConfig(block_m=128, block_n=32, num_warps=4, num_stages=4)


def paged_prefill_attention(
    q, k_cache, v_cache, cu_seqlens_q, req_indices, context_lens, block_tables, scale, max_seqlen_q, window=0,
    kv_scale=None, sinks=None, softcap=0.0,
):  # fmt: skip
    """See reference.paged_prefill_attention."""
    num_seqs = req_indices.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0] == 0 or num_seqs == 0:
        return out
    num_kv_heads, gqa_group, head_size, block_size = attention_shape(q, k_cache, v_cache)
    if prefill_sm90 is not None and prefill_sm90.supports(q, k_cache, max_seqlen_q, softcap):
        return prefill_sm90.prefill_attention_sm90(
            q, k_cache, v_cache, cu_seqlens_q, req_indices, context_lens, block_tables, scale, max_seqlen_q, window,
            kv_scale, out, sinks,
        )  # fmt: skip

    itemsize = max(q.element_size(), k_cache.element_size())
    config = prefill_config(max_seqlen_q * gqa_group, head_size, itemsize, shared_kib(q.device))
    launch(
        _prefill_kernel, (num_seqs * num_kv_heads, triton.cdiv(max_seqlen_q, config.block_m // gqa_group)),
        q, k_cache, v_cache, cu_seqlens_q, req_indices, context_lens, block_tables, out,
        kv_scale if k_cache.dtype == E4M3 else None, sinks, num_kv_heads, *score_scales(scale, softcap),
        q.stride(0), q.stride(1), k_cache.stride(0), block_tables.stride(0), out.stride(0), out.stride(1),
        STRIDE_SLOT=k_cache.stride(1), STRIDE_KV_HEAD=k_cache.stride(2),
        GQA_GROUP=gqa_group, HEAD_SIZE=head_size, BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=triton.next_power_of_2(head_size),
        WINDOW=window, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages, **launch_options(q.device),
    )  # fmt: skip
    return out

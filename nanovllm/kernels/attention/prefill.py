"""Attention of many query tokens per sequence over the paged KV cache, in Triton.

Owns how the work is cut into programs, and which prefills go to the kernel in hopper_prefill.py. Of pages it knows what
decode_attention.py does. Legend: see pages.py.

Program (sequence and KV head, i) attends the i-th run of query tokens, the whole group of query heads that
share the KV head at once: row m of the tile is head m % GROUP of token m // GROUP. So a tile is full even
where a prefix hit leaves few new tokens, and keys and values are read once per group.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from .paging import LOG2_E, LOWEST, load_block_ids, slot_offsets

try:
    from . import hopper_prefill
except ImportError:  # a version of Triton that it was not tried with
    hopper_prefill = None  # type: ignore[assignment]


@triton.jit
def _attend_tile(
    q,
    acc,
    row_max,
    row_sum,
    k_head_ptr,
    v_head_ptr,
    offs,
    first,
    context,
    position,
    scale_log2e,
    MASKED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the tokens first .. first + BLOCK_N - 1. MASKED: not every row sees all of them."""
    offs_d = tl.arange(0, BLOCK_D)
    key_position = first + tl.arange(0, BLOCK_N)
    k_ptrs = k_head_ptr + offs[:, None] + offs_d[None, :]
    v_ptrs = v_head_ptr + offs[:, None] + offs_d[None, :]
    # [BLOCK_N, BLOCK_D] each, written by the KV store of this or an earlier step.
    if MASKED:
        load_mask = (key_position < context)[:, None] & (offs_d < HEAD_SIZE)[None, :]
        k = tl.load(k_ptrs, mask=load_mask, other=0.0)
        v = tl.load(v_ptrs, mask=load_mask, other=0.0)
    elif HEAD_SIZE != BLOCK_D:
        k = tl.load(k_ptrs, mask=(offs_d < HEAD_SIZE)[None, :], other=0.0)
        v = tl.load(v_ptrs, mask=(offs_d < HEAD_SIZE)[None, :], other=0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(key_position[None, :] <= position[:, None], scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2e)
    p = tl.exp2(scores * scale_log2e - new_max[:, None])
    correction = tl.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum


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
    num_kv_heads,
    scale_log2e,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_table,
    stride_out_token,
    stride_out_head,
    STRIDE_SLOT: tl.constexpr,
    STRIDE_KV_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % num_kv_heads
    seq = tl.program_id(0) // num_kv_heads
    # The last tokens see the most keys: they start first, so that no long program is left over at the end.
    run = tl.num_programs(1) - 1 - tl.program_id(1)

    q_begin = tl.load(cu_seqlens_ptr + seq)
    num_new = tl.load(cu_seqlens_ptr + seq + 1) - q_begin
    if run * TOKENS >= num_new:
        return
    context = tl.load(context_lens_ptr + seq)
    table_ptr = tables_ptr + tl.load(req_indices_ptr + seq).to(tl.int64) * stride_table

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    token = run * TOKENS + offs_m // GROUP
    head = kv_head * GROUP + offs_m % GROUP
    row_mask = (offs_m < TOKENS * GROUP) & (token < num_new)
    io_mask = row_mask[:, None] & (offs_d < HEAD_SIZE)[None, :]
    q_token = (q_begin + token).to(tl.int64)
    # [BLOCK_M, BLOCK_D]
    q_ptrs = q_ptr + (q_token * stride_q_token + head * stride_q_head)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=io_mask, other=0.0)

    position = context - num_new + token  # i32[BLOCK_M]: a row sees the keys 0 .. position
    first_position = context - num_new + run * TOKENS
    seen = tl.minimum(first_position + TOKENS, context)  # keys that any row sees
    seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N

    k_head_ptr = k_ptr + kv_head * STRIDE_KV_HEAD
    v_head_ptr = v_ptr + kv_head * STRIDE_KV_HEAD
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    pages = load_block_ids(table_ptr, 0, context, BLOCK_SIZE, BLOCK_N)
    for first in range(0, seen_by_all, BLOCK_N):
        offs = slot_offsets(pages, first, stride_block, STRIDE_SLOT, BLOCK_SIZE, BLOCK_N)
        pages = load_block_ids(table_ptr, first + BLOCK_N, context, BLOCK_SIZE, BLOCK_N)
        acc, row_max, row_sum = _attend_tile(
            q, acc, row_max, row_sum, k_head_ptr, v_head_ptr, offs, first, context, position, scale_log2e,
            False, HEAD_SIZE, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    for first in range(seen_by_all, seen, BLOCK_N):
        offs = slot_offsets(pages, first, stride_block, STRIDE_SLOT, BLOCK_SIZE, BLOCK_N)
        pages = load_block_ids(table_ptr, first + BLOCK_N, context, BLOCK_SIZE, BLOCK_N)
        acc, row_max, row_sum = _attend_tile(
            q, acc, row_max, row_sum, k_head_ptr, v_head_ptr, offs, first, context, position, scale_log2e,
            True, HEAD_SIZE, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip

    result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    out_ptrs = out_ptr + (q_token * stride_out_token + head * stride_out_head)[:, None] + offs_d[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=io_mask)


class PrefillConfig(NamedTuple):
    """How a prefill is cut. Measured by benchmarks/attention.py --sweep."""

    block_m: int  # (token, head of the group) rows per program
    block_n: int  # tokens per tile
    num_warps: int
    num_stages: int


def prefill_config(max_rows: int, head_size: int, itemsize: int) -> PrefillConfig:
    """The configuration for sequences of at most `max_rows` rows, new tokens * GROUP."""
    if itemsize > 2:
        return PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=2)
    if max_rows <= 64:
        return PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    return PrefillConfig(block_m=128, block_n=32, num_warps=4, num_stages=4)


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_seqlen_q: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend the new tokens of S sequences causally to everything before them and themselves, over the pages.

    q: [T, H, D] packed, the last dimension contiguous. cu_seqlens_q: i32[S + 1]; tokens cu_seqlens_q[s] ..
    cu_seqlens_q[s + 1] are the last of the context_lens[s] tokens of sequence s, whose pages are listed in
    row rows[s] of block_tables. max_seqlen_q: the most new tokens of any sequence. The rest as in
    `paged_decode_attention`. Returns [T, H, D] like q, or `out`.
    """
    num_tokens, num_heads, head_size = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_size), dtype=q.dtype, device=q.device)
    num_seqs = rows.shape[0]
    if num_tokens == 0 or num_seqs == 0:
        return out
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == q.stride(2) == out.stride(2) == 1
    assert block_size % 16 == 0 and group * num_kv_heads == num_heads and group <= 16
    if hopper_prefill is not None and hopper_prefill.takes(q, k_cache, max_seqlen_q):
        return hopper_prefill.prefill_attention_sm90(
            q, k_cache, v_cache, cu_seqlens_q, rows, context_lens, block_tables, scale, max_seqlen_q, out
        )

    config = prefill_config(max_seqlen_q * group, head_size, k_cache.element_size())
    tokens_per_program = config.block_m // group
    launch(
        _prefill_kernel,
        (num_seqs * num_kv_heads, -(-max_seqlen_q // tokens_per_program)),
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        rows,
        context_lens,
        block_tables,
        out,
        num_kv_heads,
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
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(head_size),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(q.device),
    )
    return out

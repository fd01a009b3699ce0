"""Attention over the paged KV cache in plain torch: what the kernels of decode and prefill compute, on any device.

Owns clarity: one sequence at a time, pages gathered by indexing, softmax in fp32. Knows nothing of speed.
Legend: T packed query tokens, B or S sequences, H query heads, K KV heads, D head size, NB blocks of BS
tokens.
"""

import torch


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context: int,
    scale: float,
) -> torch.Tensor:
    """The last q.shape[0] of `context` tokens attend causally. q: [N, H, D]. Returns fp32 [N, H, D]."""
    num_new, num_heads, _ = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    position = torch.arange(context, device=q.device)
    blocks = block_table[position // block_size].long()
    # [context, H, D]: head h reads KV head h // (H / K).
    k = k_cache[blocks, position % block_size].float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    v = v_cache[blocks, position % block_size].float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("nhd,chd->hnc", q.float(), k) * scale
    own_position = position[context - num_new :]
    scores = scores.masked_fill(position[None, :] > own_position[:, None], -torch.inf)
    return torch.einsum("hnc,chd->nhd", scores.softmax(dim=-1), v)


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
    """Attend one new token per sequence, q [B, H, D], to its context; zeros where the context is empty.

    max_context and pdl are hints for the fast twin.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for i, (row, context) in enumerate(zip(rows.tolist(), context_lens.tolist(), strict=True)):
        if context == 0:
            out[i] = 0
        else:
            out[i : i + 1] = _attend(q[i : i + 1], k_cache, v_cache, block_tables[row], context, scale)
    return out


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
    """Attend packed new tokens, q [T, H, D], causally; sequence s has tokens cu_seqlens_q[s] .. [s + 1]."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    bounds = cu_seqlens_q.tolist()
    for i, (row, context) in enumerate(zip(rows.tolist(), context_lens.tolist(), strict=True)):
        begin, end = bounds[i], bounds[i + 1]
        if end > begin:
            out[begin:end] = _attend(q[begin:end], k_cache, v_cache, block_tables[row], context, scale)
    return out

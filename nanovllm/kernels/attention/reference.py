"""Paged attention in plain torch: the CPU backend, and the oracle of the Triton kernels.

Owns how a context is gathered from the KV cache; ``scaled_dot_product_attention`` does the rest, in the dtype of q,
except sinks and soft caps, which it does not support. Knows nothing of the kernels' work partition.

T packed query tokens, B sequences of a decode batch, S sequences of a prefill, R request slots, H query heads,
K KV heads, D head size, NB blocks of BS tokens.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...quantization.fp8.numbers import E4M3
from ..linear.reference import rotate

ROWS_AT_ONCE = 256  # queries that share a mask; keys after the last query are left out
SHARED_TOKENS = 128  # shared prefixes are multiples of it; it is a multiple of every tile of the decode kernel


class PrefixGroups(NamedTuple):
    """Sequences of a decode batch whose block tables begin with the same full blocks. int32, fixed sizes.

    A sequence is in one group at most. Unused groups have size 0; beyond the groups ``members`` is undefined.

    Attributes:
        shared_lens: [B], tokens of the shared prefix of each sequence, a multiple of ``SHARED_TOKENS``; 0: no group.
        members: [B], positions in the batch, group by group.
        begins, sizes: [G], each group's range of ``members``.
        lens: [G], its shared tokens.
        owners: [G], a row of the block tables that begins with its blocks.
    """

    shared_lens: torch.Tensor
    members: torch.Tensor
    begins: torch.Tensor
    sizes: torch.Tensor
    lens: torch.Tensor
    owners: torch.Tensor


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_indices: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_context: int,
    pdl: bool = False,
    window: int = 0,
    kv_scale: torch.Tensor | None = None,
    groups: PrefixGroups | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    row_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token per sequence over its context, [B, H, D]; of Q with ``row_lens``, [B * Q, H, D].

    Args:
        q: [B, H, D], last dimension contiguous.
        k_cache, v_cache: [NB, BS, K, D] of one layout, of q's dtype or e4m3. Kernels need BS a multiple of 16 and H / K
            at most 16.
        req_indices: i32[B], rows of ``block_tables``.
        context_lens: i32[B], the new token included; 0 gives zeros.
        block_tables: i32[R, max_blocks].
        scale: softmax scale.
        max_context: upper bound of ``context_lens``; a hint for the kernel, like ``pdl``.
        window: a query attends the last ``window`` tokens up to its own; 0: the whole context.
        kv_scale: fp32 [2, K], keys and values are the stored ones times it; read only where the caches are e4m3.
        groups: sequences that share a prefix, for the kernel: it reads each prefix once. Not with a window.
        sinks: [H], a score of each query head that joins the sum of the softmax, and nothing else.
        softcap: scores are softcap * tanh(score / softcap); 0: as they are.
        row_lens: i32[B * Q], contexts of the rows of each sequence, which grow by one; ``context_lens`` is the last
            live row's. Dead rows follow it: they have 0, and get zeros. Not with groups.
    """
    out = torch.zeros_like(q)
    if row_lens is not None:  # a prefill of the live rows
        is_live = row_lens > 0
        num_live = is_live.view(len(context_lens), -1).sum(1)
        out[is_live] = paged_prefill_attention(
            q[is_live], k_cache, v_cache, F.pad(num_live.cumsum(0), (1, 0)), req_indices, context_lens, block_tables,
            scale, len(q) // len(context_lens), window, kv_scale, sinks, softcap,
        )  # fmt: skip
        return out
    # The heads of a group become query tokens of one KV head: enable_gqa would copy K and V for each head.
    num_seqs, num_heads, head_size = q.shape
    grouped = (num_seqs, k_cache.shape[2], num_heads // k_cache.shape[2], head_size)
    grouped_q, grouped_out = q.view(grouped), out.view(grouped)
    of_rows = None if sinks is None else sinks.view(1, *grouped[1:3], 1)
    for i, k, v in _gather_contexts(q.dtype, k_cache, v_cache, req_indices, context_lens, block_tables, kv_scale):
        if window:
            k, v = k[:, :, -window:], v[:, :, -window:]
        grouped_out[i : i + 1] = _attend(grouped_q[i : i + 1], k, v, scale, None, of_rows, softcap)
    return out


def prefix_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    groups: PrefixGroups,
    pdl: bool = False,
    kv_scale: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax state of every group's members after their shared prefix, without sinks; undefined for other sequences.

    Returns:
        f32[B, H, D], sums of exp2(score - maximum) * v, as stored; f32[B, H, 2], maximum and sum of exp2(score -
        maximum). Scores are in base 2. q [B, H, D]; the rest as in `paged_decode_attention`.
    """
    acc = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    stats = torch.empty((*q.shape[:2], 2), dtype=torch.float32, device=q.device)
    begins, sizes, gqa_group = groups.begins.tolist(), groups.sizes.tolist(), q.shape[1] // k_cache.shape[2]
    lens = groups.lens.where(groups.sizes > 0, 0)
    key_scale = None if kv_scale is None else (kv_scale[0], torch.ones_like(kv_scale[1]))
    for i, k, v in _gather_contexts(torch.float32, k_cache, v_cache, groups.owners, lens, block_tables, key_scale):
        members = groups.members[begins[i] : begins[i] + sizes[i]].long()
        k, v = (x[0].float().repeat_interleave(gqa_group, 0) for x in (k, v))  # [H, shared tokens, D]
        scores = _capped(torch.einsum("bhd,hnd->bhn", q[members].float(), k) * scale, softcap) * math.log2(math.e)
        row_max = scores.amax(-1)
        p = torch.exp2(scores - row_max[..., None])
        acc[members] = torch.einsum("bhn,hnd->bhd", p, v)
        stats[members] = torch.stack([row_max, p.sum(-1)], -1)
    return acc, stats


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    req_indices: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_seqlen_q: int,
    window: int = 0,
    kv_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of packed query tokens, q [T, H, D], over the KV cache, [T, H, D].

    Tokens cu_seqlens_q[s] .. cu_seqlens_q[s + 1] are the last of the context_lens[s] tokens of sequence s.
    max_seqlen_q: most query tokens of one sequence, for the kernel. The rest as in `paged_decode_attention`.
    """
    out = torch.empty_like(q)
    bounds, is_plain = cu_seqlens_q.tolist(), sinks is None and not softcap
    of_heads = None if sinks is None else sinks.view(1, -1, 1, 1)
    gqa_group = q.shape[1] // k_cache.shape[2]
    for i, k, v in _gather_contexts(q.dtype, k_cache, v_cache, req_indices, context_lens, block_tables, kv_scale):
        begin, end, context = bounds[i], bounds[i + 1], k.shape[2]
        num_cached = context - (end - begin)
        if is_plain and not num_cached and not 0 < window < context:
            rows = q[begin:end].transpose(0, 1)[None]
            # is_causal aligns the mask with the first key, not the last
            attended = F.scaled_dot_product_attention(rows, k, v, is_causal=True, scale=scale, enable_gqa=gqa_group > 1)
            out[begin:end] = attended[0].transpose(0, 1)
            continue
        if not is_plain:
            k, v = (x.repeat_interleave(gqa_group, 1) for x in (k, v))
        for first in range(begin, end, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, end)
            stop = num_cached + last - begin
            start = max(0, stop - (last - first) - window + 1) if window else 0
            rows, keys, values = q[first:last].transpose(0, 1)[None], k[:, :, start:stop], v[:, :, start:stop]
            mask = torch.ones(last - first, stop - start, dtype=torch.bool, device=q.device)
            mask = mask.tril(stop - start - (last - first))
            if window:
                mask = mask.triu(stop - start - (last - first) - window + 1)
            attended = _attend(rows, keys, values, scale, mask, of_heads, softcap, enable_gqa=gqa_group > 1)
            out[first:last] = attended[0].transpose(0, 1)
    return out


def _attend(q, k, v, scale, mask, sinks, softcap, enable_gqa=False):
    """Attention of q [1, H, M, D] over k and v [1, H, L, D]; with sinks or a soft cap in fp32 and more.

    sinks [1, H, 1 or M, 1]. With `enable_gqa` k and v are [1, K, L, D]; for sinks and soft caps they are repeated.
    """
    if sinks is None and not softcap:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _capped(q.to(wide) @ k.to(wide).transpose(-1, -2) * scale, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide).expand(*scores.shape[:-1], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v.to(wide)).to(q.dtype)


def _capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return torch.tanh(scores / softcap) * softcap if softcap else scores


def _gather_contexts(dtype, k_cache, v_cache, req_indices, context_lens, block_tables, kv_scale):
    """(i, k, v) of each sequence with a context; k, v [1, K, context, D]: a view of one block, a copy of several.

    Keys and values of an e4m3 cache are dequantized to ``dtype``.
    """
    contexts, block_size = context_lens.tolist(), k_cache.shape[1]
    max_blocks = -(-max(contexts, default=0) // block_size)
    tables = block_tables.index_select(0, req_indices)[:, :max_blocks].tolist()
    for i, (context, table) in enumerate(zip(contexts, tables, strict=True)):
        if context == 0:
            continue
        *full, last = table[: -(-context // block_size)]
        num_last = context - len(full) * block_size
        k, v = (
            torch.cat([*(cache[block] for block in full), cache[last, :num_last]])[None]
            if full
            else cache[last : last + 1, :num_last]
            for cache in (k_cache, v_cache)
        )
        if k.dtype == E4M3:
            assert kv_scale is not None
            k, v = ((x.float() * scale[:, None]).to(dtype) for x, scale in zip((k, v), kv_scale, strict=True))
        yield i, k.transpose(1, 2), v.transpose(1, 2)


class Segments(NamedTuple):
    """Packed segments, such as images or windows: tokens attend to their own segment, in both directions."""

    bounds: list[int]  # [S + 1], ascending
    rows: int = 0  # rows of a query tile
    tiles: torch.Tensor | None = None  # i32 [N, 3]: first row of a query tile, begin and end of its segment


def packed_segments(bounds, device):
    """Make Segments of these bounds, for launches on ``device``."""
    return Segments(bounds)


def packed_attention(q, k, v, segments, scale):
    """Compute softmax(scale * q k^T) v within each segment; q, k, v [T, H, D] -> [T, H, D]."""
    sizes = [end - begin for begin, end in pairwise(segments.bounds)]
    outputs = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in one), scale=scale)[0].transpose(0, 1)
        for one in zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
    ]
    return torch.cat(outputs)


def rotate_qk(qkv, cos_sin, num_heads):
    """Rotate q and k of qkv [T, 3 * H * D], in the kernel in place, by cos_sin, fp32 [T, D].

    Returns q, k, v [T, H, D].
    """
    q, k, v = qkv.unflatten(1, (3, num_heads, -1)).unbind(1)
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
    return rotate(q, cos, sin), rotate(k, cos, sin), v

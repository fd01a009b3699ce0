"""Attention over the paged KV cache, and the backends that compute it.

Owns each layer's pages (``k_cache``, ``v_cache``) and the choice of backend. The keys and values
of a launch are in the pages before a backend is called, so a backend may read them there.

T packed tokens, S sequences, B sequences of a decode batch, H query heads, K KV heads, D head size,
NB blocks, BS tokens per block.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm import kernels
from nanovllm.errors import ConfigError
from nanovllm.layers.context import Context, get_context


class AttentionBackend(Protocol):
    """``prefill``: q [T, H, D], k and v [T, K, D] -> [T, H, D], causal. ``decode``: q [B, H, D] -> [B, H, D]."""

    capturable: bool  # decode may run inside a CUDA graph
    reads_pages: bool  # prefill needs no keys and values but those in the pages

    def prefill(self, q, k, v, k_cache, v_cache, scale: float, context: Context) -> torch.Tensor: ...

    def decode(self, q, k_cache, v_cache, scale: float, context: Context) -> torch.Tensor: ...


class Attention(nn.Module):
    """One layer's attention. ``k_cache`` and ``v_cache`` [NB, BS, K, D] are empty until the pool is allocated."""

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int, backend: AttentionBackend):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.scale = head_dim**-0.5
        self.backend = backend
        self.k_cache = self.v_cache = torch.empty(0)

    def reads_pages(self) -> bool:
        """Whether ``forward`` needs no k and v but those in the pages."""
        return self.backend.reads_pages or not get_context().is_prefill

    def forward(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None,
                sampled: torch.Tensor | None = None) -> torch.Tensor:
        """q [T, H, D], k and v [T, K, D] (normed, rotated and stored; None if it reads pages) -> [T, H * D].

        sampled: the context's, to attend for these tokens only, [N, H * D].
        """
        context = get_context()
        if sampled is not None:
            q, context = q[sampled], context.of_sampled()
        if len(q) == 0 or self.k_cache.numel() == 0:  # nothing is sampled; there are no pages yet
            out = torch.empty_like(q)
        elif not context.is_prefill:
            out = self.backend.decode(q, self.k_cache, self.v_cache, self.scale, context)
        else:
            out = self.backend.prefill(q, k, v, self.k_cache, self.v_cache, self.scale, context)
        return out.reshape(q.shape[0], self.num_heads * self.head_dim)


class SDPABackend:
    """``torch.nn.functional.scaled_dot_product_attention`` over gathered pages: runs anywhere, also without Triton."""

    capturable = False  # it asks the device for the contexts' lengths
    reads_pages = False

    def prefill(self, q, k, v, k_cache, v_cache, scale, context):
        outs = []
        ends_q, ends_k = context.cu_seqlens_q.tolist(), context.cu_seqlens_k.tolist()
        rows = context.rows.tolist() if context.has_prefix else []
        for s in range(len(ends_q) - 1):
            new = slice(ends_q[s], ends_q[s + 1])
            num_new, num_keys = ends_q[s + 1] - ends_q[s], ends_k[s + 1] - ends_k[s]
            keys, values, mask = k[new], v[new], None
            if num_keys > num_new:
                blocks = context.block_tables[rows[s], : -(-num_keys // k_cache.shape[1])].long()
                keys = k_cache[blocks].flatten(0, 1)[:num_keys]
                values = v_cache[blocks].flatten(0, 1)[:num_keys]
                mask = torch.ones(num_new, num_keys, dtype=torch.bool, device=q.device)
                mask = mask.tril(num_keys - num_new)
            outs.append(_sdpa(q[new].unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scale, mask, mask is None))
        return torch.cat(outs, 1).squeeze(0)

    def decode(self, q, k_cache, v_cache, scale, context):
        block_size, num_kv_heads = k_cache.shape[1:3]
        grouped = q.unflatten(1, (num_kv_heads, -1))  # [B, K, H / K, D]: a group's heads as queries of its KV head
        out = torch.zeros_like(grouped)
        tables, lengths = context.block_tables[context.rows.long()].tolist(), context.context_lens.tolist()
        for i, length in enumerate(lengths):
            blocks = tables[i][: -(-length // block_size)]
            if blocks:  # one block is a view of the pages; only longer contexts are copied together
                rest = length - (len(blocks) - 1) * block_size
                keys, values = (
                    torch.cat([*(cache[b] for b in blocks[:-1]), cache[blocks[-1]][:rest]])
                    if len(blocks) > 1
                    else cache[blocks[0]][:rest]
                    for cache in (k_cache, v_cache)
                )
                keys, values = keys.transpose(0, 1), values.transpose(0, 1)  # [K, length, D]
                out[i] = F.scaled_dot_product_attention(grouped[i : i + 1], keys[None], values[None], scale=scale)[0]
        return out.flatten(1, 2)


def _sdpa(q, k, v, scale, mask, is_causal):
    """q [N, M, H, D], k and v [N, L, K, D] -> [N, M, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


class TritonBackend:
    """Our kernels: split-context decode; prefill that reads the pages."""

    capturable = True
    reads_pages = True

    def __init__(self):
        self.ops = kernels.select("cuda")

    def prefill(self, q, k, v, k_cache, v_cache, scale, context):
        return self.ops.paged_prefill_attention(
            q, k_cache, v_cache, context.cu_seqlens_q, context.rows, context.context_lens, context.block_tables,
            scale, context.max_seqlen_q,
        )

    def decode(self, q, k_cache, v_cache, scale, context):
        # Chained: the embedding, an ordinary launch, lies between this and what wrote lengths and tables.
        return self.ops.paged_decode_attention(
            q, k_cache, v_cache, context.rows, context.context_lens, context.block_tables, scale, context.max_context,
            pdl=True,
        )


class FlashAttentionBackend:
    """flash-attn 2: ``flash_attn_varlen_func`` and ``flash_attn_with_kvcache``; an optional extra."""

    capturable = True
    reads_pages = False

    def __init__(self):
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen, self.with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

    def prefill(self, q, k, v, k_cache, v_cache, scale, context):
        block_tables = None
        if context.has_prefix:
            k, v = k_cache, v_cache
            block_tables = context.block_tables[context.rows.long()]
        return self.varlen(
            q, k, v, context.cu_seqlens_q, context.cu_seqlens_k, context.max_seqlen_q, context.max_context,
            softmax_scale=scale, causal=True, block_table=block_tables,
        )

    def decode(self, q, k_cache, v_cache, scale, context):
        out = self.with_kvcache(
            q.unsqueeze(1), k_cache, v_cache, cache_seqlens=context.context_lens,
            block_table=context.block_tables[context.rows.long()], softmax_scale=scale, causal=True,
        )
        return out.squeeze(1)


MAX_GROUP = 16  # query heads of one KV head that our kernels take


def select_backend(
    name: str, device_type: str, dtype: torch.dtype, block_size: int, head_dim: int, group: int = 1
) -> AttentionBackend:
    """The backend that ``attention_backend=name`` stands for; "auto" takes what measured fastest of what can run.

    Args:
        group: query heads of one KV head.

    Raises:
        ConfigError: the backend or the model's heads cannot run here; the message says why and what can.
    """
    if device_type == "cpu":
        if name not in ("auto", "sdpa"):
            raise ConfigError(f"attention_backend={name!r} needs a CUDA device; on the CPU use 'auto' or 'sdpa'.")
        return SDPABackend()
    if head_dim & (head_dim - 1):
        raise ConfigError(f"the model's head_dim={head_dim} is not a power of two: it runs only with device='cpu'.")
    if name == "triton" and group > MAX_GROUP:
        raise ConfigError(
            f"attention_backend='triton': the model has {group} query heads for each KV head, and the kernels take at "
            f"most {MAX_GROUP}. Use 'auto', 'flash_attn' or 'sdpa'."
        )
    if name == "sdpa" or (name == "auto" and group > MAX_GROUP):
        return SDPABackend()
    if name == "flash_attn":
        if dtype == torch.float32:
            raise ConfigError("attention_backend='flash_attn' needs dtype bfloat16 or float16, not float32.")
        try:
            return FlashAttentionBackend()
        except ImportError as error:
            raise ConfigError(
                f"attention_backend='flash_attn': the package flash-attn cannot be imported ({error}). Install it with "
                "pip install 'nanovllm[flash-attn]', or use 'auto', which needs nothing."
            ) from error
    return TritonBackend()

"""Attention over the paged KV cache, and the choice of its backend.

Owns each layer's ``k_cache`` and ``v_cache``. Keys and values of a step are stored before a backend runs (by
``qkv_linear``), so backends take q alone. Knows nothing of block ownership or scheduling.

T packed tokens, B sequences of a decode batch, H query heads, K KV heads, D head size, NB blocks of BS tokens.
"""

from types import SimpleNamespace
from typing import Protocol

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.errors import ConfigError
from nanovllm.layers.context import Context


class AttentionBackend(Protocol):
    """Causal attention of q [T, H, D] over the KV cache -> [T, H, D]; in ``decode`` T = B.

    With a ``window`` a token attends the last ``window`` ones up to itself; 0: all of them.
    """

    capturable: bool  # decode may run inside a CUDA graph
    captures_prefill: bool  # and so may prefill: with lengths that the host does not know

    def prefill(self, q, k_cache, v_cache, scale: float, window: int, context: Context) -> torch.Tensor: ...

    def decode(self, q, k_cache, v_cache, scale: float, window: int, context: Context) -> torch.Tensor: ...


class Attention(nn.Module):
    """One layer's attention. ``k_cache`` and ``v_cache`` [NB, BS, K, D] are empty until the KV cache is allocated.

    ``scale`` of the scores: None is D**-0.5.
    """

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int, backend: AttentionBackend,
                 scale: float | None = None, window: int = 0):
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, num_kv_heads
        self.scale, self.window = head_dim**-0.5 if scale is None else scale, window
        self.backend = backend
        self.k_cache = self.v_cache = torch.empty(0)

    def forward(self, q: torch.Tensor, context: Context) -> torch.Tensor:
        """q [T, H, D], normed and rotated; k and v already in the cache -> [T, H * D]."""
        if len(q) == 0 or self.k_cache.numel() == 0:  # nothing to sample; or memory profiling, before the cache exists
            return torch.empty_like(q).flatten(1)
        attend = self.backend.prefill if context.is_prefill else self.backend.decode
        return attend(q, self.k_cache, self.v_cache, self.scale, self.window, context).flatten(1)


class PagedBackend:
    """This library's attention: the Triton kernels, or their plain twins on any device ("sdpa")."""

    def __init__(self, ops: SimpleNamespace, capturable: bool):
        self.ops = ops
        self.capturable = self.captures_prefill = capturable  # the twins read context_lens on the host: no graphs

    def prefill(self, q, k_cache, v_cache, scale, window, context):
        return self.ops.paged_prefill_attention(
            q, k_cache, v_cache, context.cu_seqlens_q, context.req_indices, context.context_lens,
            context.block_tables, scale, context.max_seqlen_q, window,
        )  # fmt: skip

    def decode(self, q, k_cache, v_cache, scale, window, context):
        # pdl: the kernel reads req_indices, context_lens and block_tables before griddepcontrol.wait. Legal because the
        # embedding, a launch without PDL, separates it from the kernels that write them.
        return self.ops.paged_decode_attention(
            q, k_cache, v_cache, context.req_indices, context.context_lens, context.block_tables, scale,
            context.max_context, pdl=True, window=window,
        )  # fmt: skip


class FlashAttentionBackend:
    """flash-attn 2 over the block tables; an optional extra."""

    capturable = True
    captures_prefill = False

    def __init__(self):
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen, self.with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

    def prefill(self, q, k_cache, v_cache, scale, window, context):
        return self.varlen(
            q, k_cache, v_cache, context.cu_seqlens_q, context.cu_seqlens_k, context.max_seqlen_q, context.max_context,
            softmax_scale=scale, causal=True, window_size=_window_size(window),
            block_table=context.block_tables[context.req_indices.long()],
        )  # fmt: skip

    def decode(self, q, k_cache, v_cache, scale, window, context):
        out = self.with_kvcache(
            q.unsqueeze(1), k_cache, v_cache, cache_seqlens=context.context_lens,
            block_table=context.block_tables[context.req_indices.long()], softmax_scale=scale, causal=True,
            window_size=_window_size(window),
        )  # fmt: skip
        return out.squeeze(1)


def _window_size(window: int) -> tuple[int, int]:
    """flash-attn's: tokens before and after the query's own, -1 for all."""
    return (window - 1, 0) if window else (-1, -1)


MAX_GQA_GROUP = 16  # query heads per KV head: the rows of one tl.dot in the decode kernel


def select_backend(
    name: str, device_type: str, dtype: torch.dtype, head_dim: int, gqa_group: int = 1
) -> AttentionBackend:
    """The backend for ``attention_backend=name``; "auto" is the fastest that can run (docs/experiments.md).

    Raises:
        ConfigError: the backend or the model's heads cannot run here; the message names the alternatives.
    """
    plain = PagedBackend(kernels.select("cpu"), capturable=False)
    if device_type == "cpu":
        if name not in ("auto", "sdpa"):
            raise ConfigError(f"attention_backend={name!r} needs a CUDA device; on the CPU use 'auto' or 'sdpa'.")
        return plain
    if head_dim & (head_dim - 1):
        raise ConfigError(f"the model's head_dim={head_dim} is not a power of two: it runs only with device='cpu'.")
    if name == "triton" and gqa_group > MAX_GQA_GROUP:
        raise ConfigError(
            f"attention_backend='triton': the model has {gqa_group} query heads for each KV head, and the kernels take "
            f"at most {MAX_GQA_GROUP}. Use 'auto', 'flash_attn' or 'sdpa'."
        )
    if name == "sdpa" or (name == "auto" and gqa_group > MAX_GQA_GROUP):
        return plain
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
    return PagedBackend(kernels.select("cuda"), capturable=True)

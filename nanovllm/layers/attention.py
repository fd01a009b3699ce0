"""Attention over the paged KV cache.

Owns each layer's ``k_cache`` and ``v_cache``, and the shape of their blocks. Keys and values of a step are stored
before a backend runs (by ``qkv_linear``), so backends take q alone. Knows nothing of block ownership or scheduling.

T packed tokens, B sequences of a decode batch, H query heads, K KV heads, D head size, NB blocks of BS tokens.
"""

from typing import Protocol

import torch
from torch import nn

from nanovllm.layers.context import Context


class AttentionBackend(Protocol):
    """Causal attention of q [T, H, D] over a layer's KV cache -> [T, H, D].

    In ``decode`` T = B, or B * Q with ``context.row_lens``. A token attends the last ``layer.window`` tokens up to
    itself; 0: all of them. ``sinks`` [H] or None, and ``layer.softcap``, 0 for none, as in ``paged_decode_attention``.
    """

    capturable: bool  # decode may run inside a CUDA graph
    captures_prefill: bool  # prefill may, too, with lengths that the host does not know
    shares_prefixes: bool  # decode takes ``context.prefix_groups``; else it is never given any

    def prefill(self, q: torch.Tensor, layer: "Attention", context: Context,
                sinks: torch.Tensor | None) -> torch.Tensor: ...

    def decode(self, q: torch.Tensor, layer: "Attention", context: Context,
               sinks: torch.Tensor | None) -> torch.Tensor: ...


class Attention(nn.Module):
    """One layer's attention. ``k_cache`` and ``v_cache`` [NB, BS, K, D] are empty until the KV cache is allocated.

    ``scale`` multiplies the scores; None is D**-0.5. ``window``, ``softcap``: as above. ``kv_shard`` (i, n): this rank
    has part i of n of all KV heads. ``kv_scale`` fp32 [2, K]: an FP8 cache stores keys and values divided by it. Its
    address is fixed while CUDA graphs live (runner/kv_scales.py).
    """

    kv_scale: torch.Tensor

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int, backend: AttentionBackend,
                 scale: float | None = None, window: int = 0, kv_shard: tuple[int, int] = (0, 1),
                 softcap: float = 0.0):
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads, self.kv_shard = num_heads, head_dim, num_kv_heads, kv_shard
        self.backend, self.window, self.softcap = backend, window, softcap
        self.scale = head_dim**-0.5 if scale is None else scale
        self.register_buffer("kv_scale", torch.ones(2, num_kv_heads, dtype=torch.float32), persistent=False)
        self.kv_scale_is_given = [False, False]  # the checkpoint gives a scale of keys, of values
        self.attach_cache(torch.empty(0), torch.empty(0))

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        return 2, block_size, self.num_kv_heads, self.head_dim  # keys and values

    def attach_cache(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Views of the KV cache; empty ones detach the layer, which then stores nothing."""
        self.k_cache, self.v_cache = k_cache, v_cache

    def set_kv_scale(self, which: str, scale: torch.Tensor) -> None:
        """Take a given scale of "k", "v" or both ("kv"): one number, or one for each KV head of this rank."""
        for i in map("kv".index, which):
            with torch.inference_mode():
                self.kv_scale[i] = scale
            self.kv_scale_is_given[i] = True

    def forward(self, q: torch.Tensor, context: Context, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """q [T, H, D], normed and rotated; k and v already in the cache -> [T, H * D].

        ``sinks`` [H]: a score of each head that joins the sum of every softmax, and nothing else.
        """
        if len(q) == 0 or self.k_cache.numel() == 0:  # nothing to sample; or memory profiling, before the cache exists
            return torch.empty_like(q).flatten(1)
        attend = self.backend.prefill if context.is_prefill else self.backend.decode
        return attend(q, self, context, sinks).flatten(1)

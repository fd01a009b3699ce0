"""Attention of images whose tokens attend each other both ways (Gemma 3 and 4), over the paged KV cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.core import PrefillBatch
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.layers.context import Context
from nanovllm.messages.images import ImagePart
from nanovllm.models.decoder import CausalLM
from nanovllm.quantization.fp8.numbers import E4M3


class Block(NamedTuple):
    """An image in a prefill, or the end of one whose beginning is cached."""

    place: int  # place of its sequence in the batch
    first: int  # its first token among the packed ones
    start: int  # positions [start, stop) in the sequence
    stop: int


def blocks_of(batch: PrefillBatch, rows: np.ndarray, positions: np.ndarray) -> list[Block]:
    """The images of a prefill. ``rows``: of their tokens among the packed ones; ``positions``: of all tokens."""
    blocks, at = [], 0
    for place, part in batch.messages[ImagePart]:
        for each in part.rows:
            first, at = int(rows[at]), at + len(each)
            blocks.append(Block(place, first, int(positions[first]), int(positions[first]) + len(each)))
    return blocks


class BlockAttention:
    """A backend's attention, causal but for blocks: their tokens attend all of the block, too.

    A window leaves out keys before a token, and none after it.
    """

    def __init__(self, backend: AttentionBackend, blocks: list[Block]):
        self._backend, self._blocks, self.decode = backend, blocks, backend.decode

    def prefill(self, q: torch.Tensor, layer: Attention, context: Context,
                sinks: torch.Tensor | None) -> torch.Tensor:
        out = self._backend.prefill(q, layer, context, sinks)
        for place, first, start, stop in self._blocks:
            rows = slice(first, first + stop - start)
            begin = max(0, start - layer.window + 1) if layer.window else 0
            num_blocks = -(-stop // layer.k_cache.shape[1])
            table = context.block_tables[context.req_indices[place : place + 1].long(), :num_blocks].flatten().long()
            k, v = (cache[table].flatten(0, 1)[begin:stop] for cache in (layer.k_cache, layer.v_cache))  # [L, K, D]
            if k.dtype == E4M3:
                k, v = ((x.float() * y[:, None]).to(q.dtype) for x, y in zip((k, v), layer.kv_scale, strict=True))
            mask = None
            if layer.window:
                mask = torch.ones(stop - start, stop - begin, dtype=torch.bool, device=q.device)
                mask = mask.triu(start - layer.window + 1 - begin)
            heads, keys, values = (x.transpose(0, 1)[None] for x in (q[rows], k, v))
            attended = F.scaled_dot_product_attention(heads, keys, values, mask, scale=layer.scale, enable_gqa=True)
            out[rows] = attended[0].transpose(0, 1)
        return out


@contextmanager
def attending_both_ways(model: CausalLM, blocks: list[Block], kinds: tuple[str, ...]) -> Iterator[None]:
    """Within, tokens of a block attend each other both ways in layers of these kinds."""
    pairs: Any = zip(model.config.layers, model.model.layers, strict=True) if blocks else ()
    # layers may share one
    layers = list(dict.fromkeys(layer.self_attn.attn for config, layer in pairs if config.kind in kinds))
    backends = [layer.backend for layer in layers]
    try:
        for layer in layers:
            layer.backend = BlockAttention(layer.backend, blocks)
        yield
    finally:
        for layer, backend in zip(layers, backends, strict=True):
            layer.backend = backend

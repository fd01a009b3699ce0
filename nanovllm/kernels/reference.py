"""References of ``parallel_compile``, ``decode_inputs`` and ``embed``, in PyTorch."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F


def parallel_compile(device):
    """Does nothing: only Triton kernels are compiled."""
    return nullcontext(lambda: None)


def decode_inputs(req_indices, last_token, length, block_tables, block_size):
    """Inputs of a decode step, gathered from the request state. B sequences, R request slots.

    Args:
        req_indices: i32[B].
        last_token, length: i32[R]; length counts the last token, whose keys and values are not computed yet.
        block_tables: i32[R, max_blocks].

    Returns:
        input_ids, positions, slot_mapping, context_lens, all i32[B]. A padding request (length 0) gets token 0 at
        position 0, slot -1, context 0.
    """
    req_indices = req_indices.long()
    context_lens = length[req_indices]
    live = context_lens > 0
    positions = (context_lens - 1).clamp(min=0)
    blocks = block_tables[req_indices, (positions // block_size).long()]
    slots = blocks * block_size + positions % block_size
    return (
        torch.where(live, last_token[req_indices], 0).int(),
        positions.int(),
        torch.where(live, slots, -1).int(),
        context_lens.int(),
    )


def embed(input_ids, weight, vocab_start, scale):
    """Embeddings [T, C] times `scale` of the ids that one rank holds, zeros for the others.

    Args:
        input_ids: i32[T].
        weight: [V / size, C], rows of the ids from `vocab_start` on; `vocab_start` None: rows of all ids.
    """
    if vocab_start is None:
        x = F.embedding(input_ids, weight)
        return x if scale == 1 else x * scale
    local = input_ids - vocab_start
    is_local = (local >= 0) & (local < len(weight))
    x = F.embedding(local.where(is_local, 0), weight) * scale
    return x.masked_fill(~is_local.unsqueeze(-1), 0)

"""Plain twins of ``launch.parallel_compile`` and ``step_inputs.decode_inputs``, in PyTorch alone."""

from contextlib import nullcontext

import torch


def parallel_compile(device):
    """A context in which the Triton twins are compiled and do not run. Here there is nothing to compile."""
    return nullcontext(lambda: None)


def decode_inputs(rows, last_token, length, block_tables, block_size):
    """What the model reads in a decode step, from the row table.

    rows i32[B]; last_token, length i32[R] (length counts the token whose keys and values are not computed yet);
    block_tables i32[R, max_blocks]. Returns input_ids, positions, slot_mapping, context_lens, all i32[B].
    A null row (length 0) gets token 0 at position 0, slot -1, context 0.
    """
    rows = rows.long()
    context_lens = length[rows]
    live = context_lens > 0
    positions = (context_lens - 1).clamp(min=0)
    blocks = block_tables[rows, (positions // block_size).long()]
    slots = blocks * block_size + positions % block_size
    return (
        torch.where(live, last_token[rows], 0).int(),
        positions.int(),
        torch.where(live, slots, -1).int(),
        context_lens.int(),
    )

"""Triton: bias and penalties. Owns `apply_penalties`, which does nothing in sequences without them.

B sequences, V vocabulary, R request slots, W entries of a penalty table.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait

ENTRIES_BLOCK = 1024  # entries of a penalty table per iteration


@triton.jit
def penalize(x, bias, counts, repetition_penalty, frequency_penalty, presence_penalty):
    """Logits of entries with their bias and `counts`; -inf and NaN stay."""
    biased = x + bias
    divided = tl.div_rn(biased, repetition_penalty + tl.zeros_like(biased))  # `/` is not rounded correctly
    penalized = tl.where(biased > 0.0, divided, biased * repetition_penalty)
    penalized -= frequency_penalty * counts.to(tl.float32)
    penalized -= tl.where(counts > 0, presence_penalty, 0.0)
    return tl.where(counts >= 0, penalized, biased)


@triton.jit
def apply_penalties_kernel(
    penalized_ptr,  # f32[B, V], a copy of the logits, changed here
    req_indices_ptr,  # i32[B]
    is_penalized_ptr, repetition_penalty_ptr, frequency_penalty_ptr, presence_penalty_ptr,
    length_ptr,  # sampling columns [R] with their strides, like the row above
    last_token_ptr,  # i32[R] strided, written by the last step's draw
    # PenaltyTable, i32 [R] and [R, W] but for the bias, f32; written by the host and, where a token is counted, here
    num_entries_ptr, num_counted_ptr, token_ids_ptr, counts_ptr, bias_ptr,
    vocab_start, vocab_size, penalized_stride,
    is_penalized_stride, repetition_penalty_stride, frequency_penalty_stride, presence_penalty_stride, length_stride,
    last_token_stride, num_entries_stride, num_counted_stride, token_ids_stride, counts_stride, bias_stride,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B,). Token ids of a table are distinct, so no two entries meet in a logit."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    sequence = tl.program_id(0)
    req_idx = tl.load(req_indices_ptr + sequence).to(tl.int64)
    is_penalized = tl.load(is_penalized_ptr + req_idx * is_penalized_stride)
    length = tl.load(length_ptr + req_idx * length_stride)
    if (is_penalized != 0) & (length > 0):
        repetition_penalty = tl.load(repetition_penalty_ptr + req_idx * repetition_penalty_stride)
        frequency_penalty = tl.load(frequency_penalty_ptr + req_idx * frequency_penalty_stride)
        presence_penalty = tl.load(presence_penalty_ptr + req_idx * presence_penalty_stride)
        last_token = tl.load(last_token_ptr + req_idx * last_token_stride)
        num_entries = tl.load(num_entries_ptr + req_idx * num_entries_stride)
        num_counted = tl.load(num_counted_ptr + req_idx * num_counted_stride)
        uncounted = tl.where(num_counted < length, last_token, -1)
        penalized_ptr += sequence.to(tl.int64) * penalized_stride
        token_ids_ptr += req_idx * token_ids_stride
        counts_ptr += req_idx * counts_stride
        bias_ptr += req_idx * bias_stride

        found = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, num_entries, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            is_entry = offs < num_entries
            ids = tl.load(token_ids_ptr + offs, mask=is_entry, other=-1)
            counts = tl.load(counts_ptr + offs, mask=is_entry, other=-1)
            bias = tl.load(bias_ptr + offs, mask=is_entry, other=0.0)
            is_uncounted = is_entry & (ids == uncounted)
            found |= is_uncounted.to(tl.int32)
            counts = tl.where(is_uncounted, tl.maximum(counts, 0) + 1, counts)
            tl.store(counts_ptr + offs, counts, mask=is_uncounted)
            columns = ids - vocab_start
            is_here = is_entry & (columns >= 0) & (columns < vocab_size)
            x = tl.load(penalized_ptr + columns, mask=is_here, other=0.0)
            x = penalize(x, bias, counts, repetition_penalty, frequency_penalty, presence_penalty)
            tl.store(penalized_ptr + columns, x, mask=is_here)

        # The reduction is also a barrier: below, one thread overwrites what all of them have read above.
        if (uncounted >= 0) & (tl.max(found) == 0):
            tl.store(token_ids_ptr + num_entries, uncounted)
            tl.store(counts_ptr + num_entries, 1)
            tl.store(bias_ptr + num_entries, 0.0)
            tl.store(num_entries_ptr + req_idx * num_entries_stride, num_entries + 1)
            column = uncounted - vocab_start
            is_here = (column >= 0) & (column < vocab_size)
            x = tl.load(penalized_ptr + column, mask=is_here, other=0.0)
            one = tl.full((), 1, tl.int32)
            x = penalize(x, 0.0, one, repetition_penalty, frequency_penalty, presence_penalty)
            tl.store(penalized_ptr + column, x, mask=is_here)
        tl.store(num_counted_ptr + req_idx * num_counted_stride, tl.maximum(num_counted, length))


def apply_penalties(logits, req_indices, state, last_token, table, vocab_start=0):
    """See apply_penalties in nanovllm/sampling/penalties.py.

    The counts stay on the device: a step needs only the last token, which the host has not seen yet.
    """
    batch_size, vocab_size = logits.shape
    penalized = torch.empty((batch_size, vocab_size), dtype=torch.float32, device=logits.device).copy_(logits)
    assert table.token_ids.stride(1) == table.counts.stride(1) == table.bias.stride(1) == 1
    launch(
        apply_penalties_kernel, (batch_size,),
        penalized, req_indices, state.is_penalized, state.repetition_penalty, state.frequency_penalty,
        state.presence_penalty, state.length, last_token, table.num_entries, table.num_counted, table.token_ids,
        table.counts, table.bias, vocab_start, vocab_size, penalized.stride(0), state.is_penalized.stride(0),
        state.repetition_penalty.stride(0), state.frequency_penalty.stride(0), state.presence_penalty.stride(0),
        state.length.stride(0), last_token.stride(0), table.num_entries.stride(0), table.num_counted.stride(0),
        table.token_ids.stride(0), table.counts.stride(0), table.bias.stride(0),
        BLOCK=ENTRIES_BLOCK, num_warps=4, **launch_options(logits.device),
    )  # fmt: skip
    return penalized

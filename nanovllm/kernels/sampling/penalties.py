"""Triton: bias and penalties. Owns `adjust_logits`, which does nothing in sequences without them.

B sequences, V vocabulary, R request slots, W entries of an adjustment table.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait

ENTRIES_BLOCK = 1024  # entries of an adjustment table per iteration


@triton.jit
def adjust(x, bias, counts, repetition_penalty, frequency_penalty, presence_penalty):
    """Logits of entries with their bias and `counts`; -inf and NaN stay."""
    adjusted = x + bias
    divided = tl.div_rn(adjusted, repetition_penalty + tl.zeros_like(adjusted))  # `/` is not rounded correctly
    penalized = tl.where(adjusted > 0.0, divided, adjusted * repetition_penalty)
    penalized -= frequency_penalty * counts.to(tl.float32)
    penalized -= tl.where(counts > 0, presence_penalty, 0.0)
    return tl.where(counts >= 0, penalized, adjusted)


@triton.jit
def adjust_logits_kernel(
    adjusted_ptr,  # f32[B, V], a copy of the logits, changed here
    req_indices_ptr,  # i32[B]
    is_adjusted_ptr, repetition_penalty_ptr, frequency_penalty_ptr, presence_penalty_ptr,
    length_ptr,  # columns of SamplingState [R] with their strides, like the row above
    last_token_ptr,  # i32[R] strided, written by the last step's draw
    # AdjustmentTable, i32 [R] and [R, W] but for the bias, f32; written by the host and, where a token is counted, here
    num_entries_ptr, num_counted_ptr, token_ids_ptr, counts_ptr, bias_ptr,
    vocab_start, vocab_size, adjusted_stride,
    is_adjusted_stride, repetition_penalty_stride, frequency_penalty_stride, presence_penalty_stride, length_stride,
    last_token_stride, num_entries_stride, num_counted_stride, token_ids_stride, counts_stride, bias_stride,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B,). Token ids of a table are distinct, so no two entries meet in a logit."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    sequence = tl.program_id(0)
    req_idx = tl.load(req_indices_ptr + sequence).to(tl.int64)
    is_adjusted = tl.load(is_adjusted_ptr + req_idx * is_adjusted_stride)
    length = tl.load(length_ptr + req_idx * length_stride)
    if (is_adjusted != 0) & (length > 0):
        repetition_penalty = tl.load(repetition_penalty_ptr + req_idx * repetition_penalty_stride)
        frequency_penalty = tl.load(frequency_penalty_ptr + req_idx * frequency_penalty_stride)
        presence_penalty = tl.load(presence_penalty_ptr + req_idx * presence_penalty_stride)
        last_token = tl.load(last_token_ptr + req_idx * last_token_stride)
        num_entries = tl.load(num_entries_ptr + req_idx * num_entries_stride)
        num_counted = tl.load(num_counted_ptr + req_idx * num_counted_stride)
        uncounted = tl.where(num_counted < length, last_token, -1)
        adjusted_ptr += sequence.to(tl.int64) * adjusted_stride
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
            x = tl.load(adjusted_ptr + columns, mask=is_here, other=0.0)
            x = adjust(x, bias, counts, repetition_penalty, frequency_penalty, presence_penalty)
            tl.store(adjusted_ptr + columns, x, mask=is_here)

        # The reduction is also a barrier: below, one thread overwrites what all of them have read above.
        if (uncounted >= 0) & (tl.max(found) == 0):
            tl.store(token_ids_ptr + num_entries, uncounted)
            tl.store(counts_ptr + num_entries, 1)
            tl.store(bias_ptr + num_entries, 0.0)
            tl.store(num_entries_ptr + req_idx * num_entries_stride, num_entries + 1)
            column = uncounted - vocab_start
            is_here = (column >= 0) & (column < vocab_size)
            x = tl.load(adjusted_ptr + column, mask=is_here, other=0.0)
            one = tl.full((), 1, tl.int32)
            x = adjust(x, 0.0, one, repetition_penalty, frequency_penalty, presence_penalty)
            tl.store(adjusted_ptr + column, x, mask=is_here)
        tl.store(num_counted_ptr + req_idx * num_counted_stride, tl.maximum(num_counted, length))


def adjust_logits(logits, req_indices, state, last_token, table, vocab_start=0):
    """See adjust_logits in nanovllm/sampling/penalties.py.

    The counts stay on the device: a step needs only the last token, which the host has not seen yet.
    """
    batch_size, vocab_size = logits.shape
    adjusted = torch.empty((batch_size, vocab_size), dtype=torch.float32, device=logits.device).copy_(logits)
    assert table.token_ids.stride(1) == table.counts.stride(1) == table.bias.stride(1) == 1
    launch(
        adjust_logits_kernel, (batch_size,),
        adjusted, req_indices, state.is_adjusted, state.repetition_penalty, state.frequency_penalty,
        state.presence_penalty, state.length, last_token, table.num_entries, table.num_counted, table.token_ids,
        table.counts, table.bias, vocab_start, vocab_size, adjusted.stride(0), state.is_adjusted.stride(0),
        state.repetition_penalty.stride(0), state.frequency_penalty.stride(0), state.presence_penalty.stride(0),
        state.length.stride(0), last_token.stride(0), table.num_entries.stride(0), table.num_counted.stride(0),
        table.token_ids.stride(0), table.counts.stride(0), table.bias.stride(0),
        BLOCK=ENTRIES_BLOCK, num_warps=4, **launch_options(logits.device),
    )  # fmt: skip
    return adjusted

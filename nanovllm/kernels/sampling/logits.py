"""Triton: what changes logits before filters and draw: stop ids before min_tokens, grammar masks, bias and penalties.

Owns `mask_stop_ids`, `apply_token_mask` and `adjust_logits`; their references in reference.py define them. Each launch
does nothing in sequences whose request does not use it, and in padding requests (length 0).

B sequences, V vocabulary, R request slots, F stop ids per request, W entries of an adjustment table.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait

MASK_BLOCK = 4096  # logits per program of apply_token_mask
ENTRIES_BLOCK = 1024  # entries of an adjustment table per iteration


@triton.jit
def mask_stop_ids_kernel(
    logits_ptr,  # [B, V], written by the LM head, changed here
    req_indices_ptr,  # i32[B]
    min_len_ptr, stop_ids_ptr, length_ptr,  # columns of SamplingState [R], [R, F], [R], with their strides
    vocab_start, vocab_size, logits_stride, min_len_stride, stop_ids_stride, length_stride,
    NUM_STOP_IDS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B,)."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    sequence = tl.program_id(0)
    req_idx = tl.load(req_indices_ptr + sequence).to(tl.int64)
    length = tl.load(length_ptr + req_idx * length_stride)
    min_len = tl.load(min_len_ptr + req_idx * min_len_stride)
    if (length > 0) & (length < min_len):
        offs = tl.arange(0, BLOCK)
        ids = tl.load(stop_ids_ptr + req_idx * stop_ids_stride + offs, mask=offs < NUM_STOP_IDS, other=-1)
        columns = ids - vocab_start
        mask = (ids >= 0) & (columns >= 0) & (columns < vocab_size)
        tl.store(logits_ptr + sequence.to(tl.int64) * logits_stride + columns, -float("inf"), mask=mask)


def mask_stop_ids(logits, req_indices, state, vocab_start=0):
    """See reference.mask_stop_ids."""
    batch_size, vocab_size = logits.shape
    num_stop_ids = state.stop_ids.shape[1]
    assert logits.stride(1) == 1 and state.stop_ids.stride(1) == 1
    if batch_size > 0:
        launch(
            mask_stop_ids_kernel, (batch_size,),
            logits, req_indices, state.min_len, state.stop_ids, state.length, vocab_start, vocab_size,
            logits.stride(0), state.min_len.stride(0), state.stop_ids.stride(0), state.length.stride(0),
            NUM_STOP_IDS=num_stop_ids, BLOCK=triton.next_power_of_2(num_stop_ids),
            num_warps=1, **launch_options(logits.device),
        )  # fmt: skip


@triton.jit
def apply_token_mask_kernel(
    logits_ptr,  # [B, V], written by the LM head, changed here
    req_indices_ptr,  # i32[B]
    is_masked_ptr, length_ptr,  # columns of SamplingState [R], with their strides
    token_mask_ptr,  # i32[R, num_words], written by the host
    vocab_start, vocab_size, num_words, logits_stride, is_masked_stride, length_stride, token_mask_stride,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B, blocks of the vocabulary)."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    sequence = tl.program_id(0)
    req_idx = tl.load(req_indices_ptr + sequence).to(tl.int64)
    is_masked = tl.load(is_masked_ptr + req_idx * is_masked_stride)
    length = tl.load(length_ptr + req_idx * length_stride)
    if (is_masked != 0) & (length > 0):
        offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        ids = vocab_start + offs
        words = tl.load(token_mask_ptr + req_idx * token_mask_stride + ids // 32, mask=ids // 32 < num_words, other=0)
        logits_ptrs = logits_ptr + sequence.to(tl.int64) * logits_stride + offs
        # Loaded and stored as a whole: masked stores of single bf16 logits are not vectorized.
        logits = tl.load(logits_ptrs, mask=offs < vocab_size)
        logits = tl.where((words >> (ids % 32)) & 1 != 0, logits, -float("inf"))
        tl.store(logits_ptrs, logits, mask=offs < vocab_size)


def apply_token_mask(logits, req_indices, state, token_mask, vocab_start=0):
    """See reference.apply_token_mask."""
    batch_size, vocab_size = logits.shape
    assert logits.stride(1) == 1 and token_mask.stride(1) == 1
    launch(
        apply_token_mask_kernel, (batch_size, triton.cdiv(vocab_size, MASK_BLOCK)),
        logits, req_indices, state.is_masked, state.length, token_mask, vocab_start, vocab_size, token_mask.shape[1],
        logits.stride(0), state.is_masked.stride(0), state.length.stride(0), token_mask.stride(0),
        BLOCK=MASK_BLOCK, num_warps=4, **launch_options(logits.device),
    )  # fmt: skip


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
    """See reference.adjust_logits.

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

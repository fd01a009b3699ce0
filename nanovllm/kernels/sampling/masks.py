"""Triton: -inf on tokens that a request may not sample: stop ids before min_tokens, bit masks.

Owns `mask_stop_ids` and `apply_token_mask`. Each launch does nothing in sequences whose request does not use it, and in
padding requests (length 0). B sequences, V vocabulary, R request slots, F stop ids per request.
"""

import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait

MASK_BLOCK = 4096  # logits per program of apply_token_mask


@triton.jit
def mask_stop_ids_kernel(
    logits_ptr,  # [B, V], written by the LM head, changed here
    req_indices_ptr,  # i32[B]
    min_len_ptr, stop_ids_ptr, length_ptr,  # sampling columns [R], [R, F], [R], with their strides
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
    """See mask_stop_ids in nanovllm/sampling/masks.py."""
    batch_size, vocab_size = logits.shape
    num_stop_ids = state.stop_ids.shape[1]
    assert logits.stride(1) == 1 and state.stop_ids.stride(1) == 1
    launch(
        mask_stop_ids_kernel, (batch_size,),
        logits, req_indices, state.min_len, state.stop_ids, state.length, vocab_start, vocab_size,
        logits.stride(0), state.min_len.stride(0), state.stop_ids.stride(0), state.length.stride(0),
        NUM_STOP_IDS=num_stop_ids, BLOCK=triton.next_power_of_2(num_stop_ids), num_warps=1,
        **launch_options(logits.device),
    )  # fmt: skip


@triton.jit
def apply_token_mask_kernel(
    logits_ptr,  # [B, V], written by the LM head, changed here
    req_indices_ptr,  # i32[B]
    is_masked_ptr, length_ptr,  # sampling columns [R], with their strides
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
    """See apply_token_mask in nanovllm/sampling/masks.py."""
    batch_size, vocab_size = logits.shape
    assert logits.stride(1) == 1 and token_mask.stride(1) == 1
    launch(
        apply_token_mask_kernel, (batch_size, triton.cdiv(vocab_size, MASK_BLOCK)),
        logits, req_indices, state.is_masked, state.length, token_mask, vocab_start, vocab_size, token_mask.shape[1],
        logits.stride(0), state.is_masked.stride(0), state.length.stride(0), token_mask.stride(0),
        BLOCK=MASK_BLOCK, num_warps=4, **launch_options(logits.device),
    )  # fmt: skip

"""Triton: forbids tokens by a bitmask per request. Owns `apply_token_mask`; the plain twin is in reference.py.

B sequences, V vocabulary, R request slots.
"""

import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait

_BLOCK = 4096  # logits per program


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
        apply_token_mask_kernel, (batch_size, triton.cdiv(vocab_size, _BLOCK)),
        logits, req_indices, state.is_masked, state.length, token_mask, vocab_start, vocab_size, token_mask.shape[1],
        logits.stride(0), state.is_masked.stride(0), state.length.stride(0), token_mask.stride(0),
        BLOCK=_BLOCK, num_warps=4, **launch_options(logits.device),
    )  # fmt: skip

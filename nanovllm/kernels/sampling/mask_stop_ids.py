"""Triton: masks stop ids until min_tokens. Owns `mask_stop_ids`; the plain twin is in reference.py.

B sequences, V vocabulary, R request slots, F stop ids per request.
"""

import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait


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

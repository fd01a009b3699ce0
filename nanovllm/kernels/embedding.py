"""Triton: looks up embeddings, or the part of them that a tensor-parallel rank holds. Owns `embed`."""

import torch
import triton
import triton.language as tl

from .launch import launch


@triton.jit(do_not_specialize_on_alignment=["input_ids_ptr"])
def embed_kernel(
    input_ids_ptr,  # i32[T]
    weight_ptr,  # [V / size, C]
    out_ptr,  # [T, C], written here
    vocab_start, num_ids, num_channels, scale, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T, channels / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(input_ids_ptr + token).to(tl.int64) - vocab_start
    num_loaded = tl.where((row >= 0) & (row < num_ids), num_channels, 0)
    x = tl.load(weight_ptr + row * num_channels + offs, mask=offs < num_loaded, other=0.0)
    tl.store(out_ptr + token * num_channels + offs, (x.to(tl.float32) * scale).to(x.dtype), mask=offs < num_channels)


def embed(input_ids, weight, vocab_start, scale):
    """See reference.embed. An ordinary launch, without PDL: it orders the step's inputs (launch.py)."""
    num_tokens, (num_ids, num_channels) = len(input_ids), weight.shape
    assert weight.is_contiguous() and input_ids.stride(0) == 1
    out = torch.empty((num_tokens, num_channels), dtype=weight.dtype, device=weight.device)
    block = min(1024, triton.next_power_of_2(num_channels))
    launch(
        embed_kernel, (num_tokens, triton.cdiv(num_channels, block)),
        input_ids, weight, out, vocab_start or 0, num_ids, num_channels, float(scale),
        BLOCK=block, num_warps=max(1, block // 256), enable_fp_fusion=True,
    )  # fmt: skip
    return out

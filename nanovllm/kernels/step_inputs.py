"""Triton: gathers the inputs of a decode step from the request state on the device. Owns `decode_inputs`."""

import torch
import triton
import triton.language as tl

from .launch import compile_only, launch, launch_options, pdl_launch_dependents, pdl_wait


@triton.jit(do_not_specialize=["batch_size"])
def decode_inputs_kernel(
    req_indices_ptr,  # i32[B]
    last_token_ptr, length_ptr, block_tables_ptr,  # i32[R], [R], [R, max_blocks], with their strides
    input_ids_ptr, positions_ptr, slot_mapping_ptr, context_lens_ptr,  # i32[B], written here
    batch_size, last_token_stride, length_stride, block_tables_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK_B: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = offs_b < batch_size
    req_idx = tl.load(req_indices_ptr + offs_b, mask=mask, other=0).to(tl.int64)
    length = tl.load(length_ptr + req_idx * length_stride, mask=mask, other=0)
    live = length > 0
    position = tl.maximum(length - 1, 0)
    token = tl.load(last_token_ptr + req_idx * last_token_stride, mask=live, other=0)
    block = tl.load(block_tables_ptr + req_idx * block_tables_stride + position // BLOCK_SIZE, mask=live, other=0)
    slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(input_ids_ptr + offs_b, token, mask=mask)
    tl.store(positions_ptr + offs_b, position, mask=mask)
    tl.store(slot_mapping_ptr + offs_b, slot, mask=mask)
    tl.store(context_lens_ptr + offs_b, length, mask=mask)


def decode_inputs(req_indices, last_token, length, block_tables, block_size):
    """See reference.decode_inputs. One launch; the four results share one allocation."""
    (batch_size,) = req_indices.shape
    # Results start at multiples of 16 bytes: another alignment is another variant of every kernel that reads them.
    padded = triton.cdiv(batch_size, 4) * 4
    # Zeros while compiling: the embedding and flash-attn run even then, and index with the results.
    allocate = torch.zeros if compile_only.get() else torch.empty
    results = allocate((4, padded), dtype=torch.int32, device=req_indices.device)[:, :batch_size]
    block = 128
    launch(
        decode_inputs_kernel, (triton.cdiv(batch_size, block),),
        req_indices, last_token, length, block_tables, *results,
        batch_size, last_token.stride(0), length.stride(0), block_tables.stride(0),
        BLOCK_SIZE=block_size, BLOCK_B=block, num_warps=block // 32, **launch_options(req_indices.device),
    )  # fmt: skip
    return tuple(results)

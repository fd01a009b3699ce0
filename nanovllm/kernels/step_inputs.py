"""Triton: the inputs of a decode step, gathered from the request state on the device."""

import torch
import triton
import triton.language as tl

from .launch import _parallel_compile, launch, launch_options, pdl_launch_dependents, pdl_wait


@triton.jit(do_not_specialize=["batch_size"])
def decode_inputs_kernel(
    req_indices_ptr,  # i32[B]
    last_token_ptr,  # i32[R], strided
    length_ptr,  # i32[R], strided
    block_tables_ptr,  # i32[R, max_blocks]
    input_ids_ptr,  # i32[B], written here like the three below
    positions_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    batch_size,
    last_token_stride,
    length_stride,
    block_tables_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = offs_b < batch_size
    rows = tl.load(req_indices_ptr + offs_b, mask=mask, other=0).to(tl.int64)
    length = tl.load(length_ptr + rows * length_stride, mask=mask, other=0)
    live = length > 0
    position = tl.maximum(length - 1, 0)
    token = tl.load(last_token_ptr + rows * last_token_stride, mask=live, other=0)
    block = tl.load(block_tables_ptr + rows * block_tables_stride + position // BLOCK_SIZE, mask=live, other=0)
    slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(input_ids_ptr + offs_b, token, mask=mask)
    tl.store(positions_ptr + offs_b, position, mask=mask)
    tl.store(slot_mapping_ptr + offs_b, slot, mask=mask)
    tl.store(context_lens_ptr + offs_b, length, mask=mask)


def decode_inputs(rows, last_token, length, block_tables, block_size):
    """See reference.decode_inputs. One launch; the four results share one allocation."""
    (batch_size,) = rows.shape
    # Each begins at a multiple of 16 bytes: a pointer that does not makes Triton compile its readers anew.
    padded = triton.cdiv(batch_size, 4) * 4
    # Zeros where the kernel does not run: the embedding and flash-attn follow the results nevertheless.
    allocate = torch.zeros if _parallel_compile.get() else torch.empty
    results = allocate((4, padded), dtype=torch.int32, device=rows.device)[:, :batch_size]
    if batch_size > 0:
        block = 128
        launch(
            decode_inputs_kernel,
            (triton.cdiv(batch_size, block),),
            rows,
            last_token,
            length,
            block_tables,
            *results,
            batch_size,
            last_token.stride(0),
            length.stride(0),
            block_tables.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK_B=block,
            num_warps=block // 32,
            **launch_options(rows.device),
        )
    return tuple(results)

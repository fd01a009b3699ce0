"""Triton: the gate of a shared expert, its product with the expert's result, and the residual, in one launch."""

import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait


@triton.jit
def add_shared_expert_kernel(
    shared_ptr,  # [T, C] contiguous, written by the expert's last product; overwritten here
    residual_ptr,  # [T, C], tokens strided
    norm_weight_ptr, gate_ptr,  # [C] each, only with a gate
    residual_stride, eps,
    NUM_CHANNELS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: one token."""
    pdl_launch_dependents(USE_PDL)
    dtype: tl.constexpr = shared_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask = offs_c < NUM_CHANNELS
    if gate_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + offs_c, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + offs_c, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(USE_PDL)
    shared = tl.load(shared_ptr + token * NUM_CHANNELS + offs_c, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + token * residual_stride + offs_c, mask=mask, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        rstd = tl.rsqrt(tl.sum(residual * residual, 0) / NUM_CHANNELS + eps)
        x = ((residual * rstd).to(dtype).to(tl.float32) * norm_weight).to(dtype).to(tl.float32)
        scale = tl.sigmoid(tl.sum(x * gate, 0).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        shared = (shared * scale).to(dtype).to(tl.float32)  # rounded as in the reference
    if ADD_RESIDUAL:
        shared += residual
    tl.store(shared_ptr + token * NUM_CHANNELS + offs_c, shared.to(dtype), mask=mask)


def add_shared_expert(shared, residual, norm_weight, eps, gate_weight, add_residual):
    """See reference.add_shared_expert. Overwrites `shared`."""
    num_tokens, num_channels = shared.shape
    assert shared.is_contiguous() and residual.stride(1) == 1
    if gate_weight is None and not add_residual:
        return shared
    block_c = triton.next_power_of_2(num_channels)
    launch(
        add_shared_expert_kernel, (num_tokens,),
        shared, residual, norm_weight, gate_weight, residual.stride(0), eps,
        NUM_CHANNELS=num_channels, ADD_RESIDUAL=add_residual, BLOCK_C=block_c,
        num_warps=min(8, max(1, block_c // 512)), **launch_options(shared.device),
    )  # fmt: skip
    return shared

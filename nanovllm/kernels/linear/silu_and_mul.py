"""Triton: act(gate) * up of packed [gate, up], where it is not the epilogue of a GEMM."""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from .gemv import activate


@triton.jit
def act_and_mul_kernel(
    x_ptr,  # [T, 2I], tokens strided, written by the gate-up projection
    y_ptr,  # [T, I] contiguous, written here
    x_stride,
    intermediate_size,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < intermediate_size
    gate = tl.load(x_ptr + token * x_stride + offs, mask=mask, other=0.0)
    up = tl.load(x_ptr + token * x_stride + intermediate_size + offs, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    activated = activate(wide, ACT).to(gate.dtype)
    y = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(y_ptr + token * intermediate_size + offs, y, mask=mask)


def act_and_mul(x, act="silu"):
    """See reference.act_and_mul."""
    num_tokens, intermediate_size = len(x), x.shape[1] // 2
    assert x.stride(1) == 1
    y = torch.empty((num_tokens, intermediate_size), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(intermediate_size))
    launch(
        act_and_mul_kernel, (num_tokens, triton.cdiv(intermediate_size, block)), x, y, x.stride(0), intermediate_size,
        ACT=act, BLOCK=block, num_warps=max(1, block // 256), **launch_options(x.device),
    )  # fmt: skip
    return y

"""Triton: rotary embedding of heads by given cosines and sines, in one pass over them.

Owns `rotate_heads`, for models that compute cosines and sines themselves and store no keys here.

T tokens, H heads, D head size.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait


@triton.jit
def rotate_heads_kernel(
    x_ptr,  # [T, H, D], tokens and heads strided
    cos_ptr, sin_ptr,  # [T, D] contiguous, of any float dtype
    y_ptr,  # [T, H, D] contiguous, written here
    x_token_stride,
    x_head_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # D // 2
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H heads of one token."""
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]  # [BLOCK_H, 1]
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    is_pair = offs_d < HALF
    mask = (head < NUM_HEADS) & is_pair

    pdl_wait(USE_PDL)
    # [1, BLOCK_D] each, written by the model's table of frequencies
    at = token * 2 * HALF + offs_d
    cos_1 = tl.load(cos_ptr + at, mask=is_pair, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos_ptr + HALF + at, mask=is_pair, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin_ptr + at, mask=is_pair, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + HALF + at, mask=is_pair, other=0.0).to(tl.float32)
    # [BLOCK_H, BLOCK_D] each, written by the projection or its norm
    x_ptrs = x_ptr + token * x_token_stride + head * x_head_stride + offs_d
    x_1 = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    x_2 = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + (token * NUM_HEADS + head) * 2 * HALF + offs_d
    tl.store(y_ptrs, x_1 * cos_1 - x_2 * sin_1, mask=mask)
    tl.store(y_ptrs + HALF, x_2 * cos_2 + x_1 * sin_2, mask=mask)


def rotate_heads(x, cos, sin):
    """See reference.rotate_heads."""
    num_tokens, num_heads, head_dim = x.shape
    assert x.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # Few tokens: small programs, for latency. Many: large ones, for throughput.
    block_h, num_warps = (4, 1) if num_tokens <= 64 else (16, 4)
    launch(
        rotate_heads_kernel, (num_tokens, triton.cdiv(num_heads, block_h)),
        x, cos, sin, y, x.stride(0), x.stride(1), NUM_HEADS=num_heads, HALF=head_dim // 2, BLOCK_H=block_h,
        BLOCK_D=triton.next_power_of_2(head_dim // 2), num_warps=num_warps, **launch_options(x.device),
    )  # fmt: skip
    return y

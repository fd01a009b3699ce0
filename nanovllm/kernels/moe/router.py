"""Triton: the router's product for up to 256 tokens, split over channels.

Owns `router_partials`. Few experts occupy few programs, so the channels are shared out; `route` adds the partials.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait

SPLIT_K = 8


@triton.jit(do_not_specialize=["num_tokens"])
def router_kernel(
    x_ptr,  # [T, C] contiguous, written by the kernel before
    weight_ptr,  # [E, C]
    partials_ptr,  # fp32 [SPLIT_K, T, E], written here
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    SPLIT_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    split = tl.program_id(2)
    c = split * SPLIT_C + tl.arange(0, BLOCK_C)
    weight_ptrs = weight_ptr + expert[:, None] * NUM_CHANNELS + c[None, :]
    x_ptrs = x_ptr + token[:, None] * NUM_CHANNELS + c[None, :]
    acc = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    pdl_wait(USE_PDL)
    for first in range(0, SPLIT_C, BLOCK_C):
        inside = (first + tl.arange(0, BLOCK_C) < SPLIT_C) & (first + c < NUM_CHANNELS)
        x = tl.load(x_ptrs + first, mask=(token < num_tokens)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + first, mask=(expert < NUM_EXPERTS)[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
    offs = (split * num_tokens + token)[:, None] * NUM_EXPERTS + expert[None, :]
    tl.store(partials_ptr + offs, acc, mask=(token < num_tokens)[:, None] & (expert < NUM_EXPERTS)[None, :])


def router_partials(x, weight):
    """Partial sums fp32 [SPLIT_K, T, E] of x [T, C] weight^T."""
    (num_tokens, num_channels), num_experts = x.shape, len(weight)
    assert x.is_contiguous() and weight.is_contiguous()
    partials = torch.empty((SPLIT_K, num_tokens, num_experts), dtype=torch.float32, device=x.device)
    split_c = triton.cdiv(num_channels, SPLIT_K)
    block_c = min(128, max(16, triton.next_power_of_2(split_c)))
    launch(
        router_kernel, (triton.cdiv(num_tokens, 16), triton.cdiv(num_experts, 32), SPLIT_K),
        x, weight, partials, num_tokens,
        NUM_EXPERTS=num_experts, NUM_CHANNELS=num_channels, SPLIT_C=split_c, BLOCK_T=16, BLOCK_E=32, BLOCK_C=block_c,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return partials

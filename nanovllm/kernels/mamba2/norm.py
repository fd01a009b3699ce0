"""Triton: the gate of Mamba-2 and its RMSNorm over groups of channels. Legend: reference.py."""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from ..recurrent.conv import silu


@triton.jit
def _gate_and_norm_kernel(
    y_ptr,  # [T, G SIZE], overwritten with the result
    u_ptr,  # [T, ...], z first; written by the input projection
    norm_ptr,  # [G SIZE], or None
    mean_squares_ptr,  # fp32 [T, G], or None
    u_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NORMS_FIRST: tl.constexpr, MEASURES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: a group of a token. MEASURES: it only writes the mean of the squares, which ranks average."""
    pdl_launch_dependents(USE_PDL)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    group, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_groups = tl.num_programs(0)
    offs = tl.arange(0, BLOCK)
    mask, channels = offs < SIZE, group * SIZE + offs
    y_ptrs = y_ptr + token * num_groups * SIZE + channels
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(USE_PDL)
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
    gate = silu(tl.load(u_ptr + token * u_stride + channels, mask=mask, other=0.0).to(tl.float32))
    if not NORMS_FIRST:
        y *= gate
    if MEASURES:
        tl.store(mean_squares_ptr + token * num_groups + group, tl.sum(y * y, 0) / SIZE)
    else:
        if norm_ptr is not None:
            if mean_squares_ptr is None:
                mean_square = tl.sum(y * y, 0) / SIZE
            else:
                mean_square = tl.load(mean_squares_ptr + token * num_groups + group)
            y *= tl.rsqrt(mean_square + eps)
            if NORMS_FIRST:
                y *= weight * gate
            else:
                y = y.to(DTYPE).to(tl.float32) * weight
        tl.store(y_ptrs, y.to(DTYPE), mask=mask)


def gate_and_norm(y, u, weights):
    """See reference.gate_and_norm. Overwrites y."""
    num_groups = weights.num_groups
    size = y.shape[1] // num_groups
    mean_squares = None
    assert y.is_contiguous() and u.stride(1) == 1
    passes = (False,)
    if weights.mean_over_ranks is not None and weights.norm is not None:
        passes, mean_squares = (True, False), torch.empty((len(y), num_groups), dtype=torch.float32, device=y.device)
    for measures in passes:
        launch(
            _gate_and_norm_kernel, (num_groups, len(y)),
            y, u, weights.norm, mean_squares, u.stride(0), weights.eps,
            SIZE=size, BLOCK=triton.next_power_of_2(size), NORMS_FIRST=weights.norms_first, MEASURES=measures,
            num_warps=max(1, min(8, triton.next_power_of_2(size) // 256)), **launch_options(y.device),
        )  # fmt: skip
        if measures:
            mean_squares = weights.mean_over_ranks(mean_squares)
    return y

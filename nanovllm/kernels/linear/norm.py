"""Triton: RMSNorm, and the reduction of split-K partials into the residual before it.

Owns `rms_norm` and `SplitKPartials`. Knows nothing of layers. The twin is in reference.py.

T tokens, C channels.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait


@triton.jit(do_not_specialize=["num_tokens"])
def rms_norm_kernel(
    x_ptr,  # [T, C], tokens strided; the partials are added to it here
    partials_ptr,  # fp32 [SPLIT_K, T, C] contiguous, only with SPLIT_K
    weight_ptr,  # [C]
    y_ptr,  # [T, C] contiguous, written here
    num_tokens,
    x_stride,
    eps,
    NUM_CHANNELS: tl.constexpr,
    SPLIT_K: tl.constexpr,  # 0: no partials
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_T tokens. All loads are in flight before the first addition."""
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    offs_c = tl.arange(0, BLOCK_C)[None, :]  # [1, BLOCK_C]
    mask = (token < num_tokens) & (offs_c < NUM_CHANNELS)
    x_ptrs = x_ptr + token * x_stride + offs_c
    offs_y = token * NUM_CHANNELS + offs_c
    weight = tl.load(weight_ptr + offs_c, mask=offs_c < NUM_CHANNELS, other=0.0)
    pdl_wait(USE_PDL)
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    if SPLIT_K > 0:
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for split in tl.static_range(SPLIT_K):
            total += tl.load(partials_ptr + split * num_tokens * NUM_CHANNELS + offs_y, mask=mask, other=0.0)
        x = (x.to(tl.float32) + total).to(dtype)
        tl.store(x_ptrs, x, mask=mask)
    wide = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / NUM_CHANNELS + eps)
    normalized = (wide * rstd).to(dtype)
    y = (normalized.to(tl.float32) * weight.to(tl.float32)).to(dtype)
    tl.store(y_ptr + offs_y, y, mask=mask)


@dataclass(frozen=True)
class SplitKPartials:
    """A residual, and the partial sums of a split-K GEMM that `rms_norm` adds to it in place.

    `residual` is valid only after that norm: to index it, or as the residual of a later linear layer.
    """

    residual: torch.Tensor  # [T, C]
    partials: torch.Tensor  # fp32 [SPLIT_K, T, C]

    def __len__(self):
        return len(self.residual)

    def __getitem__(self, tokens):
        return self.residual[tokens]


def rms_norm(x, weight, eps):
    """See reference.rms_norm; x [T, C]. Of SplitKPartials: the norm of their sum, which is left in their `residual`."""
    x, partials = (x.residual, x.partials) if isinstance(x, SplitKPartials) else (x, None)
    num_tokens, num_channels = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and (partials is None or partials.is_contiguous())
    y = torch.empty((num_tokens, num_channels), dtype=x.dtype, device=x.device)
    block_c = triton.next_power_of_2(num_channels)
    block_t = max(1, 1024 // block_c) if partials is None else 1
    num_warps = block_t * block_c // (256 if partials is None else 128)
    launch(
        rms_norm_kernel, (triton.cdiv(num_tokens, block_t),), x, partials, weight, y, num_tokens, x.stride(0), eps,
        NUM_CHANNELS=num_channels, SPLIT_K=0 if partials is None else len(partials), BLOCK_T=block_t, BLOCK_C=block_c,
        num_warps=min(16, max(1, num_warps)), **launch_options(x.device),
    )  # fmt: skip
    return y

"""Triton: RMSNorm.

Owns `rms_norm`. Knows nothing of layers; reference.py has the plain twin. The residual addition before a norm is done
by the product before it (linear.py).
"""

import torch
import triton
import triton.language as tl

from .inputs import after_predecessor, launch_options, launcher, let_successor_start


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,  # [T, H, C], last dimension contiguous
    weight_ptr,  # [C]
    y_ptr,  # [T * H, C] contiguous, written here
    num_rows,
    num_heads,
    x_stride_t,
    x_stride_h,
    num_channels,
    eps,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHAINED: tl.constexpr,
):
    let_successor_start(CHAINED)
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]  # [BLOCK_R, 1]
    offs_c = tl.arange(0, BLOCK_C)[None, :]  # [1, BLOCK_C]
    mask = (offs_r < num_rows) & (offs_c < num_channels)
    weight = tl.load(weight_ptr + offs_c, mask=offs_c < num_channels, other=0.0)
    after_predecessor(CHAINED)
    x_row = (offs_r // num_heads) * x_stride_t + (offs_r % num_heads) * x_stride_h
    x = tl.load(x_ptr + x_row + offs_c, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / num_channels + eps)
    normalized = (wide * rstd).to(x.dtype)
    y = (normalized.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(y_ptr + offs_r * num_channels + offs_c, y, mask=mask)


def rms_norm(x, weight, eps):
    """See reference.rms_norm."""
    num_channels = x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    assert x.dim() in (2, 3) and x.stride(-1) == 1 and weight.is_contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    block_c = triton.next_power_of_2(num_channels)
    block_r = max(1, 1024 // block_c)
    launcher(rms_norm_kernel, (triton.cdiv(num_rows, block_r),))(
        x,
        weight,
        y,
        num_rows,
        num_heads,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        num_channels,
        eps,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=min(16, max(1, block_r * block_c // 256)),
        **launch_options(x.device),
    )
    return y

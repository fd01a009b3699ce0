"""Triton: RMSNorm, and the sum before it where a product left one to be made.

Owns `rms_norm`, `add_rms_norm` and `SplitKPartials`. Knows nothing of layers; reference.py has the plain twins. Other
products add to the residual stream by themselves (linear.py).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait


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
    USE_PDL: tl.constexpr,
):
    pdl_launch_dependents(USE_PDL)
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]  # [BLOCK_R, 1]
    offs_c = tl.arange(0, BLOCK_C)[None, :]  # [1, BLOCK_C]
    mask = (offs_r < num_rows) & (offs_c < num_channels)
    weight = tl.load(weight_ptr + offs_c, mask=offs_c < num_channels, other=0.0)
    pdl_wait(USE_PDL)
    x_row = (offs_r // num_heads) * x_stride_t + (offs_r % num_heads) * x_stride_h
    x = tl.load(x_ptr + x_row + offs_c, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / num_channels + eps)
    normalized = (wide * rstd).to(x.dtype)
    y = (normalized.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(y_ptr + offs_r * num_channels + offs_c, y, mask=mask)


@triton.jit
def add_rms_norm_kernel(
    parts_ptr,  # f32[P, T, C] contiguous, written by the kernel before
    stream_ptr,  # [T, C], rows strided; the parts are added to it here
    weight_ptr,  # [C]
    y_ptr,  # [T, C] contiguous, written here
    part_stride,
    stream_stride,
    eps,
    NUM_CHANNELS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one token, all of whose loads are under way before the first sum."""
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask = offs_c < NUM_CHANNELS
    weight = tl.load(weight_ptr + offs_c, mask=mask, other=0.0)
    stream_ptrs = stream_ptr + token * stream_stride + offs_c
    parts_ptrs = parts_ptr + token * NUM_CHANNELS + offs_c
    pdl_wait(USE_PDL)
    before = tl.load(stream_ptrs, mask=mask, other=0.0)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(parts_ptrs + part * part_stride, mask=mask, other=0.0)
    stream = (before.to(tl.float32) + total).to(before.dtype)
    tl.store(stream_ptrs, stream, mask=mask)
    wide = stream.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=0) / NUM_CHANNELS + eps)
    normalized = (wide * rstd).to(before.dtype)
    y = (normalized.to(tl.float32) * weight.to(tl.float32)).to(before.dtype)
    tl.store(y_ptr + token * NUM_CHANNELS + offs_c, y, mask=mask)


def add_rms_norm(parts, stream, weight, eps):
    """See reference.add_rms_norm. In place: what it returns first is `stream`."""
    num_parts, num_tokens, num_channels = parts.shape
    assert stream.stride(1) == 1 and parts.is_contiguous() and weight.is_contiguous()
    y = torch.empty((num_tokens, num_channels), dtype=stream.dtype, device=stream.device)
    block_c = triton.next_power_of_2(num_channels)
    launch(
        add_rms_norm_kernel,
        (num_tokens,),
        parts,
        stream,
        weight,
        y,
        num_tokens * num_channels,
        stream.stride(0),
        eps,
        NUM_CHANNELS=num_channels,
        NUM_PARTS=num_parts,
        BLOCK_C=block_c,
        num_warps=min(16, max(1, block_c // 128)),
        **launch_options(stream.device),
    )
    return stream, y


@dataclass
class SplitKPartials:
    """A residual stream to which a product's result is still to be added: the norm that reads it next does that.

    stream: [T, C]; the sum, once ``parts`` is None.
    parts: fp32 [P, T, C], the result in P parts; None when they have been added.
    """

    stream: torch.Tensor
    parts: torch.Tensor | None

    def __getitem__(self, tokens):
        """The sum, of some tokens."""
        assert self.parts is None
        return self.stream[tokens]

    def rms_norm(self, weight, eps):
        """Make the sum, and return its norm."""
        assert self.parts is not None
        self.stream, y = add_rms_norm(self.parts, self.stream, weight, eps)
        self.parts = None
        return y


def rms_norm(x, weight, eps):
    """See reference.rms_norm. A SplitKPartials as `x` becomes the sum."""
    if isinstance(x, SplitKPartials):
        return x.rms_norm(weight, eps)
    num_channels = x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    assert x.dim() in (2, 3) and x.stride(-1) == 1 and weight.is_contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    block_c = triton.next_power_of_2(num_channels)
    block_r = max(1, 1024 // block_c)
    launch(
        rms_norm_kernel,
        (triton.cdiv(num_rows, block_r),),
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

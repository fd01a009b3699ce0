"""Triton: RMSNorm, and the reduction of split-K partials into the residual before it; quantization of tokens to e4m3.

Owns `rms_norm`, `quantize_tokens` and `SplitKPartials`. Knows nothing of layers. The twins are in reference.py.

T tokens, C channels, S programs that shared the channels of a split-K GEMM.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..fp8 import E4M3, E4M3_MAX
from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from .reference import Tokens

LARGEST = tl.constexpr(E4M3_MAX)


@triton.jit
def to_e4m3(x):
    """Saturated. NaN stays NaN."""
    x = tl.maximum(x, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def quantize(x, AXIS: tl.constexpr):
    """x along AXIS as e4m3, and the scales: the largest magnitude becomes 448."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=AXIS, keep_dims=True), 1e-12)
    return to_e4m3(x * (LARGEST / amax)), amax / LARGEST


@triton.jit(do_not_specialize=["num_tokens"])
def rms_norm_kernel(
    x_ptr,  # [T, C], tokens strided
    weight_ptr,  # [C]
    y_ptr,  # [T, C] contiguous, written here
    scale_ptr,  # fp32 [T], written here, only with QUANTIZE
    num_tokens,
    x_stride,
    num_channels,
    eps,
    HAS_NORM: tl.constexpr,  # otherwise only quantized
    QUANTIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    offs_c = tl.arange(0, BLOCK_C)[None, :]  # [1, BLOCK_C]
    mask = (token < num_tokens) & (offs_c < num_channels)
    if HAS_NORM:
        weight = tl.load(weight_ptr + offs_c, mask=offs_c < num_channels, other=0.0)
    pdl_wait(USE_PDL)
    y = tl.load(x_ptr + token * x_stride + offs_c, mask=mask, other=0.0)
    if HAS_NORM:
        wide = y.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / num_channels + eps)
        normalized = (wide * rstd).to(y.dtype)
        y = (normalized.to(tl.float32) * weight.to(tl.float32)).to(y.dtype)
    if QUANTIZE:
        y, scale = quantize(y.to(tl.float32), 1)
        tl.store(scale_ptr + token, scale, mask=token < num_tokens)
    tl.store(y_ptr + token * num_channels + offs_c, y, mask=mask)


@triton.jit
def add_rms_norm_kernel(
    partials_ptr,  # [S, T, C] contiguous, fp32 or of the residual's type, written before
    residual_ptr,  # [T, C], tokens strided; the partials are added to it here
    weight_ptr,  # [C]
    y_ptr,  # [T, C] contiguous, written here
    scale_ptr,  # fp32 [T], written here, only with QUANTIZE
    partials_stride,
    residual_stride,
    eps,
    QUANTIZE: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one token. All loads are in flight before the first addition."""
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask = offs_c < NUM_CHANNELS
    weight = tl.load(weight_ptr + offs_c, mask=mask, other=0.0)
    residual_ptrs = residual_ptr + token * residual_stride + offs_c
    partials_ptrs = partials_ptr + token * NUM_CHANNELS + offs_c
    pdl_wait(USE_PDL)
    before = tl.load(residual_ptrs, mask=mask, other=0.0)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(partials_ptrs + split * partials_stride, mask=mask, other=0.0)
    residual = (before.to(tl.float32) + total).to(before.dtype)
    tl.store(residual_ptrs, residual, mask=mask)
    wide = residual.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=0) / NUM_CHANNELS + eps)
    normalized = (wide * rstd).to(before.dtype)
    y = (normalized.to(tl.float32) * weight.to(tl.float32)).to(before.dtype)
    if QUANTIZE:
        y, scale = quantize(y.to(tl.float32), 0)
        tl.store(scale_ptr + token + tl.arange(0, 1), scale)
    tl.store(y_ptr + token * NUM_CHANNELS + offs_c, y, mask=mask)


@dataclass(frozen=True)
class SplitKPartials:
    """A residual, and the partial sums of a split-K GEMM that `rms_norm` adds to it in place.

    `residual` is valid only after that norm: to index it, or as the residual of a later linear layer.
    """

    residual: torch.Tensor  # [T, C]
    partials: torch.Tensor  # [S, T, C], fp32; or of the residual's dtype: another rank's summand

    def __len__(self):
        return len(self.residual)

    def __getitem__(self, tokens):
        return self.residual[tokens]

    @property
    def dtype(self):
        return self.residual.dtype


def rms_norm(x, weight, eps, quantized=False):
    """See reference.rms_norm; x [T, C]. SplitKPartials are first reduced into their `residual`.

    `quantized`: the result as e4m3 Tokens.
    """
    if isinstance(x, SplitKPartials):
        return add_rms_norm(x.partials, x.residual, weight, eps, quantized)
    assert weight.is_contiguous()
    return _rms_norm(x, weight, eps, quantized)


def quantize_tokens(x):
    """See reference.quantize_tokens; x [T, C]."""
    return _rms_norm(x, None, 0.0, quantized=True)


def _rms_norm(x, weight, eps, quantized):
    num_tokens, num_channels = x.shape
    assert x.stride(1) == 1
    y, scale = _result(x, num_tokens, num_channels, quantized)
    block_c = triton.next_power_of_2(num_channels)
    block_t = max(1, 1024 // block_c)
    launch(
        rms_norm_kernel, (triton.cdiv(num_tokens, block_t),),
        x, weight, y, scale, num_tokens, x.stride(0), num_channels, eps, HAS_NORM=weight is not None,
        QUANTIZE=quantized, BLOCK_T=block_t, BLOCK_C=block_c,
        num_warps=min(16, max(4, block_t * block_c // 1024)), **launch_options(x.device),
    )  # fmt: skip
    return Tokens(y, x.dtype, scale) if quantized else y


def add_rms_norm(partials, residual, weight, eps, quantized=False):
    """residual += partials.sum(0), in place; returns rms_norm(residual), with `quantized` as e4m3 Tokens."""
    split_k, num_tokens, num_channels = partials.shape
    assert residual.stride(1) == 1 and partials.is_contiguous() and weight.is_contiguous()
    y, scale = _result(residual, num_tokens, num_channels, quantized)
    block_c = triton.next_power_of_2(num_channels)
    launch(
        add_rms_norm_kernel, (num_tokens,),
        partials, residual, weight, y, scale, num_tokens * num_channels, residual.stride(0), eps, QUANTIZE=quantized,
        NUM_CHANNELS=num_channels, SPLIT_K=split_k, BLOCK_C=block_c, num_warps=min(16, max(1, block_c // 128)),
        **launch_options(residual.device),
    )  # fmt: skip
    return Tokens(y, residual.dtype, scale) if quantized else y


def _result(x, num_tokens, num_channels, quantized):
    if not quantized:
        return torch.empty((num_tokens, num_channels), dtype=x.dtype, device=x.device), None
    data = torch.empty((num_tokens, num_channels), dtype=E4M3, device=x.device)
    return data, torch.empty(num_tokens, dtype=torch.float32, device=x.device)

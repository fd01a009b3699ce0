"""Triton: RMSNorm before and after a linear layer, and over all heads of q or k; quantization of tokens to e4m3.

Owns `rms_norm`, `quantize_tokens`, `add_post_norm`, `add_branch_norms`, `qk_rms_norm` and `SplitKPartials`, which a
norm first adds to the residual. Knows nothing of layers.

T tokens, C channels, S partial sums of a GEMM or of a token's experts; H query heads, K KV heads, D head size.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...quantization.fp8.numbers import E4M3, E4M3_MAX
from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from .reference import TILE_TOKENS, Tokens

LARGEST = tl.constexpr(E4M3_MAX)


@triton.jit
def to_e4m3(x):
    """Convert with saturation. NaN stays NaN."""
    x = tl.maximum(x, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def quantize(x, AXIS: tl.constexpr):
    """Quantize x along AXIS to e4m3; also returns the scales: the largest magnitude becomes 448."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=AXIS, keep_dims=True), 1e-12)
    return to_e4m3(x * (LARGEST / amax)), amax / LARGEST


@triton.jit
def normalized(x, weight, mean_square, eps):
    """x / sqrt(mean_square + eps) * weight, rounded to the type of x after each step, as in the reference."""
    rounded = (x.to(tl.float32) * tl.rsqrt(mean_square + eps)).to(x.dtype)
    return (rounded.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def mean_square(x, size, KEEP_DIMS: tl.constexpr = False):
    """The mean square over the last dimension."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, axis=len(x.shape) - 1, keep_dims=KEEP_DIMS) / size


@triton.jit(do_not_specialize=["num_tokens"])
def rms_norm_kernel(
    x_ptr,  # [T, C], tokens strided
    weight_ptr,  # [C], or None: only quantized
    y_ptr,  # [T, C] contiguous, written here
    scale_ptr,  # fp32 [T], written here; None: y is not quantized
    num_tokens,
    x_stride,
    num_channels,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    offs_c = tl.arange(0, BLOCK_C)[None, :]  # [1, BLOCK_C]
    mask = (token < num_tokens) & (offs_c < num_channels)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + offs_c, mask=offs_c < num_channels, other=0.0)
    pdl_wait(USE_PDL)
    y = tl.load(x_ptr + token * x_stride + offs_c, mask=mask, other=0.0)
    if weight_ptr is not None:
        y = normalized(y, weight, mean_square(y, num_channels, KEEP_DIMS=True), eps)
    if scale_ptr is not None:
        y, scale = quantize(y.to(tl.float32), 1)
        tl.store(scale_ptr + token, scale, mask=token < num_tokens)
    tl.store(y_ptr + token * num_channels + offs_c, y, mask=mask)


@triton.jit
def add_rms_norm_kernel(
    partials_ptr,  # [S, T, C] contiguous, written before
    residual_ptr,  # [T, C], tokens strided; the partials are added to it here
    weight_ptr,  # [C]
    y_ptr,  # [T, C] contiguous, written here
    scale_ptr,  # fp32 [T], written here; None: y is not quantized
    partials_stride,
    residual_stride,
    eps,
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
    y = normalized(residual, weight, mean_square(residual, NUM_CHANNELS), eps)
    if scale_ptr is not None:
        y, scale = quantize(y.to(tl.float32), 0)
        tl.store(scale_ptr + token + tl.arange(0, 1), scale)
    tl.store(y_ptr + token * NUM_CHANNELS + offs_c, y, mask=mask)


@dataclass(frozen=True)
class SplitKPartials:
    """A residual, and the partial sums of a GEMM that `rms_norm` adds to it in place.

    `residual` is valid only after that norm: to index it, or as the residual of a later linear layer.
    """

    residual: torch.Tensor  # [T, C]
    partials: torch.Tensor  # [S, T, C], fp32, or in the residual's dtype

    def __len__(self):
        return len(self.residual)

    def __getitem__(self, tokens):
        return self.residual[tokens]

    @property
    def dtype(self):
        return self.residual.dtype


def rms_norm(x, weight, eps, quantized=False):
    """See reference.rms_norm; x [T, C]. SplitKPartials are first reduced into their `residual`.

    `quantized`: return e4m3 Tokens of the result; without a weight, of x itself.
    """
    partials, x = (x.partials, x.residual) if isinstance(x, SplitKPartials) else (None, x)
    num_tokens, num_channels = x.shape
    assert x.stride(1) == 1 and (weight is None or weight.is_contiguous())
    num_rows = triton.cdiv(num_tokens, TILE_TOKENS) * TILE_TOKENS if quantized else num_tokens
    y = torch.empty((num_rows, num_channels), dtype=E4M3 if quantized else x.dtype, device=x.device)[:num_tokens]
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)[:num_tokens] if quantized else None
    block_c = triton.next_power_of_2(num_channels)
    options = dict(BLOCK_C=block_c, **launch_options(x.device))
    if partials is None:
        block_t = max(1, 1024 // block_c)
        launch(
            rms_norm_kernel, (triton.cdiv(num_tokens, block_t),),
            x, weight, y, scale, num_tokens, x.stride(0), num_channels, eps, BLOCK_T=block_t,
            num_warps=min(16, max(4, block_t * block_c // 1024)), **options,
        )  # fmt: skip
    else:
        assert partials.is_contiguous()
        launch(
            add_rms_norm_kernel, (num_tokens,),
            partials, x, weight, y, scale, num_tokens * num_channels, x.stride(0), eps, NUM_CHANNELS=num_channels,
            SPLIT_K=len(partials), num_warps=min(16, max(1, block_c // 128)), **options,
        )  # fmt: skip
    return Tokens(y, x.dtype, scale) if quantized else y


def quantize_tokens(x):
    """See reference.quantize_tokens; x [T, C]."""
    return rms_norm(x, None, 0.0, quantized=True)


@triton.jit
def post_norm_kernel(
    x_ptr,  # [T, C], tokens strided, written by the projection
    weight_ptr,  # [C]
    second_ptr,  # [T, C], tokens strided, written by an earlier kernel; or None, as are the next two
    x_weight_ptr, second_weight_ptr,  # [C]: weights of the norms of x and second; their sum is normed
    scale_ptr,  # [1] or None
    residual_ptr,  # [T, C], tokens strided; the norm of x is added to it here
    x_stride,
    second_stride,
    residual_stride,
    eps,
    NUM_CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: one token."""
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask = offs_c < NUM_CHANNELS
    weight = tl.load(weight_ptr + offs_c, mask=mask, other=0.0)
    if second_ptr is not None:
        x_weight = tl.load(x_weight_ptr + offs_c, mask=mask, other=0.0)
        second_weight = tl.load(second_weight_ptr + offs_c, mask=mask, other=0.0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(tl.float32)
    residual_ptrs = residual_ptr + token * residual_stride + offs_c
    pdl_wait(USE_PDL)
    x = tl.load(x_ptr + token * x_stride + offs_c, mask=mask, other=0.0)
    if second_ptr is not None:
        second = tl.load(second_ptr + token * second_stride + offs_c, mask=mask, other=0.0)
        x = normalized(x, x_weight, mean_square(x, NUM_CHANNELS), eps)
        second = normalized(second, second_weight, mean_square(second, NUM_CHANNELS), eps)
        x = (x.to(tl.float32) + second.to(tl.float32)).to(x.dtype)
    residual = tl.load(residual_ptrs, mask=mask, other=0.0)
    y = normalized(x, weight, mean_square(x, NUM_CHANNELS), eps)
    total = (residual.to(tl.float32) + y.to(tl.float32)).to(residual.dtype)
    if scale_ptr is not None:
        total = (total.to(tl.float32) * scale).to(residual.dtype)
    tl.store(residual_ptrs, total, mask=mask)


def add_post_norm(x, weight, eps, residual, scale=None):
    """See reference.add_post_norm. Adds to `residual` in place."""
    return add_branch_norms(x, None, None, None, weight, eps, residual, scale)


def add_branch_norms(first, second, first_weight, second_weight, weight, eps, residual, scale=None):
    """See reference.add_branch_norms. Adds to `residual` in place."""
    num_tokens, num_channels = first.shape
    assert first.stride(1) == residual.stride(1) == 1 and weight.is_contiguous()
    assert second is None or second.stride(1) == 1
    block_c = triton.next_power_of_2(num_channels)
    launch(
        post_norm_kernel, (num_tokens,), first, weight, second, first_weight, second_weight, scale, residual,
        first.stride(0), 0 if second is None else second.stride(0), residual.stride(0), eps,
        NUM_CHANNELS=num_channels, BLOCK_C=block_c, num_warps=min(16, max(1, block_c // 256)),
        **launch_options(first.device),
    )  # fmt: skip
    return residual


@triton.jit(do_not_specialize=["num_tokens"])
def qk_rms_norm_kernel(
    qkv_ptr,  # [T, (H + 2K) * D], tokens strided, written by the projection; q and k are overwritten here
    q_weight_ptr,  # [H * D]
    k_weight_ptr,  # [K * D]
    mean_squares_ptr,  # fp32 [2, T] or None
    qkv_stride,
    num_tokens,
    eps,
    Q_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: q or k of one token."""
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    is_k = tl.program_id(1)
    offs = tl.arange(0, BLOCK)
    q_size, k_size = Q_SIZE * (1 - is_k), K_SIZE * is_k  # one of them is 0
    size = q_size + k_size
    mask = offs < size
    q_weight = tl.load(q_weight_ptr + offs, mask=offs < q_size, other=0.0)
    k_weight = tl.load(k_weight_ptr + offs, mask=offs < k_size, other=0.0)
    weight = q_weight.to(tl.float32) + k_weight.to(tl.float32)
    ptrs = qkv_ptr + token * qkv_stride + is_k * Q_SIZE + offs
    pdl_wait(USE_PDL)
    x = tl.load(ptrs, mask=mask, other=0.0)
    if mean_squares_ptr is not None:
        squares = tl.load(mean_squares_ptr + is_k * num_tokens + token)
    else:
        squares = mean_square(x, size)
    tl.store(ptrs, normalized(x, weight, squares, eps), mask=mask)


def qk_rms_norm(qkv, q_weight, k_weight, eps, mean_squares=None):
    """See reference.qk_rms_norm. Overwrites q and k in `qkv`."""
    q_size, k_size = len(q_weight), len(k_weight)
    assert qkv.stride(1) == 1 and q_weight.is_contiguous() and k_weight.is_contiguous()
    assert q_weight.dtype == k_weight.dtype and (mean_squares is None or mean_squares.is_contiguous())
    block = triton.next_power_of_2(max(q_size, k_size))
    launch(
        qk_rms_norm_kernel, (len(qkv), 2), qkv, q_weight, k_weight, mean_squares, qkv.stride(0), len(qkv), eps,
        Q_SIZE=q_size, K_SIZE=k_size, BLOCK=block, num_warps=min(16, max(1, block // 256)),
        **launch_options(qkv.device),
    )  # fmt: skip
    return qkv

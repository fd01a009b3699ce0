"""Triton: RMSNorm of what attention or MLP adds to the residual, and RMSNorm over all heads of q or k.

Owns `add_post_norm` and `qk_rms_norm`; norm.py has the norm before a linear layer. The twins are in reference.py.

T tokens, C channels, H query heads, K KV heads, D head size.
"""

import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait


@triton.jit
def post_norm_kernel(
    x_ptr,  # [T, C], tokens strided, written by the projection
    weight_ptr,  # [C]
    residual_ptr,  # [T, C], tokens strided; the norm of x is added to it here
    x_stride,
    residual_stride,
    eps,
    NUM_CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one token."""
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask = offs_c < NUM_CHANNELS
    weight = tl.load(weight_ptr + offs_c, mask=mask, other=0.0)
    residual_ptrs = residual_ptr + token * residual_stride + offs_c
    pdl_wait(USE_PDL)
    x = tl.load(x_ptr + token * x_stride + offs_c, mask=mask, other=0.0)
    residual = tl.load(residual_ptrs, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=0) / NUM_CHANNELS + eps)
    # Rounded to the storage type after each step, as in the twin.
    normalized = (wide * rstd).to(x.dtype)
    y = (normalized.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(residual_ptrs, (residual.to(tl.float32) + y.to(tl.float32)).to(residual.dtype), mask=mask)


def add_post_norm(x, weight, eps, residual):
    """See reference.add_post_norm. Adds to `residual` in place."""
    num_tokens, num_channels = x.shape
    assert x.stride(1) == residual.stride(1) == 1 and weight.is_contiguous()
    block_c = triton.next_power_of_2(num_channels)
    launch(
        post_norm_kernel, (num_tokens,), x, weight, residual, x.stride(0), residual.stride(0), eps,
        NUM_CHANNELS=num_channels, BLOCK_C=block_c, num_warps=min(16, max(1, block_c // 256)),
        **launch_options(x.device),
    )  # fmt: skip
    return residual


@triton.jit(do_not_specialize=["num_tokens"])
def qk_rms_norm_kernel(
    qkv_ptr,  # [T, (H + 2K) * D], tokens strided, written by the projection; q and k are overwritten here
    q_weight_ptr,  # [H * D]
    k_weight_ptr,  # [K * D]
    mean_squares_ptr,  # fp32 [2, T], only with HAS_SQUARES
    qkv_stride,
    num_tokens,
    eps,
    Q_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
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
    wide = x.to(tl.float32)
    if HAS_SQUARES:
        mean_square = tl.load(mean_squares_ptr + is_k * num_tokens + token)
    else:
        mean_square = tl.sum(wide * wide, axis=0) / size
    normalized = (wide * tl.rsqrt(mean_square + eps)).to(x.dtype)
    y = (normalized.to(tl.float32) * weight).to(x.dtype)
    tl.store(ptrs, y, mask=mask)


def qk_rms_norm(qkv, q_weight, k_weight, eps, mean_squares=None):
    """See reference.qk_rms_norm. Overwrites q and k in `qkv`."""
    q_size, k_size = len(q_weight), len(k_weight)
    assert qkv.stride(1) == 1 and q_weight.is_contiguous() and k_weight.is_contiguous()
    assert q_weight.dtype == k_weight.dtype and (mean_squares is None or mean_squares.is_contiguous())
    block = triton.next_power_of_2(max(q_size, k_size))
    launch(
        qk_rms_norm_kernel, (len(qkv), 2), qkv, q_weight, k_weight, mean_squares, qkv.stride(0), len(qkv), eps,
        Q_SIZE=q_size, K_SIZE=k_size, HAS_SQUARES=mean_squares is not None, BLOCK=block,
        num_warps=min(16, max(1, block // 256)), **launch_options(qkv.device),
    )  # fmt: skip
    return qkv

"""Triton: per-head RMSNorm, rotary embedding and KV-cache store of packed q, k and v in one launch.

Owns `norm_rope_store`, for QKV projections without this epilogue. Knows slots, not blocks or sequences.

T tokens, H query heads, K KV heads, D head size.
"""

import triton
import triton.language as tl

from ...quantization.fp8.numbers import E4M3
from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from .norm import to_e4m3


@triton.jit
def quantize(x, scale):
    """x / scale as e4m3, saturated."""
    return to_e4m3(x.to(tl.float32) * (1.0 / scale))


@triton.jit
def norm_rope_store_kernel(
    qkv_ptr,  # [T, (H + 2K) * D], written by the projection; q is overwritten here
    q_weight_ptr, k_weight_ptr,  # [D] each, or None
    cos_sin_ptr,  # fp32 [max_position, D]
    positions_ptr,  # [T]
    slot_mapping_ptr,  # i32[T], read only with caches
    k_cache_ptr, v_cache_ptr,  # [slots, K, D] contiguous, written here; or None
    kv_scale_ptr,  # fp32 [2, K], None unless the cache is FP8
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    V_NORM: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H of the H + 2K heads of one token."""
    pdl_launch_dependents(USE_PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]  # [BLOCK_H, 1]
    offs_d = tl.arange(0, HALF)[None, :]  # [1, D/2]
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    mask = head < NUM_HEADS + 2 * NUM_KV_HEADS

    if q_weight_ptr is not None:
        q_weight_1 = tl.load(q_weight_ptr + offs_d).to(tl.float32)
        q_weight_2 = tl.load(q_weight_ptr + HALF + offs_d).to(tl.float32)
        k_weight_1 = tl.load(k_weight_ptr + offs_d).to(tl.float32)
        k_weight_2 = tl.load(k_weight_ptr + HALF + offs_d).to(tl.float32)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + offs_d)  # [1, D/2]
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + HALF + offs_d)
    if k_cache_ptr is not None:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)

    pdl_wait(USE_PDL)
    # [BLOCK_H, D/2] each: the rotation pairs x[i] with x[i + D/2].
    head_ptrs = qkv_ptr + token * qkv_stride + head * HEAD_DIM + offs_d
    raw_1 = tl.load(head_ptrs, mask=mask, other=0.0)
    raw_2 = tl.load(head_ptrs + HALF, mask=mask, other=0.0)
    dtype: tl.constexpr = raw_1.dtype
    x_1, x_2 = raw_1.to(tl.float32), raw_2.to(tl.float32)
    if q_weight_ptr is not None or V_NORM:
        rstd = tl.rsqrt(tl.sum(x_1 * x_1 + x_2 * x_2, axis=1, keep_dims=True) / HEAD_DIM + eps)
    if V_NORM:
        raw_1, raw_2 = (x_1 * rstd).to(dtype), (x_2 * rstd).to(dtype)
    if q_weight_ptr is not None:
        # Rounded to the storage type after each step, as in the reference.
        x_1 = ((x_1 * rstd).to(dtype).to(tl.float32) * tl.where(is_q, q_weight_1, k_weight_1)).to(dtype)
        x_2 = ((x_2 * rstd).to(dtype).to(tl.float32) * tl.where(is_q, q_weight_2, k_weight_2)).to(dtype)
        x_1, x_2 = x_1.to(tl.float32), x_2.to(tl.float32)
    y_1 = (x_1 * cos - x_2 * sin).to(dtype)
    y_2 = (x_2 * cos + x_1 * sin).to(dtype)
    tl.store(head_ptrs, y_1, mask=is_q)
    tl.store(head_ptrs + HALF, y_2, mask=is_q)

    if k_cache_ptr is not None:
        is_k = ~is_q & ~is_v
        if kv_scale_ptr is not None:
            # [BLOCK_H, 1]; the heads of k and v follow each other here as in the scales
            scale = tl.load(kv_scale_ptr + head - NUM_HEADS, mask=mask & ~is_q, other=1.0)
            y_1, y_2 = quantize(y_1, scale), quantize(y_2, scale)
            raw_1, raw_2 = quantize(raw_1, scale), quantize(raw_2, scale)
        if slot >= 0:
            k_offs = (slot * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM + offs_d
            v_offs = k_offs - NUM_KV_HEADS * HEAD_DIM
            tl.store(k_cache_ptr + k_offs, y_1, mask=is_k)
            tl.store(k_cache_ptr + k_offs + HALF, y_2, mask=is_k)
            tl.store(v_cache_ptr + v_offs, raw_1, mask=mask & is_v)
            tl.store(v_cache_ptr + v_offs + HALF, raw_2, mask=mask & is_v)


def padded_head_dim(head_dim):
    """See reference.padded_head_dim. A power of two, for tl.arange, and at least 16, for tl.dot in attention."""
    return max(16, triton.next_power_of_2(head_dim))


def norm_rope_store(
    qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, k_cache, v_cache, num_heads, num_kv_heads,
    kv_scale=None, v_norm=False,
):  # fmt: skip
    """See reference.norm_rope_store. Overwrites q in `qkv`; the result is a view of it.

    Positions and slots are read before the PDL wait (see launch.py).
    """
    num_tokens, num_all_heads = len(qkv), num_heads + 2 * num_kv_heads
    head_dim = qkv.shape[1] // num_all_heads
    has_cache = k_cache is not None and k_cache.numel() > 0 and num_kv_heads > 0
    assert qkv.stride(1) == 1 and cos_sin.is_contiguous() and cos_sin.dtype.is_floating_point
    assert head_dim & (head_dim - 1) == 0, f"head size {head_dim} is not a power of two"
    assert (q_weight is None) == (k_weight is None)
    assert not has_cache or (k_cache.is_contiguous() and v_cache.is_contiguous())
    is_fp8 = has_cache and k_cache.dtype == E4M3
    # Few tokens: small programs, for latency. Many: large ones, for throughput.
    block_h, num_warps = (4, 1) if num_tokens <= 64 else (16, 4)
    launch(
        norm_rope_store_kernel, (num_tokens, triton.cdiv(num_all_heads, block_h)),
        qkv, q_weight, k_weight, cos_sin, positions, slot_mapping,
        k_cache if has_cache else None, v_cache if has_cache else None, kv_scale if is_fp8 else None,
        qkv.stride(0), eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_H=block_h,
        V_NORM=v_norm, num_warps=num_warps, **launch_options(qkv.device),
    )  # fmt: skip
    return qkv.unflatten(1, (num_all_heads, head_dim))[:, :num_heads]

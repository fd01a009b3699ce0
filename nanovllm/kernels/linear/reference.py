"""Plain twins of the linear-layer kernels, in PyTorch alone: what each operation means.

Same names and signatures as the kernels; the CPU runs them and the kernels' tests compare with them. Where a kernel
works in place and its twin does not (or the reverse), the docstring says so: callers use what is returned.

T packed tokens, C channels, N output features, H query heads, K KV heads, D head size, NB KV blocks of BS tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps):
    """Root-mean-square norm over the last dimension of `x` [T, C] or [T, H, D]; rows may be strided.

    Numerics of Hugging Face's Qwen3RMSNorm: normalised in fp32, rounded to x.dtype, then times `weight`.
    Never writes to `x`.
    """
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normalized.to(x.dtype) * weight


def add_rms_norm(parts, stream, weight, eps):
    """(stream + the sum of parts, its rms_norm); parts fp32 [P, T, C], stream [T, C], which this one leaves alone."""
    stream = (stream.float() + parts.sum(0)).to(stream.dtype)
    return stream, rms_norm(stream, weight, eps)


def silu_and_mul(x):
    """x [T, 2I] -> silu(x[:, :I]) * x[:, I:], the activation rounded to x.dtype before the product."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.float()).to(x.dtype) * up


def norm_rope_store(
    qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, k_cache, v_cache, num_heads, num_kv_heads
):
    """From packed projections to attention's inputs: per-head RMSNorm, rotary embedding, store of keys and values.

    qkv [T, (H + 2K) * D]; q_weight, k_weight [D], or None for models without QK-norm; cos_sin fp32
    [max_position, D] with the cosines in the first D/2 columns and the sines in the rest; positions [T];
    slot_mapping i32[T], -1 = store nothing; k_cache, v_cache [NB, BS, K, D], or None or empty: no store.

    Returns q [T, H, D], k [T, K, D], v [T, K, D]. The Triton twin writes q and k back into `qkv` and returns
    views of it; this one leaves `qkv` alone.
    """
    num_all_heads = num_heads + 2 * num_kv_heads
    heads = qkv.unflatten(1, (num_all_heads, qkv.shape[1] // num_all_heads))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if k_cache is not None and k_cache.numel() > 0:
        store_kvcache(k, v, k_cache, v_cache, slot_mapping)
    return q, k, v


class QKVEpilogue(NamedTuple):
    """What becomes of projected heads: the arguments of norm_rope_store but the first."""

    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    k_cache: torch.Tensor | None
    v_cache: torch.Tensor | None
    num_heads: int
    num_kv_heads: int


def rotate(x, cos, sin):
    """Turn the pairs (x[i], x[i + D/2]) by the given angles, in fp32 (Hugging Face's rotate_half layout)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def store_kvcache(k, v, k_cache, v_cache, slot_mapping):
    """Write k, v [T, K, D] to slots of the caches [NB, BS, K, D]; slot = block * BS + offset, -1 = nowhere."""
    stored = slot_mapping >= 0
    slots = slot_mapping[stored].long()
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k[stored])
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v[stored])


def fused_linear(x, weight, bias=None, norm_weight=None, eps=0.0, residual=None, silu_mul=False, allow_split_k=False):
    """[residual +] [silu_and_mul] ([rms_norm] (x) @ weight.T [+ bias]); x [T, C], weight [N, C] as nn.Linear has it.

    With `norm_weight` [C], x is normalised first. With `silu_mul`, weight is [2I, C] (gate rows, then up rows)
    and the result [T, I]. The fused twin keeps what lies between in fp32 and may write the result over `residual`;
    this one rounds after each step and leaves `residual` alone. With `allow_split_k` the fused twin may leave it to the
    next norm to add to the residual, and return what only `rms_norm` and this function understand.
    """
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    y = F.linear(x, weight, bias)
    if silu_mul:
        y = silu_and_mul(y)
    return y if residual is None else residual + y


def qkv_linear(x, weight, bias, norm_weight, eps, heads, pages_only=False):
    """norm_rope_store(fused_linear(x, weight, bias, norm_weight, eps), *heads).

    pages_only: nobody reads keys and values but in the pages; the fused twin may return None in their place.
    """
    return norm_rope_store(fused_linear(x, weight, bias, norm_weight, eps), *heads)

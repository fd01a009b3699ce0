"""PyTorch references of the linear-layer kernels: the CPU backend and the oracle of the kernels' tests.

Owns the meaning of each operation and the values `Weight` and `QKVEpilogue`. Knows nothing of layers or devices. The
references round to x.dtype after each step and leave their inputs alone; some kernels work in place, so use the result.

T packed tokens, C input channels, N output features, H query heads, K KV heads, D head size, NB KV blocks of BS tokens.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...quantization.fp8 import numbers as fp8
from ...quantization.fp8.numbers import E4M3, E4M3_MAX
from ...quantization.int4 import numbers as int4
from ...quantization.mxfp4 import numbers as mxfp4
from ...quantization.nvfp4 import numbers as nvfp4


class Weight(NamedTuple):
    """The weight of a linear layer, y = x @ (data * scale).T."""

    # [N, C], as in nn.Linear; with a scale e4m3, or in four bits (quantization/): uint8 [N, C / 2], MXFP4; int32
    # [N, C / 8], words of integers or, with a factor, of NVFP4
    data: torch.Tensor
    # fp32 [N, G], each scale for C / G channels: G = 1, C / 128, or more where a shard or the tensor's end cuts blocks;
    # MXFP4 has uint8 [C / 32, N], 4-bit integers [N, G] in the dtype of x, NVFP4 uint8 [N, C / 16]
    scale: torch.Tensor | None = None
    block_n: int = 1  # number of consecutive output features that share their scales
    packed: Any = None  # a CPU copy: see `pack`, and quantization/int4/numbers.py for 4-bit integers
    zero: torch.Tensor | None = None  # int8 [N, G] for 4-bit integers; None: symmetric
    order: torch.Tensor | None = None  # i32 [C] for 4-bit integers: x's channel for each channel of W; None: the same
    factor: torch.Tensor | None = None  # fp32 [N, 1] of NVFP4
    is_temporary: bool = False  # written by a kernel just before: a PDL kernel must not read it before its wait

    def expert(self, i):
        """The Weight of expert i, sliced from data [E, N, C], scale and zero [E, N, G] of all experts."""
        scale, zero, factor = (None if x is None else x[i] for x in (self.scale, self.zero, self.factor))
        return self._replace(data=self.data[i], scale=scale, zero=zero, factor=factor)

    @property
    def is_mxfp4(self):
        return self.data.dtype == torch.uint8

    @property
    def has_words(self):
        """Whether it is of 4-bit integers or NVFP4."""
        return self.data.dtype == torch.int32

    @property
    def num_channels(self):
        return self.data.shape[-1] * (2 if self.is_mxfp4 else int4.CODES if self.has_words else 1)

    @property
    def channels(self):
        """Channel of W, i64 [C], at each place of the packed 4-bit data."""
        return int4.channels_of(self.num_channels, self.tile, self.data.device)

    @property
    def tile(self):
        """Number of channels in a tile, within which words have an order of their own."""
        if self.factor is not None:
            return nvfp4.tile_of(self.num_channels)
        return int4.tile_of(self.num_channels // self.scale.shape[-1])

    def has_whole_blocks(self):
        """Whether scales are per feature or per whole block of 128 x 128, as the prefill GEMM needs them."""
        return self.scale.shape[1] == 1 or self.block_n % 128 == 0

    def dequantize(self, dtype):
        """W [N, C] in `dtype`, or [E, N, C] of experts; unchanged without a scale."""
        if self.scale is None:
            return self.data
        if self.is_mxfp4:
            return mxfp4.dequantized(self.data, self.scale, dtype)
        if self.factor is not None:
            return nvfp4.dequantized(self.data, self.scale, self.factor, dtype)
        if self.has_words:
            numbers = int4.dequantized(self.data, self.scale, self.zero, dtype)
            return torch.empty_like(numbers).index_copy_(-1, self.channels, numbers)
        return fp8.dequantized(self.data, self.scale, dtype)


def pack(data):
    """A copy of a weight [N, C] in oneDNN's blocked layout, which F.linear would make again in each call.

    None if torch has no such product for this CPU. bf16 products are bitwise equal to F.linear; fp32 sums run in
    another order than MKL's.
    """
    supports = data.dtype == torch.float32 or (
        data.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    is_x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not (is_x86 and torch.backends.mkldnn.is_available() and data.device.type == "cpu" and supports):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(data, None)  # for any number of tokens


TILE_TOKENS = 128  # tokens in a library's tile


class Tokens(NamedTuple):
    """The input of a matrix product, x = data * scale[:, None]."""

    data: torch.Tensor  # [T, C]; with a scale e4m3
    dtype: torch.dtype  # dtype of the product, and of data without a scale
    scale: torch.Tensor | None = None  # fp32 [T], or [C / 128, T]: one for each 128 channels

    def whole_tiles(self):
        """Data and scale up to a multiple of TILE_TOKENS, as `rms_norm` allocates them; added rows are undefined."""
        num_rows = -(-len(self.data) // TILE_TOKENS) * TILE_TOKENS
        data = self.data.as_strided((num_rows, self.data.shape[1]), self.data.stride())
        return data, self.scale.as_strided((num_rows,), (1,))


class QKVEpilogue(NamedTuple):
    """The arguments of `norm_rope_store` after qkv."""

    q_weight: torch.Tensor | None  # [D], in the dtype of qkv or fp32; None without QK-norm; likewise k_weight
    k_weight: torch.Tensor | None
    eps: float
    cos_sin: torch.Tensor  # fp32 [max_position, D]: cosines in the first D/2 columns, then sines
    positions: torch.Tensor  # i32[T]
    slot_mapping: torch.Tensor  # i32[T], -1: not stored
    k_cache: torch.Tensor | None  # [NB, BS, K, D], of qkv's dtype or e4m3; None or empty: nothing is stored
    v_cache: torch.Tensor | None  # likewise
    num_heads: int
    num_kv_heads: int
    kv_scale: torch.Tensor | None = None  # fp32 [2, K], of keys and of values; read only where the caches are e4m3
    v_norm: bool = False  # values get an RMSNorm, too, without a weight


def rms_norm(x, weight, eps):
    """RMSNorm over the last dimension, rounded to x.dtype before `weight` scales it, as in Hugging Face's Qwen3.

    `weight` is of x.dtype or fp32, and the product is rounded once.
    """
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normalized.to(x.dtype) * weight).to(x.dtype)


def add_post_norm(x, weight, eps, residual, scale=None):
    """(residual + rms_norm(x)) [* scale [1]], all [T, C]; the kernel overwrites `residual`."""
    total = residual + rms_norm(x, weight, eps)
    return total if scale is None else (total * scale).to(total.dtype)


def add_branch_norms(first, second, first_weight, second_weight, weight, eps, residual, scale=None):
    """`add_post_norm` of rms_norm(first) + rms_norm(second), all [T, C]; the kernel overwrites `residual`."""
    both = rms_norm(first, first_weight, eps) + rms_norm(second, second_weight, eps)
    return add_post_norm(both, weight, eps, residual, scale)


def qk_rms_norm(qkv, q_weight, k_weight, eps, mean_squares=None):
    """RMSNorm of q and k in qkv [T, (H + 2K) * D], each over all its heads; in place in the kernel.

    q_weight [H * D], k_weight [K * D]. mean_squares: fp32 [2, T] of q and k, where other ranks have heads too.
    """
    q, k, v = qkv.split([len(q_weight), len(k_weight), len(k_weight)], dim=1)
    if mean_squares is None:
        mean_squares = torch.stack([x.float().square().mean(-1) for x in (q, k)])
    q, k = (
        ((x.float() * torch.rsqrt(squares[:, None] + eps)).to(x.dtype) * weight).to(x.dtype)
        for x, squares, weight in ((q, mean_squares[0], q_weight), (k, mean_squares[1], k_weight))
    )
    return torch.cat((q, k, v), dim=1)


def quantize_tokens(x):
    """x [T, C] as e4m3 Tokens: each token's largest magnitude becomes 448, the largest of e4m3."""
    amax = x.float().abs().amax(-1).clamp(min=1e-12)
    return Tokens(to_e4m3(x.float() * (E4M3_MAX / amax)[:, None]), x.dtype, amax / E4M3_MAX)


def to_e4m3(x):
    """Convert with saturation; torch's own conversion gives NaN beyond 448. NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def act_and_mul(x, act="silu", up=None):
    """act(x) * up, both [T, I]; without `up` they are the halves of x [T, 2I].

    The activation is rounded to x.dtype before the product.
    """
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    gate = F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")  # computed in fp32, rounded once
    return gate * up


def gelu_linear(x, weight, bias):
    """gelu(x W^T + bias) in its tanh form, x [T, C], weight [N, C]."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def sigmoid_gate(x, gate):
    """x * sigmoid(gate), both [T, N]; the kernel overwrites `x`. The sigmoid is rounded to x.dtype."""
    return x * gate.float().sigmoid().to(x.dtype)


def relu2(x):
    """relu(x)^2 of x [T, N], which is overwritten."""
    x = x.relu_()
    return x.mul_(x)


def soft_cap(x, cap):
    """cap * tanh(x / cap), in fp32, of logits x [N, V]; the kernel overwrites them."""
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)


def padded_head_dim(head_dim):
    """The head size that the operations take for a model's head size; zeros pad the rest. Here the two are equal."""
    return head_dim


def norm_rope_store(
    qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, k_cache, v_cache, num_heads, num_kv_heads,
    kv_scale=None, v_norm=False,
):  # fmt: skip
    """Per-head RMSNorm and rotary embedding of q and k, and the store of k and v to the KV cache.

    qkv [T, (H + 2K) * D]; the rest is `QKVEpilogue`. Without KV heads nothing is stored. Returns q [T, H, D], in the
    kernel a view of the overwritten qkv.
    """
    num_all_heads = num_heads + 2 * num_kv_heads
    heads = qkv.unflatten(1, (num_all_heads, qkv.shape[1] // num_all_heads))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
    if k_cache is not None and k_cache.numel() > 0 and num_kv_heads > 0:
        v = rms_norm(v, 1.0, eps) if v_norm else v
        k = k if k_weight is None else rms_norm(k, k_weight, eps)
        store_kvcache(rotate(k, cos, sin), v, k_cache, v_cache, slot_mapping, kv_scale)
    q = q if q_weight is None else rms_norm(q, q_weight, eps)
    return rotate(q, cos, sin)


def rotate(x, cos, sin):
    """Rotate the pairs (x[i], x[i + D/2]) in fp32 (the rotate_half layout of Hugging Face)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_heads(x, cos, sin):
    """Rotate the heads x [T, H, D] by cosines and sines [T, D] in fp32, the pairs as in `rotate`; contiguous."""
    (first, second), cos, sin = x.float().chunk(2, dim=-1), cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype).contiguous()


def store_kvcache(k, v, k_cache, v_cache, slot_mapping, kv_scale=None):
    """Write k, v [T, K, D] to slots of the caches [NB, BS, K, D]; slot = block * BS + offset, -1: not stored."""
    stored = slot_mapping >= 0
    slots = slot_mapping[stored].long()
    if k_cache.dtype == E4M3:
        k, v = (quantize(x, scale).view(torch.uint8) for x, scale in zip((k, v), kv_scale, strict=True))
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)  # torch copies no e4m3 by index
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k[stored])
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v[stored])


def quantize(x, scale):
    """x [T, K, D] / scale as e4m3, saturated; scale fp32 [K]."""
    return to_e4m3(x.float() * scale.reciprocal()[:, None])


def fused_linear(
    x, weight, bias=None, norm_weight=None, eps=0.0, residual=None, act_mul=None, allow_split_k=False, reader=None
):  # fmt: skip
    """[residual +] [act_and_mul] ([rms_norm] (x) @ W^T [+ bias]), x [T, C], W = data * scale of the Weight, [N, C].

    norm_weight [C]: RMSNorm of x. act_mul ("silu", "gelu_tanh"): W is [2I, C], gate features before up features; the
    result is [T, I].

    The kernels may keep intermediate results in fp32 and overwrite `residual`. With allow_split_k they may return
    SplitKPartials, which rms_norm, fused_linear and qkv_linear accept (norm.py). reader: the Weight of the only
    fused_linear that reads the result; the result may then be Tokens.
    """
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if weight.has_words and weight.factor is None:
        y = int4.linear(x, weight, bias)
    elif weight.packed is None:
        y = F.linear(x, weight.dequantize(x.dtype), bias)
    else:
        y = torch.ops.mkldnn._linear_pointwise(x, weight.packed, bias, "none", [], "")
    if act_mul is not None:
        y = act_and_mul(y, act_mul)
    return y if residual is None else residual + y


def qkv_linear(x, weight, bias, norm_weight, eps, epilogue):
    """q [T, H, D] of a QKV projection of x, normed unless norm_weight is None; k and v go to the cache only."""
    return norm_rope_store(fused_linear(x, weight, bias, norm_weight, eps), *epilogue)

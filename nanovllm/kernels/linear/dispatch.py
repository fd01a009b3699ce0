"""Linear layers with the norm before and the activation, the residual or the rotary embedding after fused in.

Owns `fused_linear` and `qkv_linear`: the choice of kernel by precision, device and number of tokens. Knows nothing of
layers or shards; reference.py says what is computed.

    tokens       16 bits                          e4m3 with scales per feature      e4m3 with scales of blocks
    1            gemv.py                          gemv.py                           gemv.py
    2 to 256     decode_gemm_sm90.py, where it    decode_gemm_sm90.py; from 65 on   likewise
                 beats cuBLAS                     only in one wave
    otherwise    prefill_gemm_sm90.py, where its  prefill_gemm_sm90.py from 65 on   prefill_gemm_sm90.py
                 epilogue saves a kernel
    otherwise    cuBLAS between separate kernels  torch._scaled_mm between them     dequantized, as 16 bits

If no epilogue is fused, and the prefill GEMM's large tiles would leave half of the SMs idle (o and down of 8B with 257
to 512 tokens), torch._scaled_mm takes its place, and the next norm adds the residual. If down takes the prefill GEMM,
gate and up write its input in e4m3, with a scale for each 128 channels of a token.

With e4m3 weights a single token is multiplied in its own 16 bits (W8A16). Two or more tokens, on Hopper, are quantized
to e4m3 as well (W8A8): the FP8 tensor cores multiply them at twice the rate of 16 bits, the fastest way there
(docs/experiments.md). The references do not quantize tokens. Elsewhere the weight is dequantized at each call, which is
correct but slow. So is a weight whose scales of 128 channels do not cover whole blocks of 128 x 128, for more than 256
tokens, as when a rank's shard cuts blocks. Weights of 4-bit integers have kernels of their own for up to 64 tokens
(int4.py); for more, they are dequantized. A dequantized weight goes to a library or to the prefill GEMM: GEMV and
decode GEMM request a weight before the kernel that writes it has ended.
"""

import torch
import torch.nn.functional as F

from ...quantization.fp8.numbers import E4M3
from ..launch import compile_only, is_sm90
from . import int4
from .dequantize import dequantized, has_e4m3
from .gemv import gemv
from .norm import SplitKPartials, rms_norm
from .norm_rope_store import norm_rope_store
from .reference import Tokens
from .silu_and_mul import act_and_mul

try:
    from . import decode_gemm_sm90, prefill_gemm_sm90
except ImportError:  # an untested version of Triton, see gluon_compat.py
    decode_gemm_sm90 = prefill_gemm_sm90 = None  # type: ignore[assignment]

MAX_TOKENS_DECODE = 256
# Precision -> epilogue of the prefill GEMM -> the fewest tokens with which it beats the library's product and a
# separate kernel (H200, docs/experiments.md).
MIN_TOKENS_PREFILL = {
    "16 bits": {"act_mul": 1024, "qkv": 2048},
    "e4m3": {"act_mul": 65, "qkv": 65, "plain": 65},
}
# In 16 bits the QKV epilogue saves a pass over T x N, and SMs without a tile in the last wave lose more than that.
MAX_IDLE_CHANNELS_QKV = 400


def fused_linear(
    x, weight, bias=None, norm_weight=None, eps=0.0, residual=None, act_mul=None, allow_split_k=False, reader=None
):  # fmt: skip
    """See reference.fused_linear. May overwrite `residual`, or return SplitKPartials of it with `allow_split_k`, or
    Tokens in e4m3 for a `reader`."""
    if weight.is_int4:
        if int4.multiplies(len(x), weight):
            return int4.fused_linear(x, weight, bias, norm_weight, eps, residual, act_mul, allow_split_k)
        x, weight, norm_weight = in_16_bits(x, weight, norm_weight, eps)
    if isinstance(residual, SplitKPartials):
        residual = residual.residual
    if isinstance(x, Tokens):
        return multiply(x, weight, bias, residual, act_mul, allow_split_k, reader)
    if len(x) == 1:
        return multiply_token(x, weight, bias, norm_weight, eps, residual, act_mul)
    x, weight = prepare(x, weight, norm_weight, eps)
    return multiply(x, weight, bias, residual, act_mul, allow_split_k, reader)


def qkv_linear(x, weight, bias, norm_weight, eps, epilogue):
    """See reference.qkv_linear."""
    if weight.is_int4:
        if int4.multiplies(len(x), weight):
            return norm_rope_store(int4.fused_linear(x, weight, bias, norm_weight, eps), *epilogue)
        x, weight, norm_weight = in_16_bits(x, weight, norm_weight, eps)
    if len(x) == 1:
        y = multiply_token(x, weight, bias, norm_weight, eps)
    else:
        x, weight = prepare(x, weight, norm_weight, eps, epilogue)
        is_fused = takes_prefill_gemm(x, weight, "qkv") and prefill_gemm_sm90.supports_qkv(x, weight, epilogue)
        if is_fused and decode_config(x, weight) is None:
            return prefill_gemm_sm90.prefill_gemm(x, weight, bias=bias, epilogue=epilogue)
        y = multiply(x, weight, bias)
    return norm_rope_store(y, *epilogue)


def gelu_linear(x, weight, bias):
    """See reference.gelu_linear. The activation is an epilogue of cuBLASLt."""
    return torch.ops.aten._addmm_activation(bias, x, weight.t(), use_gelu=True)


def in_16_bits(x, weight, norm_weight, eps):
    """The input, the 4-bit weight dequantized to 16 bits, and the norm's weight if the norm is not computed yet."""
    if weight.order is not None:
        x = x if norm_weight is None else rms_norm(x, norm_weight, eps)
        x, norm_weight = x.index_select(1, weight.order), None
    return x, dequantized(weight, x.dtype), norm_weight


def multiply_token(x, weight, bias, norm_weight, eps, residual=None, act_mul=None):
    """fused_linear of one token."""
    if weight.scale is not None:
        num_channels, num_groups = weight.data.shape[1], weight.scale.shape[1]
        is_whole_groups = num_groups == 1 or num_channels % num_groups == num_channels // num_groups % 16 == 0
        if not (has_e4m3(weight.data.device) and is_whole_groups):
            weight = dequantized(weight, x.dtype)
    if weight.is_temporary:
        return multiply(*prepare(x, weight, norm_weight, eps), bias, residual, act_mul)
    return gemv(x, weight, bias, norm_weight, eps, residual, act_mul)


def prepare(x, weight, norm_weight, eps, epilogue=None):
    """Tokens of x after its norm, if it has one, and the weight: both in e4m3, or both in x's dtype."""
    if weight.scale is not None and supports_w8a8(x, weight, epilogue):
        return rms_norm(x, norm_weight, eps, quantized=True), weight
    weight = dequantized(weight, x.dtype)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    return Tokens(x, x.dtype), weight


def multiply(x, weight, bias, residual=None, act_mul=None, allow_split_k=False, reader=None):
    """fused_linear for zero, or two or more Tokens."""
    adds_residual_only = residual is not None and bias is None and act_mul is None
    config = decode_config(x, weight, allow_split_k and adds_residual_only)
    if config is not None:
        return decode_gemm_sm90.decode_gemm(config, x, weight, bias, residual, act_mul)
    if act_mul is None:
        is_fused = is_tma_aligned(residual) and takes_prefill_gemm(x, weight, "plain")
    else:
        is_fused = residual is None and (bias is None or x.scale is None) and takes_prefill_gemm(x, weight, "act_mul")
    if is_fused:
        quantized = act_mul is not None and x.scale is not None and takes_groups(x, reader)
        return prefill_gemm_sm90.prefill_gemm(x, weight, act_mul, bias, residual=residual, quantized=quantized)
    if adds_residual_only and weight.scale is None:
        return torch.addmm(residual, x.data, weight.data.t(), out=residual)  # beta = 1: the addition is free
    y = product(x, weight, bias)
    if adds_residual_only and allow_split_k:
        return SplitKPartials(residual, y[None])
    if act_mul:
        y = act_and_mul(y, act_mul)
    return y if residual is None else residual.add_(y)


def product(x, weight, bias):
    """x W^T + bias [T, N] by a library, or by the prefill GEMM if no library supports the scales."""
    if weight.scale is None:
        return F.linear(x.data, weight.data, bias)
    if weight.scale.shape[1] > 1 or x.scale.dim() > 1:
        return prefill_gemm_sm90.prefill_gemm(x, weight, bias=bias)
    # torch before 2.10 writes nothing but bf16 here
    bias = None if bias is None else bias.to(torch.bfloat16)
    data, scale = x.whole_tiles()  # else cuBLAS chooses tiles that are a third slower
    y = torch._scaled_mm(
        data, weight.data.t(), scale_a=scale[:, None], scale_b=weight.scale.t(), bias=bias, out_dtype=torch.bfloat16
    )
    return y[: len(x.data)].to(x.dtype)


def supports_w8a8(x, weight, epilogue=None):
    """Whether the FP8 tensor cores multiply these: two tokens or more, on Hopper; with an epilogue for `qkv_linear`."""
    (num_features, num_channels), num_groups, device = weight.data.shape, weight.scale.shape[1], weight.data.device
    if not (len(x) > 1 and is_sm90(device) and weight.data.is_contiguous() and weight.scale.is_contiguous()):
        return False
    if x.dtype.itemsize != 2 or num_channels % 128 or num_groups not in (1, num_channels // 128):
        return False
    if decode_gemm_sm90 is not None and len(x) <= MAX_TOKENS_DECODE:
        return True
    if num_groups == 1:
        return num_features % 16 == 0
    if prefill_gemm_sm90 is None:
        return False
    is_qkv = epilogue is not None and prefill_gemm_sm90.supports_qkv(x, weight, epilogue)
    return weight.block_n % 128 == num_features % (128 if is_qkv else 256) == 0


def decode_config(x, weight, allow_split_k=False):
    """The tiling of a decode GEMM; None where the kernel does not run or another one is faster."""
    if decode_gemm_sm90 is None or weight.is_temporary or not 2 <= len(x.data) <= MAX_TOKENS_DECODE:
        return None
    return decode_gemm_sm90.decode_gemm_config(x, weight, allow_split_k)


def takes_prefill_gemm(x, weight, epilogue):
    """Whether the prefill GEMM runs with an epilogue ("plain", "act_mul" or "qkv") and is faster than without."""
    min_tokens = MIN_TOKENS_PREFILL["16 bits" if weight.scale is None else "e4m3"]
    if epilogue not in min_tokens or prefill_gemm_sm90 is None:
        return False
    if not prefill_gemm_sm90.supports(x, weight, epilogue == "qkv"):
        return False
    is_enough = len(x.data) >= min_tokens[epilogue]
    if weight.scale is not None:
        return is_enough and not (epilogue == "plain" and suits_library(x, weight))
    if epilogue == "act_mul":
        return is_enough or prefill_gemm_sm90.fills_one_wave(x, weight)
    # Start-up compiles the kernel at one size, which need not be one that fills the SMs.
    return is_enough and (compile_only.get() or prefill_gemm_sm90.idle_channels(x, weight) <= MAX_IDLE_CHANNELS_QKV)


def suits_library(x, weight):
    """Whether torch._scaled_mm is faster than the prefill GEMM for these Tokens; it writes bf16."""
    is_plain = weight.scale.shape[1] == 1 and x.dtype == torch.bfloat16
    return is_plain and prefill_gemm_sm90.fills_at_most_half(len(x.data), weight)


def takes_groups(x, weight):
    """Whether the prefill GEMM multiplies this weight by x; x may then have scales of 128 channels."""
    if weight is None or weight.data.dtype != E4M3 or len(x.data) <= MAX_TOKENS_DECODE:
        return False
    num_features, num_channels = weight.data.shape
    is_whole = num_features % 256 == num_channels % 128 == 0 and weight.has_whole_blocks()
    return is_whole and weight.data.is_contiguous() and not suits_library(x, weight)


def is_tma_aligned(y):
    return y is None or (y.stride(1) == 1 and y.stride(0) * y.element_size() % 16 == y.data_ptr() % 16 == 0)

"""Linear layers with the norm before and the activation, the residual or the rotary embedding after fused in.

Owns `fused_linear` and `qkv_linear`: the choice of kernel by the number of tokens. Knows nothing of layers or shards.
The twins are in reference.py.

    1             gemv.py, the norm fused
    2 to 256      decode_gemm_sm90.py on Hopper, where it beats cuBLAS; split-K where too few programs fill the device
    1,024 and up  prefill_gemm_sm90.py on Hopper, where its epilogue saves a kernel (QKV: 2,048 and up,
                  where few SMs idle during the last tiles; gate and up: 129 to 256 too, where each SM has one tile)
    otherwise     cuBLAS between separate kernels

A weight with scales goes to fp8.py, which multiplies it with a single token, and on Hopper with more in e4m3; otherwise
it is dequantized at each call, which is right, and slow.
"""

import torch
import torch.nn.functional as F

from ..launch import compile_only
from . import fp8
from .gemv import gemv
from .norm import SplitKPartials, rms_norm
from .norm_rope_store import norm_rope_store
from .silu_and_mul import act_and_mul

try:
    from . import decode_gemm_sm90, prefill_gemm_sm90, qkv_epilogue_sm90
except ImportError:  # an untested version of Triton, see gluon_compat.py
    decode_gemm_sm90 = prefill_gemm_sm90 = qkv_epilogue_sm90 = None  # type: ignore[assignment]

# Below, cuBLAS and a separate epilogue are faster (H200, docs/experiments.md).
MIN_TOKENS_PREFILL = 1024
MIN_TOKENS_PREFILL_QKV = 2048
# Likewise above: the QKV epilogue saves a pass over T x N, and SMs without a tile in the last wave lose more than that.
MAX_IDLE_CHANNELS_QKV = 400


def fused_linear(x, weight, bias=None, norm_weight=None, eps=0.0, residual=None, act_mul=None, allow_split_k=False):
    """See reference.fused_linear. May overwrite `residual`, or return SplitKPartials of it with `allow_split_k`."""
    if weight.scale is not None:
        if fp8.supports(x, weight):
            return fp8.fused_linear(x, weight, bias, norm_weight, eps, residual, act_mul, allow_split_k)
        weight = fp8.dequantized(weight, fp8.dtype_of(x))
    weight = weight.data
    if isinstance(residual, SplitKPartials):
        residual = residual.residual
    if len(x) == 1:
        return gemv(x, weight, bias, norm_weight, eps, residual, act_mul)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    adds_residual_only = residual is not None and bias is None and act_mul is None
    config = decode_config(x, weight, allow_split_k and adds_residual_only)
    if config is not None:
        return decode_gemm_sm90.decode_gemm(config, x, weight, bias, residual, act_mul)
    if act_mul and bias is residual is None and supports_prefill_gemm(x, weight):
        return prefill_gemm_sm90.prefill_gemm(x, weight, act_mul)
    if adds_residual_only:
        return torch.addmm(residual, x, weight.t(), out=residual)  # beta = 1: the addition is free
    y = F.linear(x, weight, bias)
    if act_mul:
        y = act_and_mul(y, act_mul)
    return y if residual is None else residual + y


def qkv_linear(x, weight, bias, norm_weight, eps, epilogue):
    """See reference.qkv_linear."""
    if weight.scale is not None:
        if fp8.supports(x, weight, epilogue):
            return fp8.qkv_linear(x, weight, bias, norm_weight, eps, epilogue)
        weight = fp8.dequantized(weight, fp8.dtype_of(x))
    data = weight.data
    if len(x) > 1:
        if norm_weight is not None:
            x, norm_weight = rms_norm(x, norm_weight, eps), None
        if qkv_epilogue_sm90 is not None and qkv_epilogue_sm90.supports(x, data, epilogue):
            config = decode_config(x, data)
            head_size = len(data) // (epilogue.num_heads + 2 * epilogue.num_kv_heads)
            if config is not None and decode_gemm_sm90.supports_qkv(config, head_size):
                return decode_gemm_sm90.decode_gemm(config, x, data, bias, epilogue=epilogue)
            if supports_prefill_qkv(x, data):
                return prefill_gemm_sm90.prefill_gemm(x, data, bias=bias, epilogue=epilogue)
    return norm_rope_store(fused_linear(x, weight, bias, norm_weight, eps), *epilogue)


def decode_config(x, weight, allow_split_k=False):
    """The tiling of a decode GEMM; None where the kernel does not run or is slower than cuBLAS."""
    if decode_gemm_sm90 is None or not 2 <= len(x) <= 256:
        return None
    return decode_gemm_sm90.decode_gemm_config(x, weight, allow_split_k)


def supports_prefill_gemm(x, weight):
    """Of gate and up."""
    if prefill_gemm_sm90 is None or not prefill_gemm_sm90.supports(x, weight):
        return False
    return len(x) >= MIN_TOKENS_PREFILL or prefill_gemm_sm90.fills_one_wave(x, weight)


def supports_prefill_qkv(x, weight):
    if prefill_gemm_sm90 is None or len(x) < MIN_TOKENS_PREFILL_QKV:
        return False
    # Start-up compiles the kernel at one size, which need not be one that fills the SMs.
    is_busy = compile_only.get() or prefill_gemm_sm90.idle_channels(x, weight) <= MAX_IDLE_CHANNELS_QKV
    return is_busy and prefill_gemm_sm90.supports(x, weight, is_qkv=True)

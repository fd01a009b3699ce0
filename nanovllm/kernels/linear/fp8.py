"""Linear layers whose weight is e4m3, with a scale per output feature, or per output feature and 128 channels.

Owns `fused_linear` and `qkv_linear` of such weights: the choice of kernel by the number of tokens, and of the type that
is multiplied: x in its 16 bits (W8A16), or each token quantized to e4m3 (W8A8), which the FP8 tensor cores multiply at
twice the rate. Knows nothing of layers. The twins are in reference.py, and do not quantize x.

    1                          gemv.py, W8A16; from sm_89 on
    2 to MAX_TOKENS_W8A16      decode_gemm_sm90.py, W8A16
    to 256                     decode_gemm_sm90.py, W8A8; from 65 on only in one wave, if there are scales per feature
    otherwise                  with a scale per feature prefill_gemm_sm90.py, W8A8, where it has the epilogue, else
                               torch._scaled_mm between separate kernels
    otherwise                  not here: `dequantized` at each call and multiplied in 16 bits, as without Hopper
"""

import torch
import triton
import triton.language as tl

from ..launch import is_sm90, launch, launch_options, num_sms, pdl_launch_dependents, pdl_wait
from .gemv import gemv
from .norm import SplitKPartials, quantize_tokens, rms_norm
from .norm_rope_store import norm_rope_store
from .reference import Weight
from .silu_and_mul import act_and_mul

try:
    from . import decode_gemm_sm90, prefill_gemm_sm90, qkv_epilogue_sm90
except ImportError:  # an untested version of Triton, see gluon_compat.py
    decode_gemm_sm90 = prefill_gemm_sm90 = qkv_epilogue_sm90 = None  # type: ignore[assignment]

# Above, FP8 tensor cores gain more than the quantization of x costs.
MAX_TOKENS_W8A16 = 16
MAX_TOKENS_DECODE = 256
MAX_DECODE_WAVES = 1  # of more than 64 tokens, where there are alternatives
MIN_TOKENS_PREFILL = 65  # below, torch._scaled_mm and a separate epilogue are faster


def has_e4m3(device):
    """Whether Triton converts e4m3 there: NVIDIA from sm_89 on, and the interpreter."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def supports(x, weight):
    """Whether a kernel here multiplies these without dequantizing the weight first."""
    (num_features, num_channels), num_groups, device = weight.data.shape, weight.scale.shape[1], weight.data.device
    if len(x) == 1:
        is_whole_groups = num_groups == 1 or num_channels % num_groups == num_channels // num_groups % 16 == 0
        return has_e4m3(device) and is_whole_groups
    if not (is_sm90(device) and weight.data.is_contiguous() and weight.scale.is_contiguous()):
        return False
    if dtype_of(x).itemsize != 2 or num_channels % 128 or num_groups not in (1, num_channels // 128):
        return False
    if decode_gemm_sm90 is not None and len(x) <= MAX_TOKENS_DECODE:
        return True
    return num_groups == 1 and num_features % 16 == 0


def fused_linear(x, weight, bias, norm_weight, eps, residual, act_mul, allow_split_k):
    """See reference.fused_linear, where `supports`; as dispatch.fused_linear."""
    if isinstance(residual, SplitKPartials):
        residual = residual.residual
    if len(x) == 1:
        return gemv(x, weight.data, bias, norm_weight, eps, residual, act_mul, weight.scale)
    adds_residual_only = residual is not None and bias is None and act_mul is None
    is_w8a8, config = choose(x, weight, allow_split_k and adds_residual_only)
    x, x_scale, dtype = prepare(x, norm_weight, eps, is_w8a8)
    if config is not None:
        return decode_gemm_sm90.decode_gemm(
            config, x, weight.data, bias, residual, act_mul,
            weight_scale=weight.scale, x_scale=x_scale, dtype=dtype,
        )  # fmt: skip
    if act_mul and bias is residual is None and supports_prefill_gemm(x, weight):
        return prefill_gemm_sm90.prefill_gemm(
            x, weight.data, act_mul, weight_scale=weight.scale, x_scale=x_scale, dtype=dtype
        )
    y = scaled_mm(x, x_scale, weight, bias, dtype)
    if act_mul:
        y = act_and_mul(y, act_mul)
    return y if residual is None else residual.add_(y)


def qkv_linear(x, weight, bias, norm_weight, eps, epilogue):
    """See reference.qkv_linear, where `supports`."""
    if len(x) == 1 or not supports_qkv_epilogue(dtype_of(x), weight.data, epilogue):
        return norm_rope_store(fused_linear(x, weight, bias, norm_weight, eps, None, None, False), *epilogue)
    is_w8a8, config = choose(x, weight)
    x, x_scale, dtype = prepare(x, norm_weight, eps, is_w8a8)
    scales = dict(weight_scale=weight.scale, x_scale=x_scale, dtype=dtype)
    if config is not None:
        head_size = len(weight.data) // (epilogue.num_heads + 2 * epilogue.num_kv_heads)
        if decode_gemm_sm90.supports_qkv(config, head_size):
            return decode_gemm_sm90.decode_gemm(config, x, weight.data, bias, epilogue=epilogue, **scales)
        y = decode_gemm_sm90.decode_gemm(config, x, weight.data, bias, **scales)
    elif supports_prefill_gemm(x, weight, is_qkv=True):
        return prefill_gemm_sm90.prefill_gemm(x, weight.data, bias=bias, epilogue=epilogue, **scales)
    else:
        y = scaled_mm(x, x_scale, weight, bias, dtype)
    return norm_rope_store(y, *epilogue)


def supports_qkv_epilogue(dtype, data, epilogue):
    return qkv_epilogue_sm90 is not None and qkv_epilogue_sm90.supports(data.new_empty(0, dtype=dtype), data, epilogue)


def supports_prefill_gemm(x, weight, is_qkv=False):
    """x after `prepare`, where `choose` finds no tiles of a decode GEMM."""
    is_enough = prefill_gemm_sm90 is not None and len(x) >= MIN_TOKENS_PREFILL
    return is_enough and prefill_gemm_sm90.supports(x, weight.data, is_qkv)


def dtype_of(x):
    return (x.residual if isinstance(x, SplitKPartials) else x).dtype


def choose(x, weight, allow_split_k=False):
    """Whether x is quantized, and the tiling of a decode GEMM; None: torch._scaled_mm."""
    if decode_gemm_sm90 is None or len(x) > MAX_TOKENS_DECODE:
        return True, None
    x = x.residual if isinstance(x, SplitKPartials) else x
    if len(x) <= MAX_TOKENS_W8A16:
        config = decode_gemm_sm90.decode_gemm_fp8_config(x, weight, False, allow_split_k)
        if config is not None:
            return False, config
    config = decode_gemm_sm90.decode_gemm_fp8_config(x, weight, True, allow_split_k)
    if len(x) > 64 and weight.scale.shape[1] == 1:
        num_tiles = triton.cdiv(len(x), config.block_m) * triton.cdiv(len(weight.data), config.block_n)
        if num_tiles > MAX_DECODE_WAVES * num_sms(x.device):
            return True, None
    return True, config


def prepare(x, norm_weight, eps, is_w8a8):
    """x after its norm, if it has one, and with is_w8a8 its scales; and the dtype of results."""
    dtype = dtype_of(x)
    if not is_w8a8:
        return x if norm_weight is None else rms_norm(x, norm_weight, eps), None, dtype
    return *(quantize_tokens(x) if norm_weight is None else rms_norm(x, norm_weight, eps, quantized=True)), dtype


def scaled_mm(x, x_scale, weight, bias, dtype):
    """x W^T + bias [T, N] of quantized x and a weight with one scale per output feature."""
    return torch._scaled_mm(
        x, weight.data.t(), scale_a=x_scale[:, None], scale_b=weight.scale.t(), bias=bias, out_dtype=dtype
    )


@triton.jit
def dequantize_kernel(
    data_ptr,  # e4m3 [N, C] contiguous
    scale_ptr,  # fp32 [N, G] contiguous
    y_ptr,  # [N, C] contiguous, written here
    num_channels,
    num_groups,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_C channels of an output feature."""
    pdl_launch_dependents(USE_PDL)
    feature = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = c < num_channels
    data = tl.load(data_ptr + feature * num_channels + c, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + feature * num_groups + c // (num_channels // num_groups), mask=mask, other=0.0)
    pdl_wait(USE_PDL)  # the output may reuse memory that the kernel before reads
    tl.store(y_ptr + feature * num_channels + c, (data * scale).to(y_ptr.dtype.element_ty), mask=mask)


def dequantized(weight, dtype):
    """The Weight in `dtype`, without scales."""
    if not has_e4m3(weight.data.device):
        return Weight(weight.dequantize(dtype))
    num_features, num_channels = weight.data.shape
    assert weight.data.is_contiguous() and weight.scale.is_contiguous()
    y = torch.empty((num_features, num_channels), dtype=dtype, device=weight.data.device)
    block_c = min(4096, triton.next_power_of_2(num_channels))
    launch(
        dequantize_kernel, (num_features, triton.cdiv(num_channels, block_c)), weight.data, weight.scale, y,
        num_channels, weight.scale.shape[1], BLOCK_C=block_c, num_warps=max(1, min(8, block_c // 512)),
        **launch_options(weight.data.device),
    )  # fmt: skip
    return Weight(y)

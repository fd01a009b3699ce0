"""Linear layers whose weight is e4m3, with a scale per output feature, or per output feature and 128 channels.

Owns `fused_linear` and `qkv_linear` of such weights: the choice of kernel by the number of tokens. A single token is
multiplied in its own 16 bits (W8A16). From two on, on Hopper, each token is quantized to e4m3 as well (W8A8), which the
FP8 tensor cores multiply at twice the rate of 16 bits: the fastest there (docs/experiments.md). (Scales of 128 channels
that are not those of whole blocks of 128 x 128, as when a rank's shard cuts blocks: for more than 256 tokens such a
weight is dequantized.) Knows nothing of layers. The twins are in reference.py, and do not quantize x.

    1           gemv_fp8.py, from sm_89 on, or gemv.py; the norm fused
    2 to 256    decode_gemm_sm90.py; from 65 on only where it needs one wave or nothing else runs
    otherwise   prefill_gemm_sm90.py, where it has the epilogue; with scales of 128 channels only those of 128 x 128
    otherwise   torch._scaled_mm between separate kernels, with a scale per feature
    otherwise   not here: `dequantized` at each call and multiplied in 16 bits
"""

import itertools

import torch
import triton
import triton.language as tl

from ..launch import is_sm90, launch, launch_options, num_sms, pdl_launch_dependents, pdl_wait
from .gemv import gemv
from .gemv_fp8 import gemv_fp8
from .gemv_fp8 import supports as supports_gemv_fp8
from .norm import SplitKPartials, quantize_tokens, rms_norm
from .norm_rope_store import norm_rope_store
from .reference import Weight
from .silu_and_mul import act_and_mul

try:
    from . import decode_gemm_sm90, prefill_gemm_sm90, qkv_epilogue_sm90
except ImportError:  # an untested version of Triton, see gluon_compat.py
    decode_gemm_sm90 = prefill_gemm_sm90 = qkv_epilogue_sm90 = None  # type: ignore[assignment]

MAX_TOKENS_DECODE = 256
MAX_DECODE_WAVES = 1  # of more than 64 tokens, where there are alternatives
MAX_PROGRAMS_PER_SM = 3  # that share an SM, with weights of many output features
MIN_STAGES = 4  # of each of them
MIN_TOKENS_PREFILL = 65  # below, torch._scaled_mm and a separate epilogue are faster


def has_e4m3(device):
    """Whether Triton converts e4m3 there: NVIDIA from sm_89 on, and the interpreter."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def supports(x, weight, epilogue=None):
    """Whether a kernel here multiplies these without dequantizing the weight first; with an epilogue `qkv_linear`."""
    if supports_w8a8(x, weight, epilogue):
        return True
    num_channels, num_groups = weight.data.shape[1], weight.scale.shape[1]
    is_whole_groups = num_groups == 1 or num_channels % num_groups == num_channels // num_groups % 16 == 0
    return len(x) == 1 and has_e4m3(weight.data.device) and is_whole_groups


def supports_w8a8(x, weight, epilogue=None):
    """Whether the FP8 tensor cores multiply these: two tokens or more, on Hopper."""
    (num_features, num_channels), num_groups, device = weight.data.shape, weight.scale.shape[1], weight.data.device
    if not (len(x) > 1 and is_sm90(device) and weight.data.is_contiguous() and weight.scale.is_contiguous()):
        return False
    if dtype_of(x).itemsize != 2 or num_channels % 128 or num_groups not in (1, num_channels // 128):
        return False
    if decode_gemm_sm90 is not None and len(x) <= MAX_TOKENS_DECODE:
        return True
    if num_groups == 1:
        return num_features % 16 == 0
    is_qkv = epilogue is not None and supports_qkv_epilogue(dtype_of(x), weight.data, epilogue)
    return prefill_gemm_sm90 is not None and weight.block_n % 128 == num_features % (128 if is_qkv else 256) == 0


def fused_linear(x, weight, bias, norm_weight, eps, residual, act_mul, allow_split_k):
    """See reference.fused_linear, where `supports`; as dispatch.fused_linear."""
    if isinstance(residual, SplitKPartials):
        residual = residual.residual
    if not supports_w8a8(x, weight):
        if supports_gemv_fp8(x, weight):
            return gemv_fp8(x, weight, bias, norm_weight, eps, residual, act_mul)
        return gemv(x, weight.data, bias, norm_weight, eps, residual, act_mul, weight.scale)
    adds_residual_only = residual is not None and bias is None and act_mul is None
    config = decode_config(x, weight, allow_split_k and adds_residual_only)
    x, x_scale, dtype = prepare(x, norm_weight, eps)
    if config is not None:
        return decode_gemm_sm90.decode_gemm(
            config, x, weight.data, bias, residual, act_mul,
            weight_scale=weight.scale, x_scale=x_scale, dtype=dtype,
        )  # fmt: skip
    fuses_act = act_mul is not None and bias is residual is None
    if supports_prefill_gemm(x, weight) and (fuses_act or act_mul is None) and is_tma_aligned(residual):
        return prefill_gemm_sm90.prefill_gemm(
            x, weight.data, act_mul, bias, residual=residual, weight_scale=weight.scale, x_scale=x_scale, dtype=dtype
        )
    y = product(x, x_scale, weight, bias, dtype)
    if act_mul:
        y = act_and_mul(y, act_mul)
    return y if residual is None else residual.add_(y)


def qkv_linear(x, weight, bias, norm_weight, eps, epilogue):
    """See reference.qkv_linear, where `supports`."""
    if not supports_qkv_epilogue(dtype_of(x), weight.data, epilogue) or not supports_w8a8(x, weight, epilogue):
        return norm_rope_store(fused_linear(x, weight, bias, norm_weight, eps, None, None, False), *epilogue)
    config = decode_config(x, weight)
    x, x_scale, dtype = prepare(x, norm_weight, eps)
    scales = dict(weight_scale=weight.scale, x_scale=x_scale, dtype=dtype)
    if config is not None:
        head_size = len(weight.data) // (epilogue.num_heads + 2 * epilogue.num_kv_heads)
        if decode_gemm_sm90.supports_qkv(config, head_size):
            return decode_gemm_sm90.decode_gemm(config, x, weight.data, bias, epilogue=epilogue, **scales)
        y = decode_gemm_sm90.decode_gemm(config, x, weight.data, bias, **scales)
    elif supports_prefill_gemm(x, weight, is_qkv=True):
        return prefill_gemm_sm90.prefill_gemm(x, weight.data, bias=bias, epilogue=epilogue, **scales)
    else:
        y = product(x, x_scale, weight, bias, dtype)
    return norm_rope_store(y, *epilogue)


def supports_qkv_epilogue(dtype, data, epilogue):
    return qkv_epilogue_sm90 is not None and qkv_epilogue_sm90.supports(data.new_empty(0, dtype=dtype), data, epilogue)


def supports_prefill_gemm(x, weight, is_qkv=False):
    """x after `prepare`, where `decode_config` has no tiles."""
    is_enough = prefill_gemm_sm90 is not None and len(x) >= MIN_TOKENS_PREFILL
    return is_enough and has_blocks(weight) and prefill_gemm_sm90.supports(x, weight.data, is_qkv)


def has_blocks(weight):
    """Whether a scale is of all channels, or of a block of 128 x 128: what the prefill GEMM supports."""
    return weight.scale.shape[1] == 1 or weight.block_n % 128 == 0


def is_tma_aligned(y):
    return y is None or (y.stride(1) == 1 and y.stride(0) * y.element_size() % 16 == y.data_ptr() % 16 == 0)


def dtype_of(x):
    return (x.residual if isinstance(x, SplitKPartials) else x).dtype


def decode_config(x, weight, allow_split_k=False):
    """The tiling of a decode GEMM, as in decode_gemm_config; None where another kernel is faster, or it does not run.

    Where no tiles fit the device in one wave and x has at most 64 tokens, programs share the SMs.
    """
    if decode_gemm_sm90 is None or len(x) > MAX_TOKENS_DECODE:
        return None
    x = x.residual if isinstance(x, SplitKPartials) else x
    (num_tokens, num_channels), (num_features, num_groups) = x.shape, weight.scale.shape
    max_programs = num_sms(x.device)
    min_block_m = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    for block_m, block_n in ((min_block_m, 64), (min_block_m, 128), (128, 128)):
        num_programs = triton.cdiv(num_tokens, block_m) * triton.cdiv(num_features, block_n)
        per_sm = triton.cdiv(num_programs, max_programs)
        if per_sm == 1 or (num_tokens <= 64 and block_n == 128):
            break
    has_alternatives = num_tokens > 64 and has_blocks(weight) and num_features % 256 == 0
    if has_alternatives and num_programs > MAX_DECODE_WAVES * max_programs:
        return None
    splits = (4, 2, 1) if allow_split_k else (1,)
    split_k = next(n for n in splits if n * num_programs <= max_programs * per_sm and num_channels % (n * 128) == 0)
    if allow_split_k and split_k == 1 and num_tokens > 64 and num_channels >= 2 * num_features:
        # Larger tiles of half the channels read less of x and weight; the next norm reads two partials.
        for large_m in (64, 128):
            num_programs = 2 * triton.cdiv(num_tokens, large_m) * triton.cdiv(num_features, 128)
            if num_programs <= max_programs and num_channels % 256 == 0:
                block_m, block_n, split_k = large_m, 128, 2
                break
    split_c = num_channels // split_k
    # 256 channels: half as many steps; with more tokens registers run out.
    blocks_c = (256, 128) if num_groups == 1 and split_c % 256 == 0 and block_m < 64 else (128,)
    channel_bytes = block_m + block_n + (block_n // 32 if num_groups > 1 else 0)
    for programs, block_c in itertools.product(range(min(per_sm, MAX_PROGRAMS_PER_SM), 0, -1), blocks_c):
        stages = decode_gemm_sm90.PIPELINE_BYTES // programs // (channel_bytes * block_c)
        if stages >= MIN_STAGES:
            break
    stages = min(stages, split_c // block_c)
    num_warps = 4 if block_m * block_n <= 8192 else 8
    return decode_gemm_sm90.DecodeGemmConfig(block_m, block_n, block_c, split_k, stages, num_warps)


def prepare(x, norm_weight, eps):
    """x after its norm, if it has one, quantized; its scales; and the dtype of results."""
    quantized = quantize_tokens(x) if norm_weight is None else rms_norm(x, norm_weight, eps, quantized=True)
    return *quantized, dtype_of(x)


def product(x, x_scale, weight, bias, dtype):
    """x W^T + bias [T, N] of quantized x."""
    if weight.scale.shape[1] > 1:
        return prefill_gemm_sm90.prefill_gemm(
            x, weight.data, bias=bias, weight_scale=weight.scale, x_scale=x_scale, dtype=dtype
        )
    # torch before 2.10 writes nothing but bf16 here
    bias = None if bias is None else bias.to(torch.bfloat16)
    return torch._scaled_mm(
        x, weight.data.t(), scale_a=x_scale[:, None], scale_b=weight.scale.t(), bias=bias, out_dtype=torch.bfloat16
    ).to(dtype)


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

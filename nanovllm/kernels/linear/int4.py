"""Triton: products with weights of 4-bit integers (../int4.py), and such a weight in 16 bits.

Owns `fused_linear` of these: the choice of kernel by the number of tokens, fewer than MIN_TOKENS_DENSE or not.

    1          GEMV over packed words, with norm, bias, activation and residual fused in
    2 to 64    tiles that are unpacked in registers; programs share the channels, and a sum over them follows
    more       dequantized, then as 16 bits

Codes become numbers in registers (unpack_int4.py). Scales multiply sums of a group, in fp32. Weights with groups of
fewer than 32 channels are dequantized.

T tokens, N output features, C input channels, G groups; I outputs: N, or N / 2 with act_mul; V vectors of a step.
"""

import torch
import triton
import triton.language as tl

from ..int4 import CODES
from ..launch import launch, launch_options, num_sms, pdl_launch_dependents, pdl_wait
from ..moe.grouped_gemm import sum_rows
from .gemv import activate, output_features
from .norm import SplitKPartials, rms_norm
from .reference import Weight
from .silu_and_mul import act_and_mul
from .unpack_int4 import VECTOR, dot_int4, group_of, load_zero, unpack_tile, uses_asm

MIN_TOKENS_DENSE = 65


@triton.jit
def int4_gemv_kernel(
    x_ptr,  # [1, C], written by the kernel before
    words_ptr,  # int32 [N, C / 8]
    scale_ptr,  # [N, G]
    zero_ptr,  # int8 [N, G] or None
    bias_ptr,  # [N] or None
    norm_weight_ptr,  # [C] or None
    residual_ptr,  # [1, I] or None
    y_ptr,  # [1, I], written here
    num_outputs,
    eps,
    NUM_CHANNELS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    ACT_MUL: tl.constexpr,  # "silu", "gelu_tanh" or None
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    USE_ASM: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N output features, all channels, BLOCK_V vectors a step."""
    pdl_launch_dependents(USE_PDL)
    tile = tl.program_id(0)
    BLOCK_I: tl.constexpr = BLOCK_N // 2 if ACT_MUL is not None else BLOCK_N
    GROUP: tl.constexpr = NUM_CHANNELS // NUM_GROUPS
    features, exists = output_features(tile, num_outputs, ACT_MUL, BLOCK_N)
    first = tl.arange(0, BLOCK_V)[:, None] * 32
    words_ptrs = words_ptr + features[None, :, None] * (NUM_CHANNELS // 8) + tl.arange(0, 4)[None, None, :]
    offs_i = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    acc = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
    total_squares = tl.zeros((BLOCK_V,), tl.float32)
    for step in tl.static_range(0, NUM_CHANNELS, BLOCK_V * 32):
        channel = step + first
        inside = channel < NUM_CHANNELS
        mask = inside & exists[None, :]
        words = tl.load(words_ptrs + (channel // 8)[:, :, None], mask=mask[:, :, None], other=0)
        group = features[None, :] * NUM_GROUPS + channel // GROUP
        scale = tl.load(scale_ptr + group, mask=mask, other=0.0).to(tl.float32)
        zero = load_zero(zero_ptr, group, mask)
        # Returns at once after the first. ptxas moves no load across it: all of the weight's are in flight before.
        pdl_wait(USE_PDL)
        dot, squares = dot_int4(x_ptr, norm_weight_ptr, channel, inside, words, zero, USE_ASM)
        acc += dot * scale
        total_squares += squares
    y = tl.sum(acc, axis=0)
    if norm_weight_ptr is not None:
        y *= tl.rsqrt(tl.sum(total_squares) / NUM_CHANNELS + eps)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + features, mask=exists, other=0.0).to(tl.float32)
    if ACT_MUL is not None:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, BLOCK_I)), (1, 0)))
        y = activate(gate, ACT_MUL) * up
    if residual_ptr is not None:
        y += tl.load(residual_ptr + offs_i, mask=offs_i < num_outputs, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs_i, y.to(y_ptr.dtype.element_ty), mask=offs_i < num_outputs)


@triton.jit(do_not_specialize=["num_tokens"])
def int4_gemm_kernel(
    x_ptr,  # [T, C] contiguous, written by the kernel before
    words_ptr,  # int32 [N, C / 8]
    scale_ptr,  # [N, G]
    zero_ptr,  # int8 [N, G] or None
    parts_ptr,  # fp32 [SPLIT_K, T, N], written here
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # a multiple of BLOCK_K
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_ASM: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N features of BLOCK_M tokens, every SPLIT_K-th step of channels.

    The weight has the rows of the product: wgmma takes 64, and from registers.
    """
    pdl_launch_dependents(USE_PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k, word = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 8)
    row = n % N  # what is beyond the last feature is computed twice, and not stored
    words_ptrs = words_ptr + row.to(tl.int64)[:, None] * (K // 8) + word[None, :]
    x_ptrs = x_ptr + (m % num_tokens).to(tl.int64)[:, None] * K + k[None, :]
    groups = row * (K // GROUP)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    pdl_wait(USE_PDL)
    for step in range(tl.program_id(1) * BLOCK_K, K, SPLIT_K * BLOCK_K):
        scale = tl.load(scale_ptr + groups + step // GROUP).to(tl.float32)
        zero = load_zero(zero_ptr, groups + step // GROUP, row < N)
        x = tl.load(x_ptrs + step)
        weight = unpack_tile(tl.load(words_ptrs + step // 8), zero, x.dtype, USE_ASM)
        acc += tl.dot(weight, tl.trans(x), input_precision=PRECISION) * scale[:, None]
    parts_ptrs = parts_ptr + (tl.program_id(1).to(tl.int64) * num_tokens + m)[:, None] * N + n[None, :]
    tl.store(parts_ptrs, tl.trans(acc), mask=(m < num_tokens)[:, None] & (n < N)[None, :])


@triton.jit
def int4_dequantize_kernel(
    words_ptr,  # int32 [N, C / 8]
    scale_ptr,  # [N, G]
    zero_ptr,  # int8 [N, G] or None
    y_ptr,  # [N, C], written here
    num_words,
    num_groups,
    BLOCK_W: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_W words of an output feature. A product with the scale is rounded once."""
    pdl_launch_dependents(USE_PDL)
    feature = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = w < num_words
    words = tl.load(words_ptr + feature * num_words + w, mask=mask, other=0)
    group = feature * num_groups + w // (num_words // num_groups)
    scale = tl.load(scale_ptr + group, mask=mask, other=0.0).to(tl.float32)
    zero = load_zero(zero_ptr, group, mask)
    i = tl.arange(0, 8)[None, :]
    numbers = (((words[:, None] >> (i * 4)) & 15) - zero[:, None]).to(tl.float32) * scale[:, None]
    pdl_wait(USE_PDL)  # the output may reuse memory that the kernel before reads
    y_ptrs = y_ptr + (feature * num_words + w)[:, None] * 8 + i
    tl.store(y_ptrs, numbers.to(y_ptr.dtype.element_ty), mask=mask[:, None])


def arguments(weight):
    """Words, scale and zero of a Weight."""
    for tensor in (weight.data, weight.scale, weight.zero):
        assert tensor is None or tensor.is_contiguous()
    return weight.data, weight.scale, weight.zero


def dequantized(weight, dtype):
    """The Weight in 16 bits, of experts, too."""
    num_words, num_groups = weight.data.shape[-1], weight.scale.shape[-1]
    shape = (*weight.data.shape[:-1], num_words * CODES)
    y = torch.empty(shape, dtype=dtype, device=weight.data.device)
    block_w = min(512, triton.next_power_of_2(num_words))
    launch(
        int4_dequantize_kernel, (weight.data.numel() // num_words, triton.cdiv(num_words, block_w)),
        *arguments(weight), y, num_words, num_groups, BLOCK_W=block_w, num_warps=max(1, block_w // 128),
        **launch_options(y.device),
    )  # fmt: skip
    return Weight(y)


def int4_gemv(x, weight, bias, norm_weight, eps, residual, act_mul):
    """reference.fused_linear of one token, x [1, C]."""
    num_features, num_channels = len(weight.data), weight.num_channels
    assert x.shape == (1, num_channels) and x.stride(1) == 1
    num_outputs = num_features // 2 if act_mul else num_features
    y = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    block_n, block_v = 8, min(64, triton.next_power_of_2(num_channels // VECTOR))
    launch(
        int4_gemv_kernel, (triton.cdiv(num_features, block_n),),
        x, *arguments(weight), bias, norm_weight, residual, y, num_outputs, eps,
        NUM_CHANNELS=num_channels, NUM_GROUPS=weight.scale.shape[1], ACT_MUL=act_mul, BLOCK_N=block_n, BLOCK_V=block_v,
        USE_ASM=uses_asm(x), num_warps=max(1, block_v // 32), **launch_options(x.device),
    )  # fmt: skip
    return y


def int4_gemm(x, weight):
    """fp32 partial sums [S, T, N] of x W^T, x [T, C] of 1 to 64 tokens."""
    (num_tokens, num_channels), num_features, group = x.shape, len(weight.data), group_of(weight)
    x = x.contiguous()
    block_m = min(64, max(16, triton.next_power_of_2(num_tokens)))
    block_n, block_k = 64, min(128, group & -group)
    num_tiles, num_steps = triton.cdiv(num_features, block_n), num_channels // block_k
    # as many programs as two waves of SMs hold, of four steps at least
    split_k = max(1, min(2 * num_sms(x.device) // num_tiles, num_steps // 4))
    parts = torch.empty((split_k, num_tokens, num_features), dtype=torch.float32, device=x.device)
    launch(
        int4_gemm_kernel, (num_tiles, split_k, triton.cdiv(num_tokens, block_m)), x, *arguments(weight), parts,
        num_tokens, N=num_features, K=num_channels, GROUP=group, SPLIT_K=split_k, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", USE_ASM=uses_asm(x),
        num_warps=4, num_stages=4 if x.element_size() == 2 else 2, **launch_options(x.device),
    )  # fmt: skip
    return parts


def multiplies(num_tokens, weight):
    """Whether a kernel multiplies the words by as many tokens, so that the weight need not be dequantized."""
    return 1 <= num_tokens < MIN_TOKENS_DENSE and group_of(weight) % VECTOR == 0


def fused_linear(x, weight, bias=None, norm_weight=None, eps=0.0, residual=None, act_mul=None, allow_split_k=False):
    """See reference.fused_linear, of tokens that `multiplies` takes."""
    if isinstance(residual, SplitKPartials):
        residual = residual.residual
    if isinstance(x, SplitKPartials) or (norm_weight is not None and (len(x) > 1 or weight.order is not None)):
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if len(x) == 1:
        return int4_gemv(x, weight, bias, norm_weight, eps, residual, act_mul)
    parts = int4_gemm(x, weight)
    if act_mul is None and bias is None:
        is_partial = residual is not None and allow_split_k
        return SplitKPartials(residual, parts) if is_partial else sum_rows(parts, residual, x.dtype)
    y = sum_rows(parts, None, x.dtype)
    y = y if bias is None else y.add_(bias)
    y = y if act_mul is None else act_and_mul(y, act_mul)
    return y if residual is None else residual.add_(y)

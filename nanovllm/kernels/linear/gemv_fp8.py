"""Triton: GEMV with an e4m3 weight and a token in 16 bits, on NVIDIA GPUs from sm_89 on.

Owns `gemv_fp8`; gemv.py says how a GEMV is cut into programs, and multiplies elsewhere. The twin is
reference.fused_linear.

In e4m3 a byte of weight costs twice the arithmetic, and widened to fp32 that takes as long as reading it. So products
are in fp16, two at a time: sums of four, and of those in fp32. Each vector of 16 channels of the token has a power of
two of its own, which brings its largest number to 8 to 16: no sum exceeds fp16, whatever the token's size.

Four e4m3, or two numbers of 16 bits, are loaded as an int32. Legend: gemv.py; V vectors of a step.
"""

import torch
import triton
import triton.language as tl

from ..launch import has_inline_asm, launch, launch_options, pdl_launch_dependents, pdl_wait
from .gemv import GemvConfig, load_group_scale, output_features, store_outputs

VECTOR = tl.constexpr(16)


def dot_asm():
    """$0 = the dot product of 16 e4m3, 4 in each of $1 to $4, with 16 fp16, 2 in each of $5 to $12."""
    lines = [".reg .b16 l, h;", ".reg .b32 p, q, s, t;", ".reg .f32 f, g;"]
    for i in range(4):
        lines += [f"mov.b32 {{l, h}}, ${i + 1};", "cvt.rn.f16x2.e4m3x2 p, l;", "cvt.rn.f16x2.e4m3x2 q, h;"]
        x, y = 2 * i + 5, 2 * i + 6
        if i == 0:
            lines += [f"mul.rn.f16x2 s, p, ${x};", f"mul.rn.f16x2 t, q, ${y};"]
        else:
            lines += [f"fma.rn.f16x2 s, p, ${x}, s;", f"fma.rn.f16x2 t, q, ${y}, t;"]
    lines += ["mov.b32 {l, h}, s;", "cvt.f32.f16 f, l;", "cvt.f32.f16 g, h;", "add.f32 f, f, g;"]
    lines += ["mov.b32 {l, h}, t;", "cvt.f32.f16 g, l;", "add.f32 f, f, g;", "cvt.f32.f16 g, h;", "add.f32 $0, f, g;"]
    return "{" + "\n".join(lines) + "}"


DOT_ASM = tl.constexpr(dot_asm())
PACK_ASM = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


def gemv_config(num_features, num_channels):
    """Tuned inside an engine of Qwen3-8B, H200 (docs/experiments.md, "FP8 weights")."""
    if num_channels % 2048 or num_features >= 12288:
        return GemvConfig(8, min(1024, max(VECTOR.value, triton.next_power_of_2(num_channels))), 2)
    return GemvConfig(8, 2048, 4)


@triton.jit
def split_four(x):
    """The elements of the last of three dimensions, of 4."""
    x_02, x_13 = tl.split(x.reshape(x.shape[0], x.shape[1], 2, 2))
    x_0, x_2 = tl.split(x_02)
    x_1, x_3 = tl.split(x_13)
    return x_0, x_1, x_2, x_3


@triton.jit
def load_pairs(ptr, offs, mask):
    """int32 [V, 4] twice: the pairs of a vector's first 8 channels, and of the others."""
    return tl.load(ptr + offs, mask=mask, other=0), tl.load(ptr + offs + 4, mask=mask, other=0)


@triton.jit
def unpack(pairs, IS_BF16: tl.constexpr):
    """The lower and the upper number of pairs, in fp32."""
    if IS_BF16:
        return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
        return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pack(low, high):
    """fp32 numbers as pairs of fp16."""
    return tl.inline_asm_elementwise(PACK_ASM, "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def gemv_fp8_kernel(
    x_ptr,  # [1, C / 2] of pairs, written by the kernel before
    weight_ptr,  # [N, C / 4] of fours, contiguous
    bias_ptr,  # [N], only with HAS_BIAS
    weight_scale_ptr,  # fp32 [N, NUM_GROUPS]
    norm_weight_ptr,  # [C / 2] of pairs, only with HAS_NORM
    residual_ptr,  # [1, I], only with HAS_RESIDUAL
    y_ptr,  # [1, I], written here
    num_outputs,
    eps,
    NUM_CHANNELS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # of channels with a scale
    IS_BF16: tl.constexpr,  # x and norm_weight; else fp16
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACT_MUL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N output features, all channels."""
    pdl_launch_dependents(USE_PDL)
    tile = tl.program_id(0)
    BLOCK_I: tl.constexpr = BLOCK_N // 2 if ACT_MUL is not None else BLOCK_N
    V: tl.constexpr = BLOCK_C // VECTOR
    STEPS: tl.constexpr = (NUM_CHANNELS + BLOCK_C - 1) // BLOCK_C
    features, exists = output_features(tile, num_outputs, ACT_MUL, BLOCK_N)
    vector, four = tl.arange(0, V)[:, None], tl.arange(0, 4)[None, :]
    inside = vector * VECTOR < NUM_CHANNELS  # [V, 1]
    x_offs = vector * 8 + four
    weight_ptrs = weight_ptr + (vector * 4 + four)[:, None, :] + features[None, :, None] * (NUM_CHANNELS // 4)
    weight = tl.load(weight_ptrs, mask=inside[:, None, :] & exists[None, :, None], other=0)  # [V, BLOCK_N, 4]
    scale = load_group_scale(weight_scale_ptr, features, exists, 0, NUM_CHANNELS, NUM_GROUPS, BLOCK_C, VECTOR)
    if HAS_NORM:
        norm_1, norm_2 = load_pairs(norm_weight_ptr, x_offs, inside)
    offs_i = tile * BLOCK_I + tl.arange(0, BLOCK_I)

    pdl_wait(USE_PDL)
    residual = tl.zeros((BLOCK_I,), tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offs_i, mask=offs_i < num_outputs, other=0.0).to(tl.float32)
    acc = tl.zeros((V, BLOCK_N), tl.float32)
    squares = tl.zeros((V,), tl.float32)
    for step in tl.static_range(STEPS):
        pairs_1, pairs_2 = load_pairs(x_ptr, x_offs, inside)
        x_0, x_1 = unpack(pairs_1, IS_BF16)
        x_2, x_3 = unpack(pairs_2, IS_BF16)
        if HAS_NORM:
            squares += tl.sum(x_0 * x_0 + x_1 * x_1 + x_2 * x_2 + x_3 * x_3, axis=1)
            norm_x_0, norm_x_1 = unpack(norm_1, IS_BF16)
            norm_x_2, norm_x_3 = unpack(norm_2, IS_BF16)
            x_0, x_1, x_2, x_3 = x_0 * norm_x_0, x_1 * norm_x_1, x_2 * norm_x_2, x_3 * norm_x_3
        step_weight, step_scale = weight, scale
        x_offs += BLOCK_C // 2
        inside = (step + 1) * BLOCK_C + vector * VECTOR < NUM_CHANNELS
        if step + 1 < STEPS:
            weight_ptrs += BLOCK_C // 4
            weight = tl.load(weight_ptrs, mask=inside[:, None, :] & exists[None, :, None], other=0)
            if NUM_GROUPS > 1:
                scale = load_group_scale(
                    weight_scale_ptr, features, exists, (step + 1) * BLOCK_C, NUM_CHANNELS, NUM_GROUPS, BLOCK_C, VECTOR
                )
            if HAS_NORM:
                norm_1, norm_2 = load_pairs(norm_weight_ptr, x_offs, inside)

        largest = tl.maximum(tl.maximum(tl.abs(x_0), tl.abs(x_1)), tl.maximum(tl.abs(x_2), tl.abs(x_3)))
        # The power of two at or below the largest, as the bits of an fp32, and its inverse times 8; at least 2^-123, so
        # that the inverse of 0 is finite.
        exponent = tl.maximum(tl.max(largest, axis=1).to(tl.int32, bitcast=True) & 0x7F800000, 4 << 23)  # [V]
        shrink = ((254 << 23) - exponent).to(tl.float32, bitcast=True)[:, None] * 8.0
        a_0, a_1, a_2, a_3 = split_four(pack(x_0 * shrink, x_1 * shrink)[:, None, :])
        b_0, b_1, b_2, b_3 = split_four(pack(x_2 * shrink, x_3 * shrink)[:, None, :])
        w_0, w_1, w_2, w_3 = split_four(step_weight)
        dot = tl.inline_asm_elementwise(
            DOT_ASM, "=f" + ",r" * 12, [w_0, w_1, w_2, w_3, a_0, a_1, a_2, a_3, b_0, b_1, b_2, b_3],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        grow = exponent.to(tl.float32, bitcast=True)[:, None] / 8.0
        if NUM_GROUPS > 1:
            grow = grow * step_scale
        acc += dot * grow
    store_outputs(
        acc, squares, scale, residual, bias_ptr, y_ptr, features, exists, offs_i, num_outputs, eps,
        NUM_CHANNELS, NUM_GROUPS, HAS_BIAS, HAS_NORM, ACT_MUL,
    )  # fmt: skip


def supports(x, weight):
    """Of an x [1, C] and a weight that gemv.py supports."""
    is_aligned = x.data_ptr() % 16 == weight.data.data_ptr() % 16 == weight.data.shape[1] % VECTOR.value == 0
    return x.element_size() == 2 and has_inline_asm(x.device) and is_aligned


def gemv_fp8(x, weight, bias, norm_weight, eps, residual, act_mul):
    """reference.fused_linear of one token, x [1, C]; Weight with scales, where `supports`."""
    (num_features, num_channels), num_groups = weight.data.shape, weight.scale.shape[1]
    assert x.shape == (1, num_channels) and weight.data.is_contiguous() and weight.scale.is_contiguous()
    assert weight.scale.dtype == torch.float32 and (norm_weight is None or norm_weight.dtype == x.dtype)
    config = gemv_config(num_features, num_channels)
    num_outputs = num_features // 2 if act_mul else num_features
    y = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    launch(
        gemv_fp8_kernel, (triton.cdiv(num_features, config.block_n),),
        x.view(torch.int32), weight.data.view(torch.int32), bias, weight.scale,
        None if norm_weight is None else norm_weight.view(torch.int32), residual, y, num_outputs, eps,
        NUM_CHANNELS=num_channels, NUM_GROUPS=num_groups, IS_BF16=x.dtype == torch.bfloat16, HAS_BIAS=bias is not None,
        HAS_NORM=norm_weight is not None, HAS_RESIDUAL=residual is not None, ACT_MUL=act_mul,
        BLOCK_N=config.block_n, BLOCK_C=config.block_c, num_warps=config.num_warps, **launch_options(x.device),
    )  # fmt: skip
    return y

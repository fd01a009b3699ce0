"""Triton: GEMV, the linear layer of a single token, fused with the norm before and the activation or residual after.

Owns `gemv` and its tile sizes; computes reference.fused_linear.

Bound by reading the weight. A program loads its first BLOCK_C channels before griddepcontrol.wait (launch.py on PDL),
so only x from L2, the arithmetic and the store lie between the end of one kernel and the end of the next. The fewer
registers a thread needs, the more programs of the next kernel are resident early, with their loads in flight.
Neighbouring threads load neighbouring vectors. Triton 3.7 and later would give them neighbouring features, and convert
layouts at each step; it chooses by contiguity, so pointers to vectors are declared contiguous, two at a time. The
width of a load depends on the last dimension only.

Scales of an e4m3 weight, per feature or per group of channels, multiply the sums. An e4m3 weight needs twice the
arithmetic per byte; widened to fp32, that takes as long as reading it. So on NVIDIA GPUs from sm_89 on, with a token
in 16 bits, products are in fp16, two at a time (IN_FP16): four are summed in fp16, those sums in fp32. Each vector of
16 channels of the token is scaled by its own power of two, so that its largest number is 8 to 16: no sum exceeds fp16,
however large the token. Four e4m3, or two numbers of 16 bits, are loaded as an int32.

N output features of the weight, C input channels; I outputs: N, or N / 2 with act_mul; V vectors of a step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import has_inline_asm, launch, launch_options, pdl_launch_dependents, pdl_wait

FP8_VECTOR = 16  # channels of an e4m3 weight that a thread loads at once


class GemvConfig(NamedTuple):
    """How a GEMV is cut into programs; changes only the order of summation."""

    block_n: int  # output features of a program
    block_c: int  # channels of a loop step
    num_warps: int


def gemv_config(num_features, num_channels, itemsize, in_fp16):
    """Tuned on an H200 over chains of layers of 0.6B to 8B, `in_fp16` in an engine of 8B (docs/experiments.md)."""
    is_whole_blocks = num_channels % 2048 == 0
    if in_fp16:
        if is_whole_blocks and num_features < 12288:
            return GemvConfig(8, 2048, 4)
        return GemvConfig(8, min(1024, max(FP8_VECTOR, triton.next_power_of_2(num_channels))), 2)
    if itemsize == 1:
        return GemvConfig(4, min(1024, max(16, triton.next_power_of_2(num_channels))), 2)
    if num_channels <= 1024:
        is_gate_up = 4096 < num_features < 12 * num_channels
        block_c = min(1024 if is_gate_up else 512, max(8, triton.next_power_of_2(num_channels)))
        return GemvConfig(2 if is_gate_up else 4, block_c, 1)
    if num_channels <= 2048:
        if num_features <= 256:  # a router
            return GemvConfig(2, 2048, 4)
        return GemvConfig(2 if num_features < 4096 else 4, 1024, 4 if num_features <= 6144 else 1)
    if not is_whole_blocks:
        return GemvConfig(4, 1024, 1) if num_features > num_channels else GemvConfig(2, 4096, 4)
    if num_channels >= 8192:
        return GemvConfig(2, 2048, 2)
    if num_channels == 4096 and num_features < 3072:
        return GemvConfig(4, 4096, 4)
    return GemvConfig(8, 1024, 2) if 3072 <= num_features < 12288 else GemvConfig(4, 2048, 8)


@triton.jit
def output_features(tile, num_outputs, ACT_MUL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Output features i64[BLOCK_N] of a tile, and whether they exist. ACT_MUL: half are gate, then those of up."""
    local = tl.arange(0, BLOCK_N)
    if ACT_MUL is not None:
        output = tile * (BLOCK_N // 2) + local % (BLOCK_N // 2)
        feature = output + (local // (BLOCK_N // 2)) * num_outputs
    else:
        output = tile * BLOCK_N + local
        feature = output
    return feature.to(tl.int64), output < num_outputs


@triton.jit
def sigmoid_argument(x, ACT: tl.constexpr):
    if ACT == "gelu_tanh":
        return 1.5957691216057308 * (x + 0.044715 * x * x * x)
    else:
        tl.static_assert(ACT == "silu")
        return x


@triton.jit
def activate(x, ACT: tl.constexpr):
    """silu(x) = x sigmoid(x); gelu_tanh(x) = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))."""
    return x / (1.0 + tl.exp(-sigmoid_argument(x, ACT)))


@triton.jit
def add_bias_and_activate(y, bias_ptr, features, exists, ACT_MUL: tl.constexpr):
    """y [N] of `output_features`, plus the bias, if there is one; with ACT_MUL act(gate) * up, [N / 2]."""
    if bias_ptr is not None:
        y += tl.load(bias_ptr + features, mask=exists, other=0.0).to(tl.float32)
    if ACT_MUL is None:
        return y
    else:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, y.shape[0] // 2)), (1, 0)))
        return activate(gate, ACT_MUL) * up


@triton.jit
def load_group_scale(
    scale_ptr, features, exists, first_c,
    NUM_CHANNELS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Scales [BLOCK_C / VECTOR, BLOCK_N] of the vectors from channel first_c on; with one group [BLOCK_N]."""
    if NUM_GROUPS > 1:
        GROUP: tl.constexpr = NUM_CHANNELS // NUM_GROUPS
        tl.static_assert(GROUP % VECTOR == 0)
        c = first_c + tl.arange(0, BLOCK_C // VECTOR) * VECTOR
        mask = (c < NUM_CHANNELS)[:, None] & exists[None, :]
        return tl.load(scale_ptr + (c // GROUP)[:, None] + features[None, :] * NUM_GROUPS, mask=mask, other=0.0)
    elif NUM_GROUPS == 1:
        return tl.load(scale_ptr + features, mask=exists, other=0.0)
    else:
        return 1.0


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
def load_norm_weight(ptr, offs, inside, IN_FP16: tl.constexpr):
    """Load it in the form in which gemv_kernel has x: fp32 numbers, or pairs; 1 without a norm."""
    if ptr is None:
        return 1.0
    elif IN_FP16:
        return load_pairs(ptr, offs, inside)
    else:
        return tl.load(ptr + offs, mask=inside, other=0.0).to(tl.float32)


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
def dot_fp8(x_0, x_1, x_2, x_3, weight):
    """Dot products of vectors of 16 channels of x, fp32 [V, 4] each, with e4m3, int32 [V, N, 4] of fours.

    Channels 0, 2, 4, 6 of a vector are in x_0, 1, 3, 5, 7 in x_1, 8, 10, ... in x_2, 9, 11, ... in x_3. Returns fp32
    [V, N], and the factor [V, 1] that is still to be multiplied in.
    """
    largest = tl.maximum(tl.maximum(tl.abs(x_0), tl.abs(x_1)), tl.maximum(tl.abs(x_2), tl.abs(x_3)))
    # The power of two at or below the largest, as the bits of an fp32, and its inverse times 8. It is at least 2^-123:
    # the inverse of 0 would not be finite.
    exponent = tl.maximum(tl.max(largest, axis=1).to(tl.int32, bitcast=True) & 0x7F800000, 4 << 23)  # [V]
    shrink = ((254 << 23) - exponent).to(tl.float32, bitcast=True)[:, None] * 8.0
    a_0, a_1, a_2, a_3 = split_four(pack(x_0 * shrink, x_1 * shrink)[:, None, :])
    b_0, b_1, b_2, b_3 = split_four(pack(x_2 * shrink, x_3 * shrink)[:, None, :])
    w_0, w_1, w_2, w_3 = split_four(weight)
    dot = tl.inline_asm_elementwise(
        DOT_ASM, "=f" + ",r" * 12, [w_0, w_1, w_2, w_3, a_0, a_1, a_2, a_3, b_0, b_1, b_2, b_3],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return dot, exponent.to(tl.float32, bitcast=True)[:, None] / 8.0


@triton.jit
def gemv_kernel(
    x_ptr,  # [1, C], written by the kernel before; pairs if the weight is int32
    weight_ptr,  # [N, C] contiguous; fours of e4m3 are int32 [N, C / 4]
    bias_ptr,  # [N] or None
    weight_scale_ptr,  # fp32 [N, NUM_GROUPS] or None
    norm_weight_ptr,  # [C] or None; pairs like x
    residual_ptr,  # [1, I] or None
    y_ptr,  # [1, I], written here
    num_outputs,
    eps,
    NUM_CHANNELS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # scales per feature; 0: none
    ACT_MUL: tl.constexpr,  # "silu", "gelu_tanh" or None
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N output features, all channels.

    A thread loads VECTOR channels at once and sums them itself: one accumulator per vector and feature saves registers.
    Vectors are the first dimension, so that neighbouring threads hold neighbouring vectors of x and of the weight.
    """
    pdl_launch_dependents(USE_PDL)
    tile = tl.program_id(0)
    BLOCK_I: tl.constexpr = BLOCK_N // 2 if ACT_MUL is not None else BLOCK_N
    STEPS: tl.constexpr = (NUM_CHANNELS + BLOCK_C - 1) // BLOCK_C
    IN_FP16: tl.constexpr = weight_ptr.dtype.element_ty == tl.int32  # fours of weights times pairs of x
    IS_BF16: tl.constexpr = y_ptr.dtype.element_ty == tl.bfloat16
    PACK: tl.constexpr = 4 if IN_FP16 else 1
    X_PACK: tl.constexpr = 2 if IN_FP16 else 1
    VECTOR: tl.constexpr = 16 if weight_ptr.dtype.element_ty.primitive_bitwidth == 8 or IN_FP16 else 8
    V: tl.constexpr = BLOCK_C // VECTOR
    features, exists = output_features(tile, num_outputs, ACT_MUL, BLOCK_N)
    vector, lane = tl.arange(0, V)[:, None], tl.arange(0, VECTOR // PACK)[None, :]
    channel = vector * VECTOR if IN_FP16 else vector * VECTOR + lane  # [V, 1 or VECTOR]
    x_offs = vector * (VECTOR // X_PACK) + lane
    offs = vector * (VECTOR // PACK) + lane
    weight_ptrs = weight_ptr + offs[:, None, :] + features[None, :, None] * (NUM_CHANNELS // PACK)
    weight_ptrs = tl.max_contiguous(weight_ptrs, [2, 1, VECTOR // PACK])  # see the module's docstring
    weight = tl.load(weight_ptrs, mask=(channel < NUM_CHANNELS)[:, None, :] & exists[None, :, None], other=0.0)
    scale = load_group_scale(weight_scale_ptr, features, exists, 0, NUM_CHANNELS, NUM_GROUPS, BLOCK_C, VECTOR)
    norm = load_norm_weight(norm_weight_ptr, x_offs, channel < NUM_CHANNELS, IN_FP16)
    offs_i = tile * BLOCK_I + tl.arange(0, BLOCK_I)

    pdl_wait(USE_PDL)
    residual = tl.zeros((BLOCK_I,), tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offs_i, mask=offs_i < num_outputs, other=0.0).to(tl.float32)
    acc = tl.zeros((V, BLOCK_N), tl.float32)
    squares = tl.zeros((V,), tl.float32)
    for step in tl.static_range(STEPS):
        if IN_FP16:
            pairs_1, pairs_2 = load_pairs(x_ptr, x_offs, channel < NUM_CHANNELS)
            x_0, x_1 = unpack(pairs_1, IS_BF16)
            x_2, x_3 = unpack(pairs_2, IS_BF16)
            if norm_weight_ptr is not None:
                squares += tl.sum(x_0 * x_0 + x_1 * x_1 + x_2 * x_2 + x_3 * x_3, axis=1)
                norm_0, norm_1 = unpack(norm[0], IS_BF16)
                norm_2, norm_3 = unpack(norm[1], IS_BF16)
                x_0, x_1, x_2, x_3 = x_0 * norm_0, x_1 * norm_1, x_2 * norm_2, x_3 * norm_3
        else:
            x = tl.load(x_ptr + x_offs, mask=channel < NUM_CHANNELS, other=0.0).to(tl.float32)
            if norm_weight_ptr is not None:
                squares += tl.sum(x * x, axis=1)
                x *= norm
        step_weight, step_scale = weight, scale
        channel += BLOCK_C
        x_offs += BLOCK_C // X_PACK
        if step + 1 < STEPS:
            weight_ptrs += BLOCK_C // PACK
            weight = tl.load(weight_ptrs, mask=(channel < NUM_CHANNELS)[:, None, :] & exists[None, :, None], other=0.0)
            if NUM_GROUPS > 1:
                scale = load_group_scale(
                    weight_scale_ptr, features, exists, (step + 1) * BLOCK_C, NUM_CHANNELS, NUM_GROUPS, BLOCK_C, VECTOR
                )
            norm = load_norm_weight(norm_weight_ptr, x_offs, channel < NUM_CHANNELS, IN_FP16)
        if IN_FP16:
            dot, grow = dot_fp8(x_0, x_1, x_2, x_3, step_weight)
            acc += dot * (grow * step_scale if NUM_GROUPS > 1 else grow)
        else:
            dot = tl.sum(x[:, None, :] * step_weight.to(tl.float32), axis=2)
            acc += dot * step_scale if NUM_GROUPS > 1 else dot

    y = tl.sum(acc, axis=0)
    if NUM_GROUPS == 1:
        y *= scale
    if norm_weight_ptr is not None:
        y *= tl.rsqrt(tl.sum(squares) / NUM_CHANNELS + eps)
    y = add_bias_and_activate(y, bias_ptr, features, exists, ACT_MUL)
    tl.store(y_ptr + offs_i, (y + residual).to(y_ptr.dtype.element_ty), mask=offs_i < num_outputs)


def multiplies_in_fp16(x, weight, norm_weight):
    """Whether gemv_kernel, or moe/gemv.py, reads this weight four numbers at a time."""
    is_aligned = x.data_ptr() % 16 == weight.data.data_ptr() % 16 == weight.data.shape[-1] % FP8_VECTOR == 0
    is_16_bit = x.element_size() == 2 and (norm_weight is None or norm_weight.dtype == x.dtype)
    return weight.scale is not None and has_inline_asm(x.device) and is_aligned and is_16_bit


def gemv(x, weight, bias, norm_weight, eps, residual, act_mul):
    """reference.fused_linear of one token, x [1, C], and a Weight."""
    data, scale = weight.data, weight.scale
    num_features, num_channels = data.shape
    assert scale is None or (scale.is_contiguous() and scale.dtype == torch.float32)
    assert x.shape == (1, num_channels) and x.stride(1) == 1 and data.is_contiguous()
    in_fp16 = multiplies_in_fp16(x, weight, norm_weight)
    config = gemv_config(num_features, num_channels, data.element_size(), in_fp16)
    num_outputs = num_features // 2 if act_mul else num_features
    y = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    if in_fp16:
        x, data = x.view(torch.int32), data.view(torch.int32)
        norm_weight = None if norm_weight is None else norm_weight.view(torch.int32)
    launch(
        gemv_kernel, (triton.cdiv(num_features, config.block_n),),
        x, data, bias, scale, norm_weight, residual, y, num_outputs, eps,
        NUM_CHANNELS=num_channels, NUM_GROUPS=0 if scale is None else scale.shape[1], ACT_MUL=act_mul,
        BLOCK_N=config.block_n, BLOCK_C=config.block_c, num_warps=config.num_warps, **launch_options(x.device),
    )  # fmt: skip
    return y

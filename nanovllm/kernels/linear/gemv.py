"""Triton: GEMV, the linear layer of a single token, fused with the norm before and the activation or residual after.

Owns `gemv` and its tile sizes. The twin is reference.fused_linear.

Bound by reading the weight. A program loads its first BLOCK_C channels before griddepcontrol.wait (launch.py on PDL),
so only x from L2, the arithmetic and the store lie between the end of one kernel and the end of the next. The fewer
registers a thread needs, the more programs of the next kernel are resident early, with their loads in flight.

A weight in e4m3 is multiplied in fp32 too, and its scales, of all channels or of groups of them, multiply the sums;
where gemv_fp8.py runs, it is faster.

N output features of the weight, C input channels; I outputs: N, or N / 2 with act_mul.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait


class GemvConfig(NamedTuple):
    """How a GEMV is cut into programs; changes only the order of summation."""

    block_n: int  # output features of a program
    block_c: int  # channels of a loop step
    num_warps: int


def gemv_config(num_features, num_channels, itemsize):
    """Tuned over chains of layers of 0.6B to 8B, H200 (docs/experiments.md, "Linear")."""
    is_whole_blocks = num_channels % 2048 == 0
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
    """Output features i64[BLOCK_N] of a tile, and whether they exist. ACT_MUL: half gate, then as many of up."""
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
def load_norm_weight(norm_weight_ptr, c, num_channels, HAS_NORM: tl.constexpr):
    if HAS_NORM:
        return tl.load(norm_weight_ptr + c, mask=c < num_channels, other=0.0).to(tl.float32)
    else:
        return 1.0


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


@triton.jit
def store_outputs(
    acc, squares, scale, residual, bias_ptr, y_ptr, features, exists, offs_i, num_outputs, eps,
    NUM_CHANNELS: tl.constexpr, NUM_GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    ACT_MUL: tl.constexpr,
):  # fmt: skip
    """What follows the products: acc [vectors, BLOCK_N] to y[offs_i]; squares [vectors] of x, residual like offs_i."""
    y = tl.sum(acc, axis=0)
    if NUM_GROUPS == 1:
        y *= scale
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(squares) / NUM_CHANNELS + eps)
    if HAS_BIAS:
        y += tl.load(bias_ptr + features, mask=exists, other=0.0).to(tl.float32)
    if ACT_MUL is not None:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, offs_i.shape[0])), (1, 0)))
        y = activate(gate, ACT_MUL) * up
    tl.store(y_ptr + offs_i, (y + residual).to(y_ptr.dtype.element_ty), mask=offs_i < num_outputs)


@triton.jit
def gemv_kernel(
    x_ptr,  # [1, C], written by the kernel before
    weight_ptr,  # [N, C] contiguous
    bias_ptr,  # [N], only with HAS_BIAS
    weight_scale_ptr,  # fp32 [N, NUM_GROUPS], only with NUM_GROUPS
    norm_weight_ptr,  # [C], only with HAS_NORM
    residual_ptr,  # [1, I], only with HAS_RESIDUAL
    y_ptr,  # [1, I], written here
    num_outputs,
    eps,
    NUM_CHANNELS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # of channels with a scale; 0: no scales
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
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
    VECTOR: tl.constexpr = 16 if weight_ptr.dtype.element_ty.primitive_bitwidth == 8 else 8
    features, exists = output_features(tile, num_outputs, ACT_MUL, BLOCK_N)
    c = tl.arange(0, BLOCK_C // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [BLOCK_C/V, V]
    weight_ptrs = weight_ptr + c[:, None, :] + features[None, :, None] * NUM_CHANNELS  # [BLOCK_C/V, BLOCK_N, V]
    weight = tl.load(weight_ptrs, mask=(c < NUM_CHANNELS)[:, None, :] & exists[None, :, None], other=0.0)
    scale = load_group_scale(weight_scale_ptr, features, exists, 0, NUM_CHANNELS, NUM_GROUPS, BLOCK_C, VECTOR)
    norm_weight = load_norm_weight(norm_weight_ptr, c, NUM_CHANNELS, HAS_NORM)
    offs_i = tile * BLOCK_I + tl.arange(0, BLOCK_I)

    pdl_wait(USE_PDL)
    residual = tl.zeros((BLOCK_I,), tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offs_i, mask=offs_i < num_outputs, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCK_C // VECTOR, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_C // VECTOR,), tl.float32)
    for step in tl.static_range(STEPS):
        x = tl.load(x_ptr + c, mask=c < NUM_CHANNELS, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(x * x, axis=1)
            x *= norm_weight
        step_weight, step_scale = weight, scale
        c += BLOCK_C
        if step + 1 < STEPS:
            weight_ptrs += BLOCK_C
            weight = tl.load(weight_ptrs, mask=(c < NUM_CHANNELS)[:, None, :] & exists[None, :, None], other=0.0)
            if NUM_GROUPS > 1:
                scale = load_group_scale(
                    weight_scale_ptr, features, exists, (step + 1) * BLOCK_C, NUM_CHANNELS, NUM_GROUPS, BLOCK_C, VECTOR
                )
            norm_weight = load_norm_weight(norm_weight_ptr, c, NUM_CHANNELS, HAS_NORM)
        dot = tl.sum(x[:, None, :] * step_weight.to(tl.float32), axis=2)
        if NUM_GROUPS > 1:
            dot *= step_scale
        acc += dot
    store_outputs(
        acc, squares, scale, residual, bias_ptr, y_ptr, features, exists, offs_i, num_outputs, eps,
        NUM_CHANNELS, NUM_GROUPS, HAS_BIAS, HAS_NORM, ACT_MUL,
    )  # fmt: skip


def gemv(x, weight, bias, norm_weight, eps, residual, act_mul):
    """reference.fused_linear of one token, x [1, C], and a Weight."""
    weight, weight_scale = weight.data, weight.scale
    num_features, num_channels = weight.shape
    num_groups = 0 if weight_scale is None else weight_scale.shape[1]
    assert weight_scale is None or (weight_scale.is_contiguous() and weight_scale.dtype == torch.float32)
    assert x.shape == (1, num_channels) and x.stride(1) == 1 and weight.is_contiguous()
    config = gemv_config(num_features, num_channels, weight.element_size())
    num_outputs = num_features // 2 if act_mul else num_features
    y = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    launch(
        gemv_kernel, (triton.cdiv(num_features, config.block_n),),
        x, weight, bias, weight_scale, norm_weight, residual, y, num_outputs, eps,
        NUM_CHANNELS=num_channels, NUM_GROUPS=num_groups, HAS_BIAS=bias is not None, HAS_NORM=norm_weight is not None,
        HAS_RESIDUAL=residual is not None, ACT_MUL=act_mul,
        BLOCK_N=config.block_n, BLOCK_C=config.block_c, num_warps=config.num_warps,
        **launch_options(x.device),
    )  # fmt: skip
    return y

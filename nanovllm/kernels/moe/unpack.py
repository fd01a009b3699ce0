"""Triton: MXFP4 numbers to 16 bits by shifts, in a tile of a weight and in a dot product of vectors.

Owns the order of the channels of x that such tiles need (`reordered`). Sign, exponent and mantissa of an e2m1 are moved
to their places in a number of 16 bits, and a power of two makes up for the other bias: 2^14 in fp16, 2^126 in bf16; on
NVIDIA GPUs in PTX, two numbers at once. quantization/mxfp4 has the order of the numbers in a word.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from ..linear.gemv import pack, split_four, unpack


def move_asm(source, target, shift, places):
    """Assembly that moves two e2m1, one of each half word, to `target` as numbers.

    They are at bits 15 to 12 once shifted left by `shift`; their exponents then begin `places` bits lower. t is
    overwritten.
    """
    lines = [f"shl.b32 {target}, {source}, {shift};"] if shift else [f"mov.b32 {target}, {source};"]
    lines += [f"and.b32 t, {target}, 0x70007000;", f"shr.u32 t, t, {places};"]
    return [*lines, f"and.b32 {target}, {target}, 0x80008000;", f"or.b32 {target}, {target}, t;"]


def unpack_asm(places, multiply):
    """$0 to $3: the pairs of the word $4, times their factor, twice in $5."""
    lines = [".reg .b32 t, r, z;", "mov.b32 z, 0x80008000;"]  # z: -0, twice
    for i in range(4):
        lines += [*move_asm("$4", "r", 12 - 4 * i, places), multiply.format(f"${i}", "r", "$5")]
    return "{" + "\n".join(lines) + "}"


def dot_asm():
    """$0 = the dot product of 32 e2m1, the words $1 to $4, times 2^-14, with 32 fp16, the pairs $5 to $20."""
    lines = [".reg .b16 l, h;", ".reg .b32 r, t, s0, s1;", ".reg .f32 f, g;"]
    for pair in range(16):
        lines += move_asm(f"${pair // 4 + 1}", "r", 12 - 4 * (pair % 4), 3)
        sum_, x = f"s{pair % 2}", f"${pair + 5}"
        lines += [f"mul.rn.f16x2 {sum_}, r, {x};" if pair < 2 else f"fma.rn.f16x2 {sum_}, r, {x}, {sum_};"]
    lines += ["mov.b32 {l, h}, s0;", "cvt.f32.f16 f, l;", "cvt.f32.f16 g, h;", "add.f32 f, f, g;"]
    lines += ["mov.b32 {l, h}, s1;", "cvt.f32.f16 g, l;", "add.f32 f, f, g;", "cvt.f32.f16 g, h;", "add.f32 $0, f, g;"]
    return "{" + "\n".join(lines) + "}"


UNPACK_BF16 = tl.constexpr(unpack_asm(6, "fma.rn.bf16x2 {}, {}, {}, z;"))
UNPACK_FP16 = tl.constexpr(unpack_asm(3, "mul.rn.f16x2 {}, {}, {};"))
DOT_ASM = tl.constexpr(dot_asm())


@triton.jit
def e8m0(scale):
    """Scales in fp32; byte 0 gives 0."""
    return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_factors(scale, DTYPE: tl.constexpr):
    """Factors of `unpack_tile`: 2 ** (scale - 127) and the difference of the biases, as the bits of 16-bit numbers."""
    scale = scale.to(tl.int32)
    if DTYPE == tl.float16:  # 2 ** (scale - 113)  # noqa: SIM300
        return tl.maximum(scale - 98, 0) << 10
    else:  # 2 ** (scale - 1)
        return (scale + 126) << 7


@triton.jit
def widen(codes):
    """e2m1 as fp16, times 2^-14."""
    codes = codes.to(tl.int16)
    return (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def unpack_tile(words, scale, DTYPE: tl.constexpr, USE_ASM: tl.constexpr):
    """Numbers [N, 8 W] of words int32 [N, W], times their scales e8m0 [N, W / 4], in DTYPE.

    USE_ASM: in 16 bits on NVIDIA GPUs.
    """
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    if USE_ASM:
        factor = scale_factors(scale, DTYPE) * 65537
        factor = factor[:, :, None].broadcast_to((N, W // 4, 4)).reshape((N, W))
        ASM: tl.constexpr = UNPACK_BF16 if DTYPE == tl.bfloat16 else UNPACK_FP16  # noqa: SIM300
        pairs = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r", [words, factor], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
        pairs = tl.join(tl.join(pairs[0], pairs[2]), tl.join(pairs[1], pairs[3]))
        low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
        return tl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)).reshape((N, 8 * W))
    else:
        channel = tl.arange(0, 8)
        codes = words[:, :, None] >> (channel // 2 * 4 + channel % 2 * 16)[None, None, :]
        factor = ((scale.to(tl.int32) + 14) << 23).to(tl.float32, bitcast=True).to(DTYPE)
        factor = factor[:, :, None].broadcast_to((N, W // 4, 32)).reshape((N, 8 * W))
        return widen(codes & 15).reshape((N, 8 * W)).to(DTYPE) * factor


@triton.jit
def load_scales(ptrs, step, NUM_FEATURES: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load scales e8m0 [BLOCK_N, BLOCK_K / 32] of a step's channels, zeros beyond the last.

    In words of four features: Triton's pipeline takes no load below 4 bytes.
    """
    group = step // 32 + tl.arange(0, BLOCK_K // 32)
    words = tl.load(ptrs + step // 32 * (NUM_FEATURES // 4), mask=(group < K // 32)[None, :], other=0)
    four = words[:, None, :] >> (tl.arange(0, 4) * 8)[None, :, None]
    return (four & 255).reshape((4 * words.shape[0], words.shape[1]))


@triton.jit
def channel_of(k):
    """The channel in column k of a weight's tile: see `in_order` in ../linear/unpack_int4.py."""
    return k // 128 * 128 + k // 2 % 4 * 32 + k // 16 % 8 * 4 + k // 8 % 2 * 2 + k % 2


@triton.jit
def column_of(channel):
    """The inverse of `channel_of`."""
    return channel // 128 * 128 + channel // 4 % 8 * 16 + channel // 2 % 2 * 8 + channel // 32 % 4 * 2 + channel % 2


@triton.jit
def reorder_kernel(
    x_ptr,  # [*, K] contiguous, written by the kernel before
    y_ptr,  # [*, K_PADDED] contiguous, written here
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one row, as products with `in_order` tiles take it."""
    pdl_launch_dependents(USE_PDL)
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    channel = channel_of(k)
    pdl_wait(USE_PDL)
    x = tl.load(x_ptr + row * K + channel, mask=channel < K, other=0.0)
    tl.store(y_ptr + row * K_PADDED + k, x, mask=k < K_PADDED)


def padded(num_channels):
    """Number of channels in rows ordered by `channel_of`, which end with zeros."""
    return triton.cdiv(num_channels, 128) * 128


def reordered(x):
    """x [*, K] with channels in the order of `channel_of`, [*, padded(K)]."""
    assert x.is_contiguous()
    num_rows, num_channels = x.shape
    y = torch.empty((num_rows, padded(num_channels)), dtype=x.dtype, device=x.device)
    block_k = triton.next_power_of_2(y.shape[1])
    launch(
        reorder_kernel, (num_rows,), x, y, K=num_channels, K_PADDED=y.shape[1], BLOCK_K=block_k,
        num_warps=min(8, max(1, block_k // 512)), **launch_options(x.device),
    )  # fmt: skip
    return y


@triton.jit
def largest_of(pairs):
    return tl.max(tl.maximum(tl.abs(pairs[0]), tl.abs(pairs[1])), axis=1)


@triton.jit
def dot_mxfp4(x_ptr, channel, mask, weight, IS_BF16: tl.constexpr):
    """Dot products fp32 [V, N] of vectors of 32 channels, in fp16.

    x has pairs, from the even channels [V, 1] on where mask [V, 1]; the e2m1 weight, int32 [V, N, 4], has eights. Each
    vector of x has a power of two of its own, as in linear/gemv.py.
    """
    offs = channel // 2 + tl.arange(0, 4)[None, :]
    a = unpack(tl.load(x_ptr + offs, mask=mask, other=0), IS_BF16)
    b = unpack(tl.load(x_ptr + offs + 4, mask=mask, other=0), IS_BF16)
    c = unpack(tl.load(x_ptr + offs + 8, mask=mask, other=0), IS_BF16)
    d = unpack(tl.load(x_ptr + offs + 12, mask=mask, other=0), IS_BF16)
    largest = tl.maximum(tl.maximum(largest_of(a), largest_of(b)), tl.maximum(largest_of(c), largest_of(d)))
    # The largest becomes 2^13 to 2^14, so sums of 16 products with numbers up to 6 * 2^-14 are below 96.
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 17 << 23)
    shrink = ((254 << 23) - exponent).to(tl.float32, bitcast=True)[:, None] * 8192.0
    a_0, a_1, a_2, a_3 = split_four(pack(a[0] * shrink, a[1] * shrink)[:, None, :])
    b_0, b_1, b_2, b_3 = split_four(pack(b[0] * shrink, b[1] * shrink)[:, None, :])
    c_0, c_1, c_2, c_3 = split_four(pack(c[0] * shrink, c[1] * shrink)[:, None, :])
    d_0, d_1, d_2, d_3 = split_four(pack(d[0] * shrink, d[1] * shrink)[:, None, :])
    w_0, w_1, w_2, w_3 = split_four(weight)
    dot = tl.inline_asm_elementwise(
        DOT_ASM, "=f" + ",r" * 20,
        [w_0, w_1, w_2, w_3, a_0, a_1, a_2, a_3, b_0, b_1, b_2, b_3, c_0, c_1, c_2, c_3, d_0, d_1, d_2, d_3],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return dot * (exponent.to(tl.float32, bitcast=True)[:, None] * 2.0)


@triton.jit
def dot_mxfp4_plain(x_ptr, channel, mask, weight):
    """The same for plain x and bytes [V, N, 16], in fp32."""
    byte = tl.arange(0, 16)[None, :]
    c = channel + byte // 4 * 8 + byte % 2 * 4 + byte // 2 % 2
    lower = tl.load(x_ptr + c, mask=mask, other=0.0).to(tl.float32)
    upper = tl.load(x_ptr + c + 2, mask=mask, other=0.0).to(tl.float32)
    products = lower[:, None, :] * widen(weight & 15).to(tl.float32)
    return tl.sum(products + upper[:, None, :] * widen(weight >> 4).to(tl.float32), axis=2) * 16384.0

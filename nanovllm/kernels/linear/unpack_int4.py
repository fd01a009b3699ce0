"""Triton: 4-bit integers in 16 bits, by bits: of a tile of a weight, and in a dot product of vectors.

A code becomes a number by bits: 0x4300 | code is 128 + code in bf16, 0x6400 | code is 1024 + code in fp16, both exact;
so is the difference to 128 or 1024 and the zero. On NVIDIA GPUs in PTX, two numbers at once: channels i and i + 4 of a
word (../int4.py). In dot products sums of eight are in fp16, with a power of two for each vector of 32 channels of the
token, as in gemv.py; a vector has one scale, so groups have a multiple of 32 channels.

N output features; V vectors, W words of a tile.
"""

import triton
import triton.language as tl

from ..launch import has_inline_asm
from .gemv import pack, split_four

VECTOR = 32  # channels that a thread loads at once
PAIRS = ((0, 0x000F000F), (0, 0x00F000F0), (8, 0x000F000F), (8, 0x00F000F0))  # of a word: shift, bits


def dot_asm():
    """$0 = the dot product of 32 codes less zero, the words $1 to $4, with 32 fp16, the pairs $5 to $20.

    $21 is 1024 + zero, twice in fp16, $22 is -64 - zero. Codes at bits 4 to 7 are 16 times as large.
    """
    lines = [".reg .b16 l, h;", ".reg .b32 r, s0, s1, sixteenth;", ".reg .f32 f, g;", "mov.b32 sixteenth, 0x2C002C00;"]
    for word in range(4):
        for i, (shift, bits) in enumerate(PAIRS):
            lines += [f"shr.u32 r, ${word + 1}, {shift};", f"and.b32 r, r, {bits:#010x};", "or.b32 r, r, 0x64006400;"]
            lines += ["sub.rn.f16x2 r, r, $21;" if i % 2 == 0 else "fma.rn.f16x2 r, r, sixteenth, $22;"]
            sum_, x = f"s{i % 2}", f"${4 * word + i + 5}"
            is_first = word == 0 and i < 2
            lines += [f"mul.rn.f16x2 {sum_}, r, {x};" if is_first else f"fma.rn.f16x2 {sum_}, r, {x}, {sum_};"]
    lines += ["mov.b32 {l, h}, s0;", "cvt.f32.f16 f, l;", "cvt.f32.f16 g, h;", "add.f32 f, f, g;"]
    lines += ["mov.b32 {l, h}, s1;", "cvt.f32.f16 g, l;", "add.f32 f, f, g;", "cvt.f32.f16 g, h;", "add.f32 $0, f, g;"]
    return "{" + "\n".join(lines) + "}"


def unpack_asm(offset, subtract):
    """$0 to $3: the pairs of channels i and i + 4 of the word $4, plus $5: twice -zero less the offset."""
    lines = [".reg .b32 r, one;", "mov.b32 one, 0x3F803F80;"]
    for i in range(4):
        lines += [f"shr.u32 r, $4, {4 * i};", "and.b32 r, r, 0x000F000F;", f"or.b32 r, r, {offset:#010x};"]
        lines += [subtract.format(f"${i}")]
    return "{" + "\n".join(lines) + "}"


DOT_ASM = tl.constexpr(dot_asm())
UNPACK_BF16 = tl.constexpr(unpack_asm(0x43004300, "fma.rn.bf16x2 {}, r, one, $5;"))
UNPACK_FP16 = tl.constexpr(unpack_asm(0x64006400, "add.rn.f16x2 {}, r, $5;"))


@triton.jit
def load_zero(zero_ptr, offs, mask):
    """Zeros as i32, or 8 of a symmetric weight."""
    if zero_ptr is None:
        return tl.full(offs.shape, 8, tl.int32)
    else:
        return tl.load(zero_ptr + offs, mask=mask, other=0).to(tl.int32)


@triton.jit
def load_word(x_ptr, norm_weight_ptr, channel, mask, WORD: tl.constexpr):
    """Load fp32 [V, 4] twice: channels 0 to 3 and 4 to 7 of a word, of vectors from channel [V, 1] on.

    And sum up squares, [V], before the norm's weight.
    """
    offs = channel + 8 * WORD + tl.arange(0, 4)[None, :]
    low = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + offs + 4, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(low * low + high * high, axis=1)
    if norm_weight_ptr is not None:
        low *= tl.load(norm_weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        high *= tl.load(norm_weight_ptr + offs + 4, mask=mask, other=0.0).to(tl.float32)
    return low, high, squares


@triton.jit
def dot_word(low, high, word, zero):
    """Dot products fp32 [V, N] of a word of each vector, in fp32."""
    shift = tl.arange(0, 4)[None, None, :] * 4
    lower = ((word[:, :, None] >> shift) & 15) - zero[:, :, None]
    upper = ((word[:, :, None] >> (shift + 16)) & 15) - zero[:, :, None]
    return tl.sum(low[:, None, :] * lower.to(tl.float32) + high[:, None, :] * upper.to(tl.float32), axis=2)


@triton.jit
def largest_of(low, high):
    return tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)


@triton.jit
def dot_int4(x_ptr, norm_weight_ptr, channel, mask, words, zero, USE_ASM: tl.constexpr):
    """Dot products fp32 [V, N] of vectors of 32 channels, and sums of squares of x, [V].

    x is read from channel [V, 1] on where mask [V, 1]; words int32 [V, N, 4], zero i32 [V, N].
    """
    a, a_high, squares_0 = load_word(x_ptr, norm_weight_ptr, channel, mask, 0)
    b, b_high, squares_1 = load_word(x_ptr, norm_weight_ptr, channel, mask, 1)
    c, c_high, squares_2 = load_word(x_ptr, norm_weight_ptr, channel, mask, 2)
    d, d_high, squares_3 = load_word(x_ptr, norm_weight_ptr, channel, mask, 3)
    squares = squares_0 + squares_1 + squares_2 + squares_3
    w_0, w_1, w_2, w_3 = split_four(words)
    if USE_ASM:
        largest = tl.maximum(
            tl.maximum(largest_of(a, a_high), largest_of(b, b_high)),
            tl.maximum(largest_of(c, c_high), largest_of(d, d_high)),
        )
        # The largest becomes 2^7 to 2^8, so sums of 8 products with numbers up to 16 are below 2^15.
        exponent = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 17 << 23)
        shrink = ((254 << 23) - exponent).to(tl.float32, bitcast=True)[:, None] * 128.0
        a_0, a_1, a_2, a_3 = split_four(pack(a * shrink, a_high * shrink)[:, None, :])
        b_0, b_1, b_2, b_3 = split_four(pack(b * shrink, b_high * shrink)[:, None, :])
        c_0, c_1, c_2, c_3 = split_four(pack(c * shrink, c_high * shrink)[:, None, :])
        d_0, d_1, d_2, d_3 = split_four(pack(d * shrink, d_high * shrink)[:, None, :])
        dot = tl.inline_asm_elementwise(
            DOT_ASM, "=f" + ",r" * 22,
            [w_0, w_1, w_2, w_3, a_0, a_1, a_2, a_3, b_0, b_1, b_2, b_3, c_0, c_1, c_2, c_3, d_0, d_1, d_2, d_3,
             (zero + 0x6400) * 65537, (zero * 16 + 0xD400) * 65537],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        return dot * (exponent.to(tl.float32, bitcast=True)[:, None] / 128.0), squares
    else:
        dot = dot_word(a, a_high, w_0, zero) + dot_word(b, b_high, w_1, zero)
        return dot + dot_word(c, c_high, w_2, zero) + dot_word(d, d_high, w_3, zero), squares


@triton.jit
def unpack_tile(words, zero, DTYPE: tl.constexpr, USE_ASM: tl.constexpr):
    """Numbers [N, 8 W] in DTYPE of words int32 [N, W], less the zeros i32 [N] of their rows. USE_ASM: in 16 bits."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    if USE_ASM:
        IS_BF16: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
        negative = ((zero + (0xC300 if IS_BF16 else 0xE400)) * 65537)[:, None].broadcast_to((N, W))
        p_0, p_1, p_2, p_3 = tl.inline_asm_elementwise(
            UNPACK_BF16 if IS_BF16 else UNPACK_FP16, "=r,=r,=r,=r,r,r", [words, negative], dtype=(tl.int32,) * 4,
            is_pure=True, pack=1,
        )  # fmt: skip
        pairs = tl.join(tl.join(p_0, p_2), tl.join(p_1, p_3))  # [N, W, 2, 2]
        low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
        both = tl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True))
        return both.permute((0, 1, 4, 2, 3)).reshape((N, 8 * W))
    else:
        codes = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
        return (codes - zero[:, None, None]).to(DTYPE).reshape((N, 8 * W))


def group_of(weight):
    """Channels of a group."""
    return weight.num_channels // weight.scale.shape[-1]


def uses_asm(x):
    return has_inline_asm(x.device) and x.element_size() == 2

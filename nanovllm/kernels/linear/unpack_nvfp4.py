"""Triton: NVFP4 words to numbers of 16 bits by shifts.

Owns the operations of unpack_int4.py, whose tiles these are: a weight's tile, and a dot product of vectors. Sign and
magnitude of an e2m1 are moved to their places in a number of 16 bits, which is then 2^-14 times the code's number in
fp16, 2^-126 in bf16. Logical operations are the cost, so a word's bits are where few are needed (quantization/nvfp4):
in bf16 one mask takes both parts of pairs 0 and 1. A scale, upper bits of an fp16, is moved likewise, and an addition
to its exponent makes up for the code's. In a tile the product of both is exact, times 2^-8.

A word has codes of two groups of 16 channels, pairs 0 and 1 of one, 2 and 3 of the next.

N output features; V vectors, W words of a tile.
"""

import triton
import triton.language as tl

from ...quantization.nvfp4.numbers import MAGNITUDE_BITS, SIGN_BITS
from .gemv import split_four

TILE_FACTOR = tl.constexpr(256.0)  # unpacked tiles are smaller by it


def shift_asm(target, source, places):
    """Assembly of a shift to the left, by a negative number to the right; its register, if it is none the source."""
    if places == 0:
        return source, []
    return target, [f"{'shl' if places > 0 else 'shr'}.b32 {target}, {source}, {abs(places)};"]


def move_asm(word, i, start):
    """Assembly that moves pair i of a word to r as two numbers, magnitudes from bit `start` on. t is overwritten."""
    places, of_sign = start - MAGNITUDE_BITS[i], 15 - SIGN_BITS[i]
    magnitudes = 0x00070007 << start
    source, lines = shift_asm("r", word, places)
    if places == of_sign:
        return [*lines, f"and.b32 r, {source}, {magnitudes | 0x80008000:#010x};"]
    lines.append(f"and.b32 t, {source}, {magnitudes:#010x};")
    source, more = shift_asm("r", word, of_sign)
    return [*lines, *more, f"lop3.b32 r, {source}, 0x80008000, t, 0xEA;"]  # a & b | c, at once


def scales_asm(scales, first, shift, offset):
    """Assembly that makes s0 and s1, twice each, of two bytes from `first` on."""
    lines = [f"prmt.b32 s, {scales}, zero, {0x4140 + first * 0x0101:#06x};"]
    lines += [f"mad.lo.u32 s, s, {1 << shift}, {offset:#010x};" if offset else f"shl.b32 s, s, {shift};"]
    return [*lines, "mov.b32 {l, h}, s;", "mov.b32 s0, {l, l};", "mov.b32 s1, {h, h};"]


def dot_asm():
    """$0 = the dot product of 32 NVFP4 numbers, the words $1 to $4, times 2^-14, with 32 fp16, the pairs $5 to $20.

    $21 has the scales of the first two words, $22 those of the others. Two pairs are added, then scaled.
    """
    lines = [".reg .b16 l, h;", ".reg .b32 r, t, p, s, zero, s0, s1, d0, d1;", ".reg .f32 f, g;", "mov.b32 zero, 0;"]
    for word in range(4):
        lines += scales_asm(f"${21 + word // 2}", word % 2 * 2, 7, 0)
        for half in range(2):
            for i in (2 * half, 2 * half + 1):
                x = f"${4 * word + i + 5}"
                lines += move_asm(f"${word + 1}", i, 9)
                lines.append(f"fma.rn.f16x2 p, r, {x}, p;" if i % 2 else f"mul.rn.f16x2 p, r, {x};")
            sum_ = f"d{half}"
            lines.append(f"fma.rn.f16x2 {sum_}, p, s{half}, {sum_};" if word else f"mul.rn.f16x2 {sum_}, p, s{half};")
    lines += ["mov.b32 {l, h}, d0;", "cvt.f32.f16 f, l;", "cvt.f32.f16 g, h;", "add.f32 f, f, g;"]
    lines += ["mov.b32 {l, h}, d1;", "cvt.f32.f16 g, l;", "add.f32 f, f, g;", "cvt.f32.f16 g, h;", "add.f32 $0, f, g;"]
    return "{" + "\n".join(lines) + "}"


def unpack_asm(start, shift, offset, multiply):
    """Pair i of the words $8 and $9 in $(2i) and $(2i + 1), times the scales in $10, two bytes of each word."""
    lines = [".reg .b16 l, h;", ".reg .b32 t, r, s, s0, s1, z, zero;", "mov.b32 zero, 0;", "mov.b32 z, 0x80008000;"]
    for word in range(2):  # z: -0, twice
        lines += scales_asm("$10", 2 * word, shift, offset)
        for i in range(4):
            lines += [*move_asm(f"${8 + word}", i, start), multiply.format(f"${2 * i + word}", f"s{i // 2}")]
    return "{" + "\n".join(lines) + "}"


DOT_ASM = tl.constexpr(dot_asm())
# exponents of the scales: those of fp16 and 118 in bf16, 6 in fp16
UNPACK_BF16 = tl.constexpr(unpack_asm(6, 4, 0x73007300, "fma.rn.bf16x2 {}, r, {}, z;"))
UNPACK_FP16 = tl.constexpr(unpack_asm(9, 7, 0x18001800, "mul.rn.f16x2 {}, r, {};"))


@triton.jit
def number_at(words, n):
    """Code n of words, 0 to 7, as fp16, times 2^-14."""
    half, i = words >> n // 4 * 16, n % 4
    magnitude, sign = half >> tl.where(i < 3, 6 - 3 * i, 9), half >> tl.where(i == 0, 15, 11 + i)
    return (((sign & 1) << 15) | ((magnitude & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def scale_of(scale, BYTE: tl.constexpr):
    """A byte's scale in fp32; the bytes of a word are numbered from the lowest."""
    return (((scale >> 8 * BYTE) & 255) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_vector_scales(row_ptrs, place, mask, TILE: tl.constexpr):
    """Load the scales of vectors at place [V, 1], int32 [V, N, 2]: of the first two words, then of the others.

    row_ptrs [V, N] or [1, N]: where the features' rows begin; mask [V, N].
    """
    of_vector = place // TILE * (TILE // 64) + tl.arange(0, 2)[None, :] % (TILE // 64)
    ptrs = row_ptrs[:, :, None] + of_vector[:, None, :]
    if TILE == 128:  # the layout of the words (see gemv.py): in another one Triton would convert these at each step
        ptrs = tl.max_contiguous(ptrs, [2, 1, 2])
    return tl.load(ptrs, mask=mask[:, :, None], other=0)


@triton.jit
def tile_scales(W: tl.constexpr, TILE: tl.constexpr):
    """Offset of the scales, as pairs, of each of the W words of a tile, or of several."""
    word = tl.arange(0, W)
    return word // (TILE // 8) * (TILE // 32) + word % (TILE // 32)


@triton.jit
def dot_word(x, word, scale, BYTE: tl.constexpr):
    """Dot products fp32 [V, N] of a word of each vector, times 2^-14, in fp32."""
    dot = tl.zeros(word.shape, tl.float32)
    for i in tl.static_range(4):
        pair = x[2 * i] * number_at(word, tl.full(word.shape, i, tl.int32)).to(tl.float32)
        pair += x[2 * i + 1] * number_at(word, tl.full(word.shape, i + 4, tl.int32)).to(tl.float32)
        dot += pair * scale_of(scale, BYTE + i // 2)
    return dot


@triton.jit
def dot_nvfp4(x, grow, words, scale, USE_ASM: tl.constexpr):
    """Multiply the vectors of `load_x` by words int32 [V, N, 4] with scales int32 [V, N, 2]. Returns fp32 [V, N]."""
    a, b, c, d = x
    w_0, w_1, w_2, w_3 = split_four(words)
    s_0, s_1 = tl.split(scale)
    if USE_ASM:
        dot = tl.inline_asm_elementwise(
            DOT_ASM, "=f" + ",r" * 22,
            [w_0, w_1, w_2, w_3, a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3],
             d[0], d[1], d[2], d[3], s_0, s_1],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        return dot * (grow * (1.0 / 1024.0))  # `load_x` makes up for integers' 2^-24
    else:
        dot = dot_word(a, w_0, s_0, 0) + dot_word(b, w_1, s_0, 2) + dot_word(c, w_2, s_1, 0) + dot_word(d, w_3, s_1, 2)
        return dot * 16384.0


@triton.jit
def unpack_tile(words, scale, DTYPE: tl.constexpr, USE_ASM: tl.constexpr):
    """Numbers [N, 8 W] in DTYPE of words int32 [N, W] with scales int16 [N, W], times 2^-8. USE_ASM: in 16 bits.

    They are in the order of the words, one pair of channels after the other.
    """
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    if USE_ASM:
        ASM: tl.constexpr = UNPACK_BF16 if DTYPE == tl.bfloat16 else UNPACK_FP16  # noqa: SIM300
        p_0, p_1, p_2, p_3 = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [words, scale], dtype=(tl.int32,) * 4, is_pure=True, pack=2
        )
        pairs = tl.join(tl.join(p_0, p_2), tl.join(p_1, p_3))  # [N, W, 2, 2]
        low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
        return tl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)).reshape((N, 8 * W))
    else:
        n = tl.arange(0, 8)[None, None, :]
        numbers = number_at(words[:, :, None], n // 2 + n % 2 * 4).to(tl.float32)
        scales = scale_of(scale.to(tl.int32)[:, :, None] >> n // 4 * 8, 0)
        return (numbers * (scales * 64.0)).to(DTYPE).reshape((N, 8 * W))

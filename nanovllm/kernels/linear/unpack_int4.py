"""Triton: 4-bit integers to numbers by bit operations, in a tile of a weight and in a dot product of vectors.

Owns the assembly of both, a word's channels (quantization/int4 has their order), and the order of a tile in registers
(`in_order`), for MXFP4 too. In a tile a code becomes a number of 16 bits: 0x4300 | code is 128 + code in bf16,
0x6400 | code is 1024 + code in fp16, both exact; subtracting 128 or 1024 and the zero is exact too. In a dot product
the code's bits are a subnormal fp16: code * 2^-24, or 16 times that if they are 4 bits higher. Two codes, of
neighbouring channels, are converted at once.

Eight products are summed in fp16, with a power of two for each vector of 32 channels of the token, as in gemv.py; the
zero times the sum of the token's channels is subtracted in fp32. A vector has one scale and one zero.

N output features; V vectors, W words of a tile.
"""

import triton
import triton.language as tl

from ..launch import has_inline_asm
from .gemv import pack, split_four, unpack

VECTOR = 32  # channels of the words that a thread loads at once


def dot_asm():
    """$0 = the dot product of 32 codes, the words $1 to $4, times 2^-24, with 32 fp16, the pairs $5 to $20."""
    lines = [".reg .b16 l, h;", ".reg .b32 r, w, s0, s1;", ".reg .f32 f, g;"]
    for word in range(4):
        for i in range(4):
            source, sum_, x = f"${word + 1}", f"s{i % 2}", f"${4 * word + i + 5}"
            if i == 2:
                lines.append(f"shr.u32 w, {source}, 8;")
            lines.append(f"and.b32 r, {'w' if i >= 2 else source}, {0x000F000F << 4 * (i % 2):#010x};")
            is_first = word == 0 and i < 2
            lines.append(f"mul.rn.f16x2 {sum_}, r, {x};" if is_first else f"fma.rn.f16x2 {sum_}, r, {x}, {sum_};")
    lines += ["mov.b32 {l, h}, s1;", "cvt.f32.f16 f, l;", "cvt.f32.f16 g, h;", "add.f32 f, f, g;"]
    lines += ["mul.f32 f, f, 0f3D800000;", "mov.b32 {l, h}, s0;", "cvt.f32.f16 g, l;", "add.f32 f, f, g;"]
    lines += ["cvt.f32.f16 g, h;", "add.f32 $0, f, g;"]  # 0f3D800000: 1 / 16
    return "{" + "\n".join(lines) + "}"


def unpack_asm(offset, subtract):
    """$0 to $3: the pairs of the word $4, plus $5: twice -zero less the offset."""
    lines = [".reg .b32 r, s, one, offset;", "mov.b32 one, 0x3F803F80;", f"mov.b32 offset, {offset:#010x};"]
    for i in range(4):
        lines += [f"shr.u32 s, $4, {4 * i};"] * (i > 0)
        lines += [f"lop3.b32 r, {'s' if i else '$4'}, 0x000F000F, offset, 0xEA;"]  # a & b | c, at once
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
def channel_of_word(place, WORD: tl.constexpr, TILE: tl.constexpr):
    """The first channel of the word that is WORD words after the one at `place`, a multiple of 32."""
    q = place % TILE // 8 + WORD
    return place - place % TILE + q % (TILE // 32) * 32 + q // (TILE // 32) * 2


@triton.jit
def load_two(ptr, channel, mask, USE_ASM: tl.constexpr):
    """Load an even channel and the next one as fp32; with USE_ASM in one load, if both are in one word."""
    if USE_ASM and ptr.dtype.element_ty.primitive_bitwidth == 16:
        pairs = tl.load(ptr.to(tl.pointer_type(tl.int32)) + channel // 2, mask=mask, other=0)
        return unpack(pairs, ptr.dtype.element_ty == tl.bfloat16)
    else:
        low = tl.load(ptr + channel, mask=mask, other=0.0).to(tl.float32)
        return low, tl.load(ptr + channel + 1, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_pair(x_ptr, norm_weight_ptr, channel, mask, USE_ASM: tl.constexpr):
    """Load two channels of x; also return the sum of their squares, before the norm's weight."""
    low, high = load_two(x_ptr, channel, mask, USE_ASM)
    squares = low * low + high * high
    if norm_weight_ptr is not None:
        norm_low, norm_high = load_two(norm_weight_ptr, channel, mask, USE_ASM)
        low, high = low * norm_low, high * norm_high
    return low, high, squares


@triton.jit
def load_word(x_ptr, norm_weight_ptr, place, mask, WORD: tl.constexpr, TILE: tl.constexpr, USE_ASM: tl.constexpr):
    """Load the 4 pairs of a word's channels, fp32 [V, 1] each; their sum, the sum of squares, and the largest."""
    channel = channel_of_word(place, WORD, TILE)
    a, b, squares = load_pair(x_ptr, norm_weight_ptr, channel, mask, USE_ASM)
    c, d, more = load_pair(x_ptr, norm_weight_ptr, channel + 8, mask, USE_ASM)
    squares += more
    e, f, more = load_pair(x_ptr, norm_weight_ptr, channel + 16, mask, USE_ASM)
    squares += more
    g, h, more = load_pair(x_ptr, norm_weight_ptr, channel + 24, mask, USE_ASM)
    largest = tl.maximum(
        tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d))),
        tl.maximum(tl.maximum(tl.abs(e), tl.abs(f)), tl.maximum(tl.abs(g), tl.abs(h))),
    )
    return (a, b, c, d, e, f, g, h), a + b + c + d + e + f + g + h, squares + more, largest


@triton.jit
def pack_word(x, shrink):
    """The pairs of `load_word` as fp16."""
    return (pack(x[0] * shrink, x[1] * shrink), pack(x[2] * shrink, x[3] * shrink),
            pack(x[4] * shrink, x[5] * shrink), pack(x[6] * shrink, x[7] * shrink))  # fmt: skip


@triton.jit
def dot_word(x, word):
    """Dot products fp32 [V, N] of a word of each vector, in fp32."""
    dot = tl.zeros(word.shape, tl.float32)
    for i in tl.static_range(4):
        dot += x[2 * i] * ((word >> 4 * i) & 15).to(tl.float32)
        dot += x[2 * i + 1] * ((word >> 4 * i + 16) & 15).to(tl.float32)
    return dot


@triton.jit
def load_x(x_ptr, norm_weight_ptr, place, mask, TILE: tl.constexpr, USE_ASM: tl.constexpr):
    """Load vectors of 32 channels of x, as `dot_int4` takes them; and the sums of their squares, fp32 [V, 1].

    place [V, 1] of a vector's first code, in a row of x; mask [V, 1].
    """
    a, sum_0, squares_0, largest_0 = load_word(x_ptr, norm_weight_ptr, place, mask, 0, TILE, USE_ASM)
    b, sum_1, squares_1, largest_1 = load_word(x_ptr, norm_weight_ptr, place, mask, 1, TILE, USE_ASM)
    c, sum_2, squares_2, largest_2 = load_word(x_ptr, norm_weight_ptr, place, mask, 2, TILE, USE_ASM)
    d, sum_3, squares_3, largest_3 = load_word(x_ptr, norm_weight_ptr, place, mask, 3, TILE, USE_ASM)
    grow = sum_0
    if USE_ASM:
        largest = tl.maximum(tl.maximum(largest_0, largest_1), tl.maximum(largest_2, largest_3))
        # The largest becomes 2^14 to 2^15, so sums of 8 products with codes up to 15 * 2^-20 are below 4.
        exponent = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 17 << 23)
        shrink = ((254 << 23) - exponent).to(tl.float32, bitcast=True) * 16384.0
        grow = exponent.to(tl.float32, bitcast=True) * 1024.0
        a, b, c, d = pack_word(a, shrink), pack_word(b, shrink), pack_word(c, shrink), pack_word(d, shrink)
    return (a, b, c, d), grow, sum_0 + sum_1 + sum_2 + sum_3, squares_0 + squares_1 + squares_2 + squares_3


@triton.jit
def dot_int4(x, grow, sums, words, zero, USE_ASM: tl.constexpr):
    """Multiply the vectors of `load_x` by words int32 [V, N, 4], less the zeros i32 [V, N]. Returns fp32 [V, N]."""
    a, b, c, d = x
    w_0, w_1, w_2, w_3 = split_four(words)
    if USE_ASM:
        dot = grow * tl.inline_asm_elementwise(
            DOT_ASM, "=f" + ",r" * 20,
            [w_0, w_1, w_2, w_3, a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3],
             d[0], d[1], d[2], d[3]],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        dot = dot_word(a, w_0) + dot_word(b, w_1) + dot_word(c, w_2) + dot_word(d, w_3)
    return dot - sums * zero.to(tl.float32)


@triton.jit
def unpack_tile(words, zero, DTYPE: tl.constexpr, USE_ASM: tl.constexpr):
    """Numbers [N, 8 W] in DTYPE of words int32 [N, W], less the zeros i32 [N] of their rows. USE_ASM: in 16 bits.

    They are in the order of the words, one pair of channels after the other.
    """
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
        return tl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)).reshape((N, 8 * W))
    else:
        n = tl.arange(0, 8)
        codes = (words[:, :, None] >> (n // 2 * 4 + n % 2 * 16)[None, None, :]) & 15
        return (codes - zero[:, None, None]).to(DTYPE).reshape((N, 8 * W))


@triton.jit
def place_in_tile(i, WARPS: tl.constexpr):
    """The row of a weight's tile that is loaded as row i: see `in_order`."""
    return i // (16 * WARPS) * (16 * WARPS) + i // 8 % WARPS * 16 + i // (8 * WARPS) % 2 * 8 + i % 8


@triton.jit
def in_order(tile, WARPS: tl.constexpr, TILE: tl.constexpr = 128):
    """The tile [N, K] of a weight that wgmma takes from registers, from the one that was loaded and unpacked.

    A thread loads TILE / 4 channels of a row at once, but wgmma expects it to hold pairs from all over the tile. It
    does once rows and channels are renumbered: no number moves, but rows are loaded in another order (`place_in_tile`),
    and channels have one too: 4-bit integers are stored in it, and for MXFP4 x is put into it (`reordered`).
    """
    N: tl.constexpr = tile.shape[0]
    K: tl.constexpr = tile.shape[1]
    tile = tile.reshape((N // (16 * WARPS), 2, WARPS, 8, K // TILE, 4, TILE // 16, 2, 2))
    return tile.permute((0, 2, 1, 3, 4, 6, 7, 5, 8)).reshape((N, K))


def group_of(weight):
    """Channels of a group."""
    return weight.num_channels // weight.scale.shape[-1]


def uses_asm(x):
    return has_inline_asm(x.device) and x.element_size() == 2

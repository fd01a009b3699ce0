"""Triton: MXFP4 numbers in 16 bits, by shifts: of a tile of a weight, and in a dot product of vectors.

Sign, exponent and mantissa of an e2m1 are moved to their places in a number of 16 bits, and a power of two makes up for
the other bias: 2^14 in fp16, 2^126 in bf16. On NVIDIA GPUs that is PTX on two numbers at once. ../mxfp4.py has the
order of the bytes.
"""

import triton
import triton.language as tl

from ..linear.gemv import pack, unpack


def move_asm(source, target, shift, places):
    """`target` = two e2m1 of a half word each, at its bits 15 to 12 once shifted left by `shift`, as numbers whose
    exponents begin `places` bits lower; t is overwritten.
    """
    lines = [f"shl.b32 {target}, {source}, {shift};"] if shift else [f"mov.b32 {target}, {source};"]
    lines += [f"and.b32 t, {target}, 0x70007000;", f"shr.u32 t, t, {places};"]
    return [*lines, f"and.b32 {target}, {target}, 0x80008000;", f"or.b32 {target}, {target}, t;"]


def unpack_asm(places, multiply):
    """$0, $1 and $2, $3: the lower and the upper e2m1 of the 4 bytes of $4, times their factors in $5, $6."""
    lines = [".reg .b32 a, b, t, r, z;", "mov.b32 z, 0x80008000;"]  # z: -0, twice
    lines += ["prmt.b32 a, $4, 0, 0x1404;", "prmt.b32 b, $4, 0, 0x3424;"]  # a byte in the upper half of each half word
    for i, (source, shift, factor) in enumerate((("a", 4, "$5"), ("b", 4, "$6"), ("a", 0, "$5"), ("b", 0, "$6"))):
        lines += [*move_asm(source, "r", shift, places), multiply.format(f"${i}", "r", factor)]
    return "{" + "\n".join(lines) + "}"


def dot_asm():
    """$0 = the dot product of 32 e2m1, 8 in each of $1 to $4, times 2^-14, with 32 fp16, 2 in each of $5 to $20.

    Word i has channels 4i to 4i + 3 and as many from 16 + 4i on. Of these $5 + i has channels 4i and 4i + 2, $9 + i
    4i + 1 and 4i + 3, and $13 + i and $17 + i those 16 above.
    """
    lines = [".reg .b16 l, h;", ".reg .b32 r, t, s0, s1;", ".reg .f32 f, g;"]
    for word in range(4):
        for sum_, shift, first in (("s0", 12, 5), ("s1", 8, 13), ("s0", 4, 9), ("s1", 0, 17)):
            lines += move_asm(f"${word + 1}", "r", shift, 3)
            is_first = word == 0 and first in (5, 13)
            x = f"${first + word}"
            lines += [f"mul.rn.f16x2 {sum_}, r, {x};" if is_first else f"fma.rn.f16x2 {sum_}, r, {x}, {sum_};"]
    lines += ["mov.b32 {l, h}, s0;", "cvt.f32.f16 f, l;", "cvt.f32.f16 g, h;", "add.f32 f, f, g;"]
    lines += ["mov.b32 {l, h}, s1;", "cvt.f32.f16 g, l;", "add.f32 f, f, g;", "cvt.f32.f16 g, h;", "add.f32 $0, f, g;"]
    return "{" + "\n".join(lines) + "}"


UNPACK_BF16 = tl.constexpr(unpack_asm(6, "fma.rn.bf16x2 {}, {}, {}, z;"))
UNPACK_FP16 = tl.constexpr(unpack_asm(3, "mul.rn.f16x2 {}, {}, {};"))
DOT_ASM = tl.constexpr(dot_asm())


@triton.jit
def e8m0(scale):
    """Scales in fp32; that of byte 0 is 0."""
    return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_factors(scale, DTYPE: tl.constexpr, USE_ASM: tl.constexpr):
    """By what `unpack_tile` multiplies: 2 ** (scale - 127) and the difference of the biases, in DTYPE."""
    scale = scale.to(tl.int32)
    if DTYPE == tl.float16:  # 2 ** (scale - 113)  # noqa: SIM300
        return (tl.maximum(scale - 98, 0) << 10).to(tl.int16).to(tl.float16, bitcast=True)
    elif USE_ASM:  # 2 ** (scale - 1)
        return ((scale + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return ((scale + 14) << 23).to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def widen(codes):
    """e2m1 in the lower half of bytes as fp16, times 2^-14."""
    codes = codes.to(tl.int16)
    return (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def unpack_tile(data, scale, DTYPE: tl.constexpr, USE_ASM: tl.constexpr):
    """The lower and the upper numbers of bytes [N, B], times their scales e8m0 [N, B / 16], in DTYPE [N, B] each.

    USE_ASM: in 16 bits on NVIDIA GPUs.
    """
    B: tl.constexpr = data.shape[1]
    factor = scale_factors(scale, DTYPE, USE_ASM)[:, :, None].broadcast_to((data.shape[0], B // 16, 16))
    factor = factor.reshape((data.shape[0], B))
    if not USE_ASM:
        return widen(data & 15).to(DTYPE) * factor, widen(data >> 4).to(DTYPE) * factor
    elif DTYPE == tl.bfloat16:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            UNPACK_BF16, "=r,=r,=r,=r,r,r,r", [data, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            UNPACK_FP16, "=r,=r,=r,=r,r,r,r", [data, factor], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )


@triton.jit
def load_quads(ptr, offs, mask, IS_BF16: tl.constexpr):
    """8 channels of each vector, of pairs, in fp32 [V, 2] each: channels 0 and 4, 2 and 6, 1 and 5, 3 and 7."""
    even, odd = unpack(tl.load(ptr + offs, mask=mask, other=0), IS_BF16)
    even_0, even_2 = tl.split(even.reshape(even.shape[0], 2, 2))
    odd_1, odd_3 = tl.split(odd.reshape(odd.shape[0], 2, 2))
    return even_0, even_2, odd_1, odd_3


@triton.jit
def largest_of(quads):
    even_0, even_2, odd_1, odd_3 = quads
    largest = tl.maximum(tl.maximum(tl.abs(even_0), tl.abs(even_2)), tl.maximum(tl.abs(odd_1), tl.abs(odd_3)))
    return tl.max(largest, axis=1)


@triton.jit
def pack_quads(quads, shrink):
    """As pairs of fp16, int32 [V, 1] each: of channels 0 and 2, 4 and 6, 1 and 3, 5 and 7."""
    even_0, even_2, odd_1, odd_3 = quads
    e_0, e_1 = tl.split(pack(even_0 * shrink, even_2 * shrink)[:, None, :])
    o_0, o_1 = tl.split(pack(odd_1 * shrink, odd_3 * shrink)[:, None, :])
    return e_0, e_1, o_0, o_1


@triton.jit
def dot_mxfp4(x_ptr, channel, mask, weight, IS_BF16: tl.constexpr):
    """Dot products fp32 [V, N] of vectors of 32 channels: x of pairs, from the even channels [V, 1] on where mask
    [V, 1], and e2m1 weight, int32 [V, N, 4] of eights. In fp16; each vector of x has a power of two of its own, as in
    linear/gemv.py.
    """
    offs = channel // 2 + tl.arange(0, 4)[None, :]
    a = load_quads(x_ptr, offs, mask, IS_BF16)
    b = load_quads(x_ptr, offs + 4, mask, IS_BF16)
    c = load_quads(x_ptr, offs + 8, mask, IS_BF16)
    d = load_quads(x_ptr, offs + 12, mask, IS_BF16)
    largest = tl.maximum(tl.maximum(largest_of(a), largest_of(b)), tl.maximum(largest_of(c), largest_of(d)))
    # The largest becomes 2^13 to 2^14, so sums of 16 products with numbers up to 6 * 2^-14 are below 96.
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 17 << 23)
    shrink = ((254 << 23) - exponent).to(tl.float32, bitcast=True)[:, None] * 8192.0
    ea_0, ea_1, oa_0, oa_1 = pack_quads(a, shrink)
    eb_0, eb_1, ob_0, ob_1 = pack_quads(b, shrink)
    ec_0, ec_1, oc_0, oc_1 = pack_quads(c, shrink)
    ed_0, ed_1, od_0, od_1 = pack_quads(d, shrink)
    w_02, w_13 = tl.split(weight.reshape(weight.shape[0], weight.shape[1], 2, 2))
    w_0, w_2 = tl.split(w_02)
    w_1, w_3 = tl.split(w_13)
    dot = tl.inline_asm_elementwise(
        DOT_ASM, "=f" + ",r" * 20,
        [w_0, w_1, w_2, w_3, ea_0, ea_1, eb_0, eb_1, oa_0, oa_1, ob_0, ob_1,
         ec_0, ec_1, ed_0, ed_1, oc_0, oc_1, od_0, od_1],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return dot * (exponent.to(tl.float32, bitcast=True)[:, None] * 2.0)


@triton.jit
def dot_mxfp4_plain(x_ptr, channel, mask, weight):
    """The same of x as it is and bytes [V, N, 16], in fp32."""
    c = channel + tl.arange(0, 16)[None, :]
    lower = tl.load(x_ptr + c, mask=mask, other=0.0).to(tl.float32)
    upper = tl.load(x_ptr + c + 16, mask=mask, other=0.0).to(tl.float32)
    products = lower[:, None, :] * widen(weight & 15).to(tl.float32)
    return tl.sum(products + upper[:, None, :] * widen(weight >> 4).to(tl.float32), axis=2) * 16384.0

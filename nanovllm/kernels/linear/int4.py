"""Triton: products with weights of 4-bit integers (../int4.py), and such a weight in 16 bits.

Owns `fused_linear` of these: the choice of kernel by the number of tokens, fewer than MIN_TOKENS_DENSE or not.

    1          GEMV over packed words, with norm, bias, activation and residual fused in
    2 to 64    tiles that are unpacked in registers; programs share the channels, and a sum over them follows
    more       dequantized, then as 16 bits

A code becomes a number by bits: 0x4300 | code is 128 + code in bf16, 0x6400 | code is 1024 + code in fp16, both exact;
so is the difference to 128 or 1024 and the zero. Scales multiply sums of a group, in fp32. On NVIDIA GPUs in PTX, two
numbers at once: channels i and i + 4 of a word. In the GEMV sums of eight products are in fp16, with a power of two for
each vector of 32 channels of the token, as in gemv.py. Weights with smaller groups are dequantized.

T tokens, N output features, C input channels, G groups; I outputs: N, or N / 2 with act_mul; V vectors of a step.
"""

import torch
import triton
import triton.language as tl

from ..int4 import CODES
from ..launch import has_inline_asm, launch, launch_options, num_sms, pdl_launch_dependents, pdl_wait
from ..moe.grouped_gemm import sum_rows
from .gemv import activate, output_features, pack, split_four
from .norm import SplitKPartials, rms_norm
from .reference import Weight
from .silu_and_mul import act_and_mul

VECTOR = 32  # channels that a thread of the GEMV loads at once; they have one scale
MIN_TOKENS_DENSE = 65
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


def group_of(weight):
    """Channels of a group."""
    return weight.num_channels // weight.scale.shape[-1]


def uses_asm(x):
    return has_inline_asm(x.device) and x.element_size() == 2


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
        x = x[:, weight.order]
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

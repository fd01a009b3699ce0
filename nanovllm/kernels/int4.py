"""Weights of 4-bit integers: a number is (code - zero) * scale, with a code of 0 to 15, scale and zero of its group.

A group is one of the equal parts of a row's channels. A word of 32 bits has the codes of 8 channels: channel 8w + i at
bits 4i of word w. Activations stay in their own dtype (W4A16).
"""

from functools import cache

import torch

CODES = 8  # in a word
MIDDLE = 8  # the zero of a symmetric weight
# What torch's product of 4-bit weights on the CPU takes. In fp32 and fp16 it takes 25 times as long as in bf16.
CPU_GROUPS, CPU_FEATURES, CPU_DTYPE = (256, 128, 64, 32), 16, torch.bfloat16
# Tokens up to which it is faster than dequantizing the weight, which takes 0.5 ns a number.
MAX_TOKENS_CPU = 48


def codes_of(words, bits=4):
    """Unpack words int32 [..., C * bits / 32] to codes uint8 [..., C], the first from the lowest bits. Bits: 4 or 8."""
    bytes_ = words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)  # a single column may have any stride
    return bytes_ if bits == 8 else torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)


def packed(codes):
    """The inverse of `codes_of` for 4 bits; codes uint8 [..., C], C a multiple of 8."""
    bytes_ = codes[..., 0::2] | codes[..., 1::2] << 4
    return bytes_.contiguous().view(torch.int32)


def dequantized(words, scale, zero, dtype):
    """Numbers [..., N, C] in `dtype`, of words int32 [..., N, C / 8], scale [..., N, G] and zero int8 likewise or None.

    Without a zero it is 8. Differences of code and zero are exact in 16 bits, products with the scale are rounded once.
    """
    table = pairs(dtype, words.device, MIDDLE if zero is None else 0)
    codes = table.index_select(0, words.view(torch.uint8).flatten().int()).view(dtype)
    groups = codes.view(*scale.shape, -1)
    if zero is not None:
        groups -= zero.to(dtype).unsqueeze(-1)
    return groups.mul_(scale.to(dtype).unsqueeze(-1)).flatten(-2)


@cache
def pairs(dtype, device, zero):
    """Both numbers of each byte, less `zero`, as one integer, which is looked up faster than two are shifted."""
    byte = torch.arange(256, device=device)
    both = torch.stack((byte & 15, byte >> 4), -1) - zero
    return both.to(dtype).view(torch.int64 if dtype.itemsize == 4 else torch.int32).flatten()


def pack(words, scale, zero):
    """Weight and scales as torch's product on the CPU takes them, with the channels of a group; None where it has none.

    It adds to each number -zero * scale, rounded to bf16.
    """
    num_features, num_channels = words.shape[0], words.shape[1] * CODES
    size = next((size for size in CPU_GROUPS if num_channels // scale.shape[1] % size == 0), 0)
    is_x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not (is_x86 and size and num_features % CPU_FEATURES == 0 and scale.dtype == CPU_DTYPE):
        return None
    data = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_of(words).int(), 1)
    offset = torch.zeros_like(scale) if zero is None else (MIDDLE - zero.float()) * scale
    spread = num_channels // size // scale.shape[1]
    both = torch.stack((scale, offset.to(scale.dtype)), -1).repeat_interleave(spread, 1)
    return data, both.transpose(0, 1).contiguous(), size


def linear(x, weight, bias):
    """x [T, C] times the transpose of a Weight with the copy of `pack`, plus bias: [T, N]."""
    if len(x) > MAX_TOKENS_CPU:
        return torch.nn.functional.linear(x, weight.dequantize(x.dtype), bias)
    data, scales, size = weight.packed
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), data, size, scales)
    return y if bias is None else y + bias

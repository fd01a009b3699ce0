"""Weights of 4-bit integers: a number is (code - zero) * scale; codes are 0 to 15, and a group shares scale and zero.

A group is one of the equal parts of a row's channels. A word of 32 bits has 8 codes, code n at bits 4n. Activations
stay in their own dtype (W4A16).

Channels are stored in the order in which tensor cores take them from the registers of four threads: see `channels_of`.
"""

from functools import cache

import torch

CODES = 8  # codes in a word
MAX_TILE, MIN_TILE = 128, 32  # channels
MIDDLE = 8  # the zero of a symmetric weight
# Shapes and dtype that torch's 4-bit product on the CPU takes. fp32 and fp16 take 25 times as long as bf16.
CPU_GROUPS, CPU_FEATURES, CPU_DTYPE = (256, 128, 64, 32), 16, torch.bfloat16
# Up to this many tokens it is faster than dequantizing the weight, which takes 0.5 ns a number.
MAX_TOKENS_CPU = 48


def tile_of(group):
    """Channels of a tile: the largest power of two that divides a group, up to 128. Below 32 the channels keep their
    order."""
    return min(MAX_TILE, group & -group)


def tiled(codes, tile):
    """Codes [..., C] in the order of `channels_of`."""
    if tile < MIN_TILE:
        return codes
    return codes.unflatten(-1, (-1, tile // 32, 4, 4, 2)).movedim(-2, -4).transpose(-1, -2).flatten(-5)


@cache
def channels_of(num_channels, tile, device):
    """The channel at each place, i64 [C].

    In a tile, code i of word b of thread t is channel 32b + 8i + 2t, and code i + 4 is the next channel. A thread's
    words are neighbours.
    """
    return tiled(torch.arange(num_channels, device=device), tile)


def codes_of(words, bits=4):
    """Unpack words int32 [..., C * bits / 32] to codes uint8 [..., C], the first from the lowest bits. Bits: 4 or 8."""
    bytes_ = words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)  # a single column may have any stride
    return bytes_ if bits == 8 else torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)


def words_of(codes, tile):
    """Pack codes uint8 [..., C], C a multiple of 8, into words int32 [..., C / 8], in tiles."""
    codes = tiled(codes, tile)
    bytes_ = codes[..., 0::2] | codes[..., 1::2] << 4
    return bytes_.contiguous().view(torch.int32)


def dequantized(words, scale, zero, dtype):
    """Numbers [..., N, C] in `dtype`, of words int32 [..., N, C / 8], scale [..., N, G] and zero int8 likewise or None.

    Channels are in the order of the words. A missing zero is 8. Differences of code and zero are exact in 16 bits;
    products with the scale are rounded once.
    """
    table = pairs(dtype, words.device, MIDDLE if zero is None else 0)
    codes = table.index_select(0, words.view(torch.uint8).flatten().int()).view(dtype)
    groups = codes.view(*scale.shape, -1)
    if zero is not None:
        groups -= zero.to(dtype).unsqueeze(-1)
    return groups.mul_(scale.to(dtype).unsqueeze(-1)).flatten(-2)


@cache
def pairs(dtype, device, zero):
    """Table of each byte's two numbers, less `zero`, as one integer: one lookup is faster than two shifts."""
    byte = torch.arange(256, device=device)
    both = torch.stack((byte & 15, byte >> 4), -1) - zero
    return both.to(dtype).view(torch.int64 if dtype.itemsize == 4 else torch.int32).flatten()


def pack(words, scale, zero):
    """Weight and scales as torch's CPU product takes them, with the channels of a group; None if it cannot take them.

    The product adds -zero * scale, rounded to bf16, to each number.
    """
    num_features, num_channels = words.shape[0], words.shape[1] * CODES
    size = next((size for size in CPU_GROUPS if num_channels // scale.shape[1] % size == 0), 0)
    is_x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not (is_x86 and size and num_features % CPU_FEATURES == 0 and scale.dtype == CPU_DTYPE):
        return None
    codes = torch.empty(num_features, num_channels, dtype=torch.int32)
    codes[:, channels_of(num_channels, tile_of(num_channels // scale.shape[1]), codes.device)] = codes_of(words).int()
    data = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    offset = torch.zeros_like(scale) if zero is None else (MIDDLE - zero.float()) * scale
    spread = num_channels // size // scale.shape[1]
    both = torch.stack((scale, offset.to(scale.dtype)), -1).repeat_interleave(spread, 1)
    return data, both.transpose(0, 1).contiguous(), size


def linear(x, weight, bias):
    """x [T, C] times the transpose of a Weight, plus bias: [T, N]; few tokens use the copy made by `pack`."""
    if weight.packed is None or len(x) > MAX_TOKENS_CPU:
        numbers = dequantized(weight.data, weight.scale, weight.zero, x.dtype)
        x = x.gather(1, weight.channels.expand(len(x), -1))  # in a quarter of index_select's time
        return torch.nn.functional.linear(x, numbers, bias)
    data, scales, size = weight.packed
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), data, size, scales)
    return y if bias is None else y + bias

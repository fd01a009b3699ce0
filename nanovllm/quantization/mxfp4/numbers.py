"""MXFP4, the 4-bit format of experts (OCP Microscaling Formats 1.0): e2m1 numbers, 32 channels of a row with one scale.

e2m1 is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A scale is e8m0: a byte b is
2 ** (b - 127). A word of 32 bits has 8 consecutive channels: channel 2i is number i, counted from the lowest bit, and
channel 2i + 1 is number 4 + i, so that one shift moves a pair to the same place of both half words. Scales are
transposed: a row of scales has one group of 32 channels for all features, so a tile loads many at once.
"""

import torch

from nanovllm.quantization.mxfp4.rules import GROUP

MAX_SCALE = 128  # above it, numbers times 2 ** (b - 1), as kernels compute them in bf16, overflow; 255 is NaN
MAGNITUDES = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0


def repacked(blocks):
    """Convert published bytes [..., 16] of 32 channels to this order; published byte j has channels 2j and 2j + 1."""
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).unflatten(-2, (4, 4))  # [..., word, i, 2]
    codes = pairs.mT.flatten(-3)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def dequantized(data, scale, dtype):
    """Dequantize uint8 data [..., N, C / 2] with scales [..., C / 32, N] to [..., N, C] in `dtype`."""
    wide = torch.float32 if dtype == torch.float16 else dtype  # in bf16 products are exact
    numbers = torch.tensor([sign * x for sign in (1, -1) for x in MAGNITUDES], dtype=wide, device=data.device)
    words = torch.stack((data & 15, data >> 4), -1).flatten(-2).unflatten(-1, (-1, 2, 4))  # [..., N, C / 8, 2, i]
    codes = words.mT.flatten(-3).unflatten(-1, (-1, GROUP))  # [..., N, C / 32, 32]
    values = numbers.index_select(0, codes.flatten().int()).view(codes.shape)
    scale = scale.mT.int() - 127
    factors = torch.ldexp(torch.ones(scale.shape, device=data.device), scale)
    return values.mul_(factors.to(wide).unsqueeze(-1)).flatten(-2).to(dtype)

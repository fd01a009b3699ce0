"""NVFP4 numbers: an e2m1 code times a scale of 16 channels times the feature's factor, fp32.

e2m1 is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Published scales are e4m3
without sign. Here a scale is bits 14 to 7 of the same number in fp16, five of exponent and three of mantissa: shifts
and one addition make it bf16 or fp16 on every GPU, subnormal e4m3 included. The product of code and scale has at most
six significant bits, so it is exact in 16 bits. A group whose scale is 0 has zeros for codes.

Eight codes are in a word of 32 bits, in the order of 4-bit integers (``../int4/numbers.py``) and in tiles that several
groups share. Each half word has magnitudes and signs of four codes apart, where kernels move them at least cost. Scales
are in the order of the channels.
"""

import torch

from nanovllm.quantization.int4.numbers import channels_of, tiled
from nanovllm.quantization.mxfp4.numbers import MAGNITUDES

GROUP = 16  # channels of a scale
ONE = 0x78  # the scale 1.0
MAGNITUDE_BITS, SIGN_BITS = (6, 3, 0, 9), (15, 12, 13, 14)  # lowest bits of the four codes in a half word
TILES = 128, 64  # channels; a thread needs the scales of whole words of four


def tile_of(num_channels):
    """Channels of a tile; the channels of a row that no tile divides keep their order."""
    return next((tile for tile in TILES if num_channels % tile == 0), GROUP)


def stored(scale):
    """Encode scales >= 0 as bytes; exact for e4m3, and for powers of two from 2^-14 to 2^8."""
    return (scale.half().view(torch.int16) >> 7).to(torch.uint8)


def scales_of(data):
    """Decode bytes to fp32."""
    return (data.to(torch.int16) << 7).view(torch.float16).float()


def magnitudes(device):
    """The number of each code, fp32 [16]."""
    return torch.tensor([sign * x for sign in (1, -1) for x in MAGNITUDES], device=device)


def words_of(codes, tile):
    """Pack codes uint8 [..., C], C a multiple of 8, into words int32 [..., C / 8], in tiles."""
    codes = tiled(codes, tile).unflatten(-1, (-1, 4)).int()
    halves = 0
    for i, places in enumerate(zip(MAGNITUDE_BITS, SIGN_BITS, strict=True)):
        of_magnitude, of_sign = places
        halves = halves | (codes[..., i] & 7) << of_magnitude | (codes[..., i] >> 3) << of_sign
    return halves.to(torch.int16).view(torch.int32)


def codes_of(words, tile):
    """Unpack words int32 [..., N, C / 8] to codes int32 [..., N, C] in the order of the channels."""
    halves = words.contiguous().view(torch.int16).int()
    codes = [halves >> magnitude & 7 | (halves >> sign & 1) << 3 for magnitude, sign in zip(
        MAGNITUDE_BITS, SIGN_BITS, strict=True,
    )]  # fmt: skip
    codes = torch.stack(codes, -1).flatten(-2)
    place = torch.empty_like(channels_of(codes.shape[-1], tile, words.device))
    place[channels_of(codes.shape[-1], tile, words.device)] = torch.arange(len(place), device=words.device)
    return codes.index_select(-1, place)


def dequantized(words, scale, factor, dtype):
    """Numbers [..., N, C] in ``dtype``; words int32 [..., N, C / 8], scale uint8 [..., N, C / 16], factor [..., N, 1].

    They are rounded to fp32 twice, as by ModelOpt: the product of scale and factor, and that with the code.
    """
    codes = codes_of(words, tile_of(words.shape[-1] * 8))
    numbers = magnitudes(words.device).index_select(0, codes.flatten()).view(*scale.shape, GROUP)
    return numbers.mul_((scales_of(scale) * factor).unsqueeze(-1)).flatten(-2).to(dtype)

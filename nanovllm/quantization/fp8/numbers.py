"""The 8-bit floating-point format of weights, tokens and the KV cache: e4m3, which has NaN but no infinity.

A number is stored as data * scale, scale in fp32. A quantizer either chooses scales so that no number exceeds the
largest e4m3, or saturates: torch converts a larger number to NaN.
"""

import torch
import torch.nn.functional as F

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MIN_SCALE = 1e-12  # scale of a group of zeros
ROWS_BYTES = 64 << 20  # fp32 values held at once: a running engine has little room


def quantize(weight: torch.Tensor, block: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, C] -> data (e4m3) [n, C] and scale (fp32) [ceil(n / block), ceil(C / block)], or [n, 1] without a block.

    scale = max|w| / 448 of each block or row, data = w / scale rounded to nearest.
    """
    n, C = weight.shape
    height, width = (block, block) if block else (1, C)
    data = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    scale = torch.empty(-(-n // height), -(-C // width), dtype=torch.float32, device=weight.device)
    step = max(1, ROWS_BYTES // (4 * C * height))  # rows of scales
    for i in range(0, len(scale), step):
        rows = slice(i * height, (i + step) * height)
        wide = weight[rows].float()
        padded = F.pad(wide, (0, -C % width, 0, -len(wide) % height))
        blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        # not / E4M3_MAX, which a GPU rounds otherwise than a CPU: it multiplies by the reciprocal of a number
        spread = scale[i : i + step] = (blocks.abs().amax(dim=(1, 3)) * (1 / E4M3_MAX)).clamp_(min=MIN_SCALE)
        if block:
            spread = spread.repeat_interleave(block, 0)[: len(wide)].repeat_interleave(block, 1)[:, :C]
        data[rows] = (wide / spread).to(E4M3)
    return data, scale


def dequantized(data, scale, dtype):
    """Numbers [..., N, C] in `dtype` of data [..., N, C], scale [..., N, G]."""
    groups = widened(data).unflatten(-1, (scale.shape[-1], -1))
    return groups.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)


def widened(data):
    """A copy in fp32. torch's own conversion of e4m3 takes 10 ns a number on the CPU, a table 2."""
    if data.dtype != E4M3 or data.device.type != "cpu":
        return data.to(torch.float32, copy=True)
    table = torch.arange(256, dtype=torch.uint8, device="cpu").view(data.dtype).float()
    return table.index_select(0, data.view(torch.uint8).flatten().int()).view(data.shape)

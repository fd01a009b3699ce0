"""FP8 weights on their way from a checkpoint: 16-bit tensors are quantized, published scales brought to one form.

Here a weight is data (e4m3) [N, C] times scale (fp32) [N, G], a scale for each of G groups of channels of an output
feature. G is 1, or the groups are those of published blocks, smaller where blocks would be cut: by the end of the
tensor or by a shard of it. With blocks, ``shared_rows`` features share their scales, whatever fills the weight: kernels
are chosen, and CUDA graphs captured, before that. Knows nothing of layers; ``kernels/linear/reference.py`` says what is
computed.

Legend: N output features, C input channels, both of a checkpoint tensor; a lazy tensor is one of ``loader.py``.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.kernels.fp8 import E4M3, E4M3_MAX
from nanovllm.quantization import BLOCK

MIN_SCALE = 1e-12  # of a group of zeros
ROWS_BYTES = 64 << 20  # of fp32 values at once: an engine that runs has little room


def new_weight(output_size: int, input_size: int, block: int | None) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Uninitialised data and scale of a linear layer; ``block`` as in ``FP8Weights``, None: a weight without a scale.

    ``data.scale`` is the scale. ``scale.group_size``: its channels, as many as divide both a block and this rank's
    channels; 0: all of them.
    """
    if block is None:
        return nn.Parameter(torch.empty(output_size, input_size), requires_grad=False), None
    group_size = math.gcd(block, input_size) if block else 0
    num_groups = input_size // group_size if group_size else 1
    data = nn.Parameter(torch.empty(output_size, input_size, dtype=E4M3), requires_grad=False)
    scale = nn.Parameter(torch.empty(output_size, num_groups, dtype=torch.float32), requires_grad=False)
    data.scale, scale.group_size = scale, group_size  # type: ignore[attr-defined]
    return data, scale


def shared_rows(block: int | None, parts: list[int]) -> int:
    """How many consecutive output features of a rank's weight share their scales; 1 without blocks.

    ``parts``: rows of this rank of each checkpoint tensor that the weight has one after the other; a shard begins at a
    multiple of them. ``block`` as in ``FP8Weights``.
    """
    return math.gcd(block, *parts) if block else 1


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


class Quantized:
    """FP8 data and scale of a lazy 16-bit tensor, by rows as they are read: a rank reads and quantizes its own.

    Scales are those of the tensor's rows or blocks whatever the shard, so ranks have the numbers of a single one.
    """

    def __init__(self, lazy: Any, block: int, name: str, device: torch.device):
        self.lazy, self.block, self.name, self.device = lazy, block, name, device
        self._made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def rows(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [start : stop] of the scales, behind the data that they scale."""
        if (start, stop) not in self._made:
            height = self.block or 1
            weight = self.lazy[start * height : stop * height,]
            check_is(weight, torch.bfloat16, self.name)
            self._made[start, stop] = quantize(weight.to(self.device), self.block)
        return self._made[start, stop]

    def part(self, which: int) -> "QuantizedPart":
        """0: the data, 1: the scale."""
        return QuantizedPart(self, which)


class QuantizedPart:
    """The data, or the scale, of a ``Quantized``, as a lazy tensor."""

    def __init__(self, whole: Quantized, which: int):
        self.whole, self.which = whole, which

    def get_shape(self) -> list[int]:
        N, C = self.whole.lazy.get_shape()
        block = self.whole.block
        return [N, C] if self.which == 0 else [-(-N // (block or 1)), -(-C // (block or C))]

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        start, stop, _ = index[0].indices(self.get_shape()[0])
        height = self.whole.block or 1 if self.which == 0 else 1
        first = start // height
        part = self.whole.rows(first, -(-stop // height))[self.which]
        return part[(slice(start - first * height, stop - first * height), *index[1:])]


class Scales:
    """A lazy tensor of scales as a checkpoint has them, of rows ``[start : start + count]`` of ``total``.

    One for the tensor; or one for each row, [N] or [N, 1]; with blocks [ceil(N / 128), ceil(C / 128)] instead. The last
    blocks may be partial.
    """

    def __init__(self, lazy: Any, group_size: int, rows: tuple[int, int, int] | None = None):
        self.lazy, self.group_size, self.rows = lazy, group_size, rows

    def part(self, start: int, count: int, total: int) -> "Scales":
        return Scales(self.lazy, self.group_size, (start, count, total))

    def fit(self, name: str, shape: list[int]) -> "FittedScales":
        """As a lazy tensor of this shape, [N, number of groups over all ranks]."""
        start, count, total = self.rows or (0, shape[0], shape[0])
        if count != shape[0]:  # a part has another layer's rows
            raise CheckpointError(f"tensor {name!r} scales {count} rows, expected {shape[0]}.")
        given = list(self.lazy.get_shape())
        blocks = -(-shape[1] * self.group_size // BLOCK)
        forms: list[list[int]] = [[], [1], [1, 1]]
        forms += [[-(-total // BLOCK), blocks]] if self.group_size else [[total], [total, 1]]
        if given not in forms:
            hint = ", for quantization_config has blocks of 128 x 128" if self.group_size else ""
            raise CheckpointError(f"tensor {name!r} has shape {given}, expected [1] or {forms[-1]}{hint}.")
        return FittedScales(self, name, shape, start)


class FittedScales:
    """See ``Scales.fit``."""

    def __init__(self, scales: Scales, name: str, shape: list[int], start: int):
        self.scales, self.name, self.shape, self.start = scales, name, shape, start

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """fp32; index is of rows, or of rows and groups."""
        lazy, group_size = self.scales.lazy, self.scales.group_size
        ranges = [range(*part.indices(size)) for part, size in zip(index, self.shape, strict=False)]
        rows, groups = ranges if len(ranges) == 2 else (ranges[0], range(self.shape[1]))
        begin, end = self.start + rows.start, self.start + rows.stop
        given, height = lazy.get_shape(), BLOCK if group_size else 1
        is_one = math.prod(given) == 1
        first, last = (0, 1) if is_one else (begin // height, -(-end // height))
        grid = lazy[first:last,] if given else lazy[...]
        check_is(grid, torch.float32, self.name)
        grid = grid.reshape(1 if is_one else len(grid), -1).float()
        if len(grid) == 1:
            grid = grid.expand(len(rows), -1)
        else:
            grid = grid[torch.arange(begin, end, device=grid.device) // height - first]
        if grid.shape[1] == 1:
            return grid.expand(-1, len(groups))
        columns = torch.arange(groups.start, groups.stop, device=grid.device) * group_size // BLOCK
        return grid[:, columns]


def check_is(tensor: torch.Tensor, wanted: torch.dtype, name: str) -> None:
    """Raise CheckpointError unless ``tensor`` can be copied to ``wanted``: e4m3 bits and numbers do not mix, and
    integers (quantized otherwise) would be converted without an error.
    """
    dtype, is_float = tensor.dtype, tensor.is_floating_point() and tensor.dtype.itemsize > 1
    if dtype == wanted or (is_float and wanted != E4M3):
        return
    given, expected = (str(x).removeprefix("torch.") for x in (dtype, wanted))
    expected = expected if wanted == E4M3 else "floats"
    hint = " This layer is not FP8 here." if dtype == E4M3 else ""
    if wanted == E4M3 and is_float:
        hint = " quantization_config in config.json does not leave it out."
    raise CheckpointError(f"tensor {name!r} is of {given}, expected {expected}.{hint}")

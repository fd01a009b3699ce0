"""FP8 weights on their way from a checkpoint: 16-bit tensors are quantized, published scales brought to one form.

Here a weight is data (e4m3) [N, C] times scale (fp32) [N, G], a scale for each of G groups of channels of an output
feature. G is 1, or the groups are those of published blocks, smaller where blocks would be cut: by the end of the
tensor or by a shard of it. Knows nothing of layers; ``kernels/linear/reference.py`` says what is computed.

Legend: N output features, C input channels, both of a checkpoint tensor; a lazy tensor is one of ``loader.py``.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.quantization import BLOCK

E4M3 = torch.float8_e4m3fn
MAX = 448.0  # the largest e4m3
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


def quantize(weight: torch.Tensor, block: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, C] -> data (e4m3) [n, C] and scale (fp32) [n, ceil(C / block)], or [n, 1] without a block.

    scale = max|w| / 448 of each group, data = w / scale rounded to nearest.
    """
    C = weight.shape[1]
    size = block or C
    data = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    scale = torch.empty(len(weight), -(-C // size), dtype=torch.float32, device=weight.device)
    num_rows = max(1, ROWS_BYTES // (4 * C))
    for rows in (slice(start, start + num_rows) for start in range(0, len(weight), num_rows)):
        wide = weight[rows].float()
        groups = F.pad(wide, (0, -C % size)).unflatten(1, (-1, size))
        # not / MAX, which a GPU rounds otherwise than a CPU: it multiplies by the reciprocal of a number
        scale[rows] = (groups.abs().amax(dim=2) * (1 / MAX)).clamp_(min=MIN_SCALE)
        spread = scale[rows].repeat_interleave(size, dim=1)[:, :C] if block else scale[rows]
        data[rows] = (wide / spread).to(E4M3)
    return data, scale


class Quantized:
    """FP8 data and scale of a lazy 16-bit tensor, by rows as they are read: a rank reads and quantizes its own.

    Scales are those of whole rows whatever a shard of the columns, so ranks have the numbers of a single one.
    """

    def __init__(self, lazy: Any, block: int, name: str, device: torch.device):
        self.lazy, self.block, self.name, self.device = lazy, block, name, device
        self._made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def rows(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        start, stop, _ = rows.indices(self.lazy.get_shape()[0])
        if (start, stop) not in self._made:
            weight = self.lazy[start:stop,]
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
        return [N, C if self.which == 0 else -(-C // (self.whole.block or C))]

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        return self.whole.rows(index[0])[self.which][(slice(None), *index[1:])]


class Scales:
    """A lazy tensor of scales as a checkpoint has them, of rows ``[start : start + count]`` of ``total``.

    One for the tensor; one for each row, [N] or [N, 1]; of blocks [ceil(N / 128), ceil(C / 128)], or of the blocks of
    each row [N, ceil(C / 128)]. The last blocks may be partial.
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
        forms: list[list[int]] = [[], [1], [1, 1], [total], [total, 1]]
        if self.group_size:
            forms += [[total, blocks], [-(-total // BLOCK), blocks]]
        if given not in forms:
            allowed = " or ".join(map(str, forms[1:2] + forms[4:]))
            raise CheckpointError(f"tensor {name!r} has shape {given}, expected {allowed}.")
        return FittedScales(self, name, shape, start, per_row=given[:1] == [total])


class FittedScales:
    """See ``Scales.fit``."""

    def __init__(self, scales: Scales, name: str, shape: list[int], start: int, per_row: bool):
        self.scales, self.name, self.shape, self.start, self.per_row = scales, name, shape, start, per_row

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """fp32; index is of rows, or of rows and groups."""
        lazy, group_size = self.scales.lazy, self.scales.group_size
        ranges = [range(*part.indices(size)) for part, size in zip(index, self.shape, strict=False)]
        rows, groups = ranges if len(ranges) == 2 else (ranges[0], range(self.shape[1]))
        begin, end = self.start + rows.start, self.start + rows.stop
        if not self.per_row:
            grid = lazy[...]
            check_is(grid, torch.float32, self.name)
            grid = grid.reshape(grid.shape if grid.dim() == 2 else (1, 1)).float()
            of_rows = torch.arange(begin, end, device=grid.device) // BLOCK if len(grid) > 1 else None
            grid = grid.expand(len(rows), -1) if of_rows is None else grid[of_rows]
        else:
            grid = lazy[begin:end,]
            check_is(grid, torch.float32, self.name)
            grid = grid.reshape(len(rows), -1).float()
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

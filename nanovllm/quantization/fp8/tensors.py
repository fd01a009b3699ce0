"""FP8 weights: their parameters, and the checkpoint tensors that fill them, FP8 of each published form or 16 bits.

A weight is data (e4m3) [N, C] times scale (fp32) [N, G], a scale for each of G groups of channels of an output feature.
G is 1, or the groups are published blocks, smaller where blocks would be cut: by the end of the tensor or by a shard of
it. Scales of an FP8 KV cache are read here, too.

Legend: N output features, C input channels: of this rank in a parameter, of all in a checkpoint tensor.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.quantization.fp8.numbers import E4M3, quantize
from nanovllm.quantization.fp8.rules import Fp8
from nanovllm.utils.checkpoint_tensor import CheckpointTensor, check_dtype

RANDOM_STD, RANDOM_ROWS = 64.0, 1024  # standard deviation of random data, where e4m3 ends at 448; rows drawn at once


def new_weight(output_size: int, input_size: int, scheme: Fp8, *experts: int) -> dict[str, Any]:
    """Data and scale, uninitialised.

    ``data.scale`` is the scale, ``scale.block`` the scheme's block. ``scale.group_size`` is the number of channels of a
    scale, the largest that divides both a block and this rank's channels; 0: all of them.
    """
    group_size = math.gcd(scheme.block, input_size) if scheme.block else 0
    num_groups = input_size // group_size if group_size else 1
    data = nn.Parameter(torch.empty(*experts, output_size, input_size, dtype=E4M3), requires_grad=False)
    scale = nn.Parameter(torch.empty(*experts, output_size, num_groups, dtype=torch.float32), requires_grad=False)
    data.scale, scale.group_size, scale.block = scale, group_size, scheme.block  # type: ignore[attr-defined]
    return {"": data, "_scale": scale}


def randomize(name: str, param: Any, std: float, generator: torch.Generator) -> bool:
    """Fill a parameter with random numbers; False: it is not of this format.

    Data are drawn in pieces, so that the device never holds them in another type.
    """
    if hasattr(param, "group_size"):
        param.fill_(std / RANDOM_STD)
        return True
    if param.dtype != E4M3:
        return False
    for rows in param.flatten(0, -2).split(RANDOM_ROWS):
        drawn = torch.empty(rows.shape, dtype=torch.float32, device=param.device)
        rows.copy_(drawn.normal_(0.0, RANDOM_STD, generator=generator))
    return True


def quantized(param: Any, loaded: CheckpointTensor) -> list[tuple[Any, CheckpointTensor]]:
    """Split a 16-bit tensor [N, C] into FP8 data and scale, each with its parameter.

    Rows are quantized as they are read: a rank reads and quantizes its own. Scales belong to rows or blocks of the
    whole tensor, so every rank has the numbers of a single rank.
    """
    if len(loaded.shape) != 2:
        return [(param, loaded)]  # its shape will be rejected
    (N, C), name, block = loaded.shape, loaded.name, param.scale.block
    height, width = (block, block) if block else (1, C)

    @cache
    def rows(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The data that rows [first : last] of the scales cover, and these scales."""
        weight = loaded.read((slice(first * height, last * height),))
        check_dtype(weight, torch.bfloat16, name)
        return quantize(weight.to(param.device), block)

    def read_data(index: tuple[slice, ...]) -> torch.Tensor:
        start, stop, _ = index[0].indices(N)
        first = start // height
        data, _ = rows(first, -(-stop // height))
        return data[(slice(start - first * height, stop - first * height), *index[1:])]

    def read_scale(index: tuple[slice, ...]) -> torch.Tensor:
        start, stop, _ = index[0].indices(-(-N // height))
        return rows(start, stop)[1][(slice(None), *index[1:])]

    scale = CheckpointTensor(name, [-(-N // height), -(-C // width)], read_scale)
    return [(param, CheckpointTensor(name, [N, C], read_data)), (param.scale, Scales.of_param(param.scale, scale))]


@dataclass(frozen=True)
class Scales(CheckpointTensor):
    """Scales of a checkpoint tensor, which ``fit`` spreads to the groups of a parameter.

    There is one for the whole tensor; or one per row, [N] or [N, 1]; or one per block, [ceil(N / block),
    ceil(C / block)]; the last block may be partial.
    """

    group_size: int = 0  # see ``new_weight``, as for ``block``
    block: int = 0
    part: tuple[int, int, int] | None = None  # (start, count, total): scales of these rows; None: of all rows

    @classmethod
    def of_param(cls, param: Any, loaded: CheckpointTensor) -> "Scales":
        return cls(loaded.name, loaded.shape, loaded.read, param.group_size, param.block)

    def rows(self, start: int, count: int, total: int) -> "Scales":
        return replace(self, part=(start, count, total))

    def fit(self, shape: list[int]) -> CheckpointTensor:
        """As a tensor [N, number of groups over all ranks], fp32."""
        start, count, total = self.part or (0, shape[0], shape[0])
        if count != shape[0]:  # a part has another layer's rows
            raise CheckpointError(f"tensor {self.name!r} scales {count} rows, expected {shape[0]}.")
        group_size, block = self.group_size, self.block
        forms: list[list[int]] = [[], [1], [1, 1]]
        forms += [[-(-total // block), -(-shape[1] * group_size // block)]] if block else [[total], [total, 1]]
        if self.shape not in forms:
            hint = f", for quantization_config has blocks of {block} x {block}" if block else ""
            raise CheckpointError(f"tensor {self.name!r} has shape {self.shape}, expected [1] or {forms[-1]}{hint}.")
        height, is_one = block or 1, math.prod(self.shape) == 1

        def read(index: tuple[slice, ...]) -> torch.Tensor:
            rows, groups = (range(*part.indices(n)) for part, n in zip((*index, slice(None)), shape, strict=False))
            first, last = (0, 1) if is_one else ((start + rows.start) // height, -(-(start + rows.stop) // height))
            grid = self.read((slice(first, last),) if self.shape else ...)
            check_dtype(grid, torch.float32, self.name)
            if is_one:
                return grid.float().reshape(1, 1).expand(len(rows), len(groups))
            row = torch.arange(start + rows.start, start + rows.stop, device=grid.device) // height - first
            column = torch.arange(groups.start, groups.stop, device=grid.device) * group_size // (block or 1)
            return grid.float().reshape(len(grid), -1)[row][:, column]

        return CheckpointTensor(self.name, shape, read)


def read_kv_scales(loaded: CheckpointTensor, num_kv_heads: int) -> torch.Tensor:
    """Scales of an FP8 KV cache, fp32 [num_kv_heads]: one for all heads, or one for each.

    Raises:
        CheckpointError: the tensor has another shape, or numbers that are no scales.
    """
    if math.prod(loaded.shape) not in (1, num_kv_heads):
        raise CheckpointError(f"tensor {loaded.name!r} has shape {loaded.shape}, expected [1] or [{num_kv_heads}].")
    scales = loaded.read(...)
    check_dtype(scales, torch.float32, loaded.name)
    for number in scales.flatten().tolist():
        if not 0 < number < math.inf:
            raise CheckpointError(f"tensor {loaded.name!r} has {number}, expected positive numbers.")
    return scales.float().reshape(-1).expand(num_kv_heads)

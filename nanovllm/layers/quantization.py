"""Loads quantized checkpoint tensors into the parameters of ``precision.py``.

FP8 of each published form, 16-bit tensors that become FP8 as they load, MXFP4 experts, scales of an FP8 KV cache.
``quantization/`` says which weights are quantized.

Legend: N output features, C input channels, both of a checkpoint tensor.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from nanovllm.errors import CheckpointError
from nanovllm.quantization.fp8.numbers import quantize
from nanovllm.quantization.mxfp4 import numbers as mxfp4
from nanovllm.utils.checkpoint_tensor import CheckpointTensor, check_dtype


def mxfp4_bytes(loaded: CheckpointTensor) -> CheckpointTensor:
    """Published blocks [N, C / 32, 16] as bytes [N, C / 2] of kernels; whole blocks of these may be read."""
    N, num_groups, size = loaded.shape

    def read(index: tuple[slice, ...]) -> torch.Tensor:
        rows, columns = (*index, slice(None))[:2]
        start, stop, _ = columns.indices(num_groups * size)
        assert start % size == stop % size == 0
        blocks = loaded.read((rows, slice(start // size, stop // size)))
        check_dtype(blocks, torch.uint8, loaded.name)
        return mxfp4.repacked(blocks).flatten(1)

    return CheckpointTensor(loaded.name, [N, num_groups * size], read)


def mxfp4_scales(loaded: CheckpointTensor) -> CheckpointTensor:
    """Published scales, checked where they are read: numbers that kernels can multiply by."""

    def read(index: Any) -> torch.Tensor:
        scales = loaded.read(index)
        check_dtype(scales, torch.uint8, loaded.name)
        if scales.numel() and (largest := int(scales.max())) > mxfp4.MAX_SCALE:
            raise CheckpointError(
                f"tensor {loaded.name!r} has a scale of {largest}, expected at most {mxfp4.MAX_SCALE} (2.0)."
            )
        return scales

    return CheckpointTensor(loaded.name, loaded.shape, read)


def dequantized_mxfp4(blocks: CheckpointTensor, scales: CheckpointTensor, dtype: torch.dtype) -> CheckpointTensor:
    """Dequantize all experts' blocks [E, N, C / 32, 16] and scales [E, N, C / 32] to [E, C, N], as in 16 bits."""
    scales.fit(blocks.fit([*blocks.shape[:3], mxfp4.GROUP // 2]).shape[:3])
    E, N, num_groups = scales.shape

    def read(index: tuple[slice, ...]) -> torch.Tensor:
        experts, channels, rows = (*index, slice(None), slice(None))[:3]
        data = blocks.read((experts, rows))
        check_dtype(data, torch.uint8, blocks.name)
        data = mxfp4.repacked(data).flatten(-2)
        whole = mxfp4.dequantized(data, mxfp4_scales(scales).read((experts, rows)).mT, dtype)
        return whole.mT[:, channels]

    return CheckpointTensor(blocks.name, [E, num_groups * mxfp4.GROUP, N], read)


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

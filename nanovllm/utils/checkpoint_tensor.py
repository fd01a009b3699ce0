"""A tensor of a checkpoint, lazy: only the part that is indexed is read from disk. Checks its shape and dtype."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.errors import CheckpointError

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class CheckpointTensor:
    """A lazy tensor under its name in the checkpoint."""

    name: str
    shape: list[int]  # shape of the whole tensor
    read: Callable[[Any], torch.Tensor]  # the part that an index selects: slices of the first dimensions, or ``...``

    @classmethod
    def of(cls, name: str, source: Any) -> "CheckpointTensor":
        """``source``: safetensors' PySafeSlice of an open file, or a tensor."""
        shape = source.shape if isinstance(source, torch.Tensor) else source.get_shape()
        return cls(name, list(shape), source.__getitem__)

    def is_fp8(self) -> bool:
        return bool(self.shape) and self.read((slice(1),)).dtype == E4M3

    def rows(self, start: int, count: int, total: int) -> "CheckpointTensor":
        """Rows ``[start : start + count]`` of the ``total`` that it must have."""
        self.fit([total, *self.shape[1:]])

        def read(index: tuple[slice, ...]) -> torch.Tensor:
            begin, end, _ = index[0].indices(count)
            return self.read((slice(start + begin, start + end), *index[1:]))

        return CheckpointTensor(self.name, [count, *self.shape[1:]], read)

    def transposed(self) -> "CheckpointTensor":
        """The tensor [A, B] as [B, A]."""

        def read(index: tuple[slice, ...]) -> torch.Tensor:
            rows, columns = (*index, slice(None))[:2]
            return self.read((columns, rows)).T

        return CheckpointTensor(self.name, self.shape[::-1], read)

    def entries(self, count: int) -> list["CheckpointTensor"]:
        """The ``count`` entries along the first dimension that it must have."""
        self.fit([count, *self.shape[1:]])

        def reader(i: int) -> Callable[[Any], torch.Tensor]:
            return lambda index: self.read((slice(i, i + 1), *(() if index is ... else index)))[0]

        return [CheckpointTensor(f"{self.name}[{i}]", self.shape[1:], reader(i)) for i in range(count)]

    def at_least(self, lowest: float) -> "CheckpointTensor":
        """The tensor, where reading a number below ``lowest``, infinite or NaN raises CheckpointError."""

        def read(index: Any) -> torch.Tensor:
            part = self.read(index)
            if part.is_floating_point() and part.numel():
                low, high = (bound.item() for bound in part.float().aminmax())
                if not (lowest <= low and high < math.inf):  # with one NaN both are NaN
                    allowed = "finite numbers" if lowest < 0 else f"finite numbers >= {lowest:g}"
                    raise CheckpointError(f"tensor {self.name!r} has numbers from {low:g} to {high:g}, not {allowed}.")
            return part

        return CheckpointTensor(self.name, self.shape, read)

    def fit(self, shape: list[int]) -> "CheckpointTensor":
        """The tensor in this shape, or CheckpointError if it has another one."""
        if self.shape != shape:
            raise CheckpointError(f"tensor {self.name!r} has shape {self.shape}, expected {shape}.")
        return self


class Gathered:
    """Tensors of modules whose weight several tensors make, kept until the last has come: in one file or several."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, CheckpointTensor]] = {}  # by module, then by kind

    def add(self, module: str, kind: str, tensor: CheckpointTensor,
            kinds: set[str]) -> dict[str, CheckpointTensor] | None:
        """The module's tensors by kind, once all of ``kinds`` are there."""
        come = self._waiting.setdefault(module, {})
        if kind in come or kind not in kinds:
            raise CheckpointError(f"tensor {tensor.name!r} is twice there, or unknown to the model.")
        come[kind] = CheckpointTensor.of(tensor.name, tensor.read(...).clone())  # cloned: in a file or a reused buffer
        return self._waiting.pop(module) if come.keys() == kinds else None

    def half_given(self) -> str:
        """Tensors of the first module that waits, for an error; "" if none does."""
        names = ", ".join(tensor.name for tensor in next(iter(self._waiting.values()), {}).values())
        return f"{names} without the others that make its weight" if self._waiting else ""


def check_dtype(tensor: torch.Tensor, wanted: torch.dtype, name: str) -> None:
    """Raise CheckpointError unless ``tensor`` can be copied to dtype ``wanted``.

    e4m3 bits and numbers do not mix, and integers (MXFP4, or quantized otherwise) would be converted without an error.
    """
    dtype, is_float = tensor.dtype, tensor.is_floating_point() and tensor.dtype.itemsize > 1
    is_packed = wanted in (E4M3, torch.uint8)
    if dtype == wanted or (is_float and not is_packed):
        return
    given, expected = (str(x).removeprefix("torch.") for x in (dtype, wanted))
    expected = expected if is_packed else "floats"
    hint = " This layer is not FP8 here." if dtype == E4M3 else ""
    if wanted == E4M3 and is_float:
        hint = " quantization_config in config.json does not leave it out."
    raise CheckpointError(f"tensor {name!r} is of {given}, expected {expected}.{hint}")

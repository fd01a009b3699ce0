"""NVFP4 weights: 4-bit parameters, and the checkpoint tensors that fill them, NVFP4 or MXFP4.

Each layout becomes codes [N, C], scales [N, G] and one number for the tensor. ``numbers.py`` has the form of
parameters; ``../packed.py`` gathers the tensors.

Legend: N output features, C input channels, G groups, all of a checkpoint tensor.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.quantization.int4.numbers import CODES
from nanovllm.quantization.nvfp4 import numbers
from nanovllm.quantization.nvfp4.rules import Fp4Scheme
from nanovllm.utils.checkpoint_tensor import E4M3, CheckpointTensor, check_dtype

RANDOM_STD = 2.9  # standard deviation of random codes
MAX_EXPONENT, MIN_EXPONENT = 8, -14  # of MXFP4's scales here, relative to the feature's factor


def new_weight(output_size: int, input_size: int, scheme: Fp4Scheme, *experts: int) -> dict[str, Any]:
    """Words, scale and factor of a weight, uninitialised; in 16 bits where a rank would cut a group.

    ``data.halves`` holds scale and factor. The factor is [N, 1], for features of several checkpoint tensors may follow
    each other.
    """
    if input_size % numbers.GROUP:
        return {"": nn.Parameter(torch.empty(*experts, output_size, input_size), requires_grad=False)}
    words = torch.empty(*experts, output_size, input_size // CODES, dtype=torch.int32)
    scale = torch.empty(*experts, output_size, input_size // numbers.GROUP, dtype=torch.uint8)
    factor = torch.empty(*experts, output_size, 1, dtype=torch.float32)
    data, scale, factor = (nn.Parameter(x, requires_grad=False) for x in (words, scale, factor))
    data.halves, data.noun = (scale, factor), scheme.noun  # type: ignore[attr-defined]
    scale.factor = factor  # type: ignore[attr-defined]
    return {"": data, "_scale": scale, "_factor": factor}


def randomize(name: str, param: Any, std: float, generator: torch.Generator) -> bool:
    """Fill a scale or a factor; False: it is neither. Codes are random integers (``int4/tensors.py``)."""
    if name.endswith("_factor"):
        param.fill_(std / RANDOM_STD)
    elif hasattr(param, "factor"):
        param.fill_(numbers.ONE)
    else:
        return False
    return True


class Factors(CheckpointTensor):
    """Numbers of features [N, 1], the same on ranks that share the channels."""

    def fit(self, shape: list[int]) -> CheckpointTensor:
        super().fit([shape[0], 1])
        return CheckpointTensor.of(self.name, self.read(...).expand(shape))


@dataclass(frozen=True)
class Fp4Tensors:
    """The tensors of a module, by their kinds."""

    name: str  # the module's name in the checkpoint
    scheme: Fp4Scheme
    tensors: dict[str, CheckpointTensor]

    def check(self) -> None:
        """Raises CheckpointError unless all tensors have the shapes, types and numbers that go together."""
        _ = self.scales, self.number

    def _tensor(self, place: int) -> CheckpointTensor:
        return self.tensors[self.scheme.kinds[place]]

    @cached_property
    def codes(self) -> torch.Tensor:
        """uint8 [N, C]; a byte has two, the first in its lower half."""
        tensor, group = self._tensor(0), self.scheme.group_size
        data = tensor.read(...)
        if data.dtype != torch.uint8 or data.dim() != 2 or 0 in data.shape:
            raise CheckpointError(
                f"tensor {tensor.name!r} is of {str(data.dtype).removeprefix('torch.')} and has shape {tensor.shape}, "
                "expected bytes (uint8) in two dimensions > 0."
            )
        if data.shape[1] * 2 % group:
            raise CheckpointError(
                f"tensor {tensor.name!r} has {data.shape[1] * 2} input channels, expected a multiple of {group}, which "
                "share a scale."
            )
        return torch.stack((data & 15, data >> 4), -1).flatten(1)

    @cached_property
    def scales(self) -> torch.Tensor:
        """fp32 [N, G] as stored: e4m3, or powers of two."""
        N, C = self.codes.shape
        tensor = self._tensor(1).fit([N, C // self.scheme.group_size])
        if self.scheme.layout == "mxfp4-pack-quantized":
            exponents = tensor.read(...)
            check_dtype(exponents, torch.uint8, tensor.name)
            if int(exponents.max()) == 255:
                raise CheckpointError(f"tensor {tensor.name!r} has a scale of 255, which is NaN.")
            return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 127)
        scales = tensor.at_least(0).read(...)
        check_dtype(scales, E4M3, tensor.name)
        return scales.float().abs()  # no -0

    @cached_property
    def number(self) -> torch.Tensor | None:
        """The scale of the whole tensor, fp32 [], as stored; None: it has none."""
        if len(self.scheme.kinds) < 3:
            return None
        tensor = self._tensor(2)
        number = tensor.read(...)
        check_dtype(number, torch.float32, tensor.name)
        if number.numel() != 1 or not 0 < float(number) < math.inf:
            given = f"{float(number):g}" if number.numel() == 1 else f"shape {tensor.shape}"
            raise CheckpointError(f"tensor {tensor.name!r} has {given}, expected one positive number.")
        return number.float().reshape(())

    def _scaled(self) -> torch.Tensor:
        """The scales times the tensor's, fp32 [N, G]; compressed-tensors divides by it."""
        if self.number is None:
            return self.scales
        return self.scales * self.number if self.scheme.layout == "modelopt" else self.scales / self.number

    def dequantized(self) -> CheckpointTensor:
        """The module's weight, fp32 [N, C], in the two products of the library that wrote it."""
        weight = numbers.magnitudes(self.codes.device)[self.codes.int()].unflatten(1, (-1, self.scheme.group_size))
        return CheckpointTensor.of(f"{self.name}.weight", (weight * self._scaled().unsqueeze(-1)).flatten(1))

    def writes(self, data: Any) -> list[tuple[Any, CheckpointTensor]]:
        """The parameters of a weight of 4-bit floats, each with its tensor."""
        scale, factor = data.halves
        scales, codes = self.scales, self.codes
        if self.number is None:
            scales, multiplier = self._relative(scales)
        else:
            multiplier = self.number if self.scheme.layout == "modelopt" else 1 / self.number
        multiplier = multiplier.expand(len(codes), 1)
        codes = torch.where(scales.repeat_interleave(self.scheme.group_size, 1) > 0, codes, 0)
        words = numbers.words_of(codes, numbers.tile_of(data.shape[-1] * CODES))
        spread = numbers.stored(scales).repeat_interleave(self.scheme.group_size // numbers.GROUP, 1)
        tensors = (data, CheckpointTensor.of(self.name, words)), (scale, CheckpointTensor.of(self.name, spread))
        return [*tensors, (factor, Factors.of(self.name, multiplier))]

    def _relative(self, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Powers of two [N, G] relative to their features' factors [N, 1]; groups of zeros have 0."""
        is_zero = (self.codes & 7).unflatten(1, (-1, self.scheme.group_size)).amax(-1) == 0
        scales = scales.masked_fill(is_zero, 0)
        largest = scales.amax(1, keepdim=True)
        factor = torch.where(largest > 0, largest, 1) * 2.0**-MAX_EXPONENT
        relative = scales / factor
        if bool((relative < 2.0**MIN_EXPONENT).logical_and(relative > 0).any()):
            raise CheckpointError(
                f"tensor {self._tensor(1).name!r} has scales of one feature that differ by more than a factor of 2 ** "
                f"{MAX_EXPONENT - MIN_EXPONENT}, which the 4-bit form here does not hold."
            )
        return relative, factor

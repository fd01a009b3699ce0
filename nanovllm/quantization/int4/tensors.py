"""Weights of group-quantized integers: 4-bit parameters, and the checkpoint tensors that fill them.

Each layout becomes codes [N, C], scales and zeros [N, G]; a weight is (code - zero) * scale. ``numbers.py`` has the
form of parameters; ``../packed.py`` gathers the tensors.

Legend: N output features, C input channels, G groups, all of a checkpoint tensor. A word has 32 / bits numbers.
"""

import math
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.quantization.int4 import numbers
from nanovllm.quantization.int4.rules import IntScheme
from nanovllm.utils.checkpoint_tensor import CheckpointTensor, check_dtype

# AWQ's order of the eight features of a word
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
RANDOM_STD = 4.6  # standard deviation of random codes


def new_weight(output_size: int, input_size: int, scheme: IntScheme, *experts: int) -> dict[str, Any]:
    """Words, scale, zero and order of a weight, uninitialised, for N and C of this rank; in 16 bits where a rank would
    cut words.

    Its groups are the largest that divide both the checkpoint's and C. ``data.halves`` holds scale, zero and order. The
    order is valid from the beginning, because start-up gathers by it while kernels compile.
    """
    if input_size % numbers.CODES:
        return {"": nn.Parameter(torch.empty(*experts, output_size, input_size), requires_grad=False)}
    size = math.gcd(scheme.group_size, input_size)
    groups = *experts, output_size, input_size // size
    words = torch.empty(*experts, output_size, input_size // numbers.CODES, dtype=torch.int32)
    data, scale = (nn.Parameter(x, requires_grad=False) for x in (words, torch.empty(groups)))
    zero = None if scheme.symmetric else nn.Parameter(torch.empty(groups, dtype=torch.int8), requires_grad=False)
    order = torch.arange(input_size, dtype=torch.int32) if scheme.act_order else None
    data.halves, data.noun = (scale, zero, order), scheme.noun  # type: ignore[attr-defined]
    return {"": data, "_scale": scale, "_zero": zero, "_order": order}


def randomize(name: str, param: Any, std: float, generator: torch.Generator) -> bool:
    """Fill a parameter with random codes, or with one scale or zero; False: it is not of this format."""
    if param.dtype == torch.int32:
        param.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    elif name.endswith(("_scale", "_zero")):
        param.fill_(std / RANDOM_STD if name.endswith("_scale") else numbers.MIDDLE)
    else:
        return False
    return True


def check_in_order(scheme: IntScheme, g_idx: CheckpointTensor) -> None:
    """Raises CheckpointError unless each group has neighbouring channels."""
    groups = g_idx.read(...).long()
    places = torch.arange(len(groups), device=groups.device)
    if not torch.equal(groups, places // (scheme.group_size or len(groups))):
        raise CheckpointError(
            f"tensor {g_idx.name!r} orders the channels, which quantization_config denies (desc_act). Take a "
            "checkpoint whose config says so, or the 16-bit one."
        )


@dataclass(frozen=True)
class IntTensors:
    """The tensors of a module, by their kinds."""

    name: str  # the module's name in the checkpoint
    scheme: IntScheme
    tensors: dict[str, CheckpointTensor]

    def check(self) -> None:
        """Raises CheckpointError unless all tensors have the shapes and types that go together."""
        if self.scheme.act_order:
            self.tensors["g_idx"].fit([self.shape[1]])
        _ = self.order, self.scales, self.zeros

    def _read(self, place: int, dtype: torch.dtype | None = torch.int32) -> torch.Tensor:
        tensor = self.tensors[self.scheme.kinds[place]]
        if dtype is None:  # scales, which may be negative
            tensor = tensor.at_least(-sys.float_info.max)
        part = tensor.read(...)
        if part.dim() != 2 or 0 in part.shape:
            raise CheckpointError(f"tensor {tensor.name!r} has shape {tensor.shape}, expected two dimensions > 0.")
        if dtype is None:
            check_dtype(part, torch.float32, tensor.name)
        elif part.dtype != dtype:
            given, expected = (str(x).removeprefix("torch.") for x in (part.dtype, dtype))
            raise CheckpointError(f"tensor {tensor.name!r} is of {given}, expected {expected}.")
        return part

    @cached_property
    def words(self) -> torch.Tensor:
        """Words as stored: a row is a feature, with AWQ a channel."""
        words = self._read(0)
        return words.T if self.scheme.layout in ("gptq", "gptq_v2") else words

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(N, C)."""
        rows, columns = self.words.shape
        per_word = 32 // self.scheme.bits
        if self.scheme.layout == "awq":
            return columns * per_word, rows
        if self.scheme.layout != "compressed-tensors":
            return rows, columns * per_word
        shape = self.tensors["weight_shape"].fit([2])
        if (given := shape.read(...)).is_floating_point():
            raise CheckpointError(f"tensor {shape.name!r} is of floats, expected integers.")
        N, C = map(int, given.tolist())
        self.tensors["weight_packed"].fit([N, -(-C // per_word)])
        return N, C

    @cached_property
    def codes(self) -> torch.Tensor:
        """uint8 [N, C], channels in the order of their groups."""
        codes = numbers.codes_of(self.words, self.scheme.bits)
        if self.scheme.layout == "awq":
            codes = codes.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1).T
        codes = codes[:, : self.shape[1]]
        return codes if self.order is None else codes[:, self.order]

    @cached_property
    def order(self) -> torch.Tensor | None:
        """The channels sorted by their groups; None: as they are."""
        if not self.scheme.act_order:
            return None
        groups = self.tensors["g_idx"].read(...).long()
        order = groups.argsort(stable=True)
        places = torch.arange(len(groups), device=groups.device)
        if not torch.equal(groups[order], places // self.scheme.group_size):
            raise CheckpointError(
                f"tensor {self.tensors['g_idx'].name!r} has groups that are not of {self.scheme.group_size} channels."
            )
        return order

    @cached_property
    def scales(self) -> torch.Tensor:
        """[N, G] of the file's groups."""
        scales = self._read(1, None)
        scales = scales if self.scheme.layout == "compressed-tensors" else scales.T
        N, C = self.shape
        expected = [N, -(-C // (self.scheme.group_size or C))]
        if list(scales.shape) != expected:
            raise CheckpointError(
                f"module {self.name!r} has scales of {list(scales.shape)} features and groups, expected {expected}."
            )
        return scales

    @cached_property
    def zeros(self) -> torch.Tensor | None:
        """int16 [N, G] of the file's groups; None: half the range, which is checked."""
        scheme, middle = self.scheme, 1 << (self.scheme.bits - 1)
        if scheme.layout == "compressed-tensors":
            if scheme.symmetric:
                return None
            zeros = numbers.codes_of(self._read(2).T, scheme.bits).T[: self.shape[0]].short()
        else:
            stored = numbers.codes_of(self._read(2), scheme.bits)
            if scheme.layout == "awq":
                stored = stored.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1)
            zeros = stored.T.short() + (scheme.layout == "gptq")
        if zeros.shape != self.scales.shape:
            raise CheckpointError(
                f"module {self.name!r} has zeros of {list(zeros.shape)} features and groups, expected "
                f"{list(self.scales.shape)}."
            )
        if scheme.symmetric and not bool((zeros == middle).all()):
            raise CheckpointError(
                f"module {self.name!r} has zeros from {int(zeros.min())} to {int(zeros.max())}, expected {middle}, for "
                f"quantization_config says that it is symmetric. A checkpoint_format of 'gptq' stores them less one, "
                "'gptq_v2' as they are."
            )
        if scheme.layout == "gptq" and int(zeros.max()) > 2 * middle - 1:
            raise CheckpointError(
                f"module {self.name!r} has a zero that readers of checkpoint_format 'gptq' take for 0 or for "
                f"{2 * middle}. Take a checkpoint of 'gptq_v2', or a symmetric one."
            )
        return None if scheme.symmetric else zeros

    def spread(self, groups: torch.Tensor, size: int) -> torch.Tensor:
        """Repeat [N, G] for groups of ``size`` channels, which divides both a group of the file and a row."""
        C = self.shape[1]
        columns = torch.arange(C // size, device=groups.device) * size // (self.scheme.group_size or C)
        return groups[:, columns]

    def dequantized(self) -> CheckpointTensor:
        """The module's weight, fp32 [N, C], channels in the order of the file."""
        zeros = 1 << (self.scheme.bits - 1) if self.zeros is None else self.spread(self.zeros, 1)
        weight = (self.codes.float() - zeros) * self.spread(self.scales, 1).float()
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order, weight)
        return CheckpointTensor.of(f"{self.name}.weight", weight)

    def writes(self, data: Any) -> list[tuple[Any, CheckpointTensor]]:
        """The parameters of a weight of 4-bit integers, each with its tensor."""
        scale, zero, order = data.halves
        size, (_, C) = data.shape[-1] * numbers.CODES // scale.shape[-1], self.shape
        if C % size or C % numbers.CODES:
            raise CheckpointError(f"module {self.name!r} has {C} input channels, expected a multiple of {size}.")
        pairs = [(data, numbers.words_of(self.codes, numbers.tile_of(size))), (scale, self.spread(self.scales, size))]
        if self.zeros is not None:
            pairs.append((zero, self.spread(self.zeros, size).to(torch.int8)))
        if order is not None and self.order is not None:
            self._copy_order(order, self.order)
        return [(param, CheckpointTensor.of(self.name, tensor)) for param, tensor in pairs]

    def _copy_order(self, here: torch.Tensor, given: torch.Tensor) -> None:
        """The parts of a merged layer have one order, that of their input; it stays the engine's."""
        if not hasattr(here, "is_given"):
            here.copy_(given)
            here.is_given = True  # type: ignore[attr-defined]
        elif not torch.equal(here, given.to(here)):
            raise CheckpointError(
                f"module {self.name!r} orders the channels of its input (g_idx) otherwise than the layers beside it or "
                "the weights before an update. Take a checkpoint without desc_act, or start a new engine."
            )

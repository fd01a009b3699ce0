"""Experts in MXFP4: their parameters, and the published blocks and scales that fill them.

Where the parameters have 16 bits, as on a CPU, the blocks are dequantized as they are read.

Legend: E experts, N output features, C input channels.
"""

from typing import Any

import torch
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.quantization.mxfp4 import numbers
from nanovllm.quantization.mxfp4.rules import GROUP, Mxfp4
from nanovllm.utils.checkpoint_tensor import CheckpointTensor, Gathered, check_dtype

ENDS = "_proj_blocks", "_proj_scales"  # ends of checkpoint names
RANDOM_SCALE = 120  # 2^-7: random e2m1 have a standard deviation of 2.9


def new_weight(output_size: int, input_size: int, scheme: Mxfp4, *experts: int) -> dict[str, Any]:
    """Data uint8 [E, N, C / 2] and scale [E, C / 32, N], uninitialised; ``numbers.py`` has their order."""
    shapes = {"": (output_size, input_size // 2), "_scale": (input_size // GROUP, output_size)}
    return {
        half: nn.Parameter(torch.empty(*experts, *shape, dtype=torch.uint8), requires_grad=False)
        for half, shape in shapes.items()
    }


def randomize(name: str, param: Any, std: float, generator: torch.Generator) -> bool:
    """Fill a parameter with random bits; False: it is not of this format."""
    if param.dtype != torch.uint8:
        return False
    param.fill_(RANDOM_SCALE) if name.endswith("_scale") else param.random_(generator=generator)
    return True


def take(name: str, tensor: CheckpointTensor, param: Any, gathered: Gathered) -> tuple[str, CheckpointTensor] | None:
    """Name of the parameter for blocks or scales, and the tensor. Where ``param`` has 16 bits: of both, dequantized;
    None before the second has come.
    """
    name, _, kind = name.rpartition("_")
    if param is None or not param.is_floating_point():
        return (name if kind == "blocks" else f"{name}_scale"), tensor
    halves = gathered.add(name, kind, tensor, {"blocks", "scales"})
    return (name, dequantized_experts(halves["blocks"], halves["scales"], param.dtype)) if halves else None


def rows_of_expert(param: torch.Tensor, loaded: CheckpointTensor) -> tuple[torch.Tensor, CheckpointTensor]:
    """An expert's part of a parameter, and its blocks or scales, as [output features, input channels]."""
    is_blocks = len(loaded.shape) == 3
    return (param, whole_bytes(loaded)) if is_blocks else (param.T, checked_scales(loaded))


def whole_bytes(loaded: CheckpointTensor) -> CheckpointTensor:
    """Published blocks [N, C / 32, 16] as bytes [N, C / 2] of kernels; whole blocks of these may be read."""
    N, num_groups, size = loaded.shape

    def read(index: tuple[slice, ...]) -> torch.Tensor:
        rows, columns = (*index, slice(None))[:2]
        start, stop, _ = columns.indices(num_groups * size)
        assert start % size == stop % size == 0
        blocks = loaded.read((rows, slice(start // size, stop // size)))
        check_dtype(blocks, torch.uint8, loaded.name)
        return numbers.repacked(blocks).flatten(1)

    return CheckpointTensor(loaded.name, [N, num_groups * size], read)


def checked_scales(loaded: CheckpointTensor) -> CheckpointTensor:
    """Published scales, checked where they are read: numbers that kernels can multiply by."""

    def read(index: Any) -> torch.Tensor:
        scales = loaded.read(index)
        check_dtype(scales, torch.uint8, loaded.name)
        if scales.numel() and (largest := int(scales.max())) > numbers.MAX_SCALE:
            raise CheckpointError(
                f"tensor {loaded.name!r} has a scale of {largest}, expected at most {numbers.MAX_SCALE} (2.0)."
            )
        return scales

    return CheckpointTensor(loaded.name, loaded.shape, read)


def dequantized_experts(blocks: CheckpointTensor, scales: CheckpointTensor, dtype: torch.dtype) -> CheckpointTensor:
    """Dequantize all experts' blocks [E, N, C / 32, 16] and scales [E, N, C / 32] to [E, C, N], as in 16 bits."""
    scales.fit(blocks.fit([*blocks.shape[:3], GROUP // 2]).shape[:3])
    E, N, num_groups = scales.shape

    def read(index: tuple[slice, ...]) -> torch.Tensor:
        experts, channels, rows = (*index, slice(None), slice(None))[:3]
        data = blocks.read((experts, rows))
        check_dtype(data, torch.uint8, blocks.name)
        data = numbers.repacked(data).flatten(-2)
        whole = numbers.dequantized(data, checked_scales(scales).read((experts, rows)).mT, dtype)
        return whole.mT[:, channels]

    return CheckpointTensor(blocks.name, [E, num_groups * GROUP, N], read)

"""Parameters of a linear layer in each precision: 16 bits, FP8, 4-bit integers, MXFP4; made here, uninitialised.

An FP8 weight is data (e4m3) [N, C] times scale (fp32) [N, G], a scale for each of G groups of channels of an output
feature. G is 1, or the groups are published blocks, smaller where blocks would be cut: by the end of the tensor or by a
shard of it. Groups of 4-bit integers (``kernels/int4.py``) are cut likewise. ``quantization.py`` and
``packed_weights.py`` fill them from checkpoints; ``kernels/linear/reference.py`` multiplies by them.

Legend: N output features, C input channels, both of this rank.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.layers.packed_weights import new_int4_weight
from nanovllm.quantization.fp8.numbers import E4M3
from nanovllm.quantization.int4 import numbers as int4
from nanovllm.quantization.mxfp4 import numbers as mxfp4

if TYPE_CHECKING:
    from nanovllm.quantization.int4.rules import IntScheme


def add_weight(module: nn.Module, name: str, output_size: int, input_size: int, precision: "int | IntScheme | None",
               *experts: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Register a weight, and the ``X_scale``, ``X_zero`` and ``X_order`` that it has. Returns the last two.

    Args:
        precision: as in ``ModelConfig.precision``; None: 16 bits. So are 4-bit integers whose words a rank would cut.
        experts: number of experts, as a first dimension.
    """
    zero = order = None
    if not isinstance(precision, tuple):
        data, scale = new_weight(output_size, input_size, precision, *experts)
    elif input_size % int4.CODES:
        data, scale = new_weight(output_size, input_size, None, *experts)
    else:
        data, scale, zero, order = new_int4_weight(output_size, input_size, precision, *experts)
    for half, param in ((name, data), (f"{name}_scale", scale), (f"{name}_zero", zero)):
        module.register_parameter(half, param)
    module.register_buffer(f"{name}_order", order, persistent=False)  # kept where a sleep drops the weights
    return zero, order


def new_weight(output_size: int, input_size: int, block: int | None,
               *experts: int) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Data and scale of a linear layer; ``block`` as in ``ModelConfig.fp8``, None: 16 bits, and no scale.

    ``data.scale`` is the scale, ``scale.block`` the block. ``scale.group_size`` is the number of channels of a scale,
    the largest that divides both a block and this rank's channels; 0: all of them.
    """
    if block is None:
        return nn.Parameter(torch.empty(*experts, output_size, input_size), requires_grad=False), None
    group_size = math.gcd(block, input_size) if block else 0
    num_groups = input_size // group_size if group_size else 1
    data = nn.Parameter(torch.empty(*experts, output_size, input_size, dtype=E4M3), requires_grad=False)
    scale = nn.Parameter(torch.empty(*experts, output_size, num_groups, dtype=torch.float32), requires_grad=False)
    data.scale, scale.group_size, scale.block = scale, group_size, block  # type: ignore[attr-defined]
    return data, scale


def add_mxfp4_weight(module: nn.Module, name: str, output_size: int, input_size: int, num_experts: int) -> None:
    """Register data and scale of experts in MXFP4, see ``kernels/mxfp4.py``."""
    shapes = (output_size, input_size // 2), (input_size // mxfp4.GROUP, output_size)
    for half, shape in zip((name, f"{name}_scale"), shapes, strict=True):
        data = torch.empty(num_experts, *shape, dtype=torch.uint8)
        module.register_parameter(half, nn.Parameter(data, requires_grad=False))
    module.register_parameter(f"{name}_zero", None)


def new_bias(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def shared_rows(precision: "int | IntScheme | None", parts: list[int]) -> int:
    """Number of consecutive output features that share their scales; 1 without blocks.

    Known before the weights are, since kernels are chosen and CUDA graphs captured by it.

    ``parts``: rows of this rank of each checkpoint tensor that the weight has one after the other; a shard begins at a
    multiple of them. ``precision`` as in ``add_weight``.
    """
    return math.gcd(precision, *parts) if isinstance(precision, int) and precision else 1

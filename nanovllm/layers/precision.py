"""Parameters of a linear layer in each precision: 16 bits, FP8, MXFP4. All are made here, uninitialised.

An FP8 weight is data (e4m3) [N, C] times scale (fp32) [N, G], a scale for each of G groups of channels of an output
feature. G is 1, or the groups are published blocks, smaller where blocks would be cut: by the end of the tensor or by a
shard of it. ``quantization.py`` fills them from checkpoints; ``kernels/linear/reference.py`` multiplies by them.

Legend: N output features, C input channels, both of this rank.
"""

import math

import torch
from torch import nn

from nanovllm.kernels import mxfp4
from nanovllm.kernels.fp8 import E4M3


def new_weight(output_size: int, input_size: int, block: int | None,
               *experts: int) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Data and scale of a linear layer; ``block`` as in ``ModelConfig.fp8``, None: 16 bits, and no scale.

    ``data.scale`` is the scale, ``scale.block`` the block. ``scale.group_size`` is the number of channels of a scale,
    the largest that divides both a block and this rank's channels; 0: all of them.

    ``experts``: their number, in a first dimension.
    """
    if block is None:
        return nn.Parameter(torch.empty(*experts, output_size, input_size), requires_grad=False), None
    group_size = math.gcd(block, input_size) if block else 0
    num_groups = input_size // group_size if group_size else 1
    data = nn.Parameter(torch.empty(*experts, output_size, input_size, dtype=E4M3), requires_grad=False)
    scale = nn.Parameter(torch.empty(*experts, output_size, num_groups, dtype=torch.float32), requires_grad=False)
    data.scale, scale.group_size, scale.block = scale, group_size, block  # type: ignore[attr-defined]
    return data, scale


def new_mxfp4_weight(output_size: int, input_size: int,
                     num_experts: int) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Data and scale of experts in MXFP4, see ``kernels/mxfp4.py``."""
    shapes = (output_size, input_size // 2), (input_size // mxfp4.GROUP, output_size)
    data, scale = (torch.empty(num_experts, *shape, dtype=torch.uint8) for shape in shapes)
    return nn.Parameter(data, requires_grad=False), nn.Parameter(scale, requires_grad=False)


def new_bias(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def shared_rows(block: int | None, parts: list[int]) -> int:
    """Number of consecutive output features that share their scales; 1 without blocks.

    Known before the weights are, since kernels are chosen and CUDA graphs captured by it.

    ``parts``: rows of this rank of each checkpoint tensor that the weight has one after the other; a shard begins at a
    multiple of them. ``block`` as in ``ModelConfig.fp8``.
    """
    return math.gcd(block, *parts) if block else 1

"""The weight of a linear layer in any format: its parameters, and how checkpoint tensors fill them.

Owns the table of formats and asks each folder's ``tensors.py``, for the layers (``add_weight``, ``shared_rows``), for
the loader (``WeightReader``, ``writes``) and for random weights. ``kernels/linear/reference.py`` multiplies by them.

Legend: N output features, C input channels, both of this rank.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nanovllm.quantization.fp8 import tensors as fp8
from nanovllm.quantization.fp8.rules import Fp8
from nanovllm.quantization.int4 import tensors as int4
from nanovllm.quantization.int4.rules import IntScheme
from nanovllm.quantization.mxfp4 import tensors as mxfp4
from nanovllm.quantization.mxfp4.rules import Mxfp4
from nanovllm.quantization.nvfp4 import tensors as nvfp4
from nanovllm.quantization.nvfp4.rules import Fp4Scheme
from nanovllm.quantization.packed import PackedTensors, take
from nanovllm.utils.checkpoint_tensor import CheckpointTensor, Gathered

Scheme = Fp8 | IntScheme | Fp4Scheme | Mxfp4 | None  # how a weight is stored; None: 16 bits
NEW_WEIGHT: dict[type, Callable[..., dict[str, Any]]] = {
    Fp8: fp8.new_weight, IntScheme: int4.new_weight, Fp4Scheme: nvfp4.new_weight, Mxfp4: mxfp4.new_weight,
}  # fmt: skip


def add_weight(module: nn.Module, name: str, output_size: int, input_size: int, scheme: Scheme,
               *experts: int) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Register a weight [N, C], uninitialised, with ``X_scale``, ``X_zero``, ``X_order`` and ``X_factor``.

    Returns the last three, as a ``Weight`` takes them.

    Args:
        scheme: as in ``ModelConfig.precision``.
        experts: number of experts, as a first dimension.
    """
    if scheme is None:
        made = {"": nn.Parameter(torch.empty(*experts, output_size, input_size), requires_grad=False)}
    else:
        made = NEW_WEIGHT[type(scheme)](output_size, input_size, scheme, *experts)
    for suffix in ("", "_scale", "_zero", "_factor"):
        module.register_parameter(name + suffix, made.get(suffix))
    order = made.get("_order")
    module.register_buffer(f"{name}_order", order, persistent=False)  # kept where a sleep drops the weights
    return made.get("_zero"), order, made.get("_factor")


def new_bias(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def shared_rows(scheme: Scheme, parts: list[int]) -> int:
    """Number of consecutive output features that share their scales; 1 without blocks.

    Known before the weights are, since kernels are chosen and CUDA graphs captured by it.

    ``parts``: rows of this rank of each checkpoint tensor that the weight has one after the other; a shard begins at a
    multiple of them.
    """
    return math.gcd(scheme.block, *parts) if isinstance(scheme, Fp8) and scheme.block else 1


class WeightReader:
    """Puts the checkpoint tensors together that make one weight.

    Args:
        scheme_of: the packed scheme of a module, by its name here.
        targets: the parameter that a checkpoint tensor fills, and more of it, by the tensor's name here.
    """

    def __init__(self, scheme_of: Callable[[str], Any], targets: Mapping[str, tuple[Any, ...]]):
        self._scheme_of, self._targets, self.gathered = scheme_of, targets, Gathered()

    def take(self, name: str, tensor: CheckpointTensor) -> tuple[str, CheckpointTensor, PackedTensors | None] | None:
        """A parameter's name and its tensor, with the packed weight that it completes; None: nothing to write."""
        if name.endswith(mxfp4.ENDS):
            param, *_ = self._targets.get(name.rpartition("_")[0], (None,))
            whole = mxfp4.take(name, tensor, param, self.gathered)
            return whole and (*whole, None)
        scheme = self._scheme_of(name.rpartition(".")[0])
        return take(name, tensor, scheme, name in self._targets, self.gathered)


def writes(param: Any, tensor: CheckpointTensor, packed: PackedTensors | None,
           quantizes: bool) -> list[tuple[Any, CheckpointTensor]]:
    """The parameters to write, each with its tensor. ``quantizes``: ``tensor`` has 16 bits, and ``param`` is FP8."""
    if packed is not None:
        return packed.writes(param)
    if quantizes:
        return fp8.quantized(param, tensor)
    return [(param, fp8.Scales.of_param(param, tensor.at_least(0)) if hasattr(param, "group_size") else tensor)]


def randomize(name: str, param: Any, std: float, generator: torch.Generator) -> bool:
    """Fill a quantized parameter so that the weight has this standard deviation; False: it is not quantized."""
    return any(part.randomize(name, param, std, generator) for part in (nvfp4, mxfp4, fp8, int4))

"""Packed weights: modules of a checkpoint whose weight several tensors make, group-quantized integers or NVFP4.

Owns the table of their tensors and gathers them, maybe from several files, by the scheme of the layer's module. Layers
that have 16 bits here get the weight dequantized.
"""

import re
from collections.abc import Sequence
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.quantization.fields import MIXER_LINEARS, linears
from nanovllm.quantization.int4 import tensors as int4
from nanovllm.quantization.int4.rules import IntScheme
from nanovllm.quantization.nvfp4 import tensors as nvfp4
from nanovllm.quantization.nvfp4.rules import Fp4Scheme
from nanovllm.utils.checkpoint_tensor import CheckpointTensor, Gathered

PackedScheme = IntScheme | Fp4Scheme
PackedTensors = int4.IntTensors | nvfp4.Fp4Tensors
TENSORS: dict[type, Any] = {IntScheme: int4.IntTensors, Fp4Scheme: nvfp4.Fp4Tensors}
MERGED = {part: name for kind in MIXER_LINEARS for name, parts in linears(1, kind).items() for part in parts}


def scheme_in(layers: Sequence[Any], module: str) -> PackedScheme | None:
    """The scheme of a decoder's module; ``layers`` are the ``packed_schemes`` of each layer."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    return scheme_of(layers[int(match[1])], match[2]) if match and int(match[1]) < len(layers) else None


def scheme_of(layer: tuple[tuple[str, PackedScheme], ...], module: str) -> PackedScheme | None:
    """The scheme of a decoder layer's module, by its name there: its own, or that of the layer it is merged into."""
    if not layer:
        return None
    schemes = dict(layer)
    return schemes[module] if module in schemes else schemes.get(merged_name(module))


def merged_name(module: str) -> str:
    """The linear layer here that has the weights of a checkpoint's module; names in a decoder layer."""
    return MERGED.get(re.sub(r"^mlp\.experts\.\d+\.", "mlp.experts.0.", module), module)


def take(name: str, tensor: CheckpointTensor, scheme: PackedScheme | None, is_known: bool,
         gathered: Gathered) -> tuple[str, CheckpointTensor, PackedTensors | None] | None:
    """A parameter's name here and its tensor, with the packed weight that it completes; None: nothing to write.

    None stands for a module whose other tensors are to come, and for a tensor that is only checked.

    Args:
        scheme: scheme of the tensor's module.
        is_known: the model has a parameter of this name.
    """
    module, _, kind = name.rpartition(".")
    if scheme is None or not (kind in scheme.kinds or (kind == "bias" and not is_known)):
        return name, tensor, None
    if kind == "weight" and tensor.read((slice(1),)).is_floating_point():  # ModelOpt's codes have this name too
        return name, tensor, None
    if kind == "bias":  # zeros, which AutoGPTQ stored where the model has no bias
        if bool(tensor.read(...).any()):
            raise CheckpointError(f"tensor {tensor.name!r} is not 0, and the model has no such bias.")
        return None
    if kind == "g_idx" and isinstance(scheme, IntScheme) and not scheme.act_order:
        int4.check_in_order(scheme, tensor)
        return None
    tensors = gathered.add(module, kind, tensor, scheme.needed())
    if tensors is None:
        return None
    packed: PackedTensors = TENSORS[type(scheme)](tensor.name.rpartition(".")[0], scheme, tensors)
    packed.check()
    return f"{module}.weight", tensor, packed


def fitting(param: Any, tensor: CheckpointTensor, packed: PackedTensors | None,
            is_adapted: bool) -> tuple[CheckpointTensor, PackedTensors | None]:
    """Fit a tensor, or the packed weight that it completes, to a parameter, which may be None: dequantized for 16 bits.

    Raises:
        CheckpointError: a packed weight for an adapter's sum, or another tensor for a packed parameter.
    """
    if packed is not None and is_adapted:
        raise CheckpointError(
            f"module {packed.name!r} is of packed {packed.scheme.noun}, and an adapter is merged into 16-bit weights. "
            "Take the 16-bit checkpoint; LLM(quantization='fp8') quantizes the sum."
        )
    if packed is None and hasattr(param, "halves"):
        raise CheckpointError(
            f"tensor {tensor.name!r} is not of packed {param.noun}, as this layer is here. Give all the tensors of the "
            "module as its checkpoint has them, or load the 16-bit checkpoint, which takes 16-bit updates."
        )
    if packed is not None and param is not None and not hasattr(param, "halves"):
        return packed.dequantized(), None
    return tensor, packed

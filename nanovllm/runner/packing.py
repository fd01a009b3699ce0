"""Copies of the weights on the CPU in the layout of its matrix products.

Owns their lifetime: made when the weights are there, dropped before these change. Says how packed weights are kept.
"""

from typing import Any

import torch
from torch import nn

from nanovllm.kernels.linear.reference import pack
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.quantization.int4 import numbers as int4
from nanovllm.quantization.int4.rules import OTHERS
from nanovllm.quantization.nvfp4.rules import Fp4Scheme
from nanovllm.quantization.packed import merged_name

MAX_BYTES = 4 << 30  # limit for copied weights: other programs need the host's memory


def pack_weights(model: nn.Module) -> None:
    """Give the layers of a model on the CPU their packed weights: all of 16 bits or, where they are too large, none.

    Likewise all of 4-bit integers, and all of NVFP4, whose copies have 16 bits or the model's 32.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, ParallelLMHead) or (isinstance(layer, ReplicatedLinear) and layer.weight_scale is None)
    ]
    if sum(layer.weight.nbytes for layer in layers) <= MAX_BYTES:
        for layer in layers:
            layer.packed = pack(layer.weight)
    in_words = [layer for layer in model.modules() if isinstance(layer, ReplicatedLinear) and has_words(layer)]
    with_integers = [layer for layer in in_words if layer.as_weight().factor is None]
    if sum(layer.weight.nbytes for layer in with_integers) <= MAX_BYTES:
        for layer in with_integers:
            layer.packed = int4.pack(layer.weight, layer.weight_scale, layer.zero_order_factor[0])
    with_floats, dtype = [layer for layer in in_words if layer not in with_integers], next(model.parameters()).dtype
    if sum(layer.weight.numel() * int4.CODES * dtype.itemsize for layer in with_floats) <= MAX_BYTES:
        for layer in with_floats:
            layer.packed = pack(layer.as_weight().dequantize(dtype))


def describe_packed(model: Any, device: torch.device) -> str:
    """How an engine holds the weights that its checkpoint has in few bits, integers or NVFP4; "" where it has none."""
    schemes = getattr(model, "schemes", None) or {
        f"model.layers.{i}.{merged_name(name)}": scheme
        for i, layer in enumerate(model.config.layers) for name, scheme in layer.packed_schemes if name not in OTHERS
    }  # fmt: skip
    of_floats = [scheme for scheme in schemes.values() if isinstance(scheme, Fp4Scheme)]
    num_kept = num_widened = 0
    for name, param in model.named_parameters():
        if name.removesuffix(".weight") in schemes:
            num_kept += param.dtype == torch.int32
            num_widened += param.dtype != torch.int32
    notes = [f"{num_widened} of {num_kept + num_widened} dequantized at load"] * (num_widened > 0)
    if num_kept and device.type == "cpu":
        linears = [layer for layer in model.modules() if isinstance(layer, ReplicatedLinear)]
        has_product = any(has_words(layer) and layer.packed is not None for layer in linears)
        steps = f"steps of more than {int4.MAX_TOKENS_CPU} tokens" if has_product else "every step"
        dtype = next(model.parameters()).dtype
        # experts are dequantized in any dtype
        has_advice = dtype != int4.CPU_DTYPE and model.config.moe is None and not of_floats
        if of_floats and has_product:
            notes.append(f"linear layers multiply copies in {str(dtype).removeprefix('torch.')}")
        else:
            notes.append(f"dequantized in {steps}" + ", which dtype='bfloat16' avoids" * has_advice)
    notes += ["scales of inputs not used"] * any(scheme.has_input_scales for scheme in of_floats)
    kept, widened = ("NVFP4", "NVFP4") if of_floats else ("INT4", "integer")
    if of_floats and all(scheme.layout.startswith("mxfp4") for scheme in of_floats):
        kept = widened = "MXFP4"
    what = f" with {kept} weights" if num_kept else f" with {widened} weights" if num_widened else ""
    return what + (f" ({'; '.join(notes)})" if notes else "")


def has_words(layer: ReplicatedLinear) -> bool:
    return layer.weight.dtype == torch.int32


def drop_packed_weights(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, (ReplicatedLinear, ParallelLMHead)):
            layer.packed = None

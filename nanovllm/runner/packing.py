"""Copies of the weights on the CPU in the layout of its matrix products.

Owns their lifetime: made when the weights are there, dropped before these change. Says how group-quantized integers are
kept.
"""

import re
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.linear.reference import pack
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.quantization.int4 import numbers as int4
from nanovllm.quantization.int4.rules import OTHERS
from nanovllm.quantization.int4.tensors import merged_name

MAX_BYTES = 4 << 30  # limit for copied weights: other programs need the host's memory


def pack_weights(model: nn.Module) -> None:
    """Give the layers of a model on the CPU their packed weights: all of 16 bits or, where they are too large, none.

    Likewise all of 4-bit integers.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, ParallelLMHead) or (isinstance(layer, ReplicatedLinear) and layer.weight_scale is None)
    ]
    if sum(layer.weight.nbytes for layer in layers) <= MAX_BYTES:
        for layer in layers:
            layer.packed = pack(layer.weight)
    with_integers = [layer for layer in model.modules() if isinstance(layer, ReplicatedLinear) and is_int4(layer)]
    if sum(layer.weight.nbytes for layer in with_integers) <= MAX_BYTES:
        for layer in with_integers:
            layer.packed = int4.pack(layer.weight, layer.weight_scale, layer.zero_and_order[0])


def describe_integers(model: Any, device: torch.device) -> str:
    """How an engine holds the weights that its checkpoint has as group-quantized integers; "" where it has none."""
    schemes = [layer.int_schemes for layer in model.config.layers]
    of_layers = [{merged_name(name) for name, _ in of_layer if name not in OTHERS} for of_layer in schemes]
    num_kept = num_widened = 0
    for name, param in model.named_parameters():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+?)(\.weight)?", name)
        if match and match[2] in of_layers[int(match[1])]:
            num_kept += param.dtype == torch.int32
            num_widened += param.dtype != torch.int32
    notes = [f"{num_widened} of {num_kept + num_widened} dequantized at load"] * (num_widened > 0)
    if num_kept and device.type == "cpu":
        linears = [layer for layer in model.modules() if isinstance(layer, ReplicatedLinear)]
        has_product = any(is_int4(layer) and layer.packed is not None for layer in linears)
        steps = f"steps of more than {int4.MAX_TOKENS_CPU} tokens" if has_product else "every step"
        # experts are dequantized in any dtype
        has_advice = next(model.parameters()).dtype != int4.CPU_DTYPE and model.config.moe is None
        notes.append(f"dequantized in {steps}" + ", which dtype='bfloat16' avoids" * has_advice)
    what = " with INT4 weights" if num_kept else " with integer weights" if num_widened else ""
    return what + (f" ({'; '.join(notes)})" if notes else "")


def is_int4(layer: ReplicatedLinear) -> bool:
    return layer.weight.dtype == torch.int32


def drop_packed_weights(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, (ReplicatedLinear, ParallelLMHead)):
            layer.packed = None

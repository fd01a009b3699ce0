"""Copies of the weights on the CPU in the layout of its matrix products.

Owns their lifetime: made when the weights are there, dropped before these change.
"""

from torch import nn

from nanovllm.kernels.linear.reference import pack
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import ReplicatedLinear

MAX_BYTES = 4 << 30  # of weights that are copied: other programs need the host's memory


def pack_weights(model: nn.Module) -> None:
    """Give the layers of a model on the CPU their packed weights, all or, where they are too large, none."""
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, ParallelLMHead) or (isinstance(layer, ReplicatedLinear) and layer.weight_scale is None)
    ]
    if sum(layer.weight.nbytes for layer in layers) <= MAX_BYTES:
        for layer in layers:
            layer.packed = pack(layer.weight)


def drop_packed_weights(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, (ReplicatedLinear, ParallelLMHead)):
            layer.packed = None

"""The kinds of mixers and MLPs that a decoder layer may have: a table of each, the only place that names their modules.

A kind is imported when a model has it. Imports no torch.
"""

from importlib import import_module
from typing import Any

# keyed by ``LayerConfig.mixer``
MIXERS = {
    "attention": "nanovllm.models.decoder.SelfAttention",
    "gated_delta_net": "nanovllm.models.gated_delta_net.GatedDeltaNet",
}
# keyed by ``LayerConfig.mlp``
MLPS = {
    "dense": "nanovllm.models.decoder.MLP",
    "experts": "nanovllm.models.moe.SparseMoE",
}


def load_kind(path: str) -> Any:
    """Import the class of a kind."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)

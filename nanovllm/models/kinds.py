"""Tables of kinds: decoders, mixers, MLPs, layers with states, and readers of architectures without a row in
``MODELS``.

Owns a table of each, the only place that names their modules; these are imported when a model has them.
Imports no torch.
"""

from importlib import import_module
from typing import Any

# keyed by ``Family.decoder``
DECODERS = {
    "plain": "nanovllm.models.decoder.Decoder",
    "gemma4": "nanovllm.models.gemma4.Gemma4Decoder",
}
# keyed by ``LayerConfig.mixer``
MIXERS = {
    "attention": "nanovllm.models.decoder.SelfAttention",
    "gated_delta_net": "nanovllm.models.recurrent.gated_delta_net.mixer.GatedDeltaNet",
    "mamba2": "nanovllm.models.recurrent.mamba2.mixer.Mamba2",
    "mamba2_beside_attention": "nanovllm.models.recurrent.mamba2.mixer.Mamba2BesideAttention",
    "short_conv": "nanovllm.models.recurrent.short_conv.mixer.ShortConv",
}
# keyed by ``Family.recurrent``: subclasses of ``recurrent.RecurrentConfig``
RECURRENT: dict[str, str] = {
    "gated_delta_net": "nanovllm.models.recurrent.gated_delta_net.config.GatedDeltaConfig",
    "mamba2": "nanovllm.models.recurrent.mamba2.config.Mamba2Config",
    "short_conv": "nanovllm.models.recurrent.short_conv.config.ShortConvConfig",
}
# keyed by ``LayerConfig.mlp``
MLPS = {
    "dense": "nanovllm.models.decoder.MLP",
    "ungated": "nanovllm.models.ungated.UngatedMLP",
    "experts": "nanovllm.models.moe.SparseMoE",
    "dense and experts": "nanovllm.models.gemma4.DenseAndExperts",
}

# (directory of a checkpoint, architecture) -> a ``ModelConfig``, or None if the reader does not know the architecture
READERS: tuple[str, ...] = (
    "nanovllm.transformers_backend.config.read_config",
)  # fmt: skip


def load_kind(path: str) -> Any:
    """Import the class of a kind, or a reader."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)

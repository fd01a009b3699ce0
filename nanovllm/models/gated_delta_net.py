"""The mixer of recurrent layers: a gated delta net, whose memory of a sequence is one row of states.

Owns its weights, how they are sharded (by key heads, each with its value heads), and the layer's views of the states.
``kernels/gated_delta/reference.py`` defines the computation; ``runner/recurrent.py`` has the rows.

Legend: T packed tokens, C hidden size, HK key heads of K, HV value heads of V (of this rank).
"""

from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import TPGroup
from nanovllm.errors import ConfigError
from nanovllm.kernels.gated_delta.reference import Chunks, GatedDeltaStates, GatedDeltaWeights
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.context import Context
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.weight_loader import Shard, Shards, row_loader
from nanovllm.models.config import LayerConfig, ModelConfig
from nanovllm.utils.checkpoint_tensor import CheckpointTensor


def has_quantized_linears(config: ModelConfig) -> bool:
    return config.fp8 is not None or config.has_packed_weights()


def packed_modules(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Checkpoint module -> (merged module, its parts there).

    With quantized weights b and a stay in 16 bits, as a product of their own.
    """
    if config.family.groups_delta_inputs:
        of_qkvz, of_ba = {"in_proj": "qkvz"}, {"in_proj_ba": "ba"}
    else:
        of_qkvz, of_ba = {"in_proj_qkv": "qkv", "in_proj_z": "z"}, {"in_proj_b": "b", "in_proj_a": "a"}
    merged = "in_proj_ba" if has_quantized_linears(config) else "in_proj"
    return {name: ("in_proj", parts) for name, parts in of_qkvz.items()} | {
        name: (merged, parts) for name, parts in of_ba.items()
    }


def delta_projection(hidden_size: int, sizes: dict[str, int], tp: TPGroup, precision: Any,
                     num_groups: int) -> MergedColumnParallelLinear:
    """Build the input projections as one product. ``shard_id`` has a letter for each one in a checkpoint's tensor.

    "qkv" are one after the other; "qkvz" and "ba" take turns, in a group for each key head.
    """
    joined = {"qkv": (tuple("qkv"), 0), "qkvz": (tuple("qkvz"), num_groups), "ba": (tuple("ba"), num_groups)}
    shards = Shards({name: Shard(size // tp.size, tp.rank, tp.size) for name, size in sizes.items()}, joined)
    return MergedColumnParallelLinear(hidden_size, shards, tp=tp, precision=precision)


class GatedDeltaNet(nn.Module):
    """The mixer of recurrent layers. Without ``states`` a prefill begins with zeros, and leaves nothing behind."""

    name: ClassVar[str] = "linear_attn"  # name in checkpoints

    def __init__(self, config: ModelConfig, layer: LayerConfig, rope: RotaryEmbedding | None,
                 backend: AttentionBackend, tp: TPGroup):
        super().__init__()
        delta, C = config.gated_delta, config.hidden_size
        assert delta is not None
        self.tp, self.ops = tp, kernels.select(folder="gated_delta")
        if not self.ops.takes_delta_heads(delta.key_dim, delta.value_dim):
            raise ConfigError(
                f"linear attention has key heads of {delta.key_dim} and value heads of {delta.value_dim}; the GPU's "
                "kernels take powers of two from 32 on. Use device='cpu'."
            )
        key_size, value_size = delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim
        sizes = {"q": key_size, "k": key_size, "v": value_size, "z": value_size}
        of_ba = dict.fromkeys("ba", delta.num_value_heads)
        kinds = [config.precision(layer, f"linear_attn.{name}") for name in ("in_proj", "out_proj")]
        self.in_proj_ba = None
        if has_quantized_linears(config):
            self.in_proj_ba = delta_projection(C, of_ba, tp, None, delta.num_key_heads)
        else:
            sizes |= of_ba
        self.in_proj = delta_projection(C, sizes, tp, kinds[0], delta.num_key_heads)
        self.num_gates = 2 * delta.num_value_heads // tp.size
        self.conv_sizes = [key_size, key_size, value_size]
        conv_shape = sum(self.conv_sizes) // tp.size, delta.conv_size
        self.conv_weight = nn.Parameter(torch.empty(conv_shape), requires_grad=False)
        self.conv_weight.weight_loader = self.load_conv  # type: ignore[attr-defined]
        of_heads = torch.empty(2, delta.num_value_heads // tp.size, dtype=torch.float32)  # fp32: they are exponents
        self.A_log, self.dt_bias = (nn.Parameter(values.clone(), requires_grad=False) for values in of_heads)
        for param in (self.A_log, self.dt_bias):
            param.weight_loader = row_loader(tp.rank, tp.size)  # type: ignore[attr-defined]
        self.norm = RMSNorm(delta.value_dim, config.rms_norm_eps)
        self.out_proj = RowParallelLinear(value_size, C, tp=tp, precision=kinds[1])
        self.weights = GatedDeltaWeights(
            self.conv_weight, self.A_log, self.dt_bias, self.norm.weight, self.norm.eps, delta.num_key_heads // tp.size
        )
        self.packed_modules_mapping = packed_modules(config)
        self.states: GatedDeltaStates | None = None

    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a row in the convolution's ring, and of the delta states."""
        channels, W = self.conv_weight.shape
        _, num_value_heads, key_dim, value_dim = self.weights.sizes
        return (W, channels), (num_value_heads, value_dim, key_dim)

    def load_conv(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        """From [channels of all ranks, 1, W]."""
        N, W = sum(self.conv_sizes), param.shape[1]
        loaded.fit([N, 1, W])
        flat = CheckpointTensor(loaded.name, [N, W], lambda index: loaded.read(index[:1]).squeeze(1))
        Shards.of(self.conv_sizes, self.tp.rank, self.tp.size).load(param, flat)

    def forward(self, residual: torch.Tensor, norm: RMSNorm | None, context: Context) -> torch.Tensor:
        """residual [T, C] -> this rank's partial sum of residual + mixer(norm(residual)), [T, C] or [N, C]."""
        u = self.in_proj(residual, norm)
        if self.in_proj_ba is not None:
            residual = residual[:]  # the norm has reduced SplitKPartials, if it was one, into this tensor
            ba = self.in_proj_ba(residual, norm)
        else:
            u, ba = u[:, : -self.num_gates], u[:, -self.num_gates :]
        chunks = Chunks.of(context.tensors)
        if chunks is not None:
            y = self.ops.gated_delta_prefill(u, ba, self.weights, self.states, context.positions, chunks)
        else:
            y = self.ops.gated_delta_decode(
                u, ba, self.weights, self.states, context.positions, context.slot_mapping, context.req_indices
            )
        if context.logits_indices is not None:
            y, residual = y[context.logits_indices], residual[context.logits_indices]
        return self.out_proj(y, residual=residual)

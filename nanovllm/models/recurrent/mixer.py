"""The shared part of the mixers of all recurrent layers: from the residual through the states and back.

Owns the layer's views of the states, and the weight of a causal convolution. ``runner/recurrent.py`` has the rows.

Legend: T packed tokens, N sampled tokens, C hidden size, W tokens that a convolution sees.
"""

from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.recurrent.reference import Chunks
from nanovllm.layers.context import Context
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.weight_loader import Shard, Shards
from nanovllm.models.config import ModelConfig
from nanovllm.utils.checkpoint_tensor import CheckpointTensor


class RecurrentMixer(nn.Module):
    """A mixer with states. Without ``states`` a prefill begins with zeros and stores nothing.

    A subclass makes ``in_proj``, ``weights`` and ``out_proj``.

    Attributes:
        name: name of the module in checkpoints.
        States: NamedTuple of a layer's tensors [rows, ...], in the order of ``RecurrentConfig.state_shapes``.
        weights: this rank's weights, as the operations take them.
    """

    name: ClassVar[str]
    States: ClassVar[Any]
    in_proj: MergedColumnParallelLinear
    out_proj: RowParallelLinear
    weights: Any
    adds_residual = True

    def __init__(self, config: ModelConfig, tp: TPGroup):
        super().__init__()
        assert config.recurrent is not None
        self.tp, self.ops = tp, kernels.select(folder=config.recurrent.operations)
        self.state_shapes = config.recurrent.state_shapes(tp.size)
        self.states: Any = None

    def project(self, residual: torch.Tensor, norm: RMSNorm | None) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """residual [T, C] -> the inputs of the operations, [T, ...] each, and the residual, all parts added."""
        return (self.in_proj(residual, norm),), residual

    def forward(self, residual: torch.Tensor, norm: RMSNorm | None, context: Context) -> torch.Tensor:
        """residual [T, C] -> this rank's partial sum of residual + mixer(norm(residual)), [T, C] or [N, C]."""
        inputs, residual = self.project(residual, norm)
        chunks = Chunks.of(context.tensors)
        if chunks is not None:
            y = self.ops.prefill(*inputs, self.weights, self.states, context.positions, chunks)
        else:
            y = self.ops.decode(
                *inputs, self.weights, self.states, context.positions, context.slot_mapping, context.req_indices
            )
        if context.logits_indices is not None:
            y, residual = y[context.logits_indices], residual[context.logits_indices]
        return self.out_proj(y, residual=residual if self.adds_residual else None)


def joint_projection(hidden_size: int, sizes: dict[str, int], joined: dict[str, tuple[tuple[str, ...], int]],
                     tp: TPGroup, precision: Any) -> MergedColumnParallelLinear:
    """Build input projections as one product: output features of all ranks by shard id; ``joined``: see ``Shards``."""
    shards = Shards({name: Shard(size // tp.size, tp.rank, tp.size) for name, size in sizes.items()}, joined)
    return MergedColumnParallelLinear(hidden_size, shards, tp=tp, precision=precision)


def conv_weight(sizes: list[int] | Shards, num_taps: int, tp: TPGroup) -> nn.Parameter:
    """The weight of a convolution per channel, [this rank's channels, W], loaded from [channels of all ranks, 1, W].

    ``sizes``: channels of each part over all ranks; every part is sharded by itself.
    """
    shards = Shards.of(sizes, tp.rank, tp.size)
    N = sum(shard.num_rows_in_checkpoint() for shard in shards.values())
    param = nn.Parameter(torch.empty(sum(shards.sizes), num_taps), requires_grad=False)

    def load(param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        loaded.fit([N, 1, num_taps])
        shards.load(param, CheckpointTensor(loaded.name, [N, num_taps], lambda i: loaded.read(i[:1]).squeeze(1)))

    param.weight_loader = load  # type: ignore[attr-defined]
    return param


def conv_bias(shards: Shards) -> nn.Parameter:
    """The bias of a convolution per channel, [this rank's channels]."""
    param = nn.Parameter(torch.empty(sum(shards.sizes)), requires_grad=False)
    param.weight_loader = shards.load  # type: ignore[attr-defined]
    return param

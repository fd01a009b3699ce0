"""The mixer of Mamba-2: its state is a matrix for each head, and the inputs of its convolution.

Owns its weights, and how they are sharded: by heads, with their groups. A single group is whole on every rank.
``kernels/mamba2/reference.py`` defines the computation. Falcon's layers add the results of attention and Mamba-2.

Legend: C hidden size, T packed tokens, H heads of P channels, G groups of N channels (of this rank).
"""

from typing import ClassVar

import torch
from torch import nn

from nanovllm.distributed.group import TPGroup
from nanovllm.errors import ConfigError
from nanovllm.kernels.mamba2.reference import Mamba2States, Mamba2Weights
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.context import Context
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.weight_loader import Shard, Shards, row_loader
from nanovllm.models.config import LayerConfig, ModelConfig
from nanovllm.models.decoder import SelfAttention
from nanovllm.models.recurrent.mamba2.config import Mamba2Config
from nanovllm.models.recurrent.mixer import RecurrentMixer, conv_bias, conv_weight


class Mamba2(RecurrentMixer):
    name: ClassVar[str] = "mamba"
    States = Mamba2States

    def __init__(self, config: ModelConfig, layer: LayerConfig, rope: RotaryEmbedding | None,
                 backend: AttentionBackend, tp: TPGroup):
        super().__init__(config, tp)
        mamba, C = config.recurrent, config.hidden_size
        assert isinstance(mamba, Mamba2Config)
        if not self.ops.takes_heads(mamba.head_dim, mamba.state_dim):
            raise ConfigError(
                f"Mamba has heads of {mamba.head_dim} with states of {mamba.state_dim}; the GPU's kernels take powers "
                "of two from 32 on. Use device='cpu'."
            )
        width, ranks = mamba.num_heads * mamba.head_dim, mamba.group_ranks(tp.size)
        of_heads = Shard(width // tp.size, tp.rank, tp.size)
        of_groups = Shard(mamba.num_groups * mamba.state_dim // ranks, tp.rank % ranks, ranks)
        of_steps = Shard(mamba.num_heads // tp.size, tp.rank, tp.size)
        parts = {"z": of_heads, "x": of_heads, "B": of_groups, "C": of_groups, "dt": of_steps}
        scales = zip(parts, mamba.input_scales, strict=True)
        shards = Shards({name: parts[name]._replace(scale=scale) for name, scale in scales})
        kinds = [config.precision(layer, f"mamba.{name}") for name in ("in_proj", "out_proj")]
        self.in_proj = MergedColumnParallelLinear(C, shards, tp=tp, precision=kinds[0])
        convolved = Shards({name: parts[name] for name in ("x", "B", "C")})
        self.conv_weight = conv_weight(convolved, mamba.conv_size, tp)
        self.conv_bias = conv_bias(convolved) if mamba.has_conv_bias else None
        values = torch.empty(3, of_steps.num_rows, dtype=torch.float32)  # fp32: exponents, and factors of fp32 sums
        self.A_log, self.dt_bias, self.D = (nn.Parameter(row.clone(), requires_grad=False) for row in values)
        for param in (self.A_log, self.dt_bias, self.D):
            param.weight_loader = row_loader(*of_steps.place)  # type: ignore[attr-defined]
        self.gate_norm = RMSNorm(of_heads.num_rows, config.rms_norm_eps, shard=of_heads) if mamba.norm else None
        scale = config.residual_scale * mamba.output_scale
        self.out_proj = RowParallelLinear(width, C, tp=tp, precision=kinds[1], scale=scale)
        self.weights = Mamba2Weights(
            self.conv_weight, self.conv_bias, self.A_log, self.dt_bias, self.D,
            None if self.gate_norm is None else self.gate_norm.weight, config.rms_norm_eps, mamba.head_dim,
            mamba.num_groups // ranks, mamba.norm == "first", self.mean_over_ranks if ranks < tp.size else None,
        )

    def mean_over_ranks(self, mean_squares: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(mean_squares) / self.tp.size


class Mamba2BesideAttention:
    """The sum of both mixers of the same input. ``parts`` are the two modules, by their names in checkpoints."""

    name: ClassVar[str] = "mamba_beside_attention"

    def __init__(self, config: ModelConfig, layer: LayerConfig, rope: RotaryEmbedding, backend: AttentionBackend,
                 tp: TPGroup):
        self.tp = tp
        self.self_attn = SelfAttention(config, layer, rope, backend, tp)
        self.mamba = Mamba2(config, layer, None, backend, tp)
        self.self_attn.adds_residual = self.mamba.adds_residual = False
        self.parts: dict[str, nn.Module] = {part.name: part for part in (self.self_attn, self.mamba)}

    def __call__(self, residual: torch.Tensor, norm: RMSNorm | None, context: Context) -> torch.Tensor:
        """residual [T, C] -> this rank's partial sum of residual + both mixers(norm(residual)), [T, C] or [N, C]."""
        o = self.self_attn(residual, norm, context)
        residual = residual[:]  # if the residual was SplitKPartials, the norm has reduced them into this tensor
        o += self.mamba(residual, norm, context)
        if self.tp.rank > 0:
            return o
        return o.add_(residual if context.logits_indices is None else residual[context.logits_indices])

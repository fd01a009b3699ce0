"""The MLP of Nemotron-H, without a gate: down(relu(up(x))^2)."""

import torch
from torch import nn

from nanovllm.distributed.group import TPGroup
from nanovllm.layers.context import Context
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.models.config import LayerConfig, ModelConfig


class UngatedMLP(nn.Module):
    """An MLP without a gate; with a ``size`` it is a shared expert."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, tp: TPGroup, name: str = "mlp", size: int = 0):
        super().__init__()
        C, I = config.hidden_size, size or layer.intermediate_size
        kinds = [config.precision(layer, f"{name}.{part}") for part in ("up_proj", "down_proj")]
        self.up_proj = ColumnParallelLinear(C, I, tp=tp, precision=kinds[0])
        self.down_proj = RowParallelLinear(I, C, tp=tp, precision=kinds[1], scale=config.residual_scale)

    def hidden(self, x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        """x [T, C] -> relu(up(norm(x)))^2, [T, I]."""
        return self.up_proj.ops.relu2(self.up_proj(x, norm))

    def forward(self, residual: torch.Tensor, norm: RMSNorm | None, context: Context) -> torch.Tensor:
        """residual [T, C] -> this rank's partial sum of residual + mlp(norm(residual)), [T, C]."""
        return self.down_proj(self.hidden(residual, norm), residual=residual)

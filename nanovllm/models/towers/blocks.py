"""Parts that the vision towers share: attention, the gated MLP, positions of patches.

A frame's patches are in an order in which the ``merge`` x ``merge`` patches of a token are neighbours, row by row; so
the tokens of a frame are row by row, too. T patches of a launch, C hidden size, H heads, D head size.
"""

from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from nanovllm.kernels.attention.reference import Segments
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.weight_loader import Shard, Shards


def attention(ops: SimpleNamespace, qkv: torch.Tensor, num_heads: int, cos_sin: torch.Tensor,
              segments: Segments) -> torch.Tensor:
    """Attention with rotary positions within segments, in both directions: qkv [T, 3 * C] -> [T, C]."""
    q, k, v = ops.rotate_qk(qkv, cos_sin, num_heads)
    return ops.packed_attention(q, k, v, segments, q.shape[2] ** -0.5).flatten(1)


class GatedMLP(nn.Module):
    """SwiGLU. Zeros pad its units to a multiple of 64: tensor cores take Qwen2.5-VL's 3,420 at half their rate."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool):
        super().__init__()
        size = -(-intermediate_size // 64) * 64
        order = [*range(intermediate_size), *[-1] * (size - intermediate_size)]
        shards = Shards({i: Shard(size, 0, 1, order) for i in range(2)})
        self.packed_modules_mapping = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, shards, bias=bias)
        self.down_proj = RowParallelLinear(size, hidden_size, bias=bias, head_order=order)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x, act="silu"), residual=residual)


def rope_theta(config: object) -> float:
    """``rope_theta`` of a ``vision_config``; older versions of transformers have no field for it."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)


def cos_sin_of(positions: torch.Tensor, by_row: torch.Tensor, by_column: torch.Tensor) -> torch.Tensor:
    """Cosines and sines, fp32 [T, D], of rows and columns, [T, 2], times their frequencies, fp32 [D / 4] each."""
    rows, columns = positions.float().unsqueeze(2).unbind(1)
    angles = torch.cat((rows * by_row, columns * by_column), dim=1)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def on(device: torch.device, values: np.ndarray) -> torch.Tensor:
    """The values on the device, by a copy that waits for nothing before it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@lru_cache(32)
def positions_of(rows: int, columns: int, merge: int) -> np.ndarray:
    """Row and column of each patch of a frame, int32 [rows * columns, 2]."""
    grid = np.indices((rows, columns), dtype=np.int32).reshape(2, rows // merge, merge, columns // merge, merge)
    return np.ascontiguousarray(grid.transpose(1, 3, 2, 4, 0).reshape(-1, 2))

"""RMSNorm (arXiv:1910.07467)."""

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import TPGroup
from nanovllm.layers.weight_loader import Shard, copy_shard
from nanovllm.utils.checkpoint_tensor import CheckpointTensor


class RMSNorm(nn.Module):
    """Normalises in fp32, rounds to the input's dtype, then scales. Reduces ``SplitKPartials`` given as input.

    Args:
        offset, scale: the weight is (w + offset) * scale of the checkpoint's w, in fp32: bf16 would lose bits of w.
        shard: the part of w that is this rank's, and its order.
    """

    sum_scale: nn.Parameter | None  # [1], multiplies the sum in ``add_to``; the owner loads it

    def __init__(self, size: int, eps: float = 1e-6, offset: float = 0.0, scale: float = 1.0,
                 shard: Shard | None = None):
        super().__init__()
        self.eps, self.offset, self.scale, self.shard = eps, offset, scale, shard or Shard(size, 0, 1)
        dtype = torch.get_default_dtype() if offset == 0 and scale == 1 else torch.float32
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        self.register_parameter("sum_scale", None)
        self.ops = kernels.select()

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        copy_shard(param, loaded, 0, *self.shard.place, self.shard.order)
        param.add_(self.offset).mul_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> the same shape."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + norm(x), all [T, size]; ``residual`` may be overwritten."""
        return self.ops.add_post_norm(x, self.weight, self.eps, residual, self.sum_scale)


def norm_all_heads(qkv: torch.Tensor, q_norm: RMSNorm, k_norm: RMSNorm, tp: TPGroup) -> torch.Tensor:
    """Normalise q and k of qkv [T, width] over the heads of all ranks."""
    mean_squares = None
    if tp.size > 1:  # fp32 [2, T]: q and k
        q, k, _ = qkv.tensor_split((len(q_norm.weight), len(q_norm.weight) + len(k_norm.weight)), dim=1)
        # replicas of a KV head count once each, in the sum and in the number of ranks
        means = torch.stack([x.float().square().mean(-1) for x in (q, k)])
        mean_squares = tp.all_reduce(means) / tp.size
    return q_norm.ops.qk_rms_norm(qkv, q_norm.weight, k_norm.weight, q_norm.eps, mean_squares)

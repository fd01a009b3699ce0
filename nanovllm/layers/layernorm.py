"""RMSNorm (arXiv:1910.07467)."""

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.layers.weight_loader import CheckpointTensor, copy_shard


class RMSNorm(nn.Module):
    """Normalised in fp32, rounded to the input's dtype, then scaled. Reduces ``SplitKPartials`` given as input.

    Args:
        offset, scale: the weight is (w + offset) * scale of the checkpoint's w, in fp32: bf16 would lose bits of w.
        order: of the entries of w.
        shard: (i, n): the weight is part i of n of the checkpoint's.
    """

    def __init__(self, size: int, eps: float = 1e-6, offset: float = 0.0, scale: float = 1.0,
                 order: list[int] | None = None, shard: tuple[int, int] = (0, 1)):
        super().__init__()
        self.eps, self.offset, self.scale, self.order, self.shard = eps, offset, scale, order, shard
        dtype = torch.get_default_dtype() if offset == 0 and scale == 1 else torch.float32
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        self.ops = kernels.select()

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        copy_shard(param, loaded, 0, *self.shard, order=self.order)
        param.add_(self.offset).mul_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> the same shape."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + norm(x), all [T, size]; ``residual`` may be overwritten."""
        return self.ops.add_post_norm(x, self.weight, self.eps, residual)

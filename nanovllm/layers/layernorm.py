"""Root-mean-square norm (arXiv:1910.07467), alone or together with the residual addition before it."""

import torch
from torch import nn

from nanovllm import kernels


class RMSNorm(nn.Module):
    """Computed in fp32, rounded to the input's dtype, then scaled; never changes its input ``x``."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.ops = kernels.select()

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        """x [T, C] -> normed [T, C]; with ``residual`` [T, C] -> (normed sum, sum); ``residual`` is used up."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps)
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

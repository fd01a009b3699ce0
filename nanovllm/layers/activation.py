"""The gated activation of the MLP."""

import torch
from torch import nn

from nanovllm import kernels


class SiluAndMul(nn.Module):
    """x [T, 2I] = (gate, up) -> silu(gate) * up, [T, I]."""

    def __init__(self):
        super().__init__()
        self.ops = kernels.select()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.silu_and_mul(x)

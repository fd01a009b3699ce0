"""The gated activation of the MLP."""

import torch
from torch import nn

from nanovllm import kernels


class SiluAndMul(nn.Module):
    """x [T, 2I] = (gate, up) -> act(gate) * up, [T, I]; ``act`` is "silu" or "gelu_tanh"."""

    def __init__(self, act: str = "silu"):
        super().__init__()
        self.act = act
        self.ops = kernels.select()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.act_and_mul(x, self.act)

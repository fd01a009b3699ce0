"""From logits to token ids, each row by its own rules and its own noise; greedy rows take the argmax."""

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.kernels.reference import SamplingColumns
from nanovllm.layers.parallel import ALONE, ParallelGroup


class Sampler(nn.Module):
    """Samples by the Gumbel-max trick: argmax of logit / temperature + noise, in one pass and without a softmax."""

    def __init__(self, group: ParallelGroup = ALONE):
        super().__init__()
        self.group = group
        self.ops = kernels.select()

    def forward(self, logits: torch.Tensor, rows: torch.Tensor, columns: SamplingColumns,
                last_token: torch.Tensor) -> torch.Tensor:
        """logits [B, V] (changed in place), rows int32 [B] -> token ids int32 [B]; the rows move on by one token."""
        thresholds = self.ops.logit_thresholds(logits, rows, columns)
        _, tokens = self.ops.sample(logits, rows, columns, thresholds, advance=(last_token, columns.length))
        return tokens

"""From logits to token ids, each row by its own rules and its own noise; greedy rows take the argmax."""

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.sampling.reference import SamplingState


class Sampler(nn.Module):
    """Samples by the Gumbel-max trick: argmax of logit / temperature + noise, in one pass and without a softmax."""

    def __init__(self, group: TPGroup = SINGLE_RANK):
        super().__init__()
        self.group = group
        self.ops = kernels.select()

    def forward(self, logits: torch.Tensor, rows: torch.Tensor, columns: SamplingState,
                last_token: torch.Tensor, sampled_tokens: torch.Tensor, has_filters: bool = True) -> torch.Tensor:
        """logits [B, V / size] (changed in place), rows int32 [B] -> token ids int32 [B], the same on every rank.

        The rows move on by one token, and the host finds it in ``sampled_tokens`` (``reference.advance_requests``).
        ``has_filters``: some row uses top-k, top-p or min-p.
        """
        if self.group.size > 1:
            if not has_filters:
                return self._sample_parts(logits, rows, columns, last_token, sampled_tokens)
            logits = self.group.all_gather(logits).transpose(0, 1).flatten(1)  # [B, V]
        thresholds = self.ops.filter_thresholds(logits, rows, columns)
        advance = last_token, columns.length, sampled_tokens
        _, tokens = self.ops.sample(logits, rows, columns, thresholds, advance=advance)
        return tokens

    def _sample_parts(self, logits: torch.Tensor, rows: torch.Tensor, columns: SamplingState,
                      last_token: torch.Tensor, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Each rank draws from its part of the vocabulary; the best of the winners wins, the lowest id of equals.

        The noise belongs to the id, so this draws what one rank would draw from the whole vocabulary.
        """
        start = self.group.rank * logits.shape[1]
        thresholds = self.ops.filter_thresholds(logits, rows, columns, start)
        values, tokens = self.ops.sample(logits, rows, columns, thresholds, start)
        parts = self.group.all_gather(torch.stack((values.view(torch.int32), tokens)))  # [size, 2, B], 8 bytes a row
        values, tokens = parts[:, 0].view(torch.float32), parts[:, 1]
        tokens = tokens.masked_fill(values < values.amax(0), torch.iinfo(torch.int32).max).amin(0)
        self.ops.advance_requests(tokens, rows, last_token, columns.length, sampled_tokens)
        return tokens

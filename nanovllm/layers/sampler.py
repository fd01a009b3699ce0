"""Sampling: logits -> token ids.

Owns the logits steps, their order, and the draw over tensor-parallel ranks. Sees requests only as ``SamplingState``.

B sequences, V vocabulary.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.sampling.reference import SamplingState
from nanovllm.sampling_params import FILTERS, MIN_TOKENS


class Logits(NamedTuple):
    """The logits of one launch, between two logits steps."""

    values: torch.Tensor  # [B, V / tp.size], steps may change them in place
    thresholds: torch.Tensor  # f32[B], smaller logits are not sampled; steps replace, never change them
    tp: TPGroup  # ranks that split the vocabulary

    @property
    def vocab_start(self) -> int:
        """Token id of column 0."""
        return self.tp.rank * self.values.shape[1]

    def gather(self) -> "Logits":
        """The whole vocabulary on every rank."""
        if self.tp.size == 1:
            return self
        values = self.tp.all_gather(self.values).transpose(0, 1).flatten(1)  # [B, V]
        return Logits(values, self.thresholds, SINGLE_RANK)


def mask_stop_ids(ops: SimpleNamespace, logits: Logits, req_indices: torch.Tensor, state: SamplingState) -> Logits:
    """-inf on stop ids until min_tokens were generated. Each rank masks its part of the vocabulary."""
    ops.mask_stop_ids(logits.values, req_indices, state, logits.vocab_start)
    return logits


def apply_filters(ops: SimpleNamespace, logits: Logits, req_indices: torch.Tensor, state: SamplingState) -> Logits:
    """Top-k, top-p and min-p, as a threshold per sequence. They need the whole vocabulary."""
    logits = logits.gather()
    return logits._replace(thresholds=ops.filter_thresholds(logits.values, req_indices, state))


LogitsStep = Callable[[SimpleNamespace, Logits, torch.Tensor, SamplingState], Logits]
# bit in SamplingParams.features -> step, in the order in which they run
LOGITS_STEPS: dict[int, LogitsStep] = {MIN_TOKENS: mask_stop_ids, FILTERS: apply_filters}


class Sampler(nn.Module):
    """Logits steps, then the Gumbel-max trick: argmax of logit / temperature + noise, in one pass without a softmax."""

    def __init__(self, max_num_seqs: int, tp: TPGroup = SINGLE_RANK):
        super().__init__()
        self.tp = tp
        self.ops = kernels.select()
        self.no_thresholds = torch.full((max_num_seqs,), -torch.inf, dtype=torch.float32)

    def forward(self, logits: torch.Tensor, req_indices: torch.Tensor, state: SamplingState, last_token: torch.Tensor,
                sampled_tokens: torch.Tensor, features: int) -> torch.Tensor:
        """Sample one token per sequence and append it to its request (``reference.advance_requests``).

        Args:
            logits: [B, V / tp.size], changed in place.
            req_indices: i32[B].
            last_token, sampled_tokens: written here.
            features: OR of the ``SamplingParams.features`` in the batch.

        Returns:
            Token ids i32[B], the same on every rank.
        """
        current = Logits(logits, self.no_thresholds[: len(logits)], self.tp)
        for bit, step in LOGITS_STEPS.items():
            if features & bit:
                current = step(self.ops, current, req_indices, state)
        values, thresholds, tp = current
        advance = last_token, state.length, sampled_tokens
        if tp.size == 1:
            return self.ops.gumbel_argmax(values, req_indices, state, thresholds, advance=advance)[1]
        # Each rank samples from its part of the vocabulary; the best score wins, the lowest id on a tie. The noise
        # depends on the id, not on the rank: the token is the same as without tensor parallelism.
        scores, tokens = self.ops.gumbel_argmax(values, req_indices, state, thresholds, current.vocab_start)
        candidates = tp.all_gather(torch.stack((scores.view(torch.int32), tokens)))  # [size, 2, B], 8 bytes a sequence
        scores, tokens = candidates[:, 0].view(torch.float32), candidates[:, 1]
        tokens = tokens.masked_fill(scores < scores.amax(0), torch.iinfo(torch.int32).max).amin(0)
        self.ops.advance_requests(tokens, req_indices, *advance)
        return tokens

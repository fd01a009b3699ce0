"""Sampling: logits -> token ids.

Owns the logits steps, their order, the draw over tensor-parallel ranks, and which logits log-probabilities are of. Sees
requests only as columns and tables on the device (``Requests``).

B sequences, V vocabulary.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.sampling.reference import AdjustmentTable, SamplingState
from nanovllm.sampling_params import FILTERS, LOGIT_ADJUSTMENTS, LOGPROBS, MIN_TOKENS, TOKEN_MASK


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


class Requests(NamedTuple):
    """The sampled requests, and what the device knows of all requests."""

    req_indices: torch.Tensor  # i32[B]
    state: SamplingState
    last_token: torch.Tensor  # i32[R + 1]
    token_mask: torch.Tensor | None = None  # i32[R + 1, ceil(V / 32)]; only where some request needs it, like
    adjustments: AdjustmentTable | None = None


def apply_token_mask(ops: SimpleNamespace, logits: Logits, requests: Requests) -> Logits:
    """-inf on tokens that a request does not allow."""
    ops.apply_token_mask(
        logits.values, requests.req_indices, requests.state, requests.token_mask, logits.vocab_start
    )
    return logits


def mask_stop_ids(ops: SimpleNamespace, logits: Logits, requests: Requests) -> Logits:
    """-inf on stop ids until min_tokens were generated. Each rank masks its part of the vocabulary."""
    ops.mask_stop_ids(logits.values, requests.req_indices, requests.state, logits.vocab_start)
    return logits


def adjust_logits(ops: SimpleNamespace, logits: Logits, requests: Requests) -> Logits:
    """Biases and penalties, in fp32."""
    values = ops.adjust_logits(
        logits.values, requests.req_indices, requests.state, requests.last_token, requests.adjustments,
        logits.vocab_start,
    )  # fmt: skip
    return logits._replace(values=values)


def apply_filters(ops: SimpleNamespace, logits: Logits, requests: Requests) -> Logits:
    """Top-k, top-p and min-p, as a threshold per sequence. They need the whole vocabulary."""
    logits = logits.gather()
    return logits._replace(thresholds=ops.filter_thresholds(logits.values, requests.req_indices, requests.state))


LogitsStep = Callable[[SimpleNamespace, Logits, Requests], Logits]
# bit in SamplingParams.features -> step, in the order in which they run
LOGITS_STEPS: dict[int, LogitsStep] = {
    TOKEN_MASK: apply_token_mask,
    MIN_TOKENS: mask_stop_ids,
    LOGIT_ADJUSTMENTS: adjust_logits,
    FILTERS: apply_filters,
}
IN_PLACE = TOKEN_MASK | MIN_TOKENS


class Sampler(nn.Module):
    """Logits steps, then the Gumbel-max trick: argmax of logit / temperature + noise, in one pass without a softmax."""

    def __init__(self, max_num_seqs: int, tp: TPGroup = SINGLE_RANK, processed_logprobs: bool = False):
        super().__init__()
        self.tp = tp
        self.processed_logprobs = processed_logprobs
        self.ops = kernels.select()
        self.no_thresholds = torch.full((max_num_seqs,), -torch.inf, dtype=torch.float32)

    def forward(self, logits: torch.Tensor, requests: Requests, sampled_tokens: torch.Tensor, features: int = 0,
                num_logprobs: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample one token per request and append it to its request (``reference.advance_requests``).

        Args:
            logits: [B, V / tp.size], changed in place.
            requests: their ``last_token`` and length are advanced.
            sampled_tokens: written here.
            features: OR of the ``SamplingParams.features`` in the batch.
            num_logprobs: alternatives to report beside each token.

        Returns:
            Token ids i32[B], the same on every rank, and with LOGPROBS ``reference.token_logprobs`` of them.
        """
        raw = current = Logits(logits, self.no_thresholds[: len(logits)], self.tp)
        if features & LOGPROBS and features & IN_PLACE and not self.processed_logprobs:
            current = raw._replace(values=logits.clone())
        for bit, step in LOGITS_STEPS.items():
            if features & bit:
                current = step(self.ops, current, requests)
        tokens = self.draw(current, requests, sampled_tokens)
        if not features & LOGPROBS:
            return tokens, None
        if not self.processed_logprobs:
            return tokens, self.score(raw.values, tokens, num_logprobs)
        values, thresholds, _ = current.gather()
        temperature = requests.state.temperature[requests.req_indices.long()]
        scales = torch.where(temperature > 0, 1 / temperature, 1.0)
        return tokens, self.ops.token_logprobs(values, tokens, num_logprobs, scales, thresholds)

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, num_logprobs: int) -> torch.Tensor:
        """``reference.token_logprobs`` of the model's distribution; logits [N, V / tp.size], tokens i32[N]."""
        whole = Logits(logits, self.no_thresholds, self.tp).gather()
        return self.ops.token_logprobs(whole.values, tokens, num_logprobs)

    def draw(self, logits: Logits, requests: Requests, sampled_tokens: torch.Tensor) -> torch.Tensor:
        values, thresholds, tp = logits
        req_indices, state = requests.req_indices, requests.state
        advance = requests.last_token, state.length, sampled_tokens
        if tp.size == 1:
            return self.ops.gumbel_argmax(values, req_indices, state, thresholds, advance=advance)[1]
        # Each rank samples from its part of the vocabulary; the best score wins, the lowest id on a tie. The noise
        # depends on the id, not on the rank: the token is the same as without tensor parallelism.
        candidates = req_indices.new_empty((2, len(req_indices)))  # 8 bytes a sequence
        self.ops.gumbel_argmax(values, req_indices, state, thresholds, logits.vocab_start, candidates=candidates)
        gathered = tp.all_gather(candidates.view(torch.float32)).view(torch.int32)  # floats go through peer memory
        return self.ops.pick_and_advance(gathered, req_indices, *advance)

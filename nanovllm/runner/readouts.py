"""Readers, the device halves of readouts: what each computes of a prefill's hidden states."""

from typing import Any

import torch

from nanovllm.models.decoder import CausalLM
from nanovllm.readouts.pooled_state import PooledRows
from nanovllm.readouts.prompt_logprobs import ScoredRows
from nanovllm.sampling.feature import Tensors
from nanovllm.sampling.sampler import Sampler
from nanovllm.sampling.token_logprobs import Logprobs


class Reader:
    """Computes one kind of ``ReadoutBatch``; one per rank."""

    def compute(self, rows: Any, hidden: torch.Tensor, every: Any, tensors: Tensors, model: CausalLM) -> torch.Tensor:
        """The values that ``ReadoutBatch.results`` splits.

        Args:
            rows: the message.
            hidden: hidden states of ``logits_indices``.
            every: those of all packed tokens, if a message ``needs_every_state``.
            tensors: the batch's arrays on the device.
        """
        raise NotImplementedError


class LogprobsReader(Reader):
    """``token_logprobs`` of ``ScoredRows``."""

    def __init__(self, sampler: Sampler, logprobs: Logprobs):
        self._sampler, self._logprobs = sampler, logprobs

    def compute(self, rows: ScoredRows, hidden: torch.Tensor, every: Any, tensors: Tensors,
                model: CausalLM) -> torch.Tensor:
        return self._logprobs.of_prompt(
            rows.num_top, every, tensors["target_rows"], tensors["target_ids"],
            lambda some: self._sampler.logits(model.compute_logits(some)),
        )  # fmt: skip


class StateReader(Reader):
    """Sums fp32 [P, C] of hidden states, of ``PooledRows``."""

    def compute(self, rows: PooledRows, hidden: torch.Tensor, every: Any, tensors: Tensors,
                model: CausalLM) -> torch.Tensor:
        if rows.of_last:
            return hidden[tensors["pooled_last"].long()].float()
        return sums(every[tensors["pooled_rows"].long()].float(), tensors["pooled_sizes"])


def sums(states: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Of rows fp32 [sum(sizes), C] the sums of the first sizes[0], the next sizes[1], ...: [P, C]."""
    # unsafe: it would wait for the device, to check the sizes
    return states if len(states) == len(sizes) else torch.segment_reduce(states, "sum", lengths=sizes, unsafe=True)


def make_readers(sampler: Sampler, logprobs: Logprobs) -> dict[str, Reader]:
    """The reader of each kind."""
    return {ScoredRows.kind: LogprobsReader(sampler, logprobs), PooledRows.kind: StateReader()}

"""What a prefill reports of its prompts besides tokens: log-probabilities of their tokens, and pooled hidden states."""

from typing import Any

import torch

from nanovllm.core import Batch, PrefillBatch
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.part import Part
from nanovllm.sampling.feature import Arrays, Tensors
from nanovllm.sampling.sampler import Sampler


class Readout(Part):
    """A part whose ``compute`` is sent to the host."""

    def compute(self, batch: Batch, hidden: torch.Tensor, every: Any, tensors: Tensors,
                model: CausalLM) -> torch.Tensor | None:
        """Device: of the hidden states of ``logits_indices`` and, where ``needs_every_state``, of every token."""
        raise NotImplementedError


class PromptLogprobs(Readout):
    """``token_logprobs`` of a batch's ``Targets``."""

    def __init__(self, sampler: Sampler):
        self._sampler = sampler

    def prepare(self, batch: Batch, arrays: Arrays) -> None:
        if isinstance(batch, PrefillBatch) and batch.targets is not None:
            arrays["target_rows"], arrays["target_ids"] = batch.targets.rows, batch.targets.token_ids

    def compute(self, batch: Batch, hidden: torch.Tensor, every: Any, tensors: Tensors,
                model: CausalLM) -> torch.Tensor | None:
        if "target_rows" not in tensors:
            return None
        return self._sampler.logprobs.of_targets(
            batch.targets, every, tensors["target_rows"], tensors["target_ids"],  # type: ignore[union-attr, arg-type]
            lambda some: self._sampler.logits(model.compute_logits(some)),
        )  # fmt: skip


class PooledStates(Readout):
    """Sums fp32 [P, C] of hidden states, of a batch's ``Pooled``."""

    def prepare(self, batch: Batch, arrays: Arrays) -> None:
        if isinstance(batch, PrefillBatch) and batch.pooled is not None:
            if batch.pooled.of_last:
                arrays["pooled_last"] = batch.pooled.rows  # indices of logits_indices
            else:
                arrays["pooled_rows"], arrays["pooled_sizes"] = batch.pooled.rows, batch.pooled.sizes

    def compute(self, batch: Batch, hidden: torch.Tensor, every: Any, tensors: Tensors,
                model: CausalLM) -> torch.Tensor | None:
        if "pooled_last" in tensors:
            return hidden[tensors["pooled_last"].long()].float()
        if "pooled_rows" in tensors:
            return sums(every[tensors["pooled_rows"].long()].float(), tensors["pooled_sizes"])
        return None


def sums(states: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Of rows fp32 [sum(sizes), C] the sums of the first sizes[0], the next sizes[1], ...: [P, C]."""
    # unsafe: it would wait for the device, to check the sizes
    return states if len(states) == len(sizes) else torch.segment_reduce(states, "sum", lengths=sizes, unsafe=True)

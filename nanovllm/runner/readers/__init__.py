"""The seam for readers, the device halves of readouts: each computes one kind of ``ReadoutBatch`` on one rank."""

from typing import Any, ClassVar

import torch

from nanovllm.models.decoder import CausalLM
from nanovllm.sampling.feature import Tensors
from nanovllm.sampling.sampler import Sampler


class Reader:
    """Computes one kind of ``ReadoutBatch``; one per rank.

    Attributes:
        kind: of the messages that it computes.
    """

    kind: ClassVar[str]

    def __init__(self, sampler: Sampler):
        self._sampler = sampler

    def compute(self, rows: Any, hidden: torch.Tensor, every: Any, tensors: Tensors, model: CausalLM) -> torch.Tensor:
        """The values that ``ReadoutBatch.results`` splits.

        Args:
            rows: the message.
            hidden: hidden states of ``logits_indices``.
            every: those of all packed tokens, if a message ``needs_every_state``.
            tensors: the batch's arrays on the device.
        """
        raise NotImplementedError

"""The two seams of a rank's runner.

A ``Part`` is what a capability keeps on the device beside requests and model. A ``Launcher`` is a way to run a forward
pass; the runner takes the first of its list that takes the batch.
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch

from nanovllm.core import Batch
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.cuda_graphs import CUDAGraphs
from nanovllm.sampling.feature import Arrays, Tensors


class Step(NamedTuple):
    """A batch that is prepared, and what runs it."""

    batch: Batch
    arrays: Arrays  # its inputs on the host
    tensors: Tensors  # the same on the device
    model: CausalLM
    graphs: CUDAGraphs | None


class Part:
    """Called once for every batch, in this order; a batch that does not use it pays nothing."""

    def prepare(self, batch: Batch, arrays: Arrays) -> None:
        """Host: put what the device must know into the arrays, which travel in one copy."""

    def write(self, batch: Batch, tensors: Tensors) -> None:
        """Device, before the forward pass: take it in."""

    def finish(self, batch: Batch, tensors: Tensors) -> None:
        """Device, after the forward pass."""

    def reset(self) -> None:
        """After an interrupted step: forget what the device knows."""


class Launcher:
    """A way to launch the forward pass of some batches.

    Attributes:
        fills_queue: two in a row may fill the device's launch queue.
    """

    fills_queue = False

    def takes(self, batch: Batch, arrays: Arrays) -> bool:
        """Host: whether it runs this batch; then it may pad the arrays, in place."""
        raise NotImplementedError

    def run(self, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The hidden states that are sampled from, as padded as a graph is; and those of every token, if a readout of
        the batch needs them."""
        raise NotImplementedError

    def rows(self, step: Step) -> torch.Tensor:
        """Request slots of the sampled states."""
        return step.tensors["sampled_req_indices"]

    def sample_graph(self, batch: Batch) -> Hashable | None:
        """The kind of graph that samples after it; None: there is none."""
        return None

    def sampled(self, batch: Batch, rows: torch.Tensor) -> None:
        """Device: its tokens are sampled."""

    def capture(self, model: CausalLM, graphs: CUDAGraphs) -> None:
        """Capture its graphs, if it has any."""

    def compile(self, model: CausalLM) -> None:
        """Issue each of its launches once, so that kernels are compiled."""

    def num_graphs(self) -> int:
        return 0

    def most_rows(self) -> int:
        """Of logits, in the largest batch that it samples."""
        return 0

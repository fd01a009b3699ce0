"""The plain ways to run a batch: a decode step, from a CUDA graph or kernel by kernel; a prefill kernel by kernel."""

import torch

from nanovllm.core import Batch, PrefillBatch
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.cuda_graphs import DECODE, SAMPLE, CUDAGraphs
from nanovllm.runner.inputs import DecodeInputs, prefill_inputs
from nanovllm.runner.part import Launcher, Step
from nanovllm.sampling.feature import Arrays, Feature
from nanovllm.sampling.sampler import Sampler


class DecodeLauncher(Launcher):
    """``sizes``: of the graphs, in sequences."""

    def __init__(self, inputs: DecodeInputs, sampler: Sampler, sizes: list[int]):
        self.inputs, self.sampler, self.sizes = inputs, sampler, sizes

    def takes(self, batch: Batch, arrays: Arrays) -> bool:
        return batch.is_decode

    def run(self, step: Step) -> tuple[torch.Tensor, None]:
        size = len(step.batch.req_indices)
        if step.graphs is not None:
            return step.graphs.replay(DECODE, size), None
        return step.model(*self.inputs(size, int(step.batch.lengths.max()))), None

    def rows(self, step: Step) -> torch.Tensor:
        return self.inputs.state.batch_req_indices

    def sample_graph(self, batch: Batch) -> str:
        return SAMPLE

    def sample(self, model: CausalLM, hidden: torch.Tensor, used: tuple[Feature, ...] = ()) -> torch.Tensor:
        """Sample hidden states [n, C] for the first n positions of the decode batch; token ids i32[n]."""
        return self.sampler(model.compute_logits(hidden), self.inputs.state.batch_req_indices[: len(hidden)], used)[0]

    def capture(self, model: CausalLM, graphs: CUDAGraphs) -> None:
        graphs.capture(DECODE, self.sizes, lambda size: model(*self.inputs(size)))
        graphs.capture(SAMPLE, self.sizes, lambda size: self.sample(model, graphs.output(DECODE, size)))

    def compile(self, model: CausalLM) -> None:
        for size in self.sizes:
            hidden = model(*self.inputs(size))
            for used in ((), self.sampler.compiled_at_start):
                self.sample(model, hidden, used)

    def num_graphs(self) -> int:
        return 2 * len(self.sizes)


class PrefillLauncher(Launcher):
    """Takes every prefill. ``block_tables``: of the request state."""

    fills_queue = True

    def __init__(self, block_tables: torch.Tensor):
        self._block_tables = block_tables

    def takes(self, batch: Batch, arrays: Arrays) -> bool:
        return not batch.is_decode

    def run(self, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, wanted = step.batch, step.tensors["logits_indices"].long()
        assert isinstance(batch, PrefillBatch)
        limits = int(batch.stops.max()), int((batch.stops - batch.starts).max())
        if not batch.needs_every_state:
            return step.model(*prefill_inputs(step.tensors, self._block_tables, *limits, wanted)), None
        every = step.model(*prefill_inputs(step.tensors, self._block_tables, *limits, None))
        return every[wanted], every

"""One rank's model and device: a batch in, two launches, token ids out.

Owns the order of a step: every part prepares its arrays, one copy takes them to the device, the first launcher that
takes the batch runs the model, the sampler draws. Every rank prepares its own inputs. ``forward`` and ``sample`` launch
and return; only ``StepHandle.wait`` and ``synchronize`` wait for the device.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.core import Batch, DecodeBatch
from nanovllm.distributed.workers import Worker, Workers
from nanovllm.models.decoder import CausalLM
from nanovllm.runner import memory
from nanovllm.runner.cuda_graphs import CUDAGraphs
from nanovllm.runner.device import step_threads
from nanovllm.runner.inputs import prefill_arrays, to_device
from nanovllm.runner.part import Equipment, Launcher, Step
from nanovllm.sampling.feature import Arrays, Masks, Process, Sampled, Tensors


class StepResult(NamedTuple):
    """Results of a step on the host."""

    token_ids: np.ndarray  # int32 [B], in the order of the batch; [B, Q] where each sequence has Q rows
    logprobs: np.ndarray | None  # packed by ``token_logprobs``, one row a token; None if no request wants them
    readouts: list[np.ndarray]  # results of the batch's ``readouts``


class StepHandle:
    """A step in flight; its results are on the host when the event has happened.

    ``outputs``: the report of the sampler, or None, and the results of readouts.
    """

    def __init__(self, rows: np.ndarray, workers: Workers | None, sampled_tokens: torch.Tensor,
                 event: torch.cuda.Event | None, *outputs: torch.Tensor | None):
        self._rows = rows  # rows of sampled_tokens to return
        self._sampled_tokens, self._event, self._workers, self._outputs = sampled_tokens, event, workers, outputs

    def wait(self) -> StepResult:
        """Block until the step is done."""
        if self._event is not None and self._workers is not None:
            self._workers.wait_until(self._event.query)
        elif self._event is not None:
            self._event.synchronize()
        # copies: requests keep them, and pinned memory is scarce
        outputs: list[Any] = [None if values is None else values.numpy().copy() for values in self._outputs]
        return StepResult(self._sampled_tokens.numpy()[self._rows], outputs[0], outputs[1:])


class Computed(NamedTuple):
    """A forward pass that was launched and is to be sampled."""

    step: Step
    launcher: Launcher
    hidden: torch.Tensor  # [>= num_sampled, C]
    readouts: list[torch.Tensor]  # results of the batch's readouts


class ModelRunner:
    """One rank's model and device.

    Args:
        equipment: what the factory has chosen (parts.py).
        workers: the other ranks, on rank 0 of several.

    Attributes:
        model: set by the start (start.py), as are
        num_kvcache_blocks: the same on every rank; and
        facts: of the parts, for the engine's factory; and
        weights: their updates, sleep and wake-up (weights.py).
        kv_cache: None while it is not allocated.
        max_in_flight: steps that may run ahead of the tokens the host has seen: 1 where a launch does not wait.
    """

    model: CausalLM
    num_kvcache_blocks: int
    facts: dict[str, Any]
    weights: Any

    def __init__(self, equipment: Equipment, workers: Workers | None = None):
        rank = equipment.rank
        self.rank, self.config, self.tp, self.device = rank, rank.config, rank.tp, rank.device
        self.workers = workers
        self.block_size = rank.config.kvcache_block_size
        self.request_state, self.sampler, self.decode = equipment.request_state, equipment.sampler, equipment.decode
        self.parts, self.launchers, self.readers = equipment.parts, equipment.launchers, equipment.readers
        self.max_in_flight = 1 if rank.device.type == "cuda" and not rank.config.enforce_eager else 0
        self.step_threads = step_threads(rank.config.model_config, rank.device, rank.tp.size)
        self.kv_cache: memory.KVCache | None = None
        self.graphs: CUDAGraphs | None = None
        self._computed: Computed | None = None  # set by ``forward`` for ``sample``
        self._process: Process | None = None  # on rank 0, for the step being sampled
        self._last_handle: StepHandle | None = None
        self._owner = os.getpid()

    # ------------------------------------------------------------ a step

    def forward(self, batch: Batch) -> None:
        """Launch the forward pass of a batch on every rank; ``sample`` must follow."""
        assert self._computed is None
        self.call("run_model", batch)

    def sample(self, masks: Masks | None = None, process: Process | None = None) -> StepHandle:
        """Launch the sampling of the forward pass before.

        ``masks`` and ``process``: inputs that depend on the step before, see ``Sampled``. The other ranks sample at
        once where no request of the batch needs them.
        """
        assert self._computed is not None
        batch = self._computed.step.batch
        self._process = process
        rows = self._computed.launcher.rows_on_host(batch)
        outputs = self.call("run_sampler", masks, ranks=self.sampler.waits(batch.req_indices))
        self._last_handle = StepHandle(rows, self.workers, self.request_state.sampled_tokens, *outputs)
        return self._last_handle

    def call(self, method: str, *args: Any, ranks: bool = True) -> Any:
        """Run a method on every rank, or in step with the others, and return this rank's result."""
        if self.workers is None:
            with self.step_threads():
                return getattr(self, method)(*args)
        with self.workers.guard(), self.step_threads():
            if ranks:
                self.workers.send(method, *args)
            return getattr(self, method)(*args)

    def loop(self, worker: Worker) -> None:
        """Another rank's main loop: run the calls of rank 0, until it dismisses this rank."""
        with self.step_threads():
            while (message := worker.receive()) is not None:
                method, *args = message
                if method == "weights":
                    worker.report("answer", self.weights.attempt(*args))
                    continue
                getattr(self, method)(*args)
                if method == "run_model" and not self.sampler.waits(args[0].req_indices):
                    self.run_sampler()

    @torch.inference_mode()
    def run_model(self, batch: Batch) -> None:
        """Launch the forward pass on this rank: one copy of the changes, then the model."""
        arrays = self.prepare(batch)
        launcher = next(each for each in self.launchers if each.takes(batch, arrays))
        tensors = to_device(arrays, self.device)
        if tensors:
            self.write(batch, tensors)
        if launcher.fills_queue and self.workers is not None and self._last_handle is not None:
            # If a worker died meanwhile, a launch into a full queue would block and hold the GIL that the watch needs.
            self._last_handle.wait()
        step = Step(batch, arrays, tensors, self.model, self.graphs)
        hidden, every = launcher.run(step)
        for part in self.parts if tensors else ():
            part.finish(batch, tensors)
        readouts = [self.readers[each.kind](each, hidden, every, tensors, self.model) for each in batch.readouts]
        if "sampled_from" in tensors:  # some of these sequences are sampled several times, or not
            hidden = hidden[tensors["sampled_from"].long()]
        self._computed = Computed(step, launcher, hidden, readouts)

    def prepare(self, batch: Batch) -> Arrays:
        """Host: make named arrays of the changes that a batch brings."""
        arrays: Arrays = {}
        if isinstance(batch, DecodeBatch):
            self.request_state.set_batch(batch, arrays)
        else:
            if len(batch.new):
                rows = np.zeros(len(batch.new), self.request_state.row)
                self.sampler.add(batch.new, rows, arrays)
                self.request_state.add(batch.new, rows, arrays)
            arrays |= prefill_arrays(batch, self.request_state.block_table_mirror, self.block_size)
        for part in self.parts:
            part.prepare(batch, arrays)
        return arrays

    def write(self, batch: Batch, tensors: Tensors) -> None:
        """Device: state, sampler and parts read their arrays."""
        self.request_state.write(tensors)
        self.sampler.write(tensors)
        for part in self.parts:
            part.write(batch, tensors)

    @torch.inference_mode()
    def run_sampler(self, masks: Masks | None = None) -> tuple:
        """Launch sampling. Returns the completion event and the device-to-host copies in flight."""
        assert self._computed is not None
        (step, launcher, hidden, readouts), self._computed = self._computed, None
        batch = step.batch
        n, report = len(batch.req_indices) * batch.num_rows, None
        used = self.sampler.used_by(batch.req_indices)
        if used and (arrays := self.sampler.begin(Sampled(batch.req_indices, batch.num_rows, masks, self._process))):
            self.sampler.write(to_device(arrays, self.device))
        graph = launcher.sample_graph(batch)
        if graph is not None and not used and self.graphs is not None:
            self.graphs.replay(graph, len(hidden) // batch.num_rows)  # padded like the forward pass
        elif n:
            req_indices = launcher.rows(step)[:n]
            _, report = self.sampler(self.model.compute_logits(hidden[:n]), req_indices, used)
            launcher.sampled(batch, req_indices)
        if self.device.type == "cpu":
            return None, report, *readouts
        on_host = [self._to_host(values) for values in (report, *readouts)]
        event = torch.cuda.Event()
        event.record()
        return event, *on_host

    def _to_host(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """A copy in pinned memory, complete when the stream gets there; the other ranks' are not needed."""
        if values is None or self.tp.rank > 0:
            return None
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)

    # ------------------------------------------------------------ between steps

    @torch.inference_mode()
    def on_model(self, function: Callable, *args: Any) -> Any:
        """A feature's way to the weights: ``function(model, *args)``."""
        return function(self.model, *args)

    def allocate_kv_cache(self) -> None:
        """Allocate a KV cache of ``num_kvcache_blocks``; layers get views of it, parts take their memory."""
        self.kv_cache = memory.allocate_kv_cache(
            self.model, self.num_kvcache_blocks, self.block_size, self.rank.kv_dtype, self.device
        )
        for part in self.parts:
            part.allocate(self.model, self.kv_cache, self.config.max_num_seqs)

    def release_kv_cache(self) -> None:
        """Give its memory back; until the next ``allocate_kv_cache`` the layers store nothing."""
        self.kv_cache = None
        memory.detach_kv_cache(self.model)
        for part in self.parts:
            part.release(self.model)

    def capture_cudagraph(self) -> None:
        """Capture graphs of forward passes and, apart, of sampling; with sampling features no graph samples."""
        self.graphs = CUDAGraphs()
        for launcher in self.launchers:
            launcher.capture(self.model, self.graphs)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """Wait for the device after an interrupted step, and forget its batch."""
        self.synchronize()
        self._computed = None
        self.request_state.reset()
        for part in self.parts:
            part.reset()

    def exit(self) -> None:
        """Free the device's memory; rank 0 dismisses the other ranks first."""
        if os.getpid() != self._owner:
            return  # in a forked child the device is not ours
        if self.workers is None:
            self.synchronize()
        else:
            self.workers.dismiss(kill=self._computed is not None)  # else they might wait for this rank to sample
            if not self.workers.join():
                return  # the device hangs, and freeing memory would wait for it
        tp, device = self.tp, self.device
        vars(self).clear()  # model, graphs, and whatever else holds the device's memory
        tp.close()  # after the graphs, which hold its memory
        if device.type == "cuda":
            torch.cuda.empty_cache()

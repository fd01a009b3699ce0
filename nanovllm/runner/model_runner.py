"""One rank's model and device: a batch in, two launches, token ids out.

Owns the model, the KV cache and the states of recurrent layers, the request state, the sampler and the CUDA graphs.
Knows nothing of queues. Every rank receives the batch and prepares its own inputs. ``forward`` and ``sample`` launch
and return; only ``StepHandle.wait`` and ``synchronize`` wait for the device.
"""

import os
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm import kernels
from nanovllm.config import Config
from nanovllm.core import VERIFY_ROWS, Batch, DecodeBatch, PrefillBatch, StateRows
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.distributed.workers import Worker, Workers
from nanovllm.kernels.delta.reference import CHUNK
from nanovllm.layers.attention_backends import select_backend
from nanovllm.layers.context import Context
from nanovllm.models.decoder import CausalLM
from nanovllm.runner import memory, recurrent
from nanovllm.runner.cascade import SharedPrefixes
from nanovllm.runner.cuda_graphs import CASCADE, DECODE, SAMPLE, CUDAGraphs, cascade_sizes, decode_sizes, verify_sizes
from nanovllm.runner.device import CPUThreads, select_device, select_dtype, step_threads, with_fitting_launches
from nanovllm.runner.inputs import decode_inputs, prefill_arrays, prefill_inputs, to_device
from nanovllm.runner.kv_scales import select_kv_dtype
from nanovllm.runner.micro_batches import MicroBatches
from nanovllm.runner.prefill_graphs import PADDED, SHORT, PrefillInputs, PrefillSizes, max_layer_work
from nanovllm.runner.request_state import RequestState
from nanovllm.runner.weights import Weights
from nanovllm.sampling.feature import Arrays, Feature, Logits, Tensors
from nanovllm.sampling.masks import Masks
from nanovllm.sampling.processors import Process
from nanovllm.sampling.sampler import Sampler


class StepResult(NamedTuple):
    """What a step computed, on the host."""

    token_ids: np.ndarray  # int32 [num_sampled], in the order of the batch; of a verify step [B, Q]
    logprobs: np.ndarray | None  # of each, packed as by ``token_logprobs``; None if no request wants them
    target_logprobs: np.ndarray | None  # the same of the batch's ``targets``
    pooled: np.ndarray | None  # sums of hidden states, fp32 [P, C], of the batch's ``pooled``

    def part(self, rows: np.ndarray, columns: np.ndarray) -> "StepResult":
        """See ``DecodeBatch.part``."""
        logprobs = None if self.logprobs is None else self.logprobs[rows, columns]
        return self._replace(token_ids=self.token_ids[rows, columns], logprobs=logprobs)


class StepHandle:
    """A step in flight: what it computes is on its way to the host, and there when the event has happened."""

    def __init__(self, rows: np.ndarray, workers: Workers | None, sampled_tokens: torch.Tensor,
                 event: torch.cuda.Event | None = None, logprobs: torch.Tensor | None = None,
                 target_logprobs: torch.Tensor | None = None, pooled: torch.Tensor | None = None):
        self._rows = rows  # of sampled_tokens
        self._sampled_tokens, self._event, self._workers = sampled_tokens, event, workers
        self._results = logprobs, target_logprobs, pooled

    def wait(self) -> StepResult:
        """Block until the step is done."""
        if self._event is not None and self._workers is not None:
            self._workers.wait_until(self._event.query)
        elif self._event is not None:
            self._event.synchronize()
        # copies: requests keep them, and pinned memory is scarce
        logprobs, *of_prompts = (None if values is None else values.numpy().copy() for values in self._results)
        if logprobs is not None:
            logprobs = logprobs.reshape(*self._rows.shape, -1)
        return StepResult(self._sampled_tokens.numpy()[self._rows], logprobs, *of_prompts)


class Computed(NamedTuple):
    """A forward pass that was launched and is to be sampled."""

    batch: Batch
    hidden: torch.Tensor  # [>= num_sampled, C]
    req_indices: torch.Tensor  # int32 [>= num_sampled]
    target_logprobs: torch.Tensor | None = None
    pooled: torch.Tensor | None = None


class ModelRunner:
    """One rank's model and device.

    Args:
        config: the engine's options.
        tp: this rank's tensor-parallel group.
        workers: the other ranks, on rank 0 of several.

    Attributes:
        model, kv_cache, num_kvcache_blocks: set by the start (start.py); the last is the same on every rank.
        states, num_snapshots: the same for recurrent layers, if there are any.
        max_in_flight: steps that may run ahead of the tokens the host has seen: 1 where a launch does not wait.
        weights: their updates, sleep and wake-up.
    """

    model: CausalLM
    kv_cache: torch.Tensor
    num_kvcache_blocks: int
    states: recurrent.DeltaStates | None = None
    num_snapshots = 0

    def __init__(self, config: Config, tp: TPGroup = SINGLE_RANK, workers: Workers | None = None):
        self.config, self.tp, self.workers = config, tp, workers
        self.block_size = config.kvcache_block_size
        self.max_blocks = -(-config.max_model_len // self.block_size)
        self.device = select_device(config.device, tp.rank, tp.size)
        self.dtype = select_dtype(config.dtype, config.model_config.dtype, self.device)
        self.kv_dtype = select_kv_dtype(config, self.dtype, self.device)
        self.state_dtype = getattr(torch, config.state_dtype)
        self.step_threads = step_threads(config.model_config, self.device, tp.size)
        self.ops = kernels.select(self.device.type)
        model = config.model_config
        gqa_group = model.num_attention_heads // max(model.num_key_value_heads, tp.size)
        self.backend = select_backend(
            config.attention_backend, self.device.type, self.dtype, gqa_group, model.head_dim, model.family.sinks
        )
        config = with_fitting_launches(config, self.device)
        self.config = config = recurrent.with_fitting_slots(config, self.backend, tp, self.dtype, self.device)
        on_gpu = self.device.type == "cuda"
        self.use_graphs = on_gpu and not config.enforce_eager and self.backend.capturable
        self.max_in_flight = 1 if on_gpu and not config.enforce_eager else 0
        self.prefill_sizes = PrefillSizes()
        if self.use_graphs:
            devices = range(tp.size) if tp.size > 1 else [self.device]
            max_work = max_layer_work(devices, has_fp8=model.fp8 is not None)
            self.prefill_sizes = PrefillSizes.of(config, self.backend, tp.peers is not None, max_work)
        self.graphs: CUDAGraphs | None = None
        self._computed: Computed | None = None  # by ``forward``, until ``sample``
        self._process: Process | None = None  # on rank 0, of the step that is sampled
        self._last_handle: StepHandle | None = None
        self._owner = os.getpid()
        self.weights = Weights(self)
        waiting = {} if workers is None else {"wait_until": workers.wait_until}  # not for ever, on rank 0
        self.micro_batches = MicroBatches(config, tp, self.device, **waiting)
        if on_gpu:
            torch.cuda.set_device(self.device)
        R, vocab_size = config.max_num_seqs, model.vocab_size
        self.decode_sizes = decode_sizes(R) if model.has_lm_head else []
        self.verify_sizes = dict.fromkeys(VERIFY_ROWS, verify_sizes(R)) if config.speculates else {}
        num_drafted = max((sizes[-1] * (num_rows - 1) for num_rows, sizes in self.verify_sizes.items()), default=0)
        self.request_state = state = RequestState(R, self.max_blocks, self.device, Sampler.columns, num_drafted)
        processed = config.logprobs_mode == "processed_logprobs"
        self.sampler = Sampler(state, tp, config.max_model_len, vocab_size, processed)
        shares_prefixes = self.backend.shares_prefixes and not all(model.windows)
        self.shared_prefixes = SharedPrefixes(state.block_table_mirror, self.block_size, self.device, shares_prefixes)
        self.prefill_inputs = PrefillInputs(self.prefill_sizes, state.block_tables, config.max_model_len)

    # ------------------------------------------------------------ a step

    def forward(self, batch: Batch) -> None:
        """Launch the forward pass of a batch on every rank. ``sample`` must follow before the next one."""
        assert self._computed is None
        start = perf_counter()
        self.call("run_model", batch)
        if batch.is_decode and self.workers is None and isinstance(self.step_threads, CPUThreads):
            self.step_threads.trials.took(batch.num_tokens, perf_counter() - start)

    def sample(self, masks: Masks | None = None, process: Process | None = None) -> StepHandle:
        """Launch the sampling of the forward pass before, a token for each of its batch's ``req_indices``.

        ``masks``: of its constrained requests. They depend on the tokens of the step before, so the other ranks wait
        for them; without a constrained request they sample at once. ``process``: calls its logits processors, whose
        results the other ranks wait for in a collective.
        """
        assert self._computed is not None
        batch = self._computed.batch
        self._process = process
        outputs = self.call("run_sampler", masks, ranks=self.sampler.masks.are_due(batch.req_indices))
        rows = batch.req_indices if not isinstance(batch, DecodeBatch) else self.request_state.rows_on_host(batch)
        self._last_handle = StepHandle(rows, self.workers, self.request_state.sampled_tokens, *outputs)
        return self._last_handle

    def call(self, method: str, *args: Any, ranks: bool = True) -> Any:
        """Run a method on every rank, or in step with the others, and return this rank's result."""
        if self.workers is None:
            with self.step_threads:
                return getattr(self, method)(*args)
        with self.workers.guard(), self.step_threads:
            if ranks:
                self.workers.send(method, *args)
            return getattr(self, method)(*args)

    def loop(self, worker: Worker) -> None:
        """Another rank's main loop: run what rank 0 calls, until it is told to leave."""
        with self.step_threads:
            while (message := worker.receive()) is not None:
                method, *args = message
                if method == "weights":
                    worker.report("answer", self.weights.attempt(*args))
                    continue
                getattr(self, method)(*args)
                if method == "run_model" and not self.sampler.masks.are_due(args[0].req_indices):
                    self.run_sampler()

    @torch.inference_mode()
    def run_model(self, batch: Batch) -> None:
        """Launch the forward pass on this rank: one copy of what has changed, then the model."""
        arrays: Arrays = {}
        if isinstance(batch, DecodeBatch):
            self.request_state.set_batch(batch, arrays)
            if batch.drafts is None:
                self.shared_prefixes.set_batch(batch, arrays)
            arrays |= recurrent.copy_arrays(batch.state_copies)
            if arrays:
                tensors = to_device(arrays, self.device)
                self.write(tensors)
                self._copy_states(tensors)
            self._computed = self.run_decode(batch)
        else:
            self.prepare_new(batch, arrays)
            inputs = prefill_arrays(batch, self.request_state.block_table_mirror, self.block_size)
            if batch.states is not None:
                inputs |= recurrent.chunk_arrays(batch)
            graph = self.prefill_sizes.fit(inputs)
            tensors = to_device(arrays | inputs, self.device)
            self.write(tensors)
            self._computed = self.run_prefill(batch, inputs, tensors, graph)

    @torch.inference_mode()
    def run_sampler(self, masks: Masks | None = None) -> tuple:
        """Launch the sampling on this rank: an event, and what else of ``StepResult`` is on its way to the host."""
        assert self._computed is not None
        (batch, hidden, req_indices, *of_prompts), self._computed = self._computed, None
        if masks is not None:
            self.sampler.write(to_device(self.sampler.masks.arrays_of(masks), self.device))
        num_rows = batch.num_rows
        n, logprobs = len(batch.req_indices) * num_rows, None
        used = self.sampler.used_by(batch.req_indices)
        if self.sampler.processors in used:
            self.sampler.processors.set_batch(batch.req_indices, self._process, num_rows)
        if batch.is_decode and not used and self.graphs is not None:
            kind = SAMPLE if num_rows == 1 else (SAMPLE, num_rows)
            self.graphs.replay(kind, len(hidden) // num_rows)  # as padded as the forward pass
        elif n:
            num_top = self.sampler.logprobs.num_top(batch.req_indices) if used else 0
            logits = self.model.compute_logits(hidden[:n])
            _, logprobs = self.sampler(logits, req_indices[:n], used, num_top)
            if num_rows > 1:
                self.request_state.accept(req_indices[:n], num_rows)
        if self.device.type == "cpu":
            return None, logprobs, *of_prompts
        on_host = [self._to_host(values) for values in (logprobs, *of_prompts)]
        event = torch.cuda.Event()
        event.record()
        return event, *on_host

    def prepare_new(self, batch: PrefillBatch, arrays: Arrays) -> None:
        """Host: what the device must know of the requests that a batch admits."""
        if len(batch.new):
            rows = np.zeros(len(batch.new), self.request_state.row)
            self.sampler.add(batch.new, rows, arrays)
            self.request_state.add(batch.new, rows, arrays)
            self.shared_prefixes.add()

    def write(self, tensors: Tensors) -> None:
        """Device: each part of the state takes in what it has put into the arrays."""
        for part in (self.request_state, self.sampler, self.shared_prefixes):
            part.write(tensors)

    def _to_host(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """A copy in pinned memory, complete when the stream gets there; the other ranks' are not needed."""
        if values is None or self.tp.rank > 0:
            return None
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)

    # ------------------------------------------------------------ the forward pass

    def run_decode(self, batch: DecodeBatch) -> Computed:
        size, groups = len(batch.req_indices), self.shared_prefixes.groups
        req_indices = self.request_state.batch_req_indices
        if batch.drafts is not None:
            return self._run_verify(batch, size, batch.num_rows)
        if self.graphs is None:
            hidden = self.model(*self.decode_inputs(size, int(batch.lengths.max()), groups is not None))
        else:
            hidden = self.graphs.replay(DECODE if groups is None else CASCADE, size, self._run_cascade)
        return Computed(batch, hidden, req_indices)

    def _run_verify(self, batch: DecodeBatch, size: int, num_rows: int) -> Computed:
        graphs = self.graphs
        hidden = self._run_rows(num_rows, size) if graphs is None else graphs.replay((DECODE, num_rows), size)
        return Computed(batch, hidden, self.request_state.rows(size, num_rows))

    def _run_cascade(self, size: int) -> torch.Tensor:  # to where the sampling graph reads
        hidden = self.model(*self.decode_inputs(size, self.config.max_model_len, shares_prefixes=True))
        return self.graphs.output(DECODE, size).copy_(hidden)  # type: ignore[union-attr]

    def run_prefill(self, batch: PrefillBatch, arrays: Arrays, tensors: Tensors,
                    graph: tuple[str, int] | None) -> Computed:
        """``arrays`` are the inputs on the host, and among ``tensors`` on the device; ``graph`` fits them."""
        logits_indices = tensors["logits_indices"].long()
        self._copy_blocks(tensors, "prefix_from", "prefix_to")
        if graph is not None:
            assert self.graphs is not None
            self.prefill_inputs.write(tensors)
            every = self.graphs.replay(*graph)
            hidden = every[logits_indices]
        else:
            splits = self.micro_batches.takes(batch)
            if self.workers is not None and self._last_handle is not None and not self.micro_batches.follows(splits):
                # Two prefills could fill the device's launch queue. If a worker then died, the next launch would block
                # while holding the GIL, and so block the watch thread.
                self._last_handle.wait()
            every = hidden = self._launch_prefill(batch, arrays, tensors, logits_indices, splits)
            if batch.needs_every_state:
                hidden = every[logits_indices]
        self._copy_blocks(tensors, "copy_from", "copy_to")
        self._copy_states(tensors)
        pooled = None
        if batch.pooled is not None and batch.pooled.of_last:
            pooled = hidden[tensors["pooled_last"].long()].float()
        elif batch.pooled is not None:
            pooled = sums(every[tensors["pooled_rows"].long()].float(), tensors["pooled_sizes"])
        if "sampled_from" in tensors:  # completions are forked, or some of these are not sampled
            hidden = hidden[tensors["sampled_from"].long()]
        target_logprobs = None
        if batch.targets is not None:
            target_logprobs = self.sampler.logprobs.of_targets(
                batch.targets, every, tensors["target_rows"], tensors["target_ids"], self._logits
            )
        return Computed(batch, hidden, tensors["sampled_req_indices"], target_logprobs, pooled)

    def _copy_blocks(self, tensors: Tensors, sources: str, targets: str) -> None:
        if sources in tensors:
            memory.copy_blocks(self.kv_cache, tensors[sources].long(), tensors[targets].long())

    def _copy_states(self, tensors: Tensors) -> None:
        if "rows_from" in tensors:
            assert self.states is not None
            recurrent.copy_rows(self.states, tensors["rows_from"].long(), tensors["rows_to"].long())

    def _launch_prefill(self, batch: PrefillBatch, arrays: Arrays, tensors: Tensors, logits_indices: torch.Tensor,
                        splits: bool) -> torch.Tensor:
        """The hidden states of ``logits_indices``, or of all tokens where the batch needs others."""
        block_tables = self.request_state.block_tables
        if splits:
            return self.micro_batches.run(self.model.model, arrays, block_tables)
        limits = int(batch.stops.max()), int((batch.stops - batch.starts).max())
        wanted = None if batch.needs_every_state else logits_indices
        return self.model(*prefill_inputs(tensors, block_tables, *limits, wanted))

    def _logits(self, hidden: torch.Tensor) -> Logits:
        return self.sampler.logits(self.model.compute_logits(hidden))

    def decode_inputs(self, size: int, max_context: int, shares_prefixes: bool = False,
                      num_rows: int = 1) -> tuple[torch.Tensor, Context]:
        groups = self.shared_prefixes.columns if shares_prefixes else None
        return decode_inputs(self.request_state, size, self.block_size, max_context, self.ops, groups, num_rows)

    # ------------------------------------------------------------ between steps

    @torch.inference_mode()
    def head(self, token_ids: list[int] | None) -> np.ndarray:
        """See ``CausalLM.head``; on the host."""
        return self.model.head(token_ids).cpu().numpy()

    def allocate_kv_cache(self) -> None:
        """A KV cache of ``num_kvcache_blocks``, and the rows of recurrent layers; each layer gets its views of it."""
        self.kv_cache = memory.allocate_kv_cache(
            self.model, self.num_kvcache_blocks, self.block_size, self.kv_dtype, self.device
        )
        num_rows = self.config.max_num_seqs + 1 + self.num_snapshots
        self.states = recurrent.allocate_states(self.model, num_rows, self.dtype, self.state_dtype, self.device)

    def _run_rows(self, num_rows: int, size: int) -> torch.Tensor:
        return self.model(*self.decode_inputs(size, self.config.max_model_len, num_rows=num_rows))

    def _sample_rows(self, num_rows: int, size: int) -> torch.Tensor:
        return self.sample_verified(self.graphs.output((DECODE, num_rows), size), num_rows)  # type: ignore[union-attr]

    def sample_verified(self, hidden: torch.Tensor, num_rows: int, used: tuple[Feature, ...] = ()) -> torch.Tensor:
        """The same in a verify step, for hidden states [n * num_rows, C]; and requests accept what is right."""
        rows = self.request_state.rows(len(hidden) // num_rows, num_rows)
        tokens, _ = self.sampler(self.model.compute_logits(hidden), rows, used)
        self.request_state.accept(rows, num_rows)
        return tokens

    def sample_first(self, hidden: torch.Tensor, used: tuple[Feature, ...] = ()) -> torch.Tensor:
        """Sample hidden states [n, C] for the first n positions of the decode batch; token ids i32[n]."""
        logits = self.model.compute_logits(hidden)
        return self.sampler(logits, self.request_state.batch_req_indices[: len(hidden)], used)[0]

    def capture_cudagraph(self) -> None:
        """Capture the forward pass and the sampling of every decode size, and the forward pass of prefills.

        Sampling is a graph of its own: the tokens of the step before are taken in between, and a batch whose requests
        use a feature launches the sampler kernel by kernel.
        """
        self.graphs = graphs = CUDAGraphs()
        model, inputs, max_context = self.model, self.prefill_inputs, self.config.max_model_len
        graphs.capture(DECODE, self.decode_sizes, lambda size: model(*self.decode_inputs(size, max_context)))
        graphs.capture(SAMPLE, self.decode_sizes, lambda size: self.sample_first(graphs.output(DECODE, size)))
        for num_rows, sizes in self.verify_sizes.items():
            for kind, run in ((DECODE, self._run_rows), (SAMPLE, self._sample_rows)):
                graphs.capture((kind, num_rows), sizes, partial(run, num_rows))
        graphs.capture(SHORT, list(self.prefill_sizes.short), lambda size: model(*inputs.short(size)))
        graphs.capture(PADDED, [n for n, _ in self.prefill_sizes.padded], lambda size: model(*inputs.padded(size)))
        graphs.sizes[CASCADE] = cascade_sizes(self.decode_sizes)  # captured when a batch needs them

    @property
    def state_rows(self) -> StateRows | None:
        """What the scheduler must know of recurrent layers; None without any."""
        return StateRows(self.num_snapshots, CHUNK) if self.config.model_config.delta is not None else None

    @property
    def min_copied_tokens(self) -> int | None:
        """See ``BlockManager``; None with recurrent layers, whose state at the end of so much nobody has."""
        return 16 if self.device.type == "cpu" and self.state_rows is None else None

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """After an interrupted step: wait for the device and forget what it was sent."""
        self.synchronize()
        self._computed = None
        self.request_state.reset()
        self.shared_prefixes.reset()

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
        self.graphs = self._computed = None
        for name in ("model", "kv_cache", "states", "request_state", "sampler", "shared_prefixes", "prefill_inputs",
                     "backend", "weights", "micro_batches"):  # fmt: skip
            self.__dict__.pop(name, None)
        self.tp.close()  # after the graphs, which hold its memory
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def sums(states: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Of rows fp32 [sum(sizes), C] the sums of the first sizes[0], the next sizes[1], ...: [P, C]."""
    # unsafe: it would wait for the device, to check the sizes
    return states if len(states) == len(sizes) else torch.segment_reduce(states, "sum", lengths=sizes, unsafe=True)

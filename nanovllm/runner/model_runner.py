"""One rank's model and device: a batch in, a launch, token ids out.

Owns the model, the KV cache, the request state, the sampler and the CUDA graphs. Knows nothing of queues. ``run``
launches and returns a handle; only ``StepHandle.wait`` and ``synchronize`` wait for the device.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from nanovllm import kernels
from nanovllm.config import Config
from nanovllm.distributed.channel import Channel
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.distributed.workers import Workers
from nanovllm.engine.scheduler import Batch
from nanovllm.layers.attention_backends import select_backend
from nanovllm.layers.context import Context
from nanovllm.layers.sampler import Requests, Sampler
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import init_dummy_weights, load_model
from nanovllm.runner.cuda_graphs import CUDAGraphs
from nanovllm.runner.device import model_defaults, select_device, select_dtype, step_threads, translate_oom
from nanovllm.runner.graph_sizes import decode_sizes, grouped_sizes
from nanovllm.runner.kv_scales import calibrate, select_kv_dtype
from nanovllm.runner.memory import (
    GRAPH_BYTES,
    allocate_kv_cache,
    block_bytes,
    copy_blocks,
    no_room,
    num_blocks_that_fit,
)
from nanovllm.runner.micro_batches import MicroBatches
from nanovllm.runner.prefill_graphs import PrefillInputs, PrefillSizes, max_layer_work
from nanovllm.runner.prepare import prepare, prepare_masks
from nanovllm.runner.request_state import RequestState, StagedWrites
from nanovllm.runner.residency import Residency
from nanovllm.runner.sampling_tables import SamplingTables, StagedTables
from nanovllm.runner.step import StepHeader, StepInput, StepKind, from_words, to_words, unpack
from nanovllm.runner.warmup import compile_kernels
from nanovllm.sampling_params import FILTERS, GUIDED, MIN_TOKENS

WARMUP_FEATURES = MIN_TOKENS | FILTERS  # the other kernels are compiled when a request needs them
SAMPLE, GROUPED = "sample", "grouped"  # graphs: of sampling without logits steps, of decode steps with prefix groups
LOGITS_ROWS = 256  # prompt tokens that are scored at once: bounds the memory of their logits


@dataclass(frozen=True)
class StepResult:
    """What a launch computed, on the host.

    Attributes:
        token_ids: int32 [num_sampled], in the order of the batch.
        logprobs: of the sampled tokens, packed as by ``reference.token_logprobs``; None if no request wants them.
        prompt_logprobs: the same of the batch's targets, in the order of its sequences.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    prompt_logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class StepOutput:
    """What a launch computes besides tokens: tensors on their way to the host, there when the event has happened."""

    event: torch.cuda.Event | None = None  # None on the CPU
    logprobs: torch.Tensor | None = None
    prompt_logprobs: torch.Tensor | None = None


class Computed(NamedTuple):
    """A forward pass, before it is sampled."""

    hidden: torch.Tensor  # [num_sampled, C]
    req_indices: torch.Tensor  # int32 [num_sampled]
    prompt_logprobs: torch.Tensor | None = None


class StepHandle:
    """A launch in flight. ``output`` is None while a guided step waits for its masks."""

    def __init__(self, sampled_tokens: torch.Tensor, batch: Batch, output: StepOutput | None,
                 workers: Workers | None):
        self.output = output
        self._sampled_tokens = sampled_tokens
        self._index = batch.lengths % 2, batch.req_indices
        self._workers = workers

    def wait(self) -> StepResult:
        """Block until the launch is done."""
        assert self.output is not None
        event, logprobs, prompt_logprobs = self.output.event, self.output.logprobs, self.output.prompt_logprobs
        if event is not None and self._workers is not None:
            self._workers.wait_until(event.query)
        elif event is not None:
            event.synchronize()
        return StepResult(
            self._sampled_tokens.numpy()[self._index],
            # copies: requests keep them, and pinned memory is scarce
            None if logprobs is None else logprobs.numpy().copy(),
            None if prompt_logprobs is None else prompt_logprobs.numpy().copy(),
        )


class ModelRunner:
    """One rank's model and device.

    Args:
        config: the engine's options.
        tp: this rank's tensor-parallel group.
        workers: the other ranks, on rank 0 of several.
        channel: where rank 0's steps arrive, on the other ranks.

    Attributes:
        num_kvcache_blocks: size of the KV cache, the same on every rank.
        max_in_flight: steps that may run ahead of the tokens the host has seen.
        residency: updates of the weights, sleep and wake-up.
    """

    def __init__(self, config: Config, tp: TPGroup = SINGLE_RANK, workers: Workers | None = None,
                 channel: Channel | None = None):
        self.config, self.tp, self.workers, self.channel = config, tp, workers, channel
        self.block_size = config.kvcache_block_size
        self.max_blocks = -(-config.max_model_len // self.block_size)
        self.device = select_device(config.device, tp.rank, tp.size)
        self.dtype = select_dtype(config.dtype, config.model_config.dtype, self.device)
        self.kv_dtype = select_kv_dtype(config, self.dtype, self.device)
        self.step_threads = step_threads(config.model_config, self.device, tp.size)
        self.ops = kernels.select(self.device.type)
        model = config.model_config
        gqa_group = model.num_attention_heads // max(model.num_key_value_heads, tp.size)
        self.backend = select_backend(config.attention_backend, self.device.type, self.dtype, gqa_group, model.head_dim)
        on_gpu = self.device.type == "cuda"
        self.use_graphs = on_gpu and not config.enforce_eager and self.backend.capturable
        self.max_in_flight = 1 if on_gpu and not config.enforce_eager else 0
        self.prefill_sizes = PrefillSizes()
        if self.use_graphs:
            devices = range(tp.size) if tp.size > 1 else [self.device]
            max_work = max_layer_work(devices, has_fp8=config.model_config.fp8 is not None)
            self.prefill_sizes = PrefillSizes.of(config, self.backend, tp.peers is not None, max_work)
        self.graphs: CUDAGraphs | None = None
        self._last_handle: StepHandle | None = None
        # the guided step that waits for its masks
        self._guided: tuple[StepHeader, Computed] | None = None
        self._owner = os.getpid()
        self.residency = Residency(self)
        waiting = {} if workers is None else {"wait_until": workers.wait_until}  # not for ever, on rank 0
        self.micro_batches = MicroBatches(config, tp, self.device, **waiting)
        if on_gpu:
            torch.cuda.set_device(self.device)
        with torch.inference_mode(), translate_oom():
            self.decode_sizes = decode_sizes(config.max_num_seqs)
            self.request_state = RequestState(config.max_num_seqs, self.max_blocks, self.device)
            limits = config.max_model_len, config.model_config.vocab_size
            self.staged_writes = StagedWrites(config.max_num_seqs, self.max_blocks, StagedTables(*limits))
            self.staged_writes.groups.enabled = self.backend.shares_prefixes and not all(config.model_config.windows)
            self.tables = SamplingTables(config.max_num_seqs, *limits, self.device)
            self.prefill_inputs = PrefillInputs(
                self.prefill_sizes, self.request_state.block_tables, config.max_model_len
            )
            with model_defaults(self.dtype, self.device):
                processed_logprobs = config.logprobs_mode == "processed_logprobs"
                self.sampler = Sampler(config.max_num_seqs, tp, processed_logprobs)
            with self.ops.parallel_compile(self.device) as begin:
                if on_gpu:
                    compile_kernels(self, WARMUP_FEATURES)
                begin()
                self.load_model()  # while the kernels compile
            tp.join() if workers is None else workers.join_group()
            reserved_bytes = self.warmup_model()
            calibrate(self)
            self.allocate_kv_cache(reserved_bytes)
            if self.use_graphs:
                self.capture_cudagraph()

    # ------------------------------------------------------------ start

    def make_model(self, model_config: ModelConfig) -> CausalLM:
        """A model with uninitialised weights."""
        with model_defaults(self.dtype, self.device):
            return CausalLM(model_config, self.backend, self.tp)

    def load_model(self) -> None:
        config = self.config
        self.model = self.make_model(config.model_config)
        with model_defaults(self.dtype, self.device):
            if config.load_format == "dummy":
                init_dummy_weights(self.model, config.seed + self.tp.rank)
            else:
                load_model(self.model, config.model_path)

    def warmup_model(self) -> int:
        """Run the largest prefill without a KV cache; return the bytes to reserve for activations and graphs."""
        if self.device.type == "cpu":
            return 0
        num_tokens, num_seqs = self.config.max_num_batched_tokens, self.config.max_num_seqs
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ids = torch.zeros(num_tokens, dtype=torch.int32, device=self.device)
        hidden = self.model(ids, Context(ids, ids - 1, ids[:1], ids[:1], self.request_state.block_tables, num_tokens))
        # The most memory: with several ranks, filters gather the logits.
        self.sample(hidden[:num_seqs], self.request_state.batch_req_indices, features=WARMUP_FEATURES)
        torch.cuda.synchronize()
        prefill_peak = torch.cuda.max_memory_allocated() - before
        del hidden
        if not self.use_graphs:
            return prefill_peak
        # Graphs keep their activations; estimate the largest ones' from the prefill's, in proportion to tokens.
        sizes = self.prefill_sizes
        num_graphs = 3 * len(self.decode_sizes) + len(sizes.short) + len(sizes.padded)
        graph_peak = num_graphs * GRAPH_BYTES + prefill_peak * (num_seqs + sizes.largest) // num_tokens
        logits_bytes = num_seqs * self.config.model_config.vocab_size // self.tp.size * 8
        return prefill_peak + graph_peak + logits_bytes

    def allocate_kv_cache(self, reserved_bytes: int) -> None:
        """Size the KV cache by the memory left, unless the user set its size; give each layer its views."""
        num_blocks = self.config.num_kvcache_blocks
        if num_blocks == -1:
            bytes_per_block = block_bytes(self.model, self.block_size, self.kv_dtype)
            num_blocks = num_blocks_that_fit(self.config, self.device, bytes_per_block, reserved_bytes)
            if self.tp.size > 1:
                num_blocks = int(self.tp.all_gather(torch.tensor(num_blocks, device=self.device)).min())
            if self.workers is not None:
                self.workers.check()  # with a dead rank the minimum over ranks is undefined
            if num_blocks < 1:
                raise no_room(self.config, self.device, bytes_per_block, reserved_bytes)
            num_blocks = min(num_blocks, self.config.max_num_seqs * self.max_blocks)
        self.num_kvcache_blocks = num_blocks
        self.kv_cache = allocate_kv_cache(self.model, num_blocks, self.block_size, self.kv_dtype, self.device)

    def capture_cudagraph(self) -> None:
        """Capture the forward pass and the sampling of every decode size, and the forward pass of prefills.

        Sampling is a graph of its own, because a batch that needs logits steps launches them behind the forward graph.
        """
        self.graphs = graphs = CUDAGraphs()
        max_context = self.config.max_model_len

        def decode(size: int) -> torch.Tensor:
            return self.model(*self.decode_inputs(size, max_context))

        def sample(size: int) -> torch.Tensor:
            hidden = graphs.output(StepKind.DECODE, size)
            return self.sample(hidden, self.request_state.batch_req_indices[:size], features=0)[0]

        def short_prefill(size: int) -> torch.Tensor:
            return self.model(*self.prefill_inputs.short(size))

        def padded_prefill(size: int) -> torch.Tensor:
            return self.model(*self.prefill_inputs.padded(size))

        graphs.capture(StepKind.DECODE, self.decode_sizes, decode)
        graphs.capture(SAMPLE, self.decode_sizes, sample)
        graphs.capture(StepKind.SHORT_PREFILL, list(self.prefill_sizes.short), short_prefill)
        graphs.capture(StepKind.PADDED_PREFILL, [size for size, _ in self.prefill_sizes.padded], padded_prefill)
        graphs.sizes[GROUPED] = grouped_sizes(self.decode_sizes)  # captured when a batch needs them

    # ------------------------------------------------------------ a step

    def run(self, batch: Batch) -> StepHandle:
        """Launch a batch; the handle gives a token for each of ``batch.req_indices``.

        A guided batch (``is_guided``) is computed, and sampled by ``sample_guided``.
        """
        header, packed = prepare(batch, self.staged_writes, self.block_size, self.prefill_sizes)
        has_many = header.kind == StepKind.PREFILL and not self.micro_batches.follows_another(header)
        if self.workers is not None and has_many and self._last_handle is not None:
            # Two prefills could fill the device's launch queue. If a worker then died, the next launch would block
            # while holding the GIL, and so block the watch thread.
            self._last_handle.wait()
        output = self._launch(header, packed)
        self._last_handle = StepHandle(self.request_state.sampled_tokens, batch, output, self.workers)
        return self._last_handle

    def sample_guided(self, handle: StepHandle, req_indices: np.ndarray, masks: np.ndarray) -> None:
        """Sample the guided batch that was launched last; masks int32 [n, ceil(V / 32)] of these request slots."""
        handle.output = self._launch(*prepare_masks(req_indices, masks))

    def _launch(self, header: StepHeader, packed: np.ndarray) -> StepOutput | None:
        """Run a step on every rank."""
        if self.workers is None:
            with self.step_threads:
                return self.run_model(header, packed)
        with self.workers.guard(), self.step_threads:
            self.workers.send(to_words(header, packed))
            return self.run_model(header, packed)

    def loop(self, report: Callable) -> None:
        """A worker's main loop: launch the steps of rank 0, and answer its calls, until an empty message ends it."""
        assert self.channel is not None
        with self.step_threads:
            while len(words := self.channel.receive()):
                header, packed = from_words(words)
                if header.kind == StepKind.CALL:
                    report(self.residency.answer(packed))
                else:
                    self.run_model(header, packed)

    @torch.inference_mode()
    def run_model(self, header: StepHeader, packed: np.ndarray) -> StepOutput | None:
        """Launch a step on this rank; None for a guided step, which ``StepKind.SAMPLE`` completes."""
        step = unpack(header, self.to_device(packed))
        if header.num_updates:
            self.request_state.apply(step.indices, step.values)
        if header.num_adjustments:
            self.tables.set_adjustments(step.adjustment_indices, step.adjustment_values)
        if header.num_masks:
            self.tables.set_masks(step.mask_req_indices, step.mask_words)
        if header.kind == StepKind.SAMPLE:
            assert self._guided is not None
            (header, computed), self._guided = self._guided, None
        else:
            is_decode = header.kind == StepKind.DECODE
            computed = self.run_decode(header) if is_decode else self.run_prefill(header, step, packed)
            if header.features & GUIDED:
                self._guided = header, computed
                return None
        logprobs = None
        if header.kind == StepKind.DECODE and not header.features and self.graphs is not None:
            self.graphs.replay(SAMPLE, len(computed.hidden))
        elif header.num_sampled:
            _, logprobs = self.sample(computed.hidden, computed.req_indices, header.features, header.num_logprobs)
        if self.device.type == "cpu":
            return StepOutput(None, logprobs, computed.prompt_logprobs)
        output = StepOutput(torch.cuda.Event(), self._to_host(logprobs), self._to_host(computed.prompt_logprobs))
        output.event.record()  # type: ignore[union-attr]
        return output

    def to_device(self, packed: np.ndarray) -> torch.Tensor:
        on_host = torch.from_numpy(packed)
        if self.device.type == "cpu" or not len(packed):
            return on_host
        return on_host.pin_memory().to(self.device, non_blocking=True)

    def _to_host(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """A copy in pinned memory, complete when the stream gets there; the other ranks' are not needed."""
        if values is None or self.tp.rank > 0:
            return None
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)

    def run_decode(self, header: StepHeader) -> "Computed":
        size, req_indices = header.num_sampled, self.request_state.batch_req_indices
        if self.graphs is None:
            inputs = self.decode_inputs(size, header.max_context, header.num_groups > 0)
            return Computed(self.model(*inputs), req_indices[:size])
        hidden = self.graphs.replay(GROUPED if header.num_groups else StepKind.DECODE, size, self._run_grouped)
        # without features a graph samples too, and a slice costs the host 2 us
        return Computed(hidden[:size], req_indices[:size]) if header.features else Computed(hidden, req_indices)

    def _run_grouped(self, size: int) -> torch.Tensor:  # to where the sampling graph reads
        hidden = self.model(*self.decode_inputs(size, self.config.max_model_len, is_grouped=True))
        return self.graphs.output(StepKind.DECODE, size).copy_(hidden)  # type: ignore[union-attr]

    def run_prefill(self, header: StepHeader, step: StepInput, packed: np.ndarray) -> "Computed":
        logits_indices = step.logits_indices.long()
        if header.kind != StepKind.PREFILL:
            assert self.graphs is not None
            self.prefill_inputs.write(step)
            every = self.graphs.replay(header.kind, header.num_tokens)
            hidden = every[logits_indices]
        elif header.num_targets:
            every = self.model(*self.packed_prefill_inputs(header, step, None))
            hidden = every[logits_indices]
        elif self.micro_batches.takes(header):
            hidden = self.micro_batches.run(self, header, packed)
        else:
            hidden = self.model(*self.packed_prefill_inputs(header, step, logits_indices))
        if header.num_block_copies:
            copy_blocks(self.kv_cache, step.copy_from.long(), step.copy_to.long())
        if header.num_logits < header.num_sampled:  # forked completions
            hidden = hidden[step.sampled_from.long()]
        prompt_logprobs = None
        if header.num_targets:
            indices, rows = step.target_indices.long(), range(0, header.num_targets, LOGITS_ROWS)
            slices = [slice(row, row + LOGITS_ROWS) for row in rows]
            prompt_logprobs = torch.cat([
                self.sampler.score(
                    self.model.compute_logits(every[indices[rows]]), step.targets[rows], header.num_prompt_logprobs
                ) for rows in slices
            ])  # fmt: skip
        return Computed(hidden, step.sampled_req_indices, prompt_logprobs)

    def sample(self, hidden: torch.Tensor, req_indices: torch.Tensor, features: int,
               num_logprobs: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [N, C] -> token ids int32 [N], which also advance the request state, and log-probabilities."""
        logits, state = self.model.compute_logits(hidden), self.request_state
        requests = Requests(
            req_indices, state.sampling, state.last_token, self.tables.token_mask, self.tables.adjustments
        )
        return self.sampler(logits, requests, state.sampled_tokens, features, num_logprobs)

    # ------------------------------------------------------------ inputs of the model

    def decode_inputs(self, size: int, max_context: int, is_grouped: bool = False) -> tuple[torch.Tensor, Context]:
        """The next token of each of the first ``size`` batch positions, gathered from the request state."""
        state = self.request_state
        req_indices = state.batch_req_indices[:size]
        input_ids, positions, slot_mapping, context_lens = self.ops.decode_inputs(
            req_indices, state.last_token, state.length, state.block_tables, self.block_size
        )
        context = Context(positions, slot_mapping, req_indices, context_lens, state.block_tables, max_context)
        return input_ids, replace(context, prefix_groups=state.prefix_groups) if is_grouped else context

    def packed_prefill_inputs(self, header: StepHeader, step: StepInput,
                              logits_indices: torch.Tensor | None) -> tuple[torch.Tensor, Context]:
        """The packed tokens of a prefill, and their attention metadata."""
        return step.input_ids, Context(
            step.positions, step.slot_mapping, step.req_indices, step.context_lens, self.request_state.block_tables,
            header.max_context, step.cu_seqlens_q, step.cu_seqlens_k, header.max_seqlen_q, logits_indices,
        )  # fmt: skip

    # ------------------------------------------------------------ end

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """After an interrupted step: wait for the device and forget what it was sent."""
        self.synchronize()
        self.staged_writes.reset()
        self._guided = None

    def exit(self) -> None:
        """Free the device's memory; rank 0 dismisses the other ranks first."""
        if os.getpid() != self._owner:
            return  # in a forked child the device is not ours
        if self.workers is None:
            self.synchronize()
        else:
            self.workers.dismiss()
            if not self.workers.join():
                return  # the device hangs, and freeing memory would wait for it
        self.graphs = None
        for name in ("model", "kv_cache", "request_state", "tables", "prefill_inputs", "sampler", "backend",
                     "residency", "micro_batches"):  # fmt: skip
            self.__dict__.pop(name, None)
        self.tp.close()  # after the graphs, which hold its memory
        if self.device.type == "cuda":
            torch.cuda.empty_cache()



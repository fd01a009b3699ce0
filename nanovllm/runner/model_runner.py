"""Turns a batch into device tensors, a launch, and token ids: one ``ModelRunner`` per rank.

Owns the device: the model, the KV pool, the row state, the sampler and the CUDA graphs. Knows
nothing of queues. ``run`` launches and returns a handle at once; nothing here waits for the device
but ``StepHandle.wait`` and ``synchronize``.
"""

import math
import sys
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.distributed.channel import Channel
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.distributed.workers import Workers
from nanovllm.engine.scheduler import Batch, DecodeBatch, PrefillBatch
from nanovllm.errors import ConfigError, OutOfMemoryError
from nanovllm.kernels import select
from nanovllm.layers.attention import Attention, select_backend
from nanovllm.layers.context import Context, set_context
from nanovllm.layers.sampler import Sampler
from nanovllm.models import get_model_class
from nanovllm.runner.cuda_graphs import CudaGraphs
from nanovllm.runner.request_state import RequestState, StagedWrites
from nanovllm.runner.step import StepHeader, StepInput, read_header
from nanovllm.utils.loader import init_dummy_weights, load_model

CPU_KV_BYTES = 2 << 30  # KV pool on the CPU: a laptop's memory belongs to its owner
GRAPH_BYTES = 2 << 20  # device memory that one captured graph takes besides its activations (measured)
# Prefills of at most so many tokens, which attend at most so many altogether, are graphs: launched one by one, 200
# kernels and more take the host longer than the device.
SHORT_PREFILLS = [16, 32, 64, 128, 256]
SHORT_PREFILL_CONTEXTS = 1 << 17
# a kernel is chosen by the number of tokens, with borders at multiples of 64 and at powers of two
REHEARSED_PREFILLS = (1, 2, 4, 8, 15, 16, 31, 32, 63, 64, 127, 128, 192, 255, 256, 511, 512, 1023, 1024, 2048)
NONE = np.empty(0, np.int32)
DTYPE_LOCK = Lock()


class StepHandle:
    """The token ids of a launch, on their way to the host's memory (``RequestState.sampled_tokens``)."""

    def __init__(self, sampled_tokens: torch.Tensor, batch: Batch, event: torch.cuda.Event | None, workers: Workers | None):
        self._outbox = sampled_tokens
        self._places = batch.lengths % 2, batch.rows
        self._event = event
        self._workers = workers

    def wait(self) -> np.ndarray:
        """Block until the launch is done; int32 [num_sampled]."""
        if self._event is not None and self._workers is not None:
            self._workers.wait_until(self._event.query)
        elif self._event is not None:
            self._event.synchronize()
        return self._outbox.numpy()[self._places]


class ModelRunner:
    """One rank's model and device.

    Args:
        config: the engine's options; ``num_kvcache_blocks`` is set here once memory was measured.
        group: this rank among the tensor-parallel ranks.
        workers: the other ranks, if this is rank 0 of several.
        channel: where rank 0's calls come from, if this is one of the others.
    """

    def __init__(self, config: Config, group: TPGroup = SINGLE_RANK, workers: Workers | None = None,
                 channel: Channel | None = None):
        self.config = config
        self.group = group
        self.workers = workers
        self.channel = channel
        self.graphs: CudaGraphs | None = None
        self.sampling_graphs: CudaGraphs | None = None
        self.prefill_graphs: CudaGraphs | None = None
        self._last_handle: StepHandle | None = None
        self.block_size = config.kvcache_block_size
        self.max_blocks = -(-config.max_model_len // self.block_size)
        self.device = select_device(config.device, group.rank)
        self.dtype = select_dtype(config.dtype, config.model_config.dtype, self.device)
        self.ops = select(self.device.type)
        heads, kv_heads = config.model_config.num_attention_heads, config.model_config.num_key_value_heads
        self.backend = select_backend(
            config.attention_backend, self.device.type, self.dtype, self.block_size, config.model_config.head_dim,
            heads // max(kv_heads, group.size),
        )  # fmt: skip
        self.use_graphs = self.device.type == "cuda" and not config.enforce_eager and self.backend.capturable
        self.depth = 1 if self.device.type == "cuda" and not config.enforce_eager else 0  # launches run ahead
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with torch.inference_mode(), translate_oom():
            self.request_state = RequestState(config.max_num_seqs, self.max_blocks, self.device)
            self.updates = StagedWrites(config.max_num_seqs, self.max_blocks)
            # Of a short prefill: token, position, slot, row and context of each token. At first, and when graphs are
            # captured, they attend nothing and are stored in slot 0 of the empty pool.
            self.prefill_sizes = _short_prefill_sizes(config.max_num_batched_tokens)
            self.token_inputs = torch.zeros(5 * self.prefill_sizes[-1], dtype=torch.int32, device=self.device)
            with self._defaults():
                self.sampler = Sampler(group)
            with self.ops.parallel_compile(self.device) as begin:
                if self.device.type == "cuda":
                    self.compile_kernels()
                begin()
                self.load_weights()  # while they compile
            reserved = self.warmup_model()
            self.allocate_kv_cache(reserved)
            if self.use_graphs:
                self.capture_cudagraph()

    @contextmanager
    def _defaults(self):
        """Modules built within get the model's dtype and device. The dtype is all threads' default: one at a time."""
        with DTYPE_LOCK:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            try:
                with torch.device(self.device):
                    yield
            finally:
                torch.set_default_dtype(before)

    # ------------------------------------------------------------ kernels and weights

    def compile_kernels(self) -> None:
        """Rehearse the launches of a start and of a run, so that they find their kernels: for `parallel_compile`.

        The stage is a model of two layers, because the last one differs in a prefill, and a pool of one block.
        Its weights are whatever lies in memory; its sequences are the null row, and store nothing, or attend nothing.
        """
        config, state, device = self.config, self.request_state, self.device
        self.model = self._make_model(num_layers=2)
        self.warmup_model()
        self._make_pages(1)
        if self.group.peers is not None:
            self.group.peers.rehearse(self.dtype)
        # Prefills first, the longest of them, for their kernels take the longest to compile.
        for num_tokens in (n for n in reversed(REHEARSED_PREFILLS) if n <= config.max_num_batched_tokens):
            tokens = torch.zeros(num_tokens, dtype=torch.int32, device=device)
            row, ends = tokens[:1] + state.padding_req_idx, torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
            step = StepInput(
                cells=ends[:0], values=ends[:0], input_ids=tokens, positions=tokens, slot_mapping=tokens - 1,
                rows=row, context_lens=ends[1:].clamp(max=config.max_model_len), cu_seqlens_q=ends, cu_seqlens_k=ends,
                sampled_tokens=tokens[:1], sampled_rows=row,
            )  # fmt: skip
            header = StepHeader(
                is_prefill=1, num_sampled=1, num_updates=0, num_tokens=num_tokens, num_seqs=1,
                max_seqlen_q=num_tokens, max_context=num_tokens, has_prefix=0, has_filters=0,
            )  # fmt: skip
            self._prefill(header, step)
        for num_rows in CudaGraphs.sizes(config.max_num_seqs):
            hidden = self._decode_hidden(num_rows, config.max_model_len)
            for has_filters in (False, True):
                self._sample(hidden, state.batch_req_indices[:num_rows], has_filters)
        for num_tokens in self.prefill_sizes if self.use_graphs else ():
            self._prefill_hidden(num_tokens, config.max_model_len)
        del self.model, self.kv_cache

    def load_weights(self) -> None:
        """Make the model and read its checkpoint."""
        config = self.config
        self.model = self._make_model(config.model_config.num_hidden_layers)
        with self._defaults():
            if config.load_format == "dummy":
                init_dummy_weights(self.model, config.seed + self.group.rank)
            else:
                load_model(self.model, config.model_path)

    def _make_model(self, num_layers: int) -> Any:
        model_config = replace(self.config.model_config, num_hidden_layers=num_layers)
        with self._defaults():
            return get_model_class(model_config.architecture)(model_config, self.backend, self.group)

    # ------------------------------------------------------------ memory

    def warmup_model(self) -> int:
        """Run the largest prefill without pages; return the bytes to keep for activations and graphs."""
        if self.device.type == "cpu":
            return 0
        config = self.config
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
        ids = torch.zeros(num_tokens, dtype=torch.int32, device=self.device)
        slots = torch.full_like(ids, -1)
        context = Context(True, ids[:1], ids[:1], self.request_state.block_tables, slots, num_tokens)
        with set_context(context):
            hidden = self.model(ids, ids)
        # what takes most memory: with several ranks, filters gather the logits
        self._sample(hidden[:num_seqs], self.request_state.batch_req_indices, has_filters=True)
        torch.cuda.synchronize()
        prefill_peak = torch.cuda.max_memory_allocated() - before
        del hidden
        if not self.use_graphs:
            return prefill_peak
        # a graph's activations are kept for good; the largest decode batch takes its share of the prefill's
        num_graphs = len(CudaGraphs.sizes(num_seqs)) * min(2, self.group.size) + len(self.prefill_sizes)
        graph_peak = num_graphs * GRAPH_BYTES + prefill_peak * (num_seqs + self.prefill_sizes[-1]) // num_tokens
        logits = num_seqs * config.model_config.vocab_size // self.group.size * 8
        return prefill_peak + graph_peak + logits

    def allocate_kv_cache(self, reserved: int) -> None:
        """Size the KV pool from what memory is left and hand each layer its pages."""
        config = self.config
        block_bytes = math.prod(self._pages_shape(1)) * self.dtype.itemsize
        needed_blocks = self.max_blocks  # the longest sequence, alone
        num_blocks = config.num_kvcache_blocks
        if num_blocks == -1 and self.device.type == "cpu":
            num_blocks = min(max(CPU_KV_BYTES // block_bytes, needed_blocks), config.max_num_seqs * needed_blocks)
        elif num_blocks == -1:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            budget = int(total * config.gpu_memory_utilization) - (total - free) - reserved
            num_blocks = min(self._least_over_ranks(budget // block_bytes), config.max_num_seqs * needed_blocks)
            if num_blocks < 1:
                gib = 1 << 30
                raise OutOfMemoryError(
                    f"no room for a KV cache on {self.device}: gpu_memory_utilization="
                    f"{config.gpu_memory_utilization} of {total / gib:.1f} GiB allows "
                    f"{total * config.gpu_memory_utilization / gib:.1f}; {(total - free) / gib:.1f} are in use "
                    f"(weights {torch.cuda.memory_allocated() / gib:.1f}, the rest other processes), activations need "
                    f"{reserved / gib:.1f}, one block {block_bytes / gib:.3f}. Free memory on the device, raise "
                    "gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs."
                )
        config.num_kvcache_blocks = num_blocks
        self._make_pages(num_blocks)

    def _attention_layers(self) -> list[Attention]:
        return [module for module in self.model.modules() if isinstance(module, Attention)]

    def _pages_shape(self, num_blocks: int) -> tuple[int, ...]:
        layers = self._attention_layers()
        return 2, len(layers), num_blocks, self.block_size, layers[0].num_kv_heads, layers[0].head_dim

    def _make_pages(self, num_blocks: int) -> None:
        self.kv_cache = _zeros(self._pages_shape(num_blocks), self.dtype, self.device)
        for layer, k_cache, v_cache in zip(self._attention_layers(), *self.kv_cache, strict=True):
            layer.k_cache, layer.v_cache = k_cache, v_cache

    def _least_over_ranks(self, number: int) -> int:
        if self.group.size == 1:
            return number
        least = int(self.group.all_gather(torch.tensor(number, device=self.device)).min())
        if self.workers is not None:
            self.workers.check()  # with a rank dead it is any number
        return least

    def capture_cudagraph(self) -> None:
        """Capture short prefills, and a decode step for each batch size up to ``max_num_seqs`` (padded to the next).

        With several ranks in two parts, for how ranks agree on a token depends on the filters in the batch: up to the
        hidden states, and sampling without filters. With filters, sampling is launched behind the first part.
        """
        sizes, max_context = CudaGraphs.sizes(self.config.max_num_seqs), self.config.max_model_len
        if self.group.size == 1:
            self.graphs = CudaGraphs(self._decode, sizes, max_context)
        else:
            self.graphs = CudaGraphs(self._decode_hidden, sizes, max_context)
            hidden, rows = self.graphs.result, self.request_state.batch_req_indices

            def sample(num_rows: int, _: int) -> torch.Tensor:
                return self._sample(hidden(num_rows), rows[:num_rows], False)

            self.sampling_graphs = CudaGraphs(sample, sizes, max_context)
        self.prefill_graphs = CudaGraphs(self._prefill_hidden, self.prefill_sizes, max_context)

    # ------------------------------------------------------------ a step

    def run(self, batch: Batch) -> StepHandle:
        """Launch a batch; the handle gives its token ids, one for each of ``batch.rows``."""
        if isinstance(batch, PrefillBatch):
            packed = self.prepare_prefill(batch)
            if self.workers is not None and self._last_handle is not None:
                # Two prefills' launches could fill the device's queue. If a worker then died, the next launch
                # would block for good, and with it, the interpreter and the watch over the workers.
                self._last_handle.wait()
        else:
            packed = self.prepare_decode(batch)
        event = self.call("run_model", packed)
        self._last_handle = StepHandle(self.request_state.sampled_tokens, batch, event, self.workers)
        return self._last_handle

    def call(self, method: str, *args):
        """Run a method on every rank; this rank's result is returned."""
        if self.workers is None:
            return getattr(self, method)(*args)
        with self.workers.guard():
            self.write_shm(method, *args)
            return getattr(self, method)(*args)

    def write_shm(self, method: str, *args: np.ndarray) -> None:
        """Tell the other ranks to run a method; what crosses is its number and at most one int32 array."""
        assert self.workers is not None
        self.workers.send(method, *args)

    def read_shm(self) -> tuple[str, list[np.ndarray]]:
        """The method that rank 0 runs next, and its arguments."""
        assert self.channel is not None
        method, payload = self.channel.receive()
        return method, [payload] if len(payload) else []

    def loop(self) -> None:
        """A worker's working life: run what rank 0 runs, until it exits."""
        method = ""
        while method != "exit":
            method, args = self.read_shm()
            getattr(self, method)(*args)

    def prepare_prefill(self, batch: PrefillBatch) -> np.ndarray:
        """The step of a prefill batch, packed."""
        for seq in batch.admitted:
            self.updates.enter(seq)
        cells, values = self.updates.take()
        spans = list(zip(batch.seqs, batch.starts, batch.stops, strict=True))
        input_ids = np.concatenate([seq.tokens(start, stop) for seq, start, stop in spans])
        positions = [np.arange(start, stop, dtype=np.int32) for _, start, stop in spans]
        slots = [
            np.array(seq.block_table, np.int32)[p // self.block_size] * self.block_size + p % self.block_size
            for seq, p in zip(batch.seqs, positions, strict=True)
        ]
        cu_seqlens_q = np.cumsum([0, *(stop - start for _, start, stop in spans)], dtype=np.int32)
        step = StepInput(
            cells=cells,
            values=values,
            input_ids=input_ids,
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(slots),
            rows=np.array([seq.row for seq in batch.seqs], np.int32),
            context_lens=np.array(batch.stops, np.int32),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=np.cumsum([0, *batch.stops], dtype=np.int32),
            sampled_tokens=cu_seqlens_q[1 : len(batch.rows) + 1] - 1,
            sampled_rows=batch.rows,
        )
        if self.prefill_graphs is not None and _is_short(step):
            step = self._token_by_token(step, self.prefill_graphs.size_of(len(input_ids)))
        header = StepHeader(
            is_prefill=1,
            num_sampled=len(batch.rows),
            num_updates=len(cells),
            num_tokens=len(step.input_ids),
            num_seqs=len(step.rows),
            max_seqlen_q=int(np.diff(step.cu_seqlens_q).max()),
            max_context=max(batch.stops),
            has_prefix=int((step.cu_seqlens_q != step.cu_seqlens_k).any()),
            has_filters=int(self.updates.has_filters[batch.rows].any()),
        )
        return step.pack(header)

    def _token_by_token(self, step: StepInput, size: int) -> StepInput:
        """The same prefill with every token as a sequence of its own, padded to `size` of them.

        A token's context ends with it, and all of it is in the pages when a layer attends: so a prefill is a decode
        batch of tokens, whose shape is a graph's.
        """

        def padded(values: np.ndarray, padding: int = 0) -> np.ndarray:
            return np.pad(values, (0, size - len(values)), constant_values=padding)

        context_lens = padded(step.positions + 1)
        return replace(
            step,
            input_ids=padded(step.input_ids),
            positions=padded(step.positions),
            slot_mapping=padded(step.slot_mapping, -1),
            rows=padded(np.repeat(step.rows, np.diff(step.cu_seqlens_q)), self.request_state.padding_req_idx),
            context_lens=context_lens,
            cu_seqlens_q=np.arange(size + 1, dtype=np.int32),
            cu_seqlens_k=np.cumsum([0, *context_lens], dtype=np.int32),
        )

    def prepare_decode(self, batch: DecodeBatch) -> np.ndarray:
        """The step of a decode batch, packed: only what changed since the last one."""
        self.updates.grow(batch.grown)
        self.updates.set_batch(batch.rows)
        cells, values = self.updates.take()
        header = StepHeader(
            is_prefill=0,
            num_sampled=len(batch.rows),
            num_updates=len(cells),
            num_tokens=0,
            num_seqs=0,
            max_seqlen_q=1,
            max_context=int(batch.lengths.max()),
            has_prefix=1,
            has_filters=int(self.updates.has_filters[batch.rows].any()),
        )
        step = StepInput(cells, values, *[NONE] * 9)
        return step.pack(header)

    @torch.inference_mode()
    def run_model(self, packed: np.ndarray) -> torch.cuda.Event | None:
        """Launch a packed step on this rank; the event comes when its tokens are in the sampled_tokens, None if they are."""
        header = read_header(packed)
        on_device = torch.from_numpy(packed)
        if self.device.type == "cuda" and (header.num_updates or header.is_prefill):
            on_device = on_device.pin_memory().to(self.device, non_blocking=True)
        step = StepInput.unpack(header, on_device)
        if header.num_updates:
            self.request_state.apply(step.cells, step.values)
        if header.is_prefill:
            self._prefill(header, step)
        elif self.graphs is None:
            self._decode(header.num_sampled, header.max_context, bool(header.has_filters))
        elif self.sampling_graphs is None:
            self.graphs.replay(header.num_sampled)
        else:
            hidden = self.graphs.replay(header.num_sampled)[: header.num_sampled]
            if header.has_filters:
                self._sample(hidden, self.request_state.batch_req_indices[: header.num_sampled], True)
            else:
                self.sampling_graphs.replay(header.num_sampled)
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _prefill(self, header: StepHeader, step: StepInput) -> None:
        """A token for each sampled sequence."""
        sampled, num_tokens, graphs = step.sampled_tokens.long(), header.num_tokens, self.prefill_graphs
        # One new token for each sequence: made so for a graph, or so by chance, and then a graph does as well.
        if graphs is not None and header.max_seqlen_q == 1 and num_tokens in graphs.captured_sizes:
            inputs = [step.input_ids, step.positions, step.slot_mapping, step.rows, step.context_lens]
            torch.cat(inputs, out=self.token_inputs[: 5 * num_tokens])
            hidden = graphs.replay(num_tokens)[sampled]
        else:
            hidden = self._prefill_eagerly(header, step, sampled)
        if header.num_sampled:
            self._sample(hidden, step.sampled_rows, bool(header.has_filters))

    def _prefill_eagerly(self, header: StepHeader, step: StepInput, sampled: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_sampled, C]."""
        context = Context(
            is_prefill=True,
            rows=step.rows,
            context_lens=step.context_lens,
            block_tables=self.request_state.block_tables,
            slot_mapping=step.slot_mapping,
            max_context=header.max_context,
            cu_seqlens_q=step.cu_seqlens_q,
            cu_seqlens_k=step.cu_seqlens_k,
            max_seqlen_q=header.max_seqlen_q,
            has_prefix=bool(header.has_prefix),
            sampled=sampled,
        )
        with set_context(context):
            return self.model(step.input_ids, step.positions)

    def _prefill_hidden(self, num_tokens: int, max_context: int) -> torch.Tensor:
        """The part of a short prefill before the LM head, [num_tokens, C]; its inputs are in `token_inputs`."""
        inputs = self.token_inputs[: 5 * num_tokens].view(5, num_tokens)
        input_ids, positions, slot_mapping, rows, context_lens = inputs.unbind()
        return self._hidden(input_ids, positions, slot_mapping, rows, context_lens, max_context)

    def _decode(self, num_rows: int, max_context: int, has_filters: bool = False) -> torch.Tensor:
        """One token for each of the first ``num_rows`` batch rows; all inputs come from the row state."""
        hidden = self._decode_hidden(num_rows, max_context)
        return self._sample(hidden, self.request_state.batch_req_indices[:num_rows], has_filters)

    def _decode_hidden(self, num_rows: int, max_context: int) -> torch.Tensor:
        """The part of a decode step before the LM head, [num_rows, C]."""
        state = self.request_state
        rows = state.batch_req_indices[:num_rows]
        input_ids, positions, slot_mapping, context_lens = self.ops.decode_inputs(
            rows, state.last_token, state.length, state.block_tables, self.block_size
        )
        return self._hidden(input_ids, positions, slot_mapping, rows, context_lens, max_context)

    def _hidden(self, input_ids: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor,
                rows: torch.Tensor, context_lens: torch.Tensor, max_context: int) -> torch.Tensor:
        """Of a decode batch, [B, C]."""
        context = Context(False, rows, context_lens, self.request_state.block_tables, slot_mapping, max_context)
        with set_context(context):
            return self.model(input_ids, positions)

    def _sample(self, hidden: torch.Tensor, rows: torch.Tensor, has_filters: bool) -> torch.Tensor:
        logits, state = self.model.compute_logits(hidden), self.request_state
        return self.sampler(logits, rows, state.columns, state.last_token, state.sampled_tokens, has_filters)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def exit(self) -> None:
        """Free the device's memory; rank 0 sees to it that the other ranks do."""
        if self.workers is None:
            self.synchronize()
        else:
            self.workers.dismiss()
            if not self.workers.join():
                return  # the device hangs, and giving memory back would wait for it
        self.graphs = self.sampling_graphs = self.prefill_graphs = None
        for name in ("model", "kv_cache", "request_state", "token_inputs", "sampler", "backend"):
            self.__dict__.pop(name, None)
        self.group.close()  # after the graphs, which hold on to it
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def select_device(name: str, rank: int) -> torch.device:
    """The device of a rank; "auto" is CUDA if there is a device."""
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError("device='cuda': torch sees no CUDA device here. Use device='cpu' or 'auto'.")
    if rank >= torch.cuda.device_count():
        raise ConfigError(f"tensor-parallel rank {rank} needs its own device; torch sees {torch.cuda.device_count()}.")
    return torch.device("cuda", rank)


def select_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in; "auto" is the checkpoint's, float32 on the CPU, float16 on a GPU without bfloat16."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint
        if name == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
            name = "float16"
    return getattr(torch, name)


def _short_prefill_sizes(max_num_batched_tokens: int) -> list[int]:
    """The sizes that a prefill of so many tokens at most can have, padded."""
    return [size for size in SHORT_PREFILLS if size < 2 * max_num_batched_tokens or size == SHORT_PREFILLS[0]]


def _is_short(step: StepInput) -> bool:
    """Whether a prefill is one for a graph."""
    return len(step.input_ids) <= SHORT_PREFILLS[-1] and int(step.positions.sum()) <= SHORT_PREFILL_CONTEXTS


@contextmanager
def translate_oom():
    """Where device or host run out of memory while the engine is made, an error that says what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        on_host = type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)  # torch's only sign of it
        if not on_host and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            raise
        raise OutOfMemoryError(
            f"no room for the model: {error}\nFree memory on the device, lower max_num_batched_tokens, max_num_seqs, "
            "max_model_len or num_kvcache_blocks (if set), or spread the model over more devices "
            "(tensor_parallel_size)."
        ) from error


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU memory is taken only when it is written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > sys.maxsize:  # numpy and torch have other errors for this
        raise MemoryError(f"{num_bytes:.1e} bytes were asked for.")
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(num_bytes, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)

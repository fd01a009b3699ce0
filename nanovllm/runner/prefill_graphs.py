"""Prefills that replay a CUDA graph: their sizes, their padding, and their inputs at the address that graphs read.

The host takes half a millisecond to launch a layer's kernels one by one. Where the device computes a layer faster, a
prefill is padded to a captured size. Two kinds:

    SHORT   up to 256 tokens. Each is a sequence of one query token, as in decode.
    PADDED  more tokens. They stay packed; empty sequences fill them up, and long ones are cut into several.

Each layer stores all keys and values of a launch before it attends, so a token's context is complete wherever its
sequence is cut. Recurrent layers need whole sequences: models with some have padded prefills alone, of which these
layers see the sequences uncut (``Chunks``).
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.core import Batch, PrefillBatch
from nanovllm.kernels.delta.reference import CHUNK, Chunks
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.context import Context
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.cuda_graphs import CUDAGraphs
from nanovllm.runner.device import layer_weights
from nanovllm.runner.part import Launcher, Step
from nanovllm.runner.recurrent import NAMES
from nanovllm.sampling.feature import Arrays, Tensors

SHORT, PADDED = "short prefill", "padded prefill"  # kinds of graphs
SHORT_SIZES = (16, 32, 64, 128, 256)  # tokens
SMALL_PADDED_SIZES = (64, 128, 256)  # in place of SHORT
PADDED_SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096)
MAX_SHORT_CONTEXTS = 1 << 17  # sum over tokens of the tokens they attend: each reads them by itself
# Query tokens of one sequence: the grid of the Triton attention kernel is sized for it, whatever the sequences have.
MAX_PADDED_SEQLEN = 512
# The same sum: beyond, attention alone takes as long as the host. Its kernel for Hopper has larger tiles for sequences
# of LARGE_TILES_SEQLEN query tokens and more that are not cut (prefill_sm90.py).
MAX_PADDED_CONTEXTS = 1 << 24
LARGE_TILES_SEQLEN = 1024
# Tokens times a rank's weights of a layer. An H200 computes so many in the time in which a host launches the kernels.
MAX_LAYER_WORK = 9 << 34


class PrefillSizes(NamedTuple):
    """Captured sizes, ascending. None at all: every prefill is launched kernel by kernel.

    Attributes:
        short: tokens.
        padded: tokens, and the sequences that they may belong to; a multiple of 4, which aligns the arrays behind.
        padding_req_idx: the padding request slot.
        has_chunks: some layers are recurrent.
    """

    short: tuple[int, ...] = ()
    padded: tuple[tuple[int, int], ...] = ()
    padding_req_idx: int = 0
    has_chunks: bool = False

    @classmethod
    def of(cls, config: Config, backend: AttentionBackend, has_peers: bool = False,
           max_work: int = MAX_LAYER_WORK) -> "PrefillSizes":
        """``has_peers``: sums over ranks go through peer memory; padded prefills with NCCL's are not captured."""
        limit = 2 * config.max_num_batched_tokens  # larger ones: nothing needs them
        work = layer_weights(config.model_config) // config.tensor_parallel_size
        has_chunks = config.model_config.delta is not None
        short = () if has_chunks else tuple(size for size in SHORT_SIZES if size < limit or size == SHORT_SIZES[0])
        sizes = SMALL_PADDED_SIZES * has_chunks + PADDED_SIZES
        padded = tuple((size, most_seqs(size, config)) for size in sizes if size < limit and size * work <= max_work)
        # Of more than two ranks, sums of so many tokens do not all go through peer memory.
        captures_sums = config.tensor_parallel_size == 1 or (config.tensor_parallel_size == 2 and has_peers)
        padded = padded if backend.captures_prefill and captures_sums else ()
        return cls(short, padded, config.max_num_seqs, has_chunks)

    @property
    def largest(self) -> int:
        """Tokens of the largest size."""
        return max((*self.short, *(size for size, _ in self.padded)), default=0)

    def fit(self, arrays: Arrays, needs_every_state: bool) -> tuple[str, int] | None:
        """Pad a prefill, in place, to a captured size; returns that graph's kind and size, None if there is none."""
        num_tokens, contexts = len(arrays["input_ids"]), int(arrays["positions"].sum())
        short = next((size for size in self.short if size >= num_tokens), None)
        if short is not None and contexts <= MAX_SHORT_CONTEXTS:
            arrays.update(as_short_prefill(arrays, short, self.padding_req_idx))
            return SHORT, short
        max_seqlen_q = int(np.diff(arrays["cu_seqlens_q"]).max())
        wants_large_tiles = max_seqlen_q >= LARGE_TILES_SEQLEN and contexts > MAX_PADDED_CONTEXTS
        if needs_every_state or wants_large_tiles:
            return None
        num_parts = int(num_parts_of(arrays["cu_seqlens_q"]).sum())
        num_chunks = len(arrays["chunks_seqs"]) if self.has_chunks else 0
        for size, num_seqs in self.padded:
            if size >= num_tokens and num_seqs >= num_parts and most_chunks(size, num_seqs) >= num_chunks:
                arrays.update(as_padded_prefill(arrays, size, num_seqs, self.padding_req_idx))
                if self.has_chunks:
                    arrays.update(padded_chunks(arrays, size, num_seqs, self.padding_req_idx))
                return PADDED, size
        return None


def max_layer_work(devices: Iterable, has_fp8: bool) -> int:
    """MAX_LAYER_WORK of the ranks' GPUs, the same on all ranks."""
    capabilities = [torch.cuda.get_device_capability(device) for device in devices]
    if any(capability[0] not in (9, 10) for capability in capabilities):  # not Hopper, Blackwell of a data centre
        return MAX_LAYER_WORK // 4  # an A100 has a third of an H200's rate
    # only there FP8 weights are multiplied in e4m3, in half the time
    return MAX_LAYER_WORK * (2 if has_fp8 and set(capabilities) == {(9, 0)} else 1)


def most_seqs(size: int, config: Config) -> int:
    """Sequences of a padded prefill of ``size`` tokens, their parts included; fewer than tokens."""
    num_seqs, num_cuts = (-(-n // 4) * 4 for n in (config.max_num_seqs, size // MAX_PADDED_SEQLEN))
    return min(size // 8, num_seqs + num_cuts, 256)  # the attention kernel for Hopper takes 256 a launch


def most_chunks(size: int, num_seqs: int) -> int:
    """Chunks of a padded prefill: each sequence has a partial one."""
    return aligned(size // CHUNK + num_seqs)


def aligned(length: int) -> int:
    """Of an array of int32 behind which another one begins at a multiple of 16 bytes."""
    return -(-length // 4) * 4


NONE = np.empty(0, np.int32)


def pad(values: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    padded = np.full(size, value, np.int32)  # np.pad takes five times as long
    padded[: len(values)] = values
    return padded


def as_short_prefill(arrays: Arrays, size: int, padding_req_idx: int) -> Arrays:
    """The arrays of the same prefill with each token as a sequence of its own, padded to ``size`` of them."""
    return {
        "input_ids": pad(arrays["input_ids"], size),
        "positions": pad(arrays["positions"], size),
        "slot_mapping": pad(arrays["slot_mapping"], size, -1),
        "req_indices": pad(np.repeat(arrays["req_indices"], np.diff(arrays["cu_seqlens_q"])), size, padding_req_idx),
        "context_lens": pad(arrays["positions"] + 1, size),
        "cu_seqlens_q": NONE,
        "cu_seqlens_k": NONE,
    }


def num_parts_of(cu_seqlens_q: np.ndarray) -> np.ndarray:
    """Into how many parts of at most MAX_PADDED_SEQLEN query tokens each sequence is cut."""
    return -(-np.diff(cu_seqlens_q) // MAX_PADDED_SEQLEN)


def as_padded_prefill(arrays: Arrays, size: int, num_seqs: int, padding_req_idx: int) -> Arrays:
    """The arrays of the same prefill with ``size`` tokens, the last of no sequence, and ``num_seqs`` sequences, the
    last without a token. The parts of a long one are sequences of one request slot. ``logits_indices`` are sequences.
    """
    cu_seqlens_q = arrays["cu_seqlens_q"]
    starts, ends, num_parts = cu_seqlens_q[:-1], cu_seqlens_q[1:], num_parts_of(cu_seqlens_q)
    stops = np.cumsum(num_parts)  # of each sequence's parts
    seq = np.repeat(np.arange(len(starts)), num_parts)  # of each part
    nth = np.arange(1, len(seq) + 1) - (stops - num_parts)[seq]
    part_ends = np.minimum(starts[seq] + nth * MAX_PADDED_SEQLEN, ends[seq])
    return {
        "input_ids": pad(arrays["input_ids"], size),
        "positions": pad(arrays["positions"], size),
        "slot_mapping": pad(arrays["slot_mapping"], size, -1),
        "req_indices": pad(arrays["req_indices"][seq], num_seqs, padding_req_idx),
        "context_lens": pad(arrays["context_lens"][seq] - (ends[seq] - part_ends), num_seqs),
        "cu_seqlens_q": pad(np.append(0, part_ends), num_seqs + 1, cu_seqlens_q[-1]),
        "cu_seqlens_k": NONE,
        "logits_indices": stops[: len(arrays["logits_indices"])] - 1,
    }


def padded_chunks(arrays: Arrays, size: int, num_seqs: int, padding_req_idx: int) -> Arrays:
    """The arrays of ``Chunks`` with empty sequences and chunks behind the others."""
    lengths, values = chunk_lengths(size, num_seqs), [arrays[name] for name in NAMES]
    num_tokens, num_chunks = values[0][-1], values[3][-1]
    fills = (num_tokens, padding_req_idx, -1, num_chunks, num_tokens, 0, -1)
    padded = {name: pad(*filled) for name, *filled in zip(NAMES, values, map(aligned, lengths), fills, strict=True)}
    return padded | {"cu_seqlens_q": pad(arrays["cu_seqlens_q"], aligned(num_seqs + 1), num_tokens)}


def chunk_lengths(size: int, num_seqs: int) -> list[int]:
    """Of the arrays of ``Chunks`` of a padded prefill."""
    n, num_chunks = num_seqs, most_chunks(size, num_seqs)
    return [n + 1, n, n, n + 1, num_chunks + 1, num_chunks, num_chunks]


class PrefillInputs:
    """Arrays of a padded prefill on the device, one behind the other from a fixed address on.

    Args:
        sizes: of the graphs that read them.
        block_tables: int32 [R + 1, max_blocks], of the request state.
        max_context: ``max_model_len``.
    """

    def __init__(self, sizes: PrefillSizes, block_tables: torch.Tensor, max_context: int):
        self._has_chunks = sizes.has_chunks
        num_ints = [5 * size for size in sizes.short] + [sum(self._lengths(*size)) for size in sizes.padded]
        # Zeros: warm-up runs the embedding, which needs valid ids.
        self.buffer = torch.zeros(max(num_ints, default=0), dtype=torch.int32, device=block_tables.device)
        self._num_seqs = dict(sizes.padded)
        self._block_tables, self._max_context = block_tables, max_context

    def write(self, tensors: Tensors) -> None:
        """Take in the arrays of a prefill that ``PrefillSizes.fit`` has padded."""
        names = ["input_ids", "positions", "slot_mapping", "req_indices", "context_lens", "cu_seqlens_q"]
        names += NAMES * self._has_chunks
        parts = [tensors[name] for name in names if len(tensors[name])]
        torch.cat(parts, out=self.buffer[: sum(map(len, parts))])

    def short(self, size: int) -> tuple[torch.Tensor, Context]:
        """``size`` tokens, each attending as a single-query sequence."""
        input_ids, positions, slots, req_indices, context_lens = self.buffer[: 5 * size].view(5, size)
        return input_ids, Context(
            positions, slots, req_indices, context_lens, self._block_tables, self._max_context
        )  # fmt: skip

    def padded(self, size: int) -> tuple[torch.Tensor, Context]:
        """``size`` packed tokens. The last of every sequence is sampled from; an empty one has that of the sequence
        before, and attends nothing."""
        n = self._num_seqs[size]
        lengths = self._lengths(size, n)
        input_ids, positions, slots, req_indices, context_lens, cu_seqlens_q, *of_chunks = (
            self.buffer[: sum(lengths)].split(lengths)
        )  # fmt: skip
        cu_seqlens_q, chunks = cu_seqlens_q[: n + 1], None
        if of_chunks:
            chunks = Chunks(*(x[:length] for x, length in zip(of_chunks, chunk_lengths(size, n), strict=True)))
        return input_ids, Context(
            positions, slots, req_indices, context_lens, self._block_tables, self._max_context,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=min(size, MAX_PADDED_SEQLEN),
            logits_indices=cu_seqlens_q[1:].long() - 1, chunks=chunks,
        )  # fmt: skip

    def _lengths(self, size: int, n: int) -> list[int]:
        """Of the arrays of ``size`` tokens and n sequences, one behind the other."""
        lengths = [size, size, size, n, n, n + 1]
        if self._has_chunks:
            lengths = [*lengths[:-1], aligned(n + 1), *map(aligned, chunk_lengths(size, n))]
        return lengths


class PrefillGraphs(Launcher):
    """Prefills that fit a captured size."""

    def __init__(self, sizes: PrefillSizes, block_tables: torch.Tensor, max_context: int):
        self.sizes, self.inputs = sizes, PrefillInputs(sizes, block_tables, max_context)
        self.graph: tuple[str, int] | None = None  # of the batch that it has taken last

    def takes(self, batch: Batch, arrays: Arrays) -> bool:
        self.graph = self.sizes.fit(arrays, batch.needs_every_state) if isinstance(batch, PrefillBatch) else None
        return self.graph is not None

    def run(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.graph is not None and step.graphs is not None
        self.inputs.write(step.tensors)
        every = step.graphs.replay(*self.graph)
        return every[step.tensors["logits_indices"].long()], every

    def capture(self, model: CausalLM, graphs: CUDAGraphs) -> None:
        graphs.capture(SHORT, list(self.sizes.short), lambda size: model(*self.inputs.short(size)))
        graphs.capture(PADDED, [n for n, _ in self.sizes.padded], lambda size: model(*self.inputs.padded(size)))

    def compile(self, model: CausalLM) -> None:
        for size in self.sizes.short:
            model(*self.inputs.short(size))
        for size, _ in self.sizes.padded:
            model(*self.inputs.padded(size))

    def num_graphs(self) -> int:
        return len(self.sizes.short) + len(self.sizes.padded)

"""Prefills that replay a CUDA graph: their sizes, their padding, and their inputs at the address that graphs read.

The host takes half a millisecond to launch a layer's kernels one by one. Where the device computes a layer faster, a
prefill is padded to a captured size: tokens stay packed, empty sequences fill them up, and long sequences are cut into
several. Each layer stores all keys and values of a launch before it attends, so a token's context is complete wherever
its sequence is cut. Parts whose layers need whole sequences pad arrays of their own (``Part.pad``).
"""

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.core import Batch, PrefillBatch
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.context import Context
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.cuda_graphs import CUDAGraphs
from nanovllm.runner.device import layer_weights
from nanovllm.runner.part import Launcher, Part, Rank, Step
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.feature import Arrays, Tensors

PADDED = "padded prefill"  # kind of graph
PADDED_SIZES = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
MIN_SEQS = 16  # sequences at the smallest size
SMALL_SIZE = 256  # tokens: no device computes a layer slower than the host launches it
# Query tokens of one sequence: they set the grid of the Triton attention kernel, however long the sequences are.
MAX_PADDED_SEQLEN = 512
# Sum of the tokens' positions: above it attention alone takes as long as the host. Hopper's kernel has larger tiles for
# uncut sequences of LARGE_TILES_SEQLEN query tokens and more (prefill_sm90.py).
MAX_PADDED_CONTEXTS = 1 << 24
LARGE_TILES_SEQLEN = 1024
# Tokens times a rank's weights of a layer: as many as an H200 computes while a host launches the layer's kernels.
MAX_LAYER_WORK = 9 << 34


class PrefillSizes(NamedTuple):
    """Captured sizes, ascending. None at all: every prefill is launched kernel by kernel.

    Attributes:
        sizes: tokens, and the sequences that they may belong to; a multiple of 4, which aligns the next arrays.
        padding_req_idx: the padding request slot.
    """

    sizes: tuple[tuple[int, int], ...] = ()
    padding_req_idx: int = 0

    @classmethod
    def of(cls, config: Config, backend: AttentionBackend, has_peers: bool = False,
           max_work: int = MAX_LAYER_WORK) -> "PrefillSizes":
        """``has_peers``: sums over ranks go through peer memory; prefills with NCCL's are not captured."""
        limit = 2 * config.max_num_batched_tokens  # no batch needs larger ones
        work = layer_weights(config.model_config) // config.tensor_parallel_size
        # Sums over more than two ranks go through peer memory only up to a small size.
        captures_sums = config.tensor_parallel_size == 1 or (config.tensor_parallel_size == 2 and has_peers)
        sizes = [
            size for size in PADDED_SIZES if backend.captures_prefill and size < max(limit, PADDED_SIZES[0] + 1)
            and (size <= SMALL_SIZE or (captures_sums and size * work <= max_work))
        ]  # fmt: skip
        return cls(tuple((size, most_seqs(size, config)) for size in sizes), config.max_num_seqs)

    @property
    def largest(self) -> int:
        """Tokens of the largest size."""
        return self.sizes[-1][0] if self.sizes else 0

    def fit(self, arrays: Arrays, needs_every_state: bool, parts: ListLike[Part] = ()) -> int | None:
        """Pad a prefill, in place, to a captured size, which is returned; None if there is none."""
        num_tokens, contexts = len(arrays["input_ids"]), int(arrays["positions"].sum())
        if needs_every_state or num_tokens > self.largest:
            return None
        max_seqlen_q = int(np.diff(arrays["cu_seqlens_q"]).max())
        if max_seqlen_q >= LARGE_TILES_SEQLEN and contexts > MAX_PADDED_CONTEXTS:
            return None
        num_parts = int(num_parts_of(arrays["cu_seqlens_q"]).sum())
        for size, num_seqs in self.sizes:
            if size >= num_tokens and num_seqs >= num_parts and all(part.pad(arrays, size, num_seqs) for part in parts):
                arrays.update(as_padded_prefill(arrays, size, num_seqs, self.padding_req_idx))
                return size
        return None


def max_layer_work(devices: Iterable, has_fp8: bool) -> int:
    """MAX_LAYER_WORK of the ranks' GPUs, the same on all ranks."""
    capabilities = [torch.cuda.get_device_capability(device) for device in devices]
    if any(capability[0] not in (9, 10) for capability in capabilities):  # not Hopper, Blackwell of a data centre
        return MAX_LAYER_WORK // 4  # an A100 has a third of an H200's rate
    # only Hopper multiplies FP8 weights in e4m3, in half the time
    return MAX_LAYER_WORK * (2 if has_fp8 and set(capabilities) == {(9, 0)} else 1)


def most_seqs(size: int, config: Config) -> int:
    """Sequences of a padded prefill of ``size`` tokens, their parts included; fewer than tokens."""
    num_seqs, num_cuts = (aligned(n) for n in (config.max_num_seqs, size // MAX_PADDED_SEQLEN))
    return min(max(size // 8, MIN_SEQS), num_seqs + num_cuts, 256)  # the attention kernel for Hopper takes 256 a launch


def aligned(length: int) -> int:
    """Length of an int32 array after which the next one begins at a multiple of 16 bytes."""
    return -(-length // 4) * 4


def pad(values: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    padded = np.full(size, value, np.int32)  # np.pad takes five times as long
    padded[: len(values)] = values
    return padded


def num_parts_of(cu_seqlens_q: np.ndarray) -> np.ndarray:
    """Into how many parts of at most MAX_PADDED_SEQLEN query tokens each sequence is cut."""
    return -(-np.diff(cu_seqlens_q) // MAX_PADDED_SEQLEN)


def as_padded_prefill(arrays: Arrays, size: int, num_seqs: int, padding_req_idx: int) -> Arrays:
    """The arrays of the same prefill with ``size`` tokens, the last of no sequence, and ``num_seqs`` sequences, the
    last without a token. The parts of a long one are sequences of one request slot. ``logits_indices`` are sequences.
    """
    cu_seqlens_q = arrays["cu_seqlens_q"]
    starts, ends, num_parts = cu_seqlens_q[:-1], cu_seqlens_q[1:], num_parts_of(cu_seqlens_q)
    stops = np.cumsum(num_parts)  # end of each sequence's parts
    seq = np.repeat(np.arange(len(starts)), num_parts)  # sequence of each part
    nth = np.arange(1, len(seq) + 1) - (stops - num_parts)[seq]
    part_ends = np.minimum(starts[seq] + nth * MAX_PADDED_SEQLEN, ends[seq])
    return {
        "input_ids": pad(arrays["input_ids"], size),
        "positions": pad(arrays["positions"], size),
        "slot_mapping": pad(arrays["slot_mapping"], size, -1),
        "req_indices": pad(arrays["req_indices"][seq], num_seqs, padding_req_idx),
        "context_lens": pad(arrays["context_lens"][seq] - (ends[seq] - part_ends), num_seqs),
        "cu_seqlens_q": pad(np.append(0, part_ends), aligned(num_seqs + 1), cu_seqlens_q[-1]),
        "cu_seqlens_k": np.empty(0, np.int32),
        "logits_indices": stops[: len(arrays["logits_indices"])] - 1,
    }


class PrefillGraphs(Launcher):
    """Prefills that fit a captured size. Their arrays are contiguous from a fixed address on.

    Args:
        sizes: of the graphs.
        block_tables: int32 [R + 1, max_blocks], of the request state.
        max_context: ``max_model_len``.
        parts: have arrays of their own.
    """

    def __init__(self, sizes: PrefillSizes, block_tables: torch.Tensor, max_context: int, parts: ListLike[Part] = ()):
        self.sizes, self._num_seqs, self._parts = sizes, dict(sizes.sizes), parts
        num_ints = [sum(map(aligned, self._lengths(size).values())) for size in self._num_seqs]
        # Zeros: warm-up runs the embedding, which needs valid ids.
        self.buffer = torch.zeros(max(num_ints, default=0), dtype=torch.int32, device=block_tables.device)
        self._block_tables, self._max_context = block_tables, max_context
        self.size: int | None = None  # captured size for the last batch taken

    @classmethod
    def of(cls, rank: Rank, state: RequestState, parts: ListLike[Part]) -> "PrefillGraphs":
        config, tp = rank.config, rank.tp
        devices = range(tp.size) if tp.size > 1 else [rank.device]
        max_work = max_layer_work(devices, has_fp8=config.model_config.fp8 is not None)
        sizes = PrefillSizes.of(config, rank.backend, tp.peers is not None, max_work)
        parts = [part for part in parts if part.padded_lengths(1, 1)]
        return cls(sizes, state.block_tables, config.max_model_len, parts)

    def write(self, tensors: Tensors, size: int) -> None:
        """Take in the arrays of a prefill that ``PrefillSizes.fit`` has padded."""
        values = [tensors[name] for name in self._lengths(size)]
        torch.cat(values, out=self.buffer[: sum(map(len, values))])

    def inputs(self, size: int) -> tuple[torch.Tensor, Context]:
        """``size`` packed tokens. The last of every sequence is sampled from; an empty one has that of the sequence
        before, and attends nothing."""
        lengths = self._lengths(size)
        spaces = [aligned(length) for length in lengths.values()]
        places = self.buffer[: sum(spaces)].split(spaces)
        tensors = {name: place[: lengths[name]] for name, place in zip(lengths, places, strict=True)}
        input_ids, positions, slots, req_indices, context_lens, cu_seqlens_q = list(tensors.values())[:6]
        return input_ids, Context(
            positions, slots, req_indices, context_lens, self._block_tables, self._max_context,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=min(size, MAX_PADDED_SEQLEN),
            logits_indices=cu_seqlens_q[1:].long() - 1, tensors=tensors,
        )  # fmt: skip

    def _lengths(self, size: int) -> dict[str, int]:
        """Lengths of the arrays, by name, in their order."""
        n = self._num_seqs[size]
        lengths = {"input_ids": size, "positions": size, "slot_mapping": size, "req_indices": n, "context_lens": n,
                   "cu_seqlens_q": n + 1}  # fmt: skip
        for part in self._parts:
            lengths |= part.padded_lengths(size, n)
        return lengths

    def takes(self, batch: Batch, arrays: Arrays) -> bool:
        self.size = None
        if isinstance(batch, PrefillBatch):
            self.size = self.sizes.fit(arrays, batch.needs_every_state, self._parts)
        return self.size is not None

    def run(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.size is not None and step.graphs is not None
        self.write(step.tensors, self.size)
        every = step.graphs.replay(PADDED, self.size)
        return every[step.tensors["logits_indices"].long()], every

    def capture(self, model: CausalLM, graphs: CUDAGraphs) -> None:
        graphs.capture(PADDED, [size for size, _ in self.sizes.sizes], lambda size: model(*self.inputs(size)))

    def compile(self, model: CausalLM) -> None:
        for size, _ in self.sizes.sizes:
            model(*self.inputs(size))

    def num_graphs(self) -> int:
        return len(self.sizes.sizes)

    def most_tokens(self) -> int:
        return self.sizes.largest

"""Cascade attention: the sequences of a decode batch whose block tables begin with the same full KV blocks.

Owns the choice of groups, and their columns on the device. Equal prefixes have equal blocks, so it looks at block ids
alone, and only when the batch has changed. A group must save enough reading to pay for its launch; of nested prefixes
those are taken that save most.
"""

from typing import Any

import numpy as np
import torch

from nanovllm.core import Batch, PrefillBatch
from nanovllm.kernels.attention.reference import SHARED_TOKENS, PrefixGroups
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.cuda_graphs import DECODE, CUDAGraphs
from nanovllm.runner.launchers import DecodeLauncher
from nanovllm.runner.part import Part, Rank, Step
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.feature import Arrays, Tensors

CASCADE = "cascade decode"  # kind of graph
MIN_MEMBERS = 8  # smallest group
# Reads of tokens that all groups together save a layer: 64 MB with 8 KV heads of 128 in 16 bits, 15 us.
MIN_SAVED_TOKENS = 16_384
MAX_BRANCHINGS = 64  # branchings of prefixes on the way to a group

Group = tuple[np.ndarray, int]  # batch positions of the members, and how many tokens they share


def find_groups(tables: np.ndarray, block_size: int) -> list[Group]:
    """The groups of a batch. ``tables`` int32 [B, max_blocks]: block tables, -1 after the full blocks."""
    groups, num_saved = _divide(tables, block_size, np.arange(len(tables)), 0, MAX_BRANCHINGS)
    return groups if num_saved >= MIN_SAVED_TOKENS else []


def _divide(tables: np.ndarray, block_size: int, members: np.ndarray, depth: int,
            branchings: int) -> tuple[list[Group], int]:
    """Groups of ``members``, whose first ``depth`` blocks are equal, and the tokens that these groups save."""
    rows = tables[members, depth:]
    is_shared = (rows == rows[0]).all(0) & (rows[0] >= 0)
    num_more = int(np.append(is_shared, False).argmin())
    depth += num_more
    num_tokens = depth * block_size // SHARED_TOKENS * SHARED_TOKENS
    groups: list[Group] = []
    num_saved = 0
    if depth < tables.shape[1] and branchings:
        block_ids, counts = np.unique(rows[:, num_more], return_counts=True)
        for block_id in block_ids[(counts >= MIN_MEMBERS) & (block_ids >= 0)].tolist():
            branch = members[rows[:, num_more] == block_id]
            found, saved = _divide(tables, block_size, branch, depth, branchings - 1)
            if saved > len(branch) * num_tokens:  # saves more than as members of this group
                groups += found
                num_saved += saved
    if groups:
        members = np.setdiff1d(members, np.concatenate([group for group, _ in groups]), assume_unique=True)
    if num_tokens and len(members) >= MIN_MEMBERS:
        groups.append((members, num_tokens))
        num_saved += (len(members) - 1) * num_tokens
    return groups, num_saved


def cascade_sizes(decode_sizes: list[int]) -> list[int]:
    """Captured sizes: fewer than without groups, since each is captured when a batch waits for it."""
    return [size for size in decode_sizes[:-1] if size == 32 or size % 64 == 0] + decode_sizes[-1:]


def columns_of(words: Any, max_num_seqs: int) -> PrefixGroups:
    """Views of the first ``num_words(max_num_seqs)`` of these int32 words."""
    return PrefixGroups(*(words[start : start + size] for start, size in _columns(max_num_seqs)))


def num_words(max_num_seqs: int) -> int:
    start, size = _columns(max_num_seqs)[-1]
    return start + -(-size // 4) * 4


def _columns(max_num_seqs: int) -> list[tuple[int, int]]:
    """Start and size of each column of ``PrefixGroups``, aligned to 16 bytes."""
    num_groups = max(1, max_num_seqs // MIN_MEMBERS)
    sizes = [max_num_seqs] * 2 + [num_groups] * 4
    starts = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
    return list(zip(starts, sizes, strict=False))


class Cascade(Part):
    """The groups of the decode batch, on one rank.

    Args:
        block_tables: int32 [R, max_blocks] on the host, kept up to date by the request state.
        block_size: tokens of a block.
        device: of the groups.

    Attributes:
        groups: views of one buffer on the device; None where the batch set last has none, and attention is plain.
    """

    @classmethod
    def make(cls, rank: Rank, state: RequestState, decode: DecodeLauncher) -> "Cascade | None":
        config = rank.config
        if not rank.backend.shares_prefixes or all(config.model_config.windows):
            return None
        groups = cls(state.block_table_mirror, config.kvcache_block_size, rank.device)
        groups.launchers = (CascadeLauncher(groups, decode),)
        return groups

    def __init__(self, block_tables: np.ndarray, block_size: int, device: torch.device):
        self._tables, self._block_size = block_tables, block_size
        self._buffer = torch.zeros(num_words(len(block_tables)), dtype=torch.int32, device=device)
        self.columns = columns_of(self._buffer, len(block_tables))
        self.reset()

    def reset(self) -> None:
        """The device's groups are not known any more."""
        self._on_device = np.full(len(self._buffer), -1, np.int32)
        self._req_indices = np.empty(0, np.int32)  # the batch that was grouped last
        self.groups: PrefixGroups | None = None

    def prepare(self, batch: Batch, arrays: Arrays) -> None:
        """Host: group the next decode batch, and put the changes for the device into ``arrays``."""
        if isinstance(batch, PrefillBatch):
            if len(batch.new):  # request slots have new owners: the next batch is grouped anew
                self._req_indices = np.empty(0, np.int32)
            return
        if batch.num_rows > 1:
            return
        is_same = batch.req_indices is self._req_indices or np.array_equal(batch.req_indices, self._req_indices)
        if not is_same:
            self._req_indices = batch.req_indices
            groups = self._find(batch.req_indices, (batch.lengths - 1) // self._block_size)
            self.groups = self.columns if groups else None
            if groups:  # without groups the device does not look at them
                self._set(groups, arrays)

    def write(self, batch: Batch, tensors: Tensors) -> None:
        """Device: take in the groups that have changed."""
        if "group_values" in tensors:
            self._buffer.index_copy_(0, tensors["group_indices"].long(), tensors["group_values"])

    def _set(self, groups: list[Group], arrays: Arrays) -> None:
        target = np.zeros_like(self._on_device)
        columns: Any = columns_of(target, len(self._tables))
        end = 0
        for i, (members, num_tokens) in enumerate(groups):
            columns.shared_lens[members] = num_tokens
            columns.members[end : end + len(members)] = members
            columns.begins[i], columns.sizes[i], columns.lens[i] = end, len(members), num_tokens
            columns.owners[i] = self._req_indices[members[0]]
            end += len(members)
        changed = np.flatnonzero(target != self._on_device)
        self._on_device = target
        if len(changed):
            arrays["group_indices"], arrays["group_values"] = changed, target[changed]

    def _find(self, req_indices: np.ndarray, num_full: np.ndarray) -> list[Group]:
        """``num_full`` int32 [B]: blocks of each sequence all of whose tokens are computed."""
        has_full = num_full > 0
        first = np.sort(self._tables[req_indices[has_full], 0])
        if not (first[MIN_MEMBERS - 1 :] == first[: max(len(first) - MIN_MEMBERS + 1, 0)]).any():
            return []
        tables = self._tables[req_indices, : num_full.max()]
        tables[np.arange(tables.shape[1]) >= num_full[:, None]] = -1
        return find_groups(tables, self._block_size)


class CascadeLauncher(DecodeLauncher):
    """Decode steps with groups; a graph is captured when a batch waits for it."""

    def __init__(self, groups: Cascade, decode: DecodeLauncher):
        super().__init__(decode.inputs, decode.sampler, cascade_sizes(decode.sizes))
        self._groups = groups

    def takes(self, batch: Batch, arrays: Arrays) -> bool:
        return batch.is_decode and batch.num_rows == 1 and self._groups.groups is not None

    def run(self, step: Step) -> tuple[torch.Tensor, None]:
        size, graphs, model = len(step.batch.req_indices), step.graphs, step.model
        if graphs is None:
            return model(*self.inputs(size, int(step.batch.lengths.max()), self._groups.columns)), None

        def run(size: int) -> torch.Tensor:  # to where the sampling graph reads
            hidden = model(*self.inputs(size, groups=self._groups.columns))
            return graphs.output(DECODE, size).copy_(hidden)

        return graphs.replay(CASCADE, size, run), None

    def capture(self, model: CausalLM, graphs: CUDAGraphs) -> None:
        graphs.sizes[CASCADE] = self.sizes

    def compile(self, model: CausalLM) -> None:
        for size in self.sizes:
            model(*self.inputs(size, groups=self._groups.columns))

    def num_graphs(self) -> int:
        return len(self.sizes)

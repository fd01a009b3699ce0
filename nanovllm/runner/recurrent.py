"""The states of recurrent layers on one rank: their rows, how many of them fit, and the arrays that say who uses them.

Owns one tensor over all layers for each tensor of a state. Row r < R belongs to request slot r, row R to padding, the
others to snapshots. Rows are addressed by request slot, which a decode step has on the device anyway.
"""

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.core import Batch, PrefillBatch
from nanovllm.kernels.recurrent.reference import CHUNK, CHUNK_ARRAYS
from nanovllm.messages.recurrent import RecurrentRows, StateCopies
from nanovllm.models.decoder import CausalLM
from nanovllm.models.recurrent.mixer import RecurrentMixer
from nanovllm.runner.device import model_defaults
from nanovllm.runner.launchers import DecodeLauncher
from nanovllm.runner.memory import KVCache, zeros
from nanovllm.runner.part import Part, Rank
from nanovllm.runner.prefill_graphs import aligned, pad
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.feature import Arrays, Tensors

MAX_SHARE = 0.5  # share of the memory that weights leave, for the rows of request slots
SNAPSHOT_SHARE = 0.1  # share of the KV cache's memory, for snapshots
ROWS_AT_ONCE = 2  # rows copied through a buffer: 100 MiB for a model of 9 B parameters


class RecurrentStates(Part):
    """Rows of states that a batch copies, and the chunks of a prefill; ``num_rows``: snapshots.

    Attributes:
        states: the tensors [layers, rows, ...]; () while no memory is allocated.
    """

    states: tuple[torch.Tensor, ...] = ()

    def __init__(self, rank: Rank):
        self._rank, self._num_slots = rank, rank.config.max_num_seqs

    @classmethod
    def fitted(cls, rank: Rank) -> Config:
        """With fewer request slots than ``max_num_seqs`` where their states have no room, the same on every rank."""
        config = rank.config
        if config.model_config.recurrent is None or rank.device.type == "cpu" or config.num_kvcache_blocks != -1:
            return config
        with model_defaults(rank.dtype, torch.device("meta")):
            model = CausalLM(config.model_config, rank.backend, rank.tp)
        weights = sum(param.numel() * param.itemsize for param in model.parameters())
        total = min(torch.cuda.get_device_properties(i).total_memory for i in range(max(1, rank.tp.size)))
        bytes_per_row = row_bytes(model, rank.dtype, getattr(torch, config.state_dtype))
        num_slots = max(1, int((total * config.gpu_memory_utilization - weights) * MAX_SHARE) // bytes_per_row)
        if num_slots >= config.max_num_seqs:
            return config
        fitting = copy.copy(config)
        vars(fitting)["max_num_seqs"] = num_slots  # bypasses the frozen __setattr__
        return fitting

    @classmethod
    def make(cls, rank: Rank, state: RequestState, decode: DecodeLauncher) -> "RecurrentStates | None":
        return None if rank.config.model_config.recurrent is None else cls(rank)

    # ---------------------------------------------------------------- a step

    def prepare(self, batch: Batch, arrays: Arrays) -> None:
        if isinstance(batch, PrefillBatch):
            arrays |= chunk_arrays(batch, batch.messages[StateCopies])

    def finish(self, batch: Batch, tensors: Tensors) -> None:
        if "state_rows_from" in tensors:
            copy_rows(self.states, tensors["state_rows_from"].long(), tensors["state_rows_to"].long())

    # ---------------------------------------------------------------- memory

    def _row_bytes(self, model: nn.Module) -> int:
        return row_bytes(model, self._rank.dtype, getattr(torch, self._rank.config.state_dtype))

    def reserved_bytes(self, model: CausalLM) -> int:
        return self._row_bytes(model) * (self._num_slots + 1)

    def share(self, model: CausalLM, num_bytes: int) -> int:
        config, bytes_per_row = self._rank.config, self._row_bytes(model)
        self.num_rows = config.num_state_snapshots
        if not config.enable_prefix_caching:
            self.num_rows = 0
        elif self.num_rows == -1:
            most = config.max_num_seqs * self._rank.max_blocks  # a snapshot needs its block
            self.num_rows = min(most, max(0, int(num_bytes * SNAPSHOT_SHARE) // bytes_per_row))
        return self.num_rows * bytes_per_row

    def allocate(self, model: CausalLM, kv_cache: KVCache, num_slots: int) -> None:
        rank, num_rows = self._rank, num_slots + 1 + self.num_rows
        state_dtype = getattr(torch, rank.config.state_dtype)
        self.states = allocate_states(model, num_rows, rank.dtype, state_dtype, rank.device)

    def release(self, model: CausalLM) -> None:
        self.states = ()
        for layer in recurrent_layers(model):
            layer.states = None

    def facts(self) -> dict[str, Any]:
        return {"recurrent_rows": RecurrentRows(self.num_rows, CHUNK)}

    def describe(self) -> str:
        if not self.states:
            return ""
        kib = sum(tensor[:, 0].numel() * tensor.itemsize for tensor in self.states) / 2**10
        size = f"{kib / 2**10:,.1f} MiB" if kib >= 2**10 else f"{kib:,.1f} KiB"
        return f" with states of {size} each and {self.num_rows:,} snapshots of them"

    # ---------------------------------------------------------------- prefills that no batch stands for

    def one_sequence(self, num_tokens: int) -> Arrays:
        bounds = [*range(0, num_tokens, CHUNK), num_tokens]
        n = len(bounds) - 1
        fields = ([0, num_tokens], [self._num_slots], [-1], [0, n], bounds, [0] * n, [-1] * n)
        return {name: np.array(values, np.int32) for name, values in zip(CHUNK_ARRAYS, fields, strict=True)}

    def padded_lengths(self, num_tokens: int, num_seqs: int) -> dict[str, int]:
        n, num_chunks = num_seqs, most_chunks(num_tokens, num_seqs)
        lengths = [n + 1, n, n, n + 1, num_chunks + 1, num_chunks, num_chunks]
        return dict(zip(CHUNK_ARRAYS, lengths, strict=True))

    def pad(self, arrays: Arrays, num_tokens: int, num_seqs: int) -> bool:
        """Append empty sequences and chunks."""
        values = [arrays[name] for name in CHUNK_ARRAYS]
        if len(values[5]) > most_chunks(num_tokens, num_seqs):
            return False
        end, last_chunk = values[0][-1], values[3][-1]
        fills = (end, self._num_slots, -1, last_chunk, end, 0, -1)
        lengths = self.padded_lengths(num_tokens, num_seqs)
        for (name, length), array, fill in zip(lengths.items(), values, fills, strict=True):
            arrays[name] = pad(array, aligned(length), fill)
        return True


def most_chunks(num_tokens: int, num_seqs: int) -> int:
    """Chunks of a padded prefill: each sequence has a partial one."""
    return aligned(num_tokens // CHUNK + num_seqs)


def recurrent_layers(model: nn.Module) -> list[RecurrentMixer]:
    return [module for module in model.modules() if isinstance(module, RecurrentMixer)]


def row_bytes(model: nn.Module, dtype: torch.dtype, state_dtype: torch.dtype) -> int:
    """Bytes of one row over all layers of this rank; 0 without recurrent layers."""
    shapes = [each for layer in recurrent_layers(model) for each in layer.state_shapes]
    return sum(math.prod(shape) * (state_dtype if accumulates else dtype).itemsize for shape, accumulates in shapes)


def allocate_states(model: nn.Module, num_rows: int, dtype: torch.dtype, state_dtype: torch.dtype,
                    device: torch.device) -> tuple[torch.Tensor, ...]:
    """Zeroed states [layers, num_rows, ...]; each recurrent layer gets its views. () without recurrent layers."""
    layers = recurrent_layers(model)
    if not layers:
        return ()
    (shapes,) = {layer.state_shapes for layer in layers}
    states = tuple(
        zeros((len(layers), num_rows, *shape), state_dtype if accumulates else dtype, device)
        for shape, accumulates in shapes
    )
    for layer, *views in zip(layers, *states, strict=True):
        layer.states = layer.States(*views)
    return states


def copy_rows(states: tuple[torch.Tensor, ...], rows_from: torch.Tensor, rows_to: torch.Tensor) -> None:
    """In every layer, row rows_to[i] becomes a copy of row rows_from[i]; int64 [n] each, no row in both."""
    for start in range(0, len(rows_to), ROWS_AT_ONCE):
        chunk = slice(start, start + ROWS_AT_ONCE)
        for tensor in states:
            tensor.index_copy_(1, rows_to[chunk], tensor.index_select(1, rows_from[chunk]))


def chunk_arrays(batch: PrefillBatch, copies: StateCopies) -> Arrays:
    """``Chunks`` of a prefill's sequences, and where forked completions copy their states."""
    starts, stops = batch.starts, batch.stops
    first_grid, last_grid = starts // CHUNK, -(-stops // CHUNK)
    cu_seqlens, first_chunks = (np.append(0, np.cumsum(n)) for n in (stops - starts, last_grid - first_grid))
    seqs = np.repeat(np.arange(len(starts)), last_grid - first_grid)
    nth = np.arange(len(seqs)) - first_chunks[seqs]
    ends = np.minimum((first_grid[seqs] + nth + 1) * CHUNK, stops[seqs])  # positions
    slots = batch.chunk_req_indices.tolist()
    save_rows = np.full(len(seqs), -1)
    for req_idx, num_tokens, row in copies.saves:
        i = slots.index(req_idx)
        save_rows[first_chunks[i] + -(-num_tokens // CHUNK) - first_grid[i] - 1] = row
    load_rows = np.array([copies.loads[req_idx] for req_idx in slots])
    fields = (cu_seqlens, batch.chunk_req_indices, load_rows, first_chunks,
              np.append(0, cu_seqlens[seqs] + ends - starts[seqs]), seqs, save_rows)  # fmt: skip
    arrays = {name: values.astype(np.int32) for name, values in zip(CHUNK_ARRAYS, fields, strict=True)}
    if copies.after:
        arrays["state_rows_from"], arrays["state_rows_to"] = np.array(copies.after, np.int32).T
    return arrays

"""The states of recurrent layers on one rank: their rows, how many of them fit, and the arrays that say who uses them.

Owns a tensor for the rings of all convolutions and one for all delta states. Row r < R belongs to request slot r, row R
to padding, the others to snapshots. Rows are addressed by request slot, which a decode step has on the device anyway.
"""

import copy

import numpy as np
import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.core import Batch, PrefillBatch
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.delta.reference import CHUNK, Chunks, DeltaStates
from nanovllm.layers.attention import AttentionBackend
from nanovllm.models.decoder import CausalLM
from nanovllm.models.gated_delta_net import GatedDeltaNet
from nanovllm.runner.device import model_defaults
from nanovllm.runner.memory import zeros
from nanovllm.runner.part import Part
from nanovllm.sampling.feature import Arrays, Tensors

NAMES = tuple(f"chunks_{field}" for field in Chunks._fields)
MAX_SHARE = 0.5  # of the memory that weights leave, for the rows of request slots
SNAPSHOT_SHARE = 0.1  # of what the cache may take, for snapshots
ROWS_AT_ONCE = 2  # copied through a buffer: 100 MiB for a model of 9 B parameters


class RecurrentStates(Part):
    """Rows of states that a batch copies, and the chunks of a prefill; ``states``: once they are allocated."""

    def __init__(self) -> None:
        self.states: DeltaStates | None = None

    def prepare(self, batch: Batch, arrays: Arrays) -> None:
        if isinstance(batch, PrefillBatch) and batch.states is not None:
            arrays |= chunk_arrays(batch)

    def finish(self, batch: Batch, tensors: Tensors) -> None:
        if "rows_from" in tensors:  # completions were forked
            assert self.states is not None
            copy_rows(self.states, tensors["rows_from"].long(), tensors["rows_to"].long())


def recurrent_layers(model: nn.Module) -> list[GatedDeltaNet]:
    return [module for module in model.modules() if isinstance(module, GatedDeltaNet)]


def row_bytes(model: nn.Module, dtype: torch.dtype, state_dtype: torch.dtype) -> int:
    """Bytes of one row over all layers of this rank; 0 without recurrent layers."""
    shapes = [layer.state_shapes() for layer in recurrent_layers(model)]
    return sum(
        int(np.prod(ring)) * dtype.itemsize + int(np.prod(delta)) * state_dtype.itemsize for ring, delta in shapes
    )


def with_fitting_slots(config: Config, backend: AttentionBackend, tp: TPGroup, dtype: torch.dtype,
                       device: torch.device) -> Config:
    """The options with as many request slots, at most ``max_num_seqs``, as have room for their states. The same on
    every rank of equal GPUs."""
    if config.model_config.delta is None or device.type == "cpu" or config.num_kvcache_blocks != -1:
        return config
    with model_defaults(dtype, torch.device("meta")):
        model = CausalLM(config.model_config, backend, tp)
    weights = sum(param.numel() * param.itemsize for param in model.parameters())
    total = min(torch.cuda.get_device_properties(i).total_memory for i in range(max(1, tp.size)))
    bytes_per_row = row_bytes(model, dtype, getattr(torch, config.state_dtype))
    left = total * config.gpu_memory_utilization - weights
    num_slots = max(1, int(left * MAX_SHARE) // bytes_per_row)
    if num_slots >= config.max_num_seqs:
        return config
    fitting = copy.copy(config)
    vars(fitting)["max_num_seqs"] = num_slots  # bypasses the frozen __setattr__
    return fitting


def allocate_states(model: nn.Module, num_rows: int, dtype: torch.dtype, state_dtype: torch.dtype,
                    device: torch.device) -> DeltaStates | None:
    """Zeroed states [layers, num_rows, ...]; each recurrent layer gets its views. None without recurrent layers."""
    layers = recurrent_layers(model)
    if not layers:
        return None
    (shapes,) = {layer.state_shapes() for layer in layers}
    kinds = zip(shapes, (dtype, state_dtype), strict=True)
    states = DeltaStates(*(zeros((len(layers), num_rows, *shape), kind, device) for shape, kind in kinds))
    for layer, *views in zip(layers, *states, strict=True):
        layer.states = DeltaStates(*views)
    return states


def detach_states(model: nn.Module) -> None:
    for layer in recurrent_layers(model):
        layer.states = None


def copy_rows(states: DeltaStates, rows_from: torch.Tensor, rows_to: torch.Tensor) -> None:
    """In every layer, row rows_to[i] becomes a copy of row rows_from[i]; int64 [n] each, no row in both."""
    for start in range(0, len(rows_to), ROWS_AT_ONCE):
        chunk = slice(start, start + ROWS_AT_ONCE)
        for tensor in states:
            tensor.index_copy_(1, rows_to[chunk], tensor.index_select(1, rows_from[chunk]))


def chunk_arrays(batch: PrefillBatch) -> Arrays:
    """``Chunks`` of a prefill's sequences, and where forked completions copy their states."""
    moves, starts, stops = batch.states, batch.starts, batch.stops
    assert moves is not None
    first_grid, last_grid = starts // CHUNK, -(-stops // CHUNK)
    cu_seqlens, first_chunks = (np.append(0, np.cumsum(n)) for n in (stops - starts, last_grid - first_grid))
    seqs = np.repeat(np.arange(len(starts)), last_grid - first_grid)
    nth = np.arange(len(seqs)) - first_chunks[seqs]
    ends = np.minimum((first_grid[seqs] + nth + 1) * CHUNK, stops[seqs])  # positions
    save_rows = np.full(len(seqs), -1)
    saved, tokens, rows = moves.saves.T
    save_rows[first_chunks[saved] + -(-tokens // CHUNK) - first_grid[saved] - 1] = rows
    fields = (cu_seqlens, batch.chunk_req_indices, moves.load_rows, first_chunks,
              np.append(0, cu_seqlens[seqs] + ends - starts[seqs]), seqs, save_rows)  # fmt: skip
    arrays = {name: values.astype(np.int32) for name, values in zip(NAMES, fields, strict=True)}
    return arrays | dict(zip(("rows_from", "rows_to"), moves.copies.T, strict=True)) if len(moves.copies) else arrays


def chunks_of(tensors: Tensors) -> Chunks | None:
    """Of ``chunk_arrays`` on the device."""
    return Chunks(*(tensors[name] for name in NAMES)) if NAMES[0] in tensors else None


def chunks_of_one(num_tokens: int, row: int, device: torch.device) -> Chunks:
    """One sequence from its first token on, whose states end in ``row``."""
    bounds = [*range(0, num_tokens, CHUNK), num_tokens]
    num_chunks = len(bounds) - 1
    fields = ([0, num_tokens], [row], [-1], [0, num_chunks], bounds, [0] * num_chunks, [-1] * num_chunks)
    return Chunks(*(torch.tensor(values, dtype=torch.int32, device=device) for values in fields))

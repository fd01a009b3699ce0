"""From a batch to the inputs of the model: named arrays on the host, one copy to the device, the attention context.

Every rank prepares its own from the batch. Knows nothing of queues or models.
"""

from types import SimpleNamespace

import numpy as np
import torch

from nanovllm.core import PrefillBatch
from nanovllm.kernels.attention.reference import PrefixGroups
from nanovllm.layers.context import Context
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.feature import Arrays, Tensors


def to_device(arrays: Arrays, device: torch.device) -> Tensors:
    """Named arrays as int32 tensors on the device, by one asynchronous copy, each aligned to 16 bytes.

    Triton compiles another variant of a kernel for a less aligned pointer.
    """
    places, size = [], 0
    for name, values in arrays.items():
        places.append((name, size, size + len(values)))
        size += -(-len(values) // 4) * 4
    if size == 0:
        return {}
    # the allocator of pinned memory keeps the buffer until its copy is done
    packed = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    on_host = packed.numpy()
    for name, start, stop in places:
        on_host[start:stop] = arrays[name]
    on_device = packed.to(device, non_blocking=True)
    return {name: on_device[start:stop] for name, start, stop in places}


def prefill_arrays(batch: PrefillBatch, block_tables: np.ndarray, block_size: int) -> Arrays:
    """T packed tokens of S sequences, and where they belong, int32. ``block_tables`` [R, max_blocks] on the host.

    input_ids, positions, slot_mapping: [T]. req_indices, context_lens: [S]. cu_seqlens_q, cu_seqlens_k: [S + 1].
    logits_indices: last tokens that are sampled from or read out. sampled_req_indices: [N], the requests that get a
    token. sampled_from [N], indices of logits_indices: only if completions are forked, or some are not sampled.
    """
    lengths = batch.stops - batch.starts
    cu_seqlens_q = _cumulative(lengths)
    positions = np.arange(cu_seqlens_q[-1], dtype=np.int32) + np.repeat(batch.starts - cu_seqlens_q[:-1], lengths)
    blocks = block_tables[np.repeat(batch.chunk_req_indices, lengths), positions // block_size]
    arrays = {
        "input_ids": batch.token_ids,
        "positions": positions,
        "slot_mapping": blocks * block_size + positions % block_size,
        "req_indices": batch.chunk_req_indices,
        "context_lens": batch.stops,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": _cumulative(batch.stops),
        "logits_indices": cu_seqlens_q[1 : batch.num_read + 1] - 1,
        "sampled_req_indices": batch.req_indices,
    }
    if not np.array_equal(batch.sampled_from, np.arange(batch.num_read)):
        arrays["sampled_from"] = batch.sampled_from
    for readout in batch.readouts:
        arrays |= readout.arrays()
    return arrays


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], lengths.cumsum()], dtype=np.int32, casting="same_kind")


def prefill_inputs(tensors: Tensors, block_tables: torch.Tensor, max_context: int, max_seqlen_q: int,
                   logits_indices: torch.Tensor | None) -> tuple[torch.Tensor, Context]:
    """The packed tokens of ``prefill_arrays`` and their attention metadata. See ``Context``."""
    return tensors["input_ids"], Context(
        tensors["positions"], tensors["slot_mapping"], tensors["req_indices"], tensors["context_lens"], block_tables,
        max_context, tensors["cu_seqlens_q"], tensors["cu_seqlens_k"], max_seqlen_q, logits_indices, tensors=tensors,
    )  # fmt: skip


class DecodeInputs:
    """The next token of the first sequences of the decode batch, gathered from the request state on the device."""

    def __init__(self, state: RequestState, block_size: int, max_model_len: int, ops: SimpleNamespace):
        self.state, self._block_size, self._max_model_len, self._ops = state, block_size, max_model_len, ops

    def __call__(self, size: int, max_context: int | None = None, groups: PrefixGroups | None = None,
                 rows: torch.Tensor | None = None) -> tuple[torch.Tensor, Context]:
        """``rows``: request slots i32[size * Q], where each sequence has Q rows."""
        state, req_indices = self.state, self.state.batch_req_indices[:size]
        input_ids, positions, slot_mapping, context_lens = self._ops.decode_inputs(
            req_indices if rows is None else rows, state.last_token, state.length, state.block_tables, self._block_size
        )
        row_lens = None
        if rows is not None:
            row_lens, context_lens = context_lens, context_lens.view(size, -1).amax(1)
        return input_ids, Context(
            positions, slot_mapping, req_indices, context_lens, state.block_tables, max_context or self._max_model_len,
            prefix_groups=groups, row_lens=row_lens,
        )  # fmt: skip

"""From a scheduled batch to a launch: what the host computes before each step. Numbers only, no device."""

from dataclasses import replace

import numpy as np

from nanovllm.engine.scheduler import Batch, DecodeBatch, PrefillBatch
from nanovllm.runner.request_state import StagedWrites
from nanovllm.runner.step import StepHeader, StepInput, StepKind, pack

# Prefills of few tokens, which attend few tokens, run as CUDA graphs: the host takes longer to launch their 200 kernels
# one by one than the device to run them. A longer prefill is bound by the device.
SHORT_PREFILL_SIZES = (16, 32, 64, 128, 256)
MAX_SHORT_PREFILL_CONTEXTS = 1 << 17  # sum over tokens of the tokens they attend


def short_prefill_sizes(max_num_batched_tokens: int) -> list[int]:
    """The sizes that short prefills can be padded to."""
    first = SHORT_PREFILL_SIZES[0]
    return [size for size in SHORT_PREFILL_SIZES if size < 2 * max_num_batched_tokens or size == first]


def prepare(batch: Batch, staged: StagedWrites, block_size: int,
            short_sizes: list[int] | None = None) -> tuple[StepHeader, np.ndarray]:
    """Header and packed segments of a batch. ``short_sizes``: captured sizes of short prefills, if there are any."""
    if isinstance(batch, DecodeBatch):
        return prepare_decode(batch, staged)
    return prepare_prefill(batch, staged, block_size, short_sizes or [])


def prepare_decode(batch: DecodeBatch, staged: StagedWrites) -> tuple[StepHeader, np.ndarray]:
    """Only what changed since the last decode step is sent."""
    staged.append_blocks(batch.seqs_with_new_block)
    staged.set_batch(batch.req_indices)
    indices, values = staged.drain()
    header = StepHeader(
        kind=StepKind.DECODE,
        num_updates=len(indices),
        num_sampled=len(batch.req_indices),
        max_context=int(batch.lengths.max()),
        features=staged.features(batch.req_indices),
    )
    return header, pack(header, StepInput(indices, values))


def prepare_prefill(batch: PrefillBatch, staged: StagedWrites, block_size: int,
                    short_sizes: list[int]) -> tuple[StepHeader, np.ndarray]:
    for seq in batch.new_seqs:
        staged.add(seq)
    indices, values = staged.drain()
    chunks = list(zip(batch.seqs, batch.starts, batch.stops, strict=True))
    positions = [np.arange(start, stop, dtype=np.int32) for _, start, stop in chunks]
    slots = [
        np.array(seq.block_table, np.int32)[p // block_size] * block_size + p % block_size
        for seq, p in zip(batch.seqs, positions, strict=True)
    ]
    cu_seqlens_q = np.cumsum([0, *map(len, positions)], dtype=np.int32)
    step = StepInput(
        indices,
        values,
        input_ids=np.concatenate([seq.tokens(start, stop) for seq, start, stop in chunks]),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        req_indices=np.array([seq.req_idx for seq in batch.seqs], np.int32),
        context_lens=np.array(batch.stops, np.int32),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=np.cumsum([0, *batch.stops], dtype=np.int32),
        logits_indices=cu_seqlens_q[1 : len(batch.req_indices) + 1] - 1,
        sampled_req_indices=batch.req_indices,
    )
    header = StepHeader(
        kind=StepKind.PREFILL,
        num_updates=len(indices),
        num_sampled=len(batch.req_indices),
        num_tokens=len(step.input_ids),
        num_seqs=len(batch.seqs),
        max_seqlen_q=max(map(len, positions)),
        max_context=max(batch.stops),
        features=staged.features(batch.req_indices),
    )
    size = next((size for size in short_sizes if size >= header.num_tokens), None)
    if size is not None and int(step.positions.sum()) <= MAX_SHORT_PREFILL_CONTEXTS:
        header, step = as_short_prefill(header, step, size, staged.max_num_seqs)
    return header, pack(header, step)


def as_short_prefill(header: StepHeader, step: StepInput, size: int,
                     padding_req_idx: int) -> tuple[StepHeader, StepInput]:
    """The same prefill with each token as a sequence of its own, padded to ``size`` of them.

    Every layer stores all keys and values of a launch before it attends, so a token's context is complete.
    """

    def pad(values: np.ndarray, value: int = 0) -> np.ndarray:
        return np.pad(values, (0, size - len(values)), constant_values=value)

    header = replace(header, kind=StepKind.SHORT_PREFILL, num_tokens=size, num_seqs=size, max_seqlen_q=1)
    step = replace(
        step,
        input_ids=pad(step.input_ids),
        positions=pad(step.positions),
        slot_mapping=pad(step.slot_mapping, -1),
        req_indices=pad(np.repeat(step.req_indices, np.diff(step.cu_seqlens_q)), padding_req_idx),
        context_lens=pad(step.positions + 1),
        cu_seqlens_q=(),
        cu_seqlens_k=(),
    )
    return header, step

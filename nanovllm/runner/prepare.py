"""From a scheduled batch to a launch: what the host computes before each step. Numbers only, no device."""

from itertools import chain

import numpy as np

from nanovllm.engine.scheduler import Batch, DecodeBatch, PrefillBatch
from nanovllm.engine.sequence import Sequence
from nanovllm.runner.prefill_graphs import PrefillSizes
from nanovllm.runner.request_state import StagedWrites
from nanovllm.runner.step import StepHeader, StepInput, StepKind, pack
from nanovllm.sampling_params import LOGPROBS


def prepare(batch: Batch, staged: StagedWrites, block_size: int,
            sizes: PrefillSizes = PrefillSizes()) -> tuple[StepHeader, np.ndarray]:
    """Header and packed segments of a batch. ``sizes``: of the prefills that replay a graph."""
    if isinstance(batch, DecodeBatch):
        return prepare_decode(batch, staged, block_size)
    return prepare_prefill(batch, staged, block_size, sizes)


def prepare_decode(batch: DecodeBatch, staged: StagedWrites, block_size: int) -> tuple[StepHeader, np.ndarray]:
    """Only what changed since the last decode step is sent."""
    staged.append_blocks(batch.seqs_with_new_block)
    staged.set_batch(batch.req_indices)
    num_groups = staged.groups.update(batch.req_indices, batch.lengths, block_size)
    indices, values = staged.drain()
    features = staged.features(batch.req_indices)
    header = StepHeader(
        kind=StepKind.DECODE,
        num_updates=len(indices),
        num_sampled=len(batch.req_indices),
        max_context=int(batch.lengths.max()),
        features=features,
        num_logprobs=staged.num_logprobs(batch.req_indices) if features & LOGPROBS else 0,
        num_groups=num_groups,
    )
    return header, pack(header, StepInput(indices, values))


def prepare_masks(req_indices: np.ndarray, masks: np.ndarray) -> tuple[StepHeader, np.ndarray]:
    """The step that samples what the step before has computed, with token masks int32 [n, words]."""
    header = StepHeader(
        kind=StepKind.SAMPLE, num_updates=0, num_sampled=0, num_masks=len(masks), num_mask_words=masks.size
    )
    return header, pack(header, StepInput((), (), mask_req_indices=req_indices, mask_words=masks.ravel()))


def prepare_prefill(batch: PrefillBatch, staged: StagedWrites, block_size: int,
                    sizes: PrefillSizes) -> tuple[StepHeader, np.ndarray]:
    if batch.new_seqs:
        staged.add(*batch.new_seqs)
    indices, values = staged.drain()
    chunks = list(zip(batch.seqs, batch.starts, batch.stops, strict=True))
    starts, lengths = np.array(batch.starts, np.int32), np.subtract(batch.stops, batch.starts, dtype=np.int32)
    cu_seqlens_q = np.cumsum([0, *lengths.tolist()], dtype=np.int32)
    positions = np.arange(cu_seqlens_q[-1], dtype=np.int32) + np.repeat(starts - cu_seqlens_q[:-1], lengths)
    tables = [seq.block_table for seq in batch.seqs]
    first_blocks = np.cumsum([0, *map(len, tables[:-1])])  # of each sequence among all their blocks
    blocks = np.array([*chain(*tables)], np.int32)[np.repeat(first_blocks, lengths) + positions // block_size]
    num_logits = int(batch.sampled_from.max(initial=-1)) + 1  # sampled sequences come first
    is_forked = num_logits < len(batch.sampled_from)
    adjustment_indices, adjustment_values, mask_req_indices, masks = staged.tables.drain()
    targets = targets_of(chunks, cu_seqlens_q)
    copies = np.array(batch.block_copies, np.int32).reshape(-1, 2)
    step = StepInput(
        indices,
        values,
        input_ids=np.concatenate([seq.tokens(start, stop) for seq, start, stop in chunks]),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        req_indices=np.array([seq.req_idx for seq in batch.seqs], np.int32),
        context_lens=np.array(batch.stops, np.int32),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=np.cumsum([0, *batch.stops], dtype=np.int32),
        logits_indices=cu_seqlens_q[1 : num_logits + 1] - 1,
        sampled_req_indices=batch.req_indices,
        sampled_from=batch.sampled_from if is_forked else (),
        adjustment_indices=adjustment_indices,
        adjustment_values=adjustment_values,
        mask_req_indices=mask_req_indices,
        mask_words=masks,
        target_indices=targets[0],
        targets=targets[1],
        copy_from=copies[:, 0],
        copy_to=copies[:, 1],
    )
    features = staged.features(batch.req_indices)
    header = StepHeader(
        kind=StepKind.PREFILL,
        num_updates=len(indices),
        num_sampled=len(batch.req_indices),
        num_tokens=len(step.input_ids),
        num_seqs=len(batch.seqs),
        max_seqlen_q=int(lengths.max()),
        max_context=max(batch.stops),
        features=features,
        num_logits=num_logits,
        num_logprobs=staged.num_logprobs(batch.req_indices) if features & LOGPROBS else 0,
        num_adjustments=len(adjustment_indices),
        num_masks=len(mask_req_indices),
        num_mask_words=len(masks),
        num_targets=len(targets[0]),
        num_prompt_logprobs=max(staged.num_alternatives(seq.sampling_params.prompt_logprobs) for seq in batch.seqs),
        num_block_copies=len(copies),
        can_split=not batch.unsampled and not len(targets[0]),  # unsampled ones come last, whatever they precede
    )
    header, step = sizes.fit(header, step)
    return header, pack(header, step)


def targets_of(chunks: list[tuple[Sequence, int, int]], cu_seqlens_q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed tokens whose logits are scored, and the tokens to score, int32 [n] each."""
    indices, targets = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    for (seq, start, stop), offset in zip(chunks, cu_seqlens_q.tolist(), strict=False):
        rows = seq.target_rows(start, stop)
        if rows:
            assert seq.targets is not None
            indices.append(np.arange(rows.start - start, rows.stop - start, dtype=np.int32) + offset)
            targets.append(seq.targets[rows.start - seq.first_target : rows.stop - seq.first_target])
    return np.concatenate(indices), np.concatenate(targets)

"""Prefills as short prefills: which ones, and their padding."""

import numpy as np
import pytest

from nanovllm.engine.scheduler import PrefillBatch
from nanovllm.engine.sequence import Sequence, SequenceTable
from nanovllm.runner import prepare as prepare_module
from nanovllm.runner.prepare import prepare, short_prefill_sizes
from nanovllm.runner.request_state import StagedWrites
from nanovllm.runner.sampling_tables import StagedTables
from nanovllm.runner.step import StepKind, unpack

BLOCK_SIZE, MAX_NUM_SEQS, MAX_BLOCKS = 4, 6, 200


def prefill(*chunks):
    """A batch that computes tokens [start, stop) of one sequence per chunk. Token ids are 100 * sequence + position,
    request slots 5, 4, ..., blocks 10 * sequence and up."""
    table, seqs = SequenceTable(MAX_NUM_SEQS, BLOCK_SIZE * MAX_BLOCKS), []
    table.free_req_indices.reverse()
    for i, (_, stop) in enumerate(chunks):
        seq = Sequence([100 * i + n for n in range(stop)], seq_id=i, block_size=BLOCK_SIZE)
        table.add(seq)
        seq.block_table = list(range(10 * i, 10 * i + seq.num_blocks))
        seqs.append(seq)
    starts, stops = map(list, zip(*chunks, strict=True))
    req_indices = np.array([seq.req_idx for seq in seqs], np.int32)
    each = np.arange(len(seqs))
    return PrefillBatch(seqs, starts, stops, seqs, req_indices, each, each.astype(np.int32), [], [], [])


def prepared(batch, short_sizes):
    staged = StagedWrites(MAX_NUM_SEQS, MAX_BLOCKS, StagedTables(BLOCK_SIZE * MAX_BLOCKS, vocab_size=1000))
    header, packed = prepare(batch, staged, BLOCK_SIZE, short_sizes)
    return header, {name: segment.tolist() for name, segment in unpack(header, packed)._asdict().items()}


@pytest.mark.parametrize("max_num_batched_tokens", [1, 15, 16, 17, 31, 100, 255, 256, 10_000])
def test_sizes(max_num_batched_tokens):
    """Every prefill up to 256 tokens has a size; none is padded to twice the tokens a launch can have, 16 aside."""
    sizes = short_prefill_sizes(max_num_batched_tokens)
    assert sizes[0] == 16 and sizes == sorted(sizes)
    assert sizes[-1] >= min(max_num_batched_tokens, 256) and all(n < 2 * max_num_batched_tokens for n in sizes[1:])


def test_every_token_is_a_sequence():
    header, step = prepared(prefill((0, 3), (5, 7)), short_sizes=[8, 16])
    assert (header.kind, header.num_tokens, header.num_seqs, header.num_sampled) == (StepKind.SHORT_PREFILL, 8, 8, 2)
    padding = [MAX_NUM_SEQS] * 3
    assert step["input_ids"] == [0, 1, 2, 105, 106, 0, 0, 0]
    assert step["positions"] == [0, 1, 2, 5, 6, 0, 0, 0]
    assert step["slot_mapping"] == [0, 1, 2, 4 * 11 + 1, 4 * 11 + 2, -1, -1, -1]  # padding stores nothing
    assert step["req_indices"] == [5, 5, 5, 4, 4, *padding]
    assert step["context_lens"] == [1, 2, 3, 6, 7, 0, 0, 0]  # and attends nothing
    assert step["logits_indices"] == [2, 4] and step["sampled_req_indices"] == [5, 4]


@pytest.mark.parametrize("short_sizes", [[], [4]])
def test_without_a_size_for_it(short_sizes):
    header, step = prepared(prefill((0, 3), (5, 7)), short_sizes)
    assert (header.kind, header.num_tokens, header.num_seqs, header.max_seqlen_q) == (StepKind.PREFILL, 5, 2, 3)
    assert step["context_lens"] == [3, 7] and step["cu_seqlens_q"] == [0, 3, 5] and step["cu_seqlens_k"] == [0, 3, 10]


def test_long_contexts(monkeypatch):
    """Single-query attention reads the context once per token: with long contexts packed prefill is faster."""
    monkeypatch.setattr(prepare_module, "MAX_SHORT_PREFILL_CONTEXTS", 630)
    for chunk, kind in (
        ((0, 36), StepKind.SHORT_PREFILL),  # 0 + 1 + ... + 35 = 630
        ((0, 37), StepKind.PREFILL),
        ((32, 38), StepKind.SHORT_PREFILL),
        ((600, 602), StepKind.PREFILL),
    ):
        assert prepared(prefill(chunk), short_sizes=[64])[0].kind == kind

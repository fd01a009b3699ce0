"""Prefills that replay a graph: which ones, and their padding."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm.engine.scheduler import PrefillBatch
from nanovllm.engine.sequence import Sequence, SequenceTable
from nanovllm.runner import prefill_graphs
from nanovllm.runner.prefill_graphs import PrefillInputs, PrefillSizes
from nanovllm.runner.prepare import prepare
from nanovllm.runner.request_state import StagedWrites
from nanovllm.runner.sampling_tables import StagedTables
from nanovllm.runner.step import StepKind, pack, unpack

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


def prepared(batch, *sizes):
    staged = StagedWrites(MAX_NUM_SEQS, MAX_BLOCKS, StagedTables(BLOCK_SIZE * MAX_BLOCKS, vocab_size=1000))
    header, packed = prepare(batch, staged, BLOCK_SIZE, PrefillSizes(*sizes, padding_req_idx=MAX_NUM_SEQS))
    return header, unpack(header, packed)


def segments(step):
    return {name: segment.tolist() for name, segment in step._asdict().items()}


def sizes_of(max_num_batched_tokens=16_384, max_num_seqs=512, tensor_parallel_size=1, captures_prefill=True,
             has_peers=False, max_work=prefill_graphs.MAX_LAYER_WORK, **shape):  # fmt: skip
    """Qwen3-0.6B if nothing else is given."""
    model = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "moe": None, **shape}  # fmt: skip
    config = SimpleNamespace(
        max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs,
        tensor_parallel_size=tensor_parallel_size, model_config=SimpleNamespace(**model),
    )  # fmt: skip
    return PrefillSizes.of(config, SimpleNamespace(captures_prefill=captures_prefill), has_peers, max_work)


@pytest.mark.parametrize("max_num_batched_tokens", [1, 15, 16, 17, 31, 100, 255, 256, 511, 512, 3000, 10_000])
def test_sizes(max_num_batched_tokens):
    """Every prefill of few tokens has a size; none is padded to twice the tokens a launch can have, 16 aside."""
    sizes = sizes_of(max_num_batched_tokens)
    every = [*sizes.short, *dict(sizes.padded)]
    assert every[0] == 16 and every == sorted(every) and sizes.largest == every[-1]
    assert sizes.short[-1] >= min(max_num_batched_tokens, 256) and every[-1] >= min(max_num_batched_tokens, 4096)
    assert all(size < 2 * max_num_batched_tokens for size in every[1:])


QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32}


def test_padded_sizes():
    """Only where the host takes longer to launch the kernels than the device to run them."""
    most_seqs = {512: 64, 768: 96, 1024: 128, 1536: 192, 2048: 256, 3072: 256, 4096: 256}
    assert dict(sizes_of().padded) == most_seqs
    few_seqs = {512: 36, 768: 36, 1024: 36, 1536: 36, 2048: 36, 3072: 40, 4096: 40}  # 32, and the parts of long ones
    assert dict(sizes_of(max_num_seqs=30).padded) == few_seqs
    assert dict(sizes_of(max_num_seqs=1).padded) == {size: num_seqs - 28 for size, num_seqs in few_seqs.items()}
    assert sizes_of(captures_prefill=False) == (sizes_of().short, (), 512)
    assert [*dict(sizes_of(**QWEN3_8B).padded)] == [512, 768]
    # several ranks: each has its part of the work, and these graphs hold no sums of NCCL's
    assert [*dict(sizes_of(tensor_parallel_size=2, has_peers=True, **QWEN3_8B).padded)] == [512, 768, 1024, 1536]
    for size, has_peers in ((2, False), (4, True)):
        assert sizes_of(tensor_parallel_size=size, has_peers=has_peers) == (sizes_of().short, (), 512)
    moe = SimpleNamespace(top_k=8, expert_size=768, shared_size=0)
    qwen3_30b_a3b = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
                     "num_key_value_heads": 4, "moe": moe}  # fmt: skip
    assert [*dict(sizes_of(**qwen3_30b_a3b).padded)] == [512, 768, 1024, 1536, 2048]


def test_padded_sizes_by_gpu(monkeypatch):
    capabilities = {"H200": (9, 0), "B200": (10, 0), "A100": (8, 0), "RTX 5090": (12, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.get)
    limit = prefill_graphs.MAX_LAYER_WORK
    for gpus, has_fp8, expected in (
        (["H200"], False, limit), (["H200"], True, 2 * limit), (["B200"], True, limit), (["A100"], True, limit // 4),
        (["H200", "B200"], True, limit), (["H200", "A100"], False, limit // 4), (["RTX 5090"], False, limit // 4),
    ):  # fmt: skip
        assert prefill_graphs.max_layer_work(gpus, has_fp8) == expected
    assert [*dict(sizes_of(**QWEN3_8B, max_work=2 * limit).padded)] == [512, 768, 1024, 1536]
    assert [*dict(sizes_of(max_work=limit // 4).padded)] == [512, 768, 1024, 1536, 2048]


def test_every_token_is_a_sequence():
    header, step = prepared(prefill((0, 3), (5, 7)), (8, 16))
    step = segments(step)
    assert (header.kind, header.num_tokens, header.num_seqs, header.num_sampled) == (StepKind.SHORT_PREFILL, 8, 8, 2)
    padding = [MAX_NUM_SEQS] * 3
    assert step["input_ids"] == [0, 1, 2, 105, 106, 0, 0, 0]
    assert step["positions"] == [0, 1, 2, 5, 6, 0, 0, 0]
    assert step["slot_mapping"] == [0, 1, 2, 4 * 11 + 1, 4 * 11 + 2, -1, -1, -1]  # padding stores nothing
    assert step["req_indices"] == [5, 5, 5, 4, 4, *padding]
    assert step["context_lens"] == [1, 2, 3, 6, 7, 0, 0, 0]  # and attends nothing
    assert step["logits_indices"] == [2, 4] and step["sampled_req_indices"] == [5, 4]


def test_padded():
    """Packed as they are; tokens of no sequence follow, and sequences without a token."""
    batch = prefill((0, 3), (5, 7))
    header, step = prepared(batch, (4,), ((4, 4), (8, 1), (12, 4)))
    assert (header.kind, header.num_tokens, header.num_seqs) == (StepKind.PADDED_PREFILL, 12, 4)
    assert (header.num_sampled, header.num_logits) == (2, 2)
    packed = segments(step)
    assert packed["input_ids"] == [0, 1, 2, 105, 106] + [0] * 7
    assert packed["positions"] == [0, 1, 2, 5, 6] + [0] * 7
    assert packed["slot_mapping"] == [0, 1, 2, 4 * 11 + 1, 4 * 11 + 2] + [-1] * 7
    assert packed["req_indices"] == [5, 4, MAX_NUM_SEQS, MAX_NUM_SEQS] and packed["context_lens"] == [3, 7, 0, 0]
    assert packed["cu_seqlens_q"] == [0, 3, 5, 5, 5] and packed["cu_seqlens_k"] == []

    inputs = PrefillInputs(PrefillSizes((16,), ((8, 1), (12, 4))), torch.zeros(7, 200, dtype=torch.int32), 800)
    inputs.buffer.fill_(-7)  # of the launch before
    inputs.write(unpack(header, torch.from_numpy(pack(header, step))))
    input_ids, context = inputs.padded(12)
    assert input_ids.tolist() == packed["input_ids"] and context.max_context == 800
    for name in ("positions", "slot_mapping", "req_indices", "context_lens", "cu_seqlens_q"):
        segment = getattr(context, name)
        assert segment.tolist() == packed[name] and segment.data_ptr() % 16 == inputs.buffer.data_ptr() % 16
    assert context.logits_indices.tolist() == [2, 4, 4, 4]  # of each sequence; of the padding some token
    assert packed["logits_indices"] == [0, 1]  # of these


def test_padded_parts(monkeypatch):
    """A long sequence is cut into several of its request slot; sampled is from the last of each."""
    monkeypatch.setattr(prefill_graphs, "MAX_PADDED_SEQLEN", 3)
    batch = prefill((0, 3), (5, 12), (2, 6), (0, 1))
    batch = replace(batch, req_indices=batch.req_indices[:3], sampled_from=batch.sampled_from[:3])
    header, step = prepared(batch, (), ((14, 8), (15, 6), (15, 8)))  # a graph that is filled
    assert (header.num_tokens, header.num_seqs, header.max_seqlen_q, header.num_logits) == (15, 8, 3, 3)
    inputs = PrefillInputs(PrefillSizes((), ((15, 8),)), torch.zeros(7, 200, dtype=torch.int32), 800)
    assert inputs.padded(15)[1].max_seqlen_q == 3
    step = segments(step)
    assert step["cu_seqlens_q"] == [0, 3, 6, 9, 10, 13, 14, 15, 15]
    assert step["context_lens"] == [3, 8, 11, 12, 5, 6, 1, 0]
    assert step["req_indices"] == [5, 4, 4, 4, 3, 3, 2, MAX_NUM_SEQS]
    assert step["logits_indices"] == [0, 3, 5]


@pytest.mark.parametrize("sizes", [(), ((4,),), ((), ((4, 4), (8, 1)))])
def test_without_a_size_for_it(sizes):
    header, step = prepared(prefill((0, 3), (5, 7)), *sizes)
    assert (header.kind, header.num_tokens, header.num_seqs, header.max_seqlen_q) == (StepKind.PREFILL, 5, 2, 3)
    step = segments(step)
    assert step["context_lens"] == [3, 7] and step["cu_seqlens_q"] == [0, 3, 5] and step["cu_seqlens_k"] == [0, 3, 10]


def test_long_contexts(monkeypatch):
    """Single-query attention reads the context once per token: with long contexts packed prefill is faster."""
    monkeypatch.setattr(prefill_graphs, "MAX_SHORT_CONTEXTS", 630)
    for chunk, kind in (
        ((0, 36), StepKind.SHORT_PREFILL),  # 0 + 1 + ... + 35 = 630
        ((0, 37), StepKind.PREFILL),
        ((32, 38), StepKind.SHORT_PREFILL),
        ((600, 602), StepKind.PREFILL),
    ):
        assert prepared(prefill(chunk), (64,))[0].kind == kind
        padded = prepared(prefill(chunk), (64,), ((64, 4),))[0].kind
        assert padded == (kind if kind == StepKind.SHORT_PREFILL else StepKind.PADDED_PREFILL)


def test_not_padded(monkeypatch):
    """Contexts of which attention takes long, and prompts whose log-probabilities need every hidden state."""
    sizes = (), ((64, 4),)
    monkeypatch.setattr(prefill_graphs, "MAX_PADDED_CONTEXTS", 190 + 790)  # 0 + 1 + ... + 19; 30 + ... + 49
    monkeypatch.setattr(prefill_graphs, "LARGE_TILES_SEQLEN", 20)
    assert prepared(prefill((0, 20), (30, 50)), *sizes)[0].kind == StepKind.PADDED_PREFILL
    assert prepared(prefill((0, 20), (31, 51)), *sizes)[0].kind == StepKind.PREFILL
    assert prepared(prefill((0, 19), (131, 150)), *sizes)[0].kind == StepKind.PADDED_PREFILL
    batch = prefill((0, 20))
    batch.seqs[0].targets, batch.seqs[0].first_target = np.array([3, 4], np.int32), 1
    assert prepared(batch, *sizes)[0].kind == StepKind.PREFILL


def test_what_may_be_split():
    """Sampled sequences are put before those that are only scored, and may read blocks that these write."""
    batch = prefill((0, 40), (0, 40))
    assert prepared(batch)[0].can_split
    last = batch.seqs[1]
    scored = replace(
        batch, unsampled=[last], req_indices=batch.req_indices[:1], sampled_from=np.zeros(1, np.int32)
    )
    assert not prepared(scored)[0].can_split
    last.targets, last.first_target = np.arange(3, dtype=np.int32), 10
    assert not prepared(batch)[0].can_split

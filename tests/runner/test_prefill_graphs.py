"""Prefills that replay a graph: which ones, and their padding."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import prefill_batch

from nanovllm.runner import prefill_graphs
from nanovllm.runner.inputs import prefill_arrays, to_device
from nanovllm.runner.prefill_graphs import PrefillGraphs, PrefillSizes

MAX_NUM_SEQS = 6
TABLES = np.stack([np.arange(10 * i, 10 * i + 200, dtype=np.int32) for i in range(5, -1, -1)])  # of prefill_batch


def fit(batch, *sizes):
    """The size of the graph, or None, and the arrays for it."""
    arrays = prefill_arrays(batch, TABLES, block_size=4)
    return PrefillSizes(sizes, padding_req_idx=MAX_NUM_SEQS).fit(arrays, batch.needs_every_state), arrays


def lists(arrays):
    return {name: values.tolist() for name, values in arrays.items()}


def sizes_of(max_num_batched_tokens=16_384, max_num_seqs=512, tensor_parallel_size=1, captures_prefill=True,
             has_peers=False, max_work=prefill_graphs.MAX_LAYER_WORK, **shape):  # fmt: skip
    """Qwen3-0.6B if nothing else is given."""
    model = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "moe": None, "recurrent": None, **shape}  # fmt: skip
    heads = SimpleNamespace(num_key_value_heads=model["num_key_value_heads"], head_dim=model["head_dim"])
    config = SimpleNamespace(
        max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs,
        tensor_parallel_size=tensor_parallel_size, model_config=SimpleNamespace(**model, attention_layers=[heads]),
    )  # fmt: skip
    return PrefillSizes.of(config, SimpleNamespace(captures_prefill=captures_prefill), has_peers, max_work)


@pytest.mark.parametrize("max_num_batched_tokens", [1, 15, 16, 17, 31, 100, 255, 256, 511, 512, 3000, 10_000])
def test_sizes(max_num_batched_tokens):
    """Every prefill of few tokens has a size; none is padded to twice the tokens a launch can have, 32 aside."""
    every = [*dict(sizes_of(max_num_batched_tokens).sizes)]
    assert every[0] == 32 and every == sorted(every) and every[-1] >= min(max_num_batched_tokens, 4096)
    assert all(size < 2 * max_num_batched_tokens for size in every[1:])


QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32}
SMALL = [32, 64, 128, 256]


def test_padded_sizes():
    """Small ones, and larger ones where the host takes longer to launch the kernels than the device to run them."""
    most_seqs = {32: 16, 64: 16, 128: 16, 256: 32, 512: 64, 768: 96, 1024: 128, 1536: 192, 2048: 256, 3072: 256,
                 4096: 256}  # fmt: skip
    assert dict(sizes_of().sizes) == most_seqs
    # 32, and the parts of long ones
    few_seqs = {**dict.fromkeys(SMALL[:3], 16), 256: 32, **dict.fromkeys([512, 768, 1024, 1536, 2048], 36), 3072: 40,
                4096: 40}  # fmt: skip
    assert dict(sizes_of(max_num_seqs=30).sizes) == few_seqs
    assert dict(sizes_of(max_num_seqs=1).sizes) == {
        size: 4 if size in SMALL else num_seqs - 28 for size, num_seqs in few_seqs.items()
    }
    assert sizes_of(captures_prefill=False).sizes == ()
    assert [*dict(sizes_of(**QWEN3_8B).sizes)] == [*SMALL, 512, 768]
    # several ranks: each has its part of the work, and large graphs hold no sums of NCCL's
    of_two = sizes_of(tensor_parallel_size=2, has_peers=True, **QWEN3_8B)
    assert [*dict(of_two.sizes)] == [*SMALL, 512, 768, 1024, 1536]
    for size, has_peers in ((2, False), (4, True)):
        assert [*dict(sizes_of(tensor_parallel_size=size, has_peers=has_peers).sizes)] == SMALL
    moe = SimpleNamespace(top_k=8, expert_size=768, shared_size=0)
    qwen3_30b_a3b = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
                     "num_key_value_heads": 4, "moe": moe}  # fmt: skip
    assert [*dict(sizes_of(**qwen3_30b_a3b).sizes)] == [*SMALL, 512, 768, 1024, 1536, 2048]


def test_padded_sizes_by_gpu(monkeypatch):
    capabilities = {"H200": (9, 0), "B200": (10, 0), "A100": (8, 0), "RTX 5090": (12, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.get)
    limit = prefill_graphs.MAX_LAYER_WORK
    for gpus, has_fp8, expected in (
        (["H200"], False, limit), (["H200"], True, 2 * limit), (["B200"], True, limit), (["A100"], True, limit // 4),
        (["H200", "B200"], True, limit), (["H200", "A100"], False, limit // 4), (["RTX 5090"], False, limit // 4),
    ):  # fmt: skip
        assert prefill_graphs.max_layer_work(gpus, has_fp8) == expected
    assert [*dict(sizes_of(**QWEN3_8B, max_work=2 * limit).sizes)] == [*SMALL, 512, 768, 1024, 1536]
    assert [*dict(sizes_of(max_work=limit // 4).sizes)] == [*SMALL, 512, 768, 1024, 1536, 2048]


def test_padded():
    """Packed as they are; tokens of no sequence follow, and sequences without a token."""
    graph, arrays = fit(prefill_batch((0, 3), (5, 7)), (4, 4), (8, 1), (12, 4))
    assert graph == 12
    assert lists(arrays) == {
        "input_ids": [0, 1, 2, 105, 106] + [0] * 7,
        "positions": [0, 1, 2, 5, 6] + [0] * 7,
        "slot_mapping": [0, 1, 2, 4 * 11 + 1, 4 * 11 + 2] + [-1] * 7,
        "req_indices": [5, 4, MAX_NUM_SEQS, MAX_NUM_SEQS], "context_lens": [3, 7, 0, 0],
        "cu_seqlens_q": [0, 3, 5, 5, 5, 5, 5, 5], "cu_seqlens_k": [],
        "logits_indices": [0, 1], "sampled_req_indices": [5, 4],
    }  # fmt: skip

    graphs = PrefillGraphs(PrefillSizes(((8, 1), (12, 4))), torch.zeros(7, 200, dtype=torch.int32), 800)
    graphs.buffer.fill_(-7)  # of the launch before
    graphs.write(to_device(arrays, torch.device("cpu")), 12)
    input_ids, context = graphs.inputs(12)
    assert input_ids.tolist() == arrays["input_ids"].tolist() and context.max_context == 800
    for name in ("positions", "slot_mapping", "req_indices", "context_lens", "cu_seqlens_q"):
        values = getattr(context, name)
        assert values.tolist() == arrays[name][: len(values)].tolist()
        assert values.data_ptr() % 16 == graphs.buffer.data_ptr() % 16
    # of each sequence, of the padding some token; ``logits_indices`` of the arrays are among these
    assert context.logits_indices.tolist() == [2, 4, 4, 4]


def test_padded_parts(monkeypatch):
    """A long sequence is cut into several of its request slot; sampled is from the last of each."""
    monkeypatch.setattr(prefill_graphs, "MAX_PADDED_SEQLEN", 3)
    batch = prefill_batch((0, 3), (5, 12), (2, 6), (0, 1), num_sampled=3)
    graph, arrays = fit(batch, (14, 8), (15, 6), (15, 8))  # a graph that is filled
    assert graph == 15
    graphs = PrefillGraphs(PrefillSizes(((15, 8),)), torch.zeros(7, 200, dtype=torch.int32), 800)
    assert graphs.inputs(15)[1].max_seqlen_q == 3
    arrays = lists(arrays)
    assert arrays["cu_seqlens_q"] == [0, 3, 6, 9, 10, 13, 14, 15, 15, 15, 15, 15]
    assert arrays["context_lens"] == [3, 8, 11, 12, 5, 6, 1, 0]
    assert arrays["req_indices"] == [5, 4, 4, 4, 3, 3, 2, MAX_NUM_SEQS]
    assert arrays["logits_indices"] == [0, 3, 5]


@pytest.mark.parametrize("sizes", [(), ((4, 4), (8, 1))])
def test_without_a_size_for_it(sizes):
    batch = prefill_batch((0, 3), (5, 7))
    graph, arrays = fit(batch, *sizes)
    assert graph is None and lists(arrays) == lists(prefill_arrays(batch, TABLES, block_size=4))


def test_not_padded(monkeypatch):
    """Contexts of which attention takes long, and prompts whose log-probabilities need every hidden state."""
    sizes = ((64, 4),)
    monkeypatch.setattr(prefill_graphs, "MAX_PADDED_CONTEXTS", 190 + 790)  # 0 + 1 + ... + 19; 30 + ... + 49
    monkeypatch.setattr(prefill_graphs, "LARGE_TILES_SEQLEN", 20)
    assert fit(prefill_batch((0, 20), (30, 50)), *sizes)[0] == 64
    assert fit(prefill_batch((0, 20), (31, 51)), *sizes)[0] is None
    assert fit(prefill_batch((0, 19), (131, 150)), *sizes)[0] == 64
    assert fit(prefill_batch((0, 20), num_targets={0: (1, 2)}), *sizes)[0] is None

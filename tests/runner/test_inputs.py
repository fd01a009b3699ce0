"""From a batch to the model's inputs: named arrays in one copy, against a naive model, the same on every rank."""

import pickle

import numpy as np
import pytest
import torch
from helpers import prefill_batch, running
from histories import histories
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.core import DecodeBatch, NewSequences, PrefillBatch
from nanovllm.readouts import merged
from nanovllm.readouts.prompt_logprobs import PromptLogprobs
from nanovllm.runner.inputs import prefill_arrays, to_device
from nanovllm.runner.memory import BlockCopier

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_NUM_SEQS, MAX_BLOCKS = 4, 6, 12


@histories(200)
@given(sizes=st.lists(st.integers(0, 9), max_size=6), is_long=st.booleans())
def test_named_arrays_there_in_one_copy(sizes, is_long):
    arrays = {
        str(i): np.arange(size, dtype=np.int64 if is_long else np.int32) - 100 * i for i, size in enumerate(sizes)
    }
    tensors = to_device(arrays, CPU)
    if not any(sizes):
        assert not any(map(len, tensors.values()))  # nothing is copied
        return
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: values.tolist() for name, values in arrays.items()
    }
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int32}
    (address,) = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    # one that is no multiple of 16 bytes makes Triton compile another variant of every reader
    assert all((tensor.data_ptr() - address) % 16 == 0 for tensor in tensors.values() if len(tensor))


# ------------------------------------------------------------------------------------------- prefills


@st.composite
def prefills(draw):
    """Chunks of sequences with blocks in any order; the first are sampled, some of them for several requests."""
    chunks, free = [], draw(st.permutations(range(MAX_NUM_SEQS * MAX_BLOCKS)))
    slots = draw(st.permutations(range(MAX_NUM_SEQS)))
    num_seqs = draw(st.integers(1, 3))
    num_sampled = draw(st.integers(0, num_seqs))
    for i in range(num_seqs):
        stop = draw(st.integers(1, BLOCK_SIZE * MAX_BLOCKS))
        blocks = [free.pop() for _ in range(-(-stop // BLOCK_SIZE))]
        chunks.append((slots[i], draw(st.integers(0, stop - 1)), stop, blocks))
    sampled_from = sorted([*range(num_sampled), *draw(st.lists(st.integers(0, max(num_sampled - 1, 0)), max_size=3))])
    return chunks, sampled_from if num_sampled else [], slots


def int32(values):
    return np.array(values, np.int32)


@histories(200)
@given(prefill=prefills())
def test_prefill_against_a_naive_model(prefill):
    """Each packed token: its id, position, slot of the KV cache, request, and the keys it attends."""
    chunks, sampled_from, slots = prefill
    naive, tokens, mirror = [], [], np.full((MAX_NUM_SEQS, MAX_BLOCKS), -1, np.int32)
    for slot, start, stop, blocks in chunks:
        mirror[slot, : len(blocks)] = blocks
        tokens += range(1000 * slot + start, 1000 * slot + stop)
        naive += [
            (1000 * slot + n, n, blocks[n // BLOCK_SIZE] * BLOCK_SIZE + n % BLOCK_SIZE, slot, n + 1)
            for n in range(start, stop)
        ]
    req_indices = slots[: len(sampled_from)]
    computed, starts, stops, _ = zip(*chunks, strict=True)
    batch = PrefillBatch(
        int32(req_indices), np.arange(len(req_indices)), int32(sampled_from), int32(computed),
        int32(starts), int32(stops), int32(tokens), 1 + max(sampled_from, default=-1), NewSequences.of([]),
    )  # fmt: skip
    arrays = {name: values.tolist() for name, values in prefill_arrays(batch, mirror, BLOCK_SIZE).items()}
    found, ends = [], arrays["cu_seqlens_q"][1:]
    for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        assert arrays["cu_seqlens_k"][i + 1] - arrays["cu_seqlens_k"][i] == arrays["context_lens"][i]
        for t in range(begin, end):
            keys = arrays["context_lens"][i] - (end - t - 1)
            found.append((*(arrays[name][t] for name in ("input_ids", "positions", "slot_mapping")),
                          arrays["req_indices"][i], keys))  # fmt: skip
    assert found == naive and batch.num_tokens == len(naive)
    assert arrays["cu_seqlens_q"][0] == arrays["cu_seqlens_k"][0] == 0
    assert arrays["sampled_req_indices"] == req_indices
    # each sampled request's logits are those of the last token of its own prompt
    of = arrays.get("sampled_from", range(len(sampled_from)))
    assert [arrays["logits_indices"][j] for j in of] == [ends[j] - 1 for j in sampled_from]
    # what no request of the batch needs is not there
    assert ("sampled_from" in arrays) == (len(set(sampled_from)) < len(sampled_from))
    assert not arrays.keys() & {"target_rows", "target_ids"}


def test_block_copies_and_targets():
    """Targets are found by packed token: of a chunk, those whose next token is scored."""
    batch = prefill_batch(
        (0, 3), (4, 8), (2, 6), num_targets={1: (2, 4), 2: (0, 20)}, prefix_copies=[(1, 7)],
        block_copies=[(3, 9), (4, 8)],
    )  # fmt: skip
    (scored,) = batch.readouts
    assert scored.sizes == [2, 4] and scored.seq_ids == [1, 2]
    arrays = prefill_arrays(batch, np.zeros((MAX_NUM_SEQS, MAX_BLOCKS), np.int32), BLOCK_SIZE)
    BlockCopier().prepare(batch, arrays)
    assert (arrays["before_from"].tolist(), arrays["before_to"].tolist()) == ([1], [7])
    assert (arrays["after_from"].tolist(), arrays["after_to"].tolist()) == ([3, 4], [9, 8])
    assert arrays["target_rows"].tolist() == [3, 4, 7, 8, 9, 10]  # positions 4 and 5; 2 to 5
    assert arrays["target_ids"].tolist() == [-104, -105, -202, -203, -204, -205]


@pytest.mark.parametrize(("wanted", "num_top"), [((0, 0), 0), ((3, 5), 5), ((-1, 7), -1)])
def test_alternatives_of_targets(wanted, num_top):
    """The most that one wants; -1 is the whole vocabulary."""
    seqs = [running([1, 2, 3], i) for i in range(len(wanted))]
    for seq, k in zip(seqs, wanted, strict=True):
        seq.readout = PromptLogprobs(int32([2, 3]), 0, k)
    (scored,) = merged((seq.readout, seq.seq_id, 0, 3) for seq in seqs)
    assert scored.num_top == num_top


# ------------------------------------------------------------------------------------------- messages


def test_a_batch_is_a_small_message():
    """Columns, and no object for each sequence: parameters that are the same one travel once."""
    plain = running([1] * 100, 0, range(7))
    seqs = [plain] * 256
    batch = DecodeBatch(int32(range(256)), np.arange(256), int32(range(256)), np.empty((0, 3), np.int32))
    assert len(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)) < 256 * 16 + 600
    new = pickle.dumps(NewSequences.of(seqs), pickle.HIGHEST_PROTOCOL)
    assert len(new) < 256 * (4 * 4 + 8 + 7 * 4 + 20) + 2000

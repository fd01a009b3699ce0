"""What crosses to the device between two launches: staged writes to the request state."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.sequence import Sequence, SequenceTable
from nanovllm.runner.request_state import RequestState, StagedWrites
from nanovllm.runner.sampling_tables import StagedTables
from nanovllm.sampling_params import FILTERS, LOGPROBS

SLOTS, BLOCKS = 4, 5


class Mirror:
    """Host and device side together."""

    def __init__(self):
        self.staged = StagedWrites(SLOTS, BLOCKS, StagedTables(max_model_len=32, vocab_size=64))
        self.state = RequestState(SLOTS, BLOCKS, torch.device("cpu"))

    def send(self) -> int:
        indices, values = self.staged.drain()
        assert indices.dtype == values.dtype == np.int32
        assert len(set(indices.tolist())) == len(indices)
        self.state.apply(torch.from_numpy(indices), torch.from_numpy(values))
        return len(indices)


def running(tokens, req_idx, blocks, seed=0, stop_ids=(), **params):
    seq = Sequence(tokens, SamplingParams(**params), block_size=2, seed=seed, min_tokens_stop_ids=stop_ids)
    table = SequenceTable(SLOTS, 32)
    table.free_req_indices = [req_idx]
    table.add(seq)
    seq.block_table = list(blocks)
    return seq


def test_a_slot_holds_what_the_request_asked_for():
    mirror = Mirror()
    seed = 0xFEDCBA9876543210
    mirror.staged.add(running([5, 6, 7], 2, [9, 4], seed, (1, 3), temperature=0.7, top_k=11, top_p=0.9, min_p=0.05,
                                 max_tokens=9, min_tokens=6, presence_penalty=0.5, frequency_penalty=-0.25,
                                 repetition_penalty=1.5))  # fmt: skip
    mirror.send()
    state, sampling = mirror.state, mirror.state.sampling
    assert state.length[2] == 3 and sampling.length[2] == 3
    assert state.block_tables[2, :2].tolist() == [9, 4]
    for name, expected in (
        ("temperature", 0.7), ("top_p", 0.9), ("min_p", 0.05), ("presence_penalty", 0.5),
        ("frequency_penalty", -0.25), ("repetition_penalty", 1.5),
    ):  # fmt: skip
        assert getattr(sampling, name)[2] == torch.tensor(expected, dtype=torch.float32)
    assert sampling.top_k[2] == 11 and sampling.is_adjusted[2] and not sampling.is_masked[2]
    assert sampling.seed[2].numpy().view(np.uint64).item() == seed
    assert sampling.min_len[2] == 3 + 6
    assert sampling.stop_ids[2].tolist() == [1, 3] + [-1] * 14
    untouched = [slot for slot in range(SLOTS + 1) if slot != 2]
    assert not state.length[untouched].any() and not state.block_tables[untouched].any()


def test_a_slot_keeps_nothing_of_its_last_owner():
    mirror = Mirror()
    mirror.staged.add(
        running([1], 0, [1, 2, 3], 77, (4, 5), temperature=0.5, top_k=3, top_p=0.5, min_p=0.5, min_tokens=2,
                logit_bias={3: 1.0}, allowed_token_ids=[3], presence_penalty=1, logprobs=3)
    )  # fmt: skip
    mirror.send()
    mirror.staged.add(running([1], 0, [6], temperature=0))
    mirror.send()
    fresh = Mirror()
    fresh.staged.add(running([1], 0, [6, 2, 3], temperature=0))  # table entries past the length are never read
    fresh.send()
    assert mirror.state.buffer.tolist() == fresh.state.buffer.tolist()
    rows = np.array([0])
    assert mirror.staged.features(rows) == mirror.staged.num_logprobs(rows) == 0


@pytest.mark.parametrize(
    ("params", "column", "expected"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**12}, "top_k", 2**31 - 1),
        ({"max_tokens": 10**12, "min_tokens": 10**12}, "min_len", 2**31 - 1),
    ],
)
def test_numbers_beyond_int32(params, column, expected):
    """They stay large instead of wrapping round to something else."""
    mirror = Mirror()
    mirror.staged.add(running([1], 1, [0], **params))
    mirror.send()
    assert getattr(mirror.state.sampling, column)[1] == expected


@pytest.mark.parametrize(("given", "kept"), [(1e-40, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (1e40, 1e30), (10**400, 1e30)])
def test_temperatures_beyond_fp32(given, kept):
    """1 / 1e-40 was infinite and every positive logit won; 1 / 1e40 was 0, and 0 times -inf (a stop id) NaN."""
    mirror = Mirror()
    mirror.staged.add(running([1], 1, [0], temperature=given, top_k=2))
    mirror.send()
    assert mirror.state.sampling.temperature[1].item() == np.float32(kept)
    assert mirror.staged.features(np.array([1])) == (FILTERS if kept > 0 else 0)


def test_a_new_block_sends_one_word():
    mirror = Mirror()
    seq = running([1, 2], 3, [7])
    mirror.staged.add(seq)
    mirror.send()
    seq.block_table.append(2)
    mirror.staged.append_blocks([seq])
    assert mirror.send() == 1
    assert mirror.state.block_tables[3, :2].tolist() == [7, 2]


def test_an_unchanged_batch_sends_nothing():
    mirror = Mirror()
    mirror.staged.set_batch(np.array([1, 3], np.int32))
    mirror.send()
    assert mirror.state.batch_req_indices.tolist() == [1, 3, SLOTS, SLOTS]
    mirror.staged.set_batch(np.array([1, 3], np.int32))
    assert mirror.send() == 0
    mirror.staged.set_batch(np.array([1, 2, 3], np.int32))
    assert mirror.send() == 2
    assert mirror.state.batch_req_indices.tolist() == [1, 2, 3, SLOTS]


def test_reset_sends_everything_again():
    """A launch failed on its way: what the device has is not known, and what was meant for it is void."""
    mirror = Mirror()
    rows = np.array([1, 3], np.int32)
    mirror.staged.set_batch(rows)
    mirror.staged.drain()  # lost
    mirror.staged.add(running([1], 0, [1]))  # never sent
    mirror.staged.reset()
    mirror.staged.set_batch(rows)
    assert mirror.send() == SLOTS
    assert mirror.state.batch_req_indices.tolist() == [1, 3, SLOTS, SLOTS]
    assert not mirror.state.length.any()


def test_the_padding_slot_stays_empty():
    mirror = Mirror()
    mirror.staged.set_batch(np.arange(SLOTS, dtype=np.int32))
    for slot in range(SLOTS):
        mirror.staged.add(running([1, 2], slot, range(BLOCKS), 2**64 - 1, tuple(range(16)), min_tokens=1))
    mirror.send()
    table = mirror.state.buffer[mirror.staged.groups.end :].view(SLOTS + 1, -1)
    assert not table[SLOTS].any() and table[:SLOTS].any()


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(batches=st.lists(st.lists(st.integers(0, SLOTS - 1), max_size=SLOTS, unique=True), max_size=8))
def test_batches_follow_each_other(batches):
    mirror = Mirror()
    for rows in batches:
        mirror.staged.set_batch(np.array(rows, np.int32))
        mirror.send()
        assert mirror.state.batch_req_indices.tolist() == rows + [SLOTS] * (SLOTS - len(rows))


def test_what_a_batch_needs():
    """The most that one of its requests wants; -1 is the whole vocabulary."""
    mirror = Mirror()
    for slot, params in enumerate(({}, {"logprobs": 0}, {"logprobs": 3, "top_k": 5}, {"logprobs": -1})):
        mirror.staged.add(running([1], slot, [slot], **params))
    both = LOGPROBS | FILTERS
    for rows, features, num_logprobs in (
        ([], 0, 0), ([0], 0, 0), ([0, 1], LOGPROBS, 0), ([2, 0], both, 3), ([3, 2], both, 64)
    ):  # fmt: skip
        rows = np.array(rows, np.int64)
        assert (mirror.staged.features(rows), mirror.staged.num_logprobs(rows)) == (features, num_logprobs)

"""The rows of requests on the device: what crosses to it when requests, blocks or the batch change."""

import numpy as np
import pytest
import torch
from helpers import Slots, running
from histories import histories
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.core import DecodeBatch

SLOTS, BLOCKS = 4, 5


class Rows(Slots):
    def __init__(self):
        super().__init__(SLOTS, BLOCKS)

    def decode(self, *req_indices, new_blocks=()):
        """Returns how many words a decode batch sends."""
        rows = np.array(req_indices, np.int32)
        new = np.array(new_blocks, np.int32).reshape(-1, 3)
        self.state.set_batch(DecodeBatch(rows, rows.astype(np.int64), np.ones_like(rows), new), self.arrays)
        return self.send().get("state_values", 0)


def rows_of(*seqs):
    rows = Rows()
    rows.add(*seqs)
    rows.send()
    return rows


def test_a_slot_holds_what_the_request_asked_for():
    seed = 0xFEDCBA9876543210
    state = rows_of(
        running([5, 6, 7], 2, [9, 4], seed=seed, stop_ids=(1, 3), temperature=0.7, top_k=11, top_p=0.9, min_p=0.05,
                max_tokens=9, min_tokens=6, presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5)
    ).state  # fmt: skip
    sampling = state.sampling
    assert state.length[2] == 3 and sampling.length[2] == 3
    assert state.block_tables[2, :2].tolist() == [9, 4]
    assert state.block_table_mirror.tolist() == [[-1] * 5, [-1] * 5, [9, 4, -1, -1, -1], [-1] * 5]
    for name, expected in (
        ("temperature", 0.7), ("top_p", 0.9), ("min_p", 0.05), ("presence_penalty", 0.5),
        ("frequency_penalty", -0.25), ("repetition_penalty", 1.5),
    ):  # fmt: skip
        assert getattr(sampling, name)[2] == torch.tensor(expected, dtype=torch.float32)
    assert sampling.top_k[2] == 11 and sampling.is_penalized[2] and not sampling.is_masked[2]
    assert sampling.seed[2].numpy().view(np.uint64).item() == seed
    assert sampling.min_len[2] == 3 + 6
    assert sampling.stop_ids[2].tolist() == [1, 3] + [-1] * 14
    untouched = [slot for slot in range(SLOTS + 1) if slot != 2]
    assert not state.length[untouched].any() and not state.block_tables[untouched].any()


def test_a_slot_keeps_nothing_of_its_last_owner():
    rows = rows_of(
        running([1], 0, [1, 2, 3], seed=77, stop_ids=(4, 5), temperature=0.5, top_k=3, top_p=0.5, min_p=0.5,
                min_tokens=2, logit_bias={3: 1.0}, presence_penalty=1, logprobs=3, allowed_mask=np.ones(2, np.int32))
    )  # fmt: skip
    assert len(rows.used(0)) == 5 and rows.num_top(0) == 3
    rows.add(running([1], 0, [6], temperature=0))
    rows.send()
    fresh = rows_of(running([1], 0, [6, 2, 3], temperature=0))  # table entries past the length are never read
    assert rows.state.buffer.tolist() == fresh.state.buffer.tolist()
    assert rows.state.block_table_mirror[0].tolist() == [6, -1, -1, -1, -1]
    assert rows.used(0) == [] and rows.num_top(0) == 0


@pytest.mark.parametrize(
    ("params", "column", "expected"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**12}, "top_k", 2**31 - 1),
        ({"max_tokens": 10**12, "min_tokens": 10**12, "stop_ids": (3,)}, "min_len", 2**31 - 1),
    ],
)
def test_numbers_beyond_int32(params, column, expected):
    """They stay large instead of wrapping round to something else."""
    assert getattr(rows_of(running([1], 1, **params)).state.sampling, column)[1] == expected


@pytest.mark.parametrize(("given", "kept"), [(1e-40, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (1e40, 1e30), (10**400, 1e30)])
def test_temperatures_beyond_fp32(given, kept):
    """1 / 1e-40 was infinite and every positive logit won; 1 / 1e40 was 0, and 0 times -inf (a stop id) NaN."""
    rows = rows_of(running([1], 1, temperature=given, top_k=2))
    assert rows.state.sampling.temperature[1].item() == np.float32(kept)
    assert rows.used(1) == (["filters"] if kept > 0 else [])


def test_a_new_block_sends_one_word():
    rows = rows_of(running([1, 2], 3, [7]), running([3], 1, [4, 5]))
    rows.decode(3, 1)
    assert rows.decode(3, 1, new_blocks=[(3, 1, 2)]) == 1
    assert rows.state.block_tables[[3, 1], :2].tolist() == [[7, 2], [4, 5]]
    assert rows.state.block_table_mirror[3].tolist() == [7, 2, -1, -1, -1]
    assert rows.decode(1, 3, new_blocks=[(1, 2, 8), (3, 2, 9)]) == 4  # and both positions
    assert rows.state.block_tables[[3, 1], :3].tolist() == [[7, 2, 9], [4, 5, 8]]


def test_an_unchanged_batch_sends_nothing():
    rows = Rows()
    rows.decode(1, 3)
    assert rows.state.batch_req_indices.tolist() == [1, 3, SLOTS, SLOTS]
    assert rows.decode(1, 3) == 0
    assert rows.decode(1, 2, 3) == 2
    assert rows.state.batch_req_indices.tolist() == [1, 2, 3, SLOTS]


def test_reset_sends_everything_again():
    """A launch failed on its way: what the device has is not known."""
    rows = Rows()
    rows.decode(1, 3)
    rows.state.batch_req_indices[:] = -7  # lost
    rows.state.reset()
    assert rows.decode(1, 3) == SLOTS
    assert rows.state.batch_req_indices.tolist() == [1, 3, SLOTS, SLOTS]


def test_the_padding_slot_stays_empty():
    seqs = (
        running([1, 2], slot, range(BLOCKS), seed=2**64 - 1, stop_ids=tuple(range(16)), min_tokens=1)
        for slot in range(SLOTS)
    )
    rows = rows_of(*seqs)
    rows.decode(*range(SLOTS))
    for column in (*vars(rows.state.sampling).values(), rows.state.last_token):
        assert not column[SLOTS].any()
    table = rows.state.block_tables
    assert not table[SLOTS].any() and table[:SLOTS].tolist() == [[*range(BLOCKS)]] * SLOTS


@histories(200)
@given(batches=st.lists(st.lists(st.integers(0, SLOTS - 1), max_size=SLOTS, unique=True), max_size=8))
def test_batches_follow_each_other(batches):
    rows = Rows()
    for req_indices in batches:
        rows.decode(*req_indices)
        assert rows.state.batch_req_indices.tolist() == req_indices + [SLOTS] * (SLOTS - len(req_indices))


@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 6])
def test_tables_are_aligned(max_num_seqs):
    """An address that is no multiple of 16 bytes makes Triton compile another variant of every reader."""
    state = Slots(max_num_seqs, max_blocks=3).state
    start = state.buffer.data_ptr()
    assert all((table.data_ptr() - start) % 16 == 0 for table in (state.last_token, state.block_tables))

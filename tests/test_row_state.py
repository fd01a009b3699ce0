"""What crosses to the device: updates of the row state, and packed steps, there and back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.runner.request_state import RequestState, StagedWrites
from nanovllm.engine.sequence import Sequence, SequenceTable
from nanovllm.runner.step import NUM_HEADER, StepHeader, StepInput, read_header

ROWS, BLOCKS = 4, 5


class Mirror:
    """Host and device side together."""

    def __init__(self):
        self.updates = StagedWrites(ROWS, BLOCKS)
        self.state = RequestState(ROWS, BLOCKS, torch.device("cpu"))

    def send(self) -> int:
        cells, values = self.updates.take()
        assert cells.dtype == values.dtype == np.int32
        assert len(set(cells.tolist())) == len(cells)
        self.state.apply(torch.from_numpy(cells), torch.from_numpy(values))
        return len(cells)


def running(tokens, row, blocks, seed=0, forbidden=(), **params):
    seq = Sequence(tokens, SamplingParams(**params), block_size=2, seed=seed, forbidden_token_ids=forbidden)
    table = SequenceTable(ROWS, 32)
    table.free_rows = [row]
    table.enter(seq)
    seq.block_table = list(blocks)
    return seq


def test_a_row_holds_what_the_request_asked_for():
    mirror = Mirror()
    seed = 0xFEDCBA9876543210
    mirror.updates.enter(running([5, 6, 7], 2, [9, 4], seed, (1, 3), temperature=0.7, top_k=11, top_p=0.9, min_p=0.05,
                                 max_tokens=9, min_tokens=6))  # fmt: skip
    mirror.send()
    state, columns = mirror.state, mirror.state.columns
    assert state.length[2] == 3 and columns.length[2] == 3
    assert state.block_tables[2, :2].tolist() == [9, 4]
    for name, expected in (("temperature", 0.7), ("top_p", 0.9), ("min_p", 0.05)):
        assert getattr(columns, name)[2] == torch.tensor(expected, dtype=torch.float32)
    assert columns.top_k[2] == 11
    assert columns.seed[2].numpy().view(np.uint64).item() == seed
    assert columns.min_length[2] == 3 + 6
    assert columns.forbidden[2].tolist() == [1, 3] + [-1] * 14
    untouched = [row for row in range(ROWS + 1) if row != 2]
    assert not state.length[untouched].any() and not state.block_tables[untouched].any()


def test_a_row_keeps_nothing_of_its_last_owner():
    mirror = Mirror()
    mirror.updates.enter(
        running([1], 0, [1, 2, 3], 77, (4, 5), temperature=0.5, top_k=3, top_p=0.5, min_p=0.5, min_tokens=2)
    )
    mirror.send()
    mirror.updates.enter(running([1], 0, [6], temperature=0))
    mirror.send()
    fresh = Mirror()
    fresh.updates.enter(running([1], 0, [6, 2, 3], temperature=0))  # table entries past the length are never read
    fresh.send()
    assert mirror.state.buffer.tolist() == fresh.state.buffer.tolist()


@pytest.mark.parametrize(
    ("params", "column", "expected"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**12}, "top_k", 2**31 - 1),
        ({"max_tokens": 10**12, "min_tokens": 10**12}, "min_length", 2**31 - 1),
    ],
)
def test_numbers_beyond_int32(params, column, expected):
    """They stay large instead of wrapping round to something else."""
    mirror = Mirror()
    mirror.updates.enter(running([1], 1, [0], **params))
    mirror.send()
    assert getattr(mirror.state.columns, column)[1] == expected


@pytest.mark.parametrize(("given", "kept"), [(1e-40, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (1e40, 1e30), (10**400, 1e30)])
def test_temperatures_beyond_fp32(given, kept):
    """1 / 1e-40 was infinite and every positive logit won; 1 / 1e40 was 0, and 0 times -inf (a forbidden id) NaN."""
    mirror = Mirror()
    mirror.updates.enter(running([1], 1, [0], temperature=given, top_k=2))
    mirror.send()
    assert mirror.state.columns.temperature[1].item() == np.float32(kept)
    assert mirror.updates.has_filters[1] == (kept > 0)


def test_growth_sends_one_cell():
    mirror = Mirror()
    seq = running([1, 2], 3, [7])
    mirror.updates.enter(seq)
    mirror.send()
    seq.block_table.append(2)
    mirror.updates.grow([seq])
    assert mirror.send() == 1
    assert mirror.state.block_tables[3, :2].tolist() == [7, 2]


def test_an_unchanged_batch_sends_nothing():
    mirror = Mirror()
    mirror.updates.set_batch(np.array([1, 3], np.int32))
    mirror.send()
    assert mirror.state.batch_req_indices.tolist() == [1, 3, ROWS, ROWS]
    mirror.updates.set_batch(np.array([1, 3], np.int32))
    assert mirror.send() == 0
    mirror.updates.set_batch(np.array([1, 2, 3], np.int32))
    assert mirror.send() == 2
    assert mirror.state.batch_req_indices.tolist() == [1, 2, 3, ROWS]


def test_reset_sends_everything_again():
    """A launch failed on its way: what the device has is not known, and what was meant for it is void."""
    mirror = Mirror()
    rows = np.array([1, 3], np.int32)
    mirror.updates.set_batch(rows)
    mirror.updates.take()  # lost
    mirror.updates.enter(running([1], 0, [1]))  # never sent
    mirror.updates.reset()
    mirror.updates.set_batch(rows)
    assert mirror.send() == ROWS
    assert mirror.state.batch_req_indices.tolist() == [1, 3, ROWS, ROWS]
    assert not mirror.state.length.any()


def test_the_null_row_stays_null():
    mirror = Mirror()
    mirror.updates.set_batch(np.arange(ROWS, dtype=np.int32))
    for row in range(ROWS):
        mirror.updates.enter(running([1, 2], row, range(BLOCKS), 2**64 - 1, tuple(range(16)), min_tokens=1))
    mirror.send()
    table = mirror.state.buffer[ROWS:].view(ROWS + 1, -1)
    assert not table[ROWS].any() and table[:ROWS].any()


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(batches=st.lists(st.lists(st.integers(0, ROWS - 1), max_size=ROWS, unique=True), max_size=8))
def test_batches_follow_each_other(batches):
    mirror = Mirror()
    for rows in batches:
        mirror.updates.set_batch(np.array(rows, np.int32))
        mirror.send()
        assert mirror.state.batch_req_indices.tolist() == rows + [ROWS] * (ROWS - len(rows))


def segment(size, start):
    return np.arange(start, start + size, dtype=np.int32)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(n=st.integers(0, 5), t=st.integers(1, 9), s=st.integers(1, 4), data=st.data(), on_device=st.booleans())
def test_prefill_step_there_and_back(n, t, s, data, on_device):
    sampled = data.draw(st.integers(0, s))
    sizes = (n, n, t, t, t, s, s, s + 1, s + 1, sampled, sampled)
    step = StepInput(*(segment(size, 100 * i) for i, size in enumerate(sizes)))
    header = StepHeader(1, sampled, n, t, s, 7, 8, 1, 0)
    packed = step.pack(header)
    assert packed.dtype == np.int32
    assert read_header(packed) == header
    back = StepInput.unpack(header, torch.from_numpy(packed) if on_device else packed)
    for name, expected in vars(step).items():
        assert getattr(back, name).tolist() == expected.tolist(), name


@pytest.mark.parametrize("n", [0, 3])
def test_decode_step_there_and_back(n):
    none = segment(0, 0)
    step = StepInput(segment(n, 5), segment(n, 50), *[none] * 9)
    header = StepHeader(0, 4, n, 0, 0, 1, 33, 1, 1)
    packed = step.pack(header)
    assert len(packed) <= NUM_HEADER + 2 * n + 8  # nothing travels but what changed
    assert read_header(packed) == header
    back = StepInput.unpack(header, packed)
    assert back.cells.tolist() == step.cells.tolist() and back.values.tolist() == step.values.tolist()
    assert all(len(part) == 0 for part in list(vars(back).values())[2:])

"""Snapshots of recurrent states: the policy against a naive model, and which prompts find them.

Which states move in a batch, over random histories: ``test_scheduler.py``.
"""

from types import SimpleNamespace

import pytest
from fake_device import chunk_seq_ids
from helpers import needs
from histories import histories
from hypothesis import given
from hypothesis import strategies as st
from test_scheduler import Harness

from nanovllm.core import PrefillBatch, Sequence
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.hybrid.block_manager import HybridBlockManager
from nanovllm.engine.hybrid.snapshots import Snapshots
from nanovllm.messages.recurrent import RecurrentRows, StateCopies


class NaiveSnapshots:
    """The same policy as a list of records in the order of their last use."""

    def __init__(self, num_rows, first_row):
        self.num_rows, self.records, self.used, self.rows = num_rows, [], set(), range(first_row, first_row + num_rows)

    def at(self, key):
        return next((r for r in self.records if r.key == key), None)

    def touch(self, record, is_protected):
        self.records.remove(record)
        self.records.append(record)
        record.is_protected = is_protected
        protected = [r for r in self.records if r.is_protected]
        if len(protected) > int(0.75 * self.num_rows):
            self.records.remove(protected[0])
            self.records.append(protected[0])
            protected[0].is_protected = False

    def new(self, key, victims):
        free = [row for row in self.rows if row not in self.used and row not in [r.row for r in self.records]]
        victims = [r for r in victims if r.row not in self.used]
        if not free and not victims:
            return None
        record = SimpleNamespace(key=key, is_protected=False)
        if free:
            record.row = free
        else:
            self.records.remove(victims[0])
            record.row = [victims[0].row]
        return record

    def save(self, key, is_junction):
        """Rows it may take; None if it is not taken."""
        record, rows = self.at(key), None
        if record is None:
            probation, protected = ([r for r in self.records if r.is_protected == flag] for flag in (False, True))
            record = self.new(key, probation + protected * is_junction)
            if record is None:
                return None
            self.records.append(record)
            rows = record.row
        if is_junction:
            self.touch(record, True)
        return rows


@histories(400)
@given(
    num_rows=st.integers(0, 9),
    actions=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=60),
)
def test_against_a_naive_model(num_rows, actions):
    snapshots, naive = Snapshots(num_rows, first_row=4, grain=4), NaiveSnapshots(num_rows, 4)
    for kind, key in actions:
        row = None
        if kind <= 1:
            rows, row = naive.save(key, kind == 1), snapshots.save(key, kind == 1)
        elif kind == 2 and naive.at(key) is not None and not snapshots.is_new(key):
            naive.touch(naive.at(key), True)
            naive.used.add(naive.at(key).row)
            assert snapshots.hit(key) == naive.at(key).row
        elif kind == 3:
            naive.records = [r for r in naive.records if r.key != key]
            snapshots.drop(key)
        elif kind == 4:  # the batch is made
            naive.used.clear()
            snapshots.used.clear()
        if kind <= 1:
            assert (row is None) == (rows is None)
            if row is not None:
                assert row in rows and row not in naive.used
                naive.at(key).row = row
                naive.used.add(row)
                assert snapshots.is_new(key)
        for segment, is_protected in ((snapshots.probation, False), (snapshots.protected, True)):
            assert list(segment.items()) == [(r.key, r.row) for r in naive.records if r.is_protected == is_protected]


def make(num_snapshots=8, block_size=4, chunk=4, **options):
    options = {"num_blocks": 64, "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 60, **options}
    return Harness(block_size=block_size, recurrent_rows=RecurrentRows(num_snapshots, chunk), **options)


def cached(harness):
    """``num_cached_tokens`` of each request, in order of arrival."""
    harness.run_to_end()
    return [request.completions[0].num_cached_tokens for request in harness.made.values()]


def prompt(*tails, length=8):
    """Of ``length`` tokens that are all the same, and tails."""
    return [1] * length + list(tails)


GREEDY = {"max_tokens": 3, "ignore_eos": True}


@pytest.mark.parametrize("max_in_flight", [0, 1])
@pytest.mark.parametrize(("block_size", "chunk", "found"), [(4, 4, 8), (2, 4, 8), (4, 2, 8), (4, 6, 0), (3, 1, 9)])
def test_all_but_one_of_the_queued_find_their_common_prefix(max_in_flight, block_size, chunk, found):
    """The first prompt saves the state where the others branch off, though nobody has asked for it yet."""
    harness = make(max_in_flight=max_in_flight, block_size=block_size, chunk=chunk)
    for i in range(12):
        harness.add(prompt(i % 4, i // 4, 2, 3, length=10), **GREEDY)
    assert cached(harness) == [0] + [found] * 11


FOUND = {  # name -> (prompts, whether they come one by one, the cached tokens of each, options)
    # the second finds keys and values, but no state: it saves one there
    "one by one": ([prompt(i, 2, 2, 2, 2) for i in range(4)], True, [0, 0, 8, 8], {}),
    # two groups in one: each part of a prefix is computed once
    "junctions in junctions": (
        [prompt(*[tail] * 8, i, i, i, i, i) for tail in (1, 2) for i in range(3)], False, [0, 16, 16, 8, 16, 16], {},
    ),
    # prompts that nobody shares do not drive out what is shared
    **{f"for junctions, of {n}": ([prompt(i % 4, 2, 2, 2, 2) for i in range(8)], False, [0] + [8] * 7,
                                  {"num_snapshots": n, "max_num_seqs": 2}) for n in (1, 2)},
    # those that are protected outlive many prompts
    "for the protected": (
        [prompt(2), prompt(3), *([i % 3, i // 3 % 3, i // 9 % 3, i // 27, 1, 1, 1, 1, 1] for i in range(50)),
         prompt(4)], True, [8], {"num_snapshots": 4, "num_blocks": 400},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_which_prompts_find_a_state(name):
    prompts, one_by_one, expected, options = FOUND[name]
    harness = make(**options)
    for each in prompts:
        harness.add(each, **GREEDY)
        if one_by_one:
            harness.run_to_end()
    assert cached(harness)[-len(expected) :] == expected


def test_a_batch_ends_before_who_would_load_what_it_saves():
    harness = make()
    ids = [harness.add(p, **GREEDY) for p in ([2] * 9, prompt(2), prompt(3), prompt(4))]
    first, second = harness.step(), harness.step()
    assert isinstance(first, PrefillBatch) and chunk_seq_ids(first) == ids[:2]
    assert isinstance(second, PrefillBatch) and chunk_seq_ids(second) == ids[2:]
    assert second.starts.tolist() == [8, 8] and len(set(second.messages[StateCopies].loads.values())) == 1
    harness.run_to_end()


def test_a_chat_turn_finds_the_state_at_the_end_of_the_prompt_before():
    """The second turn also saves a state where the cached keys and values of the answer end."""
    harness = make()
    first = harness.add(prompt(2), max_tokens=12, ignore_eos=True)
    for _ in range(2):
        harness.run_to_end()
        harness.add([*harness.outputs[first].token_ids, 1, 2], **GREEDY)
    assert cached(harness) == [0, 8, 20]


def test_a_preempted_sequence_resumes_from_the_end_of_its_prompt():
    harness = make(block_size=2, chunk=2, num_blocks=8, max_num_seqs=2, max_model_len=16)
    for token, max_tokens in ((1, 8), (2, 10)):
        harness.add([token] * 5, max_tokens=max_tokens, ignore_eos=True)
    starts = []
    while not harness.engine.is_finished():
        batch = harness.step()
        if isinstance(batch, PrefillBatch):
            starts += batch.starts.tolist()
    assert harness.scheduler.num_preemptions == 1 and starts == [0, 0, 4]
    harness.run_to_end()


@pytest.mark.parametrize("options", [{"num_snapshots": 0}, {"caching": False}])
def test_without_snapshots_no_prefix_is_found(options):
    harness = make(**options)
    for _ in range(2):
        harness.add(prompt(2, 2), **GREEDY)
        harness.add(prompt(2, 3), **GREEDY, n=2)
        harness.run_to_end()
    assert cached(harness) == [0] * 4 and not harness.scheduler.block_manager.hash_to_block_id


@needs("readouts.prompt_logprobs")
def test_what_is_scored_is_computed():
    """Log-probabilities of a prompt need its logits: no snapshot beyond the first of them is loaded."""
    harness = make()
    for start in (1, 13, 13, 7, 7):
        harness.add_score(prompt(length=14), start)
        harness.run_to_end()
    assert cached(harness) == [0, 0, 12, 0, 4]


def test_equal_hashes_are_not_equal_prefixes(monkeypatch):
    """If hashes collide, no foreign state is loaded: a snapshot belongs to the block that the prefix cache has."""
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(lambda ids, parent=-1: 42))
    snapshots = Snapshots(4, first_row=3, grain=2)
    manager = HybridBlockManager(12, 2, snapshots, chunk=2)
    seq = Sequence([1, 2, 3, 4, 5], block_size=2)
    manager.allocate(seq)
    manager.computed(seq, 0, 5)  # its last full block has the hash of its first
    assert not manager.take_messages()[StateCopies].saves


def test_a_cut_prefill_ends_with_a_chunk():
    harness = make(block_size=4, chunk=6, max_num_batched_tokens=17)
    harness.add([1] * 40, **GREEDY)
    assert [harness.step().stops.tolist() for _ in range(3)] == [[12], [24], [40]]
    harness.run_to_end()


def test_a_snapshot_dies_with_its_block():
    harness = make(8, num_blocks=6, max_num_seqs=1)
    for i in range(6):
        harness.add([i % 4] * 9, **GREEDY)
        harness.run_to_end()
    manager = harness.scheduler.block_manager
    snapshots = harness.scheduler.block_manager.snapshots
    held = {**snapshots.probation, **snapshots.protected}
    assert 0 < len(held) < 4 and held.keys() <= manager.hash_to_block_id.keys()
    manager.forget_prefixes()
    assert len(harness.scheduler.block_manager.snapshots.free_rows) == 8
    harness.add([1] * 9, **GREEDY)
    assert cached(harness)[-1] == 0


def test_other_completions_wait_for_no_snapshot():
    """They are forked, with the state."""
    harness = make()
    harness.add(prompt(2, 2), **GREEDY, n=3)
    batch = harness.step()
    assert batch.messages[StateCopies].after == [(0, 1), (0, 2)]
    assert cached(harness) == [0] and not harness.scheduler.block_manager._expected

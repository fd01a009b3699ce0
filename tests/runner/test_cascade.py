"""Which sequences of a batch are grouped, against every possible group; and what of it crosses to the device."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from histories import histories
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.core import DecodeBatch
from nanovllm.runner import cascade
from nanovllm.runner.cascade import Cascade, columns_of, find_groups, num_words
from nanovllm.runner.inputs import to_device

BLOCK = 4


@pytest.fixture(scope="module", autouse=True)
def small_groups():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MIN_MEMBERS", 2), ("MIN_SAVED_TOKENS", 1), ("SHARED_TOKENS", 1)):
            patch.setattr(cascade, name, value)
        yield


def tables_of(*chains):
    """Block tables of sequences named by the way to them in a tree: "ab" shares the block "a" with "a" and "ac"."""
    ids, width = {}, max(map(len, chains))
    rows = [[ids.setdefault(chain[: i + 1], len(ids)) for i in range(len(chain))] for chain in chains]
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)


def groups_of(*chains):
    return sorted((members.tolist(), num_tokens) for members, num_tokens in find_groups(tables_of(*chains), BLOCK))


def test_groups():
    assert groups_of("a", "b", "c") == []
    assert groups_of("a", "b", "a") == [([0, 2], 4)]
    assert groups_of("abc", "abd", "ab", "x", "xyz", "xyw") == [([0, 1, 2], 8), ([3, 4, 5], 4)]
    # three read "a" once: 2 * 4 tokens; the pair reads "abcd" once: 16 - 4 for the third alone
    assert groups_of("abcd", "abcd", "ax") == [([0, 1], 16)]
    assert groups_of("abc", "abc", "ax", "ay") == [([0, 1], 12), ([2, 3], 4)]
    assert groups_of("ab", "ab", "ac", "ac", "ad") == [([0, 1, 2, 3, 4], 4)]  # 4 * 4, and divided 2 * 8


def test_a_shared_length_is_rounded_down_to_what_kernels_take(monkeypatch):
    monkeypatch.setattr(cascade, "SHARED_TOKENS", 8)
    assert groups_of("abc", "abc") == [([0, 1], 8)]
    assert groups_of("a", "a") == []


def test_small_groups_and_small_savings_do_not_pay(monkeypatch):
    monkeypatch.setattr(cascade, "MIN_MEMBERS", 3)
    assert groups_of("ab", "ab", "cd", "cd", "cd") == [([2, 3, 4], 8)]
    monkeypatch.setattr(cascade, "MIN_SAVED_TOKENS", 17)  # of all groups together
    assert groups_of("ab", "ab", "cd", "cd", "cd") == []
    assert groups_of("ab", "ab", "ab", "cd", "cd", "cd") == [([0, 1, 2], 8), ([3, 4, 5], 8)]


def test_prefixes_that_branch_at_every_block():
    """As deep as there are sequences; a recursion per branching would exceed Python's limit."""
    chains = [[*range(i), 5000 + i] for i in range(1500)]
    tables = np.full((1500, 1500), -1, np.int32)
    for row, chain in zip(tables, chains, strict=True):
        row[: len(chain)] = chain
    groups = find_groups(tables, BLOCK)
    assert sum((len(members) - 1) * num_tokens for members, num_tokens in groups) > 0


chains = st.lists(st.text("ab", max_size=4), min_size=1, max_size=12)


@histories(300)
@given(chains=chains)
def test_groups_are_sound_and_no_single_group_saves_more(chains):
    groups = groups_of(*chains, "c") if "" not in chains else groups_of(*chains, "cc")
    seen = [member for members, _ in groups for member in members]
    assert len(seen) == len(set(seen))
    saved = 0
    for members, num_tokens in groups:
        depth = num_tokens // BLOCK
        assert len(members) >= 2 and depth > 0
        assert len({chains[member][:depth] for member in members}) == 1 and len(chains[members[0]]) >= depth
        saved += (len(members) - 1) * num_tokens
    for prefix in {chain[:i] for chain in chains for i in range(1, 5)}:
        alone = sum(chain.startswith(prefix) for chain in chains)
        assert saved >= (alone - 1) * len(prefix) * BLOCK


class Groups(Cascade):
    """Host and device side together, of requests with these block tables; ``sent`` counts words."""

    def __init__(self, *tables):
        self.tables, self.sent = np.full((6, 5), -1, np.int32), 0
        super().__init__(self.tables, BLOCK, torch.device("cpu"))
        self._buffer.fill_(-7)
        for req_idx, blocks in enumerate(tables):
            self.enter(req_idx, blocks)

    def enter(self, req_idx, blocks):
        """What the request state does, and the runner."""
        self.tables[req_idx] = -1
        self.tables[req_idx, : len(blocks)] = blocks
        self._req_indices = np.empty(0, np.int32)

    def of_batch(self, req_indices, lengths):
        """{position: (shared tokens, owner's request slot)} on the device, of the grouped."""
        arrays, rows = {}, np.array(req_indices, np.int32)
        new_blocks = np.empty((0, 3), np.int32)
        batch = DecodeBatch(rows, rows.astype(np.int64), np.array(lengths, np.int32), new_blocks)
        self.prepare(batch, arrays)
        self.write(batch, to_device(arrays, torch.device("cpu")))
        self.sent += sum(map(len, arrays.values()))
        if self.groups is None:
            return {}
        lens, members, *columns = (column.tolist() for column in self.groups)
        used = [group for group in zip(*columns, strict=True) if group[1]]
        found = {
            member: (length, owner) for begin, size, length, owner in used for member in members[begin : begin + size]
        }
        assert found and lens == [found.get(i, (0,))[0] for i in range(len(self.tables))]
        return found


def test_groups_follow_the_batch():
    groups = Groups([7, 8, 9, 1], [7, 8, 9, 2], [3], [7, 4])
    pair = {1: (12, 0), 3: (12, 0)}
    assert groups.of_batch([3, 0, 2, 1], [6, 14, 2, 13]) == pair
    sent = groups.sent
    assert groups.of_batch([3, 0, 2, 1], [7, 15, 3, 14]) == pair and groups.sent == sent
    assert groups.of_batch([3, 0, 2], [7, 15, 3]) == {0: (4, 3), 1: (4, 3)}
    assert groups.of_batch([2, 0], [7, 15]) == {}
    assert groups.of_batch([0, 1], [15, 14]) == {0: (12, 0), 1: (12, 0)}


@pytest.mark.parametrize("first, length", [([7, 8], 8), ([7, 8, 9, 1], 13)])
def test_a_block_is_shared_once_all_its_tokens_are_computed(first, length):
    """The token of the step is not yet: with 8 of them the second block of 4 is computed by this step."""
    assert Groups(first, [7, 8]).of_batch([0, 1], [length, 8]) == {0: (4, 0), 1: (4, 0)}


def test_another_sequence_in_the_same_request_slot():
    """The batch looks the same."""
    groups = Groups([7, 1], [7, 2])
    assert groups.of_batch([0, 1], [6, 6])
    groups.enter(1, [9])
    assert groups.of_batch([0, 1], [7, 5]) == {}
    groups.enter(1, [7, 3])
    assert groups.of_batch([0, 1], [8, 6]) == {0: (4, 0), 1: (4, 0)}


def test_blocks_that_were_appended_are_shared_too():
    groups = Groups([7], [7, 8, 3])
    groups.tables[0, 1] = 8
    assert groups.of_batch([0, 1], [9, 9]) == {0: (8, 0), 1: (8, 0)}


@pytest.mark.parametrize(("shares_prefixes", "windows"), [(False, [0, 0]), (True, [8, 8])])
def test_without_a_kernel_for_groups_there_is_no_part(shares_prefixes, windows):
    config = SimpleNamespace(model_config=SimpleNamespace(windows=windows), kvcache_block_size=BLOCK)
    rank = SimpleNamespace(config=config, backend=SimpleNamespace(shares_prefixes=shares_prefixes))
    assert Cascade.make(rank, None, None) is None


def test_reset_sends_everything_again():
    groups = Groups([7, 1], [7, 2])
    known = groups.of_batch([0, 1], [6, 6])
    groups._buffer[:] = -7  # lost
    groups.reset()
    assert groups.of_batch([0, 1], [6, 6]) == known


@pytest.mark.parametrize("max_num_seqs", [1, 2, 6, 7, 512])
def test_columns_lie_side_by_side(max_num_seqs):
    words = torch.arange(num_words(max_num_seqs))
    columns = columns_of(words, max_num_seqs)
    assert num_words(max_num_seqs) % 4 == 0 and all(int(column[0]) % 4 == 0 for column in columns)
    assert len(torch.cat(columns).unique()) == sum(map(len, columns))
    assert len(columns.shared_lens) == len(columns.members) == max_num_seqs
    assert {len(column) for column in columns[2:]} == {max(1, max_num_seqs // cascade.MIN_MEMBERS)}

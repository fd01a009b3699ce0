"""Which sequences of a batch are grouped, against every possible group; and what of it crosses to the device."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.sequence import Sequence, SequenceTable
from nanovllm.runner import prefix_groups
from nanovllm.runner.prefix_groups import StagedGroups, columns_of, find_groups, num_words

BLOCK = 4


@pytest.fixture(scope="module", autouse=True)
def small_groups():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MIN_MEMBERS", 2), ("MIN_SAVED_TOKENS", 1), ("SHARED_TOKENS", 1)):
            patch.setattr(prefix_groups, name, value)
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
    monkeypatch.setattr(prefix_groups, "SHARED_TOKENS", 8)
    assert groups_of("abc", "abc") == [([0, 1], 8)]
    assert groups_of("a", "a") == []


def test_small_groups_and_small_savings_do_not_pay(monkeypatch):
    monkeypatch.setattr(prefix_groups, "MIN_MEMBERS", 3)
    assert groups_of("ab", "ab", "cd", "cd", "cd") == [([2, 3, 4], 8)]
    monkeypatch.setattr(prefix_groups, "MIN_SAVED_TOKENS", 17)  # of all groups together
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


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
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


class Mirror:
    """Host and device side together."""

    def __init__(self, max_num_seqs=6, max_blocks=5):
        self.words = np.full(num_words(max_num_seqs), -7, np.int32)
        self.max_num_seqs, self.sent = max_num_seqs, 0
        self.staged = StagedGroups(max_num_seqs, max_blocks, self.write)

    def write(self, indices, values):
        assert indices.dtype == values.dtype == np.int32
        self.words[indices], self.sent = values, self.sent + len(indices)

    def add(self, req_idx, blocks):
        seq, table = Sequence([1], block_size=BLOCK), SequenceTable(self.max_num_seqs, 32)
        table.free_req_indices = [req_idx]
        table.add(seq)
        seq.block_table = blocks
        self.staged.add(seq)
        return seq

    def groups(self, req_indices, lengths):
        """{position: (shared tokens, owner's request slot)} on the device, of the grouped."""
        num = self.staged.update(np.array(req_indices), np.array(lengths), BLOCK)
        if num == 0:
            return {}
        lens, members, *columns = (column.tolist() for column in columns_of(self.words, self.max_num_seqs))
        used = [group for group in zip(*columns, strict=True) if group[1]]
        assert len(used) == num
        found = {
            member: (length, owner) for begin, size, length, owner in used for member in members[begin : begin + size]
        }
        assert lens == [found.get(i, (0,))[0] for i in range(self.max_num_seqs)]
        return found


def test_groups_follow_the_batch():
    mirror = Mirror()
    for req_idx, blocks in enumerate([[7, 8, 9, 1], [7, 8, 9, 2], [3], [7, 4]]):
        mirror.add(req_idx, blocks)
    pair = {1: (12, 0), 3: (12, 0)}
    assert mirror.groups([3, 0, 2, 1], [6, 14, 2, 13]) == pair
    sent = mirror.sent
    assert mirror.groups([3, 0, 2, 1], [7, 15, 3, 14]) == pair and mirror.sent == sent
    assert mirror.groups([3, 0, 2], [7, 15, 3]) == {0: (4, 3), 1: (4, 3)}
    assert mirror.groups([2, 0], [7, 15]) == {}
    assert mirror.groups([0, 1], [15, 14]) == {0: (12, 0), 1: (12, 0)}


def test_a_block_is_shared_once_all_its_tokens_are_computed():
    """The token of the step is not yet: with 8 of them the second block of 4 is computed by this step."""
    mirror = Mirror()
    mirror.add(0, [7, 8])
    mirror.add(1, [7, 8])
    assert mirror.groups([0, 1], [8, 8]) == {0: (4, 0), 1: (4, 0)}


def test_another_sequence_in_the_same_request_slot():
    """The batch looks the same."""
    mirror = Mirror()
    mirror.add(0, [7, 1])
    mirror.add(1, [7, 2])
    assert mirror.groups([0, 1], [6, 6])
    mirror.add(1, [9])
    assert mirror.groups([0, 1], [7, 5]) == {}
    mirror.add(1, [7, 3])
    assert mirror.groups([0, 1], [8, 6]) == {0: (4, 0), 1: (4, 0)}


def test_entries_behind_the_full_blocks_are_not_compared():
    """They are of the slot's last owner, or of a block that this step fills."""
    mirror = Mirror()
    mirror.add(1, [7, 8, 9])
    mirror.add(1, [7, 8])
    mirror.add(0, [7, 8, 9, 1])
    assert mirror.groups([0, 1], [13, 8]) == {0: (4, 0), 1: (4, 0)}


def test_blocks_that_were_appended_are_shared_too():
    mirror = Mirror()
    seq = mirror.add(0, [7])
    seq.block_table = [7, 8]
    mirror.staged.append_blocks([seq])
    mirror.add(1, [7, 8, 3])
    assert mirror.groups([0, 1], [9, 9]) == {0: (8, 0), 1: (8, 0)}


def test_reset_sends_everything_again():
    mirror = Mirror()
    mirror.add(0, [7, 1])
    mirror.add(1, [7, 2])
    known = mirror.groups([0, 1], [6, 6])
    mirror.words[:] = -7  # lost
    mirror.staged.reset()
    assert mirror.groups([0, 1], [6, 6]) == known


@pytest.mark.parametrize("max_num_seqs", [1, 2, 6, 7, 512])
def test_columns_lie_side_by_side(max_num_seqs):
    words = torch.arange(num_words(max_num_seqs))
    columns = columns_of(words, max_num_seqs)
    assert num_words(max_num_seqs) % 4 == 0 and all(int(column[0]) % 4 == 0 for column in columns)
    assert len(torch.cat(columns).unique()) == sum(map(len, columns))
    assert len(columns.shared_lens) == len(columns.members) == max_num_seqs
    assert {len(column) for column in columns[2:]} == {max(1, max_num_seqs // prefix_groups.MIN_MEMBERS)}

"""The block manager against a naive one that knows blocks by their whole prefix and keeps plain lists."""

import numpy as np
import pytest
import xxhash
from histories import histories
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.core import Sequence
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import SequenceTable


class NaiveManager:
    """The same policy, without hashes, counters or ordered dictionaries."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.free = list(range(num_blocks))[::-1]
        self.cached = []  # least recently used first
        self.prefix_of = {}  # block -> all tokens up to its end
        self.tables = {}
        self.registered = {}  # a block gets its one chance of a name when it is full

    def hits(self, tokens):
        found = []
        for end in range(self.block_size, len(tokens), self.block_size):
            same = [block for block, prefix in self.prefix_of.items() if prefix == tuple(tokens[:end])]
            if not same:
                break
            found += same
        return found

    def take(self):
        if self.free:
            return self.free.pop()
        block = self.cached.pop(0)
        del self.prefix_of[block]
        return block

    def allocate(self, key, tokens):
        """The block table, or None if the blocks do not suffice."""
        hits = self.hits(tokens)
        missing = -(-len(tokens) // self.block_size) - len(hits)
        if missing > len(self.free) + len([block for block in self.cached if block not in hits]):
            return None
        self.cached = [block for block in self.cached if block not in hits]
        self.tables[key] = hits + [self.take() for _ in range(missing)]
        self.registered[key] = len(hits)
        return self.tables[key]

    def register(self, key, tokens):
        table = self.tables[key]
        for i in range(self.registered[key], len(tokens) // self.block_size):
            self.registered[key] = i + 1
            prefix = tuple(tokens[: (i + 1) * self.block_size])
            if prefix not in self.prefix_of.values():
                self.prefix_of[table[i]] = prefix

    def release(self, key):
        for block in reversed(self.tables.pop(key)):
            if not any(block in table for table in self.tables.values()):
                (self.cached if block in self.prefix_of else self.free).append(block)


def append(table, seq, token):
    table.tokens[seq.req_idx, seq.num_tokens] = token
    table.num_tokens[seq.req_idx] += 1


def same_state(manager, naive):
    assert list(manager.free_block_ids) == naive.free
    assert list(manager.cached_block_ids) == naive.cached
    assert manager.num_available == len(naive.free) + len(naive.cached)
    size = naive.block_size
    for block in manager.blocks:
        assert block.ref_count == sum(block.block_id in table for table in naive.tables.values())
        prefix = naive.prefix_of.get(block.block_id)
        assert block.token_ids == (None if prefix is None else np.array(prefix[-size:], np.int32).tobytes())
    assert sorted(manager.hash_to_block_id.values()) == sorted(naive.prefix_of)


@histories(300)
@given(
    num_blocks=st.integers(1, 8),
    block_size=st.integers(1, 3),
    actions=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 63)), max_size=30),
)
def test_against_the_naive_manager(num_blocks, block_size, actions):
    manager, naive = BlockManager(num_blocks, block_size), NaiveManager(num_blocks, block_size)
    table, live = SequenceTable(len(actions), 64), []
    for kind, which, number in actions:
        if kind <= 1:  # a sequence of 1 to 7 tokens of two kinds comes; its tokens are computed at once
            tokens = [number >> i & 1 for i in range(which + 1)]
            seq = Sequence(tokens, seq_id=number, block_size=block_size)
            table.add(seq)
            expected = naive.allocate(seq, tokens)
            assert manager.can_allocate(seq) == (expected is not None)
            if expected is None:
                continue
            hits = len(naive.hits(tokens))
            manager.allocate(seq)
            assert seq.block_table == expected
            assert seq.num_computed_tokens == hits * block_size < len(tokens)
            manager.register(seq, len(tokens))
            naive.register(seq, tokens)
            live.append(seq)
        elif live and kind == 2:  # one grows by a token; the slot of its last token is due
            seq = live[which % len(live)]
            append(table, seq, number & 1)
            tokens, blocks = seq.token_ids, naive.tables[seq]
            due = len(tokens) > len(blocks) * block_size
            assert (manager.num_available > 0) == bool(naive.free or naive.cached)
            if due and not manager.num_available:
                manager.deallocate(seq)
                naive.release(seq)
                live.remove(seq)
                continue
            manager.may_append(seq, len(tokens) - 1)
            if due:
                naive.register(seq, tokens[:-1])
                blocks.append(naive.take())
            assert seq.block_table == blocks
        elif live:
            seq = live.pop(which % len(live))
            manager.deallocate(seq)
            naive.release(seq)
            assert seq.block_table == [] and seq.num_computed_tokens == 0
        same_state(manager, naive)
    for seq in live:
        manager.deallocate(seq)
        naive.release(seq)
    same_state(manager, naive)
    assert manager.num_available == num_blocks


def admit(manager, tokens, computed=None):
    seq = Sequence(tokens, block_size=manager.block_size)
    manager.allocate(seq)
    manager.register(seq, len(tokens) if computed is None else computed)
    return seq


def test_hash_is_xxh64_of_parent_and_ids():
    ids = np.array([7, 8], np.int32)
    root = xxhash.xxh64_intdigest(b"\xff" * 9 + ids.tobytes())
    assert BlockManager.compute_hash(ids) == root
    child = xxhash.xxh64_intdigest(root.to_bytes(9, "little") + ids.tobytes())
    assert BlockManager.compute_hash(ids, root) == child != root


def test_equal_hashes_are_not_equal_tokens(monkeypatch):
    """If two blocks' hashes collide, the tokens decide: no foreign keys and values, whatever the hash says."""
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(lambda ids, parent=-1: 42))
    manager = BlockManager(6, 2)
    first = admit(manager, [1, 2, 3])
    second = admit(manager, [3, 4, 5])
    assert second.num_computed_tokens == 0 and not set(first.block_table) & set(second.block_table)
    third = admit(manager, [1, 2, 9])
    assert third.num_computed_tokens == 2 and third.block_table[0] == first.block_table[0]


def test_only_computed_blocks_are_found():
    manager = BlockManager(6, 2)
    admit(manager, [1, 2, 3, 4, 5], computed=3)
    assert admit(manager, [1, 2, 3, 4, 5]).num_computed_tokens == 2


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(4, 2, enable_prefix_caching=False)
    manager.deallocate(admit(manager, [1, 2, 3, 4, 5]))
    assert admit(manager, [1, 2, 3, 4, 5]).num_computed_tokens == 0
    assert not manager.hash_to_block_id and not manager.cached_block_ids


def test_a_sequence_gets_blocks_once():
    manager = BlockManager(4, 1)
    seq = admit(manager, [1])
    with pytest.raises(AssertionError):
        manager.allocate(seq)

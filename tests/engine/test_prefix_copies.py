"""The prefix cache that copies the beginnings of blocks; over random histories: ``test_scheduler.py``."""

import numpy as np
from test_block_manager import admit, append

from nanovllm.core import Sequence
from nanovllm.engine.prefix_copies import MAX_TAILS, CopyingBlockManager
from nanovllm.engine.scheduler import SequenceTable
from nanovllm.messages.block_copies import BlockCopies


def copying(num_blocks=6, block_size=8, min_copied_tokens=2):
    return CopyingBlockManager(num_blocks, block_size, min_copied_tokens)


def leave(manager, seq):
    """After all its tokens were computed."""
    manager.deallocate(seq, seq.num_tokens)


def allocated(manager, tokens):
    seq = Sequence(tokens, block_size=manager.block_size)
    manager.allocate(seq)
    copies = manager.take_messages().get(BlockCopies)
    return seq, copies.before[0] if copies else None


def test_the_longest_beginning_is_copied():
    manager = copying()
    seqs = [admit(manager, [1, 2, 3, 9]), admit(manager, [1, 2, 3, 4, 5, 9]), admit(manager, [1, 7, 7, 7])]
    sources = [seq.block_table[0] for seq in seqs]
    for seq in seqs:
        leave(manager, seq)
    seq, copy = allocated(manager, [1, 2, 3, 4, 5, 6])
    assert copy == (sources[1], seq.block_table[0]) and seq.num_computed_tokens == 5
    assert allocated(manager, [1, 7, 8])[1] is not None
    seq, copy = allocated(manager, [1, 5, 5])  # less than two tokens
    assert copy is None and seq.num_computed_tokens == 0


def test_a_beginning_behind_shared_blocks():
    """Of a full block, or of a tail; only behind the same tokens; and the last token is computed."""
    manager = copying(8, 4)
    first = admit(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    table = first.block_table
    leave(manager, first)
    seq, copy = allocated(manager, [1, 2, 3, 4, 5, 6, 0, 0])
    assert copy == (table[1], seq.block_table[1]) and seq.block_table[0] == table[0] and seq.num_computed_tokens == 6
    seq, copy = allocated(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    assert copy == (table[2], seq.block_table[2]) and seq.num_computed_tokens == 10
    assert allocated(manager, [0, 2, 3, 4, 5, 6, 0])[1] is None


def test_a_block_in_use_is_copied_once_it_is_offered():
    """A launch that is being made has not yet written others. What it has then grows."""
    manager = copying()
    seq = admit(manager, [1, 2, 3, 4])
    assert allocated(manager, [1, 2, 3, 9])[1] is None
    manager.offer(seq, 3)
    assert allocated(manager, [1, 2, 3, 4, 5])[0].num_computed_tokens == 3
    leave(manager, seq)
    assert allocated(manager, [1, 2, 3, 4, 5])[0].num_computed_tokens == 4


def test_a_tail_that_is_filled_is_none_any_more():
    manager = copying(6, 4)
    seq, table = Sequence([1, 2, 3], block_size=4), SequenceTable(1, 8)
    table.add(seq)
    manager.allocate(seq)
    manager.offer(seq, 3)
    assert list(manager.tails) == seq.block_table
    append(table, seq, 4)
    append(table, seq, 5)
    manager.register(seq, 4)
    assert not manager.tails and manager.blocks[seq.block_table[0]].hash is not None
    assert allocated(manager, [1, 2, 3, 4, 9])[0].num_computed_tokens == 4
    assert allocated(manager, [1, 2, 8])[0].num_computed_tokens == 2


def test_a_block_of_two_sequences_is_no_tail():
    """A prompt's last block, full and shared by its completions, has no hash if another has the same contents."""
    manager = copying(40, 4)
    admit(manager, [1, 2, 3, 4])
    seq = admit(manager, [1, 2, 3, 4])
    child = Sequence([1, 2, 3, 4], block_size=4)
    manager.fork(seq, child)
    assert BlockCopies not in manager.take_messages()
    manager.offer(child, 3)
    manager.deallocate(child)
    assert not manager.tails and manager.blocks[seq.block_table[0]].ref_count == 1
    for i in range(20):
        leave(manager, admit(manager, [50 + i, 50, 50]))
    leave(manager, seq)


def test_few_tails_are_kept():
    """Others are free, and used again before the OS must map new pages."""
    manager = copying(40)
    for i in range(30):
        leave(manager, admit(manager, [i, i, i]))
    assert len(manager.tails) == MAX_TAILS == len(manager.cached_block_ids)
    used = set(manager.places)
    leave(manager, admit(manager, [77, 77, 77]))
    assert len(used | manager.tails.keys()) == MAX_TAILS + 1
    oldest = next(iter(manager.tails))
    tokens = np.frombuffer(manager.blocks[oldest].token_ids, np.int32).tolist()
    manager.deallocate(allocated(manager, [*tokens, 5])[0])  # what is copied stays
    leave(manager, admit(manager, [88, 88, 88]))
    assert oldest in manager.tails


def test_forgotten_and_evicted_blocks_are_not_copied():
    manager = copying(2)
    leave(manager, admit(manager, [1, 2, 3]))
    manager.forget_prefixes()
    assert allocated(manager, [1, 2, 3])[1] is None and not manager.tails and not manager.children
    manager = copying(2)
    leave(manager, admit(manager, [1, 2, 3]))
    admit(manager, list(range(50, 62)))  # takes both blocks
    assert not manager.tails and not manager.children and manager.num_available == 0

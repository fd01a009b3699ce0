"""Owns which snapshots of recurrent states exist, and says which states a batch loads, saves and copies.

A recurrent layer keeps one state of fixed size per sequence, so a cached prefix is of use only where somebody has saved
the state at its end. The devices hold a table of states; R = max_num_seqs, P snapshots::

    rows [0, R)              of the sequences, by request slot
    row R                    padding
    rows [R + 1, R + 1 + P)  snapshots

A snapshot is the state after a full block, and known by the block's hash, which stands for the whole prefix. It is as
large as the keys and values of 1,500 tokens or more, so there are few, at multiples of ``grain`` tokens, and of two
kinds:

    junction     where others are known to go on: a waiting prompt shares so much and no more, or the prefix cache has
                 keys and values up to there but no state
    speculative  the last of a prompt: it may be the start of a chat's next turn

Knows nothing of devices.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence as ListLike

from nanovllm.core import Sequence
from nanovllm.engine.block_manager import BlockManager


class Snapshots:
    """Block hash -> row of the snapshot after that block; a segmented LRU.

    Speculative snapshots are on probation; junctions, and what was hit, are protected, as long as these are at most 3/4
    of all. A launch reads and writes rows in no order, so a row that a batch uses is not taken again by the same batch.

    Args:
        num_rows: P; may be 0.
        first_row: of the device's table.
        grain: snapshots are taken after multiples of so many tokens; a multiple of the block size.
    """

    def __init__(self, num_rows: int, first_row: int, grain: int):
        self.num_rows, self.first_row, self.grain = num_rows, first_row, grain
        self.clear()

    def clear(self) -> None:
        self.free_rows = list(range(self.first_row + self.num_rows - 1, self.first_row - 1, -1))
        self.probation: OrderedDict[int, int] = OrderedDict()  # hash -> row, least recently used first; also the next
        self.protected: OrderedDict[int, int] = OrderedDict()
        self.used: dict[int, bool] = {}  # rows that the batch being made uses -> whether it writes them

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self.probation or block_hash in self.protected

    def longest(self, block_hashes: ListLike[int], num_blocks: int, block_size: int) -> int:
        """Up to which of the first ``num_blocks`` blocks there is a snapshot."""
        if not self.probation and not self.protected:
            return 0
        step = self.grain // block_size
        ends = range(num_blocks - num_blocks % step, 0, -step)
        return next((end for end in ends if block_hashes[end - 1] in self), 0)

    def hit(self, block_hash: int) -> int:
        """The row of a snapshot that this batch loads."""
        row = self._promote(block_hash)
        self.used[row] = False
        return row

    def is_new(self, block_hash: int) -> bool:
        """Whether this batch saves the snapshot, and so cannot load it."""
        row = (self.probation if block_hash in self.probation else self.protected)[block_hash]
        return self.used.get(row, False)

    def save(self, block_hash: int, is_junction: bool) -> int | None:
        """The row for a new snapshot; None if it is there, or has to stand back for others."""
        row = None
        if block_hash not in self:
            row = self._take_row(self.probation, self.protected) if is_junction else self._take_row(self.probation)
            if row is None:
                return None
            self.used[row] = True
            self.probation[block_hash] = row
        if is_junction:
            self._promote(block_hash)
        return row

    def drop(self, block_hash: int) -> None:
        """Forget the snapshot after a block that is evicted, if there is one."""
        if block_hash in self:
            self.free_rows.append(self._remove(block_hash))

    def _remove(self, block_hash: int) -> int:
        return (self.probation if block_hash in self.probation else self.protected).pop(block_hash)

    def _promote(self, block_hash: int) -> int:
        """Protect a snapshot, as the most recently used; return its row."""
        row = self.protected[block_hash] = self._remove(block_hash)
        if len(self.protected) > self.num_rows * 3 // 4:
            demoted, its_row = self.protected.popitem(last=False)
            self.probation[demoted] = its_row
        return row

    def _take_row(self, *segments: OrderedDict[int, int]) -> int | None:
        """A free row, else that of the least recently used snapshot; None if this batch uses them all."""
        row = next((row for row in reversed(self.free_rows) if row not in self.used), None)
        if row is not None:
            self.free_rows.remove(row)
            return row
        for segment in segments:
            for block_hash, row in segment.items():
                if row not in self.used:
                    return self._remove(block_hash)
        return None


class HybridBlockManager(BlockManager):
    """Blocks of a model with recurrent layers: a prefix ends where there is a snapshot, and each dies with its block.

    Args:
        snapshots: none are taken if it has no rows.
        chunk: of ``StateRows``.
    """

    def __init__(self, num_blocks: int, block_size: int, snapshots: Snapshots, chunk: int = 1,
                 enable_prefix_caching: bool = True):
        # a prefix without a state at its end is of no use to recurrent layers
        super().__init__(num_blocks, block_size, enable_prefix_caching and snapshots.num_rows > 0)
        self.snapshots, self.chunk = snapshots, chunk
        self._counts: Counter[int] = Counter()  # of the hashes of waiting prompts, each ``grain`` tokens
        self._expected: dict[int, list[int]] = {}  # those of each, by seq_id
        self._begin()

    def _begin(self) -> None:
        self.snapshots.used.clear()
        self._loads: dict[int, int] = {}  # see StateMoves.of
        self._saves: dict[int, list[tuple[int, int]]] = {}
        self._forked: list[tuple[Sequence, Sequence]] = []

    def expect(self, seq: Sequence) -> None:
        """A prompt waits, and may use snapshots. Other completions of it need none: they are forked."""
        if self.enable_prefix_caching and seq.seq_id == seq.group_id:
            step, num_blocks = self.snapshots.grain // seq.block_size, seq.max_cached_tokens // seq.block_size
            hashes = self.hashes(seq)[step - 1 : num_blocks : step]
            self._expected[seq.seq_id] = hashes
            self._counts.update(hashes)

    def expect_no_more(self, seq: Sequence) -> None:
        """A prompt waits no longer, or never did."""
        for block_hash in self._expected.pop(seq.seq_id, ()):
            self._counts[block_hash] -= 1
            if not self._counts[block_hash]:
                del self._counts[block_hash]

    def find_prefix(self, seq: Sequence) -> list[int]:
        found = super().find_prefix(seq)
        return found[: self.snapshots.longest(seq.block_hashes, len(found), self.block_size)]

    def can_allocate(self, seq: Sequence, num_reserved: int = 0) -> bool:
        """Nor may a sequence load what the batch being made saves."""
        if not super().can_allocate(seq, num_reserved):
            return False
        prefix = self.find_prefix(seq) if self._saves else []
        return not prefix or not self.snapshots.is_new(seq.block_hashes[len(prefix) - 1])

    def allocate(self, seq: Sequence) -> list[int]:
        prefix = super().allocate(seq)
        self.expect_no_more(seq)
        if prefix:
            self._loads[seq.seq_id] = self.snapshots.hit(self._hash_at(seq, seq.num_computed_tokens))
        return prefix

    def chunk_end(self, start: int, stop: int) -> int:
        """With one of the kernels' chunks, if one ends there."""
        aligned = stop - stop % self.chunk
        return aligned if aligned > start else stop

    def computed(self, seq: Sequence, start: int, stop: int) -> None:
        """What a sequence begins with, and what it saves."""
        super().computed(seq, start, stop)
        self._loads.setdefault(seq.seq_id, seq.req_idx if start else -1)
        grain = self.snapshots.grain
        if not self.enable_prefix_caching or start // grain == stop // grain:
            return
        self.hashes(seq)  # all are looked at below
        positions = range(start - start % grain + grain, stop + 1, grain)
        known_end, last = self._known_end(seq, start), seq.max_cached_tokens // grain * grain
        junctions = [
            position for position in positions if position == known_end
            or self._num_sharers(seq, position) > self._num_sharers(seq, position + grain)
        ]  # fmt: skip
        saves = []
        for position in [*junctions, last]:
            if position in positions and self._is_cached(seq, position):
                row = self.snapshots.save(self._hash_at(seq, position), position in junctions)
                if row is not None:
                    saves.append((position, row))
        if saves:
            self._saves[seq.seq_id] = sorted(saves)

    def fork(self, seq: Sequence, child: Sequence) -> None:
        super().fork(seq, child)
        self._forked.append((seq, child))

    def take_moves(self) -> tuple:
        before, after, _ = super().take_moves()
        moves = self._loads, self._saves, [(seq.req_idx, child.req_idx) for seq, child in self._forked]
        self._begin()
        return before, after, moves

    def _forget(self, block_id: int) -> None:
        block_hash = self.blocks[block_id].hash
        super()._forget(block_id)
        if block_hash is not None:
            self.snapshots.drop(block_hash)

    def _hash_at(self, seq: Sequence, position: int) -> int:
        return seq.block_hashes[position // seq.block_size - 1]

    def _num_sharers(self, seq: Sequence, position: int) -> int:
        """How many waiting prompts begin with the same tokens up to ``position``, and may find them cached."""
        return self._counts[self._hash_at(seq, position)] if position <= seq.num_tokens else 0

    def _is_cached(self, seq: Sequence, position: int) -> bool:
        """Whether the prefix cache has the block before ``position``: a snapshot lives no longer than its block."""
        return self.find(seq, position // seq.block_size - 1) is not None

    def _known_end(self, seq: Sequence, start: int) -> int:
        """The last multiple of ``grain`` up to which others have computed the keys and values already."""
        i = start // seq.block_size
        while i < seq.max_cached_tokens // seq.block_size:
            block_id = self.find(seq, i)
            if block_id is None or block_id == seq.block_table[i]:
                break
            i += 1
        return i * seq.block_size // self.snapshots.grain * self.snapshots.grain

"""Snapshots of recurrent states, a segmented LRU. Owns the rows they lie in.

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

from collections import OrderedDict
from collections.abc import Sequence as ListLike


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
        self.probation: OrderedDict[int, int] = OrderedDict()  # hash -> row, least recently used first (both)
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
        last = range(len(self.free_rows) - 1, -1, -1)
        if (place := next((i for i in last if self.free_rows[i] not in self.used), None)) is not None:
            return self.free_rows.pop(place)  # from the end: there may be 100,000 rows
        for segment in segments:
            for block_hash, row in segment.items():
                if row not in self.used:
                    return self._remove(block_hash)
        return None

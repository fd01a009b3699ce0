"""The queue of waiting sequences, whose end need not be made yet.

Owns their order. A call of many requests is queued at once; each of them becomes sequences when its turn comes, or
earlier while the device works. So the first launch need not wait until the last request is made.
"""

from collections import deque
from collections.abc import Iterator

from nanovllm.core import Sequence, SequenceStatus


class WaitingQueue:
    """A queue of sequences; its length counts those that are not made yet, iteration does not see them."""

    def __init__(self) -> None:
        self._made: deque[Sequence] = deque()
        self.forget_drafts()

    def forget_drafts(self) -> None:
        """Drop what is not made yet."""
        self._drafts: Iterator[list[Sequence]] = iter(())
        self._num_drafts = 0

    def __len__(self) -> int:
        return len(self._made) + self._num_drafts

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._made)

    def expect(self, drafts: Iterator[list[Sequence]], num_seqs: int) -> None:
        """Queue the sequences of one prompt after the other. ``next(drafts)`` makes those of a prompt, which may turn
        out to be finished, with nothing to compute."""
        self.make(len(self))  # of a call around this one
        self._drafts, self._num_drafts = drafts, num_seqs

    def make(self, number: int) -> None:
        """Make the first ``number`` sequences, as far as there are so many."""
        while self._num_drafts and len(self._made) < number:
            seqs = next(self._drafts)
            self._num_drafts -= len(seqs)
            self._made.extend(seq for seq in seqs if seq.status is SequenceStatus.WAITING)
            if not self._num_drafts:
                self.forget_drafts()  # they refer to the engine

    def head(self) -> Sequence | None:
        """The first sequence, made by now; None if none waits."""
        self.make(1)
        return self._made[0] if self._made else None

    def is_head(self, seq: Sequence) -> bool:
        return len(self._made) > 0 and self._made[0] is seq

    def append(self, seq: Sequence) -> None:
        self.make(len(self))
        self._made.append(seq)

    def appendleft(self, seq: Sequence) -> None:
        self._made.appendleft(seq)

    def popleft(self) -> Sequence:
        """Take the head."""
        return self._made.popleft()

    def remove(self, seq: Sequence) -> None:
        self._made.remove(seq)

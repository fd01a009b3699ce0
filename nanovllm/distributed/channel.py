"""What rank 0 tells the other ranks to run: one writer, several readers, through shared memory.

Owns the layout of that memory and the waiting for each other. Knows nothing of processes or devices.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

METHODS = ("run_model", "synchronize", "exit")  # of ModelRunner, that rank 0 may ask for


class Backoff:
    """Waits hardly at all at first, then longer: for what mostly comes within microseconds."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        if self._count > 50:
            time.sleep(5e-5 if self._count < 2000 else 1e-3)


class Channel:
    """A pipe from rank 0 to every other rank, through shared memory. It carries int32 words.

    The words lie in a ring. Rank 0 moves ``marks[0]``, words written so far; rank r acknowledges by moving
    ``marks[r]``, words read so far. A word is overwritten when all have read it, so a message of any size
    flows through. Each mark has one writer and a cache line of its own.
    """

    NUM_WORDS = 1 << 17
    NUM_MARKS = 16  # those of ranks 0 to 7, then the beats of ranks 0 to 7
    NUM_BYTES = NUM_MARKS * 64 + NUM_WORDS * 4

    def __init__(self, memory: Any, rank: int, size: int):
        self.rank = rank
        marks = np.frombuffer(memory, np.int64, self.NUM_MARKS * 8).reshape(self.NUM_MARKS, 8)[:, 0]
        self._words = np.frombuffer(memory, np.int32, self.NUM_WORDS, offset=self.NUM_MARKS * 64)
        self._marks, self.readers, self.beats = marks, marks[1:size], marks[8 : 8 + size]
        self._fence = threading.Lock()

    def write(self, words: np.ndarray, pause: Callable[[], None]) -> None:
        """Rank 0: hand over ``words``; ``pause`` is called while there is no room, and may raise."""
        done, written = 0, int(self._marks[0])
        while done < len(words):
            at = written % self.NUM_WORDS
            free = self.NUM_WORDS - (written - min(self.readers.tolist()))
            n = min(free, self.NUM_WORDS - at, len(words) - done)
            if n == 0:
                pause()
                continue
            self._words[at : at + n] = words[done : done + n]
            self._order_memory()
            done, written = done + n, written + n
            self._marks[0] = written

    def read(self, num_words: int) -> np.ndarray:
        """Any other rank: the next ``num_words`` words, when they come."""
        words, done = np.empty(num_words, np.int32), 0
        read, pause = int(self._marks[self.rank]), Backoff()
        while done < num_words:
            at = read % self.NUM_WORDS
            n = min(int(self._marks[0]) - read, self.NUM_WORDS - at, num_words - done)
            if n == 0:
                pause()
                continue
            self._order_memory()
            words[done : done + n] = self._words[at : at + n]
            self._order_memory()
            done, read = done + n, read + n
            self._marks[self.rank] = read
        return words

    def _order_memory(self) -> None:
        """Accesses before this happen before those after it, also on processors that reorder them.

        Taking a lock keeps later accesses after it, releasing one keeps earlier accesses before it; it
        takes both, in the order release and take, to keep them apart.
        """
        with self._fence:
            pass
        with self._fence:
            pass

    def send(self, method: str, payload: np.ndarray, pause: Callable[[], None]) -> None:
        self.write(np.array((METHODS.index(method), len(payload)), np.int32), pause)
        self.write(payload, pause)

    def receive(self) -> tuple[str, np.ndarray]:
        method, size = self.read(2).tolist()
        return METHODS[method], self.read(size)

"""Messages from rank 0 to the workers: a ring buffer in shared memory with one writer and several readers.

Owns the layout of that memory, heartbeats included. Knows nothing of processes or of the meaning of messages.
"""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import numpy as np


def backoff() -> Iterator[None]:
    """Waits between polls: 50 times not at all, since most events are microseconds away, then 50 us, then 1 ms."""
    for seconds in chain(repeat(0.0, 50), repeat(5e-5, 1950), repeat(1e-3)):
        if seconds:
            time.sleep(seconds)
        yield


class Channel:
    """One rank's end of the ring. Messages are bytes of any length.

    Counter 0 is the number of bytes written so far, counter r the number read by rank r. A byte is overwritten once
    all workers have read it, so a message longer than the ring flows through it. Rank r increments ``heartbeats[r]``.
    Each counter and each heartbeat has one writer and its own cache line.
    """

    RING_BYTES = 1 << 19
    MAX_RANKS, CACHE_LINE = 8, 64  # CACHE_LINE in bytes
    NUM_BYTES = 2 * MAX_RANKS * CACHE_LINE + RING_BYTES

    def __init__(self, memory: Any, rank: int, size: int):
        self.rank = rank
        lines = np.frombuffer(memory, np.int64, 2 * self.MAX_RANKS * self.CACHE_LINE // 8)
        self._counters, self.heartbeats = lines.reshape(2, self.MAX_RANKS, -1)[:, :size, 0]
        self.read_counters = self._counters[1:]
        self._ring = np.frombuffer(memory, np.uint8, self.RING_BYTES, offset=lines.nbytes)
        self._lock = threading.Lock()

    def send(self, message: bytes, check: Callable[[], None]) -> None:
        """Rank 0: send one message. ``check`` is called while the ring is full, and may raise."""
        data = np.frombuffer(len(message).to_bytes(8, "little") + message, np.uint8)
        done, written, pause = 0, int(self._counters[0]), backoff()
        while done < len(data):
            at = written % self.RING_BYTES
            free = self.RING_BYTES - (written - min(self.read_counters.tolist()))
            n = min(free, self.RING_BYTES - at, len(data) - done)
            if n == 0:
                check()
                next(pause)
                continue
            self._ring[at : at + n] = data[done : done + n]
            self._memory_fence()
            done, written = done + n, written + n
            self._counters[0] = written

    def receive(self) -> bytes:
        """A worker: wait for the next message."""
        return self._read(int.from_bytes(self._read(8), "little"))

    def _read(self, num_bytes: int) -> bytes:
        data, done = np.empty(num_bytes, np.uint8), 0
        read, pause = int(self._counters[self.rank]), backoff()
        while done < num_bytes:
            at = read % self.RING_BYTES
            n = min(int(self._counters[0]) - read, self.RING_BYTES - at, num_bytes - done)
            if n == 0:
                next(pause)
                continue
            self._memory_fence()
            data[done : done + n] = self._ring[at : at + n]
            self._memory_fence()
            done, read = done + n, read + n
            self._counters[self.rank] = read
        return data.tobytes()

    def _memory_fence(self) -> None:
        """Full fence, for Arm: earlier accesses stay above the release of a lock, later ones below an acquire."""
        with self._lock:
            pass
        with self._lock:
            pass

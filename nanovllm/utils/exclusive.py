"""A lock that is never waited for."""

from typing import Any

from nanovllm.errors import EngineError


class Exclusive:
    """Holds a lock, or raises EngineError if another thread does."""

    def __init__(self, lock: Any):
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise EngineError("this engine is in use by another thread; give each thread an LLM of its own.")

    def __exit__(self, *_: object) -> None:
        self._lock.release()

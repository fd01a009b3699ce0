"""The door of the engine: who may come in, and what an error or Ctrl-C inside leaves behind.

Every public method passes it, so that what stands behind need not know of threads, interrupts or the garbage collector.
"""

import gc
from typing import Any

from nanovllm.errors import EngineError

NO_GC = 1 << 30  # a threshold that is never reached


class NoFullGC:
    """Collects young objects only. A full (gen-2) collection walks every torch object, ~100 ms, and stalls the GPU."""

    _thresholds: tuple[int, int, int] | None = None

    def __enter__(self) -> None:
        thresholds = gc.get_threshold()
        if thresholds[2] != NO_GC:  # else an outer one, or another engine's thread, set it and will restore it
            self._thresholds = thresholds
            gc.set_threshold(*thresholds[:2], NO_GC)

    def __exit__(self, *_: object) -> None:
        if self._thresholds is not None:
            gc.set_threshold(*self._thresholds)


class Guard(NoFullGC):
    """The use of an engine by this thread alone, which may enter it again; no full garbage collection meanwhile.

    Args:
        engine: an ``LLMEngine``.
        is_critical: whether an error or an interrupt inside may leave requests half done, so that all are dropped.

    Raises:
        EngineError: the engine is shut down, belongs to a forked process, or another thread uses it.
    """

    def __init__(self, engine: Any, is_critical: bool = False):
        self._engine, self._is_critical = engine, is_critical

    def __enter__(self) -> None:
        self._engine._require_running()
        if not self._engine._lock.acquire(blocking=False):
            raise EngineError("this engine is in use by another thread; give each thread an LLM of its own.")
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is not None and self._is_critical:
                self._engine._drop_all()
        finally:
            super().__exit__()
            self._engine._lock.release()

"""The lock of the engine's public methods, and the clean-up after an error or Ctrl-C in one of them.

Every public method that makes, runs or aborts requests holds it, so other code knows nothing of threads, interrupts or
garbage collection. Any thread, or a finalizer during a step, may abandon requests: the step's end aborts them.
"""

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from nanovllm.errors import EngineError

NO_GC = 1 << 30  # a threshold that no count reaches
F = TypeVar("F", bound=Callable[..., Any])


class Guard:
    """The use of an engine by this thread alone, which may enter it again.

    Meanwhile no full (gen-2) collection runs: it would walk every torch object, ~100 ms, and stall the GPU.

    Args:
        engine: an ``LLMEngine``; None while it is made.

    Raises:
        EngineError: it is shut down or a forked process's, another thread uses it, or its own logits processor enters.
    """

    def __init__(self, engine: Any = None):
        self._engine = engine

    def __enter__(self) -> None:
        if self._engine is not None:
            self._engine._require_running()
            self._engine._token_processors.require_outside()
            with self._engine._aborting:  # another thread may hold the lock to abort requests
                is_free = self._engine._lock.acquire(blocking=False)
            if not is_free:
                raise EngineError("this engine is in use by another thread; give each thread an LLM of its own.")
        self._thresholds = gc.get_threshold()
        if self._thresholds[2] != NO_GC:  # else an outer guard or another engine's thread has set it and restores it
            gc.set_threshold(*self._thresholds[:2], NO_GC)

    def __exit__(self, *_: object) -> None:
        if self._thresholds[2] != NO_GC:
            gc.set_threshold(*self._thresholds)
        if self._engine is not None:
            release(self._engine)


def release(engine: Any) -> None:
    """Give the lock back; then abort requests that were abandoned after the last step, while it was taken."""
    engine._lock.release()
    if engine._abandoned:
        abandon(engine, ())


def all_or_nothing(method: F) -> F:
    """Decorate a method that an error or an interrupt may leave half done: it then drops all requests."""

    @functools.wraps(method)
    def guarded(engine: Any, *args: Any) -> Any:
        is_inner = engine._is_changing
        try:
            engine._is_changing = True
            return method(engine, *args)
        except BaseException as error:
            engine._drop_all()
            if isinstance(error, Exception) and not engine._why_shut_down:  # perhaps exit() ran in a signal handler
                engine._require_running()
            raise
        finally:
            engine._is_changing = is_inner
            if engine._abandoned and not is_inner:
                engine._abort_abandoned()

    return guarded  # type: ignore[return-value]


def abandon(engine: Any, requests: Iterable[Any]) -> None:
    """Abort the unfinished ones of some requests: now, or at the end of the step that this or another thread takes.

    Any thread may call it, and a finalizer between any two instructions. It waits for no step.
    """
    engine._abandoned.extend(requests)
    with engine._aborting:
        if engine._lock.acquire(blocking=False):
            try:
                if not engine._is_changing:
                    engine._abort_abandoned()
            finally:
                engine._lock.release()

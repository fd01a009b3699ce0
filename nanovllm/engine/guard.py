"""Which thread uses an engine, and the clean-up after an error or Ctrl-C in one of its methods.

Every public method that makes, runs or aborts requests passes a ``Guard``, so other code knows nothing of threads,
interrupts or garbage collection. Any thread, or a finalizer during a step, may abandon requests: they wait in a list
until the step is over.
"""

import functools
import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from threading import RLock, get_ident
from typing import Any, TypeVar

from nanovllm.errors import EngineError

NO_GC = 1 << 30  # a threshold that no count reaches
NOBODY: Callable[[], Any] = weakref.ref(set())  # dead at once
F = TypeVar("F", bound=Callable[..., Any])


class InUseError(EngineError):
    """Another thread uses the engine."""


class Access:
    """Access to one engine.

    Attributes:
        user: weak reference to the outermost ``Guard``. It dies with the guard, even if Ctrl-C strikes at its edge.
        lock: held while the user changes, and while requests are aborted without one; never during a step.
        abandoned: requests to abort between two steps.
    """

    def __init__(self) -> None:
        self.user: Callable[[], Guard | None] = NOBODY
        self.lock = RLock()
        self.abandoned: deque[Any] = deque()


class Guard:
    """The use of an engine by this thread alone, which may enter it again.

    Meanwhile no full (gen-2) collection runs: it would walk every torch object, ~100 ms, and stall the GPU.

    Args:
        engine: an ``LLMEngine``; None while it is made.

    Raises:
        EngineError: it is shut down or a forked process's, another thread uses it, or its own logits processor enters.
    """

    pauses: Callable[[], "Guard | None"] = NOBODY  # the guard that has paused full collections
    thresholds = gc.get_threshold()  # before that; a guard that Ctrl-C ended at its edge leaves them to the next one

    def __init__(self, engine: Any = None):
        self._engine, self.thread = engine, get_ident()
        self.is_changing = False  # whether an ``all_or_nothing`` method is running

    def __enter__(self) -> None:
        if self._engine is not None:
            self._engine.require_running()
            self._engine.token_processors.require_outside()
            access = self._engine.access
            with access.lock:
                if (user := access.user()) is None:
                    access.user = weakref.ref(self)
                elif user.thread != self.thread:
                    raise InUseError("this engine is in use by another thread; give each thread an LLM of its own.")
        if Guard.pauses() is None:  # else an outer guard, or another engine's thread, has paused it
            thresholds = gc.get_threshold()
            if thresholds[2] != NO_GC:
                Guard.thresholds = thresholds
            Guard.pauses = weakref.ref(self)
            gc.set_threshold(*thresholds[:2], NO_GC)

    def __exit__(self, *_: object) -> None:
        if Guard.pauses() is self:
            Guard.pauses = NOBODY
            gc.set_threshold(*Guard.thresholds)
        if self._engine is not None and self._engine.access.user() is self:
            self._engine.access.user = NOBODY
            if self._engine.access.abandoned:
                abandon(self._engine, ())


def abandon(engine: Any, requests: Iterable[Any]) -> None:
    """Abort the unfinished ones of some requests: now, or between two steps where a step is running.

    Any thread may call it, and a finalizer between any two instructions. It waits for no step.
    """
    access = engine.access
    access.abandoned.extend(requests)
    with access.lock:
        user = access.user() or Guard()
        if user.thread == get_ident() and not user.is_changing:
            outer, access.user = access.user, weakref.ref(user)
            try:
                engine.abort_abandoned()
            finally:
                access.user = outer


def all_or_nothing(method: F) -> F:
    """Decorate a method that an error or an interrupt may leave half done: it then drops all requests."""

    @functools.wraps(method)
    def guarded(engine: Any, *args: Any) -> Any:
        user = engine.access.user() or Guard()
        is_inner, user.is_changing = user.is_changing, True
        try:
            return method(engine, *args)
        except BaseException as error:
            engine.drop_all()
            if isinstance(error, Exception) and not engine.why_shut_down:  # perhaps exit() ran in a signal handler
                engine.require_running()
            raise
        finally:
            user.is_changing = is_inner

    return guarded  # type: ignore[return-value]

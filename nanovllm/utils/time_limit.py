"""A limit for the time of Python code that somebody else wrote, such as a checkpoint's chat template.

Owns the watch and its exception. Only CPython's interpreter looks for it, so one long call of a C function is not cut.
"""

import _thread
import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TimeLimitError(BaseException):
    """The code within ``time_limit`` took longer. Its ``except Exception`` does not stop this."""


class Watch(threading.Timer):
    """A timer that starts at once: ``Thread.start`` waits until the thread runs, as long as a chat takes to render."""

    def start(self) -> None:
        _thread.start_new_thread(self.run, ())


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeLimitError`` in the code within, in this thread, ``seconds`` after its start; else at its end."""
    lock, is_over, is_late, is_raised = threading.Lock(), False, False, False
    thread = ctypes.c_ulong(threading.get_ident())

    def expire() -> None:
        nonlocal is_late
        with lock:
            if not is_over:
                is_late = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeLimitError))

    watch = Watch(seconds, expire)
    try:
        watch.start()
        yield
    except TimeLimitError:
        is_raised = True
        raise
    finally:
        with lock:
            is_over = True
        watch.cancel()
        if is_late and not is_raised:
            # Not taken back: in CPython 3.11 that leaves the interpreter checking for ever, and a traced one hangs.
            for _ in range(100):
                pass  # a pending exception is raised here; if none is, the code within has swallowed it
            raise TimeLimitError

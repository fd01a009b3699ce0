"""A limit for the time of Python code that somebody else wrote, such as a checkpoint's chat template.

Owns the watch and its exception. Only CPython's interpreter looks for it, so one long call of a C function is not cut.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TimeLimitError(BaseException):
    """The code within ``time_limit`` took longer. Its ``except Exception`` does not stop this."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeLimitError`` in the code within, in this thread, ``seconds`` after its start. Not to be nested."""
    lock, is_over = threading.Lock(), False
    thread = ctypes.c_ulong(threading.get_ident())
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def expire() -> None:
        with lock:
            if not is_over:
                interrupt(thread, ctypes.py_object(TimeLimitError))

    watch = threading.Timer(seconds, expire)
    watch.daemon = True
    try:
        watch.start()
        yield
    finally:
        with lock:
            is_over = True
            interrupt(thread, None)  # raised already, or it would be behind this block
        watch.cancel()

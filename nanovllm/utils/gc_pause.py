"""Turns full garbage collections off while the GPU must not wait for the host."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NO_GC = 1 << 30  # a threshold that is never reached


@contextmanager
def no_full_gc() -> Iterator[None]:
    """Collect young objects only. A full (gen-2) collection walks every torch object, ~100 ms, and stalls the GPU."""
    gen0, gen1, gen2 = gc.get_threshold()
    if gen2 == NO_GC:  # another engine's thread set it and will restore it
        yield
        return
    try:
        gc.set_threshold(gen0, gen1, NO_GC)
        yield
    finally:
        gc.set_threshold(gen0, gen1, gen2)

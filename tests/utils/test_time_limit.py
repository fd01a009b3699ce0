"""The time limit of other people's code."""

import threading
from contextlib import suppress
from time import perf_counter, sleep
from typing import ClassVar

import pytest
from helpers import run_python

from nanovllm.utils.time_limit import TimeLimitError, time_limit


def test_code_that_catches_exceptions_is_cut():
    start = perf_counter()
    with pytest.raises(TimeLimitError), time_limit(0.1):
        while perf_counter() < start + 60:
            with suppress(Exception):
                sum(range(1000))


class ByHand(threading.Timer):
    """A timer that expires when the test says so."""

    made: ClassVar[list] = []

    def start(self):
        self.made.append(self)


def test_nothing_is_raised_behind_the_block(monkeypatch):
    monkeypatch.setattr("nanovllm.utils.time_limit.Watch", ByHand)
    with time_limit(30):
        pass
    ByHand.made[-1].function()
    sum(range(1000))
    assert ByHand.made[-1].finished.is_set(), "its thread would wait for 30 s"


@pytest.mark.parametrize("error", [None, KeyError])
def test_an_error_that_comes_late_is_raised_at_the_end(error, monkeypatch):
    """It expired at the last line of the code within."""
    monkeypatch.setattr("nanovllm.utils.time_limit.Watch", ByHand)
    with pytest.raises(TimeLimitError), time_limit(30):
        ByHand.made[-1].function()
        if error is not None:
            raise error
    sum(range(1000))


def test_a_swallowed_error_is_raised_at_the_end():
    start = perf_counter()
    with pytest.raises(TimeLimitError), time_limit(0.05), suppress(TimeLimitError):
        while perf_counter() < start + 60:
            pass


@pytest.mark.parametrize("seconds", [30, 0.05])
def test_the_interpreter_is_as_before(seconds):
    """Something was left pending in it: all later code ran slower, and under a debugger it hung."""
    code = f"""
import sys
from nanovllm.utils.time_limit import TimeLimitError, time_limit
try:
    with time_limit({seconds}):
        while {seconds} < 1:
            pass
except TimeLimitError:
    pass
def trace(frame, event, arg):
    return trace
def traced():
    return [i for i in range(10)]
sys.settrace(trace)
traced()
"""
    run_python("-c", code, timeout=60)


def test_an_interrupt_at_the_start_leaves_no_timer(monkeypatch):
    class Interrupted(ByHand):
        def start(self):
            super().start()
            raise KeyboardInterrupt

    monkeypatch.setattr("nanovllm.utils.time_limit.Watch", Interrupted)
    with pytest.raises(KeyboardInterrupt), time_limit(30):
        pass
    assert ByHand.made[-1].finished.is_set()


def test_an_error_of_the_code_within_is_its_own():
    with pytest.raises(KeyError), time_limit(10):
        raise KeyError


def test_other_threads_go_on():
    results = []

    def work():
        with time_limit(30):
            sleep(0.3)
            results.append("done")

    other = threading.Thread(target=work)
    other.start()
    with pytest.raises(TimeLimitError), time_limit(0.05):
        while True:
            pass
    other.join()
    assert results == ["done"]

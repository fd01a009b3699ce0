"""The time limit of other people's code."""

import threading
from contextlib import suppress
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import ClassVar

import pytest

from nanovllm.utils import time_limit as time_limit_module
from nanovllm.utils.time_limit import TimeLimitError, time_limit


def test_a_loop_is_cut():
    start = perf_counter()
    with pytest.raises(TimeLimitError), time_limit(0.1):
        while perf_counter() < start + 60:
            pass
    assert perf_counter() < start + 30


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
    monkeypatch.setattr(threading, "Timer", ByHand)
    with time_limit(30):
        pass
    ByHand.made[-1].function()
    sum(range(1000))
    assert ByHand.made[-1].finished.is_set(), "its thread would wait for 30 s"


def test_an_error_that_comes_too_late_is_taken_back(monkeypatch):
    """It expired when the code within was done."""
    monkeypatch.setattr(threading, "Timer", ByHand)
    cleared = []
    interrupt = SimpleNamespace(PyThreadState_SetAsyncExc=lambda thread, error: cleared.append(error))
    monkeypatch.setattr(time_limit_module.ctypes, "pythonapi", interrupt)
    with time_limit(30):
        ByHand.made[-1].function()
    assert cleared[0].value is TimeLimitError and cleared[1] is None


def test_an_interrupt_at_the_start_leaves_no_timer(monkeypatch):
    class Interrupted(ByHand):
        def start(self):
            super().start()
            raise KeyboardInterrupt

    monkeypatch.setattr(threading, "Timer", Interrupted)
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

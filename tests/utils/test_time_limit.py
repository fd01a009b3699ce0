import threading
from time import perf_counter, sleep

import pytest

from nanovllm.utils.time_limit import TimeLimitError, time_limit


def test_a_loop_is_cut():
    start = perf_counter()
    with pytest.raises(TimeLimitError), time_limit(0.1):
        while perf_counter() < start + 60:
            pass
    assert perf_counter() < start + 30


def test_nothing_is_raised_behind_the_block():
    for _ in range(20):
        with time_limit(0.02):
            pass
    sleep(0.1)
    sum(range(1000))
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


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

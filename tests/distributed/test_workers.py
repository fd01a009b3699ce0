"""Worker processes without a model: every way to fail ends in a WorkerError of the right rank, and nothing is left.

``tests/runner/test_worker.py`` provokes the same failures in an engine at work.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import worker_mains

from nanovllm.distributed import workers as workers_module
from nanovllm.distributed.workers import Workers, hidden_main_module
from nanovllm.errors import WorkerError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

LIMIT_S = 10.0  # from a failure to its WorkerError, everything torn down


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(target) -> Workers. In the end no process, shared memory or directory may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(workers_module, "START_METHOD", "spawn")
    made = []

    def start(target, size=2):
        made.append(Workers(size, target))
        return made[-1]

    yield start
    for workers in made:
        workers.dismiss()
        assert workers.join()
        assert not any(process.is_alive() for process in workers.processes.values())
    assert os.listdir(tmp_path) == []
    if os.path.isdir("/dev/shm"):
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"pym-{os.getpid()}-")]


@contextmanager
def failure(rank, text):
    start = time.monotonic()
    with pytest.raises(WorkerError, match=f"rank {rank} failed") as caught:
        yield
    assert time.monotonic() - start < LIMIT_S
    assert caught.value.rank == rank and text in caught.value.worker_traceback


def idle(workers):
    """Rank 0 at work that never ends by itself."""
    with workers.guard():
        workers.wait_until(lambda: False)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (worker_mains.raises, "ValueError: no good"),
        (worker_mains.is_killed, "SIGKILL"),
        (worker_mains.is_silent, "no sign of life"),
        (worker_mains.never_up, "stalled at start"),
    ],
)
def test_failures_at_start(start, monkeypatch, target, text):
    monkeypatch.setattr(workers_module, "SILENCE_LIMIT_S", 1.5)
    monkeypatch.setattr(workers_module, "UP_TIMEOUT_S", 1.0 if target is worker_mains.never_up else 60.0)
    with failure(1, text):
        start(target).wait_for("ready")


def test_workers_leave_when_dismissed(start):
    workers = start(worker_mains.serve, size=3)
    workers.wait_for("ready")
    for _ in range(2):
        workers.dismiss()
        assert workers.join()
    assert workers.failure is None
    assert [process.exitcode for process in workers.processes.values()] == [0, 0]


@pytest.mark.parametrize(
    ("harm", "rank", "text"),
    [(lambda workers: workers.send(2, 77), 2, "ValueError: code 77"),
     (lambda workers: workers.processes[2].kill(), 2, "SIGKILL"),
     (lambda workers: os.kill(workers.processes[1].pid, signal.SIGSTOP), 1, "no sign of life")],
    ids=["raises", "is killed", "is stopped"],
)  # fmt: skip
def test_failures_at_work(start, monkeypatch, harm, rank, text):
    workers = start(worker_mains.serve, size=3)
    workers.wait_for("ready")
    if "life" in text:
        monkeypatch.setattr(workers_module, "SILENCE_LIMIT_S", 1.5)
    harm(workers)
    for use in (idle, lambda workers: workers.send(1, 0)):
        with failure(rank, text):
            use(workers)


def test_a_worker_that_does_not_read(start, monkeypatch):
    workers = start(worker_mains.never_up, size=3)
    monkeypatch.setattr(workers_module, "STEP_TIMEOUT_S", 0.2)
    with failure(1, "nothing has moved for 0 s"):
        idle(workers)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_dismissal_that_is_not_read(start, monkeypatch, signal_number):
    """A dead or stopped worker was asked to leave, and rank 0's device waited for it for ever, with all its memory."""
    monkeypatch.setattr(workers_module, "EXIT_TIMEOUT_S", 1.0)
    workers, aborted = start(worker_mains.serve), []
    workers.wait_for("ready")
    # a device that waits for the worker until the group is aborted
    workers.tp = SimpleNamespace(drain=lambda timeout_s: bool(aborted), abort=lambda: aborted.append(True))
    os.kill(workers.processes[1].pid, signal_number)
    workers.dismiss()
    assert workers.join() and aborted
    assert workers.processes[1].exitcode == -signal.SIGKILL


def test_starts_in_two_threads_leave_the_main_module_in_its_place():
    """Of two engines started in two threads, the second one hid the first one's stand-in, and put it back for good:
    nothing that the user's script defines could be pickled from then on."""
    main = sys.modules["__main__"]
    hidden = [threading.Event() for _ in range(2)]
    may_end = [threading.Event() for _ in range(2)]

    def hide(i):
        with hidden_main_module():
            hidden[i].set()
            may_end[i].wait(10)

    threads = [threading.Thread(target=hide, args=(i,)) for i in range(2)]
    try:
        threads[0].start()
        assert hidden[0].wait(10) and sys.modules["__main__"] is not main
        threads[1].start()
        hidden[1].wait(0.3)  # must not happen before the first one ends
        for thread, event in zip(threads, may_end, strict=True):
            event.set()
            thread.join(10)
        assert sys.modules["__main__"] is main
    finally:
        sys.modules["__main__"] = main

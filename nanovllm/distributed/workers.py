"""The processes of ranks 1 to size - 1, from spawn to join. Knows nothing of their work, the ``target``.

Rank 0 is the user's process::

    rank 0 (Workers)                                      rank 1, 2, ... (Worker)
    main thread   -- Channel: messages --------------->   main thread: target
    watch thread  <- pipe: reports --------------------   main thread
                  <- heartbeats in shared memory ------   heartbeat thread, which also watches rank 0

The watch thread detects the exit of a worker, its traceback or missing heartbeats. It kills all workers and aborts the
tensor-parallel group, so that pending collectives of rank 0 return, and rank 0 raises ``WorkerError``. Nothing is left
behind: the shared memory is an unlinked file (``RawArray``), the rendezvous directory exists while all ranks meet.
torch is imported inside functions only: a worker's heartbeat starts before it imports torch.
"""

import ctypes
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.distributed.channel import Channel, backoff
from nanovllm.errors import NanoVLLMError, WorkerError

if TYPE_CHECKING:
    from nanovllm.distributed.group import TPGroup

START_METHOD = "spawn"  # a fork would inherit CUDA, and locks that nobody releases
HEARTBEAT_S = 0.5
SILENCE_LIMIT_S = 30.0  # without a heartbeat; one import can hold the GIL for long on a cold disk
UP_TIMEOUT_S = 120.0  # from spawn until torch is imported and the device opened
STEP_TIMEOUT_S = 900.0  # limit of one step or one collective, and of the time from spawn until ready
EXIT_TIMEOUT_S = 5.0  # from dismissal to SIGKILL
MAIN_MODULE_LOCK = threading.Lock()


class Workers:
    """The workers as seen by rank 0. A thread spawns and watches them (private methods); the constructor does not wait.

    Args:
        size: number of ranks, rank 0 included.
        target: called in each worker as ``target(worker: Worker, *args)``. Its module must not import torch.
    """

    def __init__(self, size: int, target: Callable[..., None], *args: Any):
        self.failure: WorkerError | None = None  # the error that ended the workers, set by the watch thread
        self.processes: dict[int, Any] = {}  # worker processes by rank
        self.tp: TPGroup | None = None  # rank 0's group, once connected
        self.rank, self._size, self._target, self._args = 0, size, target, args
        self._owner = os.getpid()
        self._busy = False  # whether collective work was begun and not completed
        self._context: Any = multiprocessing.get_context(START_METHOD)
        self._memory = self._context.RawArray(ctypes.c_char, Channel.NUM_BYTES)
        self._channel = Channel(self._memory, 0, size)
        self._directory = os.path.join(tempfile.gettempdir(), f"nanovllm-{os.urandom(8).hex()}")
        self._pipes: dict[int, connection.Connection] = {}
        self._reports: dict[str, dict[int, Any]] = defaultdict(dict)  # reports by kind and rank, see ``Worker.report``
        self._grace_s: float | None = None  # seconds until the workers are killed; 0 if nobody told them to leave
        self._thread = threading.Thread(target=self._watch, name="nanovllm-workers", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the WorkerError, if there is one."""
        if self.failure is not None:
            raise self.failure

    @property
    def are_lost(self) -> bool:
        """Whether one failed, or collective work was begun and not completed."""
        return self._busy or self.failure is not None

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll ``condition``. Raises WorkerError if a worker fails meanwhile, or after STEP_TIMEOUT_S."""
        pause, limit = backoff(), time.monotonic() + STEP_TIMEOUT_S
        while not condition():
            self.check()
            if time.monotonic() > limit:
                slowest = 1 + int(self._channel.read_counters.argmin())
                raise WorkerError(slowest, f"nothing has moved for {STEP_TIMEOUT_S:.0f} s; it seems to be stuck.")
            next(pause)
        self.check()

    def wait_for(self, kind: str) -> None:
        """Wait until every worker has made this report. The watch thread limits the wait for "up" and "ready"."""
        self.wait_until(lambda: len(self._reports[kind]) == self._size - 1)

    def wait_for_answers(self) -> list[Any]:
        """Every worker's answer to the last message."""
        self.wait_for("answer")
        return list(self._reports.pop("answer").values())

    def connect(self, device: Any) -> "TPGroup":
        """Connect rank 0. On a thread: a rendezvous with a rank that has died cannot be interrupted."""
        from nanovllm.distributed.group import TPGroup, on_daemon_thread

        self.wait_for("up")
        os.mkdir(self._directory, 0o700)  # not before: now each worker removes it should this process be killed
        self.send("meet")
        rendezvous = 0, self._size, device, self._directory, STEP_TIMEOUT_S
        connected = on_daemon_thread("nanovllm-connect", TPGroup.connect, *rendezvous)
        self.wait_until(connected.done)
        self.tp = connected.result()
        return self.tp

    def join_group(self) -> None:
        """Wait until all ranks are connected."""
        assert self.tp is not None
        self.tp.join(self.wait_until)
        shutil.rmtree(self._directory, ignore_errors=True)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Context of collective work. Any exception is fatal, and is re-raised as WorkerError of the rank at fault."""
        self._busy = True
        try:
            yield
        except NanoVLLMError:
            raise
        except Exception as error:
            text = traceback.format_exc()
            limit = time.monotonic() + (3.0 if isinstance(error, RuntimeError) else 0.0)
            while self.failure is None and time.monotonic() < limit:
                time.sleep(0.01)  # a collective fails before the watch thread knows which worker died
            raise (self.failure or WorkerError(0, text)) from error
        self._busy = False

    def send(self, *message: Any) -> None:
        """Send one message, pickled, to every worker; none at all tells them to leave."""
        self.check()
        self._channel.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL) if message else b"", self.check)

    def dismiss(self, kill: bool = False) -> None:
        """Tell the workers to leave; in collective work, or with ``kill``, have them killed. Does not wait."""
        if os.getpid() != self._owner or self._grace_s is not None:
            return  # a forked child does not own the workers
        grace_s = 0.0
        try:
            with suppress(WorkerError):
                if not (self._busy or kill):
                    self.send()
                    grace_s = EXIT_TIMEOUT_S
        finally:  # Ctrl-C may strike while sending
            self._grace_s = grace_s

    def join(self) -> bool:
        """Wait until all workers are gone. False if rank 0's device hangs: to free its memory would block."""
        idle = self.tp is None or self.tp.drain(2 * EXIT_TIMEOUT_S)
        if os.getpid() == self._owner:
            self._thread.join(4 * EXIT_TIMEOUT_S)
            if not idle and self.tp is not None:
                self.tp.abort()  # a collective waits for a worker that did not read its dismissal and was killed
                idle = self.tp.drain(EXIT_TIMEOUT_S)
        return idle

    def _watch(self) -> None:
        try:
            self._spawn()
            self.failure = self._watch_until_end()
        except BaseException:
            self.failure = WorkerError(0, f"the watch over the workers failed:\n{traceback.format_exc()}")
        limit = time.monotonic() + (self._grace_s or 0.0)
        for process in self.processes.values():
            process.join(max(0.0, limit - time.monotonic()))
            process.kill()
        for process in self.processes.values():
            process.join(EXIT_TIMEOUT_S)
        for pipe in self._pipes.values():
            pipe.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self.tp is not None and not self._grace_s:
            self.tp.abort()

    def _spawn(self) -> None:
        if hasattr(signal, "pthread_sigmask"):  # inherited: a terminal sends Ctrl-C to every process
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for rank in range(1, self._size):
            self._pipes[rank], pipe = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=_run_worker, name=f"nanovllm-rank-{rank}", daemon=True,
                args=(self._target, self._args, rank, self._size, self._memory, pipe, self._directory),
            )  # fmt: skip
            with hidden_main_module():
                process.start()
            # multiprocessing terminates known daemons at exit, also at the exit of a forked child
            getattr(multiprocessing.process, "_children", set()).discard(process)
            self.processes[rank] = process
            pipe.close()

    def _watch_until_end(self) -> WorkerError | None:
        """The first failure; None once the workers are told to exit."""
        heartbeats, silence, starting = self._channel.heartbeats.copy(), np.zeros(self._size), 0.0
        while True:
            before = time.monotonic()
            connection.wait([*self._pipes.values(), *(p.sentinel for p in self.processes.values())], HEARTBEAT_S)
            if self._grace_s is not None:
                return None
            self._read_pipes()
            if self._reports["failed"] or not all(process.is_alive() for process in self.processes.values()):
                failure = self._first_failure()
                return None if self._grace_s else failure
            # time counts only while this thread is awake: Ctrl-Z stops it together with the workers
            awake = min(time.monotonic() - before, 2 * HEARTBEAT_S)
            starting += awake
            for kind, limit in (("up", UP_TIMEOUT_S), ("ready", STEP_TIMEOUT_S)):
                late = self.processes.keys() - self._reports[kind].keys()
                if late and starting > limit:
                    return WorkerError(min(late), f"it was not ready within {limit:.0f} s; it stalled at start.")
            silence += awake
            silence[heartbeats != self._channel.heartbeats] = 0
            heartbeats = self._channel.heartbeats.copy()
            rank = 1 + int(silence[1:].argmax())
            if silence[rank] > SILENCE_LIMIT_S:
                return WorkerError(rank, f"it has stalled: no sign of life for {SILENCE_LIMIT_S:.0f} s.")

    def _read_pipes(self) -> None:
        for rank, pipe in self._pipes.items():
            with suppress(EOFError, OSError):  # the process has ended, which its sentinel will report
                while pipe.poll():
                    kind, detail = pipe.recv()
                    self._reports[kind][rank] = detail

    def _first_failure(self) -> WorkerError:
        """The root cause: a worker that died without a traceback (it was killed), else the earliest traceback."""
        time.sleep(0.2)
        self._read_pipes()
        failed = self._reports["failed"]
        for rank, process in self.processes.items():
            if rank not in failed and not process.is_alive():
                code = process.exitcode
                how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
                return WorkerError(rank, f"the process ended without a traceback ({how}).")
        rank = min(failed, key=failed.__getitem__)
        return WorkerError(rank, failed[rank][1])


class Worker:
    """A worker process as seen by its target: its rank, the channel, and reports to rank 0."""

    def __init__(self, rank: int, size: int, memory: Any, pipe: connection.Connection, directory: str):
        self.rank, self.size = rank, size
        self.channel = Channel(memory, rank, size)
        self._pipe, self._directory = pipe, directory

    def connect(self, device: Any) -> "TPGroup":
        """Report "up" and connect. Slow work that needs no other rank comes before: from there on all ranks wait."""
        import torch

        from nanovllm.distributed.group import TPGroup

        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)  # creates the CUDA context, which takes seconds
        self.report("up")
        if self.receive() is None:  # the directory exists
            os._exit(0)
        return TPGroup.connect(self.rank, self.size, device, self._directory, STEP_TIMEOUT_S)

    def receive(self) -> tuple | None:
        """Wait for the next message of rank 0; None when this worker is to leave."""
        message = self.channel.receive()
        return pickle.loads(message) if message else None

    def report(self, kind: str, detail: Any = None) -> None:
        """Tell rank 0: "up", "ready", "answer" with the answer, or "failed" with (time, traceback).

        Once ready, the Linux kernel kills this process with its parent. The heartbeat thread does so on any system,
        after removing the rendezvous directory, but not while a blocked CUDA launch holds the GIL.
        """
        self._pipe.send((kind, detail))
        if kind == "ready" and sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def beat(self) -> None:
        """Heartbeat until rank 0 is gone, then end this process."""
        parent: Any = multiprocessing.parent_process()
        while not connection.wait([parent.sentinel], HEARTBEAT_S):
            self.channel.heartbeats[self.rank] += 1
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(1)


def _run_worker(target: Callable[..., None], args: tuple, *ends: Any) -> None:
    """Main function of a worker process. It leaves by ``os._exit``: a regular exit would join threads that wait for
    other ranks, and stop the heartbeat thread inside library code, which may abort."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    worker = Worker(*ends)
    threading.Thread(target=worker.beat, daemon=True).start()
    try:
        target(worker, *args)
    except BaseException:
        worker.report("failed", (time.time(), traceback.format_exc()))
        os._exit(1)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a service may have none
        stream.flush()
    os._exit(0)


@contextmanager
def hidden_main_module() -> Iterator[None]:
    """Hide the user's script from ``Process.start``, for one thread at a time.

    A spawned process imports the main module of its parent, which may define the target. A script without
    ``if __name__ == "__main__"`` would start an engine in every worker.
    """
    with MAIN_MODULE_LOCK:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main

"""The other ranks: spawned processes, the channel that tells them what to run, and the watch over them.

Owns the workers' lives, from before they are spawned until nothing of them is left (the channel itself is in
``channel.py``). Knows nothing of what they compute. Rank 0 is the user's process, every other rank a worker::

    rank 0                                            worker
    main thread   -- channel: what to run ------->    main thread (ModelRunner.loop)
    watch thread  <- pipe: state, or a traceback --   main thread
                  <- beats in shared memory --------  beat thread, which also watches the parent

Whatever happens to a worker, the watch thread sees it: the process ends, the pipe brings a traceback,
the beats fall silent. It then ends all workers, which makes collectives of rank 0 fail or finish, and
whatever rank 0 was waiting for becomes a ``WorkerError``. Nothing of this has a name that could be
left behind: the shared memory is a file that is deleted before it is used (``RawArray``), and the
directory in which the ranks meet is gone when they have met.

torch is imported only by the functions that need it, so that a worker beats before it imports torch.
"""

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing import connection
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.config import Config
from nanovllm.distributed.channel import Backoff, Channel
from nanovllm.errors import ConfigError, NanoVLLMError, WorkerError

if TYPE_CHECKING:
    from nanovllm.distributed.group import TPGroup
    from nanovllm.runner.model_runner import ModelRunner

BEAT_S = 0.5
SILENCE_LIMIT_S = 30.0  # without a beat; one import may hold the interpreter's lock for long on a cold disk
START_TIMEOUT_S = 120.0  # to be there, and again to be ready once rank 0 is
STEP_TIMEOUT_S = 900.0  # for one step or one collective
LEAVE_S = 5.0  # between asking the workers to leave and ending them
STARTED: weakref.WeakSet[Any] = weakref.WeakSet()  # every worker of this process
MAIN_LOCK = threading.Lock()  # whoever hid the main module is the one to put it back


# ---------------------------------------------------------------------------------------------- rank 0


def start_runner(config: Config) -> "ModelRunner":
    """Rank 0's runner. With tensor_parallel_size > 1 the other ranks are up and ready when it returns.

    Raises:
        ConfigError: more ranks than devices; nothing was spawned.
        WorkerError: a worker failed, died or took too long; all workers are gone.
    """
    import torch

    from nanovllm.runner.model_runner import ModelRunner, select_device

    size = config.tensor_parallel_size
    if size == 1:
        return ModelRunner(config)
    device = select_device(config.device, 0)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(
            f"tensor_parallel_size={size} needs {size} CUDA devices; torch sees {torch.cuda.device_count()}"
            + (f" (CUDA_VISIBLE_DEVICES={visible})." if visible is not None else ".")
        )
    workers = Workers(config)
    try:
        with workers.guard():
            runner = ModelRunner(config, workers.connect(device), workers=workers)
            workers.wait_for_state("ready")
    except BaseException:
        workers.dismiss()
        workers.join()
        if workers.group is not None:
            workers.group.close()
        raise
    return runner


class Workers:
    """The processes of ranks 1 to n-1, as rank 0 sees them.

    Attributes:
        failure: what ended them, as soon as it is known.
    """

    def __init__(self, config: Config):
        self.failure: WorkerError | None = None
        self.group: TPGroup | None = None
        self._config = config
        self._size = config.tensor_parallel_size
        self._owner = os.getpid()
        self._busy = False  # a call has reached some ranks, and rank 0 has not come to its end
        self._context = multiprocessing.get_context("spawn")
        self._memory = self._context.RawArray(ctypes.c_char, Channel.NUM_BYTES)
        self._channel = Channel(self._memory, 0, self._size)
        self._directory = tempfile.mkdtemp(prefix="nanovllm-")
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, connection.Connection] = {}
        self._states: dict[int, str] = {}
        self._tracebacks: list[tuple[float, int, str]] = []  # time, rank, text
        self._leaving = threading.Event()  # the workers were asked to leave
        self._killing = threading.Event()  # they are not worth asking
        self._thread = threading.Thread(target=self._watch, name="nanovllm-workers", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for rank 0's main thread

    def check(self) -> None:
        """Raise the WorkerError, if there is one."""
        if self.failure is not None:
            raise self.failure

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait without ever being blocked; raises WorkerError if a worker fails or nothing happens for very long."""
        pause, limit = Backoff(), time.monotonic() + STEP_TIMEOUT_S
        while not condition():
            self.check()
            if time.monotonic() > limit:
                slowest = 1 + int(self._channel.readers.argmin())
                raise WorkerError(slowest, f"nothing has moved for {STEP_TIMEOUT_S:.0f} s; it seems to be stuck.")
            pause()
        self.check()

    def wait_for_state(self, state: str) -> None:
        """Wait until every worker has reported ``state``: "here" or "ready"."""
        limit = time.monotonic() + START_TIMEOUT_S
        while True:
            late = [rank for rank in range(1, self._size) if self._states.get(rank) != state]
            self.check()
            if not late:
                return
            if time.monotonic() > limit:
                raise WorkerError(late[0], f"it was not {state} within {START_TIMEOUT_S:.0f} s; it stalled at start.")
            time.sleep(0.01)

    def connect(self, device: Any) -> "TPGroup":
        """Meet the workers. On a thread of its own: what waits in there for a rank that has died cannot be woken."""
        from nanovllm.distributed.group import TPGroup

        self.wait_for_state("here")
        met: Future = Future()
        store_path = os.path.join(self._directory, "store")
        arguments = (met, TPGroup.connect, 0, self._size, device, store_path, STEP_TIMEOUT_S)
        threading.Thread(target=_settle, args=arguments, name="nanovllm-connect", daemon=True).start()
        self.wait_until(met.done)
        self.group = met.result()
        shutil.rmtree(self._directory, ignore_errors=True)
        return met.result()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What rank 0 does together with the workers. An error in here ends the engine, so it says whose it was."""
        self._busy = True
        try:
            yield
        except NanoVLLMError:
            raise
        except Exception as error:
            text = traceback.format_exc()
            limit = time.monotonic() + (3.0 if isinstance(error, RuntimeError) else 0.0)
            while self.failure is None and time.monotonic() < limit:
                time.sleep(0.01)  # a collective that fails hears of a dead worker before the watch thread does
            raise (self.failure or WorkerError(0, text)) from error
        self._busy = False

    def send(self, method: str, *args: np.ndarray) -> None:
        """Have every worker run a method; with no argument, or with one array of int32."""
        pause = Backoff()

        def pause_and_check() -> None:
            self.check()
            pause()

        self.check()
        self._channel.send(method, args[0] if args else np.empty(0, np.int32), pause_and_check)

    def dismiss(self) -> None:
        """Ask the workers to leave, or end them if they may not hear it; does not wait."""
        if os.getpid() != self._owner or self._leaving.is_set() or self._killing.is_set():
            return  # in a forked copy of the process they are not ours
        try:
            if self._busy:
                self._killing.set()
            else:
                self.send("exit")
                self._leaving.set()
        except WorkerError:
            self._killing.set()

    def join(self) -> bool:
        """Return when nothing is left of the workers: whether rank 0's device is idle, too."""
        idle = self.group is None or self.group.drain(2 * LEAVE_S)
        if os.getpid() == self._owner:
            self._thread.join(4 * LEAVE_S)
            if not idle and self.group is not None:
                self.group.abort()  # it waits for a rank that did not hear that it should leave, and is gone by now
                idle = self.group.drain(LEAVE_S)
        return idle

    # ------------------------------------------------------------ the watch thread

    def _watch(self) -> None:
        try:
            self._spawn()
            self.failure = self._watch_until_end()
        except BaseException:
            self.failure = WorkerError(0, f"the watch over the workers failed:\n{traceback.format_exc()}")
        patience = time.monotonic() + (LEAVE_S if self.failure is None and not self._killing.is_set() else 0.0)
        for process in self._processes.values():
            process.join(max(0.0, patience - time.monotonic()))
            process.kill()
        for process in self._processes.values():
            process.join(LEAVE_S)
        for pipe in self._pipes.values():
            pipe.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self.group is not None and not self._leaving.is_set():
            self.group.abort()

    def _spawn(self) -> None:
        if hasattr(signal, "pthread_sigmask"):  # inherited: Ctrl-C reaches every process of a terminal
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for rank in range(1, self._size):
            ours, theirs = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=worker_main,
                args=(rank, self._config, self._memory, theirs, self._directory),
                name=f"nanovllm-rank-{rank}",
                daemon=True,
            )
            with _without_main_module():
                process.start()
            STARTED.add(process)
            theirs.close()
            self._processes[rank], self._pipes[rank] = process, ours

    def _watch_until_end(self) -> WorkerError | None:
        """The first failure; None when the workers were asked to leave or are to be ended."""
        beats, silence, starting = self._channel.beats.copy(), np.zeros(self._size), 0.0
        while True:
            before = time.monotonic()
            connection.wait([*self._pipes.values(), *(p.sentinel for p in self._processes.values())], BEAT_S)
            if self._leaving.is_set() or self._killing.is_set():
                return None
            self._read_pipes()
            gone = [rank for rank, process in self._processes.items() if not process.is_alive()]
            if gone or self._tracebacks:
                failure = self._first_failure()
                return None if self._leaving.is_set() else failure
            # counted in time that this thread was awake: Ctrl-Z stops it together with the workers
            awake = min(time.monotonic() - before, 2 * BEAT_S)
            starting += awake
            late = [rank for rank in self._processes if self._states.get(rank) != "ready"]
            if late and starting > STEP_TIMEOUT_S:
                return WorkerError(late[0], f"it was not ready within {STEP_TIMEOUT_S:.0f} s; it stalled at start.")
            silence += awake
            silence[beats != self._channel.beats] = 0
            beats = self._channel.beats.copy()
            rank = 1 + int(silence[1:].argmax())
            if silence[rank] > SILENCE_LIMIT_S:
                return WorkerError(rank, f"it has stalled: no sign of life for {SILENCE_LIMIT_S:.0f} s.")

    def _read_pipes(self) -> None:
        for rank, pipe in list(self._pipes.items()):
            try:
                while pipe.poll():
                    state, *details = pipe.recv()
                    self._states[rank] = state
                    if state == "failed":
                        self._tracebacks.append((details[0], rank, details[1]))
            except (EOFError, OSError):
                self._pipes.pop(rank).close()

    def _first_failure(self) -> WorkerError:
        """Who failed first: others fail in its wake. One that ended without a word was killed, and never a follower."""
        time.sleep(0.2)
        self._read_pipes()
        told = {rank for _, rank, _ in self._tracebacks}
        for rank, process in self._processes.items():
            if rank not in told and not process.is_alive():
                code = process.exitcode
                how = f"exit code {code}" if code is None or code >= 0 else f"killed by {signal.Signals(-code).name}"
                return WorkerError(rank, f"the process ended without a traceback ({how}).")
        _, rank, text = min(self._tracebacks)
        return WorkerError(rank, text)


def _settle(future: Future, function: Callable, *args: Any) -> None:
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)


def _disown_workers() -> None:
    """In a forked copy of the process: ``multiprocessing`` ends the daemons it knows of when a process ends."""
    getattr(multiprocessing.process, "_children", set()).difference_update(STARTED)
    STARTED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_workers)


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide the user's script from ``Process.start``.

    A spawned process otherwise runs the script again, as a module, in case the target lives there; a
    script without ``if __name__ == "__main__"`` would start an engine in every worker. Ours lives here.
    One at a time: of two engines that start in two threads, the second would take the first one's stand-in for the
    script, and leave it in its place.
    """
    with MAIN_LOCK:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


# ---------------------------------------------------------------------------------------------- a worker


def worker_main(rank: int, config: Config, memory: Any, pipe: connection.Connection, directory: str) -> None:
    """The life of a worker: meet the others, build this rank's runner, do what rank 0 says until it says exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0 to handle
    channel = Channel(memory, rank, config.tensor_parallel_size)
    threading.Thread(target=_beat, args=(channel, directory), daemon=True).start()
    try:
        import torch

        from nanovllm.distributed.group import TPGroup
        from nanovllm.runner.model_runner import ModelRunner, select_device

        device = select_device(config.device, rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)  # the slow part of meeting, done before anybody waits
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.tensor_parallel_size))
        pipe.send(("here",))
        store_path = os.path.join(directory, "store")
        group = TPGroup.connect(rank, config.tensor_parallel_size, device, store_path, STEP_TIMEOUT_S)
        runner = ModelRunner(config, group, channel=channel)
        pipe.send(("ready",))
        _die_with_parent()
        runner.loop()
    except BaseException:
        pipe.send(("failed", time.time(), traceback.format_exc()))
        pipe.close()
        os._exit(1)  # an ordinary end would wait for whatever waits for the other ranks
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an ordinary end stops the beat thread wherever it is, and now and then libraries abort over that


def _beat(channel: Channel, directory: str) -> None:
    """Show that this process is alive, and end it when the parent is not."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while not connection.wait([parent.sentinel], BEAT_S):
        channel.beats[channel.rank] += 1
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def _die_with_parent() -> None:
    """On Linux the kernel ends this process with its parent, or with the parent's thread that started it.

    The beat thread does the same anywhere, but not while a CUDA launch that waits for a lost rank holds the
    interpreter's lock.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

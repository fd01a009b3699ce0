"""Compiles Triton kernels in processes of their own during a first start; threads compile one by one, for the GIL.

Owns the server process, its protocol, and the record of what was compiled before. The server imports torch, Triton and
the kernels while the engine's process imports torch. It has one thread and no CUDA context, so it may fork: each child
compiles one kernel into Triton's disk cache, where the engine's process finds it. What fails here is compiled there.

Protocol: the server's standard input is a socket. It sends a byte when it is ready. For each kernel it receives one end
of a socket pair, which brings the pickled request and takes the answer when the kernel is cached; the pair is closed
without an answer if that failed. When the standard input ends, the engine's process needs nothing more, or is dead.
"""

import gc
import glob
import hashlib
import io
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module, metadata
from operator import attrgetter
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.config import Config

LOGGER = logging.getLogger("nanovllm")
ANSWER = b"cached"
TIMEOUT_S = 60.0  # for a kernel, and for the kernels of another process
MIN_KERNELS = 8  # threads compile fewer in less time than a server needs to start
MAX_CHILDREN = 16  # at once
PACKAGE = Path(__file__).resolve().parent.parent
# options that choose kernels; one forgotten here costs the time that the server would have saved
OPTIONS = (
    "max_num_batched_tokens", "max_num_seqs", "max_model_len", "tensor_parallel_size", "enforce_eager",
    "kvcache_block_size", "dtype", "kv_cache_dtype", "attention_backend", "logprobs_mode", "model_config",
)  # fmt: skip


class CompileServer:
    """The server as seen by the engine's process.

    Args:
        record: file that is not empty once the kernels are compiled; locked while a server compiles them. A second
            process with the same kernels starts no server, and waits for the first.
    """

    def __init__(self, record: Path):
        record.parent.mkdir(parents=True, exist_ok=True)
        self._record = record.open("a")
        self._num_requests = 0
        self._is_owner = self._lock(exclusive=True)
        if not self._is_owner:
            return
        self._control, server_end = socket.socketpair()
        self._control.setblocking(False)  # a server that hangs reads nothing
        folders = [folder for folder in sys.path if isinstance(folder, str)]
        code = f"import sys; sys.path[:] = {folders!r}; from {__name__} import serve; serve()"
        try:
            with server_end:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code], stdin=server_end.fileno(), stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is for the engine's process
                )  # fmt: skip
        except BaseException:
            self._control.close()
            self._record.close()
            raise

    def request(self, compile_kernel: Callable) -> Callable[[], None]:
        """Have a kernel compiled, unless it is cached. The result waits until it is, or the server has failed.

        Args:
            compile_kernel: the closure that Triton would have run by an executor.
        """
        self._deadline = time.monotonic() + TIMEOUT_S
        try:
            request = read_closure(compile_kernel)
            if is_cached(*request):
                return lambda: None
            if not self._is_owner:
                return lambda: self._wait_for_other(request)
            answer = self._send(pickled(request))
        except Exception:  # the server is gone; or Triton's names have changed, or a value cannot be pickled
            LOGGER.debug("compile server: no request was made", exc_info=True)
            return lambda: None
        return lambda: self._wait_for(answer)

    def _send(self, data: bytes) -> socket.socket:
        """The end of the socket pair at which the answer will arrive."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                ours.setblocking(False)  # nobody reads yet: what its buffer cannot hold would wait for ever
                ours.sendall(data)
                socket.send_fds(self._control, [b" "], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        self._num_requests += 1
        return ours

    def _wait_for(self, answer: socket.socket) -> None:
        with answer, suppress(OSError):
            if self._num_requests < MIN_KERNELS and not self._has_started():
                return
            answer.settimeout(max(0.01, self._deadline - time.monotonic()))
            if answer.recv(len(ANSWER)) == ANSWER:
                return
        LOGGER.debug("compile server: a request was not answered")

    def _has_started(self) -> bool:
        """True also of a server that has ended."""
        try:
            self._control.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        return True

    def _wait_for_other(self, request: tuple) -> None:
        with suppress(OSError):  # the cache was deleted meanwhile
            while not is_cached(*request) and not self._lock(exclusive=False) and time.monotonic() < self._deadline:
                time.sleep(0.05)

    def close(self, is_compiled: bool) -> None:
        """End the server; if ``is_compiled``, the next start needs none. May be called again."""
        if self._record.closed:
            return
        if self._is_owner:
            self._control.close()
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its children too
            self._process.wait()
            if is_compiled:
                self._record.write("compiled\n")
        with suppress(OSError):  # the disk is full
            self._record.close()

    def _lock(self, exclusive: bool) -> bool:
        """The lock goes with the process. True where the file system has no locks."""
        import fcntl

        try:
            fcntl.flock(self._record, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True


active: ContextVar[CompileServer | None] = ContextVar("active_compile_server", default=None)


@contextmanager
def compile_server(config: "Config") -> Iterator[None]:
    """Inside, kernels are compiled by a server, unless they were compiled before.

    To be entered before torch is imported, which takes the server as long as this process.
    """
    server = None
    try:
        path = record_path(config)
        is_frozen = getattr(sys, "frozen", False)  # sys.executable would run the user's program again
        if not is_frozen and not (path.exists() and path.stat().st_size):
            server = CompileServer(path)
    except Exception:  # no place for the record, no such package, no interpreter to start
        LOGGER.debug("compile server: not started", exc_info=True)
    token = active.set(server)
    try:
        yield
    finally:
        active.reset(token)
        if server is not None:
            server.close(is_compiled=False)


def record_path(config: "Config") -> Path:
    """Beside the kernels in Triton's cache; its name is a hash of what decides them. Imports no Triton."""
    sources = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(PACKAGE.glob("kernels/**/*.py"))]
    gpus = [Path(name).read_text().split("\n")[0] for name in glob.glob("/proc/driver/nvidia/gpus/*/information")]
    versions = sys.version, metadata.version("torch"), metadata.version("triton")
    options = [getattr(config, name) for name in OPTIONS]
    # repr has sets (FP8 layers) in an order that changes with the process; pformat sorts them where it breaks lines
    text = pformat((versions, sorted(gpus), sources, options), width=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    home = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")
    return Path(os.environ.get("TRITON_CACHE_DIR") or home) / f"nanovllm-{digest[:32]}"


def read_closure(compile_kernel: Callable) -> tuple[Any, Any, dict, dict]:
    """(source, target, options, environment): arguments of ``triton.compile``."""
    cells = zip(compile_kernel.__code__.co_freevars, compile_kernel.__closure__ or (), strict=True)
    values = {name: cell.cell_contents for name, cell in cells}
    return values["src"], values["target"], values["options"].__dict__, values["env_vars"]


def is_cached(source: Any, target: Any, options: dict, environment: dict) -> bool:
    """Whether ``triton.compile`` would find the kernel."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend = make_backend(target)
    key = get_cache_key(source, backend, backend.parse_options(options), environment)
    name = f"{source.name[:150]}.json"
    return name in (get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name) or ())


def pickled(request: tuple) -> bytes:
    """With kernels by module and name."""
    from triton.runtime.jit import JITFunction

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> tuple[str, str] | None:
            return (obj.__module__, obj.__qualname__) if isinstance(obj, JITFunction) else None

    Pickler(buffer := io.BytesIO()).dump(request)
    return buffer.getvalue()


class Unpickler(pickle.Unpickler):
    def persistent_load(self, name: tuple[str, str]) -> Any:
        return attrgetter(name[1])(import_module(name[0]))


# ---------------------------------------------------------------- in the server


def serve() -> None:
    """Main function of the server. Each child ends with its kernel; all that are left end with the server."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # children of a user who ignores it could not be waited for
    try:
        import triton  # noqa: F401

        fork(build_driver)
        from triton.runtime.cache import triton_key

        from nanovllm import kernels

        kernels._load_ops(use_triton=True)
        triton_key()  # a hash of the whole of Triton, kept in memory, which every child needs
        gc.freeze()
        gc.disable()
        answer_requests(socket.socket(fileno=0))
    finally:
        os.killpg(0, signal.SIGKILL)


def answer_requests(control: socket.socket) -> None:
    control.sendall(b" ")  # ready
    num_running = 1  # build_driver
    limit = min(MAX_CHILDREN, len(os.sched_getaffinity(0)) - 1)  # one core is for the engine's process
    hangup = select.poll()
    hangup.register(control, 0)  # reported at once; the end of the input only after all requests sent before
    while (fds := socket.recv_fds(control, 1, 1)[1]) and not hangup.poll(0):
        fork(lambda: compile_request(fds[0]))
        os.close(fds[0])
        num_running += 1
        while num_running and os.waitpid(-1, 0 if num_running >= limit else os.WNOHANG)[0]:
            num_running -= 1


def fork(work: Callable[[], None]) -> None:
    """Run ``work`` in a child."""
    if os.fork() == 0:
        try:
            work()
        finally:
            os._exit(0)


def compile_request(fd: int) -> None:
    """Compile the kernel of one request, and answer."""
    import triton

    with socket.socket(fileno=fd) as connection, connection.makefile("rb") as file:
        source, target, options, environment = Unpickler(file).load()
        kernel = triton.compile(source, target=target, options=options, _env_vars=environment)
        with suppress(Exception):  # no libcuda here, or another Triton: the engine's process builds it
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(kernel.src, kernel.metadata)  # Triton 3.6 compiles it from C, into the cache
        connection.sendall(ANSWER)


def build_driver() -> None:
    """Triton's own C module, which its first use in a process needs, into the cache."""
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()

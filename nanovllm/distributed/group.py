"""Collectives between tensor-parallel ranks.

Owns the choice of transport: gloo on CPUs, NCCL on GPUs, and peer memory where it is faster (``peer_memory.py``). Knows
nothing of processes. Backends are used without ``torch.distributed``'s default process group, which is the user's.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from nanovllm.distributed.peer_memory import PeerMemory

# ``Workers`` handles failures. NCCL's own watchdog would end the user's process, and poll a store that is gone.
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"


@dataclass(frozen=True)
class TPGroup:
    """One rank's view of the tensor-parallel group. The default is a single rank, which communicates with nobody."""

    rank: int = 0
    size: int = 1
    backend: Any = field(default=None, repr=False, compare=False)  # ProcessGroupNCCL or ProcessGroupGloo
    peers: PeerMemory | None = field(default=None, repr=False, compare=False)
    # done once NCCL's ranks are connected, half a second after ``connect``
    communicator: "Future[None] | None" = field(default=None, repr=False, compare=False)
    # whether launches only compile their kernels; then collectives do nothing
    is_compiling: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)

    @classmethod
    def connect(cls, rank: int, size: int, device: torch.device, directory: str, timeout_s: float) -> "TPGroup":
        """Rendezvous in an empty directory, which all ranks share until they have joined.

        A CUDA device must be torch's current device. ``timeout_s`` also limits each collective on the CPU.
        """
        timeout = timedelta(seconds=timeout_s)

        def store(name: str) -> dist.Store:
            store = dist.FileStore(os.path.join(directory, name), size)
            store.set_timeout(timeout)
            return store

        if device.type == "cuda":
            from nanovllm.kernels.launch import compile_only

            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timeout
            disabled = [name for name in WATCHDOG if name not in os.environ]
            os.environ.update(dict.fromkeys(disabled, "0"))
            try:
                backend = nccl(store("nccl"), rank, size, options)
            finally:
                for name in disabled:
                    del os.environ[name]
            # Multicast would be set up and never used. Set before NCCL's thread starts, which reads the environment.
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

            def create_communicator() -> None:
                torch.cuda.set_device(device)
                backend.allreduce([torch.zeros(1, device=device)]).wait()
                torch.cuda.current_stream().synchronize()

            communicator = on_daemon_thread("nanovllm-nccl", create_communicator)
            peers = PeerMemory.connect(store("peers"), rank, size, device, directory)
            return cls(rank, size, backend, peers, communicator, compile_only.get)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # loopback only
        options._timeout = timeout
        return cls(rank, size, dist.ProcessGroupGloo(store("gloo"), rank, size, options))

    def join(self, wait_until: Callable[[Callable[[], bool]], None] | None = None) -> None:
        """Wait for all ranks: a barrier, after which nobody needs the directory.

        For the communicator before it by ``wait_until(condition)``, if that is given.
        """
        if self.size == 1:
            return
        device = "cpu"
        if self.communicator is not None:
            if wait_until is not None:
                wait_until(self.communicator.done)
            self.communicator.result()
            device = "cuda"
        self.all_gather(torch.zeros(1, device=device)).sum().item()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; returns x."""
        if self.size == 1 or x.numel() == 0:
            return x
        if self.peers is not None and self.peers.can_reduce(x):
            return self.peers.all_reduce(x)
        self._run_collective(self.backend.allreduce, AllreduceOptions(), [x])
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] of every rank -> [size, ...], the same on every rank."""
        if self.size == 1:
            return x.unsqueeze(0)
        # scalars are gathered at start only, and not worth a kernel variant
        if self.peers is not None and self.peers.can_gather(x) and x.numel() > 1:
            return self.peers.all_gather(x)
        out = x.new_empty(self.size, *x.shape)
        gather = self.backend._allgather_base
        self._run_collective(gather, AllgatherOptions(), out.view(-1), x.contiguous().view(-1))
        return out

    def _run_collective(self, collective: Callable, options: Any, *tensors: Any) -> None:
        """Run on the current stream: a stream of NCCL's own would cost two event waits."""
        if self.is_compiling():  # nothing else runs while compiling
            return
        if self.communicator is not None:
            self.communicator.result()
        options.asyncOp = False
        work = collective(*tensors, options)
        if work is not None:
            work.wait()

    def drain(self, timeout_s: float) -> bool:
        """Poll until the device is idle, without blocking in the driver. False if it stays busy, or has failed."""
        if self.communicator is None:
            return True
        try:
            with torch.cuda.device(self.rank):
                done, limit = torch.cuda.Event(), time.monotonic() + timeout_s
                done.record()
                while not (idle := done.query()) and time.monotonic() < limit:
                    time.sleep(1e-4)
                return idle
        except RuntimeError:  # a sticky CUDA error: the next CUDA call raises it too
            return False

    def abort(self) -> None:
        """Let collectives that wait for a dead rank return, with any result. From any thread."""
        if self.peers is not None:
            self.peers.abort()
            # NCCL's kernels queued after these must start before their communicator goes away. This waits on a thread,
            # because NCCL must be aborted even if the driver blocks.
            waiting = threading.Thread(target=self.drain, args=(1.0,), daemon=True)
            waiting.start()
            waiting.join(1.5)
        if self.communicator is not None:
            wait([self.communicator], 1.0)  # a communicator that does not exist yet could not be aborted
            self.backend.abort()

    def close(self) -> None:
        """Leave the group, without the other ranks' cooperation."""
        self.abort()
        if self.peers is not None:
            self.peers.close()


SINGLE_RANK = TPGroup()


def on_daemon_thread(name: str, function: Callable[..., Any], *args: Any) -> "Future[Any]":
    """Call a function on a thread that the exit of the process does not wait for, should another rank have died."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future

"""Collectives between tensor-parallel ranks.

Owns the choice of transport: gloo on CPUs, NCCL on GPUs, and for small tensors peer memory (``peer_memory.py``). Knows
nothing of processes. Backends are used without ``torch.distributed``'s default process group, which is the user's.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from nanovllm.distributed.peer_memory import PeerMemory

NCCL: Any = getattr(dist, "ProcessGroupNCCL", ())  # not every torch has it; isinstance(x, ()) is False
# ``Workers`` handles failures. NCCL's own watchdog would end the user's process, and poll a store that is gone.
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"


@dataclass(frozen=True)
class TPGroup:
    """One rank's view of the tensor-parallel group. The default is a single rank, which communicates with nobody."""

    rank: int = 0
    size: int = 1
    backend: Any = field(default=None, repr=False, compare=False)  # ProcessGroupNCCL or ProcessGroupGloo
    peers: PeerMemory | None = field(default=None, repr=False, compare=False)

    @classmethod
    def connect(cls, rank: int, size: int, device: torch.device, directory: str, timeout_s: float,
                max_sum_bytes: int = 0) -> "TPGroup":
        """Rendezvous in an empty directory, which all ranks share; returns once all are connected.

        A CUDA device must be torch's current device. ``timeout_s`` also limits each collective on the CPU.
        ``max_sum_bytes``: of the largest sum beside other work (``PushedSums``), on two GPUs.
        """
        peers, timeout = None, timedelta(seconds=timeout_s)
        store = dist.FileStore(os.path.join(directory, "store"), size)
        store.set_timeout(timeout)
        if device.type == "cuda":
            options: Any = NCCL.Options()
            options._timeout = timeout
            disabled = [name for name in WATCHDOG if name not in os.environ]
            os.environ.update(dict.fromkeys(disabled, "0"))
            try:
                backend = NCCL(store, rank, size, options)
            finally:
                for name in disabled:
                    del os.environ[name]
            backend.allreduce([torch.zeros(1, device=device)]).wait()  # creates the communicator
            torch.cuda.synchronize()
            peers = PeerMemory.connect(backend, store, rank, size, device, directory, max_sum_bytes)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # loopback only
            options._timeout = timeout
            backend = dist.ProcessGroupGloo(store, rank, size, options)
        tp = cls(rank, size, backend, peers)
        tp.all_gather(torch.zeros(1, device=device)).sum().item()  # a barrier: nobody needs the store any more
        return tp

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks. Use the result: it may be x, or a new tensor."""
        if self.size == 1 or x.numel() == 0:
            return x
        if self.peers is not None and self.peers.fits(x):
            return self.peers.all_reduce(x)
        _run_collective(self.backend.allreduce, AllreduceOptions(), [x])
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] of every rank -> [size, ...], the same on every rank."""
        if self.size == 1:
            return x.unsqueeze(0)
        # scalars are gathered at start only, and not worth a kernel variant
        if self.peers is not None and self.peers.fits(x) and x.numel() > 1:
            return self.peers.all_gather(x)
        out = x.new_empty(self.size, *x.shape)
        _run_collective(self.backend._allgather_base, AllgatherOptions(), out.view(-1), x.contiguous().view(-1))
        return out

    def drain(self, timeout_s: float) -> bool:
        """Poll until the device is idle, without blocking in the driver. False if it stays busy, or has failed."""
        if not isinstance(self.backend, NCCL):
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
            # NCCL's kernels queued behind must start before their communicator goes away. On a thread, because NCCL
            # must be aborted even where the driver blocks.
            waiting = threading.Thread(target=self.drain, args=(1.0,), daemon=True)
            waiting.start()
            waiting.join(1.5)
        if isinstance(self.backend, NCCL):
            self.backend.abort()

    def close(self) -> None:
        """Leave the group, without the other ranks' cooperation."""
        self.abort()
        if self.peers is not None:
            self.peers.close()


SINGLE_RANK = TPGroup()


def _run_collective(collective: Callable, options: Any, *tensors: Any) -> None:
    """Run on the current stream: a stream of NCCL's own would cost two event waits."""
    options.asyncOp = False
    work = collective(*tensors, options)
    if work is not None:
        work.wait()

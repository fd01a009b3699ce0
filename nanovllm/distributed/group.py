"""What the layers know of the other tensor-parallel ranks: who they are, and how to add up and gather with them.

Owns the exchange of tensors: gloo between CPUs, NCCL between GPUs, and for the small ones of a decode
step memory that the GPUs of one host read directly. Knows nothing of processes or of what is exchanged.
The backends are used without ``torch.distributed``'s default process group, which belongs to the user.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

# largest sum, in bytes, that is faster through memory read directly than through NCCL, by number of ranks; the limit of
# gathers too, which were not measured
PEER_SUM_BYTES = {2: 4 << 20, 4: 2 << 20, 8: 256 << 10}
# (bytes, programs, elements per program and turn): few programs have fewer marks to exchange, many move more
LANES = ((64 << 10, 16, 2048), (256 << 10, 32, 4096), (4 << 20, 64, 4096))

# A collective that fails is the engine's business: it ends its workers and raises. Left alone, torch's
# watchdog would end the user's process instead, and would keep asking a store that is gone by then.
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


@dataclass(frozen=True)
class TPGroup:
    """One rank's view of its group. The default is the group of one, in which nothing is exchanged."""

    rank: int = 0
    size: int = 1
    backend: Any = field(default=None, repr=False, compare=False)  # ProcessGroupNCCL or ProcessGroupGloo
    peers: "PeerMemory | None" = field(default=None, repr=False, compare=False)

    @classmethod
    def connect(cls, rank: int, size: int, device: torch.device, store_path: str, timeout_s: float) -> "TPGroup":
        """Meet the other ranks; returns when all of them are there.

        Args:
            device: this rank's; the current one if it is a CUDA device.
            store_path: a file that does not exist yet, the same for all ranks; needed only until all have met.
            timeout_s: limit of the meeting, and on the CPU of each collective.
        """
        store = dist.FileStore(store_path, size)
        store.set_timeout(timedelta(seconds=timeout_s))
        peers = None
        if device.type == "cuda":
            backend = _connect_nccl(store, rank, size, timeout_s)
            backend.allreduce([torch.zeros(1, device=device)]).wait()  # the communicator is made here
            torch.cuda.synchronize()
            peers = _connect_peers(backend, store, rank, size, device, name=store_path)
        else:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # nobody from outside
            options._timeout = timedelta(seconds=timeout_s)
            backend = dist.ProcessGroupGloo(store, rank, size, options)
        group = cls(rank, size, backend, peers)
        group.all_gather(torch.zeros(1, device=device)).sum().item()  # from here on nobody needs the store
        return group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may work in place, use what is returned."""
        if self.size == 1 or x.numel() == 0:
            return x
        if self.peers is not None and self.peers.takes(x):
            return self.peers.all_reduce(x)
        _finish(self.backend.allreduce([x], _in_order("AllreduceOptions")))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] of every rank -> [size, ...], the same on every rank."""
        if self.size == 1:
            return x.unsqueeze(0)
        # single numbers are exchanged at start only, and are not worth compiling a kernel
        if self.peers is not None and self.peers.takes(x) and x.numel() > 1:
            return self.peers.all_gather(x)
        out = x.new_empty(self.size, *x.shape)
        flat = x.contiguous().view(-1)
        _finish(self.backend._allgather_base(out.view(-1), flat, _in_order("AllgatherOptions")))
        return out

    def abort(self) -> None:
        """Make collectives that wait for a dead rank end, with any result; from any thread."""
        if self.peers is not None:
            self.peers.release()
            # NCCL's kernels that were queued behind must have begun before their communicator is taken away. On a
            # thread, because NCCL must be aborted even where the driver blocks.
            waiting = threading.Thread(target=self.drain, args=(1.0,), daemon=True)
            waiting.start()
            waiting.join(1.5)
        if isinstance(self.backend, _nccl()):
            self.backend.abort()

    def drain(self, timeout_s: float) -> bool:
        """Wait for the device's work, if it has any, without being blocked by it; whether it came to its end."""
        if not isinstance(self.backend, _nccl()):
            return True
        try:
            with torch.cuda.device(self.rank):
                done, limit = torch.cuda.Event(), time.monotonic() + timeout_s
                done.record()
                while not done.query():
                    if time.monotonic() > limit:
                        return False
                    time.sleep(1e-4)
        except RuntimeError:  # the device has failed; whoever uses it next is told
            return False
        return True

    def close(self) -> None:
        """Leave the group; needs no word from the other ranks."""
        self.abort()
        if self.peers is not None:
            self.peers.close()


SINGLE_RANK = TPGroup()


class _CountedFromZero(dist.Store):
    """A store for the rendezvous of symmetric memory, which numbers its keys by process: "name/number/...".

    A process that has met others before counts on, and a new one begins at 0: they would wait for each other's keys
    for ever. Here the numbers that a process uses become 0, 1, 2, ... in the order of their first use.
    """

    def __init__(self, store: dist.Store):
        super().__init__()
        self._store = store
        self._numbers: dict[str, dict[str, int]] = {}

    def _renumbered(self, key: str) -> str:
        name, *rest = key.split("/")
        if rest and rest[0].isdigit():
            numbers = self._numbers.setdefault(name, {})
            rest[0] = str(numbers.setdefault(rest[0], len(numbers)))
        return "/".join([name, *rest])

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch says str and sends bytes
        self._store.set(self._renumbered(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._store.get(self._renumbered(key))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._renumbered(key), amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._renumbered(key) for key in keys])

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait([self._renumbered(key) for key in keys], *timeout)


class PeerMemory:
    """Memory on each GPU of one host that the others read over NVLink: small sums in one launch.

    The memory is torch's symmetric memory, without multicast; what runs on it is in ``kernels/all_reduce.py``.
    It can be captured in CUDA graphs: what changes from launch to launch is counted on the device.

    Raises:
        RuntimeError: the devices cannot read each other's memory, or torch is too old.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, name: Any):
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        from nanovllm.kernels.all_reduce import one_shot

        # read by torch before it shares memory; multicast would be set up and never used
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._kernel, self._name, self._rank, self._size = one_shot, name, rank, size
        self._store = store = _CountedFromZero(store)
        self._process_group = dist.ProcessGroup(store, rank, size)  # only lends its store to the name
        self._process_group._set_group_name(name)
        _register_process_group(name, self._process_group)
        mark_bytes = 8 * size * sum(programs for _, programs, _ in LANES)
        num_bytes = mark_bytes + 2 * sum(lane_bytes for lane_bytes, _, _ in LANES)
        self._memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device).zero_()
        torch.cuda.synchronize()  # the marks are 0 before anybody else can reach them
        try:
            self._handle = _SymmetricMemory.rendezvous(self._memory, name)
        except RuntimeError as error:
            if "group info" not in str(error):
                raise
            _SymmetricMemory.set_group_info(name, rank, size, store)  # older torch does not look at process groups
            self._handle = _SymmetricMemory.rendezvous(self._memory, name)
        self._released = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
        starts = torch.tensor(self._handle.buffer_ptrs)
        self._lanes = []  # (bytes, addresses of buffers, addresses of marks, epochs, block)
        mark, data = 0, mark_bytes
        for lane_bytes, programs, block in LANES:
            epochs = torch.zeros(programs, dtype=torch.int64, device=device)
            self._lanes.append((lane_bytes, (starts + data).to(device), (starts + mark).to(device), epochs, block))
            mark, data = mark + 8 * size * programs, data + 2 * lane_bytes

    def takes(self, x: torch.Tensor) -> bool:
        return x.is_contiguous() and x.nbytes <= PEER_SUM_BYTES[self._size]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, a new tensor."""
        return self._launch(x, torch.empty_like(x), gather=False)

    def rehearse(self, dtype: torch.dtype) -> None:
        """Launch the kernel of each lane, with a sum as large as it takes: for `parallel_compile`."""
        for lane_bytes, buffers, *_ in self._lanes:
            num_bytes = min(lane_bytes, PEER_SUM_BYTES[self._size])
            self.all_reduce(torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=buffers.device))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] of every rank -> [size, ...]."""
        return self._launch(x, x.new_empty(self._size, *x.shape), gather=True)

    def _launch(self, x: torch.Tensor, out: torch.Tensor, gather: bool) -> torch.Tensor:
        lane_bytes, buffers, marks, epochs, block = next(lane for lane in self._lanes if x.nbytes <= lane[0])
        return self._kernel(
            x, out, buffers, marks, epochs, self._released, lane_bytes // x.itemsize, self._rank, self._size,
            gather=gather, block=block,
        )  # fmt: skip

    def release(self) -> None:
        """Let every launch of this rank pass, now and from now on; from any thread, and without the driver."""
        self._released.fill_(1)

    def close(self) -> None:
        from torch._C._distributed_c10d import _unregister_process_group

        _unregister_process_group(self._name)
        for name in ("_handle", "_memory"):
            self.__dict__.pop(name, None)


def _connect_peers(backend: Any, store: dist.Store, rank: int, size: int, device: torch.device,
                   name: str) -> PeerMemory | None:
    """Peer memory if every rank has it, else None on every rank."""
    peers = None
    reachable = all(torch.cuda.can_device_access_peer(device, i) for i in range(size) if i != device.index)
    able = torch.tensor([float(reachable and size in PEER_SUM_BYTES)], device=device)
    backend.allreduce([able]).wait()  # the rendezvous waits for everybody, so it is tried by all or by none
    if able.item() == size:
        try:
            peers = PeerMemory(store, rank, size, device, name)
        except (RuntimeError, ImportError, AttributeError) as error:
            logger.warning("small exchanges go through NCCL, peer memory is not available: %s", error)
    able.fill_(peers is not None)
    backend.allreduce([able]).wait()
    return peers if able.item() == size else None


def _connect_nccl(store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with _environment(NCCL_ENVIRONMENT):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _nccl() -> Any:
    return getattr(dist, "ProcessGroupNCCL", ())  # a torch without NCCL has no such class


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables that hold within the ``with`` block; what the user has set himself stays."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update((name, variables[name]) for name in added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _in_order(kind: str) -> Any:
    """Options that run a collective on the current stream, without a detour over a stream of its own."""
    options = getattr(dist.distributed_c10d, kind)()
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()

"""Peer memory: all-reduce and all-gather over NVLink, for tensors where they are faster than NCCL.

Owns memory that the GPUs of one host access directly (torch's symmetric memory, without multicast), its rendezvous, and
which tensors go through it. The kernel is in ``kernels/all_reduce.py``; it can be captured in CUDA graphs, since it
counts launches on the device.
"""

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

logger = logging.getLogger(__name__)

# Ranks -> bytes per launch, a multiple of 4 * BLOCK, measured for sums only (benchmarks/all_reduce.py). Two ranks take
# several launches for larger sums, still faster than NCCL; more ranks were slower beyond it, with an older kernel.
MAX_BYTES = {2: 16 << 20, 4: 2 << 20, 8: 256 << 10}
BLOCK, NUM_WARPS = 256, 4  # 32-bit words and warps per program
DTYPES = torch.bfloat16, torch.float16, torch.float32


class PeerMemory:
    """One rank's symmetric memory: the buffer of pushed words."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, name: Any):
        from nanovllm.kernels.all_reduce import push

        self._push, self._name, self._rank, self._size = push, name, rank, size
        self._store = store = RenumberedStore(store)
        self._process_group = dist.ProcessGroup(store, rank, size)  # the rendezvous finds the store by its name
        self._process_group._set_group_name(name)
        c10d._register_process_group(name, self._process_group)
        self._max_bytes, self._block, self._num_warps = MAX_BYTES[size], BLOCK, NUM_WARPS
        memory_bytes = 2 * (size - 1) * self._max_bytes
        self._memory = c10d._SymmetricMemory.empty_strided_p2p((memory_bytes,), (1,), torch.uint8, device)
        self._memory.fill_(255)
        torch.cuda.synchronize()  # before another rank can reach it
        try:
            self._handle = c10d._SymmetricMemory.rendezvous(self._memory, name)
        except RuntimeError as error:
            if "group info" not in str(error):
                raise
            c10d._SymmetricMemory.set_group_info(name, rank, size, store)  # torch 2.8 ignores process groups
            self._handle = c10d._SymmetricMemory.rendezvous(self._memory, name)
        self._abort_flag = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
        self._buffers = torch.tensor(self._handle.buffer_ptrs).to(device)
        self._launches = torch.zeros(self._max_bytes // (4 * self._block), dtype=torch.int64, device=device)

    @classmethod
    def connect(cls, store: dist.Store, rank: int, size: int, device: torch.device, name: str) -> "PeerMemory | None":
        """Peer memory on every rank, or None on every rank."""

        def on_all_ranks(what: str, able: bool) -> bool:
            store.set(f"{what} {rank}", str(able))
            return all(store.get(f"{what} {i}") == b"True" for i in range(size))

        reachable = all(torch.cuda.can_device_access_peer(device, i) for i in range(size) if i != device.index)
        # the rendezvous would wait for the others
        if not on_all_ranks("reachable", reachable and size in MAX_BYTES):
            return None
        peers = None
        try:
            peers = cls(store, rank, size, device, name)
        except (RuntimeError, ImportError, AttributeError) as error:
            logger.warning("all exchanges go through NCCL, peer memory is not available: %s", error)
        return peers if on_all_ranks("connected", peers is not None) else None

    def can_reduce(self, x: torch.Tensor) -> bool:
        return self._is_words(x) and (self._size == 2 or x.nbytes <= self._max_bytes)

    def can_gather(self, x: torch.Tensor) -> bool:
        return self._is_words(x) and x.nbytes <= self._max_bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        for part in x.view(-1).split(self._max_bytes // x.itemsize):
            self._launch(part, part, gather=False)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] of every rank -> [size, ...]."""
        return self._launch(x, x.new_empty(self._size, *x.shape), gather=True)

    def _is_words(self, x: torch.Tensor) -> bool:
        return x.dtype in DTYPES and (x.nbytes | x.data_ptr()) % 4 == 0 and x.is_contiguous()

    def _launch(self, x: torch.Tensor, out: torch.Tensor, gather: bool) -> torch.Tensor:
        return self._push(
            x, out, self._buffers, self._launches, self._abort_flag, self._max_bytes // 4, self._rank, self._size,
            gather=gather, block=self._block, num_warps=self._num_warps,
        )  # fmt: skip

    def abort(self) -> None:
        """Let all launches of this rank pass from now on, with any result. From any thread, and without the driver."""
        self._abort_flag.fill_(1)

    def close(self) -> None:
        c10d._unregister_process_group(self._name)
        del self._handle, self._memory


class RenumberedStore(dist.Store):
    """A store whose keys "name/number/..." have numbers counted anew, in the order of their first use by this process.

    Symmetric memory counts its rendezvous per process. A process that has connected before and a new one would wait
    for each other's keys for ever.
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

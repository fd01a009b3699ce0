"""Peer memory: one-shot all-reduce and all-gather over NVLink, for tensors so small that NCCL's latency dominates.

Owns memory that the GPUs of one host access directly (torch's symmetric memory, without multicast), its rendezvous, and
the choice of protocol by size. The kernels are in ``kernels/all_reduce.py``; they can be captured in CUDA graphs, since
they count epochs on the device. Part of the memory is for large sums beside other work (``pushed_sums.py``).
"""

import logging
import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from nanovllm.distributed.pushed_sums import PushedSums, region_bytes

logger = logging.getLogger(__name__)

# Both measured with benchmarks/all_reduce.py. Ranks -> bytes of the largest tensor that is summed faster than by NCCL
# (gathers were not measured); (bytes, programs, block): few programs exchange fewer signals, many move more bytes.
MAX_BYTES = {2: 4 << 20, 4: 2 << 20, 8: 256 << 10}
SIZE_CLASSES = ((64 << 10, 16, 2048), (256 << 10, 32, 4096), (4 << 20, 64, 4096))
# Ranks -> bytes of the largest tensor that is summed by pushing, multiples of 4 * PUSH_BLOCK; more than two ranks have
# not been measured beyond.
PUSH_BYTES = {2: 1 << 20, 4: 64 << 10, 8: 64 << 10}
PUSH_BLOCK, PUSH_WARPS = 256, 4  # 32-bit words and warps of a program
PUSH_DTYPES = torch.bfloat16, torch.float16, torch.float32


class SizeClass(NamedTuple):
    """The kernel's arguments for tensors of at most ``num_bytes``."""

    num_bytes: int
    buffers: torch.Tensor  # i64[size], address of each rank's double buffer, [2, num_bytes]
    signal_pads: torch.Tensor  # i64[size], address of each rank's signal pad, i64[size, programs]
    epochs: torch.Tensor  # i64[programs], launches so far
    block: int  # elements per program and iteration


class PushClass(NamedTuple):
    """The push kernel's arguments for tensors of at most ``num_bytes``."""

    num_bytes: int
    buffers: torch.Tensor  # i64[size], address of each rank's buffer, i64[2, size, num_bytes / 4]
    epochs: torch.Tensor  # i64[programs], launches so far
    block: int
    num_warps: int


class PeerMemory:
    """One rank's symmetric memory: the signal pads of all size classes, their buffers, the buffer for pushed words.

    Attributes:
        sums: sums of up to ``max_sum_bytes`` beside other work; None without, or with more than two ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, name: Any,
                 max_sum_bytes: int = 0):
        from nanovllm.kernels.all_reduce import one_shot, push_all_reduce

        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # it would be set up, and never used
        self._one_shot, self._push, self._name, self._rank, self._size = one_shot, push_all_reduce, name, rank, size
        self._store = store = RenumberedStore(store)
        self._process_group = dist.ProcessGroup(store, rank, size)  # by its name the rendezvous finds the store
        self._process_group._set_group_name(name)
        c10d._register_process_group(name, self._process_group)
        pad_bytes = 8 * size * sum(programs for _, programs, _ in SIZE_CLASSES)
        push_at = pad_bytes + 2 * sum(num_bytes for num_bytes, _, _ in SIZE_CLASSES)
        sums_at = push_at + 2 * size * 2 * PUSH_BYTES[size]  # every 32-bit word with 32 bits of epoch
        sums_at = -(-sums_at // 512) * 512
        sums_bytes = region_bytes(max_sum_bytes) if max_sum_bytes and size == 2 else 0
        memory_bytes = sums_at + sums_bytes
        self._memory = c10d._SymmetricMemory.empty_strided_p2p((memory_bytes,), (1,), torch.uint8, device).zero_()
        torch.cuda.synchronize()  # signals and epochs are zero before another rank can reach them
        try:
            self._handle = c10d._SymmetricMemory.rendezvous(self._memory, name)
        except RuntimeError as error:
            if "group info" not in str(error):
                raise
            c10d._SymmetricMemory.set_group_info(name, rank, size, store)  # torch 2.8 ignores process groups
            self._handle = c10d._SymmetricMemory.rendezvous(self._memory, name)
        self._abort_flag = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
        addresses, pad, buffer = torch.tensor(self._handle.buffer_ptrs), 0, pad_bytes
        self._size_classes = []
        for num_bytes, programs, block in SIZE_CLASSES:
            buffers, signal_pads = (addresses + buffer).to(device), (addresses + pad).to(device)
            epochs = torch.zeros(programs, dtype=torch.int64, device=device)
            self._size_classes.append(SizeClass(num_bytes, buffers, signal_pads, epochs, block))
            pad, buffer = pad + 8 * size * programs, buffer + 2 * num_bytes
        epochs = torch.zeros(PUSH_BYTES[size] // (4 * PUSH_BLOCK), dtype=torch.int64, device=device)
        self._push_class = PushClass(PUSH_BYTES[size], (addresses + push_at).to(device), epochs, PUSH_BLOCK, PUSH_WARPS)
        self.sums: PushedSums | None = None
        if sums_bytes:
            peers = self._handle.get_buffer(1 - rank, (sums_bytes,), torch.uint8, sums_at)
            self.sums = PushedSums(self._memory[sums_at:], peers, self._abort_flag)
            torch.cuda.synchronize()

    @classmethod
    def connect(cls, backend: Any, store: dist.Store, rank: int, size: int, device: torch.device,
                name: str, max_sum_bytes: int = 0) -> "PeerMemory | None":
        """Peer memory on every rank, or None on every rank. ``backend``: a connected ProcessGroupNCCL."""

        def on_all_ranks(able: bool) -> bool:
            votes = torch.tensor([float(able)], device=device)
            backend.allreduce([votes]).wait()
            return votes.item() == size

        reachable = all(torch.cuda.can_device_access_peer(device, i) for i in range(size) if i != device.index)
        if not on_all_ranks(reachable and size in MAX_BYTES):  # the rendezvous would wait for the others
            return None
        peers = None
        try:
            peers = cls(store, rank, size, device, name, max_sum_bytes)
        except (RuntimeError, ImportError, AttributeError) as error:
            logger.warning("small exchanges go through NCCL, peer memory is not available: %s", error)
        return peers if on_all_ranks(peers is not None) else None

    def fits(self, x: torch.Tensor) -> bool:
        return x.is_contiguous() and x.nbytes <= MAX_BYTES[self._size]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, a new tensor."""
        out, c = torch.empty_like(x), self._push_class
        if x.nbytes > c.num_bytes or x.dtype not in PUSH_DTYPES or (x.nbytes | x.data_ptr()) % 4:
            return self._launch(x, out, gather=False)
        return self._push(
            x, out, c.buffers, c.epochs, self._abort_flag, c.num_bytes // 4, self._rank, self._size,
            block=c.block, num_warps=c.num_warps,
        )  # fmt: skip

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] of every rank -> [size, ...]."""
        return self._launch(x, x.new_empty(self._size, *x.shape), gather=True)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Launch the largest pushed all-reduce and that of each size class, for `parallel_compile`."""
        device = self._push_class.buffers.device
        for num_bytes in (self._push_class.num_bytes, *(c.num_bytes for c in self._size_classes)):
            num_elements = min(num_bytes, MAX_BYTES[self._size]) // dtype.itemsize
            self.all_reduce(torch.empty(num_elements, dtype=dtype, device=device))

    def _launch(self, x: torch.Tensor, out: torch.Tensor, gather: bool) -> torch.Tensor:
        c = next(c for c in self._size_classes if x.nbytes <= c.num_bytes)
        return self._one_shot(
            x, out, c.buffers, c.signal_pads, c.epochs, self._abort_flag, c.num_bytes // x.itemsize,
            self._rank, self._size, gather=gather, block=c.block,
        )  # fmt: skip

    def abort(self) -> None:
        """Let all launches of this rank pass from now on, with any result. From any thread, and without the driver."""
        self._abort_flag.fill_(1)

    def close(self) -> None:
        c10d._unregister_process_group(self._name)
        self.sums = None
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

"""Sums over two ranks that run beside other work: each rank's partial sum is copied to the other by a copy engine.

Owns the receive buffers in peer memory, the stream of the copies, and the order of both. NCCL's kernels need SMs, which
the persistent kernels of a prefill keep to themselves until they end; copy engines need none.

A micro-batch h counts its sums n = 0, 1, 2, ... Sum n of a rank goes through slot (h, n % 2) of the other rank::

    main stream   product -> own | other micro-batch's work ........ | wait for own's copy, then for the flag | sum
    copy stream                  | own -> peer's slot, epoch -> its flag |

Why two slots per micro-batch are enough: rank r writes its partial sum of n + 2 into the slot of n. Before, in the
order of its streams, it has waited for the other rank's n + 1, since the product of n + 2 reads the sum of n + 1. The
other rank sent its n + 1 after its product, which reads its sum of n: by then it had read the slot. This holds across
prefills and whatever number of sums they have, as every sum that was begun is waited for before the next one of its
micro-batch.

No order of the two hosts ends in a deadlock: a partial sum is sent before it, and what depends on it, is waited for.

A flag equals the epoch of what is in its slot. It stays until the next but one sum of the micro-batch, so that an epoch
has to differ from that of two sums before only.
"""

from dataclasses import dataclass
from typing import Any

import torch

SLOTS = 2  # of each of two micro-batches
EPOCHS = 16  # per slot, before they start anew
FLAG_BYTES = 512  # all flags, 128 bytes apart


def region_bytes(max_bytes: int) -> int:
    """Memory of one rank, for sums of at most ``max_bytes``."""
    return FLAG_BYTES + 2 * SLOTS * _aligned(max_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


@dataclass(frozen=True)
class Slot:
    """``received`` and ``flag`` are in this rank's memory, ``remote`` and ``remote_flag`` in the other's."""

    received: torch.Tensor  # uint8 [max_bytes]
    flag: torch.Tensor  # i64 [1]
    remote: torch.Tensor
    remote_flag: torch.Tensor
    computed: torch.cuda.Event  # the partial sum is complete
    sent: torch.cuda.Event  # it has been copied


class PushedSums:
    """One rank's end.

    Args:
        mine, peers: uint8 [region_bytes(max_bytes)], this rank's region and the other's, zero at first.
        abort_flag: i64 [1] in pinned memory; nonzero: waits return, with undefined sums.
    """

    def __init__(self, mine: torch.Tensor, peers: torch.Tensor, abort_flag: torch.Tensor):
        from nanovllm.kernels.all_reduce import wait_for_epoch
        from nanovllm.kernels.launch import compile_only
        from nanovllm.kernels.linear.norm import SplitKPartials

        self.wait_for_epoch, self.partials, self._compile_only = wait_for_epoch, SplitKPartials, compile_only
        self.abort_flag = abort_flag
        self.aborted = torch.zeros(1, dtype=torch.int64, device=mine.device)
        self._epochs = torch.arange(EPOCHS, dtype=torch.int64, device=mine.device).add(1).split(1)
        self._copies = torch.cuda.Stream(mine.device)
        self._counts = [0, 0]  # sums begun, of each micro-batch
        self.max_bytes = (len(mine) - FLAG_BYTES) // (2 * SLOTS)

        def cut(region: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            start = FLAG_BYTES + i * self.max_bytes
            return region[start : start + self.max_bytes], region[128 * i : 128 * i + 8].view(torch.int64)

        slots = [
            Slot(*cut(mine, i), *cut(peers, i), torch.cuda.Event(), torch.cuda.Event()) for i in range(2 * SLOTS)
        ]
        self._slots = slots[:SLOTS], slots[SLOTS:]  # of each micro-batch

    def begin(self, x: torch.Tensor, half: int) -> "PendingSum":
        """Send this rank's partial sum [T, C] of micro-batch 0 or 1; it must stay as it is until it is waited for."""
        assert x.is_contiguous() and x.nbytes <= self.max_bytes, x.shape
        if self._compile_only.get():  # its product is not launched either
            return PendingSum(self, self._slots[half][0], 1, x)
        count, self._counts[half] = self._counts[half], self._counts[half] + 1
        slot, epoch = self._slots[half][count % SLOTS], count // SLOTS % EPOCHS
        slot.computed.record()
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(slot.computed)
            slot.remote[: x.nbytes].copy_(x.view(-1).view(torch.uint8))
            slot.remote_flag.copy_(self._epochs[epoch])  # copies of a stream complete in order
            slot.sent.record()
        return PendingSum(self, slot, epoch + 1, x)


@dataclass(frozen=True)
class PendingSum:
    """A sum that was begun. It keeps the partial sum's memory from being used for something else."""

    sums: PushedSums
    slot: Slot
    epoch: int
    own: torch.Tensor  # [T, C]

    def wait(self) -> Any:
        """``SplitKPartials`` of both partial sums, which the next RMSNorm adds up in fp32 and rounds once.

        Ranks get the same bits, because a + b = b + a. The device waits, the host does not.
        """
        return self.sums.partials(self.own, self._received()[None])

    def total(self) -> torch.Tensor:
        """The sum [T, C], of the same bits; in place."""
        return self.own.add_(self._received())

    def _received(self) -> torch.Tensor:
        own, sums = self.own, self.sums
        torch.cuda.current_stream().wait_event(self.slot.sent)  # the sum overwrites what is copied
        sums.wait_for_epoch(self.slot.flag, self.epoch, sums.aborted, sums.abort_flag)
        return self.slot.received[: own.nbytes].view(own.dtype).view(own.shape)

"""Targets of spawned processes. torch is imported only where needed: most of them are short-lived."""

import os
import signal
import time

from nanovllm.distributed.channel import Channel


def serve(worker):
    """Receive messages until dismissed; a message [n, code] is an order for rank n."""
    worker.report("ready")
    while len(words := worker.channel.receive()):
        rank, code = words.tolist()
        if rank == worker.rank:
            raise ValueError(f"code {code}")


def raises(worker):
    raise ValueError("no good")


def is_killed(worker):
    os.kill(os.getpid(), signal.SIGKILL)


def is_silent(worker):
    os.kill(os.getpid(), signal.SIGSTOP)


def never_up(worker):
    time.sleep(1000)


def echo(memory, rank, size, pipe):
    """Report length and sum of each message, until the empty one comes."""
    channel = Channel(memory, rank, size)
    num_words = -1
    while num_words != 0:
        words = channel.receive()
        num_words = len(words)
        pipe.send((num_words, int(words.sum(dtype="int64"))))


SUM_SIZES = (100, 1536, 1600, 1, 1100, 1599)  # in turn, so that both halves of the double buffer see every shape
SUM_CAPACITY, SUM_PROGRAMS = 1600, 3


def addend(num_elements, rank):
    import torch

    return torch.randn(num_elements, generator=torch.Generator().manual_seed(num_elements + rank))


def reduce_and_gather(rank, buffers, signal_pads, pipe):
    """One rank of one-shot sums and gathers through shared memory, in Triton's interpreter; report the results."""
    import torch

    from nanovllm.kernels.all_reduce import one_shot

    addresses = [torch.tensor([t.data_ptr() for t in tensors]) for tensors in (buffers, signal_pads)]
    epochs, abort_flag = torch.zeros(SUM_PROGRAMS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for n in SUM_SIZES:
        x, out = addend(n, rank), torch.full((n,), float("nan"))
        one_shot(x, out, *addresses, epochs, abort_flag, SUM_CAPACITY, rank, len(buffers), block=512)
        gathered = torch.full((len(buffers), n), float("nan"))
        one_shot(x, gathered, *addresses, epochs, abort_flag, SUM_CAPACITY, rank, len(buffers), gather=True, block=512)
        pipe.send((out.numpy(), gathered.numpy()))

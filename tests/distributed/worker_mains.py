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
PUSH_CAPACITY, PUSH_BLOCK = 2048, 512  # 32-bit words
NEAR_WRAP = 2**32 - 8  # added to the epochs: even, since the halves take turns


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


def push_cases():
    """(type, number of elements, added to the epochs before); x of 16 bits has an even number of elements."""
    import torch

    yield from ((torch.float32, n, 0) for n in SUM_SIZES)
    yield from ((torch.bfloat16, 2 * n, NEAR_WRAP if i == 0 else 0) for i, n in enumerate(SUM_SIZES))
    yield torch.float16, 200, 0


def push(rank, buffers, pipe):
    """One rank of pushed sums through shared memory, in Triton's interpreter; report the results as fp32."""
    import torch

    from nanovllm.kernels.all_reduce import push_all_reduce

    addresses = torch.tensor([t.data_ptr() for t in buffers])
    epochs, abort_flag = torch.zeros(PUSH_CAPACITY // PUSH_BLOCK, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for dtype, n, added in push_cases():
        epochs += added
        x, out = addend(n, rank).to(dtype), torch.full((n + 2,), float("nan"), dtype=dtype)
        push_all_reduce(
            x, out[:n], addresses, epochs, abort_flag, PUSH_CAPACITY, rank, len(buffers), block=PUSH_BLOCK
        )  # fmt: skip
        pipe.send(out.float().numpy())

"""Targets of spawned processes. torch is imported only where needed: most of them are short-lived."""

import os
import signal
import time
import zlib

from nanovllm.distributed.channel import Channel


def serve(worker):
    """Receive messages until dismissed; a message (n, code) is an order for rank n."""
    worker.report("up")
    worker.report("ready")
    while (message := worker.receive()) is not None:
        rank, code = message
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
    """Report length and checksum of each message, until the empty one comes."""
    channel, message = Channel(memory, rank, size), None
    while message != b"":
        message = channel.receive()
        pipe.send((len(message), zlib.crc32(message)))


SUM_SIZES = (100, 1536, 1600, 1, 1100, 1599)  # in turn, so that both halves of the double buffer see every shape
PUSH_CAPACITY, PUSH_BLOCK = 2048, 512  # 32-bit words


def addend(num_elements, rank):
    import torch

    return torch.randn(num_elements, generator=torch.Generator().manual_seed(num_elements + rank))


def push_cases():
    """(type, number of elements); x of 16 bits has an even number of elements."""
    import torch

    yield from ((torch.float32, n) for n in SUM_SIZES)
    yield from ((torch.bfloat16, 2 * n) for n in SUM_SIZES)
    yield torch.float16, 200


def push_rank(rank, buffers, pipe):
    """One rank of sums and gathers through shared memory, in Triton's interpreter; report both as fp32."""
    import torch

    from nanovllm.kernels.all_reduce import push

    addresses = torch.tensor([t.data_ptr() for t in buffers])
    launches = torch.zeros(PUSH_CAPACITY // PUSH_BLOCK, dtype=torch.int64)
    arguments = addresses, launches, torch.zeros(1, dtype=torch.int64), PUSH_CAPACITY, rank, len(buffers)
    for dtype, n in push_cases():
        x, out = addend(n, rank).to(dtype), torch.full((n + 2,), float("nan"), dtype=dtype)
        gathered = x.new_full((len(buffers) * n + 2,), float("nan"))
        push(x, out[:n], *arguments, block=PUSH_BLOCK)
        push(x, gathered[:-2].view(-1, n), *arguments, gather=True, block=PUSH_BLOCK)
        pipe.send((out.float().numpy(), gathered.float().numpy()))


SUM_LENGTHS = 5000, PUSH_CAPACITY, 3, PUSH_CAPACITY + 1  # of fp32


def peer_memory_of(buffers, rank):
    """A PeerMemory over given buffers [2, ranks - 1, PUSH_CAPACITY]."""
    import torch

    from nanovllm.distributed.peer_memory import PeerMemory
    from nanovllm.kernels.all_reduce import push

    memory = object.__new__(PeerMemory)
    memory._push, memory._rank, memory._size, memory._max_bytes = push, rank, len(buffers), 4 * PUSH_CAPACITY
    memory._block, memory._num_warps = PUSH_BLOCK, 4
    memory._buffers = torch.tensor([buffer.data_ptr() for buffer in buffers])
    memory._launches = torch.zeros(PUSH_CAPACITY // PUSH_BLOCK, dtype=torch.int64)
    memory._abort_flag = torch.zeros(1, dtype=torch.int64)
    return memory


def sum_rank(rank, buffers, pipe):
    """One rank of sums of any length through shared memory, in Triton's interpreter; gathers of what fits a launch."""
    memory = peer_memory_of(buffers, rank)
    for n in SUM_LENGTHS:
        x = addend(n, rank)
        gathered = memory.all_gather(x).numpy() if memory.can_gather(x) else None
        assert memory.can_reduce(x) and memory.all_reduce(x) is x
        pipe.send((x.numpy(), gathered))

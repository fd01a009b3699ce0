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


NUM_SUMS, SUM_CHANNELS = 90, 16
SUM_BYTES = 4 * SUM_CHANNELS * 12


def partial_sum(n, rank):
    """Of sum n: [T, SUM_CHANNELS] in bf16 or fp32, 1 to 12 tokens."""
    import torch

    generator = torch.Generator().manual_seed(2 * n + rank)
    x = torch.randn(1 + n * 7 % 12, SUM_CHANNELS, generator=generator)
    return x.bfloat16() if n % 3 == 0 else x


def halves():
    """Which micro-batch does what: (half, number of the sum, whether it begins); in an order that both ranks have."""
    import random

    rng, pending, n = random.Random(0), [None, None], 0
    while n < NUM_SUMS:
        half = rng.choice((0, 1, 0)) if n > 20 else n % 2
        if pending[half] is not None:
            yield half, pending[half], False
        pending[half] = n
        yield half, n, True
        n += 1
    yield from ((half, number, False) for half, number in enumerate(pending))


def sum_halves(sums, partial_sums, jitter):
    """Run ``halves`` on a ``PushedSums``; returns the sums in the order of their ends."""
    pending, results = {}, []
    for half, n, begins in halves():
        jitter()
        if begins:
            pending[half] = sums.begin(partial_sums[n].clone(), half)
        else:
            partials = pending.pop(half).wait()
            jitter()
            total = partials.residual.float() + partials.partials.float().sum(0)
            partials.residual.copy_(total)  # in place, as the norm does
            results.append(partials.residual)
    return results


class NoStream:
    """What PushedSums asks of streams and events, where copies are done at once."""

    def __init__(self, *_):
        pass

    def wait_event(self, event):
        pass

    def record(self):
        pass


def push_halves(rank, regions, pipe):
    """One rank of sums by copies in shared memory, the wait in Triton's interpreter."""
    import contextlib
    import random

    import torch

    from nanovllm.distributed.pushed_sums import PushedSums

    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = NoStream
    torch.cuda.stream = contextlib.nullcontext
    sums = PushedSums(regions[rank], regions[1 - rank], torch.zeros(1, dtype=torch.int64))
    rng = random.Random(rank)
    partial_sums = [partial_sum(n, rank) for n in range(NUM_SUMS)]
    for total in sum_halves(sums, partial_sums, lambda: time.sleep(rng.choice((0, 0, 0, 1e-3, 5e-3)))):
        pipe.send(total.float().numpy())


def push_halves_on_gpus(rank, directory, pipe):
    """One rank of sums between two GPUs, beside products that keep all SMs busy."""
    import random

    import torch

    from nanovllm.distributed.group import TPGroup

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    tp = TPGroup.connect(rank, 2, device, directory, 60.0, SUM_BYTES)
    tp.join()
    assert tp.peers is not None and tp.peers.sums is not None
    partial_sums = [partial_sum(n, rank).to(device) for n in range(NUM_SUMS)]
    rng, x = random.Random(rank), torch.randn(2048, 2048, device=device)

    def jitter():
        if rng.random() < 0.3:
            torch.cuda._sleep(rng.randint(1000, 2_000_000))
        if rng.random() < 0.3:
            torch.mm(x, x)

    for _ in range(3):  # the first time kernels are loaded, and the ranks wait for each other
        results = sum_halves(tp.peers.sums, partial_sums, jitter)
    for total in results:
        pipe.send(total.float().cpu().numpy())
    tp.close()

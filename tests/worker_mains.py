"""What spawned processes do in the tests of tensor parallelism, instead of ``worker_main`` or besides.

torch is imported only where it is needed: most of these processes are short-lived.
"""

import os
import signal
import time

from nanovllm.distributed.channel import Channel
from nanovllm.distributed.workers import worker_main


def raises(rank, config, *args):
    """Finds no weights, where rank 0 does."""
    config.model_path += "/nowhere"
    worker_main(rank, config, *args)


def is_killed(rank, config, *args):
    os.kill(os.getpid(), signal.SIGKILL)


def is_silent(rank, config, *args):
    time.sleep(1000)


def never_ready(rank, config, memory, pipe, directory):
    """Beats, and does nothing else."""
    import threading

    from nanovllm.distributed.workers import _beat

    threading.Thread(target=_beat, args=(Channel(memory, rank, config.tensor_parallel_size), directory)).start()
    time.sleep(1000)


def echo(memory, rank, size, pipe):
    """Report the length and the sum of messages, until an empty one comes."""
    channel = Channel(memory, rank, size)
    while True:
        method, words = channel.receive()
        pipe.send((method, len(words), int(words.sum(dtype="int64"))))
        if len(words) == 0:
            return


SUM_SIZES = (100, 4096, 5000, 1, 3000, 4999)  # in turn, so that both halves of the buffer see every shape
SUM_CAPACITY, SUM_PROGRAMS = 5000, 3


def sum_parts(num_elements, rank):
    import torch

    return torch.randn(num_elements, generator=torch.Generator().manual_seed(num_elements + rank))


def sums(rank, buffers, marks, pipe):
    """Take part in sums and gathers through shared memory, with Triton's interpreter, and report the results."""
    import torch

    from nanovllm.kernels.all_reduce import one_shot

    addresses = [torch.tensor([t.data_ptr() for t in tensors]) for tensors in (buffers, marks)]
    epochs, released = torch.zeros(SUM_PROGRAMS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for n in SUM_SIZES:
        x, out = sum_parts(n, rank), torch.full((n,), float("nan"))
        one_shot(x, out, *addresses, epochs, released, SUM_CAPACITY, rank, len(buffers), block=512)
        gathered = torch.full((len(buffers), n), float("nan"))
        one_shot(x, gathered, *addresses, epochs, released, SUM_CAPACITY, rank, len(buffers), gather=True, block=512)
        pipe.send((out.numpy(), gathered.numpy()))

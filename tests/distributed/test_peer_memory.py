"""The one-shot kernel between two ranks, and the store through which symmetric memory connects."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import worker_mains
from worker_mains import SUM_CAPACITY, SUM_PROGRAMS, SUM_SIZES, addend

from nanovllm.distributed.peer_memory import RenumberedStore
from nanovllm.distributed.workers import hidden_main_module

WORLD = 2


def check_results(results):
    for n, (total, gathered) in zip(SUM_SIZES, results, strict=True):
        addends = torch.stack([addend(n, rank) for rank in range(WORLD)])
        torch.testing.assert_close(torch.as_tensor(total), addends.sum(0), rtol=0, atol=1e-6)
        assert torch.equal(torch.as_tensor(gathered), addends)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_one_shot_between_processes():
    pytest.importorskip("triton")
    context = torch.multiprocessing.get_context("spawn")
    buffers = [torch.zeros(2 * SUM_CAPACITY).share_memory_() for _ in range(WORLD)]
    signal_pads = [torch.zeros(WORLD, SUM_PROGRAMS, dtype=torch.int64).share_memory_() for _ in range(WORLD)]
    pipes, processes = [], []
    for rank in range(WORLD):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, buffers, signal_pads, theirs)
        processes.append(context.Process(target=worker_mains.reduce_and_gather, args=arguments, daemon=True))
        pipes.append(ours)
        with hidden_main_module():
            processes[-1].start()
    results: list[list] = [[] for _ in pipes]
    for _ in SUM_SIZES:  # in turn: a full pipe would stop its rank, and the other one with it
        for pipe, received in zip(pipes, results, strict=True):
            assert pipe.poll(60)
            received.append(pipe.recv())
    for received in results:
        check_results(received)
    for process in processes:
        process.join(10)


@pytest.mark.gpu
def test_one_shot_between_streams():
    """Two ranks on one GPU; then one whose peer never launches, released by its abort flag."""
    from nanovllm.kernels.all_reduce import one_shot

    buffers = [torch.zeros(2 * SUM_CAPACITY, device="cuda") for _ in range(WORLD)]
    signal_pads = [torch.zeros(WORLD, SUM_PROGRAMS, dtype=torch.int64, device="cuda") for _ in range(WORLD)]
    addresses = [torch.tensor([t.data_ptr() for t in tensors], device="cuda") for tensors in (buffers, signal_pads)]
    epochs = [torch.zeros(SUM_PROGRAMS, dtype=torch.int64, device="cuda") for _ in range(WORLD)]
    streams = [torch.cuda.Stream() for _ in range(WORLD)]
    xs = [[addend(n, rank).cuda() for n in SUM_SIZES] for rank in range(WORLD)]
    outs = [[torch.full((WORLD + 1, *x.shape), float("nan"), device="cuda") for x in xs[rank]] for rank in range(WORLD)]
    abort_flags = [torch.ones(1, dtype=torch.int64).pin_memory() for _ in range(WORLD)]

    def launch(rank, i):
        arguments = (*addresses, epochs[rank], abort_flags[rank], SUM_CAPACITY, rank, WORLD)
        one_shot(xs[rank][i], outs[rank][i][0], *arguments, block=512, num_warps=4)
        one_shot(xs[rank][i], outs[rank][i][1:], *arguments, gather=True, block=512, num_warps=4)

    for i in range(len(SUM_SIZES)):  # the driver loads no kernel while another one runs: load all of them first
        for rank in range(WORLD):
            launch(rank, i)
    torch.cuda.synchronize()
    for tensor in (*abort_flags, *signal_pads, *epochs):
        tensor.zero_()
    torch.cuda.synchronize()
    for i in range(len(SUM_SIZES)):
        for rank in range(WORLD):
            with torch.cuda.stream(streams[rank]):
                launch(rank, i)
    torch.cuda.synchronize()
    for rank in range(WORLD):
        check_results([(out[0].cpu(), out[1:].cpu()) for out in outs[rank]])

    with torch.cuda.stream(streams[0]):
        launch(0, 0)
        launch(0, 1)
    time.sleep(0.05)
    assert not streams[0].query()  # it waits for rank 1
    abort_flags[0].fill_(1)
    torch.cuda.synchronize()


def test_ranks_connect_whatever_they_connected_before(tmp_path):
    """Symmetric memory numbers its keys by process: a second engine waited for its new workers for ever."""
    files = [dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2)]
    for file in files:
        file.set_timeout(timedelta(seconds=2))
    stores = [RenumberedStore(file) for file in files]
    for step in range(3):
        keys = [f"Exchange/{7 * (rank == 0) + step}" for rank in range(2)]  # rank 0 has connected seven times before
        for rank, store in enumerate(stores):
            store.set(f"{keys[rank]}/{rank}", b"%d of step %d" % (rank, step))
        for rank, store in enumerate(stores):
            peer = f"{keys[rank]}/{1 - rank}"
            store.wait([peer])
            assert store.check([peer]) and store.get(peer) == b"%d of step %d" % (1 - rank, step)
            assert store.add(f"{keys[rank]}/barrier", 1) == rank + 1
    stores[0].set("Exchange/other", b"no number")
    assert stores[1].get("Exchange/other") == b"no number"

"""The all-reduce kernels between two ranks, and the store through which symmetric memory connects."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import worker_mains
from worker_mains import PUSH_BLOCK, PUSH_CAPACITY, SUM_CAPACITY, SUM_PROGRAMS, SUM_SIZES, addend, push_cases

from nanovllm.distributed import workers
from nanovllm.distributed.peer_memory import RenumberedStore
from nanovllm.distributed.workers import hidden_main_module

WORLD = 2


def check_results(results):
    for n, (total, gathered) in zip(SUM_SIZES, results, strict=True):
        addends = torch.stack([addend(n, rank) for rank in range(WORLD)])
        torch.testing.assert_close(torch.as_tensor(total), addends.sum(0), rtol=0, atol=1e-6)
        assert torch.equal(torch.as_tensor(gathered), addends)


def check_pushed(results, bf16_rtol=0.0):
    """Sums in fp32, rounded once, the same bits on all ranks; nothing written behind them."""
    for (dtype, n, _), *outs in zip(push_cases(), *results, strict=True):
        total = sum(addend(n, rank).to(dtype).float() for rank in range(WORLD)).to(dtype)
        first, *others = (torch.as_tensor(out) for out in outs)
        rtol = bf16_rtol if dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(first[:n], total.float(), rtol=rtol, atol=0.0)
        assert first[n:].isnan().all()
        for other in others:
            assert torch.equal(other.view(torch.int32), first.view(torch.int32))


def run_ranks(target, num_results, *memory):
    """What each of two processes reports; ``memory``: tensors [WORLD] shared between them."""
    context = torch.multiprocessing.get_context(workers.START_METHOD)
    pipes, processes = [], []
    for rank in range(WORLD):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=target, args=(rank, *memory, theirs), daemon=True))
        pipes.append(ours)
        with hidden_main_module():
            processes[-1].start()
    results: list[list] = [[] for _ in pipes]
    for _ in range(num_results):  # in turn: a full pipe would stop its rank, and the other one with it
        for pipe, received in zip(pipes, results, strict=True):
            assert pipe.poll(60)
            received.append(pipe.recv())
    for process in processes:
        process.join(10)
    return results


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_one_shot_between_processes():
    pytest.importorskip("triton")
    buffers = [torch.zeros(2 * SUM_CAPACITY).share_memory_() for _ in range(WORLD)]
    signal_pads = [torch.zeros(WORLD, SUM_PROGRAMS, dtype=torch.int64).share_memory_() for _ in range(WORLD)]
    for received in run_ranks(worker_mains.reduce_and_gather, len(SUM_SIZES), buffers, signal_pads):
        check_results(received)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_push_between_processes():
    """Types and sizes, in both halves, across the wrap-around of 32-bit epochs."""
    pytest.importorskip("triton")
    buffers = [torch.zeros(2, WORLD, PUSH_CAPACITY, dtype=torch.int64).share_memory_() for _ in range(WORLD)]
    results = run_ranks(worker_mains.push, len(list(push_cases())), buffers)
    check_pushed(results, bf16_rtol=2**-7)  # the interpreter does not round to bf16, but truncates


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_push_takes_the_words_of_its_epoch_only():
    """One rank with the other's words laid out by hand: what it stores and sums, and what it waits for."""
    pytest.importorskip("triton")
    from nanovllm.kernels.all_reduce import push_kernel

    rank, block, n = 1, 64, 100
    buffers = torch.zeros(WORLD, 2, WORLD, 2 * block, dtype=torch.int64)
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    epochs, abort_flag = torch.full((2,), 2**32 - 1), torch.zeros(1, dtype=torch.int64)
    xs = [addend(n, r) for r in range(WORLD)]

    def launch():
        out = torch.full((n,), float("nan"))
        push_kernel[(2,)](
            xs[rank], out, addresses, epochs, abort_flag, n, 2 * block,
            RANK=rank, WORLD=WORLD, BLOCK=block, POLLS=2, THREADS=32, USE_PDL=False,
        )  # fmt: skip
        return out

    for epoch in (2**32, 2**32 + 1):
        tag, half = epoch % 2**32 << 32, epoch % 2
        buffers[rank, half, 0] = tag  # also where x has no word: the others store whole blocks
        buffers[rank, half, 0, :n] |= xs[0].view(torch.int32).long() & 0xFFFFFFFF
        if epoch == 2**32:  # an epoch of zero in 32 bits: what is zero from the start must not pass for it
            buffers[rank, half, 0, n] = -2 << 32  # left there two epochs before
            abort_flag.fill_(1)
            launch()
            assert epochs.tolist() == [2**32, 2**32 | 1 << 62]  # only the program of that word was aborted
            abort_flag.zero_()
            epochs.fill_(2**32)
            continue
        assert torch.equal(launch(), xs[0] + xs[1])
        assert epochs.tolist() == [epoch, epoch]
        sent = buffers[0, half, rank]
        assert torch.equal(sent >> 32, torch.full((2 * block,), epoch % 2**32))
        assert torch.equal(sent[:n].int().view(torch.float32), xs[rank])
        assert not buffers[rank, :, rank].any()  # its own words stay in registers

    epochs |= 1 << 62  # aborted before: no wait, although nothing has come, and the flag is not read
    launch()
    assert epochs.tolist() == [2**32 + 2 | 1 << 62] * 2


def run_on_streams(launch, num_cases, zeroed, before=lambda rank, i: None):
    """Each case of ``launch(rank, case)`` on two ranks of one GPU, a stream each, which it returns.

    ``zeroed``: state of the ranks to begin with. ``before(rank, case)`` runs on the rank's stream.
    """
    streams = [torch.cuda.Stream() for _ in range(WORLD)]
    for i in range(num_cases):  # the driver loads no kernel while another one runs: load all of them first
        for rank in range(WORLD):
            launch(rank, i)
    torch.cuda.synchronize()
    for tensor in zeroed:
        tensor.zero_()
    torch.cuda.synchronize()
    for i in range(num_cases):
        for rank in range(WORLD):
            with torch.cuda.stream(streams[rank]):
                before(rank, i)
                launch(rank, i)
    torch.cuda.synchronize()
    return streams


def check_release(launch, stream, abort_flag):
    """Rank 0 waits for a peer that never launches, until its abort flag is set."""
    with torch.cuda.stream(stream):
        launch(0, 0)
        launch(0, 1)
    time.sleep(0.05)
    assert not stream.query()
    abort_flag.fill_(1)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_one_shot_between_streams():
    """Two ranks on one GPU; then one whose peer never launches, released by its abort flag."""
    from nanovllm.kernels.all_reduce import one_shot

    buffers = [torch.zeros(2 * SUM_CAPACITY, device="cuda") for _ in range(WORLD)]
    signal_pads = [torch.zeros(WORLD, SUM_PROGRAMS, dtype=torch.int64, device="cuda") for _ in range(WORLD)]
    addresses = [torch.tensor([t.data_ptr() for t in tensors], device="cuda") for tensors in (buffers, signal_pads)]
    epochs = [torch.zeros(SUM_PROGRAMS, dtype=torch.int64, device="cuda") for _ in range(WORLD)]
    xs = [[addend(n, rank).cuda() for n in SUM_SIZES] for rank in range(WORLD)]
    outs = [[torch.full((WORLD + 1, *x.shape), float("nan"), device="cuda") for x in xs[rank]] for rank in range(WORLD)]
    abort_flags = [torch.ones(1, dtype=torch.int64).pin_memory() for _ in range(WORLD)]

    def launch(rank, i):
        arguments = (*addresses, epochs[rank], abort_flags[rank], SUM_CAPACITY, rank, WORLD)
        one_shot(xs[rank][i], outs[rank][i][0], *arguments, block=512, num_warps=4)
        one_shot(xs[rank][i], outs[rank][i][1:], *arguments, gather=True, block=512, num_warps=4)

    streams = run_on_streams(launch, len(SUM_SIZES), [*abort_flags, *signal_pads, *epochs])
    for rank in range(WORLD):
        check_results([(out[0].cpu(), out[1:].cpu()) for out in outs[rank]])
    check_release(launch, streams[0], abort_flags[0])


@pytest.mark.gpu
def test_push_between_streams():
    """As `test_one_shot_between_streams`."""
    from nanovllm.kernels.all_reduce import push_all_reduce

    buffers = [torch.zeros(2, WORLD, PUSH_CAPACITY, dtype=torch.int64, device="cuda") for _ in range(WORLD)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], device="cuda")
    epochs = [torch.zeros(PUSH_CAPACITY // PUSH_BLOCK, dtype=torch.int64, device="cuda") for _ in range(WORLD)]
    cases = list(push_cases())
    xs = [[addend(n, rank).to(dtype).cuda() for dtype, n, _ in cases] for rank in range(WORLD)]
    outs = [[torch.cat([x, x[:1], x[:1]]).fill_(float("nan")) for x in xs[rank]] for rank in range(WORLD)]
    abort_flags = [torch.ones(1, dtype=torch.int64).pin_memory() for _ in range(WORLD)]

    def launch(rank, i):
        x, out = xs[rank][i], outs[rank][i][:-2]
        arguments = (addresses, epochs[rank], abort_flags[rank], PUSH_CAPACITY, rank, WORLD)
        push_all_reduce(x, out, *arguments, block=PUSH_BLOCK)

    def advance(rank, i):
        epochs[rank] += cases[i][2]

    streams = run_on_streams(launch, len(cases), [*abort_flags, *buffers, *epochs], advance)
    check_pushed([[out.cpu().float() for out in outs[rank]] for rank in range(WORLD)])
    check_release(launch, streams[0], abort_flags[0])


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

"""The all-reduce kernel between ranks, what goes through peer memory, and how the ranks agree and connect."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import worker_mains
from worker_mains import PUSH_BLOCK, PUSH_CAPACITY, SUM_LENGTHS, addend, peer_memory_of, push_cases

from nanovllm.distributed import workers
from nanovllm.distributed.peer_memory import PeerMemory, RenumberedStore
from nanovllm.distributed.workers import hidden_main_module

WORLD = 3


def check_pushed(results, bf16_rtol=0.0):
    """Sums in fp32, rounded once, the same bits on all ranks; gathers copy; nothing written behind either."""
    for (dtype, n), *ranks in zip(push_cases(), *results, strict=True):
        addends = torch.stack([addend(n, rank).to(dtype) for rank in range(WORLD)]).float()
        rtol = bf16_rtol if dtype == torch.bfloat16 else 0.0
        first = torch.as_tensor(ranks[0][0])
        total = sum(addends[1:], addends[0]).to(dtype).float()
        torch.testing.assert_close(first[:n], total, rtol=rtol, atol=0.0)
        for out, gathered in ranks:
            out, gathered = torch.as_tensor(out), torch.as_tensor(gathered)
            assert out[n:].isnan().all() and gathered[-2:].isnan().all()
            assert torch.equal(out.view(torch.int32), first.view(torch.int32))
            assert torch.equal(gathered[:-2].view(-1, n), addends)


def run_ranks(target, num_results, memory, world=2):
    """What each of ``world`` processes reports; ``memory``: what they share."""
    context = torch.multiprocessing.get_context(workers.START_METHOD)
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=target, args=(rank, memory, theirs), daemon=True))
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
def test_push_between_processes():
    """Types and sizes, in both halves of the buffers."""
    pytest.importorskip("triton")
    buffers = [torch.full((2, WORLD - 1, PUSH_CAPACITY), -1, dtype=torch.int32).share_memory_() for _ in range(WORLD)]
    results = run_ranks(worker_mains.push_rank, len(list(push_cases())), buffers, WORLD)
    check_pushed(results, bf16_rtol=2**-7)  # the interpreter does not round to bf16, but truncates
    for buffer in buffers:
        assert (buffer == -1).all()  # as it was


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_push_waits_for_words_and_leaves_none(dtype):
    """One rank with the others' words laid out by hand: what it stores, sums and empties, and what it waits for."""
    pytest.importorskip("triton")
    from nanovllm.kernels.all_reduce import push_kernel

    rank, block, num_words = 1, 64, 100
    n = num_words * 4 // dtype.itemsize
    buffers = torch.full((WORLD, 2, WORLD - 1, 2 * block), -1, dtype=torch.int32)
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    launches, abort_flag = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    xs = [(addend(n, r) * 8).round().to(dtype) for r in range(WORLD)]  # sums are exact
    xs[rank].view(torch.int32)[3] = -1  # the NaNs that mean EMPTY, as data

    def launch():
        out = torch.full((n,), 7.0).to(dtype)
        push_kernel[(2,)](
            xs[rank], out, addresses, launches, abort_flag, num_words, 2 * block,
            RANK=rank, WORLD=WORLD, BLOCK=block, POLLS=2, THREADS=32, GATHER=False, USE_PDL=False,
        )  # fmt: skip
        return out

    for count in (1, 2, 3):
        received = buffers[rank, count % 2]
        received[:] = 0  # also where x has no word: the others store whole blocks
        for place, source in enumerate((0, 2)):
            received[place, :num_words] = xs[source].view(torch.int32)
        torch.testing.assert_close(launch(), xs[0] + xs[1] + xs[2], rtol=0.0, atol=0.0, equal_nan=True)
        assert launches.tolist() == [count, count]
        expected = xs[rank].clone()
        expected.view(torch.int32)[3] = 0x7FFF7FFF
        for sent in (buffers[0, count % 2, 0], buffers[2, count % 2, 1]):
            assert (sent != -1).all() and not sent[num_words:].any()
            assert torch.equal(sent[:num_words], expected.view(torch.int32))
        assert expected.view(torch.int32).view(dtype).isnan().sum() == 4 // dtype.itemsize
        assert (buffers[rank] == -1).all()  # emptied; its own words stay in registers

    buffers[rank, 0] = 0
    buffers[rank, 0, 1, num_words] = -1  # one has not come, of the second program
    abort_flag.fill_(1)
    launch()
    assert launches.tolist() == [4, 4 | 1 << 62]  # only the program of that word was aborted
    abort_flag.zero_()
    launches |= 1 << 62  # aborted before: no wait, although nothing has come, and the flag is not read
    launch()
    assert launches.tolist() == [5 | 1 << 62] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_two_ranks_sum_tensors_of_any_length_in_place():
    pytest.importorskip("triton")
    buffers = [torch.full((2, 1, PUSH_CAPACITY), -1, dtype=torch.int32).share_memory_() for _ in range(2)]
    for n, *ranks in zip(SUM_LENGTHS, *run_ranks(worker_mains.sum_rank, len(SUM_LENGTHS), buffers), strict=True):
        addends = torch.stack([addend(n, rank) for rank in range(2)])
        for total, gathered in ranks:
            assert torch.equal(torch.as_tensor(total), addends[0] + addends[1])
            assert gathered is None if n > PUSH_CAPACITY else torch.equal(torch.as_tensor(gathered), addends)


def test_what_goes_through_peer_memory():
    """The rest is NCCL's: other types, halves of words, and with more than two ranks what is longer than a launch."""
    pytest.importorskip("triton")
    for size in (2, 4):
        buffers = [torch.full((2, size - 1, PUSH_CAPACITY), -1, dtype=torch.int32) for _ in range(size)]
        memory = peer_memory_of(buffers, 0)
        fits, longer = torch.zeros(PUSH_CAPACITY), torch.zeros(PUSH_CAPACITY + 1)
        assert memory.can_reduce(fits) and memory.can_gather(fits)
        assert memory.can_reduce(longer) == (size == 2) and not memory.can_gather(longer)
        halves = torch.zeros(7, dtype=torch.bfloat16)
        for x in (fits.int(), fits.view(2, -1).t(), halves, halves[1:]):
            assert not memory.can_reduce(x) and not memory.can_gather(x)
        assert memory.can_reduce(halves[:6])


@pytest.mark.parametrize(
    ("size", "failing", "expected"), [(2, None, True), (2, 1, False), (3, None, False), (4, 2, False), (8, None, True)]
)
def test_all_ranks_have_peer_memory_or_none(size, failing, expected, tmp_path, monkeypatch):
    """Three ranks have no figures; a rank that cannot connect would leave the others waiting."""

    class Connected(PeerMemory):
        def __init__(self, store, rank, *_):
            if rank == failing:
                raise RuntimeError("no peer access")

    def connect(rank):
        store = dist.FileStore(str(tmp_path / "store"), size)
        store.set_timeout(timedelta(seconds=20))
        return Connected.connect(store, rank, size, torch.device("cuda", rank), "group")

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    with ThreadPoolExecutor(size) as pool:
        assert [memory is not None for memory in pool.map(connect, range(size))] == [expected] * size


@pytest.mark.gpu
def test_push_between_streams():
    """Ranks on one GPU; then one whose peer never launches, released by its abort flag."""
    from nanovllm.kernels.all_reduce import push

    shape = 2, WORLD - 1, PUSH_CAPACITY
    buffers = [torch.full(shape, -1, dtype=torch.int32, device="cuda") for _ in range(WORLD)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], device="cuda")
    launches = [torch.zeros(PUSH_CAPACITY // PUSH_BLOCK, dtype=torch.int64, device="cuda") for _ in range(WORLD)]
    cases = list(push_cases())
    xs = [[addend(n, rank).to(dtype).cuda() for dtype, n in cases] for rank in range(WORLD)]
    outs = [[x.new_full((x.numel() + 2,), float("nan")) for x in xs[rank]] for rank in range(WORLD)]
    gathered = [[x.new_full((WORLD * x.numel() + 2,), float("nan")) for x in xs[rank]] for rank in range(WORLD)]
    abort_flags = [torch.ones(1, dtype=torch.int64).pin_memory() for _ in range(WORLD)]

    def launch(rank, i):
        arguments = (addresses, launches[rank], abort_flags[rank], PUSH_CAPACITY, rank, WORLD)
        push(xs[rank][i], outs[rank][i][:-2], *arguments, block=PUSH_BLOCK, num_warps=4)
        push(xs[rank][i], gathered[rank][i][:-2], *arguments, gather=True, block=PUSH_BLOCK, num_warps=4)

    places = [(rank, i) for i in range(len(cases)) for rank in range(WORLD)]
    for place in places:  # the driver loads no kernel while another one runs: load all of them first
        launch(*place)
    torch.cuda.synchronize()
    for tensor in (*abort_flags, *launches):
        tensor.zero_()
    for buffer in buffers:
        buffer.fill_(-1)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(WORLD)]
    for rank, i in places:
        with torch.cuda.stream(streams[rank]):
            launch(rank, i)
    torch.cuda.synchronize()
    ranks = [zip(outs[rank], gathered[rank], strict=True) for rank in range(WORLD)]
    check_pushed([[tuple(result.cpu().float() for result in results) for results in rank] for rank in ranks])
    assert all((buffer == -1).all() for buffer in buffers)
    with torch.cuda.stream(streams[0]):  # rank 0 waits for a peer that never launches
        launch(0, 0)
        launch(0, 1)
    time.sleep(0.05)
    assert not streams[0].query()
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

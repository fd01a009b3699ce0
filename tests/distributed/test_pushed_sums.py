"""Sums by copies into the other rank's memory: right values and the same bits on both ranks, whoever is late."""

import time

import pytest
import torch
import worker_mains
from helpers import gpu_param, interpret_fp8_exactly
from test_peer_memory import run_ranks
from worker_mains import NUM_SUMS, SUM_BYTES, halves, partial_sum, sum_halves

from nanovllm.distributed.pushed_sums import FLAG_BYTES, PushedSums, region_bytes

WORLD = 2


def check(results):
    numbers = [n for _, n, begins in halves() if not begins]
    assert len(numbers) == NUM_SUMS
    for n, total, other in zip(numbers, *results, strict=True):
        expected = sum(partial_sum(n, rank).float() for rank in range(WORLD)).to(partial_sum(n, 0).dtype)
        assert torch.equal(torch.as_tensor(total), expected.float()), n
        assert torch.equal(torch.as_tensor(other), torch.as_tensor(total)), n


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_between_processes():
    """Slots, epochs and their wrap-around, ranks that wait for each other at random."""
    pytest.importorskip("triton")
    regions = [torch.zeros(region_bytes(SUM_BYTES), dtype=torch.uint8).share_memory_() for _ in range(WORLD)]
    check(run_ranks(worker_mains.push_halves, NUM_SUMS, regions))
    flags = [region[:FLAG_BYTES].view(torch.int64)[::16].tolist() for region in regions]
    assert flags[0] == flags[1] and 0 not in flags[0]


@pytest.mark.gpu
def test_between_streams():
    """Two ranks on one GPU; then one whose peer sends nothing, released by its abort flag."""
    regions = [torch.zeros(region_bytes(SUM_BYTES), dtype=torch.uint8, device="cuda") for _ in range(WORLD)]
    abort_flags = [torch.ones(1, dtype=torch.int64).pin_memory() for _ in range(WORLD)]
    sums = [PushedSums(regions[rank], regions[1 - rank], abort_flags[rank]) for rank in range(WORLD)]
    streams = [torch.cuda.Stream() for _ in range(WORLD)]
    # waits if it is copied
    partial_sums = [[partial_sum(n, rank).cuda() for n in range(NUM_SUMS)] for rank in range(WORLD)]

    def run(rank):
        with torch.cuda.stream(streams[rank]):
            return sum_halves(sums[rank], partial_sums[rank], lambda: torch.cuda._sleep(100_000))

    for rank in range(WORLD):  # aborted: nothing waits while kernels are loaded
        run(rank)
    torch.cuda.synchronize()
    for tensor in (*abort_flags, *regions, *(s.aborted for s in sums)):
        tensor.zero_()
    torch.cuda.synchronize()
    results = [run(rank) for rank in range(WORLD)]
    torch.cuda.synchronize()
    check([[total.float().cpu() for total in totals] for totals in results])

    with torch.cuda.stream(streams[0]):
        for _ in range(3):
            sums[0].begin(partial_sums[0][1].clone(), 0).wait()
    time.sleep(0.05)
    assert not streams[0].query()  # it waits for rank 1
    abort_flags[0].fill_(1)
    torch.cuda.synchronize()


@pytest.mark.multigpu
@pytest.mark.gpu
def test_between_gpus(tmp_path):
    check(run_ranks(worker_mains.push_halves_on_gpus, NUM_SUMS, str(tmp_path)))


@pytest.mark.parametrize("dtype", [torch.float16, gpu_param(torch.bfloat16), torch.float32])
@pytest.mark.parametrize("quantized", [False, True])
def test_the_norm_adds_partial_sums(dtype, quantized, monkeypatch):
    """Rounded once, the same bits whichever rank's is its own; nothing beyond the tokens is read."""
    pytest.importorskip("triton")
    from nanovllm.kernels.linear.norm import SplitKPartials, rms_norm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    interpret_fp8_exactly(monkeypatch)
    a, b = (torch.randn(5, 200, dtype=dtype, device=device) for _ in range(2))
    received = torch.cat((b, b.new_full((1, 200), torch.nan)))[:5]
    weight = torch.randn(200, dtype=dtype, device=device)
    total, own = (a.float() + b.float()).to(dtype), a.clone()
    given = rms_norm(SplitKPartials(own, received[None]), weight, 1e-6, quantized)
    assert torch.equal(own, total)
    want = rms_norm(total, weight, 1e-6, quantized)
    if quantized:
        assert torch.equal(given.scale, want.scale)
        given, want = given.data.float(), want.data.float()
    assert torch.equal(given, want)
    other = b.clone()
    rms_norm(SplitKPartials(other, a[None]), weight, 1e-6)
    assert torch.equal(other, total)

"""Collectives between ranks on the CPU, as threads of one process. The engine's tests run them on GPUs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from nanovllm.distributed.group import SINGLE_RANK, TPGroup


@pytest.fixture
def groups(tmp_path):
    """A group of two ranks."""
    connect, cpu = TPGroup.connect, torch.device("cpu")
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(connect, rank, 2, cpu, str(tmp_path), 30.0) for rank in range(2)]
        groups = [future.result() for future in futures]
    yield groups
    for tp in groups:
        assert tp.drain(1.0)
        tp.close()


def on_all(groups, collective):
    with ThreadPoolExecutor() as pool:
        return list(pool.map(collective, groups))


@pytest.mark.parametrize("shape", [(1,), (3, 5), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_collectives(groups, shape, dtype):
    xs = [(torch.arange(15)[: torch.Size(shape).numel()].reshape(shape) + 10 * rank).to(dtype) for rank in range(2)]
    for total in on_all(groups, lambda tp: tp.all_reduce(xs[tp.rank].clone())):
        assert torch.equal(total, xs[0] + xs[1])
    for gathered in on_all(groups, lambda tp: tp.all_gather(xs[tp.rank].mT if len(shape) > 1 else xs[tp.rank])):
        assert torch.equal(gathered, torch.stack([x.mT if len(shape) > 1 else x for x in xs]))


def test_a_single_rank_keeps_its_tensor():
    x = torch.arange(6).view(2, 3)
    assert SINGLE_RANK.all_reduce(x) is x
    assert torch.equal(SINGLE_RANK.all_gather(x), x[None])
    assert SINGLE_RANK.drain(0.0)
    SINGLE_RANK.close()


def test_the_default_process_group_is_left_to_the_user(groups):
    assert not dist.is_initialized()

"""Collectives between ranks on the CPU, as threads of one process. The engine's tests run them on GPUs."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

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


class Backend:
    """Counts its collectives."""

    calls = 0

    def allreduce(self, tensors, options):
        self.calls += 1


def test_collectives_wait_for_the_communicator():
    x, backend, communicator = torch.ones(3), Backend(), Future()
    tp = TPGroup(0, 2, backend, communicator=communicator)
    assert TPGroup(0, 2, backend, communicator=communicator, is_compiling=lambda: True).all_reduce(x) is x
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(tp.all_reduce, x)
        time.sleep(0.05)
        assert backend.calls == 0 and not pending.done()
        communicator.set_result(None)
        assert pending.result(10) is x and backend.calls == 1


def test_join_polls_as_it_is_told_and_raises_what_connecting_raised():
    communicator, conditions = Future(), []
    tp = TPGroup(0, 2, Backend(), communicator=communicator)

    def wait_until(condition):
        conditions.append(condition())
        communicator.set_exception(RuntimeError("no route"))
        conditions.append(condition())

    with pytest.raises(RuntimeError, match="no route"):
        tp.join(wait_until)
    assert conditions == [False, True]
    SINGLE_RANK.join(wait_until)
    assert len(conditions) == 2  # nothing to wait for

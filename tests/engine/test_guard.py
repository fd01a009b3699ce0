"""No full garbage collection during a run, and no garbage left because of it."""

import gc
import weakref

import pytest
from helpers import greedy

from nanovllm.engine.guard import Guard


@pytest.fixture
def gc_threshold():
    """gc_threshold(*values) sets the thresholds for the length of a test."""
    before = gc.get_threshold()
    gc.unfreeze()  # what the tests before have imported counts again
    gc.collect()  # a full collection that is due comes now
    yield gc.set_threshold
    gc.set_threshold(*before)


def test_generate_runs_no_full_collection(make_llm, gc_threshold, monkeypatch):
    """In one run of three a full collection walked every torch object, and the device idled for 0.1 s."""
    llm, kept, generations = make_llm(), [], []
    forward = llm.model_runner.forward
    enough = len(gc.get_objects()) // 2  # Python waits for a quarter more old objects

    def record(phase, info):
        generations.append(info["generation"])

    llm.model_runner.forward = lambda batch: kept.extend([] for _ in range(enough)) or forward(batch)
    gc_threshold(20_000, 1, 1)
    gc.callbacks.append(record)
    try:
        llm.generate([[5, 6]], greedy(2), use_tqdm=False)
    finally:
        gc.callbacks.remove(record)
    assert set(generations) == {0, 1} and gc.get_threshold() == (20_000, 1, 1)
    monkeypatch.setattr(llm.model_runner, "forward", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate([[5, 6]], greedy(3), use_tqdm=False)
    assert gc.get_threshold() == (20_000, 1, 1)


def test_runs_of_two_engines_overlap(gc_threshold):
    """In two threads; the one that ends last must not restore the other's pause."""
    gc_threshold(100, 2, 3)
    first, second = Guard(), Guard()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (100, 2, 3)


def test_garbage_between_runs_is_collected(make_llm, gc_threshold):
    """gc.freeze() for the length of a run made old objects of young garbage: only a full collection found it."""
    llm, alive = make_llm(), weakref.WeakSet()

    class Node:
        pass

    gc_threshold(50, 2, 1 << 20)  # no full collection between the runs either
    for _ in range(40):
        node = Node()
        node.itself = node
        alive.add(node)
        del node
        llm.generate([[5, 6]], greedy(1), use_tqdm=False)
    assert len(alive) < 10

"""Futures of ``LLM.submit``: whoever steps the engine resolves them, and ``result`` steps it itself if nobody does."""

import asyncio
import threading
from concurrent.futures import CancelledError, as_completed, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from itertools import pairwise

import pytest
from helpers import generate, greedy, in_threads, prompt_of, run_ahead
from leaks import check_is_empty

from nanovllm import LLM, EngineError, RequestError, SamplingParams
from nanovllm.engine.request import Request


@pytest.mark.parametrize("ahead", [False, True])
def test_results_are_those_of_generate(make_llm, reference, ahead):
    """Asked for in any order, after more were submitted than run at a time."""
    llm = run_ahead(make_llm(max_num_seqs=3)) if ahead else make_llm(max_num_seqs=3)
    prompts = [prompt_of(5, seed=i) for i in range(8)]
    futures = [llm.submit(prompt, greedy(2 + i)) for i, prompt in enumerate(prompts)]
    assert not any(future.done() for future in futures) and futures[0].running()
    for i in (6, 0, 7, 3):
        output = futures[i].result()
        assert output["token_ids"] == reference(prompts[i], 2 + i) and output.request_id == str(futures[i].request_id)
    assert all(future.exception() is None for future in futures)
    check_is_empty(llm)


def test_any_step_resolves_them(make_llm, reference):
    """Those of ``generate``, of a stream, of ``step``; which report their own requests only."""
    llm = make_llm()
    first = llm.submit(prompt_of(5), greedy(3))
    assert generate(llm, [prompt_of(6)], greedy(6)) == [reference(prompt_of(6), 6)] and first.done()
    second = llm.submit(prompt_of(5), greedy(3))
    assert len(list(llm.stream([prompt_of(6)], greedy(6)))) == 1 and second.done()
    third, added = llm.submit(prompt_of(5), greedy(3)), llm.add_request(prompt_of(6), greedy(6))
    finished = []
    while not llm.is_finished():
        finished += llm.step()[0]
    assert finished == [(added, reference(prompt_of(6), 6))]
    for future in (first, second, third):
        assert future.done() and future.result()["token_ids"] == reference(prompt_of(5), 3)


def test_deltas():
    """After each step the new tokens, or all until now; the last is finished."""
    params = SamplingParams(temperature=0, max_tokens=12, stop="9", logprobs=0)
    with LLM(device="cpu", num_kvcache_blocks=16, quiet=True) as llm:
        expected = llm.generate("count to 30", params, use_tqdm=False)[0]
        new, whole = (llm.submit("count to 30", params) for _ in range(2))
        deltas, wholes = [], []
        while not llm.is_finished():
            llm.step()
            deltas += filter(None, [new.delta()])
            wholes += filter(None, [whole.delta(cumulative=True)])
        assert [output.finished for output in wholes] == [False] * (len(wholes) - 1) + [True]
        texts = [output["text"] for output in wholes]
        assert len(set(texts)) > 3 and all(after.startswith(before) for before, after in pairwise(texts))
        assert "".join(output["text"] for output in deltas) == texts[-1] == expected["text"]
        assert wholes[-1].outputs[0].logprobs == expected.outputs[0].logprobs
        assert whole.result()["text"] == expected["text"]


def test_refused_aborted_dropped(make_llm, monkeypatch):
    llm = make_llm()
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.submit([10**6])
    future, mate = llm.submit(prompt_of(5), greedy(30)), llm.submit(prompt_of(5), greedy(3))
    llm.step()
    llm.abort(future.request_id)
    assert future.done() and not mate.done()
    with pytest.raises(EngineError, match=r"this request was aborted\."):
        future.result()
    assert len(mate.result()["token_ids"]) == 3
    futures = [llm.submit(prompt_of(5), greedy(30)) for _ in range(2)]
    monkeypatch.setattr(llm.model_runner, "forward", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        futures[0].result()
    monkeypatch.undo()
    for future in futures:
        with pytest.raises(EngineError, match="dropped, because a step of this engine failed"):
            future.result()
    check_is_empty(llm)
    assert len(llm.submit(prompt_of(5), greedy(3)).result()["token_ids"]) == 3


def test_timeout_and_exit(make_llm):
    llm = make_llm()
    future = llm.submit(prompt_of(5), greedy(400))
    with pytest.raises((TimeoutError, FutureTimeoutError)):
        future.result(timeout=0.01)
    with pytest.raises((TimeoutError, FutureTimeoutError)):
        future.exception(timeout=0)
    llm.exit()
    with pytest.raises(EngineError, match="this engine is shut down"):
        future.result()
    orphan = LLM(device="cpu", num_kvcache_blocks=16, quiet=True).submit("2 + 3", greedy(4))
    with pytest.raises(EngineError, match="the engine of this request is gone"):
        orphan.result()


def test_from_another_thread(make_llm, reference):
    """``result`` waits while another thread steps; then its own thread goes on."""
    llm, results = make_llm(), []
    futures = [llm.submit(prompt_of(5, seed=i), greedy(10 + 20 * i)) for i in range(3)]
    in_threads(*(lambda future=future: results.append(future.result(60)) for future in futures))
    assert sorted(len(output["token_ids"]) for output in results) == [10, 30, 50]
    assert futures[2].result()["token_ids"] == reference(prompt_of(5, seed=2), 50)


def test_callbacks_may_use_the_engine(make_llm, reference):
    """They run between two steps, and may submit what comes next."""
    llm, outputs = make_llm(), []

    def go_on(future):
        output = future.result()
        outputs.append(output["token_ids"])
        if len(outputs) < 3:
            llm.submit(output.prompt_token_ids + output["token_ids"], greedy(2)).add_done_callback(go_on)

    llm.submit(prompt_of(5), greedy(2)).add_done_callback(go_on)
    while not llm.is_finished():
        llm.step()
    assert [i for tokens in outputs for i in tokens] == reference(prompt_of(5), 6)


def test_in_asyncio_and_as_completed(make_llm):
    llm = make_llm()

    async def wait_for(future):
        wrapped = asyncio.wrap_future(future)
        while not wrapped.done():
            llm.step()
            await asyncio.sleep(0)
        return await wrapped

    assert len(asyncio.run(wait_for(llm.submit(prompt_of(5), greedy(4))))["token_ids"]) == 4
    futures = [llm.submit(prompt_of(5), greedy(n)) for n in (9, 2)]
    futures[0].result()
    assert {len(future.result()["token_ids"]) for future in as_completed(futures)} == {9, 2}


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_cancel_aborts(make_llm, reference, steps):
    """Waiting, at its prompt or amid its tokens: its mates go on, and the blocks are free."""
    llm, told = make_llm(max_num_seqs=2), []
    first, mate, last = (llm.submit(prompt_of(5, seed=i), greedy(9)) for i in range(3))
    for _ in range(steps):
        llm.step()
    for future in (first, last):
        future.add_done_callback(told.append)
        assert future.cancel() and future.cancelled() and future.done() and not future.running()
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result()
        with pytest.raises(CancelledError):
            future.exception()
    assert told == [first, last] and not llm.is_finished()
    assert wait([first, last], 10).done == {first, last}
    assert mate.result()["token_ids"] == reference(prompt_of(5, seed=1), 9) and not mate.cancel()
    check_is_empty(llm)
    orphan = llm.submit(prompt_of(5), greedy(3))
    llm.exit()
    assert orphan.cancel() and orphan.cancelled()


def test_cancel_by_asyncio_and_from_another_thread(make_llm, reference):
    llm = make_llm()

    async def leave():
        wrapped = asyncio.wrap_future(future)
        llm.step()
        wrapped.cancel()
        await asyncio.sleep(0.01)

    future = llm.submit(prompt_of(5), greedy(400))
    asyncio.run(leave())
    assert future.cancelled() and llm.is_finished()
    future, mate = llm.submit(prompt_of(5), greedy(4000)), llm.submit(prompt_of(6), greedy(200))
    thread = threading.Thread(target=future.cancel)
    mate.result(0.05) if mate.done() else llm.step()
    thread.start()
    assert mate.result()["token_ids"] == reference(prompt_of(6), 200)
    thread.join()
    assert future.cancelled()
    check_is_empty(llm)


def test_cancel_does_not_stop_the_thread_that_steps(make_llm, reference):
    """While ``cancel`` aborted a request, the step of the other thread was refused, and ended it."""
    llm, errors = make_llm(), []
    mate, *others = (llm.submit(prompt_of(6), greedy(n)) for n in [200, *[4000] * 79])

    def loop():
        try:
            while not mate.done():
                llm.step()
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    assert all(future.cancel() for future in others)
    thread.join(60)
    assert not errors and mate.result()["token_ids"] == reference(prompt_of(6), 200)
    check_is_empty(llm)


def test_a_device_that_is_lost_while_it_is_cleaned(make_llm, monkeypatch):
    """``result`` waited for ever: its future was never told."""
    llm = make_llm()
    future = llm.submit(prompt_of(3), greedy(5))
    monkeypatch.setattr(llm.model_runner, "forward", lambda batch: 1 / 0)
    monkeypatch.setattr(llm.model_runner, "reset", lambda: [][1])
    with pytest.raises(IndexError):
        llm.step()
    with pytest.raises(EngineError, match="dropped"):
        future.result(5)


def test_a_loop_until_is_finished_resolves_every_future(monkeypatch):
    """Texts are made on another thread: the last was still to come when ``is_finished`` was True."""
    with LLM(device="cpu", num_kvcache_blocks=16, quiet=True) as llm:
        monkeypatch.setattr(Request, "has_text", False)  # not yet there after any step
        futures = [llm.submit("count to 30", greedy(n)) for n in (3, 7)]
        while not llm.is_finished():
            llm.step()
        assert all(future.done() for future in futures)
        future = llm.submit("count to 30", greedy(3))
        llm.generate("2 + 3", greedy(9), use_tqdm=False)
        assert not future.done() and llm.reset_prefix_cache() and future.done()  # for it an idle engine is enough
        future = llm.submit("count to 30", greedy(3))
        while (output := future.delta()) is None or not output.finished:
            llm.step()
        assert future.done() and llm.is_finished()

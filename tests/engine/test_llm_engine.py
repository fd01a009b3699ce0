"""The whole engine against transformers: limits, calls beside each other, threads. Every way: ``test_ways.py``."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from helpers import DEVICES, generate, greedy, in_threads, needs, prompt_of, run_ahead, tokens_of
from leaks import check_is_empty, finish

from nanovllm import EngineError
from nanovllm.engine.guard import Guard
from nanovllm.engine.request import Request


@pytest.mark.parametrize("device", DEVICES)
def test_growth_to_max_model_len(make_llm, reference, device):
    """The last token allowed was written one past the end of the tables, or the sequence stopped one short."""
    llm = make_llm(device=device, dtype="float32", max_model_len=48)
    prompts = [prompt_of(10), prompt_of(47)]
    outputs = llm.generate(prompts, greedy(2**40), use_tqdm=False)
    assert tokens_of(outputs) == [reference(prompts[0], 38), reference(prompts[1], 1)]
    assert [output["finish_reason"] for output in outputs] == ["length"] * 2
    assert llm.generate([], use_tqdm=False) == []


CALLS = {
    "generate": lambda llm, prompt: llm.generate([prompt], greedy(12), use_tqdm=False),
    "stream": lambda llm, prompt: list(llm.stream(prompt, greedy(12))),
    "score": lambda llm, prompt: llm.score([prompt]),
}


@pytest.mark.parametrize("call", ["generate", "stream", pytest.param("score", marks=needs("verbs.scoring"))])
def test_requests_that_were_added_run_along_with_a_call(make_llm, reference, call):
    """A call was refused while they were under way. They stay the caller's: ``step`` reports them afterwards."""
    alone, llm = make_llm(), run_ahead(make_llm(num_kvcache_blocks=8, max_num_batched_tokens=20))
    early, late = prompt_of(9), prompt_of(30)
    expected = {llm.add_request(early, greedy(4)): reference(early, 4)}
    llm.step()
    expected[llm.add_request(late, greedy(40))] = reference(late, 40)
    outputs, of_alone = (CALLS[call](each, prompt_of(7)) for each in (llm, alone))
    if call == "score":
        assert outputs[0].logprobs == pytest.approx(of_alone[0].logprobs, abs=1e-4)
    else:
        assert [i for output in outputs for i in output["token_ids"]] == reference(prompt_of(7), 12)
    assert not llm.is_finished()
    assert finish(llm) == expected
    check_is_empty(llm)


def test_two_calls_at_a_time(make_llm, reference):
    """A stream that is read while another runs: each gets its own outputs; the one closed early takes nobody along."""
    llm, prompts = make_llm(max_num_seqs=3), [prompt_of(n) for n in (5, 6, 7, 8)]
    first, second = (llm.stream(prompts, greedy(n)) for n in (6, 9))
    outputs = [next(first), next(second), *first]
    assert {output.index: output["token_ids"] for output in outputs if len(output["token_ids"]) == 6} == {
        i: reference(prompt, 6) for i, prompt in enumerate(prompts)
    }
    assert outputs[1]["token_ids"] == reference(prompts[outputs[1].index], 9)
    second.close()
    assert generate(llm, prompts[:1], greedy(3)) == [reference(prompts[0], 3)]
    assert llm.is_finished() and llm.scheduler.block_manager.num_available == len(llm.scheduler.block_manager.blocks)


def test_two_threads(make_llm, reference):
    """Each took the other's tokens; later, the second thread's requests were queued and aborted while the first one was
    inside a step: IndexErrors there."""
    llm, outcomes = make_llm(), []

    def use(prompt):
        for _ in range(60):
            try:
                outcomes.append(generate(llm, [prompt], greedy(6)) == [reference(prompt, 6)])
            except EngineError as error:
                outcomes.append(str(error))

    prompts = [5, 6], [7] * 20
    for prompt in prompts:
        reference(prompt, 6)  # the oracle is for one thread, too
    in_threads(*(partial(use, prompt) for prompt in prompts))
    refused = "this engine is in use by another thread; give each thread an LLM of its own."
    assert len(outcomes) == 120 and set(outcomes) == {True, refused}
    assert llm.is_finished()


def test_what_may_not_be_done_beside_another_threads_call(make_llm):
    """``exit`` took the model from under it; a refused ``step`` lost the news that requests were dropped."""
    llm, refused = make_llm(), "in use by another thread"
    llm.add_request([5, 6], greedy(3))
    forward = llm.model_runner.forward
    llm.model_runner.forward = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        llm.generate([[5, 6]], greedy(3), use_tqdm=False)
    llm.model_runner.forward = forward

    def beside(method):
        def inside(batch):
            with ThreadPoolExecutor(1) as pool, pytest.raises(EngineError, match=refused):
                pool.submit(method).result()
            return forward(batch)

        llm.model_runner.forward = inside
        llm.generate([[5, 6]], greedy(1), use_tqdm=False)
        llm.model_runner.forward = forward

    beside(llm.exit)
    beside(llm.step)
    assert not llm.is_finished()
    with pytest.raises(EngineError, match="dropped"):
        llm.step()
    assert llm.is_finished()


@pytest.mark.parametrize("where", ["_admit", "_growing"])
def test_a_stream_that_is_collected_within_the_scheduler(make_llm, reference, where):
    """Its requests left amid ``schedule``, which went on with them: IndexErrors, and all requests were dropped."""
    llm = make_llm(max_num_seqs=4, num_kvcache_blocks=64)
    scheduler, stream = llm.scheduler, llm.stream([prompt_of(9, seed=i) for i in range(12)], greedy(40))
    next(stream)
    prompts = [prompt_of(3, seed=i) for i in range(6)]
    ids = [llm.add_request(prompt, greedy(6)) for prompt in prompts]
    method, streams = getattr(scheduler, where), [stream]
    del stream

    def interrupted(*args):
        result = method(*args)
        if where == "_admit" or (result is not None and ((result[1] - 1) % llm.config.kvcache_block_size == 0).any()):
            streams.clear()  # the last reference; some sequence is about to take a block
        return result

    setattr(scheduler, where, interrupted)
    done = finish(llm)
    assert not streams and [done[i] for i in ids] == [reference(prompt, 6) for prompt in prompts]
    check_is_empty(llm)


def test_many_requests_are_abandoned_at_once(make_llm):
    """By another thread, amid a step: it does not wait for the call, whose step aborts them all at its end."""
    llm, left = make_llm(), []
    stream = llm.stream([prompt_of(3)] * 1500, greedy(400))
    next(stream)
    forward = llm.model_runner.forward

    def inside(batch):
        if not left:
            thread = threading.Thread(target=stream.close)
            thread.start()
            thread.join(60)
            left.append(not thread.is_alive() and llm.metrics()["num_requests_waiting"])
        return forward(batch)

    llm.model_runner.forward = inside
    assert len(llm.generate([[5, 6]], greedy(3), use_tqdm=False)[0]["token_ids"]) == 3
    assert left[0] > 0
    llm.model_runner.forward = forward
    check_is_empty(llm)


def test_requests_abandoned_behind_the_last_step(make_llm):
    """While the other thread's call still has the lock: nobody takes a step that would abort them."""
    llm = make_llm()
    future = llm.submit(prompt_of(3), greedy(400))
    with Guard(llm), ThreadPoolExecutor(1) as pool:
        assert pool.submit(future.cancel).result() and not llm.is_finished()
    check_is_empty(llm)


@pytest.mark.parametrize("late", [False, True])
def test_outputs_are_made_while_others_run(make_llm, reference, monkeypatch, late):
    """2,048 of them took 25 ms after the last step. One whose text is late does not hold up the device."""
    llm, running, output = make_llm(), [], Request.output
    monkeypatch.setattr(Request, "output", lambda self: running.append(not llm.is_finished()) or output(self))
    if late:
        monkeypatch.setattr(Request, "has_text", property(lambda self: self.index == 1))
    limits = [9, 2, 5, 3]
    prompts = [prompt_of(5, seed=i) for i in range(4)]
    assert generate(llm, prompts, [greedy(n) for n in limits]) == [
        reference(prompt, n) for prompt, n in zip(prompts, limits, strict=True)
    ]
    assert running == ([True, False, False, False] if late else [True, True, True, False])

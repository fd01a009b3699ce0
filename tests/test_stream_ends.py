"""Streams that are closed, aborted or interrupted: they take their own requests with them, and leave no trace."""

import signal
from itertools import count, product

import pytest
from helpers import generate, greedy, prompt_of, run_ahead
from leaks import check_is_empty, finish

from nanovllm import EngineError, SamplingParams

# ---------------------------------------------------------------- closed early


def close_by_break(stream):
    for _ in stream:
        break
    stream.close()


def close_by_hand(stream):
    next(stream)
    stream.close()
    assert list(stream) == []


def left_to_the_garbage(stream):  # the caller deletes it
    next(stream)


def close_by_error(stream):
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C in the consumer
        for _ in stream:
            raise KeyboardInterrupt
    stream.close()


def never_begun(stream):
    stream.close()


CLOSES = [close_by_break, close_by_hand, left_to_the_garbage, close_by_error, never_begun]
STREAMED = {
    "one": lambda: prompt_of(20),
    "many": lambda: ((prompt_of(20 + i % 30), greedy(1 + i % 9)) for i in range(40)),
    "endless": lambda: (prompt_of(1 + i % 30) for i in count()),
}


@pytest.mark.parametrize("close", CLOSES)
def test_closed_early(make_llm, reference, close):
    """Its requests are aborted, and those of add_request go on."""
    llm = make_llm(num_kvcache_blocks=16, max_num_seqs=4)
    for in_flight, (kind, prompts) in product((0, 1), STREAMED.items()):
        llm.model_runner.max_in_flight = in_flight
        added = llm.add_request(prompt_of(9), greedy(40))
        for n in (1, 3) if kind == "one" else (1,):
            stream = llm.stream(prompts(), SamplingParams(max_tokens=8, n=n, ignore_eos=True))
            close(stream)
            del stream
            assert [request.request_id for request in llm._outputs._requests.values()] == [added]
            assert len(llm.scheduler.waiting) + len(llm.scheduler.running) == 1
        assert finish(llm) == {added: reference(prompt_of(9), 40)}
        check_is_empty(llm)
    assert generate(llm, [prompt_of(30)], greedy(5)) == [reference(prompt_of(30), 5)]


def test_closed_after_exit(make_llm):
    llm = make_llm()
    stream = llm.stream([5, 6], greedy(50))
    next(stream)
    llm.exit()
    with pytest.raises(EngineError, match="this engine is shut down"):
        next(stream)
    stream = make_llm().stream([[5, 6]] * 3, greedy(50))
    stream.close()


# ---------------------------------------------------------------- abort


@pytest.mark.parametrize("in_flight", [0, 1])
def test_abort_at_every_stage(make_llm, reference, in_flight):
    """Waiting, between two chunks of its prompt, decoding, finished, reported, unknown; the others carry on."""
    llm = make_llm(num_kvcache_blocks=24, max_num_batched_tokens=16, max_num_seqs=3, enable_prefix_caching=False)
    llm.model_runner.max_in_flight = in_flight
    for num_steps in (*range(0, 16, 2), 25):
        mate = llm.add_request(prompt_of(9), greedy(12))
        doomed = [llm.add_request(prompt_of(40), greedy(8, logprobs=0)) for _ in range(3)]
        finished = {}
        for _ in range(num_steps):
            finished.update(llm.step()[0])
        for request in (doomed[0], str(doomed[1]), doomed[0], 12345):
            llm.abort(request)
        finished.update(finish(llm))
        assert finished[mate] == reference(prompt_of(9), 12)
        assert finished[doomed[2]] == reference(prompt_of(40), 8)
        assert set(finished) <= {mate, *doomed}
        assert len(finished) == 2 or num_steps > 0
        check_is_empty(llm)
    assert set(finished) == {mate, *doomed}, "the last abort came after the end"


@pytest.mark.parametrize("use", ["generate", "stream", "score"])
def test_finished_after_a_surplus_launch(make_llm, reference, use):
    """Whatever stopped its last request, an engine that has nothing to do is finished, and its prefix cache can be
    reset: on a GPU a launch of surplus tokens was in flight, and reset_prefix_cache refused."""
    llm, prompt = run_ahead(make_llm()), prompt_of(9)
    params = greedy(20, stop_token_ids=[reference(prompt, 6)[5]])
    if use == "generate":
        generate(llm, [prompt], params)
    elif use == "stream":
        list(llm.stream(prompt, params))
    else:
        llm.score([prompt])
    assert llm.is_finished()
    assert llm.reset_prefix_cache() is True


# ---------------------------------------------------------------- interrupts, ranks


@pytest.mark.usefixtures("heard_sigint")
@pytest.mark.parametrize("use", [
    *(lambda llm, prompts=prompts: list(llm.stream(STREAMED[prompts](), greedy(20))) for prompts in ("one", "many")),
    lambda llm: llm.score([prompt_of(90), prompt_of(17)]),
])  # fmt: skip
@pytest.mark.parametrize("in_flight", [0, 1])
def test_keyboard_interrupt_in_a_step(make_llm, reference, monkeypatch, use, in_flight):
    llm = make_llm(max_num_batched_tokens=32)
    llm.model_runner.max_in_flight = in_flight
    original, calls = llm.model_runner.forward, count(1)

    def interrupted(batch):
        if next(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return original(batch)

    monkeypatch.setattr(llm.model_runner, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        use(llm)
    monkeypatch.undo()
    check_is_empty(llm)
    assert generate(llm, [prompt_of(30)], greedy(5)) == [reference(prompt_of(30), 5)]


@pytest.mark.parametrize("prompts", [prompt_of(9), [(prompt_of(9), greedy(2)), (prompt_of(8), greedy(20))]])
def test_requests_that_a_failed_step_dropped(make_llm, monkeypatch, prompts):
    """Another caller's step failed: the stream says so, and does not wait for tokens that never come. That of a
    finished list ended as if all were done."""
    llm = make_llm()
    stream = llm.stream(prompts, greedy(20))
    next(stream)

    def fail(*_):
        raise RuntimeError("device says no")

    monkeypatch.setattr(llm.model_runner, "forward", fail)
    with pytest.raises(RuntimeError, match="device says no"):
        generate(llm, [prompt_of(5)], greedy(2))
    monkeypatch.undo()
    with pytest.raises(EngineError, match="these requests were dropped, because a step of this engine failed"):
        next(stream)
    check_is_empty(llm)


def test_added_requests_that_a_failed_step_dropped(make_llm, reference, monkeypatch):
    """By another caller: the loop over step() ended as if all were done. By its own: the next request's step failed."""
    llm = make_llm()
    llm.add_request(prompt_of(9), greedy(20))
    monkeypatch.setattr(llm.model_runner, "forward", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(llm, [prompt_of(5)], greedy(2))
    assert not llm.is_finished()
    with pytest.raises(EngineError, match="these requests were dropped"):
        llm.step()
    llm.add_request(prompt_of(9), greedy(20))
    with pytest.raises(ZeroDivisionError):
        llm.step()
    monkeypatch.undo()
    assert llm.is_finished()
    added = llm.add_request(prompt_of(9), greedy(12))
    assert finish(llm) == {added: reference(prompt_of(9), 12)}


def test_a_bar_that_fails(make_llm):
    """Its close() failed too, and the requests stayed in the engine."""

    class Bar:
        def __init__(self, **_):
            pass

        def update(self, _=0):
            raise BrokenPipeError

        close = refresh = update

    llm = make_llm()
    with pytest.raises(BrokenPipeError):
        llm.generate([prompt_of(9)] * 2, [greedy(2), greedy(20)], use_tqdm=Bar)
    check_is_empty(llm)


@pytest.mark.parametrize("use", [
    lambda llm: llm.add_request(prompt_of(9), greedy(2)), lambda llm: list(llm.stream(prompt_of(9), greedy(2))),
])  # fmt: skip
def test_interrupted_while_it_is_queued(make_llm, monkeypatch, use):
    """The request was known and never scheduled: a loop until is_finished() had no end."""

    def interrupt(_):
        raise KeyboardInterrupt

    llm = make_llm()
    monkeypatch.setattr(llm.scheduler, "add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        use(llm)
    monkeypatch.undo()
    assert not llm._outputs.unfinished


def test_closed_early_on_two_ranks(make_llm, reference):
    llm, prompt = make_llm(tensor_parallel_size=2, max_num_seqs=4, num_kvcache_blocks=32), [5, 6, 7]
    for prompts in (prompt, ([5 + i % 9] * 20 for i in count())):
        for _ in llm.stream(prompts, greedy(12)):
            break
        check_is_empty(llm)
    assert [i for delta in llm.stream(prompt, greedy(12)) for i in delta["token_ids"]] == reference(prompt, 12)
    assert generate(llm, [prompt], greedy(12)) == [reference(prompt, 12)]

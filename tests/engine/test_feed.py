"""Requests that become sequences while others run: nobody can tell, except by the time of the first launch."""

import weakref
from random import Random

import pytest
from helpers import OnUpdate, generate, greedy, needs, prompt_of, tokens_of
from test_scheduler import EOS, Harness, Request

from nanovllm import EngineError, RequestError, SamplingParams
from nanovllm.engine import callers
from nanovllm.engine.callers import run
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.output_processor import OutputProcessor


def test_the_first_launch_does_not_wait_for_the_last_request(make_llm, reference, monkeypatch):
    """2,048 short requests were all made while the device idled: 50 ms of 580. While it works, twice as many follow."""
    monkeypatch.setattr(callers, "FIRST", 2)
    llm, made, at_launch = make_llm(max_num_seqs=4), [], []
    make, run = InputProcessor.make_completions, llm.model_runner.forward
    monkeypatch.setattr(
        InputProcessor, "make_completions", lambda self, request: made.append(request.index) or make(self, request)
    )
    monkeypatch.setattr(llm.model_runner, "forward", lambda batch: at_launch.append(len(made)) or run(batch))
    prompts, limits = [prompt_of(5, seed=i) for i in range(20)], [3, 6, 2, 4, 5, 1, 3, 2] * 2 + [2] * 4
    outputs = llm.generate(prompts, [greedy(n) for n in limits], use_tqdm=False)
    assert at_launch[:3] == [2, 4, 8] and made == list(range(20))
    assert tokens_of(outputs) == [reference(prompt, n) for prompt, n in zip(prompts, limits, strict=True)]
    assert [(output.index, output.request_id) for output in outputs] == [(i, str(i)) for i in range(20)]


def test_a_window_counts_completions(make_llm, monkeypatch):
    """A request of 64 completions is 64 sequences to make before the first launch."""
    llm, queued = make_llm(max_num_seqs=4), []
    run = llm.model_runner.forward
    monkeypatch.setattr(llm.model_runner, "forward", lambda batch: queued.append(num_queued(llm)) or run(batch))
    llm.generate([prompt_of(5, seed=i) for i in range(6)], SamplingParams(n=5, max_tokens=4), use_tqdm=False)
    assert queued[0] == 10 and max(queued) <= 8 + 4


def num_queued(llm):
    return len(llm.scheduler.waiting) + len(llm.scheduler.running)


@pytest.mark.parametrize("place", [0, 7, 15])
@pytest.mark.parametrize(
    ("prompt", "params", "text"), [([], {}, "the prompt is empty"), ([5], {"max_tokens": 150}, "need 10 KV blocks")]
)
def test_refused_before_any_launch(make_llm, monkeypatch, place, prompt, params, text):
    llm = make_llm(max_num_seqs=2, max_model_len=200, num_kvcache_blocks=6, skip_tokenizer_init=True)
    monkeypatch.setattr(llm.model_runner, "forward", lambda batch: pytest.fail("launched"))
    prompts, every = [[5, 6]] * 16, [greedy(3)] * 16
    prompts[place], every[place] = prompt, greedy(**{"max_tokens": 3, **params})
    with pytest.raises(RequestError, match=f"prompt {place}: .*{text}"):
        llm.generate(prompts, every, use_tqdm=False)
    assert llm.is_finished() and llm.metrics()["request_success"]["abort"] == 0
    monkeypatch.undo()
    assert llm.generate([[5, 6]], greedy(1), use_tqdm=False)[0].request_id == "0"


def launches_of(seed, at_once, least):
    """What the device is given for a random call, and the tokens of each request."""
    rng = Random(seed)
    in_flight, caching, seats = rng.randrange(2), rng.random() < 0.5, rng.randint(1, 5)
    harness = Harness(in_flight, caching, 2, 12, seats, rng.randint(1, 12), 16)
    engine, prompts, every = harness.engine, [], []
    for _ in range(rng.randint(1, 14)):
        prompts.append([rng.randint(1, 2) for _ in range(rng.randint(1, 8))])
        n, max_tokens = rng.choice([1, 1, 2, 3]), rng.choice([least, 1, 2, 5, 8])
        every.append(SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=rng.random() < 0.5))
    requests = engine._inputs.make_all(prompts, every)
    for request, prompt in zip(requests, prompts, strict=True):
        engine._inputs.make_completions(request)
        for seq in request.completions:  # for what the device is to expect
            harness.requests[seq.seq_id] = Request(prompt, request.params, 16, seq.seed, (EOS,), None, None, 0)
        request.completions = []
    launches, forward, advance = [], harness.device.forward, engine.advance

    def recorded(batch):
        chunks = () if batch.is_decode else (batch.starts.tolist(), batch.stops.tolist())
        launches.append((batch.seq_ids.tolist(), batch.req_indices.tolist(), chunks))
        return forward(batch)

    def checked():
        batch = advance()
        harness.made = {request.request_id: request for request in engine._outputs._requests.values()}
        harness.check()
        return batch

    harness.device.forward, engine.advance = recorded, checked
    with pytest.MonkeyPatch.context() as patch:
        if at_once:
            patch.setattr(callers, "FIRST", 1000)
            patch.setattr(callers, "WINDOW", 1000)
        finished = {r.index: [c.output_ids for c in r.completions] for _, ended in run(engine, requests) for r in ended}
    assert engine.is_finished() and not harness.scheduler.waiting and not engine._outputs.num_not_queued
    assert len(finished) == len(prompts)
    return launches, finished


def test_launches_are_those_of_a_full_queue():
    """Whether requests come one by one or all at once: the same batches in the same order."""
    histories = [[launches_of(seed, at_once, least=1) for at_once in (False, True)] for seed in range(60)]
    assert all(in_a_window == at_once for in_a_window, at_once in histories)
    assert max(len(launches) for (launches, _), _ in histories) > 20


def test_requests_with_nothing_to_compute():
    """They never reach the scheduler; nobody waits for ever."""
    for seed in range(40):
        assert launches_of(seed, False, least=0)[1] == launches_of(seed, True, least=0)[1]


def test_metrics_count_what_is_not_queued(make_llm, monkeypatch):
    """They wait from the call on; a call that ends early aborts them, and leaves nothing behind."""
    llm, seen = make_llm(max_num_seqs=2), []
    run = llm.model_runner.forward
    monkeypatch.setattr(llm.model_runner, "forward", lambda batch: seen.append(llm.metrics()) or run(batch))

    def fail():
        raise KeyError(bar.options["total"])

    bar = OnUpdate(fail)
    with pytest.raises(KeyError, match="7"):
        llm.generate([[5, 6]] * 7, greedy(3), use_tqdm=bar)
    assert [(now["num_requests_running"], now["num_requests_waiting"]) for now in seen[:2]] == [(2, 5)] * 2
    now = llm.metrics()
    assert (now["num_requests_running"], now["num_requests_waiting"]) == (0, 0) and llm.is_finished()
    assert now["request_success"] == {"stop": 0, "length": 2, "abort": 5, "error": 0}
    assert len(generate(llm, [[5, 6]], greedy(3))[0]) == 3
    llm.generate([[7, 8]] * 6, greedy(4), use_tqdm=False)
    times = {name: llm.metrics()[f"{name}_seconds"]["sum"] for name in ("request_queue_time", "e2e_request_latency")}
    assert times["request_queue_time"] > times["e2e_request_latency"] / 6  # the later ones had waited since the call


@needs("readouts.prompt_logprobs")
def test_scores_that_are_not_queued_keep_their_ids(make_llm):
    """A request that was added in the middle of a call took the id of a score to come: one of them was lost."""
    llm = make_llm(max_num_seqs=2)
    lists = [[5, 6, 7, 8 + i] for i in range(10)]
    plain, outputs = llm.score(lists), []

    def stream():
        outputs.extend(llm.stream([[9, i] for i in range(5)], greedy(4)))

    assert llm.score(lists, use_tqdm=OnUpdate(stream, once=True)) == plain
    assert sorted(output.index for output in outputs) == [0, 1, 2, 3, 4]
    assert llm.is_finished() and llm.metrics()["request_success"]["abort"] == 0


@pytest.mark.parametrize("which", [0, -1])
def test_a_call_whose_request_is_aborted(make_llm, which):
    """Without its last request it returned a shorter list, and said nothing."""
    llm = make_llm(max_num_seqs=2)

    def abort():
        llm.abort(sorted(llm._outputs.unfinished, key=int)[which])

    with pytest.raises(EngineError, match="1 of the 4 requests of this call were aborted"):
        llm.generate([[9, i] for i in range(4)], [greedy(n) for n in (2, 6, 6, 6)], use_tqdm=OnUpdate(abort, once=True))
    assert llm.is_finished()
    assert len(llm.generate([[5, 6]] * 3, greedy(2), use_tqdm=False)) == 3


@pytest.mark.parametrize("request_id", [4, "5"])
def test_a_request_is_aborted_before_it_is_queued(make_llm, request_id):
    """It was ignored. An id that is unknown still is."""
    llm, seen = make_llm(max_num_seqs=2), []

    def abort():
        assert not llm._outputs.unfinished[str(request_id)].completions
        for aborted in (request_id, 99):
            llm.abort(aborted)
            seen.append(llm.metrics()["num_requests_waiting"])

    with pytest.raises(EngineError, match="1 of the 6 requests of this call were aborted"):
        llm.generate([[9, i] for i in range(6)], greedy(3), use_tqdm=OnUpdate(abort, once=True))
    assert seen == [3, 3] and llm.is_finished()
    assert llm.metrics()["request_success"] == {"stop": 0, "length": 5, "abort": 1, "error": 0}


def test_finished_requests_are_freed_during_a_call(make_llm, monkeypatch):
    """A call of a million prompts need not hold their sequences until its end."""
    llm, made, alive = make_llm(max_num_seqs=2), [], []
    make = InputProcessor.make_completions

    def recorded(self, request):
        made.append(weakref.ref(request))
        return make(self, request)

    bar = OnUpdate(lambda: alive.append(sum(ref() is not None for ref in made)))
    monkeypatch.setattr(InputProcessor, "make_completions", recorded)
    llm.generate([[9, i] for i in range(40)], greedy(3), use_tqdm=bar)
    assert len(made) == 40 and max(alive) <= 4 + 2 + 2


def test_a_loop_of_steps_within_a_call(make_llm, reference):
    """It ends with what is queued; the call around it goes on to queue the others."""
    llm = make_llm(max_num_seqs=2)

    def run_to_end():
        while not llm.is_finished():
            llm.step()

    prompts = [[9, i] for i in range(9)]
    outputs = llm.generate(prompts, greedy(3), use_tqdm=OnUpdate(run_to_end, once=True))
    assert tokens_of(outputs) == [reference(prompt, 3) for prompt in prompts]


def test_interrupted_while_requests_are_made(make_llm, monkeypatch):
    """The request that was being made was missing from the counter of aborts."""
    llm, countdown = make_llm(max_num_seqs=2), 0

    def interrupt(function):
        def interrupted(*args):
            nonlocal countdown
            countdown -= 1
            if countdown == 0:
                raise KeyboardInterrupt
            return function(*args)

        return interrupted

    def num_counted(start):
        nonlocal countdown
        countdown, before = start, sum(llm.metrics()["request_success"].values())
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[9, i] for i in range(6)], greedy(3), use_tqdm=False)
        assert llm.is_finished()
        return sum(llm.metrics()["request_success"].values()) - before

    for kind, name in ((InputProcessor, "make_completions"), (OutputProcessor, "queued")):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, interrupt(getattr(kind, name)))
            assert [num_counted(start) for start in range(1, 7)] == [6] * 6
    with monkeypatch.context() as patch:
        patch.setattr(OutputProcessor, "register", interrupt(OutputProcessor.register))
        assert [num_counted(start) for start in range(1, 7)] == list(range(6))
    assert len(generate(llm, [[5, 6]], greedy(3))[0]) == 3


def test_a_call_within_a_call_fails_to_make_the_outer_requests(make_llm, monkeypatch):
    """The outer call waited for ever for requests that nobody would make."""
    llm = make_llm(max_num_seqs=2)

    def fail(*_):
        raise MemoryError

    def generate_within():
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr("nanovllm.engine.input_processor.Completion", fail)
            llm.generate([[7, 1]], greedy(3), use_tqdm=False)

    steps, advance = iter(range(100)), llm.advance
    monkeypatch.setattr(llm, "advance", lambda: pytest.fail("waits for ever") if next(steps) > 50 else advance())
    with pytest.raises(EngineError, match="were dropped"):
        llm.generate([[5, i] for i in range(8)], greedy(3), use_tqdm=OnUpdate(generate_within, once=True))
    assert llm.is_finished() and len(generate(llm, [[5, 6]], greedy(3))[0]) == 3

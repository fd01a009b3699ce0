"""``SamplingParams(logits_processors=...)``: tokens of transformers with the same functions; what
a function raises ends its own request. ``test_ways.py``: whatever else happens to the request."""

import pytest
import torch
from helpers import DEVICES, generate, greedy, prompt_of, run_ahead
from leaks import check_is_empty
from logits_twin import GreedyTwin
from transformers import MinLengthLogitsProcessor

from nanovllm import SamplingParams

PROMPTS = [prompt_of(40), prompt_of(9, seed=1), prompt_of(17, seed=2), prompt_of(30, seed=3)]


def ban(*ids):
    def processor(token_ids, logits):
        logits[list(ids)] = -torch.inf
        return logits

    return processor


def no_repeat(token_ids, logits):
    """Depends on all tokens; returns another tensor."""
    return logits.scatter(0, torch.tensor(token_ids, dtype=torch.int64, device=logits.device), -torch.inf)


def not_in_prompt(prompt_ids, token_ids, logits):
    """Three parameters; and the last token plus one is wanted where it is not in the prompt."""
    wanted = (token_ids[-1] + 1) % 512 if len(token_ids) % 2 else None
    logits[list(prompt_ids)] -= 5.0
    if wanted is not None and wanted not in prompt_ids:
        logits[wanted] += 4.0
    return logits


@pytest.fixture(scope="module")
def oracle(tiny):
    """Processors of each prompt, and its tokens with them."""
    processors = [(no_repeat,), (), (not_in_prompt,), (not_in_prompt, no_repeat)]
    twin = GreedyTwin(tiny)
    return processors, [twin(prompt, each) for prompt, each in zip(PROMPTS, params_of(processors), strict=True)]


def params_of(processors, **more):
    return [greedy(20, logits_processors=list(ours), **more) for ours in processors]


@pytest.mark.parametrize("device", DEVICES)
def test_as_transformers(device, oracle, make_llm):
    """Requests with and without processors in one batch, their tokens known when a function is called."""
    processors, want = oracle
    llm = make_llm(device=device, dtype="float32")
    for _ in range(2):
        assert generate(llm, PROMPTS, params_of(processors)) == want
    check_is_empty(llm)


def test_an_interrupted_function_on_two_ranks(make_llm):
    """The other rank waits for its results, and is not waited for."""

    def interrupt(tokens, logits):
        raise KeyboardInterrupt

    llm = make_llm(tensor_parallel_size=2)
    processes = llm.model_runner.workers.processes.values()
    with pytest.raises(KeyboardInterrupt):
        generate(llm, PROMPTS[:1], greedy(4, logits_processors=[interrupt]))
    assert not any(process.is_alive() for process in processes)


def test_with_everything_else(tiny, make_llm):
    """Masks come before, penalties and log-probabilities after; the raw ones are not changed."""
    seen = []

    def look(token_ids, logits):
        seen.append(logits.clone())
        return logits.index_fill(0, torch.tensor([8, 9]), 50.0)

    params = greedy(6, logits_processors=[look], allowed_token_ids=[8, 9, 10], logprobs=3, frequency_penalty=2,
                    logit_bias={9: 1}, stop_token_ids=[10])  # fmt: skip
    (output,) = make_llm().generate(PROMPTS[:1], params, use_tqdm=False)
    assert output["token_ids"] == [9, 8, 9, 8, 9, 8]  # bias 1 and penalties of 2 decide between equals
    for at, logits in enumerate(seen):
        assert logits.isfinite().nonzero().flatten().tolist() == [8, 9, 10] and logits.dtype == torch.float32
        raw = tiny.logits(PROMPTS[0] + output["token_ids"][:at])[0, -1]
        torch.testing.assert_close(logits[8:11], raw[8:11], rtol=0, atol=1e-4)
        reported = output.outputs[0].logprobs[at][output["token_ids"][at]].logprob
        assert reported == pytest.approx(raw.log_softmax(0)[output["token_ids"][at]].item(), abs=1e-4)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stop(ahead, make_llm):
    """No function is called for the surplus token behind it, although its forward pass may run by then."""
    lengths = []

    def count_up(token_ids, logits):
        lengths.append(len(token_ids))
        return logits.index_fill(0, torch.tensor([20 + len(token_ids)]), 1000.0)

    llm = run_ahead(make_llm()) if ahead else make_llm()
    params = [greedy(20, logits_processors=[count_up], stop_token_ids=[23]), greedy(20)]
    first, second = generate(llm, PROMPTS[:2], params)
    assert first == [20, 21, 22, 23] and len(second) == 20
    assert lengths == [0, 1, 2, 3]


@pytest.mark.parametrize("processed", [False, True])
def test_log_probabilities(processed, tiny, make_llm):
    """The raw ones are the model's, although the function changes the logits in place."""
    llm = make_llm(logprobs_mode="processed_logprobs" if processed else "raw_logprobs")
    (output,) = llm.generate(PROMPTS[:1], greedy(1, logits_processors=[ban(*range(500))], logprobs=0), use_tqdm=False)
    logits, (token,) = tiny.logits(PROMPTS[0])[0, -1], output["token_ids"]
    logits = ban(*range(500))([], logits.clone()) if processed else logits
    want = logits.log_softmax(0)[token].item()
    assert output.outputs[0].logprobs[0][token].logprob == pytest.approx(want, abs=1e-4)


def test_several_completions(make_llm):
    """Each sees its own tokens, and has a clone of the processor."""
    made, calls = [], []

    class Alternate:
        def __call__(self, prompt_ids, token_ids, logits):
            raise AssertionError("not cloned")

        def clone(self):
            mine = []
            made.append(mine)

            def processor(prompt_ids, token_ids, logits):
                assert prompt_ids == PROMPTS[0] and token_ids == mine
                calls.append(token_ids)
                mine.append(10 + (len(mine) + made.index(mine)) % 2)
                return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor(mine[-1:]), 0.0)

            return processor

    params = SamplingParams(n=3, max_tokens=5, seed=1, ignore_eos=True, logits_processors=[Alternate()])
    (output,) = make_llm(max_num_seqs=2).generate(PROMPTS[:1], params, use_tqdm=False)
    even, odd = [10, 11, 10, 11, 10], [11, 10, 11, 10, 11]
    assert [each.token_ids for each in output.outputs] == [even, odd, even]
    assert len(calls) == 15


def test_what_a_function_raises_ends_its_request(oracle, make_llm):
    processors, want = oracle

    def fail(token_ids, logits):
        return logits / (len(token_ids) - 3) if len(token_ids) != 3 else {}["nothing"]

    wrong = {"None": lambda ids, logits: None, "shape": lambda ids, logits: logits[:3], "arity": lambda ids: ids}
    for ahead in (False, True):
        llm = make_llm()
        if ahead:
            run_ahead(llm)
        params = params_of(processors)
        params[0] = greedy(20, logits_processors=[fail])
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [each["token_ids"] for each in outputs[1:]] == want[1:]
        first = outputs[0].outputs[0]
        assert first.finish_reason == "error" and len(first.token_ids) == 3
        assert first.stop_reason == "a logits processor failed (KeyError: 'nothing')"
        theirs = greedy(1, logits_processors=[MinLengthLogitsProcessor(5, 1)])
        (output,) = llm.generate(PROMPTS[:1], theirs, use_tqdm=False)
        assert "'list' object has no attribute 'shape'). It is called as f(token_ids" in output.outputs[0].stop_reason
        for name, text in (("None", r"shape \[512\], not None"), ("shape", "must return the logits"),
                           ("arity", "a logits processor failed (TypeError: ")):  # fmt: skip
            (output,) = llm.generate(PROMPTS[:1], greedy(4, logits_processors=[wrong[name]]), use_tqdm=False)
            assert output["finish_reason"] == "error" and output["token_ids"] == []
            assert text.replace("\\", "") in output.outputs[0].stop_reason
        check_is_empty(llm)


@pytest.mark.parametrize("params", [
    {"temperature": 0}, {"temperature": 0.5}, {"temperature": 1e-5, "top_p": 0.9}, {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.0, "repetition_penalty": 1.5, "min_p": 0.1},
], ids=str)  # fmt: skip
def test_what_is_not_finite(make_llm, params):
    """+inf everywhere gave token 0 and NaN an error. One +inf is a certain token; several have no probabilities."""
    nan, inf, largest = torch.nan, torch.inf, torch.finfo(torch.float32).max
    filled = {
        "all +inf": (inf, {}), "two +inf": (0.0, {5: inf, 9: inf}), "+inf and NaN": (nan, {5: inf, 9: inf}),
        "all NaN": (nan, {}), "all -inf": (-inf, {}), "one +inf": (0.0, {7: inf}), "one beside NaN": (nan, {7: inf}),
        "one number": (nan, {7: -3.0}), "a large number": (0.0, {7: largest}), "two": (-largest, {7: largest}),
    }  # fmt: skip

    def processor(value, places):
        return lambda ids, logits: logits.fill_(value).index_put_((torch.tensor([*places], dtype=torch.int64),),
                                                                  torch.tensor([*places.values()]))  # fmt: skip

    params = [SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1, logits_processors=[processor(*each)], **params)
              for each in filled.values()]  # fmt: skip
    outputs = make_llm(logprobs_mode="processed_logprobs").generate([PROMPTS[1]] * len(params), params, use_tqdm=False)
    for name, output in zip(filled, outputs, strict=True):
        if name.startswith(("all", "two +", "+inf")):
            assert output["token_ids"] == [] and output["finish_reason"] == "error", name
            assert "a logits processor returns several +inf" in output.outputs[0].stop_reason
        else:
            assert output["token_ids"] == [7, 7, 7], name
            assert output.outputs[0].cumulative_logprob == 0, name


CALLS = {
    "cancel": lambda llm, mates: mates[1].cancel(),
    "generate": lambda llm, mates: llm.generate([PROMPTS[0]], greedy(2), use_tqdm=False),
    "step": lambda llm, mates: llm.step(),
    "add_request": lambda llm, mates: llm.add_request(PROMPTS[0]),
    "result": lambda llm, mates: llm.submit(PROMPTS[0], greedy(2)).result(),
    "result of before": lambda llm, mates: mates[0].result(),
    "stream": lambda llm, mates: next(llm.stream(PROMPTS[0], greedy(2))),
    "abort": lambda llm, mates: llm.abort(mates[0].request_id),
    "score": lambda llm, mates: llm.score([PROMPTS[0]]),
    "update_weights": lambda llm, mates: llm.update_weights({}, partial=True),
    "exit": lambda llm, mates: llm.exit(),
}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_function_that_calls_its_engine_ends_its_request(oracle, make_llm, ahead):
    """A step within a step changed the tokens of other requests in silence; ``exit`` was an AttributeError."""
    processors, want = oracle
    llm = run_ahead(make_llm()) if ahead else make_llm()
    for call in CALLS.values():
        mates = []

        def intrude(token_ids, logits, call=call, mates=mates):
            if len(token_ids) == 2:
                call(llm, mates)
            return logits

        mates += [llm.submit(prompt, params) for prompt, params in zip(PROMPTS, params_of(processors), strict=True)]
        intruder = llm.submit(PROMPTS[1], greedy(20, logits_processors=[intrude]))
        assert [mate.result()["token_ids"] for mate in mates] == want
        completion = intruder.result().outputs[0]
        assert completion.finish_reason == "error" and len(completion.token_ids) == 2
        assert "a logits processor called the engine that calls it" in completion.stop_reason
        check_is_empty(llm)


@pytest.mark.parametrize("fails", [False, True])
def test_a_function_may_read_its_engine_call_another_and_close_a_stream(oracle, make_llm, reference, fails):
    """The stream that it closes is its own; it may be a garbage collection that closes it."""
    processors, want = oracle
    llm, other, seen = make_llm(), make_llm(), []

    def processor(token_ids, logits):
        if len(token_ids) == 4:
            stream.close()
            seen.extend([llm.is_finished(), *generate(other, [PROMPTS[1]], greedy(4))])
            return None if fails else logits
        return logits

    stream = llm.stream(PROMPTS[3], greedy(50, logits_processors=[processor]))
    next(stream)
    assert generate(llm, PROMPTS, params_of(processors)) == want
    assert seen == [False, reference(PROMPTS[1], 4)]
    check_is_empty(llm)

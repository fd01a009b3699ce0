"""One step in flight: the order of forward pass, take-in and sampling, and outputs that do not depend on it."""

from itertools import count

import pytest
import torch
from helpers import greedy, tokens_of

from nanovllm import BeamSearchParams, SamplingParams
from nanovllm.errors import EngineError
from nanovllm.runner.model_runner import StepHandle
from nanovllm.sampling_params import StructuredOutputsParams

PLAIN = {
    "greedy": {"temperature": 0},
    "sampled": {"seed": 3, "top_p": 0.9, "n": 2},
    "penalised": {"temperature": 0, "repetition_penalty": 1.4, "logprobs": 2},
    "stopped": {"temperature": 0, "stop": ["11", "a"], "max_tokens": 60},
    "one of a few": {"seed": 4, "allowed_token_ids": [20, 21, 22, 23], "min_tokens": 5},
}
CONSTRAINED = {
    "regex": {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="(yes|no), [a-z]{9,12}")},
    "json": {"seed": 5, "n": 2, "structured_outputs": StructuredOutputsParams(json={"type": "array", "minItems": 8})},
    "bad words": {"temperature": 0, "bad_words": ["the", "1", "I"]},
}


class Events:
    """(what, number of the step) in the order in which an engine does it; ``masked`` steps had constrained requests."""

    def __init__(self, llm, monkeypatch):
        runner, numbers = llm.model_runner, count()
        self.order, self.masked = [], set()
        forward, sample, wait = runner.forward, runner.sample, StepHandle.wait

        def record_forward(batch):
            self.number = next(numbers)
            self.order.append(("forward", self.number))
            forward(batch)

        def record_sample(masks=None, process=None):
            self.order.append(("sample", self.number))
            self.masked |= set() if masks is None else {self.number}
            handle = sample(masks, process)
            handle.number = self.number
            return handle

        def record_wait(handle):
            self.order.append(("wait", handle.number))
            return wait(handle)

        monkeypatch.setattr(runner, "forward", record_forward)
        monkeypatch.setattr(runner, "sample", record_sample)
        monkeypatch.setattr(StepHandle, "wait", record_wait)

    def at(self, what):
        """Where in the order each step did it."""
        found = {number: i for i, (name, number) in enumerate(self.order) if name == what}
        assert [*found] == [*range(self.number + 1)]  # every step, once and in order
        return [*found.values()]


def results(llm, kinds):
    params = [SamplingParams(**{"max_tokens": 40, **changes}) for changes in kinds.values()]
    prompts = [f"{word} words about {name}" for word in ("some", "other") for name in kinds]
    outputs = llm.generate(prompts, params * 2, use_tqdm=False)
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for output in outputs for c in output.outputs]


@pytest.fixture
def start(make_llm):
    def start(in_flight, **options):
        llm = make_llm(model=None, skip_tokenizer_init=False, **{"num_kvcache_blocks": 100, **options})
        llm.model_runner.max_in_flight = in_flight
        return llm

    return start


@pytest.mark.parametrize("kinds", [PLAIN, CONSTRAINED, PLAIN | CONSTRAINED], ids=["plain", "constrained", "both"])
def test_the_step_before_is_taken_in_while_the_device_works(start, monkeypatch, kinds):
    """Forward(n) < wait(n - 1) < sample(n): what a request may sample is known from all tokens before. The same for
    every kind of request."""
    if kinds is not PLAIN:
        pytest.importorskip("llguidance")
    llm = start(1)
    events = Events(llm, monkeypatch)
    results(llm, kinds)
    forward, wait, sample = map(events.at, ("forward", "wait", "sample"))
    assert len(forward) >= 40 and llm.scheduler.num_preemptions == 0
    drained = 0
    for n in range(1, len(forward)):
        drained += wait[n - 1] < forward[n]
        assert wait[n - 1] < sample[n] and forward[n] < sample[n]
    assert drained <= 1  # where all sequences wait for their last token
    assert bool(events.masked) == (kinds is not PLAIN)


@pytest.mark.parametrize("kinds", [PLAIN, CONSTRAINED], ids=["plain", "constrained"])
def test_without_a_step_in_flight_each_is_taken_in_at_once(start, monkeypatch, kinds):
    if kinds is CONSTRAINED:
        pytest.importorskip("llguidance")
    llm = start(0)
    events = Events(llm, monkeypatch)
    results(llm, kinds)
    assert events.order == [
        (what, n) for n in range(events.number + 1) for what in ("forward", "sample", "wait")
    ]  # fmt: skip


@pytest.mark.parametrize("in_flight", [0, 1])
def test_logits_of_nan_end_their_own_request(make_llm, reference, monkeypatch, caplog, in_flight):
    """They gave token 0, which may be the end-of-sequence token, and no word. One step is in flight when they show."""
    llm = make_llm(num_kvcache_blocks=8)
    monkeypatch.setattr(llm.model_runner, "max_in_flight", in_flight)
    good, bad = [5, 6, 8], [9, 10, 11]
    second = reference(bad, 2)[1]
    assert second not in good + reference(good, 12) + bad + reference(bad, 1)
    with torch.inference_mode():
        llm.model_runner.model.model.embed_tokens.weight[second] = torch.nan
    params = [greedy(12), greedy(9, logprobs=1, stop_token_ids=[511]), greedy(9), greedy(9)]
    for _ in range(2):  # the blocks of NaN are used again
        outputs = llm.generate([good, bad, bad, [*good, second]], params, use_tqdm=False)
        assert tokens_of(outputs) == [reference(good, 12), reference(bad, 2), reference(bad, 2), []]
        assert [output["finish_reason"] for output in outputs] == ["length", "error", "error", "error"]
        assert all("every logit is NaN or -inf" in output.outputs[0].stop_reason for output in outputs[1:])
        assert len(outputs[1].outputs[0].logprobs) == 2
    assert [record.getMessage()[:33] for record in caplog.records[:1]] == ["request 3: no token could be samp"]
    assert llm.metrics()["generation_tokens"] == 2 * (12 + 2 + 2) and llm.metrics()["request_success"]["error"] == 6
    *_, last = llm.stream(bad, greedy(9))
    assert last["finish_reason"] == "error" and last["token_ids"] == []
    with pytest.raises(EngineError, match=r"every logit is NaN"):
        llm.beam_search([bad], BeamSearchParams(beam_width=2, max_tokens=5))
    assert llm.is_finished() and llm.scheduler.block_manager.num_available == 8


def test_logits_of_nan_are_no_token_to_look_at(make_llm):
    """-1 is no id that stop strings, bad words and grammars could take in."""
    llm = make_llm(model=None, skip_tokenizer_init=False)
    with torch.inference_mode():
        llm.model_runner.model.model.norm.weight.fill_(torch.nan)
    params = [greedy(9, stop=["zz"]), greedy(9, bad_words=["a"]), greedy(9, n=1), SamplingParams(n=2, stop=["zz"]),
              greedy(9, structured_outputs=StructuredOutputsParams(regex="a+"))]  # fmt: skip
    outputs = [each for output in llm.generate(["The"] * 5, params, use_tqdm=False) for each in output.outputs]
    assert [(each.finish_reason, each.text, each.token_ids) for each in outputs] == [("error", "", [])] * 6
    assert all("every logit is NaN" in each.stop_reason for each in outputs)

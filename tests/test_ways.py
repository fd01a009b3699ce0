"""Every feature in every way of computing gives what it gives alone.

A feature is a row of ``FEATURES`` or ``VERBS``; tests of its own show that it is right where nothing else happens. The
oracle here computes each request alone on the CPU: whole prompts, no prefix cache, no step in flight. A way is a row of
``WAYS``: it runs all features side by side, and must be seen to happen. In fp32, where rounding decides between two
tokens once in many thousands.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import families
import numpy as np
import pytest
import torch
from helpers import ROOT, generate, gpu_param, greedy, record_calls, use_graphs_on_cpu
from histories import at_night
from leaks import check_is_empty
from logits_twin import STEPS, check_same
from test_speculation import know

from nanovllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanovllm.utils.checkpoint import DEMO_MODEL

sys.path.insert(0, str(ROOT / "tools"))

import make_demo

NUM_TOKENS, GUIDED_TOKENS = 16, 48
TOLERANCE = 2e-4  # absolute, of log-probabilities and hidden states
BETWEEN_DEVICES = 5e-2  # recurrent layers amplify rounding, in transformers too: 0.024 in one of 2,000 scores
FACTS = ("cached", "chunked", "preempted", "graphs", "ahead", "drafts")

# ---------------------------------------------------------------- features


def no_repeat(token_ids, logits):
    """Depends on all tokens; returns another tensor."""
    return logits.scatter(0, torch.tensor(token_ids, dtype=torch.int64, device=logits.device), -torch.inf)


def not_in_prompt(prompt_ids, token_ids, logits):
    """Changes the logits in place."""
    logits[list(set(prompt_ids))] -= 50.0
    if len(token_ids) % 2:
        logits[(token_ids[-1] + 1) % 100] += 60.0
    return logits


def guide(**kind):
    return {"structured_outputs": StructuredOutputsParams(**kind), "ignore_eos": False, "max_tokens": GUIDED_TOKENS}


GREEDY, ENDS = {"temperature": 0}, {"temperature": 0, "ignore_eos": False}
PEOPLE = {"type": "object", "required": ["name", "age"], "additionalProperties": False, "properties": {
    "name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
}}  # fmt: skip
FEATURES = {  # name -> what is not as in ``Model._request``
    "greedy": GREEDY,
    "greedy of a question": {**ENDS, "prompt": "2 + 3"},
    "greedy of a long answer": {**ENDS, "prompt": "count to 50", "max_tokens": 48, "logprobs": 0},
    "greedy of text": {**GREEDY, "prompt": ("introduce yourself",)},
    "seeded": {},
    "any token": {"temperature": 50.0},
    "a bias": {**GREEDY, "logit_bias": {7: 59.0, 100: 57.0, 20: 58.0}, "frequency_penalty": 1.5,
               "presence_penalty": 0.5},
    "a bias of all": {"temperature": 5.0, "logit_bias": {i: (i * 37 % 101 - 50) / 20 for i in range(140)}},
    "allowed and penalties": {"allowed_token_ids": list(range(60, 130)), "frequency_penalty": 1.0,
                              "repetition_penalty": 1.3, "logit_bias": {100: 2.0, 5: 100.0}},
    "min_tokens": {**GREEDY, "min_tokens": 12, "stop_token_ids": [7, 30], "logit_bias": {7: 100.0, 30: 100.0},
                   "presence_penalty": 1.0},
    "stop tokens": {"temperature": 3.0, "stop_token_ids": list(range(0, 140, 3)), "logprobs": 2},
    "stop tokens later": {"temperature": 3.0, "stop_token_ids": list(range(0, 140, 9)), "min_tokens": 7},
    "one token": {**GREEDY, "max_tokens": 1, "logprobs": 1},
    "no token": {**GREEDY, "max_tokens": 0, "logprobs": 1, "prompt_logprobs": 2},
    "truncated": {**GREEDY, "truncate_prompt_tokens": 10, "prompt_logprobs": 1},
    **{f"log-probabilities {k} {of_prompt}": {**temperature, "logprobs": k, "prompt_logprobs": of_prompt}
       for (k, of_prompt), temperature in zip(
           ((5, None), (0, 2), (None, 5), (20, 20), (1, 0), (3, 1), (None, 0)), [GREEDY, {"temperature": 1.3}] * 4,
           strict=False)},
    "n": {"n": 5},
    "n of one token": {"n": 3, "prompt": 0},
    "n of a full block": {"n": 3, "prompt": 4},
    "n, log-probabilities": {"n": 4, "logprobs": 2, "prompt_logprobs": 1},
    "n, penalties": {"n": 3, "temperature": 1.2, "presence_penalty": 2.0, "repetition_penalty": 5.0, "min_tokens": 4},
    "n, filters": {"n": 3, "temperature": 2.0, "top_k": 40, "top_p": 0.9, "logit_bias": {9: 3.0}},
    "n, ends": {"n": 3, "temperature": 3.0, "stop_token_ids": list(range(0, 140, 2)), "logprobs": 1},
    "a function that cannot be pickled": {**GREEDY, "logits_processors": [lambda ids, x: x.roll(len(ids) % 3)]},
    "functions": {"temperature": 5.0, "logits_processors": [not_in_prompt, no_repeat], "logprobs": 1},
    "n, a function": {"n": 2, "temperature": 5.0, "logits_processors": [not_in_prompt]},
    **{f"step: {name}": {"temperature": 2.5, "logprobs": 4, "max_tokens": 20, **changes}
       for name, changes in STEPS.items()},
    "stop string": {**GREEDY, "stop": ["zzz", "demo mo"], "prompt": "introduce yourself"},
    "stop string, kept": {**GREEDY, "stop": ["11"], "include_stop_str_in_output": True, "prompt": "count to 50",
                          "max_tokens": 40},
    "stop string across tokens": {"stop": ["1, 1", "e th"], "max_tokens": 40, "prompt": "list all primes within 50"},
    "stop string at a character": {"temperature": 50.0, "stop": ["a", "e", "\n", "日"], "min_tokens": 3},
    "stop string, n": {"n": 4, "temperature": 3.0, "stop": ["a", "5", "on"], "logprobs": 0},
    "stop string that never comes": {**GREEDY, "stop": ["nanovllm is not", "never" * 9]},
    "special tokens": {"temperature": 50.0, "skip_special_tokens": False},
    "no text": {"detokenize": False},
    "bad words": {**GREEDY, "bad_words": ["demo model", "capital", "I"], "prompt": "Who are you?"},
    "bad words, sampled": {"n": 2, "temperature": 1.5, "bad_words": ["add", "I"], "prompt": "help"},
    "bad words and penalties": {**GREEDY, "bad_words": ["demo model", "tiny"], "frequency_penalty": 0.5,
                                "logit_bias": {40: 2.0}, "prompt": "introduce yourself", "logprobs": 1},
    "json": {"temperature": 3.0, **guide(json=PEOPLE, disable_any_whitespace=True)},
    "json of any bytes": {"temperature": 50.0, **guide(json=PEOPLE, whitespace_pattern="[ ]?")},
    "regex": {**GREEDY, **guide(regex=r"[A-Z][a-z]{2,9}, (north|south) [0-9]{1,3}°")},
    "choice": guide(choice=["positive", "negative", "naïve – 日本"]),
    "grammar": {**guide(grammar='root ::= "(" root ")" | [1-9] " + " [1-9]'), "top_p": 0.9, "logprobs": 1},
    "n, guides": {"n": 3, "temperature": 3.0, **guide(regex="(yes|no), [a-z]{9,12}")},
    "named log-probabilities": {**GREEDY, "logprob_token_ids": [99, 3, 42]},
    "n, named log-probabilities": {"n": 3, "logprobs": 2, "logprob_token_ids": [7, 100]},
    "thoughts": {**GREEDY, "prompt": ("what is the",), "thinking_token_budget": 3, "logprobs": 1},
    "thoughts, n": {"n": 3, "temperature": 5.0, "top_k": 50, "thinking_token_budget": 2, "logit_bias": {280: 9.0},
                    "prompt": "help", "frequency_penalty": 2.0},
    "thoughts before a guide": {"temperature": 3.0, "prompt": ("what is the",), "thinking_token_budget": 5,
                                **guide(regex="(yes|no), [a-z]{9,12}")},
}  # fmt: skip
IDS = range(3, 1000)


CHOICES = {  # name -> probability of another value than the neutral one, and that value
    "top_k": (0.2, lambda rng: rng.choice((1, 5, 40))),
    "top_p": (0.2, lambda rng: rng.uniform(0.3, 1)),
    "min_p": (0.2, lambda rng: rng.uniform(0, 0.3)),
    "stop": (0.4, lambda rng: rng.sample(("a", "e", "5", ", ", "\n", "on", "The", "never"), rng.choice((1, 3)))),
    "stop_token_ids": (0.2, lambda rng: rng.sample(IDS, rng.choice((1, 9)))),
    "include_stop_str_in_output": (0.3, lambda rng: True),
    "ignore_eos": (0.4, lambda rng: False),
    "logprobs": (0.3, lambda rng: rng.randrange(4)),
    "prompt_logprobs": (0.2, lambda rng: rng.randrange(3)),
    "repetition_penalty": (0.2, lambda rng: rng.uniform(0.7, 2)),
    "presence_penalty": (0.15, lambda rng: rng.uniform(-2, 2)),
    "frequency_penalty": (0.15, lambda rng: rng.uniform(-2, 2)),
    "logit_bias": (0.15, lambda rng: {i: rng.uniform(-5, 5) for i in rng.sample(IDS, 20)}),
    "bad_words": (0.15, lambda rng: rng.sample(("a", "London", "prime numbers", "5"), 2)),
    "skip_special_tokens": (0.3, lambda rng: False),
    "truncate_prompt_tokens": (0.15, lambda rng: rng.choice((-1, 1, 16, 20))),
    "detokenize": (0.2, lambda rng: False),
}


def random_mix(rng):
    """Random values of every parameter; no other test has them in one request."""
    mix = {name: make(rng) for name, (probability, make) in CHOICES.items() if rng.random() < probability}
    mix |= {"temperature": rng.choice((0, 0.5, 1.0, 3.0, 50.0)), "max_tokens": rng.choice((0, 1, 2, *range(3, 21)))}
    if mix["temperature"] > 0:
        mix["n"] = rng.choice((1, 1, 1, 2, 3, 6))
    if "stop" in mix:
        mix["detokenize"] = True
    constraint = rng.random()
    if constraint < 0.2:
        mix |= {"structured_outputs": FEATURES[rng.choice(("choice", "grammar"))]["structured_outputs"]}
    elif constraint < 0.3:
        mix["allowed_token_ids"] = [2, *rng.sample(IDS, 400)]
    elif constraint < 0.5:
        mix["min_tokens"] = rng.randint(0, mix["max_tokens"])
    return mix


FEATURES |= {f"mix {i}": random_mix(random.Random(i)) for i in range(12)}
FEATURES |= {
    "repetition": {**GREEDY, "repetition_detection": {"max_pattern_size": 4, "min_count": 2}, "prompt": "count to 50",
                   "max_tokens": 48, "logprobs": 1},
    "repetition, n": {"n": 3, "allowed_token_ids": [20, 21, 22], "min_tokens": 6, "max_tokens": 30,
                      "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 3}},
}  # fmt: skip
if find_spec("llguidance") is None:  # on a GPU machine without it
    FEATURES = {name: row for name, row in FEATURES.items() if "structured_outputs" not in row}


def check_is_legal(output, params):
    """Lengths and reasons of an output's completions."""
    assert [completion.index for completion in output.outputs] == list(range(params.n)) and output.finished
    for completion in output.outputs:
        assert params.min_tokens <= len(completion.token_ids) <= params.max_tokens
        reason = completion.stop_reason
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == params.max_tokens and reason is None
        elif reason == "repetition_detected":
            assert completion.finish_reason == "stop" and params.repetition_detection is not None
        elif isinstance(reason, str):
            assert completion.finish_reason == "stop" and reason in params.stop
            assert completion.text.endswith(reason) or not params.include_stop_str_in_output
        else:
            last = completion.token_ids[-1]
            is_end = not params.ignore_eos and (reason, last) in ((None, 2), (0, 0))
            assert completion.finish_reason == "stop" and (
                is_end or params.structured_outputs is not None or (last == reason and last in params.stop_token_ids)
            )
        assert params.detokenize or completion.text == ""
        num_logprobs = None if params.num_logprobs is None else len(completion.token_ids)
        assert (None if completion.logprobs is None else len(completion.logprobs)) == num_logprobs


def score(llm, lists):
    """Each list whole, and from its middle on."""
    lists = [ids for ids in lists if len(ids) > 1]
    scores = [*llm.score(lists), *llm.score(lists, start=[len(ids) // 2 for ids in lists])]
    assert all(score.error is None for score in scores)
    return [np.array(score.logprobs) for score in scores]


def pooled(kind):
    def embed(llm, prompts):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm, "read_pooling", lambda _: (kind, True))
            return [output.embedding for output in llm.embed(prompts)]

    return embed


def beams(llm, prompts):
    outputs = llm.beam_search(prompts[1:6:2], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    found = [beam for output in outputs for beam in output.sequences]
    return [np.array([*beam.tokens, beam.cum_logprob]) for beam in found]


OF_ANY_MODEL = ("n", "n of one token", "n of a full block", "n, log-probabilities", "log-probabilities None 5",
                "no token")  # fmt: skip
VERBS = {"score": score, "embed: last": pooled("last"), "embed: mean": pooled("mean"), "embed: cls": pooled("cls"),
         "beams": beams}  # fmt: skip

# ---------------------------------------------------------------- models


class Model:
    """A checkpoint, the requests that it gets, and what each gives alone. ``options``: of every engine."""

    def __init__(self, path, vocab_size, tokenizer=None, **options):
        self.path, self.options, self._plain = path, {"max_model_len": 512, **options}, {}
        rng = random.Random(0)
        shared, long = ([rng.randrange(3, vocab_size) for _ in range(n)] for n in (40, 280))
        self.prompts = [  # one token, two blocks that several share, a full block of 16; more than a block of 256
            [4], [*shared, 7, 8, 9], shared, long[:70], long[100:116], [*shared[:33], 5], long[50:200], long,
            [*long[:272], 6], long[:9], long[:197],
        ]  # fmt: skip
        rows = FEATURES if tokenizer is not None else self._rows_of_any_model()
        self.requests = {name: self._request(i, tokenizer, **row) for i, (name, row) in enumerate(rows.items())}
        self.longest = max(map(len, self.prompts)) + GUIDED_TOKENS

    def _rows_of_any_model(self):
        """What depends on the model: prompts, whose answers cross the ends of two blocks, and their copies."""
        rows = {f"greedy {i}": {**GREEDY, "prompt": i, "max_tokens": 36} for i in range(len(self.prompts))}
        return rows | {name: FEATURES[name] for name in OF_ANY_MODEL}

    def _request(self, i, tokenizer, prompt=None, **row):
        """(prompt, parameters). ``prompt``: a number, a question for the chat template, or (text,)."""
        more = {"seed": 100 * i, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        params = SamplingParams(**{**more, "detokenize": tokenizer is not None, **row})
        if isinstance(prompt, str | tuple) and tokenizer is not None:
            question = prompt if isinstance(prompt, tuple) else [{"role": "user", "content": prompt}]
            return question[0] if isinstance(prompt, tuple) else tokenizer(question), params
        return self.prompts[prompt if isinstance(prompt, int) else i % len(self.prompts)], params

    def start(self, device="cpu", **options):
        return LLM(self.path, **{"device": device, "dtype": "float32", "kvcache_block_size": 16, "quiet": True,
                                 **self.options, **options})  # fmt: skip

    def plain(self, is_processed=False):
        """({name: output}, {verb: arrays}) of an engine that computes one request at a time."""
        if is_processed not in self._plain:
            outputs, results = self.plain() if is_processed else ({}, {})
            options = PROCESSED if is_processed else {}
            with self.start(enable_prefix_caching=False, max_num_seqs=1, **options) as llm:
                llm.model_runner.max_in_flight = 0
                outputs = outputs | {
                    name: llm.submit(*request).result() for name, request in self.requests.items()
                    if not is_processed or request[1].logprobs is not None
                }  # fmt: skip
                results = results or {name: verb(llm, self.prompts) for name, verb in VERBS.items()}
            self._plain[is_processed] = outputs, results
        return self._plain[is_processed]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """model(name) -> ``Model``."""

    @cache
    def make(name):
        if name == "demo":
            with LLM(str(DEMO_MODEL), device="cpu", num_kvcache_blocks=2, quiet=True) as llm:
                template = llm.tokenizer.apply_chat_template
            return Model(str(DEMO_MODEL), 1000, lambda chat: template(chat, add_generation_prompt=True)["input_ids"],
                         reasoning_start_str=" the", reasoning_end_str=" So: 1.")  # fmt: skip
        path = tmp_path_factory.mktemp(name)
        families.make(path, name)
        return Model(str(path), 140, skip_tokenizer_init=True, num_state_snapshots=8)

    return make


# ---------------------------------------------------------------- ways


def together(llm, model):
    """All at once; verbs are called while others run."""
    futures, results, names = {}, {}, [*model.requests]
    for i, (name, verb) in enumerate(VERBS.items()):
        for each in names[i :: len(VERBS)]:
            futures[each] = llm.submit(*model.requests[each])
        results[name] = verb(llm, model.prompts)
    return {name: future.result() for name, future in futures.items()}, results


def as_they_finish(llm, model):
    """From an iterable, in the opposite order; verbs behind them."""
    names = [*model.requests][::-1]
    outputs = list(llm.stream(iter([model.requests[name] for name in names])))
    return {names[o.index]: o for o in outputs}, {name: verb(llm, model.prompts) for name, verb in VERBS.items()}


def arriving(llm, model):
    """One between two steps each: prefills and decode steps alternate. Others are aborted in between."""
    futures, intruders = {}, [model.requests[name] for name in model.requests if name.startswith(("n,", "log", "json"))]
    for i, (name, request) in enumerate(model.requests.items()):
        futures[name] = llm.submit(*request)
        llm.step()
        if i % 3 == 0:
            gone = llm.add_request(*intruders[i % len(intruders)])
            for _ in llm.stream(*intruders[-i % len(intruders)]):
                break
            llm.abort(gone)
    return {name: future.result() for name, future in futures.items()}, {}


def streamed(llm, model):
    """A dozen at a time, whose deltas are joined."""
    joined, streams, waiting = {name: [] for name in model.requests}, {}, dict(model.requests)
    while streams or waiting:
        while waiting and len(streams) < 12:
            name = next(iter(waiting))
            streams[name] = llm.stream(*waiting.pop(name))
        for name, stream in [*streams.items()]:
            if (delta := next(stream, None)) is None:
                del streams[name]
            else:
                joined[name].append(delta)
    return {name: join(deltas, model.requests[name][1]) for name, deltas in joined.items()}, {}


def join(deltas, params):
    """The output that the deltas of a request add up to."""
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert len({delta.request_id for delta in deltas}) == 1
    last = deltas[-1]
    for completion in last.outputs:
        parts = [delta.outputs[completion.index] for delta in deltas]
        assert all(part.finish_reason is part.stop_reason is None for part in parts[:-1])
        assert {part.index for part in parts} == {completion.index}
        if params.num_logprobs is not None:
            assert [len(part.logprobs) for part in parts] == [len(part.token_ids) for part in parts]
            completion.logprobs = [at for part in parts for at in part.logprobs]
        completion.text = "".join(part.text for part in parts)
        completion.token_ids = [token for part in parts for token in part.token_ids]
    return last


@dataclass(frozen=True)
class Way:
    """Options of an engine. ``facts``, of ``FACTS``: what it does, and is seen to do; nothing else is seen."""

    facts: str
    options: dict[str, Any] = field(default_factory=dict)
    drive: Callable = together
    turns: int = 1  # the second finds the first one's prompts in the prefix cache

    def start(self, model, device):
        facts, block_size = self.facts.split(), self.options.get("kvcache_block_size", 16)
        options: dict[str, Any] = {"enable_prefix_caching": "cached" in facts, "max_num_seqs": 16}
        options["max_num_batched_tokens"] = 48 if "chunked" in facts else 16384
        options["num_kvcache_blocks"] = 16384 // block_size
        if "preempted" in facts:
            options["num_kvcache_blocks"] = -(-model.longest // block_size) + 1
        if "drafts" in facts:
            options["speculative_config"] = {"method": "ngram", "adaptive": False}
        if device == "cuda":
            options["enforce_eager"] = "graphs" not in facts
        llm = model.start(device, **{**options, **self.options})
        if "graphs" in facts and device == "cpu":
            use_graphs_on_cpu(llm)
        llm.model_runner.max_in_flight = int("ahead" in facts)
        return llm


PROCESSED = {"logprobs_mode": "processed_logprobs"}
TWO_RANKS = {"tensor_parallel_size": 2}
WAYS = {
    "batched": Way("cached", turns=2),
    "blocks of 256": Way("cached ahead", {"kvcache_block_size": 256}),
    "chunked": Way("cached chunked", {"max_num_seqs": 7}),
    "preempted": Way("cached preempted", PROCESSED),
    "preempted, no cache": Way("preempted ahead"),
    "graphs": Way("cached chunked ahead graphs", {"max_num_batched_tokens": 300, **PROCESSED}),
    "all at once": Way("cached chunked preempted ahead graphs", {"max_num_seqs": 13}),
    "few slots": Way("cached ahead", {"max_num_seqs": 4, **PROCESSED}, as_they_finish),
    "arriving": Way("cached chunked ahead", {"max_num_seqs": 5}, arriving),
    "streamed": Way("cached preempted ahead", drive=streamed),
    "two ranks": Way("cached ahead", {**TWO_RANKS, "kvcache_block_size": 256}),
    "drafts": Way("cached ahead drafts graphs chunked", {"max_num_seqs": 8, "max_num_batched_tokens": 300}),
    "drafts, all at once": Way("cached chunked preempted drafts", {"max_num_seqs": 4, **PROCESSED}),
    "two ranks, all at once": Way("cached chunked preempted ahead drafts",
                                  {**TWO_RANKS, **PROCESSED, "max_num_seqs": 6}),
}  # fmt: skip
# Ways that others contain: chunks in "all at once" and "arriving", preemption with a cache in "streamed", two ranks in
# "two ranks, all at once", whose requests without drafts decode in plain steps; graphs in "all at once" and "drafts",
# their processed log-probabilities in "few slots"; drafts with preemption and chunks in "two ranks, all at once".
BY_NIGHT = ("chunked", "preempted", "two ranks", "graphs", "drafts, all at once")
ON_GPU = {
    "sdpa": Way("cached ahead", {"attention_backend": "sdpa"}, turns=2),
    "blocks of 64": Way("cached ahead graphs", {"kvcache_block_size": 64}),
    "blocks of 512": Way("ahead graphs", {"kvcache_block_size": 512, "max_num_seqs": 13}),
    "one slot": Way("cached graphs", {"max_num_seqs": 1}),
}


class Watch:
    """The facts of an engine's steps from now on."""

    def __init__(self, llm):
        self.llm, self.seen, self.num_sampled, self.readouts = llm, set(), 0, set()
        forward, self._kinds = llm.model_runner.forward, []
        if llm.model_runner.graphs is not None:
            self._kinds = record_calls(llm.model_runner.graphs, "replay")

        def watched(batch):
            stops = [] if batch.is_decode or batch.num_tokens > 300 else zip(batch.seqs, batch.stops, strict=True)
            if any(stop < seq.num_prompt_tokens for seq, stop in stops):  # a launch is not full
                self.seen.add("chunked")
            if llm.scheduler.num_in_flight > 1:
                self.seen.add("ahead")
            self.num_sampled += len(batch.req_indices)
            self.readouts |= {each.kind for each in batch.readouts if len(batch.req_indices)}
            return forward(batch)

        llm.model_runner.forward = watched

    def facts(self):
        metrics = self.llm.metrics()
        accepted, drafted = (metrics.get(f"spec_decode_num_{kind}_tokens", 0) for kind in ("accepted", "draft"))
        more = {"cached": metrics["prefix_cache_hits"] > 0, "preempted": metrics["num_preemptions"] > 0,
                "graphs": len(self._kinds) > 20, "drafts": 30 < accepted < drafted}  # fmt: skip
        return self.seen | {name for name, is_seen in more.items() if is_seen}


def check_output(given, alone, tolerance=TOLERANCE):
    for one, other in zip(given.outputs, alone.outputs, strict=True):
        assert (one.token_ids, one.text, one.finish_reason, one.stop_reason) == (
            other.token_ids, other.text, other.finish_reason, other.stop_reason
        )  # fmt: skip
        check_same(one.logprobs, other.logprobs, tolerance)
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=NUM_TOKENS * tolerance)
    assert (given.prompt, given.prompt_token_ids) == (alone.prompt, alone.prompt_token_ids)
    prompts = [output.prompt_logprobs and output.prompt_logprobs[1:] for output in (given, alone)]
    check_same(*prompts, tolerance)


def check_arrays(given, alone, tolerance=TOLERANCE):
    assert len(given) == len(alone)
    for one, other in zip(given, alone, strict=True):
        assert one.shape == other.shape and np.abs(one - other).max() < tolerance


def failures(check, given, alone, tolerance=TOLERANCE):
    """{name: how it differs}."""
    found = {}
    for name in given:
        try:
            check(given[name], alone[name], tolerance)
        except AssertionError as error:
            found[name] = str(error)
    return found


def check_way(name, way, device, model):
    """A way gives what each request of the model gives alone, and its facts are seen."""
    model = model(name)
    outputs, results = model.plain("logprobs_mode" in way.options)
    with way.start(model, device) as llm:
        watch = Watch(llm)
        if "drafts" in way.facts:
            know(llm, outputs.values())
        for _ in range(way.turns):
            given, verbs = way.drive(llm, model)
            assert given.keys() == outputs.keys()
            tolerance = TOLERANCE if device == "cpu" or name == "demo" else BETWEEN_DEVICES
            differ = failures(check_output, given, outputs, tolerance)
            assert not differ | failures(check_arrays, verbs, results, tolerance)
            check_is_empty(llm)
        facts = watch.facts()
        assert facts == set(way.facts.split())
        several = way.options.get("max_num_seqs") != 1  # in a batch
        if name == "demo" and way.drive is together and several and "preempted" not in facts:
            assert len(watch.readouts) == 2, "beside requests that are sampled"
        if facts <= {"cached", "chunked", "preempted"}:
            assert watch.num_sampled == llm.metrics()["generation_tokens"], "computed in vain"


CASES = [(way, "cpu") for way in WAYS if way not in BY_NIGHT or at_night(way)]
CASES += [gpu_param(way, "cuda") for way in WAYS | ON_GPU if "ranks" not in way]


@pytest.mark.parametrize(("way", "device"), CASES)
def test_way(way, device, model):
    check_way("demo", {**WAYS, **ON_GPU}[way], device, model)


ACTING = ("top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias",
          "allowed_token_ids", "bad_words", "stop", "stop_token_ids", "structured_outputs",
          "logits_processors", "thinking_token_budget",
          "repetition_detection")  # fmt: skip
# too weak to change these few tokens of the demo model; others with the same parameters do
WEAK = {"n, penalties", "stop tokens later"} | {
    f"step: {name}" for name in ("below 1", "bias", "filters", "frequency", "greedy", "min_tokens", "repetition")
}


def test_every_feature_acts(model):
    """Or its row would show nothing."""
    model, neutral = model("demo"), SamplingParams()
    outputs, _ = model.plain()
    wrong = set()
    with WAYS["batched"].start(model, "cpu") as llm:
        bare = {
            name: llm.submit(prompt, SamplingParams(n=params.n, temperature=params.temperature, seed=params.seed,
                                                    ignore_eos=True, max_tokens=params.max_tokens))
            for name, (prompt, params) in model.requests.items()
        }  # fmt: skip
        for name, (_, params) in model.requests.items():
            free = bare[name].result()
            acts = any(getattr(params, each) != getattr(neutral, each) for each in ACTING) and "never" not in name
            differs = [c.token_ids for c in free.outputs] != [c.token_ids for c in outputs[name].outputs]
            if differs != acts and params.ignore_eos and not name.startswith(("mix", "truncated")) and name not in WEAK:
                wrong.add(name)
            check_is_legal(outputs[name], params)
            if name.startswith(("stop string", "repetition")) and acts:
                wrong |= {name} if all(c.stop_reason is None for c in outputs[name].outputs) else set()
    assert not wrong, "|".join(sorted(wrong))


def test_abandoned_over_and_over(model):
    """Streams of many that are closed at any time, on one engine: it stays as good as new."""
    model, rng = model("demo"), random.Random(0)
    outputs, _ = model.plain()
    with WAYS["all at once"].start(model, "cpu") as llm:
        for _ in range(10):
            stream = llm.stream(iter(rng.choices([*model.requests.values()], k=100)))
            for _ in range(rng.randrange(4)):
                next(stream)
            stream.close()
            assert not llm._outputs._requests and not llm._outputs._processors
        check_is_empty(llm)
        name = "greedy of a question"
        check_output(llm.submit(*model.requests[name]).result(), outputs[name])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_beginnings_of_blocks_are_found(model, num_ranks):
    """On a CPU, though a block has 256 tokens: all but the last token of a prompt that comes again, and the tokens that
    it shares with another."""
    model = model("demo")
    prompt = max(model.prompts, key=len)
    others = [[*prompt[:n], prompt[n] ^ 1, *prompt[:5]] for n in (275, 100, 17, 15)]
    with model.start(enable_prefix_caching=False) as llm:
        expected = generate(llm, others, greedy(6))
    with model.start(kvcache_block_size=256, tensor_parallel_size=num_ranks) as llm:
        for num_cached in (0, len(prompt) - 1):
            (output,) = llm.generate([prompt], greedy(6), use_tqdm=False)
            assert output.num_cached_tokens == num_cached
        outputs = llm.generate(others, greedy(6), use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [275, 100, 17, 0]
        assert [output["token_ids"] for output in outputs] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("backend", ["triton", "sdpa", "flash_attn"])
def test_answers_in_bf16(backend, eager):
    """Every backend gives the demo model's answers word for word: together, again from the cache, and alone.

    They include the longest answer and prompts behind a long prefix. The smallest margin in fp32 is several logits, so
    a difference is a bug, not a rounding.
    """
    if backend == "flash_attn":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    checks = sorted(make_demo.CHECKS.items(), key=lambda check: len(check[1]))
    prompts = [(make_demo.prompt_text(question), answer) for question, answer in [*checks[:3], *checks[-3:]]]
    filler = make_demo.filler(random.Random(3), 270)
    prompts += [(make_demo.prompt_text(question, filler), answer) for question, answer in checks[:2]]
    texts, answers = map(list, zip(*prompts, strict=True))
    params = SamplingParams(temperature=0, max_tokens=450)
    options = {"max_model_len": 1024, "attention_backend": backend, "enforce_eager": eager}
    with LLM(device="cuda", dtype="bfloat16", quiet=True, **options) as llm:
        for _ in range(2):
            assert [output["text"] for output in llm.generate(texts, params, use_tqdm=False)] == answers
        assert [llm.generate(text, params, use_tqdm=False)[0]["text"] for text in texts] == answers

"""Random mixes of all parameters through tiny pools, with random aborts: nothing leaks, and every request that has a
seed or is greedy gets what it gets alone.
"""

import random
from itertools import count

import pytest
from helpers import run_ahead, use_graphs_on_cpu
from leaks import check_is_empty, finish

from nanovllm import LLM, SamplingParams, StructuredOutputsParams

OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 96, "quiet": True}
STOPS = ("a", "e", "5", ", ", "\n", "on", "The", "never")
MAX_TOKENS, LONGEST_PROMPT = 20, 44  # 64 slots: 4 blocks
TEXT = "What is 2 + 3? The capital of England is London, and 2, 3, 5, 7 are prime numbers. 日本 naïve. " * 3
GUIDES = (
    {"choice": ["yes", "no", "neither"]},
    {"regex": r"[a-f]{1,6}( \d)?"},
    {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, "disable_any_whitespace": True},
    {"grammar": 'root ::= "(" root ")" | [1-9]'},
)
IDS = range(3, 1000)


def maybe(rng, probability, make, otherwise=None):
    return make() if rng.random() < probability else otherwise


def random_params(rng):
    """Of every parameter its neutral value or some other, so that all meet in one batch."""
    is_greedy = rng.random() < 0.25
    params = {
        "temperature": 0 if is_greedy else rng.choice((0.5, 1.0, 3.0, 50.0)),
        "seed": maybe(rng, 0.85, lambda: rng.randrange(5)),
        "max_tokens": rng.choice((0, 1, 2, *range(3, MAX_TOKENS), MAX_TOKENS)),
        "n": 1 if is_greedy else rng.choice((1, 1, 1, 2, 3, 6)),
        "ignore_eos": rng.random() < 0.6,
        "top_k": maybe(rng, 0.2, lambda: rng.choice((1, 5, 40)), 0),
        "top_p": maybe(rng, 0.2, lambda: rng.uniform(0.3, 1), 1.0),
        "min_p": maybe(rng, 0.2, lambda: rng.uniform(0, 0.3), 0.0),
        "stop_token_ids": maybe(rng, 0.2, lambda: rng.sample(IDS, rng.choice((1, 9, 300))), ()),
        "stop": maybe(rng, 0.4, lambda: rng.sample(STOPS, rng.choice((1, 3)))),
        "include_stop_str_in_output": rng.random() < 0.3,
        "logprobs": maybe(rng, 0.3, lambda: rng.randrange(4)),
        "prompt_logprobs": maybe(rng, 0.2, lambda: rng.randrange(3)),
        "repetition_penalty": maybe(rng, 0.2, lambda: rng.uniform(0.7, 2), 1.0),
        "presence_penalty": maybe(rng, 0.15, lambda: rng.uniform(-2, 2), 0.0),
        "frequency_penalty": maybe(rng, 0.15, lambda: rng.uniform(-2, 2), 0.0),
        "logit_bias": maybe(rng, 0.15, lambda: {i: rng.uniform(-5, 5) for i in rng.sample(IDS, 20)}),
        "allowed_token_ids": maybe(rng, 0.1, lambda: [2, *rng.sample(IDS, 400)]),
        "bad_words": maybe(rng, 0.15, lambda: rng.sample(("a", "London", "prime numbers", "5"), 2)),
        "skip_special_tokens": rng.random() < 0.7,
        "truncate_prompt_tokens": maybe(rng, 0.15, lambda: rng.choice((-1, 1, 16, 20))),
    }
    if rng.random() < 0.2 and params["allowed_token_ids"] is None:
        params["structured_outputs"] = StructuredOutputsParams(**rng.choice(GUIDES))
    elif rng.random() < 0.3:  # not beside a guide: test_structured_outputs.py has that
        params["stop_token_ids"] = params["stop_token_ids"][:9]  # at most 16 can be held back
        params["min_tokens"] = rng.randint(0, params["max_tokens"])
    if not params["stop"]:
        params["detokenize"] = rng.random() < 0.8
    return SamplingParams(**params)


def random_prompt(rng, tokenizer):
    """Many share their beginning: the prefix cache is hit."""
    if rng.random() < 0.3:
        return rng.sample(IDS, rng.randint(1, LONGEST_PROMPT))
    return tokenizer.encode(TEXT)[: rng.randint(1, LONGEST_PROMPT)]


def values(logprobs):
    """Log-probability of each token itself."""
    return None if logprobs is None else [at and next(iter(at.values())).logprob for at in logprobs]


def check_is_legal(output, params):
    assert [completion.index for completion in output.outputs] == list(range(params.n)) and output.finished
    for completion in output.outputs:
        assert params.min_tokens <= len(completion.token_ids) <= params.max_tokens
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == params.max_tokens and completion.stop_reason is None
        else:
            assert completion.finish_reason == "stop" and completion.token_ids
            reason, last = completion.stop_reason, completion.token_ids[-1]
            if isinstance(reason, str):
                assert reason in params.stop
                assert completion.text.endswith(reason) or not params.include_stop_str_in_output
            elif reason is None:
                assert last == 2 and not params.ignore_eos
            else:
                assert last == reason and (reason in params.stop_token_ids or (reason == 0 and not params.ignore_eos))
        assert params.detokenize or completion.text == ""
        num_logprobs = None if params.logprobs is None else len(completion.token_ids)
        assert (None if completion.logprobs is None else len(completion.logprobs)) == num_logprobs


def check_is_like_alone(output, alone):
    for completion, expected in zip(output.outputs, alone.outputs, strict=True):
        assert completion.token_ids == expected.token_ids
        assert completion.text == expected.text
        assert (completion.finish_reason, completion.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert values(completion.logprobs) == pytest.approx(values(expected.logprobs), abs=1e-3)
    if alone.prompt_logprobs is not None:
        assert output.prompt_logprobs[0] is None
        given, expected = values(output.prompt_logprobs)[1:], values(alone.prompt_logprobs)[1:]
        assert given == pytest.approx(expected, abs=1e-3)


@pytest.fixture(scope="module")
def roomy():
    """Computes each request alone, whole prompts, without a prefix cache."""
    with LLM(num_kvcache_blocks=64, max_num_seqs=8, enable_prefix_caching=False, **OPTIONS) as llm:
        yield llm


POOLS = {
    "one sequence": {"num_kvcache_blocks": 4, "max_num_seqs": 4, "max_num_batched_tokens": 512},
    "little more than one": {"num_kvcache_blocks": 5, "max_num_seqs": 3, "max_num_batched_tokens": 16},
    "two": {"num_kvcache_blocks": 8, "max_num_seqs": 8, "max_num_batched_tokens": 32},
    "no prefix cache": {
        "num_kvcache_blocks": 7, "max_num_seqs": 5, "max_num_batched_tokens": 24, "enable_prefix_caching": False,
    },
    "drafts": {
        "num_kvcache_blocks": 9, "max_num_seqs": 8, "max_num_batched_tokens": 64,
        "speculative_config": {"method": "suffix", "prompt_lookup_min": 1, "adaptive": False},
    },
    "no limits": {"num_kvcache_blocks": 64, "max_num_seqs": 16, "max_num_batched_tokens": 512},
}  # fmt: skip


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("pool", POOLS)
def test_any_mix_through_any_pool(roomy, pool, in_flight):
    rng = random.Random(f"{pool} {in_flight}")
    requests = [(random_prompt(rng, roomy.tokenizer), random_params(rng)) for _ in range(16)]
    with LLM(**{**OPTIONS, **POOLS[pool]}) as llm:
        if in_flight:
            run_ahead(llm)
        elif pool in ("two", "drafts", "no limits"):
            use_graphs_on_cpu(llm)
        added, finished, outputs = [], {}, {}
        for output in llm.stream(iter(requests)):
            outputs[output.index] = output
            # others come and go meanwhile
            if rng.random() < 0.6:
                params = random_params(rng)
                added.append(llm.add_request(random_prompt(rng, roomy.tokenizer), params))
            for _ in range(rng.choice((0, 0, 1, 4))):
                finished.update(llm.step()[0])
            if added and rng.random() < 0.5:
                llm.abort(rng.choice(added))
            if rng.random() < 0.2:
                for _ in llm.stream(random_prompt(rng, roomy.tokenizer), random_params(rng)):
                    break
        finished.update(finish(llm))
        check_is_empty(llm)
        num_preemptions = llm.scheduler.num_preemptions
    assert (num_preemptions > 0) == (pool != "no limits")
    assert set(finished) <= set(added)
    assert sorted(outputs) == list(range(len(requests)))
    compared = 0
    for index, (prompt, params) in enumerate(requests):
        check_is_legal(outputs[index], params)
        if params.seed is not None or params.temperature == 0:
            (alone,) = roomy.generate([prompt], params, use_tqdm=False)
            check_is_like_alone(outputs[index], alone)
            compared += 1
    assert compared >= 8


@pytest.mark.parametrize("in_flight", [0, 1])
def test_abandoned_over_and_over(roomy, in_flight):
    """Streams of many that are closed at any time, on one engine: it stays as good as new."""
    rng = random.Random(in_flight)
    with LLM(**{**OPTIONS, **POOLS["little more than one"]}) as llm:
        if in_flight:
            run_ahead(llm)
        for _ in range(10):
            feed = ((random_prompt(rng, roomy.tokenizer), random_params(rng)) for _ in count())
            stream = llm.stream(feed)
            for _ in range(rng.randrange(4)):
                next(stream)
            stream.close()
            assert not llm._outputs._requests and not llm._outputs._processors
        check_is_empty(llm)
        prompt, params = roomy.tokenizer.encode("What is 2 + 3?"), SamplingParams(temperature=0)
        assert llm.generate([prompt], params, use_tqdm=False)[0]["text"] == "\n5"


@pytest.mark.parametrize("is_score", [False, True])
def test_a_prompt_in_chunks_beside_mates_that_ask_for_more(roomy, is_score):
    """A launch reports as many alternatives as its greediest request wants, so the chunks of a prompt had different
    widths, and could not be joined."""
    long, short = roomy.tokenizer.encode(TEXT)[:40], [5, 6, 7]
    few, many = (SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=k) for k in (1, 5))
    with LLM(num_kvcache_blocks=64, max_num_seqs=8, max_num_batched_tokens=16, **OPTIONS) as llm:
        wide = llm.add_request(short, many)  # fills up the first launch together with the long prompt's first chunk
        if is_score:
            (given,), (expected,) = (x.score([long]) for x in (llm, roomy))
            assert given.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        else:
            (output,), (expected,) = (x.generate([long], few, use_tqdm=False) for x in (llm, roomy))
            assert [at and list(at) for at in output.prompt_logprobs] == [
                at and list(at) for at in expected.prompt_logprobs
            ]
        assert set(finish(llm)) == {wide}

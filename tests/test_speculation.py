"""Speculation: outputs are those of the engine without it, and it ends where it gains nothing.

``knowing`` engines draft what plain ones have generated, with mistakes: that accepts any number of tokens, whatever the
model. What lookup finds is tested with the demo model, which repeats itself, and in ``HashChains`` against a search.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import DEVICES, generate, greedy, prompt_of, record_calls, run_ahead, use_graphs_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, ConfigError, SamplingParams
from nanovllm.config import Config, SpeculativeConfig
from nanovllm.core import MAX_VERIFIED_SEQS, DecodeBatch, Sequence
from nanovllm.engine import speculation
from nanovllm.engine.speculation import HashChains, KeptTexts, Lookup, Speculator
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.utils.checkpoint import DEMO_MODEL

FORCED = {"method": "ngram", "adaptive": False}
TEXT = "one two three four five six seven eight nine ten "
PARAMS = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 3, "n": 3},
    "top-p": {"seed": 4, "top_p": 0.8, "top_k": 30, "min_p": 0.01},
    "log-probabilities": {"temperature": 0, "logprobs": 3},
    "a stop string": {"temperature": 0, "stop": ["1", "a ", "th", "e"], "include_stop_str_in_output": True},
    "stop tokens": {"seed": 5, "stop_token_ids": list(range(0, 1000, 9))},
    "stop tokens later": {"seed": 7, "stop_token_ids": list(range(0, 1000, 90)), "min_tokens": 7},
    "end of text": {"temperature": 0, "ignore_eos": False, "min_tokens": 3},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "a bias": {"temperature": 0, "logit_bias": {7: 3.0, 9: -4.0}},
    "a few tokens": {"seed": 6, "allowed_token_ids": list(range(20, 60))},
    "bad words": {"temperature": 0, "bad_words": ["the", "1"]},
    "a guide": {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="[a-f ]{5,30}")},
    "a function": {"temperature": 0, "logits_processors": [lambda ids, logits: logits.roll(len(ids) % 3)]},
}
NEVER = ("penalties", "a bias", "a few tokens", "bad words", "a guide", "a function")


def requests(kinds=PARAMS, max_tokens=24, copies=1):
    params = [SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **PARAMS[kind]}) for kind in kinds]
    prompts = [TEXT * (1 + i % 3) + f"about {kind}" for i, kind in enumerate(kinds)]
    return prompts * copies, params * copies


def results(outputs):
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason,
         None if c.logprobs is None else [{i: e.rank for i, e in at.items()} for at in c.logprobs])
        for output in outputs for c in output.outputs
    ]  # fmt: skip


def know(llm, outputs, seed=0, length=7):
    """Draft what these outputs say, wrong from some place on; of sequences that were to be drafted for."""
    speculator, draw = llm.scheduler.speculator, random.Random(seed)
    texts = [[*o.prompt_token_ids, *c.token_ids] for o in outputs for c in o.outputs]
    enter, drafted = speculator._enter, set()

    def draft(seq, room):
        if enter(seq) is None:
            return np.empty(0, np.int32), None, 0.0
        drafted.add(seq.seq_id)
        known = seq.token_ids
        longer = next((text for text in texts if text[: len(known)] == known and len(text) > len(known)), known)
        tokens = np.array(longer[len(known) :][: min(length, room)], np.int32)
        tokens[draw.randrange(8) :] ^= 1
        return tokens, None, float(len(tokens))

    speculator._draft = draft
    return drafted


@pytest.fixture(scope="module")
def plain():
    """The demo model without speculation: outputs by prompts and parameters."""
    with LLM(device="cpu", max_num_seqs=24, quiet=True) as llm:
        yield llm


def check_equal(plain, llm, prompts, params, seed=0):
    """Outputs of an engine that drafts them are those without drafts; some of the tokens were accepted."""
    expected = plain.generate(prompts, params, use_tqdm=False)
    drafted = know(llm, expected, seed)
    assert results(llm.generate(prompts, params, use_tqdm=False)) == results(expected)
    metrics = llm.metrics()
    accepted = metrics["spec_decode_num_accepted_tokens"]
    assert 0 < accepted < metrics["spec_decode_num_draft_tokens"] and min(metrics["spec_decode_num_accepted_tokens_per_pos"]) > 0
    return drafted


# ---------------------------------------------------------------- equality


@pytest.mark.parametrize("in_flight", [0, 1, "graphs"])
def test_every_parameter(plain, in_flight):
    """Side by side in one batch, those that are never drafted for in between."""
    prompts, params = requests()
    with LLM(device="cpu", max_num_seqs=16, max_num_batched_tokens=512, quiet=True, speculative_config=FORCED) as llm:
        if in_flight == "graphs":
            use_graphs_on_cpu(llm)
        elif in_flight:
            run_ahead(llm)
        drafted = check_equal(plain, llm, prompts, params)
    # sequences by request; the second has three
    never = {i + 2 * (i > 1) for i, kind in enumerate(PARAMS) if kind in NEVER}
    assert drafted == set(range(len(PARAMS) + 2)) - never


@pytest.mark.parametrize("options", [
    {"max_num_batched_tokens": 32, "max_num_seqs": 4},  # chunks
    {"num_kvcache_blocks": 12, "max_num_seqs": 4, "kvcache_block_size": 16},  # preemption
    {"num_kvcache_blocks": 12, "max_num_seqs": 3, "kvcache_block_size": 16, "enable_prefix_caching": False},
    {"max_num_seqs": 2, "kvcache_block_size": 16},  # prefixes that the others have left
], ids=str)  # fmt: skip
@pytest.mark.parametrize("in_flight", [0, 1])
def test_small_pools(plain, options, in_flight):
    kinds = ["greedy", "seeded", "top-p", "a stop string", "penalties", "log-probabilities"]
    prompts, params = requests(kinds, max_tokens=30, copies=2)
    with LLM(device="cpu", max_model_len=160, quiet=True, speculative_config=FORCED, **options) as llm:
        if in_flight:
            run_ahead(llm)
        check_equal(plain, llm, prompts, params, seed=in_flight)
        assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in options)
        if "kvcache_block_size" in options and options.get("enable_prefix_caching", True):
            assert llm.metrics()["prefix_cache_hits"] > 0


def test_two_ranks(plain):
    prompts, params = requests(["greedy", "seeded", "top-p", "a stop string", "bad words", "log-probabilities"])
    with LLM(str(DEMO_MODEL), device="cpu", tensor_parallel_size=2, quiet=True, speculative_config=FORCED) as llm:
        check_equal(plain, llm, prompts, params)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_what_lookup_finds(plain, method):
    """Without any stand-in; the second time "suffix" knows every output."""
    prompts, params = requests(["greedy", "seeded", "log-probabilities"], max_tokens=60)
    expected = results(plain.generate(prompts, params, use_tqdm=False))
    with LLM(device="cpu", quiet=True, speculative_config={"method": method, "adaptive": False}) as llm:
        num_steps = []
        for _ in range(2):
            batches = record_calls(llm.model_runner, "forward")
            assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
            num_steps.append(len(batches))
        accepted = llm.metrics()["spec_decode_num_accepted_tokens"]
    assert accepted >= 10
    if method == "suffix":
        assert num_steps[1] < 0.5 * num_steps[0]


def test_windows(checkpoint, make_llm):
    """Each row of a sequence has a window of its own."""
    path, _ = checkpoint("gemma3")
    options = {"model": path, "max_model_len": 256}
    prompts, params = [prompt_of(n)[:n] for n in (9, 40)], [greedy(40), SamplingParams(seed=1, max_tokens=40, ignore_eos=True)]
    prompts = [[token % 90 for token in prompt] for prompt in prompts]
    outputs = make_llm(**options).generate(prompts, params, use_tqdm=False)
    llm = make_llm(speculative_config=FORCED, **options)
    assert any(llm.config.model_config.windows)
    know(llm, outputs)
    assert generate(llm, prompts, params) == [output["token_ids"] for output in outputs]
    assert llm.metrics()["spec_decode_num_accepted_tokens"] > 20


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("device", DEVICES)
def test_engines_of_a_random_model(make_llm, device, kv_cache_dtype):
    """In fp32, with CUDA graphs on a GPU; batches of every size up to the largest that speculates, and beyond."""
    options = {"device": device, "dtype": "float32", "kv_cache_dtype": kv_cache_dtype, "max_num_seqs": 20,
               "max_num_batched_tokens": 256, "max_model_len": 96}  # fmt: skip
    prompts = [prompt_of(5 + i, seed=i) for i in range(MAX_VERIFIED_SEQS + 3)]
    params = [greedy(10 + i) if i % 2 else SamplingParams(seed=i, max_tokens=10 + i, ignore_eos=True)
              for i in range(len(prompts))]  # fmt: skip
    outputs = make_llm(**options).generate(prompts, params, use_tqdm=False)
    llm = make_llm(speculative_config=FORCED, **options)
    if device == "cpu":
        use_graphs_on_cpu(llm)
    know(llm, outputs)
    batches = record_calls(llm.model_runner, "forward")
    assert generate(llm, prompts, params) == [output["token_ids"] for output in outputs]
    sizes = {len(batch.req_indices) for batch in batches if batch.num_rows > 1}
    assert {batch.num_rows for batch in batches} == {1, 4, 8} and max(sizes) == MAX_VERIFIED_SEQS and len(sizes) > 3

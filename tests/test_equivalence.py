"""Plain sampling gives the same tokens in the ways of the spine, whatever feature ``tools/without.py`` has taken out.

Every feature in every way: ``test_ways.py``.
"""

import pytest
from helpers import generate, greedy, prompt_of, run_ahead

from nanovllm import LLM, SamplingParams

MIXES = ({}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}, {"temperature": 0.5}, {"repetition_penalty": 1.3})
PROMPTS = [prompt_of(40)[:n] + prompt_of(i, seed=1) for i, n in enumerate((40, 33, 40, 16, 0, 3, 40, 33), 1)]
PARAMS = [greedy(24)] + [SamplingParams(seed=i, max_tokens=24, ignore_eos=True, **mix) for i, mix in enumerate(MIXES)]
PARAMS += [greedy(9)]
WAYS = {
    "batched": {},
    "no cache": {"enable_prefix_caching": False},
    "blocks of 256": {"kvcache_block_size": 256},
    "chunked": {"max_num_batched_tokens": 12},
    "preempted": {"num_kvcache_blocks": 8},
    "two slots": {"max_num_seqs": 2},
    "two ranks": {"tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def alone(make_checkpoint):
    """The tokens of each request, computed alone."""
    options = {"device": "cpu", "skip_tokenizer_init": True, "kvcache_block_size": 16, "max_num_batched_tokens": 256}
    with LLM(make_checkpoint(), enable_prefix_caching=False, max_num_seqs=1, **options) as llm:
        return [generate(llm, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_same_tokens(way, in_flight, make_llm, alone):
    """As alone; the second time with a warm prefix cache."""
    llm = make_llm(**WAYS[way])
    if in_flight:
        run_ahead(llm)
    for _ in range(2):
        assert generate(llm, PROMPTS, PARAMS) == alone
    assert (llm.scheduler.num_preemptions > 0) == (way == "preempted")
    if way != "blocks of 256":  # whose beginnings are a feature
        assert (llm.metrics()["prefix_cache_hits"] > 0) == (way != "no cache")

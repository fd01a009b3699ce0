"""Several completions of one prompt: each is what a request of its own would give, and the prompt is computed once."""


import pytest
from helpers import DEVICES, generate, prompt_of, record_calls, run

from nanovllm import SamplingParams
from nanovllm.core import PrefillBatch

LENGTHS = (1, 5, 16, 32, 40)  # tokens of the prompts: less than a block of 16, one block, two, two and a half
NUM_TOKENS = 18


def sampled(n, seed=None, **params):
    return SamplingParams(**{"n": n, "seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params})


def completions(llm, prompt, params):
    """Token ids of each completion of one prompt."""
    (output,) = run(llm, [prompt], params)
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize("device", DEVICES)
def test_completion_i_is_a_request_with_seed_plus_i(make_llm, device):
    llm = make_llm(device=device, dtype="float32")
    prompts = [prompt_of(length) for length in LENGTHS]
    mixes = [{}] * (len(prompts) - 1) + [{"repetition_penalty": 1.5, "presence_penalty": 1.0, "top_k": 40,
                                          "min_tokens": 4, "logit_bias": {9: 3.0}}]  # fmt: skip
    outputs = run(llm, prompts, [sampled(5, seed=10 * i, **mix) for i, mix in enumerate(mixes)])
    for i, (prompt, mix, output) in enumerate(zip(prompts, mixes, outputs, strict=True)):
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3, 4]
        tokens = [completion.token_ids for completion in output.outputs]
        assert tokens == generate(llm, [prompt] * 5, [sampled(1, seed, **mix) for seed in range(10 * i, 10 * i + 5)])
        assert len({tuple(ids) for ids in tokens}) == 5
        assert output["token_ids"] == tokens[0] and output.prompt_token_ids == prompt


def test_without_a_seed_each_draws_its_own(make_llm):
    llm, prompt = make_llm(), prompt_of(20)
    first, second = (completions(llm, prompt, sampled(4)) for _ in range(2))
    assert len({tuple(ids) for ids in first + second}) == 8
    assert completions(make_llm(), prompt, sampled(4)) == first  # the engine's seed repeats them


@pytest.mark.parametrize("length", [40, 64])
def test_more_completions_than_max_num_seqs(make_llm, length):
    """The others come later and find the prompt's full blocks in the prefix cache; not even so without it."""
    for cached, num_tokens in ((True, length + (length - (length - 1) // 16 * 16)), (False, 2 * length)):
        llm = make_llm(max_num_seqs=3, enable_prefix_caching=cached)
        batches = record_calls(llm.model_runner, "forward")
        assert len(completions(llm, prompt_of(length), sampled(6))) == 6
        assert sum(batch.num_tokens for batch in batches if isinstance(batch, PrefillBatch)) == num_tokens
        assert max(len(batch.req_indices) for batch in batches) == 3

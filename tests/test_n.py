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


# ---------------------------------------------------------------- seeds


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


def test_request_ids(make_llm):
    """Each prompt is one request; the ids of the next ones are not its completions'."""
    llm = make_llm()
    outputs = run(llm, [[5], [6], [7]], [sampled(3), sampled(1), sampled(2)])
    added = llm.add_request([8], sampled(2))
    ids = [int(output.request_id) for output in outputs] + [added]
    assert len(outputs) == 3 and ids == sorted(set(ids))
    assert [len(output.outputs) for output in outputs] == [3, 1, 2]
    finished = []
    while not llm.is_finished():
        finished += llm.step()[0]
    assert [request_id for request_id, _ in finished] == [added]  # once, and when both are complete


def test_in_index_order_whichever_ends_first(make_llm):
    """The stop token of the last completion ends it early, perhaps others too; each is cut by itself."""
    llm, prompt = make_llm(), prompt_of(9)
    free = completions(llm, prompt, sampled(4, seed=3))
    stop = next(token for token in free[3][2:] if token not in free[0] and token not in free[3][:2])
    (output,) = run(llm, [prompt], sampled(4, seed=3, stop_token_ids=[stop]))
    for index, (completion, ids) in enumerate(zip(output.outputs, free, strict=True)):
        ends = stop in ids
        assert completion.index == index
        assert completion.token_ids == (ids[: ids.index(stop) + 1] if ends else ids)
        assert completion.finish_reason == ("stop" if ends else "length")
        assert completion.stop_reason == (stop if ends else None)
    assert [c.finish_reason for c in output.outputs][::3] == ["length", "stop"]


# ---------------------------------------------------------------- shared blocks


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared(make_llm, length, enable_prefix_caching):
    """Only a partly filled last block is each completion's own."""
    llm = make_llm(enable_prefix_caching=enable_prefix_caching)
    blocks, batches = llm.scheduler.block_manager, record_calls(llm.model_runner, "forward")
    before = blocks.num_available
    llm.add_request(prompt_of(length), sampled(6))
    llm.step()
    (batch,) = batches
    assert isinstance(batch, PrefillBatch) and batch.num_tokens == length and len(batch.req_indices) == 6
    assert before - blocks.num_available == length // 16 + 6 * (length % 16 > 0)
    while not llm.is_finished():
        llm.step()
    assert not any(isinstance(batch, PrefillBatch) for batch in batches[1:])
    assert blocks.num_available == before


@pytest.mark.parametrize("length", [40, 64])
def test_more_completions_than_max_num_seqs(make_llm, length):
    """The others come later and find the prompt's full blocks in the prefix cache; not even so without it."""
    for cached, num_tokens in ((True, length + (length - (length - 1) // 16 * 16)), (False, 2 * length)):
        llm = make_llm(max_num_seqs=3, enable_prefix_caching=cached)
        batches = record_calls(llm.model_runner, "forward")
        assert len(completions(llm, prompt_of(length), sampled(6))) == 6
        assert sum(batch.num_tokens for batch in batches if isinstance(batch, PrefillBatch)) == num_tokens
        assert max(len(batch.req_indices) for batch in batches) == 3


def test_chunked_prompt(make_llm):
    """All completions are sampled from the last chunk."""
    llm = make_llm(max_num_batched_tokens=16, max_num_seqs=8)
    batches = record_calls(llm.model_runner, "forward")
    run(llm, [prompt_of(40)], sampled(4, max_tokens=2))
    assert [len(batch.req_indices) for batch in batches] == [0, 0, 4, 4]
    assert [batch.num_tokens for batch in batches[:3]] == [16, 16, 8]


# ---------------------------------------------------------------- beside other features


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_hardly_any_tokens(make_llm, max_tokens):
    (output,) = run(make_llm(max_num_seqs=2), [prompt_of(20)], sampled(3, seed=1, max_tokens=max_tokens))
    assert [len(completion.token_ids) for completion in output.outputs] == [max_tokens] * 3
    assert [completion.finish_reason for completion in output.outputs] == ["length"] * 3

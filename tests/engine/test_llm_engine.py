"""The whole engine against transformers: limits, prefix cache, chunked prefill, preemption."""

import threading

import numpy as np
import pytest
from helpers import DEVICES, generate, gpu_param, greedy, prompt_of, record_calls, run_ahead, tokens_of
from leaks import finish

from nanovllm import EngineError, RequestError
from nanovllm.engine.request import Request

# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("device", DEVICES)
def test_growth_to_max_model_len(make_llm, reference, device):
    """The last token allowed was written one past the end of the tables, or the sequence stopped one short."""
    llm = make_llm(device=device, dtype="float32", max_model_len=48)
    prompts = [prompt_of(10), prompt_of(47)]
    outputs = llm.generate(prompts, greedy(1000), use_tqdm=False)
    assert tokens_of(outputs) == [reference(prompts[0], 38), reference(prompts[1], 1)]
    assert [output["finish_reason"] for output in outputs] == ["length"] * 2


@pytest.mark.parametrize("max_tokens", [np.int32(2**31 - 1), np.uint8(250), 2**40])
def test_max_tokens_near_integer_limits(make_llm, reference, max_tokens):
    """numpy integers were kept: prompt length + max_tokens wrapped around, and generate() never returned."""
    llm = make_llm(max_model_len=48)
    request = llm.add_request(prompt_of(10), greedy(max_tokens))
    finished = [done for _ in range(50) for done in llm.step()[0]]
    assert finished == [(request, reference(prompt_of(10), 38))]


def test_min_tokens_near_integer_limits(make_llm, reference):
    """100 prompt tokens + np.int8(40) gave -116, and no stop token was masked."""
    prompt = prompt_of(100)
    (stop,) = reference(prompt, 1)
    params = greedy(64, min_tokens=np.int8(40), stop_token_ids=[np.int16(stop)])
    (tokens,) = generate(make_llm(), [prompt], params)
    assert stop not in tokens[:40] and len(tokens) >= 40


def test_more_prompts_than_max_num_seqs(make_llm, reference):
    """Six prompts with max_num_seqs=2 once ran three at a time, and wrote past the request state."""
    llm = make_llm(max_num_seqs=2)
    batches = record_calls(llm.model_runner, "forward")
    prompts = [prompt_of(5 + 9 * i) for i in range(6)]
    assert generate(llm, prompts, greedy(12)) == [reference(prompt, 12) for prompt in prompts]
    assert max(len(batch.req_indices) for batch in batches) == 2


def test_larger_than_the_kv_cache(make_llm, reference):
    """A request that can never fit the cache waited forever. It is refused; one that just fits runs."""
    llm = make_llm(num_kvcache_blocks=3)
    prompt = prompt_of(20)
    with pytest.raises(RequestError, match=r"need 4 KV blocks of 16 tokens; the .* has 3"):
        generate(llm, [prompt_of(49)], greedy(1))
    with pytest.raises(RequestError, match="need 4 KV blocks"):
        generate(llm, [prompt], greedy(30))
    assert generate(llm, [prompt_of(50)], greedy(0)) == [[]]  # needs no block
    # 49 tokens in 48 slots: the keys and values of the last one are never computed
    assert generate(llm, [prompt, prompt_of(48)], [greedy(29), greedy(1)]) == [
        reference(prompt, 29),
        reference(prompt_of(48), 1),
    ]


def test_refused_request_spares_the_others(make_llm, reference):
    """A bad request failed in the middle of a run, and everyone's results with it. It is refused when it is added."""
    llm = make_llm()
    good = llm.add_request(prompt_of(9), greedy(5))
    for bad in ([], [3, 512], [-1], [1] * 4096):
        with pytest.raises(RequestError):
            llm.add_request(bad, greedy(5))
    also = llm.add_request(prompt_of(8), greedy(3))
    finished = finish(llm)
    assert finished == {good: reference(prompt_of(9), 5), also: reference(prompt_of(8), 3)}


def test_max_tokens_zero_and_one(make_llm, reference):
    """max_tokens=0 generated one token and max_tokens=1 two; or outputs came back in another order."""
    llm, limits = make_llm(), (0, 1, 0, 3)
    prompts = [prompt_of(n) for n in (4, 16, 17, 40)]
    outputs = llm.generate(prompts, [greedy(n) for n in limits], use_tqdm=False)
    assert tokens_of(outputs) == [reference(prompt, n) for prompt, n in zip(prompts, limits, strict=True)]
    assert [output["finish_reason"] for output in outputs] == ["length"] * 4
    assert generate(llm, prompts, greedy(0)) == [[]] * 4
    assert llm.generate([], use_tqdm=False) == []


def test_generate_between_steps(make_llm, reference):
    """generate() was refused while requests of add_request() were under way. They run along, and stay the caller's."""
    llm = make_llm()
    added = llm.add_request(prompt_of(9), greedy(4))
    llm.step()
    later = llm.add_request(prompt_of(8), greedy(40))
    assert generate(llm, [prompt_of(7)], greedy(12)) == [reference(prompt_of(7), 12)]
    assert not llm.is_finished()
    finished = finish(llm)
    assert finished == {added: reference(prompt_of(9), 4), later: reference(prompt_of(8), 40)}


def test_two_calls_at_a_time(make_llm, reference):
    """A stream that is read while another runs: each gets its own outputs; the one closed early takes nobody along."""
    llm, prompts = make_llm(max_num_seqs=3), [prompt_of(n) for n in (5, 6, 7, 8)]
    first, second = (llm.stream(prompts, greedy(n)) for n in (6, 9))
    outputs = [next(first), next(second), *first]
    assert {output.index: output["token_ids"] for output in outputs if len(output["token_ids"]) == 6} == {
        i: reference(prompt, 6) for i, prompt in enumerate(prompts)
    }
    assert outputs[1]["token_ids"] == reference(prompts[outputs[1].index], 9)
    second.close()
    assert generate(llm, prompts[:1], greedy(3)) == [reference(prompts[0], 3)]
    assert llm.is_finished() and llm.scheduler.block_manager.num_available == len(llm.scheduler.block_manager.blocks)


def test_from_another_thread(make_llm):
    """Two threads stepped one engine, and each took the other's tokens."""
    llm, errors = make_llm(), []

    def intrude():
        try:
            llm.generate([3], greedy(1), use_tqdm=False)
        except EngineError as error:
            errors.append(str(error))

    run = llm.model_runner.forward

    def slow_run(batch):
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        return run(batch)

    llm.model_runner.forward = slow_run
    assert len(generate(llm, [[5]], greedy(1))[0]) == 1
    assert errors == ["this engine is in use by another thread; give each thread an LLM of its own."]


# ---------------------------------------------------------------- prefix cache


@pytest.mark.parametrize("device", DEVICES)
def test_equal_prompts_in_one_prefill(make_llm, reference, device):
    """The second of two equal prompts hits blocks that the same launch fills."""
    llm, prompt = make_llm(device=device, max_num_batched_tokens=256), prompt_of(40)
    outputs = llm.generate([prompt] * 3, greedy(8), use_tqdm=False)
    assert tokens_of(outputs) == [reference(prompt, 8)] * 3
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32]


@pytest.mark.parametrize("device", DEVICES)
def test_fully_cached_prompt(make_llm, reference, device):
    """A prompt cached to its last token left nothing to compute, and so no logits to sample from."""
    llm = make_llm(device=device)
    for length in (16, 32, 33):
        prompt = prompt_of(length, seed=1)
        for cached in (0, (length - 1) // 16 * 16):
            (output,) = llm.generate([prompt], greedy(20), use_tqdm=False)
            assert output["token_ids"] == reference(prompt, 20)
            assert output.num_cached_tokens == cached


@pytest.mark.parametrize("device", DEVICES)
def test_evicted_block_loses_its_hash(make_llm, reference, device):
    """A block given to another sequence kept its hash: the old prompt came back and attended foreign keys."""
    llm, first = make_llm(device=device, num_kvcache_blocks=4, max_num_seqs=4), prompt_of(36)
    for length in (50, 5):  # sequences that fill blocks register hashes of their own; short ones leave the old ones
        for cached in (0, 32):
            (output,) = llm.generate([first], greedy(4), use_tqdm=False)
            assert (output["token_ids"], output.num_cached_tokens) == (reference(first, 4), cached)
        generate(llm, [prompt_of(length, seed) for seed in range(4)], greedy(4))


# ---------------------------------------------------------------- chunked prefill


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_num_batched_tokens", [16, 32, 31, 33])
def test_chunk_ends_at_a_block_boundary(make_llm, reference, max_num_batched_tokens, device):
    """A chunk that ended where a block did registered the block twice, or the next chunk started in it again."""
    prompts = [prompt_of(80), prompt_of(64), prompt_of(65)]
    llm = make_llm(device=device, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=4)
    for hits in ([0, 0, 0], [64, 48, 64]):
        outputs = llm.generate(prompts, greedy(6), use_tqdm=False)
        assert tokens_of(outputs) == [reference(prompt, 6) for prompt in prompts]
        assert [output.num_cached_tokens for output in outputs] == hits


# ---------------------------------------------------------------- preemption


@pytest.mark.parametrize(
    ("device", "max_in_flight", "enable_prefix_caching"),
    [("cpu", 0, True), ("cpu", 1, False), gpu_param("cuda", 1, True), gpu_param("cuda", 1, False)],
)
@pytest.mark.parametrize(("lengths", "preempted_at"), [((251, 252), 258), ((251, 251), 257), ((256, 256), 257)])
def test_preemption_at_257_tokens(
    make_llm, reference, lengths, preempted_at, enable_prefix_caching, device, max_in_flight
):
    """The 257th token opens a second block of 256, and none is left: the sequence is recomputed from its prompt and the
    tokens it has generated, which were lost, or counted as prompt."""
    llm = make_llm(
        device=device, kvcache_block_size=256, num_kvcache_blocks=3, max_num_batched_tokens=512, max_model_len=512,
        enable_prefix_caching=enable_prefix_caching,
    )  # fmt: skip
    if max_in_flight:
        run_ahead(llm)
    preempt, preempted = llm.scheduler.preempt, []
    llm.scheduler.preempt = lambda seq: (preempted.append(seq.num_tokens), preempt(seq))
    prompts = [prompt_of(length, seed=i) for i, length in enumerate(lengths)]
    outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
    assert preempted == [preempted_at]
    assert tokens_of(outputs) == [reference(prompt, 20) for prompt in prompts]
    assert tuple(len(output.prompt_token_ids) for output in outputs) == lengths
    assert [output.num_cached_tokens for output in outputs] == [0, 0]  # at its first admission


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_repeated_preemption(make_llm, reference, enable_prefix_caching, device):
    """Sequences that preempted each other in turn made no progress, or lost generated tokens."""
    llm = make_llm(device=device, num_kvcache_blocks=6, max_num_seqs=6, enable_prefix_caching=enable_prefix_caching)
    prompts = [prompt_of(14 + i) for i in range(6)]
    assert generate(llm, prompts, greedy(40)) == [reference(prompt, 40) for prompt in prompts]
    assert llm.scheduler.num_preemptions > 3
    assert llm.scheduler.block_manager.num_available == 6


def test_two_threads(make_llm, reference):
    """The second thread's requests were queued and aborted while the first one was inside a step: IndexErrors there."""
    llm, outcomes = make_llm(), []

    def use(prompt):
        for _ in range(60):
            try:
                outcomes.append(generate(llm, [prompt], greedy(6)) == [reference(prompt, 6)])
            except EngineError as error:
                outcomes.append("in use by another thread" in str(error) and "refused")

    prompts = [5, 6], [7] * 20
    for prompt in prompts:
        reference(prompt, 6)  # the oracle is for one thread, too
    threads = [threading.Thread(target=use, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 120 and set(outcomes) == {True, "refused"}
    assert llm.is_finished()


@pytest.mark.parametrize("late", [False, True])
def test_outputs_are_made_while_others_run(make_llm, reference, monkeypatch, late):
    """2,048 of them took 25 ms after the last step. One whose text is late does not hold up the device."""
    llm, running, output = make_llm(), [], Request.output
    monkeypatch.setattr(Request, "output", lambda self: running.append(not llm.is_finished()) or output(self))
    if late:
        monkeypatch.setattr(Request, "has_text", property(lambda self: self.index == 1))
    limits = [9, 2, 5, 3]
    prompts = [prompt_of(5, seed=i) for i in range(4)]
    assert generate(llm, prompts, [greedy(n) for n in limits]) == [
        reference(prompt, n) for prompt, n in zip(prompts, limits, strict=True)
    ]
    assert running == ([True, False, False, False] if late else [True, True, True, False])

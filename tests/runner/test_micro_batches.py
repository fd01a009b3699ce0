"""Prefills as two micro-batches: the split against a naive list of tokens, and outputs that do not depend on it."""

import itertools
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from families import make
from helpers import generate, generate_with_logits, greedy, prefill_batch, prompt_of, record_calls

from benchmarks.workloads import write_model
from nanovllm import LLM, SamplingParams, WorkerError
from nanovllm.config import Config
from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.runner import micro_batches
from nanovllm.runner import worker as worker_module
from nanovllm.runner.micro_batches import MicroBatches, cut_of, max_half, max_sum_bytes, min_tokens, split
from nanovllm.runner.start import compile_kernels

FEWEST = 24  # tokens of a prefill that is split, in these tests


def random_prefill(rng):
    """One long sequence, or many; with cached prefixes; sampled ones first."""
    num_seqs = rng.choice((1, 2, 3, 10, 40))
    lengths = np.array([rng.choice((1, 2, 17, 200, 900)) for _ in range(num_seqs)], np.int32)
    if lengths.sum() < 2:
        lengths += 1
    starts = np.array([rng.choice((0, 0, 16, 500)) for _ in range(num_seqs)], np.int32)
    cu_seqlens_q = np.append(0, np.cumsum(lengths, dtype=np.int32))
    num_tokens, num_logits = int(cu_seqlens_q[-1]), rng.choice((0, num_seqs, num_seqs - 1))
    positions = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    return {
        "input_ids": np.arange(num_tokens) + 7, "positions": positions, "slot_mapping": np.arange(num_tokens) * 3,
        "req_indices": np.arange(num_seqs) + 100, "context_lens": starts + lengths, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": np.append(0, np.cumsum(starts + lengths)),
        "logits_indices": cu_seqlens_q[1 : num_logits + 1] - 1,
    }  # fmt: skip


def tokens_of(arrays):
    """What each packed token is, and whom it attends: (id, position, slot, request, keys, is sampled from)."""
    arrays = {name: values.tolist() for name, values in arrays.items()}
    tokens, sampled = [], set(arrays["logits_indices"])
    for s, (begin, end) in enumerate(itertools.pairwise(arrays["cu_seqlens_q"])):
        for i in range(begin, end):
            keys = arrays["context_lens"][s] - (end - i - 1)
            assert keys == arrays["positions"][i] + 1
            tokens.append((*(arrays[name][i] for name in ("input_ids", "positions", "slot_mapping")),
                           arrays["req_indices"][s], keys, i in sampled))  # fmt: skip
    return tokens


def test_halves_have_the_tokens_of_the_whole():
    rng, cuts_inside = random.Random(0), 0
    for _ in range(150):
        arrays = random_prefill(rng)
        a, b = halves = split(arrays)
        assert [token for half in halves for token in tokens_of(half)] == tokens_of(arrays)
        for half in halves:
            assert 0 < len(half["input_ids"]) <= max_half(len(arrays["input_ids"]))
            assert len(half["cu_seqlens_q"]) - 1 == len(half["context_lens"]) == len(half["req_indices"])
            assert np.diff(half["cu_seqlens_q"]).min() > 0
            assert half["cu_seqlens_k"].tolist() == [0, *np.cumsum(half["context_lens"])]
            # the sequences that are sampled from come first
            ends = half["cu_seqlens_q"][1:] - 1
            assert half["logits_indices"].tolist() == ends[: len(half["logits_indices"])].tolist()
        cuts_inside += a["req_indices"][-1] == b["req_indices"][0]
    assert 15 < cuts_inside < 135


def test_a_cut_is_at_a_border_near_the_middle_else_at_a_tile():
    assert cut_of(np.array([0, 2048, 4096, 6144, 8192])) == 4096
    assert cut_of(np.array([0, 4000, 8192])) == 4000
    assert cut_of(np.array([0, 3000, 8192])) == 4096
    assert cut_of(np.array([0, 8100])) == 3968  # 31 tiles of 128
    assert cut_of(np.array([0, 40])) == 20


# ------------------------------------------------------------------------------------------- outputs


def splits_prefills(worker, config):
    micro_batches.MIN_TOKENS = FEWEST
    micro_batches.MIN_LAYER_WORK = {"cpu": 0, "cuda": 0}
    worker_module.worker_main(worker, config)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multigpu])])
def device(request):
    return request.param


@pytest.fixture
def start(device, monkeypatch):
    """start(model) -> two ranks that split prefills, and the arrays of those that rank 0 has split."""
    made = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(worker_module, "worker_main", splits_prefills)
    monkeypatch.setattr(micro_batches, "MIN_TOKENS", FEWEST)
    monkeypatch.setattr(micro_batches, "MIN_LAYER_WORK", {"cpu": 0, "cuda": 0})

    def start(model):
        llm = LLM(model, device=device, tensor_parallel_size=2, enforce_eager=True, **OPTIONS)
        made.append(llm)
        prefills = record_calls(llm.model_runner.micro_batches, "run")
        return llm, prefills

    yield start
    for llm in made:
        llm.exit()
    torch.set_num_threads(before)


OPTIONS = {"skip_tokenizer_init": True, "quiet": True, "kvcache_block_size": 16, "max_num_batched_tokens": 64,
           "max_num_seqs": 8, "num_kvcache_blocks": 64}  # fmt: skip
PROMPTS = [
    prompt_of(150),  # in three chunks, each split inside the sequence
    *(prompt_of(n, seed=n) for n in (5, 17, 33, 1, 20)),
    *(prompt_of(40, seed=1) + prompt_of(n, seed=n) for n in (3, 9)),  # the second reads blocks that the first writes
]


@pytest.mark.parametrize("case", ["qwen3", "mistral-window", "gemma3", "olmo2", "qwen3-moe", "qwen2-moe"])
def test_tokens_are_those_of_one_rank(case, device, start, make_llm, tmp_path):
    """Chunks, cached and shared prefixes, windows, experts, norms of results; forked completions and guided ones."""
    make(tmp_path, case, vocab_size=512)
    llm, prefills = start(str(tmp_path))
    alone = make_llm(model=str(tmp_path), device=device, enforce_eager=True, num_kvcache_blocks=64)
    params = [greedy(8)] * len(PROMPTS)
    params[2] = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)
    params[3] = greedy(8, allowed_token_ids=[4, 5, 6])
    for prompts in (PROMPTS, PROMPTS[::-1]):  # the second time prefixes are cached
        given, expected = (
            [c.token_ids for o in engine.generate(prompts, params, use_tqdm=False) for c in o.outputs]
            for engine in (llm, alone)
        )
        if device == "cpu":
            assert given == expected
        else:  # sums in another order: a near tie may turn out otherwise, once in a while
            assert sum(a == b for a, b in zip(given, expected, strict=True)) >= 0.7 * len(given)
    assert len(prefills) >= 5
    halves = [split(step.arrays) for step in prefills]
    assert any(a["req_indices"][-1] == b["req_indices"][0] for a, b in halves)
    assert any(len(half["logits_indices"]) == 0 for pair in halves for half in pair)
    assert all(len(half["input_ids"]) <= max_half(64) for pair in halves for half in pair)


def test_embeddings_are_those_of_one_rank(device, start, make_llm, make_checkpoint):
    """Beside prompts that generate, of which some begin with the same blocks."""
    path = make_checkpoint()
    llm, prefills = start(path)
    alone = make_llm(model=path, device=device, enforce_eager=True, num_kvcache_blocks=64)
    expected = generate(alone, PROMPTS, greedy(4))
    ids = [llm.add_request(prompt, greedy(4)) for prompt in PROMPTS]
    given = llm.embed(PROMPTS[::-1])[::-1]
    finished = {}
    while not llm.is_finished():
        finished |= dict(llm.step()[0])
    assert len(prefills) >= 5 and (device != "cpu" or [finished[i] for i in ids] == expected)
    for output, other in zip(given, alone.embed(PROMPTS), strict=True):
        assert abs(output.embedding - other.embedding).max() < (1e-5 if device == "cpu" else 1e-2)


def test_logits_are_those_of_one_rank(device, start, make_llm, make_checkpoint):
    path = make_checkpoint(attention_bias=True)
    prompts = [prompt_of(n, seed=7) for n in (30, 61, 25, 100)]
    llm, prefills = start(path)
    _, given = generate_with_logits(llm, prompts, 2)
    _, expected = generate_with_logits(make_llm(model=path, device=device, enforce_eager=True), prompts, 2)
    assert len(prefills) >= 3
    for logits, other in zip(given, expected, strict=True):
        torch.testing.assert_close(logits, other[:, :256], rtol=0, atol=1e-4)  # of rank 0's ids


def test_what_is_never_split(device, start, make_llm, tmp_path):
    """Prompts that are scored, alone or beside others; short prefills."""
    make(tmp_path, "qwen3", vocab_size=512)
    llm, prefills = start(str(tmp_path))
    prompt = prompt_of(50)
    alone = make_llm(model=str(tmp_path), device=device, enforce_eager=True, num_kvcache_blocks=64)
    assert llm.score([prompt])[0].logprobs == pytest.approx(alone.score([prompt])[0].logprobs, abs=1e-3)
    generate(llm, [prompt_of(FEWEST - 1, seed=9)], greedy(2))
    assert not prefills
    generate(llm, [prompt_of(FEWEST, seed=9)], greedy(2))
    assert len(prefills) == 1
    takes = lambda batch: llm.model_runner.micro_batches.takes(batch, {})  # noqa: E731
    assert takes(prefill_batch((0, FEWEST))) and takes(prefill_batch((0, FEWEST), (4, 30), num_sampled=1))
    assert not takes(prefill_batch((0, FEWEST), num_targets={0: (3, 4)}))
    assert not takes(prefill_batch((1, FEWEST)))


def test_a_scored_prompt_that_others_continue_is_not_split():
    """Sampled sequences are put before those that are only scored, and may read blocks that these write. A scored
    prompt's last chunk may have nothing to score: it is its last token alone."""
    batches = MicroBatches(SimpleNamespace(tensor_parallel_size=1), SINGLE_RANK, torch.device("cpu"), torch.empty(0))
    batches.min_tokens = FEWEST
    for scored, is_split in (((15, 16), False), ((14, 16), True)):  # the latter would have a target
        assert batches.takes(prefill_batch((0, 40), scored, (0, 20), num_sampled=1), {}) == is_split
    assert batches.takes(prefill_batch((15, 16), (0, 40)), {})  # sampled


def test_small_models_and_other_numbers_of_ranks_run_whole(make_checkpoint, tmp_path):
    """A host launches the two halves of a small model more slowly than a GPU computes them."""
    def of(size, ranks, max_num_batched_tokens=16384):
        options = {"tensor_parallel_size": ranks, "max_num_batched_tokens": max_num_batched_tokens}
        return Config.from_options(write_model(tmp_path, size), {"load_format": "dummy", **options})

    assert 8000 < min_tokens(of("8b", 2), "cuda") < 12000
    assert 3000 < min_tokens(of("32b", 2), "cuda") < 5000
    nothing = [of("0.6b", 2), of("8b", 1), of("8b", 4), of("8b", 2, 2048)]
    assert [min_tokens(config, "cuda") for config in nothing] == [None] * 4
    assert min_tokens(of("8b", 2), "cpu") is None
    assert max_sum_bytes(of("0.6b", 2), torch.device("cuda")) == 0


def test_a_worker_that_is_killed_in_a_split_prefill(start, make_checkpoint):
    """Rank 0 waits for a partial sum that does not come; nothing hangs."""
    llm, prefills = start(make_checkpoint())
    worker = llm.model_runner.workers.processes[1]
    killer = threading.Timer(0.5, worker.kill)
    prompts = [prompt_of(60, seed=n) for n in range(20_000)]
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1"):
        killer.start()
        llm.generate(prompts, greedy(1), use_tqdm=False)
    assert time.monotonic() - begin < 15 and prefills and not worker.is_alive()


def test_warm_up_fits_the_smallest_buffers(make_llm):
    """Two halves are compiled, of no more tokens than the buffers of the smallest limit have room for."""
    llm, halves = make_llm(max_num_batched_tokens=micro_batches.MIN_TOKENS), []
    runner = llm.model_runner
    runner.micro_batches.min_tokens = micro_batches.MIN_TOKENS
    runner.micro_batches.forward = lambda model, inputs: halves.extend(len(input_ids) for input_ids, _ in inputs)
    with torch.inference_mode():
        compile_kernels(runner)
    assert len(halves) == 2 and max(halves) <= max_half(micro_batches.MIN_TOKENS)


def test_rank_0_does_not_wait_for_ever_for_its_device(monkeypatch):
    """In the middle of a launch it waits as for the tokens: until a worker fails, or nothing has moved for long."""
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: False))

    def wait_until(condition):
        raise WorkerError(1, f"it is stuck: {condition()}")

    one_rank = SimpleNamespace(tensor_parallel_size=1)
    batches = MicroBatches(one_rank, SINGLE_RANK, torch.device("cuda"), torch.empty(0), wait_until)
    for _ in range(micro_batches.MAX_LAYERS_AHEAD):
        batches._limit_queue()
    with pytest.raises(WorkerError, match="stuck: False"):
        batches._limit_queue()

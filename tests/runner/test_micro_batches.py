"""Prefills as two micro-batches: the split against a naive list of tokens, and outputs that do not depend on it."""

import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from families import make
from helpers import generate, generate_with_logits, greedy, prompt_of

from benchmarks.workloads import write_model
from nanovllm import LLM, SamplingParams, WorkerError
from nanovllm.config import Config
from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.runner import micro_batches
from nanovllm.runner import worker as worker_module
from nanovllm.runner.micro_batches import MicroBatches, cut_of, max_half, max_sum_bytes, min_tokens, split
from nanovllm.runner.model_runner import WARMUP_FEATURES
from nanovllm.runner.step import StepHeader, StepInput, StepKind, pack, unpack
from nanovllm.runner.warmup import compile_kernels

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
    step = StepInput(
        (), (), np.arange(num_tokens) + 7, positions, np.arange(num_tokens) * 3, np.arange(num_seqs) + 100,
        starts + lengths, cu_seqlens_q, np.append(0, np.cumsum(starts + lengths)), cu_seqlens_q[1 : num_logits + 1] - 1,
    )  # fmt: skip
    header = StepHeader(
        StepKind.PREFILL, 0, num_sampled=0, num_tokens=num_tokens, num_seqs=num_seqs, num_logits=num_logits,
        max_seqlen_q=int(lengths.max()), max_context=int((starts + lengths).max()), can_split=1,
    )  # fmt: skip
    return header, step


def tokens_of(header, step):
    """What each packed token is, and whom it attends: (id, position, slot, request, keys, is sampled from)."""
    step = StepInput(*(np.asarray(segment).tolist() for segment in step))
    tokens, sampled = [], set(step.logits_indices)
    for s in range(header.num_seqs):
        begin, end = step.cu_seqlens_q[s : s + 2]
        for i in range(begin, end):
            keys = step.context_lens[s] - (end - i - 1)
            assert keys == step.positions[i] + 1
            tokens.append((step.input_ids[i], step.positions[i], step.slot_mapping[i], step.req_indices[s], keys,
                           i in sampled))  # fmt: skip
    return tokens


def test_halves_have_the_tokens_of_the_whole():
    rng, cuts_inside = random.Random(0), 0
    for _ in range(150):
        header, step = random_prefill(rng)
        halves = [(part, unpack(part, pack(part, half))) for part, half in split(header, step)]  # segments fit
        assert [token for half in halves for token in tokens_of(*half)] == tokens_of(header, step)
        for part, half in halves:
            assert 0 < part.num_tokens <= max_half(header.num_tokens)
            assert part.num_seqs == len(half.context_lens) == len(half.req_indices)
            assert part.max_seqlen_q == np.diff(half.cu_seqlens_q).max() and np.diff(half.cu_seqlens_q).min() > 0
            assert part.max_context == half.context_lens.max()
            assert half.cu_seqlens_k.tolist() == [0, *np.cumsum(half.context_lens)]
            # the sequences that are sampled from come first
            assert half.logits_indices.tolist() == (half.cu_seqlens_q[1:] - 1)[: part.num_logits].tolist()
        (_, a), (_, b) = halves
        cuts_inside += a.req_indices[-1] == b.req_indices[0]
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
    """start(model, ...) -> two ranks that split prefills, and the halves of those that rank 0 has split."""
    made = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(worker_module, "worker_main", splits_prefills)
    monkeypatch.setattr(micro_batches, "MIN_TOKENS", FEWEST)
    monkeypatch.setattr(micro_batches, "MIN_LAYER_WORK", {"cpu": 0, "cuda": 0})

    def start(model):
        llm = LLM(model, device=device, tensor_parallel_size=2, enforce_eager=True, **OPTIONS)
        made.append(llm)
        splits = []
        run = MicroBatches.run
        llm.model_runner.micro_batches.run = lambda runner, header, packed: (
            splits.append(split(header, unpack(header, packed))) or run(runner.micro_batches, runner, header, packed)
        )
        return llm, splits

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
    llm, splits = start(str(tmp_path))
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
    assert len(splits) >= 5
    assert any(a.req_indices[-1] == b.req_indices[0] for (_, a), (_, b) in splits)
    assert any(part.num_logits == 0 for halves in splits for part, _ in halves)
    assert all(part.num_tokens <= max_half(64) for halves in splits for part, _ in halves)


def test_logits_are_those_of_one_rank(device, start, make_llm, make_checkpoint):
    path = make_checkpoint(attention_bias=True)
    prompts = [prompt_of(n, seed=7) for n in (30, 61, 25, 100)]
    llm, splits = start(path)
    _, given = generate_with_logits(llm, prompts, 2)
    _, expected = generate_with_logits(make_llm(model=path, device=device, enforce_eager=True), prompts, 2)
    assert len(splits) >= 3
    for logits, other in zip(given, expected, strict=True):
        torch.testing.assert_close(logits, other[:, :256], rtol=0, atol=1e-4)  # of rank 0's ids


def test_what_is_never_split(device, start, make_llm, tmp_path):
    """Prompts that are scored, alone or beside others; short prefills."""
    make(tmp_path, "qwen3", vocab_size=512)
    llm, splits = start(str(tmp_path))
    prompt = prompt_of(50)
    alone = make_llm(model=str(tmp_path), device=device, enforce_eager=True, num_kvcache_blocks=64)
    assert llm.score([prompt])[0].logprobs == pytest.approx(alone.score([prompt])[0].logprobs, abs=1e-3)
    generate(llm, [prompt_of(FEWEST - 1, seed=9)], greedy(2))
    assert not splits
    generate(llm, [prompt_of(FEWEST, seed=9)], greedy(2))
    assert len(splits) == 1
    header, _ = random_prefill(random.Random(0))
    header = header._replace(num_tokens=FEWEST)
    takes = llm.model_runner.micro_batches.takes
    assert takes(header) and not takes(header._replace(can_split=0))
    assert not takes(header._replace(kind=StepKind.SHORT_PREFILL))


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
    """Rank 0 waits for a summand that does not come; nothing hangs."""
    llm, splits = start(make_checkpoint())
    worker = llm.model_runner.workers.processes[1]
    killer = threading.Timer(0.5, worker.kill)
    prompts = [prompt_of(60, seed=n) for n in range(20_000)]
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1"):
        killer.start()
        llm.generate(prompts, greedy(1), use_tqdm=False)
    assert time.monotonic() - begin < 15 and splits and not worker.is_alive()


def test_warm_up_fits_the_smallest_buffers(make_llm):
    """Two halves are compiled, of no more tokens than the buffers of the smallest limit have room for."""
    llm, halves = make_llm(max_num_batched_tokens=micro_batches.MIN_TOKENS), []
    runner = llm.model_runner
    runner.micro_batches.min_tokens = micro_batches.MIN_TOKENS
    runner.micro_batches.forward = lambda model, inputs: halves.extend(len(input_ids) for input_ids, _ in inputs)
    with torch.inference_mode():
        compile_kernels(runner, WARMUP_FEATURES)
    assert len(halves) == 2 and max(halves) <= max_half(micro_batches.MIN_TOKENS)


def test_rank_0_does_not_wait_for_ever_for_its_device(monkeypatch):
    """In the middle of a launch it waits as for the tokens: until a worker fails, or nothing has moved for long."""
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: False))

    def wait_until(condition):
        raise WorkerError(1, f"it is stuck: {condition()}")

    one_rank = SimpleNamespace(tensor_parallel_size=1)
    batches = MicroBatches(one_rank, SINGLE_RANK, torch.device("cuda"), wait_until)
    for _ in range(micro_batches.MAX_LAYERS_AHEAD):
        batches._limit_queue()
    with pytest.raises(WorkerError, match="stuck: False"):
        batches._limit_queue()

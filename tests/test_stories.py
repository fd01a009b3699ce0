"""Situations that broke engines of this kind. Each docstring tells the story; transformers says what is right.

Mistakes that end in an error, damaged checkpoints among them, have their own file: ``test_errors.py``.
"""

import gc
import itertools
import json
import random
import shutil
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm import LLM, OutOfMemoryError, RequestError, SamplingParams
from nanovllm.engine import model_runner
from nanovllm.runner.cuda_graphs import CudaGraphs
from nanovllm.engine.llm_engine import no_full_gc
from nanovllm.engine.scheduler import DecodeBatch
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ReplicatedLinear

ROOT = Path(__file__).resolve().parent.parent


def on_gpu(*values):
    return pytest.param(*values, marks=pytest.mark.gpu)


DEVICES = ["cpu", on_gpu("cuda")]


def greedy(max_tokens, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **params})


def tokens_of(outputs):
    return [output["token_ids"] for output in outputs]


def prompt_of(length, seed=0):
    return random.Random(f"{length} {seed}").choices(range(2, 512), k=length)


@pytest.fixture(scope="module")
def reference(make_checkpoint):
    """reference(prompt, n) -> the n tokens that transformers generates greedily with the tiny checkpoint."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(make_checkpoint()).eval()
    known: dict[tuple, list] = {}

    @torch.inference_mode()
    def generate(prompt, n):
        key = tuple(prompt)
        if len(known.setdefault(key, [])) < n:
            ids = torch.tensor([prompt])
            # the mask is given, because transformers otherwise takes token 0 for padding
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            known[key] = out[0, len(prompt) :].tolist()
        return known[key][:n]

    return generate


def run_ahead(llm):
    """Depth 1 on the CPU, where it is 0 of its own accord."""
    llm.model_runner.depth = 1
    return llm


def pad_batches(llm):
    """Decode batches and short prefills padded as for graphs, on the CPU: each "replay" is an ordinary step."""

    def stand_in(decode, sizes):
        graphs = CudaGraphs.__new__(CudaGraphs)
        graphs.captured_sizes, graphs.graphs = sizes, {}
        for size in sizes:
            result = decode(size, llm.config.max_model_len).clone()

            def replay(size=size, result=result):
                result.copy_(decode(size, llm.config.max_model_len))

            graphs.graphs[size] = SimpleNamespace(replay=replay), result
        return graphs

    runner = llm.model_runner
    with torch.inference_mode():
        runner.graphs = stand_in(runner._decode, CudaGraphs.sizes(llm.config.max_num_seqs))
        runner.prefill_graphs = stand_in(runner._prefill_hidden, runner.prefill_sizes)


# ---------------------------------------------------------------- batches and limits


@pytest.mark.parametrize(("device", "padded"), [("cpu", False), ("cpu", True), on_gpu("cuda", True)])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 12, 20, 100])
def test_full_batches(make_llm, reference, max_num_seqs, device, padded):
    """Batch sizes between the captured ones: graphs were captured for 1, 2, 4, 8, 16, 32 ... up to ``max_num_seqs``,
    and a batch of 3, 12, 20 or 100 found no graph, or ran with another batch's padding."""
    prompts = [prompt_of(3 + i % 7, seed=i) for i in range(max_num_seqs)]
    llm = make_llm(
        device=device, dtype="float32", max_num_seqs=max_num_seqs, max_num_batched_tokens=1024, max_model_len=64
    )
    if padded and device == "cpu":
        pad_batches(llm)
    assert (llm.model_runner.graphs is not None) == padded
    sizes, run = [], llm.model_runner.run

    def watch(batch):
        if isinstance(batch, DecodeBatch):
            sizes.append(len(batch.rows))
        return run(batch)

    llm.model_runner.run = watch
    # a fifth of them finish at a time, so smaller batches occur too; padding that stored something would hit the
    # first block, whose owner stays to the end
    params = [greedy(8 - i % 5) for i in range(max_num_seqs)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert tokens_of(outputs) == [reference(p, 8)[: q.max_tokens] for p, q in zip(prompts, params, strict=True)]
    assert sizes[0] == max_num_seqs and len(set(sizes)) >= min(5, max_num_seqs)


def test_a_graph_for_every_batch_size():
    """``max_num_seqs=3`` captured 1, 2 and 4, and the last had more rows than the row table; 20 captured up to 16."""
    for max_num_seqs in range(1, 700):
        sizes = CudaGraphs.sizes(max_num_seqs)
        assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_num_seqs
        assert all(b - a <= max(a, 8) and b - a <= 32 for a, b in itertools.pairwise(sizes))  # little is padding


@pytest.mark.parametrize("device", DEVICES)
def test_growth_to_max_model_len(make_llm, reference, device):
    """The last token allowed was written one past the tables' end, or the sequence stopped one short."""
    llm = make_llm(device=device, dtype="float32", max_model_len=48)
    prompts = [prompt_of(10), prompt_of(47)]
    long, longest = llm.generate(prompts, greedy(1000), use_tqdm=False)
    assert long["token_ids"] == reference(prompts[0], 38) and long["finish_reason"] == "length"
    assert longest["token_ids"] == reference(prompts[1], 1) and longest["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", [np.int32(2**31 - 1), np.uint8(250), 2**40])
def test_max_tokens_that_overflow_with_the_prompt(make_llm, reference, max_tokens):
    """numpy's numbers were kept: the sum with the prompt's length wrapped round, and generate() never came back."""
    llm = make_llm(max_model_len=48)
    request = llm.add_request(prompt_of(10), greedy(max_tokens))
    finished = [done for _ in range(50) for done in llm.step()[0]]
    assert finished == [(request, reference(prompt_of(10), 38))]


def test_min_tokens_that_overflow_with_the_prompt(make_llm, reference):
    """100 and np.int8(40) made -116, so nothing was held back."""
    prompt = prompt_of(100)
    (stop,) = reference(prompt, 1)
    params = greedy(64, min_tokens=np.int8(40), stop_token_ids=[np.int16(stop)])
    (output,) = make_llm().generate([prompt], params, use_tqdm=False)
    assert stop not in output["token_ids"][:40] and len(output["token_ids"]) >= 40


def test_more_prompts_than_places(make_llm, reference):
    """Six prompts with ``max_num_seqs=2`` once ran three at a time, and wrote past the row tables."""
    llm = make_llm(max_num_seqs=2)
    widest = 0
    run = llm.model_runner.run

    def watch(batch):
        nonlocal widest
        widest = max(widest, len(llm.scheduler.running))
        return run(batch)

    llm.model_runner.run = watch
    prompts = [prompt_of(5 + 9 * i) for i in range(6)]
    outputs = llm.generate(prompts, greedy(12), use_tqdm=False)
    assert tokens_of(outputs) == [reference(prompt, 12) for prompt in prompts]
    assert widest == 2


def test_larger_than_the_pool(make_llm, reference):
    """A prompt, or its growth, that the pool can never hold waited for ever. It is refused, and what just fits runs."""
    llm = make_llm(num_kvcache_blocks=3)
    with pytest.raises(RequestError, match="need 4 KV blocks of 16 tokens; the pool has 3"):
        llm.generate([prompt_of(49)], greedy(1), use_tqdm=False)
    prompt = prompt_of(20)
    with pytest.raises(RequestError, match="need 4 KV blocks"):
        llm.generate([prompt], greedy(30), use_tqdm=False)
    assert tokens_of(llm.generate([prompt_of(50)], greedy(0), use_tqdm=False)) == [[]]  # which needs no block
    # 49 tokens: the last one is sampled, and its keys and values are never needed
    assert tokens_of(llm.generate([prompt, prompt_of(48)], [greedy(29), greedy(1)], use_tqdm=False)) == [
        reference(prompt, 29),
        reference(prompt_of(48), 1),
    ]


def test_refused_request_spares_the_others(make_llm, reference):
    """A bad request that failed in the middle took everybody's results along. It is refused when it is added."""
    llm = make_llm()
    good = llm.add_request(prompt_of(9), greedy(5))
    for bad in ([], [3, 512], [-1], [1] * 4096):
        with pytest.raises(RequestError):
            llm.add_request(bad, greedy(5))
    also = llm.add_request(prompt_of(8), greedy(3))
    finished = {}
    while not llm.is_finished():
        done, _ = llm.step()
        finished.update(done)
    assert finished == {good: reference(prompt_of(9), 5), also: reference(prompt_of(8), 3)}


def test_max_tokens_zero_and_one(make_llm, reference):
    """``max_tokens=0`` generated one token, and ``max_tokens=1`` two; or the output got lost among the others."""
    llm = make_llm()
    prompts = [prompt_of(n) for n in (4, 16, 17, 40)]
    outputs = llm.generate(prompts, [greedy(n) for n in (0, 1, 0, 3)], use_tqdm=False)
    assert tokens_of(outputs) == [reference(prompt, n) for prompt, n in zip(prompts, (0, 1, 0, 3), strict=True)]
    assert [output["finish_reason"] for output in outputs] == ["length"] * 4
    assert tokens_of(llm.generate(prompts, greedy(0), use_tqdm=False)) == [[]] * 4
    assert llm.generate([], use_tqdm=False) == []


def test_outputs_of_two_requests_differ(make_llm):
    """As mappings they were equal when their texts were, and could not be kept in a set."""
    one, other = make_llm().generate([prompt_of(4)] * 2, greedy(3), use_tqdm=False)
    assert dict(one) == dict(other)
    assert one == one and one != other and one != dict(one)
    assert len({one, other, one}) == 2


# ---------------------------------------------------------------- prefix cache, chunks, preemption


@pytest.mark.parametrize("device", DEVICES)
def test_identical_prompts_in_one_step(make_llm, reference, device):
    """The second of two equal prompts hit blocks that the same launch was only about to fill."""
    llm = make_llm(device=device, max_num_batched_tokens=256)
    prompt = prompt_of(40)
    outputs = llm.generate([prompt] * 3, greedy(8), use_tqdm=False)
    assert tokens_of(outputs) == [reference(prompt, 8)] * 3
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [16, 32, 33])
def test_wholly_cached_prompt(make_llm, reference, length, device):
    """A prompt that is cached to its last token left nothing to compute, and so no logits to sample from."""
    llm = make_llm(device=device)
    prompt = prompt_of(length)
    for cached in (0, (length - 1) // 16 * 16):
        (output,) = llm.generate([prompt], greedy(20), use_tqdm=False)
        assert output["token_ids"] == reference(prompt, 20)
        assert output.num_cached_tokens == cached


@pytest.mark.parametrize("device", DEVICES)
def test_reused_block_loses_its_name(make_llm, reference, device):
    """A block was given to another sequence and kept its hash: the old prompt came back and read foreign keys."""
    llm = make_llm(device=device, num_kvcache_blocks=4, max_num_seqs=4)
    first = prompt_of(36)
    # those who fill the blocks give them names of their own; those who do not are who leave the old ones there
    for length in (50, 5):
        llm.generate([first], greedy(4), use_tqdm=False)
        (again,) = llm.generate([first], greedy(4), use_tqdm=False)
        assert again.num_cached_tokens == 32
        llm.generate([prompt_of(length, seed) for seed in range(4)], greedy(4), use_tqdm=False)
        (again,) = llm.generate([first], greedy(4), use_tqdm=False)
        assert again.num_cached_tokens == 0
        assert again["token_ids"] == reference(first, 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [16, 32, 31, 33])
def test_chunk_ends_on_a_block_boundary(make_llm, reference, budget, device):
    """A chunk that ended just where a block did registered that block twice, or the next chunk began in it again."""
    prompts = [prompt_of(80), prompt_of(64), prompt_of(65)]
    llm = make_llm(device=device, max_num_batched_tokens=budget, max_num_seqs=4)
    for _ in range(2):  # the second time with hits
        outputs = llm.generate(prompts, greedy(6), use_tqdm=False)
        assert tokens_of(outputs) == [reference(p, 6) for p in prompts]
    assert [output.num_cached_tokens for output in outputs] == [64, 48, 64]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [20, 300])
def test_short_prefills(make_llm, reference, budget, device):
    """A prompt of 128 tokens took 12 ms, for its 224 kernels were launched one by one. A short prefill is a graph now,
    a row per token: of several prompts, behind cached prefixes, in chunks that sample nothing. A long one is not."""
    llm = make_llm(device=device, dtype="float32", max_num_seqs=8, max_num_batched_tokens=budget)
    if device == "cpu":
        pad_batches(llm)
    sizes, graphs = [], llm.model_runner.prefill_graphs
    replay = graphs.replay
    graphs.replay = lambda n: sizes.append(n) or replay(n)
    first, long = [prompt_of(n, seed=n) for n in (1, 2, 15, 16, 17, 40)], prompt_of(290)
    for prompts in (first, [long], [[*first[5], 7, 8, 9], [*long[:260], 5], first[2], first[5]]):
        assert tokens_of(llm.generate(prompts, greedy(3), use_tqdm=False)) == [reference(p, 3) for p in prompts]
    # 91 tokens; 290; 11 + 5 + 15 + 8 behind blocks of 16
    assert sizes == ([128, 64] if budget == 300 else [32] * 4 + [16] + [32] * 14 + [16] + [32, 32])


def test_short_prefills_attend_little(make_llm, reference, monkeypatch):
    """As rows of a decode batch tokens read their contexts one by one: those of long ones are better off without it."""
    monkeypatch.setattr(model_runner, "SHORT_PREFILL_CONTEXTS", 630)
    llm = make_llm(dtype="float32")
    pad_batches(llm)
    sizes, graphs = [], llm.model_runner.prefill_graphs
    replay = graphs.replay
    graphs.replay = lambda n: sizes.append(n) or replay(n)
    for prompt, expected in ((prompt_of(36), [64]), (prompt_of(37), []), ([*prompt_of(36), 1, 2], [16])):
        sizes.clear()  # 0 + 1 + ... + 35 = 630; the last one finds 32 tokens in the cache, and attends 32 + ... + 37
        assert tokens_of(llm.generate([prompt], greedy(3), use_tqdm=False)) == [reference(prompt, 3)]
        assert sizes == expected


@pytest.mark.parametrize(("device", "depth"), [("cpu", 0), ("cpu", 1), on_gpu("cuda", 1)])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize(("lengths", "preempted_at"), [((251, 252), 258), ((251, 251), 257), ((256, 256), 257)])
def test_preemption_at_257_tokens(
    make_llm, reference, monkeypatch, lengths, preempted_at, enable_prefix_caching, device, depth
):
    """The 257th token opens a second block of 256. There is none, so the sequence starts again from its prompt and the
    tokens it has generated; these were left out, or counted as prompt."""
    llm = make_llm(
        device=device, kvcache_block_size=256, num_kvcache_blocks=3, max_num_batched_tokens=512, max_model_len=512,
        enable_prefix_caching=enable_prefix_caching,
    )  # fmt: skip
    if depth:
        run_ahead(llm)
    preempt, preempted = llm.scheduler.preempt, []
    monkeypatch.setattr(llm.scheduler, "preempt", lambda seq: (preempted.append(seq.num_tokens), preempt(seq)))
    prompts = [prompt_of(length, seed=i) for i, length in enumerate(lengths)]
    outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
    assert preempted == [preempted_at]
    assert tokens_of(outputs) == [reference(prompt, 20) for prompt in prompts]
    assert tuple(len(output.prompt_token_ids) for output in outputs) == lengths
    assert [output.num_cached_tokens for output in outputs] == [0, 0]  # of the prompt, when it came


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preemption_again_and_again(make_llm, reference, enable_prefix_caching, device):
    """Preempted by turns, sequences waited for each other; and what they had generated got lost."""
    llm = make_llm(
        device=device, num_kvcache_blocks=6, max_num_seqs=6, enable_prefix_caching=enable_prefix_caching
    )
    prompts = [prompt_of(14 + i) for i in range(6)]
    outputs = llm.generate(prompts, greedy(40), use_tqdm=False)
    assert tokens_of(outputs) == [reference(prompt, 40) for prompt in prompts]
    assert llm.scheduler.num_preemptions > 3
    assert llm.scheduler.block_manager.num_available == 6


@pytest.mark.parametrize("device", DEVICES)
def test_hit_on_a_block_in_flight(make_llm, reference, device):
    """A prompt arrives while the launch that fills its twin's blocks still runs: a hit, as launches run in order."""
    llm = run_ahead(make_llm(device=device))
    prompt = prompt_of(40)
    ids, finished, processed = [llm.add_request(prompt, greedy(6))], {}, []
    llm.step()
    assert len(llm._in_flight) == 1
    ids.append(llm.add_request(prompt, greedy(6)))
    while not llm.is_finished():
        done, num_tokens = llm.step()
        finished.update(done)
        processed.append(num_tokens)
    assert [n for n in processed if n > 0] == [40, 8]
    assert finished == dict.fromkeys(ids, reference(prompt, 6))


@pytest.mark.parametrize("device", DEVICES)
def test_stop_learnt_one_launch_late(make_llm, reference, device):
    """Run-ahead computes one token too many after a stop; it appeared in the output, or in the next owner's row."""
    prompts = [prompt_of(n) for n in (9, 10, 11, 12)]
    stops = [reference(prompt, 12)[i] for prompt, i in zip(prompts, (2, 5, 0, 7), strict=True)]
    expected = []
    for prompt, stop in zip(prompts, stops, strict=True):
        tokens = reference(prompt, 12)
        expected.append(tokens[: tokens.index(stop) + 1])
    llm = run_ahead(make_llm(device=device, max_num_seqs=2))
    outputs = llm.generate(prompts, [greedy(12, stop_token_ids=[stop]) for stop in stops], use_tqdm=False)
    assert tokens_of(outputs) == expected
    assert [output.outputs[0].stop_reason for output in outputs] == stops
    assert [output["finish_reason"] for output in outputs] == ["stop"] * 4


# ---------------------------------------------------------------- interrupts, and the engine's life


def test_error_in_a_launch(make_llm, reference, monkeypatch):
    """An exception from the device leaves the engine empty and usable, and reaches the caller as it is."""
    llm = make_llm()

    def fail(*args):
        raise RuntimeError("device says no")

    monkeypatch.setattr(llm.model_runner.sampler, "forward", fail)
    with pytest.raises(RuntimeError, match="device says no"):
        llm.generate([prompt_of(5)], greedy(5), use_tqdm=False)
    monkeypatch.undo()
    assert tokens_of(llm.generate([prompt_of(5)], greedy(5), use_tqdm=False)) == [reference(prompt_of(5), 5)]


def test_the_collector_does_not_stop_a_run(make_llm, monkeypatch):
    """In one run of three, Python looked for garbage among all of torch's objects, and the device waited for 0.1 s.
    To freeze them for the time of a run was a mistake: it made old objects of young garbage, which then stayed."""
    llm, collected = make_llm(), []
    run, before = llm.model_runner.run, gc.get_threshold()

    def watch(batch):
        for _ in range(2000):  # young garbage, enough of it for many collections, of all generations
            cycle = []
            cycle.append(cycle)
        return run(batch)

    llm.model_runner.run = watch
    gc.collect()  # else one that is due, for what came before, may come before the run
    gc.callbacks.append(note := lambda phase, info: collected.append(info["generation"]))
    gc.set_threshold(100, 1, 1)
    try:
        llm.generate([[5, 6]], greedy(3), use_tqdm=False)
        assert set(collected) == {0, 1} and gc.get_threshold() == (100, 1, 1)
        monkeypatch.setattr(llm.model_runner, "run", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[5, 6]], greedy(3), use_tqdm=False)
        assert gc.get_threshold() == (100, 1, 1)
        first, second = no_full_gc(), no_full_gc()  # runs of two engines, in two threads
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        assert gc.get_threshold() == (100, 1, 1)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)


def test_garbage_between_runs_is_collected(make_llm):
    llm, alive = make_llm(), weakref.WeakSet()

    class Node:
        pass

    for _ in range(1500):
        node = Node()
        node.itself = node
        alive.add(node)
        llm.generate([[5, 6]], greedy(1), use_tqdm=False)
    assert len(alive) < 1200


def test_exit_twice(make_checkpoint):
    """``exit()`` in a ``with`` block, and again by hand, tore down what was gone already."""
    with LLM(make_checkpoint(), device="cpu", skip_tokenizer_init=True) as llm:
        llm.exit()
    llm.exit()
    llm.exit()


def test_two_engines_in_a_row_and_at_once(make_llm, make_checkpoint, reference):
    """The second engine of a process inherited the first one's context, default dtype or thread."""
    prompt = prompt_of(20)
    first = make_llm()
    second = make_llm(model=make_checkpoint(tie_word_embeddings=True), num_kvcache_blocks=8, dtype="bfloat16")
    other = tokens_of(second.generate([prompt], greedy(6), use_tqdm=False))
    assert tokens_of(first.generate([prompt], greedy(6), use_tqdm=False)) == [reference(prompt, 6)] != other
    first.exit()
    assert tokens_of(second.generate([prompt], greedy(6), use_tqdm=False)) == other
    second.exit()
    assert tokens_of(make_llm().generate([prompt], greedy(6), use_tqdm=False)) == [reference(prompt, 6)]
    assert torch.get_default_dtype() == torch.float32


def test_two_engines_in_two_threads(make_checkpoint):
    """The context was the process's: a launch of one engine broke the other's with an AssertionError. Engines that
    were made at the same time got each other's dtype, which is torch's default for all threads for a while."""
    prompts = [prompt_of(n) for n in (5, 30, 17)]
    kinds = [{}, {"model": make_checkpoint(tie_word_embeddings=True), "dtype": "bfloat16"}]
    options = {"model": make_checkpoint(), "device": "cpu", "skip_tokenizer_init": True, "num_kvcache_blocks": 16}

    def outcome(kind):
        with LLM(**{**options, **kind}) as llm:
            return [tokens_of(llm.generate(prompts, greedy(10), use_tqdm=False)) for _ in range(3)]

    def work(kind, outcomes):
        outcomes += [outcome(kind) for _ in range(6)]

    alone = [outcome(kind) for kind in kinds]
    together = [[], []]
    threads = [threading.Thread(target=work, args=pair) for pair in zip(kinds, together, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone[0] != alone[1]
    assert together == [[alone[0]] * 6, [alone[1]] * 6]


MADE_IN_THREADS = """
import threading
from nanovllm import LLM, SamplingParams

prompts = []

def work():
    with LLM(device="cpu", num_kvcache_blocks=4) as llm:
        prompts.extend(llm.generate("2 + 3", SamplingParams(max_tokens=0), use_tqdm=False))

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(prompts) == 3, len(prompts)
assert all(prompt.prompt_token_ids == prompts[0].prompt_token_ids for prompt in prompts)
"""


def test_first_engines_made_in_three_threads():
    """Each imported transformers, all but one failed: "cannot import name 'AutoTokenizer' from 'transformers'"."""
    argv = [sys.executable, "-c", MADE_IN_THREADS]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_made_and_deleted_ten_times(make_checkpoint):
    """``del llm`` freed nothing, because an atexit hook, a thread or a cycle held on to the weights and the pool."""
    threads = threading.active_count()
    gc.collect()
    gc.disable()  # what only the cycle collector finds is freed too late
    try:
        for _ in range(10):
            llm = LLM(make_checkpoint(), device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=4)
            llm.generate([prompt_of(5)], greedy(2), use_tqdm=False)
            held = [
                weakref.ref(x) for x in (llm, llm.model_runner, llm.model_runner.model, llm.model_runner.kv_cache)
            ]
            del llm
            assert [ref() for ref in held] == [None] * 4
    finally:
        gc.enable()
    assert threading.active_count() <= threads + 1  # the last tokenizer thread may still be on its way out


def test_exit_frees_though_the_engine_is_still_referenced(make_llm):
    """``exit()`` frees at once; users keep the variable."""
    llm = make_llm()
    held = [weakref.ref(x) for x in (llm.model_runner.model, llm.model_runner.kv_cache)]
    llm.exit()
    gc.collect()
    assert [ref() for ref in held] == [None] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_device_memory_does_not_grow(make_checkpoint, enforce_eager):
    """Ten engines one after another: graphs' pools or the KV cache stayed on the device."""
    before, allocated, used = torch.cuda.memory_allocated(), [], []
    for _ in range(10):
        llm = LLM(
            make_checkpoint(),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            num_kvcache_blocks=4096,
            max_num_seqs=8,
            enforce_eager=enforce_eager,
        )
        llm.generate([prompt_of(5)], greedy(2), use_tqdm=False)
        model, pool = llm.model_runner.model, llm.model_runner.kv_cache
        assert pool.nbytes == 512 << 20  # too large to be taken for anything else
        held = weakref.ref(model), weakref.ref(pool)
        del llm, model, pool
        gc.collect()
        assert [ref() for ref in held] == [None] * 2
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    assert max(used[2:]) - used[1] < 32 << 20, used
    # torch makes its libraries' workspaces once, for each stream, and keeps them: 32 MiB on some GPUs
    assert allocated[1] - before < 256 << 20, (before, allocated)
    assert max(allocated[2:]) <= allocated[1], allocated


HOLD = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu
def test_another_process_holds_device_memory(make_checkpoint):
    """``gpu_memory_utilization`` counted this process only: with a neighbour on the device the pool was too large
    and the first long prompt ran out of memory. Its share counts; where nothing is left, the figures are told."""
    path = make_checkpoint(num_key_value_heads=4, head_dim=128)  # a block is 1 MiB: the pool could fill the device
    options = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_num_seqs": 1 << 14,
        "max_model_len": 4096,
        "max_num_batched_tokens": 1 << 14,
    }
    free, total = torch.cuda.mem_get_info()
    hold = int(free * 0.3)
    neighbour = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(hold)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert neighbour.stdout.readline() == b"held\n"
        with LLM(path, gpu_memory_utilization=0.6, **options) as llm:
            llm.generate([prompt_of(100)], greedy(2), use_tqdm=False)
            free_now, _ = torch.cuda.mem_get_info()
            assert total - free_now < 0.62 * total
            assert llm.model_runner.kv_cache.nbytes < 0.6 * total - hold
        with pytest.raises(OutOfMemoryError, match=r"no room for a KV cache.*gpu_memory_utilization=0.2 of"):
            LLM(path, gpu_memory_utilization=0.2, **options)
    finally:
        neighbour.communicate()


def run_python(code):
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_import_is_light():
    """``import nanovllm`` took seconds, or failed where a GPU package was missing. It loads none of the big ones."""
    done = run_python(
        "import sys, nanovllm\n"
        "heavy = {'torch', 'transformers', 'triton', 'flash_attn', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "nanovllm.SamplingParams(temperature=0)\n"
        "assert 'torch' not in sys.modules\n"
        "from nanovllm import LLM\n"
        "heavy = {'transformers', 'triton', 'flash_attn'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert done.returncode == 0, done.stderr


def test_interpreter_ends_with_an_engine_open(make_checkpoint):
    """A script that never calls ``exit()`` hung at its end, or printed a traceback from half-dead modules."""
    done = run_python(
        "from nanovllm import LLM, SamplingParams\n"
        f"llm = LLM({make_checkpoint()!r}, device='cpu', skip_tokenizer_init=True, num_kvcache_blocks=4)\n"
        "out = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)\n"
        "print(out[0]['token_ids'])\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)) == 3


# ---------------------------------------------------------------- numerics


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [1, 5])  # on a GPU the norm is part of the product, or a kernel before it
def test_norm_leaves_the_residual_alone(device, num_tokens):
    """``x.float()`` is ``x`` itself in fp32, and the norm then scaled the residual stream in place."""
    torch.manual_seed(0)
    with torch.device(device):
        norm, linear = RMSNorm(64, eps=1e-6), ReplicatedLinear(64, 64)
        norm.weight.data.normal_()
        linear.weight.data.normal_()
        x = torch.randn(num_tokens, 64)
    before = x.clone()
    expected = before * (before.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)
    assert torch.equal(x, before)
    product = expected @ linear.weight.T
    torch.testing.assert_close(linear(x, norm=norm), product, rtol=1e-4, atol=1e-4)
    assert torch.equal(x, before)
    # what is added is the stream itself; it may be overwritten, but only by the sum
    total = linear(x, norm=norm, residual=x)
    torch.testing.assert_close(total, before + product, rtol=1e-4, atol=1e-4)
    assert torch.equal(x, before) or torch.equal(x, total)


# ---------------------------------------------------------------- tokenizers and the hub


@pytest.fixture
def with_tokenizer(make_checkpoint, tmp_path):
    """with_tokenizer(eos, generation_eos) -> the tiny checkpoint with a tokenizer of words "t0" ... "t511"."""

    def make(eos, generation_eos):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        path = tmp_path / "with_tokenizer"
        shutil.copytree(make_checkpoint(), path)
        tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{eos}", unk_token="t0").save_pretrained(
            path
        )
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
        return str(path)

    return make


def until(tokens, stops):
    return tokens[: min(i for i, token in enumerate(tokens) if token in stops) + 1]


def test_tokenizer_and_generation_config_disagree_on_the_end(make_llm, with_tokenizer, reference):
    """The chat model's end-of-turn stood in one file and its end-of-text in the other; one of them ran on for ever."""
    first, second, third = (prompt_of(n) for n in (7, 8, 9))
    eos = {reference(first, 20)[4], reference(second, 20)[6], reference(third, 20)[2]}
    path = with_tokenizer(reference(first, 20)[4], [reference(second, 20)[6], reference(third, 20)[2]])
    llm = make_llm(model=path, skip_tokenizer_init=False)
    assert llm.scheduler.eos_token_ids == eos
    prompts = [" ".join(f"t{i}" for i in first), second, third]  # text and ids, mixed
    outputs = llm.generate(prompts, greedy(20, ignore_eos=False), use_tqdm=False)
    assert tokens_of(outputs) == [until(reference(prompt, 20), eos) for prompt in (first, second, third)]
    assert {output["finish_reason"] for output in outputs} == {"stop"}
    assert [output.prompt for output in outputs] == [prompts[0], None, None]
    # special tokens are no text; this tokenizer joins words by a space
    assert outputs[1]["text"] == " ".join(f"t{i}" for i in outputs[1]["token_ids"] if i != reference(first, 20)[4])
    whole = llm.generate(prompts, greedy(20), use_tqdm=False)
    assert tokens_of(whole) == [reference(prompt, 20) for prompt in (first, second, third)]


def test_single_end_in_the_generation_config(make_llm, with_tokenizer, reference):
    """``eos_token_id`` is a number in some files and a list in others; and min_tokens holds every one of them back."""
    prompt = prompt_of(8)
    tokens = reference(prompt, 20)
    llm = make_llm(model=with_tokenizer(511, tokens[6]), skip_tokenizer_init=False)
    (output,) = llm.generate([prompt], greedy(20, ignore_eos=False), use_tqdm=False)
    assert output["token_ids"] == until(tokens, {tokens[6], 511})
    (output,) = llm.generate([prompt], greedy(20, ignore_eos=False, min_tokens=12), use_tqdm=False)
    assert len(output["token_ids"]) >= 12 and not {tokens[6], 511} & set(output["token_ids"][:12])


def test_chat_without_a_template(make_llm, with_tokenizer):
    """A base model has a tokenizer and no chat template; transformers' own error names neither model nor way out."""
    llm = make_llm(model=with_tokenizer(5, 6), skip_tokenizer_init=False)
    with pytest.raises(RequestError, match=r"this model has none\. Use generate\(\)"):
        llm.chat([{"role": "user", "content": "t1"}])
    with pytest.raises(RequestError, match="prompt 0: the prompt is empty"):
        llm.generate([""], use_tqdm=False)


def test_hub_id(make_checkpoint, reference, monkeypatch):
    """A hub id is asked of huggingface_hub with its revision, and without the weight formats that are not read."""
    import huggingface_hub

    asked = []

    def download(repo_id, **options):
        asked.append((repo_id, options))
        return make_checkpoint()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with LLM(
        "Qwen/Qwen3-0.6B", revision="v2", device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=4
    ) as llm:
        assert tokens_of(llm.generate([prompt_of(6)], greedy(4), use_tqdm=False)) == [reference(prompt_of(6), 4)]
    ((repo_id, options),) = asked
    assert repo_id == "Qwen/Qwen3-0.6B" and options["revision"] == "v2"
    assert "*.safetensors" in options["allow_patterns"]
    assert not any("bin" in pattern or "pt" in pattern for pattern in options["allow_patterns"])


@pytest.mark.parametrize("revision", [None, "v2"])
def test_hub_cache_offline(make_checkpoint, reference, tmp_path, monkeypatch, revision):
    """On a machine without a network a model that was downloaded once is found in the hub's cache."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--someone--tiny"
    shutil.copytree(make_checkpoint(), repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / (revision or "main")).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with LLM(
        "someone/tiny", revision=revision, device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=4
    ) as llm:
        assert tokens_of(llm.generate([prompt_of(6)], greedy(4), use_tqdm=False)) == [reference(prompt_of(6), 4)]

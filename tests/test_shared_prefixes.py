"""Prefixes that a decode step reads once: the tokens are those of plain attention, whoever shares what, and when.

Most tests run the engine with a plain model of the two kernels: the softmax state of ``prefix_attention``, and the
attention of a sequence's own tokens, which starts from it.
"""

import math
import os
import random
from types import SimpleNamespace

import families
import pytest
import torch
from helpers import DEVICES, generate, greedy, prompt_of, run_ahead, use_graphs_on_cpu
from histories import at_night

from nanovllm import LLM, SamplingParams, kernels
from nanovllm.kernels.attention import reference
from nanovllm.layers.attention_backends import PagedBackend
from nanovllm.runner import cascade, parts
from nanovllm.runner import worker as worker_module

BLOCK = 16


def decode_in_two_halves(
    q, k_cache, v_cache, req_indices, context_lens, tables, scale, _, pdl, window, kv_scale, groups, sinks, softcap,
    row_lens,
):  # fmt: skip
    assert sinks is row_lens is None and not softcap
    if groups is None:
        return reference.paged_decode_attention(q, k_cache, v_cache, req_indices, context_lens, tables, scale, 0)
    assert groups.sizes.any()
    acc, stats = reference.prefix_attention(q, k_cache, v_cache, tables, scale, groups)
    out, gqa_group = torch.zeros_like(q), q.shape[1] // k_cache.shape[2]
    for i, (req_idx, context) in enumerate(zip(req_indices.tolist(), context_lens.tolist(), strict=True)):
        first = int(groups.shared_lens[i])
        if context == 0:
            assert first == 0, "padding is in no group"
            continue
        slots = [int(tables[req_idx, p // BLOCK]) * BLOCK + p % BLOCK for p in range(first, context)]
        k, v = (cache.flatten(0, 1)[slots].repeat_interleave(gqa_group, 1) for cache in (k_cache, v_cache))
        scores = torch.einsum("hd,nhd->hn", q[i], k) * scale
        highest = scores.amax(1)
        if first:
            highest = highest.maximum(stats[i, :, 0] * math.log(2))
        weights = (scores - highest[:, None]).exp()
        total, sums = weights.sum(1), torch.einsum("hn,nhd->hd", weights, v)
        if first:
            rest = (stats[i, :, 0] * math.log(2) - highest).exp()
            total, sums = total + rest * stats[i, :, 1], sums + rest[:, None] * acc[i]
        out[i] = sums / total[:, None]
    return out


SMALL = {"MIN_MEMBERS": 2, "MIN_SAVED_TOKENS": 1, "SHARED_TOKENS": 32}


@pytest.fixture
def small_groups(monkeypatch):
    """Two sequences and two blocks make a group. Returns the sizes of the groups of each decode step so far."""
    for name, value in SMALL.items():
        monkeypatch.setattr(cascade, name, value)
    seen = []
    prepare = cascade.Cascade.prepare

    def recorded(self, batch, arrays):
        prepare(self, batch, arrays)
        if not batch.is_decode:
            return
        sizes = cascade.columns_of(self._on_device, len(self._tables)).sizes
        seen.append([] if self.groups is None else sizes[sizes > 0].tolist())

    monkeypatch.setattr(cascade.Cascade, "prepare", recorded)
    return seen


def two_halves_backend():
    ops = SimpleNamespace(**{**vars(kernels.select("cpu")), "paged_decode_attention": decode_in_two_halves})
    return PagedBackend(ops, capturable=True)


@pytest.fixture
def two_halves(monkeypatch):
    backend = two_halves_backend()
    monkeypatch.setattr(parts, "select_backend", lambda *_: backend)


def prompts_of_a_tree(rng, num, depth=3):
    """Prompts that continue one of few parents by some blocks, more or less, and end anywhere."""
    parents = [prompt_of(rng.choice([32, 40, 48]), rng.random()) for _ in range(2)]
    for _ in range(depth):
        parents += [rng.choice(parents) + prompt_of(rng.choice([16, 32, 48, 7]), rng.random()) for _ in range(2)]
    return [rng.choice(parents) + prompt_of(rng.randint(1, 20), rng.random()) for _ in range(num)]


def completions(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain(make_checkpoint):
    """An engine that reads every context whole."""
    with LLM(make_checkpoint(), device="cpu", skip_tokenizer_init=True, kvcache_block_size=16, quiet=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def trees(plain):
    """[(prompts, parameters, tokens of each completion)]."""
    made = []
    for seed in range(2):
        rng = random.Random(seed)
        prompts = prompts_of_a_tree(rng, 12)
        params = [
            SamplingParams(temperature=n - 1, seed=i, n=rng.choice([1, 3]) if n > 1 else 1, ignore_eos=True,
                           max_tokens=rng.randint(1, 24)) for i, n in enumerate(rng.choices([1, 2], k=len(prompts)))
        ]  # fmt: skip
        made.append((prompts, params, completions(plain, prompts, params)))
    return made


WAYS = {
    "plain": {},
    "run-ahead": {},
    "graphs": {},
    "few at once": {"max_num_seqs": 5},
    "preempted": {"num_kvcache_blocks": 24},
    "chunked": {"max_num_batched_tokens": 33},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_random_prefix_trees(make_llm, trees, small_groups, two_halves, way):
    """Groups form, nest and dissolve as requests come and go; completions of one prompt share its blocks by forks."""
    llm = make_llm(**{"max_num_seqs": 16, "max_num_batched_tokens": 256, **WAYS[way]})
    if way in ("run-ahead", "preempted"):
        run_ahead(llm)
    if way == "graphs":
        run_ahead(use_graphs_on_cpu(llm))
    for prompts, params, expected in trees:
        assert completions(llm, prompts, params) == expected
    assert any(len(sizes) > 1 for sizes in small_groups), "several groups at once"
    assert ([] in small_groups or way == "few at once") and max(map(sum, small_groups)) > 4
    assert (llm.scheduler.num_preemptions > 0) == (way == "preempted")


def groups_in_a_worker(worker, config):
    vars(cascade).update(SMALL)
    backend = two_halves_backend()
    parts.select_backend = lambda *_: backend
    worker_module.worker_main(worker, config)


def test_two_ranks(make_llm, trees, monkeypatch, small_groups, two_halves):
    """Each rank finds the same groups."""
    monkeypatch.setattr(worker_module, "worker_main", groups_in_a_worker)
    llm = make_llm(tensor_parallel_size=2, max_num_seqs=16, max_num_batched_tokens=256)
    prompts, params, expected = trees[0]
    assert completions(llm, prompts, params) == expected
    assert any(len(sizes) > 1 for sizes in small_groups)


def test_samples_of_one_prompt(make_llm, plain, small_groups, two_halves):
    """n = 64: one group of all that run. A prompt that fills a group's blocks exactly, and one that does not."""
    llm = make_llm(max_num_seqs=64, max_num_batched_tokens=128)
    for length, sizes in ((32, [64]), (31, [])):
        small_groups.clear()
        request = [prompt_of(length)], SamplingParams(seed=3, n=64, max_tokens=5, ignore_eos=True)
        tokens = completions(llm, *request)
        assert small_groups == [sizes] * 4
        assert tokens == completions(plain, *request)


def test_a_batch_is_grouped_when_it_changes_only(make_llm, small_groups, two_halves, monkeypatch):
    llm, calls = make_llm(), []
    find = cascade.find_groups
    monkeypatch.setattr(cascade, "find_groups", lambda *args: calls.append(1) or find(*args))
    common = prompt_of(40)
    generate(llm, [[*common, i] for i in range(2, 6)], [greedy(n) for n in (3, 20, 20, 8)])
    # all; the others after one that has had its last token, twice; then the pair
    assert len(calls) == 3 and small_groups == [[4]] * 2 + [[3]] * 5 + [[2]] * 12
    calls.clear()
    generate(llm, [prompt_of(40, i) for i in range(4)], greedy(5))
    assert not calls and small_groups[-4:] == [[]] * 4  # nothing is shared: the block tables are not even compared


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="compiled kernels run in the tests marked gpu")
@pytest.mark.parametrize("case", ["gemma2", "gpt-oss-attention", *at_night("qwen3")])
def test_on_the_interpreted_kernels(case, tmp_path, make_llm, small_groups, monkeypatch):
    """With a soft cap, which is part of a prefix's state; with sinks, which are not; beside layers with a window."""
    pytest.importorskip("triton")
    more = {"mlp_layer_types": ["dense"] * 2} if case == "gpt-oss-attention" else {}
    families.make(tmp_path, case, num_hidden_layers=2, **more)
    model, common = str(tmp_path), [token % 140 + 2 for token in prompt_of(40)]
    prompts = [[*common[:32], 7], [*common, 8, 9], [*common, 10], [3, 4]]
    params = [greedy(n) for n in (2, 3, 4, 2)]
    options = {"model": model, "max_num_seqs": 5, "max_num_batched_tokens": 128, "max_model_len": 256}
    expected = generate(make_llm(**options), prompts, params)
    ops = kernels.select("cuda")
    monkeypatch.setattr(kernels, "select", lambda device_type=None, folder="": ops)
    monkeypatch.setattr(parts, "select_backend", lambda *_: PagedBackend(ops, capturable=True))
    assert generate(make_llm(**options), prompts, params) == expected
    assert [3] in small_groups and [2] in small_groups


@pytest.mark.gpu
@pytest.mark.parametrize(
    "eager, num_ranks", [(False, 1), (True, 1), pytest.param(False, 2, marks=pytest.mark.multigpu)]
)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_on_a_gpu(make_checkpoint, make_llm, monkeypatch, device, eager, num_ranks):
    """fp32: with groups, which form by themselves here, and without."""
    rng = random.Random(0)
    common = [prompt_of(700, seed) for seed in range(2)]
    prompts = [common[i % 2][: rng.choice([600, 700])] + prompt_of(rng.randint(1, 90), i) for i in range(70)]
    params = [greedy(rng.randint(3, 60)) for _ in prompts]
    options = {"device": device, "dtype": "float32", "kvcache_block_size": 128, "max_num_seqs": 64,
               "max_num_batched_tokens": 4096, "enforce_eager": eager, "tensor_parallel_size": num_ranks}  # fmt: skip
    llm, grouped = make_llm(**options), []
    find = cascade.Cascade._find
    with monkeypatch.context() as patch:
        patch.setattr(cascade.Cascade, "_find", lambda *args: grouped.append(find(*args)) or grouped[-1])
        tokens = generate(llm, prompts, params)
    assert max(map(len, grouped)) >= 2 and min(map(len, grouped)) == 0
    # on all ranks, each of which finds the groups itself: without the cache no two sequences have a block in common
    assert tokens == generate(make_llm(**options, enable_prefix_caching=False), prompts, params)

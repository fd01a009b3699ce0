"""Batches padded to captured sizes: with CUDA graphs on a GPU, with ``EagerGraphs`` on the CPU."""

import itertools

import pytest
from helpers import DEVICES, generate, gpu_param, greedy, prompt_of, record_calls, use_graphs_on_cpu

from nanovllm import SamplingParams
from nanovllm.runner import prefill_graphs
from nanovllm.runner.cascade import cascade_sizes
from nanovllm.runner.cuda_graphs import decode_sizes
from nanovllm.runner.prefill_graphs import PrefillGraphs


def test_decode_sizes():
    """max_num_seqs=3 captured 1, 2 and 4, more sequences than the request state has; 20 captured up to 16."""
    for max_num_seqs in range(1, 700):
        sizes = decode_sizes(max_num_seqs)
        assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_num_seqs
        assert all(b - a <= max(a, 8) and b - a <= 32 for a, b in itertools.pairwise(sizes))  # little padding
        assert set(cascade_sizes(sizes)) <= set(sizes) and cascade_sizes(sizes)[-1] == max_num_seqs
    assert cascade_sizes(decode_sizes(200)) == [32, 64, 128, 192, 200]


@pytest.mark.parametrize(
    ("device", "max_num_seqs"),
    [("cpu", 1), ("cpu", 3), ("cpu", 20), ("cpu", 40), *(gpu_param("cuda", n) for n in (1, 3, 12, 20, 100))],
)
def test_batches_between_captured_sizes(make_llm, reference, max_num_seqs, device):
    """Graphs were captured for 1, 2, 4, 8, 16, 32 ...: a batch of 3, 12, 20 or 100 found none, or ran with the padding
    of another batch."""
    llm = make_llm(
        device=device, dtype="float32", max_num_seqs=max_num_seqs, max_num_batched_tokens=1024, max_model_len=64
    )
    if device == "cpu":
        use_graphs_on_cpu(llm)
    assert llm.model_runner.graphs is not None
    batches = record_calls(llm.model_runner, "forward")
    # A fifth of the sequences ends at a time, so smaller batches occur. Padding that stored its keys would hit the
    # first block, whose owner stays to the end.
    prompts = [prompt_of(3 + i % 7, seed=i) for i in range(max_num_seqs)]
    limits = [8 - i % 5 for i in range(max_num_seqs)]
    tokens = generate(llm, prompts, [greedy(n) for n in limits])
    assert tokens == [reference(prompt, n) for prompt, n in zip(prompts, limits, strict=True)]
    sizes = [len(batch.req_indices) for batch in batches if batch.is_decode]
    assert sizes[0] == max_num_seqs and len(set(sizes)) >= min(5, max_num_seqs)


def record_graphs(llm):
    """The size of each prefill's graph from now on, None for those without."""
    sizes = []
    launcher = next((each for each in llm.model_runner.launchers if isinstance(each, PrefillGraphs)), None)
    if launcher is None:
        return sizes
    takes = launcher.takes

    def recorded(batch, arrays):
        taken = takes(batch, arrays)
        if not batch.is_decode:
            sizes.append(launcher.size)
        return taken

    launcher.takes = recorded
    return sizes


def sizes_of(graphs):
    return [size for size in graphs if size is not None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("max_num_batched_tokens", "expected"), [(20, [32] * 22), (300, [128, 512, 64])]
)  # fmt: skip
def test_small_prefills(make_llm, reference, max_num_batched_tokens, expected, device):
    """A prompt of 128 tokens took 12 ms: its 224 kernels were launched one by one. Now small prefills replay a graph:
    several prompts, behind cached prefixes, in chunks that sample nothing."""
    llm = make_llm(device=device, dtype="float32", max_num_batched_tokens=max_num_batched_tokens)
    if device == "cpu":
        use_graphs_on_cpu(llm)
    graphs = record_graphs(llm)
    first, long = [prompt_of(n, seed=n) for n in (1, 2, 15, 16, 17, 40)], prompt_of(290)
    for prompts in (first, [long], [[*first[5], 7, 8, 9], [*long[:260], 5], first[2], first[5]]):
        assert generate(llm, prompts, greedy(3)) == [reference(prompt, 3) for prompt in prompts]
    # 91 tokens; 290; 11 + 5 + 15 + 8 behind cached blocks of 16
    assert sizes_of(graphs) == expected
    graphs.clear()  # the prompt's log-probabilities need every hidden state
    output = llm.generate([first[4]], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    assert len(output.prompt_logprobs) == 17 and graphs == [None]


@pytest.mark.parametrize("device", DEVICES)
def test_padded_prefills(make_llm, reference, monkeypatch, device):
    """2,048 prompts of 32 tokens took twice the device's time: each prefill of more than 256 tokens was launched kernel
    by kernel. Graphs read their sequences' lengths on the device: any number of them, chunks, hits, preempted ones."""
    monkeypatch.setattr(prefill_graphs, "PADDED_SIZES", (32, 64, 128))
    monkeypatch.setattr(prefill_graphs, "MAX_PADDED_SEQLEN", 50)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 100, "num_kvcache_blocks": 24, "max_model_len": 192}
    llm = make_llm(device=device, dtype="float32", **options)
    if device == "cpu":
        use_graphs_on_cpu(llm)
    (launcher,) = (each for each in llm.model_runner.launchers if isinstance(each, PrefillGraphs))
    assert launcher.sizes == (((32, 8), (64, 12), (128, 12)), 8)
    graphs = record_graphs(llm)
    prefix = prompt_of(48)
    for prompts in (
        [prompt_of(20)],
        [prompt_of(3 + n, seed=n) for n in range(8)],
        [prefix, prompt_of(49, seed=1)],
        [[*prefix[:40], 7, 8, 9], prompt_of(17, seed=2)],  # behind cached blocks of 16
        [prompt_of(n, seed=n) for n in (40, 35, 33, 48, 50, 20, 30)],  # in chunks
        [prompt_of(60, seed=3), prompt_of(10, seed=9)],  # longer than the graphs' sequences: cut
    ):
        assert generate(llm, prompts, greedy(3)) == [reference(prompt, 3) for prompt in prompts]
    assert sizes_of(graphs) == [32, 64, 128, 32, 128, 128, 64, 128]
    graphs.clear()
    # they outgrow the KV cache, are preempted, and recomputed
    prompts = [prompt_of(30 + n, seed=n) for n in range(6)]
    assert generate(llm, prompts, greedy(60)) == [reference(prompt, 60) for prompt in prompts]
    assert llm.scheduler.num_preemptions > 0 and len(sizes_of(graphs)) > 2


@pytest.mark.gpu
def test_padded_prefills_of_many_short_prompts(make_checkpoint, make_llm):
    """In bfloat16, with the kernels that a Hopper GPU takes and the sizes that are really captured."""
    options = {"model": make_checkpoint(head_dim=128), "device": "cuda", "dtype": "bfloat16", "max_num_seqs": 100,
               "max_model_len": 256, "max_num_batched_tokens": 16_384, "kvcache_block_size": 256}  # fmt: skip
    prompts = [prompt_of(8 + 5 * i % 70, seed=i) for i in range(400)]
    params = [greedy(4 + 7 * i % 23) for i in range(400)]
    with make_llm(**options) as llm:
        graphs = record_graphs(llm)
        tokens = generate(llm, prompts, params)
        assert len(sizes_of(graphs)) >= 3
    with make_llm(**options, enforce_eager=True) as llm:
        expected = generate(llm, prompts, params)
    # Products of another size round otherwise: some ties fall the other way, and what follows with them.
    assert sum(a[0] == b[0] for a, b in zip(tokens, expected, strict=True)) > 0.95 * 400
    assert sum(a == b for a, b in zip(tokens, expected, strict=True)) > 0.5 * 400


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.multigpu)])
def test_padded_prefills_of_long_prompts(make_checkpoint, make_llm, num_ranks):
    """Cut into sequences of at most 512 query tokens, alone and behind a cached prefix; with the sums of two ranks."""
    options = {"model": make_checkpoint(head_dim=128), "device": "cuda", "dtype": "bfloat16", "max_model_len": 4096,
               "max_num_batched_tokens": 4096, "kvcache_block_size": 256, "tensor_parallel_size": num_ranks}
    prompts = [prompt_of(n, seed=n) for n in (300, 513, 1000, 2100, 3000)]
    prompts.append([*prompts[4][:1024], *prompt_of(1500, seed=7)])
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=5)
    results, sizes = [], [512, 768, 1024, 3072, 3072, 1536]
    for eager in (False, True):
        with make_llm(**options, enforce_eager=eager) as llm:
            graphs = record_graphs(llm)
            outputs = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in prompts]
            has_graphs = not eager and (num_ranks == 1 or llm.model_runner.tp.peers is not None)
            assert sizes_of(graphs) == (sizes if has_graphs else [])
            results.append(outputs)
    for graphs, eager in zip(*results, strict=True):
        expected = eager.logprobs[0]
        assert abs(expected[graphs.token_ids[0]].logprob - expected[eager.token_ids[0]].logprob) < 0.04  # a tie
        both = expected.keys() & graphs.logprobs[0].keys()
        assert len(both) >= 3
        assert all(abs(expected[token].logprob - graphs.logprobs[0][token].logprob) < 0.04 for token in both)

"""Batches padded to captured sizes: with CUDA graphs on a GPU, with ``EagerGraphs`` on the CPU."""

import itertools

import pytest
from helpers import DEVICES, generate, gpu_param, greedy, prompt_of, record_calls, use_graphs_on_cpu

from nanovllm.engine.scheduler import DecodeBatch
from nanovllm.runner.graph_sizes import decode_sizes, grouped_sizes
from nanovllm.runner.step import StepKind


def test_decode_sizes():
    """max_num_seqs=3 captured 1, 2 and 4, more sequences than the request state has; 20 captured up to 16."""
    for max_num_seqs in range(1, 700):
        sizes = decode_sizes(max_num_seqs)
        assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_num_seqs
        assert all(b - a <= max(a, 8) and b - a <= 32 for a, b in itertools.pairwise(sizes))  # little padding
        assert set(grouped_sizes(sizes)) <= set(sizes) and grouped_sizes(sizes)[-1] == max_num_seqs
    assert grouped_sizes(decode_sizes(200)) == [32, 64, 128, 192, 200]


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
    batches = record_calls(llm.model_runner, "run")
    # A fifth of the sequences ends at a time, so smaller batches occur. Padding that stored its keys would hit the
    # first block, whose owner stays to the end.
    prompts = [prompt_of(3 + i % 7, seed=i) for i in range(max_num_seqs)]
    limits = [8 - i % 5 for i in range(max_num_seqs)]
    tokens = generate(llm, prompts, [greedy(n) for n in limits])
    assert tokens == [reference(prompt, n) for prompt, n in zip(prompts, limits, strict=True)]
    sizes = [len(batch.req_indices) for batch in batches if isinstance(batch, DecodeBatch)]
    assert sizes[0] == max_num_seqs and len(set(sizes)) >= min(5, max_num_seqs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("max_num_batched_tokens", "expected"), [(20, [32] * 4 + [16] + [32] * 14 + [16] + [32, 32]), (300, [128, 64])]
)
def test_short_prefills(make_llm, reference, max_num_batched_tokens, expected, device):
    """A prompt of 128 tokens took 12 ms: its 224 kernels were launched one by one. Now short prefills replay a graph:
    several prompts, behind cached prefixes, in chunks that sample nothing. Long ones do not."""
    llm = make_llm(device=device, dtype="float32", max_num_batched_tokens=max_num_batched_tokens)
    if device == "cpu":
        use_graphs_on_cpu(llm)
    headers = record_calls(llm.model_runner, "run_model")
    first, long = [prompt_of(n, seed=n) for n in (1, 2, 15, 16, 17, 40)], prompt_of(290)
    for prompts in (first, [long], [[*first[5], 7, 8, 9], [*long[:260], 5], first[2], first[5]]):
        assert generate(llm, prompts, greedy(3)) == [reference(prompt, 3) for prompt in prompts]
    # 91 tokens; 290; 11 + 5 + 15 + 8 behind cached blocks of 16
    assert [header.num_tokens for header in headers if header.kind == StepKind.SHORT_PREFILL] == expected

"""The same tokens however the engine computes them: greedy and seeded sampling, on the demo model.

The reference computes every request alone on the CPU: whole prompts, no prefix cache, no preemption, no step in flight.
Every other way must give the same tokens. In fp32, rounding differs by some 1e-6, which decides between two tokens once
in many thousands; in bf16 it would do so often in sampled text, so there only greedy answers are compared: the demo
model gives them with a wide margin.
"""

import random
import sys

import pytest
from helpers import ROOT, generate, run_ahead, tokens_of

from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import PrefillBatch
from nanovllm.utils.checkpoint import DEMO_MODEL

sys.path.insert(0, str(ROOT / "tools"))

import make_demo

MAX_TOKENS = 48
MIXES = (
    {},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"min_tokens": 12},
    {"ignore_eos": True, "top_p": 0.95},
)
NUM_CHECKS = 3  # of the shortest answers, and as many of the longest
ON_CPU = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 1024}


@pytest.fixture(scope="module")
def answers():
    """[(prompt as token ids, greedy answer as token ids)] of the demo model's checks."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    checks = sorted(make_demo.CHECKS.items(), key=lambda check: len(check[1]))
    filler = make_demo.filler(random.Random(3), 270)  # a long prefix that two requests share
    prompts = [(make_demo.prompt_text(p), a) for p, a in checks[:NUM_CHECKS] + checks[-NUM_CHECKS:]]
    prompts += [(make_demo.prompt_text(p, filler), a) for p, a in checks[:2]]
    return [(tokenizer.encode(p).ids, [*tokenizer.encode(a).ids, make_demo.IM_END_ID]) for p, a in prompts]


@pytest.fixture(scope="module")
def requests(answers):
    """[(prompt, SamplingParams)]: each prompt greedily, and sampled with a seed and one of the mixes."""
    pairs = []
    for i, (prompt, _) in enumerate(answers):
        mix = MIXES[i % len(MIXES)]
        pairs.append((prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)))
        pairs.append((prompt, SamplingParams(temperature=0.8, seed=i, max_tokens=MAX_TOKENS, **mix)))
        # a question broken off: several continuations are probable
        start = prompt[: 4 if len(prompt) < 100 else -12]
        mix = {**mix, "ignore_eos": True}
        pairs.append((start, SamplingParams(temperature=0.8, seed=-2 - i, max_tokens=MAX_TOKENS, **mix)))
    return pairs


@pytest.fixture(scope="module")
def few_blocks(requests):
    """Options with a KV cache that the longest request barely fits."""
    longest = max(len(prompt) + params.max_tokens for prompt, params in requests)
    return {"num_kvcache_blocks": -(-longest // 16), "kvcache_block_size": 16, "max_num_seqs": 32}


def demo(**options):
    return LLM(**{**ON_CPU, **options})


def run_all(llm, requests):
    prompts, params = zip(*requests, strict=True)
    return llm.generate(list(prompts), list(params), use_tqdm=False)


@pytest.fixture(scope="module")
def expected(requests):
    """Each request's tokens when it is computed alone."""
    with demo(enable_prefix_caching=False, max_num_seqs=1) as llm:
        tokens = [run_all(llm, [request])[0]["token_ids"] for request in requests]
    sampled = {tuple(ids) for ids, (_, params) in zip(tokens, requests, strict=True) if params.temperature > 0}
    assert len(sampled) > len(requests) / 2, "sampling that shows nothing"
    return tokens


def check_all_blocks_are_available(llm):
    manager = llm.scheduler.block_manager
    assert manager.num_available == len(manager.blocks)
    assert all(block.ref_count == 0 for block in manager.blocks)


class Launches:
    """Counts an engine's chunks and sampled tokens, the surplus ones included."""

    def __init__(self, llm):
        self.chunks = self.sampled = 0
        run = llm.model_runner.forward

        def counted(batch):
            if isinstance(batch, PrefillBatch):
                self.chunks += len(batch.chunk_seq_ids) - len(batch.req_indices)
            self.sampled += len(batch.req_indices)
            return run(batch)

        llm.model_runner.forward = counted


def test_greedy_answers_are_the_checks(answers, requests, expected):
    """The reference itself is right: greedily the demo model says what it was trained to say."""
    greedy = [ids for ids, (_, params) in zip(expected, requests, strict=True) if params.temperature == 0]
    short = len(answers) - 2  # the two behind a long prefix may be wrong
    assert greedy[:short] == [answer[:MAX_TOKENS] for _, answer in answers[:short]]


@pytest.mark.parametrize("block_size", (16, 256, 384))
def test_batched(block_size, requests, expected):
    """Nothing is computed in vain without a step in flight."""
    with demo(kvcache_block_size=block_size) as llm:
        launches = Launches(llm)
        outputs = run_all(llm, requests)
        assert tokens_of(outputs) == expected
        assert launches.sampled == sum(map(len, expected))
        hits = [output.num_cached_tokens for output in outputs]
        assert max(hits) >= 256 and (block_size > 16 or all(hit % 16 == 0 for hit in hits))


def test_warm_prefix_cache(requests, expected):
    """The second time the prompts are in the cache; so are generated tokens, which a longer prompt then finds."""

    def all_cached(outputs):
        return all(o.num_cached_tokens == (len(o.prompt_token_ids) - 1) // 16 * 16 for o in outputs)

    with demo(kvcache_block_size=16) as llm:
        run_all(llm, requests)
        outputs = run_all(llm, requests)
        assert tokens_of(outputs) == expected and all_cached(outputs)
        long = [
            (prompt, tokens) for (prompt, params), tokens in zip(requests, expected, strict=True)
            if params.temperature == 0 and len(tokens) > 40
        ]  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=8)
        outputs = run_all(llm, [(prompt + tokens[:-8], params) for prompt, tokens in long])
        assert tokens_of(outputs) == [tokens[-8:] for _, tokens in long] and all_cached(outputs)


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_beginnings_of_blocks_are_found(num_ranks, requests, expected):
    """On a CPU, though a block has 256 tokens: all but the last token of a prompt that comes again, and what a prompt
    shares with another."""
    few, of_few = requests[:6] + requests[-6:], expected[:6] + expected[-6:]  # the last are longer than a block
    with demo(tensor_parallel_size=num_ranks) as llm:
        first, again = run_all(llm, few), run_all(llm, few)
        assert tokens_of(first) == tokens_of(again) == of_few
        prompts = [prompt for prompt, _ in few]
        assert all(o.num_cached_tokens == len(p) - 1 for o, p in zip(again, prompts, strict=True) if len(p) > 16)
        prompt = max(prompts, key=len)
        shared = [[*prompt[:n], prompt[n] ^ 1, *prompt[:5]] for n in (275, 100, 17, 15)]
        outputs = run_all(llm, [(ids, SamplingParams(temperature=0, max_tokens=6)) for ids in shared])
        assert [output.num_cached_tokens for output in outputs] == [275, 100, 17, 0]
    with demo(enable_prefix_caching=False) as llm:
        assert tokens_of(run_all(llm, [(ids, SamplingParams(temperature=0, max_tokens=6)) for ids in shared])) == (
            tokens_of(outputs)
        )


def test_without_prefix_cache(requests, expected):
    with demo(enable_prefix_caching=False, kvcache_block_size=16) as llm:
        outputs = run_all(llm, requests)
        assert tokens_of(outputs) == expected
        assert all(output.num_cached_tokens == 0 for output in outputs)


@pytest.mark.parametrize(("num_tokens", "block_size"), ((48, 16), (128, 256)))
def test_chunked_prefill(num_tokens, block_size, requests, expected):
    with demo(max_num_batched_tokens=num_tokens, max_num_seqs=7, kvcache_block_size=block_size) as llm:
        launches = Launches(llm)
        assert tokens_of(run_all(llm, requests)) == expected
        assert launches.chunks > 2


@pytest.mark.parametrize(("enable_prefix_caching", "in_flight"), ((True, False), (False, False), (True, True)))
def test_preempted(enable_prefix_caching, in_flight, requests, expected, few_blocks):
    with demo(**few_blocks, enable_prefix_caching=enable_prefix_caching) as llm:
        if in_flight:
            run_ahead(llm)
        assert tokens_of(run_all(llm, requests)) == expected
        assert llm.scheduler.num_preemptions > 1
        check_all_blocks_are_available(llm)


def test_few_at_a_time_and_in_another_order(requests, expected):
    order = random.Random(1).sample(range(len(requests)), len(requests))
    with demo(max_num_seqs=3) as llm:
        tokens = tokens_of(run_all(llm, [requests[i] for i in order]))
        assert tokens == [expected[i] for i in order]


def test_arriving_while_others_run(requests, expected):
    """Requests are added between the steps: prefills and decode steps alternate."""
    with demo(max_num_seqs=9, kvcache_block_size=16) as llm:
        finished, ids, waiting = {}, [], list(requests)
        while waiting or not llm.is_finished():
            if waiting:
                ids.append(llm.add_request(*waiting.pop(0)))
            done, _ = llm.step()
            finished.update(done)
        assert [finished[i] for i in ids] == expected


@pytest.mark.parametrize("options", (
    {},
    {"max_num_seqs": 7, "max_num_batched_tokens": 48, "kvcache_block_size": 16},
))  # fmt: skip
def test_run_ahead(options, requests, expected):
    """Stop tokens are known one step late; the surplus token must leave no trace."""
    with demo(**options) as llm:
        launches = Launches(run_ahead(llm))
        assert tokens_of(run_all(llm, requests)) == expected
        assert launches.sampled > sum(map(len, expected)), "no step ran ahead"
        check_all_blocks_are_available(llm)


# -------------------------------------------------------------------- on a GPU

GPU_WAYS = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "sdpa": {"attention_backend": "sdpa"},
    "sdpa eager": {"attention_backend": "sdpa", "enforce_eager": True},
    "block size 16": {"kvcache_block_size": 16},
    "block size 64": {"kvcache_block_size": 64},
    "block size 512": {"kvcache_block_size": 512},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 48, "max_num_seqs": 7, "kvcache_block_size": 16},
    "preempted": {},
    "preempted eager": {"enforce_eager": True},
    "one at a time": {"max_num_seqs": 1},
    "odd batch size": {"max_num_seqs": 13},
}
ON_GPU = {"device": "cuda", "max_num_seqs": 64, "num_kvcache_blocks": 1024}
NOT_IN_FLIGHT_TOO = ("graphs", "chunked", "preempted")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("way", "in_flight"), [(way, True) for way in GPU_WAYS] + [(way, False) for way in NOT_IN_FLIGHT_TOO]
)
def test_on_the_gpu_in_fp32(way, in_flight, requests, expected, few_blocks):
    """GPU like CPU, graphs like eager, with a step in flight and without."""
    cache = few_blocks if "preempted" in way else {}
    with demo(**{**ON_GPU, **cache, **GPU_WAYS[way]}) as llm:
        eager = llm.config.enforce_eager
        assert llm.model_runner.max_in_flight == (0 if eager else 1)
        if not in_flight:
            llm.model_runner.max_in_flight = 0
        assert (llm.model_runner.graphs is None) == (eager or "sdpa" in way)
        for _ in range(2):  # the second time with a warm prefix cache
            assert tokens_of(run_all(llm, requests)) == expected
        assert (llm.scheduler.num_preemptions > 0) == ("preempted" in way)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", (False, True))
@pytest.mark.parametrize("backend", ("triton", "sdpa", "flash_attn"))
def test_on_the_gpu_in_bf16(backend, eager, answers):
    """Every backend gives the demo model's answers word for word: together, again from the cache, and alone.

    They include the longest answer and the prompts behind a long prefix. The smallest margin in fp32 is several logits,
    so a difference is a bug, not a rounding.
    """
    if backend == "flash_attn":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    prompts, greedy = [prompt for prompt, _ in answers], SamplingParams(temperature=0, max_tokens=450)
    expected = [answer for _, answer in answers]
    with demo(**ON_GPU, dtype="bfloat16", attention_backend=backend, enforce_eager=eager) as llm:
        for _ in range(2):
            assert generate(llm, prompts, greedy) == expected
        assert [generate(llm, [prompt], greedy)[0] for prompt in prompts] == expected

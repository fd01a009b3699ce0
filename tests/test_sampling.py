"""Sampling through the whole engine: frequencies, seeds, greedy, stop tokens, min_tokens.

Frequencies are compared with the exact distribution, worked out from transformers' logits, by a chi-square test over
pairs of successive tokens: a prefill samples the first, a decode step (a CUDA graph on the GPU) the second, and they
must be independent. All draws are seeded, so on one machine a run gives the same p-values every time.

A bf16 engine gets a checkpoint on which rounding changes no filter's selection: among random logits there are always
some that 1 % moves across an edge, and then neither distribution is wrong.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import Reference, generate, gpu_param, greedy
from logits_twin import GreedyTwin, adjusted, filtered, log_softmax
from scipy import stats

from nanovllm import SamplingParams

PROMPT = [3, 9, 4, 1, 5]
SMALL = {"vocab_size": 16, "num_hidden_layers": 1}  # 256 pairs of tokens
NUM_DRAWS = 2000
MIXES = (
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 4},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 10, "top_p": 0.93, "min_p": 0.1},
    {"top_k": 8, "min_p": 0.15},
    {"top_p": 0.9, "min_p": 0.08},
)
PENALISED = (  # the second token sees the first in its counts
    {"temperature": 0.8, "logit_bias": {3: 1.5, 7: -100.0}},
    {"temperature": 1.5, "repetition_penalty": 3.0},
    {"temperature": 0.6, "frequency_penalty": 2.0, "presence_penalty": 2.0},
    {"presence_penalty": -2.0, "logit_bias": {5: 2.0}},
    {"temperature": 1.2, "repetition_penalty": 0.5, "frequency_penalty": -1.0, "logit_bias": {2: 1.0},
     "allowed_token_ids": list(range(1, 7)), "top_k": 5, "top_p": 0.9},
)  # fmt: skip


def next_logits(reference, *sequences):
    """After each of the equally long sequences: float64 [len(sequences), V]."""
    return reference.logits(*sequences)[:, -1].double().numpy()


def distribution(logits, generated=(), **mix):
    """Probabilities as SamplingParams defines them behind ``PROMPT`` and what was generated, float64 [V]."""
    params = SamplingParams(**mix)
    return np.exp(log_softmax(filtered(adjusted(logits, PROMPT, generated, params), params)))


def pair_distribution(reference, **mix):
    """Probabilities of the first two tokens, [V, V]."""
    first = distribution(next_logits(reference, PROMPT)[0], **mix)
    second = next_logits(reference, *([*PROMPT, token] for token in range(len(first))))
    return np.stack([p * distribution(row, [i], **mix) for i, (p, row) in enumerate(zip(first, second, strict=True))])


def p_value(pairs, probabilities):
    """Of a chi-square test of the drawn pairs; 0 if a pair of probability 0 was drawn."""
    counts = np.zeros_like(probabilities)
    for first, second in pairs:
        counts[first, second] += 1
    if (counts[probabilities == 0] > 0).any():
        return 0.0
    expected = probabilities * len(pairs)
    common = expected >= 5
    rest = (expected[~common].sum(), counts[~common].sum())
    expected, counts = np.append(expected[common], rest[0]), np.append(counts[common], rest[1])
    if expected[-1] < 5:  # too few to count as a class of its own
        expected[0], counts[0] = expected[0] + expected[-1], counts[0] + counts[-1]
        expected, counts = expected[:-1], counts[:-1]
    if len(expected) == 1:
        return 1.0
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


@pytest.fixture(scope="module")
def small(make_checkpoint):
    path = make_checkpoint(**SMALL)
    return path, Reference(path)


@pytest.fixture(scope="module")
def spaced(make_checkpoint, tmp_path_factory):
    """A checkpoint for bf16, which holds its logits exactly: after every token the same 16, 3/16 apart, in another
    order. A step of 3/16 keeps the filters' edges away from them (``check_margins``)."""
    model = Reference(make_checkpoint(**SMALL)).model
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(16, generator=generator) for _ in range(16)])
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()  # so the last norm sees the token's embedding,
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(8 * torch.eye(16, 64))  # leaves it, as its mean square is 1,
        model.model.norm.weight.fill_(1)
        model.lm_head.weight[:, :16] = (orders.T - 7.5) * 3 / 16 / 8  # and the head looks the logits up
    path = tmp_path_factory.mktemp("spaced")
    model.save_pretrained(path)
    return str(path), Reference(path)


def check_margins(reference, margin=0.03):
    """No filter's selection changes if logits move by ``margin``: 2 % of the largest, 8 times bf16's rounding.

    A filter's edge moves furthest if the most probable tokens, however many, move one way and the rest the other.
    """
    contexts = [PROMPT, *([*PROMPT, token] for token in range(16))]
    for logits, mix in itertools.product((next_logits(reference, context)[0] for context in contexts), MIXES):
        assert 50 * margin > np.abs(logits).max()
        selection = distribution(logits, **mix) > 0
        ranks = np.argsort(np.argsort(-logits))
        for count, by in itertools.product(range(1, 16), (margin, -margin)):
            moved = logits + np.where(ranks < count, by, -by)
            assert ((distribution(moved, **mix) > 0) == selection).all(), mix


def draw(llm, mixes, num_draws, seeded=False):
    """Pairs of tokens for each mix; all mixes run in the same batches."""
    params = [
        SamplingParams(max_tokens=2, ignore_eos=True, seed=i if seeded else None, **mix)
        for i in range(num_draws)
        for mix in mixes
    ]
    pairs = generate(llm, [PROMPT] * len(params), params)
    return [pairs[i :: len(mixes)] for i in range(len(mixes))]


def check_frequencies(llm, reference, num_draws, seeded=False, mixes=MIXES + PENALISED):
    exact = [pair_distribution(reference, **mix) for mix in mixes]
    for one, other in itertools.combinations(exact, 2):
        assert np.abs(one - other).sum() > 0.1, "mixes that do not differ"
    drawn = draw(llm, mixes, num_draws, seeded)
    for mix, pairs, probabilities in zip(mixes, drawn, exact, strict=True):
        assert p_value(pairs, probabilities) > 1e-4, mix
    return drawn


def check_power(reference, drawn):
    """The test tells distributions apart: a temperature that is off by a third, one token too many or too few."""
    for i, mix in (0, {"temperature": 4 / 3}), (3, {"top_k": 3}), (3, {"top_k": 5}), (4, MIXES[5]):
        assert p_value(drawn[i], pair_distribution(reference, **mix)) < 1e-6, mix
    for i, j in itertools.permutations(range(len(MIXES), len(drawn)), 2):  # of the penalised ones each from each
        assert p_value(drawn[i], pair_distribution(reference, **PENALISED[j - len(MIXES)])) < 1e-6


BIG_BATCHES = {"max_num_seqs": 512, "max_num_batched_tokens": 4096, "max_model_len": 16}


@pytest.mark.parametrize("seeded, device", [(False, "cpu"), (True, "cpu"), gpu_param(False, "cuda")])
def test_frequencies(seeded, device, small, make_llm):
    path, reference = small
    llm = make_llm(model=path, device=device, dtype="float32", num_kvcache_blocks=1024, **BIG_BATCHES)
    drawn = check_frequencies(llm, reference, NUM_DRAWS // 4 if seeded else NUM_DRAWS, seeded)
    if not seeded:
        check_power(reference, drawn)


@pytest.mark.parametrize("options", [{"device": "cpu"}, gpu_param({}), gpu_param({"enforce_eager": True})])
def test_frequencies_in_bf16(options, spaced, make_llm):
    path, reference = spaced
    check_margins(reference)
    options = {"device": "cuda", "num_kvcache_blocks": 1024, **BIG_BATCHES, **options}
    llm = make_llm(model=path, dtype="bfloat16", **options)
    check_power(reference, check_frequencies(llm, reference, NUM_DRAWS, mixes=MIXES))


# -------------------------------------------------------------------- seeds

HOT = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}


def test_equal_seeds_draw_equally(make_llm):
    seeds = [1, 1, 2, -1, 2**40, 2**40 + 2**32, 2**80]
    a, b, *others = generate(make_llm(), [PROMPT] * len(seeds), [SamplingParams(seed=seed, **HOT) for seed in seeds])
    assert a == b
    assert len({tuple(ids) for ids in (a, *others)}) == len(seeds) - 1


def test_successive_tokens_draw_fresh_noise(small, make_llm):
    """From one distribution over and over, noise that repeats would repeat the token."""
    llm = make_llm(model=small[0], max_model_len=512)
    params = SamplingParams(temperature=50.0, seed=0, max_tokens=480, ignore_eos=True)  # nearly uniform
    (drawn,) = generate(llm, PROMPT, params)
    counts = Counter(drawn)
    assert stats.chisquare([counts[i] for i in range(16)]).pvalue > 1e-3
    repeats = sum(a == b for a, b in itertools.pairwise(drawn))
    assert 10 < repeats < 60  # 30 expected


def test_the_engines_seed_repeats_requests_without_a_seed(make_llm):
    def run(**options):
        llm = make_llm(**options)
        return [generate(llm, [PROMPT] * 6, SamplingParams(**HOT)) for _ in range(2)]

    first, later = run(seed=5)
    assert len({tuple(ids) for ids in first + later}) == 12
    assert run(seed=5) == [first, later]
    assert run(seed=5, max_num_seqs=2, kvcache_block_size=32) == [first, later]
    others, _ = run(seed=6)
    assert not {tuple(ids) for ids in others} & {tuple(ids) for ids in first + later}


# -------------------------------------------------------------------- greedy


def test_greedy(reference, make_llm):
    """It ignores filters; and filters that leave one token are greedy."""
    mixes = [{}, {"top_k": 5}, {"top_p": 0.1}, {"min_p": 0.9}, {"top_k": 3, "top_p": 0.5, "min_p": 0.2}, {"seed": 3}]
    params = [greedy(12, **mix) for mix in mixes]
    mixes = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}]
    params += [SamplingParams(**{**HOT, "max_tokens": 12, **mix}) for mix in mixes]
    assert generate(make_llm(), [PROMPT] * len(params), params) == [reference(PROMPT, 12)] * len(params)


# -------------------------------------------------------------------- stop tokens and min_tokens


def first_new(ids, start):
    """The first index >= start whose token did not occur before it."""
    return next(i for i in range(start, len(ids)) if ids[i] not in ids[:i])


@pytest.fixture(scope="module")
def eos(reference, make_checkpoint):
    """A checkpoint whose greedy text contains its end-of-sequence token; that text, and where."""
    tokens = reference(PROMPT, 20)
    i = first_new(tokens, 3)
    return make_checkpoint(eos_token_id=tokens[i]), tokens, i  # the weights are the same


@pytest.mark.parametrize("extra", (0, 1, 5))
def test_min_tokens_masks_end_of_sequence_and_stop_ids(extra, eos, tiny, make_llm):
    """transformers' greedy text with those ids masked for as long is the oracle."""
    path, free, i = eos
    stop = [free[1], free[i + 1]]
    until = i + extra
    tokens = GreedyTwin(tiny)(PROMPT, greedy(20, min_tokens=until), stop_ids=[free[i], *stop])
    end = next((n for n in range(until, 20) if tokens[n] in (free[i], *stop)), 19)
    assert not {free[i], *stop} & set(tokens[:until])
    params = greedy(20, min_tokens=until, stop_token_ids=stop, ignore_eos=False)
    assert generate(make_llm(model=path), PROMPT, params) == [tokens[: end + 1]]


def test_min_tokens_with_ignore_eos_does_not_mask_end_of_sequence(eos, make_llm):
    path, tokens, _ = eos
    assert generate(make_llm(model=path), PROMPT, greedy(20, min_tokens=20)) == [tokens]


@pytest.mark.parametrize("beyond", (0, 2**32, 2**70))
def test_end_of_sequence_beyond_the_vocabulary(beyond, reference, make_checkpoint, make_llm):
    """It cannot be sampled. As 32 bits on the device it was another token's id, which min_tokens then masked."""
    tokens = reference(PROMPT, 20)
    llm = make_llm(model=make_checkpoint(eos_token_id=[beyond + tokens[1], 512, 100_000]))
    assert llm.scheduler.eos_token_ids == ({tokens[1]} if beyond == 0 else set())
    assert generate(llm, PROMPT, greedy(20, min_tokens=20, ignore_eos=beyond == 0)) == [tokens]

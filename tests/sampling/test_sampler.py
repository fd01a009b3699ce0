"""The sampler: which logits steps run, and the same tokens on every rank as on one."""

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from helpers import FEATURES, Slots, running
from logits_twin import adjusted, filtered, log_softmax

from nanovllm import SamplingParams
from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.engine.structured_outputs.token_masks import mask_of
from nanovllm.sampling.feature import Feature

R, V = 10, 40
ALLOWED = [3, 5, 25, 30, 39]
ALL = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, min_tokens=3),
    SamplingParams(temperature=0.8),
    SamplingParams(min_tokens=3),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.6, min_tokens=3),
    SamplingParams(temperature=1.5, min_p=0.2),
    SamplingParams(allowed_token_ids=ALLOWED, min_tokens=3, top_k=3),
    SamplingParams(logit_bias={33: 3.0, 3: -3.0}, allowed_token_ids=ALLOWED),
    SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={38: 2.0}),
]
STEPS = FEATURES[:-1]  # those that change logits, in the order of SamplingParams's docstring


def make_slots(seed=0, tp=SINGLE_RANK, processed=False):
    """A request slot for each of `ALL`, and a free one, R. Each was prompted with 3 and 3 and has generated 8 and, just
    now, 9, which the host has not seen; those with min_tokens are one token short of them."""
    slots = Slots(R + 1, vocab_size=V, tp=tp, processed=processed)
    seeds = np.random.default_rng(seed).integers(2**64, size=R, dtype=np.uint64).tolist()
    seqs = []
    for i, params in enumerate(ALL):
        seq = running([3, 3], i, completion=[8], seed=seeds[i], stop_ids=(3, 25) if params.min_tokens else (),
                      allowed_mask=mask_of(ALLOWED, V) if params.allowed_token_ids else None)  # fmt: skip
        seq.sampling_params = params
        seqs.append(seq)
    slots.add(*seqs)
    slots.send()
    slots.state.length[:R] += 1
    slots.state.last_token[:R] = 9
    return slots


def make_logits(seed=0):
    logits = torch.randn(R + 1, V, generator=torch.Generator().manual_seed(seed))
    logits[:, 3] += 4  # a stop id, which most would sample
    logits[:, 9] += 3.5  # a token that was generated
    return logits


def sample_with_logprobs(slots, logits, features):
    """Tokens of all requests, and their log-probabilities; checks that the tokens were appended."""
    state, sampler = slots.state, slots.sampler
    used = tuple(getattr(slots.features, name) for name in FEATURES if name in features)
    slots.features.logprobs.num_top = 2
    tokens, logprobs = sampler(logits, torch.arange(R + 1, dtype=torch.int32), used)
    assert tokens.dtype == torch.int32 and tokens[R] == 0
    assert torch.equal(state.last_token[: R + 1], tokens) and torch.equal(state.sampled_tokens[: R + 1], tokens)
    assert state.length.tolist() == [5] * R + [0, 0]
    return tokens.tolist()[:R], None if logprobs is None else logprobs[:R]


def sample(logits, features, seed=0):
    return sample_with_logprobs(make_slots(seed), logits.clone(), features)[0]


@pytest.mark.parametrize("features", [(), *((name,) for name in STEPS), ("min_tokens", "filters"), STEPS])
def test_only_the_features_in_use_are_applied(features):
    calls, slots = [], make_slots()
    for name in FEATURES:
        feature = getattr(slots.features, name)
        feature.apply = lambda *args, name=name, apply=feature.apply: calls.append(name) or apply(*args)
    tokens, _ = sample_with_logprobs(slots, make_logits(), features)
    assert calls == list(features)
    for i, (token, expected) in enumerate(zip(tokens, sample(make_logits(), STEPS), strict=True)):
        if set(slots.used(i)) <= set(features):  # a feature leaves the requests alone that do not ask for it
            assert token == expected
        if "min_tokens" in features and ALL[i].min_tokens:
            assert token not in (3, 25)
        if "masks" in features and ALL[i].allowed_token_ids:
            assert token in ALLOWED
    if features == STEPS:
        assert tokens[9] == distributions(make_logits(), processed=True)[9].argmax() != make_logits()[9].argmax()


def distributions(logits, processed):
    """log-softmax of each row before or after what `ALL` asks for, by the plain twins, fp64 [R, V]."""
    rows = logits[:R].double().numpy()
    if processed:
        rows = np.stack([filtered(adjusted(row, [3, 3], [8, 9], params, stop_ids=(3, 25)), params)
                         for row, params in zip(rows, ALL, strict=True)])  # fmt: skip
    return torch.from_numpy(log_softmax(rows))


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_logprobs(processed, size):
    """Raw ones are the model's, though steps change the logits in place; processed ones are those sampled from."""
    for seed in range(5):
        logits, exchange, results = make_logits(seed), Exchange(size), [None] * size
        expected = distributions(logits, processed)

        def run(rank, logits=logits, exchange=exchange, results=results, seed=seed):
            part = logits[:, rank * V // size : (rank + 1) * V // size].clone()
            results[rank] = sample_with_logprobs(make_slots(seed, exchange.rank(rank), processed), part, FEATURES)

        run_on_threads(run, size)
        for tokens, rows in results:
            assert tokens == sample(logits, STEPS, seed)
            values = rows.contiguous().view(torch.float32)
            for row, value, token, logprobs in zip(rows.tolist(), values, tokens, expected, strict=True):
                assert value[0] == pytest.approx(logprobs[token].item(), abs=1e-5)
                assert row[1] == (logprobs >= logprobs[token] - 1e-9).sum()  # the rank; 1 is best
                top = logprobs.topk(2)
                assert value[4:].tolist() == pytest.approx(top.values.tolist(), abs=1e-5)
                kept = top.values.isfinite()
                assert torch.tensor(row[2:4])[kept].tolist() == top.indices[kept].tolist()


class Only30(Feature):
    """What requests with this top_k ask for."""

    in_place = True

    def add(self, new, rows, arrays):
        return [params.top_k == 30 for params in new.sampling.params]

    def apply(self, logits, req_indices):
        logits.values[:, 30 - logits.vocab_start] = 99.0
        return logits


def test_a_new_feature_is_one_class():
    slots = Slots(2, vocab_size=V)
    slots.sampler.features += (Only30(),)
    slots.add(running([5], 0, temperature=0, top_k=30), running([5], 1, temperature=0))
    slots.send()
    for rows, expected in (([0], [30]), ([1], [3])):
        used = slots.sampler.used_by(np.array(rows))
        tokens, _ = slots.sampler(make_logits()[:1], torch.tensor(rows, dtype=torch.int32), used)
        assert tokens.tolist() == expected


@dataclass
class Exchange:
    """Ranks on threads that gather through this process's memory."""

    size: int
    parts: list = field(default_factory=list)

    def __post_init__(self):
        self.parts = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=30)

    def rank(self, rank):
        exchange = self

        class Rank:
            size = exchange.size

            def all_gather(self, x):
                exchange.parts[rank] = x
                exchange.barrier.wait()
                gathered = torch.stack(exchange.parts)
                exchange.barrier.wait()
                return gathered

        Rank.rank = rank
        return Rank()


def run_on_threads(run, size):
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("features", [(), *((name,) for name in STEPS), ("min_tokens", "filters"), STEPS])
def test_every_rank_samples_the_token_of_one_rank(size, features):
    for seed in range(5):
        logits, exchange, tokens = make_logits(seed), Exchange(size), [None] * size
        logits[0, [7, 39]] = 50.0  # a tie between ranks: the lowest id wins

        def run(rank, logits=logits, exchange=exchange, tokens=tokens, seed=seed):
            part = logits[:, rank * V // size : (rank + 1) * V // size].clone()
            tokens[rank], _ = sample_with_logprobs(make_slots(seed, exchange.rank(rank)), part, features)

        run_on_threads(run, size)
        assert tokens == [sample(logits, features, seed)] * size
        assert tokens[0][0] == 7

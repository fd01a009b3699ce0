"""The sampler: which logits steps run, and the same tokens on every rank as on one."""

import threading
from dataclasses import dataclass, field

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.kernels.sampling.reference import SamplingState
from nanovllm.layers.sampler import LOGITS_STEPS, Logits, Sampler
from nanovllm.sampling_params import FILTERS, MIN_TOKENS

R, V = 7, 40
ALL = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, min_tokens=2),
    SamplingParams(temperature=0.8),
    SamplingParams(min_tokens=2),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.6, min_tokens=2),
    SamplingParams(temperature=1.5, min_p=0.2),
]


@pytest.mark.parametrize(
    "params, features",
    [
        (dict(), 0),
        (dict(top_k=-1, top_p=1, min_p=0), 0),
        (dict(temperature=0, top_k=5, top_p=0.5, min_p=0.5), 0),
        (dict(temperature=1e-6, top_k=5), 0),
        (dict(min_tokens=1), MIN_TOKENS),
        (dict(temperature=0, min_tokens=1, top_k=5), MIN_TOKENS),
        (dict(top_k=5), FILTERS),
        (dict(top_p=0.9), FILTERS),
        (dict(min_p=0.1, min_tokens=3), FILTERS | MIN_TOKENS),
    ],
)
def test_features_of_a_request(params, features):
    assert SamplingParams(**params).features == features


def make_state(seed=0):
    """One request slot for each of `ALL`, and the padding slot; all are one token short of min_len."""
    generator = torch.Generator().manual_seed(seed)
    column = lambda name, dtype: torch.tensor([getattr(p, name) for p in ALL] + [0], dtype=dtype)  # noqa: E731
    return SamplingState(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        seed=torch.randint(-(2**31), 2**31 - 1, (R + 1, 2), dtype=torch.int32, generator=generator),
        min_len=torch.tensor([5 * (p.min_tokens > 0) for p in ALL] + [0], dtype=torch.int32),
        stop_ids=torch.tensor([[3, 25, -1]] * (R + 1), dtype=torch.int32),
        length=torch.tensor([4] * R + [0], dtype=torch.int32),
    )


def make_logits(seed=0):
    logits = torch.randn(R + 1, V, generator=torch.Generator().manual_seed(seed))
    logits[:, 3] += 4  # a stop id, which most would sample
    return logits


def sample(sampler, logits, features, seed=0):
    """Tokens of all requests and the padding slot; checks that they were appended."""
    state = make_state(seed)
    last_token, sampled_tokens = torch.zeros(R + 1, dtype=torch.int32), torch.zeros(2, R + 1, dtype=torch.int32)
    req_indices = torch.arange(R + 1, dtype=torch.int32)
    tokens = sampler(logits, req_indices, state, last_token, sampled_tokens, features)
    assert tokens.dtype == torch.int32 and tokens[R] == 0
    assert torch.equal(last_token, tokens) and torch.equal(sampled_tokens[0], tokens)
    assert state.length.tolist() == [5] * R + [0]
    return tokens.tolist()[:R]


@pytest.mark.parametrize("features", [0, MIN_TOKENS, FILTERS, MIN_TOKENS | FILTERS])
def test_only_the_steps_in_features_run(features, monkeypatch):
    calls = []
    for bit, step in list(LOGITS_STEPS.items()):

        def recorded(*args, bit=bit, step=step):
            calls.append(bit)
            return step(*args)

        monkeypatch.setitem(LOGITS_STEPS, bit, recorded)
    tokens = sample(Sampler(max_num_seqs=R + 1), make_logits(), features)
    assert calls == [bit for bit in (MIN_TOKENS, FILTERS) if features & bit]
    whole = sample(Sampler(R + 1), make_logits(), -1)
    for params, token, expected in zip(ALL, tokens, whole, strict=True):
        if params.features & ~features == 0:  # a step leaves the requests alone that do not ask for it
            assert token == expected
    assert all(token not in (3, 25) for p, token in zip(ALL, tokens, strict=True) if features & p.features & MIN_TOKENS)


def test_a_new_step_is_one_function(monkeypatch):
    def only_30(ops, logits: Logits, req_indices, state) -> Logits:
        logits.values[:, 30 - logits.vocab_start] = 99.0
        return logits

    monkeypatch.setitem(LOGITS_STEPS, 1 << 20, only_30)
    assert sample(Sampler(R + 1), make_logits(), 1 << 20) == [30] * R
    assert sample(Sampler(R + 1), make_logits(), 0) != [30] * R


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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("features", [0, MIN_TOKENS, FILTERS, MIN_TOKENS | FILTERS])
def test_every_rank_samples_the_token_of_one_rank(size, features):
    for seed in range(5):
        logits, exchange, tokens = make_logits(seed), Exchange(size), [None] * size
        logits[0, [7, 39]] = 50.0  # a tie between ranks: the lowest id wins

        def run(rank, logits=logits, exchange=exchange, tokens=tokens, seed=seed):
            part = logits[:, rank * V // size : (rank + 1) * V // size].clone()
            tokens[rank] = sample(Sampler(R + 1, exchange.rank(rank)), part, features, seed)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tokens == [sample(Sampler(R + 1), logits, features, seed)] * size
        assert tokens[0][0] == 7

"""The sampler: which logits steps run, and the same tokens on every rank as on one."""

import threading
from dataclasses import dataclass, field

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.kernels.sampling.reference import AdjustmentTable, SamplingState
from nanovllm.layers.sampler import LOGITS_STEPS, Logits, Requests, Sampler
from nanovllm.sampling_params import FILTERS, LOGIT_ADJUSTMENTS, LOGPROBS, MIN_TOKENS, TOKEN_MASK

R, V = 10, 40
ALLOWED = [3, 5, 25, 30, 39]
ALL = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, min_tokens=2),
    SamplingParams(temperature=0.8),
    SamplingParams(min_tokens=2),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.6, min_tokens=2),
    SamplingParams(temperature=1.5, min_p=0.2),
    SamplingParams(allowed_token_ids=ALLOWED, min_tokens=2, top_k=3),
    SamplingParams(logit_bias={33: 3.0, 3: -3.0}, allowed_token_ids=ALLOWED),
    SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={38: 2.0}),
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
        (dict(temperature=0, logit_bias={1: 2}, logprobs=0), LOGIT_ADJUSTMENTS | LOGPROBS),
        (dict(allowed_token_ids=[1], presence_penalty=1), TOKEN_MASK | LOGIT_ADJUSTMENTS),
    ],
)
def test_features_of_a_request(params, features):
    assert SamplingParams(**params).features == features


def make_state(seed=0):
    """One request slot for each of `ALL`, and the padding slot; those with min_tokens are one token short of them."""
    generator = torch.Generator().manual_seed(seed)
    column = lambda name, dtype: torch.tensor([getattr(p, name) for p in ALL] + [0], dtype=dtype)  # noqa: E731
    flags = lambda bit: torch.tensor([p.features & bit for p in ALL] + [0], dtype=torch.int32)  # noqa: E731
    return SamplingState(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        seed=torch.randint(-(2**31), 2**31 - 1, (R + 1, 2), dtype=torch.int32, generator=generator),
        min_len=torch.tensor([5 * (p.min_tokens > 0) for p in ALL] + [0], dtype=torch.int32),
        stop_ids=torch.tensor([[3, 25, -1]] * (R + 1), dtype=torch.int32),
        length=torch.tensor([4] * R + [0], dtype=torch.int32),
        is_masked=flags(TOKEN_MASK),
        is_adjusted=flags(LOGIT_ADJUSTMENTS),
        **{f"{name}_penalty": column(f"{name}_penalty", torch.float32)
           for name in ("presence", "frequency", "repetition")},
    )  # fmt: skip


def make_tables():
    """Token masks and adjustments of `ALL`; each sequence was prompted with 3 and has generated 8 and, just now, 9."""
    token_mask = torch.zeros(R + 1, -(-V // 32), dtype=torch.int32)
    for token in ALLOWED:
        token_mask[:, token // 32] |= 1 << token % 32
    zeros = lambda *shape: torch.zeros(shape, dtype=torch.int32)  # noqa: E731
    table = AdjustmentTable(zeros(R + 1), zeros(R + 1), zeros(R + 1, V), zeros(R + 1, V), zeros(R + 1, V).float())
    for i, params in enumerate(ALL):
        entries = {token: (-1, bias) for token, bias in (params.logit_bias or {}).items()}
        if params.has_penalties:
            entries |= {3: (0, 0.0), 8: (1, 0.0)}
        table.num_entries[i], table.num_counted[i] = len(entries), 3 if params.has_penalties else 99
        for j, (token, (count, bias)) in enumerate(entries.items()):
            table.token_ids[i, j], table.counts[i, j], table.bias[i, j] = token, count, bias
    return token_mask, table


def make_logits(seed=0):
    logits = torch.randn(R + 1, V, generator=torch.Generator().manual_seed(seed))
    logits[:, 3] += 4  # a stop id, which most would sample
    logits[:, 9] += 3.5  # a token that was generated
    return logits


def sample_with_logprobs(sampler, logits, features, seed=0):
    """Tokens of all requests, and their log-probabilities; checks that the tokens were appended."""
    state = make_state(seed)
    last_token, sampled_tokens = torch.full((R + 1,), 9, dtype=torch.int32), torch.zeros(2, R + 1, dtype=torch.int32)
    last_token[R] = 0
    requests = Requests(torch.arange(R + 1, dtype=torch.int32), state, last_token, *make_tables())
    tokens, logprobs = sampler(logits, requests, sampled_tokens, features, num_logprobs=2)
    assert tokens.dtype == torch.int32 and tokens[R] == 0
    assert torch.equal(last_token, tokens) and torch.equal(sampled_tokens[0], tokens)
    assert state.length.tolist() == [5] * R + [0]
    return tokens.tolist()[:R], None if logprobs is None else logprobs[:R]


def sample(sampler, logits, features, seed=0):
    return sample_with_logprobs(sampler, logits.clone(), features, seed)[0]


STEPS = (TOKEN_MASK, MIN_TOKENS, LOGIT_ADJUSTMENTS, FILTERS)  # in the order of SamplingParams's docstring


@pytest.mark.parametrize("features", [0, *STEPS, MIN_TOKENS | FILTERS, sum(STEPS)])
def test_only_the_steps_in_features_run(features, monkeypatch):
    calls = []
    for bit, step in list(LOGITS_STEPS.items()):

        def recorded(*args, bit=bit, step=step):
            calls.append(bit)
            return step(*args)

        monkeypatch.setitem(LOGITS_STEPS, bit, recorded)
    tokens = sample(Sampler(max_num_seqs=R + 1), make_logits(), features)
    assert calls == [bit for bit in STEPS if features & bit]
    whole = sample(Sampler(R + 1), make_logits(), sum(STEPS))
    for params, token, expected in zip(ALL, tokens, whole, strict=True):
        if params.features & ~features == 0:  # a step leaves the requests alone that do not ask for it
            assert token == expected
    assert all(token not in (3, 25) for p, token in zip(ALL, tokens, strict=True) if features & p.features & MIN_TOKENS)
    assert all(token in ALLOWED for p, token in zip(ALL, tokens, strict=True) if features & p.features & TOKEN_MASK)
    if features == sum(STEPS):
        assert tokens[9] == distributions(make_logits(), processed=True)[9].argmax() != make_logits()[9].argmax()


def test_the_last_token_is_counted():
    """The penalties of a step include the token that the step before has sampled, which the host has not seen."""
    logits = make_logits()
    logits[9, 3] = logits[9, 38] = -9
    top = logits[9].topk(2).indices.tolist()
    assert top[0] == 9
    assert sample(Sampler(R + 1), logits, 0)[9] == 9
    assert sample(Sampler(R + 1), logits, LOGIT_ADJUSTMENTS)[9] == top[1]


def distributions(logits, processed):
    """log-softmax of each row before or after what `ALL` asks for, by the definitions, fp64 [R, V]."""
    logits = logits[:R].double()
    if not processed:
        return logits.log_softmax(-1)
    rows = []
    for row, params in zip(logits, ALL, strict=True):
        row = row.clone()
        if params.allowed_token_ids:
            row[[i for i in range(V) if i not in ALLOWED]] = -torch.inf
        if params.min_tokens:
            row[[3, 25]] = -torch.inf
        for token, bias in (params.logit_bias or {}).items():
            row[token] += bias
        if params.has_penalties:
            for token, count in ((3, 0), (8, 1), (9, 1)):
                factor = params.repetition_penalty
                row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
                row[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        row = row / (params.temperature or 1)
        if params.top_k:
            row[row < row.topk(params.top_k).values[-1]] = -torch.inf
        if params.top_p < 1:
            ordered, order = row.softmax(-1).sort(descending=True)
            row[order[ordered.cumsum(-1) - ordered >= params.top_p]] = -torch.inf
        if params.min_p:
            row[row.softmax(-1) < params.min_p * row.softmax(-1).max()] = -torch.inf
        rows.append(row.log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_logprobs(processed, size):
    """Raw ones are the model's, though steps change the logits in place; processed ones are those sampled from."""
    features = sum(STEPS) | LOGPROBS
    for seed in range(5):
        logits, exchange, results = make_logits(seed), Exchange(size), [None] * size
        expected = distributions(logits, processed)

        def run(rank, logits=logits, exchange=exchange, results=results, seed=seed):
            part = logits[:, rank * V // size : (rank + 1) * V // size].clone()
            sampler = Sampler(R + 1, exchange.rank(rank), processed_logprobs=processed)
            results[rank] = sample_with_logprobs(sampler, part, features, seed)

        run_on_threads(run, size)
        for tokens, rows in results:
            assert tokens == sample(Sampler(R + 1), logits, sum(STEPS), seed)
            values = rows.contiguous().view(torch.float32)
            for row, value, token, logprobs in zip(rows.tolist(), values, tokens, expected, strict=True):
                assert value[0] == pytest.approx(logprobs[token].item(), abs=1e-5)
                assert row[1] == (logprobs >= logprobs[token] - 1e-9).sum()  # the rank; 1 is best
                top = logprobs.topk(2)
                assert value[4:].tolist() == pytest.approx(top.values.tolist(), abs=1e-5)
                kept = top.values.isfinite()
                assert torch.tensor(row[2:4])[kept].tolist() == top.indices[kept].tolist()


def test_a_new_step_is_one_function(monkeypatch):
    def only_30(ops, logits: Logits, requests: Requests) -> Logits:
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


def run_on_threads(run, size):
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("features", [0, *STEPS, MIN_TOKENS | FILTERS, sum(STEPS)])
def test_every_rank_samples_the_token_of_one_rank(size, features):
    for seed in range(5):
        logits, exchange, tokens = make_logits(seed), Exchange(size), [None] * size
        logits[0, [7, 39]] = 50.0  # a tie between ranks: the lowest id wins

        def run(rank, logits=logits, exchange=exchange, tokens=tokens, seed=seed):
            part = logits[:, rank * V // size : (rank + 1) * V // size].clone()
            tokens[rank] = sample(Sampler(R + 1, exchange.rank(rank)), part, features, seed)

        run_on_threads(run, size)
        assert tokens == [sample(Sampler(R + 1), logits, features, seed)] * size
        assert tokens[0][0] == 7

"""Draws: the noise against published vectors, frequencies against exact odds, the Triton kernels against their twins.

The plain twins carry the statistics; the kernels must agree with the twins.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from nanovllm.kernels.sampling import gumbel

from .sampling_state import (
    BOTH,
    DEVICE,
    KERNELS,
    every_request,
    kept_ids,
    make_state,
    no_thresholds,
    random_state,
    reference,
    same_selection,
)  # fmt: skip

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.usefixtures("poisoned")

# ---------------------------------------------------------------- noise


def test_philox_agrees_with_published_vectors():
    """The known answers that come with Random123, by the authors of Philox."""
    word = torch.tensor
    cases = [
        ([0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
        ),
    ]
    for counter, key, expected in cases:
        words = reference.philox_4x32([word(c) for c in counter], [word(k) for k in key])
        assert [int(w) for w in words] == expected


def test_uniforms_stay_inside_the_open_interval():
    bits = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
    tail, is_lower = reference.uniform_tails(bits)
    assert (tail > 0).all() and (tail <= 0.5).all()
    assert is_lower.tolist() == [True, True, True, False, False, False]
    assert tail[0] == tail[-1] == 2.0**-33


def test_noise_is_standard_gumbel():
    seed = torch.tensor([[1, 2]], dtype=torch.int32)
    noise = reference.gumbel_noise(seed, torch.tensor([5]), torch.arange(200_000)).double().flatten()
    assert abs(noise.mean() - 0.577216) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    for x in (-1.5, 0.0, 1.0, 3.0, 6.0):
        assert abs((noise <= x).double().mean() - math.exp(-math.exp(-x))) < 0.005


def test_noise_of_an_id_does_not_depend_on_the_rest_of_the_batch():
    seed = torch.randint(-(2**31), 2**31 - 1, (3, 2), dtype=torch.int32)
    length = torch.tensor([1, 2, 3])
    whole = reference.random_bits(seed, length, torch.arange(100))
    assert torch.equal(whole[1:2, 37:90], reference.random_bits(seed[1:2], length[1:2], torch.arange(37, 90)))
    some = torch.tensor([3, 4, 40, 47, 99])
    assert torch.equal(whole[:, some], reference.random_bits(seed, length, some))
    assert len(whole.unique()) > 290


def test_noise_lies_within_the_bounds_of_its_upper_half():
    upper = torch.cat((torch.arange(40), torch.randint(0, 2**16, (2000,)), torch.arange(2**16 - 40, 2**16)))
    highest, lowest = reference.noise_bounds(torch.device("cpu"))
    for lower in (0, 1, 2**15, 2**16 - 1, *torch.randint(0, 2**16, (5,)).tolist()):
        noise = reference.noise_of(upper << 16 | lower)
        assert (lowest[upper] <= noise).all() and (noise <= highest[upper]).all()


@pytest.mark.parametrize("spread, temperature", [
    (0.0, 1.0), (1.0, 1.0), (4.0, 1.0), (4.0, 0.05), (4.0, 50.0), (60.0, 1.0),
])  # fmt: skip
@pytest.mark.parametrize("vocab_start", [0, 5])
def test_twin_draws_as_if_it_made_all_noise(spread, temperature, vocab_start):
    """It makes that of the ids which may win, by the upper half of their random bits."""
    B, V, rows = 24, 900, torch.arange(24)
    logits = torch.randn(B, V) * spread
    logits[1:3, ::2] = torch.nan
    logits[3] = -torch.inf
    logits[4, 10] = torch.inf
    logits[5:7] = logits[5:7].round()
    state = SimpleNamespace(
        temperature=torch.full((B,), temperature), length=torch.arange(1, B + 1, dtype=torch.int32),
        seed=torch.randint(-(2**31), 2**31 - 1, (B, 2), dtype=torch.int32),
    )  # fmt: skip
    state.temperature[::5] = 0.0
    ids = torch.arange(vocab_start, vocab_start + V)
    noise = reference.gumbel_noise(state.seed, state.length, ids) * (state.temperature > 0).unsqueeze(1)
    inverse = torch.where(state.temperature > 0, 1.0 / state.temperature, 1.0).unsqueeze(1)
    expected = (logits * inverse).nan_to_num(-torch.inf, torch.inf, -torch.inf) + noise
    scores, tokens = reference.gumbel_argmax(logits, rows, state, torch.full((B,), -torch.inf), vocab_start)
    assert torch.equal(tokens, expected.argmax(1).int() + vocab_start)
    assert torch.equal(scores, expected.amax(1))


@pytest.mark.parametrize("vocab_start", [0, 3, 1024])
def test_triton_noise_agrees_with_the_twin(vocab_start):
    """Logits of zero at temperature 1: the winning score is the largest noise itself."""
    state = make_state(6, length=[1, 2, 3, 1000, 40000, 6])
    logits = torch.zeros(6, 777, device=DEVICE)
    expected = reference.gumbel_argmax(logits, every_request(state), state, no_thresholds(6), vocab_start)
    actual = KERNELS.gumbel_argmax(logits, every_request(state), state, no_thresholds(6), vocab_start)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)


@triton.jit
def noise_kernel(bits_ptr, noise_ptr, size, BLOCK: tl.constexpr, COMPILED: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + offs, mask=offs < size, other=1).to(tl.uint32, bitcast=True)
    tl.store(noise_ptr + offs, gumbel.gumbel_noise(bits, COMPILED), mask=offs < size)


def test_noise_is_exact_at_both_ends():
    """Against fp64, from the smallest bits to the largest, and where the branches of the formula meet."""
    edges = torch.tensor([0] + [2**e + d for e in range(1, 32) for d in (-1, 0, 1)] + [2**32 - 2, 2**32 - 1])
    bits = torch.cat((edges, torch.randint(0, 2**32, (20_000,)), torch.randint(1, 2**12, (2000,)))).unique()
    signed = torch.where(bits < 2**31, bits, bits - 2**32).int().to(DEVICE)
    noise = torch.empty(len(bits), device=DEVICE)
    noise_kernel[(triton.cdiv(len(bits), 1024),)](signed, noise, len(bits), BLOCK=1024, COMPILED=DEVICE == "cuda")
    exact = -(-torch.log1p(-(bits.double() + 0.5) / 2**32)).log()
    torch.testing.assert_close(noise.cpu().double(), exact, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- draws


def advance_of(state):
    """The last token of each request slot, a strided column of 77s; its length; and what the host is told."""
    num_slots = len(state.length)
    last_token = torch.full((num_slots, 4), 77, dtype=torch.int32, device=DEVICE)[:, 1]
    return last_token, state.length, torch.zeros(num_slots, dtype=torch.int32, pin_memory=DEVICE == "cuda")


@BOTH
def test_greedy_takes_the_lowest_of_equals(ops):
    state = make_state(4, temperature=0.0, length=[3, 3, 3, 0])
    logits = torch.randn(4, 2500, device=DEVICE).to(torch.bfloat16)
    logits[0, [17, 18, 2400]] = 9.0
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[2, 2499] = -5.0
    thresholds = ops.filter_thresholds(logits, every_request(state), state)
    values, tokens = ops.gumbel_argmax(logits, every_request(state), state, thresholds)
    assert tokens.tolist() == [17, 0, 2499, 0]
    assert values.tolist() == [9.0, -math.inf, -5.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_size, vocab_size, vocab_start", [(0, 10, 0), (5, 3001, 0), (9, 4099, 6)])
def test_triton_draws_agree_with_the_twin(batch_size, vocab_size, vocab_start, dtype):
    state = random_state(16)
    req_indices = torch.randperm(16, device=DEVICE)[:batch_size].int()
    logits = (torch.randn(batch_size, vocab_size, device=DEVICE) * 3).to(dtype)
    thresholds = reference.filter_thresholds(logits, req_indices, state)
    expected = reference.gumbel_argmax(logits, req_indices, state, thresholds, vocab_start)
    actual = KERNELS.gumbel_argmax(logits, req_indices, state, thresholds, vocab_start)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)


LOGITS = {
    "equal": lambda shape: torch.zeros(shape),
    "coarse": lambda shape: torch.full(shape, 256.0),  # at temperature 2**-16 noise is rounded to even numbers
    "flat": lambda shape: torch.randn(shape) * 0.1,
    "ties": lambda shape: (torch.randn(shape) * 2).round(),
    "spread": lambda shape: torch.randn(shape) * 1000,
    "rising": lambda shape: torch.linspace(-30, 30, shape[1]).expand(shape).contiguous(),
    "falling": lambda shape: torch.linspace(30, -30, shape[1]).expand(shape).contiguous(),
    "one in eight": lambda shape: torch.randn(shape) - 40 * (torch.arange(shape[1]) % 8 != 5),
    "peaked": lambda shape: torch.randn(shape) + 40 * (torch.arange(shape[1]) == shape[1] - 7),
    "few": lambda shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.99, -torch.inf),
    "broken": lambda shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.5, torch.nan),
    "infinite": lambda shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.01, torch.inf),
}


@pytest.mark.parametrize("max_segments, vocab_start", [(99, 5), (1, 0)])
@pytest.mark.parametrize("kind", LOGITS)
def test_draws_of_unusual_logits(kind, max_segments, vocab_start, monkeypatch):
    """One and two tiles per segment, at temperatures from nearly greedy to uniform."""
    monkeypatch.setattr(gumbel, "_MAX_SEGMENTS", max_segments)
    state = make_state(7, temperature=[0.0, 2.0**-16, 0.25, 1.0, 4.0, 1e30, 1.0], length=range(1, 8))
    logits = LOGITS[kind]((7, 1800)).to(torch.bfloat16).to(DEVICE)
    logits[6] = -torch.inf
    thresholds = no_thresholds(7)
    thresholds[3] = logits[3, 1700].float().nan_to_num(0, 0, 0)
    expected = reference.gumbel_argmax(logits, every_request(state), state, thresholds, vocab_start)
    actual = KERNELS.gumbel_argmax(logits, every_request(state), state, thresholds, vocab_start)
    assert actual[1].tolist() == expected[1].tolist()
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)


@BOTH
def test_strided_logits(ops):
    """Logits that are some columns of a wider tensor, whose other columns would win."""
    state = random_state(6)
    wide = torch.full((6, 3 * 50), 99.0, device=DEVICE)
    logits = wide[:, 50:100]
    logits.copy_(torch.randn(6, 50, device=DEVICE))
    req_indices = torch.randperm(6, device=DEVICE).int()
    results = []
    for x in (logits, logits.clone()):
        thresholds = ops.filter_thresholds(x, req_indices, state)
        results.append((thresholds, *ops.gumbel_argmax(x, req_indices, state, thresholds)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (wide[:, :50] == 99).all() and (wide[:, 100:] == 99).all()


@BOTH
def test_an_empty_batch(ops):
    state, logits = random_state(6), torch.randn(0, 50, device=DEVICE)
    req_indices, before, advance = every_request(state)[:0], state.length.clone(), advance_of(state)
    thresholds = ops.filter_thresholds(logits, req_indices, state)
    values, tokens = ops.gumbel_argmax(logits, req_indices, state, thresholds, advance=advance)
    gathered = torch.zeros(2, 2, 0, dtype=torch.int32, device=DEVICE)
    assert len(ops.pick_and_advance(gathered, req_indices, *advance)) == 0
    assert (len(thresholds), len(values), len(tokens)) == (0, 0, 0) and tokens.dtype == torch.int32
    assert torch.equal(state.length, before) and (advance[0] == 77).all()


@BOTH
def test_the_best_shard_has_the_token_of_the_whole_vocabulary(ops):
    state = make_state(6, temperature=[0.0, 0.5, 1.0, 1.0, 2.0, 1.0])
    logits = torch.randn(6, 1010, device=DEVICE) * 2
    thresholds = no_thresholds(6)
    req_indices = every_request(state)
    whole_values, whole = ops.gumbel_argmax(logits, req_indices, state, thresholds)
    cut = 333  # inside eight ids that share Philox blocks
    candidates = torch.zeros(2, 2, 6, dtype=torch.int32, device=DEVICE)
    ops.gumbel_argmax(logits[:, :cut], req_indices, state, thresholds, candidates=candidates[0])
    ops.gumbel_argmax(logits[:, cut:], req_indices, state, thresholds, cut, candidates=candidates[1])
    assert torch.equal(candidates[:, 0].view(torch.float32).amax(0), whole_values)
    assert torch.equal(ops.pick_and_advance(candidates, req_indices, *advance_of(state)), whole)


@BOTH
def test_advance_requests(ops):
    state = make_state(5, temperature=0.0, length=[3, 0, 7, 9, 1])
    req_indices = torch.tensor([2, 1, 4], dtype=torch.int32, device=DEVICE)
    logits = torch.randn(3, 50, device=DEVICE)
    thresholds = no_thresholds(3)
    advance = last_token, _, sampled_tokens = advance_of(state)
    scores, tokens = ops.gumbel_argmax(logits, req_indices, state, thresholds, advance=advance)
    assert state.length.tolist() == [3, 0, 8, 9, 2]
    assert last_token.tolist() == [77, 77, int(tokens[0]), 77, int(tokens[2])]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert sampled_tokens.tolist() == [0, 0, int(tokens[0]), 0, int(tokens[2])]
    assert tokens.tolist() == [int(logits[0].argmax()), 0, int(logits[2].argmax())]

    worse = torch.stack(((scores - 1).view(torch.int32), tokens * 0))
    better = torch.stack((scores.view(torch.int32), tokens + 1))
    picked = ops.pick_and_advance(torch.stack((worse, better)), req_indices, *advance)
    assert torch.equal(picked, tokens + 1)
    assert state.length.tolist() == [3, 0, 9, 9, 3]
    assert last_token.tolist() == [77, 77, int(tokens[0]) + 1, 77, int(tokens[2]) + 1]
    assert sampled_tokens.tolist() == [0, 0, int(tokens[0]) + 1, 0, int(tokens[2]) + 1]


@pytest.mark.parametrize("size, batch_size", [(2, 3), (4, 130)])
def test_the_best_candidate(size, batch_size):
    """Ties, ranks without an allowed token, infinite scores, padding slots; more than one program."""
    state = make_state(140, length=torch.randint(0, 4, (140,)))
    req_indices = torch.randperm(140, device=DEVICE)[:batch_size].int()
    scores = torch.randint(-2, 2, (size, batch_size), device=DEVICE).float()
    scores[scores == -2] = -torch.inf
    scores[0, 0] = torch.inf
    tokens = torch.randint(0, 150_000, (size, batch_size), dtype=torch.int32, device=DEVICE)
    candidates = torch.stack((scores.view(torch.int32), tokens), dim=1)
    results = []
    for ops in (reference, KERNELS):
        advance = last_token, length, sampled_tokens = advance_of(SimpleNamespace(length=state.length.clone()))
        picked = ops.pick_and_advance(candidates, req_indices, *advance)
        results.append([x.tolist() for x in (picked, last_token, length, sampled_tokens.to(DEVICE))])
    assert results[0] == results[1]
    columns = zip((-scores).T.tolist(), tokens.T.tolist(), strict=True)
    assert results[0][0] == [min(zip(*column, strict=True))[1] for column in columns]


@BOTH
def test_the_host_is_told_where_no_logit_is_finite(ops):
    """The device goes on with a valid id: the next launch, which looks it up, is scheduled before the host knows."""
    state = make_state(6, temperature=[0.0, 1.0, 1.0, 0.0, 0.0, 1.0], length=[3] * 6)
    logits = torch.randn(6, 1500, device=DEVICE)
    logits[1], logits[3], logits[2, :1499] = torch.nan, -torch.inf, torch.nan
    logits[4:, [7, 1400]] = torch.inf
    advance, req_indices = advance_of(state), every_request(state)
    last_token, _, sampled_tokens = advance
    first = int(logits[0].argmax())
    scores, tokens = ops.gumbel_argmax(logits, req_indices, state, no_thresholds(6), advance=advance)
    for _ in range(2):
        torch.cuda.synchronize() if DEVICE == "cuda" else None
        assert sampled_tokens.tolist() == [first, -1, 1499, -1, -1, -1]
        assert tokens.tolist() == last_token.tolist() == [first, 0, 1499, 0, 7, 7]
        sampled_tokens.zero_(), last_token.zero_()
        candidates = torch.stack((scores.view(torch.int32), tokens)).expand(2, -1, -1).contiguous()
        tokens = ops.pick_and_advance(candidates, req_indices, *advance)


@BOTH
def test_a_seed_draws_the_same_in_any_slot_and_batch(ops):
    state = make_state(8)
    state.seed[5] = state.seed[2]
    logits = torch.randn(1, 999, device=DEVICE)
    thresholds = no_thresholds(8)
    _, together = ops.gumbel_argmax(logits.expand(8, -1), every_request(state), state, thresholds)
    req_indices = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    _, alone = ops.gumbel_argmax(logits, req_indices, state, thresholds[:1])
    assert together[2] == together[5] == alone[0]
    assert len(together.unique()) > 2


def chi_square_limit(degrees):
    """About the 1 - 1e-5 quantile (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.265 * math.sqrt(2 / (9 * degrees))) ** 3


MIXES = [
    dict(temperature=1.0),
    dict(temperature=0.5),
    dict(top_k=5),
    dict(top_p=0.7),
    dict(min_p=0.1),
    dict(temperature=1.7, top_k=12, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize(
    "ops, num_draws, vary, mix",
    [
        *((reference, 20_000, vary, mix) for vary in ("length", "seed") for mix in MIXES),
        *((KERNELS, 64, "seed", mix) for mix in (MIXES[-1:] if DEVICE == "cpu" else ())),  # 80 ms per draw
        *((KERNELS, 20_000, "seed", mix) for mix in (MIXES if DEVICE == "cuda" else ())),
    ],
)
def test_frequencies_follow_the_exact_odds(ops, num_draws, vary, mix):
    vocab_size = 24
    logits = torch.randn(1, vocab_size, device=DEVICE) * 1.5
    state = make_state(num_draws, **mix)
    if vary == "length":
        state.seed[:] = state.seed[:1].clone()
        state.length = torch.arange(1, num_draws + 1, device=DEVICE, dtype=torch.int32)
    req_indices = every_request(state)
    batch = logits.repeat(num_draws, 1)
    thresholds = ops.filter_thresholds(batch[:1], req_indices[:1], state).expand(num_draws).contiguous()
    _, tokens = ops.gumbel_argmax(batch, req_indices, state, thresholds)

    values = logits[0].double().tolist()
    kept = sorted(kept_ids(values, **mix))
    odds = [math.exp(values[i] / mix.get("temperature", 1.0)) for i in kept]
    counts = torch.bincount(tokens.long().cpu(), minlength=vocab_size).double()
    assert counts[kept].sum() == num_draws  # nothing outside the filters
    expected = torch.tensor(odds, dtype=torch.float64) * (num_draws / sum(odds))
    common = expected >= 5  # the rest share one cell
    observed = counts[kept]
    cells_expected = torch.cat((expected[common], expected[~common].sum()[None]))
    cells_observed = torch.cat((observed[common], observed[~common].sum()[None]))
    filled = cells_expected > 0
    chi_square = ((cells_observed - cells_expected).square() / cells_expected)[filled].sum()
    assert chi_square < chi_square_limit(int(filled.sum()) - 1 or 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_size", [1, 64])
@pytest.mark.parametrize("spread", [0.1, 4])
def test_whole_vocabulary(batch_size, dtype, spread):
    state = random_state(batch_size)
    req_indices = every_request(state)
    logits = (torch.randn(batch_size, 151_936, device=DEVICE) * spread).to(dtype)
    expected = reference.filter_thresholds(logits, req_indices, state)
    actual = KERNELS.filter_thresholds(logits, req_indices, state)
    assert same_selection(logits, expected, actual, slack=20)
    expected_values, expected_tokens = reference.gumbel_argmax(logits, req_indices, state, expected)
    values, tokens = KERNELS.gumbel_argmax(logits, req_indices, state, expected)
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)
    assert (tokens != expected_tokens).sum() <= 1  # two scores equal to fp32

"""Sampling: the noise against published vectors, thresholds against a naive loop, draws against exact odds.

The plain twins carry the statistics; the Triton kernels must then agree with the twins. Compiled where there is a
GPU, under Triton's interpreter elsewhere.
"""

import math
import os
from dataclasses import replace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from nanovllm.kernels import reference, triton_ops  # noqa: E402
from nanovllm.kernels import sample as triton_sample  # noqa: E402
from nanovllm.kernels import thresholds as triton_thresholds  # noqa: E402
from nanovllm.kernels.reference import SamplingState  # noqa: E402

BOTH = pytest.mark.parametrize("ops", [reference, triton_ops], ids=["twin", "triton"])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """torch.empty hands out NaN (and an absurd integer) from here on."""
    torch.manual_seed(0)
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -123456)

    monkeypatch.setattr(torch, "empty", poisoned_empty)


def make_columns(num_rows, **values):
    """Columns with the given value in every row (a number or a list), as strided views of one integer table."""
    defaults = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_length=0, forbidden=-1, length=1)
    table = torch.zeros((num_rows, 32), dtype=torch.int32, device=DEVICE)
    columns, start = {}, 0
    for name, default in defaults.items():
        width = {"seed": 2, "forbidden": 16}.get(name, 1)
        column = table[:, start : start + width]
        if isinstance(default, float):
            column = column.view(torch.float32)
        if name == "seed":
            column[:] = torch.randint(-(2**31), 2**31 - 1, (num_rows, 2), device=DEVICE)
        else:
            column[:] = default
        if name in values:
            value = torch.as_tensor(values[name], device=DEVICE)
            column[:] = value if value.dim() != 1 else value[:, None]
        columns[name] = column if width > 1 else column[:, 0]
        start += width
    return SamplingState(**columns)


def all_rows(columns):
    return torch.arange(len(columns.length), device=DEVICE, dtype=torch.int32)


# The generator.


def test_philox_agrees_with_published_vectors():
    """The known answers that come with Random123, by the authors of Philox."""
    word = torch.tensor
    cases = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
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


def test_noise_of_an_id_does_not_depend_on_what_is_drawn_beside_it():
    seed = torch.randint(-(2**31), 2**31 - 1, (3, 2), dtype=torch.int32)
    length = torch.tensor([1, 2, 3])
    whole = reference.philox_bits(seed, length, torch.arange(100))
    assert torch.equal(whole[1:2, 37:90], reference.philox_bits(seed[1:2], length[1:2], torch.arange(37, 90)))
    assert len(whole.unique()) > 290


@pytest.mark.parametrize("vocab_start", [0, 3, 1024])
def test_triton_noise_agrees_with_the_twin(vocab_start):
    """Logits of zero at temperature 1: the winning score is the largest noise itself."""
    columns = make_columns(6, length=[1, 2, 3, 1000, 40000, 6])
    logits = torch.zeros(6, 777, device=DEVICE)
    no_threshold = torch.full((6,), -torch.inf, device=DEVICE)
    expected = reference.sample(logits, all_rows(columns), columns, no_threshold, vocab_start)
    actual = triton_sample.sample(logits, all_rows(columns), columns, no_threshold, vocab_start)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)


@triton.jit
def noise_and_bound_kernel(bits_ptr, noise_ptr, bound_ptr, size, BLOCK: tl.constexpr, COMPILED: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + offs, mask=offs < size, other=1).to(tl.uint32, bitcast=True)
    tl.store(noise_ptr + offs, triton_sample.gumbel_noise(bits, COMPILED), mask=offs < size)
    tl.store(bound_ptr + offs, triton_sample.noise_bound(bits, COMPILED), mask=offs < size)


def test_bound_of_the_noise():
    """What an id is left out by: no noise exceeds its bound, nor one of more bits, nor any the largest assumed."""
    edges = torch.tensor([2**e + d for e in range(1, 32) for d in (-1, 0, 1)] + [2**32 - 2, 2**32 - 1])
    bits = torch.cat((edges, torch.randint(1, 2**32, (20_000,)), torch.randint(1, 2**12, (2000,)))).unique()
    noise, bound = (torch.empty(len(bits), device=DEVICE) for _ in range(2))
    signed = torch.where(bits < 2**31, bits, bits - 2**32).int().to(DEVICE)
    noise_and_bound_kernel[(triton.cdiv(len(bits), 1024),)](
        signed, noise, bound, len(bits), BLOCK=1024, COMPILED=DEVICE == "cuda"
    )
    assert (noise < 23).all() and (bound >= noise + 5e-5).all()
    assert (bound >= noise.flip(0).cummax(0).values.flip(0)).all()  # bits are in order
    assert ((bound - noise)[(bits > 2**12) & (bits < 2**20)] < 1e-3).all()  # and it is a close one


# Thresholds.


def kept_ids(logits, temperature, top_k, top_p, min_p):
    """The set of ids that may be sampled, by the definition, in Python floats."""
    by_size = sorted(range(len(logits)), key=lambda i: -logits[i])
    if 0 < top_k < len(logits):
        by_size = [i for i in by_size if logits[i] >= logits[by_size[top_k - 1]]]
    largest = logits[by_size[0]]
    odds = {i: math.exp((logits[i] - largest) / temperature) for i in by_size}
    kept, mass, total = [], 0.0, sum(odds.values())
    for i in by_size:
        tied = bool(kept) and logits[i] == logits[kept[-1]]
        if top_p < 1 and kept and mass >= top_p * total and not tied:
            break
        kept.append(i)
        mass += odds[i]
    return {i for i in kept if odds[i] >= min_p}


FILTERS = [
    dict(),
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=10_000),
    dict(top_p=0.0),
    dict(top_p=0.3),
    dict(top_p=0.95),
    dict(min_p=0.05),
    dict(min_p=1.0),
    dict(top_k=20, top_p=0.7),
    dict(top_k=20, min_p=0.2),
    dict(top_k=50, top_p=0.9, min_p=0.01),
    dict(top_k=5, temperature=0.0),
]


@BOTH
@pytest.mark.parametrize("temperature", [0.6, 1.5])
@pytest.mark.parametrize("ties", [False, True])
def test_thresholds_agree_with_the_definition(ops, temperature, ties):
    vocab_size = 300
    logits = torch.randn(len(FILTERS), vocab_size, device=DEVICE) * 3
    if ties:
        logits = logits.round()
    filters = [dict(dict(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0), **f) for f in FILTERS]
    columns = make_columns(len(filters), **{name: [f[name] for f in filters] for name in filters[0]})
    thresholds = ops.filter_thresholds(logits, all_rows(columns), columns)
    for row, wanted in enumerate(filters):
        if wanted["temperature"] == 0 or FILTERS[row] in (dict(), dict(top_k=10_000)):
            assert thresholds[row] == -torch.inf
        else:
            values = logits[row].double().tolist()
            kept = {i for i, value in enumerate(values) if value >= float(thresholds[row])}
            assert kept == kept_ids(values, **wanted), FILTERS[row]


def random_columns(num_rows):
    rand = torch.rand(4, num_rows)
    columns = make_columns(
        num_rows,
        temperature=rand[0] * 1.5,
        top_k=torch.randint(0, 80, (num_rows,)),
        top_p=rand[1] + 0.2,
        min_p=(rand[2] - 0.5).clamp(min=0) * 0.2,
        length=torch.randint(0, 9, (num_rows,)),
        min_length=torch.randint(0, 9, (num_rows,)),
        forbidden=torch.randint(-1, 100, (num_rows, 16)),
    )
    columns.temperature[::5] = 0
    columns.top_k[::3] = 0
    return columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size, spread", [(50, 4), (5000, 4), (9000, 0.05)])
def test_triton_thresholds_agree_with_the_twin(vocab_size, spread, dtype):
    """9,000 nearly equal logits: more candidates than the kernel sets aside."""
    columns = random_columns(8)
    rows = torch.randperm(8, device=DEVICE)[:7].int()
    logits = (torch.randn(7, vocab_size + 3, device=DEVICE) * spread).to(dtype)[:, :vocab_size]
    logits[2, 5] = torch.nan
    logits[3, 7:9] = -torch.inf
    other = logits.clone()
    expected = reference.filter_thresholds(logits, rows, columns)
    actual = triton_ops.filter_thresholds(other, rows, columns)
    assert torch.equal(logits.nan_to_num(), other.nan_to_num())  # the same ids forbidden
    assert same_selection(logits, expected, actual)


@pytest.mark.parametrize("line", [1, 1 << 40], ids=["several programs", "one program"])
@pytest.mark.parametrize("spread", [4, 0.05])
@pytest.mark.parametrize("filters", [dict(top_k=7), dict(top_p=0.8), dict(top_k=50, top_p=0.9), dict(min_p=0.3)])
def test_thresholds_of_a_row_of_several_blocks(filters, spread, line, monkeypatch):
    """Five blocks, the last one not full, whose row fills cache lines or does not; ids forbidden in three of them.

    Twice, for a launch must leave its counters at zero.
    """
    monkeypatch.setattr(triton_thresholds, "_LINE", line)
    columns = make_columns(1, temperature=0.7, min_length=9, forbidden=-1, **filters)
    logits = (torch.randn(1, 20_000, device=DEVICE) * spread).to(torch.bfloat16)
    columns.forbidden[0, :4] = torch.tensor([4, 4_096, 9_000, int(logits.argmax())])
    other = logits.clone()
    expected = reference.filter_thresholds(logits, all_rows(columns), columns)
    for _ in range(2):
        actual = triton_ops.filter_thresholds(other, all_rows(columns), columns)
        assert torch.equal(logits, other) and logits[0, columns.forbidden[0, :4].long()].isinf().all()
        assert same_selection(logits, expected, actual)


def same_selection(logits, expected, actual, slack=2):
    """Thresholds select the same ids, give or take `slack` whose cumulated mass equals p to fp32."""
    wide = logits.float()
    differing = (wide >= expected[:, None]) != (wide >= actual[:, None])
    return bool((differing.sum(1) <= slack).all()) and torch.equal(expected.isinf(), actual.isinf())


@BOTH
def test_forbidden_ids_until_min_length(ops):
    columns = make_columns(3, temperature=0.0, length=[4, 5, 4], min_length=[5, 5, 0], forbidden=-1)
    columns.forbidden[:, 0], columns.forbidden[:, 3], columns.forbidden[:, 4] = 12, 19, 99
    logits = torch.randn(3, 10, device=DEVICE)
    expected = logits.clone()
    expected[0, 2] = expected[0, 9] = -torch.inf  # ids 10 .. 19 live here
    ops.filter_thresholds(logits, all_rows(columns), columns, 10)
    assert torch.equal(logits, expected)


# Draws.


@BOTH
def test_greedy_takes_the_lowest_of_equals(ops):
    columns = make_columns(4, temperature=0.0, length=[3, 3, 3, 0])
    logits = torch.randn(4, 2500, device=DEVICE).to(torch.bfloat16)
    logits[0, [17, 18, 2400]] = 9.0
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[2, 2499] = -5.0
    thresholds = ops.filter_thresholds(logits, all_rows(columns), columns)
    values, tokens = ops.sample(logits, all_rows(columns), columns, thresholds)
    assert tokens.tolist() == [17, 0, 2499, 0]
    assert values.tolist() == [9.0, -math.inf, -5.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_size, vocab_size, vocab_start", [(0, 10, 0), (5, 3001, 0), (9, 4099, 6)])
def test_triton_draws_agree_with_the_twin(batch_size, vocab_size, vocab_start, dtype):
    columns = random_columns(16)
    rows = torch.randperm(16, device=DEVICE)[:batch_size].int()
    logits = (torch.randn(batch_size, vocab_size, device=DEVICE) * 3).to(dtype)
    thresholds = reference.filter_thresholds(logits, rows, columns, vocab_start)
    expected = reference.sample(logits, rows, columns, thresholds, vocab_start)
    actual = triton_sample.sample(logits, rows, columns, thresholds, vocab_start)
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
    "one in four": lambda shape: torch.randn(shape) - 40 * (torch.arange(shape[1]) % 4 != 1),
    "peaked": lambda shape: torch.randn(shape) + 40 * (torch.arange(shape[1]) == shape[1] - 7),
    "few": lambda shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.99, -torch.inf),
    "broken": lambda shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.5, torch.nan),
    "infinite": lambda shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.01, torch.inf),
}


@pytest.mark.parametrize("few_rows, max_chunks, vocab_start", [(0, 14, 5), (0, 1, 0), (7, 1, 0)])
@pytest.mark.parametrize("kind", LOGITS)
def test_what_is_left_out_cannot_win(kind, few_rows, max_chunks, vocab_start, monkeypatch):
    """Two and four tiles of ids per chunk, at temperatures from nearly greedy to uniform; and with nothing left out."""
    monkeypatch.setattr(triton_sample, "_FEW_ROWS", few_rows)
    monkeypatch.setattr(triton_sample, "_MAX_CHUNKS", max_chunks)
    columns = make_columns(7, temperature=[0.0, 2.0**-16, 0.25, 1.0, 4.0, 1e30, 1.0], length=range(1, 8))
    logits = LOGITS[kind]((7, 1800)).to(torch.bfloat16).to(DEVICE)
    logits[6] = -torch.inf
    thresholds = torch.full((7,), -torch.inf, device=DEVICE)
    thresholds[3] = logits[3, 1700].float().nan_to_num(0, 0, 0)
    expected = reference.sample(logits, all_rows(columns), columns, thresholds, vocab_start)
    actual = triton_sample.sample(logits, all_rows(columns), columns, thresholds, vocab_start)
    assert actual[1].tolist() == expected[1].tolist()
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)


@BOTH
def test_no_rows_and_strided_logits(ops):
    """A launch that samples nobody, and logits that are a part of wider rows, whose other columns would win."""
    columns = random_columns(6)
    wide = torch.full((6, 3 * 50), 99.0, device=DEVICE)
    logits = wide[:, 50:100]
    logits.copy_(torch.randn(6, 50, device=DEVICE))
    rows = torch.randperm(6, device=DEVICE).int()
    copy = logits.clone()
    results = []
    for x in (logits, copy):
        thresholds = ops.filter_thresholds(x, rows, columns)
        results.append((thresholds, *ops.sample(x, rows, columns, thresholds)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (wide[:, :50] == 99).all() and (wide[:, 100:] == 99).all()

    before, last_token = columns.length.clone(), torch.full((6,), 77, dtype=torch.int32, device=DEVICE)
    advance = last_token, columns.length, torch.zeros(2, 6, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    thresholds = ops.filter_thresholds(logits[:0], rows[:0], columns)
    values, tokens = ops.sample(logits[:0], rows[:0], columns, thresholds, advance=advance)
    ops.advance_requests(tokens, rows[:0], *advance)
    assert (len(thresholds), len(values), len(tokens)) == (0, 0, 0) and tokens.dtype == torch.int32
    assert torch.equal(columns.length, before) and (last_token == 77).all()


@BOTH
def test_shards_settle_on_the_token_of_the_whole(ops):
    columns = make_columns(6, temperature=[0.0, 0.5, 1.0, 1.0, 2.0, 1.0])
    logits = torch.randn(6, 1010, device=DEVICE) * 2
    thresholds = torch.full((6,), -torch.inf, device=DEVICE)
    rows = all_rows(columns)
    whole_values, whole = ops.sample(logits, rows, columns, thresholds)
    cut = 333  # not a multiple of the four ids that share a block of noise
    shards = [
        ops.sample(logits[:, :cut], rows, columns, thresholds),
        ops.sample(logits[:, cut:], rows, columns, thresholds, cut),
    ]
    values = torch.stack([values for values, _ in shards])
    tokens = torch.stack([tokens for _, tokens in shards])
    winner = values.argmax(0, keepdim=True)
    assert torch.equal(tokens.gather(0, winner)[0], whole)
    assert torch.equal(values.max(0).values, whole_values)


@BOTH
def test_advance_rows(ops):
    columns = make_columns(5, temperature=0.0, length=[3, 0, 7, 9, 1])
    last_token = torch.full((5, 4), 77, dtype=torch.int32, device=DEVICE)[:, 1]
    rows = torch.tensor([2, 1, 4], dtype=torch.int32, device=DEVICE)
    logits = torch.randn(3, 50, device=DEVICE)
    thresholds = torch.full((3,), -torch.inf, device=DEVICE)
    sampled_tokens = torch.zeros(2, 5, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    _, tokens = ops.sample(logits, rows, columns, thresholds, advance=(last_token, columns.length, sampled_tokens))
    assert columns.length.tolist() == [3, 0, 8, 9, 2]
    assert last_token.tolist() == [77, 77, int(tokens[0]), 77, int(tokens[2])]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    odd = [0, 0, int(tokens[0]), 0, int(tokens[2])]  # both lengths were
    assert sampled_tokens.tolist() == [[0] * 5, odd]
    assert tokens.tolist() == [int(logits[0].argmax()), 0, int(logits[2].argmax())]

    ops.advance_requests(tokens + 1, rows, last_token, columns.length, sampled_tokens)
    assert columns.length.tolist() == [3, 0, 9, 9, 3]
    assert last_token.tolist() == [77, 77, int(tokens[0]) + 1, 77, int(tokens[2]) + 1]
    assert sampled_tokens.tolist() == [[0, 0, int(tokens[0]) + 1, 0, int(tokens[2]) + 1], odd]


@BOTH
def test_a_seed_draws_the_same_whatever_its_row_and_mates(ops):
    columns = make_columns(8)
    columns.seed[5] = columns.seed[2]
    logits = torch.randn(1, 999, device=DEVICE)
    thresholds = torch.full((8,), -torch.inf, device=DEVICE)
    _, together = ops.sample(logits.expand(8, -1), all_rows(columns), columns, thresholds)
    row = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    _, alone = ops.sample(logits, row, columns, thresholds[:1])
    assert together[2] == together[5] == alone[0]
    assert len(together.unique()) > 2


def chi_square_limit(degrees):
    """About the 1 - 1e-5 quantile (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.265 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "filters",
    [
        dict(temperature=1.0),
        dict(temperature=0.5),
        dict(top_k=5),
        dict(top_p=0.7),
        dict(min_p=0.1),
        dict(temperature=1.7, top_k=12, top_p=0.8, min_p=0.05),
    ],
    ids=lambda filters: "-".join(filters),
)
@pytest.mark.parametrize(
    "ops, num_draws, vary",
    [(reference, 20_000, "length"), (reference, 20_000, "seed"), (triton_ops, 120, "seed")],
    ids=["twin-length", "twin-seed", "triton-seed"],
)
def test_frequencies_follow_the_exact_odds(ops, num_draws, filters, vary):
    if DEVICE == "cuda":
        num_draws = 20_000
    vocab_size = 24
    logits = torch.randn(1, vocab_size, device=DEVICE) * 1.5
    columns = make_columns(num_draws, **filters)
    if vary == "length":
        columns.seed[:] = columns.seed[:1].clone()
        columns = replace(columns, length=torch.arange(1, num_draws + 1, device=DEVICE, dtype=torch.int32))
    rows = all_rows(columns)
    batch = logits.repeat(num_draws, 1)
    thresholds = ops.filter_thresholds(batch[:1], rows[:1], columns).expand(num_draws).contiguous()
    _, tokens = ops.sample(batch, rows, columns, thresholds)

    settings = dict(dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0), **filters)
    values = logits[0].double().tolist()
    kept = sorted(kept_ids(values, **settings))
    odds = [math.exp(values[i] / settings["temperature"]) for i in kept]
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
    columns = random_columns(batch_size)
    rows = all_rows(columns)
    logits = (torch.randn(batch_size, 151_936, device=DEVICE) * spread).to(dtype)
    other = logits.clone()
    expected = reference.filter_thresholds(logits, rows, columns)
    actual = triton_ops.filter_thresholds(other, rows, columns)
    assert same_selection(logits, expected, actual, slack=20)
    expected_values, expected_tokens = reference.sample(logits, rows, columns, expected)
    values, tokens = triton_sample.sample(logits, rows, columns, expected)
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)
    assert (tokens != expected_tokens).sum() <= 1  # two scores equal to fp32

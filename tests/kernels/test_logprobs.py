"""Log-probabilities: the twin against torch.log_softmax and a sort, the Triton kernels against the twin."""

import math

import pytest
import torch

from .sampling_state import BOTH, DEVICE, KERNELS, every_request, make_state, reference

pytestmark = pytest.mark.usefixtures("poisoned")


def unpack_logprobs(packed):
    """(logprob f32[N], rank i32[N], ids i32[N, k], top f32[N, k])."""
    num_top = packed.shape[1] // 2 - 1
    ids, top = packed[:, 2 : 2 + num_top], packed[:, 2 + num_top :]
    return packed[:, 0].view(torch.float32), packed[:, 1], ids, top.view(torch.float32)


def assert_same(actual, expected):
    assert actual.dtype == torch.int32 and actual.is_contiguous() and actual.shape == expected.shape
    actual, expected = unpack_logprobs(actual), unpack_logprobs(expected)
    assert torch.equal(actual[1], expected[1]) and torch.equal(actual[2], expected[2])
    for i in (0, 3):
        torch.testing.assert_close(actual[i], expected[i], rtol=1e-6, atol=1e-5)


def random_tokens(num_rows, vocab_size):
    return torch.randint(0, vocab_size, (num_rows,), device=DEVICE, dtype=torch.int32)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_log_softmax(ops, dtype):
    logits = (torch.randn(6, 4500, device=DEVICE) * 4).to(dtype)
    tokens = random_tokens(6, 4500)
    tokens[0] = logits[0].argmax()
    logprob, rank, ids, top = unpack_logprobs(ops.token_logprobs(logits, tokens, 9))
    expected = torch.log_softmax(logits.double(), -1)
    for row, token in enumerate(tokens.tolist()):
        wide = logits[row].double().tolist()
        order = sorted(range(4500), key=lambda id, wide=wide: (-wide[id], id))[:9]
        assert ids[row].tolist() == order
        assert rank[row] == sum(x >= wide[token] for x in wide)
        torch.testing.assert_close(top[row].double(), expected[row, order], rtol=0, atol=1e-5)
        assert abs(logprob[row] - expected[row, token]) < 1e-5
    assert rank[0] == 1 and logprob[0] == top[0, 0]


@BOTH
def test_scales_and_thresholds_are_those_of_the_draw(ops):
    """The scale is an inverse temperature; what the threshold cuts has no probability."""
    state = make_state(4, temperature=[0.5, 2.0, 1.0, 0.7], top_k=[5, 0, 3, 0], top_p=[1.0, 0.6, 1.0, 1.0])
    logits = torch.randn(4, 300, device=DEVICE) * 3
    thresholds = reference.filter_thresholds(logits, every_request(state), state)
    tokens = logits.argmin(1)
    packed = ops.token_logprobs(logits, tokens, 6, 1 / state.temperature, thresholds)
    logprob, rank, ids, top = unpack_logprobs(packed)
    kept = logits.masked_fill(logits < thresholds[:, None], -torch.inf)
    expected = torch.log_softmax(kept / state.temperature[:, None], -1)
    torch.testing.assert_close(top, expected.sort(descending=True).values[:, :6], rtol=1e-5, atol=1e-5)
    assert logprob[:3].tolist() == [-math.inf] * 3 and rank.tolist() == [300] * 4
    torch.testing.assert_close(logprob[3], expected[3, tokens[3]])
    assert top.isinf().sum(1).tolist() == [1, 0, 3, 0] and ids[2, :3].tolist() == logits[2].topk(3).indices.tolist()


@BOTH
@pytest.mark.parametrize("num_top, num_named", [(0, 3), (2, 5), (7, 1), (3, 128)])
def test_named_tokens(ops, num_top, num_named):
    """Rows with names report these, in their order; the others keep the most probable ones."""
    logits = torch.randn(5, 4500, device=DEVICE) * 4
    logits[1, 7] = torch.nan
    scales, thresholds = torch.rand(5, device=DEVICE) + 0.3, torch.randn(5, device=DEVICE)
    named = torch.full((5, num_named), -1, dtype=torch.int32, device=DEVICE)
    for row, count in ((0, 1), (1, num_named), (3, -(-num_named // 2))):
        named[row, :count] = random_tokens(count, 4500)
    named[1, 0], named[0, 0] = 7, 4499
    tokens = random_tokens(5, 4500)
    packed = ops.token_logprobs(logits, tokens, num_top, scales, thresholds, named)
    assert packed.shape == (5, 2 + 2 * max(num_top, num_named))
    logprob, rank, ids, others = unpack_logprobs(packed)
    expected = torch.log_softmax(logits.nan_to_num(-torch.inf).where(logits >= thresholds[:, None], -torch.inf)
                                 * scales[:, None], -1)  # fmt: skip
    plain = unpack_logprobs(ops.token_logprobs(logits, tokens, num_top, scales, thresholds))
    assert torch.equal(rank, plain[1])
    torch.testing.assert_close(logprob, plain[0])
    for row, names in enumerate(named.tolist()):
        asked = [i for i in names if i >= 0] or plain[2][row].tolist()
        assert ids[row, : len(asked)].tolist() == asked
        torch.testing.assert_close(others[row, : len(asked)], expected[row, asked], rtol=1e-5, atol=1e-5)


@BOTH
def test_ties_infinities_and_nan(ops):
    """The lowest ids win a tie, also among -inf; -0.0 equals 0.0. A row without a finite logit is no crash."""
    logits = torch.full((5, 9000), -5.0, device=DEVICE)
    logits[0, [8999, 4096, 127, 128, 3]] = 2.0
    logits[1] = torch.nan
    logits[1, [700, 8500]] = torch.tensor([-0.0, 0.0], device=DEVICE)
    logits[2] = -torch.inf
    logits[3] = torch.nan
    logits[4] = -torch.inf
    logits[4, 8999] = -300.0
    tokens = torch.tensor([4096, 8500, 5, 8, 8999], device=DEVICE)
    logprob, rank, ids, top = unpack_logprobs(ops.token_logprobs(logits, tokens, 6))
    assert ids.tolist() == [
        [3, 127, 128, 4096, 8999, 0], [700, 8500, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5],
        [8999, 0, 1, 2, 3, 4],
    ]  # fmt: skip
    assert rank.tolist() == [5, 2, 9000, 9000, 1]
    assert logprob[2:].tolist() == [-math.inf, -math.inf, 0.0] and top[2:4].isinf().all()
    torch.testing.assert_close(top[1, :2].tolist(), [math.log(0.5)] * 2)
    assert top[1, 2:].isinf().all() and logprob[1] == top[1, 0] and logprob[0] == top[0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_top", [0, 3, 40])
@pytest.mark.parametrize("num_rows, vocab_size", [(3, 50), (5, 8193)])
def test_triton_logprobs_agree_with_the_twin(num_rows, vocab_size, num_top, dtype):
    """Logits are columns of a wider tensor, whose other columns would win; many tie."""
    wide = torch.full((num_rows, vocab_size + 20), 99.0, device=DEVICE, dtype=dtype)
    logits = wide[:, 7 : 7 + vocab_size]
    logits.copy_((torch.randn(num_rows, vocab_size, device=DEVICE) * 8).round() / 2)
    logits[1, ::3] = torch.nan
    logits[2, 10:] = -torch.inf
    tokens = random_tokens(num_rows, vocab_size)
    scales = torch.rand(num_rows, device=DEVICE) + 0.3
    thresholds = torch.randn(num_rows, device=DEVICE) * 3
    for options in ({}, {"scales": scales}, {"thresholds": thresholds, "scales": scales}, {"thresholds": thresholds}):
        expected = reference.token_logprobs(logits, tokens, num_top, **options)
        assert_same(KERNELS.token_logprobs(logits, tokens, num_top, **options), expected)


def test_triton_top_tokens_of_one_group_and_of_many():
    """All top tokens in one group of 128, in order and against it; and each in another group."""
    logits = torch.randn(3, 6000, device=DEVICE)
    logits[0, 256:288] += torch.linspace(50, 80, 32, device=DEVICE)
    logits[1, 256:288] += torch.linspace(80, 50, 32, device=DEVICE)
    logits[2, ::128] += 50
    tokens = random_tokens(3, 6000)
    assert_same(KERNELS.token_logprobs(logits, tokens, 32), reference.token_logprobs(logits, tokens, 32))


@BOTH
def test_no_rows(ops):
    packed = ops.token_logprobs(torch.randn(0, 50, device=DEVICE), random_tokens(0, 50), 3)
    assert packed.shape == (0, 8) and packed.dtype == torch.int32

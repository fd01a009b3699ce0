"""Norms behind a projection: the kernels against their twins, the twins against transformers' modules."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from nanovllm.kernels.linear import norm, reference  # noqa: E402

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4.8e-2}  # three roundings of numbers up to 4
pytestmark = pytest.mark.usefixtures("poisoned")


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[expected.dtype], atol=TOLERANCE[expected.dtype])


def test_add_post_norm_twin_agrees_with_hugging_face():
    olmo2 = pytest.importorskip("transformers.models.olmo2.modeling_olmo2")
    norm = olmo2.Olmo2RMSNorm(40, EPS)
    norm.weight.data.normal_()
    x, residual = torch.randn(2, 3, 40)
    torch.testing.assert_close(reference.add_post_norm(x, norm.weight, EPS, residual), residual + norm(x))


# a weight in fp32: an offset was added to it
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens, num_channels", [(0, 64), (1, 64), (5, 100), (3, 1030)])
def test_add_post_norm(num_tokens, num_channels, weight_dtype, dtype):
    packed = randn(num_tokens, num_channels + 6, dtype=dtype)
    residual, padding = packed[:, :num_channels], packed[:, num_channels:].clone()
    x = 3 * randn(num_tokens, num_channels + 2, dtype=dtype)[:, 1:-1]
    weight = torch.rand(num_channels, device=DEVICE).to(weight_dtype)
    expected = reference.add_post_norm(x, weight, EPS, residual)
    y = norm.add_post_norm(x, weight, EPS, residual)
    assert y.data_ptr() == residual.data_ptr() and expected.dtype == dtype
    assert_close(y, expected)
    assert torch.equal(packed[:, num_channels:], padding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens, q_size, k_size", [(0, 64, 64), (1, 64, 32), (5, 96, 32), (3, 1024, 1024)])
@pytest.mark.parametrize("given", [False, True])
def test_qk_rms_norm(num_tokens, q_size, k_size, given, dtype):
    """``given``: the mean squares are those of more heads than this rank's."""
    total = q_size + 2 * k_size
    packed = randn(num_tokens, total + 5, dtype=dtype)
    padding, qkv = packed[:, total:].clone(), packed[:, :total]
    weights = randn(q_size, dtype=dtype), randn(k_size, dtype=dtype)
    mean_squares = 1 + randn(2, num_tokens).square() if given else None
    expected = reference.qk_rms_norm(qkv, *weights, EPS, mean_squares)
    q, k, v = qkv.split([q_size, k_size, k_size], dim=1)
    if not given:
        alone = [reference.rms_norm(x, weight, EPS) for x, weight in zip((q, k), weights, strict=True)]
        assert_close(expected, torch.cat([*alone, v], dim=1))
    y = norm.qk_rms_norm(qkv, *weights, EPS, mean_squares)
    assert y.data_ptr() == qkv.data_ptr()
    assert_close(y, expected)
    assert torch.equal(packed[:, total:], padding)

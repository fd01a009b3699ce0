"""Attention within packed segments against its twin in fp64, and the twin against the formula."""

import pytest
import torch

from nanovllm.kernels.attention import packed, reference

from . import DEVICE, randn
from .table import each_once

pytestmark = pytest.mark.usefixtures("poisoned")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {FP32: 1e-5, FP16: 2e-3, BF16: 1.6e-2}
TYPES = [FP32, FP16] if DEVICE == "cpu" else [FP32, BF16, FP16]  # the interpreter multiplies bf16 as bit patterns
BOUNDS = [
    [0, 1],
    [0, 64, 96, 160, 163],  # windows: tiles of 64 rows
    [0, 130, 131, 259, 300],  # images: rows and keys that fill no tile, or just one
]
HEADS = [(2, 72), (1, 80), (3, 64), (2, 20), (1, 128)]
LARGE = [0, 1000, 1004, 5100, 5228, 9000]


def make(bounds, num_heads, head_size, dtype):
    """Views of one tensor, as a projection makes them."""
    qkv = randn(bounds[-1], 3 * num_heads * head_size, dtype=dtype)
    return qkv.unflatten(1, (3, num_heads, head_size)).unbind(1)


def check(bounds, num_heads, head_size, dtype):
    q, k, v = make(bounds, num_heads, head_size, dtype)
    segments, scale = packed.packed_segments(bounds, torch.device(DEVICE)), head_size**-0.5
    actual = packed.packed_attention(q, k, v, segments, scale)
    expected = reference.packed_attention(q.double(), k.double(), v.double(), segments, scale)
    assert actual.shape == q.shape and actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("bounds, heads, dtype", each_once(BOUNDS, HEADS, TYPES), ids=str)
def test_packed_attention(bounds, heads, dtype):
    check(bounds, *heads, dtype)


@pytest.mark.parametrize("heads, dtype", each_once(HEADS, TYPES), ids=str)
def test_without_the_kernel_for_hopper(heads, dtype, monkeypatch):
    monkeypatch.setattr(packed, "packed_sm90", None)
    for bounds in BOUNDS:
        check(bounds, *heads, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 72, 80, 128])
def test_large_images(head_size):
    """Several tiles for each program, and many keys."""
    check(LARGE, 16, head_size, BF16)


def test_other_segments_may_hold_nan():
    """Tiles of keys reach into the next segment, whose values count for nothing: 0 * NaN would be NaN."""
    q, k, v = make([0, 200], 2, 72, FP32 if DEVICE == "cpu" else BF16)
    segments = packed.packed_segments([0, 130], torch.device(DEVICE))
    expected = packed.packed_attention(q, k, v, segments, 0.1)[:130].clone()
    k[130:], v[130:] = torch.nan, torch.nan
    assert torch.equal(packed.packed_attention(q, k, v, segments, 0.1)[:130], expected)


def test_large_scores():
    """Scores beyond the range of exp, and far below."""
    q, k, v = make([0, 70], 1, 16, FP32)
    for factor in (1e3, 1e-3):
        segments = packed.packed_segments([0, 70], torch.device(DEVICE))
        actual = packed.packed_attention(q * factor, k, v, segments, 1.0)
        expected = reference.packed_attention((q * factor).double(), k.double(), v.double(), segments, 1.0)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_the_twin_is_the_formula():
    q, k, v = (x.double() for x in make([0, 5, 12], 2, 8, FP32))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    place = torch.arange(12, device=DEVICE) < 5
    weights = scores.masked_fill(place[:, None] != place, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v)
    torch.testing.assert_close(reference.packed_attention(q, k, v, reference.Segments([0, 5, 12]), 0.3), expected)

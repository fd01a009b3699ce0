"""The kernels' FP8 KV cache against the plain twins: stores, and the needle in a long context.

Kernels are compiled on a GPU, interpreted elsewhere. Slots that no token owns hold NaN. test_attention.py has the table
of the attention kernels.
"""

import pytest
import torch

from nanovllm.kernels.attention import decode, prefill, reference
from nanovllm.kernels.linear import dispatch, norm_rope_store
from nanovllm.kernels.linear import reference as linear_reference
from nanovllm.kernels.linear.reference import Weight, quantize
from nanovllm.quantization.fp8.numbers import E4M3

from . import DEVICE, EPS, another, make_epilogue, randn
from .test_attention import FP8Cache, check, uneven_scales

pytestmark = pytest.mark.usefixtures("poisoned", "exact_fp8")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALL_E4M3 = torch.arange(256, dtype=torch.uint8).view(E4M3)


# ---------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group, window", [(1, 0), (3, 20)])
def test_twins_dequantize(group, window, dtype):
    new_and_context = [(5, 5), (33, 50), (1, 37), (0, 0)]
    new, contexts = zip(*new_and_context, strict=True)
    cache = FP8Cache(contexts, 2, 24, 16, dtype, device="cpu")
    cache.kv_scale = cache.kv_scale.cpu()
    options = {"window": window, "kv_scale": cache.kv_scale}
    args = cache.decode_args(cache.queries(len(contexts), 2 * group, 2))
    expected = cache.oracle(reference.paged_decode_attention, *args, window=window)
    check(cache, reference.paged_decode_attention(*args, **options), expected)
    cu_seqlens = torch.tensor([0, *new]).cumsum(0).int()
    args = (cache.queries(sum(new), 2 * group, 2), *args[1:3], cu_seqlens, *args[3:7], max(new))
    expected = cache.oracle(reference.paged_prefill_attention, *args, window=window)
    check(cache, reference.paged_prefill_attention(*args, **options), expected)


@pytest.mark.parametrize("context", [2_000, pytest.param(32_000, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("op", ["twin", "decode", "prefill"])
def test_needle_in_a_long_context(op, context):
    """One key matches among equal others. Its weight is half, theirs together the other half: each is 1 / 64,000 of
    it, so that an accumulator of 16 bits, or of FP8 tensor cores, would lose them.
    """
    D, block_size = 64, 256
    needle = context // 3
    others = torch.full((context,), 1.0)
    k = torch.zeros(-(-context // block_size) * block_size, 1, D)
    v = torch.full_like(k, torch.nan)
    k[needle, 0, 0], v[:context, 0] = 448.0, others[:, None]
    v[needle, 0, :] = -3.0
    k, v = (x.to(DEVICE).to(E4M3).view(-1, block_size, 1, D) for x in (k, v))
    kv_scale = torch.tensor([[0.5], [2.0]], device=DEVICE)
    q = torch.zeros(2, 2, D, device=DEVICE, dtype=torch.float16)
    q[:, :, 0] = 1.0
    scale = torch.tensor(context - 1.0).log().item() / (448 * 0.5)  # softmax weight of the needle: 1/2
    i32 = {"dtype": torch.int32, "device": DEVICE}
    table = torch.arange(len(k), **i32)[None]
    last = torch.tensor([0], **i32), torch.tensor([context], **i32), table
    if op == "prefill":
        out = prefill.paged_prefill_attention(
            q, k, v, torch.tensor([0, 2], **i32), *last, scale, 2, kv_scale=kv_scale
        )[1:]  # fmt: skip
    else:
        attend = (decode if op == "decode" else reference).paged_decode_attention
        out = attend(q[:1], k, v, *last, scale, context, kv_scale=kv_scale)
    torch.testing.assert_close(out.float(), torch.full_like(out.float(), 2.0 * (-3.0 + 1.0) / 2), rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
def test_every_stored_value_is_read_as_it_is():
    """All 254 finite bytes through the conversions of the decode kernel: keys of one channel, values alone."""
    values = ALL_E4M3[ALL_E4M3.float().isfinite()].to(DEVICE)
    n = len(values)
    k = torch.zeros(n, 16, 1, 128, dtype=E4M3, device=DEVICE)
    v = torch.zeros_like(k)
    v.view(torch.uint8)[:, 0, 0] = values.view(torch.uint8)[:, None].roll(1, 0).expand(n, 128)
    v.view(torch.uint8)[:, 0, 0, 1] = values.view(torch.uint8)
    i32 = {"dtype": torch.int32, "device": DEVICE}
    q = torch.zeros(n, 1, 128, dtype=torch.float16, device=DEVICE)
    args = (torch.arange(n, **i32), torch.ones(n, **i32), torch.arange(n, **i32)[:, None], 1.0, 1)
    out = decode.paged_decode_attention(q, k, v, *args, kv_scale=torch.ones(2, 1, device=DEVICE))
    assert torch.equal(out[:, 0].float(), v[:, 0, 0].float())


# ------------------------------------------------------------------------------------------------------- stores


def stored(num_tokens, num_heads, num_kv_heads, head_dim, dtype, with_norm=True):
    """q and the two caches of the kernel, then those of the twin; some values beyond 448 times the scale, one NaN."""
    qkv = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    qkv[0, -1], qkv[1, num_heads] = 1e4, -1e4  # saturated: v of the last head; k of the first, without norm
    qkv[3, -1, 3] = torch.nan
    scales = uneven_scales(num_kv_heads)
    epilogue = make_epilogue(num_tokens, num_heads, num_kv_heads, head_dim, dtype, with_norm, scales)
    results = []
    for op in (norm_rope_store.norm_rope_store, linear_reference.norm_rope_store):
        own = another(epilogue)
        q = op(qkv.clone().flatten(1), *own)
        results.append((q, *(cache.float().cpu() for cache in (own.k_cache, own.v_cache))))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("num_tokens, head_dim", [(6, 32), (70, 16)])
def test_norm_rope_store(num_tokens, head_dim, with_norm, dtype):
    (q, k, v), (twin_q, twin_k, twin_v) = stored(num_tokens, 5, 2, head_dim, dtype, with_norm)
    torch.testing.assert_close(q, twin_q, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(v, twin_v, rtol=0, atol=0, equal_nan=True)
    assert_same_but_for_ties(k, twin_k)
    assert (v == 448).any() and (with_norm or (k.abs() == 448).any())


def assert_same_but_for_ties(k, twin_k):
    """Rotation in another order of operations may round a few keys to the neighbour in e4m3."""
    assert torch.equal(k.isnan(), twin_k.isnan())
    differs = (k != twin_k) & ~k.isnan()
    assert differs.float().mean() < 0.01
    torch.testing.assert_close(k, twin_k, rtol=0.15, atol=2**-9, equal_nan=True)


def test_a_round_trip_keeps_four_significant_bits():
    x = torch.randn(64, 3, 32) * torch.tensor([0.01, 1.0, 100.0])[:, None]
    scale = x.abs().amax((0, 2)) * 8 / 448
    back = quantize(x, scale).float() * scale[:, None]
    torch.testing.assert_close(back, x, rtol=2**-4, atol=float(scale.max()) * 2**-10)
    assert ((back - x).abs() / x.abs()).median() < 0.03
    beyond = torch.tensor([[[1e9, -1e9, 449.0, 0.0, torch.nan]]])
    assert quantize(beyond, torch.ones(1)).float().nan_to_num(7.0).tolist() == [[[448.0, -448.0, 448.0, 0.0, 7.0]]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_norm, has_bias", [(True, False), (False, True)])
@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", [(16, 8, 128), (6, 4, 64), (14, 2, 64)])
@pytest.mark.parametrize("num_tokens", [1, 33, 144, 256, 2048, 2500])
def test_qkv_linear_at_size(num_tokens, num_heads, num_kv_heads, head_dim, has_norm, has_bias, dtype, monkeypatch):
    """GEMV, decode GEMM and prefill GEMM with the epilogue, and the kernel behind cuBLAS."""
    monkeypatch.setattr(dispatch, "MAX_IDLE_CHANNELS_QKV", 10**9)
    C, width = 1024, (num_heads + 2 * num_kv_heads) * head_dim
    x, weight = randn(num_tokens, C, dtype=dtype), randn(width, C, scale=1 / 32, dtype=dtype)
    weight[-head_dim:] *= 1000  # values of the last head saturate
    bias = randn(width, dtype=dtype) if has_bias else None
    scales = uneven_scales(num_kv_heads)
    epilogue = make_epilogue(num_tokens, num_heads, num_kv_heads, head_dim, dtype, has_norm, scales)
    results = []
    for op in (dispatch.qkv_linear, linear_reference.qkv_linear):
        own = another(epilogue)
        q = op(x, Weight(weight), bias, None, EPS, own)
        results.append((q.float(), own.k_cache.float(), own.v_cache.float()))
    (q, *kv), (twin_q, *twin_kv) = results
    # The twin rounds before the norm and the rotation, whose differences cancel: an error relative to the inputs.
    atol = 0.1 if dtype == torch.bfloat16 else 0.03
    torch.testing.assert_close(q, twin_q, rtol=3e-2, atol=atol)
    for ours, theirs, scale in zip(kv, twin_kv, scales, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        wide = (x * scale.view(-1, 1) for x in (ours, theirs))
        torch.testing.assert_close(*wide, rtol=0.15, atol=atol, equal_nan=True)  # a rounding of e4m3 apart
        assert ((ours != theirs) & ~ours.isnan()).float().mean() < 0.1
    assert (kv[1][..., -1, :].abs() == 448).any()

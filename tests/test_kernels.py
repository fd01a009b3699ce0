"""Every Triton kernel but attention and sampling against its plain twin, and the twins against other formulas.

Compiled where there is a GPU, under Triton's interpreter elsewhere. Whatever a kernel allocates is poisoned first, so
that an element it forgets to write cannot pass.
"""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from nanovllm.kernels import activation, inputs, linear, norm, prefill_attention, reference, rope_store  # noqa: E402
from nanovllm.kernels.norm import SplitKPartials  # noqa: E402

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """torch.empty hands out NaN (and an absurd integer) from here on."""
    torch.manual_seed(0)
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -123456)

    monkeypatch.setattr(torch, "empty", poisoned_empty)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_close(actual, expected, scale=1.0):
    tolerance = TOLERANCE[expected.dtype] * scale
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Twins against formulas written elsewhere.


def test_rms_norm_twin_agrees_with_hugging_face():
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    for dtype in DTYPES:
        layer = qwen3.Qwen3RMSNorm(96, eps=EPS).to(DEVICE, dtype)
        layer.weight.data.uniform_(0.5, 1.5)
        x = randn(7, 96, dtype=dtype)
        assert torch.equal(reference.rms_norm(x, layer.weight.data, EPS), layer(x).detach())


def test_rotary_twin_agrees_with_hugging_face():
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    num_tokens, num_heads, num_kv_heads, head_dim = 9, 4, 2, 32
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    q_weight, k_weight = torch.rand(2, head_dim, device=DEVICE)
    positions = torch.randint(0, 1000, (num_tokens,), device=DEVICE, dtype=torch.int32)
    cos_sin = make_cos_sin(1000, head_dim)
    no_slots = torch.full((num_tokens,), -1, dtype=torch.int32, device=DEVICE)
    q, k, v = reference.norm_rope_store(
        qkv, q_weight, k_weight, EPS, cos_sin, positions, no_slots, None, None, num_heads, num_kv_heads
    )

    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)
    heads = qkv.view(num_tokens, -1, head_dim).transpose(0, 1).unsqueeze(0)  # [1, heads, T, D]
    raw_q, raw_k, raw_v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected_q, expected_k = qwen3.apply_rotary_pos_emb(
        reference.rms_norm(raw_q, q_weight, EPS),
        reference.rms_norm(raw_k, k_weight, EPS),
        torch.cat((cos, cos), -1).unsqueeze(0),
        torch.cat((sin, sin), -1).unsqueeze(0),
    )
    assert_close(q, expected_q[0].transpose(0, 1))
    assert_close(k, expected_k[0].transpose(0, 1))
    assert torch.equal(v, raw_v[0].transpose(0, 1))


def test_silu_and_mul_twin_agrees_with_torch():
    x = randn(5, 34, dtype=torch.bfloat16)
    expected = torch.nn.functional.silu(x[:, :17]) * x[:, 17:]
    assert torch.equal(reference.silu_and_mul(x), expected)


# Triton against the twins.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens, num_channels", [(0, 64), (1, 64), (5, 100), (3, 1030)])
def test_rms_norm(num_tokens, num_channels, dtype):
    x = randn(num_tokens, num_channels + 6, dtype=dtype)[:, 3 : 3 + num_channels]
    before = x.clone()
    weight = torch.rand(num_channels, device=DEVICE).to(dtype)
    assert_close(norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_strided_heads(dtype):
    x = randn(7, 10, 16, dtype=dtype)[:, 2:5]  # [T, H, D], neither T nor H contiguous
    weight = torch.rand(16, device=DEVICE).to(dtype)
    assert_close(norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts, num_tokens, num_channels", [(1, 1, 64), (4, 5, 100), (2, 3, 1030)])
def test_rms_norm_makes_a_pending_sum(num_parts, num_tokens, num_channels, dtype):
    packed = randn(num_tokens, num_channels + 6, dtype=dtype)
    beside, stream = packed[:, num_channels:].clone(), packed[:, :num_channels]
    parts, weight = randn(num_parts, num_tokens, num_channels), torch.rand(num_channels, device=DEVICE).to(dtype)
    expected = reference.add_rms_norm(parts, stream, weight, EPS)
    pending = SplitKPartials(stream, parts)
    y = norm.rms_norm(pending, weight, EPS)
    assert pending.parts is None and pending.stream is stream
    assert_close(stream, expected[0])
    assert_close(y, expected[1])
    assert torch.equal(packed[:, num_channels:], beside)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens, size", [(0, 8), (1, 8), (3, 100), (2, 1500)])
def test_silu_and_mul(num_tokens, size, dtype):
    x = (randn(num_tokens, 2 * size + 5, dtype=dtype) * 4)[:, : 2 * size]
    assert_close(activation.silu_and_mul(x), reference.silu_and_mul(x))


def make_cos_sin(max_position, head_dim):
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=DEVICE).float() / head_dim)
    angles = torch.arange(max_position, device=DEVICE).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def check_norm_rope_store(num_tokens, num_heads, num_kv_heads, head_dim, dtype, with_norm=True, with_cache=True):
    num_blocks, block_size = num_tokens // 16 + 2, 16
    width = (num_heads + 2 * num_kv_heads) * head_dim
    packed = randn(num_tokens, width + 8, dtype=dtype)
    qkv, beside = packed[:, :width], packed[:, width:].clone()
    weights = [torch.rand(head_dim, device=DEVICE).to(dtype) if with_norm else None for _ in range(2)]
    positions = torch.randint(0, 500, (num_tokens,), device=DEVICE, dtype=torch.int32)
    slots = torch.randperm(num_blocks * block_size, device=DEVICE)[:num_tokens].int()
    slots[::3] = -1
    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim) if with_cache else (0,)
    caches = [torch.full(cache_shape, 7.0, device=DEVICE, dtype=dtype) for _ in range(4)]
    arguments = (*weights, EPS, make_cos_sin(500, head_dim), positions, slots)
    expected = reference.norm_rope_store(qkv, *arguments, *caches[:2], num_heads, num_kv_heads)
    actual = rope_store.norm_rope_store(qkv, *arguments, *caches[2:], num_heads, num_kv_heads)
    for a, e in zip((*actual, *caches[2:]), (*expected, *caches[:2]), strict=True):
        assert a.shape == e.shape
        assert_close(a, e, scale=2)
    assert torch.equal(packed[:, width:], beside)
    if num_tokens > 0:
        assert actual[0].data_ptr() == qkv.data_ptr()  # views of qkv, written in place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_norm_rope_store(num_tokens, dtype):
    check_norm_rope_store(num_tokens, 5, 2, 32, dtype)


def test_norm_rope_store_in_larger_programs():
    check_norm_rope_store(70, 3, 1, 16, torch.float32)


@pytest.mark.parametrize("with_norm, with_cache", [(False, True), (True, False)])
def test_norm_rope_store_without(with_norm, with_cache):
    check_norm_rope_store(5, 4, 2, 16, torch.float32, with_norm, with_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 4097])
def test_norm_rope_store_at_model_size(num_tokens):
    check_norm_rope_store(num_tokens, 16, 8, 128, torch.bfloat16)


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_store_kvcache(num_tokens):
    num_kv_heads, head_dim = 3, 24
    packed = randn(num_tokens, 2 * num_kv_heads, head_dim)
    k, v = packed[:, :num_kv_heads], packed[:, num_kv_heads:]
    slots = torch.randperm(32, device=DEVICE)[:num_tokens].int()
    slots[1::2] = -1
    caches = [torch.full((2, 16, num_kv_heads, head_dim), 7.0, device=DEVICE) for _ in range(4)]
    reference.store_kvcache(k, v, *caches[:2], slots)
    rope_store.store_kvcache(k, v, *caches[2:], slots)
    assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])
    for token in range(num_tokens):
        if slots[token] >= 0:
            assert torch.equal(caches[2].view(32, num_kv_heads, head_dim)[slots[token]], k[token])


@pytest.mark.parametrize("batch_size", [0, 1, 7, 130])
def test_decode_inputs(batch_size):
    num_rows, block_size = 140, 16
    table = torch.randint(1, 99, (num_rows, 12), device=DEVICE, dtype=torch.int32)
    last_token, length, blocks = table[:, 0], table[:, 1], table[:, 2:]
    length.remainder_(10 * block_size)
    length[:3] = torch.tensor([0, block_size, block_size + 1])
    rows = torch.randperm(num_rows, device=DEVICE)[:batch_size].int()
    rows[:3] = torch.arange(len(rows[:3]))
    actual = inputs.decode_inputs(rows, last_token, length, blocks, block_size)
    expected = reference.decode_inputs(rows, last_token, length, blocks, block_size)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.int32 and torch.equal(a, e)
    for i, row in enumerate(rows.tolist()):  # and both against the definition
        n = int(length[row])
        slot = int(blocks[row, (n - 1) // block_size]) * block_size + (n - 1) % block_size
        wanted = (int(last_token[row]), n - 1, slot, n) if n > 0 else (0, 0, -1, 0)
        assert tuple(int(column[i]) for column in expected) == wanted


# Matrix products.


def check_fused_linear(num_tokens, num_rows, num_channels, dtype, silu_mul=False, norm=False, bias=False,
                       residual=False, launch=linear.fused_linear, padding=16, **more):  # fmt: skip
    num_results = num_rows // 2 if silu_mul else num_rows
    x = randn(num_tokens, num_channels + padding, dtype=dtype)[:, :num_channels]
    weight = (randn(num_rows, num_channels) / num_channels**0.5).to(dtype)
    options = dict(
        bias=randn(num_rows, dtype=dtype) if bias else None,
        norm_weight=torch.rand(num_channels, device=DEVICE).to(dtype) if norm else None,
        eps=EPS,
        residual=randn(num_tokens, num_results, dtype=dtype) if residual else None,
        silu_mul=silu_mul,
        **more,
    )
    expected = reference.fused_linear(x, weight, **options)
    y = launch(x, weight, **options)
    if isinstance(y, SplitKPartials):
        ones = torch.ones(num_results, dtype=dtype, device=DEVICE)
        assert_close(reference.rms_norm(expected, ones, EPS), y.rms_norm(ones, EPS), scale=4)
        y = y.stream
    assert y.shape == (num_tokens, num_results)
    assert_close(y, expected, scale=4)
    return y


OPTIONS = [
    dict(),
    dict(norm=True, bias=True),
    dict(norm=True, silu_mul=True),
    dict(residual=True),
    dict(norm=True, bias=True, silu_mul=True, residual=True),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(0, 24, 96), (1, 24, 96), (3, 40, 1100), (17, 96, 200), (257, 10, 64)])
def test_fused_linear(shape, options):
    check_fused_linear(*shape, torch.float32, **options)


def test_fused_linear_in_16_bits():
    check_fused_linear(1, 24, 96, torch.bfloat16, norm=True, silu_mul=True)


def test_a_pending_sum_is_input_and_residual_of_what_follows():
    """As in a layer: the product that left the sum, one that reads its norm, one that adds to it."""
    stream, parts = randn(3, 64), randn(2, 3, 64)
    norm_weight, weight, back = torch.rand(64, device=DEVICE), randn(24, 64), randn(64, 24)
    summed = stream + parts.sum(0)
    expected_hidden = reference.fused_linear(summed, weight, norm_weight=norm_weight, eps=EPS)
    expected = reference.fused_linear(expected_hidden, back, residual=summed)
    pending = SplitKPartials(stream, parts)
    with pytest.raises(AssertionError):
        linear.fused_linear(randn(3, 24), back, residual=pending)  # not yet
    hidden = linear.fused_linear(pending, weight, norm_weight=norm_weight, eps=EPS)
    y = linear.fused_linear(hidden, back, residual=pending)
    assert_close(hidden, expected_hidden, scale=4)
    assert_close(y, expected, scale=40)


@pytest.mark.parametrize("options", OPTIONS)
def test_vector_product_in_several_steps(options):
    """More channels than a program takes in one step, and not a multiple of it."""

    def launch(x, weight, bias, norm_weight, eps, residual, silu_mul):
        tiling = linear.GemvConfig(16, 128, 4)
        return linear.gemv(tiling, x, weight, bias, norm_weight, eps, residual, silu_mul)

    check_fused_linear(1, 72, 300, torch.float32, launch=launch, **options)


def test_gluon_kernels_are_there_with_the_versions_that_they_were_tried_with():
    """A mistake in them would otherwise pass for a Triton without them, and be slow in silence."""
    import triton

    version = tuple(int(number) for number in triton.__version__.split(".")[:2])
    was_tried = (3, 6) <= version <= (3, 9)
    assert was_tried == (linear.decode_gemm_sm90 is not None) == (prefill_attention.hopper_prefill is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows, num_channels", [(192, 512), (1000, 1024), (64, 192)])
@pytest.mark.parametrize("num_tokens", [2, 16, 17, 33, 64, 100, 200])
def test_ring_product(num_tokens, num_rows, num_channels, dtype):
    """Every tile, more stages than steps and fewer, several splits; rows and tokens that fill no tile."""
    decode_gemm_sm90 = pytest.importorskip("nanovllm.kernels.decode_gemm_sm90", exc_type=ImportError)
    if not inputs.is_sm90(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    block_c = 128 if num_channels % 128 == 0 else 64
    splits = [1, 2, 4] if num_channels % (4 * block_c) == 0 else [1]
    for block_m, block_n, num_warps in ((16, 64, 4), (32, 128, 4), (64, 64, 4), (64, 128, 8), (128, 128, 8)):
        for split in splits:
            for stages in (2, 3):
                tiling = decode_gemm_sm90.DecodeGemmConfig(block_m, block_n, block_c, split, stages, num_warps)

                def launch(x, weight, bias, residual, silu_mul, tiling=tiling, **_):
                    num_results = len(weight) // 2 if silu_mul else len(weight)
                    if tiling.splits > 1:
                        parts = torch.empty(tiling.splits, len(x), num_results, device=DEVICE)
                        return decode_gemm_sm90.decode_gemm(tiling, x, weight, parts).sum(0).to(x.dtype)
                    y = torch.empty(len(x), num_results, dtype=x.dtype, device=DEVICE)
                    return decode_gemm_sm90.decode_gemm(tiling, x, weight, y, bias, residual, silu_mul)

                shape = (num_tokens, num_rows, num_channels, dtype)
                check_fused_linear(*shape, launch=launch)
                if split == 1:
                    check_fused_linear(*shape, launch=launch, bias=True, residual=True)
                    check_fused_linear(*shape, launch=launch, silu_mul=True)
                    check_fused_linear(*shape, launch=launch, silu_mul=True, bias=True, residual=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("num_tokens, num_rows, num_channels", [(1, 256, 64), (100, 512, 320), (5000, 1280, 1024)])
def test_hopper_product(num_tokens, num_rows, num_channels, silu_mul, dtype):
    """Fewer tiles than programs and several to each, fewer steps than stages and more, tokens that fill no tile."""
    prefill_gemm_sm90 = pytest.importorskip("nanovllm.kernels.prefill_gemm_sm90", exc_type=ImportError)
    if not inputs.is_sm90(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")

    def launch(x, weight, bias, norm_weight, eps, residual, silu_mul):
        y = torch.empty(num_tokens, num_rows // 2 if silu_mul else num_rows, dtype=dtype, device=DEVICE)
        return prefill_gemm_sm90.prefill_gemm(x, weight, y, silu_mul)

    check_fused_linear(num_tokens, num_rows, num_channels, dtype, silu_mul, launch=launch)


def check_project_heads(num_tokens, num_heads, num_kv_heads, head_dim, num_channels, dtype, with_qk_norm=True,
                        bias=False, pages_only=True):  # fmt: skip
    width = (num_heads + 2 * num_kv_heads) * head_dim
    x = randn(num_tokens, num_channels, dtype=dtype)
    norm_weight = torch.rand(num_channels, device=DEVICE).to(dtype)
    weight = (randn(width, num_channels) / num_channels**0.5).to(dtype)
    biases = randn(width, dtype=dtype) if bias else None
    qk_weights = [torch.rand(head_dim, device=DEVICE).to(dtype) if with_qk_norm else None for _ in range(2)]
    positions = torch.randint(0, 500, (num_tokens,), device=DEVICE, dtype=torch.int32)
    num_blocks = num_tokens // 16 + 2
    slots = torch.randperm(num_blocks * 16, device=DEVICE)[:num_tokens].int()
    slots[::3] = -1
    caches = torch.full((4, num_blocks, 16, num_kv_heads, head_dim), 7.0, device=DEVICE, dtype=dtype)
    cos_sin = make_cos_sin(500, head_dim)
    results = []
    for twin, k_cache, v_cache in ((reference, *caches[:2]), (linear, *caches[2:])):
        heads = reference.QKVEpilogue(
            *qk_weights, EPS, cos_sin, positions, slots, k_cache, v_cache, num_heads, num_kv_heads
        )
        results.append(twin.qkv_linear(x, weight, biases, norm_weight, EPS, heads, pages_only))
    (q, k, v), actual = results
    assert_close(actual[0], q, scale=4)
    assert_close(caches[2:], caches[:2], scale=4)
    if not pages_only or actual[1] is not None:
        assert_close(actual[1], k, scale=4)
        assert_close(actual[2], v, scale=4)
    return actual


@pytest.mark.parametrize("pages_only", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_project_heads(num_tokens, pages_only):
    check_project_heads(num_tokens, 3, 1, 16, 64, torch.float32, pages_only=pages_only)
    check_project_heads(num_tokens, 3, 1, 16, 64, torch.float32, False, True, pages_only)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(16, 8), (4, 1), (8, 3)])
@pytest.mark.parametrize("num_tokens", [2, 60, 129, 256, 300, 2048, 2500])
def test_project_heads_at_model_size(num_tokens, num_heads, num_kv_heads, dtype):
    for num_channels in (1024, 2560):
        shape = (num_tokens, num_heads, num_kv_heads, 128, num_channels, dtype)
        _, k, _ = check_project_heads(*shape)
        if num_tokens >= 2048 and linear.prefill_gemm_sm90 is not None and inputs.is_sm90(torch.device("cuda")):
            assert k is None
        check_project_heads(*shape, with_qk_norm=False)
        check_project_heads(*shape, bias=True)
        check_project_heads(*shape, pages_only=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_norm, has_bias", [(True, False), (False, True)])
@pytest.mark.parametrize("num_tokens", [33, 65, 128, 200])
def test_ring_qkv(num_tokens, has_norm, has_bias, dtype):
    """Steps that all have a stage and steps that share them; tokens that fill no tile, and some that go to no slot."""
    decode_gemm_sm90 = pytest.importorskip("nanovllm.kernels.decode_gemm_sm90", exc_type=ImportError)
    if not inputs.is_sm90(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    H, K, D, num_channels = 6, 3, 128, 512
    x = randn(num_tokens, num_channels, dtype=dtype)
    weight = (randn((H + 2 * K) * D, num_channels) / num_channels**0.5).to(dtype)
    bias = randn(len(weight), dtype=dtype) if has_bias else None
    q_weight, k_weight = (randn(2, D) / 4 + 1).to(dtype) if has_norm else (None, None)
    cos_sin = randn(512, D)
    positions = torch.randint(0, 512, (num_tokens,), device=DEVICE, dtype=torch.int32)
    slots = torch.randperm(512, device=DEVICE)[:num_tokens].int()
    slots[::7] = -1

    wide = [None if tensor is None else tensor.float() for tensor in (x, weight, bias, q_weight, k_weight)]
    expected_caches = torch.full((2, 2, 256, K, D), 7.0, device=DEVICE)
    qkv = torch.nn.functional.linear(*wide[:3])
    expected = reference.norm_rope_store(qkv, *wide[3:], EPS, cos_sin, positions, slots, *expected_caches, H, K)[0]
    for block_m, stages, num_warps in ((64, 4, 4), (64, 3, 4), (128, 2, 8)):
        tiling = decode_gemm_sm90.DecodeGemmConfig(block_m, 128, 128, 1, stages, num_warps)
        caches = torch.full((2, 2, 256, K, D), 7.0, device=DEVICE, dtype=dtype)
        assert decode_gemm_sm90.takes_heads(tiling, x, weight, caches[0])
        torch.cuda.synchronize()
        args = (q_weight, k_weight, EPS, cos_sin, positions, slots, *caches, H, K)
        q = decode_gemm_sm90.decode_qkv_gemm(tiling, x, weight, bias, *args)
        assert_close(q.view(num_tokens, H, D), expected.to(dtype), scale=4)
        assert_close(caches, expected_caches.to(dtype), scale=4)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 16, 31, 64, 100, 256])
@pytest.mark.parametrize(
    "num_rows, num_channels, options",
    [
        (4096, 1024, dict(norm=True)),
        (1024, 2048, dict(residual=True)),
        (1024, 2048, dict(residual=True, allow_split_k=True)),
        (6144, 1024, dict(norm=True, silu_mul=True)),
        (1024, 3072, dict(residual=True, allow_split_k=True)),
        (151936, 1024, dict(norm=True)),
        (4096, 1024, dict(residual=True, padding=1)),
        (4096, 12288, dict(residual=True)),
        (4096, 12288, dict(residual=True, allow_split_k=True)),
    ],
)
def test_fused_linear_at_model_size(num_tokens, num_rows, num_channels, options):
    """Also: the same result in every run."""
    results = []
    for _ in range(3):
        torch.manual_seed(1)
        results.append(check_fused_linear(num_tokens, num_rows, num_channels, torch.bfloat16, **options))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])

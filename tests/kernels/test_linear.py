"""The linear layers' matrix products against their twins, and the twins against other formulas.

Compiled where there is a GPU, under Triton's interpreter elsewhere. Whatever a kernel allocates is poisoned first, so
that an element it forgets to write cannot pass.
"""

import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
import triton

from nanovllm.kernels.launch import is_sm90
from nanovllm.kernels.linear import dispatch, gemv, reference
from nanovllm.kernels.linear.norm import SplitKPartials
from nanovllm.kernels.linear.reference import QKVEpilogue, Tokens, Weight

from . import DEVICE, EPS, another, make_cos_sin, make_epilogue, rand, randn, sm90_module
from .table import DTYPES, TOLERANCE, assert_close

ACTS = ["silu", "gelu_tanh"]
pytestmark = pytest.mark.usefixtures("poisoned")


def assert_as_accurate(actual, exact, twin):
    """`actual` is about as near to the fp32 result as the twin is, which rounds to its 16 bits after each step."""
    assert actual.dtype == twin.dtype
    error, allowed = (actual.float() - exact).abs(), (twin.float() - exact).abs()
    assert error.isfinite().all()
    largest = (TOLERANCE[twin.dtype] * (1 + exact.abs())).clamp(min=2 * allowed.max().item())
    assert (error <= largest).all(), f"{int((error > largest).sum())} of {error.numel()}, up to {error.max():.3f}"
    rms, twin_rms = error.square().mean().sqrt().item(), allowed.square().mean().sqrt().item()
    assert rms <= 1.5 * twin_rms + 1e-6, f"mean error {rms:.2g}, the twin's {twin_rms:.2g}"


def widened(*tensors):
    return [None if tensor is None else tensor.float() for tensor in tensors]


# Twins against formulas written elsewhere.


def test_rms_norm_twin_agrees_with_hugging_face():
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    for dtype in DTYPES:
        layer = qwen3.Qwen3RMSNorm(96, eps=EPS).to(DEVICE, dtype)
        layer.weight.data.uniform_(0.5, 1.5)
        x = randn(7, 96, dtype=dtype)
        assert torch.equal(reference.rms_norm(x, layer.weight.data, EPS), layer(x).detach())


def test_add_post_norm_twin_agrees_with_hugging_face():
    olmo2 = pytest.importorskip("transformers.models.olmo2.modeling_olmo2")
    layer = olmo2.Olmo2RMSNorm(40, EPS)
    layer.weight.data.normal_()
    x, residual = torch.randn(2, 3, 40)
    torch.testing.assert_close(reference.add_post_norm(x, layer.weight, EPS, residual), residual + layer(x))


def test_rotary_twin_agrees_with_hugging_face():
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    num_tokens, num_heads, num_kv_heads, head_dim = 9, 4, 2, 32
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    q_weight, k_weight = rand(2, head_dim)
    positions = torch.randint(0, 1000, (num_tokens,), device=DEVICE, dtype=torch.int32)
    cos_sin = make_cos_sin(1000, head_dim)
    slots = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE)
    k_cache, v_cache = torch.zeros(2, 1, 16, num_kv_heads, head_dim, device=DEVICE)
    q = reference.norm_rope_store(
        qkv, q_weight, k_weight, EPS, cos_sin, positions, slots, k_cache, v_cache, num_heads, num_kv_heads
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
    assert_close(k_cache[0, :num_tokens], expected_k[0].transpose(0, 1))
    assert torch.equal(v_cache[0, :num_tokens], raw_v[0].transpose(0, 1))


def test_act_and_mul_twin_agrees_with_torch():
    x = randn(5, 34, dtype=torch.bfloat16)
    gate, up = x.chunk(2, dim=-1)
    assert torch.equal(reference.act_and_mul(x), torch.nn.functional.silu(gate) * up)
    assert torch.equal(reference.act_and_mul(x, "gelu_tanh"), torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_store_kvcache_twin_agrees_with_a_loop(num_tokens):
    num_kv_heads, head_dim = 3, 24
    packed = randn(num_tokens, 2 * num_kv_heads, head_dim)
    k, v = packed[:, :num_kv_heads], packed[:, num_kv_heads:]
    slots = torch.randperm(32, device=DEVICE)[:num_tokens].int()
    slots[1::2] = -1
    caches = torch.full((2, 2, 16, num_kv_heads, head_dim), 7.0, device=DEVICE)
    expected = caches.clone().view(2, 32, num_kv_heads, head_dim)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot], expected[1, slot] = k[token], v[token]
    reference.store_kvcache(k, v, *caches, slots)
    assert torch.equal(caches.view_as(expected), expected)


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("data_dtype", [torch.float32, torch.float8_e4m3fn])
def test_the_twins_honour_the_scale_of_a_weight(data_dtype, num_groups):
    x, data = randn(3, 32), randn(24, 32).to(data_dtype)
    scale = rand(24, num_groups)
    scaled = Weight(data.float() * scale.repeat_interleave(32 // num_groups, dim=1))
    expected = x @ scaled.data.t()
    assert_close(reference.fused_linear(x, Weight(data, scale)), expected)
    one = torch.ones(24, device=DEVICE)
    assert_close(reference.fused_linear(x, Weight(data, scale), bias=one, residual=expected), 2 * expected + one)
    y = reference.fused_linear(x.bfloat16(), Weight(data, scale))
    assert y.dtype == torch.bfloat16
    assert_close(y, expected.bfloat16(), scale=4)
    positions = torch.arange(3, device=DEVICE)
    epilogue = QKVEpilogue(None, None, EPS, make_cos_sin(4, 8), positions, positions, None, None, 1, 1)
    norm_weight = rand(32)
    q = reference.qkv_linear(x, Weight(data, scale), None, norm_weight, EPS, epilogue)
    assert_close(q, reference.qkv_linear(x, scaled, None, norm_weight, EPS, epilogue))


# Matrix products.


def check_fused_linear(num_tokens, num_features, num_channels, dtype, act_mul=None, norm=False, bias=False,
                       residual=False, run=dispatch.fused_linear, padding=16, **more):  # fmt: skip
    num_outputs = num_features // 2 if act_mul else num_features
    x = randn(num_tokens, num_channels + padding, dtype=dtype)[:, :num_channels]
    weight = Weight((randn(num_features, num_channels) / num_channels**0.5).to(dtype))
    options = dict(
        bias=randn(num_features, dtype=dtype) if bias else None,
        norm_weight=rand(num_channels, dtype=dtype) if norm else None,
        eps=EPS,
        residual=randn(num_tokens, num_outputs, dtype=dtype) if residual else None,
        act_mul=act_mul,
        **more,
    )
    expected = reference.fused_linear(x, weight, **options)
    if dtype != torch.float32:
        tensors = ("bias", "norm_weight", "residual")
        wide = options | dict(zip(tensors, widened(*(options[name] for name in tensors)), strict=True))
        exact = reference.fused_linear(x.float(), Weight(weight.data.float()), **wide)
    y = run(x, weight, **options)
    if isinstance(y, SplitKPartials):
        assert y.residual is options["residual"]
        ones = torch.ones(num_outputs, dtype=dtype, device=DEVICE)
        assert_close(reference.rms_norm(expected, ones, EPS), dispatch.rms_norm(y, ones, EPS), scale=4)
        y = y.residual
    assert y.shape == (num_tokens, num_outputs)
    if dtype == torch.float32:
        assert_close(y, expected, scale=4)
    elif num_tokens > 0:
        assert_as_accurate(y, exact, expected)
    return y


OPTIONS = [
    dict(),
    dict(norm=True, bias=True),
    dict(norm=True, act_mul="silu"),
    dict(act_mul="gelu_tanh"),
    dict(residual=True),
    dict(norm=True, bias=True, act_mul="silu", residual=True),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(0, 24, 96), (1, 24, 96), (3, 40, 1100), (17, 96, 200), (257, 10, 64)])
def test_fused_linear(shape, options):
    check_fused_linear(*shape, torch.float32, **options)


def test_fused_linear_in_16_bits():
    check_fused_linear(1, 24, 96, torch.bfloat16, norm=True, act_mul="silu")


def test_split_k_partials_are_input_and_residual_of_later_layers():
    """As in a decoder layer: split-K partials, a layer that reads their norm, and one that adds to the residual."""
    residual, partials = randn(3, 64), randn(2, 3, 64)
    norm_weight, up, down = rand(64), Weight(randn(24, 64)), Weight(randn(64, 24))
    total = residual + partials.sum(0)
    expected_hidden = reference.fused_linear(total, up, norm_weight=norm_weight, eps=EPS)
    expected = reference.fused_linear(expected_hidden, down, residual=total)
    x = SplitKPartials(residual, partials)
    hidden = dispatch.fused_linear(x, up, norm_weight=norm_weight, eps=EPS)
    assert_close(hidden, expected_hidden, scale=4)
    assert_close(dispatch.fused_linear(hidden, down, residual=x), expected, scale=40)


@pytest.mark.parametrize("options", OPTIONS)
def test_gemv_in_several_steps(options, monkeypatch):
    """More channels than a program takes in one step, and not a multiple of it."""
    monkeypatch.setattr(gemv, "gemv_config", lambda *_: gemv.GemvConfig(16, 128, 4))
    check_fused_linear(1, 72, 300, torch.float32, **options)


def test_gluon_kernels_are_imported_with_supported_versions_of_triton():
    """An ImportError of their own would otherwise look like an unsupported Triton: a silent slowdown."""
    version = tuple(int(number) for number in triton.__version__.split(".")[:2])
    was_tried = (3, 6) <= version <= (3, 9)
    assert was_tried == (dispatch.decode_gemm_sm90 is not None) == (dispatch.prefill_gemm_sm90 is not None)
    if was_tried:
        importlib.import_module("nanovllm.kernels.attention.prefill_sm90")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_features, num_channels", [(192, 512), (1000, 1024), (64, 192)])
@pytest.mark.parametrize("num_tokens", [2, 16, 17, 33, 64, 100, 200])
def test_decode_gemm(num_tokens, num_features, num_channels, dtype):
    """Every tile, more stages than steps and fewer, several splits; features and tokens that fill no tile."""
    decode_gemm_sm90 = sm90_module("decode_gemm_sm90")
    block_c = 128 if num_channels % 128 == 0 else 64
    splits = [1, 2, 4] if num_channels % (4 * block_c) == 0 else [1]
    shape = (num_tokens, num_features, num_channels, dtype)
    for block_m, block_n, num_warps in ((16, 64, 4), (32, 128, 4), (64, 64, 4), (64, 128, 8), (128, 128, 8)):
        for split_k in splits:
            for stages in (2, 3):
                config = decode_gemm_sm90.DecodeGemmConfig(block_m, block_n, block_c, split_k, stages, num_warps)

                def run(x, weight, bias, residual, act_mul, config=config, **_):
                    return decode_gemm_sm90.decode_gemm(config, Tokens(x, dtype), weight, bias, residual, act_mul)

                check_fused_linear(*shape, run=run, residual=True)
                if split_k == 1:
                    check_fused_linear(*shape, run=run)
                    check_fused_linear(*shape, run=run, bias=True, residual=True)
                    for act in ACTS:
                        check_fused_linear(*shape, run=run, act_mul=act)
                    check_fused_linear(*shape, run=run, act_mul="gelu_tanh", bias=True, residual=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens, num_features, num_channels", [(1, 256, 64), (100, 512, 320), (5000, 1280, 1024)])
def test_prefill_gemm(num_tokens, num_features, num_channels, dtype):
    """Fewer tiles than programs and several to each, fewer steps than stages and more, tokens that fill no tile."""
    prefill_gemm_sm90 = sm90_module("prefill_gemm_sm90")

    def run(x, weight, act_mul, bias, **_):
        return prefill_gemm_sm90.prefill_gemm(Tokens(x, dtype), weight, act_mul, bias)

    for act, bias in itertools.product(ACTS, (False, True)):
        check_fused_linear(num_tokens, num_features, num_channels, dtype, act_mul=act, bias=bias, run=run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_linear(dtype):
    """On a CPU the two are one; the other form of GELU differs by up to 5e-4."""
    x, weight, bias = randn(70, 40, dtype=dtype), randn(24, 40, dtype=dtype) / 4, randn(24, dtype=dtype)
    run = dispatch.gelu_linear if DEVICE == "cuda" else reference.gelu_linear
    expected = F.gelu(x.double() @ weight.double().T + bias.double(), approximate="tanh")
    assert_close(run(x, weight, bias), expected.to(dtype), scale=4)


def check_qkv_linear(num_tokens, num_heads, num_kv_heads, head_dim, num_channels, dtype, with_qk_norm=True,
                     bias=False, with_cache=True, with_norm=True):  # fmt: skip
    width = (num_heads + 2 * num_kv_heads) * head_dim
    x = randn(num_tokens, num_channels, dtype=dtype)
    norm_weight = rand(num_channels, dtype=dtype) if with_norm else None
    weight = (randn(width, num_channels) / num_channels**0.5).to(dtype)
    bias = randn(width, dtype=dtype) if bias else None
    epilogue = make_epilogue(num_tokens, num_heads, num_kv_heads, head_dim, dtype, with_qk_norm)
    if not with_cache:
        epilogue = epilogue._replace(k_cache=None, v_cache=None)

    def run(qkv_linear, dtype, x, weight, bias, norm_weight):
        own = another(epilogue, dtype)
        q = qkv_linear(x, Weight(weight), bias, norm_weight, EPS, own)
        return [q, own.k_cache, own.v_cache] if with_cache else [q]

    tensors = (x, weight, bias, norm_weight)
    expected, actual = run(reference.qkv_linear, dtype, *tensors), run(dispatch.qkv_linear, dtype, *tensors)
    assert actual[0].shape == (num_tokens, num_heads, head_dim)
    if dtype == torch.float32:
        for pair in zip(actual, expected, strict=True):
            assert_close(*pair, scale=4)
    else:
        exact = run(reference.qkv_linear, torch.float32, *widened(*tensors))
        for each in zip(actual, exact, expected, strict=True):
            assert_as_accurate(*each)


@pytest.mark.parametrize("with_cache", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_qkv_linear(num_tokens, with_cache):
    check_qkv_linear(num_tokens, 3, 1, 16, 64, torch.float32, with_cache=with_cache)
    check_qkv_linear(num_tokens, 3, 1, 16, 64, torch.float32, with_qk_norm=False, bias=True, with_cache=with_cache)
    check_qkv_linear(num_tokens, 3, 1, 16, 64, torch.float32, with_cache=with_cache, with_norm=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", [(16, 8, 128), (5, 1, 128), (32, 8, 64), (14, 2, 64)])
@pytest.mark.parametrize("num_tokens", [2, 60, 129, 256, 300, 2048, 2500])
def test_qkv_linear_at_model_size(num_tokens, num_heads, num_kv_heads, head_dim, dtype, monkeypatch):
    unfused = []
    store = dispatch.norm_rope_store
    monkeypatch.setattr(dispatch, "norm_rope_store", lambda *args: unfused.append(args) or store(*args))
    monkeypatch.setattr(dispatch, "MAX_IDLE_CHANNELS_QKV", num_tokens * 10**6)
    for num_channels in (1024, 2560):
        shape = (num_tokens, num_heads, num_kv_heads, head_dim, num_channels, dtype)
        check_qkv_linear(*shape)
        check_qkv_linear(*shape, with_qk_norm=False)
        check_qkv_linear(*shape, bias=True)
        if num_tokens >= 2048 and dispatch.prefill_gemm_sm90 is not None and is_sm90(torch.device("cuda")):
            assert not unfused
        check_qkv_linear(*shape, with_cache=False)
        assert unfused
        unfused.clear()


def empty_operands(num_tokens, num_features, num_channels):
    x, data = (torch.empty(size, num_channels, device="meta") for size in (num_tokens, num_features))
    return Tokens(x, x.dtype), Weight(data)


def test_qkv_epilogue_of_many_tokens_where_the_last_tiles_leave_few_sms_idle(monkeypatch):
    prefill_gemm_sm90 = pytest.importorskip("nanovllm.kernels.linear.prefill_gemm_sm90", exc_type=ImportError)
    monkeypatch.setattr(prefill_gemm_sm90, "num_sms", lambda device: 132)
    for num_tokens, num_features, num_channels, expected in (
        (2048, 4096, 1024, 31),  # 256 tiles in two waves
        (2048, 4608, 3584, 977),  # 288 tiles in three
        (16384, 4608, 3584, 109),
    ):
        x, weight = empty_operands(num_tokens, num_features, num_channels)
        assert round(prefill_gemm_sm90.idle_channels(x, weight)) == expected


def test_gate_and_up_of_few_tokens_where_each_sm_has_one_tile(monkeypatch):
    prefill_gemm_sm90 = pytest.importorskip("nanovllm.kernels.linear.prefill_gemm_sm90", exc_type=ImportError)
    monkeypatch.setattr(prefill_gemm_sm90, "num_sms", lambda device: 132)
    for num_tokens, num_features, expected in (
        (256, 16384, True),  # 128 tiles
        (129, 16384, True),
        (128, 16384, False),  # half as many
        (257, 16384, False),
        (256, 24576, False),  # 192
        (256, 12288, False),  # 96
    ):
        x, weight = empty_operands(num_tokens, num_features, 64)
        assert prefill_gemm_sm90.fills_one_wave(x, weight) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 16, 31, 64, 100, 256])
@pytest.mark.parametrize(
    "num_features, num_channels, options",
    [
        (4096, 1024, dict(norm=True)),
        (1024, 2048, dict(residual=True)),
        (1024, 2048, dict(residual=True, allow_split_k=True)),
        (6144, 1024, dict(norm=True, act_mul="silu")),
        (6144, 1024, dict(norm=True, act_mul="gelu_tanh")),
        (1024, 3072, dict(residual=True, allow_split_k=True)),
        (151936, 1024, dict(norm=True)),
        (4096, 1024, dict(residual=True, padding=1)),
        (4096, 12288, dict(residual=True)),
        (4096, 12288, dict(residual=True, allow_split_k=True)),
        (16384, 2048, dict(norm=True, act_mul="silu")),
        (2048, 8192, dict(residual=True, allow_split_k=True)),
    ],
)
def test_fused_linear_at_model_size(num_tokens, num_features, num_channels, options):
    """Also: the same result in every run."""
    results = []
    for _ in range(3):
        torch.manual_seed(1)
        results.append(check_fused_linear(num_tokens, num_features, num_channels, torch.bfloat16, **options))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])

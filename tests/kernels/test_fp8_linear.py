"""Linear layers with an e4m3 weight against their twins; the poison and the interpreter as in test_linear.py.

The twin multiplies x in its own type. Where the kernels quantize x (W8A8), the expected result is computed in fp32 from
the same quantized x, so that the tolerance need not cover the rounding to e4m3 and a wrong scale shows.
"""

import pytest
import torch

from nanovllm.kernels.launch import is_sm90
from nanovllm.kernels.linear import dispatch, gemv, norm, reference
from nanovllm.kernels.linear.norm import SplitKPartials
from nanovllm.kernels.linear.reference import Tokens, Weight
from nanovllm.quantization.fp8.numbers import E4M3

from . import DEVICE, EPS, another, make_epilogue, rand, randn, sm90_module

OPTIONS = [
    dict(),
    dict(norm=True, bias=True),
    dict(norm=True, act_mul="silu"),
    dict(residual=True),
    dict(norm=True, bias=True, act_mul="gelu_tanh", residual=True),
]
pytestmark = pytest.mark.usefixtures("poisoned")


def make_weight(num_features, num_channels, num_groups, block_n=1):
    """Scales that differ by a factor of up to 4 between features, or blocks of them, and groups."""
    scale = (rand(-(-num_features // block_n), num_groups) * 1.5 + 0.5) / num_channels**0.5
    scale = scale.repeat_interleave(block_n, dim=0)[:num_features].contiguous()
    return Weight(randn(num_features, num_channels).to(E4M3), scale, block_n)


def make_options(num_tokens, num_features, num_channels, dtype, norm=False, bias=False, act_mul=None, residual=False):
    return dict(
        bias=randn(num_features, dtype=dtype) if bias else None,
        norm_weight=rand(num_channels, dtype=dtype) if norm else None,
        eps=EPS,
        residual=randn(num_tokens, num_features // 2 if act_mul else num_features, dtype=dtype) if residual else None,
        act_mul=act_mul,
    )


def widened(values):
    return {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def assert_near(actual, expected, tolerance):
    """Every element within `tolerance` of the largest; a wrong scale of a row or a group is off by far more."""
    error = (actual.float() - expected.float()).abs().max().item()
    assert error <= tolerance * expected.float().abs().max().item(), error


def values(quantized):
    return quantized.data.float() * quantized.scale[:, None]


def assert_quantized(actual, expected):
    """Scales equal but for the last bits; values equal, or neighbours in e4m3 where the norm's rounding differs."""
    torch.testing.assert_close(actual.scale, expected.scale, rtol=2e-2, atol=0)
    a, e = values(actual), values(expected)
    # Triton's interpreter loses the carry of a mantissa that is rounded up to the next power of two: half the value.
    halved = (2 * a - e).abs() <= 0.15 * e.abs() if DEVICE == "cpu" else False
    near = (a - e).abs() <= 0.15 * e.abs() + 2**-9 * expected.scale[:, None]
    assert (near | halved).all()
    assert (actual.data.float() == expected.data.float()).float().mean() > 0.85


def test_the_twin_of_quantization_rounds_to_the_nearest_e4m3():
    x = torch.tensor([[896.0, -2.0, 100.0, 0.0], [0.0, 0.0, 0.0, 0.0]], device=DEVICE)
    data, _, scale = reference.quantize_tokens(x)
    assert data.float().tolist() == [[448.0, -1.0, 48.0, 0.0], [0.0] * 4]  # 50 lies half way: to even
    assert scale[0] == 2 and scale[1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens, num_channels", [(0, 64), (1, 64), (5, 100), (3, 1030)])
def test_tokens_that_e4m3_represents_are_quantized_exactly(num_tokens, num_channels, dtype):
    data = (randn(num_tokens, num_channels) * 30).to(E4M3).float()
    data[:, -1] = 448
    scale = torch.exp2(torch.arange(num_tokens, device=DEVICE) - 2.0)
    x = torch.full((num_tokens, num_channels + 6), 1e4, device=DEVICE, dtype=dtype)
    x[:, 3 : 3 + num_channels] = (data * scale[:, None]).to(dtype)
    actual = norm.quantize_tokens(x[:, 3 : 3 + num_channels])
    assert actual.data.dtype == E4M3 and torch.equal(actual.data.float(), data) and torch.equal(actual.scale, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens, num_channels", [(1, 64), (5, 100), (3, 1030)])
def test_rms_norm_quantizes(num_tokens, num_channels, dtype):
    x, weight = randn(num_tokens, num_channels, dtype=dtype), rand(num_channels, dtype=dtype)
    assert_quantized(
        norm.rms_norm(x, weight, EPS, quantized=True), reference.quantize_tokens(reference.rms_norm(x, weight, EPS))
    )
    partials = randn(2, num_tokens, num_channels)
    total = (x.float() + partials.sum(0)).to(dtype)
    expected = reference.quantize_tokens(reference.rms_norm(total, weight, EPS))
    before = x.clone()
    assert_quantized(norm.rms_norm(SplitKPartials(x, partials), weight, EPS, quantized=True), expected)
    torch.testing.assert_close(x, total)
    product = partials[:1].to(dtype)  # a library's
    total = (before.float() + product[0].float()).to(dtype)
    expected = reference.quantize_tokens(reference.rms_norm(total, weight, EPS))
    assert_quantized(norm.rms_norm(SplitKPartials(before, product), weight, EPS, quantized=True), expected)
    torch.testing.assert_close(before, total)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_features, num_channels, num_groups", [(24, 96, 1), (38, 1100, 1), (70, 384, 3)])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_fused_linear(num_tokens, num_features, num_channels, num_groups, options):
    """One token: the GEMV. More: without Hopper the weight is dequantized."""
    options = make_options(num_tokens, num_features, num_channels, torch.float32, **options)
    x, weight = randn(num_tokens, num_channels), make_weight(num_features, num_channels, num_groups)
    expected = reference.fused_linear(x, weight, **options)
    assert_near(dispatch.fused_linear(x, weight, **options), expected, 1e-5)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_gemv_in_several_steps(num_groups, monkeypatch):
    """A step shares its first group with the step before; features and channels fill no tile."""
    monkeypatch.setattr(gemv, "gemv_config", lambda *_: gemv.GemvConfig(16, 64, 4))
    options = make_options(1, 72, 288, torch.float32, norm=True, bias=True, act_mul="silu", residual=True)
    x, weight = randn(1, 288), make_weight(72, 288, num_groups)
    assert_near(dispatch.fused_linear(x, weight, **options), reference.fused_linear(x, weight, **options), 1e-5)


def twin_of_qkv(x, weight, bias, norm_weight, epilogue):
    wide = another(epilogue, torch.float32)
    bias, norm_weight = (None if tensor is None else tensor.float() for tensor in (bias, norm_weight))
    return reference.qkv_linear(x.float(), weight, bias, norm_weight, EPS, wide), wide.k_cache, wide.v_cache


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_qkv_linear(num_tokens, num_groups):
    x, weight, norm_weight = randn(num_tokens, 64), make_weight(80, 64, num_groups), rand(64)
    epilogue = make_epilogue(num_tokens, 3, 1, 16, torch.float32)
    expected = twin_of_qkv(x, weight, None, norm_weight, epilogue)
    q = dispatch.qkv_linear(x, weight, None, norm_weight, EPS, epilogue)
    for actual, exact in zip((q, epilogue.k_cache, epilogue.v_cache), expected, strict=True):
        assert_near(actual, exact, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, E4M3])
def test_the_prefill_gemm_takes_numbers_of_16_and_8_bits(dtype, monkeypatch):
    prefill_gemm_sm90 = pytest.importorskip("nanovllm.kernels.linear.prefill_gemm_sm90", exc_type=ImportError)
    monkeypatch.setattr(prefill_gemm_sm90, "is_sm90", lambda device: True)
    x, data = (torch.zeros(size, 256, device=DEVICE, dtype=dtype) for size in (2048, 512))
    assert prefill_gemm_sm90.supports(Tokens(x, dtype), Weight(data)) == (dtype != torch.float32)


# Gluon, on Hopper.


def check_decode_gemm(config, num_tokens, num_features, num_channels, num_groups, dtype, **options):
    """16-bit results of fp32 sums: 2 to the -8, and with e4m3 products some 14 bits of each sum of a stage."""
    decode_gemm_sm90 = sm90_module("decode_gemm_sm90")
    options = make_options(num_tokens, num_features, num_channels, dtype, **options)
    del options["norm_weight"], options["eps"]
    x = randn(num_tokens, num_channels, dtype=dtype) * torch.exp2(torch.arange(num_tokens, device=DEVICE) % 5)[:, None]
    x = x.to(dtype)
    weight = make_weight(num_features, num_channels, num_groups)
    quantized = reference.quantize_tokens(x)
    expected = reference.fused_linear(values(quantized), weight, **widened(options))
    y = decode_gemm_sm90.decode_gemm(config, quantized, weight, **options)
    if isinstance(y, SplitKPartials):
        dispatch.rms_norm(y, torch.ones(num_features, dtype=dtype, device=DEVICE), EPS)
        y = y.residual
    assert y.dtype == dtype and y.shape == expected.shape
    error = (y.float() - expected).abs()
    # row by row: the tokens' sizes differ
    allowed = 8e-3 * expected.abs() + (2e-3 if dtype == torch.bfloat16 else 1e-3) * expected.abs().amax(1, keepdim=True)
    assert (error <= allowed).all(), f"{(error / allowed).max():.2f} times what is allowed"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_features, num_channels", [(192, 512), (1000, 1024)])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 33, 64, 100, 200])
def test_decode_gemm(num_tokens, num_features, num_channels, dtype):
    """Every tile, more stages than steps and fewer, several splits; features and tokens that fill no tile."""
    decode_gemm_sm90 = sm90_module("decode_gemm_sm90")
    tiles = [(16, 64, 128, 4), (32, 128, 128, 8), (64, 64, 128, 4), (64, 128, 128, 8)]
    tiles += [(16, 64, 256, 4), (128, 128, 128, 8), (64, 128, 128, 4)]
    for block_m, block_n, block_c, num_warps in tiles:
        for num_groups in (1,) if block_c == 256 else (1, num_channels // 128):
            for split_k, stages in ((1, 2), (1, 4), (2, 2), (2, 3)):
                config = decode_gemm_sm90.DecodeGemmConfig(block_m, block_n, block_c, split_k, stages, num_warps)
                shape = (config, num_tokens, num_features, num_channels, num_groups, dtype)
                check_decode_gemm(*shape, residual=True)
                if split_k == 1:
                    check_decode_gemm(*shape)
                    check_decode_gemm(*shape, bias=True, residual=True, act_mul="silu")


def check_quantized_linear(num_tokens, weight, dtype, **options):
    """dispatch.fused_linear, where x may have been quantized after its norm."""
    num_features, num_channels = weight.data.shape
    options = make_options(num_tokens, num_features, num_channels, dtype, **options)
    x = randn(num_tokens, num_channels, dtype=dtype)
    exact = reference.fused_linear(x.float(), weight, **widened(options))
    rounded = x if options["norm_weight"] is None else reference.rms_norm(x, options["norm_weight"], EPS)
    rounded = values(reference.quantize_tokens(rounded))
    expected = reference.fused_linear(rounded, weight, **widened(options | dict(norm_weight=None)))
    y = dispatch.fused_linear(x, weight, **options, allow_split_k=True)
    if isinstance(y, SplitKPartials):
        dispatch.rms_norm(y, torch.ones(num_features, dtype=dtype, device=DEVICE), EPS)
        y = y.residual

    def distance(other):
        return ((y.float() - other).square().mean() / other.square().mean()).sqrt().item()

    # Either type of product; a norm rounded elsewhere changes some of x by one step of e4m3, hence a norm of errors.
    assert y.dtype == dtype and min(distance(exact), distance(expected)) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 16, 17, 31, 64, 65, 100, 129, 200, 256, 257, 300, 1024, 1500])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_fused_linear_at_model_size(num_tokens, is_grouped):
    for num_features, num_channels, options in (
        (6144, 4096, dict(norm=True)),
        (4096, 4096, dict(residual=True)),
        (24576, 4096, dict(norm=True, act_mul="silu")),
        (4096, 12288, dict(residual=True)),
        (6144, 1024, dict(norm=True, act_mul="gelu_tanh")),
        (1024, 3072, dict(residual=True, bias=True)),
        (1000, 2560, dict(norm=True, bias=True)),
    ):
        num_groups = num_channels // 128 if is_grouped else 1
        for block_n in (1, 128) if is_grouped else (1,):
            weight = make_weight(num_features, num_channels, num_groups, block_n)
            check_quantized_linear(num_tokens, weight, torch.bfloat16, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "num_tokens, num_features, num_channels",
    [(1, 256, 128), (100, 512, 640), (430, 9216, 256), (5000, 1280, 1024)],
)
def test_prefill_gemm(num_tokens, num_features, num_channels, dtype):
    """Fewer tiles than programs and several to each, fewer steps than stages and more, tokens that fill no tile.

    Half tiles alone, half tiles behind whole ones, and none.
    """
    prefill_gemm_sm90 = sm90_module("prefill_gemm_sm90")
    for num_groups, block_n in ((1, 1), (num_channels // 128, 128)):
        weight = make_weight(num_features, num_channels, num_groups, block_n)
        for more in (
            dict(),
            dict(bias=True),
            dict(residual=True),
            dict(bias=True, residual=True),
            dict(act_mul="silu"),
        ):
            options = make_options(num_tokens, num_features, num_channels, dtype, **more)
            quantized = reference.quantize_tokens(randn(num_tokens, num_channels, dtype=dtype))
            expected = reference.fused_linear(values(quantized), weight, **widened(options))
            del options["norm_weight"], options["eps"]
            y = prefill_gemm_sm90.prefill_gemm(quantized, weight, **options)
            assert y.dtype == dtype and (options["residual"] is None or y is options["residual"])
            assert_near(y, expected, 8e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("act_mul", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_tokens", [1, 70, 190, 450])
def test_half_tiles_change_no_bit(num_tokens, act_mul, monkeypatch):
    prefill_gemm_sm90 = sm90_module("prefill_gemm_sm90")
    weight = make_weight(28672, 512, 1)
    quantized = reference.quantize_tokens(randn(num_tokens, 512, dtype=torch.bfloat16))
    results = []
    for whole in (lambda tiles, programs: tiles, lambda tiles, programs: tiles // programs * programs):
        monkeypatch.setattr(prefill_gemm_sm90, "num_whole_tiles", whole)
        results.append(prefill_gemm_sm90.prefill_gemm(quantized, weight, act_mul))
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_groups, block_n", [(1, 1), (5, 128)])
@pytest.mark.parametrize("num_tokens", [70, 1000])
def test_prefill_gemm_of_a_scale_for_128_channels(num_tokens, num_groups, block_n, dtype):
    """Gate and up leave Tokens, down reads them. Tokens and groups of channels differ by orders of magnitude."""
    prefill_gemm_sm90 = sm90_module("prefill_gemm_sm90")
    gate_up, down = make_weight(1280, 640, num_groups, block_n), make_weight(256, 640, num_groups, block_n)
    gate_up.scale.mul_(torch.logspace(-1, 1, 10, device=DEVICE).repeat_interleave(128)[:, None])
    x = randn(num_tokens, 640) * torch.logspace(-2, 1, num_tokens, device=DEVICE)[:, None]
    x[3] = 0
    x = reference.quantize_tokens(x.to(dtype))
    expected = reference.fused_linear(values(x), gate_up, act_mul="silu")
    y = prefill_gemm_sm90.prefill_gemm(x, gate_up, "silu", quantized=True)
    assert (y.data.dtype, y.dtype, y.scale.shape) == (E4M3, dtype, (5, num_tokens))
    groups = expected.unflatten(1, (5, 128))
    largest = groups.abs().amax(2).clamp_(min=1e-12)
    torch.testing.assert_close(y.scale.t(), largest / 448, rtol=1e-2, atol=0)
    widened_y = y.data.float().unflatten(1, (5, 128)) * y.scale.t()[:, :, None]
    assert ((widened_y - groups).abs() <= 0.07 * groups.abs() + 2e-3 * largest[:, :, None]).all()
    residual, bias = randn(num_tokens, 256, dtype=dtype), randn(256, dtype=dtype)
    expected = reference.fused_linear(widened_y.flatten(1), down, bias.float(), residual=residual.float())
    actual = prefill_gemm_sm90.prefill_gemm(y, down, bias=bias, residual=residual)
    error = (actual.float() - expected).abs()
    assert (error <= 8e-3 * expected.abs().amax(1, keepdim=True)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_groups, block_n", [(1, 1), (8, 128)])
@pytest.mark.parametrize("num_tokens", [200, 300, 640, 2000])
def test_gate_and_up_then_down(num_tokens, num_groups, block_n):
    """Whichever kernels these are, and wherever their input is quantized."""
    gate_up, down = make_weight(4096, 1024, num_groups, block_n), make_weight(4096, 2048, 2 * num_groups, block_n)
    down = down._replace(scale=down.scale[:, : 1 if num_groups == 1 else None].contiguous())
    x, norm_weight = randn(num_tokens, 1024, dtype=torch.bfloat16), rand(1024, dtype=torch.bfloat16)
    residual, ones = randn(num_tokens, 4096, dtype=torch.bfloat16), rand(4096, dtype=torch.bfloat16)
    hidden = reference.fused_linear(x.float(), gate_up, None, norm_weight.float(), EPS, act_mul="silu")
    expected = reference.fused_linear(hidden, down)
    y = dispatch.fused_linear(x, gate_up, None, norm_weight, EPS, act_mul="silu", reader=down)
    y = dispatch.fused_linear(y, down, residual=residual.clone(), allow_split_k=True)
    if isinstance(y, SplitKPartials):
        dispatch.rms_norm(y, ones, EPS)
        y = y.residual
    error = (y.float() - residual.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.06, error  # of e4m3, twice


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, size", [*((torch.bfloat16, size) for size in (1e-30, 1e-3, 1.0, 1e5, 1e30)), (torch.float16, 1.0)]
)
@pytest.mark.parametrize("num_features, num_channels, num_groups", [(100, 48, 3), (6144, 4096, 1), (1000, 2560, 20)])
def test_gemv_of_one_token(num_features, num_channels, num_groups, dtype, size):
    """Products in fp16 of a token of any size, with outliers and zeros; features and channels that fill no tile."""
    weight = make_weight(num_features, num_channels, num_groups)
    x = randn(1, num_channels) * size
    x[:, 3] *= 1000 if dtype == torch.bfloat16 else 10
    x[:, 16:32] = 0
    x = x.to(dtype)
    assert gemv.multiplies_in_fp16(x, weight, None) or not dispatch.has_e4m3(x.device)
    # A norm's eps would hide tiny tokens, and the squares of huge ones are infinite.
    others = (dict(norm=True, act_mul="silu"), dict(bias=True, residual=True)) if 1e-5 < size < 1e10 else ()
    for more in (dict(), *others):
        options = make_options(1, num_features, num_channels, dtype, **more)
        expected = reference.fused_linear(x.float(), weight, **widened(options))
        y = gemv.gemv(
            x, weight, options["bias"], options["norm_weight"], EPS, options["residual"], options["act_mul"]
        )
        assert_near(y, expected, 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("num_heads, num_kv_heads, head_size", [(16, 8, 128), (32, 8, 64), (5, 1, 128)])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 60, 100, 129, 256, 300, 2048])
def test_qkv_linear_at_model_size(num_tokens, num_heads, num_kv_heads, head_size, is_grouped):
    num_channels = 1024
    width = (num_heads + 2 * num_kv_heads) * head_size
    weight = make_weight(width, num_channels, *((num_channels // 128, 128) if is_grouped else (1, 1)))
    x, norm_weight = randn(num_tokens, num_channels, dtype=torch.bfloat16), rand(num_channels, dtype=torch.bfloat16)
    for has_norm, bias in ((True, None), (False, randn(width, dtype=torch.bfloat16))):
        epilogue = make_epilogue(num_tokens, num_heads, num_kv_heads, head_size, torch.bfloat16, has_norm)
        exact = twin_of_qkv(x, weight, bias, norm_weight, epilogue)
        rounded = values(reference.quantize_tokens(reference.rms_norm(x, norm_weight, EPS)))
        quantized = twin_of_qkv(rounded, weight, bias, None, epilogue)
        assert dispatch.supports_w8a8(x, weight, epilogue) or num_tokens == 1 or not is_sm90(x.device)
        q = dispatch.qkv_linear(x, weight, bias, norm_weight, EPS, epilogue)
        for actual, *twins in zip((q, epilogue.k_cache, epilogue.v_cache), exact, quantized, strict=True):
            errors = [((actual.float() - twin).square().mean() / twin.square().mean()).sqrt().item() for twin in twins]
            assert min(errors) < 1e-2, errors

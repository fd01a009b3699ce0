"""Linear layers of NVFP4 against their reference; the poison and the interpreter as in test_linear.py.

The assembly is run by the twin of test_int4_linear.py.
"""

import pytest
import torch

from nanovllm.kernels.linear import dispatch, int4, reference, unpack_nvfp4
from nanovllm.kernels.linear.reference import Weight
from nanovllm.quantization.nvfp4 import numbers

from . import DEVICE, EPS, another, make_epilogue, rand, randn
from .test_fp8_linear import OPTIONS, assert_near, make_options, widened
from .test_int4_linear import as_words, run_ptx

pytestmark = pytest.mark.usefixtures("poisoned")


def make_weight(N, C, experts=()):
    """All codes; scales of all e4m3 >= 0 up to 448, most of them near the largest; factors that differ."""
    codes = torch.randint(0, 16, (*experts, N, C), device=DEVICE, dtype=torch.uint8)
    scales = (448 * rand(*experts, N, C // 16) ** 4).to(torch.float8_e4m3fn).float()
    scales.flatten()[::7] = 2.0**-9
    scales.flatten()[::11] = 0
    codes = torch.where(scales.repeat_interleave(16, -1) > 0, codes, 0)
    factor = (rand(*experts, N, 1) + 0.5) / C**0.5 / 400
    return Weight(numbers.words_of(codes, numbers.tile_of(C)), numbers.stored(scales), factor=factor)


SHAPES = [(24, 192), (332, 64), (38, 1088), (70, 384), (26, 176)]


def test_numbers_by_the_definition_of_the_format():
    """Every code with every e4m3, in each place of a tile."""
    scales = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float().repeat(16)
    scales = scales[: 15 * 128].view(15, 128)
    assert torch.equal(numbers.scales_of(numbers.stored(scales)), scales)
    codes = torch.randint(0, 16, (15, 2048), dtype=torch.uint8)
    factor = torch.rand(15, 1)
    sign, exponent, mantissa = 1 - 2 * (codes >> 3).int(), (codes >> 1 & 3).int(), (codes & 1).int()
    values = sign * torch.where(exponent == 0, mantissa * 0.5, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    want = values * (scales * factor).repeat_interleave(16, 1)
    got = numbers.dequantized(numbers.words_of(codes, 128), numbers.stored(scales), factor, torch.float32)
    assert torch.equal(got, want)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("N, C", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 64, 65])
def test_fused_linear(num_tokens, N, C, options):
    weight = make_weight(N, C)
    x, more = randn(num_tokens, C), make_options(num_tokens, N, C, torch.float32, **options)
    expected = reference.fused_linear(x, weight, **more)
    assert_near(dispatch.fused_linear(x, weight, **more), expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_in_16_bits(num_tokens, dtype):
    """The error is that of rounding x and the result, for products of code and scale are exact."""
    if DEVICE == "cpu" and dtype == torch.bfloat16 and 1 < num_tokens <= 64:
        pytest.skip("Triton's interpreter multiplies no bf16 matrices")
    weight, x = make_weight(40, 256), randn(num_tokens, 256, dtype=dtype)
    more = make_options(num_tokens, 40, 256, dtype, norm=num_tokens > 1, residual=True)
    expected = reference.fused_linear(x.float(), weight, **widened(more))
    assert_near(dispatch.fused_linear(x, weight, **more), expected, 0.01 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("N, C", SHAPES)
def test_dequantized(N, C, dtype):
    cuts = DEVICE == "cpu" and dtype == torch.bfloat16  # the interpreter rounds to bf16 towards 0
    for each in (make_weight(N, C), make_weight(N, C, experts=(3,))):
        got, want = int4.dequantized(each, dtype).data, each.dequantize(dtype)
        # the twin rounds the product of scale and factor to fp32 first
        rtol = 2**-7 if cuts else {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
        torch.testing.assert_close(got, want, rtol=rtol, atol=2**-24)


@pytest.mark.parametrize("num_tokens, num_features, C", [(1, 66, 4160), (1, 136, 4224), (6, 66, 4224), (6, 66, 4160)])
def test_a_gemv_in_several_steps_and_split_channels(num_tokens, num_features, C, monkeypatch):
    """136 features are more blocks than run at once on one SM."""
    monkeypatch.setattr(int4, "num_sms", lambda device: 1)
    weight, x = make_weight(num_features, C), randn(num_tokens, C)
    assert_near(dispatch.fused_linear(x, weight), reference.fused_linear(x, weight), 1e-5)


def test_channels_that_no_tile_divides_are_dequantized():
    assert not int4.multiplies(1, make_weight(8, 176)) and int4.multiplies(64, make_weight(8, 192))


@pytest.mark.parametrize("num_tokens", [1, 4, 66])
def test_qkv_linear(num_tokens):
    epilogue = make_epilogue(num_tokens, 4, 2, 16, torch.float32)
    weight, x, norm = make_weight(8 * 16, 192), randn(num_tokens, 192), rand(192)
    expected_epilogue, bias = another(epilogue), randn(8 * 16)
    expected = reference.qkv_linear(x, weight, bias, norm, EPS, expected_epilogue)
    assert_near(dispatch.qkv_linear(x, weight, bias, norm, EPS, epilogue), expected, 1e-5)
    for cache in ("k_cache", "v_cache"):
        assert_near(getattr(epilogue, cache), getattr(expected_epilogue, cache), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N, C", [(6144, 4096), (4096, 12288), (2560, 9728), (51200, 5120), (5120, 8192)])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 33, 64, 65, 1000])
def test_fused_linear_at_model_size(num_tokens, N, C, dtype):
    """Products of the GEMV are in fp16, whatever the token's size."""
    weight = make_weight(N, C)
    for magnitude in (1.0, 2.0**-12, 2.0**12 if dtype == torch.bfloat16 else 16.0):
        x = randn(num_tokens, C, dtype=dtype, scale=magnitude)
        got = dispatch.fused_linear(x, weight).float()
        expected = reference.fused_linear(x.float(), weight)
        error = ((got - expected).square().mean() / expected.square().mean()).sqrt()
        assert error < (0.004 if dtype == torch.bfloat16 else 0.001)


# ---------------------------------------------------------------- assembly, instruction by instruction


def in_words(codes):
    return numbers.words_of(codes.to(torch.uint8), 1).long()[..., 0] & 0xFFFFFFFF


def random_scales(*shape):
    return (448 * torch.rand(shape)).to(torch.float8_e4m3fn).float()


def values_of(codes):
    return numbers.magnitudes("cpu")[codes].double()


def test_assembly_of_the_dot_product():
    n = 64
    codes, scales = torch.randint(0, 16, (n, 4, 8)), random_scales(n, 4, 2)
    x = (torch.randn(n, 4, 8) * 8000).clamp(-32767, 32767).half()
    words = in_words(codes)
    operands = {i + 1: words[:, i] for i in range(4)}
    operands |= {4 * j + i + 5: as_words(x[:, j, [i, i + 4]].contiguous()) for j in range(4) for i in range(4)}
    stored = numbers.stored(scales).long().view(n, 2, 4)
    operands |= {21 + i: (stored[:, i] << torch.arange(0, 32, 8)).sum(-1) for i in range(2)}
    got = run_ptx(unpack_nvfp4.dot_asm(), operands)["$0"] * 2**14
    spread = scales.double()[:, :, [0, 0, 1, 1, 0, 0, 1, 1]]
    products = x.double() * values_of(codes) * spread
    assert ((got - products.sum((1, 2))).abs() / products.abs().sum((1, 2))).max() < 2**-9


@pytest.mark.parametrize("dtype, text", [
    (torch.bfloat16, unpack_nvfp4.UNPACK_BF16), (torch.float16, unpack_nvfp4.UNPACK_FP16),
])  # fmt: skip
def test_assembly_of_the_unpacking(dtype, text):
    """Exact for every code and scale."""
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:124].view(31, 2, 2)
    codes = torch.arange(16).repeat(31).view(31, 2, 8)
    stored = (numbers.stored(scales).long().view(31, 4) << torch.arange(0, 32, 8)).sum(-1)
    words = in_words(codes)
    made = run_ptx(text.value, {8: words[:, 0], 9: words[:, 1], 10: stored})
    for word in range(2):
        for i in range(4):
            pair = made[f"${2 * i + word}"]
            bits = torch.stack((pair & 0xFFFF, pair >> 16), -1)
            got = torch.where(bits > 0x7FFF, bits - 0x10000, bits).short().view(dtype)
            want = values_of(codes[:, word, [i, i + 4]]) * scales[:, word, i // 2, None]
            assert torch.equal(got.double() * 256, want)

"""Linear layers of 4-bit integers against their reference; the poison and the interpreter as in test_linear.py.

The interpreter runs no PTX, so the assembly of the dot product and of the unpacking is run by a twin of it here.
"""

import re

import pytest
import torch

from nanovllm.kernels.linear import dispatch, int4, reference, unpack_int4
from nanovllm.kernels.linear.norm import SplitKPartials, rms_norm
from nanovllm.kernels.linear.reference import Weight
from nanovllm.quantization.int4 import numbers

from . import DEVICE, EPS, another, make_epilogue, rand, randn
from .test_fp8_linear import OPTIONS, assert_near, make_options, widened

pytestmark = pytest.mark.usefixtures("poisoned")


def make_weight(N, C, size, symmetric=False, dtype=torch.float32, ordered=False):
    """Scales of both signs that differ by a factor of up to 4; zeros of the whole range."""
    scale = (rand(N, C // size) * 1.5 + 0.5) / C**0.5 / 4
    scale[1::2] *= -1
    zero = None if symmetric else torch.randint(0, 17, scale.shape, device=DEVICE, dtype=torch.int8)
    words = numbers.words_of(torch.randint(0, 16, (N, C), device=DEVICE, dtype=torch.uint8), numbers.tile_of(size))
    order = torch.randperm(C, device=DEVICE).int() if ordered else None
    return Weight(words, scale.to(dtype), zero=zero, order=order)


def widened_weight(weight):
    return weight._replace(scale=weight.scale.float())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("N, C, size, symmetric, ordered", [
    (24, 96, 32, False, False), (332, 64, 32, False, False), (38, 1088, 64, True, False), (70, 384, 128, False, True),
    (26, 160, 160, True, True),
])  # fmt: skip
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 64, 65])
def test_fused_linear(num_tokens, N, C, size, symmetric, ordered, options):
    weight = make_weight(N, C, size, symmetric, ordered=ordered)
    x, more = randn(num_tokens, C), make_options(num_tokens, N, C, torch.float32, **options)
    expected = reference.fused_linear(x, weight, **more)
    assert_near(dispatch.fused_linear(x, weight, **more), expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_in_16_bits(num_tokens, dtype):
    """Sums of a group are scaled in fp32: the error is that of rounding x and the result."""
    if DEVICE == "cpu" and dtype == torch.bfloat16 and 1 < num_tokens <= 64:
        pytest.skip("Triton's interpreter multiplies no bf16 matrices")
    weight, x = make_weight(40, 256, 64, dtype=dtype), randn(num_tokens, 256, dtype=dtype)
    more = make_options(num_tokens, 40, 256, dtype, norm=num_tokens > 1, residual=True)
    expected = reference.fused_linear(x.float(), widened_weight(weight), **widened(more))
    assert_near(dispatch.fused_linear(x, weight, **more), expected, 0.01 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_small_groups_are_dequantized(num_tokens, size):
    weight, x = make_weight(20, 96, size), randn(num_tokens, 96)
    assert not int4.multiplies(num_tokens, weight)
    assert_near(dispatch.fused_linear(x, weight), reference.fused_linear(x, weight), 1e-5)


@pytest.mark.parametrize("N, C, size", [(5, 96, 32), (3, 1032, 8), (7, 520, 520)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantized(N, C, size, dtype):
    weight = make_weight(N, C, size, dtype=dtype)
    experts = Weight(*(torch.stack((t, t.flip(0))) for t in weight[:2]), zero=torch.stack((weight.zero,) * 2))
    cuts = DEVICE == "cpu" and dtype == torch.bfloat16  # the interpreter rounds to bf16 towards 0
    for each in (weight, experts):
        got, want = int4.dequantized(each, dtype).data, each.dequantize(dtype)
        torch.testing.assert_close(got, want, rtol=2**-7 if cuts else 0, atol=0)


@pytest.mark.parametrize("num_tokens, num_features", [(1, 66), (1, 136), (6, 66)])
def test_a_gemv_in_several_steps_and_split_channels(num_tokens, num_features, monkeypatch):
    """136 features are more blocks than run at once on one SM."""
    monkeypatch.setattr(int4, "num_sms", lambda device: 1)
    weight, x = make_weight(num_features, 4160, 32), randn(num_tokens, 4160)
    assert_near(dispatch.fused_linear(x, weight), reference.fused_linear(x, weight), 1e-5)
    if num_tokens > 1:
        residual = randn(num_tokens, 66)
        partial = dispatch.fused_linear(x, weight, residual=residual.clone(), allow_split_k=True)
        assert isinstance(partial, SplitKPartials) and len(partial.partials) > 1
        norm, expected = rand(66), reference.fused_linear(x, weight, residual=residual)
        assert_near(rms_norm(partial, norm, EPS), reference.rms_norm(expected, norm, EPS), 1e-5)


@pytest.mark.parametrize("num_tokens", [1, 4, 66])
def test_qkv_linear(num_tokens):
    epilogue = make_epilogue(num_tokens, 4, 2, 16, torch.float32)
    weight, x, norm = make_weight(8 * 16, 96, 32, ordered=num_tokens == 4), randn(num_tokens, 96), rand(96)
    expected_epilogue, bias = another(epilogue), randn(8 * 16)
    expected = reference.qkv_linear(x, weight, bias, norm, EPS, expected_epilogue)
    assert_near(dispatch.qkv_linear(x, weight, bias, norm, EPS, epilogue), expected, 1e-5)
    for cache in ("k_cache", "v_cache"):
        assert_near(getattr(epilogue, cache), getattr(expected_epilogue, cache), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N, C, size, symmetric", [
    (6144, 4096, 128, True), (4096, 12288, 64, False), (2560, 9728, 32, True), (51200, 5120, 128, True),
    (5120, 8192, 128, True),
])  # fmt: skip
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 33, 64, 65, 1000])
def test_fused_linear_at_model_size(num_tokens, N, C, size, symmetric, dtype):
    """Products of the GEMV are in fp16, whatever the token's size."""
    weight = make_weight(N, C, size, symmetric, dtype)
    for magnitude in (1.0, 2.0**-12, 2.0**12 if dtype == torch.bfloat16 else 16.0):
        x = randn(num_tokens, C, dtype=dtype, scale=magnitude)
        got = dispatch.fused_linear(x, weight).float()
        expected = reference.fused_linear(x.float(), widened_weight(weight))
        error = ((got - expected).square().mean() / expected.square().mean()).sqrt()
        assert error < (0.004 if dtype == torch.bfloat16 else 0.001)


# ---------------------------------------------------------------- assembly, instruction by instruction


def run_ptx(text, operands):
    """A twin of the few instructions on tensors: words are int64 in [0, 2**32), halves fp16 pairs of them."""

    def halves(word):
        both = torch.stack((word & 0xFFFF, word >> 16), -1)
        return torch.where(both > 0x7FFF, both - 0x10000, both).short()

    def word(values):
        bits = values.view(torch.int16).long() & 0xFFFF
        return bits[..., 0] | bits[..., 1] << 16

    registers = {f"${i}": value for i, value in operands.items()}

    def read(name):
        if name.startswith("0f"):  # the bits of an fp32
            return torch.tensor(int(name[2:], 16), dtype=torch.int32).view(torch.float32)
        return torch.tensor(int(name, 16)) if name.startswith("0x") else registers[name]

    for line in filter(None, (part.strip() for part in text.strip("{}").split(";"))):
        op, _, rest = line.partition(" ")
        to, *sources = re.findall(r"\{[^}]*\}|[$\w]+", rest)
        if op == ".reg":
            continue
        if op == "mov.b32" and sources[0].startswith("{"):
            registers[to] = word(torch.stack([registers[name] for name in re.findall(r"\w+", sources[0])], -1))
            continue
        if op == "mov.b32" and to.startswith("{"):
            for name, half in zip(re.findall(r"\w+", to), halves(read(sources[0])).unbind(-1), strict=True):
                registers[name] = half.view(torch.float16)
            continue
        kind = op.split(".")
        values = [read(name) if not name.isdigit() else torch.tensor(int(name)) for name in sources]
        if kind[0] in ("shl", "shr", "and", "or", "mov"):
            a, b = (*values, torch.tensor(0))[:2]
            made = {"shl": a << b & 0xFFFFFFFF, "shr": a >> b, "and": a & b, "or": a | b, "mov": a}
            registers[to] = made[kind[0]]
        elif kind[0] == "prmt":
            a, b, choice = values
            chosen = [a >> 8 * i if i < 4 else b >> 8 * (i - 4) for i in (int(choice) >> 4 * j & 7 for j in range(4))]
            registers[to] = sum((byte & 255) << 8 * j for j, byte in enumerate(chosen))
        elif op == "mad.lo.u32":
            registers[to] = (values[0] * values[1] + values[2]) & 0xFFFFFFFF
        elif kind[0] == "lop3":
            a, b, c, table = values
            assert table == (0xF0 & 0xCC) | 0xAA
            registers[to] = a & b | c
        elif kind[-1] in ("f16x2", "bf16x2"):
            dtype = torch.float16 if kind[-1] == "f16x2" else torch.bfloat16
            wide = [halves(value).view(dtype).double() for value in values]
            made = {"sub": lambda a, b: a - b, "add": lambda a, b: a + b, "mul": lambda a, b: a * b,
                    "fma": lambda a, b, c: a * b + c}[kind[0]](*wide)  # fmt: skip
            registers[to] = word(made.to(dtype))
        elif kind[0] == "cvt":
            registers[to] = values[0].float()
        else:
            registers[to] = values[0] * values[1] if kind[0] == "mul" else values[0] + values[1]
    return registers


def as_words(values):
    """int64 [n] of pairs [n, 2] in 16 bits."""
    bits = values.view(torch.int16).long() & 0xFFFF
    return bits[:, 0] | bits[:, 1] << 16


def test_assembly_of_the_dot_product():
    n = 64
    codes = torch.randint(0, 16, (n, 4, 8))
    words = (codes << torch.arange(0, 32, 4)).sum(-1)
    x = (torch.randn(n, 4, 8) * 8000).clamp(-32767, 32767).half()
    operands = {i + 1: words[:, i] for i in range(4)}
    operands |= {4 * j + i + 5: as_words(x[:, j, [i, i + 4]].contiguous()) for j in range(4) for i in range(4)}
    got = run_ptx(unpack_int4.dot_asm(), operands)["$0"] * 2**24
    products = x.double() * codes
    assert ((got - products.sum((1, 2))).abs() / products.abs().sum((1, 2))).max() < 2**-10


@pytest.mark.parametrize("dtype, text, offset, negative", [
    (torch.bfloat16, unpack_int4.UNPACK_BF16, 128, 0xC300), (torch.float16, unpack_int4.UNPACK_FP16, 1024, 0xE400),
])  # fmt: skip
def test_assembly_of_the_unpacking(dtype, text, offset, negative):
    codes = torch.arange(16).repeat(9)[:136].view(17, 8)
    words = (codes << torch.arange(0, 32, 4)).sum(-1)
    zero = torch.arange(17)
    made = run_ptx(text.value, {4: words, 5: (negative + zero) * 65537 % 2**32})
    for i in range(4):
        bits = torch.stack((made[f"${i}"] & 0xFFFF, made[f"${i}"] >> 16), -1)
        got = torch.where(bits > 0x7FFF, bits - 0x10000, bits).short().view(dtype)
        assert torch.equal(got.long(), codes[:, [i, i + 4]] - zero[:, None]), offset

"""Which kernels a linear layer or a mixture of experts launches: by precision, device and number of tokens, on the meta
device.
"""

import sys

import pytest
import torch

from nanovllm.kernels.linear import dispatch
from nanovllm.kernels.linear.norm import SplitKPartials
from nanovllm.kernels.linear.reference import QKVEpilogue, Tokens, Weight
from nanovllm.kernels.moe import dispatch as moe
from nanovllm.kernels.moe.reference import Routing
from nanovllm.quantization.fp8.numbers import E4M3
from nanovllm.runner.start import WARMUP_SIZES

pytestmark = pytest.mark.skipif(dispatch.decode_gemm_sm90 is None, reason="no Gluon kernels with this Triton")


class Launched(list):
    """The names of kernels launched, and of torch's products, on a made-up device."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.monkeypatch = monkeypatch
        self.set("launch", self.launch)
        for module, name in ((torch.nn.functional, "linear"), (torch, "addmm")):
            monkeypatch.setattr(module, name, self.recorded(name, getattr(module, name)))
        product = self.recorded("scaled_mm", self.scaled_mm)
        monkeypatch.setattr(torch, "_scaled_mm", product)
        self.device(is_sm90=True, has_e4m3=True, num_sms=132, has_inline_asm=True)

    def scaled_mm(self, x, weight, scale_a, **_):
        assert len(x) % 128 == 0 and len(scale_a) == len(x)  # with others cuBLAS takes tiles a third slower
        return empty(len(x), weight.shape[1])

    def launch(self, kernel, grid, x, *args, **options):
        name = kernel.fn.__name__.removesuffix("_kernel")
        in_fp16 = name == "gemv" and x.dtype == torch.int32  # pairs
        self.append(name + ("_in_fp16" if in_fp16 else ""))

    def recorded(self, name, function):
        return lambda *args, **options: self.append(name) or function(*args, **options)

    def set(self, name, value):
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(("nanovllm.kernels.linear.", "nanovllm.kernels.moe.")) and hasattr(module, name):
                self.monkeypatch.setattr(module, name, value)

    def device(self, **answers):
        for name, answer in answers.items():
            self.set(name, lambda device, answer=answer: answer)

    def by(self, run):
        self.clear()
        run()
        return " ".join(self)


@pytest.fixture
def launched(monkeypatch):
    return Launched(monkeypatch)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def make_weight(num_features, num_channels, precision):
    if precision == "16 bits":
        return Weight(empty(num_features, num_channels))
    num_groups = 1 if precision == "e4m3" else num_channels // 128
    block_n = {"e4m3": 1, "e4m3 blocks": 128, "e4m3 cut blocks": 64}[precision]
    scale = empty(num_features, num_groups, dtype=torch.float32)
    return Weight(empty(num_features, num_channels, dtype=E4M3), scale, block_n)


DECODE, PREFILL = "rms_norm decode_gemm", "rms_norm prefill_gemm"
GATE_UP = {  # of 6144 features and 1024 channels
    "16 bits": {1: "gemv", 2: DECODE, 256: DECODE, 300: "rms_norm linear act_and_mul", 1024: PREFILL},
    "e4m3": {1: "gemv_in_fp16", 2: DECODE, 256: DECODE, 300: PREFILL},
    "e4m3 blocks": {1: "gemv_in_fp16", 2: DECODE, 256: DECODE, 300: PREFILL},
    "e4m3 cut blocks": {1: "gemv_in_fp16", 256: DECODE, 300: "dequantize rms_norm linear act_and_mul"},
}
RESIDUAL = {  # of 4096 features and 12288 channels; where x is multiplied in e4m3, the norm's kernel quantizes it
    "16 bits": {1: "gemv", 64: "decode_gemm", 65: "addmm", 4096: "addmm"},
    "e4m3": {1: "gemv_in_fp16", 64: DECODE, 256: DECODE, 300: "rms_norm scaled_mm", 640: PREFILL},
    "e4m3 blocks": {1: "gemv_in_fp16", 64: DECODE, 256: DECODE, 300: PREFILL},
    "e4m3 cut blocks": {1: "gemv_in_fp16", 256: DECODE, 300: "dequantize addmm"},
}
QKV = {  # 16 and 8 heads of 128
    "16 bits": {1: "gemv norm_rope_store", 256: DECODE + " norm_rope_store", 2048: PREFILL},
    "e4m3": {1: "gemv_in_fp16 norm_rope_store", 256: DECODE + " norm_rope_store", 300: PREFILL},
    "e4m3 blocks": {1: "gemv_in_fp16 norm_rope_store", 256: DECODE + " norm_rope_store", 300: PREFILL},
    "e4m3 cut blocks": {32: DECODE + " norm_rope_store", 300: "dequantize rms_norm linear norm_rope_store"},
}


def gate_up(num_tokens, precision, dtype=torch.bfloat16, norm_dtype=None):
    x, norm_weight = empty(num_tokens, 1024, dtype=dtype), empty(1024, dtype=norm_dtype or dtype)
    dispatch.fused_linear(x, make_weight(6144, 1024, precision), None, norm_weight, 1e-6, act_mul="silu")


def residual(num_tokens, precision, num_features=4096, dtype=torch.bfloat16):
    x, weight = empty(num_tokens, 12288, dtype=dtype), make_weight(num_features, 12288, precision)
    dispatch.fused_linear(x, weight, residual=empty(num_tokens, num_features, dtype=dtype))


def qkv(num_tokens, precision, with_cache=True):
    int32s = empty(num_tokens, dtype=torch.int32)
    cache = 2 * (empty(2, 256, 8, 128) if with_cache else None,)
    cos_sin = empty(512, 128, dtype=torch.float32)
    epilogue = QKVEpilogue(*empty(2, 128), 1e-6, cos_sin, int32s, int32s, *cache, 16, 8)
    dispatch.qkv_linear(empty(num_tokens, 1024), make_weight(4096, 1024, precision), None, empty(1024), 1e-6, epilogue)


@pytest.mark.parametrize("run, table", [(gate_up, GATE_UP), (residual, RESIDUAL), (qkv, QKV)])
def test_kernels_on_hopper(run, table, launched):
    for precision, by_tokens in table.items():
        for num_tokens, want in by_tokens.items():
            assert launched.by(lambda n=num_tokens, p=precision: run(n, p)) == want, (precision, num_tokens)


@pytest.mark.parametrize(
    "num_tokens, gate_up, down, num_features, is_quantized",
    [
        (640, "e4m3", "e4m3", 4096, True),
        (300, "e4m3 blocks", "e4m3 blocks", 4096, True),
        (300, "e4m3", "e4m3", 4096, False),  # down is the library's
        (640, "e4m3", "16 bits", 4096, False),
        (640, "e4m3", "e4m3 cut blocks", 4096, False),
        (2048, "16 bits", "e4m3", 4096, False),
        (200, "e4m3", "e4m3 blocks", 4096, False),  # the decode GEMM's
        (2048, "e4m3", "e4m3 blocks", 4096 + 128, False),  # no whole tiles
    ],
)
def test_gate_and_up_are_quantized_for_down(num_tokens, gate_up, down, num_features, is_quantized, launched):
    """Else a kernel of its own quantizes them, or nothing does."""
    down = make_weight(num_features, 12288, down)
    norm_weight, gate_up = empty(1024), make_weight(24576, 1024, gate_up)
    x = dispatch.fused_linear(empty(num_tokens, 1024), gate_up, None, norm_weight, act_mul="silu", reader=down)
    assert isinstance(x, Tokens) == is_quantized and launched[-1] in ("prefill_gemm", "act_and_mul")
    if is_quantized:
        assert x.data.dtype == E4M3 and x.scale.shape == (96, num_tokens)
        assert launched.by(lambda: dispatch.fused_linear(x, down, residual=empty(num_tokens, 4096))) == "prefill_gemm"
        # a residual that TMA cannot store
        strided = empty(num_tokens, 4100)[:, 2:-2]
        assert launched.by(lambda: dispatch.fused_linear(x, down, residual=strided)) == "prefill_gemm"


def kinds_of_results(num_features, num_channels, sizes):
    """Kernels of o or down in e4m3, and what the next norm is given."""
    weight, kinds = make_weight(num_features, num_channels, "e4m3"), set()
    for num_tokens in sizes:
        residual = empty(num_tokens, num_features)
        y = dispatch.fused_linear(empty(num_tokens, num_channels), weight, residual=residual, allow_split_k=True)
        partials = y.partials if isinstance(y, SplitKPartials) else None
        assert residual is (y if partials is None else y.residual) or num_tokens <= 256
        kinds.add((len(partials), partials.dtype) if partials is not None else None)
    return kinds


@pytest.mark.parametrize("num_features, num_channels", [(4096, 12288), (5120, 25600), (2560, 9728), (1024, 3072)])
def test_the_warmup_has_each_kind_of_result(num_features, num_channels, launched):
    """Partial sums, the library's result or none: each is another variant of the norm behind it."""
    kinds = kinds_of_results(num_features, num_channels, range(2, 2050, 7))
    assert (1, torch.bfloat16) in kinds and kinds <= kinds_of_results(num_features, num_channels, WARMUP_SIZES[1:])


def test_kernels_on_other_devices(launched):
    launched.device(is_sm90=False)
    assert launched.by(lambda: gate_up(1, "e4m3")) == "gemv_in_fp16"
    assert launched.by(lambda: gate_up(2, "16 bits")) == "rms_norm linear act_and_mul"
    assert launched.by(lambda: gate_up(2, "e4m3")) == "dequantize rms_norm linear act_and_mul"
    launched.device(has_inline_asm=False)
    assert launched.by(lambda: gate_up(1, "e4m3 blocks")) == "gemv"
    launched.device(has_e4m3=False)
    assert launched.by(lambda: gate_up(1, "e4m3")) == "gemv"  # dequantized by torch


@pytest.mark.parametrize("group", [16, 128])
@pytest.mark.parametrize("num_tokens", [1, 2, 64, 65, 200, 256, 1024])
def test_none_requests_a_weight_before_it_is_dequantized(num_tokens, group, launched):
    """As GEMV and decode GEMM do: they start while the kernel before writes. Captured prefills gave NaN."""
    words = empty(4096, 2048 // 8, dtype=torch.int32)
    weight = Weight(words, empty(4096, 2048 // group))
    run = launched.by(lambda: dispatch.fused_linear(empty(num_tokens, 2048), weight, None, empty(2048), 1e-6))
    assert ("int4_dequantize" in run) == (num_tokens > 64 or group == 16)
    assert "int4_dequantize" not in run or not {"gemv", "decode_gemm"} & set(run.split()), run


def test_kernels_by_shape_and_dtype(launched):
    assert launched.by(lambda: gate_up(1, "e4m3", norm_dtype=torch.float32)) == "gemv"
    assert launched.by(lambda: gate_up(300, "e4m3", torch.float32)) == "dequantize rms_norm linear act_and_mul"
    assert launched.by(lambda: qkv(2048, "16 bits", with_cache=False)) == "rms_norm linear norm_rope_store"
    assert launched.by(lambda: residual(300, "e4m3 blocks", 384)) == "dequantize addmm"  # no whole tiles
    assert launched.by(lambda: residual(300, "e4m3", 48)) == "rms_norm scaled_mm"
    assert launched.by(lambda: residual(300, "e4m3", dtype=torch.float16)) == PREFILL  # the library rounds to bf16
    assert launched.by(lambda: residual(300, "e4m3", 40)) == "dequantize addmm"


def test_kernels_with_an_untested_triton(launched, monkeypatch):
    for name in ("decode_gemm_sm90", "prefill_gemm_sm90"):
        monkeypatch.setattr(dispatch, name, None)
    for num_tokens in (2, 2048):
        assert launched.by(lambda n=num_tokens: gate_up(n, "16 bits")) == "rms_norm linear act_and_mul"
        assert launched.by(lambda n=num_tokens: gate_up(n, "e4m3")) == "rms_norm scaled_mm act_and_mul"
        blocks = launched.by(lambda n=num_tokens: gate_up(n, "e4m3 blocks"))
        assert blocks == "dequantize rms_norm linear act_and_mul"


def experts(num_tokens, act="silu", num_experts=32, num_units=768, dtype=torch.bfloat16, precision=None, **options):
    """gate, up and down of 4 of the experts of a token, 2048 channels."""
    gate_up, down = (
        Weight(empty(num_experts, *shape, dtype=precision or dtype))
        for shape in ((num_units if act == "relu2" else 2 * num_units, 2048), (2048, num_units))
    )
    if precision is not None:
        gate_up, down = (w._replace(scale=empty(*w.data.shape[:2], 1, dtype=torch.float32)) for w in (gate_up, down))
    ids, weights = empty(num_tokens, 4, dtype=torch.int32), empty(num_tokens, 4, dtype=torch.float32)
    moe.chosen_experts(empty(num_tokens, 2048, dtype=dtype), gate_up, down, ids, weights, act, **options)


def of_experts(launched, *args, **options):
    return [name for name in launched.by(lambda: experts(*args, **options)).split() if name.startswith("grouped")]


def test_kernels_of_experts(launched):
    """On Hopper, in 16 bits, from 128 rows of an expert on."""
    assert launched.by(lambda: experts(4)) == "gate_up_rows down_rows"
    assert launched.by(lambda: experts(512)) == "group_rows grouped_gemm grouped_gemm sum_rows"
    for options in ({}, {"act": "relu2"}, {"dtype": torch.float16}, {"num_units": 1856}):
        assert of_experts(launched, 1024, **options) == 2 * ["grouped_gemm_sm90"], options
    assert of_experts(launched, 1023) == of_experts(launched, 1024, num_experts=33) == 2 * ["grouped_gemm"]
    biases = (empty(32, 1536), empty(32, 2048))
    others = {"dtype": torch.float32}, {"precision": E4M3}, {"biases": biases}
    for options in others:
        assert of_experts(launched, 1024, **options) == 2 * ["grouped_gemm"], options
    # steps of 64 units or channels; a limit is of the activation alone
    assert of_experts(launched, 1024, num_units=768 - 32) == ["grouped_gemm_sm90", "grouped_gemm"]
    assert of_experts(launched, 1024, limit=7.0) == ["grouped_gemm", "grouped_gemm_sm90"]
    launched.device(is_sm90=False)
    assert of_experts(launched, 1024) == 2 * ["grouped_gemm"]


@pytest.mark.parametrize("dtype, by_tokens", [
    (torch.bfloat16, {5: "router", 256: "router", 257: "router", 4096: "router"}),
    (torch.float32, {5: "router", 256: "router", 257: "linear", 4096: "linear"}),
])  # fmt: skip
def test_scores_in_fp32(dtype, by_tokens, launched):
    """Scores by sigmoid are of fp32 logits. Those of 16 bits are multiplied as they are, without copies in fp32."""
    router, gate_up, down = (empty(*shape, dtype=dtype) for shape in ((32, 2048), (32, 96, 2048), (32, 2048, 48)))
    for num_tokens, want in by_tokens.items():
        launched.clear()
        moe.fused_moe(
            empty(num_tokens, 2048, dtype=dtype), None, 1e-6, router, None, Weight(gate_up), Weight(down),
            Routing(4, "sigmoid"), empty(num_tokens, dtype=torch.int32),
        )  # fmt: skip
        assert launched[:2] == [want, "route"], num_tokens

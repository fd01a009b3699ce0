"""The mixture-of-experts kernels against their twins, and the twins against other formulas.

Compiled where there is a GPU, under Triton's interpreter elsewhere. Whatever a kernel allocates is poisoned first, so
that an element it forgets to write cannot pass.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import gpu_param

from nanovllm import kernels
from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.kernels.launch import is_sm90, launch
from nanovllm.kernels.linear.norm import SplitKPartials, quantize_tokens
from nanovllm.kernels.linear.reference import Weight, fused_linear, rms_norm
from nanovllm.kernels.moe import dispatch, grouped_gemm, reference, shared_expert
from nanovllm.kernels.moe.reference import Biases, Routing, Shared
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.models.config import LayerConfig, MoEConfig, Scales
from nanovllm.models.families import Family
from nanovllm.models.moe import SparseMoE
from nanovllm.quantization.fp8.numbers import E4M3
from nanovllm.quantization.int4 import numbers as int4

from . import DEVICE, EPS, rand, randn
from .test_nvfp4_linear import make_weight as nvfp4_weight

ON_HOPPER = DEVICE == "cuda" and is_sm90(torch.device("cuda"))
# share of the largest value: routing weights, products of a few hundred channels, and the rounding of the result
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bf16 matrices
pytestmark = pytest.mark.usefixtures("poisoned")
ROUTINGS = {
    "qwen3-moe": Routing(8),
    "mixtral": Routing(2),
    "olmoe": Routing(8, renormalize=False),
    "top-1": Routing(1, renormalize=False),
    "glm": Routing(4, "sigmoid", routed_scale=2.5),
    "groups": Routing(4, "sigmoid", renormalize=False, num_groups=4, top_groups=2),
    "all groups": Routing(4, "sigmoid", num_groups=4, top_groups=4),
    "softmax groups": Routing(3, "softmax", renormalize=False, routed_scale=16.0, num_groups=8, top_groups=3),
}


def spread_logits(num_tokens, num_experts, dtype=torch.float32):
    """[T, E], those of a token at least 6 / E apart: no rounding of the scores changes the choice."""
    values = torch.linspace(-3, 3, num_experts, device=DEVICE)
    order = torch.rand(num_tokens, num_experts, device=DEVICE).argsort(1)
    return values[order].to(dtype)


def slots(num_tokens, padding=()):
    mapping = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE) + 7
    mapping[list(padding)] = -1
    return mapping


def assert_close(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    tolerance = TOLERANCE[expected.dtype]
    atol = tolerance * expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=atol)


def assert_quantized_close(actual, expected):
    """Of quantized rows. A sum that rounds otherwise can move a row's largest number, and
    with its scale many of its numbers by a step of e4m3. That is some 4 % of this row, and few rows have it.
    """
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    error, size = (x.float().square().mean(1) for x in (actual.float() - expected.float(), expected))
    assert ((error / size).sqrt() < 0.06).all()
    assert (error.mean() / size.mean()).sqrt() < 0.01


def whole(result):
    """A result as a tensor: SplitKPartials are added up."""
    if isinstance(result, torch.Tensor):
        return result
    return (result.residual.float() + result.partials.sum(0)).to(result.residual.dtype)


# Twins against formulas written elsewhere.


@pytest.mark.parametrize("name", ROUTINGS)
def test_route_twin_agrees_with_a_loop(name):
    """One token and one expert at a time, in Python floats."""
    routing, num_experts = ROUTINGS[name], 16
    logits, bias = randn(9, num_experts), randn(num_experts, scale=0.3)
    ids, weights = reference.route(logits, bias, routing, slots(9, padding=[3]))
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    for t, row in enumerate(logits.double().cpu()):
        if t == 3:
            assert ids[t].tolist() == [-1] * routing.top_k and not weights[t].any()
            continue
        scores = (row.exp() / row.exp().sum() if routing.scoring == "softmax" else 1 / (1 + (-row).exp())).tolist()
        choice = [score + b for score, b in zip(scores, bias.tolist(), strict=True)]
        size = num_experts // routing.num_groups
        groups = [sorted(choice[i : i + size], reverse=True)[:2] for i in range(0, num_experts, size)]
        kept = sorted(range(routing.num_groups), key=lambda g: -sum(groups[g]))[: routing.top_groups]
        allowed = [e for e in range(num_experts) if e // size in kept]
        expected = sorted(allowed, key=lambda e: -choice[e])[: routing.top_k]
        assert ids[t].tolist() == expected
        total = sum(scores[e] for e in expected) if routing.renormalize else 1.0
        want = [scores[e] / total * routing.routed_scale for e in expected]
        assert weights[t].tolist() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("add_residual", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_fused_moe_twin_agrees_with_every_expert_computed(has_norm, add_residual):
    T, C, E, I, routing = 11, 24, 6, 20, Routing(2)
    x, norm_weight, router = randn(T, C), randn(C), randn(E, C)
    gate_up, down = randn(E, 2 * I, C), randn(E, C, I)
    before = x.clone()
    got = reference.fused_moe(
        x, norm_weight if has_norm else None, EPS, router, None, Weight(gate_up), Weight(down), routing,
        slots(T, padding=[0, 10]), add_residual=add_residual,
    )  # fmt: skip
    normed = rms_norm(x, norm_weight, EPS) if has_norm else x
    gate, up = torch.einsum("tc,enc->ten", normed, gate_up).chunk(2, -1)
    every = torch.einsum("tei,eci->tec", F.silu(gate) * up, down)
    weights, ids = (normed @ router.T).softmax(-1).topk(2)
    share = torch.zeros(T, E, device=DEVICE).scatter(1, ids, weights / weights.sum(-1, keepdim=True))
    share[[0, 10]] = 0.0
    expected = torch.einsum("te,tec->tc", share, every)
    assert_close(got, expected + x if add_residual else expected)
    assert torch.equal(x, before)


# The kernels against the twins.

GPU_SIZES = [gpu_param(n) for n in (8, 16, 17, 64, 127, 256, 257, 1000, 2048, 4096, 16384)]


@pytest.mark.parametrize("dtype", [torch.float32, gpu_param(torch.bfloat16)])
@pytest.mark.parametrize("num_tokens", [0, 1, 6, *GPU_SIZES])
@pytest.mark.parametrize("name", ROUTINGS)
def test_route(name, num_tokens, dtype):
    for num_experts in (24,) if DEVICE == "cpu" else (16, 60, 64, 128, 160):
        routing = ROUTINGS[name]
        if num_experts % routing.num_groups:
            continue
        logits = spread_logits(num_tokens, num_experts, dtype)
        bias = randn(num_experts, scale=0.01) if routing.scoring == "sigmoid" or num_tokens == 6 else None
        padding = [t for t in (1, num_tokens - 1) if 0 <= t < num_tokens]
        args = logits, bias, routing, slots(num_tokens, padding)
        ids, weights = dispatch.route(*args)
        expected_ids, expected_weights = reference.route(*args)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["qwen3-moe", "groups", "softmax groups"])
def test_route_gives_ties_to_the_lowest_index(name):
    routing = ROUTINGS[name]
    logits = torch.zeros(3, 16, device=DEVICE)
    logits[1] = torch.arange(16, device=DEVICE) // 4 % 2  # pairs of equal groups of 4
    logits[2, 5] = logits[2, 13] = 1.0
    args = logits, None, routing, slots(3)
    ids, weights = dispatch.route(*args)
    expected_ids, expected_weights = reference.route(*args)
    assert torch.equal(ids, expected_ids) and ids[0].tolist() == list(range(routing.top_k))
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.filterwarnings("ignore:overflow")
def test_route_with_extreme_logits():
    """One expert has all the probability, or none has any: nothing overflows, nothing is divided by 0."""
    logits = spread_logits(4, 16)
    logits[0, 3], logits[1], logits[2] = 1e4, logits[1] * 30, logits[2] - 300.0
    for routing in (Routing(4), Routing(4, "sigmoid")):
        args = logits, None, routing, slots(4)
        ids, weights = dispatch.route(*args)
        expected_ids, expected_weights = reference.route(*args)
        for t in range(4):  # experts of weight 0 are alike
            chosen = expected_weights[t] > 0
            assert torch.equal(ids[t][chosen], expected_ids[t][chosen])
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "num_tokens, num_experts, num_channels, dtype",
    [(3, 5, 600, torch.float32), (256, 40, 96, HALF), (257, 5, 600, HALF), (300, 130, 96, HALF),
     *(gpu_param(n, *sizes, HALF) for n in (257, 16384) for sizes in ((128, 2688), (32, 2048), (256, 7168)))],
)  # fmt: skip
def test_router_partials(num_tokens, num_experts, num_channels, dtype, has_bias):
    """Exact but for the rounding of sums in fp32: nothing is rounded to 16 bits."""
    x, weight = randn(num_tokens, num_channels, dtype=dtype), randn(num_experts, num_channels, dtype=dtype)
    bias = randn(num_experts, dtype=dtype) if has_bias else None
    got = dispatch.router_partials(x, weight, bias)
    assert got.dtype == torch.float32 and got.shape[1:] == (num_tokens, num_experts)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(got.sum(0).double(), expected, rtol=0, atol=2e-5 * num_channels**0.5)


class Problem:
    """Arguments of `fused_moe`. The router looks at the first E channels only, which `choose` sets."""

    def __init__(self, num_tokens, C=32, E=16, I=12, routing=Routing(4), dtype=torch.float32, padding=()):
        self.routing, self.E = routing, E
        self.residual = randn(num_tokens, C, dtype=dtype)
        self.norm_weight = (1 + randn(C, scale=0.1)).to(dtype)
        self.router = torch.zeros(E, C, device=DEVICE, dtype=dtype)
        self.router[:, :E] = torch.eye(E, device=DEVICE, dtype=dtype)
        self.norm_weight[:E] = 1.0
        self.bias = randn(E, scale=0.01) if routing.scoring == "sigmoid" else None
        self.gate_up = randn(E, 2 * I, C, dtype=dtype, scale=C**-0.5)
        self.down = randn(E, C, I, dtype=dtype, scale=I**-0.5)
        self.weights, self.options = [Weight(self.gate_up), Weight(self.down)], {}
        self.slots = slots(num_tokens, padding)
        self.choose(spread_logits(num_tokens, E))

    def choose(self, logits):
        self.residual[:, : self.E] = logits.to(self.residual.dtype)

    def run(self, op, residual=None, **options):
        """The result on copies of the residual, which a kernel may overwrite."""
        return op(
            self.residual.clone() if residual is None else residual, self.norm_weight, EPS, self.router, self.bias,
            *self.weights, self.routing, self.slots, **self.options | options,
        )  # fmt: skip

    def without_tokens(self, first, last, padding=()):
        """Logits that choose no expert from ``first`` to ``last``, but for a row of padding."""
        logits = spread_logits(len(self.residual), self.E)
        logits[:, first : last + 1] -= 20.0
        logits[list(padding), first + 2] = 8.0
        self.choose(logits)

    def check(self, **options):
        """Rows of padding may hold anything."""
        live = self.slots >= 0
        got = whole(self.run(dispatch.fused_moe, **options))[live]
        expected = self.run(reference.fused_moe, **options)[live]
        assert_close(got, expected)


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [
    (1, 1, 3), (40, 2, 5), (700, 4, 64), (2100, 4, 5), (3000, 4, 130), (8200, 1, 3),
])  # fmt: skip
def test_group_rows(num_tokens, top_k, num_experts):
    """Each expert's rows in order, some of them padding; few by a search, more than 8,192 by counts."""
    ids = torch.rand(num_tokens, num_experts, device=DEVICE).topk(top_k, 1).indices.int()
    ids[5::7] = -1
    rows, counts = dispatch.group_rows(ids, num_experts)
    for expert in range(num_experts):
        expected = (ids.flatten() == expert).nonzero().flatten().int()
        assert counts[expert] == len(expected)
        assert torch.equal(rows[expert, : len(expected)], expected)


@pytest.mark.parametrize(
    "num_tokens, dtype", [(0, HALF), (1, HALF), (2, torch.float32), (5, HALF), (33, torch.float32)]
)
def test_fused_moe(num_tokens, dtype):
    Problem(num_tokens, dtype=dtype).check()


SHAPES = {  # C, E, I, routing
    "qwen3-30b-a3b": (2048, 128, 768, Routing(8)),
    "qwen3-30b-a3b on two": (2048, 128, 384, Routing(8)),
    "mixtral-8x7b on four": (4096, 8, 3584, Routing(2)),
    "olmoe": (2048, 64, 1024, Routing(8, renormalize=False)),
    "qwen1.5-moe": (2048, 60, 1408, Routing(4, renormalize=False)),
    "glm-4.5-air": (4096, 128, 1408, Routing(8, "sigmoid")),
    "glm-4.5-air on eight": (4096, 128, 176, Routing(8, "sigmoid")),
}


@pytest.mark.gpu
@pytest.mark.whole_gpu  # gigabytes
@pytest.mark.parametrize("num_tokens", [1, 2, 4, *(param.values[0] for param in GPU_SIZES)])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_moe_of_published_shapes(shape, num_tokens):
    C, E, I, routing = SHAPES[shape]
    padding = [num_tokens - 1] if num_tokens > 4 else []
    Problem(num_tokens, C, E, I, routing, torch.bfloat16, padding).check(allow_split_k=True)


@pytest.mark.parametrize("num_tokens", [7, gpu_param(1), gpu_param(3), gpu_param(300), gpu_param(5000)])
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "groups", *map(gpu_param, ROUTINGS)])
def test_fused_moe_with_every_routing(name, num_tokens):
    Problem(num_tokens, routing=ROUTINGS[name], padding=[num_tokens // 2]).check()


@pytest.mark.parametrize("num_tokens", [1, 7, gpu_param(3), gpu_param(300)])
def test_a_router_with_a_norm_of_its_own(num_tokens):
    """And factors of the experts' weights, as in Gemma 4."""
    problem = Problem(num_tokens, padding=[num_tokens // 2] if num_tokens > 1 else [])
    problem.norm_weight = randn(len(problem.norm_weight), scale=3.0)  # would choose other experts
    weight = torch.ones_like(problem.norm_weight)
    problem.check(add_residual=False, router_norm_weight=weight, expert_scales=rand(problem.E) + 0.5)


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "sizes"),
    [
        (1, HALF, (32, 16, 12)), (7, torch.float32, (96, 5, 17)), (33, HALF, (32, 16, 12)),
        *(gpu_param(n, torch.bfloat16, (2688, 128, 1856)) for n in (1, 64, 2048)),
    ],
)  # fmt: skip
def test_experts_without_a_gate(num_tokens, dtype, sizes):
    """Nemotron-H's: down(relu(up x)^2)."""
    problem = Problem(num_tokens, *sizes, Routing(3, "sigmoid"), dtype, [num_tokens // 2] if num_tokens > 1 else [])
    problem.weights[0] = Weight(problem.gate_up[:, : sizes[2]].contiguous())
    problem.check(act="relu2")
    got = problem.run(dispatch.fused_moe, act="relu2", allow_split_k=True)
    if num_tokens > 1:
        assert_close(whole(got)[problem.slots >= 0], problem.run(reference.fused_moe, act="relu2")[problem.slots >= 0])
    else:
        assert isinstance(got, torch.Tensor)  # the next product of one token takes nothing else


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act, C, E, I", [
    ("silu", 64, 4, 64), ("relu2", 64, 4, 64),  # one step of channels
    ("gelu_tanh", 192, 5, 320), ("relu2", 192, 5, 448), ("silu", 320, 200, 192), ("relu2", 2688, 16, 1856),
])  # fmt: skip
def test_many_rows_on_hopper(act, C, E, I, dtype, monkeypatch):
    """Tiles that are not whole, experts without rows, and two experts with more than the others."""
    if not ON_HOPPER:
        pytest.skip("other GPUs have no such kernel")
    module, calls = dispatch.grouped_gemm_sm90, []
    original = module.grouped_gemm
    monkeypatch.setattr(module, "grouped_gemm", lambda *args: calls.append(args) or original(*args))
    num_tokens = 80 * E + 7
    problem = Problem(num_tokens, C, E, I, Routing(2), dtype, padding=[0, 70, num_tokens - 1])
    if act == "relu2":
        problem.weights[0] = Weight(problem.gate_up[:, :I].contiguous())
    problem.without_tokens(1, 2, padding=[0])
    problem.residual[5 : num_tokens // 3, 3:5] += 20.0
    problem.check(act=act)
    assert len(calls) == 2


@pytest.mark.parametrize("C, E, I", [(48, 6, 40), (72, 20, 24), (96, 5, 17)])
def test_fused_moe_of_odd_sizes(C, E, I):
    Problem(7, C, E, I, Routing(3)).check()


@pytest.mark.parametrize("num_tokens", [1, 9, gpu_param(256), gpu_param(16384)])
def test_all_tokens_choose_the_same_experts(num_tokens):
    problem = Problem(num_tokens)
    problem.choose(spread_logits(1, problem.E).expand(num_tokens, -1))
    problem.check()


@pytest.mark.parametrize("num_tokens", [2, 19, gpu_param(4096)])
@pytest.mark.parametrize("expert", [0, 15])
def test_all_tokens_choose_one_expert(num_tokens, expert):
    problem = Problem(num_tokens, routing=Routing(1))
    logits = spread_logits(num_tokens, problem.E)
    logits[:, expert] = 8.0
    problem.choose(logits)
    problem.check()


@pytest.mark.parametrize("num_tokens", [3, 6, gpu_param(64)])
def test_padding_does_not_disturb_others(num_tokens):
    """Rows of padding may hold anything, and so may an expert that they alone would choose."""
    padding = [0, num_tokens // 2, num_tokens - 1]
    problem = Problem(num_tokens, padding=padding)
    logits = spread_logits(num_tokens, problem.E)
    logits[:, 5] = -8.0
    logits[padding, 5] = 8.0
    problem.choose(logits)
    problem.gate_up[5] = problem.down[5] = torch.nan
    problem.residual[padding[0]] = torch.nan if DEVICE == "cuda" else 1e4  # numpy's argmax would raise an error
    problem.check()


@pytest.mark.parametrize("num_tokens", [5, gpu_param(1), gpu_param(200)])
def test_a_token_alone_gets_what_it_gets_among_others(num_tokens):
    """Up to the order of sums, which kernels for other numbers of tokens may change."""
    problem = Problem(num_tokens + 1)
    together = whole(problem.run(dispatch.fused_moe))
    problem.residual, problem.slots = problem.residual[:1], problem.slots[:1]
    assert_close(whole(problem.run(dispatch.fused_moe)), together[:1])


@pytest.mark.parametrize("num_tokens", [1, 5, gpu_param(200)])
@pytest.mark.parametrize("add_residual, allow_split_k", [(False, False), (False, True), (True, True)])
def test_residual(num_tokens, add_residual, allow_split_k):
    problem = Problem(num_tokens, padding=[num_tokens - 1])
    problem.check(add_residual=add_residual, allow_split_k=allow_split_k)


@pytest.mark.parametrize("num_tokens", [1, 5, gpu_param(200)])
def test_without_a_norm(num_tokens):
    problem = Problem(num_tokens)
    problem.norm_weight = None
    problem.check()


# FP8 weights.


def quantized_experts(weight, group):
    """e4m3 with a scale for each output feature and `group` channels; they differ by a factor of up to 4."""
    E, N, C = weight.shape
    scale = torch.rand(E, N, C // group, device=DEVICE) * 1.5 + 0.5
    data = torch.randn(E, N, C, device=DEVICE).to(E4M3)
    return Weight(data, (scale * C**-0.5).contiguous())


class FP8Problem(Problem):
    """`groups`: channels of a scale of gate_up, units of one of down; 0: all of them."""

    def __init__(self, num_tokens, C=64, E=16, I=48, groups=(0, 0), **more):
        super().__init__(num_tokens, C, E, I, **more)
        self.weights = [
            quantized_experts(weight, group or weight.shape[2])
            for weight, group in zip((self.gate_up, self.down), groups, strict=True)
        ]

    def run_w8a8(self):
        """In fp32, with x and h quantized row by row where scales are of whole steps of 32 channels; rows of padding
        get the residual."""
        dtype, (gate_up, down) = self.residual.dtype, self.weights
        x = rms_norm(self.residual, self.norm_weight, EPS)
        ids, weights = reference.route(F.linear(x, self.router), self.bias, self.routing, self.slots)
        x, y = as_multiplied(x, gate_up), self.residual.float()
        for t, row in enumerate(ids.tolist()):
            for j, expert in enumerate(row):
                if expert >= 0:
                    h = fused_linear(x[t : t + 1], gate_up.expert(expert), act_mul="silu").to(dtype)
                    h = as_multiplied(h, down)
                    y[t] += fused_linear(h, down.expert(expert))[0] * weights[t, j]
        return y.to(dtype)


def as_multiplied(x, weight):
    if weight.num_channels // weight.scale.shape[2] % 32:
        return x.float()
    tokens = quantize_tokens(x)
    return tokens.data.float() * tokens.scale[:, None]


# C, E, I, groups: per feature; blocks; blocks that a shard cuts; fewer than 16 channels, or no multiple of them
FP8_SHAPES = [
    (64, 16, 48, (0, 0)), (128, 8, 64, (64, 32)), (96, 5, 48, (32, 16)), (48, 3, 24, (16, 8)), (24, 3, 16, (0, 0)),
]  # fmt: skip


@pytest.mark.parametrize("num_tokens, dtype", [
    (0, HALF), (1, HALF), (3, torch.float32), (7, HALF), gpu_param(40, HALF), gpu_param(40, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_fp8_experts(shape, num_tokens, dtype):
    """One token or few, in 16 bits: as the twin. More on Hopper: quantized, where scales allow it."""
    C, E, I, groups = shape
    padding = [1] if num_tokens > 1 else []
    problem = FP8Problem(num_tokens, C, E, I, groups, routing=Routing(2), dtype=dtype, padding=padding)
    if num_tokens > dispatch.MAX_TOKENS_GEMV and ON_HOPPER and dtype != torch.float32:
        live = problem.slots >= 0
        assert_quantized_close(whole(problem.run(dispatch.fused_moe))[live], problem.run_w8a8()[live])
    else:
        problem.check()


@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.parametrize("in_16_bits", ["gate_up", "down"])
def test_one_of_the_two_in_fp8(in_16_bits, num_tokens):
    """A checkpoint may leave out either."""
    problem = FP8Problem(num_tokens, dtype=torch.float32)
    problem.weights[["gate_up", "down"].index(in_16_bits)] = Weight(getattr(problem, in_16_bits))
    problem.check()


@pytest.mark.filterwarnings("ignore:All-NaN")  # rows of padding
@pytest.mark.parametrize("num_tokens", [6, gpu_param(64), gpu_param(300), gpu_param(3000)])
@pytest.mark.parametrize("C, E, I, groups", [
    (128, 8, 96, (0, 0)), (128, 8, 96, (64, 32)), (160, 6, 288, (0, 96)), (256, 4, 128, (128, 128)),
])  # fmt: skip
def test_quantized_rows_meet_fp8_experts(C, E, I, groups, num_tokens, monkeypatch):
    """W8A8, whatever the device: channels beyond the last whole step, groups of half and quarter steps."""
    if DEVICE == "cuda" and not ON_HOPPER:
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(dispatch, "is_sm90", lambda device: True)
    seen = []
    gemm = dispatch.grouped_gemm
    monkeypatch.setattr(dispatch, "grouped_gemm", lambda c, x, *more, **o: seen.append(x) or gemm(c, x, *more, **o))
    problem = FP8Problem(num_tokens, C, E, I, groups, routing=Routing(2), dtype=HALF, padding=[2])
    live = problem.slots >= 0
    got, expected = whole(problem.run(dispatch.fused_moe))[live], problem.run_w8a8()[live]
    assert [x.data.dtype for x in seen] == [E4M3, E4M3]
    assert_quantized_close(got, expected)


# Integers of four bits.


def int4_experts(weight, group, symmetric, dtype):
    """Random codes; scales of both signs; zeros of the whole range."""
    E, N, C = weight.shape
    scale = (torch.rand(E, N, C // group, device=DEVICE) * 1.5 + 0.5) * C**-0.5 / 5
    scale[:, ::2] *= -1
    zero = None if symmetric else torch.randint(0, 17, scale.shape, device=DEVICE, dtype=torch.int8)
    codes = torch.randint(0, 16, (E, N, C), device=DEVICE, dtype=torch.uint8)
    return Weight(int4.words_of(codes, int4.tile_of(group)), scale.to(dtype), zero=zero)


@pytest.mark.parametrize("C, E, I, groups", [
    (64, 16, 96, (64, 32)), (96, 5, 64, (32, 64)), (160, 4, 32, (160, 32)), (128, 3, 48, (128, 16)),
])  # fmt: skip
@pytest.mark.parametrize("num_tokens, dtype, symmetric", [
    (0, torch.float32, True), (1, HALF, False), (3, torch.float32, True), (7, torch.float32, False), (7, HALF, True),
    (100, torch.float32, False), gpu_param(300, HALF, False),
])  # fmt: skip
def test_int4_experts(num_tokens, dtype, symmetric, C, E, I, groups):
    """One token or few row by row, more in tiles; groups of 16 units are dequantized."""
    padding = [1] if num_tokens > 1 else []
    problem = Problem(num_tokens, C, E, I, routing=Routing(2), dtype=dtype, padding=padding)
    problem.weights = [
        int4_experts(weight, group, symmetric, dtype)
        for weight, group in zip((problem.gate_up, problem.down), groups, strict=True)
    ]
    problem.check()


# NVFP4.


@pytest.mark.parametrize("C, E, I", [(256, 4, 128), (64, 16, 64), (128, 3, 48), (128, 5, 192)])
@pytest.mark.parametrize("num_tokens, dtype", [
    (0, torch.float32), (1, HALF), (3, torch.float32), (7, torch.float32), (7, HALF), (100, torch.float32),
    gpu_param(300, HALF),
])  # fmt: skip
def test_nvfp4_experts(num_tokens, dtype, C, E, I):
    """One token or few row by row, more in tiles; 48 units are dequantized."""
    padding = [1] if num_tokens > 1 else []
    problem = Problem(num_tokens, C, E, I, routing=Routing(2), dtype=dtype, padding=padding)
    both = problem.gate_up, problem.down
    problem.weights = [nvfp4_weight(*each.shape[1:], experts=each.shape[:1]) for each in both]
    problem.check()


FP8_PUBLISHED = {  # C, E, I, routing, groups
    "qwen3-30b-a3b": (2048, 128, 768, Routing(8), (128, 128)),
    "qwen3-30b-a3b on two": (2048, 128, 384, Routing(8), (128, 128)),
    "qwen3-30b-a3b on four": (2048, 128, 192, Routing(8), (128, 64)),
    "qwen3.6-35b-a3b, a quarter": (2048, 64, 512, Routing(8), (128, 128)),
    "glm-4.5-air": (4096, 128, 1408, Routing(8, "sigmoid"), (0, 0)),
    "glm-4.5-air on eight": (4096, 128, 176, Routing(8, "sigmoid"), (0, 0)),
    "blocks of 16 units": (4096, 32, 176, Routing(8), (128, 16)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 8, 32, 127, 256, 1000])
@pytest.mark.parametrize("shape", [  # the largest takes gigabytes
    pytest.param(shape, marks=[pytest.mark.whole_gpu] * (shape == "glm-4.5-air")) for shape in FP8_PUBLISHED
])  # fmt: skip
def test_fp8_experts_of_published_shapes(shape, num_tokens):
    """On Hopper from 5 tokens on rows are quantized, which costs some 4 % of the result."""
    C, E, I, routing, groups = FP8_PUBLISHED[shape]
    problem = FP8Problem(num_tokens, C, E, I, groups, routing=routing, dtype=torch.bfloat16)
    got = whole(problem.run(dispatch.fused_moe, add_residual=False)).float()
    expected = problem.run(reference.fused_moe, add_residual=False).float()
    error = ((got - expected).square().mean() / expected.square().mean()).sqrt()
    assert error < (0.01 if num_tokens <= dispatch.MAX_TOKENS_GEMV or not ON_HOPPER else 0.07)


@pytest.mark.parametrize(("num_tokens", "sizes", "groups"), [
    (1, (64, 5, 48), (0, 0)), (7, (128, 4, 64), (64, 32)),
    *(gpu_param(n, (2688, 16, 1856), (0, 0)) for n in (1, 64, 2048)),
])  # fmt: skip
def test_fp8_experts_without_a_gate(num_tokens, sizes, groups):
    """Nemotron-H's. On Hopper rows are quantized, also those of one token."""
    problem = FP8Problem(num_tokens, *sizes, groups, routing=Routing(3, "sigmoid"), dtype=HALF)
    up = problem.weights[0]
    data, scale = (each[:, : each.shape[1] // 2].contiguous() for each in (up.data, up.scale))
    problem.weights[0] = up._replace(data=data, scale=scale)
    got = whole(problem.run(dispatch.fused_moe, add_residual=False, act="relu2")).float()
    expected = problem.run(reference.fused_moe, add_residual=False, act="relu2").float()
    error = ((got - expected).square().mean() / expected.square().mean()).sqrt()
    assert error < (0.1 if ON_HOPPER else 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_experts_of_tokens_of_any_size(dtype):
    """Products of few tokens are in fp16, and no sum exceeds it."""
    problem = FP8Problem(2, 2048, 8, 256, (128, 128), routing=Routing(2), dtype=dtype)
    problem.norm_weight *= 2.0**12
    for weight in problem.weights:
        weight.scale.mul_(2.0**-8)
    problem.check(add_residual=False)


# gpt-oss: biases, a clamped SwiGLU, MXFP4 weights.


def mxfp4_experts(E, N, C):
    """Random bytes; scales differ by a factor of up to 4. Their product with normal numbers is about normal."""
    first = 125 - round(C**0.5).bit_length()
    scale = torch.randint(first, first + 3, (E, C // 32, N), dtype=torch.uint8, device=DEVICE)
    return Weight(torch.randint(0, 256, (E, N, C // 2), dtype=torch.uint8, device=DEVICE), scale)


class GptOssProblem(Problem):
    def __init__(self, num_tokens, C=96, E=16, I=64, mxfp4=True, **more):
        super().__init__(num_tokens, C, E, 1 if mxfp4 else I, **more)
        dtype = self.residual.dtype
        if mxfp4:
            self.weights = [mxfp4_experts(E, 2 * I, C), mxfp4_experts(E, C, I)]
        router = randn(E, scale=0.02)
        router[3] = 7.0  # chosen by its bias alone
        self.biases = Biases(router.to(dtype), randn(E, 2 * I, dtype=dtype), randn(E, C, dtype=dtype))
        self.options = {"biases": self.biases, "limit": 1.5}  # of numbers about 1.4 in size


def test_mxfp4_twin_agrees_with_every_expert_computed():
    T, C, E, I, problem = 9, 96, 16, 64, GptOssProblem(9, routing=Routing(3))
    got = problem.run(reference.fused_moe, add_residual=False)
    gate_up, down = (weight.dequantize(torch.float32) for weight in problem.weights)
    assert gate_up.shape == (E, 2 * I, C) and 0.5 < (gate_up.std() * C**0.5) < 2
    router, of_gate_up, of_down = problem.biases
    x = rms_norm(problem.residual, problem.norm_weight, EPS)
    gate, up = (torch.einsum("tc,enc->ten", x, gate_up) + of_gate_up).chunk(2, -1)
    gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    every = torch.einsum("tei,eci->tec", gate * torch.sigmoid(1.702 * gate) * (up + 1), down) + of_down
    values, ids = (x @ problem.router.T + router).topk(3)
    share = torch.zeros(T, E, device=DEVICE).scatter(1, ids, values.softmax(-1))
    assert (ids == 3).any(1).all()
    assert_close(got, torch.einsum("te,tec->tc", share, every))


@pytest.mark.parametrize("mxfp4", [False, True])
@pytest.mark.parametrize("num_tokens, dtype", [
    (0, HALF), (1, HALF), (1, torch.float32), (3, torch.float32), (7, HALF), gpu_param(4, HALF), gpu_param(40, HALF),
    gpu_param(40, torch.float32), gpu_param(300, HALF), gpu_param(3000, HALF), gpu_param(4, torch.float16),
    gpu_param(100, torch.float16),
])  # fmt: skip
@pytest.mark.parametrize("C, E, I", [(96, 16, 64), (160, 12, 96), gpu_param(2880, 8, 1440)])
def test_gpt_oss_experts(C, E, I, num_tokens, dtype, mxfp4):
    """Channels beyond the last whole step too."""
    padding = [1] if num_tokens > 1 else []
    GptOssProblem(num_tokens, C, E, I, mxfp4, routing=Routing(3), dtype=dtype, padding=padding).check()


@pytest.mark.parametrize("num_tokens", [150, 300])
def test_gpt_oss_experts_of_many_tokens(num_tokens):
    """Tiles of 32 and of 128 rows, several of an expert; tokens that are none between others."""
    GptOssProblem(num_tokens, 96, 4, 96, routing=Routing(1), dtype=HALF, padding=[0, 70, num_tokens - 1]).check()


@pytest.mark.parametrize("num_tokens", [2, 6])
@pytest.mark.parametrize("without", ["router", "gate_up", "down", "limit"])
def test_each_bias_and_the_limit_matter(without, num_tokens):
    problem = GptOssProblem(num_tokens)
    before = problem.run(reference.fused_moe)
    if without == "limit":
        problem.options["limit"] = 3.0
    else:
        zeros = torch.zeros_like(getattr(problem.biases, without))
        problem.options["biases"] = problem.biases._replace(**{without: zeros})
    assert (problem.run(reference.fused_moe) - before).abs().max() > 1e-2
    problem.check()


@pytest.mark.parametrize("num_tokens", [2, 6])
def test_nan_passes_the_clamps(num_tokens):
    """A broken model shows."""
    problem = GptOssProblem(num_tokens)
    problem.biases.gate_up[:] = torch.nan
    assert whole(problem.run(dispatch.fused_moe)).isnan().all()


KINDS = {  # of weights
    "16 bits": Problem, "FP8": partial(FP8Problem, groups=(32, 16)), "MXFP4": GptOssProblem,
    "FP8, sigmoid": partial(FP8Problem, groups=(16, 16), routing=ROUTINGS["glm"]),
}  # fmt: skip


@pytest.mark.parametrize("add_residual", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_split_k_partials_as_residual(kind, num_tokens, add_residual):
    """The residual may come unreduced from the attention's o_proj; the norm reduces it."""
    problem = KINDS[kind](num_tokens)
    expected = problem.run(reference.fused_moe, add_residual=add_residual)
    partials = randn(3, *problem.residual.shape)
    unreduced = SplitKPartials(problem.residual - partials.sum(0), partials)
    got = problem.run(dispatch.fused_moe, unreduced, add_residual=add_residual, allow_split_k=True)
    assert_close(whole(got), expected)


@pytest.mark.parametrize("num_tokens", [3, 6, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_without_tokens_are_not_read(kind, num_tokens):
    """Nor those that rows of padding alone would choose: neither weights, nor scales, nor biases."""
    problem = KINDS[kind](num_tokens, padding=[0, num_tokens - 1])
    problem.without_tokens(3, 10, padding=[0])
    unread = [weight.data if weight.scale is None else weight.scale for weight in problem.weights]
    if kind == "MXFP4":  # its scales have no NaN
        problem.biases.router[:] = 0.0
        unread = problem.biases[1:]
    for tensor in unread:
        tensor[3:11] = torch.nan
    problem.check()


@pytest.mark.gpu
@pytest.mark.whole_gpu  # gigabytes
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 8, 32, 127, 256, 1000, 5000])
@pytest.mark.parametrize("E", [32, 128])
def test_published_gpt_oss(E, num_tokens):
    """20b and 120b."""
    problem = GptOssProblem(num_tokens, 2880, E, 2880, routing=Routing(4), dtype=torch.bfloat16)
    problem.options["limit"] = 7.0
    problem.check(allow_split_k=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mxfp4_experts_of_tokens_of_any_size(dtype):
    """Products of few tokens are in fp16, and no sum exceeds it; scales as small and as large as they may be."""
    problem = GptOssProblem(2, 2880, 8, 2880, routing=Routing(2), dtype=dtype)
    problem.options["limit"] = 0.0
    problem.norm_weight *= 2.0**12
    problem.weights[0].scale.sub_(12)
    problem.check(add_residual=False)


@pytest.mark.gpu
def test_mxfp4_numbers_on_the_gpu_are_exact():
    """One channel at a time, 64 tokens with a 1 each: the product is the weight itself, in bf16 without rounding."""
    weight = mxfp4_experts(1, 128, 64)
    weight.scale[:] = torch.arange(96, 129, device=DEVICE, dtype=torch.uint8)[torch.arange(256) % 33].view(1, 2, 128)
    x = torch.eye(64, device=DEVICE, dtype=torch.bfloat16)
    rows, counts = dispatch.group_rows(torch.zeros(64, 1, dtype=torch.int32, device=DEVICE), 1)
    for config in ((16, 128, 128, 4, 3), (64, 64, 128, 4, 3), (128, 128, 128, 8, 3), (32, 64, 128, 4, 3)):
        got = torch.empty(1, 64, 128, device=DEVICE)
        ones = torch.ones(64, device=DEVICE)
        config, tokens = grouped_gemm.GroupedConfig(*config), dispatch.tokens_for(x, weight)
        grouped_gemm.grouped_gemm(config, tokens, weight, rows, counts, got, 1, weights=ones)
        assert torch.equal(got[0].T, weight.dequantize(torch.float32)[0])


@pytest.mark.parametrize("num_tokens, shared_size", [(1, 12), (2, 12), (2, 20), (6, 12), (6, 20)])
def test_layer_with_a_shared_expert(num_tokens, shared_size, monkeypatch):
    """The shared expert reads the residual before the experts are added; SplitKPartials are reduced once. Of the
    experts' size, few tokens take it as one of them.
    """
    config = SimpleNamespace(
        hidden_size=32, act="silu", moe=MoEConfig(8, 3, 12, shared_size=shared_size),
        family=Family(experts="softmax", has_shared_gate=True), precision=lambda *_: None,
        mlp_bias=False, residual_scale=1.0, scales=Scales(), quant_method=None,
    )  # fmt: skip
    context = SimpleNamespace(slot_mapping=slots(num_tokens))
    residual, partials = randn(num_tokens, 32), randn(2, num_tokens, 32)
    results, launched = [], []
    monkeypatch.setattr(shared_expert, "launch", lambda *args, **options: launched.append(launch(*args, **options)))
    for x, ops in (
        (residual, kernels.select("cpu")),
        (SplitKPartials(residual - partials.sum(0), partials), kernels.select("cuda")),
    ):
        monkeypatch.setattr(kernels, "select", lambda ops=ops: ops)
        torch.manual_seed(0)
        with torch.device(DEVICE), torch.inference_mode():
            layer, norm = SparseMoE(config, LayerConfig(), SINGLE_RANK), RMSNorm(32)
            for param in layer.parameters():
                param.normal_(0.0, 0.3)
            results.append(whole(layer(x, norm, context)))
    assert_close(results[1], results[0])
    assert len(launched) == (num_tokens > dispatch.MAX_TOKENS_GEMV or shared_size > 12)


@pytest.mark.parametrize("num_tokens, dtype", [(1, HALF), (1, torch.float32), (4, HALF)])
@pytest.mark.parametrize("has_gate", [False, True])
def test_shared_expert_as_one_of_the_experts(num_tokens, dtype, has_gate):
    padding = [2] if num_tokens > 2 else []
    C, I, routing = 96, 48, Routing(3, routed_scale=1.7)
    problem = Problem(num_tokens, C, 5, I, routing, dtype, padding)
    gate_up, down = (Weight(randn(*weight.shape[1:], dtype=dtype, scale=weight.shape[2] ** -0.5))
                     for weight in (problem.gate_up, problem.down))  # fmt: skip
    assert dispatch.takes_shared_expert(num_tokens, Weight(problem.gate_up), gate_up, routing)
    problem.check(shared=Shared(gate_up, down, randn(1, C, dtype=dtype, scale=0.3) if has_gate else None))


def test_which_shared_experts_are_taken():
    routing, experts = Routing(3), Weight(randn(5, 24, 32))
    assert dispatch.takes_shared_expert(4, experts, Weight(randn(24, 32)), routing)
    assert not dispatch.takes_shared_expert(5, experts, Weight(randn(24, 32)), routing)
    assert not dispatch.takes_shared_expert(4, experts, Weight(randn(48, 32)), routing)
    fp8 = quantized_experts(experts.data, 32)
    assert not dispatch.takes_shared_expert(4, fp8, fp8.expert(0), routing)
    groups = Routing(3, num_groups=5, top_groups=2)
    assert not dispatch.takes_shared_expert(4, experts, Weight(randn(24, 32)), groups)


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("allow_split_k", [False, True])
def test_another_base_than_the_residual(num_tokens, allow_split_k):
    problem = Problem(num_tokens)
    base = randn(num_tokens, problem.residual.shape[1], dtype=problem.residual.dtype)
    expected = problem.run(reference.fused_moe, base=base)
    got = problem.run(dispatch.fused_moe, base=base, allow_split_k=allow_split_k)
    assert_close(whole(got), expected)

"""The kernels of Mamba-2 against their references, and the references against the recurrence and transformers.

Compiled where there is a GPU, under Triton's interpreter elsewhere. Outputs and scratch are poisoned first.
"""

import pytest
import torch
from histories import at_night

from nanovllm.kernels.mamba2 import decode, norm, prefill, reference
from nanovllm.kernels.mamba2.reference import Mamba2States, Mamba2Weights

from . import DEVICE
from .chunks import PADDING, SAVED, SEQUENCES, int32, make_chunks
from .test_gated_delta import TOLERANCE, assert_close

pytestmark = pytest.mark.usefixtures("poisoned")


def make_layer(num_heads=2, num_groups=1, head_dim=32, state_dim=32, taps=4, dtype=torch.float32, has_bias=True,
               norms_first=False):  # fmt: skip
    channels = num_heads * head_dim + 2 * num_groups * state_dim
    return Mamba2Weights(
        (torch.randn(channels, taps, device=DEVICE) / 2).to(dtype),
        torch.randn(channels, device=DEVICE).to(dtype) if has_bias else None,
        torch.linspace(-5, 1, num_heads, device=DEVICE),  # slow and fast decays
        torch.randn(num_heads, device=DEVICE), torch.randn(num_heads, device=DEVICE),
        (torch.rand(num_heads * head_dim, device=DEVICE) + 0.5).to(dtype), 1e-5, head_dim, num_groups, norms_first,
    )  # fmt: skip


def make_states(weights, dtype=torch.float32, num_rows=PADDING + 1):
    channels, taps = weights.conv.shape
    num_heads, _, head_dim, state_dim = weights.sizes
    return Mamba2States(
        torch.randn(num_rows, taps, channels, device=DEVICE).to(weights.conv.dtype),
        torch.randn(num_rows, num_heads, head_dim, state_dim, device=DEVICE).to(dtype),
    )


def make_inputs(weights, num_tokens):
    """A view of a projection's result."""
    num_heads, _, head_dim, _ = weights.sizes
    width = num_heads * head_dim + len(weights.conv) + num_heads
    return torch.randn(num_tokens, width + 3, device=DEVICE).to(weights.conv.dtype)[:, 3:]


def clone(states):
    return Mamba2States(*(x.clone() for x in states))


def assert_states_close(actual, expected, dtype):
    assert torch.equal(actual.conv, expected.conv)
    assert_close(actual.ssm, expected.ssm, dtype)


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "heads", "options"),
    [
        (torch.float32, torch.float32, (2, 1, 64, 32), {}),
        (torch.float32, torch.float16, (4, 2, 32, 64), {"taps": 2, "has_bias": False}),
        (torch.bfloat16, torch.float32, (6, 2, 64, 32), {}),
        (torch.bfloat16, torch.float16, (3, 1, 32, 32), {"taps": 3}),
        pytest.param(torch.bfloat16, torch.float32, (48, 1, 64, 128), {}, marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, torch.float32, (64, 8, 64, 128), {}, marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, torch.float16, (24, 1, 64, 256), {}, marks=pytest.mark.gpu),
    ],
)
def test_decode(dtype, state_dtype, heads, options):
    weights = make_layer(*heads, dtype=dtype, **options)
    states = make_states(weights, state_dtype)
    twin_states = clone(states)
    rows, slots = int32([3, 0, PADDING, 5, PADDING]), int32([10, 0, -1, 7, -1])
    for positions in ([0, 1, 0, 70, 9], [1, 2, 0, 71, 9]):
        u = make_inputs(weights, len(rows))
        y = decode.decode(u, weights, states, int32(positions), slots, rows)
        assert (y[slots < 0] == 0).all()
        twin = reference.decode(u, weights, twin_states, int32(positions), slots, rows)
        assert_close(y, twin, dtype)
        assert_states_close(states, twin_states, max(dtype, state_dtype, key=TOLERANCE.get))


def test_heads_that_the_kernels_take():
    assert decode.takes_heads(64, 128) and not decode.takes_heads(80, 128) and not decode.takes_heads(64, 16)


def test_states_in_fp16_are_saturated():
    weights = make_layer()._replace(A_log=torch.full((2,), -20.0, device=DEVICE))  # no decay
    states = make_states(weights, torch.float16)
    states.ssm[:] = 65504
    twin_states, u = clone(states), make_inputs(weights, 1) * 8
    decode.decode(u, weights, states, int32([5]), int32([0]), int32([2]))
    reference.decode(u, weights, twin_states, int32([5]), int32([0]), int32([2]))
    assert states.ssm[2].abs().max() == 65504
    assert_states_close(states, twin_states, torch.float16)


def check_prefill(weights, sequences, saved=None, state_dtype=torch.float32):
    """The kernels' result, states and rest of the states against the reference's."""
    dtype = weights.conv.dtype
    chunks, positions = make_chunks(sequences, saved)
    u = make_inputs(weights, len(positions))
    states = make_states(weights, state_dtype, num_rows=len(sequences) + PADDING + 1)
    twin_states = clone(states)
    y = prefill.prefill(u, weights, states, positions, chunks)
    assert_close(y, reference.prefill(u, weights, twin_states, positions, chunks), dtype)
    assert_states_close(states, twin_states, max(dtype, state_dtype, key=TOLERANCE.get))


@pytest.mark.parametrize("num_tokens", [1, 3, 63, 64, 65, 130])
def test_prefill_of_a_sequence(num_tokens):
    check_prefill(make_layer(), [(0, num_tokens, 3, -1)])


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "heads", "taps"),
    [
        (torch.float32, torch.float32, (4, 2, 32, 64), 4),
        (torch.float16, torch.float32, (3, 1, 64, 32), 3),
        *at_night((torch.float32, torch.float16, (1, 1, 32, 64), 2)),
        pytest.param(torch.bfloat16, torch.float32, (48, 1, 64, 128), 4, marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, torch.float32, (64, 8, 64, 128), 4, marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, torch.float16, (24, 1, 64, 256), 4, marks=pytest.mark.gpu),
        pytest.param(torch.float16, torch.float32, (32, 1, 128, 256), 4, marks=pytest.mark.gpu),
    ],
)
def test_prefill_of_several_sequences(dtype, state_dtype, heads, taps):
    check_prefill(make_layer(*heads, taps, dtype), SEQUENCES, SAVED, state_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[2048], [600], [300] * 40])
def test_prefill_of_published_heads(lengths):
    check_prefill(make_layer(48, 1, 64, 128, dtype=torch.bfloat16), [(0, n, i, -1) for i, n in enumerate(lengths)])


def test_prefill_without_states():
    weights = make_layer(2, 1)
    chunks, positions = make_chunks([(0, 65, 0, -1), (7, 3, 1, 5)])
    arguments = make_inputs(weights, len(positions)), weights, None, positions, chunks
    assert_close(prefill.prefill(*arguments), reference.prefill(*arguments), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_groups", "norms_first", "has_norm"), [
    (1, False, True), (2, False, True), (2, True, True), (2, False, False),
])  # fmt: skip
def test_gate_and_norm(dtype, num_groups, norms_first, has_norm):
    """Of whole groups, and of groups of which another rank has another half."""
    weights = make_layer(6, num_groups, dtype=dtype, norms_first=norms_first)
    weights = weights if has_norm else weights._replace(norm=None)
    u, y = make_inputs(weights, 5), torch.randn(5, 6 * 32, device=DEVICE).to(dtype)
    expected = reference.gate_and_norm(y.clone(), u, weights)
    assert_close(norm.gate_and_norm(y.clone(), u, weights), expected, dtype)

    weights = weights._replace(mean_over_ranks=lambda mean_squares: mean_squares * 1.5)
    shared = [each.gate_and_norm(y.clone(), u, weights) for each in (reference, norm)]
    assert_close(shared[1], shared[0], dtype)
    assert torch.equal(shared[0], expected) != has_norm


@pytest.mark.parametrize("ops", [(prefill, decode), (reference, reference)])
def test_prefill_then_decode_is_the_recurrence(ops):
    """In one launch, and in two and five steps, against a plain loop over tokens in fp64."""
    weights = make_layer(4, 2, 32, 64)
    chunks, positions = make_chunks([(0, 135, 2, -1)])
    u = make_inputs(weights, 135)
    expected, state = recurrence(u, weights)
    whole, states = make_states(weights), make_states(weights)
    y = ops[0].prefill(u, weights, whole, positions, chunks)
    parts = []
    for begin, end, load_row in ((0, 40, -1), (40, 130, 2)):
        chunks, _ = make_chunks([(begin, end - begin, 2, load_row)])
        parts.append(ops[0].prefill(u[begin:end], weights, states, positions[begin:end], chunks))
    for i in range(130, 135):  # positions[i] by a kernel: no decode step may follow another without one between
        arguments = weights, states, positions[i : i + 1] + 0, int32([i]), int32([2])
        parts.append(ops[1].decode(u[i : i + 1], *arguments))
    for result, left in ((y, whole), (torch.cat(parts), states)):
        assert_close(result, expected, torch.float32)
        assert_close(left.ssm[2], state, torch.float32)


def recurrence(u, weights):
    """A sequence from its start, token by token and head by head: y and S, computed in fp64."""
    num_heads, num_groups, head_dim, state_dim = weights.sizes
    channels, taps = weights.conv.shape
    width, of_groups = num_heads * head_dim, num_groups * state_dim
    u, conv, bias = (x.double() for x in (u, weights.conv, weights.conv_bias))
    S = torch.zeros(num_heads, head_dim, state_dim, dtype=torch.float64, device=u.device)
    rows = []
    for t in range(len(u)):
        c = bias + sum(conv[:, taps - 1 - i] * u[t - i, width : width + channels] for i in range(min(taps, t + 1)))
        c = c / (1 + torch.exp(-c))
        for j in range(num_heads):
            first = width + j * num_groups // num_heads * state_dim
            x, B, C = c[j * head_dim :][:head_dim], c[first:][:state_dim], c[first + of_groups :][:state_dim]
            dt = torch.log1p(torch.exp(u[t, width + channels + j] + weights.dt_bias[j].double()))
            S[j] = torch.exp(-dt * torch.exp(weights.A_log[j].double())) * S[j] + torch.outer(dt * x, B)
            rows.append(S[j] @ C + weights.D[j].double() * x)
    y, z = torch.cat(rows).view(len(u), -1), u[:, :width]
    y = (y * z / (1 + torch.exp(-z))).view(len(u), num_groups, -1)
    y = y / (y.square().mean(-1, keepdim=True) + weights.eps).sqrt()
    return (y.flatten(1) * weights.norm.double()).float(), S.float()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_the_references_are_transformers_layer(num_groups):
    """With gate and norm; of whole sequences, of which one has less than a chunk."""
    pytest.importorskip("transformers")
    from transformers import GraniteMoeHybridConfig
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

    config = GraniteMoeHybridConfig(
        hidden_size=48, num_hidden_layers=1, layer_types=["linear_attention"], mamba_n_heads=3, mamba_d_head=32,
        mamba_d_state=16, mamba_n_groups=1, mamba_expand=2,
    )
    if num_groups == 2:
        config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups = 4, 24, 2
    layer = GraniteMoeHybridMambaLayer(config, 0).float()
    generator = torch.Generator().manual_seed(0)
    for param in layer.parameters():
        param.data.normal_(0, 0.3, generator=generator)
    weights = Mamba2Weights(
        layer.conv1d.weight[:, 0], layer.conv1d.bias, layer.A_log, layer.dt_bias, layer.D, layer.norm.weight,
        layer.norm.variance_epsilon, config.mamba_d_head, num_groups, False,
    )
    with torch.inference_mode():
        for length in (5, 150):
            hidden = torch.randn(1, length, 48, generator=generator)
            chunks, positions = make_chunks([(0, length, 0, -1)])
            chunks, positions = type(chunks)(*(x.cpu() for x in chunks)), positions.cpu()
            u = layer.in_proj(hidden[0])
            y = layer.out_proj(reference.prefill(u, weights, None, positions, chunks))
            torch.testing.assert_close(y, layer(hidden)[0], atol=1e-5, rtol=1e-5)

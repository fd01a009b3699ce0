"""The kernels of the gated delta net against their references, and the references against the plain recurrence.

Compiled where there is a GPU, under Triton's interpreter elsewhere. Outputs and scratch are poisoned first.
"""

import pytest
import torch
from histories import at_night

from nanovllm.kernels.gated_delta import decode, prefill, reference
from nanovllm.kernels.gated_delta.reference import GatedDeltaStates, GatedDeltaWeights

from . import DEVICE
from .chunks import PADDING, SAVED, SEQUENCES, int32, make_chunks

pytestmark = pytest.mark.usefixtures("poisoned")
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # relative, of the root mean square


def make_layer(num_key_heads=2, num_value_heads=2, key_dim=32, value_dim=32, taps=4, dtype=torch.float32):
    channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    return GatedDeltaWeights(
        (torch.randn(channels, taps, device=DEVICE) / 2).to(dtype),
        torch.linspace(-5, 1, num_value_heads, device=DEVICE),  # slow and fast decays
        torch.randn(num_value_heads, device=DEVICE),
        (torch.rand(value_dim, device=DEVICE) + 0.5).to(dtype), 1e-6, num_key_heads,
    )  # fmt: skip


def make_states(weights, dtype=torch.float32, num_rows=PADDING + 1):
    channels, taps = weights.conv.shape
    _, num_value_heads, key_dim, value_dim = weights.sizes
    return GatedDeltaStates(
        torch.randn(num_rows, taps, channels, device=DEVICE).to(weights.conv.dtype),
        torch.randn(num_rows, num_value_heads, value_dim, key_dim, device=DEVICE).to(dtype),
    )


def make_inputs(weights, num_tokens):
    """u and ba, views of one projection's result."""
    channels, num_value_heads = len(weights.conv), len(weights.A_log)
    widths = [channels + num_value_heads * len(weights.norm), 2 * num_value_heads]
    return torch.randn(num_tokens, sum(widths) + 3, device=DEVICE).to(weights.conv.dtype)[:, 3:].split(widths, dim=1)


def clone(states):
    return GatedDeltaStates(states.conv.clone(), states.delta.clone())


def assert_close(actual, expected, dtype):
    """All elements, and their root mean square: the norm amplifies rounding where a head's o is small."""
    assert actual.dtype == expected.dtype
    actual, expected = actual.float(), expected.float()
    assert actual.isfinite().all()
    error, rms = actual - expected, expected.square().mean().sqrt()
    mean, largest = error.square().mean().sqrt() / rms, (error.abs() / (rms + expected.abs())).max()
    assert mean < TOLERANCE[dtype] and largest < 20 * TOLERANCE[dtype], f"{mean:.2g}, up to {largest:.2g}"


def assert_states_close(actual, expected, dtype):
    assert torch.equal(actual.conv, expected.conv)
    assert_close(actual.delta, expected.delta, dtype)


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "heads", "taps"),
    [
        (torch.float32, torch.float32, (2, 2, 32, 64), 4),
        (torch.float32, torch.float16, (1, 3, 32, 64), 2),
        (torch.bfloat16, torch.float32, (2, 6, 32, 64), 4),
        (torch.bfloat16, torch.float16, (2, 4, 32, 64), 3),
        pytest.param(torch.bfloat16, torch.float32, (16, 32, 128, 128), 4, marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, torch.float16, (16, 48, 128, 128), 4, marks=pytest.mark.gpu),
    ],
)
def test_decode(dtype, state_dtype, heads, taps):
    weights = make_layer(*heads, taps, dtype)
    states = make_states(weights, state_dtype)
    twin_states = clone(states)
    rows, slots = int32([3, 0, PADDING, 5, PADDING]), int32([10, 0, -1, 7, -1])
    for positions in ([0, 1, 0, 70, 9], [1, 2, 0, 71, 9]):
        u, ba = make_inputs(weights, len(rows))
        arguments = u, ba, weights, states, int32(positions), slots, rows
        y = decode.decode(*arguments)
        assert (y[slots < 0] == 0).all()
        twin = reference.decode(*arguments[:3], twin_states, *arguments[4:])
        assert_close(y, twin, dtype)
        assert_states_close(states, twin_states, max(dtype, state_dtype, key=TOLERANCE.get))


def test_states_in_fp16_are_saturated():
    weights = make_layer()
    states = make_states(weights, torch.float16)
    states.delta[:] = 65504
    u, ba = make_inputs(weights, 1)
    ba[:] = torch.tensor([9.0] * 2 + [-9.0] * 2, device=DEVICE)  # all of beta, no decay
    twin_states = clone(states)
    decode.decode(u, ba, weights, states, int32([5]), int32([0]), int32([2]))
    reference.decode(u, ba, weights, twin_states, int32([5]), int32([0]), int32([2]))
    assert states.delta[2].abs().max() == 65504
    assert_states_close(states, twin_states, torch.float16)


def check_prefill(weights, sequences, saved=None, state_dtype=torch.float32):
    """The kernels' result, states and rest of the states against the reference's."""
    dtype = weights.conv.dtype
    chunks, positions = make_chunks(sequences, saved)
    u, ba = make_inputs(weights, len(positions))
    states = make_states(weights, state_dtype, num_rows=len(sequences) + PADDING + 1)
    twin_states = clone(states)
    y = prefill.prefill(u, ba, weights, states, positions, chunks)
    assert_close(y, reference.prefill(u, ba, weights, twin_states, positions, chunks), dtype)
    assert_states_close(states, twin_states, max(dtype, state_dtype, key=TOLERANCE.get))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 63, 64, 65, 130])
def test_prefill_of_a_sequence(num_tokens):
    check_prefill(make_layer(), [(0, num_tokens, 3, -1)])


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "heads", "taps"),
    [
        (torch.float32, torch.float32, (2, 6, 32, 64), 4),
        (torch.float16, torch.float32, (1, 3, 64, 32), 3),
        *at_night((torch.float32, torch.float16, (1, 1, 32, 64), 2)),
        pytest.param(torch.bfloat16, torch.float32, (16, 32, 128, 128), 4, marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, torch.float16, (16, 48, 128, 128), 4, marks=pytest.mark.gpu),
        pytest.param(torch.float16, torch.float32, (16, 16, 128, 128), 4, marks=pytest.mark.gpu),
    ],
)
def test_prefill_of_several_sequences(dtype, state_dtype, heads, taps):
    check_prefill(make_layer(*heads, taps, dtype), SEQUENCES, SAVED, state_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[2048], [600], [300] * 40])
def test_prefill_of_published_heads(lengths):
    check_prefill(make_layer(16, 32, 128, 128, dtype=torch.bfloat16), [(0, n, i, -1) for i, n in enumerate(lengths)])


def test_prefill_without_states():
    weights = make_layer(1, 2)
    chunks, positions = make_chunks([(0, 65, 0, -1), (7, 3, 1, 5)])
    arguments = *make_inputs(weights, len(positions)), weights, None, positions, chunks
    assert_close(
        prefill.prefill(*arguments), reference.prefill(*arguments), torch.float32
    )


def test_equal_tokens():
    """Keys that are all equal, without decay: powers of A reach 1e17."""
    weights = make_layer(1, 1)._replace(A_log=torch.full((1,), -20.0, device=DEVICE))
    chunks, positions = make_chunks([(0, 130, 0, -1)])
    u, ba = make_inputs(weights, 130)
    u[:], ba[:, 0] = u[:1].clone(), 5.0
    y = prefill.prefill(u, ba, weights, make_states(weights), positions, chunks)
    assert_close(y, recurrence(u, ba, weights)[0], torch.float32)


@pytest.mark.parametrize("ops", [(prefill, decode), (reference, reference)])
def test_prefill_then_decode_is_the_recurrence(ops):
    """In one launch, and in two and five steps, against a plain loop over tokens in fp64."""
    weights = make_layer(2, 4, 32, 64)
    chunks, positions = make_chunks([(0, 135, 2, -1)])
    u, ba = make_inputs(weights, 135)
    expected, state = recurrence(u, ba, weights)
    whole, states = make_states(weights), make_states(weights)
    y = ops[0].prefill(u, ba, weights, whole, positions, chunks)
    parts = []
    for begin, end, load_row in ((0, 40, -1), (40, 130, 2)):
        chunks, _ = make_chunks([(begin, end - begin, 2, load_row)])
        parts.append(
            ops[0].prefill(u[begin:end], ba[begin:end], weights, states, positions[begin:end], chunks)
        )
    for i in range(130, 135):  # positions[i] by a kernel: no decode step may follow another without one between
        arguments = u[i : i + 1], ba[i : i + 1], weights, states, positions[i : i + 1] + 0, int32([i]), int32([2])
        parts.append(ops[1].decode(*arguments))
    for result, left in ((y, whole), (torch.cat(parts), states)):
        assert_close(result, expected, torch.float32)
        assert_close(left.delta[2], state, torch.float32)


def recurrence(u, ba, weights):
    """A sequence from its start, token by token and head by head: y and S, computed in fp64."""
    num_key_heads, num_value_heads, key_dim, value_dim = weights.sizes
    channels, taps = weights.conv.shape
    x, ba, conv = (x.double() for x in (u, ba, weights.conv))
    key_channels = num_key_heads * key_dim
    S = torch.zeros(num_value_heads, value_dim, key_dim, dtype=torch.float64, device=u.device)
    rows = []
    for t in range(len(u)):
        c = sum(conv[:, taps - 1 - i] * x[t - i, :channels] for i in range(min(taps, t + 1)))
        c = c / (1 + torch.exp(-c))
        for j in range(num_value_heads):
            head = j * num_key_heads // num_value_heads * key_dim
            q, k = c[head : head + key_dim], c[key_channels + head : key_channels + head + key_dim]
            q, k = (y / (y @ y + 1e-6).sqrt() for y in (q, k))
            v = c[2 * key_channels + j * value_dim :][:value_dim]
            z = x[t, channels + j * value_dim :][:value_dim]
            step = torch.log1p(torch.exp(ba[t, num_value_heads + j] + weights.dt_bias[j].double()))
            S[j] *= torch.exp(-torch.exp(weights.A_log[j].double()) * step)
            S[j] += torch.outer((v - S[j] @ k) / (1 + torch.exp(-ba[t, j])), k)
            o = S[j] @ q / key_dim**0.5
            o = o / (o.square().mean() + weights.eps).sqrt() * weights.norm.double()
            rows.append(o * z / (1 + torch.exp(-z)))
    return torch.cat(rows).view(len(u), -1).to(u.dtype), S.float()

"""The kernels of the gated delta net against their references, and the references against the plain recurrence.

Compiled where there is a GPU, under Triton's interpreter elsewhere. Outputs and scratch are poisoned first.
"""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from nanovllm.kernels.delta import decode, reference  # noqa: E402
from nanovllm.kernels.delta.reference import DeltaStates, DeltaWeights  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PADDING = 7  # a row of the states


def make_layer(num_key_heads=2, num_value_heads=2, key_dim=16, value_dim=16, taps=4, dtype=torch.float32):
    channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    return DeltaWeights(
        (torch.randn(channels, taps, device=DEVICE) / 2).to(dtype),
        torch.linspace(-5, 1, num_value_heads, device=DEVICE),  # slow and fast decays
        torch.randn(num_value_heads, device=DEVICE),
        (torch.rand(value_dim, device=DEVICE) + 0.5).to(dtype), 1e-6, num_key_heads,
    )  # fmt: skip


def make_states(weights, dtype=torch.float32, num_rows=PADDING + 1):
    channels, taps = weights.conv.shape
    _, num_value_heads, key_dim, value_dim = weights.sizes
    return DeltaStates(
        torch.randn(num_rows, taps, channels, device=DEVICE).to(weights.conv.dtype),
        torch.randn(num_rows, num_value_heads, value_dim, key_dim, device=DEVICE).to(dtype),
    )


def make_inputs(weights, num_tokens):
    """u and ba, views of one projection's result."""
    channels, num_value_heads = len(weights.conv), len(weights.A_log)
    widths = [channels + num_value_heads * len(weights.norm), 2 * num_value_heads]
    return torch.randn(num_tokens, sum(widths) + 3, device=DEVICE).to(weights.conv.dtype)[:, 3:].split(widths, dim=1)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def clone(states):
    return DeltaStates(states.conv.clone(), states.delta.clone())


def assert_close(actual, expected, dtype):
    """All elements, relative to the root mean square, so that the few large ones excuse nothing."""
    assert actual.dtype == expected.dtype
    actual, expected = actual.float(), expected.float()
    assert actual.isfinite().all()
    rms = expected.square().mean().sqrt()
    error = (actual - expected).abs() / (rms + expected.abs())
    assert error.max() < TOLERANCE[dtype], error.max()


def assert_states_close(actual, expected, dtype):
    assert torch.equal(actual.conv, expected.conv)
    assert_close(actual.delta, expected.delta, dtype)


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "heads", "taps"),
    [
        (torch.float32, torch.float32, (2, 2, 16, 32), 4),
        (torch.float32, torch.float16, (1, 3, 32, 16), 2),
        (torch.bfloat16, torch.float32, (2, 6, 16, 16), 4),
        (torch.bfloat16, torch.float16, (2, 4, 32, 16), 3),
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
        y = decode.gated_delta_decode(*arguments)
        assert (y[slots < 0] == 0).all()
        twin = reference.gated_delta_decode(*arguments[:3], twin_states, *arguments[4:])
        assert_close(y, twin, dtype)
        assert_states_close(states, twin_states, max(dtype, state_dtype, key=TOLERANCE.get))


def test_states_in_fp16_are_saturated():
    weights = make_layer()
    states = make_states(weights, torch.float16)
    states.delta[:] = 65504
    u, ba = make_inputs(weights, 1)
    ba[:] = torch.tensor([9.0] * 2 + [-9.0] * 2, device=DEVICE)  # all of beta, no decay
    twin_states = clone(states)
    decode.gated_delta_decode(u, ba, weights, states, int32([5]), int32([0]), int32([2]))
    reference.gated_delta_decode(u, ba, weights, twin_states, int32([5]), int32([0]), int32([2]))
    assert states.delta[2].abs().max() == 65504
    assert_states_close(states, twin_states, torch.float16)

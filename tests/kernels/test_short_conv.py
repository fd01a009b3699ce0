"""The kernels of the short convolution against their references, and the references against a plain loop over tokens.

Compiled where there is a GPU, under Triton's interpreter elsewhere. Outputs are poisoned first.
"""

import pytest
import torch
from histories import at_night

from nanovllm.kernels.short_conv import decode, prefill, reference
from nanovllm.kernels.short_conv.reference import ShortConvStates, ShortConvWeights

from . import DEVICE
from .chunks import PADDING, int32, make_chunks

pytestmark = pytest.mark.usefixtures("poisoned")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative, and of the largest element
OPS = [(prefill, decode), (reference, reference)]


def make_layer(channels, taps, dtype, num_rows=PADDING + 1):
    weights = ShortConvWeights(torch.randn(channels, taps, device=DEVICE).to(dtype))
    return weights, ShortConvStates(torch.randn(num_rows, taps, channels, device=DEVICE).to(dtype))


def make_inputs(weights, num_tokens):
    """A view of a wider tensor."""
    N = len(weights.conv)
    return torch.randn(num_tokens, 3 * N + 5, device=DEVICE).to(weights.conv.dtype)[:, 5:]


def clone(states):
    return ShortConvStates(states.conv.clone())


def assert_close(actual, expected):
    assert actual.dtype == expected.dtype and actual.isfinite().all()
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


SHAPES = [
    (torch.float32, 80, 3), (torch.bfloat16, 300, 4), (torch.float16, 64, 2),
    pytest.param(torch.bfloat16, 2048, 3, marks=pytest.mark.gpu),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "channels", "taps"), SHAPES)
def test_decode(dtype, channels, taps):
    """Padding rows are zeros, and leave no input behind."""
    weights, states = make_layer(channels, taps, dtype)
    twin_states = clone(states)
    rows, slots = int32([3, 0, PADDING, 5, PADDING]), int32([10, 0, -1, 7, -1])
    for positions in ([0, 1, 0, 70, 9], [1, 2, 0, 71, 9], [2, 3, 0, 72, 9]):
        arguments = make_inputs(weights, len(rows)), weights, states, int32(positions), slots, rows
        y = decode.decode(*arguments)
        assert (y[slots < 0] == 0).all()
        assert_close(y, reference.decode(*arguments[:2], twin_states, *arguments[3:]))
        assert_close(states.conv, twin_states.conv)  # Triton's interpreter truncates to bf16


@pytest.mark.parametrize(("dtype", "channels", "taps"), SHAPES)
def test_prefill_of_several_sequences(dtype, channels, taps):
    """Off the grid of chunks, from the own row, from another, from none; with snapshots on the way and at the end.

    The first chunks of two sequences have one token, so their snapshots hold an input of the row that the sequence
    began with, and overwrites.
    """
    sequences = [
        (70, 70, 0, 4), (0, 0, 1, -1), (64, 1, 2, 13), (5, 130, 3, -1), (1, 2, 5, 5), (192, 65, 6, 4), (0, 1, 8, -1),
        (63, 130, 14, 14), (63, 1, 15, 15),
    ]  # fmt: skip
    saved = {(0, 128): 9, (3, 64): 10, (3, 135): 11, (4, 3): 12, (7, 64): 16, (7, 193): 17, (8, 64): 18}
    weights, states = make_layer(channels, taps, dtype, num_rows=20)
    twin_states, (chunks, positions) = clone(states), make_chunks(sequences, saved)
    u = make_inputs(weights, len(positions))
    y = prefill.prefill(u, weights, states, positions, chunks)
    assert_close(y, reference.prefill(u, weights, twin_states, positions, chunks))
    assert_close(states.conv, twin_states.conv)


@pytest.mark.parametrize("ops", OPS)
def test_prefill_without_states(ops):
    weights, _ = make_layer(48, 3, torch.float32)
    chunks, positions = make_chunks([(0, 65, 0, -1), (7, 3, 1, 5)])
    u = make_inputs(weights, len(positions))
    y = ops[0].prefill(u, weights, None, positions, chunks)
    assert_close(y, torch.cat((plain(u[:65], weights), plain(u[65:], weights))))


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("taps", [3, *at_night(2, 5)])
def test_prefill_then_decode_is_the_plain_loop(ops, taps):
    """In one launch, and in three and five steps. A decode step may follow another only with a launch between them."""
    weights, whole = make_layer(40, taps, torch.float32)
    states = clone(whole)
    u, (chunks, positions) = make_inputs(weights, 135), make_chunks([(0, 135, 2, -1)])
    expected = plain(u, weights)
    assert_close(ops[0].prefill(u, weights, whole, positions, chunks), expected)
    parts = []
    for begin, end, load_row in ((0, 1, -1), (1, 40, 2), (40, 130, 2)):
        chunks, _ = make_chunks([(begin, end - begin, 2, load_row)])
        parts.append(ops[0].prefill(u[begin:end], weights, states, positions[begin:end], chunks))
    for i in range(130, 135):
        parts.append(ops[1].decode(u[i : i + 1], weights, states, positions[i : i + 1] + 0, int32([i]), int32([2])))
    assert_close(torch.cat(parts), expected)
    last = torch.arange(135 - taps + 1, 135) % taps  # the slot before them holds an input that nobody reads again
    assert_close(states.conv[2, last], whole.conv[2, last])


def plain(u, weights):
    """A sequence from its start, token by token, computed in fp64."""
    b, c, x = u.double().chunk(3, dim=1)
    taps, bx = weights.conv.shape[1], b * x
    rows = [
        c[t] * sum(weights.conv[:, taps - 1 - i].double() * bx[t - i] for i in range(min(taps, t + 1)))
        for t in range(len(u))
    ]  # fmt: skip
    return torch.stack(rows).to(u.dtype)

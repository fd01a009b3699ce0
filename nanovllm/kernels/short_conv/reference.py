"""PyTorch references of the short convolution of LFM2 (arXiv:2511.23404): a causal convolution between two gates.

Owns the meaning of the operations and the layout of the state; ``recurrent/reference.py`` describes a batch. Each
channel computes::

    y_t = c_t (w_0 b_{t-W+1} x_{t-W+1} + ... + w_{W-1} b_t x_t)

T packed tokens, B sequences of a decode step, N channels, W tokens that the convolution sees.
"""

from typing import NamedTuple

import torch

from ..recurrent.reference import Taps, conv_step


class ShortConvWeights(NamedTuple):
    """This rank's weights of a layer."""

    conv: torch.Tensor  # [N, W]; the last column is for the token itself


class ShortConvStates(NamedTuple):
    """A layer's states: a row for each request slot, one for padding, and one for each snapshot."""

    conv: torch.Tensor  # [rows, W, N], a ring of products b x: that of position p is in slot p % W


def prefill(u, weights, states, positions, chunks):
    """Run packed sequences, each from the inputs in its row of ``load_rows``.

    Args:
        u: [T, 3 N], the gates b and c, and x.
        states: written at ``rows`` and ``save_rows``; None: all sequences begin with zeros and store nothing.
        positions: i32[T].
        chunks: the chunks of the sequences.

    Returns:
        [T, N].
    """
    b, c, x = u.chunk(3, dim=1)
    ring = None if states is None else states.conv
    taps = Taps.of(b * x, ring, positions, chunks, weights.conv.shape[1])
    y = (c * taps.conv(weights.conv)).to(u.dtype)
    if ring is not None:
        taps.store(ring, positions, chunks)
    return y


def decode(u, weights, states, positions, slot_mapping, req_indices):
    """Run one token of each of B sequences, with states in the rows ``req_indices``; u, positions as for prefill.

    slot_mapping: i32[B]; a token with -1 is padding: its result is 0, and it stores no state.
    """
    y, live = u.new_zeros(len(u), len(weights.conv)), slot_mapping >= 0
    b, c, x = u[live].chunk(3, dim=1)
    sums = conv_step(b * x, weights.conv, states.conv, positions[live].long(), req_indices[live].long())
    y[live] = (c * sums).to(u.dtype)
    return y

"""PyTorch references of Mamba-2 (arXiv:2405.21060): a recurrent mixer whose memory has a fixed size.

Owns the meaning of the operations and the layout of their inputs. Each head has a state S [P, N] in fp32, which a token
with input x, time step dt, and B and C of the head's group changes and reads::

    S = exp(dt A) S + dt x B^T,    A = -exp(A_log)
    y = S C + D x

x, B and C come from a causal convolution over the last W tokens, with a bias and SiLU. y is gated by silu(z), and
normalised over the channels of a group.

T packed tokens, S sequences, H heads of P channels, G groups; head j has group j * G // H. N channels of B and C.
Inputs u [T, 2 H P + 2 G N + H] have z | x | B | C | dt, of which x, B and C are the convolution's channels.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..recurrent.reference import Taps, as_stored, conv_step


class Mamba2Weights(NamedTuple):
    """This rank's weights of a layer, and its shape."""

    conv: torch.Tensor  # [channels, W] of x, B, C, channels = H P + 2 G N; the last column is for the token itself
    conv_bias: torch.Tensor | None  # [channels]
    A_log: torch.Tensor  # fp32 [H]
    dt_bias: torch.Tensor  # fp32 [H]
    D: torch.Tensor  # fp32 [H]
    norm: torch.Tensor | None  # [H P]; None: the gate alone
    eps: float
    head_dim: int
    num_groups: int
    norms_first: bool  # the gate multiplies the norm's result, not its input
    # Averages a tensor over the ranks that share a group; None: this rank has all channels of its groups.
    mean_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """H, G, P, N."""
        num_heads = len(self.A_log)
        state_dim = (len(self.conv) - num_heads * self.head_dim) // (2 * self.num_groups)
        return num_heads, self.num_groups, self.head_dim, state_dim


class Mamba2States(NamedTuple):
    """A layer's states: a row for each request slot, one for padding, and one for each snapshot."""

    conv: torch.Tensor  # [rows, W, channels], a ring: the input of position p is in slot p % W
    ssm: torch.Tensor  # [rows, H, P, N], fp32 or fp16


def takes_heads(head_dim, state_dim):
    """Whether the operations run with heads of P and states of N channels; the references with any."""
    return True


def prefill(u, weights, states, positions, chunks):
    """Run packed sequences, each from the states in its row of ``load_rows``.

    Args:
        u: [T, z | x | B | C | dt].
        states: written at ``rows`` and ``save_rows``; None: all sequences begin with zeros and store nothing.
        positions: i32[T].
        chunks: the ``Chunks`` of the sequences.

    Returns:
        [T, H P].
    """
    num_heads, _, head_dim, state_dim = weights.sizes
    channels, W = weights.conv.shape
    width, ring = num_heads * head_dim, None if states is None else states.conv
    taps = Taps.of(u[:, width : width + channels], ring, positions, chunks, W)
    x, B, C, dt = after_conv(taps.conv(weights.conv), u, weights)
    if states is not None:
        taps.store(states.conv, positions, chunks)
    y = u.new_zeros(len(u), width)
    first_chunks, bounds, save_rows = (x.tolist() for x in (chunks.first_chunks, chunks.bounds, chunks.save_rows))
    for i, (row, load_row) in enumerate(zip(chunks.rows.tolist(), chunks.load_rows.tolist(), strict=True)):
        if first_chunks[i] == first_chunks[i + 1]:
            continue
        state = u.new_zeros(num_heads, head_dim, state_dim, dtype=torch.float32)
        if load_row >= 0 and states is not None:
            state = states.ssm[load_row].float()
        for chunk in range(first_chunks[i], first_chunks[i + 1]):
            tokens = slice(bounds[chunk], bounds[chunk + 1])
            o, state = mamba2_chunk(*(each[tokens] for each in (x, B, C, dt)), weights, state)
            y[tokens] = o.flatten(1).to(u.dtype)
            if states is not None and save_rows[chunk] >= 0:
                states.ssm[save_rows[chunk]] = as_stored(state, states.ssm.dtype)
        if states is not None:
            states.ssm[row] = as_stored(state, states.ssm.dtype)
    return gate_and_norm(y, u, weights)


def decode(u, weights, states, positions, slot_mapping, req_indices):
    """Run one token of each of B sequences, with states in the rows ``req_indices``; u and positions as for prefill.

    slot_mapping: i32[B]; a token with -1 is padding: its result is 0, and it stores no state.
    """
    num_heads, _, head_dim, _ = weights.sizes
    width = num_heads * head_dim
    y = u.new_zeros(len(u), width)
    live = slot_mapping >= 0
    all_u, u, positions, rows = u, u[live], positions[live].long(), req_indices[live].long()
    convolved = conv_step(u[:, width : width + len(weights.conv)], weights.conv, states.conv, positions, rows)
    x, B, C, dt = after_conv(convolved, u, weights)
    decay = (-weights.A_log.float().exp() * dt).exp()
    state = states.ssm[rows].float() * decay[..., None, None] + (dt[..., None] * x)[..., None] * B[:, :, None]
    o = (state @ C[..., None]).squeeze(-1) + weights.D.float()[:, None] * x
    y[live] = o.flatten(1).to(u.dtype)
    states.ssm[rows] = as_stored(state, states.ssm.dtype)
    return gate_and_norm(y, all_u, weights)


def gate_and_norm(y, u, weights):
    """Multiply y [T, H P] by silu(z), and normalise it over each group; -> [T, H P]."""
    dtype, z = y.dtype, F.silu(u[:, : y.shape[1]].float())
    y = y.float()
    if weights.norm is None:
        return (y * z).to(dtype)
    y = y if weights.norms_first else y * z
    groups = y.unflatten(1, (weights.num_groups, -1))
    mean_square = groups.square().mean(-1, keepdim=True)
    if weights.mean_over_ranks is not None:
        mean_square = weights.mean_over_ranks(mean_square)
    y = (groups * torch.rsqrt(mean_square + weights.eps)).flatten(1)
    if weights.norms_first:
        return (y * weights.norm.float() * z).to(dtype)
    return (y.to(dtype).float() * weights.norm.float()).to(dtype)


def after_conv(convolved, u, weights):
    """x [T, H, P], B and C [T, H, N], and dt [T, H], all fp32, from the convolution's sums [T, channels]."""
    num_heads, num_groups, head_dim, state_dim = weights.sizes
    y = convolved if weights.conv_bias is None else convolved + weights.conv_bias.float()
    y = F.silu(y).to(u.dtype).float()
    x, *of_groups = y.split([num_heads * head_dim] + [num_groups * state_dim] * 2, dim=-1)
    B, C = (
        each.unflatten(-1, (num_groups, state_dim)).repeat_interleave(num_heads // num_groups, dim=-2)
        for each in of_groups
    )
    dt = F.softplus(u[:, -num_heads:].float() + weights.dt_bias.float())
    return x.unflatten(-1, (num_heads, head_dim)), B, C, dt


def mamba2_chunk(x, B, C, dt, weights, state):
    """The recurrence over c tokens at once: y [c, H, P], and the state after them.

    With g = dt A, G = cumsum(g) and L_ij = exp(G_i - G_j) for j <= i: y = (C B^T * L) dt x + exp(G) C S^T + D x;
    S = exp(G_last) S + (exp(G_last - G) dt x)^T B.
    """
    x, B, C, dt = (each.transpose(0, 1) for each in (x, B, C, dt))  # [H, c, ...]
    G = (-weights.A_log.float().exp()[:, None] * dt).cumsum(1)
    decay = (G[:, :, None] - G[:, None, :]).tril().exp().tril()
    scaled = dt[..., None] * x
    y = ((C @ B.mT) * decay) @ scaled + G.exp()[..., None] * (C @ state.mT) + weights.D.float()[:, None, None] * x
    rest = (G[:, -1:] - G).exp()[..., None]
    state = state * G[:, -1].exp()[:, None, None] + (scaled * rest).mT @ B
    return y.transpose(0, 1), state

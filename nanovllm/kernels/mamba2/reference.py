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

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Mamba2Weights(NamedTuple):
    """This rank's weights of a layer, and its shape."""

    conv: torch.Tensor  # [channels, W] of x, B, C, channels = H P + 2 G N; the last column is the token's own
    conv_bias: torch.Tensor | None  # [channels]
    A_log: torch.Tensor  # fp32 [H]
    dt_bias: torch.Tensor  # fp32 [H]
    D: torch.Tensor  # fp32 [H]
    norm: torch.Tensor | None  # [H P]; None: the gate alone
    eps: float
    head_dim: int
    num_groups: int
    norms_first: bool  # the gate multiplies the norm's result, not its input

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """H, G, P, N."""
        num_heads = len(self.A_log)
        state_dim = (len(self.conv) - num_heads * self.head_dim) // (2 * self.num_groups)
        return num_heads, self.num_groups, self.head_dim, state_dim


def takes_mamba_heads(head_dim, state_dim):
    """Whether the operations run with heads of P and states of N channels; the references with any."""
    return True


def mamba2_prefill(u, weights, states, positions, chunks):
    """Run packed sequences, each from the states in its row of ``load_rows``.

    Args:
        u: [T, z | x | B | C | dt].
        states: (ring [rows, W, channels], S [rows, H, P, N] in fp32 or fp16), written at ``rows`` and ``save_rows``;
            None: all sequences begin with zeros and store nothing. The input of position p is in the ring's slot p % W.
        positions: i32[T].
        chunks: the ``Chunks`` of the sequences.

    Returns:
        y [T, H P], before gate and norm.
    """
    num_heads, _, head_dim, state_dim = weights.sizes
    channels, W = weights.conv.shape
    width = num_heads * head_dim
    y = u.new_zeros(len(u), width)
    first_chunks, bounds, save_rows = (x.tolist() for x in (chunks.first_chunks, chunks.bounds, chunks.save_rows))
    for i, (row, load_row) in enumerate(zip(chunks.rows.tolist(), chunks.load_rows.tolist(), strict=True)):
        start, stop = chunks.cu_seqlens[i : i + 2].tolist()
        if start == stop:
            continue
        position = int(positions[start])
        before = torch.arange(position - W + 1, position, device=u.device)
        if load_row < 0 or states is None:
            taps = u.new_zeros(W - 1, channels)
            state = u.new_zeros(num_heads, head_dim, state_dim, dtype=torch.float32)
        else:
            ring, stored = states
            taps, state = ring[load_row, before % W], stored[load_row].float()
        taps = torch.cat((taps, u[start:stop, width : width + channels]))  # from W - 1 positions before ``start`` on
        x, B, C, dt = after_conv(taps, u[start:stop, width + channels :], weights)
        for chunk in range(first_chunks[i], first_chunks[i + 1]):
            tokens = slice(bounds[chunk] - start, bounds[chunk + 1] - start)
            o, state = mamba2_chunk(*(each[tokens] for each in (x, B, C, dt)), weights, state)
            y[bounds[chunk] : bounds[chunk + 1]] = o.flatten(1).to(u.dtype)
            saved = [] if states is None else [save_rows[chunk]] * (save_rows[chunk] >= 0)
            if states is not None and tokens.stop == stop - start:
                saved.append(row)
            for to in saved:
                ring, stored = states
                ring[to, (before + tokens.stop) % W] = taps[tokens.stop : tokens.stop + W - 1]
                stored[to] = as_stored(state, stored.dtype)
    return y


def mamba2_decode(u, weights, states, positions, slot_mapping, req_indices):
    """Run one token of each of B sequences, with states in the rows ``req_indices``; u and positions as for prefill.

    slot_mapping: i32[B]; a token with -1 is padding: its result is 0, and it stores no state.
    """
    num_heads, _, head_dim, _ = weights.sizes
    channels, W = weights.conv.shape
    width, (ring, stored) = num_heads * head_dim, states
    y = u.new_zeros(len(u), width)
    live = slot_mapping >= 0
    u, positions, rows = u[live], positions[live].long(), req_indices[live].long()
    before = positions[:, None] + torch.arange(1 - W, 0, device=u.device)
    inputs = u[:, width : width + channels]
    taps = torch.cat((ring[rows[:, None], before % W], inputs[:, None]), dim=1)  # [B, W, channels]
    x, B, C, dt = (each[:, 0] for each in after_conv(taps, u[:, None, width + channels :], weights))
    decay = (-weights.A_log.float().exp() * dt).exp()
    state = stored[rows].float() * decay[..., None, None] + (dt[..., None] * x)[..., None] * B[:, :, None]
    o = (state @ C[..., None]).squeeze(-1) + weights.D.float()[:, None] * x
    y[live] = o.flatten(1).to(u.dtype)
    ring[rows, positions % W] = inputs
    stored[rows] = as_stored(state, stored.dtype)
    return y


def gate_and_norm(y, u, weights, all_reduce=None, num_ranks=1):
    """Multiply y [T, H P] by silu(z), and normalise it over each group; -> [T, H P].

    all_reduce: sums a tensor over the ``num_ranks`` ranks that share the group; None: the group is this rank's alone.
    """
    dtype, z = y.dtype, F.silu(u[:, : y.shape[1]].float())
    y = y.float()
    if weights.norm is None:
        return (y * z).to(dtype)
    y = y if weights.norms_first else y * z
    groups = y.unflatten(1, (weights.num_groups, -1))
    mean_square = groups.square().mean(-1, keepdim=True)
    if all_reduce is not None:
        mean_square = all_reduce(mean_square) / num_ranks
    y = (groups * torch.rsqrt(mean_square + weights.eps)).flatten(1)
    if weights.norms_first:
        return (y * weights.norm.float() * z).to(dtype)
    return (y.to(dtype).float() * weights.norm.float()).to(dtype)


def as_stored(state, dtype):
    """Convert with saturation."""
    limit = torch.finfo(dtype).max
    return state.clamp(-limit, limit).to(dtype)


def after_conv(taps, dt, weights):
    """x [..., T, H, P], B and C [..., T, H, N], and dt [..., T, H] of tokens, fp32.

    taps: [..., W - 1 + T, channels], inputs of the convolution; dt [..., T, H], before bias and softplus.
    """
    num_heads, num_groups, head_dim, state_dim = weights.sizes
    windows = taps.float().unfold(-2, weights.conv.shape[1], 1)  # [..., T, channels, W]
    y = (windows * weights.conv.float()).sum(-1)
    y = y if weights.conv_bias is None else y + weights.conv_bias.float()
    y = F.silu(y).to(taps.dtype).float()
    x, *of_groups = y.split([num_heads * head_dim] + [num_groups * state_dim] * 2, dim=-1)
    B, C = (
        each.unflatten(-1, (num_groups, state_dim)).repeat_interleave(num_heads // num_groups, dim=-2)
        for each in of_groups
    )
    return x.unflatten(-1, (num_heads, head_dim)), B, C, F.softplus(dt.float() + weights.dt_bias.float())


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

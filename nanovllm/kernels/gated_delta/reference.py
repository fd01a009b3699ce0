"""PyTorch references of the gated delta net (arXiv:2412.06464): a recurrent mixer whose memory has a fixed size.

Owns the meaning of the operations and the layout of the states; ``recurrent/reference.py`` describes a batch. Each
value head has a state S [V, K] in fp32, which a token with key k, value v, decay g <= 0 and rate beta changes and
reads::

    S = exp(g) S
    S = S + beta (v - S k) k^T
    o = S q

q, k and v come from a causal convolution over the last W tokens, and o passes through a gated RMSNorm.

T packed tokens, S sequences, NC chunks, HK key heads of K, HV value heads of V; value head j has key head j * HK // HV.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..recurrent.reference import as_stored

L2_EPS = 1e-6


class GatedDeltaWeights(NamedTuple):
    """This rank's weights of a layer, and its shape."""

    conv: torch.Tensor  # [channels, W] of q, k and v, channels = 2 HK K + HV V; the last column is the token's own
    A_log: torch.Tensor  # fp32 [HV]
    dt_bias: torch.Tensor  # fp32 [HV]
    norm: torch.Tensor  # [V]
    eps: float
    num_key_heads: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """HK, HV, K, V."""
        num_value_heads, value_dim = len(self.A_log), len(self.norm)
        key_channels = (len(self.conv) - num_value_heads * value_dim) // 2
        return self.num_key_heads, num_value_heads, key_channels // self.num_key_heads, value_dim


class GatedDeltaStates(NamedTuple):
    """A layer's states: a row for each request slot, one for padding, and one for each snapshot."""

    conv: torch.Tensor  # [rows, W, channels], a ring: the input of position p is in slot p % W
    delta: torch.Tensor  # [rows, HV, V, K], fp32 or fp16


def takes_heads(key_dim, value_dim):
    """Whether the operations run with heads of K and V; the references with any."""
    return True


def prefill(u, ba, weights, states, positions, chunks):
    """Run packed sequences, each from the states in its row of ``load_rows``.

    Args:
        u: [T, 2 HK K + 2 HV V], q, k, v before the convolution, and the gates z.
        ba: [T, 2 HV], beta before the sigmoid, and the time step before the softplus.
        states: written at ``rows`` and ``save_rows``; None: all sequences begin with zeros and store nothing.
        positions: i32[T].
        chunks: the chunks of the sequences.

    Returns:
        [T, HV V].
    """
    y = u.new_zeros(len(u), weights.sizes[1] * weights.sizes[3])
    W = weights.conv.shape[1]
    first_chunks, bounds, save_rows = (x.tolist() for x in (chunks.first_chunks, chunks.bounds, chunks.save_rows))
    for i, (row, load_row) in enumerate(zip(chunks.rows.tolist(), chunks.load_rows.tolist(), strict=True)):
        start, stop = chunks.cu_seqlens[i : i + 2].tolist()
        if start == stop:
            continue
        position = int(positions[start])
        before = torch.arange(position - W + 1, position, device=u.device)
        taps, state = initial_state(weights, states, load_row, before, u)
        channels = len(weights.conv)
        taps = torch.cat((taps, u[start:stop, :channels]))  # from W - 1 positions before ``start`` on
        q, k, v, g, beta = after_conv(taps, ba[start:stop], weights)
        for chunk in range(first_chunks[i], first_chunks[i + 1]):
            tokens = slice(bounds[chunk] - start, bounds[chunk + 1] - start)
            o, state = delta_chunk(*(x[tokens] for x in (q, k, v, g, beta)), state)
            packed = slice(bounds[chunk], bounds[chunk + 1])
            y[packed] = gated_norm(o, u[packed, channels:], weights)
            if states is not None:
                if save_rows[chunk] >= 0:
                    store_state(states, save_rows[chunk], taps[tokens.stop : tokens.stop + W - 1],
                                before + tokens.stop, state)  # fmt: skip
                if tokens.stop == stop - start:
                    store_state(states, row, taps[1 - W :], before + tokens.stop, state)
    return y


def decode(u, ba, weights, states, positions, slot_mapping, req_indices):
    """Run one token of each of B sequences, with states in the rows ``req_indices``; u, ba, positions as for prefill.

    slot_mapping: i32[B]; a token with -1 is padding: its result is 0, and it stores no state.
    """
    y = u.new_zeros(len(u), weights.sizes[1] * weights.sizes[3])
    channels, W = weights.conv.shape
    live = slot_mapping >= 0
    u, ba, positions, rows = u[live], ba[live], positions[live].long(), req_indices[live].long()
    before = positions[:, None] + torch.arange(1 - W, 0, device=u.device)
    taps = torch.cat((states.conv[rows[:, None], before % W], u[:, None, :channels]), dim=1)  # [B, W, channels]
    q, k, v, g, beta = (x[:, 0] for x in after_conv(taps, ba[:, None], weights))
    state = states.delta[rows].float() * g.exp()[:, :, None, None]
    error = beta[..., None] * (v - (state @ k[..., None]).squeeze(-1))
    state = state + error[..., None] * k[:, :, None]
    y[live] = gated_norm((state @ q[..., None]).squeeze(-1), u[:, channels:], weights)
    states.conv[rows, positions % W] = u[:, :channels]
    states.delta[rows] = as_stored(state, states.delta.dtype)
    return y


def initial_state(weights, states, load_row, before, u):
    """Inputs of the convolution at the positions ``before``, [W - 1, channels], and S, fp32 [HV, V, K]."""
    _, num_value_heads, key_dim, value_dim = weights.sizes
    channels, W = weights.conv.shape
    if load_row < 0 or states is None:
        return u.new_zeros(W - 1, channels), u.new_zeros(num_value_heads, value_dim, key_dim, dtype=torch.float32)
    return states.conv[load_row, before % W], states.delta[load_row].float()


def store_state(states, row, taps, positions, state):
    states.conv[row, positions % states.conv.shape[1]] = taps
    states.delta[row] = as_stored(state, states.delta.dtype)


def after_conv(taps, ba, weights):
    """q, k [..., T, HV, K], v [..., T, HV, V], g and beta [..., T, HV] of tokens, fp32.

    taps: [..., W - 1 + T, channels], inputs of the convolution; ba [..., T, 2 HV].
    """
    num_key_heads, num_value_heads, key_dim, value_dim = weights.sizes
    W = weights.conv.shape[1]
    windows = taps.float().unfold(-2, W, 1)  # [..., T, channels, W]
    y = F.silu((windows * weights.conv.float()).sum(-1)).to(taps.dtype).float()
    q, k, v = y.split([num_key_heads * key_dim, num_key_heads * key_dim, num_value_heads * value_dim], dim=-1)
    q, k = (x.unflatten(-1, (num_key_heads, key_dim)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(num_value_heads // num_key_heads, dim=-2) for x in (q * key_dim**-0.5, k))
    b, a = ba.float().chunk(2, dim=-1)
    g = -weights.A_log.float().exp() * F.softplus(a + weights.dt_bias.float())
    return q, k, v.unflatten(-1, (num_value_heads, value_dim)), g, b.sigmoid()


def delta_chunk(q, k, v, g, beta, state):
    """The recurrence over c tokens at once: o [c, HV, V], and the state after them.

    With G = cumsum(g) and D_ij = exp(G_i - G_j) for j <= i: A = tril(beta_i (k_i . k_j) D_ij, -1), T = (I + A)^-1,
    U = T beta v, W = T beta exp(G) k; new values N = U - W S^T; o = exp(G) q S^T + (q k^T * D) N;
    S = exp(G_last) S + (exp(G_last - G) N)^T k.
    """
    q, k, v, g, beta = (x.transpose(0, 1) for x in (q, k, v, g, beta))  # [HV, c, ...]
    G = g.cumsum(1)
    decay = (G[:, :, None] - G[:, None, :]).tril().exp().tril()
    eye = torch.eye(g.shape[1], device=g.device, dtype=torch.float32)
    A = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    values = torch.cat((beta[..., None] * v, (beta * G.exp())[..., None] * k), dim=-1)
    U, W = torch.linalg.solve_triangular(A + eye, values, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    N = U - W @ state.mT
    o = (q * G.exp()[..., None]) @ state.mT + ((q @ k.mT) * decay) @ N
    state = state * G[:, -1].exp()[:, None, None] + (N * (G[:, -1:] - G).exp()[..., None]).mT @ k
    return o.transpose(0, 1), state


def gated_norm(o, z, weights):
    """RMSNorm of each head of o [T, HV, V], times silu(z [T, HV V]) -> [T, HV V]."""
    dtype = z.dtype
    o = o.to(dtype).float()
    o = (o * torch.rsqrt(o.square().mean(-1, keepdim=True) + weights.eps)).to(dtype) * weights.norm
    return (o.flatten(1).float() * F.silu(z.float())).to(dtype)

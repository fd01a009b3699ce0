"""PyTorch references that the operations of several kinds of recurrent layers share, and the description of a prefill.

Owns ``Chunks``, and the depthwise causal convolution with its ring: slot p % W of a row has the input of position p.

T packed tokens, S sequences, NC chunks, B sequences of a decode step, W tokens that a convolution sees.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

CHUNK = 64  # tokens that prefill computes at once; chunks end at multiples of it, counted from a sequence's first token


class Chunks(NamedTuple):
    """The sequences of a prefill in chunks; all i32. An empty sequence or chunk does nothing."""

    cu_seqlens: torch.Tensor  # [S + 1], cumulative tokens
    rows: torch.Tensor  # [S], rows that get the states after each sequence
    load_rows: torch.Tensor  # [S], rows of the states that sequences begin with; -1: zeros
    first_chunks: torch.Tensor  # [S + 1], cumulative chunks
    bounds: torch.Tensor  # [NC + 1], cumulative tokens of the chunks
    seqs: torch.Tensor  # [NC], sequence of a chunk
    save_rows: torch.Tensor  # [NC], a snapshot of the states after this chunk; -1: none

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> "Chunks | None":
        """Make the chunks from a prefill's named arrays (``CHUNK_ARRAYS``); None for a decode step."""
        return cls(*(tensors[name] for name in CHUNK_ARRAYS)) if CHUNK_ARRAYS[0] in tensors else None


CHUNK_ARRAYS = tuple(f"chunks_{field}" for field in Chunks._fields)


class Taps(NamedTuple):
    """The inputs of a convolution in a prefill: each sequence, preceded by its W - 1 earlier inputs."""

    inputs: torch.Tensor  # [S (W - 1) + T, channels]
    tokens: torch.Tensor  # i64[T], their rows in ``inputs``

    @classmethod
    def of(cls, u, ring, positions, chunks, num_taps):
        """Gather the inputs from u [T, channels] and from ``ring`` [rows, W, channels], which may be None."""
        W1, (S, cu_seqlens) = num_taps - 1, (len(chunks.rows), chunks.cu_seqlens.long())
        tokens = torch.arange(len(u), device=u.device)
        seqs = torch.searchsorted(cu_seqlens[1:], tokens, right=True).clamp_(max=S - 1)  # padding follows the last one
        tokens += (seqs + 1) * W1
        inputs = u.new_zeros(len(u) + S * W1, u.shape[1])
        inputs[tokens] = u
        restored = ((chunks.load_rows >= 0) & (cu_seqlens.diff() > 0)).nonzero()[:, 0]
        if ring is not None and len(restored):
            starts, before = cu_seqlens[restored], torch.arange(-W1, 0, device=u.device)
            places = (positions[starts].long()[:, None] + before) % num_taps
            rows = (starts + (restored + 1) * W1)[:, None] + before
            inputs[rows] = ring[chunks.load_rows[restored].long()[:, None], places]
        return cls(inputs, tokens)

    def conv(self, weight):
        """The sums [T, channels], fp32, with ``weight`` [channels, W]; its last column is for the token itself."""
        W = weight.shape[1]
        inputs, columns = self.inputs.float(), weight.float().unbind(1)
        y = inputs * columns[W - 1]
        for i in range(1, W):
            y[i:].addcmul_(inputs[:-i], columns[W - 1 - i])
        return y[self.tokens]

    def store(self, ring, positions, chunks):
        """Store the last W - 1 inputs of each sequence at its row, and at the end of a chunk that is saved."""
        W, device = ring.shape[1], self.inputs.device
        cu_seqlens = chunks.cu_seqlens.long()
        seqs, saved = cu_seqlens.diff().nonzero()[:, 0], (chunks.save_rows >= 0).nonzero()[:, 0]
        rows = torch.cat((chunks.rows[seqs], chunks.save_rows[saved])).long()
        ends = torch.cat((cu_seqlens[seqs + 1], chunks.bounds[saved + 1].long()))
        seqs = torch.cat((seqs, chunks.seqs[saved].long()))
        before = torch.arange(1 - W, 0, device=device)
        starts = cu_seqlens[seqs]
        places = (positions[starts].long() + ends - starts)[:, None] + before
        ring[rows[:, None], places % W] = self.inputs[(ends + (seqs + 1) * (W - 1))[:, None] + before]


def conv_step(u, weight, ring, positions, rows):
    """The convolution's sums at one token of each of B sequences, fp32 [B, channels]; u goes into the ring.

    u: [B, channels]; positions and rows: i64[B].
    """
    W = weight.shape[1]
    before = positions[:, None] + torch.arange(1 - W, 0, device=u.device)
    taps = ring[rows[:, None], before % W].float()
    ring[rows, positions % W] = u
    return (taps * weight[:, :-1].T.float()).sum(1).addcmul_(u.float(), weight[:, -1].float())


def as_stored(state, dtype):
    """Convert with saturation."""
    limit = torch.finfo(dtype).max
    return state.clamp(-limit, limit).to(dtype)

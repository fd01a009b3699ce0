"""Prefills of made-up sequences, for the tests of recurrent kernels."""

import torch

from nanovllm.kernels.recurrent.reference import CHUNK, Chunks

from . import DEVICE

PADDING = 7  # a row of the states
# Off the grid of chunks, from the own row, from another, from none; with snapshots on the way and at the end. The first
# chunks of the last two are shorter than a convolution of 4 tokens, so their second chunks see the ring, too.
SEQUENCES = [
    (70, 70, 0, 4), (0, 0, 1, -1), (64, 1, 2, 13), (5, 130, 3, -1), (1, 2, 5, 5), (192, 65, 6, 4), (0, 1, 8, -1),
    (63, 66, 14, 14), (62, 3, 15, 4),
]  # fmt: skip
SAVED = {(0, 128): 9, (3, 64): 10, (3, 135): 11, (4, 3): 12, (7, 64): 16}


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_chunks(sequences, saved=None, num_empty=2):
    """Chunks and positions of (first position, tokens, row, load_row); saved: (sequence, position) -> row.

    Empty sequences and chunks at the end are those of a graph for more.
    """
    cu_seqlens, first_chunks, bounds, seqs, save_rows, positions = [0], [0], [0], [], [], []
    for i, (begin, count, _, _) in enumerate(sequences):
        ends = sorted({*range((begin // CHUNK + 1) * CHUNK, begin + count, CHUNK), begin + count}) if count else []
        bounds += [cu_seqlens[-1] + end - begin for end in ends]
        seqs += [i] * len(ends)
        save_rows += [(saved or {}).get((i, end), -1) for end in ends]
        cu_seqlens.append(cu_seqlens[-1] + count)
        first_chunks.append(len(seqs))
        positions += range(begin, begin + count)
    bounds, seqs = bounds + bounds[-1:] * num_empty, seqs + [len(sequences)] * num_empty
    rows, load_rows = ([x[i] for x in sequences] + [PADDING] for i in (2, 3))
    columns = (cu_seqlens + cu_seqlens[-1:], rows, load_rows, first_chunks + first_chunks[-1:], bounds, seqs)
    return Chunks(*map(int32, columns), int32(save_rows + [-1] * num_empty)), int32(positions)

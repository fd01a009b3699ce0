"""Prefills of made-up sequences, for the tests of recurrent kernels."""

import torch

from nanovllm.kernels.recurrent.reference import CHUNK, Chunks

from . import DEVICE

PADDING = 7  # a row of the states


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

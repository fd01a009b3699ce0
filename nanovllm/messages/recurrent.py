"""Moves of recurrent states that go with a prefill. Between engine/hybrid and runner/recurrent.py.

A state is a row in tables of every rank: a row for each request slot, one for padding, and one for each snapshot.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanovllm.core import Moves, Sequence, pairs


class RecurrentRows(NamedTuple):
    """Sizes of the devices' tables of states, as the engine must know them."""

    num_snapshots: int
    chunk: int = 64  # tokens; kernels compute a sequence in chunks, counted from its first token


@dataclass(frozen=True)
class RecurrentMoves(Moves):
    """Initial states of the S sequences of a prefill, and the rows where it saves further copies of them."""

    load_rows: np.ndarray  # int32 [S], row that each sequence begins with: a snapshot's, or its own; -1: zeros
    saves: np.ndarray  # int32 [n, 3]: sequence, number of its tokens after which its state is saved, row
    state_copies: np.ndarray  # int32 [n, 2], (from, to) rows, copied after the forward pass for forked completions

    @classmethod
    def of(cls, moves: Moves, seqs: ListLike[Sequence], loads: dict[int, int],
           saves: dict[int, list[tuple[int, int]]], copies: list[tuple[int, int]]) -> "RecurrentMoves":
        """``seqs``: in the order of the batch. ``loads`` and ``saves`` (tokens, row) by seq_id."""
        flat = [(i, *save) for i, seq in enumerate(seqs) for save in saves.get(seq.seq_id, ())]
        load_rows = np.array([loads[seq.seq_id] for seq in seqs], np.int32)
        return cls(moves.block_copies, load_rows, np.array(flat, np.int32).reshape(-1, 3), pairs(copies))

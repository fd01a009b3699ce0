"""Copies of recurrent states that go with a prefill. Between engine/hybrid and runner/recurrent.py.

A state is a row in tables of every rank: a row for each request slot, one for padding, and one for each snapshot.
"""

from typing import NamedTuple


class RecurrentRows(NamedTuple):
    """Sizes of the devices' tables of states, as the engine must know them."""

    num_snapshots: int
    chunk: int = 64  # tokens; kernels compute a sequence in chunks, counted from its first token


class StateCopies(NamedTuple):
    """Initial states of a prefill's sequences, the states that it saves, and copies for forked completions."""

    loads: dict[int, int]  # request slot -> row that its sequence begins with: a snapshot's, or its own; -1: zeros
    saves: list[tuple[int, int, int]]  # request slot, number of its tokens after which its state is saved, row
    after: list[tuple[int, int]]  # (from, to) rows, copied after the forward pass

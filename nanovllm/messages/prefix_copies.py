"""Copies of the beginnings of blocks that go with a prefill. Between engine/ and runner/prefix_copies.py."""

from dataclasses import dataclass

import numpy as np

from nanovllm.core import Moves


@dataclass(frozen=True)
class PrefixMoves(Moves):
    """Blocks whose beginnings a prefill copies before its forward pass."""

    prefix_copies: np.ndarray  # int32 [n, 2], (from, to) blocks

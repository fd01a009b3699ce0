"""Copies of KV blocks that go with a prefill. Between engine/block_manager.py and runner/memory.py."""

from typing import NamedTuple


class BlockCopies(NamedTuple):
    """Blocks that a prefill copies: for cached beginnings before its forward pass, for forked completions after it."""

    before: list[tuple[int, int]]  # (from, to)
    after: list[tuple[int, int]]

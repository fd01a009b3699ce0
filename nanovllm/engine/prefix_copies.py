"""A prefix cache that also finds the beginnings of blocks, and copies them.

On a CPU that is cheaper than computing a few tokens.

Owns which blocks may be copied: full ones, and *tails*, which are partly filled.
"""

from collections import OrderedDict
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.core import Sequence
from nanovllm.engine.block_manager import NO_PARENT, BlockManager
from nanovllm.messages import Messages

MAX_TAILS = 16  # tails that can be found; older ones' blocks are free once their sequences have left


class CopyingBlockManager(BlockManager):
    """``min_copied_tokens``: how much of a block must be in common for a copy of it."""

    @classmethod
    def of(cls, config: Config, num_blocks: int, facts: dict[str, Any]) -> "CopyingBlockManager | None":
        """None where the device copies no beginnings (runner/prefix_copies.py)."""
        if "min_copied_tokens" not in facts or not config.enable_prefix_caching:
            return None
        return cls(num_blocks, config.kvcache_block_size, facts["min_copied_tokens"])

    def __init__(self, num_blocks: int, block_size: int, min_copied_tokens: int):
        super().__init__(num_blocks, block_size)
        self.min_copied_tokens = min_copied_tokens
        # tails that may be copied, by the hash of the block before and their first ``min_copied_tokens`` tokens
        self.children: dict[tuple[int, bytes], list[int]] = {}
        self.places: dict[int, tuple[int, bytes]] = {}  # block id -> its key in ``children``
        self.tails: OrderedDict[int, None] = OrderedDict()  # blocks in ``children``, least recently used first
        self._computed: list[tuple[Sequence, int]] = []  # (sequence, number of tokens) in the batch being made
        self._computed_before: list[tuple[Sequence, int]] = []  # the same for the last batch: may be copied from now on

    def _place_of(self, seq: Sequence, i: int) -> tuple[int, bytes]:
        """The key of ``children`` for the sequence's block ``i``."""
        first = i * self.block_size
        beginning = seq.tokens(first, first + self.min_copied_tokens)
        return self._hash_of(seq, i - 1) if i else NO_PARENT, beginning.tobytes()

    def find_beginning(self, seq: Sequence, num_blocks: int) -> tuple[int, int] | None:
        """Find the block with the longest common beginning after the first ``num_blocks`` blocks, and its length.
        """
        first = num_blocks * self.block_size
        wanted = seq.tokens(first, min(first + self.block_size, seq.max_cached_tokens))
        if len(wanted) < self.min_copied_tokens:
            return None
        best = -1, 0
        for block_id in self.children.get(self._place_of(seq, num_blocks), ()):
            found = np.frombuffer(self.blocks[block_id].token_ids or b"", np.int32)[: len(wanted)]
            is_same = found == wanted[: len(found)]
            num_same = len(found) if is_same.all() else int(is_same.argmin())
            if num_same > best[1]:
                best = block_id, num_same
        return best if best[1] >= self.min_copied_tokens else None

    def allocate(self, seq: Sequence) -> list[int]:
        self._offer_computed()
        beginning = self.find_beginning(seq, len(self.find_prefix(seq)))
        for order in (self.cached_block_ids, self.tails):
            if beginning is not None and beginning[0] in order:
                order.move_to_end(beginning[0])
        prefix = super().allocate(seq)
        if beginning is not None:
            seq.num_computed_tokens += beginning[1]
            self.copies.before.append((beginning[0], seq.block_table[len(prefix)]))
        return prefix

    def computed(self, seq: Sequence, start: int, stop: int) -> None:
        super().computed(seq, start, stop)
        self._computed.append((seq, stop))

    def take_messages(self) -> Messages:
        self._computed_before, self._computed = self._computed, []
        return super().take_messages()

    def _offer_computed(self) -> None:
        for seq, num_computed in self._computed_before:
            self.offer(seq, num_computed)
        self._computed_before = []

    def offer(self, seq: Sequence, num_computed: int) -> None:
        """Let others copy the beginnings of a sequence's blocks, up to ``num_computed`` tokens."""
        if self.block_size <= self.min_copied_tokens:
            return
        for i, first in enumerate(range(0, num_computed, self.block_size)):
            block = self.blocks[seq.block_table[i]]
            tokens = seq.tokens(first, min(first + self.block_size, num_computed))
            if block.hash is None and block.ref_count == 1 and self.min_copied_tokens <= len(tokens) < self.block_size:
                block.token_ids = tokens.tobytes()
                self.tails[block.block_id] = None
            if block.token_ids is not None and block.block_id not in self.places:
                place = self.places[block.block_id] = self._place_of(seq, i)
                self.children.setdefault(place, []).append(block.block_id)
        self._forget_tails()

    def register(self, seq: Sequence, num_computed: int) -> None:
        first = seq.num_registered_blocks
        super().register(seq, num_computed)
        for block_id in seq.block_table[first : seq.num_registered_blocks]:
            if self.blocks[block_id].hash is not None:
                self.tails.pop(block_id, None)

    def deallocate(self, seq: Sequence, num_written: int = 0) -> None:
        self.register(seq, num_written)
        self.offer(seq, num_written)
        self._computed_before = [each for each in self._computed_before if each[0] is not seq]
        super().deallocate(seq, num_written)
        self._forget_tails()

    def _forget_tails(self) -> None:
        for _ in range(len(self.tails) - MAX_TAILS):
            block_id = next(iter(self.tails))
            self._forget(block_id)
            if block_id in self.cached_block_ids:
                del self.cached_block_ids[block_id]
                self.free_block_ids.append(block_id)

    def forget_prefixes(self) -> None:
        for block_id in list(self.tails):
            self._forget(block_id)
        super().forget_prefixes()

    def _forget(self, block_id: int) -> None:
        place = self.places.pop(block_id, None)
        if place is not None:
            self.children[place].remove(block_id)
            if not self.children[place]:
                del self.children[place]
        self.tails.pop(block_id, None)
        super()._forget(block_id)

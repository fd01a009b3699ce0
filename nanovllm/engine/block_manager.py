"""Owns which sequence holds which KV block, and the prefix cache.

Knows nothing of devices; compares tokens, but never interprets them. Every block is in one of three sets at all times
(invariant 1):

    free     its contents cannot be found                    ``free_block_ids``, used last taken first
    cached   unreferenced, contents can be found             ``cached_block_ids``, least recently used first
    used     in ``ref_count >= 1`` block tables              the rest

Full blocks are found by their hash, and shared. Where copying a block is cheaper than computing a few tokens, on a CPU,
the beginning of one is found as well, and copied: of full blocks and of *tails*, which are partly filled.
"""

from collections import OrderedDict

import numpy as np
import xxhash

from nanovllm.core import Sequence
from nanovllm.engine.snapshots import Snapshots

NO_PARENT = -1  # parent hash of a sequence's first block
MAX_TAILS = 16  # that can be found; the blocks of older ones are free, once their sequences have left


class Block:
    """One KV block. ``token_ids`` are set while the prefix cache knows it; ``hash`` if it is full; ``place``, a key
    of ``children``, if its beginning may be copied."""

    __slots__ = ("block_id", "hash", "place", "ref_count", "token_ids")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.hash: int | None = None
        self.place: tuple[int, bytes] | None = None
        self.token_ids: bytes | None = None

    def forget(self) -> None:
        self.hash = self.place = self.token_ids = None


class BlockManager:
    """``num_blocks`` blocks of ``block_size`` tokens, shared by sequences with equal prefixes.

    With ``snapshots``, of models with recurrent layers, a prefix ends where there is one; each dies with its block.

    ``min_copied_tokens``: how much of a block must be in common for a copy of it; None: nothing is copied.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True,
                 snapshots: Snapshots | None = None, min_copied_tokens: int | None = None):
        self.snapshots = snapshots
        self.min_copied_tokens = min_copied_tokens if enable_prefix_caching else None
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        # a stack: on the CPU the OS maps a page when it is first written, and most engines need few
        self.free_block_ids = list(range(num_blocks - 1, -1, -1))
        self.cached_block_ids: OrderedDict[int, None] = OrderedDict()
        self.hash_to_block_id: dict[int, int] = {}
        # those that may be copied, by the hash of the block before and their first ``min_copied_tokens`` tokens
        self.children: dict[tuple[int, bytes], list[int]] = {}
        self.tails: OrderedDict[int, None] = OrderedDict()  # of ``children``, least recently used first

    @staticmethod
    def compute_hash(token_ids: np.ndarray, parent: int = NO_PARENT) -> int:
        """xxh64 of the parent block's hash and this block's token ids (int32)."""
        return xxhash.xxh64_intdigest(parent.to_bytes(9, "little", signed=True) + token_ids.tobytes())

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self.free_block_ids) + len(self.cached_block_ids)

    def _hash_of(self, seq: Sequence, i: int) -> int:
        """Hash of the sequence's full block ``i``, memoised in ``seq.block_hashes``."""
        hashes = seq.block_hashes
        while len(hashes) <= i:
            hashes.append(self.compute_hash(seq.block(len(hashes)), hashes[-1] if hashes else NO_PARENT))
        return hashes[i]

    def _place_of(self, seq: Sequence, i: int) -> tuple[int, bytes]:
        """The key of ``children`` for the sequence's block ``i``."""
        first = i * self.block_size
        beginning = seq.tokens(first, first + (self.min_copied_tokens or 0))
        return self._hash_of(seq, i - 1) if i else NO_PARENT, beginning.tobytes()

    def hashes(self, seq: Sequence) -> list[int]:
        """Of all its full blocks whose tokens are known."""
        if seq.num_tokens >= self.block_size:
            self._hash_of(seq, seq.num_tokens // self.block_size - 1)
        return seq.block_hashes

    def find(self, seq: Sequence, i: int) -> int | None:
        """The block in the prefix cache that holds the sequence's full block ``i``."""
        block_id = self.hash_to_block_id.get(self._hash_of(seq, i))
        # equal hashes are no proof of equal tokens
        is_equal = block_id is not None and self.blocks[block_id].token_ids == seq.block(i).tobytes()
        return block_id if is_equal else None

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Blocks that already hold the sequence's leading full blocks.

        The block of the last token is never among them: one token must be computed, to have logits to sample from.
        """
        found: list[int] = []
        if self.enable_prefix_caching:
            for i in range(seq.max_cached_tokens // self.block_size):
                block_id = self.find(seq, i)
                if block_id is None:
                    break
                found.append(block_id)
            if self.snapshots is not None:
                del found[self.snapshots.longest(seq.block_hashes, len(found), self.block_size) :]
        return found

    def find_beginning(self, seq: Sequence, num_blocks: int) -> tuple[int, int] | None:
        """The block that begins with most of what follows the sequence's first ``num_blocks`` blocks, and how many
        tokens that is."""
        if self.min_copied_tokens is None:
            return None
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

    def can_allocate(self, seq: Sequence, num_reserved: int = 0) -> bool:
        """Whether ``allocate(seq)`` would find enough blocks, and leave so many."""
        num_available = self.num_available - num_reserved
        if seq.num_blocks <= num_available:
            return True
        prefix = self.find_prefix(seq)
        revived = sum(self.blocks[i].ref_count == 0 for i in prefix)
        return seq.num_blocks - len(prefix) + revived <= num_available

    def allocate(self, seq: Sequence) -> tuple[int, int] | None:
        """Give the sequence blocks for all its known tokens; sets ``num_computed_tokens`` to the prefix hit.

        Returns:
            The blocks to copy from and to before it is computed, if it begins one like another.
        """
        assert not seq.block_table
        prefix = self.find_prefix(seq)
        beginning = self.find_beginning(seq, len(prefix))
        for order in (self.cached_block_ids, self.tails):
            if beginning is not None and beginning[0] in order:
                order.move_to_end(beginning[0])
        for block_id in prefix:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.cached_block_ids[block_id]
            block.ref_count += 1
        seq.block_table = prefix + [self._pop_block() for _ in range(seq.num_blocks - len(prefix))]
        seq.num_registered_blocks = len(prefix)
        seq.num_computed_tokens = len(prefix) * self.block_size
        if beginning is None:
            return None
        seq.num_computed_tokens += beginning[1]
        return beginning[0], seq.block_table[len(prefix)]

    def can_fork(self, seq: Sequence) -> bool:
        """Whether ``fork`` of this sequence would find a block for its last, partly filled one."""
        return self.num_available >= (seq.num_tokens % self.block_size > 0)

    def fork(self, seq: Sequence, child: Sequence) -> tuple[int, int] | None:
        """Give ``child``, whose tokens are equal, the full blocks of ``seq`` and a copy of its partly filled one.

        Returns:
            The blocks to copy from and to, if there is a partly filled one.
        """
        assert not child.block_table and child.num_tokens == seq.num_tokens
        num_full = seq.num_tokens // self.block_size
        for block_id in seq.block_table[:num_full]:
            self.blocks[block_id].ref_count += 1
        child.block_table = seq.block_table[:num_full]
        child.num_registered_blocks = min(seq.num_registered_blocks, num_full)
        child.num_computed_tokens = seq.num_tokens
        if num_full == len(seq.block_table):
            return None
        child.block_table.append(self._pop_block())
        return seq.block_table[num_full], child.block_table[num_full]

    def deallocate(self, seq: Sequence) -> None:
        """Drop the sequence's references. Unreferenced blocks become cached, or free if they cannot be found."""
        # the tail first, so that it is evicted first: more sequences share a prefix than its continuation
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.token_ids is None:
                    self.free_block_ids.append(block_id)
                else:
                    self.cached_block_ids[block_id] = None
        self._forget_tails()
        seq.block_table = []
        seq.num_registered_blocks = seq.num_computed_tokens = 0

    def may_append(self, seq: Sequence, position: int) -> None:
        """Make room for the token at ``position``: a new block if the last one is full."""
        if position >= len(seq.block_table) * self.block_size:
            self.register(seq, min(position, seq.num_tokens))  # tokens of a draft are not known
            seq.block_table.append(self._pop_block())

    def trim(self, seq: Sequence, num_computed: int) -> None:
        """Take back the blocks behind the first ``num_computed`` tokens: their draft was wrong."""
        for _ in range(len(seq.block_table) - -(-num_computed // self.block_size)):
            block_id = seq.block_table.pop()
            self.blocks[block_id].ref_count = 0
            self.free_block_ids.append(block_id)

    def register(self, seq: Sequence, num_computed: int) -> None:
        """Enter the full blocks among the first ``num_computed`` tokens into the prefix cache (invariant 2).

        Their ids must be known, and the launch that writes their keys and values issued or being scheduled: a layer
        stores before it attends.
        """
        if not self.enable_prefix_caching:
            return
        for i in range(seq.num_registered_blocks, num_computed // self.block_size):
            block_hash = self._hash_of(seq, i)
            # a block with the same contents, computed concurrently, keeps the entry
            if block_hash not in self.hash_to_block_id:
                block = self.blocks[seq.block_table[i]]
                block.hash, block.token_ids = block_hash, seq.block(i).tobytes()
                self.tails.pop(block.block_id, None)
                self.hash_to_block_id[block_hash] = block.block_id
            seq.num_registered_blocks = i + 1

    def offer(self, seq: Sequence, num_computed: int) -> None:
        """Let others copy the beginnings of a sequence's blocks, of which launches have written so many tokens."""
        if self.min_copied_tokens is None or self.block_size <= self.min_copied_tokens:
            return
        for i, first in enumerate(range(0, num_computed, self.block_size)):
            block = self.blocks[seq.block_table[i]]
            tokens = seq.tokens(first, min(first + self.block_size, num_computed))
            if block.hash is None and block.ref_count == 1 and self.min_copied_tokens <= len(tokens) < self.block_size:
                block.token_ids = tokens.tobytes()
                self.tails[block.block_id] = None
            if block.token_ids is not None and block.place is None:
                block.place = self._place_of(seq, i)
                self.children.setdefault(block.place, []).append(block.block_id)
        self._forget_tails()

    def _forget_tails(self) -> None:
        for _ in range(len(self.tails) - MAX_TAILS):
            block_id = next(iter(self.tails))
            self._forget(block_id)
            if block_id in self.cached_block_ids:
                del self.cached_block_ids[block_id]
                self.free_block_ids.append(block_id)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; running sequences keep their blocks."""
        for block_id in [*self.hash_to_block_id.values(), *self.tails]:
            self._forget(block_id)
        self.free_block_ids.extend(self.cached_block_ids)
        self.cached_block_ids.clear()

    def _pop_block(self) -> int:
        if self.free_block_ids:
            block_id = self.free_block_ids.pop()
        else:
            block_id, _ = self.cached_block_ids.popitem(last=False)
            self._forget(block_id)
        self.blocks[block_id].ref_count = 1
        return block_id

    def _forget(self, block_id: int) -> None:
        """Take a block out of the prefix cache."""
        block = self.blocks[block_id]
        if block.hash is not None:
            del self.hash_to_block_id[block.hash]
            if self.snapshots is not None:
                self.snapshots.drop(block.hash)
        if block.place is not None:
            self.children[block.place].remove(block_id)
            if not self.children[block.place]:
                del self.children[block.place]
        self.tails.pop(block_id, None)
        block.forget()

"""Owns which sequence holds which KV block, and the prefix cache.

Knows nothing of devices; compares tokens, but never interprets them. Every block is in one of three sets at all times
(invariant 1):

    free     its contents cannot be found                    ``free_block_ids``, used last taken first
    cached   unreferenced, contents can be found             ``cached_block_ids``, least recently used first
    used     in ``ref_count >= 1`` block tables              the rest

The scheduler reports each sequence, from ``expect`` to ``deallocate``, and asks for a batch's messages. Other kinds of
cache are subclasses (``variants.py``).
"""

from collections import OrderedDict

import numpy as np
import xxhash

from nanovllm.core import Sequence
from nanovllm.messages import Messages
from nanovllm.messages.block_copies import BlockCopies

NO_PARENT = -1  # parent hash of a sequence's first block


class Block:
    """One KV block; ``hash`` and ``token_ids`` are set while the prefix cache knows it."""

    __slots__ = ("block_id", "hash", "ref_count", "token_ids")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.hash: int | None = None
        self.token_ids: bytes | None = None


class BlockManager:
    """``num_blocks`` blocks of ``block_size`` tokens, shared by sequences with equal prefixes."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        # a stack: on the CPU the OS maps a page at its first write, and most engines need few blocks
        self.free_block_ids = list(range(num_blocks - 1, -1, -1))
        self.cached_block_ids: OrderedDict[int, None] = OrderedDict()
        self.hash_to_block_id: dict[int, int] = {}
        self.copies = BlockCopies([], [])  # go with the batch being made

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
        return found

    def can_allocate(self, seq: Sequence, num_reserved: int = 0) -> bool:
        """Whether ``allocate(seq)`` would find enough blocks, and leave ``num_reserved``."""
        num_available = self.num_available - num_reserved
        if seq.num_blocks <= num_available:
            return True
        prefix = self.find_prefix(seq)
        revived = sum(self.blocks[i].ref_count == 0 for i in prefix)
        return seq.num_blocks - len(prefix) + revived <= num_available

    def allocate(self, seq: Sequence) -> list[int]:
        """Give the sequence blocks for all its known tokens; sets ``num_computed_tokens`` to the prefix hit.

        Returns:
            The blocks that were found in the prefix cache.
        """
        assert not seq.block_table
        prefix = self.find_prefix(seq)
        for block_id in prefix:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.cached_block_ids[block_id]
            block.ref_count += 1
        seq.block_table = prefix + [self._pop_block() for _ in range(seq.num_blocks - len(prefix))]
        seq.num_registered_blocks = len(prefix)
        seq.num_computed_tokens = len(prefix) * self.block_size
        return prefix

    def can_fork(self, seq: Sequence) -> bool:
        """Whether ``fork`` of this sequence would find a block for its last, partly filled one."""
        return self.num_available >= (seq.num_tokens % self.block_size > 0)

    def fork(self, seq: Sequence, child: Sequence) -> None:
        """Give ``child``, whose tokens are equal, the full blocks of ``seq`` and a copy of its partly filled one."""
        assert not child.block_table and child.num_tokens == seq.num_tokens
        num_full = seq.num_tokens // self.block_size
        for block_id in seq.block_table[:num_full]:
            self.blocks[block_id].ref_count += 1
        child.block_table = seq.block_table[:num_full]
        child.num_registered_blocks = min(seq.num_registered_blocks, num_full)
        child.num_computed_tokens = seq.num_tokens
        if num_full < len(seq.block_table):
            child.block_table.append(self._pop_block())
            self.copies.after.append((seq.block_table[num_full], child.block_table[num_full]))

    def deallocate(self, seq: Sequence, num_written: int = 0) -> None:
        """Drop the sequence's references; launches have written the keys and values of ``num_written`` tokens.

        Blocks without a reference become cached, or free if they cannot be found.
        """
        self.register(seq, num_written)
        # the last block first, so that it is evicted first: more sequences share a prefix than its continuation
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.token_ids is None:
                    self.free_block_ids.append(block_id)
                else:
                    self.cached_block_ids[block_id] = None
        seq.block_table = []
        seq.num_registered_blocks = seq.num_computed_tokens = 0

    def may_append(self, seq: Sequence, position: int) -> None:
        """Make room for the token at ``position``: a new block if the last one is full."""
        if position >= len(seq.block_table) * self.block_size:
            self.register(seq, min(position, seq.num_tokens))  # the tokens after it are guesses
            seq.block_table.append(self._pop_block())

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
                self.hash_to_block_id[block_hash] = block.block_id
            seq.num_registered_blocks = i + 1

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; running sequences keep their blocks."""
        for block_id in list(self.hash_to_block_id.values()):
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
        block.hash = block.token_ids = None

    # ---------------------------------------------------------------- what other kinds of cache add

    def expect(self, seq: Sequence) -> None:
        """A sequence waits."""

    def expect_no_more(self, seq: Sequence) -> None:
        """A waiting sequence was aborted."""

    def is_ready(self, seq: Sequence) -> bool:
        """Whether a waiting sequence has its inputs in memory, as far as no chunk or cached prefix covers them."""
        if (inputs := seq.attachment) is None:
            return True
        # another completion of its prompt may have dropped them since its first chunk
        start = seq.num_computed_tokens if seq.block_table else len(self.find_prefix(seq)) * self.block_size
        return inputs.is_ready(start)

    def chunk_end(self, seq: Sequence, start: int, stop: int) -> int:
        """Where a prefill chunk from ``start`` ends that cannot go beyond ``stop``; ``start``: it must wait."""
        return stop if seq.attachment is None else seq.attachment.chunk_end(start, stop)

    def computed(self, seq: Sequence, start: int, stop: int) -> None:
        """The batch being made computes tokens [start, stop) of a prompt."""
        self.register(seq, stop)

    def take_messages(self) -> Messages:
        """The messages of the prefill being made, to the parts that hold the cache on the devices."""
        copies, self.copies = self.copies, BlockCopies([], [])
        return {BlockCopies: copies} if any(copies) else {}

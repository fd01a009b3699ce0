"""KV blocks of a model with recurrent layers: a cached prefix ends where there is a snapshot of their states.

Owns the states that a batch loads, saves and copies. Knows nothing of devices.
"""

from collections import Counter
from math import lcm
from typing import Any

from nanovllm.config import Config
from nanovllm.core import Sequence
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.hybrid.snapshots import Snapshots
from nanovllm.messages import Messages
from nanovllm.messages.recurrent import StateCopies


class HybridBlockManager(BlockManager):
    """Blocks of a model with recurrent layers: a prefix ends where there is a snapshot, and each dies with its block.

    Args:
        snapshots: none are taken if it has no rows.
        chunk: of ``RecurrentRows``.
    """

    @classmethod
    def of(cls, config: Config, num_blocks: int, facts: dict[str, Any]) -> "HybridBlockManager | None":
        """None for models without recurrent layers."""
        if "recurrent_rows" not in facts:
            return None
        size, caching = config.kvcache_block_size, config.enable_prefix_caching
        num_snapshots, chunk = facts["recurrent_rows"]
        snapshots = Snapshots(caching * num_snapshots, config.max_num_seqs + 1, lcm(size, chunk))
        return cls(num_blocks, size, snapshots, chunk, caching)

    def __init__(self, num_blocks: int, block_size: int, snapshots: Snapshots, chunk: int = 1,
                 enable_prefix_caching: bool = True):
        # recurrent layers cannot use a cached prefix without a state at its end
        super().__init__(num_blocks, block_size, enable_prefix_caching and snapshots.num_rows > 0)
        self.snapshots, self.chunk = snapshots, chunk
        self._counts: Counter[int] = Counter()  # how many waiting prompts have each hash; hashed every ``grain`` tokens
        self._expected: dict[int, list[int]] = {}  # hashes of each waiting prompt, by seq_id
        self._begin()

    def _begin(self) -> None:
        self.snapshots.used.clear()
        self._hits: dict[int, int] = {}  # rows of snapshots, by the seq_id of those that begin with them
        self._loads: dict[int, int] = {}  # see StateCopies
        self._saves: list[tuple[int, int, int]] = []
        self._forked: list[tuple[Sequence, Sequence]] = []

    def hashes(self, seq: Sequence) -> list[int]:
        """Hashes of all full blocks whose tokens are known."""
        if seq.num_tokens >= self.block_size:
            self._hash_of(seq, seq.num_tokens // self.block_size - 1)
        return seq.block_hashes

    def expect(self, seq: Sequence) -> None:
        """A prompt waits, and may use snapshots. Other completions of it need none: they are forked."""
        if self.enable_prefix_caching and seq.seq_id == seq.group_id:
            step, num_blocks = self.snapshots.grain // seq.block_size, seq.max_cached_tokens // seq.block_size
            hashes = self.hashes(seq)[step - 1 : num_blocks : step]
            self._expected[seq.seq_id] = hashes
            self._counts.update(hashes)

    def expect_no_more(self, seq: Sequence) -> None:
        """A prompt waits no longer, or never did."""
        for block_hash in self._expected.pop(seq.seq_id, ()):
            self._counts[block_hash] -= 1
            if not self._counts[block_hash]:
                del self._counts[block_hash]

    def find_prefix(self, seq: Sequence) -> list[int]:
        found = super().find_prefix(seq)
        return found[: self.snapshots.longest(seq.block_hashes, len(found), self.block_size)]

    def can_allocate(self, seq: Sequence, num_reserved: int = 0) -> bool:
        """Also refuse a sequence that would load a snapshot which the batch being made saves."""
        if not super().can_allocate(seq, num_reserved):
            return False
        prefix = self.find_prefix(seq) if self._saves else []
        return not prefix or not self.snapshots.is_new(seq.block_hashes[len(prefix) - 1])

    def allocate(self, seq: Sequence) -> list[int]:
        prefix = super().allocate(seq)
        self.expect_no_more(seq)
        if prefix:
            self._hits[seq.seq_id] = self.snapshots.hit(self._hash_at(seq, seq.num_computed_tokens))
        return prefix

    def chunk_end(self, seq: Sequence, start: int, stop: int) -> int:
        """With one of the kernels' chunks, if one ends there."""
        aligned = stop - stop % self.chunk
        return aligned if aligned > start and stop < seq.num_tokens else stop

    def computed(self, seq: Sequence, start: int, stop: int) -> None:
        """Record the initial state of a sequence and the snapshots that it saves."""
        super().computed(seq, start, stop)
        self._loads[seq.req_idx] = self._hits.pop(seq.seq_id, seq.req_idx if start else -1)
        grain = self.snapshots.grain
        if not self.enable_prefix_caching or start // grain == stop // grain:
            return
        self.hashes(seq)  # hashes all blocks, because all are looked up below
        positions = range(start - start % grain + grain, stop + 1, grain)
        known_end, last = self._known_end(seq, start), seq.max_cached_tokens // grain * grain
        junctions = [
            position for position in positions if position == known_end
            or self._num_sharers(seq, position) > self._num_sharers(seq, position + grain)
        ]  # fmt: skip
        for position in [*junctions, last]:
            # a snapshot must not outlive the cached block before it
            if position in positions and self.find(seq, position // seq.block_size - 1) is not None:
                row = self.snapshots.save(self._hash_at(seq, position), position in junctions)
                if row is not None:
                    self._saves.append((seq.req_idx, position, row))

    def fork(self, seq: Sequence, child: Sequence) -> None:
        super().fork(seq, child)
        self._forked.append((seq, child))

    def take_messages(self) -> Messages:
        after = [(seq.req_idx, child.req_idx) for seq, child in self._forked]
        messages = super().take_messages() | {StateCopies: StateCopies(self._loads, self._saves, after)}
        self._begin()
        return messages

    def _forget(self, block_id: int) -> None:
        block_hash = self.blocks[block_id].hash
        super()._forget(block_id)
        if block_hash is not None:
            self.snapshots.drop(block_hash)

    def _hash_at(self, seq: Sequence, position: int) -> int:
        return seq.block_hashes[position // seq.block_size - 1]

    def _num_sharers(self, seq: Sequence, position: int) -> int:
        """How many waiting prompts begin with the same tokens up to ``position``, and may find them cached."""
        return self._counts[self._hash_at(seq, position)] if position <= seq.num_tokens else 0

    def _known_end(self, seq: Sequence, start: int) -> int:
        """The last multiple of ``grain`` up to which others have computed the keys and values already."""
        i = start // seq.block_size
        while i < seq.max_cached_tokens // seq.block_size:
            block_id = self.find(seq, i)
            if block_id is None or block_id == seq.block_table[i]:
                break
            i += 1
        return i * seq.block_size // self.snapshots.grain * self.snapshots.grain

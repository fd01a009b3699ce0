"""A scheduler whose decode steps may verify drafts, and so give a sequence one token or more.

Nothing is scheduled while a verify step is in flight: the lengths of its sequences depend on its tokens. Where known
tokens have a draft that pays, the scheduler waits for the step in flight. Other steps run ahead. Drafts come from
``lookup.py``.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.core import Batch, DecodeBatch, PrefillBatch, Sequence
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import NO_TOKEN, Scheduler
from nanovllm.engine.speculation.lookup import Speculator
from nanovllm.messages.verify import MAX_VERIFIED_SEQS, DraftTokens


class SpeculativeScheduler(Scheduler):
    @classmethod
    def of(cls, config: Config, new_cache: Callable[[], BlockManager],
           eos_token_ids: Iterable[int]) -> "SpeculativeScheduler | None":
        """None unless the options ask for speculation and the model's kind allows it."""
        options = config.speculative_config
        if options is None or not config.speculates:
            return None
        return cls(Speculator(options), config, new_cache, eos_token_ids)

    def __init__(self, speculator: Speculator, *args: Any):
        self.speculator = speculator
        super().__init__(*args)

    def clear(self) -> None:
        super().clear()
        self.speculator.clear()
        self._waits_for_tokens = False  # whether to wait for the tokens in flight, to verify drafts after them
        self._extended: list[int] = []  # batch positions of sequences whose drafts in flight have further blocks

    def schedule(self) -> Batch | None:
        self._waits_for_tokens = False
        return None if self.speculator.is_verifying else super().schedule()

    def _schedule_prefill(self) -> PrefillBatch | None:
        return None if self._waits_for_tokens else super()._schedule_prefill()

    def _schedule_decode(self) -> DecodeBatch | None:
        found = self._growing()
        if found is None:
            return None
        drafts = self._propose(*found)
        if drafts is None:
            return self._decode(*found)
        if self.num_in_flight:
            self._waits_for_tokens = True
            return None
        batch = self._decode(*found)
        new_blocks = batch.new_blocks
        if more_blocks := self._make_room(*found, drafts):
            new_blocks = np.concatenate([new_blocks, np.array(more_blocks, np.int32)])
        messages = batch.messages | {DraftTokens: DraftTokens(drafts)}
        return replace(batch, new_blocks=new_blocks, num_rows=1 + drafts.shape[1], messages=messages)

    def _propose(self, req_indices: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """Drafts of the next step, int32 [B, Q - 1], if it pays to verify them."""
        if len(req_indices) > MAX_VERIFIED_SEQS:
            return None
        seqs = [self._seqs[i] for i in req_indices.tolist()]
        room = (self.table.max_tokens[req_indices] - lengths - 1).tolist()  # the token after a draft needs no room
        return self.speculator.propose(seqs, room, self.max_num_batched_tokens, self.num_in_flight > 0)

    def _make_room(self, req_indices: np.ndarray, lengths: np.ndarray, drafts: np.ndarray) -> list[tuple]:
        """Give sequences blocks for their drafts; where there are none left, the drafts are cut, in place."""
        self.speculator.is_verifying = True
        num_drafted, new_blocks = (drafts >= 0).sum(1), []
        ends = lengths - 1 + num_drafted  # positions of their last tokens
        self._extended = np.flatnonzero(ends // self.block_size > (lengths - 1) // self.block_size).tolist()
        for i in self._extended:
            seq = self._seqs[int(req_indices[i])]
            for position in range(int(lengths[i]), int(ends[i]) + 1):
                if position >= len(seq.block_table) * self.block_size:
                    if not self.block_manager.num_available:
                        drafts[i, position - lengths[i] :] = NO_TOKEN
                        break
                    new_blocks.append(self._append_block(seq, position))
        return new_blocks

    def steps(self, batch: Batch, result: Any, one_by_one: bool) -> list[tuple[Batch, Any]]:
        """Split a verify step into plain ones: one by one if a token may end a sequence, else all at once.

        Tokens after the end of a sequence are surplus.
        """
        drafts: DraftTokens | None = batch.messages.get(DraftTokens)
        if drafts is None:
            self.speculator.took_in(len(batch.req_indices), 1, batch.is_decode)
            return super().steps(batch, result, one_by_one)
        table, req_indices, num_accepted = self.table, batch.req_indices, drafts.num_accepted(result.token_ids)
        self.speculator.verified(batch.seq_ids.tolist(), drafts.token_ids, num_accepted)
        num_computed, alive = batch.lengths + num_accepted, table.seq_id[req_indices] == batch.seq_ids
        for i in self._extended:
            if alive[i]:
                self._trim(self._seqs[int(req_indices[i])], int(num_computed[i]))
        table.num_scheduled[req_indices[alive]] = num_computed[alive] + 1
        columns, rows = np.nonzero(np.arange(batch.num_rows)[:, None] <= num_accepted)
        plain = part_of(batch, result, rows, columns)
        may_end = self._num_stopping[plain[1].token_ids].any()
        may_end |= (num_computed + 1 >= table.max_tokens[req_indices]).any()
        if not (one_by_one or may_end or not alive.all()):
            return [plain]
        parts = [(rows[columns == column], column) for column in range(columns[-1] + 1)]
        self.num_in_flight += len(parts) - 1
        return [part_of(batch, result, *part) for part in parts]

    def _trim(self, seq: Sequence, num_computed: int) -> None:
        """Take back the blocks after the first ``num_computed`` tokens: their draft was wrong."""
        manager = self.block_manager
        for _ in range(len(seq.block_table) - -(-num_computed // self.block_size)):
            block_id = seq.block_table.pop()
            manager.blocks[block_id].ref_count = 0
            manager.free_block_ids.append(block_id)

    def _release(self, seq: Sequence, is_partial: bool = False) -> None:
        self.speculator.leave(seq)
        super()._release(seq, is_partial)

    def counters(self) -> dict[str, Any]:
        return self.speculator.counters()


def part_of(batch: Batch, result: Any, rows: np.ndarray, columns: np.ndarray | int) -> tuple[DecodeBatch, Any]:
    """A plain step of the tokens sampled at these places; several tokens of a sequence are in their order."""
    lengths, logprobs = batch.lengths[rows] + columns, result.logprobs
    if logprobs is not None:
        logprobs = logprobs.reshape(*result.token_ids.shape, -1)[rows, columns]
    plain = DecodeBatch(batch.req_indices[rows], batch.seq_ids[rows], lengths, np.empty((0, 3), np.int32))
    return plain, result._replace(token_ids=result.token_ids[rows, columns], logprobs=logprobs)

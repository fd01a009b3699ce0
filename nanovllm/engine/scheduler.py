"""Decides which sequences get how many tokens in the next launch.

Owns the waiting and running sequences and their counts. Knows nothing of devices, and needs no
token ids to decide: a length stop is known before it happens, so the next launch can be put
together while the last one still runs. Only a stop token is learnt one launch late; the surplus
token that was sampled meanwhile is thrown away.

The policy, whole: prefill first, in order of arrival, within ``max_num_batched_tokens`` (a prompt
that exceeds what is left of it is computed in chunks); otherwise one token for every running
sequence. If the KV pool runs dry, the sequences that came last give up their blocks and are
computed again later.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus, SequenceTable


@dataclass(frozen=True)
class PrefillBatch:
    """Compute tokens [starts[i], stops[i]) of ``seqs[i]``, then sample for those whose last token is among them."""

    seqs: list[Sequence]
    starts: list[int]
    stops: list[int]
    admitted: list[Sequence]  # those whose row is new
    rows: np.ndarray  # int32 [S], of those that are sampled: all of ``seqs``, or all but the last
    seq_ids: np.ndarray  # int64 [S]

    @property
    def num_tokens(self) -> int:
        return sum(self.stops) - sum(self.starts)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sampled sequence before this launch samples one, int32 [S]."""
        return np.array(self.stops[: len(self.rows)], np.int32)


@dataclass(frozen=True)
class DecodeBatch:
    """Compute one token of every row and sample the next."""

    rows: np.ndarray  # int32 [B]
    seq_ids: np.ndarray  # int64 [B]
    grown: list[Sequence]  # those whose block table got one more block
    lengths: np.ndarray  # int32 [B], tokens before this launch samples one: so many it attends

    @property
    def num_tokens(self) -> int:
        return len(self.rows)


Batch = PrefillBatch | DecodeBatch


class Scheduler:
    """Waiting and running sequences, their rows and their blocks.

    Args:
        config: limits; ``num_kvcache_blocks`` must be known by now.
        eos_token_ids: end a sequence unless it asked for ``ignore_eos``.
    """

    def __init__(self, config: Config, eos_token_ids: Iterable[int] = ()):
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.block_size = config.kvcache_block_size
        vocab_size = config.model_config.vocab_size
        self.eos_token_ids = frozenset(i for i in eos_token_ids if i < vocab_size)  # no other can be sampled
        self.num_preemptions = 0
        # ids that stop some sequence; a hit is then checked against the sequence itself
        self._stops_some = np.zeros(vocab_size, bool)
        self._stops_some[list(self.eos_token_ids)] = True
        self._config = config
        self.clear()

    def clear(self) -> None:
        """Start again with nothing: no sequence, no cached prefix (the caller has made the device idle).

        All is made anew, because an interrupt may have struck between any two statements.
        """
        config = self._config
        self.block_manager = BlockManager(
            config.num_kvcache_blocks, config.kvcache_block_size, config.enable_prefix_caching
        )
        self.table = SequenceTable(config.max_num_seqs, config.max_model_len)
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.num_in_flight = 0  # launches scheduled and not yet processed
        self._seq_of_row: list[Sequence | None] = [None] * config.max_num_seqs
        self._running_rows = np.empty(0, np.int32)  # in the order of ``running``

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; whoever calls has checked that it fits the pool when alone."""
        self._stops_some[list(seq.sampling_params.stop_token_ids)] = True
        self.waiting.append(seq)

    def schedule(self) -> Batch | None:
        """Put the next launch together; None if the one in flight must be processed first (or nothing is left)."""
        batch = self._schedule_prefill() or self._schedule_decode()
        if batch is not None:
            self.num_in_flight += 1
        return batch

    def _schedule_prefill(self) -> PrefillBatch | None:
        seqs, starts, stops, admitted = [], [], [], []
        budget = self.max_num_batched_tokens
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            if seq.row < 0:
                if not self.table.free_rows or not self.block_manager.can_allocate(seq):
                    break
                self._admit(seq)
                admitted.append(seq)
            start = seq.num_computed_tokens
            stop = min(seq.num_tokens, start + budget)
            budget -= stop - start
            seqs.append(seq)
            starts.append(start)
            stops.append(stop)
            seq.num_computed_tokens = stop
            self.block_manager.register(seq, stop)
            if stop < seq.num_tokens:
                break  # it stays at the head of the queue, with its row and blocks, for its next chunk
            self.running.append(self.waiting.popleft())
        if not seqs:
            return None
        whole = len(seqs) - (stops[-1] < seqs[-1].num_tokens)
        rows = np.array([seq.row for seq in seqs[:whole]], np.int32)
        self._running_rows = np.concatenate([self._running_rows, rows])
        self.table.num_scheduled[rows] += 1
        return PrefillBatch(seqs, starts, stops, admitted, rows, self.table.seq_id[rows])

    def _schedule_decode(self) -> DecodeBatch | None:
        table = self.table
        while True:
            rows = self._running_rows
            lengths = table.num_scheduled[rows]
            going_on = lengths < table.max_tokens[rows]
            if not going_on.all():  # the others only wait for their last token to arrive
                rows, lengths = rows[going_on], lengths[going_on]
            if not len(rows):
                return None
            # this launch writes slot lengths - 1; where that slot opens a block, a block is due
            growing = rows[(lengths - 1) % self.block_size == 0]
            if len(growing) <= self.block_manager.num_available:
                break
            if self.num_in_flight:
                return None  # what is in flight may finish somebody; and only known tokens can be computed again
            self.preempt(self.running[-1])
        grown = [self._seq_of_row[row] for row in growing.tolist()]
        for seq in grown:
            self.block_manager.may_append(seq, int(table.num_scheduled[seq.row]) - 1)
        table.num_scheduled[rows] = lengths + 1
        return DecodeBatch(rows, table.seq_id[rows], grown, lengths)

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks and row; it goes to the head of the queue, to be computed again."""
        assert self.num_in_flight == 0
        self.num_preemptions += 1
        self.running.remove(seq)
        self._running_rows = self._running_rows[self._running_rows != seq.row]
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)

    def postprocess(self, batch: Batch, token_ids: np.ndarray) -> list[Sequence]:
        """Take in the sampled ids, int32 [len(batch.rows)]; return the sequences that are finished now."""
        self.num_in_flight -= 1
        table, rows = self.table, batch.rows
        alive = table.seq_id[rows] == batch.seq_ids
        if not alive.all():  # somebody stopped after this launch was put together: its token is surplus
            rows, token_ids = rows[alive], token_ids[alive]
        lengths = table.num_tokens[rows]
        table.tokens[rows, lengths] = token_ids
        table.num_tokens[rows] = lengths + 1
        may_be_done = self._stops_some[token_ids] | (lengths + 1 == table.max_tokens[rows])
        finished = []
        for i in np.flatnonzero(may_be_done).tolist():
            seq = self._seq_of_row[rows[i]]
            assert seq is not None
            if self._is_done(seq, int(token_ids[i])):
                self._release(seq)
                seq.status = SequenceStatus.FINISHED
                finished.append(seq)
        if finished:
            gone = table.seq_id[self._running_rows] < 0
            for i in np.flatnonzero(gone)[::-1].tolist():
                del self.running[i]
            self._running_rows = self._running_rows[~gone]
        return finished

    def _admit(self, seq: Sequence) -> None:
        self.block_manager.allocate(seq)
        self.table.enter(seq)
        self._seq_of_row[seq.row] = seq
        if seq.num_completion_tokens == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
        seq.status = SequenceStatus.RUNNING

    def _release(self, seq: Sequence) -> None:
        """Give back blocks and row; the full blocks stay in the prefix cache."""
        # the last token's keys and values may never have been computed
        self.block_manager.register(seq, seq.num_tokens - 1)
        self.block_manager.deallocate(seq)
        self._seq_of_row[seq.row] = None
        self.table.leave(seq)

    def _is_done(self, seq: Sequence, token_id: int) -> bool:
        params = seq.sampling_params
        if token_id in params.stop_token_ids:
            seq.finish_reason, seq.stop_reason = "stop", token_id
        elif token_id in self.eos_token_ids and not params.ignore_eos:
            seq.finish_reason = "stop"
        elif seq.num_tokens == self.table.max_tokens[seq.row]:
            seq.finish_reason = "length"
        return seq.finish_reason is not None

"""Decides which sequences get how many tokens in the next launch.

Owns the waiting and running sequences and their counts. Knows nothing of devices. Scheduling needs counts, not tokens:
a length stop is known before it happens, so the next launch is scheduled while the last one runs. Only a stop token is
learnt one launch late; the surplus token sampled meanwhile is dropped.

The policy: prefill first, in order of arrival, within ``max_num_batched_tokens`` (a prompt that exceeds the rest of the
budget is computed in chunks); otherwise decode, one token for every running sequence. A prefill interrupts everybody's
decoding, so free request slots are filled in batches: see ``_waits_for_slots``. If the KV cache runs out of blocks, the
latest sequences are preempted: they give up their blocks and are recomputed later. Where many run, nobody is admitted
to blocks that they are sure to need: see ``_num_reserved``.

A step that verifies drafts (speculation.py) gives each sequence one token or more. So nothing is scheduled while one is
in flight; and where known tokens have a draft that pays, the step in flight is waited for. Other steps run ahead.

Several completions of one prompt are forked: the prompt is computed once, and they share its full blocks.

Of recurrent layers' states ``snapshots.py`` knows which a batch loads and saves; a batch ends before a sequence that
would load what it saves.
"""

from collections import deque
from collections.abc import Iterable
from math import lcm

import numpy as np

from nanovllm.config import Config
from nanovllm.core import (
    MAX_VERIFIED_SEQS,
    Batch,
    DecodeBatch,
    PrefillBatch,
    Sequence,
    SequenceStatus,
    StateRows,
)
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.metrics import Metrics
from nanovllm.engine.snapshots import RecurrentStates, Snapshots
from nanovllm.engine.speculation import Speculator

NO_TOKEN = -1  # in place of a sampled id
NO_TOKEN_REASON = (
    "no token could be sampled: every logit is NaN or -inf. Either the weights hold NaN or overflow in this dtype, or "
    "the sampling parameters forbid every token."
)
MAX_WAIT_STEPS = 64  # decode steps that a free request slot waits for others
# Running sequences from which on more of them make a step longer by as much as they give. With fewer they share the
# reading of the weights, which is worth being preempted and recomputed.
MANY_SEQS = 256


class SequenceTable:
    """Columns by request slot, ``req_idx``; the same slot as in the device's request state. R = max_num_seqs.

    Attributes:
        seq_id: int64 [R]; -1 where the slot is free.
        num_tokens: int32 [R]; tokens whose ids the host knows.
        num_scheduled: int32 [R]; the same plus those in flight.
        max_tokens: int32 [R]; limit of prompt plus completion, max_model_len included.
        min_tokens: int32 [R]; how many it will have at least at its end.
        tokens: int32 [R, max_model_len]; the OS maps its pages at the first write.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int):
        self.seq_id = np.full(max_num_seqs, -1, np.int64)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_scheduled = np.zeros(max_num_seqs, np.int32)
        self.max_tokens = np.zeros(max_num_seqs, np.int32)
        self.min_tokens = np.zeros(max_num_seqs, np.int32)
        self.tokens = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.free_req_indices = list(range(max_num_seqs - 1, -1, -1))  # the lowest is taken first

    def add(self, seq: Sequence) -> None:
        """Move a waiting sequence's tokens into a free request slot."""
        req_idx, n = self.free_req_indices.pop(), seq.num_tokens
        self.seq_id[req_idx] = seq.seq_id
        self.num_tokens[req_idx] = self.num_scheduled[req_idx] = n
        self.max_tokens[req_idx] = min(seq.max_num_tokens, self.tokens.shape[1])
        self.min_tokens[req_idx] = min(seq.min_num_tokens, self.tokens.shape[1])
        self.tokens[req_idx, :n] = seq.tokens(0, n)
        seq.attach(self, req_idx)

    def remove(self, seq: Sequence) -> None:
        """Move a sequence's tokens back to itself and free the slot."""
        req_idx = seq.req_idx
        seq.detach()
        self.seq_id[req_idx] = -1
        self.free_req_indices.append(req_idx)


class Scheduler:
    """Waiting and running sequences, their request slots and their blocks.

    Args:
        config: limits.
        num_blocks: size of the KV cache.
        eos_token_ids: end a sequence unless it asked for ``ignore_eos``. The first is the end-of-sequence token; the
            others are stop tokens, reported as ``stop_reason``.
        state_rows: of models with recurrent layers, else None.
        min_copied_tokens: of ``BlockManager``.
    """

    def __init__(self, config: Config, num_blocks: int, eos_token_ids: Iterable[int] = (),
                 state_rows: StateRows | None = None, min_copied_tokens: int | None = None):
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.block_size = config.kvcache_block_size
        vocab_size = config.model_config.vocab_size
        known = [i for i in dict.fromkeys(eos_token_ids) if i < vocab_size]  # larger ids are never sampled
        self.eos_token_id = known[0] if known else None
        self.eos_token_ids = frozenset(known)
        self.num_preemptions = 0
        self.metrics = Metrics()
        self.speculator = Speculator.of(config)  # None: every step gives a sequence one token
        # [V + 1], ids that stop some sequence, NO_TOKEN is the last; a hit is then checked against the sequence itself
        self._is_stop_token = np.zeros(vocab_size + 1, bool)
        self._is_stop_token[[*self.eos_token_ids, NO_TOKEN]] = True
        self._config, self._num_blocks, self._state_rows = config, num_blocks, state_rows
        self._min_copied_tokens = min_copied_tokens
        self.clear()

    def clear(self) -> None:
        """Drop every sequence and cached prefix (the caller has made the device idle).

        Everything is made anew: an interrupt may have left any of it half updated.
        """
        config, rows, block_size = self._config, self._state_rows, self.block_size
        num_snapshots, chunk = rows or (0, 1)
        # a prefix without a state at its end is of no use to recurrent layers
        caching = config.enable_prefix_caching and (rows is None or num_snapshots > 0)
        grain = lcm(block_size, chunk)
        snapshots = None if rows is None else Snapshots(caching * num_snapshots, config.max_num_seqs + 1, grain)
        self.block_manager = BlockManager(self._num_blocks, block_size, caching, snapshots, self._min_copied_tokens)
        self.states = None if snapshots is None else RecurrentStates(snapshots, self.block_manager, chunk)
        self.table = SequenceTable(config.max_num_seqs, config.max_model_len)
        if self.speculator is not None:
            self.speculator.clear()
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.num_in_flight = 0  # launches scheduled and not yet processed
        self._waits_for_tokens = False  # of the launch in flight, to verify drafts behind them
        self._extended: list[int] = []  # batch positions of the sequences whose drafts in flight have further blocks
        self._prefilled_last: list[Sequence] = []  # by the last prefill; their blocks may be copied from the next on
        self._missed_tokens = 0  # of free request slots, in the decode steps since the last prefill
        self._seqs: list[Sequence | None] = [None] * config.max_num_seqs  # by req_idx
        # computed to their end by a launch in flight, and nothing to sample: without request slot and blocks; by seq_id
        self._unsampled: dict[int, Sequence] = {}
        self._running_req_indices = np.empty(0, np.int32)  # in the order of ``running``

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; the caller has checked that it fits the KV cache when alone (invariant 6)."""
        self.waiting.append(seq)
        if self.states is not None:
            self.states.expect(seq)

    def schedule(self) -> Batch | None:
        """The next launch; None if the one in flight must be processed first, or nothing is left."""
        batch: Batch | None
        if self.speculator is not None and self.speculator.is_verifying:
            return None  # how long its sequences are depends on its tokens
        self._waits_for_tokens = False
        if self.waiting and not self._waits_for_slots():
            batch = self._schedule_prefill() or self._schedule_decode()
        else:
            batch = self._schedule_decode()
            if batch is None and not self._waits_for_tokens:
                batch = self._schedule_prefill()
        if batch is not None:
            self.num_in_flight += 1
        return batch

    def _waits_for_slots(self) -> bool:
        """Whether to leave the few free request slots empty for now, because more sequences wait than they can take.

        A prefill delays the others by about one decode step, however few tokens it computes. So it pays once the slots
        free since the last one have missed a full step's tokens, ``max_num_seqs``. Where slots become free at a
        constant rate, this is the cheapest interval (the economic order quantity; figures: docs/experiments.md). A step
        counts some tokens at least, so that no slot waits for long where no other comes.
        """
        is_half_computed = self.waiting[0].req_idx >= 0
        few_are_free = 0 < len(self.table.free_req_indices) < len(self.waiting)
        return few_are_free and not is_half_computed and self._missed_tokens < len(self.table.seq_id)

    def _schedule_prefill(self) -> PrefillBatch | None:
        chunks: list[tuple[Sequence, int, int, list[Sequence]]] = []
        new_seqs: list[Sequence] = []
        prefix_copies: list[tuple[int, int]] = []
        block_copies: list[tuple[int, int]] = []
        budget, states = self.max_num_batched_tokens, self.states
        are_many = len(self.running) >= MANY_SEQS
        num_reserved = self._num_reserved() if are_many else 0
        for seq in self._prefilled_last:
            if seq.block_table:
                self.block_manager.offer(seq, seq.num_computed_tokens)
        self._prefilled_last = []
        while budget > 0 and self.waiting:
            seq = self.waiting[0]
            num_reserved += self._num_future_blocks(seq) if are_many else 0
            if seq.req_idx < 0:
                if not self._admit(seq, num_reserved, prefix_copies):
                    break
                new_seqs.append(seq)
            start = seq.num_computed_tokens
            stop = min(seq.num_tokens, start + budget)
            if states is not None and stop < seq.num_tokens:
                stop = states.cut(start, stop)
            budget -= stop - start
            seq.num_computed_tokens = stop
            self.block_manager.register(seq, stop)
            if states is not None:
                states.compute(seq, start, stop)
            if stop < seq.num_tokens:
                chunks.append((seq, start, stop, []))
                break  # it stays at the head of the queue, with its request slot and blocks, for its next chunk
            self.waiting.popleft()
            siblings = self._fork_siblings(seq, block_copies) if seq.is_sampled else []
            if states is not None:
                states.fork(seq, siblings)
            new_seqs += siblings
            num_reserved += sum(map(self._num_future_blocks, siblings)) if are_many else 0
            chunks.append((seq, start, stop, [seq, *siblings] if seq.is_sampled else []))
        if not chunks:
            return None
        self._prefilled_last = [seq for seq, *_ in chunks]
        moves = None if states is None else states.moves()
        batch = PrefillBatch.of(chunks, new_seqs, prefix_copies, block_copies, moves)
        for seq, _, stop, _ in chunks:
            if not seq.is_sampled and stop == seq.num_tokens:  # whoever gets slot and blocks is launched later (3)
                self._unsampled[seq.seq_id] = seq
                self._release(seq)
        # with slots left, it was tokens or blocks that ran out: more follow as soon as they can
        self._missed_tokens = len(self.table.seq_id) if self.table.free_req_indices else 0
        self.running.extend(seq for *_, sampled in chunks for seq in sampled)
        self._running_req_indices = np.concatenate([self._running_req_indices, batch.req_indices])
        self.table.num_scheduled[batch.req_indices] += 1
        return batch

    def _num_future_blocks(self, seq: Sequence) -> int:
        """Blocks that a sequence will need besides those of its known tokens."""
        num_tokens = min(seq.min_num_tokens, self.table.tokens.shape[1]) - 1  # the last one is not computed
        return max(-(-num_tokens // self.block_size) - seq.num_blocks, 0)

    def _num_reserved(self) -> int:
        """Blocks that running sequences will take, as far as their lengths are known: the most at any time from now on,
        less those of sequences that are done by then. Of many times some are looked at."""
        table, size = self.table, self.block_size
        lengths = table.num_scheduled[self._running_req_indices] - 1
        left = np.maximum(table.min_tokens[self._running_req_indices] - 1 - lengths, 0)
        steps = np.unique(left)[::-1, None]  # until one of them is done
        steps = steps[:: len(steps) // 16 + 1]
        taken = np.where(left >= steps, -(-(lengths + steps) // size), 0) - -(-lengths // size)
        return int(taken.sum(1).max(initial=0))

    def _fork_siblings(self, seq: Sequence, block_copies: list[tuple[int, int]]) -> list[Sequence]:
        """Admit the waiting completions of the same prompt, as many as fit, with the blocks of ``seq``."""
        forked: list[Sequence] = []
        while (
            self.waiting
            and (sibling := self.waiting[0]).group_id == seq.group_id
            and sibling.num_tokens == seq.num_tokens == seq.num_prompt_tokens
            and self.table.free_req_indices
            and self.block_manager.can_fork(seq)
        ):
            self.waiting.popleft()
            copy = self.block_manager.fork(seq, sibling)
            if copy is not None:
                block_copies.append(copy)
            self._enter(sibling)
            forked.append(sibling)
        return forked

    def _schedule_decode(self) -> DecodeBatch | None:
        table = self.table
        while True:
            req_indices = self._running_req_indices
            lengths = table.num_scheduled[req_indices]
            unfinished = lengths < table.max_tokens[req_indices]
            if not unfinished.all():  # the others wait for their last token to arrive
                req_indices, lengths = req_indices[unfinished], lengths[unfinished]
            if not len(req_indices):
                return None
            # this launch writes position lengths - 1, which may open a block
            growing = req_indices[(lengths - 1) % self.block_size == 0]
            if len(growing) <= self.block_manager.num_available:
                break
            if self.num_in_flight:
                return None  # it may finish a sequence; and only known tokens can be recomputed
            self.preempt(self.running[-1])
        drafts = None
        if self.speculator is not None and len(req_indices) <= MAX_VERIFIED_SEQS:
            drafts = self._propose(req_indices, lengths)
            if drafts is not None and self.num_in_flight:
                self._waits_for_tokens = True
                return None
        new_blocks = []
        for req_idx, length in zip(growing.tolist(), table.num_scheduled[growing].tolist(), strict=True):
            seq = self._seqs[req_idx]
            assert seq is not None
            self.block_manager.may_append(seq, length - 1)
            new_blocks.append((req_idx, len(seq.block_table) - 1, seq.block_table[-1]))
        if drafts is not None:
            new_blocks += self._make_room(req_indices, lengths, drafts)
        state_copies = None
        if self.states is not None:
            state_copies = self.states.roll(seq for i in growing.tolist() if (seq := self._seqs[i]) is not None)
        table.num_scheduled[req_indices] = lengths + 1
        at_least = -(-len(table.seq_id) // MAX_WAIT_STEPS)  # see _waits_for_slots
        self._missed_tokens += max(at_least, len(table.free_req_indices))
        new = np.array(new_blocks, np.int32).reshape(-1, 3)
        return DecodeBatch(req_indices, table.seq_id[req_indices], lengths, new, state_copies, drafts)

    def _propose(self, req_indices: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """Drafts of the next step, int32 [B, Q - 1], if it pays to verify them."""
        assert self.speculator is not None
        seqs = [seq for i in req_indices.tolist() if (seq := self._seqs[i]) is not None]
        room = (self.table.max_tokens[req_indices] - lengths - 1).tolist()  # the token behind a draft needs none
        return self.speculator.propose(seqs, room, self.max_num_batched_tokens, self.num_in_flight > 0)

    def _make_room(self, req_indices: np.ndarray, lengths: np.ndarray, drafts: np.ndarray) -> list[tuple]:
        """Give sequences blocks for their drafts; where there are none left, the drafts are cut, in place."""
        assert self.speculator is not None
        self.speculator.is_verifying = True
        num_drafted, new_blocks = (drafts >= 0).sum(1), []
        ends = lengths - 1 + num_drafted  # positions of their last tokens
        self._extended = np.flatnonzero(ends // self.block_size > (lengths - 1) // self.block_size).tolist()
        for i in self._extended:
            seq = self._seqs[req_indices[i]]
            assert seq is not None
            for position in range(int(lengths[i]), int(ends[i]) + 1):
                if position >= len(seq.block_table) * self.block_size:
                    if not self.block_manager.num_available:
                        drafts[i, position - lengths[i] :] = NO_TOKEN
                        break
                    self.block_manager.may_append(seq, position)
                    new_blocks.append((seq.req_idx, len(seq.block_table) - 1, seq.block_table[-1]))
        return new_blocks

    def accept(self, batch: DecodeBatch, token_ids: np.ndarray, at_once: bool) -> tuple[np.ndarray, np.ndarray]:
        """Take in what a verify step has shown, int32 [B, Q]. Its tokens are those of several plain steps, and where
        one may end a sequence, or not ``at_once``, the caller postprocesses them like that: a token that stops a
        sequence makes those behind it surplus.

        Returns:
            Rows and columns of the tokens that are right, step by step; none if they are appended.
        """
        assert self.speculator is not None and batch.drafts is not None
        table, req_indices, num_accepted = self.table, batch.req_indices, batch.num_accepted(token_ids)
        self.speculator.verified(batch.seq_ids.tolist(), batch.drafts, num_accepted)
        num_computed, alive = batch.lengths + num_accepted, table.seq_id[req_indices] == batch.seq_ids
        for i in self._extended:
            if alive[i] and (seq := self._seqs[req_indices[i]]) is not None:
                self.block_manager.trim(seq, int(num_computed[i]))
        table.num_scheduled[req_indices[alive]] = num_computed[alive] + 1
        columns, rows = np.nonzero(np.arange(token_ids.shape[1])[:, None] <= num_accepted)
        tokens = token_ids[rows, columns]
        may_be_done = self._is_stop_token[tokens].any() or (num_computed + 1 >= table.max_tokens[req_indices]).any()
        if at_once and alive.all() and not may_be_done:
            self.num_in_flight -= 1
            table.tokens[req_indices[rows], batch.lengths[rows] + columns] = tokens
            table.num_tokens[req_indices] = num_computed + 1
            self.metrics.generation_tokens += len(tokens)
            return rows, columns[:0]
        self.num_in_flight += int(columns[-1])
        return rows, columns

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks and request slot; it goes to the head of the queue, to be recomputed."""
        assert self.num_in_flight == 0
        self.num_preemptions += 1
        self.running.remove(seq)
        self._running_req_indices = self._running_req_indices[self._running_req_indices != seq.req_idx]
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)

    def postprocess(self, batch: Batch, token_ids: np.ndarray, is_part: bool = False) -> list[Sequence]:
        """Append the sampled ids, int32 [len(batch.req_indices)]; return the sequences that are finished now.
        ``is_part``: of a verify step."""
        self.num_in_flight -= 1
        if self.speculator is not None and not is_part:
            self.speculator.took_in(len(batch.req_indices), 1, batch.is_decode)
        table, req_indices = self.table, batch.req_indices
        alive = table.seq_id[req_indices] == batch.seq_ids
        if not alive.all():  # a sequence stopped after this launch was scheduled: its token is surplus
            req_indices, token_ids = req_indices[alive], token_ids[alive]
        lengths = table.num_tokens[req_indices]
        table.tokens[req_indices, lengths] = token_ids
        table.num_tokens[req_indices] = lengths + 1
        self.metrics.generation_tokens += len(token_ids)
        may_be_done = self._is_stop_token[token_ids] | (lengths + 1 == table.max_tokens[req_indices])
        finished = []
        for i in np.flatnonzero(may_be_done).tolist():
            seq = self._seqs[req_indices[i]]
            assert seq is not None
            if self._is_done(seq, int(token_ids[i])):
                finished.append(seq)
        if isinstance(batch, PrefillBatch):
            finished += self._prefilled(batch)
        if finished:
            self.finish(finished)
        return finished

    def _prefilled(self, batch: PrefillBatch) -> list[Sequence]:
        """Note the time; return the sequences that are computed to their end and sample nothing."""
        alive = self.table.seq_id[batch.chunk_req_indices] == batch.chunk_seq_ids  # with a slot, and not aborted since
        computed = [self._seqs[req_idx] for req_idx in batch.chunk_req_indices[alive].tolist()]
        finished = []
        for seq_id, stop in zip(batch.chunk_seq_ids[~alive].tolist(), batch.stops[~alive].tolist(), strict=True):
            seq = self._unsampled.get(seq_id)
            if seq is not None and stop == seq.num_tokens:  # not an earlier chunk
                del self._unsampled[seq_id]
                seq.finish_reason = "length"
                finished.append(seq)
        self.metrics.prefilled([*computed, *finished])
        return finished

    def finish(self, seqs: list[Sequence]) -> None:
        """Take sequences out, wherever they are. A launch in flight may still write to their blocks (invariant 3)."""
        for seq in seqs:
            is_partial = len(self.waiting) > 0 and self.waiting[0] is seq  # computed up to some chunk
            if is_partial or seq.status is SequenceStatus.WAITING:
                self.waiting.remove(seq)
                if self.states is not None:
                    self.states.expect_no_more(seq)
            if seq.req_idx >= 0:
                self._release(seq, is_partial)
            self._unsampled.pop(seq.seq_id, None)
            seq.status = SequenceStatus.FINISHED
        gone = self.table.seq_id[self._running_req_indices] < 0
        if gone.any():
            for i in np.flatnonzero(gone)[::-1].tolist():
                del self.running[i]
            self._running_req_indices = self._running_req_indices[~gone]

    def _admit(self, seq: Sequence, num_reserved: int, prefix_copies: list[tuple[int, int]]) -> bool:
        """Give a waiting sequence blocks and a request slot, if there are any, and so many blocks are left."""
        if not self.table.free_req_indices or not self.block_manager.can_allocate(seq, num_reserved):
            return False
        if self.states is not None and self.states.must_wait(seq):
            return False
        is_new = not seq.entered_at
        copy = self.block_manager.allocate(seq)
        if copy is not None:
            prefix_copies.append(copy)
        if self.states is not None:
            self.states.admit(seq)
        self._enter(seq)
        if is_new:
            self.metrics.looked_up(seq)
        return True

    def _enter(self, seq: Sequence) -> None:
        """Give a sequence with blocks a request slot."""
        if seq.sampling_params.stop_token_ids:
            self._is_stop_token[list(seq.sampling_params.stop_token_ids)] = True
        self.table.add(seq)
        self._seqs[seq.req_idx] = seq
        if seq.num_completion_tokens == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
        if not seq.entered_at:
            self.metrics.entered(seq, is_first=seq.seq_id == seq.group_id)
        seq.status = SequenceStatus.RUNNING

    def _release(self, seq: Sequence, is_partial: bool = False) -> None:
        """Give back blocks and request slot; the blocks stay in the prefix cache, the full ones at least."""
        if not is_partial:
            # the last token's keys and values may never have been computed
            self.block_manager.register(seq, seq.num_tokens - 1)
            self.block_manager.offer(seq, seq.num_tokens - 1)
        if self.speculator is not None:
            self.speculator.leave(seq)
        self.block_manager.deallocate(seq)
        self._seqs[seq.req_idx] = None
        self.table.remove(seq)

    def _is_done(self, seq: Sequence, token_id: int) -> bool:
        params = seq.sampling_params
        if token_id == NO_TOKEN:
            self.table.num_tokens[seq.req_idx] -= 1
            self.metrics.generation_tokens -= 1
            seq.finish_reason, seq.stop_reason = "error", NO_TOKEN_REASON
        elif token_id == self.eos_token_id and not params.ignore_eos:
            seq.finish_reason = "stop"
        elif token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos):
            seq.finish_reason, seq.stop_reason = "stop", token_id
        elif seq.num_tokens == self.table.max_tokens[seq.req_idx]:
            seq.finish_reason = "length"
        return seq.finish_reason is not None

"""The scheduler: which sequences get how many tokens in the next launch.

Owns the waiting and running sequences and their counts. Knows nothing of devices. Scheduling needs counts, not tokens:
a length stop is known before it happens, so the next launch is scheduled while the last one runs. Only a stop token is
learnt one launch late; the surplus token sampled meanwhile is dropped.

The policy: prefill first, in order of arrival, within ``max_num_batched_tokens`` (a prompt that exceeds the rest of the
budget is computed in chunks); otherwise decode, one token for every running sequence. If the KV cache runs out of
blocks, the latest sequences are preempted: they give up their blocks and are recomputed later. Several completions of
one prompt are forked: the prompt is computed once, and they share its full blocks. Strategies attach from outside.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.core import Batch, DecodeBatch, PrefillBatch, Sequence, SequenceStatus
from nanovllm.engine.admission import Admission
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.metrics import Metrics

NO_TOKEN = -1  # marks a missing sampled id
NO_TOKEN_REASON = (
    "no token could be sampled: every logit is NaN or -inf, or some are +inf. Either the weights hold NaN or overflow "
    "in this dtype, or the sampling parameters forbid every token, or a logits processor returns several +inf."
)


class SequenceTable:
    """Columns by request slot, ``req_idx``; the same slot as in the device's request state. R = max_num_seqs.

    Attributes:
        seq_id: int64 [R]; -1 where the slot is free.
        num_tokens: int32 [R]; tokens whose ids the host knows.
        num_scheduled: int32 [R]; the same plus those in flight.
        max_tokens: int32 [R]; limit of prompt plus completion, max_model_len included.
        min_tokens: int32 [R]; length that it reaches at least.
        tokens: int32 [R, max_model_len]; the OS maps its pages at the first write.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int):
        self.seq_id = np.full(max_num_seqs, -1, np.int64)
        self.num_tokens, self.num_scheduled, self.max_tokens, self.min_tokens = np.zeros((4, max_num_seqs), np.int32)
        self.tokens = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.free_req_indices = list(range(max_num_seqs - 1, -1, -1))  # a stack: the lowest is taken first

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
        new_cache: makes the block manager; again after an interrupt, which may have left it half updated.
        eos_token_ids: end a sequence unless it asked for ``ignore_eos``. The first is the end-of-sequence token; the
            others are stop tokens, reported as ``stop_reason``.
    """

    def __init__(self, config: Config, new_cache: Callable[[], BlockManager], eos_token_ids: Iterable[int] = ()):
        self.max_num_batched_tokens, self.block_size = config.max_num_batched_tokens, config.kvcache_block_size
        vocab_size = config.model_config.vocab_size
        known = [i for i in dict.fromkeys(eos_token_ids) if i < vocab_size]  # larger ids are never sampled
        self.eos_token_id = known[0] if known else None
        self.eos_token_ids = frozenset(known)
        self.num_preemptions = 0
        self.metrics = Metrics()
        self._config, self._new_cache = config, new_cache
        self.clear()

    def clear(self) -> None:
        """Drop every sequence and cached prefix (the caller has made the device idle).

        Everything is made anew: an interrupt may have left any of it half updated.
        """
        self.block_manager = self._new_cache()
        self.table = SequenceTable(self._config.max_num_seqs, self._config.max_model_len)
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.running_req_indices = np.empty(0, np.int32)  # in the same order
        self.admission = Admission(self)
        self.num_in_flight = 0  # launches scheduled and not yet processed
        # int [V + 1], how many sequences each id may stop (last: NO_TOKEN); a hit is then checked against its sequence
        self._num_stopping = np.bincount([*self.eos_token_ids, self._config.model_config.vocab_size])
        self._seqs: dict[int, Sequence] = {}  # by req_idx

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; the caller has checked that it fits the KV cache when alone (invariant 6)."""
        self.waiting.append(seq)
        self.block_manager.expect(seq)

    def schedule(self) -> Batch | None:
        """The next launch; None if the one in flight must be processed first, or nothing is left."""
        if self.waiting and not self.admission.waits():
            batch = self._schedule_prefill() or self._schedule_decode()
        else:
            batch = self._schedule_decode() or self._schedule_prefill()
        if batch is not None:
            self.num_in_flight += 1
        return batch

    # ---------------------------------------------------------------- prefill

    def _schedule_prefill(self) -> PrefillBatch | None:
        chunks: list[tuple[Sequence, int, int]] = []  # tokens [start, stop) of a sequence
        sampled: list[tuple[Sequence, Sequence]] = []  # a request, and the sequence whose last logits it gets
        new_seqs: list[Sequence] = []
        budget, blocks = self.max_num_batched_tokens, self.block_manager
        self.admission.begin()
        while budget > 0 and self.waiting:
            seq = self.waiting[0]
            if not blocks.is_ready(seq):
                break
            num_reserved = self.admission.reserve(seq)
            if seq.req_idx < 0:
                if not self._admit(seq, num_reserved):
                    break
                new_seqs.append(seq)
            start = seq.num_computed_tokens
            stop = blocks.chunk_end(seq, start, min(seq.num_tokens, start + budget))
            if stop == start:
                break  # its next tokens are computed at once, and need more than the rest of the budget
            budget -= stop - start
            seq.num_computed_tokens = stop
            blocks.computed(seq, start, stop)
            chunks.append((seq, start, stop))
            if stop < seq.num_tokens:
                break  # it stays first in the queue, with its request slot and blocks, for its next chunk
            self.waiting.popleft()
            if seq.is_sampled:
                siblings = self._fork_all(seq)
                sampled += [(each, seq) for each in (seq, *siblings)]
                new_seqs += siblings
        if not chunks:
            return None
        batch = PrefillBatch.of(chunks, sampled, new_seqs, blocks.take_messages())
        for seq in batch.ends:  # the next owner of its slot and blocks is launched later (3)
            self._release(seq)
        self.admission.prefills()
        self.running.extend(seq for seq, _ in sampled)
        self.running_req_indices = np.concatenate([self.running_req_indices, batch.req_indices])
        self.table.num_scheduled[batch.req_indices] += 1
        return batch

    def _admit(self, seq: Sequence, num_reserved: int) -> bool:
        """Give a waiting sequence blocks and a request slot, if there are any and ``num_reserved`` blocks are left."""
        if not self.table.free_req_indices or not self.block_manager.can_allocate(seq, num_reserved):
            return False
        is_new = not seq.entered_at
        self.block_manager.allocate(seq)
        self._enter(seq)
        if is_new:
            self.metrics.looked_up(seq)
        return True

    def _can_fork(self, seq: Sequence) -> bool:
        """Whether another completion of the same prompt waits, and has room."""
        if not self.waiting or self.waiting[0].group_id != seq.group_id or not self.table.free_req_indices:
            return False
        is_new = self.waiting[0].num_tokens == seq.num_tokens == seq.num_prompt_tokens
        return is_new and self.block_manager.can_fork(seq)

    def _fork_all(self, seq: Sequence) -> list[Sequence]:
        """Admit waiting completions of the same prompt, with the blocks of ``seq``, as long as there is room."""
        siblings = []
        while self._can_fork(seq):
            siblings.append(self.waiting.popleft())
            self.block_manager.fork(seq, siblings[-1])
            self._enter(siblings[-1])
            self.admission.reserve(siblings[-1])
        return siblings

    def _enter(self, seq: Sequence) -> None:
        """Give a sequence with blocks a request slot."""
        if seq.sampling_params.stop_token_ids:
            self._num_stopping[list(seq.sampling_params.stop_token_ids)] += 1
        self.table.add(seq)
        self._seqs[seq.req_idx] = seq
        if not seq.entered_at:
            seq.num_cached_tokens = seq.num_computed_tokens
            self.metrics.entered(seq, is_first=seq.seq_id == seq.group_id)
        seq.status = SequenceStatus.RUNNING

    # ---------------------------------------------------------------- decode

    def _schedule_decode(self) -> DecodeBatch | None:
        found = self._growing()
        return None if found is None else self._decode(*found)

    def _growing(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The request slots that get a token, and their lengths; preempts the latest where blocks run out."""
        table = self.table
        while True:
            req_indices = self.running_req_indices
            lengths = table.num_scheduled[req_indices]
            unfinished = lengths < table.max_tokens[req_indices]
            if not unfinished.all():  # the others wait for their last token
                req_indices, lengths = req_indices[unfinished], lengths[unfinished]
            if not len(req_indices):
                return None
            # this launch writes position lengths - 1, which may open a block
            if np.count_nonzero((lengths - 1) % self.block_size == 0) <= self.block_manager.num_available:
                return req_indices, lengths
            if self.num_in_flight:
                return None  # a token in flight may finish a sequence; and only known tokens can be recomputed
            self.preempt(self.running[-1])

    def _decode(self, req_indices: np.ndarray, lengths: np.ndarray) -> DecodeBatch:
        table, opens = self.table, (lengths - 1) % self.block_size == 0
        new_blocks = [
            self._append_block(self._seqs[req_idx], length - 1)
            for req_idx, length in zip(req_indices[opens].tolist(), lengths[opens].tolist(), strict=True)
        ]
        table.num_scheduled[req_indices] = lengths + 1
        self.admission.decodes()
        blocks = np.array(new_blocks, np.int32).reshape(-1, 3)
        return DecodeBatch(req_indices, table.seq_id[req_indices], lengths, blocks)

    def _append_block(self, seq: Sequence, position: int) -> tuple[int, int, int]:
        """A row of ``DecodeBatch.new_blocks``."""
        self.block_manager.may_append(seq, position)
        return seq.req_idx, len(seq.block_table) - 1, seq.block_table[-1]

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks and request slot; it goes to the head of the queue, to be recomputed."""
        assert self.num_in_flight == 0
        self.num_preemptions += 1
        self.running.remove(seq)
        self.running_req_indices = self.running_req_indices[self.running_req_indices != seq.req_idx]
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)

    # ---------------------------------------------------------------- tokens

    def steps(self, batch: Batch, result: Any, one_by_one: bool) -> list[tuple[Batch, Any]]:
        """Split a launch into plain steps; ``one_by_one`` if a request looks at every token."""
        return [(batch, result)]

    def postprocess(self, batch: Batch, token_ids: np.ndarray) -> list[Sequence]:
        """Append the sampled ids, int32 [len(batch.req_indices)]; return the sequences that are finished now."""
        self.num_in_flight -= 1
        table, req_indices, lengths = self.table, batch.req_indices, batch.lengths
        alive = table.seq_id[req_indices] == batch.seq_ids
        if not alive.all():  # surplus tokens: their sequences stopped after this launch was scheduled
            req_indices, lengths, token_ids = req_indices[alive], lengths[alive], token_ids[alive]
        table.tokens[req_indices, lengths] = token_ids
        table.num_tokens[req_indices] = lengths + 1
        self.metrics.generation_tokens += len(token_ids)
        may_be_done = self._num_stopping[token_ids] | (lengths + 1 == table.max_tokens[req_indices])
        finished = []
        for i in np.flatnonzero(may_be_done).tolist():
            seq = self._seqs[int(req_indices[i])]
            if self._is_done(seq, int(token_ids[i])):
                finished.append(seq)
        if isinstance(batch, PrefillBatch):
            self.metrics.prefilled(batch.seqs)
            for seq in batch.ends:
                if seq.status is not SequenceStatus.FINISHED:  # an abort may have finished it
                    seq.finish_reason = "length"
                    finished.append(seq)
        if finished:
            self.finish(finished)
        return finished

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

    def finish(self, seqs: list[Sequence]) -> None:
        """Take sequences out, wherever they are. A launch in flight may still write to their blocks (invariant 3)."""
        for seq in seqs:
            is_partial = len(self.waiting) > 0 and self.waiting[0] is seq  # some of its chunks are computed
            if is_partial or seq.status is SequenceStatus.WAITING:
                self.waiting.remove(seq)
                self.block_manager.expect_no_more(seq)
            if seq.req_idx >= 0:
                self._release(seq, is_partial)
            seq.status = SequenceStatus.FINISHED
        gone = self.table.seq_id[self.running_req_indices] < 0
        if gone.any():
            for i in np.flatnonzero(gone)[::-1].tolist():
                del self.running[i]
            self.running_req_indices = self.running_req_indices[~gone]

    def _release(self, seq: Sequence, is_partial: bool = False) -> None:
        """Give back blocks and request slot; full blocks stay in the prefix cache."""
        # the last token's keys and values may never be computed
        self.block_manager.deallocate(seq, 0 if is_partial else seq.num_tokens - 1)
        if seq.sampling_params.stop_token_ids:
            self._num_stopping[list(seq.sampling_params.stop_token_ids)] -= 1
        del self._seqs[seq.req_idx]
        self.table.remove(seq)

    def counters(self) -> dict[str, Any]:
        """Metrics of a subclass."""
        return {}

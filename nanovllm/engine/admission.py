"""When waiting sequences may enter. Owns no sequence: it counts, and the scheduler asks.

Two rules besides "first come, first served": a few free request slots are left empty for a while, and where many
sequences run, nobody is admitted to KV blocks that they are sure to need. Either is a matter of speed.
"""

from typing import TYPE_CHECKING

import numpy as np

from nanovllm.core import Sequence

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler

MAX_WAIT_STEPS = 64  # decode steps that a free request slot waits for others
# Running sequences from which on more of them make a step longer by as much as they give. With fewer they share the
# reading of the weights, which is worth being preempted and recomputed.
MANY_SEQS = 256


class Admission:
    def __init__(self, scheduler: "Scheduler"):
        self._scheduler, self._table = scheduler, scheduler.table
        self.missed_tokens = 0  # of free request slots, in the decode steps since the last prefill
        self._num_reserved: int | None = None  # blocks; None where few run

    def waits(self) -> bool:
        """Whether to leave the few free request slots empty for now, because more sequences wait than they can take.

        A prefill delays the others by about one decode step, however few tokens it computes. So it pays once the slots
        free since the last one have missed a full step's tokens, ``max_num_seqs``. Where slots become free at a
        constant rate, this is the cheapest interval (the economic order quantity; figures: docs/experiments.md). A step
        counts some tokens at least, so that no slot waits for long where no other comes.
        """
        table, waiting = self._table, self._scheduler.waiting
        is_half_computed = waiting[0].req_idx >= 0
        few_are_free = 0 < len(table.free_req_indices) < len(waiting)
        return few_are_free and not is_half_computed and self.missed_tokens < len(table.seq_id)

    def decodes(self) -> None:
        """A decode step is scheduled."""
        self.missed_tokens += max(-(-len(self._table.seq_id) // MAX_WAIT_STEPS), len(self._table.free_req_indices))

    def prefills(self) -> None:
        """A prefill is scheduled. With slots left, it was tokens or blocks that ran out: more follow at once."""
        self.missed_tokens = len(self._table.seq_id) if self._table.free_req_indices else 0

    def begin(self) -> None:
        """A prefill is being formed."""
        self._num_reserved = self._reserved_by_running() if len(self._scheduler.running) >= MANY_SEQS else None

    def reserve(self, seq: Sequence) -> int:
        """Reserve the blocks that a sequence will need; returns the blocks to leave for others when it is admitted."""
        if self._num_reserved is None:
            return 0
        num_tokens = min(seq.min_num_tokens, self._table.tokens.shape[1]) - 1  # the last one is not computed
        self._num_reserved += max(-(-num_tokens // seq.block_size) - seq.num_blocks, 0)
        return self._num_reserved

    def _reserved_by_running(self) -> int:
        """Compute the peak number of blocks that running sequences will take, as far as their lengths are known.

        Blocks of sequences that are done by then do not count. Of many times some are looked at.
        """
        table, size, running = self._table, self._scheduler.block_size, self._scheduler.running_req_indices
        lengths = table.num_scheduled[running] - 1
        left = np.maximum(table.min_tokens[running] - 1 - lengths, 0)
        steps = np.unique(left)[::-1, None]  # until one of them is done
        steps = steps[:: len(steps) // 16 + 1]
        taken = np.where(left >= steps, -(-(lengths + steps) // size), 0) - -(-lengths // size)
        return int(taken.sum(1).max(initial=0))

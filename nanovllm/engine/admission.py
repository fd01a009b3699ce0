"""When waiting sequences may enter. Owns no sequence: it counts, and the scheduler asks.

Three rules besides "first come, first served": a few free request slots are left empty for a while; where many
sequences run, nobody is admitted to KV blocks that they are sure to need; and many sequences that generate equally many
tokens enter in cohorts. Each is a matter of speed.
"""

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nanovllm.core import Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler

MAX_WAIT_STEPS = 64  # decode steps for which a free request slot waits for others
# With this many running sequences, each further one makes a step longer by as much as it gains. Fewer share the
# reading of the weights, so adding one pays even if it is preempted and recomputed.
MANY_SEQS = 128
NUM_COHORTS = 8
MAX_SEQS = 512  # limit with cohorts. More sequences lengthen a step by as much as they gain (8B in FP8 on an H100)
MAX_STEPS = 0.9  # cohorts may take at most this share of the steps needed without them: their steps are longer
MAX_EXAMINED = 1024  # waiting sequences that are examined
NUM_INTERVALS = 16
NOBODY = (-1, 0)


class Admission:
    def __init__(self, scheduler: "Scheduler"):
        self._scheduler, self._table, self._running = scheduler, scheduler.table, scheduler.running
        self.missed_tokens = 0  # tokens that free request slots missed in the decode steps since the last prefill
        self.num_expected = 0  # sequences of the call that begins; they are queued a window at a time
        self._cohorts: Cohorts | None = None
        self._demand: BlockDemand | None = None  # needs of the running and admitted sequences; None while few run
        self._asked = NOBODY  # last sequence considered since a prefill, and the free request slots then

    def waits(self) -> bool:
        """Whether to leave the few free request slots empty for now, because more sequences wait than they can take.

        A prefill delays the others by about one decode step, however few tokens it computes. So it pays once the slots
        free since the last one have missed a full step's tokens, ``max_num_seqs``. Where slots become free at a
        constant rate, this is the cheapest interval (the economic order quantity; figures: docs/experiments.md). A step
        counts some tokens at least, so that no slot waits for long where no other comes.

        Also true while the next cohort must wait, and where the first in the queue was refused and nobody has left.
        """
        waiting, num_free = self._scheduler.waiting, len(self._table.free_req_indices)
        few_are_free = 0 < num_free < len(waiting) and self.missed_tokens < len(self._table.seq_id)
        must_wait = self._are_full() if self._cohorts else self._asked == (waiting[0].seq_id, num_free)
        return (few_are_free or must_wait) and waiting[0].req_idx < 0  # else it is half computed

    def decodes(self) -> None:
        """A decode step is scheduled."""
        self.missed_tokens += max(-(-len(self._table.seq_id) // MAX_WAIT_STEPS), len(self._table.free_req_indices))

    def prefills(self) -> None:
        """A prefill is scheduled. With slots left, it was tokens or blocks that ran out: more follow at once."""
        self._asked, self.missed_tokens = NOBODY, len(self._table.seq_id) if self._table.free_req_indices else 0

    def begin(self) -> None:
        """A prefill is being formed."""
        are_many = max(len(self._running), self.num_expected) >= MANY_SEQS
        self._demand = self._plan() if self._cohorts or are_many else None

    def reserve(self, seq: Sequence) -> int:
        """Reserve the blocks that a sequence will need; returns the blocks to leave for others when it is admitted."""
        self._asked = (seq.seq_id, len(self._table.free_req_indices))
        return self._demand.add(seq) if self._demand else 0

    def _plan(self) -> "BlockDemand | None":
        """Choose the cohorts of a call that begins, and count the needs of many running sequences."""
        if len(self._table.free_req_indices) == len(self._table.seq_id):  # nobody runs or is half computed
            is_large = self.num_expected >= MANY_SEQS
            self._cohorts = plan_cohorts(self._scheduler, self.num_expected) if is_large else None
        self.num_expected = 0
        reserves = self._cohorts is not None or len(self._running) >= MANY_SEQS
        return BlockDemand(self._scheduler, self._cohorts) if reserves else None

    def _are_full(self) -> bool:
        """Whether all have entered that may by now. A sequence of another length ends the cohorts."""
        assert self._cohorts is not None
        if growth(self._scheduler.waiting[0], self._table.tokens.shape[1]) != self._cohorts.growth:
            self._cohorts = None
            return False
        return self._cohorts.num_seats() <= len(self._table.seq_id) - len(self._table.free_req_indices)


def growth(seq: Sequence, max_model_len: int) -> int:
    """Tokens that it is sure to generate from now on."""
    return min(seq.min_num_tokens, max_model_len) - seq.num_tokens


class Cohorts(NamedTuple):
    """How sequences that generate equally many tokens enter, where the KV cache does not hold all of them.

    If as many as it holds to their end entered together, they would end together, and until then it would be half empty
    on average. So an eighth of those that are to run enter together, and the next eighth when these have come an eighth
    of their way. More sequences share a step; and when a cohort ends, the next one takes its blocks.
    """

    size: int  # sequences
    growth: int  # tokens that each one generates
    first: Sequence  # first sequence of the first cohort

    def num_seats(self) -> int:
        """Sequences that may run by now: all, if the first one was aborted."""
        is_done = self.first.status is SequenceStatus.FINISHED
        num_tokens = self.growth if is_done else self.first.num_completion_tokens
        return self.size * min(NUM_COHORTS, 1 + num_tokens * NUM_COHORTS // self.growth)


def plan_cohorts(scheduler: "Scheduler", num_seqs: int) -> Cohorts | None:
    """Choose the cohorts of a call with ``num_seqs`` sequences; some wait, and none runs.

    None where cohorts would save too few decode steps. Sequences of different or unknown lengths end one by one anyway,
    and those that share a prefix take fewer blocks than their lengths say.
    """
    seqs = list(islice(scheduler.waiting, MAX_EXAMINED))
    growths = {growth(seq, scheduler.table.tokens.shape[1]) for seq in seqs}
    tokens = max(growths, default=0)
    if tokens < NUM_COHORTS or len(growths) > 1 or any(seq.min_num_tokens < seq.max_num_tokens for seq in seqs):
        return None
    if len({seq.block(0).tobytes() for seq in seqs}) < len(seqs):
        return None
    ages = tokens * np.arange(1, NUM_COHORTS + 1) // NUM_COHORTS + 1  # at most, in tokens, when one cohort ends
    num_prompt_tokens, block_size = sum(seq.num_tokens for seq in seqs) // len(seqs), scheduler.block_size
    num_blocks, num_slots = scheduler.block_manager.num_available, len(scheduler.table.seq_id)
    size = num_blocks // int((-(-(num_prompt_tokens + ages) // block_size)).sum())
    size = min(size, min(num_slots, MAX_SEQS) // NUM_COHORTS)
    if size * NUM_COHORTS < MANY_SEQS:
        return None
    num_at_once = min(num_blocks // -(-(num_prompt_tokens + tokens - 1) // block_size), num_slots)
    num_periods = -(-num_seqs // size) + NUM_COHORTS - 1  # each lasts tokens / NUM_COHORTS steps
    saves_steps = num_periods < MAX_STEPS * NUM_COHORTS * -(-num_seqs // num_at_once)
    return Cohorts(size, tokens, seqs[0]) if saves_steps else None


class BlockDemand:
    """Blocks that sequences will take, as far as their lengths are known; and the seats of cohorts.

    Time is in decode steps from now, in intervals that end when some sequence does; of many such times some are taken.
    In an interval a sequence counts if it lasts till its begin, with as many blocks as it has at its end.
    """

    def __init__(self, scheduler: "Scheduler", cohorts: Cohorts | None):
        table, running = scheduler.table, scheduler.running_req_indices
        self._block_manager, self._size = scheduler.block_manager, scheduler.block_size
        self._max_model_len = table.tokens.shape[1]
        self._seats = cohorts.num_seats() - len(running) if cohorts else len(table.seq_id)
        lengths = table.num_scheduled[running] - 1  # tokens whose keys and values are stored
        left = np.maximum(table.min_tokens[running] - 1 - lengths, 0)
        ends = np.unique(left)
        stride = len(ends) // NUM_INTERVALS + 1
        self._ends = np.append(ends[stride - 1 :: stride], self._max_model_len)
        self._begins = np.append(0, self._ends[:-1] + 1)
        self._added: list[tuple[int, int]] = []  # (length, steps left) of added sequences that are not yet counted
        self._blocks = np.zeros(len(self._ends), int)  # blocks needed beyond those held now
        self._count(lengths, left)

    def _count(self, lengths: np.ndarray, left: np.ndarray) -> None:
        """Count sequences of these lengths, in tokens, and steps left. After its end one gives its blocks back."""
        lengths, left = lengths[:, None], left[:, None]
        at_end = -(-(lengths + np.minimum(left, self._ends)) // self._size)
        self._blocks += (np.where(left >= self._begins, at_end, 0) - -(-lengths // self._size)).sum(0)
        self._peak = max(int(self._blocks.max()), 0)

    def add(self, seq: Sequence) -> int:
        """Add a sequence; returns the blocks that must be left when it has blocks for its tokens."""
        self._seats -= 1
        if self._seats < 0:
            return len(self._block_manager.blocks)
        length, left = seq.num_tokens, max(growth(seq, self._max_model_len) - 1, 0)  # the last token is never stored
        num_blocks = -(-length // self._size)
        self._added.append((length, left))
        self._peak += -(-(length + left) // self._size) - num_blocks  # an upper bound: others may have ended by then
        if num_blocks + self._peak > self._block_manager.num_available:
            self._count(*np.array(self._added).T)
            self._added.clear()
        return self._peak

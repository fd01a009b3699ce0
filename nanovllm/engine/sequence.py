"""One sequence being completed, and the table of the running ones.

Owns a sequence's tokens, counters and status. A waiting or finished ``Sequence`` keeps its tokens itself. A running one
has a request slot in the ``SequenceTable``, so that a decode step over a thousand sequences is a few array operations
instead of a thousand Python statements.

Token ranges of a running sequence::

    [0, num_cached)      keys and values were found in the prefix cache
    [0, num_computed)    the launch that writes their keys and values was issued (prefill; see the scheduler)
    [0, num_tokens)      ids known to the host
    [0, num_scheduled)   the same plus the tokens being sampled by launches in flight
"""

from collections.abc import Sequence as ListLike
from enum import Enum, auto

import numpy as np

from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams

INT32_MAX = 2**31 - 1


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class SequenceTable:
    """Columns by request slot, ``req_idx``; the same slot as in the device's request state. R = max_num_seqs.

    Attributes:
        seq_id: int64 [R]; -1 where the slot is free.
        num_tokens: int32 [R]; tokens whose ids the host knows.
        num_scheduled: int32 [R]; the same plus those in flight.
        max_tokens: int32 [R]; limit of prompt plus completion, max_model_len included.
        tokens: int32 [R, max_model_len]; the OS maps its pages at the first write.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int):
        self.seq_id = np.full(max_num_seqs, -1, np.int64)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_scheduled = np.zeros(max_num_seqs, np.int32)
        self.max_tokens = np.zeros(max_num_seqs, np.int32)
        self.tokens = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.free_req_indices = list(range(max_num_seqs - 1, -1, -1))  # the lowest is taken first

    def add(self, seq: "Sequence") -> None:
        """Move a waiting sequence's tokens into a free request slot."""
        req_idx, n = self.free_req_indices.pop(), seq.num_tokens
        self.seq_id[req_idx] = seq.seq_id
        self.num_tokens[req_idx] = self.num_scheduled[req_idx] = n
        self.max_tokens[req_idx] = min(seq.max_num_tokens, self.tokens.shape[1])
        self.tokens[req_idx, :n] = seq.tokens(0, n)
        seq.attach(self, req_idx)

    def remove(self, seq: "Sequence") -> None:
        """Move a sequence's tokens back to itself and free the slot."""
        req_idx = seq.req_idx
        seq.detach()
        self.seq_id[req_idx] = -1
        self.free_req_indices.append(req_idx)


class Sequence:
    """One prompt and one completion of it.

    Args:
        prompt_token_ids: at least one token.
        sampling_params: of the request.
        seq_id: unique in its engine; also the order of arrival.
        block_size: tokens per KV block.
        seed: 64-bit key of its sampling noise.
        min_tokens_stop_ids: ids that may not be sampled among its first ``min_tokens`` tokens.
        group_id: the same for all completions of one prompt; they share its blocks. None: seq_id.

    Attributes:
        targets: token ids int32 [n] whose log-probabilities prefill reports, or None. The hidden states of positions
            [first_target, first_target + n) predict them.
        allowed_mask: tokens it may sample, a bit each, int32 [ceil(V / 32)], or None.
    """

    def __init__(self, prompt_token_ids: ListLike[int] | np.ndarray, sampling_params: SamplingParams = SamplingParams(),
                 seq_id: int = 0, block_size: int = 256, seed: int = 0,
                 min_tokens_stop_ids: tuple[int, ...] = (), group_id: int | None = None):
        self.seq_id = seq_id
        self.group_id = seq_id if group_id is None else group_id
        self.status = SequenceStatus.WAITING
        self.sampling_params = sampling_params
        self.features = sampling_params.features
        self.seed = seed
        self.min_tokens_stop_ids = min_tokens_stop_ids
        self.block_size = block_size
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_cached_tokens = 0  # at its first admission
        self.num_computed_tokens = 0  # of the tokens known at admission; decoding does not move it
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # of its leading full blocks, computed on demand
        self.num_registered_blocks = 0  # leading blocks that the prefix cache knows
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.arrived_at = self.entered_at = self.prefilled_at = 0.0  # perf_counter, in seconds; see metrics.py
        self.targets: np.ndarray | None = None
        self.first_target = 0
        self.allowed_mask: np.ndarray | None = None
        self.req_idx = -1
        self._table: SequenceTable | None = None
        self._token_ids = np.array(prompt_token_ids, np.int32)  # while it has no request slot

    def attach(self, table: SequenceTable, req_idx: int) -> None:
        self._table, self.req_idx, self._token_ids = table, req_idx, np.empty(0, np.int32)

    def detach(self) -> None:
        self._token_ids = self.tokens(0, self.num_tokens).copy()
        self._table, self.req_idx = None, -1

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids) if self._table is None else int(self._table.num_tokens[self.req_idx])

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop) as int32."""
        return (self._token_ids if self._table is None else self._table.tokens[self.req_idx])[start:stop]

    @property
    def token_ids(self) -> list[int]:
        return self.tokens(0, self.num_tokens).tolist()

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.tokens(0, self.num_prompt_tokens).tolist()

    @property
    def completion_token_ids(self) -> list[int]:
        return self.tokens(self.num_prompt_tokens, self.num_tokens).tolist()

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_num_tokens(self) -> int:
        assert self.sampling_params.max_tokens is not None  # the request layer has resolved it
        return self.num_prompt_tokens + self.sampling_params.max_tokens

    @property
    def is_sampled(self) -> bool:
        """Whether it generates anything; otherwise its prompt is computed for the log-probabilities alone."""
        return self.sampling_params.max_tokens != 0

    @property
    def max_cached_tokens(self) -> int:
        """How much of it may come from the prefix cache: what is computed gives logits."""
        scored_before = self.targets is None or self.num_completion_tokens > 0
        return self.num_tokens - 1 if scored_before else min(self.num_tokens - 1, self.first_target)

    def target_rows(self, start: int, stop: int) -> range:
        """Positions in [start, stop) whose logits are scored against ``targets``."""
        if self.targets is None or self.num_completion_tokens > 0:  # resumed after preemption: known by then
            return range(0)
        return range(max(start, self.first_target), min(stop, self.first_target + len(self.targets)))

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)

    def block(self, i: int) -> np.ndarray:
        """Token ids of block i, int32 [<= block_size]."""
        return self.tokens(i * self.block_size, min((i + 1) * self.block_size, self.num_tokens))

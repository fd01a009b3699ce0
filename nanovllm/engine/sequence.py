"""One request, and the numbers of the running ones as columns.

Owns a request's tokens, counters and status. A waiting or finished ``Sequence`` keeps its tokens
itself. A running one lives in a row of the ``SequenceTable``, so that a decode step over a
thousand sequences is a few array operations instead of a thousand Python statements.

What is known of a running sequence's tokens, left to right::

    [0, num_cached)      keys and values came from the prefix cache
    [.., num_computed)   a launch that writes their keys and values was issued (prefill; see scheduler)
    [.., num_tokens)     ids known to the host
    [.., num_scheduled)  ids known, or being sampled by a launch in flight
"""

from collections.abc import Sequence as Sized
from enum import Enum, auto

import numpy as np

from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class SequenceTable:
    """Columns over rows; a running sequence owns one row (the same row as in the device's tables).

    Attributes:
        seq_id: int64 [R]; -1 where the row is free.
        num_tokens: int32 [R]; tokens whose ids the host knows.
        num_scheduled: int32 [R]; the same plus those in flight.
        max_tokens: int32 [R]; prompt plus completion at most, max_model_len included.
        tokens: int32 [R, max_model_len]; pages are taken from the system only when written.
    """

    def __init__(self, num_rows: int, max_model_len: int):
        self.seq_id = np.full(num_rows, -1, np.int64)
        self.num_tokens = np.zeros(num_rows, np.int32)
        self.num_scheduled = np.zeros(num_rows, np.int32)
        self.max_tokens = np.zeros(num_rows, np.int32)
        self.tokens = np.zeros((num_rows, max_model_len), np.int32)
        self.free_rows = list(range(num_rows - 1, -1, -1))  # the lowest row is taken first

    def enter(self, seq: "Sequence") -> None:
        """Move a waiting sequence's tokens into a free row."""
        row = self.free_rows.pop()
        n = seq.num_tokens
        self.seq_id[row] = seq.seq_id
        self.num_tokens[row] = self.num_scheduled[row] = n
        self.max_tokens[row] = min(seq.max_num_tokens, self.tokens.shape[1])
        self.tokens[row, :n] = seq.tokens(0, n)
        seq.attach(self, row)

    def leave(self, seq: "Sequence") -> None:
        """Move a sequence's tokens back into its own list and free the row."""
        row = seq.row
        seq.detach()
        self.seq_id[row] = -1
        self.free_rows.append(row)


class Sequence:
    """One request.

    Args:
        prompt_token_ids: the prompt, at least one token.
        sampling_params: how to sample it.
        seq_id: unique in its engine; also the order of arrival.
        block_size: tokens per KV block.
        seed: 64-bit key of its noise.
        forbidden_token_ids: may not be sampled among its first ``min_tokens`` tokens.
    """

    def __init__(self, prompt_token_ids: Sized[int] | np.ndarray, sampling_params: SamplingParams = SamplingParams(),
                 seq_id: int = 0, block_size: int = 256, seed: int = 0,
                 forbidden_token_ids: tuple[int, ...] = ()):
        self.seq_id = seq_id
        self.status = SequenceStatus.WAITING
        self.sampling_params = sampling_params
        self.seed = seed
        self.forbidden_token_ids = forbidden_token_ids
        self.block_size = block_size
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_cached_tokens = 0  # at its first admission
        self.num_computed_tokens = 0  # of the tokens known at admission; decoding does not move it
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # of its leading full blocks, as far as they were needed
        self.num_registered_blocks = 0  # leading blocks that the prefix cache knows
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.row = -1
        self._table: SequenceTable | None = None
        self._token_ids = np.array(prompt_token_ids, np.int32)  # while it has no row

    def attach(self, table: SequenceTable, row: int) -> None:
        self._table, self.row, self._token_ids = table, row, np.empty(0, np.int32)

    def detach(self) -> None:
        self._token_ids = self.tokens(0, self.num_tokens).copy()
        self._table, self.row = None, -1

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids) if self._table is None else int(self._table.num_tokens[self.row])

    @property
    def token_ids(self) -> list[int]:
        return self.tokens(0, self.num_tokens).tolist()

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop) as int32."""
        return (self._token_ids if self._table is None else self._table.tokens[self.row])[start:stop]

    @property
    def last_token(self) -> int:
        return int(self.tokens(self.num_tokens - 1, self.num_tokens)[0])

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def max_num_tokens(self) -> int:
        return self.num_prompt_tokens + self.sampling_params.max_tokens

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.tokens(0, self.num_prompt_tokens).tolist()

    @property
    def completion_token_ids(self) -> list[int]:
        return self.tokens(self.num_prompt_tokens, self.num_tokens).tolist()

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> np.ndarray:
        """Token ids of block i, int32 [<= block_size]."""
        return self.tokens(i * self.block_size, min((i + 1) * self.block_size, self.num_tokens))

    def append_token(self, token_id: int) -> None:
        """Append one known token (``Scheduler.postprocess`` does it for whole batches)."""
        if self._table is None:
            self._token_ids = np.append(self._token_ids, np.int32(token_id))
        else:
            self._table.tokens[self.row, self.num_tokens] = token_id
            self._table.num_tokens[self.row] += 1

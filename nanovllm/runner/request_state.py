"""The device's tables of the running sequences, and the host's way to change them.

Owns one int32 buffer on the device. Its first part lists the rows of the current decode batch;
the rest is a table with a row for each running sequence (last token, length, sampling values,
block table). A decode step reads its inputs there and writes its tokens there, so the host sends
nothing while nothing changes, and otherwise only which cells change to what. Owns as well the sampled_tokens
in the host's memory, where it finds the tokens.
"""

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.sampling.reference import SamplingState
from nanovllm.sampling_params import MAX_FORBIDDEN

# columns of the table; float values are kept as their bits
LAST_TOKEN, LENGTH, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, MIN_LENGTH, FORBIDDEN = 0, 1, 2, 3, 4, 5, 6, 8, 9
BLOCK_TABLE = FORBIDDEN + MAX_FORBIDDEN
INT32_MAX = 2**31 - 1  # stands for any larger number a user gives
MAX_TEMPERATURE = 1e30  # so does this; its inverse is an fp32 number other than 0


def _bits(*values: float) -> list[int]:
    return np.array(values, np.float32).view(np.int32).tolist()


class RequestState:
    """Device side: views of the buffer.

    Attributes:
        batch_req_indices: int32 [R], batch position -> row; positions past the batch hold the null row.
        last_token, length: int32 [R + 1]; length counts the token whose keys and values are due next.
        columns: the sampling columns, each [R + 1, ...].
        block_tables: int32 [R + 1, max_blocks].
        sampled_tokens: int32 [2, R + 1] in the host's memory, where launches put their tokens: of a row whose length was
            n, at [n % 2, row]. So a launch does not overwrite what the one before it left.
    """

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device):
        self.padding_req_idx = num_rows  # length 0: stores nothing, attends nothing
        width = BLOCK_TABLE + max_blocks
        self.buffer = torch.zeros(num_rows + (num_rows + 1) * width, dtype=torch.int32, device=device)
        self.batch_req_indices = self.buffer[:num_rows]
        self.batch_req_indices.fill_(self.padding_req_idx)
        table = self.buffer[num_rows:].view(num_rows + 1, width)
        floats = table.view(torch.float32)
        self.sampled_tokens = torch.zeros(2, num_rows + 1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self.last_token = table[:, LAST_TOKEN]
        self.length = table[:, LENGTH]
        self.block_tables = table[:, BLOCK_TABLE:]
        self.columns = SamplingState(
            temperature=floats[:, TEMPERATURE],
            top_k=table[:, TOP_K],
            top_p=floats[:, TOP_P],
            min_p=floats[:, MIN_P],
            seed=table[:, SEED : SEED + 2],
            min_length=table[:, MIN_LENGTH],
            forbidden=table[:, FORBIDDEN : FORBIDDEN + MAX_FORBIDDEN],
            length=self.length,
        )

    def apply(self, cells: torch.Tensor, values: torch.Tensor) -> None:
        """buffer[cells] = values; both int32 [n] on the device."""
        if len(cells):
            self.buffer.index_copy_(0, cells.long(), values)


class StagedWrites:
    """Host side: gathers the cells to change until the next launch takes them along."""

    def __init__(self, num_rows: int, max_blocks: int):
        self.num_rows = num_rows
        self.width = BLOCK_TABLE + max_blocks
        self.reset()

    def reset(self) -> None:
        """Forget what was gathered, and what the device is believed to have (a launch may never have got there)."""
        self._batch_rows = np.full(self.num_rows, -1, np.int32)  # what the device has; -1 unknown
        self._cells: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self.has_filters = np.zeros(self.num_rows, bool)  # sampling the row takes the whole vocabulary

    def _put(self, row: int, column: int, values: list[int]) -> None:
        start = self.num_rows + row * self.width + column
        self._cells.append(np.arange(start, start + len(values), dtype=np.int32))
        self._values.append(np.array(values, np.int64).astype(np.int32))

    def enter(self, seq: Sequence) -> None:
        """A sequence got its row: everything about it."""
        params = seq.sampling_params
        temperature = 0.0 if params.is_greedy else min(params.temperature, MAX_TEMPERATURE)
        filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self.has_filters[seq.row] = filters and not params.is_greedy
        forbidden = seq.forbidden_token_ids
        halves = np.array([seq.seed], np.uint64).view(np.int32).tolist()
        self._put(seq.row, LAST_TOKEN, [
            0,
            seq.num_tokens,
            *_bits(temperature),
            min(max(params.top_k, 0), INT32_MAX),
            *_bits(params.top_p, params.min_p),
            *halves,
            min(seq.num_prompt_tokens + params.min_tokens, INT32_MAX),
            *forbidden, *[-1] * (MAX_FORBIDDEN - len(forbidden)),
            *seq.block_table,
        ])  # fmt: skip

    def grow(self, seqs: list[Sequence]) -> None:
        """These sequences' block tables got one more block each."""
        if seqs:
            start = self.num_rows + BLOCK_TABLE - 1
            cells = [start + seq.row * self.width + len(seq.block_table) for seq in seqs]
            self._cells.append(np.array(cells, np.int32))
            self._values.append(np.array([seq.block_table[-1] for seq in seqs], np.int32))

    def set_batch(self, rows: np.ndarray) -> None:
        """The next decode batch is ``rows``, int32 [B]; only positions that differ are sent."""
        target = np.full(self.num_rows, self.num_rows, np.int32)
        target[: len(rows)] = rows
        changed = np.flatnonzero(target != self._batch_rows)
        if len(changed):
            self._cells.append(changed.astype(np.int32))
            self._values.append(target[changed])
            self._batch_rows = target

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Cells and values, int32 [n] each, gathered since the last call."""
        if not self._cells:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        taken = np.concatenate(self._cells), np.concatenate(self._values)
        self._cells, self._values = [], []
        return taken

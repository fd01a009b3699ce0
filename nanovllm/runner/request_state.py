"""The running requests on the device: a row per request slot, and the slots of the current decode batch.

In a verify step the tokens of a draft have rows of their own, behind the padding slot: copies of their request's row,
further on by 1, 2, ... tokens. So they are prepared, computed and sampled like requests; dead ones have length 0.

Owns one int32 buffer on the device, its layout, and the host's mirror of the block tables. A decode step reads its
inputs from here and its sampling writes its tokens here, so a step copies to the device only what changes: new
requests, new blocks, another batch.
"""

from typing import Any

import numpy as np
import torch

from nanovllm.core import DecodeBatch, NewSequences
from nanovllm.sampling.feature import Arrays, SamplingState, Tensors


class RequestState:
    """R request slots, and one more, the padding slot: of length 0, it stores, attends and samples nothing.

    Args:
        max_num_seqs: R.
        max_blocks: length of a block table.
        device: of the buffer.
        columns: name -> numpy dtype of the sampling columns. A row has its last token, its length, these columns, and
            its block table.
        num_drafted: D, most tokens of all drafts of a verify step.

    Attributes:
        batch_req_indices: int32 [R], batch position -> request slot; the padding slot beyond the batch.
        last_token, length: int32 [R + 1 + D]; length counts the token whose keys and values are computed next.
        sampling: the sampling columns, [R + 1 + D] or [R + 1 + D, n] each.
        block_tables: int32 [R + 1 + D, max_blocks].
        block_table_mirror: the same on the host, int32 [R, max_blocks]; -1 where a slot has no block.
        sampled_tokens: int32 [R + 1 + D], pinned host memory, written by the sampling kernel; -1 where no logit was
            finite. A step is sampled when the host has read the tokens of the one before.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device, columns: dict[str, Any],
                 num_drafted: int = 0):
        self.max_num_seqs = self.padding_req_idx = R = max_num_seqs
        self.device = device
        fields = [("last_token", np.int32), ("length", np.int32), *columns.items()]
        num_words = np.dtype(fields).itemsize // 4
        # The columns, the block tables and the first row begin at multiples of 16 bytes: Triton compiles another
        # variant of a kernel for a pointer that does not.
        fields.append(("padding", (np.int32, -num_words % 4)))
        self.row = np.dtype(fields)
        self._first_row, self._first_block = -(-R // 4) * 4, self.row.itemsize // 4
        self._width = self._first_block + max_blocks
        num_rows = R + 1 + num_drafted
        self._first_draft = self._first_row + num_rows * self._width
        self.buffer = torch.zeros(self._first_draft + num_drafted, dtype=torch.int32, device=device)
        self.batch_req_indices = self.buffer[:R].fill_(self.padding_req_idx)
        self._drafts = self.buffer[self._first_draft :]
        self._table = table = self.buffer[self._first_row : self._first_draft].view(num_rows, self._width)
        self._draft_rows = torch.arange(R + 1, num_rows, dtype=torch.int32, device=device)
        rows = self._first_row + np.arange(R + 1, num_rows) * self._width
        drafts = np.arange(self._first_draft, len(self.buffer))
        self._draft_places = np.concatenate([rows, rows + 1, drafts])  # in the buffer: tokens, lengths, tokens again

        def column(name: str) -> torch.Tensor:
            dtype, offset = self.row.fields[name][:2]  # type: ignore[index]
            of_its_type = table.view(torch.float32 if dtype == np.float32 else torch.int32)
            values = of_its_type[:, offset // 4 : (offset + dtype.itemsize) // 4]
            return values[:, 0] if values.shape[1] == 1 else values

        self.last_token, self.length = column("last_token"), column("length")
        self.sampling = SamplingState(length=self.length, **{name: column(name) for name in columns})
        self.block_tables = table[:, self._first_block :]
        self.block_table_mirror = np.full((R, max_blocks), -1, np.int32)
        self.sampled_tokens = torch.zeros(num_rows, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self.reset()

    def reset(self) -> None:
        """Forget what the device knows: it may have got an interrupted step, or not."""
        self._batch_req_indices = np.full(self.max_num_seqs, -1, np.int32)  # as on the device; -1 unknown

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> None:
        """Host: sequences have got request slots. ``rows`` [n]: structured, of type ``row``, the sampling columns
        filled in. Puts elements of the buffer and their new values into ``arrays``."""
        rows["length"] = new.num_tokens  # prefill samples the last token
        nth = np.arange(len(new.block_ids)) - np.repeat(np.cumsum(new.num_blocks) - new.num_blocks, new.num_blocks)
        owners = np.repeat(new.req_indices, new.num_blocks)
        self.block_table_mirror[new.req_indices] = -1
        self.block_table_mirror[owners, nth] = new.block_ids
        starts = self._first_row + new.req_indices * self._width
        words = starts[:, None] + np.arange(self._first_block)
        self._set(arrays, words.ravel(), rows.view(np.int32))
        self._set(arrays, self._first_row + owners * self._width + self._first_block + nth, new.block_ids)

    def set_batch(self, batch: DecodeBatch, arrays: Arrays) -> None:
        """Host: the blocks that a decode batch appends, and the batch positions that differ from the last one's."""
        if len(batch.new_blocks):
            req_indices, places, block_ids = batch.new_blocks.T
            self.block_table_mirror[req_indices, places] = block_ids
            self._set(arrays, self._first_row + req_indices * self._width + self._first_block + places, block_ids)
        target = np.full(self.max_num_seqs, self.padding_req_idx, np.int32)
        target[: len(batch.req_indices)] = batch.req_indices
        changed = np.flatnonzero(target != self._batch_req_indices)
        if len(changed):
            self._set(arrays, changed, target[changed])
            self._batch_req_indices = target
        if batch.drafts is not None:
            self._set_drafts(batch, batch.drafts, arrays)

    def _set_drafts(self, batch: DecodeBatch, drafts: np.ndarray, arrays: Arrays) -> None:
        """Host: tokens and lengths of the draft rows; beyond the batch as many as a graph may have are dead."""
        num_drafted, Q = len(self._draft_rows), 1 + drafts.shape[1]
        values = np.zeros((3, num_drafted), np.int32)
        values[0, : drafts.size] = values[2, : drafts.size] = drafts.ravel()
        values[1, : drafts.size] = ((batch.lengths[:, None] + np.arange(1, Q)) * (drafts >= 0)).ravel()
        self._set(arrays, self._draft_places, values.ravel())

    def write(self, tensors: Tensors) -> None:
        """Device: take in what the host has set."""
        if "state_values" in tensors:
            self.buffer.index_copy_(0, tensors["state_indices"].long(), tensors["state_values"])

    # ---------------------------------------------------------------- drafts: B sequences with Q rows each

    def rows(self, size: int, num_rows: int) -> torch.Tensor:
        """Device: the request slots i32[B * Q] of a verify step, of each sequence its own and those of its draft."""
        drafted = self._draft_rows[: size * (num_rows - 1)].view(size, num_rows - 1)
        return torch.cat([self.batch_req_indices[:size, None], drafted], 1).flatten()

    def rows_on_host(self, batch: DecodeBatch) -> np.ndarray:
        """The same, int32 [B, Q]; of a batch without drafts [B]."""
        if batch.drafts is None:
            return batch.req_indices
        drafted = np.arange(batch.drafts.size, dtype=np.int32).reshape(batch.drafts.shape) + self.padding_req_idx + 1
        return np.concatenate([batch.req_indices[:, None], drafted], 1)

    def spread(self, size: int, num_rows: int) -> None:
        """Device: the draft rows get what their requests' rows have behind token and length, which the host has set."""
        owners = self.batch_req_indices[:size, None].expand(size, num_rows - 1).flatten()
        drafted = self._table[self.padding_req_idx + 1 :][: len(owners)]
        drafted[:, 2:] = self._table[:, 2:].index_select(0, owners)

    def accept(self, rows: torch.Tensor, num_rows: int) -> None:
        """Device: every row has sampled. Requests go on behind the tokens of their draft that are right; see
        ``DecodeBatch.num_accepted``."""
        rows = rows.view(-1, num_rows).long()
        tokens, is_live = self.last_token[rows], self.length[rows[:, 1:]] > 0
        drafts = self._drafts[: is_live.numel()].view(is_live.shape)
        is_right = ((tokens[:, :-1] == drafts) & is_live).int()
        num_accepted = is_right.cumprod(1).sum(1)
        self.last_token[rows[:, 0]] = tokens.gather(1, num_accepted[:, None])[:, 0]
        self.length[rows[:, 0]] += num_accepted.int()

    def _set(self, arrays: Arrays, indices: np.ndarray, values: np.ndarray) -> None:
        for name, added in (("state_indices", indices), ("state_values", values)):
            arrays[name] = np.concatenate([arrays[name], added]) if name in arrays else added

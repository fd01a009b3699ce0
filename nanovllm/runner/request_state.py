"""The running requests on the device: a row per request slot, and the slots of the current decode batch.

Owns one int32 buffer on the device, its layout, and the host's mirror of the block tables. A decode step reads its
inputs from here and its sampling writes its tokens here, so a step copies to the device only what changes: new
requests, new blocks, another batch.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nanovllm.core import DecodeBatch, NewSequences
from nanovllm.sampling.feature import Arrays, Tensors


class RequestState:
    """R request slots, and one more, the padding slot: of length 0, it stores, attends and samples nothing.

    Args:
        max_num_seqs: R.
        max_blocks: length of a block table.
        device: of the buffer.
        columns: name -> numpy dtype of the sampling columns. A row has its last token, its length, these columns, and
            its block table.
        num_more: D, rows after the padding slot, see drafts.py.

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
                 num_more: int = 0):
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
        num_rows = R + 1 + num_more
        self.buffer = torch.zeros(self._first_row + num_rows * self._width, dtype=torch.int32, device=device)
        self.batch_req_indices = self.buffer[:R].fill_(self.padding_req_idx)
        self.table = table = self.buffer[self._first_row :].view(num_rows, self._width)

        def column(name: str) -> torch.Tensor:
            dtype, offset = self.row.fields[name][:2]  # type: ignore[index]
            of_its_type = table.view(torch.float32 if dtype == np.float32 else torch.int32)
            values = of_its_type[:, offset // 4 : (offset + dtype.itemsize) // 4]
            return values[:, 0] if values.shape[1] == 1 else values

        self.last_token, self.length = column("last_token"), column("length")
        self.sampling = SimpleNamespace(length=self.length, **{name: column(name) for name in columns})
        self.block_tables = table[:, self._first_block :]
        self.block_table_mirror = np.full((R, max_blocks), -1, np.int32)
        self.sampled_tokens = torch.zeros(num_rows, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self.reset()

    def reset(self) -> None:
        """Forget the device's batch: an interrupted step may have reached it, or not."""
        self._batch_req_indices = np.full(self.max_num_seqs, -1, np.int32)  # the same as on the device; -1: unknown

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
        self.set(arrays, words.ravel(), rows.view(np.int32))
        self.set(arrays, self._first_row + owners * self._width + self._first_block + nth, new.block_ids)

    def set_batch(self, batch: DecodeBatch, arrays: Arrays) -> None:
        """Host: the blocks that a decode batch appends, and the batch positions that differ from the last one's."""
        if len(batch.new_blocks):
            req_indices, places, block_ids = batch.new_blocks.T
            self.block_table_mirror[req_indices, places] = block_ids
            self.set(arrays, self._first_row + req_indices * self._width + self._first_block + places, block_ids)
        target = np.full(self.max_num_seqs, self.padding_req_idx, np.int32)
        target[: len(batch.req_indices)] = batch.req_indices
        changed = np.flatnonzero(target != self._batch_req_indices)
        if len(changed):
            self.set(arrays, changed, target[changed])
            self._batch_req_indices = target

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Elements of the buffer: last token and length of some rows, [2, n]."""
        return self._first_row + rows * self._width + np.arange(2)[:, None]

    def write(self, tensors: Tensors) -> None:
        """Device: store the elements that the host has set."""
        if "state_values" in tensors:
            self.buffer.index_copy_(0, tensors["state_indices"].long(), tensors["state_values"])

    def set(self, arrays: Arrays, indices: np.ndarray, values: np.ndarray) -> None:
        """Host: set elements of the buffer, with the batch's copy to the device."""
        for name, added in (("state_indices", indices), ("state_values", values)):
            arrays[name] = np.concatenate([arrays[name], added]) if name in arrays else added

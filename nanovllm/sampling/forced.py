"""Tokens that must come next: the end of thoughts whose budget is spent (``engine/thinking.py``)."""

import numpy as np
import torch

from nanovllm.core import NewSequences
from nanovllm.sampling.feature import Arrays, Feature, Logits, Sampled, Tensors


class Forced(Feature):
    """-inf on every token but one, whatever masks, penalties and functions say.

    The token is a late input of the step that samples it. Other steps of the request leave the logits unchanged.
    """

    has_kernels, sends = False, "forced_rows"

    def __init__(self, max_num_seqs: int):
        self._has_budget = np.zeros(max_num_seqs, bool)
        self._rows: torch.Tensor | None = None  # int64 [m], rows of the logits
        self._ids = torch.empty(0)  # int64 [m]

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        used = [params.thinking_token_budget is not None for params in new.sampling.params]
        self._has_budget[new.req_indices] = used
        return used

    def waits(self, req_indices: np.ndarray) -> bool:
        return bool(self._has_budget[req_indices].any())

    def begin(self, sampled: Sampled, arrays: Arrays) -> None:
        self._rows = None
        if sampled.masks is not None and len(forced := sampled.masks[2]):
            places = np.nonzero(forced[:, :1] == sampled.req_indices)[1]
            # each is sampled from the first of its rows
            arrays["forced_rows"], arrays["forced_ids"] = places * sampled.num_rows, forced[:, 1]

    def write(self, tensors: Tensors) -> None:
        self._rows, self._ids = tensors["forced_rows"].long(), tensors["forced_ids"].long()

    def apply(self, logits: Logits, req_indices: torch.Tensor) -> Logits:
        if self._rows is None:
            return logits
        width = logits.values.shape[1]
        columns = self._ids - logits.vocab_start
        is_own = (columns >= 0) & (columns < width)  # ids that this rank holds
        values = logits.values.index_fill(0, self._rows, -torch.inf)
        forced = torch.where(is_own, 0.0, -torch.inf).to(values.dtype)
        return logits._replace(values=values.index_put_((self._rows, columns.clamp(0, width - 1)), forced))

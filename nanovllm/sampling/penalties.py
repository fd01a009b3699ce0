"""logit_bias, and repetition, frequency and presence penalties.

The device keeps a short list of distinct tokens for each request, with their counts and biases. The kernel counts the
last token, which the host may not know yet, before it applies them. R request slots, W entries of a list.
"""

from typing import ClassVar

import numpy as np
import torch

from nanovllm.core import NewSequences
from nanovllm.kernels.sampling.reference import AdjustmentTable
from nanovllm.sampling.feature import INT32_MAX, MAX_FLOAT, Arrays, Feature, Logits, Tensors
from nanovllm.sampling_params import MAX_LOGIT_BIAS, SamplingParams

BIAS_ONLY = -1  # count of an entry that has a bias and is no token of the request


class Penalties(Feature):
    """Biases and penalties, in fp32. Each rank counts all tokens, and changes its part of the vocabulary."""

    columns: ClassVar = {
        "presence_penalty": np.float32,
        "frequency_penalty": np.float32,
        "repetition_penalty": np.float32,
        "is_adjusted": np.int32,
    }

    def __init__(self, max_num_seqs: int, max_model_len: int, vocab_size: int, last_token: torch.Tensor):
        self._last_token = last_token  # int32 [R + 1]
        # all that a request may be prompted with, generate or bias
        self._capacity = min(max_model_len + MAX_LOGIT_BIAS, vocab_size)
        self._shape = max_num_seqs + 1, 2 + 3 * self._capacity  # two sizes; ids, counts and biases
        self._buffer: torch.Tensor | None = None
        self.table: AdjustmentTable | None = None  # views of the buffer

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        rows["repetition_penalty"] = 1.0
        used = [params.has_penalties or params.logit_bias is not None for params in new.params]
        rows["is_adjusted"] = used
        indices, values = [], []
        for i in np.flatnonzero(used).tolist():
            params, row, W = new.params[i], rows[i], self._capacity
            row["presence_penalty"], row["frequency_penalty"] = params.presence_penalty, params.frequency_penalty
            row["repetition_penalty"] = max(1 / MAX_FLOAT, min(params.repetition_penalty, MAX_FLOAT))
            num_counted, ids, counts, bias = entries(params, new.histories[i], int(new.num_prompt_tokens[i]))
            columns = [np.arange(len(ids)) + 2 + column * W for column in range(3)]
            indices.append(np.concatenate([[0, 1], *columns]) + int(new.req_indices[i]) * self._shape[1])
            values.append(np.concatenate([[len(ids), num_counted], ids, counts, bias.view(np.int32)]))
        if indices:
            arrays["penalty_indices"], arrays["penalty_values"] = np.concatenate(indices), np.concatenate(values)
        return used

    def write(self, tensors: Tensors) -> None:
        if "penalty_values" not in tensors:
            return
        if self._buffer is None:
            (R, width), W = self._shape, self._capacity
            self._buffer = torch.zeros(R * width, dtype=torch.int32, device=self._last_token.device)
            rows = self._buffer.view(R, width)
            ids, counts, bias = rows[:, 2:].view(R, 3, W).unbind(1)
            self.table = AdjustmentTable(rows[:, 0], rows[:, 1], ids, counts, bias.view(torch.float32))
        self._buffer.index_copy_(0, tensors["penalty_indices"].long(), tensors["penalty_values"])

    def apply(self, logits: Logits, req_indices: torch.Tensor) -> Logits:
        return logits._replace(values=self.ops.adjust_logits(
            logits.values, req_indices, self.state, self._last_token, self.table, logits.vocab_start
        ))  # fmt: skip

    def release(self) -> None:
        self.table = self._buffer = None


def entries(params: SamplingParams, history: np.ndarray | None,
            num_prompt_tokens: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """How many tokens are counted; distinct token ids, how often each was generated, their biases."""
    ids, counts, num_counted = np.empty(0, np.int64), np.empty(0, np.int64), INT32_MAX  # nothing is ever counted
    if history is not None:
        ids, where = np.unique(history, return_inverse=True)
        counts = np.bincount(where[num_prompt_tokens:], minlength=len(ids))
        num_counted = len(history)
    bias_of = params.logit_bias or {}
    others = np.setdiff1d(np.array(list(bias_of), np.int64), ids)
    ids = np.concatenate([ids, others]).astype(np.int32)
    counts = np.concatenate([counts, np.full(len(others), BIAS_ONLY)]).astype(np.int32)
    bias = np.array([bias_of.get(i, 0.0) for i in ids.tolist()]).clip(-MAX_FLOAT, MAX_FLOAT).astype(np.float32)
    return num_counted, ids, counts, bias

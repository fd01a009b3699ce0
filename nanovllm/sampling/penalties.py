"""logit_bias, and repetition, frequency and presence penalties.

The device keeps a short list of distinct tokens for each request, with their counts and biases. The kernel counts the
last token, which the host may not know yet, before it applies them. R request slots, W entries of a list.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from nanovllm.core import NewSequences
from nanovllm.sampling.feature import INT32_MAX, MAX_FLOAT, Arrays, Feature, Logits, Tensors
from nanovllm.sampling_params import MAX_LOGIT_BIAS, SamplingParams

BIAS_ONLY = -1  # count of an entry that has a bias and is no token of the request


@dataclass(frozen=True)
class PenaltyTable:
    """Per request slot the distinct tokens whose logits change, in no order; strided views are fine.

    W is large enough for every token that a request biases, was prompted with or generates. Every tensor-parallel rank
    keeps the whole table.
    """

    num_entries: torch.Tensor  # i32[R]
    num_counted: torch.Tensor  # i32[R], tokens of the sequence that the counts include
    token_ids: torch.Tensor  # i32[R, W], distinct
    counts: torch.Tensor  # i32[R, W], -1 only a bias; 0 in the prompt, not generated; k >= 1 generated k times
    bias: torch.Tensor  # f32[R, W], added to the logit


class Penalties(Feature):
    """Biases and penalties, in fp32. Each rank counts all tokens, and changes its part of the vocabulary."""

    columns: ClassVar = {
        "presence_penalty": np.float32,  # 0 = off, once for every token generated
        "frequency_penalty": np.float32,  # 0 = off, times how often it was generated
        "repetition_penalty": np.float32,  # > 0, 1 = off, for tokens of prompt and output
        "is_penalized": np.int32,  # 0 = neither bias nor penalty
    }
    sends = "penalty_values"

    def __init__(self, max_num_seqs: int, max_model_len: int, vocab_size: int, last_token: torch.Tensor):
        self._last_token = last_token  # int32 [R + 1]
        # all that a request may be prompted with, generate or bias
        self._capacity = min(max_model_len + MAX_LOGIT_BIAS, vocab_size)
        self._shape = max_num_seqs + 1, 2 + 3 * self._capacity  # two sizes; ids, counts and biases
        self._buffer: torch.Tensor | None = None
        self.table: PenaltyTable | None = None  # views of the buffer

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        rows["repetition_penalty"] = 1.0
        used = [params.has_penalties or params.logit_bias is not None for params in new.sampling.params]
        rows["is_penalized"] = used
        sent = [self._fill(new, i, rows[i]) for i in np.flatnonzero(used).tolist()]
        if sent:
            arrays["penalty_indices"], arrays["penalty_values"] = map(np.concatenate, zip(*sent, strict=True))
        return used

    def _fill(self, new: NewSequences, i: int, row: np.void) -> tuple[np.ndarray, np.ndarray]:
        """Fill the columns of one request; return its elements of the buffer and their values."""
        params, W = new.sampling.params[i], self._capacity
        row["presence_penalty"], row["frequency_penalty"] = params.presence_penalty, params.frequency_penalty
        row["repetition_penalty"] = max(1 / MAX_FLOAT, min(params.repetition_penalty, MAX_FLOAT))
        num_counted, ids, counts, bias = entries(params, new.sampling.histories[i], int(new.num_prompt_tokens[i]))
        columns = [np.arange(len(ids)) + 2 + column * W for column in range(3)]
        indices = np.concatenate([[0, 1], *columns]) + int(new.req_indices[i]) * self._shape[1]
        return indices, np.concatenate([[len(ids), num_counted], ids, counts, bias.view(np.int32)])

    def write(self, tensors: Tensors) -> None:
        if self._buffer is None:
            (R, width), W = self._shape, self._capacity
            self._buffer = torch.zeros(R * width, dtype=torch.int32, device=self._last_token.device)
            rows = self._buffer.view(R, width)
            ids, counts, bias = rows[:, 2:].view(R, 3, W).unbind(1)
            self.table = PenaltyTable(rows[:, 0], rows[:, 1], ids, counts, bias.view(torch.float32))
        self._buffer.index_copy_(0, tensors["penalty_indices"].long(), tensors["penalty_values"])

    def apply(self, logits: Logits, req_indices: torch.Tensor) -> Logits:
        return logits._replace(values=self.ops.apply_penalties(
            logits.values, req_indices, self.state, self._last_token, self.table, logits.vocab_start
        ))  # fmt: skip

    def release(self) -> None:
        self.table = self._buffer = None


def entries(params: SamplingParams, history: np.ndarray | None,
            num_prompt_tokens: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Number of counted tokens; distinct token ids, their counts in the output, their biases."""
    ids, counts, num_counted = np.empty(0, np.int64), np.empty(0, np.int64), INT32_MAX  # nothing is ever counted
    if history is not None:
        ids, where = np.unique(history, return_inverse=True)
        counts = np.bincount(where[num_prompt_tokens:], minlength=len(ids))
        ids, counts = ids[ids >= 0], counts[ids >= 0]  # no model samples the others (messages/)
        num_counted = len(history)
    bias_of = params.logit_bias or {}
    others = np.setdiff1d(np.array(list(bias_of), np.int64), ids)
    ids = np.concatenate([ids, others]).astype(np.int32)
    counts = np.concatenate([counts, np.full(len(others), BIAS_ONLY)]).astype(np.int32)
    bias = np.array([bias_of.get(i, 0.0) for i in ids.tolist()]).clip(-MAX_FLOAT, MAX_FLOAT).astype(np.float32)
    return num_counted, ids, counts, bias


def apply_penalties(logits, req_indices, state, last_token, table, vocab_start=0):
    """fp32 logits [B, V] with bias and penalties; -inf and NaN stay. First counts the last token, if it is not yet.

    Bias first, then the penalties in the order repetition, frequency, presence. Repetition divides positive logits and
    multiplies the others. Requests without `state.is_penalized` get a plain copy.

    Args:
        last_token: i32[R], the last of the `state.length` tokens of each sequence.
        table: PenaltyTable, counted in here.
        vocab_start: id of column 0 of `logits` [B, V]; ids outside of its V columns are counted all the same.
    """
    out = logits.to(torch.float32, copy=True)
    slots = req_indices.long()
    changed = ((state.is_penalized[slots] != 0) & (state.length[slots] > 0)).nonzero().squeeze(1)
    if len(changed) == 0:
        return out
    slots = slots[changed]
    uncounted = slots[table.num_counted[slots] < state.length[slots]]
    if len(uncounted) > 0:
        count_tokens(last_token[uncounted], uncounted, table)
        table.num_counted[uncounted] = state.length[uncounted]

    num_entries = table.num_entries[slots].unsqueeze(1)
    width = int(num_entries.max())
    columns = table.token_ids[slots, :width].long() - vocab_start
    counts, bias = table.counts[slots, :width], table.bias[slots, :width]
    present = torch.arange(width, device=logits.device) < num_entries
    present &= (columns >= 0) & (columns < logits.shape[1])
    x = out[changed].gather(1, columns.masked_fill(~present, 0)) + bias
    repetition = state.repetition_penalty[slots].unsqueeze(1)
    penalized = torch.where(x > 0, x / repetition, x * repetition)
    penalized = penalized - state.frequency_penalty[slots].unsqueeze(1) * counts
    penalized = penalized - state.presence_penalty[slots].unsqueeze(1) * (counts > 0)
    x = torch.where(counts >= 0, penalized, x)
    sequence, entry = present.nonzero(as_tuple=True)
    out[changed[sequence], columns[sequence, entry]] = x[sequence, entry]
    return out


def count_tokens(tokens, slots, table):
    """Count one generated token, i32[N], for each of the request slots, int64[N]; append it where it is new."""
    num_entries = table.num_entries[slots]
    width = int(num_entries.max())
    is_entry = torch.arange(width, device=slots.device) < num_entries.unsqueeze(1)
    matches = is_entry & (table.token_ids[slots, :width] == tokens.unsqueeze(1))
    is_new = ~matches.any(1)
    entry = torch.where(is_new, num_entries, (matches * torch.arange(width, device=slots.device)).sum(1)).long()
    table.token_ids[slots, entry] = tokens
    table.counts[slots, entry] = torch.where(is_new, 0, table.counts[slots, entry].clamp(min=0)) + 1
    table.bias[slots[is_new], entry[is_new]] = 0.0
    table.num_entries[slots[is_new]] += 1

"""Per-request tables that few requests need: token masks, and the tokens whose logits are adjusted.

Owns their layout and the host's staged writes to them. The device's side is allocated when the first request needs it.
"""

import numpy as np
import torch

from nanovllm.engine.sequence import INT32_MAX, Sequence
from nanovllm.kernels.sampling.reference import AdjustmentTable
from nanovllm.sampling_params import LOGIT_ADJUSTMENTS, MAX_LOGIT_BIAS

MAX_FLOAT = 1e30
BIAS_ONLY = -1  # count of an entry that has a bias and is no token of the request


def mask_words(vocab_size: int) -> int:
    """int32 words of a token mask: bit t % 32 of word t // 32 allows token t."""
    return -(-vocab_size // 32)


def table_capacity(max_model_len: int, vocab_size: int) -> int:
    """Most entries of one request: its distinct tokens, and those with a bias."""
    return min(max_model_len + MAX_LOGIT_BIAS, vocab_size)


class SamplingTables:
    """Device side. R request slots and one for padding, V vocabulary, W entries per request.

    Attributes:
        token_mask: int32 [R + 1, ceil(V / 32)].
        adjustments: distinct tokens of each request, with counts and biases.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, vocab_size: int, device: torch.device):
        self._num_rows, self._vocab_size = max_num_seqs + 1, vocab_size
        self._capacity = table_capacity(max_model_len, vocab_size)
        self._device = device
        self.token_mask: torch.Tensor | None = None
        self.adjustments: AdjustmentTable | None = None
        self._buffer: torch.Tensor | None = None

    def release(self) -> None:
        """Give the memory back; the next requests that need it allocate it again, and send their rows."""
        self.token_mask = self.adjustments = self._buffer = None

    def set_masks(self, req_indices: torch.Tensor, words: torch.Tensor) -> None:
        """int32 [n] and [n * words of a mask], on the device."""
        if self.token_mask is None:
            shape = self._num_rows, mask_words(self._vocab_size)
            self.token_mask = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self.token_mask.index_copy_(0, req_indices.long(), words.view(len(req_indices), -1))

    def set_adjustments(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """buffer[indices] = values; both int32 [n] on the device."""
        if self._buffer is None:
            W = self._capacity
            self._buffer = torch.zeros(self._num_rows * (2 + 3 * W), dtype=torch.int32, device=self._device)
            rows = self._buffer.view(self._num_rows, 2 + 3 * W)
            ids, counts, bias = rows[:, 2:].view(self._num_rows, 3, W).unbind(1)
            self.adjustments = AdjustmentTable(rows[:, 0], rows[:, 1], ids, counts, bias.view(torch.float32))
        self._buffer.index_copy_(0, indices.long(), values)


class StagedTables:
    """Host side: rows of sequences that were given a request slot, until the next launch takes them along."""

    def __init__(self, max_model_len: int, vocab_size: int):
        self.vocab_size = vocab_size
        self._capacity = table_capacity(max_model_len, vocab_size)
        self.reset()

    def reset(self) -> None:
        self._indices: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._masked: list[int] = []
        self._masks: list[np.ndarray] = []

    def add(self, seq: Sequence, features: int) -> None:
        if seq.allowed_mask is not None:
            self._masked.append(seq.req_idx)
            self._masks.append(seq.allowed_mask)
        if features & LOGIT_ADJUSTMENTS:
            offset, W = seq.req_idx * (2 + 3 * self._capacity), self._capacity
            num_counted, ids, counts, bias = adjustment_entries(seq)
            n = len(ids)
            columns = [np.arange(n) + 2 + column * W for column in range(3)]
            indices = np.concatenate([[0, 1], *columns]) + offset
            self._indices.append(indices.astype(np.int32))
            self._values.append(np.concatenate([[n, num_counted], ids, counts, bias.view(np.int32)]).astype(np.int32))

    def drain(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Adjustment indices and values, request slots of masks, and their words, all int32."""
        empty = np.empty(0, np.int32)
        staged = (
            np.concatenate([empty, *self._indices]),
            np.concatenate([empty, *self._values]),
            np.array(self._masked, np.int32),
            np.concatenate([empty, *self._masks]),
        )
        self.reset()
        return staged


def clamped(value: float) -> float:
    """A finite number within +-MAX_FLOAT: beyond, fp32 overflows; it has the same effect."""
    return max(-MAX_FLOAT, min(value, MAX_FLOAT))


def adjustment_entries(seq: Sequence) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """How many tokens are counted; distinct token ids, how often each was generated, their biases."""
    params = seq.sampling_params
    if params.has_penalties:
        known = seq.tokens(0, seq.num_tokens)
        ids, where = np.unique(known, return_inverse=True)
        counts = np.bincount(where[seq.num_prompt_tokens :], minlength=len(ids))
        num_counted = seq.num_tokens
    else:
        ids, counts = np.empty(0, np.int32), np.empty(0, np.int64)
        num_counted = INT32_MAX  # nothing is ever counted
    bias_of = params.logit_bias or {}
    others = np.setdiff1d(np.array(list(bias_of), np.int64), ids)
    ids = np.concatenate([ids, others]).astype(np.int32)
    counts = np.concatenate([counts, np.full(len(others), BIAS_ONLY)]).astype(np.int32)
    bias = np.array([clamped(bias_of.get(i, 0.0)) for i in ids.tolist()], np.float32)
    return num_counted, ids, counts, bias

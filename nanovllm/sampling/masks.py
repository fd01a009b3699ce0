"""Tokens that a request may not sample: bit masks (allowed ids, grammars, bad words), stop ids before min_tokens."""

from typing import ClassVar

import numpy as np
import torch

from nanovllm.core import NewSequences
from nanovllm.sampling.feature import INT32_MAX, Arrays, Feature, Logits, Sampled, Tensors
from nanovllm.sampling_params import MAX_STOP_IDS


class TokenMasks(Feature):
    """-inf on tokens that a request does not allow: bit t % 32 of word t // 32 of its mask allows token t.

    The mask of a fixed set of ids is sent once, when the request gets its slot. The mask of a constrained request
    depends on its last token, so it is a late input of every sampling.
    """

    columns: ClassVar = {"is_masked": np.int32}  # 0 = every token is allowed
    in_place, sends = True, "masks"

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self._shape, self._device = (max_num_seqs + 1, -(-vocab_size // 32)), device
        self._is_constrained = np.zeros(max_num_seqs, bool)
        self.table: torch.Tensor | None = None  # int32 [R + 1, ceil(V / 32)]

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        self._is_constrained[new.req_indices] = new.sampling.is_constrained
        has_mask = [mask is not None for mask in new.sampling.allowed_masks]
        if any(has_mask):
            masks = [mask for mask in new.sampling.allowed_masks if mask is not None]
            self._send(new.req_indices[has_mask], np.stack(masks), arrays)
        rows["is_masked"] = used = [a or b for a, b in zip(new.sampling.is_constrained, has_mask, strict=True)]
        return used

    def waits(self, req_indices: np.ndarray) -> bool:
        return bool(self._is_constrained[req_indices].any())

    def begin(self, sampled: Sampled, arrays: Arrays) -> None:
        if sampled.masks is not None and len(sampled.masks[0]):  # else the masks belong to other batches
            self._send(*sampled.masks[:2], arrays)

    @staticmethod
    def _send(req_indices: np.ndarray, masks: np.ndarray, arrays: Arrays) -> None:
        arrays["mask_req_indices"], arrays["masks"] = req_indices, masks.ravel()

    def write(self, tensors: Tensors) -> None:
        if self.table is None:
            self.table = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        req_indices = tensors["mask_req_indices"].long()
        self.table.index_copy_(0, req_indices, tensors["masks"].view(len(req_indices), -1))

    def apply(self, logits: Logits, req_indices: torch.Tensor) -> Logits:
        self.ops.apply_token_mask(logits.values, req_indices, self.state, self.table, logits.vocab_start)
        return logits

    def release(self) -> None:
        self.table = None


class MinTokens(Feature):
    """-inf on stop ids until min_tokens were generated. Each rank masks its part of the vocabulary."""

    columns: ClassVar = {
        "min_len": np.int32,  # stop_ids may not be sampled while length < min_len
        "stop_ids": (np.int32, MAX_STOP_IDS),  # padded with -1
    }
    in_place = compiled_at_start = True

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        rows["stop_ids"] = -1
        for i, ids in enumerate(new.sampling.min_tokens_stop_ids):
            if ids:
                rows["min_len"][i] = min(int(new.num_prompt_tokens[i]) + new.sampling.params[i].min_tokens, INT32_MAX)
                rows["stop_ids"][i, : len(ids)] = ids
        return [len(ids) > 0 for ids in new.sampling.min_tokens_stop_ids]

    def apply(self, logits: Logits, req_indices: torch.Tensor) -> Logits:
        self.ops.mask_stop_ids(logits.values, req_indices, self.state, logits.vocab_start)
        return logits


def apply_token_mask(logits, req_indices, state, token_mask, vocab_start=0):
    """In place: -inf on the tokens that `token_mask` forbids, in sequences with `state.is_masked`.

    Args:
        token_mask: i32[R, ceil(vocabulary / 32)]; bit t % 32 of word t // 32 allows token t. Ids beyond are forbidden.
        vocab_start: id of column 0 of `logits` [B, V], not always a multiple of 32.
    """
    slots = req_indices.long()
    masked = ((state.is_masked[slots] != 0) & (state.length[slots] > 0)).nonzero().squeeze(1)
    if len(masked) > 0:
        ids = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
        words = token_mask[slots[masked]][:, (ids // 32).clamp(max=token_mask.shape[1] - 1)]
        allowed = (words >> (ids % 32) & 1 > 0) & (ids < 32 * token_mask.shape[1])
        logits[masked] = logits[masked].masked_fill(~allowed, -torch.inf)


def mask_stop_ids(logits, req_indices, state, vocab_start=0):
    """In place: -inf on the stop_ids of requests with length < min_len.

    `vocab_start` is the id of column 0 of `logits` [B, V]; ids outside of its V columns are ignored.
    """
    req_indices = req_indices.long()
    length = state.length[req_indices]
    too_short = (length > 0) & (length < state.min_len[req_indices])
    ids = state.stop_ids[req_indices].long()
    columns = ids - vocab_start
    masked = too_short.unsqueeze(1) & (ids >= 0) & (columns >= 0) & (columns < logits.shape[1])
    sequence, entry = masked.nonzero(as_tuple=True)
    logits[sequence, columns[sequence, entry]] = -torch.inf

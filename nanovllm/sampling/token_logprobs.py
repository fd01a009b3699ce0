"""Log-probabilities of sampled tokens and of a prompt's tokens, with the most probable or named ones beside each."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from nanovllm.core import NewSequences
from nanovllm.sampling.feature import Arrays, Feature, Logits, Sampled, Tensors
from nanovllm.sampling_params import MAX_LOGPROB_IDS

MAX_TOP = 32  # alternatives of the kernel, which finds one a round; for more, topk is faster
LOGITS_ROWS = 256  # prompt tokens that are scored at once: bounds the memory of their logits


class Logprobs(Feature):
    """Computes log-probabilities after the draw, in one pass: from the model's logits, or with ``processed`` from the
    distribution after masks, penalties, temperature and filters.
    """

    sends = "logprob_ids"

    def __init__(self, max_num_seqs: int, vocab_size: int, processed: bool):
        self.reads_raw, self._processed, self._vocab_size = not processed, processed, vocab_size
        self._num_top = np.zeros(max_num_seqs, np.int32)
        self.num_top = 0  # most alternatives of a request of the batch; each gets that number, and its owner trims them
        self._num_ids, self._ids = np.zeros(max_num_seqs, np.int32), np.empty((max_num_seqs, MAX_LOGPROB_IDS), np.int32)
        self._named: torch.Tensor | None = None  # for the batch's rows; see ``token_logprobs``

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        named = [params.logprob_token_ids or [] for params in new.sampling.params]
        wanted = [params.num_logprobs for params in new.sampling.params]
        of_top = [0 if ids else self._limited(num or 0) for num, ids in zip(wanted, named, strict=True)]
        self._num_top[new.req_indices], self._num_ids[new.req_indices] = of_top, [len(ids) for ids in named]
        for req_idx, ids in zip(new.req_indices, named, strict=True):
            self._ids[req_idx, : len(ids)] = ids
        return [num is not None for num in wanted]

    def begin(self, sampled: Sampled, arrays: Arrays) -> None:
        self.num_top = int(self._num_top[sampled.req_indices].max(initial=0))
        self._named, counts = None, self._num_ids[sampled.req_indices, None]
        if most := int(counts.max(initial=0)):
            ids = np.where(np.arange(most) < counts, self._ids[sampled.req_indices, :most], -1)
            arrays["logprob_ids"] = ids.repeat(sampled.num_rows, axis=0).ravel()

    def write(self, tensors: Tensors) -> None:
        self._named = tensors["logprob_ids"]

    def report(self, raw: Logits, logits: Logits, tokens: torch.Tensor, req_indices: torch.Tensor) -> torch.Tensor:
        """``token_logprobs`` of the sampled tokens."""
        named = None if self._named is None else self._named.view(len(tokens), -1)
        if not self._processed:
            return self._compute(raw.gather().values, tokens, self.num_top, named=named)
        values, thresholds, _ = logits.gather()
        temperature = self.state.temperature[req_indices.long()]
        scales = torch.where(temperature > 0, 1 / temperature, 1.0)
        return self._compute(values, tokens, self.num_top, scales, thresholds, named)

    def of_prompt(self, num_top: int, hidden: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor,
                  compute_logits: Callable[[torch.Tensor], Logits]) -> torch.Tensor:
        """The same of prompt tokens i32[n], which follow the packed tokens ``rows`` i32[n]; hidden states [T, C]."""
        num_top = self._limited(num_top)
        return torch.cat([
            self._compute(compute_logits(hidden[some.long()]).gather().values, ids, num_top)
            for some, ids in zip(rows.split(LOGITS_ROWS), token_ids.split(LOGITS_ROWS), strict=True)
        ])  # fmt: skip

    def _compute(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int, *options: Any,
                 **others: Any) -> torch.Tensor:
        compute = self.ops.token_logprobs if num_top <= MAX_TOP else token_logprobs
        return compute(logits, tokens, num_top, *options, **others)

    def _limited(self, num_top: int) -> int:
        """-1 is the whole vocabulary."""
        return self._vocab_size if num_top == -1 else min(num_top, self._vocab_size)


def token_logprobs(logits, tokens, num_top, scales=None, thresholds=None, named=None):
    """Log-probabilities of one token per row and of the `num_top` most probable ones, or of named ones.

    Args:
        logits: [N, V], the whole vocabulary. NaN counts as -inf.
        tokens: int[N].
        num_top: number of most probable tokens, at most V; the lowest id first on a tie.
        scales: f32[N], > 0: logits are multiplied by them, as by an inverse temperature.
        thresholds: f32[N]: logits below count as -inf, before the scales; see `filter_thresholds`.
        named: int[N, W]: a row whose first id is not -1 reports these, not the most probable ones; padded with -1.

    Returns:
        i32[N, 2 + 2k], k = max(num_top, W), in one piece for one copy to the host. Columns: bits of the token's fp32
        logprob; its rank, the number of logits >= its own; the ids of the others; the bits of their logprobs. If a row
        is all -inf, every logprob is -inf. Columns beyond the tokens that a row reports are undefined.
    """
    x = logits.float()
    x = x.masked_fill(x.isnan(), -torch.inf)
    if thresholds is not None:
        x = x.masked_fill(x < thresholds.unsqueeze(1), -torch.inf)
    if scales is not None:
        x = x * scales.unsqueeze(1)
    own = x.gather(1, tokens.long().unsqueeze(1))
    rank = (x >= own).sum(1, keepdim=True)
    ids = top_ids(x, num_top)
    if named is not None:
        width = max(num_top, named.shape[1])
        named, ids = (pad(each, (0, width - each.shape[1])) for each in (named, ids))
        ids = torch.where(named[:, :1] >= 0, named, ids).clamp(min=0)
    normalizer = x.logsumexp(1, keepdim=True)
    logprobs = torch.cat((own, x.gather(1, ids.long())), 1) - normalizer
    logprobs = logprobs.masked_fill(logprobs.isnan(), -torch.inf).view(torch.int32)
    return torch.cat((logprobs[:, :1], rank.int(), ids, logprobs[:, 1:]), 1)


def top_ids(x, num_top):
    """Columns i32[N, num_top] of the largest values of fp32 `x` [N, V], the lowest column first on a tie."""
    if num_top == 0:
        return torch.empty((len(x), 0), dtype=torch.int32, device=x.device)
    # topk does not promise the lowest column of a tie, so distinct keys: an integer in the order of the floats, -column
    bits = (x + 0.0).view(torch.int32)  # -0.0 is a tie with 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.long() << 32) - torch.arange(x.shape[1], device=x.device)
    return -keys.topk(num_top).values.int()  # the lower half

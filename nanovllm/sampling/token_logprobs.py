"""Log-probabilities of sampled tokens and of a prompt's tokens, each with its most probable alternatives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nanovllm.core import NewSequences
from nanovllm.sampling.feature import Arrays, Feature, Logits, Sampled

MAX_TOP = 32  # alternatives of the kernel, which finds one a round; for more, topk is faster
LOGITS_ROWS = 256  # prompt tokens that are scored at once: bounds the memory of their logits


class Logprobs(Feature):
    """Computed after the draw, in one pass: of the model's logits, or with ``processed`` of the distribution after
    masks, penalties, temperature and filters.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, processed: bool):
        self.reads_raw, self._processed, self._vocab_size = not processed, processed, vocab_size
        self._num_top = np.zeros(max_num_seqs, np.int32)
        self.num_top = 0  # most alternatives of a request of the batch; each gets that number, and its owner trims them

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        wanted = [params.logprobs for params in new.params]
        self._num_top[new.req_indices] = [self._limited(num_top or 0) for num_top in wanted]
        return [num_top is not None for num_top in wanted]

    def begin(self, sampled: Sampled, arrays: Arrays) -> None:
        self.num_top = int(self._num_top[sampled.req_indices].max(initial=0))

    def report(self, raw: Logits, logits: Logits, tokens: torch.Tensor, req_indices: torch.Tensor) -> torch.Tensor:
        """``token_logprobs`` of the sampled tokens."""
        if not self._processed:
            return self._compute(raw.gather().values, tokens, self.num_top)
        values, thresholds, _ = logits.gather()
        temperature = self.state.temperature[req_indices.long()]
        scales = torch.where(temperature > 0, 1 / temperature, 1.0)
        return self._compute(values, tokens, self.num_top, scales, thresholds)

    def of_prompt(self, num_top: int, hidden: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor,
                  compute_logits: Callable[[torch.Tensor], Logits]) -> torch.Tensor:
        """The same of prompt tokens i32[n], which follow the packed tokens ``rows`` i32[n]; hidden states [T, C]."""
        num_top = self._limited(num_top)
        return torch.cat([
            self._compute(compute_logits(hidden[some.long()]).gather().values, ids, num_top)
            for some, ids in zip(rows.split(LOGITS_ROWS), token_ids.split(LOGITS_ROWS), strict=True)
        ])  # fmt: skip

    def _compute(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int, *options: Any) -> torch.Tensor:
        compute = self.ops.token_logprobs if num_top <= MAX_TOP else token_logprobs
        return compute(logits, tokens, num_top, *options)

    def _limited(self, num_top: int) -> int:
        """-1 is the whole vocabulary."""
        return self._vocab_size if num_top == -1 else min(num_top, self._vocab_size)


def token_logprobs(logits, tokens, num_top, scales=None, thresholds=None):
    """Log-probabilities of one token per row and of the `num_top` most probable ones.

    Args:
        logits: [N, V], the whole vocabulary. NaN counts as -inf.
        tokens: int[N].
        num_top: number of most probable tokens, at most V; the lowest id first on a tie.
        scales: f32[N], > 0: logits are multiplied by them, as by an inverse temperature.
        thresholds: f32[N]: logits below count as -inf, before the scales; see `filter_thresholds`.

    Returns:
        i32[N, 2 + 2 * num_top], in one piece for one copy to the host. Columns: bits of the token's fp32 logprob;
        its rank, the number of logits >= its own; the top ids; the bits of their logprobs.
        In a row of -inf every logprob is -inf.
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

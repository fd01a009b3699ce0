"""Log-probabilities: of sampled tokens and those most probable beside them, and of a prompt's own tokens."""

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.core import NewSequences, Targets
from nanovllm.sampling.feature import Arrays, Feature, Logits

LOGITS_ROWS = 256  # prompt tokens that are scored at once: bounds the memory of their logits


class Logprobs(Feature):
    """Computed after the draw, in one pass: of the model's logits, or of those that were sampled from.

    Args:
        processed: report the distribution after masks, penalties, temperature and filters.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, processed: bool):
        self.processed, self._vocab_size = processed, vocab_size
        self._num_top = np.zeros(max_num_seqs, np.int32)

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        wanted = [params.logprobs for params in new.params]
        self._num_top[new.req_indices] = [self._limited(num_top or 0) for num_top in wanted]
        return [num_top is not None for num_top in wanted]

    def num_top(self, req_indices: np.ndarray) -> int:
        """Most alternatives that one of these requests wants; each is given as many, and its owner trims them."""
        return int(self._num_top[req_indices].max(initial=0))

    def of_sampled(self, raw: Logits, processed: Logits, tokens: torch.Tensor, num_top: int,
                   req_indices: torch.Tensor) -> torch.Tensor:
        """``reference.token_logprobs`` of tokens i32[B]; ``raw`` are the logits as the model gave them."""
        if not self.processed:
            return self.ops.token_logprobs(raw.gather().values, tokens, num_top)
        values, thresholds, _ = processed.gather()
        temperature = self.state.temperature[req_indices.long()]
        scales = torch.where(temperature > 0, 1 / temperature, 1.0)
        return self.ops.token_logprobs(values, tokens, num_top, scales, thresholds)

    def of_targets(self, targets: Targets, hidden: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor,
                   compute_logits: Callable[[torch.Tensor], Logits]) -> torch.Tensor:
        """The same of prompt tokens i32[n], which follow the packed tokens ``rows`` i32[n]; hidden states [T, C]."""
        num_top = self._limited(targets.num_top)
        return torch.cat([
            self.ops.token_logprobs(compute_logits(hidden[some.long()]).gather().values, ids, num_top)
            for some, ids in zip(rows.split(LOGITS_ROWS), token_ids.split(LOGITS_ROWS), strict=True)
        ])  # fmt: skip

    def _limited(self, num_top: int) -> int:
        """-1 is the whole vocabulary."""
        return self._vocab_size if num_top == -1 else min(num_top, self._vocab_size)

"""Top-k, top-p and min-p: one threshold per sequence."""

from typing import ClassVar

import numpy as np
import torch

from nanovllm.core import NewSequences
from nanovllm.sampling.feature import INT32_MAX, Arrays, Feature, Logits


class Filters(Feature):
    """Logits below a sequence's threshold are not sampled. To find it takes the whole vocabulary."""

    columns: ClassVar = {"top_k": np.int32, "top_p": np.float32, "min_p": np.float32}

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        params = new.params
        rows["top_k"] = [min(max(p.top_k, 0), INT32_MAX) for p in params]  # larger values have the same effect
        rows["top_p"], rows["min_p"] = [p.top_p for p in params], [p.min_p for p in params]
        return [not p.is_greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params]

    def apply(self, logits: Logits, req_indices: torch.Tensor) -> Logits:
        logits = logits.gather()
        return logits._replace(thresholds=self.ops.filter_thresholds(logits.values, req_indices, self.state))

"""Top-k, top-p and min-p: one threshold per sequence."""

from typing import ClassVar

import numpy as np
import torch

from nanovllm.core import NewSequences
from nanovllm.sampling.feature import INT32_MAX, Arrays, Feature, Logits

CANDIDATES = 1024  # the largest logits, which most often decide the threshold


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


def filter_thresholds(logits, req_indices, state):
    """The smallest logit each sequence may sample, f32[B]; -inf for greedy requests and those without a filter.

    `logits` [B, V] are before the temperature and cover the whole vocabulary.
    """
    req_indices = req_indices.long()
    vocab_size = logits.shape[1]
    temperature, top_k = state.temperature[req_indices], state.top_k[req_indices]
    top_p, min_p = state.top_p[req_indices], state.min_p[req_indices]
    thresholds = torch.full((len(req_indices),), -torch.inf, dtype=torch.float32, device=logits.device)
    filtered = (temperature > 0) & (state.length[req_indices] > 0)
    filtered &= ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)
    if not filtered.any():
        return thresholds
    temperature, top_k = temperature[filtered, None], top_k[filtered, None].long()
    top_p, min_p = top_p[filtered, None], min_p[filtered, None]

    wide = logits[filtered].float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ordered = wide.topk(min(CANDIDATES, vocab_size)).values  # a sort of all takes ten times as long
    cuts, is_decided = _cuts(wide, ordered, temperature, top_k, top_p)
    if not is_decided.all():
        cuts, _ = _cuts(wide, wide.sort(dim=-1, descending=True).values, temperature, top_k, top_p)
    min_p_threshold = torch.where(min_p > 0, ordered[:, :1] + temperature * min_p.log(), -torch.inf)
    thresholds[filtered] = torch.maximum(cuts, min_p_threshold).squeeze(1)
    return thresholds


def _cuts(wide, ordered, temperature, top_k, top_p):
    """Thresholds f32[B, 1] of top-k and top-p, and whether the largest logits decide them, bool[B, 1].

    ``ordered`` f32[B, N]: the N largest of ``wide`` [B, V], descending. The other arguments are columns [B, 1].
    """
    vocab_size, size = wide.shape[1], ordered.shape[1]
    has_k = (top_k > 0) & (top_k < vocab_size)
    kth = ordered.gather(1, (top_k - 1).clamp(0, size - 1)).where(has_k, -torch.inf)
    scores = (ordered.double() / temperature).masked_fill(ordered < kth, -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if size < vocab_size and not has_k.all():
        total = torch.where(has_k, total, (wide / temperature).logsumexp(-1, keepdim=True))
    probs = (scores - total).exp()
    reached = probs.cumsum(-1)
    kept = (reached - probs < top_p) | (top_p >= 1)
    kept[:, 0] = True
    nucleus = ordered.masked_fill(~kept | (ordered < kth), torch.inf).amin(1, keepdim=True)
    # The first logit that top-k, or top-p alone, drops is among them: ties with the k-th count for top-p.
    is_decided = torch.where(has_k, ordered[:, -1:] < kth, (top_p >= 1) | (reached[:, -1:] >= top_p))
    return torch.where(has_k | (top_p < 1), nucleus, -torch.inf), is_decided | (size == vocab_size)

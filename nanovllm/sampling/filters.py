"""Top-k, top-p and min-p: one threshold per sequence."""

from typing import ClassVar

import numpy as np
import torch

from nanovllm.core import NewSequences
from nanovllm.sampling.feature import INT32_MAX, Arrays, Feature, Logits

BINS, BINS_PER_NAT = 2048, 64  # bins of a histogram of logits / temperature; the last bin has all the rest


class Filters(Feature):
    """Logits below a sequence's threshold are not sampled. Finding it takes the whole vocabulary.

    Logits are divided by the temperature first. Top-k keeps the k largest; top-p the shortest prefix of the remaining
    ones, sorted and renormalized, whose probabilities reach p; min-p the tokens at least min_p times as probable as the
    most probable one. Ties with the last token kept are kept.
    """

    columns: ClassVar = {
        "top_k": np.int32,  # 0 = off
        "top_p": np.float32,  # 1 = off
        "min_p": np.float32,  # 0 = off
    }
    compiled_at_start = True

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        params = new.sampling.params
        rows["top_k"] = [min(max(p.top_k, 0), INT32_MAX) for p in params]  # larger values have the same effect
        rows["top_p"], rows["min_p"] = [p.top_p for p in params], [p.min_p for p in params]
        return [not p.is_greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params]

    def apply(self, logits: Logits, req_indices: torch.Tensor) -> Logits:
        logits = logits.gather()
        return logits._replace(thresholds=self.ops.filter_thresholds(logits.values, req_indices, self.state))


def filter_thresholds(logits, req_indices, state):
    """The smallest logit each sequence may sample, f32[B]; -inf for greedy requests and requests without a filter.

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
    num_deciding = _num_deciding(wide, temperature, top_k, top_p)
    ordered = wide.topk(num_deciding).values  # for all logits it is a sort, thirty times as slow as for a few
    min_p_threshold = torch.where(min_p > 0, ordered[:, :1] + temperature * min_p.log(), -torch.inf)
    thresholds[filtered] = torch.maximum(_cuts(wide, ordered, temperature, top_k, top_p), min_p_threshold).squeeze(1)
    return thresholds


def _num_deciding(wide, temperature, top_k, top_p):
    """Number of the largest logits that decide the thresholds of top-k and top-p in every row, in whole bins.

    Arguments as in ``_cuts``.
    """
    vocab_size = wide.shape[1]
    below = ((wide.amax(1, keepdim=True) - wide) / temperature).nan_to_num(0.0)  # infinities of one sign
    bins = (below * BINS_PER_NAT).clamp(max=BINS - 1).long()
    sums = torch.zeros((2, len(wide), BINS), dtype=torch.float64, device=wide.device)
    counts, probs = sums
    counts.scatter_add_(1, bins, torch.ones((), dtype=torch.float64, device=wide.device).expand_as(bins))
    probs.scatter_add_(1, bins, (-below).exp().double())
    counts, probs = sums.cumsum(-1)
    has_k = (top_k > 0) & (top_k < vocab_size)
    # with a margin for sums in another order
    is_short = torch.where(has_k, counts < top_k, (probs < top_p * (1 + 1e-5) * probs[:, -1:]) & (top_p < 1))
    last = is_short.sum(1, keepdim=True).clamp(max=BINS - 1)
    return int(counts.gather(1, last).amax())


def _cuts(wide, ordered, temperature, top_k, top_p):
    """Thresholds f32[B, 1] of top-k and top-p.

    ``ordered`` f32[B, N]: the N largest of ``wide`` [B, V], descending, which decide. The other arguments are columns
    [B, 1].
    """
    vocab_size, size = wide.shape[1], ordered.shape[1]
    has_k = (top_k > 0) & (top_k < vocab_size)
    kth = ordered.gather(1, (top_k - 1).clamp(0, size - 1)).where(has_k, -torch.inf)
    largest = ordered[:, :1]  # in fp32 a total of scores far from 0 would be too coarse
    scores = ((ordered - largest).double() / temperature).masked_fill(ordered < kth, -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if size < vocab_size and not has_k.all():
        total = torch.where(has_k, total, ((wide - largest) / temperature).logsumexp(-1, keepdim=True))
    probs = (scores - total).exp()
    kept = (probs.cumsum(-1) - probs < top_p) | (top_p >= 1)
    kept[:, 0] = True
    nucleus = ordered.masked_fill(~kept | (ordered < kth), torch.inf).amin(1, keepdim=True)
    return torch.where(has_k | (top_p < 1), nucleus, -torch.inf)

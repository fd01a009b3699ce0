"""The sampler: logits to token ids, as a recipe.

Owns the order of a sampling, the record of which requests use which features, and the draw over tensor-parallel ranks.
Knows no feature by name (``features.py``). B sequences of a batch, V vocabulary, R request slots.
"""

from typing import Any

import numpy as np
import torch

from nanovllm import kernels
from nanovllm.core import NewSequences
from nanovllm.distributed.group import TPGroup
from nanovllm.sampling.feature import MAX_FLOAT, Arrays, Feature, Logits, Sampled, Tensors


class Sampler:
    """One rank's features, and the Gumbel-max trick: argmax of logit / temperature + noise, without a softmax.

    Args:
        state: the ``RequestState``; the draw advances its last tokens and lengths.
        tp: ranks that split the vocabulary.
        features: in the order in which they are applied.
    """

    def __init__(self, state: Any, tp: TPGroup, features: tuple[Feature, ...]):
        R, device = state.max_num_seqs, state.device
        beside = kernels.select(device.type).beside
        self.state, self.tp, self.features, self.ops = state, tp, features, beside("nanovllm.sampling.gumbel")
        for feature in features:
            feature.state = state.sampling
            if feature.has_kernels:
                feature.ops = beside(type(feature).__module__)
        self.compiled_at_start = tuple(feature for feature in features if feature.compiled_at_start)
        self._uses = np.zeros(R, np.int32)  # by request slot: bit i for feature i
        self._answer: tuple[Any, tuple[Feature, ...]] = None, ()  # the last ``used_by``: each batch asks twice
        self._no_thresholds = torch.full((len(state.length),), -torch.inf, dtype=torch.float32, device=device)

    def __call__(self, values: torch.Tensor, req_indices: torch.Tensor,
                 used: tuple[Feature, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample one token per request and append it to its request (``advance_requests`` of gumbel.py).

        Args:
            values: logits [B, V / tp.size], changed in place.
            req_indices: i32[B], request slots.
            used: the features that some request of the batch uses, from ``begin``.

        Returns:
            Token ids i32[B], the same on every rank, and the features' report, if the batch uses one that has any.
        """
        raw = logits = self.logits(values)
        if any(feature.reads_raw for feature in used) and any(feature.in_place for feature in used):
            logits = raw._replace(values=values.clone())
        for feature in used:
            logits = feature.apply(logits, req_indices)
        tokens = self.draw(logits, req_indices)
        reports = (feature.report(raw, logits, tokens, req_indices) for feature in used)
        return tokens, next((report for report in reports if report is not None), None)

    def logits(self, values: torch.Tensor) -> Logits:
        return Logits(values, self._no_thresholds[: len(values)], self.tp)

    def draw(self, logits: Logits, req_indices: torch.Tensor) -> torch.Tensor:
        values, thresholds, tp = logits
        columns = self.state.sampling
        advance = self.state.last_token, columns.length, self.state.sampled_tokens
        if tp.size == 1:
            return self.ops.gumbel_argmax(values, req_indices, columns, thresholds, advance=advance)[1]
        # Each rank samples from its part of the vocabulary; the best score wins, the lowest id on a tie. The noise
        # depends on the id, not on the rank: the token is the same as without tensor parallelism.
        candidates = req_indices.new_empty((2, len(req_indices)))  # 8 bytes a sequence
        self.ops.gumbel_argmax(values, req_indices, columns, thresholds, logits.vocab_start, candidates=candidates)
        gathered = tp.all_gather(candidates.view(torch.float32)).view(torch.int32)  # floats go through peer memory
        return self.ops.pick_and_advance(gathered, req_indices, *advance)

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> None:
        """Host: fill the columns of new requests; see ``Feature.add``."""
        rows["temperature"] = [0.0 if p.is_greedy else min(p.temperature, MAX_FLOAT) for p in new.sampling.params]
        rows["seed"] = new.seeds
        uses = np.zeros(len(new), np.int32)
        for i, feature in enumerate(self.features):
            uses |= np.array(feature.add(new, rows, arrays), np.int32) << i
        self._uses[new.req_indices], self._answer = uses, (None, ())

    def used_by(self, req_indices: np.ndarray) -> tuple[Feature, ...]:
        """Features that one of these requests uses; without any, a captured graph draws."""
        if req_indices is not self._answer[0]:
            bits = int(np.bitwise_or.reduce(self._uses[req_indices]))
            self._answer = req_indices, tuple(feature for i, feature in enumerate(self.features) if bits >> i & 1)
        return self._answer[1]

    def waits(self, req_indices: np.ndarray) -> bool:
        """Host: whether a batch of these requests waits for the host's late inputs."""
        return any(feature.waits(req_indices) for feature in self.used_by(req_indices))

    def begin(self, sampled: Sampled) -> Arrays:
        """Host: a batch is sampled next; returns arrays for ``write`` before it is."""
        arrays: Arrays = {}
        for feature in self.used_by(sampled.req_indices):
            feature.begin(sampled, arrays)
        return arrays

    def write(self, tensors: Tensors) -> None:
        """Device: read the arrays that ``add`` and ``begin`` have filled."""
        for feature in self.features:
            if feature.sends in tensors:
                feature.write(tensors)

    def release(self) -> None:
        for feature in self.features:
            feature.release()

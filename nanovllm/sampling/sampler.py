"""The sampler: logits to token ids, as a recipe.

Owns the order of the features, the record of which requests use which, and the draw over tensor-parallel ranks.
B sequences of a batch, V vocabulary, R request slots.
"""

from typing import Any, ClassVar

import numpy as np
import torch

from nanovllm import kernels
from nanovllm.core import NewSequences
from nanovllm.distributed.group import TPGroup
from nanovllm.sampling.feature import MAX_FLOAT, Arrays, Feature, Logits, Tensors
from nanovllm.sampling.filters import Filters
from nanovllm.sampling.logprobs import Logprobs
from nanovllm.sampling.masks import MinTokens, TokenMasks
from nanovllm.sampling.penalties import Penalties
from nanovllm.sampling.processors import Processors


class Sampler:
    """One rank's features, and the Gumbel-max trick: argmax of logit / temperature + noise, without a softmax.

    Args:
        state: the ``RequestState``, with ``columns``; the draw advances its last tokens and lengths.
        tp: ranks that split the vocabulary.
        max_model_len, vocab_size: limits of the features' tables.
        processed_logprobs: see ``Logprobs``.
    """

    columns: ClassVar[dict[str, Any]] = {
        "temperature": np.float32, "seed": np.uint64,
        **{name: dtype for kind in (Filters, MinTokens, Penalties, TokenMasks) for name, dtype in kind.columns.items()},
    }  # fmt: skip

    def __init__(self, state: Any, tp: TPGroup, max_model_len: int, vocab_size: int, processed_logprobs: bool = False):
        R, device = state.max_num_seqs, state.device
        beside = kernels.select(device.type).beside
        self.state, self.tp, self.ops = state, tp, beside("nanovllm.sampling.gumbel")
        self.masks = TokenMasks(R, vocab_size, device)
        self.logprobs = Logprobs(R, vocab_size, processed_logprobs)
        self.min_tokens, self.processors, self.filters = MinTokens(), Processors(R), Filters()
        self.penalties = Penalties(R, max_model_len, vocab_size, state.last_token)
        # in the order in which they are applied; log-probabilities follow the draw
        self.features: tuple[Feature, ...] = (
            self.masks, self.min_tokens, self.processors, self.penalties, self.filters, self.logprobs
        )  # fmt: skip
        for feature in self.features:
            feature.state = state.sampling
            if feature.has_kernels:
                feature.ops = beside(type(feature).__module__)
        self._uses = np.zeros(R, np.int32)  # by request slot: bit i for feature i
        self._no_thresholds = torch.full((len(state.length),), -torch.inf, dtype=torch.float32, device=device)

    def __call__(self, values: torch.Tensor, req_indices: torch.Tensor, used: tuple[Feature, ...] = (),
                 num_top: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample one token per request and append it to its request (``advance_requests`` of gumbel.py).

        Args:
            values: logits [B, V / tp.size], changed in place.
            req_indices: i32[B], request slots.
            used: the features that some request of the batch uses, in their order.
            num_top: alternatives to report beside each token.

        Returns:
            Token ids i32[B], the same on every rank, and their log-probabilities where the batch uses these.
        """
        raw = logits = self.logits(values)
        wants_logprobs = self.logprobs in used
        if wants_logprobs and not self.logprobs.processed and any(feature.in_place for feature in used):
            logits = raw._replace(values=values.clone())
        for feature in used:
            if feature is not self.logprobs:
                logits = feature.apply(logits, req_indices)
        tokens = self.draw(logits, req_indices)
        if not wants_logprobs:
            return tokens, None
        return tokens, self.logprobs.of_sampled(raw, logits, tokens, num_top, req_indices)

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

    # ---------------------------------------------------------------- which requests use what

    @property
    def compiled_at_start(self) -> tuple[Feature, ...]:
        """Features whose kernels are compiled at the start; those of the others when a request needs them."""
        return self.min_tokens, self.filters

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> None:
        """Host: sequences have got request slots; see ``Feature.add``."""
        rows["temperature"] = [0.0 if p.is_greedy else min(p.temperature, MAX_FLOAT) for p in new.params]
        rows["seed"] = new.seeds
        uses = np.zeros(len(new), np.int32)
        for i, feature in enumerate(self.features):
            uses |= np.array(feature.add(new, rows, arrays), np.int32) << i
        self._uses[new.req_indices] = uses

    def used_by(self, req_indices: np.ndarray) -> tuple[Feature, ...]:
        """The features that one of these requests uses; without any, a captured graph draws."""
        bits = int(np.bitwise_or.reduce(self._uses[req_indices]))
        return tuple(feature for i, feature in enumerate(self.features) if bits >> i & 1) if bits else ()

    def write(self, tensors: Tensors) -> None:
        """Device: take in what ``add`` has put into the arrays."""
        for feature in self.features:
            feature.write(tensors)

    def release(self) -> None:
        for feature in self.features:
            feature.release()

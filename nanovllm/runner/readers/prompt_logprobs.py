"""Log-probabilities of a prompt's tokens, device half; see ``readouts/prompt_logprobs.py``."""

from typing import Any

import torch

from nanovllm.models.decoder import CausalLM
from nanovllm.readouts.prompt_logprobs import ScoredRows
from nanovllm.runner.readers import Reader
from nanovllm.sampling.feature import Tensors
from nanovllm.sampling.sampler import Sampler
from nanovllm.sampling.token_logprobs import Logprobs


class LogprobsReader(Reader):
    """``token_logprobs`` of ``ScoredRows``."""

    kind = ScoredRows.kind

    def __init__(self, sampler: Sampler):
        super().__init__(sampler)
        (self._logprobs,) = (feature for feature in sampler.features if isinstance(feature, Logprobs))

    def compute(self, rows: ScoredRows, hidden: torch.Tensor, every: Any, tensors: Tensors,
                model: CausalLM) -> torch.Tensor:
        return self._logprobs.of_prompt(
            rows.num_top, every, tensors["target_rows"], tensors["target_ids"],
            lambda some: self._sampler.logits(model.compute_logits(some)),
        )  # fmt: skip

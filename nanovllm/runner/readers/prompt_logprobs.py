"""Log-probabilities of a prompt's tokens, device half; see ``readouts/prompt_logprobs.py``."""

from typing import Any

import torch

from nanovllm.models.decoder import CausalLM
from nanovllm.readouts.prompt_logprobs import ScoredRows
from nanovllm.sampling.feature import Tensors
from nanovllm.sampling.sampler import Sampler
from nanovllm.sampling.token_logprobs import Logprobs


def read_prompt_logprobs(sampler: Sampler, rows: ScoredRows, hidden: torch.Tensor, every: Any, tensors: Tensors,
                         model: CausalLM) -> torch.Tensor:
    """``token_logprobs`` of ``ScoredRows``."""
    (logprobs,) = (feature for feature in sampler.features if isinstance(feature, Logprobs))
    return logprobs.of_prompt(
        rows.num_top, every, tensors["target_rows"], tensors["target_ids"],
        lambda some: sampler.logits(model.compute_logits(some)),
    )  # fmt: skip

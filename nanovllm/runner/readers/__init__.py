"""The seam for readers, the device halves of readouts: each computes one kind of ``ReadoutBatch`` on one rank."""

from collections.abc import Callable
from typing import Any

import torch

from nanovllm.models.decoder import CausalLM
from nanovllm.sampling.feature import Tensors
from nanovllm.sampling.sampler import Sampler

# A reader takes the sampler, a message, the hidden states of ``logits_indices``, the hidden states of all packed tokens
# (if a message ``needs_every_state``), the batch's arrays on the device, and the model. It returns the values that
# ``ReadoutBatch.results`` splits.
Reader = Callable[[Sampler, Any, torch.Tensor, Any, Tensors, CausalLM], torch.Tensor]

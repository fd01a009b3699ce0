"""Sums of a prompt's hidden states, device half; see ``readouts/pooled_state.py``."""

from typing import Any

import numpy as np
import torch

from nanovllm.models.decoder import CausalLM
from nanovllm.readouts.pooled_state import PooledRows
from nanovllm.sampling.feature import Tensors
from nanovllm.sampling.sampler import Sampler


def read_pooled_states(sampler: Sampler, rows: PooledRows, hidden: torch.Tensor, every: Any, tensors: Tensors,
                       model: CausalLM) -> torch.Tensor:
    """Sums of hidden states, fp32 [P, C], of ``PooledRows``."""
    if rows.needs_every_state:
        return sums(every[tensors["pooled_rows"].long()].float(), tensors["pooled_sizes"])
    return hidden[tensors["pooled_last"].long()].float()


def sums(states: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Sum rows fp32 [sum(sizes), C] in runs of sizes[0], sizes[1], ...: [P, C]."""
    # unsafe: it would wait for the device, to check the sizes
    return states if len(states) == len(sizes) else torch.segment_reduce(states, "sum", lengths=sizes, unsafe=True)


def head_rows(model: CausalLM, token_ids: list[int] | None) -> np.ndarray:
    """Rows of the LM head, or without ``token_ids`` the classification head, fp32 [n, C]. A call of every rank."""
    if token_ids is None:
        return model.score.weight.float().cpu().numpy()
    ids = torch.tensor(token_ids, dtype=torch.int32, device=model.lm_head.weight.device)
    return model.lm_head.rows(ids).float().cpu().numpy()

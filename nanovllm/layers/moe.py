"""Mixture of experts; a placeholder until the layer is merged."""

from torch import nn

from nanovllm.distributed.group import TPGroup
from nanovllm.model_config import ModelConfig


class SparseMoE(nn.Module):
    def __init__(self, config: ModelConfig, tp: TPGroup):
        raise NotImplementedError

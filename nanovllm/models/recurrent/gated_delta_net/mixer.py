"""The mixer of a gated delta net: its state is a matrix for each value head, and the inputs of a convolution.

Owns its weights, and how they are sharded: by key heads, each with its value heads.
``kernels/gated_delta/reference.py`` defines the computation.

Legend: C hidden size, HK key heads of K, HV value heads of V (of this rank).
"""

from typing import ClassVar

import torch
from torch import nn

from nanovllm.distributed.group import TPGroup
from nanovllm.errors import ConfigError
from nanovllm.kernels.gated_delta.reference import GatedDeltaStates, GatedDeltaWeights
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.weight_loader import row_loader
from nanovllm.models.config import LayerConfig, ModelConfig
from nanovllm.models.recurrent.gated_delta_net.config import GatedDeltaConfig
from nanovllm.models.recurrent.mixer import RecurrentMixer, conv_weight, joint_projection


def has_quantized_linears(config: ModelConfig) -> bool:
    return config.fp8 is not None or config.has_packed_weights()


def packed_modules(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Checkpoint module -> (merged module, its parts there).

    With quantized weights b and a stay in 16 bits, as a product of their own.
    """
    if config.family.groups_delta_inputs:
        of_qkvz, of_ba = {"in_proj": "qkvz"}, {"in_proj_ba": "ba"}
    else:
        of_qkvz, of_ba = {"in_proj_qkv": "qkv", "in_proj_z": "z"}, {"in_proj_b": "b", "in_proj_a": "a"}
    merged = "in_proj_ba" if has_quantized_linears(config) else "in_proj"
    return {name: ("in_proj", parts) for name, parts in of_qkvz.items()} | {
        name: (merged, parts) for name, parts in of_ba.items()
    }


class GatedDeltaNet(RecurrentMixer):
    name: ClassVar[str] = "linear_attn"
    States = GatedDeltaStates

    def __init__(self, config: ModelConfig, layer: LayerConfig, rope: RotaryEmbedding | None,
                 backend: AttentionBackend, tp: TPGroup):
        super().__init__(config, tp)
        delta, C = config.recurrent, config.hidden_size
        assert isinstance(delta, GatedDeltaConfig)
        if not self.ops.takes_heads(delta.key_dim, delta.value_dim):
            raise ConfigError(
                f"linear attention has key heads of {delta.key_dim} and value heads of {delta.value_dim}; the GPU's "
                "kernels take powers of two from 32 on. Use device='cpu'."
            )
        key_size, value_size = delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim
        sizes = {"q": key_size, "k": key_size, "v": value_size, "z": value_size}
        of_ba = dict.fromkeys("ba", delta.num_value_heads)
        # A shard id has a letter for each projection in a checkpoint's tensor: "qkv" are one after the other; "qkvz"
        # and "ba" take turns, in a group for each key head.
        num_groups = delta.num_key_heads
        joined = {"qkv": (tuple("qkv"), 0), "qkvz": (tuple("qkvz"), num_groups), "ba": (tuple("ba"), num_groups)}
        kinds = [config.precision(layer, f"linear_attn.{name}") for name in ("in_proj", "out_proj")]
        self.in_proj_ba = None
        if has_quantized_linears(config):
            self.in_proj_ba = joint_projection(C, of_ba, joined, tp, None)
        else:
            sizes |= of_ba
        self.in_proj = joint_projection(C, sizes, joined, tp, kinds[0])
        self.num_gates = 2 * delta.num_value_heads // tp.size
        self.conv_weight = conv_weight([key_size, key_size, value_size], delta.conv_size, tp)
        of_heads = torch.empty(2, delta.num_value_heads // tp.size, dtype=torch.float32)  # fp32: they are exponents
        self.A_log, self.dt_bias = (nn.Parameter(values.clone(), requires_grad=False) for values in of_heads)
        for param in (self.A_log, self.dt_bias):
            param.weight_loader = row_loader(tp.rank, tp.size)  # type: ignore[attr-defined]
        self.norm = RMSNorm(delta.value_dim, config.rms_norm_eps)
        self.out_proj = RowParallelLinear(value_size, C, tp=tp, precision=kinds[1])
        self.weights = GatedDeltaWeights(
            self.conv_weight, self.A_log, self.dt_bias, self.norm.weight, self.norm.eps, delta.num_key_heads // tp.size
        )
        self.packed_modules_mapping = packed_modules(config)

    def project(self, residual: torch.Tensor, norm: RMSNorm | None) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """The inputs of the operations are u, with q, k, v and z, and ba."""
        u = self.in_proj(residual, norm)
        if self.in_proj_ba is None:
            return (u[:, : -self.num_gates], u[:, -self.num_gates :]), residual
        residual = residual[:]  # if the residual was SplitKPartials, the norm has reduced them into this tensor
        return (u, self.in_proj_ba(residual, norm)), residual

"""This library's layers in place of transformers' modules, for any leading dimensions; ``plain`` is the reference.

Each replaces a module, ``given``, and computes the same numbers. It is built on meta; ``build.py`` gives it memory.

T packed tokens, k experts of a token.
"""

from dataclasses import replace
from inspect import unwrap
from types import MethodType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from nanovllm import kernels
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from nanovllm.layers.weight_loader import copy_bias, copy_shard
from nanovllm.models import moe
from nanovllm.models.config import LayerConfig, MoEConfig
from nanovllm.quantization.fields import EXPERT_PARTS
from nanovllm.quantization.fp8.rules import Fp8
from nanovllm.transformers_backend.config import TransformersConfig
from nanovllm.utils.checkpoint_tensor import CheckpointTensor

NUM_PLAIN = 4  # experts that the proof compares: the last ones, at the far end of the weights


class Linear(ReplicatedLinear):
    """This library's linear layer in the place of ``nn.Linear``: any leading dimensions, one argument.

    Args:
        style: how ranks share it, as transformers' plans call it: "colwise" shards output features; "rowwise" shards
            input features and sums the results; "" replicates it.
    """

    def __init__(self, given: Any, precision: Any, tp: TPGroup = SINGLE_RANK, style: str = ""):
        sizes = {"out": given.out_features, "in": given.in_features}
        if style:
            sizes["out" if style == "colwise" else "in"] //= tp.size
        with torch.device("meta"):
            super().__init__(sizes["in"], sizes["out"], given.bias is not None, tp, precision)
        self.in_features, self.out_features, self.style = sizes["in"], sizes["out"], style
        for name in ("weight", "bias") if precision is None and (not style or tp.size == 1) else ():
            if (param := getattr(given, name)) is not None:  # keep the same parameter, which may be tied
                param.weight_loader = self.weight_loader
                self.register_parameter(name, param)

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: Any = None) -> None:
        if self.style == "rowwise" and param.dim() == 1:
            copy_bias(param, loaded, self.tp.rank)
        elif self.style:
            copy_shard(param, loaded, int(self.style == "rowwise"), self.tp.rank, self.tp.size)
        else:
            copy_shard(param, loaded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x [..., in_features] -> [..., out_features]."""
        y = self._summed(super().forward(x.reshape(-1, self.in_features).contiguous()))
        return y.view(*x.shape[:-1], self.out_features)

    def _summed(self, y: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(y) if self.style == "rowwise" else y

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """The same in plain PyTorch with dequantized weights, x [T, in_features]."""
        bias: Any = self.bias
        return self._summed(F.linear(x, as_plain(self, x.dtype), bias))


class Norm(RMSNorm):
    """This library's RMSNorm in the place of one of transformers, ``given``, with any leading dimensions."""

    def __init__(self, given: Any, eps: float, offset: float):
        self.size = len(given.weight)
        with torch.device("meta"):
            super().__init__(self.size, eps, offset)
        self._given = (given,)  # a tuple, so that it is no submodule: its weight is on meta
        self.weight_type = given.weight.dtype
        if offset == 0:
            given.weight.weight_loader = self.weight_loader
            self.register_parameter("weight", given.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        return super().forward(x.reshape(-1, self.size)).view(x.shape)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """The same by transformers' module."""
        weight = (self.weight - self.offset).to(self.weight_type)
        return functional_call(self._given[0], {"weight": weight}, (x,))


class MLP(nn.Module):
    """This library's gated MLP in the place of one of transformers, ``given``: one product of gate and up.

    Args:
        act: activation of the gate, "silu" or "gelu_tanh".
        precisions: schemes of gate, up (the same) and down.
        tp: ranks that share it; a single one replicates it.
    """

    packed_modules_mapping: ClassVar = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}

    def __init__(self, given: Any, act: str, precisions: list[Any], tp: TPGroup):
        super().__init__()
        self._given, self.act, self.tp = (given,), act, tp
        gate, down = given.gate_proj, given.down_proj
        self.size = gate.in_features
        with torch.device("meta"):
            sizes = [gate.out_features] * 2
            self.gate_up_proj = MergedColumnParallelLinear(self.size, sizes, gate.bias is not None, tp, precisions[0])
            self.down_proj = RowParallelLinear(sizes[0], down.out_features, down.bias is not None, tp, precisions[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        flat = x.reshape(-1, self.size).contiguous()
        gated = self.gate_up_proj(flat, act=self.act, reader=self.down_proj)
        return self.tp.all_reduce(self.down_proj(gated)).view(*x.shape[:-1], -1)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """The same by transformers' module with dequantized weights."""
        gate_up, down = self.gate_up_proj, self.down_proj
        weights: dict[str, Any]
        merged, weights = as_plain(gate_up, x.dtype), {"down_proj.weight": as_plain(down, x.dtype)}
        if down.bias is not None:
            weights["down_proj.bias"] = down.bias
        for i, name in enumerate(("gate_proj", "up_proj")):
            weights[f"{name}.weight"] = merged.chunk(2)[i]
            if (bias := gate_up.bias) is not None:
                weights[f"{name}.bias"] = bias.chunk(2)[i]  # type: ignore[operator]
        return self.tp.all_reduce(functional_call(self._given[0], weights, (x,)))


class Experts(moe.Experts):
    """This library's experts in the place of transformers', ``given``; its router stays.

    Args:
        act: activation of the gate, "silu" or "gelu_tanh".
        precisions: schemes of gate and up, and of down.
        tp: ranks that share each expert's intermediate features.
    """

    ops: Any  # kernels

    def __init__(self, given: Any, act: str, precisions: tuple[Any, Any], config: TransformersConfig, tp: TPGroup):
        num_experts, num_features, self.size = given.gate_up_proj.shape
        names = dict(zip((f"mlp.experts.{part}" for part in EXPERT_PARTS), precisions, strict=True))
        layer = LayerConfig(
            fp8_linears=frozenset(name for name, scheme in names.items() if isinstance(scheme, Fp8)),
            packed_schemes=tuple((name, x) for name, x in names.items() if x is not None and not isinstance(x, Fp8)),
        )
        with torch.device("meta"):
            sizes = MoEConfig(num_experts, 1, num_features // 2)
            super().__init__(replace(config, hidden_size=given.gate_up_proj.shape[2]), sizes, layer, tp)
        self._given, self.act, self.ops = (given,), act, kernels.select()
        self.first_plain = max(0, num_experts - NUM_PLAIN)
        given.forward = looping(given)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states [T, size], experts of each token and their weights [T, k] -> the weighted sum, [T, size]."""
        x, ids, weights = (each.contiguous() for each in (hidden_states, top_k_index.int(), top_k_weights.float()))
        return self.tp.all_reduce(self.ops.chosen_experts(x, *self.weights(), ids, weights, self.act))

    def plain(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The same by transformers' module for the experts from ``first_plain`` on, with dequantized weights."""
        last = slice(self.first_plain, None)
        both = zip(EXPERT_PARTS, (each.expert(last).dequantize(x.dtype) for each in self.weights()), strict=True)
        return self.tp.all_reduce(functional_call(self._given[0], dict(both), (x, ids - self.first_plain, weights)))


def looping(experts: nn.Module) -> MethodType:
    """The forward method of transformers' experts that loops over them, and takes any number of experts."""
    return MethodType(unwrap(type(experts).forward), experts)


def as_plain(layer: ReplicatedLinear, dtype: torch.dtype) -> torch.Tensor:
    """A layer's weight in 16 or 32 bits, with its channels in the order of the input."""
    weight = layer.as_weight()
    plain, order = weight.dequantize(dtype), weight.order
    return plain if order is None else torch.empty_like(plain).index_copy_(1, order.long(), plain)

"""The sparse MLP of a mixture of experts: a router, the experts, and with some families a shared expert.

Owns how experts are sharded: each rank holds its part of every expert's intermediate features, as if each were an MLP.
All ranks route alike; one all-reduce of the decoder layer sums experts, shared expert and residual.
``kernels/moe/reference.py`` defines the computation.

Legend: T packed tokens, C hidden size, E experts, I intermediate size of an expert.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.linear.reference import Weight
from nanovllm.kernels.moe.reference import Biases, Routing, Shared
from nanovllm.layers.context import Context
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.weight_loader import Shard, Shards, copy_bias, copy_shard
from nanovllm.models.config import LayerConfig, ModelConfig, MoEConfig
from nanovllm.models.decoder import MLP
from nanovllm.models.families import Family
from nanovllm.models.ungated import UngatedMLP
from nanovllm.quantization.fields import EXPERT_PARTS
from nanovllm.quantization.mxfp4.tensors import rows_of_expert
from nanovllm.quantization.weights import add_weight, new_bias
from nanovllm.utils.checkpoint_tensor import CheckpointTensor


class Router(nn.Module):
    """Weights of the router, the same on every rank."""

    bias: nn.Parameter | None

    def __init__(self, family: Family, num_experts: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)
        self.register_parameter("bias", new_bias(num_experts) if family.gpt_oss_experts else None)
        self.register_parameter("e_score_correction_bias", None)
        if family.has_correction_bias:
            # fp32 in any model: it decides between scores that differ by less than a bf16 ulp
            bias = torch.empty(num_experts, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
            self.e_score_correction_bias.weight_loader = self.load_bias  # type: ignore[attr-defined]

    def load_bias(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        """[E], or as ERNIE has it [1, E]."""
        copy_shard(param[None] if len(loaded.shape) == 2 else param, loaded)


class Experts(nn.Module):
    """Weights of all experts: gate_up_proj [E, 2I / size, C], gate before up, and down_proj [E, C, I / size].

    A checkpoint has a tensor for each expert and projection, or one of all experts, which the loader takes apart. The
    latter may be transposed: [E, C, 2I] and [E, I, C]. In gpt-oss the rows of gate and up take turns. MXFP4 stays MXFP4
    on a GPU; on a CPU the loader dequantizes it.

    Biases: [E, 2I / size] of this rank's rows, and [E, C], zeros on all ranks but the first.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_scale: nn.Parameter | None
    down_proj_scale: nn.Parameter | None
    gate_up_proj_zero: nn.Parameter | None
    down_proj_zero: nn.Parameter | None
    gate_up_proj_factor: nn.Parameter | None
    down_proj_factor: nn.Parameter | None
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, moe: MoEConfig, layer: LayerConfig, tp: TPGroup):
        super().__init__()
        self.tp, self.family, is_gpt_oss = tp, config.family, config.family.gpt_oss_experts
        E, I, C = moe.num_experts, moe.expert_size // tp.size, config.hidden_size
        shard = Shard(I, tp.rank, tp.size)
        in_turns = {None: ((0, 1), moe.expert_size)} if is_gpt_oss else None
        parts = ("up_proj",) if self.family.ungated else EXPERT_PARTS["gate_up_proj"]
        self.gate_up_shards = Shards(dict.fromkeys(range(len(parts)), shard), in_turns)
        has_16_bits = config.quant_method == "mxfp4" and not kernels.select().takes_mxfp4()
        for name, num_features, num_channels in (("gate_up_proj", len(parts) * I, C), ("down_proj", C, I)):
            scheme = None if has_16_bits else config.precision(layer, f"mlp.experts.{name}")
            add_weight(self, name, num_features, num_channels, scheme, E)
            self.register_parameter(f"{name}_bias", new_bias(E, num_features) if is_gpt_oss else None)
        for name, param in self.named_parameters():
            load = self.load_gate_up if name.startswith("gate_up") else self.load_down
            param.weight_loader = load  # type: ignore[attr-defined]
            same_dim = 1 if name.startswith("gate_up") else 0
            param.in_rows = partial(self.in_rows, param.shape[1:], same_dim)  # type: ignore[attr-defined]
            param.is_merged = is_gpt_oss  # type: ignore[attr-defined]
            param.parts = parts if name.startswith("gate_up") else ("down_proj",)  # type: ignore[attr-defined]

    def load_gate_up(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: tuple[int, int | None]) -> None:
        """``shard_id``: expert, and 0 for its gate, 1 for up, None for both."""
        expert, part = shard_id
        rows = param[expert]
        if part is None:
            rows, loaded = self.of_expert(rows, loaded, 1)
        self.gate_up_shards.load(rows, loaded, part)

    def load_down(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: tuple[int, int | None]) -> None:
        rows, loaded = self.of_expert(param[shard_id[0]], loaded, 0)
        if rows.dim() > 1:
            copy_shard(rows, loaded, 1, self.tp.rank, self.tp.size)
        else:
            copy_bias(rows, loaded, self.tp.rank)

    def of_expert(
        self, param: torch.Tensor, loaded: CheckpointTensor, same_dim: int
    ) -> tuple[torch.Tensor, CheckpointTensor]:
        """An expert's part of a parameter, and its tensor, as [output features, input channels]."""
        if self.family.gpt_oss_experts and param.dtype == torch.uint8:
            return rows_of_expert(param, loaded)
        return param, self.in_rows(param.shape, same_dim, loaded)

    def in_rows(self, shape: torch.Size, same_dim: int, loaded: CheckpointTensor) -> CheckpointTensor:
        """An expert's tensor as [output features, input channels]. Dimension ``same_dim`` of its ``shape`` here is the
        same on all ranks, which shows whether a tensor is transposed."""
        if len(shape) == 1:
            return loaded
        may_be = self.family.experts_transposed and loaded.shape[same_dim] != shape[same_dim]
        return loaded.transposed() if may_be or self.family.gpt_oss_experts else loaded

    def weights(self) -> tuple[Weight, Weight]:
        """Weights of the gate and up product, and of the down product."""
        return (
            Weight(
                self.gate_up_proj, self.gate_up_proj_scale, zero=self.gate_up_proj_zero,
                factor=self.gate_up_proj_factor,
            ),
            Weight(self.down_proj, self.down_proj_scale, zero=self.down_proj_zero, factor=self.down_proj_factor),
        )


class SparseMoE(nn.Module):
    """Each token passes ``top_k`` of the experts, chosen by the router, and the shared expert."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, tp: TPGroup):
        super().__init__()
        assert config.moe is not None
        family, moe, C = config.family, config.moe, config.hidden_size
        self.tp = tp
        self.ops = kernels.select()
        self.act, self.limit = config.act, moe.swiglu_limit
        self.routing = Routing(
            moe.top_k, family.experts, moe.renormalize, moe.routed_scale * config.residual_scale, moe.num_groups,
            moe.top_groups, family.choice_eps,
        )
        self.gate = Router(family, moe.num_experts, C)
        self.experts = Experts(config, moe, layer, tp)
        make_shared: Any = UngatedMLP if family.ungated else MLP
        of_shared = config, layer, tp, "mlp.shared_expert", moe.shared_size
        self.shared_expert = make_shared(*of_shared) if moe.shared_size else None
        has_gate = self.shared_expert is not None and family.has_shared_gate
        self.shared_expert_gate = ReplicatedLinear(C, 1, tp=tp) if has_gate else None

    def forward(self, residual: torch.Tensor, norm: RMSNorm, context: Context) -> torch.Tensor:
        """residual [T, C] -> this rank's partial sum of residual + moe(norm(residual)), [T, C]."""
        slot_mapping = context.slot_mapping
        if len(residual) < len(slot_mapping):  # the last layer of a prefill
            slot_mapping = slot_mapping[context.logits_indices]
        x, base, is_first = residual, None, self.tp.rank == 0
        norm_weight: torch.Tensor | None = norm.weight
        merged = self.shared_to_merge(len(residual))
        if self.shared_expert is not None and merged is None:
            shared, gate = self.shared_expert, self.shared_gate()
            if gate is None or len(residual) > 1:  # one norm for the shared expert and the others
                x, norm_weight = norm(residual), None
                hidden = shared.hidden(x, None)
            else:
                hidden = shared.hidden(residual, norm)
                x = residual[:]
            residual = residual[:]  # the norm has reduced SplitKPartials, if it was one, into this tensor
            base = shared.down_proj(hidden, residual=residual if gate is None else None, allow_split_k=False)
            if gate is not None:
                base = self.ops.add_shared_expert(base, residual, norm.weight, norm.eps, gate, is_first)
        return self.ops.fused_moe(
            x, norm_weight, norm.eps, self.gate.weight, self.gate.e_score_correction_bias,
            *self.experts.weights(), self.routing, slot_mapping, self.act,
            add_residual=is_first or base is not None, allow_split_k=self.tp.size == 1, base=base, biases=self.biases(),
            limit=self.limit, shared=merged,
        )  # fmt: skip

    def shared_to_merge(self, num_tokens: int) -> Shared | None:
        """The shared expert, where few tokens take it as one more of the experts."""
        if self.shared_expert is None or self.act == "relu2":
            return None
        shared, (gate_up, _) = self.shared_expert, self.experts.weights()
        of_gate_up, of_down = shared.gate_up_proj.as_weight(), shared.down_proj.as_weight()
        if not self.ops.takes_shared_expert(num_tokens, gate_up, of_gate_up, self.routing):
            return None
        return Shared(of_gate_up, of_down, self.shared_gate())

    def shared_gate(self) -> torch.Tensor | None:
        return None if self.shared_expert_gate is None else self.shared_expert_gate.weight

    def biases(self) -> Biases | None:
        router, gate_up, down = self.gate.bias, self.experts.gate_up_proj_bias, self.experts.down_proj_bias
        return None if router is None or gate_up is None or down is None else Biases(router, gate_up, down)

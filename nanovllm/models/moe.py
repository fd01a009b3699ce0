"""The sparse MLP of a mixture of experts: a router, the experts, and with some families a shared expert.

Owns how experts are sharded: each rank holds its part of every expert's intermediate features, as if each were an MLP.
All ranks route alike; one all-reduce of the decoder layer sums experts, shared expert and residual.
``kernels/moe/reference.py`` says what is computed.

Legend: T packed tokens, C hidden size, E experts, I intermediate size of an expert.
"""

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.linear.reference import Weight
from nanovllm.kernels.moe.reference import Routing
from nanovllm.layers.context import Context
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from nanovllm.layers.quantization import new_weight
from nanovllm.layers.weight_loader import CheckpointTensor, copy_shard, split_rows
from nanovllm.models.config import LayerConfig, ModelConfig, MoEConfig


class Router(nn.Module):
    """Weights of the router, the same on every rank."""

    def __init__(self, moe: MoEConfig, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size), requires_grad=False)
        self.register_parameter("e_score_correction_bias", None)
        if moe.has_correction_bias:  # fp32 in any model: it decides between scores that differ by less than a bf16 ulp
            bias = torch.empty(moe.num_experts, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
            self.e_score_correction_bias.weight_loader = self.load_bias  # type: ignore[attr-defined]

    def load_bias(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        """[E], or as ERNIE has it [1, E]."""
        copy_shard(param[None] if len(loaded.shape) == 2 else param, loaded)


class Experts(nn.Module):
    """Weights of all experts: gate_up_proj [E, 2I / size, C], gate before up, and down_proj [E, C, I / size].

    A checkpoint has a tensor for each expert and projection, or one of all experts, which the loader takes apart;
    these may be transposed: [E, C, 2I] and [E, I, C].
    """

    gate_up_proj_scale: nn.Parameter | None
    down_proj_scale: nn.Parameter | None

    def __init__(self, config: ModelConfig, moe: MoEConfig, layer: LayerConfig, tp: TPGroup):
        super().__init__()
        self.tp, self.may_be_transposed = tp, moe.may_be_transposed
        E, I, C = moe.num_experts, moe.expert_size // tp.size, config.hidden_size
        fp8 = [config.fp8_block(layer, f"mlp.experts.{name}") for name in ("gate_up_proj", "down_proj")]
        self.gate_up_proj, gate_up_scale = new_weight(2 * I, C, fp8[0], E)
        self.down_proj, down_scale = new_weight(C, I, fp8[1], E)
        self.register_parameter("gate_up_proj_scale", gate_up_scale)
        self.register_parameter("down_proj_scale", down_scale)
        for name, param in self.named_parameters():
            load = self.load_gate_up if name.startswith("gate_up") else self.load_down
            param.weight_loader = load  # type: ignore[attr-defined]

    def load_gate_up(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: tuple[int, int | None]) -> None:
        """``shard_id``: expert, and 0 for its gate, 1 for up, None for both, gate rows before up rows."""
        n, (expert, part) = param.shape[1] // 2, shard_id
        if part is None:
            loaded = loaded.transposed() if self.may_be_transposed and loaded.shape[1] != param.shape[2] else loaded
            for i, rows in enumerate(split_rows(loaded, [n * self.tp.size] * 2)):
                self.load_gate_up(param, rows, (expert, i))
        else:
            copy_shard(param[expert, part * n : (part + 1) * n], loaded, 0, self.tp.rank, self.tp.size)

    def load_down(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: tuple[int, int | None]) -> None:
        loaded = loaded.transposed() if self.may_be_transposed and loaded.shape[0] != param.shape[1] else loaded
        copy_shard(param[shard_id[0]], loaded, 1, self.tp.rank, self.tp.size)

    def weights(self) -> tuple[Weight, Weight]:
        """Of the products with gate and up, and with down."""
        return Weight(self.gate_up_proj, self.gate_up_proj_scale), Weight(self.down_proj, self.down_proj_scale)


class SharedExpert(nn.Module):
    """An MLP that every token passes. Its result, without the residual, is this rank's summand."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, layer: LayerConfig, tp: TPGroup):
        super().__init__()
        C, I = config.hidden_size, moe.shared_size
        fp8 = [config.fp8_block(layer, f"mlp.shared_expert.{name}") for name in ("gate_up_proj", "down_proj")]
        self.gate_up_proj = MergedColumnParallelLinear(C, [I, I], tp=tp, fp8_block=fp8[0])
        self.act = config.act
        self.down_proj = RowParallelLinear(I, C, tp=tp, fp8_block=fp8[1])

    def forward(self, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(residual, norm, self.act))


class SparseMoE(nn.Module):
    """Each token passes ``top_k`` of the experts, chosen by the router, and the shared expert."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, tp: TPGroup):
        super().__init__()
        assert config.moe is not None
        moe, C = config.moe, config.hidden_size
        self.tp = tp
        self.ops = kernels.select()
        self.act = config.act
        self.routing = Routing(
            moe.top_k, moe.scoring, moe.renormalize, moe.routed_scale, moe.num_groups, moe.top_groups
        )
        self.gate = Router(moe, C)
        self.experts = Experts(config, moe, layer, tp)
        self.shared_expert = SharedExpert(config, moe, layer, tp) if moe.shared_size else None
        self.shared_expert_gate = ReplicatedLinear(C, 1, tp=tp) if moe.has_shared_gate else None

    def forward(self, residual: torch.Tensor, norm: RMSNorm, context: Context) -> torch.Tensor:
        """residual [T, C] -> this rank's summand of residual + moe(norm(residual)), [T, C]."""
        slot_mapping = context.slot_mapping
        if len(residual) < len(slot_mapping):  # the last layer of a prefill
            slot_mapping = slot_mapping[context.logits_indices]
        base, is_first = None, self.tp.rank == 0
        if self.shared_expert is not None:
            shared = self.shared_expert(residual, norm)
            residual = residual[:]  # the norm has reduced SplitKPartials, if it was one, into this tensor
            gate = None if self.shared_expert_gate is None else self.shared_expert_gate.weight
            base = self.ops.add_shared_expert(shared, residual, norm.weight, norm.eps, gate, is_first)
        return self.ops.fused_moe(
            residual, norm.weight, norm.eps, self.gate.weight, self.gate.e_score_correction_bias,
            *self.experts.weights(), self.routing, slot_mapping, self.act,
            add_residual=is_first or base is not None, allow_split_k=self.tp.size == 1, base=base,
        )  # fmt: skip

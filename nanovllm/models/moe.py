"""The sparse MLP of a mixture of experts: a router, the experts, and with some families a shared expert.

Owns how experts are sharded: each rank holds its part of every expert's intermediate features, as if each were an MLP.
All ranks route alike; one all-reduce of the decoder layer sums experts, shared expert and residual.
``kernels/moe/reference.py`` says what is computed.

Legend: T packed tokens, C hidden size, E experts, I intermediate size of an expert.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.moe.reference import Routing
from nanovllm.layers.context import Context
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from nanovllm.layers.weight_loader import CheckpointTensor, copy_shard
from nanovllm.models.config import ModelConfig, MoEConfig


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

    A checkpoint has a tensor for each expert and projection, or one of all experts (``shard_id`` None), of the
    parameter's shape on a single rank, or with its last two dimensions swapped.
    """

    def __init__(self, moe: MoEConfig, hidden_size: int, tp: TPGroup):
        super().__init__()
        self.tp, self.may_be_swapped = tp, moe.may_be_swapped
        E, I, C = moe.num_experts, moe.expert_size // tp.size, hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, C), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(E, C, I), requires_grad=False)
        self.gate_up_proj.weight_loader = self.load_gate_up  # type: ignore[attr-defined]
        self.down_proj.weight_loader = self.load_down  # type: ignore[attr-defined]

    def load_gate_up(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: tuple[int, int] | None) -> None:
        """``shard_id``: expert, and 0 for its gate, 1 for up."""
        n, rank, size = param.shape[1] // 2, self.tp.rank, self.tp.size
        if shard_id is None:
            loaded = loaded.swapped() if self.may_be_swapped and loaded.shape[-1] != param.shape[2] else loaded
            for i in (0, 1):  # [E, 2I, C]: the up rows of all ranks come after their gate rows
                copy_shard(param[:, i * n : (i + 1) * n], loaded, 1, i * size + rank, 2 * size)
        else:
            expert, i = shard_id
            copy_shard(param[expert, i * n : (i + 1) * n], loaded, 0, rank, size)

    def load_down(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: tuple[int, None] | None) -> None:
        target = param if shard_id is None else param[shard_id[0]]
        if self.may_be_swapped and shard_id is None and loaded.shape[1] != param.shape[1]:
            loaded = loaded.swapped()
        copy_shard(target, loaded, target.dim() - 1, self.tp.rank, self.tp.size)


class SharedExpert(nn.Module):
    """An MLP that every token passes. Its result, without the residual, is this rank's summand."""

    def __init__(self, moe: MoEConfig, hidden_size: int, act: str, tp: TPGroup):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [moe.shared_size] * 2, tp=tp)
        self.act = act
        self.down_proj = RowParallelLinear(moe.shared_size, hidden_size, tp=tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x, act=self.act))


class SparseMoE(nn.Module):
    """Each token passes ``top_k`` of the experts, chosen by the router, and the shared expert."""

    def __init__(self, config: ModelConfig, tp: TPGroup):
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
        self.experts = Experts(moe, C, tp)
        self.shared_expert = SharedExpert(moe, C, config.act, tp) if moe.shared_size else None
        self.shared_expert_gate = ReplicatedLinear(C, 1, tp=tp) if moe.has_shared_gate else None

    def forward(self, residual: torch.Tensor, norm: RMSNorm, context: Context) -> torch.Tensor:
        """residual [T, C] -> this rank's summand of residual + moe(norm(residual)), [T, C]."""
        slot_mapping = context.slot_mapping
        if len(residual) < len(slot_mapping):  # the last layer of a prefill
            slot_mapping = slot_mapping[context.logits_indices]
        shared = None
        if self.shared_expert is not None:
            x = norm(residual)
            residual = residual[:]  # the norm has reduced SplitKPartials, if it was one, into this tensor
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                shared = F.linear(x, self.shared_expert_gate.weight).sigmoid() * shared
        y = self.ops.fused_moe(  # after the shared expert: it may overwrite the residual
            residual, norm.weight, norm.eps, self.gate.weight, self.gate.e_score_correction_bias,
            self.experts.gate_up_proj, self.experts.down_proj, self.routing, slot_mapping, self.act,
            add_residual=self.tp.rank == 0, allow_split_k=self.tp.size == 1 and shared is None,
        )  # fmt: skip
        return y if shared is None else y + shared

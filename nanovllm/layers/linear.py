"""Linear layers and how their weights are sharded over tensor-parallel ranks.

A layer's ``weight_loader(param, loaded, shard_id)`` copies this rank's shard of a checkpoint tensor. ``loaded`` is
lazy: only the shard is read from disk.

    ColumnParallel  shards output features: weight[rank * N/size : (rank+1) * N/size]
    RowParallel     shards input features: the layer's output is the sum of the ranks' outputs

No layer communicates for it: ``models/decoder.py`` sums up, once for attention and once for the MLP.

A layer takes the neighbouring operations as arguments, so that kernels can fuse them: the RMSNorm before it, and after
it the gated activation, the residual addition, or QK-norm + RoPE + KV store. ``kernels/linear/dispatch.py`` chooses.

Legend: T packed tokens, N output features.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.fp8 import E4M3
from nanovllm.kernels.linear.reference import QKVEpilogue, Weight
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.quantization import new_weight, shared_rows
from nanovllm.layers.rotary_embedding import HeadOrders
from nanovllm.layers.weight_loader import CheckpointTensor, copy_shard, grouped_rows, split_rows


class ReplicatedLinear(nn.Module):
    """``y = x W^T (+ b)``, the same on every rank. Weight [output_size, input_size] as in ``nn.Linear``.

    ``fp8_block``: an FP8 weight has a scale for each block of so many output features and input channels; 0: for each
    output feature.
    """

    weight_scale: nn.Parameter | None
    packed: torch.Tensor | None = None  # a copy of the weight, on the CPU (runner/packing.py)

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TPGroup = SINGLE_RANK,
                 fp8_block: int | None = None):
        super().__init__()
        self.tp = tp
        self.ops = kernels.select()
        self.weight, scale = new_weight(output_size, input_size, fp8_block)
        self.block_n = shared_rows(fp8_block, [output_size])
        self.register_parameter("weight_scale", scale)
        self.register_parameter("bias", nn.Parameter(torch.empty(output_size), requires_grad=False) if bias else None)
        for param in self.parameters():
            param.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        copy_shard(param, loaded)

    def as_weight(self) -> Weight:
        return Weight(self.weight, self.weight_scale, self.block_n, self.packed)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None, act: str | None = None,
                residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, input_size] -> residual + act(norm(x) W^T + b), [T, output_size].

        With ``act``, "silu" or "gelu_tanh", W has gate and up, and act(gate) * up is half as wide.
        With ``residual`` the result may be unreduced ``SplitKPartials``. Only an RMSNorm, which reduces them, may read
        it; after that it serves as the next ``residual``.
        """
        weight = self.as_weight()
        norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        is_alone = self.tp.size == 1  # an all-reduce needs the reduced sum
        return self.ops.fused_linear(x, weight, self.bias, norm_weight, eps, residual, act, allow_split_k=is_alone)


class ColumnParallelLinear(ReplicatedLinear):
    """Output features sharded over ranks: this rank holds ``output_size / size`` of them."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TPGroup = SINGLE_RANK,
                 fp8_block: int | None = None):
        super().__init__(input_size, output_size // tp.size, bias, tp, fp8_block)

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        copy_shard(param, loaded, 0, self.tp.rank, self.tp.size)


class Shard(NamedTuple):
    """This rank's rows of a checkpoint tensor: part ``part`` of ``total``, the dimensions of its heads in ``order``."""

    num_rows: int
    part: int
    total: int
    order: list[int] | None = None

    def num_rows_in_checkpoint(self) -> int:
        head_dim, padded = (max(self.order) + 1, len(self.order)) if self.order else (1, 1)
        return self.num_rows * self.total // padded * head_dim


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input as a single product; ``shard_id`` is the layer's index."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False, tp: TPGroup = SINGLE_RANK,
                 fp8_block: int | None = None):
        super().__init__(input_size, sum(output_sizes), bias, tp, fp8_block)
        self.block_n = shared_rows(fp8_block, [size // tp.size for size in output_sizes])
        self.shards: dict[Any, Shard] = {
            i: Shard(size // tp.size, tp.rank, tp.size) for i, size in enumerate(output_sizes)
        }  # fmt: skip

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: Any = None) -> None:
        if shard_id is None:  # merged in the checkpoint too
            sizes = [shard.num_rows_in_checkpoint() for shard in self.shards.values()]
            for name, tensor in zip(self.shards, split_rows(loaded, sizes), strict=True):
                self.weight_loader(param, tensor, name)
            return
        rows = dict(zip(self.shards, param.split([shard.num_rows for shard in self.shards.values()]), strict=True))
        _, part, total, order = self.shards[shard_id]
        copy_shard(rows[shard_id], loaded, 0, part, total, order)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections as a single product; ``shard_id`` is "q", "k" or "v".

    Heads are sharded over ranks. With fewer KV heads than ranks, ``size / num_kv_heads`` neighbouring ranks hold a
    replica of the same KV head. ``orders``: of the dimensions of each head; ``head_dim`` includes the padding.
    ``has_gate``: the checkpoint's q_proj has a gate behind the query of each head. Here all gates come last.
    """

    def __init__(self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool = False,
                 tp: TPGroup = SINGLE_RANK, fp8_block: int | None = None, orders: HeadOrders = HeadOrders(),
                 has_gate: bool = False):
        self.num_heads, self.num_kv_heads = num_heads // tp.size, max(1, num_kv_heads // tp.size)  # of this rank
        replicas = max(1, tp.size // num_kv_heads)
        self.q_shard, self.kv_shard = (tp.rank, tp.size), (tp.rank // replicas, tp.size // replicas)
        self.head_dim, self.orders, self.has_gate = head_dim, orders, has_gate
        q_size, kv_size = self.num_heads * head_dim, self.num_kv_heads * head_dim
        sizes = [q_size, kv_size, kv_size, *[q_size] * has_gate]
        super().__init__(hidden_size, [n * tp.size for n in sizes], bias, tp, fp8_block)
        self.shards = {
            "q": Shard(q_size, *self.q_shard, orders.qk),
            "k": Shard(kv_size, *self.kv_shard, orders.qk),
            "v": Shard(kv_size, *self.kv_shard, orders.v),
        }
        if has_gate:
            self.shards["gate"] = Shard(q_size, *self.q_shard, orders.v)
        if orders.qk is not None and (fp8_block or 0) % head_dim:  # a head's rows would go to other blocks
            self.block_n = 1

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: Any = None) -> None:
        if shard_id != "q" or not self.has_gate:
            super().weight_loader(param, loaded, shard_id)
            return
        head_dim = self.shards["q"].num_rows_in_checkpoint() // (self.num_heads * self.tp.size)
        whole = loaded.fit([2 * head_dim * self.num_heads * self.tp.size, *param.shape[1:]])  # FP8 scales: of each row
        for name, tensor in zip(("q", "gate"), grouped_rows(whole, [head_dim, head_dim]), strict=True):
            super().weight_loader(param, tensor, name)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None, epilogue: QKVEpilogue,  # type: ignore[override]
                qk_norms: tuple[RMSNorm, RMSNorm] | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [T, hidden_size] -> q [T, H, D] of norm(x) W^T after QK-norm and RoPE, and the gate [T, H * D] or None;
        k and v go to the KV cache.

        ``qk_norms`` are those over all heads at once; those of each head are in the epilogue.
        """
        if self.has_gate:
            qkvg = super().forward(x, norm)
            num_gates = self.num_heads * self.head_dim
            return self.ops.norm_rope_store(qkvg[:, :-num_gates], *epilogue), qkvg[:, -num_gates:]
        if qk_norms is None:
            weight = Weight(self.weight, self.weight_scale, self.block_n, self.packed)
            norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return self.ops.qkv_linear(x, weight, self.bias, norm_weight, eps, epilogue), None
        qkv, (q_norm, k_norm) = super().forward(x, norm), qk_norms
        mean_squares = None
        if self.tp.size > 1:  # fp32 [2, T], of q and of k over the heads of all ranks
            q, k, _ = qkv.split([shard.num_rows for shard in self.shards.values()], dim=1)
            # replicas of a KV head count once each, in the sum and in the number of ranks
            means = torch.stack([x.float().square().mean(-1) for x in (q, k)])
            mean_squares = self.tp.all_reduce(means) / self.tp.size
        qkv = self.ops.qk_rms_norm(qkv, q_norm.weight, k_norm.weight, q_norm.eps, mean_squares)
        return self.ops.norm_rope_store(qkv, *epilogue), None


class RowParallelLinear(ReplicatedLinear):
    """Input features sharded over ranks: this rank holds ``input_size / size`` of them, and computes its partial sum.

    Bias and residual are rank 0's. ``scale`` multiplies weight and bias at load. ``head_order``: of the input features
    of a head, see ``HeadOrders.v``.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TPGroup = SINGLE_RANK,
                 fp8_block: int | None = None, scale: float = 1.0, head_order: list[int] | None = None):
        super().__init__(input_size // tp.size, output_size, bias, tp, fp8_block)
        self.scale, self.head_order = scale, head_order

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        if param.dim() == 1:  # the bias is added once, by rank 0
            copy_shard(param, loaded)
            if self.tp.rank > 0:
                param.zero_()
        else:
            order = None if param is self.weight_scale else self.head_order
            copy_shard(param, loaded, 1, self.tp.rank, self.tp.size, order)
        if self.scale != 1 and param.dtype != E4M3:  # of an FP8 weight, its scale
            param.mul_(self.scale)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None, act: str | None = None,
                residual: torch.Tensor | None = None) -> torch.Tensor:
        """As ``ReplicatedLinear.forward``, x [T, input_size / size]."""
        return super().forward(x, norm, act, residual if self.tp.rank == 0 else None)

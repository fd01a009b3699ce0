"""Linear layers, sharded over tensor-parallel ranks.

    ColumnParallel  shards output features: weight[rank * N/size : (rank+1) * N/size]
    RowParallel     shards input features: the layer's output is the sum of the ranks' outputs

No layer communicates for it: ``models/decoder.py`` sums up, once for the mixer and once for the MLP. A layer's
``weight_loader(param, loaded, shard_id)`` copies this rank's shard of a checkpoint tensor.

A layer takes the neighbouring operations as arguments, so that kernels can fuse them: the RMSNorm before it, and after
it the gated activation, the residual addition, or QK-norm + RoPE + KV store. ``kernels/linear/dispatch.py`` chooses.

T packed tokens, N output features.
"""

from typing import Any

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.linear.reference import QKVEpilogue, Weight
from nanovllm.layers.layernorm import RMSNorm, norm_all_heads
from nanovllm.layers.weight_loader import HeadOrders, Shards, copy_bias, copy_shard, multiply
from nanovllm.quantization.weights import add_weight, new_bias, shared_rows
from nanovllm.utils.checkpoint_tensor import CheckpointTensor


class ReplicatedLinear(nn.Module):
    """``y = x W^T (+ b)``, the same on every rank. ``precision``: the scheme of ``add_weight``; None: 16 bits."""

    weight: nn.Parameter
    weight_scale: nn.Parameter | None
    packed: Any = None  # a copy of the weight, on the CPU (runner/packing.py)

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TPGroup = SINGLE_RANK,
                 precision: Any = None):
        super().__init__()
        self.tp, self.ops = tp, kernels.select()
        self.zero_order_factor = add_weight(self, "weight", output_size, input_size, precision)
        self.block_n = shared_rows(precision, [output_size])
        self.register_parameter("bias", new_bias(output_size) if bias else None)
        for param in self.parameters():
            param.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: Any = None) -> None:
        copy_shard(param, loaded)

    def as_weight(self) -> Weight:
        return Weight(self.weight, self.weight_scale, self.block_n, self.packed, *self.zero_order_factor)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None, act: str | None = None,
                residual: torch.Tensor | None = None, reader: "ReplicatedLinear | None" = None,
                allow_split_k: bool = True) -> torch.Tensor:
        """x [T, input_size] -> residual + act(norm(x) W^T + b), [T, output_size].

        With ``act``, "silu" or "gelu_tanh", W has gate and up, and act(gate) * up is half as wide. ``reader``, the only
        layer that reads the result, may get e4m3 Tokens. With ``residual``, which rank 0 adds, the result may be
        ``SplitKPartials``, if allowed: the next RMSNorm adds them up, and then they serve as the next ``residual``.
        """
        residual = residual if self.tp.rank == 0 else None
        norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        allow_split_k = allow_split_k and self.tp.size == 1  # an all-reduce needs the reduced sum
        weight, to_read = self.as_weight(), None if reader is None else reader.as_weight()
        return self.ops.fused_linear(x, weight, self.bias, norm_weight, eps, residual, act, allow_split_k, to_read)


class ColumnParallelLinear(ReplicatedLinear):
    """Output features sharded over ranks: this rank holds ``output_size / size`` of them."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TPGroup = SINGLE_RANK,
                 precision: Any = None):
        super().__init__(input_size, output_size // tp.size, bias, tp, precision)

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: Any = None) -> None:
        copy_shard(param, loaded, 0, self.tp.rank, self.tp.size)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input as a single product; ``shard_id`` is the layer's index."""

    def __init__(self, input_size: int, output_sizes: list[int] | Shards, bias: bool = False,
                 tp: TPGroup = SINGLE_RANK, precision: Any = None):
        self.shards = Shards.of(output_sizes, tp.rank, tp.size)
        super().__init__(input_size, sum(self.shards.sizes) * tp.size, bias, tp, precision)
        self.block_n = shared_rows(precision, self.shards.sizes)

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: Any = None) -> None:
        self.shards.load(param, loaded, shard_id)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections as a single product; ``shard_id`` is "q", "k" or "v".

    ``orders``: order of the dimensions of each head; ``head_dim`` includes padding. ``has_gate``: the checkpoint's
    q_proj has a gate after the query of each head. Here all gates come last. ``k_is_v``: it has no v_proj, and k_proj
    is used for both. Without KV heads the layer has q alone.
    """

    def __init__(self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool = False,
                 tp: TPGroup = SINGLE_RANK, precision: Any = None, orders: HeadOrders = HeadOrders(),
                 has_gate: bool = False, k_is_v: bool = False):
        shards = Shards.of_heads(head_dim, num_heads, num_kv_heads, tp.rank, tp.size, orders, has_gate, k_is_v)
        super().__init__(hidden_size, shards, bias, tp, precision)
        for param in self.parameters():  # the parts that a checkpoint stores
            param.shard_ids = "qk"[: 1 + (num_kv_heads > 0)] if k_is_v or not num_kv_heads else "qkv"  # type: ignore[attr-defined]
        self.head_dim, self.orders = head_dim, orders
        q_size, kv_size, _, *gates = shards.sizes
        self.num_heads, self.num_kv_heads, self.num_gates = q_size // head_dim, kv_size // head_dim, sum(gates)
        if orders.qk is not None and self.block_n > 1 and precision.block % head_dim:  # its rows change blocks
            self.block_n = 1

    def forward(self, x: torch.Tensor, norm: RMSNorm | None, epilogue: QKVEpilogue,  # type: ignore[override]
                qk_norms: tuple[RMSNorm, RMSNorm] | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [T, hidden_size] -> q [T, H, D] of norm(x) W^T after QK-norm and RoPE, and the gate [T, H * D] or None.

        k and v go to the KV cache. ``qk_norms`` are norms over all heads; norms of each head are in the epilogue.
        """
        if qk_norms is None and not self.num_gates:
            norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return self.ops.qkv_linear(x, self.as_weight(), self.bias, norm_weight, eps, epilogue), None
        qkv, gate = super().forward(x, norm), None
        if self.num_gates:
            qkv, gate = qkv[:, : -self.num_gates], qkv[:, -self.num_gates :]
        if qk_norms is not None:
            qkv = norm_all_heads(qkv, *qk_norms, self.tp)
        return self.ops.norm_rope_store(qkv, *epilogue), gate


class RowParallelLinear(ReplicatedLinear):
    """Input features sharded over ranks: this rank holds ``input_size / size`` of them, and computes its partial sum.

    ``scale`` multiplies weight and bias at load. ``head_order``: order of a head's input features, ``HeadOrders.v``.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TPGroup = SINGLE_RANK,
                 precision: Any = None, scale: float = 1.0, head_order: list[int] | None = None):
        super().__init__(input_size // tp.size, output_size, bias, tp, precision)
        self.scale, self.head_order = scale, head_order

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: Any = None) -> None:
        if param.dim() == 1:
            copy_bias(param, loaded, self.tp.rank)
        else:
            order = None if param is self.weight_scale else self.head_order
            copy_shard(param, loaded, 1, self.tp.rank, self.tp.size, order)
        multiply(param, self.scale)

"""Linear layers and how their weights are sharded over tensor-parallel ranks.

A layer's ``weight_loader(param, loaded, shard_id)`` copies this rank's shard of a checkpoint tensor. ``loaded`` has a
``.shape`` and can be sliced, so only the shard is read from disk.

    ColumnParallel  shards output features: weight[rank * N/size : (rank+1) * N/size]; no communication
    RowParallel     shards input features; the ranks' outputs are all-reduced

A layer takes the neighbouring operations as arguments, so that kernels can fuse them: the RMSNorm before it, and after
it the gated activation, the residual addition, or QK-norm + RoPE + KV store. ``kernels/linear/dispatch.py`` chooses.

Legend: T packed tokens, N output features.
"""

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.linear.reference import QKVEpilogue, Weight
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.utils.loader import CheckpointTensor, copy_checked


class ReplicatedLinear(nn.Module):
    """``y = x W^T (+ b)``, the same on every rank. Weight [output_size, input_size] as in ``nn.Linear``."""

    weight_scale: nn.Parameter | None  # of a quantized weight; set by a quantization scheme

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TPGroup = SINGLE_RANK):
        super().__init__()
        self.tp = tp
        self.ops = kernels.select()
        self.weight = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        self.register_parameter("weight_scale", None)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False)
            self.bias.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        copy_checked(param, loaded)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None, act_fn: SiluAndMul | None = None,
                residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, input_size] -> residual + act_fn(norm(x) W^T + b), [T, output_size]; half as wide with ``act_fn``.

        With ``residual`` the result may be unreduced ``SplitKPartials``. Only an RMSNorm, which reduces them, may read
        it; after that it serves as the next ``residual``.
        """
        return self.ops.fused_linear(
            x,
            Weight(self.weight, self.weight_scale),
            self.bias,
            norm_weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            residual=residual,
            act_mul=None if act_fn is None else act_fn.act,
            allow_split_k=self.tp.size == 1,  # an all-reduce needs the reduced sum
        )


class ColumnParallelLinear(ReplicatedLinear):
    """Output features sharded over ranks: this rank holds ``output_size / size`` of them."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TPGroup = SINGLE_RANK):
        super().__init__(input_size, output_size // tp.size, bias, tp)

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        copy_checked(param, loaded, dim=0, start=self.tp.rank * param.shape[0], total=self.tp.size)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input as a single product; ``shard_id`` is the layer's index."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False, tp: TPGroup = SINGLE_RANK):
        super().__init__(input_size, sum(output_sizes), bias, tp)
        self.output_sizes = output_sizes

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: int) -> None:  # type: ignore[override]
        size = self.tp.size
        offset, n = sum(self.output_sizes[:shard_id]) // size, self.output_sizes[shard_id] // size
        copy_checked(param[offset : offset + n], loaded, dim=0, start=self.tp.rank * n, total=size)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as a single product; ``shard_id`` is "q", "k" or "v".

    Heads are sharded over ranks. With fewer KV heads than ranks, ``size / num_kv_heads`` neighbouring ranks hold a
    replica of the same KV head.
    """

    def __init__(self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool = False,
                 tp: TPGroup = SINGLE_RANK):
        self.head_dim = head_dim
        self.num_heads = num_heads // tp.size  # of this rank
        self.num_kv_heads = max(1, num_kv_heads // tp.size)
        self.kv_head_replicas = max(1, tp.size // num_kv_heads)
        output_size = (self.num_heads + 2 * self.num_kv_heads) * head_dim * tp.size
        super().__init__(hidden_size, output_size, bias, tp)

    def forward(self, x: torch.Tensor, norm: RMSNorm, epilogue: QKVEpilogue) -> torch.Tensor:  # type: ignore[override]
        """x [T, hidden_size] -> q [T, H, D] of norm(x) W^T after QK-norm and RoPE; k and v go to the KV cache."""
        weight = Weight(self.weight, self.weight_scale)
        return self.ops.qkv_linear(x, weight, self.bias, norm.weight, norm.eps, epilogue)

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: str) -> None:  # type: ignore[override]
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        offset, n = {"q": (0, q_size), "k": (q_size, kv_size), "v": (q_size + kv_size, kv_size)}[shard_id]
        replicas = 1 if shard_id == "q" else self.kv_head_replicas
        start = self.tp.rank // replicas * n
        copy_checked(param[offset : offset + n], loaded, dim=0, start=start, total=self.tp.size // replicas)


class RowParallelLinear(ReplicatedLinear):
    """Input features sharded over ranks: this rank holds ``input_size / size`` of them; outputs are all-reduced."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TPGroup = SINGLE_RANK):
        super().__init__(input_size // tp.size, output_size, bias, tp)

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        if param.dim() == 1:  # the bias is added once, by rank 0
            copy_checked(param, loaded)
            if self.tp.rank > 0:
                param.zero_()
        else:
            copy_checked(param, loaded, dim=1, start=self.tp.rank * param.shape[1], total=self.tp.size)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None, act_fn: SiluAndMul | None = None,
                residual: torch.Tensor | None = None) -> torch.Tensor:
        """As ``ReplicatedLinear.forward``, x [T, input_size / size]; rank 0 adds the residual before the all-reduce."""
        y = super().forward(x, norm, act_fn, residual if self.tp.rank == 0 else None)
        return y if self.tp.size == 1 else self.tp.all_reduce(y)

"""Linear layers and how their weights are split over tensor-parallel ranks.

A layer's ``weight_loader(param, loaded, shard_id)`` copies this rank's part of a checkpoint tensor.
``loaded`` is anything with ``.shape`` that can be sliced, so that only that part is read from disk.

    ColumnParallel  splits output features: weight rows [rank * N/size, (rank+1) * N/size); no exchange
    RowParallel     splits input features: weight columns; the ranks' outputs are added up

A product takes its neighbours along: the norm before it, the gated activation or the residual
addition after it, or what the heads of q, k and v need. Much of that is done by one kernel, or with
the next product's norm (``kernels/linear.py``); elsewhere cuBLAS and the separate kernels do.
"""

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.linear.reference import QKVEpilogue
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.utils.loader import CheckpointTensor, copy_checked


class ReplicatedLinear(nn.Module):
    """``y = x W^T (+ b)``, the same on every rank. Weight [output_size, input_size] as in ``nn.Linear``."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, group: TPGroup = SINGLE_RANK):
        super().__init__()
        self.group = group
        self.ops = kernels.select()
        self.weight = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False)
            self.bias.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        copy_checked(param, loaded)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None, act_fn: SiluAndMul | None = None,
                residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, input_size] -> residual + act_fn(norm(x) W^T + b), [T, output_size], half as wide with ``act_fn``.

        With ``residual`` the result is a residual stream, of which the sum may still have to be made: it is for norms,
        and for the residual of a layer behind a norm of it.
        """
        return self.ops.fused_linear(
            x,
            self.weight,
            self.bias,
            norm_weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            residual=residual,
            silu_mul=act_fn is not None,
            allow_split_k=self.group.size == 1,  # ranks add up the whole
        )


class ColumnParallelLinear(ReplicatedLinear):
    """Output features split over ranks: this rank holds ``output_size / size`` rows."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, group: TPGroup = SINGLE_RANK):
        super().__init__(input_size, output_size // group.size, bias, group)

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        copy_checked(param, loaded, dim=0, start=self.group.rank * param.shape[0], total=self.group.size)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers that read the same input, as one product; shard_id is the layer's index."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False, group: TPGroup = SINGLE_RANK):
        super().__init__(input_size, sum(output_sizes), bias, group)
        self.output_sizes = output_sizes

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: int) -> None:  # type: ignore[override]
        size = self.group.size
        offset, rows = sum(self.output_sizes[:shard_id]) // size, self.output_sizes[shard_id] // size
        copy_checked(param[offset : offset + rows], loaded, dim=0, start=self.group.rank * rows, total=size)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as one product; shard_id is "q", "k" or "v".

    QKVEpilogue are split over ranks. With fewer KV heads than ranks, ``size / num_kv_heads`` neighbouring
    ranks hold the same KV head.
    """

    def __init__(self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool = False,
                 group: TPGroup = SINGLE_RANK):
        self.head_dim = head_dim
        self.num_heads = num_heads // group.size  # of this rank
        self.num_kv_heads = max(1, num_kv_heads // group.size)
        self.ranks_per_kv_head = max(1, group.size // num_kv_heads)
        rows = (self.num_heads + 2 * self.num_kv_heads) * head_dim
        super().__init__(hidden_size, rows * group.size, bias, group)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, norm: RMSNorm, heads: QKVEpilogue, pages_only: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """x [T, hidden_size] -> norm(x) W^T, its heads normed, rotated and stored: q [T, H, D], k and v [T, K, D].

        With ``pages_only`` k and v may be None: they are in the pages.
        """
        return self.ops.qkv_linear(x, self.weight, self.bias, norm.weight, norm.eps, heads, pages_only)

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: str) -> None:  # type: ignore[override]
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        offset, rows = {"q": (0, q_rows), "k": (q_rows, kv_rows), "v": (q_rows + kv_rows, kv_rows)}[shard_id]
        replicas = 1 if shard_id == "q" else self.ranks_per_kv_head
        start = self.group.rank // replicas * rows
        copy_checked(param[offset : offset + rows], loaded, dim=0, start=start, total=self.group.size // replicas)


class RowParallelLinear(ReplicatedLinear):
    """Input features split over ranks: this rank holds ``input_size / size`` columns; outputs are added up."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, group: TPGroup = SINGLE_RANK):
        super().__init__(input_size // group.size, output_size, bias, group)

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        if param.dim() == 1:  # the bias is added once, by rank 0
            copy_checked(param, loaded)
            if self.group.rank > 0:
                param.zero_()
        else:
            copy_checked(param, loaded, dim=1, start=self.group.rank * param.shape[1], total=self.group.size)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None, act_fn: SiluAndMul | None = None,
                residual: torch.Tensor | None = None) -> torch.Tensor:
        """As above, with x [T, input_size / size]; the ranks' products are added up, the residual once, by rank 0."""
        return self.group.all_reduce(super().forward(x, norm, act_fn, residual if self.group.rank == 0 else None))

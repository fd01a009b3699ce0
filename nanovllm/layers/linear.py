"""Linear layers and how their weights are sharded over tensor-parallel ranks.

A layer's ``weight_loader(param, loaded, shard_id)`` copies this rank's shard of a checkpoint tensor. ``loaded`` is
lazy: only the shard is read from disk.

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
from nanovllm.kernels.fp8 import E4M3
from nanovllm.kernels.linear.reference import QKVEpilogue, Weight
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.utils.fp8 import new_weight, shared_rows
from nanovllm.utils.loader import CheckpointTensor, copy_checked, copy_heads, split_rows


class ReplicatedLinear(nn.Module):
    """``y = x W^T (+ b)``, the same on every rank. Weight [output_size, input_size] as in ``nn.Linear``.

    ``fp8_block``: an FP8 weight has a scale for each block of so many output features and input channels; 0: for each
    output feature.
    """

    weight_scale: nn.Parameter | None

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
        copy_checked(param, loaded)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None, act: str | None = None,
                residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, input_size] -> residual + act(norm(x) W^T + b), [T, output_size].

        With ``act``, "silu" or "gelu_tanh", W has gate and up, and act(gate) * up is half as wide.
        With ``residual`` the result may be unreduced ``SplitKPartials``. Only an RMSNorm, which reduces them, may read
        it; after that it serves as the next ``residual``.
        """
        return self.ops.fused_linear(
            x,
            Weight(self.weight, self.weight_scale, self.block_n),
            self.bias,
            norm_weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            residual=residual,
            act_mul=act,
            allow_split_k=self.tp.size == 1,  # an all-reduce needs the reduced sum
        )


class ColumnParallelLinear(ReplicatedLinear):
    """Output features sharded over ranks: this rank holds ``output_size / size`` of them."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TPGroup = SINGLE_RANK,
                 fp8_block: int | None = None):
        super().__init__(input_size, output_size // tp.size, bias, tp, fp8_block)

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        copy_checked(param, loaded, dim=0, start=self.tp.rank * param.shape[0], total=self.tp.size)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input as a single product; ``shard_id`` is the layer's index."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False, tp: TPGroup = SINGLE_RANK,
                 fp8_block: int | None = None):
        super().__init__(input_size, sum(output_sizes), bias, tp, fp8_block)
        self.output_sizes = output_sizes
        self.block_n = shared_rows(fp8_block, [size // tp.size for size in output_sizes])

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: int | None) -> None:  # type: ignore[override]
        if shard_id is None:  # merged in the checkpoint too
            for i, part in enumerate(split_rows(loaded, self.output_sizes)):
                self.weight_loader(param, part, i)
            return
        size = self.tp.size
        offset, n = sum(self.output_sizes[:shard_id]) // size, self.output_sizes[shard_id] // size
        copy_checked(param[offset : offset + n], loaded, dim=0, start=self.tp.rank * n, total=size)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as a single product; ``shard_id`` is "q", "k" or "v".

    Heads are sharded over ranks. With fewer KV heads than ranks, ``size / num_kv_heads`` neighbouring ranks hold a
    replica of the same KV head. ``head_order``: of the dimensions of each head of Q and K, see ``rotary_embedding.py``;
    ``v_order``: of V. ``head_dim`` includes the padding.
    """

    def __init__(self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool = False,
                 tp: TPGroup = SINGLE_RANK, head_order: list[int] | None = None, v_order: list[int] | None = None,
                 fp8_block: int | None = None):
        self.head_dim, self.head_order, self.v_order = head_dim, head_order, v_order
        self.num_heads = num_heads // tp.size  # of this rank
        self.num_kv_heads = max(1, num_kv_heads // tp.size)
        self.kv_head_replicas = max(1, tp.size // num_kv_heads)
        self.q_shard = tp.rank, tp.size
        self.kv_shard = tp.rank // self.kv_head_replicas, tp.size // self.kv_head_replicas
        output_size = (self.num_heads + 2 * self.num_kv_heads) * head_dim * tp.size
        super().__init__(hidden_size, output_size, bias, tp, fp8_block)
        parts = [self.num_heads * head_dim, self.num_kv_heads * head_dim]
        if head_order is not None and (fp8_block or 0) % head_dim:  # a head's rows would go to other blocks
            parts = [1]
        self.block_n = shared_rows(fp8_block, parts)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None, epilogue: QKVEpilogue,  # type: ignore[override]
                qk_norms: tuple[RMSNorm, RMSNorm] | None = None) -> torch.Tensor:
        """x [T, hidden_size] -> q [T, H, D] of norm(x) W^T after QK-norm and RoPE; k and v go to the KV cache.

        ``qk_norms`` are those over all heads at once; those of each head are in the epilogue.
        """
        if qk_norms is None:
            weight, norm_weight, eps = Weight(self.weight, self.weight_scale, self.block_n), None, 0.0
            if norm is not None:
                norm_weight, eps = norm.weight, norm.eps
            return self.ops.qkv_linear(x, weight, self.bias, norm_weight, eps, epilogue)
        qkv, (q_norm, k_norm) = super().forward(x, norm), qk_norms
        mean_squares = None if self.tp.size == 1 else self._mean_squares(qkv)
        qkv = self.ops.qk_rms_norm(qkv, q_norm.weight, k_norm.weight, q_norm.eps, mean_squares)
        return self.ops.norm_rope_store(qkv, *epilogue)

    def _mean_squares(self, qkv: torch.Tensor) -> torch.Tensor:
        """fp32 [2, T], of q and of k over the heads of all ranks."""
        q_size, k_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, _ = qkv.split([q_size, k_size, k_size], dim=1)
        # replicas of a KV head count once each, in the sum and in the number of ranks
        means = torch.stack([x.float().square().mean(-1) for x in (q, k)])
        return self.tp.all_reduce(means) / self.tp.size

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: str | None) -> None:  # type: ignore[override]
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if shard_id is None:  # merged in the checkpoint too
            sizes = [q_size * self.q_shard[1], kv_size * self.kv_shard[1], kv_size * self.kv_shard[1]]
            if self.v_order is not None:  # without the padding
                sizes = [size // self.head_dim * (max(self.v_order) + 1) for size in sizes]
            for part, name in zip(split_rows(loaded, sizes), "qkv", strict=True):
                self.weight_loader(param, part, name)
            return
        offset, n = {"q": (0, q_size), "k": (q_size, kv_size), "v": (q_size + kv_size, kv_size)}[shard_id]
        shard, num_shards = self.q_shard if shard_id == "q" else self.kv_shard
        order = self.v_order if shard_id == "v" else self.head_order
        copy_heads(param[offset : offset + n], loaded, order, 0, shard, num_shards)


class RowParallelLinear(ReplicatedLinear):
    """Input features sharded over ranks: this rank holds ``input_size / size`` of them; outputs are all-reduced.

    Without ``all_reduce`` the caller sums up over the ranks. ``scale`` multiplies weight and bias at load.
    ``head_order``: of the input features of a head, as ``v_order`` of the QKV projection.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False, tp: TPGroup = SINGLE_RANK,
                 all_reduce: bool = True, scale: float = 1.0, fp8_block: int | None = None,
                 head_order: list[int] | None = None):
        super().__init__(input_size // tp.size, output_size, bias, tp, fp8_block)
        self.all_reduce, self.scale, self.head_order = all_reduce, scale, head_order

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        if param.dim() == 1:  # the bias is added once, by rank 0
            copy_checked(param, loaded)
            if self.tp.rank > 0:
                param.zero_()
        else:
            order = None if param is self.weight_scale else self.head_order
            copy_heads(param, loaded, order, 1, self.tp.rank, self.tp.size)
        if self.scale != 1 and param.dtype != E4M3:  # of an FP8 weight, its scale
            param.mul_(self.scale)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None, act: str | None = None,
                residual: torch.Tensor | None = None, leaves_sum: bool = False) -> torch.Tensor:
        """As ``ReplicatedLinear.forward``, x [T, input_size / size]; rank 0 adds the residual before the all-reduce."""
        y = super().forward(x, norm, act, residual if self.tp.rank == 0 else None)
        return self.tp.all_reduce(y) if self.all_reduce and self.tp.size > 1 and not leaves_sum else y

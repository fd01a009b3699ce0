"""Copies a checkpoint tensor into a parameter: the parts that a layer's ``weight_loader`` is made of.

Owns the rows of merged layers, this rank's shard of them, and the order of a head's dimensions. The layer says how it
is sharded over ranks; ``models/loader.py`` finds the parameter.
"""

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from nanovllm.utils.checkpoint_tensor import CheckpointTensor, check_dtype


def split_rows(loaded: CheckpointTensor, sizes: list[int]) -> list[CheckpointTensor]:
    """The parts of a tensor that has several layers' rows one after the other.

    Raises:
        CheckpointError: the tensor has another number of rows.
    """
    ends = accumulate(sizes)
    return [loaded.rows(end - size, size, sum(sizes)) for size, end in zip(sizes, ends, strict=True)]


def grouped_rows(loaded: CheckpointTensor, sizes: list[int]) -> list[CheckpointTensor]:
    """The parts of a tensor whose rows are stored in groups (heads): each has ``sizes[i]`` rows of part i.

    Only whole groups of a part may be read.
    """
    total = sum(sizes)
    num_groups = loaded.shape[0] // total
    loaded.fit([num_groups * total, *loaded.shape[1:]])

    @cache  # every part reads the same groups
    def groups(first: int, last: int) -> torch.Tensor:
        return loaded.read((slice(first * total, last * total),)).unflatten(0, (-1, total))

    def part(offset: int, size: int) -> CheckpointTensor:
        def read(index: tuple[slice, ...]) -> torch.Tensor:
            start, stop, _ = index[0].indices(num_groups * size)
            assert start % size == stop % size == 0
            rows = groups(start // size, stop // size)[:, offset : offset + size].flatten(0, 1)
            return rows[(slice(None), *index[1:])]

        return CheckpointTensor(loaded.name, [num_groups * size, *loaded.shape[1:]], read)

    return [part(end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]


class HeadOrders(NamedTuple):
    """Order of the dimensions of a checkpoint's heads here, -1 for padding; None: unchanged. See ``head_orders``."""

    qk: list[int] | None = None  # order for Q and K
    v: list[int] | None = None  # order for V, and for the output projection's input


class Shard(NamedTuple):
    """This rank's rows of a checkpoint tensor: part ``part`` of ``total``, the dimensions of its heads in ``order``."""

    num_rows: int
    part: int
    total: int
    order: list[int] | None = None
    scale: float = 1.0  # multiplies the rows at load

    @property
    def place(self) -> tuple[int, int]:
        return self.part, self.total

    def num_rows_in_checkpoint(self) -> int:
        head_dim, padded = (max(self.order) + 1, len(self.order)) if self.order else (1, 1)
        return self.num_rows * self.total // padded * head_dim


COPIES = -1


class Shards(dict[Any, Shard]):
    """This rank's rows of each part of a merged layer, by shard id, in the order of the parameter."""

    def __init__(self, shards: dict[Any, Shard], joined: dict[Any, tuple[tuple, int]] | None = None):
        super().__init__(shards)
        # Shard id of a checkpoint tensor that holds several parts -> (their shard ids, number of groups). The parts'
        # rows take turns, group by group (head by head); 0 groups: one part after the other; COPIES: all are equal.
        self.joined = {None: (tuple(shards), 0)} | (joined or {})

    @classmethod
    def of(cls, sizes: "list[int] | Shards", rank: int, size: int) -> "Shards":
        """Equal shards of parts with ``sizes`` rows over all ranks."""
        if isinstance(sizes, Shards):
            return sizes
        return cls({i: Shard(num_rows // size, rank, size) for i, num_rows in enumerate(sizes)})

    @classmethod
    def of_heads(cls, head_dim: int, num_heads: int, num_kv_heads: int, rank: int, size: int, orders: HeadOrders,
                 has_gate: bool, k_is_v: bool = False) -> "Shards":
        """Heads of "q", "k" and "v", sharded over ranks. The rows of a "gate" follow each head's "q".

        With fewer KV heads than ranks, ``size / num_kv_heads`` neighbouring ranks hold a replica of the same KV head.
        """
        replicas = max(1, size // max(1, num_kv_heads))
        q = Shard(num_heads // size * head_dim, rank, size, orders.qk)
        k = Shard(-(-num_kv_heads // size) * head_dim, rank // replicas, size // replicas, orders.qk)
        shards = {"q": q, "k": k, "v": k._replace(order=orders.v)}
        if k_is_v:
            return cls(shards, {"k": (("k", "v"), COPIES)})
        if not has_gate:
            return cls(shards)
        return cls(shards | {"gate": q._replace(order=orders.v)}, {"q": (("q", "gate"), num_heads)})

    @property
    def sizes(self) -> list[int]:
        """Rows of each part."""
        return [shard.num_rows for shard in self.values()]

    def load(self, param: torch.Tensor, loaded: CheckpointTensor, shard_id: Any = None) -> None:
        """Copy this rank's rows of a part, or of the parts that ``loaded`` holds."""
        names, num_groups = self.joined.get(shard_id, ((shard_id,), 0))
        tensors = [loaded] * len(names)
        if len(names) > 1 and num_groups != COPIES:
            sizes = [self[name].num_rows_in_checkpoint() for name in names]
            if num_groups:
                whole = loaded.fit([sum(sizes), *param.shape[1:]])  # FP8 scales: of each row
                tensors = grouped_rows(whole, [size // num_groups for size in sizes])
            else:
                tensors = split_rows(loaded, sizes)
        rows = dict(zip(self, param.split(self.sizes), strict=True))
        for name, tensor in zip(names, tensors, strict=True):
            _, part, total, order, scale = self[name]
            copy_shard(rows[name], tensor, 0, part, total, order)
            multiply(rows[name], scale)


def multiply(param: torch.Tensor, scale: float) -> None:
    """Scale a loaded weight, bias or weight scale. FP8 and integer codes stay: their scales are scaled instead."""
    if scale != 1 and param.is_floating_point() and param.dtype.itemsize > 1:
        param.mul_(scale)


def row_loader(part: int, total: int) -> Callable[..., None]:
    """The ``weight_loader`` of a parameter that has part ``part`` of ``total`` of a tensor's rows."""
    return lambda param, loaded, shard_id=None: copy_shard(param, loaded, 0, part, total)


def copy_bias(param: torch.Tensor, loaded: CheckpointTensor, rank: int) -> None:
    """Copy the bias of a sum over ranks, which rank 0 adds; it is 0 on the others."""
    copy_shard(param, loaded)
    if rank > 0:
        param.zero_()


def copy_shard(param: torch.Tensor, loaded: CheckpointTensor, dim: int = 0, part: int = 0, total: int = 1,
               order: list[int] | None = None) -> None:
    """Copy part ``part`` of the ``total`` equal parts that ``loaded`` has along ``dim`` into ``param``.

    Args:
        order: order of each head's dimensions along ``dim``, -1 for zeros that pad heads in ``param``. None:
            unchanged.

    Raises:
        CheckpointError: the tensor has another shape, or is not of floats; or one of tensor and ``param`` is FP8.
    """
    if order is None:
        size = param.shape[dim]
        whole = [*param.shape[:dim], size * total, *param.shape[dim + 1 :]]
        shard = loaded.fit(whole).read((slice(None),) * dim + (slice(part * size, (part + 1) * size),))
        check_dtype(shard, param.dtype, loaded.name)
        param.copy_(shard)
        return
    heads = param.unflatten(dim, (-1, len(order)))
    head_dim = max(order) + 1  # in the checkpoint: every dimension of its heads is in the order
    unordered = param.new_empty([*param.shape[:dim], heads.shape[dim] * head_dim, *param.shape[dim + 1 :]])
    copy_shard(unordered, loaded, dim, part, total)
    unordered = unordered.unflatten(dim, (-1, head_dim)).movedim(dim + 1, 0)  # [head_dim, ...]
    with_zeros = torch.cat((unordered, torch.zeros_like(unordered[:1])))
    heads.movedim(dim + 1, 0).copy_(with_zeros[order])

"""What the layers know of the other tensor-parallel ranks: who they are and how to add up with them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ParallelGroup:
    """One rank's view of its group. The default is the group of one, in which nothing is exchanged."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may work in place, use what is returned."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] of every rank -> [size, ...], the same on every rank."""
        if self.size == 1:
            return x.unsqueeze(0)
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(out, x.contiguous())
        return out


ALONE = ParallelGroup()

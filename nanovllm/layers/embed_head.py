"""Token embedding and output head, split over ranks by vocabulary: rank r owns ids [r * V/size, (r+1) * V/size)."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.utils.loader import CheckpointTensor, copy_checked


class VocabParallelEmbedding(nn.Module):
    """Token ids [T] -> embeddings [T, C]; each rank looks up its ids, the sum over ranks is whole."""

    def __init__(self, vocab_size: int, hidden_size: int, group: TPGroup = SINGLE_RANK):
        super().__init__()
        self.group = group
        self.vocab_start = group.rank * (vocab_size // group.size)
        self.weight = nn.Parameter(torch.empty(vocab_size // group.size, hidden_size), requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
        copy_checked(param, loaded, dim=0, start=self.vocab_start, total=self.group.size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.vocab_start
        mine = (local >= 0) & (local < self.weight.shape[0])
        x = F.embedding(local.where(mine, 0), self.weight)
        return self.group.all_reduce(x * mine.unsqueeze(-1))


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states [S, C] -> logits of this rank's ids [S, V/size]. May share its weight with the embedding."""

    def __init__(self, vocab_size: int, hidden_size: int, group: TPGroup = SINGLE_RANK):
        super().__init__(vocab_size, hidden_size, group)
        self.ops = kernels.select()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ops.fused_linear(hidden, self.weight)

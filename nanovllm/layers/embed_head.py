"""Token embedding and LM head, sharded by vocabulary: rank r owns ids [r * V/size, (r+1) * V/size)."""

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.linear.reference import Weight
from nanovllm.layers.weight_loader import row_loader


class VocabParallelEmbedding(nn.Module):
    """Token ids [T] -> embeddings [T, C]; each rank looks up its own ids, an all-reduce sums them up.

    ``scale``, rounded to the weights' dtype, multiplies the embeddings, not the weight: the LM head may share it.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TPGroup = SINGLE_RANK, scale: float = 1.0):
        super().__init__()
        self.scale = torch.tensor(scale, device="cpu").item()
        self.tp = tp
        self.ops = kernels.select()
        self.vocab_start = tp.rank * (vocab_size // tp.size)
        self.weight = nn.Parameter(torch.empty(vocab_size // tp.size, hidden_size), requires_grad=False)
        self.weight.weight_loader = row_loader(tp.rank, tp.size)  # type: ignore[attr-defined]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        vocab_start = None if self.tp.size == 1 else self.vocab_start
        return self.tp.all_reduce(self.ops.embed(input_ids, self.weight, vocab_start, self.scale))


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states [N, C] -> logits of this rank's ids [N, V/size]. May share its weight with the embedding.

    ``softcap``: logits x are softcap * tanh(x / softcap); 0: as they are.
    """

    packed: torch.Tensor | None = None  # a copy of the weight, on the CPU (runner/packing.py)

    def __init__(self, vocab_size: int, hidden_size: int, tp: TPGroup = SINGLE_RANK, softcap: float = 0.0):
        super().__init__(vocab_size, hidden_size, tp)
        self.softcap = softcap

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids i32[n] -> [n, C]."""
        return super().forward(token_ids)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.ops.fused_linear(hidden, Weight(self.weight, packed=self.packed))
        return self.ops.soft_cap(logits, self.softcap) if self.softcap else logits

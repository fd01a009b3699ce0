"""Copies of the beginnings of blocks on a CPU, before a prefill's forward pass."""

from typing import Any

from nanovllm.core import Batch, PrefillBatch
from nanovllm.messages.prefix_copies import PrefixMoves
from nanovllm.runner.launchers import DecodeLauncher
from nanovllm.runner.memory import BlockCopies
from nanovllm.runner.part import Rank
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.feature import Arrays, Tensors

MIN_COPIED_TOKENS = 16  # on a CPU a copy is cheaper than computing them


class PrefixCopies(BlockCopies):
    @classmethod
    def make(cls, rank: Rank, state: RequestState, decode: DecodeLauncher) -> "PrefixCopies | None":
        """None for models with recurrent layers: a copied partial block has no matching state."""
        return cls() if rank.device.type == "cpu" and rank.config.model_config.gated_delta is None else None

    def facts(self) -> dict[str, Any]:
        return {"min_copied_tokens": MIN_COPIED_TOKENS}

    def prepare(self, batch: Batch, arrays: Arrays) -> None:
        if isinstance(batch, PrefillBatch) and isinstance(batch.moves, PrefixMoves):
            self.put("prefix", batch.moves.prefix_copies, arrays)

    def write(self, batch: Batch, tensors: Tensors) -> None:
        self.copy("prefix", tensors)

    def finish(self, batch: Batch, tensors: Tensors) -> None:
        pass

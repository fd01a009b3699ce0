"""Whether a device copies the beginnings of blocks instead of computing them: a CPU does."""

from typing import Any

from nanovllm.runner.launchers import DecodeLauncher
from nanovllm.runner.part import Part, Rank
from nanovllm.runner.request_state import RequestState

MIN_COPIED_TOKENS = 16  # on a CPU a copy is cheaper than computing them


class PrefixCopies(Part):
    """Tells the engine to copy beginnings; ``BlockCopier`` does it."""

    @classmethod
    def make(cls, rank: Rank, state: RequestState, decode: DecodeLauncher) -> "PrefixCopies | None":
        """None for models with recurrent layers: a copied partial block has no matching state."""
        return cls() if rank.device.type == "cpu" and rank.config.model_config.recurrent is None else None

    def facts(self) -> dict[str, Any]:
        return {"min_copied_tokens": MIN_COPIED_TOKENS}

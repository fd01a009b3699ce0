"""The columns of new requests that sampling features read. Between core.py and sampling/."""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.core import Sequence


@dataclass(frozen=True)
class SamplingColumns:
    """Sampling parameters of the n sequences that get a request slot with a batch, and data that features need."""

    params: list[SamplingParams]
    is_constrained: list[bool]  # whether its tokens decide which token it may sample next
    has_processors: list[bool]  # whether functions of the user change its logits
    min_tokens_stop_ids: list[tuple[int, ...]]
    allowed_masks: list[np.ndarray | None]
    histories: list[np.ndarray | None]  # token ids int32 [num_tokens], where penalties count them

    @classmethod
    def of(cls, seqs: "ListLike[Sequence]") -> "SamplingColumns":
        params = [seq.sampling_params for seq in seqs]
        return cls(
            params,
            [each.is_constrained for each in params],
            [bool(each.logits_processors) for each in params],
            [seq.min_tokens_stop_ids for seq in seqs],
            [seq.allowed_mask for seq in seqs],
            [seq.tokens(0, seq.num_tokens) if seq.sampling_params.has_penalties else None for seq in seqs],
        )

    def __getstate__(self) -> dict[str, Any]:
        """State for other ranks: one object for equal parameters, without fields that only the host reads."""
        sent = {id(params): params for params in self.params}
        sent = {key: params.without_host_fields() for key, params in sent.items()}
        return {**vars(self), "params": [sent[id(params)] for params in self.params]}

"""One step's batch as the layers see it: positions, KV slots and attention metadata.

An immutable value, passed to the layers as an argument. Holds no token ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True)
class Context:
    """T packed tokens of S sequences, whose blocks are found in a table of R request slots.

    With ``cu_seqlens_q`` a sequence has several query tokens (prefill). Without, S = T and each has one: decode, or a
    short prefill under a CUDA graph, where every token is a sequence of its own that ends with it. With ``row_lens``
    a sequence has Q packed rows: its last token, a draft, and dead rows (verify step).
    """

    positions: torch.Tensor  # i32[T], places of the tokens in their sequences
    slot_mapping: torch.Tensor  # i32[T], KV slot of each token; -1 stores nothing
    req_indices: torch.Tensor  # i32[S], row of each sequence in block_tables
    context_lens: torch.Tensor  # i32[S], keys to attend, with the keys of this step
    block_tables: torch.Tensor  # i32[R, max_blocks]
    max_context: int  # upper bound of context_lens, known to the host
    cu_seqlens_q: torch.Tensor | None = None  # i32[S + 1], cumulative query tokens (prefill)
    cu_seqlens_k: torch.Tensor | None = None  # i32[S + 1], cumulative context_lens (prefill)
    max_seqlen_q: int = 1  # most query tokens of one sequence (prefill)
    # i64[N], tokens to sample from: the last of each of the first N sequences (prefill). None: all hidden states.
    logits_indices: torch.Tensor | None = None
    # A ``PrefixGroups`` of kernels/attention: sequences that share a prefix in a decode batch. None: no groups.
    prefix_groups: tuple[torch.Tensor, ...] | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # further arrays of a prefill, for some layers
    rope_rows: torch.Tensor | None = None  # i32[T], rows of the RoPE table; None: positions
    row_lens: torch.Tensor | None = None  # i32[S * Q], keys that each row attends (verify step); 0: a dead row

    @property
    def is_prefill(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def rope_positions(self) -> torch.Tensor:
        return self.positions if self.rope_rows is None else self.rope_rows

    def all_tokens(self) -> "Context":
        """The context for all layers but the last, which compute all tokens."""
        return self if self.logits_indices is None else replace(self, logits_indices=None)

    def last_tokens_only(self) -> "Context":
        """The tokens of ``logits_indices`` as single-query attention, for the last layer of a prefill.

        ``positions`` and ``slot_mapping`` keep all tokens: keys are rotated and stored by then.
        """
        assert self.logits_indices is not None
        n = len(self.logits_indices)
        return replace(
            self, req_indices=self.req_indices[:n], context_lens=self.context_lens[:n],
            cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=1, logits_indices=None,
        )  # fmt: skip

"""The verify step: a decode batch with drafts. Between engine/speculation and runner/drafts.py."""

from dataclasses import dataclass

import numpy as np

from nanovllm.core import DecodeBatch

VERIFY_ROWS = (4, 8)  # rows per sequence in a verify step: its last token and a draft
MAX_VERIFIED_SEQS = 16  # with more sequences in a step, products are no longer bound by the weights' bytes


@dataclass(frozen=True)
class VerifyBatch(DecodeBatch):
    """Compute the last token and the draft of every sequence, and sample the token after each: B sequences, Q rows."""

    drafts: np.ndarray  # int32 [B, Q - 1], guesses of the next tokens; -1 after a sequence's last guess

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        return 1 + self.drafts.shape[1]

    def num_accepted(self, token_ids: np.ndarray) -> np.ndarray:
        """Number of correct tokens of each draft, [B].

        Args:
            token_ids: int32 [B, Q], sampled after the last token and after each token of the draft. Up to the first
                that differs from its draft they are the tokens of plain steps.
        """
        return np.logical_and.accumulate(token_ids[:, :-1] == self.drafts, axis=1).sum(1)

    def part(self, rows: np.ndarray, columns: np.ndarray | int) -> DecodeBatch:
        """A plain batch of the tokens sampled at these places; several tokens of a sequence are in their order."""
        lengths = self.lengths[rows] + columns
        return DecodeBatch(self.req_indices[rows], self.seq_ids[rows], lengths, self.new_blocks[:0])

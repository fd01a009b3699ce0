"""The drafts of a verify step. Between engine/speculation and runner/drafts.py."""

from typing import NamedTuple

import numpy as np

VERIFY_ROWS = (4, 8)  # rows per sequence in a verify step: its last token and a draft
MAX_VERIFIED_SEQS = 16  # with more sequences in a step, products are no longer bound by the weights' bytes


class DraftTokens(NamedTuple):
    """Drafts of a decode batch. Its Q rows compute each sequence's last token and draft, and sample after each."""

    token_ids: np.ndarray  # int32 [B, Q - 1], guesses of the next tokens; -1 after a sequence's last guess

    def num_accepted(self, token_ids: np.ndarray) -> np.ndarray:
        """Number of correct tokens of each draft, [B].

        Args:
            token_ids: int32 [B, Q], sampled after the last token and after each token of the draft. Up to the first
                that differs from its draft they are the tokens of plain steps.
        """
        return np.logical_and.accumulate(token_ids[:, :-1] == self.token_ids, axis=1).sum(1)

"""Log-probabilities of a completion's tokens, gathered as it grows; see ``utils/packed_logprobs.py``."""

from collections.abc import Callable

import numpy as np

from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.outputs import LogprobsAt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.packed_logprobs import logprobs_at, trimmed


class SampleLogprobs:
    """Log-probabilities of one completion as it grows."""

    def __init__(self, params: SamplingParams, tokenizer: AsyncTokenizer):
        assert params.logprobs is not None
        self._num_logprobs, self._texts = params.logprobs, tokenizer.texts if params.detokenize else None
        self._rows: list[np.ndarray] = []
        self._totals = [0.0]  # sums of the log-probabilities of the first 0, 1, ... tokens

    def append(self, row: np.ndarray) -> None:
        self._rows.append(trimmed(row, self._num_logprobs))
        self._totals.append(self._totals[-1] + float(row[:1].view(np.float32)[0]))

    def between(self, start: int, stop: int, token_ids: list[int]) -> tuple[float, Callable[[], list[LogprobsAt]]]:
        """Sum of the log-probabilities of the first ``stop`` tokens, and a function that lists tokens [start, stop).

        ``token_ids``: theirs.
        """
        rows = self._rows[start:stop]
        return self._totals[stop], lambda: logprobs_at(np.array(rows), token_ids, self._texts)

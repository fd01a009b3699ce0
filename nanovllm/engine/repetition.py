"""Repetition detection: whether a completion ends in one pattern of tokens, several times in a row.

Knows nothing of sequences and text. The cost of a token does not grow with the completion.
"""

import numpy as np

from nanovllm.sampling_params import RepetitionDetectionParams, SamplingParams

REPETITION_DETECTED = "repetition_detected"  # value of stop_reason


class RepetitionDetector:
    """Reads one completion, a token at a time: O(max_pattern_size) each, vectorised over the pattern sizes p.

    ``_runs[p]`` counts how many of the last tokens equal the token p places before them. A pattern of p tokens stands
    k times at the end exactly where the run is p (k - 1) or longer.

    Args:
        params: of the request: ``repetition_detection``, and ``min_tokens``, the length from which on it counts.
        max_model_len: bounds the completion, as ``max_tokens`` does, and so the patterns that fit into it.
    """

    def __init__(self, params: SamplingParams, max_model_len: int):
        wanted = params.repetition_detection
        assert isinstance(wanted, RepetitionDetectionParams)
        max_tokens = min(params.max_tokens or 0, max_model_len)
        smallest = min(max(wanted.min_pattern_size, 1), max_tokens + 1)
        sizes = np.arange(smallest, min(wanted.max_pattern_size, max_tokens // wanted.min_count) + 1)
        self._runs, self._needed = np.zeros_like(sizes), sizes * min(wanted.min_count - 1, max_tokens)
        self._last = np.full(sizes.max(initial=0), -1)  # the last tokens, newest first
        self._before = self._last[smallest - 1 :]  # a view: for each p the token p places before the next
        self._num_early = params.min_tokens  # tokens to come that cannot end the text

    def update(self, token_id: int) -> bool:
        """Take in the next token; returns whether the completion ends in a repetition now."""
        self._runs += 1
        self._runs *= self._before == token_id
        self._last[1:] = self._last[:-1]
        self._last[:1] = token_id
        self._num_early -= 1
        return self._num_early <= 0 and bool((self._runs >= self._needed).any())

"""Log-probabilities of tokens, from packed rows to the dictionaries of an output.

A row is packed as by ``token_logprobs`` (sampling), int32 [2 + 2k]: log-probability and rank of the token itself, then
ids and log-probabilities of the k most probable ones.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from nanovllm.engine.detokenizer import decode_tokens
from nanovllm.engine.tokenizer import AsyncTokenizer
from nanovllm.outputs import Logprob, LogprobsAt
from nanovllm.readouts import Readout
from nanovllm.readouts.prompt_logprobs import PromptLogprobs, trimmed
from nanovllm.sampling_params import SamplingParams


class SampleLogprobs:
    """Log-probabilities of one completion as it grows."""

    def __init__(self, params: SamplingParams, tokenizer: AsyncTokenizer):
        assert params.logprobs is not None
        self._num_logprobs, self._tokenizer = params.logprobs, params.detokenize and tokenizer
        self._rows: list[np.ndarray] = []
        self._totals = [0.0]  # sums of the log-probabilities of the first 0, 1, ... tokens

    def append(self, row: np.ndarray) -> None:
        self._rows.append(trimmed(row, self._num_logprobs))
        self._totals.append(self._totals[-1] + float(row[:1].view(np.float32)[0]))

    def between(self, start: int, stop: int, token_ids: list[int]) -> tuple[float, Callable[[], list[LogprobsAt]]]:
        """Sum of the log-probabilities of the first ``stop`` tokens, and what makes the list of tokens [start, stop),
        whose ids are given.
        """
        rows = self._rows[start:stop]
        return self._totals[stop], lambda: logprobs_at(np.array(rows), token_ids, self._tokenizer)


def logprobs_at(rows: np.ndarray, token_ids: list[int], tokenizer: AsyncTokenizer | Literal[False]) -> list[LogprobsAt]:
    """One dict per token: the token itself, then the most probable ones.

    Args:
        rows: int32 [n, 2 + 2k].
        token_ids: [n].
        tokenizer: for ``decoded_token``.
    """
    if not token_ids:
        return []
    k = (rows.shape[1] - 2) // 2
    values = np.ascontiguousarray(rows).view(np.float32)
    chosen, ranks = values[:, 0].tolist(), rows[:, 1].tolist()
    top_ids, top = rows[:, 2 : 2 + k].tolist(), values[:, 2 + k :].tolist()
    text: dict[int, str | None] = {}
    if tokenizer and tokenizer.tokenizer is not None:
        distinct = sorted({*token_ids, *(i for ids in top_ids for i in ids)})
        text = dict(zip(distinct, decode_tokens(tokenizer.tokenizer, distinct), strict=True))
    result = []
    for token_id, logprob, rank, ids, logprobs in zip(token_ids, chosen, ranks, top_ids, top, strict=True):
        entry = {token_id: Logprob(logprob, rank, text.get(token_id))}
        for place, (i, value) in enumerate(zip(ids, logprobs, strict=True), 1):
            if i not in entry:
                entry[i] = Logprob(value, place, text.get(i))
        result.append(entry)
    return result


def prompt_logprobs(readout: Readout, prompt_ids: np.ndarray,
                    tokenizer: AsyncTokenizer | Literal[False]) -> Callable[[], list] | None:
    """Makes the list of a finished prompt, None for its first token; None if it has no log-probabilities."""
    if not isinstance(readout, PromptLogprobs) or readout.error is not None:
        return None

    def make() -> list:
        if not readout.chunks:  # a prompt of one token
            return [None]
        return [None, *logprobs_at(readout.packed(), prompt_ids[1:].tolist(), tokenizer)]

    return make

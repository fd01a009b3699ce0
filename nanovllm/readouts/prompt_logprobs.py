"""Log-probabilities of a prompt's tokens, or of given tokens after each of its prefixes (scores); host half."""

import math
import sys
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from nanovllm.outputs import LogprobsAt, Score
from nanovllm.readouts import Readout, ReadoutBatch, Wanted
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.packed_logprobs import Texts, logprobs_at, trimmed


@dataclass(frozen=True)
class ScoredRows(ReadoutBatch):
    """Tokens of a prefill whose log-probabilities are reported."""

    kind: ClassVar[str] = "prompt_logprobs"
    seq_ids: list[int]
    sizes: list[int]  # tokens of each sequence
    rows: np.ndarray  # int32 [sum(sizes)], packed tokens whose logits are scored
    token_ids: np.ndarray  # int32 [sum(sizes)], the tokens that the rows score
    num_top: int  # most alternatives that a sequence wants; -1: all

    def arrays(self) -> dict[str, np.ndarray]:
        return {"target_rows": self.rows, "target_ids": self.token_ids}

    def results(self, values: np.ndarray) -> Iterator[tuple[int, np.ndarray, bool]]:
        stop = 0
        for seq_id, size in zip(self.seq_ids, self.sizes, strict=True):
            start, stop = stop, stop + size
            of_seq = values[start:stop]
            yield seq_id, of_seq, bool(np.isfinite(of_seq[:, 0].view(np.float32)).all())


class PromptLogprobs(Readout):
    """Log-probabilities of tokens that the hidden states from position ``first`` on predict.

    Args:
        token_ids: int32 [n], the tokens after positions first, ..., first + n - 1.
        num_top: most probable alternatives reported with each; -1: all.
        before: ids of tokens before these, where a character of several tokens may begin.

    Attributes:
        chunks: rows of the chunks taken in so far, int32 [n, 2 + 2k] in all; see ``utils/packed_logprobs.py``.
    """

    subject = "logits"

    def __init__(self, token_ids: np.ndarray, first: int, num_top: int, before: ListLike[int] = ()):
        super().__init__(first, first + len(token_ids))
        self.token_ids, self.num_top, self._before = token_ids, num_top, before
        self.chunks: list[np.ndarray] = []

    @classmethod
    def wanted_by(cls, params: SamplingParams, prompt_ids: np.ndarray) -> "PromptLogprobs | None":
        """The readout of a request with ``prompt_logprobs``."""
        if params.prompt_logprobs is None:
            return None
        return cls(prompt_ids[1:].astype(np.int32), 0, params.prompt_logprobs, prompt_ids[:1].tolist())

    @classmethod
    def merge(cls, wanted: list[Wanted]) -> ScoredRows:
        found = [(each.readout, each.rows.start - each.readout.first_needed, len(each.rows)) for each in wanted]
        tops = [readout.num_top for readout, _, _ in found]
        return ScoredRows(
            [each.seq_id for each in wanted],
            [size for _, _, size in found],
            np.concatenate([np.arange(w.rows.start, w.rows.stop, dtype=np.int32) + w.offset for w in wanted]),
            np.concatenate([readout.token_ids[start : start + size] for readout, start, size in found]),
            -1 if -1 in tops else max(tops),
        )

    def add_results(self, values: np.ndarray) -> None:
        # trimmed here, because the prompt's next chunk may run with requests that want fewer
        self.chunks.append(trimmed(values, self.num_top))

    def output_fields(self, texts: Texts | None) -> dict[str, Any]:
        return {"prompt_logprobs": partial(self._listed, texts)} if self.error is None else {}

    def _listed(self, texts: Texts | None) -> list[LogprobsAt | None]:
        if not self.chunks:  # a prompt of one token
            return [None]
        rows = np.concatenate(self.chunks)
        return [None, *logprobs_at(rows, self.token_ids.tolist(), texts, True, self._before)]

    def perplexity(self) -> float:
        """Compute exp of the mean negative log-probability; NaN without any."""
        if self.error is not None or not self.chunks:
            return math.nan
        mean = -float(np.concatenate(self.chunks)[:, 0].view(np.float32).mean(dtype=np.float64))
        return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf

    def score(self) -> Score:
        if self.error is not None:
            n = len(self.token_ids)
            return Score([math.nan] * n, [False] * n, self.error)
        values = np.concatenate(self.chunks).view(np.float32)  # logprob, rank, best id, best logprob
        return Score(values[:, 0].tolist(), (values[:, 0] == values[:, 3]).tolist())

"""The mean of some hidden states of a prompt, for embeddings and classification; host half."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nanovllm.readouts import Readout, ReadoutBatch, Wanted

# kind of pooling -> positions whose hidden states are added up, in a prompt of n tokens
POOLING: dict[str, Callable[[int], tuple[int, int]]] = {
    "last": lambda n: (n - 1, n),
    "cls": lambda n: (0, 1),
    "mean": lambda n: (0, n),
}


@dataclass(frozen=True)
class PooledRows(ReadoutBatch):
    """Prompts of a prefill, P in all, whose hidden states are summed."""

    kind: ClassVar[str] = "pooled_state"
    seq_ids: list[int]  # [P]
    sizes: np.ndarray  # int32 [P], tokens of each sequence
    # int32 [sum(sizes)], packed tokens; or sequences of the batch, whose last tokens are read
    rows: np.ndarray
    needs_every_state: bool  # whether rows are packed tokens; else they are sequences

    def arrays(self) -> dict[str, np.ndarray]:
        if self.needs_every_state:
            return {"pooled_rows": self.rows, "pooled_sizes": self.sizes}
        return {"pooled_last": self.rows}  # indices of logits_indices

    def results(self, values: np.ndarray) -> Iterator[tuple[int, np.ndarray, bool]]:
        return zip(self.seq_ids, values, np.isfinite(values).all(axis=1).tolist(), strict=True)


class PooledState(Readout):
    """The mean hidden state of some positions of a prompt of ``num_tokens``. ``pooling``: of ``POOLING``."""

    subject = "hidden states"

    def __init__(self, pooling: str, num_tokens: int):
        first, end = POOLING[pooling](num_tokens)
        super().__init__(first, end)
        self._num_pooled, self._is_last = end - first, pooling == "last"
        self._sum: np.ndarray | None = None  # sum so far, fp32 [C]

    def takes_last(self, stop: int) -> bool:
        return self._is_last and stop == self._end

    @classmethod
    def merge(cls, wanted: list[Wanted]) -> PooledRows:
        of_last, rows = wanted[0].readout._is_last, list[int]()  # the kind is the checkpoint's, one for all
        for each in wanted:
            first, stop = each.rows.start + each.offset, each.rows.stop + each.offset
            rows += [each.place] if of_last else range(first, stop)
        sizes = np.fromiter((len(each.rows) for each in wanted), np.int32)
        return PooledRows([each.seq_id for each in wanted], sizes, np.array(rows, np.int32), not of_last)

    def add_results(self, values: np.ndarray) -> None:
        self._sum = values if self._sum is None else self._sum + values

    def mean(self) -> np.ndarray:
        """fp32 [C]."""
        assert self._sum is not None
        return self._sum / self._num_pooled

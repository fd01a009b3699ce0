"""The seam for results of a prompt besides tokens: prompt log-probabilities, pooled hidden states. Imports no torch.

A ``Readout`` hangs on a sequence. It names the positions whose hidden states it reads and gathers its results, chunk by
chunk. The readouts of a batch are merged by kind into ``ReadoutBatch``es, frozen messages in ``PrefillBatch.readouts``
that every rank receives. The device half of a kind is a reader (``runner/readers/``).

A new kind is one file here, with a readout and its message, and one reader there. It is made by a verb (``verbs/``), or
where a request's parameters ask for it (``READOUTS`` of ``engine/variants.py``). Knows neither queues nor devices.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np


class Wanted(NamedTuple):
    """The rows of one chunk of a prefill that its readout reads."""

    readout: Any  # a readout of the kind that merges it
    seq_id: int
    place: int  # place of its sequence in the batch
    rows: range  # positions in the prompt
    offset: int  # offset from a position to its packed token


class ReadoutBatch:
    """The rows of one kind in a batch. Subclasses are frozen dataclasses, which pickle.

    Attributes:
        kind: names the reader on the device.
        needs_every_state: whether it reads other hidden states than the last ones of chunks.
    """

    kind: ClassVar[str]
    needs_every_state: bool = True

    def arrays(self) -> dict[str, np.ndarray]:
        """The int32 arrays that its reader needs on the device."""
        raise NotImplementedError

    def results(self, values: np.ndarray) -> Iterator[tuple[int, np.ndarray, bool]]:
        """Split the reader's values into (seq_id, values of that sequence, whether all are finite)."""
        raise NotImplementedError


class Readout:
    """The report of one prompt: positions ``first_needed`` to ``end - 1``, and their results.

    Attributes:
        subject: names the results in an error's text.
        first_needed: the prefix cache may serve the positions before it.
        error: why there is no result.
    """

    subject: ClassVar[str]
    error: str | None = None

    def __init__(self, first_needed: int, end: int):
        self.first_needed, self._end = first_needed, end

    def rows(self, start: int, stop: int) -> range:
        """Positions in [start, stop) whose hidden states it reads."""
        return range(max(start, self.first_needed), min(stop, self._end))

    def takes_last(self, stop: int) -> bool:
        """Whether it reads only the last hidden state of a chunk that ends at ``stop``."""
        return False

    @classmethod
    def merge(cls, wanted: list[Wanted]) -> ReadoutBatch:
        """The message of a batch, from its readouts of this kind."""
        raise NotImplementedError

    def add_results(self, values: np.ndarray) -> None:
        """Gather the results of a chunk, on the host."""
        raise NotImplementedError

    def output_fields(self, texts: Callable[[set[int]], Any] | None) -> dict[str, Any]:
        """Fields that it sets in the prompt's ``RequestOutput``.

        ``texts``: the text and bytes of each token id, decoded alone; None if the request wants no text.
        """
        return {}


def merged(chunks: Iterable[tuple[Readout | None, int, int, int]]) -> tuple[ReadoutBatch, ...]:
    """The messages of chunks (readout, seq_id, start, stop), given in the order of the packed tokens."""
    found: dict[type[Readout], list[Wanted]] = {}
    offset = 0
    for i, (readout, seq_id, start, stop) in enumerate(chunks):
        if readout is not None and (rows := readout.rows(start, stop)):
            found.setdefault(type(readout), []).append(Wanted(readout, seq_id, i, rows, offset - start))
        offset += stop - start
    return tuple(kind.merge(wanted) for kind, wanted in found.items())

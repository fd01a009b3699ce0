"""One launch as a single array of int32: what crosses to the device, and to other ranks.

Owns the layout: a header of ``NUM_HEADER`` numbers, then the segments one after the other. Host
and device read it with the same ``StepInput.unpack``, on numpy arrays or on tensors.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

NUM_HEADER = 16


@dataclass(frozen=True)
class StepHeader:
    """Numbers that decide what is launched, known to every host.

    Attributes:
        is_prefill: 1 or 0.
        num_sampled: sequences that get a token: B of a decode step; of a prefill those computed to their end.
        num_updates: cells of the row state that change.
        num_tokens: packed tokens (prefill).
        num_seqs: sequences in the launch (prefill).
        max_seqlen_q: most new tokens of one sequence.
        max_context: upper bound of the tokens a sequence attends.
        has_prefix: 1 if some sequence attends tokens from before this launch.
        has_filters: 1 if some sampled row uses top-k, top-p or min-p, for which a rank needs the whole vocabulary.
    """

    is_prefill: int
    num_sampled: int
    num_updates: int
    num_tokens: int
    num_seqs: int
    max_seqlen_q: int
    max_context: int
    has_prefix: int
    has_filters: int


NUM_NUMBERS = len(fields(StepHeader))


@dataclass(frozen=True)
class StepInput:
    """The segments, int32. The first two are in every step, the others in prefill steps.

    Attributes:
        cells, values: [num_updates], changes of the row state.
        input_ids, positions, slot_mapping: [num_tokens].
        rows, context_lens: [num_seqs].
        cu_seqlens_q, cu_seqlens_k: [num_seqs + 1].
        sampled_tokens, sampled_rows: [num_sampled], places among the packed tokens, and rows.
    """

    cells: Any
    values: Any
    input_ids: Any
    positions: Any
    slot_mapping: Any
    rows: Any
    context_lens: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    sampled_tokens: Any
    sampled_rows: Any

    def pack(self, header: StepHeader) -> np.ndarray:
        """Header and segments as one int32 array."""
        packed = np.zeros(NUM_HEADER + sum(_aligned(n) for n in self._sizes(header)), np.int32)
        packed[:NUM_NUMBERS] = list(vars(header).values())
        views = StepInput.unpack(header, packed)
        for view, segment in zip(vars(views).values(), vars(self).values(), strict=True):
            view[:] = segment
        return packed

    @classmethod
    def unpack(cls, header: StepHeader, packed: Any) -> "StepInput":
        """The segments as views of ``packed``."""
        start, segments, nothing = NUM_HEADER, [], packed[:0]
        for size in cls._sizes(header):
            # to slice a tensor costs 2.5 us, and most segments of a decode step are empty
            segments.append(packed[start : start + size] if size else nothing)
            start += _aligned(size)
        return cls(*segments)

    @staticmethod
    def _sizes(header: StepHeader) -> tuple[int, ...]:
        n, t, s = header.num_updates, header.num_tokens, header.num_seqs
        ends, sampled = (s + 1, header.num_sampled) if header.is_prefill else (0, 0)
        return n, n, t, t, t, s, s, ends, ends, sampled, sampled


def _aligned(size: int) -> int:
    """Segments start at multiples of 16 bytes: Triton compiles a kernel anew for a pointer that does not."""
    return -(-size // 4) * 4


def read_header(packed: np.ndarray) -> StepHeader:
    return StepHeader(*packed[:NUM_NUMBERS].tolist())

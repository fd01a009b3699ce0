"""Logits processors: the user's own functions of a request's logits.

They are called on rank 0 alone, where the user's process is, and the results go to the other ranks; so a function need
be neither picklable nor deterministic.
"""

import numpy as np
import torch

from nanovllm.core import NewSequences
from nanovllm.sampling.feature import MAX_FLOAT, Arrays, Feature, Logits, Process, Sampled


class Processors(Feature):
    """Functions see the whole vocabulary, in fp32. They need the tokens so far; the host knows these, because it has
    read the previous step's results.
    """

    in_place = True
    has_kernels = False

    def __init__(self, max_num_seqs: int):
        self._has_processors = np.zeros(max_num_seqs, bool)
        self._places = self._rows = np.empty(0, np.int64)  # places in the batch sampled next, rows in its logits
        self._process: Process | None = None

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        self._has_processors[new.req_indices] = new.sampling.has_processors
        return new.sampling.has_processors

    def begin(self, sampled: Sampled, arrays: Arrays) -> None:
        self._places, self._process = np.flatnonzero(self._has_processors[sampled.req_indices]), sampled.process
        self._rows = self._places * sampled.num_rows  # each is sampled from the first of its rows

    def apply(self, logits: Logits, req_indices: torch.Tensor) -> Logits:
        whole = logits.gather()
        values, rows = whole.values.float(), torch.from_numpy(self._rows).to(whole.values.device)
        processed = values[rows]
        if self._process is not None:
            self._process(self._places, processed)
        values[rows] = certain(logits.tp.all_gather(processed)[0])
        return whole._replace(values=values)


def certain(logits: torch.Tensor) -> torch.Tensor:
    """Logits f32[n, V] in which a single +inf has become probability 1; several of them are left, for the draw to fail.

    Other numbers stay finite when they are divided by a temperature.
    """
    is_infinite = logits == torch.inf
    is_one = is_infinite.sum(1, keepdim=True) == 1
    alone = torch.where(is_infinite, 0.0, -torch.inf)
    return torch.where(is_one, alone, torch.where(is_infinite, torch.inf, logits.clamp(max=MAX_FLOAT)))

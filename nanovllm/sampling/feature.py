"""What a sampling feature is: its three methods, and the logits that pass from one to the next."""

from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from nanovllm.core import NewSequences
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.sampling.reference import SamplingState

INT32_MAX = 2**31 - 1
MAX_FLOAT = 1e30  # beyond, fp32 overflows; larger numbers have the same effect

Arrays = dict[str, np.ndarray]  # integers [n] each, on their way to the device
Tensors = dict[str, torch.Tensor]  # the same there, int32


class Logits(NamedTuple):
    """The logits of one step, between two features. B sequences, V vocabulary."""

    values: torch.Tensor  # [B, V / tp.size], features may change them in place
    thresholds: torch.Tensor  # f32[B], smaller logits are not sampled; features replace, never change them
    tp: TPGroup  # ranks that split the vocabulary

    @property
    def vocab_start(self) -> int:
        """Token id of column 0."""
        return self.tp.rank * self.values.shape[1]

    def gather(self) -> "Logits":
        """The whole vocabulary on every rank."""
        if self.tp.size == 1:
            return self
        values = self.tp.all_gather(self.values).transpose(0, 1).flatten(1)  # [B, V]
        return Logits(values, self.thresholds, SINGLE_RANK)


class Feature:
    """A change of the logits that some requests ask for. A batch without such a request pays nothing for it.

    Attributes:
        columns: name -> numpy dtype of its columns of the request state, which ``add`` fills and its kernel reads.
        in_place: ``apply`` changes the logits that it gets.
        ops, state: kernels and all sampling columns on the device, given by the sampler.
    """

    columns: ClassVar[dict[str, Any]] = {}
    in_place: ClassVar[bool] = False
    ops: SimpleNamespace
    state: SamplingState

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        """Host: sequences have got request slots. Fill the columns in their ``rows``, a structured array [n], and put
        what else the device must know into ``arrays``. Returns which of the sequences use the feature."""
        raise NotImplementedError

    def write(self, tensors: Tensors) -> None:
        """Device: take in what ``add`` has put into the arrays, if anything."""

    def apply(self, logits: Logits, req_indices: torch.Tensor) -> Logits:
        """Device: the logits changed, of these request slots, i32[B]."""
        raise NotImplementedError

    def release(self) -> None:
        """Give the device's memory back, when no request runs; the next one that needs it takes it again."""

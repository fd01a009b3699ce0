"""What a sampling feature is: its three methods, and the logits that pass from one to the next."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from nanovllm.core import NewSequences
from nanovllm.distributed.group import SINGLE_RANK, TPGroup

INT32_MAX = 2**31 - 1
MAX_FLOAT = 1e30  # beyond, fp32 overflows; larger numbers have the same effect

Arrays = dict[str, np.ndarray]  # integers [n] each, on their way to the device
Tensors = dict[str, torch.Tensor]  # the same there, int32


@dataclass(frozen=True)
class SamplingState:
    """Columns of the request state that sampling reads, indexed by request slot; strided views are fine.

    Order of the filters: divide the logits by the temperature; top-k keeps the k largest; top-p keeps the shortest
    prefix of the remaining ones, sorted and renormalized, whose probabilities reach p; min-p keeps those at least min_p
    times as probable as the most probable. Ties with the last token kept are kept.
    """

    temperature: torch.Tensor  # f32[R], 0 = greedy
    top_k: torch.Tensor  # i32[R], 0 = off
    top_p: torch.Tensor  # f32[R], 1 = off
    min_p: torch.Tensor  # f32[R], 0 = off
    seed: torch.Tensor  # i32[R, 2], 64-bit Philox key, low half first
    min_len: torch.Tensor  # i32[R], stop_ids may not be sampled while length < min_len
    stop_ids: torch.Tensor  # i32[R, F], padded with -1
    length: torch.Tensor  # i32[R], 0 = padding request slot
    # Read only by the features that a batch uses, so a caller without these may leave them out.
    is_masked: torch.Tensor | None = None  # i32[R], 0 = every token is allowed
    is_penalized: torch.Tensor | None = None  # i32[R], 0 = neither bias nor penalty
    presence_penalty: torch.Tensor | None = None  # f32[R], 0 = off, once for every token generated
    frequency_penalty: torch.Tensor | None = None  # f32[R], 0 = off, times how often it was generated
    repetition_penalty: torch.Tensor | None = None  # f32[R], > 0, 1 = off, for tokens of prompt and output


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
        has_kernels: ``apply`` launches kernels.
        ops: the functions that ``apply`` launches: the references in the feature's own module, or on CUDA the kernels
            under the same names in the module of its name in ``kernels/sampling``. Given by the sampler, as is
        state: all sampling columns on the device.
    """

    columns: ClassVar[dict[str, Any]] = {}
    in_place: ClassVar[bool] = False
    has_kernels: ClassVar[bool] = True
    ops: ModuleType
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

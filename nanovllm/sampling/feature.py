"""The seam of sampling: the base class of features, and the logits that pass from one feature to the next."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from nanovllm.core import NewSequences
from nanovllm.distributed.group import SINGLE_RANK, TPGroup

INT32_MAX = 2**31 - 1
MAX_FLOAT = 1e30  # beyond, fp32 overflows; larger numbers have the same effect

Arrays = dict[str, np.ndarray]  # integers [n] each, on their way to the device
Tensors = dict[str, torch.Tensor]  # the same there, int32
Masks = tuple[np.ndarray, np.ndarray, np.ndarray]  # slots [n], masks [n, ceil(V / 32)]; slots and tokens [m, 2]; int32
# takes places in the batch, int [n], and their logits, f32[n, V], which it changes in place
Process = Callable[[np.ndarray, torch.Tensor], None]


class Sampled(NamedTuple):
    """A batch about to be sampled, with the host's late inputs, which depend on the tokens of the step before."""

    req_indices: np.ndarray  # int32 [B], request slots
    num_rows: int = 1  # rows of logits for each request
    masks: Masks | None = None  # masks of constrained requests
    process: Process | None = None  # calls logits processors; None on other ranks than 0


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
        reads_raw: ``report`` reads the model's own logits.
        compiled_at_start: its kernels are compiled at the start, and not when a request needs them.
        sends: an array of its ``add`` or ``begin``; ``write`` is called where this array is.
        ops: the functions that ``apply`` launches: the references in the feature's own module, or on CUDA the kernels
            under the same names in ``kernels/sampling``. Given by the sampler, as is
        state: all sampling columns of the request state on the device, [R] or [R, n]; strided views are fine.
    """

    columns: ClassVar[dict[str, Any]] = {}
    in_place = reads_raw = compiled_at_start = False
    has_kernels, sends = True, ""
    ops: ModuleType
    state: SimpleNamespace

    def add(self, new: NewSequences, rows: np.ndarray, arrays: Arrays) -> list[bool]:
        """Host: fill the columns of new requests in their ``rows``, a structured array [n]. Anything else that the
        device must know goes into ``arrays``. Returns which of the requests use the feature."""
        raise NotImplementedError

    def waits(self, req_indices: np.ndarray) -> bool:
        """Host: whether these requests cannot be sampled before the host's late inputs have come."""
        return False

    def begin(self, sampled: Sampled, arrays: Arrays) -> None:
        """Host: prepare for a batch that uses the feature and is sampled next. ``arrays`` as for ``add``."""

    def write(self, tensors: Tensors) -> None:
        """Device: read the arrays that ``add`` or ``begin`` has filled."""

    def apply(self, logits: Logits, req_indices: torch.Tensor) -> Logits:
        """Device: change the logits of these request slots, i32[B]."""
        return logits

    def report(self, raw: Logits, logits: Logits, tokens: torch.Tensor, req_indices: torch.Tensor) -> Any:
        """Device: results for the host besides the tokens i32[B], from the logits before and after all features."""

    def release(self) -> None:
        """Free the device memory while no request runs; it is allocated again when a request needs it."""

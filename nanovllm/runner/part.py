"""The seams of a rank's runner: parts and launchers; and ``Equipment``, which holds all that the factory has chosen.

A ``Part`` keeps something on the device besides model and requests. A ``Launcher`` is a way to run a forward pass; the
runner takes the first of its list that takes the batch.
"""

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.core import Batch
from nanovllm.distributed.group import TPGroup
from nanovllm.layers.attention import AttentionBackend
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.cuda_graphs import CUDAGraphs
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.feature import Arrays, Tensors
from nanovllm.sampling.sampler import Sampler

if TYPE_CHECKING:
    from nanovllm.runner.launchers import DecodeLauncher
    from nanovllm.runner.memory import KVCache


@dataclass(frozen=True)
class Rank:
    """One rank's device and options."""

    config: Config
    tp: TPGroup
    device: torch.device
    dtype: torch.dtype  # dtype of computations
    kv_dtype: torch.dtype  # dtype of the KV cache
    backend: AttentionBackend
    ops: SimpleNamespace  # kernels, or their references on a CPU

    @property
    def use_graphs(self) -> bool:
        return self.device.type == "cuda" and not self.config.enforce_eager and self.backend.capturable

    @property
    def max_blocks(self) -> int:
        """Length of a block table."""
        return -(-self.config.max_model_len // self.config.kvcache_block_size)


class Step(NamedTuple):
    """A prepared batch, and the model and graphs that run it."""

    batch: Batch
    arrays: Arrays  # its inputs on the host
    tensors: Tensors  # the same on the device
    model: CausalLM
    graphs: CUDAGraphs | None


class Launcher:
    """A way to launch the forward pass of some batches.

    Attributes:
        fills_queue: two in a row may fill the device's launch queue.
    """

    fills_queue = False

    def takes(self, batch: Batch, arrays: Arrays) -> bool:
        """Host: whether it runs this batch; then it may pad the arrays, in place."""
        raise NotImplementedError

    def run(self, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch the forward pass.

        Returns:
            The hidden states that are sampled from, as padded as a graph is; and the hidden states of every token, if
            a readout of the batch needs them.
        """
        raise NotImplementedError

    def rows(self, step: Step) -> torch.Tensor:
        """Request slots of the sampled states."""
        return step.tensors["sampled_req_indices"]

    def rows_on_host(self, batch: Batch) -> np.ndarray:
        """The same on the host: places in ``RequestState.sampled_tokens``, int32 of any shape."""
        return batch.req_indices

    def sample_graph(self, batch: Batch) -> Hashable | None:
        """The kind of graph that samples after it; None: there is none."""
        return None

    def sampled(self, batch: Batch, rows: torch.Tensor) -> None:
        """Device: its tokens are sampled."""

    def capture(self, model: CausalLM, graphs: CUDAGraphs) -> None:
        """Capture its graphs, if it has any."""

    def compile(self, model: CausalLM) -> None:
        """Issue each of its launches once, so that kernels are compiled."""

    def num_graphs(self) -> int:
        return 0

    def most_rows(self) -> int:
        """Rows of logits in the largest batch that it samples; 0 if that is no larger than other launchers'."""
        return 0

    def most_tokens(self) -> int:
        """Tokens of its largest graph; 0 if that is no larger than ``max_num_seqs``."""
        return 0


class Part:
    """Something on the device besides model and requests. A batch that does not use it pays nothing.

    Attributes:
        launchers: the ways to run a batch that it brings along.
        module: its part of the checkpoint besides the decoder, with the names of its tensors there; loaded, updated and
            put to sleep like the decoder.
        num_rows: rows of device memory that it shares with the KV cache, the same on every rank.
    """

    launchers: tuple[Launcher, ...] = ()
    module: torch.nn.Module | None = None
    num_rows = 0

    # ---------------------------------------------------------------- made by the factory, in this order

    @classmethod
    def fitted(cls, rank: Rank) -> Config:
        """The options, with limits lowered to the memory that it needs for each request slot."""
        return rank.config

    @classmethod
    def num_request_rows(cls, rank: Rank) -> int:
        """Rows that it needs in the request state, after the padding slot."""
        return 0

    @classmethod
    def make(cls, rank: Rank, state: RequestState, decode: "DecodeLauncher") -> "Part | None":
        """The part, if these options and this model use it."""
        raise NotImplementedError

    # ---------------------------------------------------------------- a step, in this order; a batch without arrays has
    # nothing to write or finish

    def prepare(self, batch: Batch, arrays: Arrays) -> None:
        """Host: put changes for the device into the arrays, which travel in one copy."""

    def write(self, batch: Batch, tensors: Tensors) -> None:
        """Device, before the forward pass: take it in."""

    def finish(self, batch: Batch, tensors: Tensors) -> None:
        """Device, after the forward pass."""

    def reset(self) -> None:
        """Forget the device's contents, after an interrupted step or new weights."""

    # ---------------------------------------------------------------- memory

    def reserved_bytes(self, model: CausalLM) -> int:
        """Device memory that it needs besides the KV cache."""
        return 0

    def share(self, model: CausalLM, num_bytes: int) -> int:
        """Take rows out of the ``num_bytes`` of the KV cache; sets ``num_rows`` and returns their bytes."""
        return 0

    def allocate(self, model: CausalLM, kv_cache: "KVCache", num_slots: int) -> None:
        """Take memory for ``num_slots`` request slots; the model's layers get their views of it."""

    def release(self, model: CausalLM) -> None:
        """Give the memory back."""

    def facts(self) -> dict[str, Any]:
        """Facts of the device for the engine's factory."""
        return {}

    def describe(self) -> str:
        """A clause of the line at start."""
        return ""

    # ---------------------------------------------------------------- prefills that no batch stands for

    def one_sequence(self, num_tokens: int) -> Arrays:
        """Its arrays of a prefill of one sequence in the padding slot, for warm-up and calibration."""
        return {}

    def padded_lengths(self, num_tokens: int, num_seqs: int) -> dict[str, int]:
        """Lengths of its arrays in the graph of a padded prefill."""
        return {}

    def pad(self, arrays: Arrays, num_tokens: int, num_seqs: int) -> bool:
        """Host: pad its arrays to these lengths, in place; False where they do not fit."""
        return True


@dataclass(frozen=True)
class Equipment:
    """The choices of the factory (parts.py) for a rank."""

    rank: Rank
    request_state: RequestState
    sampler: Sampler
    decode: "DecodeLauncher"
    parts: list[Part]
    launchers: list[Launcher]  # the last takes every prefill
    readers: Mapping[str, Callable[..., torch.Tensor]]  # by kind of readout; each has the sampler


def extra_modules(parts: ListLike[Part]) -> list[torch.nn.Module]:
    """The parts' modules of the checkpoint."""
    return [part.module for part in parts if part.module is not None]


def one_sequence(rank: Rank, parts: ListLike[Part], num_tokens: int) -> Tensors:
    """The parts' arrays of a prefill of one sequence in the padding slot, on the device."""
    arrays = {name: values for part in parts for name, values in part.one_sequence(num_tokens).items()}
    return {name: torch.from_numpy(values).to(rank.device) for name, values in arrays.items()}

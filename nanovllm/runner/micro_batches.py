"""Prefills of many tokens on several ranks as two micro-batches, so that sums over ranks run beside products.

Owns the split of a prefill and the order in which the halves take turns::

    layer n:    attention A | attention B | MLP A       | MLP B       | layer n + 1: attention A ...
    summed up:              | attention A | attention B | MLP A       | MLP B

The halves are prefills like any other, of which B goes on where A ends: a sequence may have its first tokens in A and
the rest in B, whose attention reads the keys that A has stored in that layer. Knows nothing of how a sum gets to the
other rank (``distributed/pushed_sums.py``; on the CPU they are computed at once, for the tests).
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.core import Batch, PrefillBatch
from nanovllm.distributed.group import TPGroup
from nanovllm.layers.context import Context
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.models.decoder import Decoder, added_to
from nanovllm.runner.device import layer_weights, select_dtype
from nanovllm.runner.inputs import prefill_inputs, to_device
from nanovllm.runner.part import Launcher, Step
from nanovllm.sampling.feature import Arrays

MIN_TOKENS = 2048  # of a prefill that is split: smaller halves fill the SMs badly
# Tokens times weights of a layer on one rank, by device type: in less time than an H200 needs for so many, a host does
# not launch the kernels of two halves (docs/experiments.md). None on the CPU, where nothing runs beside anything.
MIN_LAYER_WORK: dict[str, int | None] = {"cuda": 7 << 37, "cpu": None}
TILE = 128  # tokens of a tile in the prefill's GEMMs
# Layers that the host may be ahead of the device: 30 entries each of the 1,024 of a stream's launch queue. In a launch
# that waits for a free entry the host would hold the GIL, which the watch over the workers needs.
MAX_LAYERS_AHEAD = 12


def min_tokens(config: Config, device_type: str) -> int | None:
    """Fewest tokens of a prefill that is split; None: none ever is."""
    size, work = config.tensor_parallel_size, MIN_LAYER_WORK[device_type]
    if work is None or size == 1 or (size > 2 and device_type == "cuda"):
        return None
    if config.model_config.delta is not None:  # a half has no chunks of its own
        return None
    fewest = max(MIN_TOKENS, work * size // layer_weights(config.model_config))
    return fewest if fewest <= config.max_num_batched_tokens else None


def max_sum_bytes(config: Config, device: torch.device) -> int:
    """Of the largest sum of a micro-batch; 0: none is split."""
    if min_tokens(config, device.type) is None:
        return 0
    itemsize = select_dtype(config.dtype, config.model_config.dtype, device).itemsize
    return max_half(config.max_num_batched_tokens) * config.model_config.hidden_size * itemsize


# ------------------------------------------------------------ the split


def cut_of(cu_seqlens_q: np.ndarray) -> int:
    """The token at which the second half begins: where a sequence does, if that is near the middle."""
    num_tokens = int(cu_seqlens_q[-1])
    border = int(cu_seqlens_q[np.abs(2 * cu_seqlens_q - num_tokens).argmin()])
    if abs(2 * border - num_tokens) <= num_tokens // 8:
        return border
    middle = num_tokens // 2
    return middle // TILE * TILE or middle


def max_half(num_tokens: int) -> int:
    """Most tokens of a half."""
    return num_tokens // 2 + max(num_tokens // 16, TILE) + 1


def split(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """The arrays of a prefill (``prefill_arrays``) as two: those that the model reads, and no others."""
    cut = cut_of(arrays["cu_seqlens_q"])
    return part(arrays, 0, cut), part(arrays, cut, len(arrays["input_ids"]))


def part(arrays: Arrays, begin: int, end: int) -> Arrays:
    """The packed tokens begin .. end - 1 as a prefill of their own."""
    tokens, starts = slice(begin, end), arrays["cu_seqlens_q"][:-1]
    first, last = (int(i) for i in np.searchsorted(starts, (begin + 1, end)))
    seqs = slice(first - 1, last)  # those with tokens in here; the first may have begun before, the last may go on
    ends = arrays["cu_seqlens_q"][1:][seqs]
    context_lens = arrays["context_lens"][seqs] - np.maximum(ends - end, 0)
    logits = arrays["logits_indices"]
    return {
        **{name: arrays[name][tokens] for name in ("input_ids", "positions", "slot_mapping")},
        "req_indices": arrays["req_indices"][seqs],
        "context_lens": context_lens,
        "cu_seqlens_q": np.append(begin, np.minimum(ends, end)) - begin,
        "cu_seqlens_k": np.append(0, np.cumsum(context_lens)),
        "logits_indices": logits[(logits >= begin) & (logits < end)] - begin,
    }


# ------------------------------------------------------------ the forward pass


class Summed:
    """A sum that was computed at once; the reference of ``PendingSum``."""

    def __init__(self, total: torch.Tensor):
        self._total = total

    def wait(self) -> torch.Tensor:
        return self._total

    total = wait


class PostNormed:
    """A sum whose norm is added to the residual once it is there."""

    def __init__(self, pending: Any, residual: torch.Tensor, post_norm: RMSNorm, context: Context):
        self._pending, self._args = pending, (post_norm, context)
        self._residual = residual

    def wait(self) -> torch.Tensor:
        return added_to(self._residual, self._pending.total(), *self._args)


def poll(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(1e-4)


class MicroBatches(Launcher):
    """One rank's: which prefills are split, and their forward pass. ``wait_until``: how it waits for the device."""

    fills_queue = True

    def __init__(self, config: Config, tp: TPGroup, device: torch.device, block_tables: torch.Tensor,
                 wait_until: Callable[[Callable[[], bool]], None] = poll):
        self._tp, self._device, self._block_tables, self._wait_until = tp, device, block_tables, wait_until
        self._ends: deque[torch.cuda.Event] = deque()  # of layers, on the device
        self._sums = None if tp.peers is None else tp.peers.sums
        self.min_tokens = min_tokens(config, device.type)
        if device.type == "cuda" and self._sums is None:
            self.min_tokens = None

    def takes(self, batch: Batch, arrays: Arrays) -> bool:
        """Whether a prefill is split. Never where prompt tokens are scored: that takes every hidden state, and one that
        is scored and not sampled comes last, whoever reads its blocks. Its last chunk has nothing to score where it is
        the last token alone."""
        if self.min_tokens is None or not isinstance(batch, PrefillBatch) or batch.num_tokens < self.min_tokens:
            return False
        if batch.needs_every_state:
            return False
        return bool((batch.stops - batch.starts > 1)[batch.num_last :].all())

    def run(self, step: Step) -> tuple[torch.Tensor, None]:
        halves = split(step.arrays)
        named = {f"{i} {name}": values for i, half in enumerate(halves) for name, values in half.items()}
        tensors, inputs = to_device(named, self._device), []
        for i, half in enumerate(halves):
            limits = int(half["context_lens"].max()), int(np.diff(half["cu_seqlens_q"]).max())
            of_half = {name: tensors[f"{i} {name}"] for name in half}
            inputs.append(prefill_inputs(of_half, self._block_tables, *limits, of_half["logits_indices"].long()))
        return self.forward(step.model.model, inputs), None

    def forward(self, model: Decoder, inputs: list[tuple[torch.Tensor, Context]]) -> torch.Tensor:
        """As ``Decoder.forward``, of two halves: input_ids and context of each -> [N, C]."""
        sums: list[Any] = [Summed(model.embed_tokens(input_ids)) for input_ids, _ in inputs]
        for i, layer in enumerate(model.layers):
            is_last = i == len(model.layers) - 1
            at_once = self._sums is None or is_last  # its tokens are few
            for sublayer, norm, post_norm in layer.sublayers:  # type: ignore[union-attr]
                for half, (_, context) in enumerate(inputs):
                    residual = sums[half].wait()
                    y = sublayer(residual, norm, context if is_last else context.all_tokens())
                    pending = Summed(self._tp.all_reduce(y)) if at_once else self._sums.begin(y, half)  # type: ignore[union-attr]
                    sums[half] = pending if post_norm is None else PostNormed(pending, residual, post_norm, context)
            self._limit_queue()
        return torch.cat([model.norm(total.wait()) for total in sums])

    def _limit_queue(self) -> None:
        """Wait until the device is at most MAX_LAYERS_AHEAD layers behind; without blocking in the driver."""
        if self._device.type == "cpu":
            return
        self._ends.append(torch.cuda.Event())
        self._ends[-1].record()
        if len(self._ends) > MAX_LAYERS_AHEAD:
            self._wait_until(self._ends.popleft().query)

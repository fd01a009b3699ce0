"""Weights and memory between the rollouts of a training loop: ``LLM.update_weights``, ``sleep`` and ``wake_up``."""

import os
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nanovllm.config import PATH
from nanovllm.engine.guard import Guard
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import ConfigError, EngineError
from nanovllm.validation import check, optional

if TYPE_CHECKING:
    from nanovllm.runner.weights import Source, Weights

UNCHANGED: Any = object()  # the adapter, where None is none


class WeightVerbs(LLMEngine):
    """Replaces the weights of an idle engine, and frees its memory."""

    def update_weights(self, weights: "Source | None" = None, partial: bool = False, *,
                       lora: str | os.PathLike | None = UNCHANGED) -> set[str]:
        """Replace the weights in place, and forget cached prefixes.

        Args:
            weights: pairs (name in the checkpoint, tensor on any device, of any float dtype), such as
                ``model.named_parameters()`` or a state dict; or a path of safetensors, which each rank reads. For an
                FP8 weight data (e4m3) and scale (``X.weight_scale``), or a tensor that is quantized here. For one of
                4-bit integers all tensors of its module, as in the checkpoint.
            partial: False: every tensor of the model must be given, its vision tower's included.
            lora: given in place of weights, a directory or hub id of a PEFT adapter: the weights become those of the
                model's checkpoint with this adapter, and no other; None: without any. Only what differs is read.

        Returns:
            The names of the tensors written; copies of tied weights are passed over.

        Raises:
            CheckpointError: a tensor is unknown, given twice, of another shape or, unless ``partial``, missing. If
                some were written by then, no request is taken until all of them are.
            EngineError: requests are unfinished, or the weights sleep.
        """
        if lora is not UNCHANGED and (weights is not None or partial):
            raise ConfigError("update_weights: give weights, or lora, which is merged into the checkpoint's weights.")
        if lora is not UNCHANGED:
            check("update_weights", "lora", lora, optional(PATH), ConfigError)
        with self._idle("update_weights") as of_runner:
            return of_runner.update(weights, partial) if lora is UNCHANGED else of_runner.merge(lora)

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory: weights, KV cache and CUDA graphs. Requests are refused until ``wake_up``.

        Args:
            level: 1 moves the weights to pinned memory of the host; 2 drops them, to be pushed by ``update_weights``
                after ``wake_up``.

        Raises:
            EngineError: requests are unfinished.
        """
        with self._idle("sleep") as weights:
            weights.call("sleep", level)

    def wake_up(self, tags: ListLike[str] | None = None) -> None:
        """Take the device's memory again.

        Args:
            tags: "weights", "kv_cache", or both, the default. Graphs are captured when both are back.

        Raises:
            OutOfMemoryError: there is no room; what slept sleeps on.
        """
        with self._idle("wake_up") as weights:
            weights.call("wake_up", tags)

    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are not in the device's memory."""
        self.require_running()
        return bool(self.model_runner.weights.sleeping)

    @contextmanager
    def _idle(self, what: str) -> Iterator["Weights"]:
        """Give the weights of an idle engine to work on. No cached prefix outlives it."""
        with Guard(self):
            if not self._is_idle():
                raise EngineError(f"{what} needs an idle engine; finish or abort its requests first.")
            while self._in_flight:  # a surplus launch
                self._process_output()
            self.reset_prefix_cache()
            try:
                yield self.model_runner.weights
            except BaseException:
                workers = self.model_runner.workers
                if workers is not None and workers.are_lost:
                    self.drop_all()
                raise

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, as is needed after a change of the weights; False while requests run."""
        if not self._is_idle():
            return False
        self.scheduler.block_manager.forget_prefixes()
        return True

    def _is_idle(self) -> bool:
        """Whether all requests are finished; futures that wait for nothing but their text are resolved first."""
        if self._outputs.is_empty():
            for caller in self._callers:
                caller.between_steps(self, is_idle=True)
        return self.is_finished()

"""The worker that scripts reach into: the model, its weights, sleep. ``nanovllm.LLM`` does the work."""

import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from nanovllm.contrib.as_vllm.processors import imported
from nanovllm.errors import ConfigError, EngineError
from nanovllm.llm import LLM

ON_EVERY_RANK = ("load_weights", "reload_weights", "sleep", "wake_up")


class DriverWorker:
    """vLLM's ``Worker``, of rank 0; the others are nanovllm's own. ``collective_rpc`` runs code here.

    Attributes:
        is_paused: no request is taken (sleep of level 0).
        lora: the adapter that is merged into the weights, with marks of its files; or None.
        has_new_weights: whether some are not the checkpoint's, adapters apart.
    """

    rank = local_rank = 0
    worker = driver_worker = property(lambda self: self)

    def __init__(self, llm: LLM, vllm_config: Any):
        self._llm, self.is_paused = llm, False
        self.lora: tuple | None = None
        self.has_new_weights = False
        self.vllm_config, self.device = vllm_config, llm.model_runner.device
        model, worker = llm.model_runner.model, weakref.proxy(self)  # the model must not keep its engine alive
        model.load_weights = lambda weights: worker.load_weights(weights)  # type: ignore
        self.model_runner = SimpleNamespace(model=model, device=self.device, vllm_config=vllm_config)
        self.model_runner.get_model = lambda: model

    def get_model(self) -> Any:
        """The model, a ``torch.nn.Module``."""
        return self.model_runner.model

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Any number of tensors at a time, under their names in the checkpoint."""
        if self.lora is not None:
            self._llm.update_weights(lora=None)
            self.lora = None
        written = self._llm.update_weights(weights, partial=True)
        self.has_new_weights |= bool(written)
        return written

    def reload_weights(self) -> None:
        """Read the checkpoint's files again."""
        self._llm.update_weights(self._llm.config.model_path)
        self.lora, self.has_new_weights = None, False

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """0: no request is taken. 1: weights move to the host, the KV cache goes. 2: both go."""
        if level not in (0, 1, 2):
            raise ConfigError(f"sleep: level={level!r} must be 0, 1 or 2.")
        if level:
            self._llm.sleep(level)
        else:
            self._require_idle("sleep")
            self.is_paused = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory of ``tags`` again; None is all. After level 2 the weights must be loaded."""
        self._llm.wake_up(None if tags is None else [tag for tag in tags if tag != "scheduling"])
        self.is_paused = self.is_paused and self._llm.is_sleeping()

    def is_sleeping(self) -> bool:
        return self.is_paused or self._llm.is_sleeping()

    def collective_rpc(self, method: str | Callable, timeout: float | None = None, args: tuple = (),
                       kwargs: dict | None = None) -> list[Any]:
        """Call a method of the worker, or a function with the worker as first argument; a result for each rank."""
        self._require_idle("collective_rpc")
        num_ranks = self._llm.config.tensor_parallel_size
        if num_ranks > 1 and method not in ON_EVERY_RANK:
            raise EngineError(
                f"collective_rpc of {method!r} with tensor_parallel_size > 1 is not supported by nanovllm, which runs "
                f"only its own methods on every rank: {', '.join(ON_EVERY_RANK)}."
            )
        if callable(method):
            return [method(self, *args, **(kwargs or {}))]
        if not hasattr(self, method):
            raise EngineError(f"collective_rpc: the worker has no method {method!r}.")
        return [getattr(self, method)(*args, **(kwargs or {}))] * num_ranks

    def apply_model(self, func: Callable) -> list[Any]:
        """Call a function with the model."""
        return self.collective_rpc(lambda worker: func(worker.get_model()))

    def _require_idle(self, what: str) -> None:
        if not self._llm.is_finished():
            raise EngineError(f"{what} needs an idle engine; finish or abort its requests first.")


def worker_class(worker: Any, extension: str) -> type[DriverWorker]:
    """``DriverWorker``, or a class derived from it (``worker_cls``, itself or its name); with the methods of a class
    "module.Class" (``worker_extension_cls``).
    """
    kind = DriverWorker if worker in (None, "", "auto") else worker
    kind = imported("worker_cls", kind) if isinstance(kind, str) else kind
    if not (isinstance(kind, type) and issubclass(kind, DriverWorker)):
        raise ConfigError(f"LLM: worker_cls={worker!r:.200} must be 'auto', or a class derived from vLLM's Worker.")
    if not extension:
        return kind
    return type("Worker", (kind, imported("worker_extension_cls", extension)), {})

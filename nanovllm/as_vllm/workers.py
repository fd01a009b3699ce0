"""What code that reaches into vLLM's workers finds: the model, its weights, sleep. ``LLM`` does the work."""

import os
import time
import weakref
from collections.abc import Callable, Iterable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.errors import ConfigError, EngineError
from nanovllm.llm import LLM

ON_EVERY_RANK = ("load_weights", "reload_weights", "sleep", "wake_up", "check_health")  # methods of ``Worker``


class Memory:
    """Weights and sleep of an engine, in vLLM's words. Sleep of level 0 only refuses requests."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._is_paused = False

    @property
    def is_asleep(self) -> bool:
        return self._is_paused or self._llm.is_sleeping()

    def require_awake(self) -> None:
        if self._is_paused:
            raise EngineError("the engine sleeps (scheduling); call wake_up() first.")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Any number of tensors at a time, under their names in the checkpoint."""
        return self._llm.update_weights(weights, partial=True)

    def reload_weights(self) -> None:
        """Read the checkpoint's files again."""
        self._llm.update_weights(self._llm.config.model_path)

    def sleep(self, level: int = 1) -> None:
        """0: no request is taken. 1: weights move to the host, the KV cache goes. 2: both go."""
        if level not in (0, 1, 2):
            raise ConfigError(f"sleep: level={level!r} must be 0, 1 or 2.")
        if level == 0:
            self.require_idle("sleep")
            self._is_paused = True
        else:
            self._llm.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory of ``tags`` again; None is all. After level 2 the weights must be loaded."""
        if set(tags or ()) - {"weights", "kv_cache", "scheduling"}:
            raise ConfigError(f"wake_up: tags={tags!r} may hold 'weights', 'kv_cache' and 'scheduling'.")
        self._llm.wake_up(None if tags is None else [tag for tag in tags if tag != "scheduling"])
        if not self._llm.is_sleeping():
            self._is_paused = False

    def require_idle(self, what: str) -> None:
        if not self._llm.is_finished():
            raise EngineError(f"{what} needs an idle engine; finish or abort its requests first.")


class Worker:
    """The one worker. ``collective_rpc`` calls its methods, and hands it to functions."""

    rank = local_rank = 0

    def __init__(self, llm: LLM, memory: Memory, engine_config: Any = None):
        runner, memory_of_llm = llm.model_runner, weakref.proxy(memory)  # the model must not keep its engine alive
        runner.model.load_weights = lambda weights: memory_of_llm.load_weights(weights)  # type: ignore
        self.device = runner.device
        self.vllm_config = engine_config
        self.model_runner = SimpleNamespace(
            model=runner.model, device=runner.device, vllm_config=engine_config, get_model=lambda: runner.model
        )
        self._memory = memory

    @property
    def worker(self) -> "Worker":
        return self

    def get_model(self) -> torch.nn.Module:
        return self.model_runner.model

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return self._memory.load_weights(weights)

    def reload_weights(self) -> None:
        self._memory.reload_weights()

    def sleep(self, level: int = 1) -> None:
        self._memory.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._memory.wake_up(tags)

    def check_health(self) -> None:
        """It runs in this process."""


class Executor:
    """``model_executor``: calls the worker."""

    def __init__(self, worker: Worker, memory: Memory, num_ranks: int):
        self.driver_worker, self._memory, self._num_ranks = worker, memory, num_ranks

    def collective_rpc(self, method: str | Callable, timeout: float | None = None, args: tuple = (),
                       kwargs: dict | None = None) -> list[Any]:
        """Call a method of the worker, or a function with the worker as first argument; a result for each rank."""
        self._memory.require_idle("collective_rpc")
        if method in ON_EVERY_RANK:
            return [getattr(self.driver_worker, method)(*args, **(kwargs or {}))] * self._num_ranks
        if self._num_ranks > 1:
            raise EngineError(
                f"collective_rpc of {method!r} with tensor_parallel_size > 1 is not supported by nanovllm, which runs "
                f"only its own methods on every rank: {', '.join(ON_EVERY_RANK)}."
            )
        if callable(method):
            return [method(self.driver_worker, *args, **(kwargs or {}))]
        if not hasattr(self.driver_worker, method):
            raise EngineError(f"collective_rpc: the worker has no method {method!r}.")
        return [getattr(self.driver_worker, method)(*args, **(kwargs or {}))]


class Profiler:
    """``start_profile`` and ``stop_profile``: torch's profiler.

    Args:
        config: vLLM's ``profiler_config``, a dictionary or an object with "torch_profiler_dir".
    """

    def __init__(self, config: Any):
        given = config if isinstance(config, dict) else vars(config) if config is not None else {}
        self._directory = given.get("torch_profiler_dir") or os.environ.get("VLLM_TORCH_PROFILER_DIR")
        self._running: torch.profiler.profile | None = None
        self._prefix = ""

    def start(self, prefix: str | None = None) -> None:
        if not self._directory:
            raise EngineError(
                "start_profile needs LLM(profiler_config={'profiler': 'torch', 'torch_profiler_dir': '/a/directory'})."
            )
        self._prefix = prefix or "nanovllm"
        self._running = torch.profiler.profile()
        self._running.start()

    def stop(self) -> None:
        """Write a Chrome trace."""
        if self._running is not None and self._directory:
            self._running.stop()
            os.makedirs(self._directory, exist_ok=True)
            name = f"{self._prefix}-{time.strftime('%Y%m%d-%H%M%S')}.pt.trace.json"
            self._running.export_chrome_trace(os.path.join(self._directory, name))
            self._running = None


def worker_class(extension: str) -> type[Worker]:
    """``Worker`` with the methods of a class "module.Class" (``worker_extension_cls``)."""
    if not extension:
        return Worker
    module, _, name = extension.rpartition(".")
    try:
        return type("Worker", (Worker, getattr(import_module(module), name)), {})
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"LLM: worker_extension_cls={extension!r} cannot be imported: {error}.") from error

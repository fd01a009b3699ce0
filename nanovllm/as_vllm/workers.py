"""What code that reaches into vLLM's workers finds: the model, its weights, sleep. One rank, in this process.

Owns the order that keeps outputs right: weights change while the engine is idle, and cached keys and values go with the
old weights.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.errors import CheckpointError, ConfigError, EngineError
from nanovllm.llm import LLM
from nanovllm.runner.memory import allocate_kv_cache, attention_layers
from nanovllm.utils.loader import CheckpointTensor, TensorNames, fill, load_model


class InMemory:
    """A tensor with the interface of a safetensors slice."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.detach()

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


class Memory:
    """The device memory of an engine, which ``sleep`` gives back.

    Attributes:
        asleep: tags of what is gone now, of "weights" and "kv_cache"; "scheduling" while paused.
    """

    def __init__(self, llm: LLM):
        self._llm = llm
        self.asleep: set[str] = set()
        self._on_host: dict[str, torch.Tensor] = {}
        self._num_bytes: dict[str, int] = {}

    def require_awake(self) -> None:
        if self.asleep:
            raise EngineError(f"the engine sleeps ({', '.join(sorted(self.asleep))}); call wake_up() first.")

    def require_idle(self, what: str) -> None:
        if self._llm.config.tensor_parallel_size > 1:
            raise EngineError(f"{what} with tensor_parallel_size > 1 is not supported by nanovllm.")
        if not self._llm.is_finished():
            raise EngineError(f"{what} needs an idle engine; finish or abort its requests first.")

    def _require_weights(self) -> None:
        if "weights" in self.asleep:
            raise EngineError("the weights sleep; call wake_up(tags=['weights']) before they are loaded.")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy tensors, under their names in the checkpoint, into the model; returns the names.

        Any number of them at a time. The prefix cache is emptied.
        """
        self.require_idle("load_weights")
        self._require_weights()
        names, loaded = TensorNames(self._llm.model_runner.model), set()
        with torch.inference_mode():
            for name, tensor in weights:
                if names.is_unused(name):
                    continue
                param, shard_id, _ = names.find(name) or (None, None, None)
                if param is None:
                    raise CheckpointError(f"load_weights: the model has no tensor {name!r}, by the checkpoint's names.")
                fill(param, CheckpointTensor(name, InMemory(tensor)), shard_id)
                loaded.add(name)
        self._llm.reset_prefix_cache()
        return loaded

    def reload_weights(self) -> None:
        """Read the checkpoint's files again."""
        self.require_idle("reload_weights")
        self._require_weights()
        with torch.inference_mode():
            load_model(self._llm.model_runner.model, self._llm.config.model_path)
        self._llm.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """0: no request is taken. 1: weights move to the host, the KV cache goes. 2: both go."""
        if level not in (0, 1, 2):
            raise ConfigError(f"sleep: level={level!r} must be 0, 1 or 2.")
        self.require_idle("sleep")
        self._llm.reset_prefix_cache()
        parts = {"scheduling"} if level == 0 else {"scheduling", "weights", "kv_cache"} - self.asleep
        runner = self._llm.model_runner
        runner.synchronize()
        if level > 0:
            runner.graphs = None  # they hold addresses of both
        if "kv_cache" in parts:
            del runner.kv_cache
            for layer in attention_layers(runner.model):
                layer.k_cache = layer.v_cache = torch.empty(0)
        if "weights" in parts:
            with torch.inference_mode():
                for name, param in runner.model.named_parameters():
                    if level == 1:
                        self._on_host[name] = param.to("cpu", copy=True)
                    self._num_bytes[name] = param.untyped_storage().nbytes()
                    param.untyped_storage().resize_(0)
        if runner.device.type == "cuda":
            torch.cuda.empty_cache()
        self.asleep |= parts

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory of ``tags`` again; None is all. After level 2 the weights must be loaded."""
        unknown = set(tags or ()) - {"weights", "kv_cache", "scheduling"}
        if unknown:
            raise ConfigError(f"wake_up: tags={tags!r} may hold 'weights', 'kv_cache' and 'scheduling'.")
        waking = self.asleep & set(tags if tags is not None else self.asleep)
        runner = self._llm.model_runner
        with torch.inference_mode():
            if "weights" in waking:
                for name, param in runner.model.named_parameters():
                    param.untyped_storage().resize_(self._num_bytes.pop(name))
                    if name in self._on_host:
                        param.copy_(self._on_host.pop(name))
            if "kv_cache" in waking:
                runner.kv_cache = allocate_kv_cache(
                    runner.model, runner.num_kvcache_blocks, runner.block_size, runner.dtype, runner.device
                )
            self.asleep -= waking
            if not self.asleep & {"weights", "kv_cache"}:
                self.asleep.clear()
                if runner.use_graphs and runner.graphs is None:
                    runner.capture_cudagraph()


class Worker:
    """The one worker. ``collective_rpc`` calls its methods, and hands it to functions."""

    rank = local_rank = 0

    def __init__(self, llm: LLM, memory: Memory, engine_config: Any = None):
        runner = llm.model_runner
        if llm.config.tensor_parallel_size == 1:
            memory_of_llm = weakref.proxy(memory)  # the model must not keep its engine alive
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

    def __init__(self, worker: Worker, memory: Memory):
        self.driver_worker, self._memory = worker, memory

    def collective_rpc(self, method: str | Callable, timeout: float | None = None, args: tuple = (),
                       kwargs: dict | None = None) -> list[Any]:
        """Call a method of the worker, or a function with the worker as first argument; one result, of the one rank."""
        self._memory.require_idle("collective_rpc")
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

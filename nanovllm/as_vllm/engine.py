"""vLLM's ``LLMEngine``: requests with string ids, driven step by step."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from nanovllm.as_vllm import launch, options, sampling
from nanovllm.as_vllm.prompts import as_prompts, refuse, refuse_lora
from nanovllm.as_vllm.sampling import RequestOutputKind
from nanovllm.as_vllm.views import ModelConfig, vllm_config
from nanovllm.engine.request import Request
from nanovllm.engine.stream import DeltaStream
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.utils import checkpoint


class LLMEngine:
    """vLLM's engine loop over one nanovllm engine. Made by ``from_engine_args``, or by ``LLM``.

    Attributes:
        vllm_config, model_config: views of the options.
    """

    def __init__(self, model: str, keywords: dict[str, Any]):
        from nanovllm.as_vllm.workers import Executor, Memory, Profiler, worker_class  # imports torch

        extended_worker = worker_class(keywords.get("worker_extension_cls") or "")
        self._llm = llm = launch.start(model, keywords)
        self._keywords = keywords
        self._profiler = Profiler(keywords.get("profiler_config"))
        self.model_config = ModelConfig(llm.config, {"model": model, **keywords})
        self.model_config.dtype = llm.model_runner.dtype
        self.vllm_config = vllm_config(llm.config, self.model_config, llm.model_runner.num_kvcache_blocks)
        self.cache_config, self.scheduler_config = self.vllm_config.cache_config, self.vllm_config.scheduler_config
        self.parallel_config = self.vllm_config.parallel_config
        self._memory = Memory(llm)
        worker = extended_worker(llm, self._memory, self.vllm_config)
        self.model_executor = Executor(worker, self._memory, llm.config.tensor_parallel_size)
        self._requests: dict[str, Tracked] = {}

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> "LLMEngine":
        keywords = options.keywords_of(engine_args)
        return cls(keywords.pop("model", options.PASSED["model"]), keywords)

    # ---------------------------------------------------------------- for LLM

    def awake(self) -> launch.CoreLLM:
        """nanovllm's engine; EngineError while it sleeps."""
        self._memory.require_awake()
        return self._llm

    def get_default_sampling_params(self) -> sampling.SamplingParams:
        source = self._keywords.get("generation_config") or "auto"
        path = self._llm.config.model_path if source == "auto" else source
        defaults = {} if source == "vllm" else checkpoint.read_generation_config(path)
        override = {"max_new_tokens": None, **(self._keywords.get("override_generation_config") or {})}
        max_new_tokens = override.pop("max_new_tokens")
        if max_new_tokens is not None:
            override["max_tokens"] = max_new_tokens
        return sampling.SamplingParams.from_optional(**{**defaults, **override})

    # ---------------------------------------------------------------- requests

    def add_request(self, request_id: str, prompt: Any, params: Any, arrival_time: float | None = None,
                    lora_request: Any = None, tokenization_kwargs: dict | None = None, trace_headers: Any = None,
                    priority: int = 0, *_: Any, **__: Any) -> str:
        """Queue a prompt: text, token ids or a dictionary."""
        refuse_lora(lora_request)
        refuse("add_request", tokenization_kwargs=tokenization_kwargs, priority=priority)
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {type(request_id).__name__}")
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r} is in use by an unfinished request.")
        (prompt,) = as_prompts(prompt)
        number = self.awake().add_request(prompt, sampling.to_nanovllm(params))
        kind = getattr(params, "output_kind", RequestOutputKind.CUMULATIVE)
        self._requests[request_id] = Tracked(request_id, self._llm.request_of(number), kind)
        return request_id

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def abort_request(self, request_id: str | list[str], *_: Any, **__: Any) -> None:
        """Ids that are unknown or finished are passed over."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            tracked = self._requests.pop(name, None)
            if tracked is not None:
                self._llm.abort(tracked.request.request_id)

    def step(self) -> list[RequestOutput]:
        """Outputs of requests with new tokens, as their ``output_kind`` asks."""
        try:
            finished = {request.request_id for request in self.awake().advance()}
        except EngineError:
            if self._llm.is_finished():
                self._requests.clear()  # they were dropped
            raise
        outputs = []
        for tracked in list(self._requests.values()):
            if tracked.request.request_id in finished:
                del self._requests[tracked.name]
                outputs.append(tracked.last())
            elif (output := tracked.output()) is not None:
                outputs.append(output)
        return outputs

    # ---------------------------------------------------------------- tokenizer, caches, workers

    @property
    def tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._llm.set_tokenizer(tokenizer)

    def get_tokenizer(self, lora_request: Any = None) -> Any:
        return self.tokenizer

    def get_tokenizer_group(self) -> Any:
        return SimpleNamespace(tokenizer=self.tokenizer, get_lora_tokenizer=self.get_tokenizer)

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        return self._llm.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._memory.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._memory.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self._memory.is_asleep

    def collective_rpc(self, method: str | Callable, timeout: float | None = None, args: tuple = (),
                       kwargs: dict | None = None) -> list[Any]:
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable) -> list[Any]:
        """Call a function with the model, a ``torch.nn.Module``."""
        return self.collective_rpc(lambda worker: func(worker.get_model()))

    @property
    def engine_core(self) -> Any:
        core = SimpleNamespace(model_executor=self.model_executor, shutdown=self.shutdown)
        return SimpleNamespace(**vars(core), engine_core=core)  # vLLM's client holds the core

    def shutdown(self) -> None:
        """Free the device's memory."""
        self._llm.exit()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        self._profiler.start(profile_prefix)

    def stop_profile(self) -> None:
        self._profiler.stop()

    def do_log_stats(self) -> None:
        """Statistics are not logged."""


class Tracked:
    """A request of ``add_request``, and what ``step`` has reported of it."""

    def __init__(self, name: str, request: Request, kind: RequestOutputKind):
        self.name, self.kind, self.request = name, kind, request
        self._deltas = None if kind is RequestOutputKind.FINAL_ONLY else DeltaStream(request)
        self._so_far = [CompletionOutput(index, "", []) for index in range(len(request.seqs))]

    def output(self) -> RequestOutput | None:
        """Of the unfinished request; None if there is nothing new, or nothing to report before the end."""
        output = None if self._deltas is None else self._deltas.delta()
        if output is None:
            return None
        if self.kind is RequestOutputKind.CUMULATIVE:
            for before, new in zip(self._so_far, output.outputs, strict=True):
                before.text += new.text
                before.token_ids = before.token_ids + new.token_ids
                before.cumulative_logprob = new.cumulative_logprob
                if new.logprobs is not None:
                    before.logprobs = [*(before.logprobs or []), *new.logprobs]  # type: ignore[misc]
            output = self.request.output_of([copy.copy(so_far) for so_far in self._so_far], finished=False)
        return self._named(output)

    def last(self) -> RequestOutput:
        """Of the finished request."""
        if self.kind is RequestOutputKind.DELTA and self._deltas is not None:
            return self._named(self._deltas.last())
        return self._named(self.request.output())

    def _named(self, output: RequestOutput) -> RequestOutput:
        output.request_id = self.name
        return output

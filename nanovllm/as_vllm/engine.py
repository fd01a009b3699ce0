"""vLLM's ``LLMEngine``: requests with string ids, driven step by step; and the views of its configuration."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from nanovllm.as_vllm import launch, options, sampling
from nanovllm.as_vllm.helpers import refuse_lora
from nanovllm.as_vllm.sampling import RequestOutputKind
from nanovllm.config import Config
from nanovllm.engine.request import Request
from nanovllm.engine.stream import DeltaStream
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.utils import checkpoint


class ModelConfig:
    """``model_config`` of an engine, read by scripts for the context length and the vocabulary."""

    def __init__(self, config: Config, keywords: dict[str, Any]):
        self.model = str(keywords.get("model") or config.model)
        self.tokenizer = str(keywords.get("tokenizer") or self.model)
        self.max_model_len = config.max_model_len
        self.trust_remote_code = config.trust_remote_code
        self.seed = config.seed
        self.max_logprobs = config.max_logprobs
        self.logprobs_mode = config.logprobs_mode
        self.enforce_eager = config.enforce_eager
        self.runner_type = self.task = "generate"
        self.is_multimodal_model = self.is_encoder_decoder = False
        self.dtype: Any = None  # set when the runner is there
        self._config = config

    @property
    def hf_config(self) -> Any:
        """transformers' view of config.json."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._config.model_path, trust_remote_code=self.trust_remote_code)

    hf_text_config = hf_config

    def get_vocab_size(self) -> int:
        return self._config.model_config.vocab_size

    def get_hidden_size(self) -> int:
        return self._config.model_config.hidden_size


class LLMEngine:
    """vLLM's engine loop over one nanovllm engine. Made by ``from_engine_args``, or by ``LLM``.

    Attributes:
        vllm_config, model_config: views of the options.
    """

    def __init__(self, model: str, keywords: dict[str, Any]):
        from nanovllm.as_vllm.workers import Executor, Memory, Profiler, worker_class  # imports torch

        self._llm = llm = launch.start(model, keywords)
        self._keywords = keywords
        self._profiler = Profiler(keywords.get("profiler_config"))
        self.model_config = ModelConfig(llm.config, {"model": model, **keywords})
        self.model_config.dtype = llm.model_runner.dtype
        self.vllm_config = SimpleNamespace(
            model_config=self.model_config,
            cache_config=SimpleNamespace(
                block_size=llm.config.kvcache_block_size, num_gpu_blocks=llm.model_runner.num_kvcache_blocks,
                gpu_memory_utilization=llm.config.gpu_memory_utilization,
                enable_prefix_caching=llm.config.enable_prefix_caching,
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=llm.config.max_num_seqs, max_num_batched_tokens=llm.config.max_num_batched_tokens,
                max_model_len=llm.config.max_model_len,
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=llm.config.tensor_parallel_size, pipeline_parallel_size=1, data_parallel_size=1,
                world_size=llm.config.tensor_parallel_size,
            ),
            lora_config=None,
            speculative_config=None,
        )  # fmt: skip
        self.cache_config, self.scheduler_config = self.vllm_config.cache_config, self.vllm_config.scheduler_config
        self.parallel_config = self.vllm_config.parallel_config
        self._memory = Memory(llm)
        worker = worker_class(keywords.get("worker_extension_cls") or "")(llm, self._memory, self.vllm_config)
        self.model_executor = Executor(worker, self._memory)
        self._requests: dict[str, Tracked] = {}

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> "LLMEngine":
        keywords = options.keywords_of(engine_args)
        return cls(keywords.pop("model", options.PASSED["model"]), keywords)

    # ---------------------------------------------------------------- for LLM

    def core(self) -> Any:
        """nanovllm's ``LLM``; EngineError while it sleeps."""
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
        from nanovllm.as_vllm.llm import as_prompts, refuse

        refuse_lora(lora_request)
        refuse("add_request", tokenization_kwargs=tokenization_kwargs, priority=priority)
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {type(request_id).__name__}")
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r} is in use by an unfinished request.")
        (prompt,) = as_prompts(prompt)
        number = self.core().add_request(prompt, sampling.to_nanovllm(params))
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
            finished = {request.request_id for request in self.core().advance()}
        except EngineError:
            self._requests.clear()  # nanovllm has dropped them
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
        return SimpleNamespace(tokenizer=self.tokenizer)

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        return self._llm.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._memory.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._memory.wake_up(tags)

    def is_sleeping(self) -> bool:
        return bool(self._memory.asleep)

    def collective_rpc(self, method: str | Callable, timeout: float | None = None, args: tuple = (),
                       kwargs: dict | None = None) -> list[Any]:
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable) -> list[Any]:
        """Call a function with the model, a ``torch.nn.Module``."""
        return self.collective_rpc(lambda worker: func(worker.get_model()))

    @property
    def engine_core(self) -> Any:
        core = SimpleNamespace(model_executor=self.model_executor)
        return SimpleNamespace(model_executor=self.model_executor, engine_core=core)  # vLLM's client holds the core

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
        is_delta = self.kind is RequestOutputKind.DELTA and self._deltas is not None
        return self._named(self._deltas.last() if is_delta else self.request.output())  # type: ignore[union-attr]

    def _named(self, output: RequestOutput) -> RequestOutput:
        output.request_id = self.name
        output.prompt_token_ids = self.request.seqs[0].prompt_token_ids
        return output

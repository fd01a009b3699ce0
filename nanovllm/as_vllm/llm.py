"""vLLM's ``LLM`` and ``LLMEngine``: its signatures over one nanovllm engine."""

import os
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import nanovllm.llm
from nanovllm.as_vllm import launch, options
from nanovllm.as_vllm.prompts import as_prompt, as_prompts, refuse
from nanovllm.as_vllm.requests import NamedRequest
from nanovllm.as_vllm.sampling import SamplingParams, snapshots
from nanovllm.as_vllm.worker import worker_class
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.utils import checkpoint

OF_THE_WORKER = ("sleep", "wake_up", "is_sleeping", "collective_rpc", "apply_model")  # see ``DriverWorker``


class LLMEngine:
    """vLLM's engine: requests with string ids, driven step by step.

    Args:
        model: a local directory or a hub id.
        **keywords: vLLM's engine keywords; see ``nanovllm.as_vllm.options``.

    Attributes:
        vllm_config, model_config and so on: the options; see ``EngineConfig``.
        model_executor: holds the ``driver_worker``.

    Raises:
        ConfigError: a keyword is unknown, or has a value that nanovllm cannot honour.
    """

    def __init__(self, model: str, **keywords: Any):
        make_worker = worker_class(keywords.get("worker_extension_cls") or "")
        self._keywords, self._llm = keywords, launch.start(model, keywords)
        config = options.EngineConfig(self._llm.config, {"model": model, **keywords}, self._llm.model_runner)
        self.vllm_config = self.model_config = self.cache_config = self.scheduler_config = self.parallel_config = config
        self._worker = worker = make_worker(self._llm, config)
        self.model_executor = SimpleNamespace(driver_worker=worker, collective_rpc=worker.collective_rpc)
        self._requests: dict[str, NamedRequest] = {}
        self._profile: Any = None  # torch's profiler, while it runs

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> Any:
        return cls(**vars(engine_args))

    def __getattr__(self, name: str) -> Any:
        if name in OF_THE_WORKER:
            return getattr(self._worker, name)
        raise AttributeError(f"nanovllm's stand-in for vLLM's {type(self).__name__} has no {name!r}.")

    def awake(self) -> nanovllm.llm.LLM:
        """nanovllm's engine; EngineError while it sleeps at level 0. Of other levels it knows itself."""
        if self._worker.is_paused:
            raise EngineError("the engine sleeps (scheduling); call wake_up() first.")
        return self._llm

    def shutdown(self) -> None:
        """Free the device's memory."""
        self._llm.exit()

    engine_core = property(lambda self: self)

    def get_tokenizer(self, lora_request: Any = None) -> Any:
        refuse("get_tokenizer", lora_request=lora_request)
        return self._llm.get_tokenizer()

    def set_tokenizer(self, tokenizer: Any) -> None:
        self._llm.set_tokenizer(tokenizer)

    tokenizer = property(get_tokenizer, set_tokenizer)

    def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        return self._llm.reset_prefix_cache()

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, with those of the checkpoint's ``generation_config.json``."""
        source = self._keywords.get("generation_config") or "auto"
        path = self._llm.config.model_path if source == "auto" else source
        defaults = {} if source == "vllm" else checkpoint.read_generation_config(path)
        override = dict(self._keywords.get("override_generation_config") or {})
        if (max_new_tokens := override.pop("max_new_tokens", None)) is not None:
            override["max_tokens"] = max_new_tokens
        return SamplingParams.from_optional(**{**defaults, **override})

    def get_metrics(self) -> list[Any]:
        return []  # as with disable_log_stats, the default

    def do_log_stats(self) -> None:
        """Statistics are not logged."""

    # ---------------------------------------------------------------- requests

    def add_request(self, request_id: str, prompt: Any, params: Any, arrival_time: float | None = None,
                    lora_request: Any = None, **others: Any) -> str:
        """Queue a prompt: text, token ids or a dictionary."""
        refuse("add_request", lora_request=lora_request, **others)
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {type(request_id).__name__}")
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r} is in use by an unfinished request.")
        self._requests[request_id] = NamedRequest(self.awake(), request_id, as_prompt(prompt), params)
        return request_id

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def abort_request(self, request_id: str | list[str], *_: Any, **__: Any) -> None:
        """Ids that are unknown or finished are passed over."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if name in self._requests:
                self._llm.abort(self._requests.pop(name).request_id)

    def step(self) -> list[RequestOutput]:
        """Outputs of requests with new tokens, as their ``output_kind`` asks."""
        try:
            finished = dict(self.awake().step()[0])  # ids -> tokens
        except BaseException:
            if self._llm.is_finished():
                self._requests.clear()  # they were dropped
            raise
        outputs = [request.output(request.request_id in finished) for request in self._requests.values()]
        self._requests = {name: r for name, r in self._requests.items() if r.request_id not in finished}
        return [output for output in outputs if output is not None]

    # ---------------------------------------------------------------- torch's profiler

    def start_profile(self, profile_prefix: str | None = None) -> None:
        given = self._keywords.get("profiler_config") or {}
        given = given if isinstance(given, dict) else vars(given)
        directory = given.get("torch_profiler_dir") or os.environ.get("VLLM_TORCH_PROFILER_DIR")
        if not directory:
            raise EngineError(
                "start_profile needs LLM(profiler_config={'profiler': 'torch', 'torch_profiler_dir': '/a/directory'})."
            )
        from torch.profiler import profile, tensorboard_trace_handler

        self._profile = profile(on_trace_ready=tensorboard_trace_handler(directory, profile_prefix or "nanovllm"))
        self._profile.start()

    def stop_profile(self) -> None:
        """Write a Chrome trace."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


class LLM(LLMEngine):
    """vLLM's ``LLM`` served by nanovllm; takes the same arguments."""

    llm_engine = property(lambda self: self, fdel=LLMEngine.shutdown)

    def generate(self, prompts: Any = None, sampling_params: Any = None, prompt_token_ids: Any = None,
                 use_tqdm: bool | Callable = True, lora_request: Any = None, **others: Any) -> list[RequestOutput]:
        """Complete one prompt or many; ``prompt_token_ids`` is how ids were given before prompt dictionaries.

        Raises:
            RequestError: a prompt or a parameter cannot be served, or one of the ``others`` is given.
        """
        refuse("generate", lora_request=lora_request, **others)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        outputs = self.awake().generate(as_prompts(prompts, prompt_token_ids), snapshots(params), use_tqdm)
        return flatten_logprobs(outputs, params)

    def chat(self, messages: list, sampling_params: Any = None, use_tqdm: bool | Callable = True,
             lora_request: Any = None, chat_template: str | None = None, chat_template_content_format: str = "auto",
             add_generation_prompt: bool = True, continue_final_message: bool = False,
             tools: list[dict] | None = None, chat_template_kwargs: dict | None = None,
             **others: Any) -> list[RequestOutput]:
        """Answer one conversation or many. Raises what ``generate`` raises."""
        refuse("chat", lora_request=lora_request, **others)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        outputs = self.awake().chat(
            messages, snapshots(params), use_tqdm, chat_template=chat_template, tools=tools,
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )  # fmt: skip
        return flatten_logprobs(outputs, params)

    def beam_search(self, prompts: Any, params: Any, lora_request: Any = None, use_tqdm: bool = False,
                    concurrency_limit: int | None = None) -> list[Any]:
        """``concurrency_limit`` changes no result: the engine batches by its memory."""
        refuse("beam_search", lora_request=lora_request)
        return self.awake().beam_search(as_prompts(prompts), params)

    def _no_pooling(self, *_: Any, **__: Any) -> Any:
        raise EngineError("embed, encode, classify, reward and score of vLLM need a pooling model; nanovllm generates "
                          "text only.")  # fmt: skip

    embed = encode = classify = reward = score = _no_pooling


class FlatLogprobs(list):
    """Log-probabilities by position, as a list of dictionaries, and as columns over all their entries."""

    token_ids = property(lambda self: [token_id for at in self for token_id in at or ()])
    logprobs = property(lambda self: self._column("logprob"))
    ranks = property(lambda self: self._column("rank"))
    decoded_tokens = property(lambda self: self._column("decoded_token"))
    end_indices = property(lambda self: list(accumulate(len(at or ()) for at in self)))
    start_indices = property(lambda self: [0, *self.end_indices][:-1])

    def _column(self, name: str) -> list[Any]:
        return [getattr(entry, name) for at in self for entry in (at or {}).values()]


def flatten_logprobs(outputs: list[RequestOutput], params: Any) -> list[RequestOutput]:
    """Where ``flat_logprobs`` asks for it."""
    params = params if isinstance(params, (list, tuple)) else [params] * len(outputs)
    for output, asked in zip(outputs, params, strict=True):
        if getattr(asked, "flat_logprobs", False):
            for holder, name in [(output, "prompt_logprobs"), *((c, "logprobs") for c in output.outputs)]:
                if (logprobs := getattr(holder, name)) is not None:
                    setattr(holder, name, FlatLogprobs(logprobs))
    return outputs

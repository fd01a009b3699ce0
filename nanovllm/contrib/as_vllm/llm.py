"""vLLM's ``LLM`` and ``LLMEngine``: its signatures over one nanovllm engine."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.config import read_generation_config
from nanovllm.contrib.as_vllm import options, processors
from nanovllm.contrib.as_vllm.helpers import load_chat_template
from nanovllm.contrib.as_vllm.metrics import Metric, as_metrics
from nanovllm.contrib.as_vllm.pooling import PoolingOutput, checked, usable
from nanovllm.contrib.as_vllm.sampling import RequestOutputKind, SamplingParams, flatten_logprobs, snapshots
from nanovllm.contrib.as_vllm.worker import worker_class
from nanovllm.contrib.tool_calls import with_parsed_arguments
from nanovllm.errors import EngineError, RequestError
from nanovllm.llm import is_one_prompt
from nanovllm.outputs import EmbeddingOutput, PoolingRequestOutput, RequestOutput, ScoringOutput

OF_THE_WORKER = "sleep", "wake_up", "is_sleeping", "collective_rpc", "apply_model"  # see ``DriverWorker``
PROMPT_KEYS = "prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs"
IGNORED_KEYS = "cache_salt", "type", "multi_modal_uuids"  # no value of theirs changes an output


class LLMEngine:
    """vLLM's engine: requests with string ids, driven step by step.

    Args:
        model: a local directory or a hub id.
        **keywords: vLLM's engine keywords; see ``nanovllm.contrib.as_vllm.options``.

    Attributes:
        vllm_config, model_config and so on: the options; see ``EngineConfig``.

    Raises:
        ConfigError: a keyword is unknown, or has a value that nanovllm cannot honour.
    """

    def __init__(self, model: str, **keywords: Any):
        make_worker = worker_class(keywords.get("worker_cls"), keywords.get("worker_extension_cls") or "")
        self._chat_template = load_chat_template(keywords.get("chat_template"))
        self._keywords, self._llm = keywords, options.start(model, keywords)
        config = options.EngineConfig(self._llm.config, {"model": model, **keywords}, self._llm.model_runner)
        self.vllm_config = self.model_config = self.cache_config = self.scheduler_config = self.parallel_config = config
        self.model_executor = self._worker = make_worker(self._llm, config)
        self._processors = processors.load(keywords.get("logits_processors"), config, self._llm.model_runner.device)
        self._thinks_first = options.thinks_first(keywords, self._llm)
        self._requests: dict[str, tuple[Any, RequestOutputKind, Any]] = {}  # future, kind, parameters; by their names
        self._waiting: dict[str, tuple[Any, ...]] = {}  # arguments of ``_start``, until the engine is idle
        self._loras: set[int] = set()  # ids given to ``add_lora``
        self._names = map(str, count())  # request ids for ``enqueue``
        self._profile: Any = None  # torch's profiler, while it runs

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> Any:
        return cls(**vars(engine_args))

    def __getattr__(self, name: str) -> Any:
        if name in OF_THE_WORKER:
            return getattr(self._worker, name)
        raise AttributeError(f"nanovllm's stand-in for vLLM's {type(self).__name__} has no {name!r}.")

    def awake(self) -> Any:  # a copy of nanovllm may lack verbs that are called below
        """nanovllm's engine; EngineError while it sleeps at level 0. It checks the other levels itself."""
        if self._worker.is_paused:
            raise EngineError("the engine sleeps (scheduling); call wake_up() first.")
        return self._llm

    def shutdown(self) -> None:
        """Free the device's memory."""
        self._llm.exit()

    engine_core = property(lambda self: self)

    def get_model_config(self) -> options.EngineConfig:
        return self.model_config

    def get_tokenizer(self, lora_request: Any = None) -> Any:
        return self._llm.get_tokenizer()

    def set_tokenizer(self, tokenizer: Any) -> None:
        self._llm.set_tokenizer(tokenizer)

    tokenizer = property(get_tokenizer, set_tokenizer)

    def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        return self._llm.reset_prefix_cache()

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, overridden by the checkpoint's ``generation_config.json``."""
        source = self._keywords.get("generation_config") or "auto"
        path = self._llm.config.model_path if source == "auto" else source
        values = {} if source == "vllm" else read_generation_config(path)
        for name, value in (self._keywords.get("override_generation_config") or {}).items():
            values["max_tokens" if name == "max_new_tokens" else name] = value
        return SamplingParams.from_optional(**values)

    def reset_mm_cache(self) -> None:
        """Does nothing: images are not cached."""

    def get_world_size(self, include_dp: bool = True) -> int:
        """Count the ranks of all data-parallel processes (``VLLM_DP_SIZE``), or of this one."""
        return self.parallel_config.world_size * (int(os.environ.get("VLLM_DP_SIZE", "1")) if include_dp else 1)

    def get_metrics(self) -> list[Metric]:
        """Read the engine's counters, with or without ``disable_log_stats``."""
        return as_metrics(self._llm.metrics(), self.model_config.model)

    def do_log_stats(self) -> None:
        """Statistics are not logged."""

    # ---------------------------------------------------------------- requests

    def add_request(self, request_id: str, prompt: Any, params: Any, arrival_time: float | None = None,
                    lora_request: Any = None, **others: Any) -> str:
        """Queue a prompt: text, token ids or a dictionary. With another adapter it waits for the requests before it."""
        refuse("add_request", **others)
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {type(request_id).__name__}")
        self._queue(request_id, prompt, params, lora_request, getattr(params, "output_kind", None))
        return request_id

    def _snapshots(self, params: Any) -> Any:
        return snapshots(params, self._processors, self._thinks_first)

    def _queue(self, request_id: str, prompt: Any, given: Any, lora_request: Any, kind: Any) -> None:
        if self.is_unfinished(request_id):
            raise RequestError(f"request_id={request_id!r} is in use by an unfinished request.")
        request = lora_request, kind, given, as_prompt(prompt), self._snapshots(given)
        if self._waiting or not self._fits(lora_request):
            self.awake().submit(*request[3:]).cancel()  # raises what can never be served
            self._waiting[request_id] = request
        else:
            self._start(request_id, *request)

    def _start(self, request_id: str, lora_request: Any, kind: Any, given: Any, prompt: Any, params: Any) -> None:
        self._adapt(lora_request)
        self._requests[request_id] = self.awake().submit(prompt, params), kind, given

    def _fits(self, lora_request: Any) -> bool:
        """Whether a request may start: it needs the weights of the unfinished ones, or there are none."""
        needs_others = getattr(lora_request, "load_inplace", False) or version_of(lora_request) != self._worker.lora
        return not (self._keywords.get("enable_lora") and self._requests and needs_others)

    def _adapt(self, lora_request: Any) -> None:
        """Merge a request's adapter into the weights in place of the one before, which takes an idle engine."""
        if not self._keywords.get("enable_lora"):
            if lora_request is not None:
                raise RequestError(f"lora_request={lora_request!r:.200} needs LLM(enable_lora=True).")
            return
        lora, worker = version_of(lora_request), self._worker
        if lora is not None and worker.lora is None and worker.has_new_weights:
            raise RequestError(
                "a lora_request after new weights were loaded is not supported: nanovllm merges adapters into the "
                "checkpoint's weights. Call collective_rpc('reload_weights'), or save a new checkpoint."
            )
        if worker.lora != lora or getattr(lora_request, "load_inplace", False):
            if self._requests:
                raise EngineError(
                    f"lora_request={lora_request!r:.200} needs other weights than the unfinished requests of "
                    "add_request. Call step() until has_unfinished_requests() is False; or add_request, which waits."
                )
            self.awake().update_weights(lora=None if lora is None else lora[0])
            worker.lora, worker.has_new_weights = lora, False

    def add_lora(self, lora_request: Any) -> bool:
        """Read an adapter before its first request; it takes an idle engine, and the place of the one before."""
        self._adapt(lora_request)
        self._loras.add(lora_request.lora_int_id)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Take an adapter off the list; True if it was there. A request may name an adapter that is not."""
        was_there = lora_id in self._loras
        self._loras.discard(lora_id)
        return was_there

    def list_loras(self) -> set[int]:
        """List the ids that ``add_lora`` was given."""
        return set(self._loras)

    def _without_adapter(self) -> Any:
        """nanovllm's engine with the checkpoint's own weights."""
        self._adapt(None)
        return self.awake()

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._waiting

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._waiting)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests) + len(self._waiting)

    def abort_request(self, request_id: str | list[str], *_: Any, **__: Any) -> None:
        """Abort requests; unknown or finished ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            self._waiting.pop(name, None)
            if name in self._requests:
                self._llm.abort(self._requests.pop(name)[0].request_id)

    @contextmanager
    def _forgetting_dropped(self) -> Iterator[None]:
        """Forget the requests that a failed step has dropped: all of them."""
        try:
            yield
        except BaseException:
            if self._llm.is_finished():
                self._requests.clear()
                self._waiting.clear()
            raise

    def step(self) -> list[RequestOutput]:
        """Outputs of requests with new tokens, as their ``output_kind`` asks."""
        while self._waiting and self._fits(next(iter(self._waiting.values()))[0]):
            name = next(iter(self._waiting))
            self._start(name, *self._waiting.pop(name))
        with self._forgetting_dropped():
            self.awake().step()
        outputs = []
        for name, (future, kind, given) in list(self._requests.items()):
            if kind is RequestOutputKind.FINAL_ONLY and not future.done():
                continue
            if (output := future.delta(cumulative=kind is not RequestOutputKind.DELTA)) is not None:
                if output.finished:
                    del self._requests[name]
                output.request_id = name
                outputs += flatten_logprobs([output], given)
        return outputs

    # ---------------------------------------------------------------- torch's profiler

    def start_profile(self, profile_prefix: str | None = None, **others: Any) -> None:
        refuse("start_profile", **others)
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
        refuse("generate", **others)
        prompts = as_prompts(prompts, prompt_token_ids)
        return self._complete("generate", prompts, sampling_params, lora_request, use_tqdm)

    def _complete(self, method: str, prompts: Any, sampling_params: Any, lora_request: Any, *use_tqdm: Any,
                  **options: Any) -> list[RequestOutput]:
        """Call nanovllm's ``method`` with copies of the parameters; None stands for the checkpoint's defaults."""
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params

        def run(prompts: Any, params: Any) -> list[RequestOutput]:
            return getattr(self.awake(), method)(prompts, self._snapshots(params), *use_tqdm, **options)

        return flatten_logprobs(self._by_adapter(prompts, params, lora_request, run), params)

    def _by_adapter(self, prompts: Any, params: Any, lora_request: Any, run: Callable[[Any, Any], list]) -> list[Any]:
        """``run(prompts, params)``, adapter by adapter where each prompt has a ``lora_request`` of its own; the outputs
        in the order of the prompts.
        """
        if not isinstance(lora_request, (list, tuple)):
            self._adapt(lora_request)
            outputs = run(prompts, params)
            for output in outputs:
                output.lora_request = lora_request
            return outputs
        prompts = [prompts] if is_one_prompt(prompts) else prompts
        lora_requests = for_each("lora_requests", lora_request, prompts)
        results: dict[int, Any] = {}
        for adapter in dict.fromkeys(lora_requests):
            ours = [i for i, asked in enumerate(lora_requests) if asked == adapter]
            own = [params[i] for i in ours] if isinstance(params, (list, tuple)) else params
            outputs = self._by_adapter([prompts[i] for i in ours], own, adapter, run)
            results.update(zip(ours, outputs, strict=True))
        return [results[i] for i in range(len(prompts))]

    def chat(self, messages: list, sampling_params: Any = None, use_tqdm: bool | Callable = True,
             lora_request: Any = None, chat_template: str | None = None, chat_template_content_format: str = "auto",
             add_generation_prompt: bool = True, continue_final_message: bool = False,
             tools: list[dict] | None = None, chat_template_kwargs: dict | None = None,
             **others: Any) -> list[RequestOutput]:
        """Answer one conversation or many. Raises what ``generate`` raises, and for an image that cannot be read."""
        refuse("chat", **others)
        prompts = self._prompts_of(messages, sampling_params, chat_template, chat_template_kwargs, tools=tools,
                                   add_generation_prompt=add_generation_prompt,
                                   continue_final_message=continue_final_message,
                                   chat_template_content_format=chat_template_content_format)  # fmt: skip
        outputs = self._complete("generate", prompts, sampling_params, lora_request, use_tqdm)
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            if "multi_modal_data" in prompt and output["finish_reason"] == "error" and not output["token_ids"]:
                raise RequestError(f"conversation {i}: {output.outputs[0].stop_reason}")
        return outputs

    def _prompts_of(self, messages: list, sampling_params: Any, chat_template: str | None,
                    chat_template_kwargs: dict | None, **options: Any) -> list[Any]:
        """Make prompts of one conversation or many. ``options`` of the template that are None are left out."""
        if not isinstance(chat_template_kwargs, (dict, type(None))):
            raise RequestError(f"chat_template_kwargs must be a dict or None, not {chat_template_kwargs!r:.100}.")
        options["chat_template"] = chat_template or self._chat_template
        given = {name: value for name, value in options.items() if value is not None}
        messages, params = with_parsed_arguments(messages), sampling_params or SamplingParams()
        return self.awake().chat_prompts(messages, params, **{**(chat_template_kwargs or {}), **given})

    def enqueue(self, prompts: Any, sampling_params: Any = None, lora_request: Any = None, priority: Any = None,
                use_tqdm: bool | Callable = True, **others: Any) -> list[str]:
        """Queue one prompt or many for ``wait_for_completion``; return the ids of their requests.

        Raises:
            RequestError: as ``generate``; none of the prompts is queued.
        """
        refuse("enqueue", priority=priority, **others)
        prompts = as_prompts(prompts)
        prompts = [prompts] if is_one_prompt(prompts) else list(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        own_params = for_each("sampling_params", params, prompts)
        own_loras = for_each("lora_requests", lora_request, prompts)
        names: list[str] = []
        try:
            for prompt, own, lora in zip(prompts, own_params, own_loras, strict=True):
                name = next(name for name in self._names if not self.is_unfinished(name))
                self._queue(name, prompt, own, lora, RequestOutputKind.FINAL_ONLY)
                names.append(name)
        except BaseException:
            self.abort_request(names)
            raise
        return names

    def enqueue_chat(self, messages: list, sampling_params: Any = None, use_tqdm: bool | Callable = True,
                     lora_request: Any = None, chat_template: str | None = None,
                     chat_template_content_format: str = "auto", add_generation_prompt: bool = True,
                     continue_final_message: bool = False, tools: list[dict] | None = None,
                     chat_template_kwargs: dict | None = None, **others: Any) -> list[str]:
        """Queue one conversation or many, as ``enqueue`` does."""
        refuse("enqueue_chat", **others)
        prompts = self._prompts_of(messages, sampling_params, chat_template, chat_template_kwargs, tools=tools,
                                   add_generation_prompt=add_generation_prompt,
                                   continue_final_message=continue_final_message,
                                   chat_template_content_format=chat_template_content_format)  # fmt: skip
        return self.enqueue(prompts, sampling_params, lora_request)

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: bool | Callable = True) -> list[RequestOutput]:
        """Complete all queued requests; return their outputs in the order of the queue. There is no progress bar."""
        names, outputs = [*self._requests, *self._waiting], {}
        while self.has_unfinished_requests():
            with self._forgetting_dropped():
                for future, *_ in list(self._requests.values()):
                    future.exception()  # takes the steps; ``step`` would ask every request after each
            outputs.update({output.request_id: output for output in self.step() if output.finished})
        return [outputs[name] for name in names]

    def beam_search(self, prompts: Any, params: Any, lora_request: Any = None, use_tqdm: bool = False,
                    concurrency_limit: int | None = None) -> list[Any]:
        """``concurrency_limit`` changes no result: the engine batches by its memory."""
        run = self.awake().beam_search
        return self._by_adapter(as_prompts(prompts), params, lora_request, run)

    def embed(self, prompts: Any, *, use_tqdm: bool | Callable = True, pooling_params: Any = None,
              **others: Any) -> list[PoolingRequestOutput]:
        """``outputs.embedding`` of each prompt, without the checkpoint's default prompt, as in vLLM."""
        refuse("embed", **others)
        params, embed = checked("embed", pooling_params), self._without_adapter().embed
        return usable(embed(as_prompts(prompts), params.is_active, params.dimensions, use_tqdm, instruction=""))

    def classify(self, prompts: Any, *, use_tqdm: bool | Callable = True, pooling_params: Any = None,
                 **others: Any) -> list[PoolingRequestOutput]:
        """``outputs.probs`` of each prompt."""
        refuse("classify", **others)
        params = checked("classify", pooling_params)
        if params.is_active is False or params.dimensions is not None:
            raise RequestError("classify: logits without activation, and dimensions, are not supported.")
        return usable(self._without_adapter().classify(as_prompts(prompts), use_tqdm))

    def encode(self, prompts: Any, pooling_params: Any = None, *, use_tqdm: bool | Callable = True,
               pooling_task: str | None = None, **others: Any) -> list[PoolingRequestOutput]:
        """``outputs.data``, a tensor, of each prompt; for the tasks "embed" and "classify"."""
        import torch

        refuse("encode", **others)
        task = pooling_task or ("classify" if self.awake().config.model_config.num_labels else "embed")
        methods = {"embed": self.embed, "classify": self.classify}
        if task not in methods:
            tasks = " and ".join(map(repr, methods))
            raise RequestError(f"encode: pooling_task={task!r} is not supported, only {tasks}.")
        outputs = methods[task](prompts, use_tqdm=use_tqdm, pooling_params=pooling_params)
        for output in outputs:
            of = output.outputs
            output.outputs = PoolingOutput(torch.tensor(of.values if isinstance(of, EmbeddingOutput) else of.probs))
        return outputs

    def score(self, data_1: Any, data_2: Any, *, use_tqdm: bool | Callable = True, pooling_params: Any = None,
              **others: Any) -> list[PoolingRequestOutput]:
        """Score each text of ``data_2`` with that of ``data_1``, or with the only one: ``outputs.score``.

        A reranker scores the two texts as one prompt; for other models the score is the cosine of their embeddings.
        """
        refuse("score", **others)
        checked("score", pooling_params)
        first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise RequestError(f"score: {len(first)} texts and {len(second)}; give one, or as many.")
        llm = self._without_adapter()
        if llm.config.model_config.num_labels or llm.config.model_config.label_tokens:
            return usable(llm.rerank(first, second, template="{query}{document}", use_tqdm=use_tqdm))
        outputs = usable(llm.embed(second, True, use_tqdm=use_tqdm, instruction=""))
        queries = list(dict.fromkeys(first))
        of_queries = llm.embed(queries, True, use_tqdm=False, instruction="")
        embeddings = {text: x.embedding for text, x in zip(queries, of_queries, strict=True)}
        for text, output in zip(first, outputs, strict=True):
            output.outputs = ScoringOutput(float(np.dot(embeddings[text], output.embedding)))
        return outputs

    def reward(self, *_: Any, **__: Any) -> Any:
        raise EngineError("reward of vLLM, a score for every token, is not supported by nanovllm; see classify.")


def version_of(lora_request: Any) -> tuple | None:
    """Path of an adapter, and marks of its files, which tell whether it was saved again; None without an adapter."""
    if lora_request is None:
        return None
    path = lora_request.lora_path
    stats = [file.stat() for file in sorted(Path(path).expanduser().glob("adapter_*"))]  # none for a hub id
    return path, *((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats)


def as_prompts(prompts: Any, prompt_token_ids: Any = None) -> Any:
    """One prompt or many, as nanovllm takes them; ids beside them are how they were given before dictionaries."""
    if prompt_token_ids is not None:
        ids = [prompt_token_ids] if is_one_prompt(prompt_token_ids) else prompt_token_ids
        texts = [None] * len(ids) if prompts is None else [prompts] if isinstance(prompts, str) else list(prompts)
        if len(texts) != len(ids):
            raise RequestError(f"{len(texts)} prompts but {len(ids)} prompt_token_ids.")
        return [{"prompt": t, "prompt_token_ids": i} for t, i in zip(texts, ids, strict=True)]
    return [as_prompt(prompt) for prompt in prompts] if isinstance(prompts, (list, tuple)) else as_prompt(prompts)


def as_prompt(prompt: Any) -> Any:
    """A dictionary without the keys that are empty, or change nothing; anything else as it is."""
    if not isinstance(prompt, Mapping):
        return prompt
    for key, value in prompt.items():
        is_given = hasattr(value, "dtype") or value  # a tensor has no truth value
        if is_given and key not in (*PROMPT_KEYS, *IGNORED_KEYS):
            raise RequestError(f"a prompt with {key!r} is not supported by nanovllm; allowed: {PROMPT_KEYS}.")
    return {key: prompt[key] for key in PROMPT_KEYS if prompt.get(key) is not None}


def for_each(what: str, value: Any, prompts: list) -> Any:
    """Repeat one value for every prompt, or check a list's length."""
    if not isinstance(value, (list, tuple)):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(value)} {what}.")
    return value


def refuse(method: str, **values: Any) -> None:
    """Raise RequestError for arguments that would change the result and are not supported."""
    for name, value in values.items():
        if any(value) if isinstance(value, (list, tuple)) else value:  # priorities of 0 change nothing
            raise RequestError(f"{method}: {name}={value!r:.200} is not supported by nanovllm; leave it out.")

"""The engine: requests come in, steps repeat until all are finished, outputs go out.

Owns the loop. The input processor checks prompts, the scheduler decides what is computed, the model runner computes it,
the output processor joins what comes back. ``nanovllm.llm`` has the other verbs.
"""

import gc
import os
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from functools import cached_property
from threading import RLock
from typing import TYPE_CHECKING, Any

from nanovllm.config import Config
from nanovllm.core import Batch
from nanovllm.engine.callers import DROPPED, Caller, collect
from nanovllm.engine.guard import Guard, abandon, all_or_nothing
from nanovllm.engine.input_processor import InputProcessor, Params
from nanovllm.engine.loading import LoadingQueue
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.text.prompts import Prompt, as_prompts
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.engine.token_processor import TokenProcessors
from nanovllm.engine.variants import make_scheduler
from nanovllm.errors import EngineError
from nanovllm.outputs import RequestOutput
from nanovllm.runner.worker import start_runner
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import read_eos_token_ids, read_generation_config

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner, StepHandle


class LLMEngine:
    """The engine of ``LLM``: requests and steps.

    Args:
        model: a local directory, a hub id such as "Qwen/Qwen3-0.6B", or None for the bundled demo model.
        **options: see ``nanovllm.config.Config``.

    Raises:
        ConfigError, CheckpointError, OutOfMemoryError: an option, the model's files or the memory at hand forbid it.
        WorkerError: a tensor-parallel rank failed. Any method may raise it; the engine is then shut down.

    Use it as a context manager, or call ``exit()``, to free the device's memory at a time of your choice.
    """

    def __init__(self, model: str | None = None, **options: Any):
        config = Config.from_options(model, options)
        with Guard():
            tokenizer_source = config.tokenizer_path, config.skip_tokenizer_init, config.trust_remote_code
            self._tokenizer = AsyncTokenizer(*tokenizer_source)
            runner = self.model_runner = start_runner(config)
            self.config = config = runner.config  # its max_num_seqs is what memory has room for
            # the runner holds no reference to the engine, so collecting the engine frees the runner's memory too
            self._finalizer = weakref.finalize(self, _shut_down, runner, self._tokenizer)
            try:
                # the tokenizer's id is the end-of-sequence token; further ids of the checkpoint are stop tokens
                eos_token_ids = self._tokenizer.eos_token_ids()
                eos_token_ids += read_eos_token_ids(config.model_path, config.model_config.eos_token_ids)
                from nanovllm.runner.device import translate_oom  # imports torch, as the runner has by now

                with translate_oom():
                    self._set_up(make_scheduler(config, runner.num_kvcache_blocks, eos_token_ids, runner.facts))
            except BaseException:
                self._finalizer()
                raise
        gc.collect()  # full collections were off during the start; one here spares the first call

    def _set_up(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._token_processors = TokenProcessors(self.config, self._tokenizer, tuple(scheduler.eos_token_ids))
        num_blocks = self.model_runner.num_kvcache_blocks
        self._inputs = InputProcessor(self.config, num_blocks, self._tokenizer, self._token_processors)
        self._outputs = OutputProcessor(self._tokenizer, self._token_processors, scheduler.metrics)
        self._in_flight: deque[tuple[Batch, StepHandle]] = deque()  # steps whose tokens the host has not seen
        self._added = Caller(detokenize=False)  # requests of ``add_request``
        self._callers: list[Caller | LoadingQueue] = []  # called between steps
        self._lock = RLock()  # held by the thread that uses the engine; see ``Guard``
        self._aborting = RLock()  # held by the thread that aborts abandoned requests
        self._is_changing = False  # whether an ``all_or_nothing`` method is running
        self._abandoned: deque[Request] = deque()  # requests to abort once no such method runs
        self._owner = os.getpid()
        self._why_shut_down = ""

    # ---------------------------------------------------------------- lifetime

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.exit()

    def exit(self) -> None:
        """Free the device's memory; may be called again. Raises EngineError while another thread's call runs."""
        if self._finalizer.alive:
            with Guard(self):
                self._finalizer()

    def _require_running(self) -> None:
        if not self._finalizer.alive:
            raise EngineError(f"this engine is shut down{self._why_shut_down}; make a new LLM(...).")
        if os.getpid() != self._owner:
            raise EngineError("this engine belongs to the process that was forked; make an LLM(...) in this one.")

    def require_ready(self) -> None:
        """Raise EngineError where no request can run: shut down, asleep, or with weights that are half new."""
        self._require_running()
        self.model_runner.weights.require_ready()

    # ---------------------------------------------------------------- requests

    def generate(self, prompts: Prompt | ListLike[Prompt], sampling_params: Params = None,
                 use_tqdm: bool | Callable = True) -> list[RequestOutput]:
        """Complete one prompt or many.

        Args:
            prompts: a string, a list of token ids, or ``{"prompt": ...}`` / ``{"prompt_token_ids": ...}``; or a list.
                With images: ``{"prompt": ..., "multi_modal_data": {"image": image}}``, or a list of images, and a
                placeholder for each in the text. An image is a PIL image, a numpy array uint8 [H, W, 3], bytes, a
                data URL, or a path or URL that an option of ``LLM`` allows.
            sampling_params: one for all, or one for each prompt. Default ``get_default_sampling_params()``.
            use_tqdm: show a progress bar; or a function that makes one, called like ``tqdm``.

        Returns:
            One ``RequestOutput`` for each prompt, in their order. Where an image cannot be read, its ``finish_reason``
            is "error" and its ``stop_reason`` says why.

        Raises:
            RequestError: a prompt can never be served, or the counts differ; nothing was computed.
        """
        with Guard(self):
            self.require_ready()
            params = self.get_default_sampling_params() if sampling_params is None else sampling_params
            requests = self._inputs.make_all(as_prompts(prompts), params)
            return collect(self, requests, Request.output, use_tqdm, desc="Generating")

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt; return its id, with which ``step`` reports it.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        with Guard(self):
            request = self._make(prompt, sampling_params, waits=True)
            self.queue([request], self._added)
        return request.request_id

    def _make(self, prompt: Prompt, params: SamplingParams | None, waits: bool = False) -> Request:
        self.require_ready()
        params = self.get_default_sampling_params() if params is None else params
        return self._inputs.make(prompt, self._inputs.checks.copy_of(params), waits=waits)

    def abort(self, request_id: int | str) -> None:
        """Drop an unfinished request; unknown and finished ids are ignored."""
        with Guard(self):
            if (request := self._outputs.unfinished.get(str(request_id))) is not None:
                abandon(self, [request])

    @all_or_nothing
    def _abort_abandoned(self) -> None:
        while self._abandoned:
            request = self._abandoned.popleft()
            if request.request_id in request.caller.unfinished and self._finalizer.alive:
                try:
                    self.scheduler.finish(self._outputs.abort(request))
                finally:
                    request.caller.refuse(request, "this request was aborted.")

    def is_finished(self) -> bool:
        """Whether every queued request is reported, finished or dropped; a surplus launch may still run."""
        return self._outputs.is_empty() and not self._added.finished and not self._added.is_dropped

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of a request that gives none: the checkpoint's ``generation_config.json``."""
        if self.config.generation_config == "vllm":
            return SamplingParams()
        return SamplingParams(**read_generation_config(self.config.model_path))

    # ---------------------------------------------------------------- the loop

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Launch the next batch, and take in the one before it.

        Returns:
            [(request id, generated token ids)] of the requests of ``add_request`` that are finished now (of the first
            completion, if a request has several), and the number of tokens processed: positive for a prefill, negative
            for a decode step.
        """
        with Guard(self):
            try:
                num_tokens = self.advance()
            except BaseException:
                self._added.is_dropped = False  # their caller learns it now
                raise
        finished = [(request.request_id, request.completions[0].output_ids) for request in self._added.take()]
        return finished, num_tokens

    @all_or_nothing
    def advance(self) -> int:
        """One step: schedule a batch, launch its forward pass, take in the tokens of the step before, let it sample.

        The host is one step ahead of the tokens it has seen; not on the CPU and in eager mode, where launches wait.

        Returns:
            The number of tokens taken in, as from ``step``; 0: none.
        """
        batch, done = self.scheduler.schedule(), 0
        if batch is not None:
            self.model_runner.forward(batch)
        if self._in_flight:
            done = self._take_in()
        if batch is not None:
            self._in_flight.append((batch, self._sample(batch)))
            if self.model_runner.max_in_flight == 0:
                done = self._take_in()
        for caller in self._callers:
            caller.between_steps(self, is_idle=batch is None and not done)
        return done

    def _take_in(self) -> int:
        """Wait for the oldest step in flight, and take in its tokens; returns their number as ``step`` does."""
        batch, handle = self._in_flight.popleft()
        num_tokens = 0
        for part, result in self.scheduler.steps(batch, handle.wait(), self._outputs.sees_tokens):
            finished = self.scheduler.postprocess(part, result.token_ids)
            if ended := self._outputs.update(part, result):  # by what they say
                self.scheduler.finish(ended)
            if finished or ended:
                self._outputs.finish(finished + ended)
            num_tokens += part.num_tokens
        return -num_tokens if batch.is_decode else num_tokens

    def _sample(self, batch: Batch) -> "StepHandle":
        """Launch the sampling. Ends sequences whose grammar or logits processors fail; their tokens are surplus."""
        masks, process, failed = self._outputs.late_inputs(batch)  # they depend on the tokens just processed
        handle = self.model_runner.sample(masks, process)
        if failed:
            self.scheduler.finish(failed)
            self._outputs.finish(failed)
        return handle

    @all_or_nothing
    def register(self, requests: list[Request], caller: Caller) -> None:
        for request in requests:
            self._outputs.register(request, caller)

    @all_or_nothing
    def queue(self, requests: list[Request], caller: Caller) -> None:
        """Queue requests. One whose inputs still load is scheduled once they are loaded."""
        for request in requests:
            if request.caller is None:
                self._outputs.register(request, caller)
            self._outputs.queued(request)
            if request.has_inputs:
                self._loading.add(request)
            else:
                self.schedule(request)

    def schedule(self, request: Request) -> None:
        """Make the sequences of a queued request, whose inputs are loaded, and hand them to the scheduler."""
        if request.loading is not None:
            self._inputs.complete(request)
        self._inputs.make_completions(request)
        for seq in self._outputs.begin(request):
            self.scheduler.add(seq)

    @cached_property
    def _loading(self) -> LoadingQueue:
        self._callers.append(queue := LoadingQueue(self._inputs.attachments.has_room))
        return queue

    def _drop_all(self) -> None:
        """Drop everything that is queued, running or in flight.

        With several ranks the engine shuts down: an interrupted step may have reached only some of them.
        """
        self._in_flight.clear()
        dropped = self._outputs.clear()
        if self.config.tensor_parallel_size > 1 and self._finalizer.alive:
            self._why_shut_down = ", because a run on several ranks was interrupted or a rank failed"
            self.exit()
        try:
            if self._finalizer.alive:
                self.scheduler.clear()
                self.model_runner.reset()
        finally:  # a lost device raises
            for request in dropped:
                request.caller.refuse(request, DROPPED)


def _shut_down(runner: "ModelRunner", tokenizer: AsyncTokenizer) -> None:
    tokenizer.close()
    runner.exit()

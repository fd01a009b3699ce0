"""The engine: requests come in, steps repeat until all are finished, outputs go out.

Owns the loop. The input processor checks prompts, the scheduler decides what is computed, the model runner computes it,
the output processor joins what comes back. ``nanovllm.llm`` has the other verbs.
"""

import os
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from functools import cached_property
from typing import TYPE_CHECKING

from nanovllm.config import Config
from nanovllm.core import Batch, Sequence
from nanovllm.engine.callers import DROPPED, Caller, collect
from nanovllm.engine.guard import Access, Guard, abandon, all_or_nothing
from nanovllm.engine.input_processor import InputProcessor, Params
from nanovllm.engine.loading import LoadingQueue
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.request import Request
from nanovllm.engine.text.prompts import Prompt, as_prompts
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.engine.token_processor import TokenProcessors
from nanovllm.engine.variants import make_scheduler
from nanovllm.errors import EngineError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import read_eos_token_ids, read_generation_config

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner, StepHandle


class LLMEngine:
    """Requests and steps of one engine.

    Args:
        config: options and limits.
        runner: a started ``ModelRunner``.
        tokenizer: encodes prompts and decodes completions.
        new_processors: makes the processors of sequences whose every token is examined.

    Use it as a context manager, or call ``exit()``, to free the device's memory at a time of your choice.
    """

    def __init__(self, config: Config, runner: "ModelRunner", tokenizer: AsyncTokenizer,
                 new_processors: Callable[..., TokenProcessors] = TokenProcessors):
        self.config, self.model_runner, self._tokenizer = config, runner, tokenizer
        # the runner holds no reference to the engine, so collecting the engine frees the runner's memory too
        self._finalizer = weakref.finalize(self, _shut_down, runner, tokenizer)
        try:
            # the tokenizer's id is the end-of-sequence token; further ids of the checkpoint are stop tokens
            eos_token_ids = tokenizer.eos_token_ids()
            eos_token_ids += read_eos_token_ids(config.model_path, config.model_config.eos_token_ids)
            num_blocks = runner.num_kvcache_blocks
            self.scheduler = make_scheduler(config, num_blocks, eos_token_ids, runner.facts)
            self.token_processors = new_processors(config, tokenizer, tuple(self.scheduler.eos_token_ids))
            self._inputs = InputProcessor(config, num_blocks, tokenizer, self.token_processors)
            self._outputs = OutputProcessor(tokenizer, self.token_processors, self.scheduler.metrics)
        except BaseException:
            self._finalizer()
            raise
        self._in_flight: deque[tuple[Batch, StepHandle]] = deque()  # steps whose tokens the host has not seen
        self._added = Caller(detokenize=False)  # requests of ``add_request``
        self._callers: list[Caller | LoadingQueue] = []  # called between steps
        self.access = Access()
        self._owner = os.getpid()
        self.why_shut_down = ""

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

    @property
    def is_running(self) -> bool:
        """Whether it is not shut down."""
        return self._finalizer.alive

    def require_running(self) -> None:
        if not self._finalizer.alive:
            raise EngineError(f"this engine is shut down{self.why_shut_down}; make a new LLM(...).")
        if os.getpid() != self._owner:
            raise EngineError("this engine belongs to the process that was forked; make an LLM(...) in this one.")

    def require_ready(self) -> None:
        """Raise EngineError where no request can run: shut down, asleep, or with weights that are half new."""
        self.require_running()
        self.model_runner.weights.require_ready()

    # ---------------------------------------------------------------- requests

    def generate(self, prompts: Prompt | ListLike[Prompt], sampling_params: Params = None,
                 use_tqdm: bool | Callable = True) -> list[RequestOutput]:
        """Complete one prompt or many.

        Args:
            prompts: a string, a list of token ids, or ``{"prompt": ...}`` / ``{"prompt_token_ids": ...}``; or a list.
                A dictionary may have more keys, see ``nanovllm.engine.text.prompts``.
            sampling_params: one for all, or one for each prompt. Default ``get_default_sampling_params()``.
            use_tqdm: show a progress bar; or a function that makes one, called like ``tqdm``.

        Returns:
            One ``RequestOutput`` for each prompt, in their order. If a file of a prompt cannot be read, the
            ``finish_reason`` is "error" and the ``stop_reason`` says why.

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
        return self._inputs.make(prompt, self._inputs.checks.checked_params(params), waits=waits)

    def abort(self, request_id: int | str) -> None:
        """Drop an unfinished request; unknown and finished ids are ignored."""
        with Guard(self):
            if (request := self._outputs.unfinished.get(str(request_id))) is not None:
                abandon(self, [request])

    @all_or_nothing
    def abort_abandoned(self) -> None:
        while self.access.abandoned:
            request = self.access.abandoned.popleft()
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
        if self.access.abandoned:
            self.abort_abandoned()
        batch, done = self.scheduler.schedule(), 0
        if batch is not None:
            self.model_runner.forward(batch)
        if self._in_flight:
            done = self._process_output()
        if batch is not None:
            self._in_flight.append((batch, self._sample(batch)))
            if self.model_runner.max_in_flight == 0:
                done = self._process_output()
        for caller in self._callers:
            caller.between_steps(self, is_idle=batch is None and not done)
        return done

    def _process_output(self) -> int:
        """Wait for the oldest step in flight, and take in its tokens; returns their number as ``step`` does."""
        batch, handle = self._in_flight.popleft()
        num_tokens = 0
        for part, result in self.scheduler.steps(batch, handle.wait(), self._outputs.has_token_processors):
            finished = self.scheduler.postprocess(part, result.token_ids)
            if ended := self._outputs.update(part, result):  # by what they say
                self.scheduler.finish(ended)
            if finished or ended:
                self._outputs.finish(finished + ended)
            num_tokens += part.num_tokens
        return -num_tokens if batch.is_decode else num_tokens

    def _sample(self, batch: Batch) -> "StepHandle":
        """Launch the sampling. Ends sequences whose grammar or logits processors fail; their tokens are surplus."""
        masks, process, failed = self._outputs.sampling_inputs(batch)  # they depend on the tokens just processed
        handle = self.model_runner.sample(masks, process)
        if failed:
            self.end(failed)
        return handle

    def end(self, seqs: list[Sequence]) -> None:
        """Take out sequences that have a ``finish_reason``, wherever they are."""
        self.scheduler.finish(seqs)
        self._outputs.finish(seqs)

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

    def drop_all(self) -> None:
        """Drop everything that is queued, running or in flight.

        With several ranks the engine shuts down: an interrupted step may have reached only some of them.
        """
        self._in_flight.clear()
        dropped = self._outputs.clear()
        if self.config.tensor_parallel_size > 1 and self._finalizer.alive:
            self.why_shut_down = ", because a run on several ranks was interrupted or a rank failed"
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

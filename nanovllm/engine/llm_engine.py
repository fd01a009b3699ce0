"""The loop: requests come in, ``step`` repeats until all are finished, outputs go out.

Owns the loop. The request layer checks prompts and joins outputs, the scheduler decides what is computed, the model
runner computes it.
"""

import os
import weakref
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.progress import Progress
from nanovllm.engine.request import Request, RequestProcessor, as_list
from nanovllm.engine.scheduler import Batch, PrefillBatch, Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.tokenizer import AsyncTokenizer
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.runner.worker import start_runner
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import read_eos_token_ids
from nanovllm.utils.gc_pause import no_full_gc

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner, StepHandle

Prompt = str | ListLike[int]


class LLMEngine:
    """An LLM that generates offline.

    Args:
        model: a local directory, a hub id such as "Qwen/Qwen3-0.6B", or None for the bundled demo model.
        **options: see ``nanovllm.config.Config``.

    Raises:
        ConfigError, CheckpointError, OutOfMemoryError: an option, the model's files or the memory at hand forbid it.
        WorkerError: a tensor-parallel rank failed. Any method may raise it; the engine is then shut down.

    Use it as a context manager, or call ``exit()``, to free the device's memory at a time of your choice.
    """

    @no_full_gc()
    def __init__(self, model: str | None = None, **options: Any):
        self.config = config = Config.from_options(model, options)
        self._tokenizer = AsyncTokenizer(config.model_path, config.skip_tokenizer_init, config.trust_remote_code)
        self.model_runner = start_runner(config)
        # the runner holds no reference to the engine, so collecting the engine frees the runner's memory too
        self._finalizer = weakref.finalize(self, _shut_down, self.model_runner, self._tokenizer)
        try:
            eos_token_ids = self._tokenizer.eos_token_ids()
            eos_token_ids |= read_eos_token_ids(config.model_path, config.model_config)
            from nanovllm.runner.device import translate_oom  # imports torch, as the runner has by now

            num_blocks = self.model_runner.num_kvcache_blocks
            with translate_oom():
                self.scheduler = Scheduler(config, num_blocks, eos_token_ids)
            self._requests = RequestProcessor(config, num_blocks, self.scheduler.eos_token_ids, self._tokenizer)
        except BaseException:
            self.exit()
            raise
        self._in_flight: deque[tuple[Batch, StepHandle]] = deque()
        self._finished_unscheduled: list[Sequence] = []  # max_tokens=0: nothing to compute
        self._owner = os.getpid()
        self._why_shut_down = ""

    # ---------------------------------------------------------------- lifetime

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.exit()

    def exit(self) -> None:
        """Free the device's memory; may be called again."""
        self._finalizer()

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer; None with ``skip_tokenizer_init``."""
        return self._tokenizer.tokenizer

    def _require_running(self) -> None:
        if not self._finalizer.alive:
            raise EngineError(f"this engine is shut down{self._why_shut_down}; make a new LLM(...).")
        if os.getpid() != self._owner:
            raise EngineError("this engine belongs to the process that was forked; make an LLM(...) in this one.")

    # ---------------------------------------------------------------- generate and chat

    def generate(
        self,
        prompts: Prompt | ListLike[Prompt],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many.

        Args:
            prompts: a string, a list of token ids, or a list of either.
            sampling_params: one for all, or one for each prompt. Default ``SamplingParams()``.
            use_tqdm: show a progress bar.

        Returns:
            One ``RequestOutput`` for each prompt, in their order.

        Raises:
            RequestError: a prompt can never be served, or the counts differ; nothing was computed.
        """
        self._require_running()
        prompts = [prompts] if isinstance(prompts, str) else as_list("prompts must be a string or a list", prompts)
        if prompts and isinstance(prompts[0], (int, np.integer)):
            prompts = [prompts]  # type: ignore[list-item]
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        encoded = iter(self._tokenizer.encode(texts))
        token_ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
        return self._generate(texts, token_ids, sampling_params, use_tqdm)

    def chat(
        self,
        messages: ListLike[dict] | ListLike[ListLike[dict]],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of conversations.

        Args:
            messages: ``[{"role": "user", "content": "..."}]``, or a list of such lists.
            sampling_params, use_tqdm: as in ``generate``.
            **template_options: for the tokenizer's chat template, e.g. ``enable_thinking=False``.
        """
        self._require_running()
        rule = 'messages must be a list such as [{"role": "user", "content": "..."}], or a list of such lists'
        conversations = as_list(rule, messages)
        if conversations and isinstance(conversations[0], dict):
            conversations = [conversations]
        for conversation in conversations:
            if not isinstance(conversation, (list, tuple)) or not all(isinstance(m, dict) for m in conversation):
                raise RequestError(f"{rule}, not {messages!s:.100}.")
        texts = [self._tokenizer.apply_chat_template(m, **template_options) for m in conversations]
        token_ids = self._tokenizer.encode(texts, add_special_tokens=False)
        return self._generate(texts, token_ids, sampling_params, use_tqdm)

    @no_full_gc()
    def _generate(self, texts, token_ids, sampling_params, use_tqdm) -> list[RequestOutput]:
        if not self.is_finished():
            raise EngineError("generate() needs an idle engine; finish the requests you added with step() first.")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(token_ids)
        sampling_params = as_list("sampling_params must be a SamplingParams or a list of them", sampling_params)
        if len(sampling_params) != len(token_ids):
            raise RequestError(
                f"{len(token_ids)} prompts but {len(sampling_params)} sampling_params; "
                "give one, or one for each prompt."
            )
        requests = self._requests.make_all(texts, token_ids, sampling_params)
        try:
            for _ in self._run(requests, use_tqdm):
                pass
            return [request.output() for request in requests]
        except BaseException:
            self._abort()
            raise

    def _run(self, requests: list[Request], use_tqdm: bool) -> Iterator[Request]:
        """Step until all requests are finished; yields each as soon as it is."""
        for request in requests:
            self._add(request)
        progress = Progress(len(requests), use_tqdm)
        try:
            while not self.is_finished():
                seqs, batch = self._step()
                finished = self._requests.finish(seqs)
                progress.update(batch, len(finished))
                yield from finished
        finally:
            progress.close()

    # ---------------------------------------------------------------- the loop, for callers who drive it themselves

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt; return its id, with which ``step`` reports it.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        self._require_running()
        text = prompt if isinstance(prompt, str) else None
        token_ids = prompt if text is None else self._tokenizer.encode([text])[0]
        params = SamplingParams() if sampling_params is None else sampling_params
        request = self._requests.make(text, token_ids, params)
        self._add(request)
        return request.request_id

    def is_finished(self) -> bool:
        """Whether every request was reported as finished."""
        return self.scheduler.is_finished() and not self._in_flight and not self._finished_unscheduled

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Launch the next batch, and process the one before it.

        Returns:
            [(request id, generated token ids)] of the requests that are finished now, and the number
            of tokens processed: positive for a prefill, negative for a decode step.
        """
        seqs, batch = self._step()
        finished = [(r.request_id, r.token_ids[r.request_id]) for r in self._requests.finish(seqs, detokenize=False)]
        num_tokens = 0 if batch is None else batch.num_tokens
        return finished, num_tokens if isinstance(batch, PrefillBatch) else -num_tokens

    def _add(self, request: Request) -> None:
        for seq in self._requests.start(request):
            if seq.sampling_params.max_tokens == 0:
                seq.status, seq.finish_reason = SequenceStatus.FINISHED, "length"
                self._finished_unscheduled.append(seq)
            else:
                self.scheduler.add(seq)

    def _step(self) -> tuple[list[Sequence], Batch | None]:
        """Schedule, run, postprocess. With one step in flight, the batch postprocessed is the one before."""
        self._require_running()
        try:
            batch = self.scheduler.schedule()
            if batch is not None:
                self._in_flight.append((batch, self.model_runner.run(batch)))
            finished, self._finished_unscheduled = self._finished_unscheduled, []
            done = None
            if self._in_flight and (batch is None or len(self._in_flight) > self.model_runner.max_in_flight):
                done, handle = self._in_flight.popleft()
                finished += self.scheduler.postprocess(done, handle.wait().token_ids)
            return finished, done
        except BaseException:
            self._abort()
            raise

    def _abort(self) -> None:
        """Drop everything that is queued, running or in flight. The engine stays usable on one rank; with several it
        shuts down, because an interrupted step may have reached only some of them.
        """
        self._in_flight.clear()
        self._finished_unscheduled.clear()
        self._requests.clear()
        if self.config.tensor_parallel_size > 1 and self._finalizer.alive:
            self._why_shut_down = ", because a run on several ranks was interrupted or a rank failed"
            self.exit()
        if self._finalizer.alive:
            self.scheduler.clear()
            self.model_runner.reset()


def _shut_down(runner: "ModelRunner", tokenizer: AsyncTokenizer) -> None:
    tokenizer.close()
    runner.exit()

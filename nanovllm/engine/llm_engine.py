"""The loop: requests come in, ``step`` repeats until all are finished, outputs go out.

Owns the loop. The request layer checks prompts and joins outputs, the scheduler decides what is computed, the model
runner computes it. ``nanovllm.llm`` puts ``generate`` and its siblings on top.
"""

import gc
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any

from nanovllm.config import Config
from nanovllm.core import Batch, PrefillBatch, Sequence, SequenceStatus
from nanovllm.engine.progress import Progress
from nanovllm.engine.request import Call, Drafts, Request, RequestProcessor
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.tokenizer import AsyncTokenizer
from nanovllm.errors import EngineError, RequestError
from nanovllm.runner.worker import start_runner
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import read_eos_token_ids, read_generation_config
from nanovllm.utils.exclusive import Exclusive
from nanovllm.utils.gc_pause import no_full_gc

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner, StepHandle

Prompt = str | ListLike[int] | dict[str, Any]


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

    @no_full_gc()
    def __init__(self, model: str | None = None, **options: Any):
        self.config = config = Config.from_options(model, options)
        self._tokenizer = AsyncTokenizer(config.tokenizer_path, config.skip_tokenizer_init, config.trust_remote_code)
        self.model_runner = start_runner(config)
        # the runner holds no reference to the engine, so collecting the engine frees the runner's memory too
        self._finalizer = weakref.finalize(self, _shut_down, self.model_runner, self._tokenizer)
        try:
            # the tokenizer's is the end-of-sequence token; others of the checkpoint are stop tokens
            eos_token_ids = self._tokenizer.eos_token_ids()
            eos_token_ids += read_eos_token_ids(config.model_path, config.model_config)
            from nanovllm.runner.device import translate_oom  # imports torch, as the runner has by now

            num_blocks = self.model_runner.num_kvcache_blocks
            with translate_oom():
                self.scheduler = Scheduler(config, num_blocks, eos_token_ids)
            self._requests = RequestProcessor(
                config, num_blocks, self.scheduler.eos_token_ids, self._tokenizer, self.scheduler.metrics
            )
        except BaseException:
            self.exit()
            raise
        self._in_flight: deque[tuple[Batch, StepHandle]] = deque()
        self._added = Call(detokenize=False)  # by add_request
        self._lock = RLock()  # of the thread that uses the engine
        self._owner = os.getpid()
        self._why_shut_down = ""
        gc.collect()  # full collections were off during the start; not in the first call

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
        """The transformers tokenizer, loaded when first asked for; None with ``skip_tokenizer_init``."""
        return self._tokenizer.of_transformers()

    def _require_running(self) -> None:
        if not self._finalizer.alive:
            raise EngineError(f"this engine is shut down{self._why_shut_down}; make a new LLM(...).")
        if os.getpid() != self._owner:
            raise EngineError("this engine belongs to the process that was forked; make an LLM(...) in this one.")

    def _require_ready(self) -> None:
        """Raise EngineError where no request can run: shut down, asleep, or with weights that are half new."""
        self._require_running()
        self.model_runner.residency.require_ready()

    # ---------------------------------------------------------------- requests and steps

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt; return its id, with which ``step`` reports it.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        with self._exclusive():
            (text,), (token_ids,) = self._encode([prompt])
            params = self.get_default_sampling_params() if sampling_params is None else sampling_params
            request = self._requests.make(text, token_ids, self._requests.snapshot(params))
            self._add(request, self._added)
        return request.request_id

    def abort(self, request_id: int | str) -> None:
        """Drop a request of ``add_request`` or ``stream``; an id that is unknown, or finished, is ignored."""
        with self._exclusive():
            try:
                if self._requests.find(request_id) is None:  # perhaps a draft of a call around this one
                    self.scheduler.waiting.make(len(self.scheduler.waiting))
                if (request := self._requests.find(request_id)) is not None:
                    self.scheduler.finish(self._requests.abort(request))
            except BaseException:  # an interrupt: half made, or forgotten and not taken out
                self._abort()
                raise

    def is_finished(self) -> bool:
        """Whether every request was reported, finished or dropped. A surplus launch, after a stop token, may run on."""
        is_idle = self._requests.is_empty() and not self.scheduler.waiting
        return is_idle and not self._added.finished and not self._added.dropped

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Launch the next batch, and process the one before it.

        Returns:
            [(request id, generated token ids)] of the requests that are finished now (of the first completion, if a
            request has several), and the number of tokens processed: positive for a prefill, negative for a decode
            step.
        """
        try:
            batch = self._step()
        except BaseException:
            self._added.dropped = False  # their caller learns it now
            raise
        finished = [(r.request_id, r.token_ids[r.request_id]) for r in self._take(self._added)]
        num_tokens = 0 if batch is None else batch.num_tokens
        return finished, num_tokens if isinstance(batch, PrefillBatch) else -num_tokens

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of a request that gives none: the checkpoint's ``generation_config.json``."""
        if self.config.generation_config == "vllm":
            return SamplingParams()
        return SamplingParams(**read_generation_config(self.config.model_path))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, as is needed after a change of the weights; False while requests run."""
        if not self.is_finished():
            return False
        self.scheduler.block_manager.forget_prefixes()
        return True

    def metrics(self) -> dict[str, Any]:
        """Counters since the engine was made, and its state now, under vLLM's names; any thread may read them."""
        return self.scheduler.metrics.read(self.scheduler)

    # ---------------------------------------------------------------- the loop

    def _encode(self, prompts: list[Prompt]) -> tuple[list[str | None], list[Any]]:
        """Texts and token ids of prompts; a text that comes with ids is carried, and not encoded."""
        texts: list[str | None] = []
        given: list[Any] = []  # token ids
        for prompt in prompts:
            text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
            if isinstance(prompt, dict):
                text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
                if (text is None and token_ids is None) or not isinstance(text, (str, type(None))):
                    raise RequestError(
                        'a prompt dictionary needs "prompt", a string, or "prompt_token_ids", a list of integers; '
                        f"this one has {', '.join(map(repr, prompt)) or 'neither'}."
                    )
                others = [key for key in prompt if key not in ("prompt", "prompt_token_ids") and prompt[key]]
                if others:
                    raise RequestError(f"a prompt dictionary cannot have {', '.join(map(repr, others))}: text only.")
            texts.append(text)
            given.append(token_ids)
        is_text = [text is not None and ids is None for text, ids in zip(texts, given, strict=True)]
        to_encode = [text if to_do else None for text, to_do in zip(texts, is_text, strict=True)]
        encoded = iter(self._tokenizer.encode(to_encode))
        return texts, [next(encoded) if to_do else ids for ids, to_do in zip(given, is_text, strict=True)]

    def _run(self, feed: Drafts | Iterator[Request], window: int = 0,
             use_tqdm: bool | Callable = False) -> Iterator[Request]:
        """Run requests; yields each as it is finished. Closed early, it aborts its own and no others.

        Args:
            feed: drafts, which count as queued from now on and for the progress bar; or requests as they come.
            window: so many of the latter are unfinished at a time.
        """
        call, requests = (Call(feed), None) if isinstance(feed, Drafts) else (Call(), feed)
        progress = Progress(call.drafts.num_seqs, use_tqdm)
        try:
            if requests is None:
                self._expect(call)
            while True:
                while requests is not None and len(call.unfinished) < window:
                    with self._exclusive():
                        request = next(requests, None)
                        if request is None:
                            requests = None
                        else:
                            self._add(request, call)
                batch = None
                if not call.finished and not call.dropped:  # finished already: one had nothing to compute
                    if not call.unfinished and not call.drafts.left:
                        return
                    batch = self._step()
                finished = self._take(call)
                progress.update(batch, sum(len(request.seqs) for request in finished))
                yield from finished
        except (GeneratorExit, Exception):
            raise
        except BaseException:  # an interrupt may have left anything half done
            self._abort()
            raise
        finally:
            self._abandon(call)
            progress.close()  # the user's bar may raise

    def _abandon(self, call: Call) -> None:
        """Abort what a caller leaves unfinished; perhaps when its stream is collected, in any thread."""
        with self._lock:
            if self._finalizer.alive:
                if call.drafts.left:
                    self.scheduler.waiting.forget_drafts()
                    self._requests.drop(call.drafts)
                for request in list(call.unfinished.values()):
                    self.scheduler.finish(self._requests.abort(request))

    def _exclusive(self) -> Exclusive:
        """Use of the engine by this thread alone.

        Raises:
            EngineError: it is shut down, or another thread uses it.
        """
        self._require_running()
        return Exclusive(self._lock)

    def _take(self, call: Call) -> list[Request]:
        """The call's requests that are finished and were not yet taken."""
        if call.dropped:
            call.dropped = False
            raise EngineError("these requests were dropped, because a step of this engine failed or was interrupted.")
        finished = list(call.finished)
        call.finished.clear()
        return finished

    def _add(self, request: Request, call: Call) -> None:
        self._require_ready()
        try:
            for seq in self._start(request, call):
                if seq.status is SequenceStatus.WAITING:
                    self.scheduler.add(seq)
        except BaseException:  # an interrupt: registered and not queued, it would never finish
            self._abort()
            raise

    def _expect(self, call: Call) -> None:
        """Queue the drafts of a call, which become requests as the scheduler takes them."""
        with self._exclusive():
            self._require_ready()
            call.arrived_at = perf_counter()
            drafts = call.drafts
            try:
                self.scheduler.waiting.expect((self._start(request, call) for request in drafts), drafts.num_seqs)
            except BaseException:  # those of a call around this one are half made
                self._abort()
                raise

    def _start(self, request: Request, call: Call) -> list[Sequence]:
        """Register a request; its sequences, of which those with nothing to compute are finished at once."""
        seqs = self._requests.start(request, call)
        for seq in seqs:
            if not seq.is_sampled and seq.targets is None:
                seq.status, seq.finish_reason = SequenceStatus.FINISHED, "length"
                self._requests.finish([seq])
        return seqs

    def _step(self) -> Batch | None:
        """Schedule, run, postprocess; returns the batch that was processed. With one step in flight, it is the batch
        before the one that is launched.
        """
        with self._exclusive():
            try:
                batch, done = self.scheduler.schedule(), None
                if batch is not None:
                    self.model_runner.forward(batch)
                    self.scheduler.look_ahead()
                if self._in_flight:
                    done = self._process()  # the step before, while the device works
                if batch is not None:
                    # what a constrained request may sample depends on the tokens before
                    self._in_flight.append((batch, self.model_runner.sample(self._requests.masks(batch))))
                    if self.model_runner.max_in_flight == 0:
                        done = self._process()
                return done
            except BaseException:
                self._abort()
                raise

    def _process(self) -> Batch:
        """Wait for the oldest launch and take in its tokens."""
        batch, handle = self._in_flight.popleft()
        result = handle.wait()
        finished = self.scheduler.postprocess(batch, result.token_ids)
        stopped = self._requests.update(batch, result)
        if stopped:
            self.scheduler.finish(stopped)
        self._requests.finish(finished + stopped)
        return batch

    def _abort(self) -> None:
        """Drop everything that is queued, running or in flight. The engine stays usable on one rank; with several it
        shuts down, because an interrupted step may have reached only some of them.
        """
        self._in_flight.clear()
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

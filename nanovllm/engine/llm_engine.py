"""The loop: requests come in, ``step`` goes round until all are finished, outputs go out.

Owns the user's requests, the order of their outputs and the progress bar. The scheduler decides
what is computed, the model runner computes it.
"""

import gc
import os
import struct
import weakref
from collections import deque
from collections.abc import Iterator, KeysView, Mapping, Set
from collections.abc import Sequence as ListLike
from concurrent.futures import Future
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import xxhash

from nanovllm.config import Config
from nanovllm.distributed.workers import start_runner
from nanovllm.engine.scheduler import Batch, PrefillBatch, Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.tokenizer import AsyncTokenizer
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.runner.model_runner import ModelRunner, StepHandle, translate_oom
from nanovllm.sampling_params import MAX_FORBIDDEN, SamplingParams
from nanovllm.utils.checkpoint import read_eos_token_ids

Prompt = str | ListLike[int]
NOT_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)  # though they can be gone through
NEVER = 1 << 30  # as a threshold of the garbage collector


@contextmanager
def no_full_gc() -> Iterator[None]:
    """Within, Python's garbage collector looks at young objects only.

    To look at all that a process with torch holds takes it 0.1 s, which comes at any time: five times in a start that
    compiles, and in a run the device waits.
    """
    youngest, young, old = gc.get_threshold()
    if old == NEVER:  # the run of another engine, in another thread, which puts it back
        yield
        return
    try:
        gc.set_threshold(youngest, young, NEVER)
        yield
    finally:
        gc.set_threshold(youngest, young, old)


class LLMEngine:
    """An LLM that generates offline.

    Args:
        model: a local directory, a hub id such as "Qwen/Qwen3-0.6B", or None for the bundled demo model.
        **options: see ``nanovllm.config.Config``.

    Raises:
        ConfigError, CheckpointError, OutOfMemoryError: what was given, what is allowed, what to change.
        WorkerError: a tensor-parallel rank failed; from any method, after which only ``exit()`` is left.

    Use it as a context manager, or call ``exit()``, to free the device's memory at a time of your choice.
    """

    @no_full_gc()
    def __init__(self, model: str | None = None, **options: Any):
        self.config = config = Config.from_options(model, options)
        self._tokenizer = AsyncTokenizer(config.model_path, config.skip_tokenizer_init, config.trust_remote_code)
        self.model_runner = start_runner(config)
        # the runner does not know the engine, so the engine can be collected, and takes the runner along
        self._finalizer = weakref.finalize(self, _shut_down, self.model_runner, self._tokenizer)
        try:
            eos_token_ids = self._tokenizer.eos_token_ids()
            eos_token_ids |= read_eos_token_ids(config.model_path, config.model_config)
            with translate_oom():
                self.scheduler = Scheduler(config, eos_token_ids)
        except BaseException:
            self.exit()
            raise
        self._in_flight: deque[tuple[Batch, StepHandle]] = deque()
        self._finished_unscheduled: list[Sequence] = []  # max_tokens=0: nothing to compute
        self._num_requests = 0
        self._owner = os.getpid()
        self._why_shut_down = ""

    # ---------------------------------------------------------------- life

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

    # ---------------------------------------------------------------- the loop, for people who drive it

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt; return its id, with which ``step`` reports it.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        self._require_running()
        token_ids = self._tokenizer.encode([prompt])[0] if isinstance(prompt, str) else prompt
        params = SamplingParams() if sampling_params is None else sampling_params
        seq = self._make_sequence(token_ids, params, self._num_requests)
        self._add(seq)
        return seq.seq_id

    def is_finished(self) -> bool:
        """Whether every request was reported as finished."""
        return self.scheduler.is_finished() and not self._in_flight and not self._finished_unscheduled

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Launch the next batch, and process the one before it.

        Returns:
            [(request id, generated token ids)] of the requests that are finished now, and the number
            of tokens processed: positive for a prefill, negative for a decode step.
        """
        finished, batch = self._step()
        num_tokens = 0 if batch is None else batch.num_tokens
        return (
            [(seq.seq_id, seq.completion_token_ids) for seq in finished],
            num_tokens if isinstance(batch, PrefillBatch) else -num_tokens,
        )

    def _step(self) -> tuple[list[Sequence], Batch | None]:
        """schedule, run, postprocess; with depth 1 the batch that is postprocessed is the one before."""
        self._require_running()
        try:
            batch = self.scheduler.schedule()
            if batch is not None:
                self._in_flight.append((batch, self.model_runner.run(batch)))
            finished, self._finished_unscheduled = self._finished_unscheduled, []
            done = None
            if self._in_flight and (batch is None or len(self._in_flight) > self.model_runner.depth):
                done, handle = self._in_flight.popleft()
                finished += self.scheduler.postprocess(done, handle.wait())
            return finished, done
        except BaseException:
            self._abort()
            raise

    def _abort(self) -> None:
        """Drop everything that is queued, running or in flight; the engine stays usable.

        Except that with several ranks it is shut down: what was interrupted may have reached only some of them.
        """
        self._in_flight.clear()
        self._finished_unscheduled.clear()
        if self.config.tensor_parallel_size > 1 and self._finalizer.alive:
            self._why_shut_down = ", because a run on several ranks was interrupted or a rank failed"
            self.exit()
        if self._finalizer.alive:
            self.model_runner.synchronize()
            self.model_runner.updates.reset()
            self.scheduler.clear()

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
        prompts = [prompts] if isinstance(prompts, str) else _as_list("prompts must be a string or a list", prompts)
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
        rule = 'messages must be a list such as [{"role": "user", "content": "..."}], or a list of such lists'
        conversations = _as_list(rule, messages)
        if conversations and isinstance(conversations[0], dict):
            conversations = [conversations]
        for conversation in conversations:
            if not isinstance(conversation, (list, tuple)) or not all(isinstance(m, dict) for m in conversation):
                raise RequestError(f"{rule}, not {messages!s:.100}.")
        texts = [self._tokenizer.apply_chat_template(m, **template_options) for m in conversations]  # type: ignore
        token_ids = self._tokenizer.encode(texts, add_special_tokens=False)
        return self._generate(texts, token_ids, sampling_params, use_tqdm)

    @no_full_gc()
    def _generate(self, texts, token_ids, sampling_params, use_tqdm) -> list[RequestOutput]:
        self._require_running()
        if not self.is_finished():
            raise EngineError("generate() needs an idle engine; finish the requests you added with step() first.")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(token_ids)
        sampling_params = _as_list("sampling_params must be a SamplingParams or a list of them", sampling_params)
        if len(sampling_params) != len(token_ids):
            raise RequestError(
                f"{len(token_ids)} prompts but {len(sampling_params)} sampling_params; "
                "give one, or one for each prompt."
            )
        seqs = []
        for i, (ids, params) in enumerate(zip(token_ids, sampling_params, strict=True)):
            try:
                seqs.append(self._make_sequence(ids, params, self._num_requests + i))
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from None
        try:
            for seq in seqs:
                self._add(seq)
            results = self._run_to_end(len(seqs), use_tqdm)
            outputs = [
                self._output(seq, text, *results[seq.seq_id]) for seq, text in zip(seqs, texts, strict=True)
            ]
        except BaseException:
            self._abort()
            raise
        return outputs

    def _run_to_end(self, num_requests: int, use_tqdm: bool) -> dict[int, tuple]:
        """Step until all is finished; request id -> its prompt's ids, its completion's, and the future of its text.

        Lists of ids are made as requests finish, while the device works: a million of them take the host 30 ms.
        """
        from tqdm import tqdm

        results = {}
        tokens, seconds = {"Prefill": 0, "Decode": 0}, {"Prefill": 0.0, "Decode": 0.0}
        with tqdm(total=num_requests, desc="Generating", dynamic_ncols=True, disable=not use_tqdm) as bar:
            last = shown = perf_counter()
            while not self.is_finished():
                finished, batch = self._step()
                for seq in finished:
                    completion = seq.completion_token_ids
                    text = self._tokenizer.decode_later(completion)
                    results[seq.seq_id] = seq.prompt_token_ids, completion, text
                if use_tqdm and batch is not None:
                    now = perf_counter()
                    kind = "Prefill" if isinstance(batch, PrefillBatch) else "Decode"
                    tokens[kind] += batch.num_tokens
                    seconds[kind] += now - last
                    last = now
                    if now - shown > bar.mininterval:
                        shown = now
                        bar.set_postfix({k: f"{tokens[k] / (seconds[k] or 1):.0f}tok/s" for k in tokens}, refresh=False)
                bar.update(len(finished))
            if use_tqdm:
                bar.set_postfix({k: f"{tokens[k] / (seconds[k] or 1):.0f}tok/s" for k in tokens}, refresh=False)
        return results

    def _output(
        self, seq: Sequence, prompt: str | None, prompt_ids: list[int], completion_ids: list[int], text: "Future[str]"
    ) -> RequestOutput:
        assert seq.finish_reason is not None
        return RequestOutput(
            request_id=str(seq.seq_id),
            prompt=prompt,
            prompt_token_ids=prompt_ids,
            outputs=[CompletionOutput(text.result(), completion_ids, seq.finish_reason, seq.stop_reason)],
            num_cached_tokens=seq.num_cached_tokens,
        )

    # ---------------------------------------------------------------- requests

    def _make_sequence(self, token_ids: ListLike[int], params: SamplingParams, number: int) -> Sequence:
        """A sequence that is sure to finish, or a RequestError (invariant 6). Its number counts once it is added."""
        config, vocab_size = self.config, self.config.model_config.vocab_size
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be a SamplingParams, not {type(params).__name__}.")
        ids = None
        if isinstance(token_ids, np.ndarray):
            ids = None if np.ma.is_masked(token_ids) else token_ids
        elif _is_list(token_ids):
            ids = _int64(tuple(token_ids))
        if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError(
                f"a prompt must be a string or a flat list of integer token ids, not {token_ids!s:.100}."
            )
        if len(ids) == 0:
            raise RequestError("the prompt is empty; it must hold at least one token.")
        if ids.min() < 0 or ids.max() >= vocab_size:
            bad = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise RequestError(f"token id {bad} is outside the vocabulary [0, {vocab_size}).")
        if len(ids) >= config.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; with max_model_len={config.max_model_len} at most "
                f"{config.max_model_len - 1} fit. Shorten it or raise max_model_len."
            )
        longest = min(len(ids) + params.max_tokens, config.max_model_len)
        # the last token's keys and values are never needed
        num_blocks = max(1, -(-(longest - 1) // config.kvcache_block_size))
        if params.max_tokens > 0 and num_blocks > config.num_kvcache_blocks:
            raise RequestError(
                f"prompt ({len(ids)} tokens) and max_tokens={params.max_tokens} need {num_blocks} KV blocks of "
                f"{config.kvcache_block_size} tokens; the pool has {config.num_kvcache_blocks}. Lower max_tokens, "
                "or give the pool more room (num_kvcache_blocks, gpu_memory_utilization)."
            )
        for stop_id in params.stop_token_ids:
            if stop_id >= vocab_size:
                raise RequestError(f"stop_token_ids: {stop_id} is outside the vocabulary [0, {vocab_size}).")
        forbidden: tuple[int, ...] = ()
        if params.min_tokens:
            eos = () if params.ignore_eos else tuple(self.scheduler.eos_token_ids)
            forbidden = tuple(dict.fromkeys((*params.stop_token_ids, *eos)))
            if len(forbidden) > MAX_FORBIDDEN:
                raise RequestError(
                    f"min_tokens can hold back at most {MAX_FORBIDDEN} end-of-sequence and stop ids, "
                    f"not {len(forbidden)}."
                )
        if params.seed is None:
            seed = xxhash.xxh64_intdigest(f"request {number}".encode(), seed=config.seed)
        else:
            seed = xxhash.xxh64_intdigest(f"seed {params.seed}".encode())
        return Sequence(ids, params, number, config.kvcache_block_size, seed, forbidden)

    def _add(self, seq: Sequence) -> None:
        self._num_requests += 1
        if seq.sampling_params.max_tokens == 0:
            seq.status, seq.finish_reason = SequenceStatus.FINISHED, "length"
            self._finished_unscheduled.append(seq)
        else:
            self.scheduler.add(seq)


def _int64(token_ids: tuple) -> np.ndarray | None:
    """None unless all are integers, True and False left out. Twice as fast as numpy's conversion."""
    try:
        ids = np.frombuffer(struct.pack(f"{len(token_ids)}q", *token_ids), np.int64)
    except (TypeError, struct.error):
        return None
    # booleans became 0 and 1; to ask all ids for their types would take as long again
    suspects = [token_ids[i] for i in (ids < 2).nonzero()[0].tolist()]
    return None if any(isinstance(x, bool) or "bool" in str(getattr(x, "dtype", "")) for x in suspects) else ids


def _is_list(given: Any) -> bool:
    """Whether it can be gone through like a list; errors of a generator's own come when that is done."""
    try:
        iter(given)
    except TypeError:
        return False
    return not isinstance(given, NOT_LISTS)


def _as_list(rule: str, given: Any) -> list:
    if not _is_list(given) and not isinstance(given, KeysView):  # which are a set, but have an order
        raise RequestError(f"{rule}, not {given!s:.100}.")
    return list(given)


def _shut_down(runner: ModelRunner, tokenization: AsyncTokenizer) -> None:
    tokenization.close()
    runner.exit()

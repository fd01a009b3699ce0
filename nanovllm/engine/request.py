"""The request layer: prompts and parameters become sequences, finished sequences become outputs.

Owns every check of a prompt and its parameters, the seeds, and the join of a request's sequences into one
``RequestOutput``. The scheduler sees sequences only.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListLike
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import numpy as np
import xxhash

from nanovllm.config import Config
from nanovllm.engine.logprobs import logprobs_at, trimmed
from nanovllm.engine.metrics import Metrics
from nanovllm.engine.prompts import as_token_ids, check_scored, pack_prompts
from nanovllm.engine.scheduler import Batch, PrefillBatch
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.token_processor import TokenProcessor, TokenProcessors
from nanovllm.engine.tokenizer import AsyncTokenizer
from nanovllm.errors import RequestError
from nanovllm.outputs import CompletionOutput, RequestOutput, Score
from nanovllm.sampling_params import MAX_STOP_IDS, SamplingParams

logger = logging.getLogger("nanovllm")


@dataclass(eq=False)
class Drafts:
    """The checked requests of a call, in order. Iterating makes and removes them: most while the device works.

    Attributes:
        left: requests, or what makes them.
        num_seqs: of all.
    """

    left: "deque[Request | Callable[[], Request]]" = field(default_factory=deque)
    num_seqs: int = 0

    def __iter__(self) -> Iterator["Request"]:
        while self.left:
            draft = self.left[0]
            request = draft if isinstance(draft, Request) else draft()
            self.left.popleft()  # not before: interrupted while it is made, it counts as aborted
            yield request


@dataclass(eq=False)
class Call:
    """The requests of one caller: of one ``generate``, one ``stream``, or all of ``add_request``."""

    drafts: Drafts = field(default_factory=Drafts)  # not made yet
    unfinished: dict[int, "Request"] = field(default_factory=dict)  # by request_id
    finished: deque["Request"] = field(default_factory=deque)  # not yet taken by the caller
    arrived_at: float = 0.0  # perf_counter, if all its requests came at once
    detokenize: bool = True  # in the background, as sequences finish
    dropped: bool = False  # the engine had to drop its requests


@dataclass(eq=False)
class Request:
    """One prompt, the sequences that complete it, and their results as they finish.

    Attributes:
        prompt: its text; None if it was given as token ids.
        seqs: in the order of ``RequestOutput.outputs``.
        watches: by seq_id, of the sequences whose every token the host looks at.
        index: the place of the prompt in its call.
        call: who waits for it.
        token_ids, texts: of finished sequences, by seq_id; a text is a future, and absent if nobody waits for it.
        prompt_logprobs: of ``seqs[0].targets`` chunk by chunk, packed as by ``reference.token_logprobs``.
    """

    prompt: str | None
    seqs: list[Sequence]
    watches: dict[int, TokenProcessor]
    tokenizer: AsyncTokenizer
    index: int = 0
    call: Call = None  # type: ignore[assignment]  # until it starts
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, Future[str]] = field(default_factory=dict)
    prompt_logprobs: list[np.ndarray] = field(default_factory=list)

    @property
    def request_id(self) -> int:
        return self.seqs[0].seq_id

    @cached_property
    def prompt_ids(self) -> np.ndarray:
        """int32 [num_prompt_tokens], a copy: a list of ids is made when somebody reads it."""
        seq = self.seqs[0]
        return seq.tokens(0, seq.num_prompt_tokens).copy()

    @property
    def params(self) -> SamplingParams:
        return self.seqs[0].sampling_params

    @property
    def has_text(self) -> bool:
        """Whether ``output`` need not wait, once the request is finished."""
        return all(text.done() for text in self.texts.values())

    def output(self) -> RequestOutput:
        """The finished request; waits for the text."""
        outputs = []
        for index, seq in enumerate(self.seqs):
            assert seq.finish_reason is not None
            token_ids = self.token_ids[seq.seq_id]
            text = self.texts.get(seq.seq_id) or self.tokenizer.decode_later(text_ids(seq, token_ids), self.params)
            watch = self.watches.get(seq.seq_id)
            total, logprobs = (None, None) if watch is None else watch.logprobs(token_ids)
            outputs.append(
                CompletionOutput(index, text.result(), token_ids, total, logprobs, seq.finish_reason, seq.stop_reason)
            )
        return self.output_of(outputs)

    def output_of(self, outputs: list[CompletionOutput], finished: bool = True) -> RequestOutput:
        return RequestOutput(
            request_id=str(self.request_id),
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids.tolist,
            outputs=outputs,
            num_cached_tokens=self.seqs[0].num_cached_tokens,
            finished=finished,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self._prompt_logprobs,
            index=self.index,
        )

    def score(self) -> Score:
        rows = np.concatenate(self.prompt_logprobs)
        values = np.ascontiguousarray(rows).view(np.float32)  # logprob, rank, best id, best logprob
        return Score(values[:, 0].tolist(), (values[:, 0] == values[:, 3]).tolist())

    def _prompt_logprobs(self) -> list:
        if not self.prompt_logprobs:  # a prompt of one token
            return [None]
        rows, ids = np.concatenate(self.prompt_logprobs), self.prompt_ids[1:].tolist()
        return [None, *logprobs_at(rows, ids, self.params.detokenize and self.tokenizer)]


class RequestProcessor:
    """Makes requests and joins their results; one per engine.

    Args:
        config: limits, and the engine's seed.
        num_kvcache_blocks: size of the KV cache.
        eos_token_ids: ids that end a sequence.
        tokenizer: for the text of completions.
        metrics: told of requests that finish.
    """

    def __init__(self, config: Config, num_kvcache_blocks: int, eos_token_ids: Iterable[int],
                 tokenizer: AsyncTokenizer, metrics: Metrics | None = None):
        self._config, self._metrics = config, metrics or Metrics()
        # a sequence's last token needs no place in the cache
        self._max_tokens = min(config.max_model_len, num_kvcache_blocks * config.kvcache_block_size + 1)
        self._num_blocks = num_kvcache_blocks
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = tokenizer
        self._watch_maker = TokenProcessors(config, tokenizer, self._eos_token_ids)
        self._num_seqs = 0  # the next seq_id
        self._unfinished: dict[str, Request] = {}  # by request_id
        self._requests: dict[int, Request] = {}  # by seq_id, while the sequence is unfinished
        self._watches: dict[int, TokenProcessor] = {}  # the same, where every token is looked at
        self._has_warned = False

    # ---------------------------------------------------------------- requests

    def snapshot(self, params: Any) -> SamplingParams:
        """A checked copy of a user's parameters."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be a SamplingParams, not {type(params).__name__}.")
        params, allowed = params.snapshot(), self._config.max_logprobs
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            ids = getattr(params, name)
            if ids:
                self._check_ids(f"{name}:", np.fromiter(ids, np.int64, len(ids)))
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and allowed != -1 and not 0 <= asked <= allowed:
                raise RequestError(f"{name}={asked} must be at most max_logprobs={allowed}; see LLM(max_logprobs=...).")
        return params

    def make(self, prompt: str | None, token_ids: Any, params: SamplingParams) -> Request:
        """A request that is sure to finish. It is not registered before ``start``.

        Args:
            prompt: the text of ``token_ids``, if the user gave text.
            params: a snapshot, which nobody else changes.

        Raises:
            RequestError: it can never be served.
        """
        return self._make(prompt, *self._check(as_token_ids(token_ids), params), self._num_seqs)

    def draft_all(self, prompts: ListLike[str | None], token_ids: ListLike[Any], params: ListLike[SamplingParams],
                  is_snapshot: bool = False) -> Drafts:
        """Check all requests of a call, before anything is made that costs time; their ids are given away.

        Raises:
            RequestError: one can never be served, with its index. No id was given away.
        """
        drafts, first_id = Drafts(), self._num_seqs
        last: Any = drafts  # the parameters before: none yet
        known: dict[Any, tuple[SamplingParams, bool]] = {}  # requests with equal parameters share a snapshot
        packed = pack_prompts(token_ids, self._config.model_config.vocab_size)
        for i, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
            try:
                if given is not last:
                    last, key = given, given.key() if isinstance(given, SamplingParams) else None
                    if key not in known:
                        snapshot = given if is_snapshot else self.snapshot(given)
                        known[key] = snapshot, snapshot.is_checked_when_made
                    snapshot, is_made_now = known[key]
                ids = as_token_ids(token_ids[i]) if packed is None else packed[i]
                ids, resolved = self._check(ids, snapshot, packed is not None)
                draft = partial(self._make, prompt, ids, resolved, first_id + drafts.num_seqs, i)
                drafts.left.append(draft() if is_made_now else draft)
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from None
            drafts.num_seqs += resolved.n
        self.give_ids(drafts.num_seqs)
        return drafts

    def give_ids(self, number: int) -> int:
        """Give away the next ids, to sequences that are registered later: whatever comes between takes others."""
        self._num_seqs += number
        return number

    def make_scoring(self, token_ids: Any, start: Any, index: int, num_before: int) -> Request:
        """A request for the log-probabilities of ``token_ids[start:]``, and nothing else. See ``give_ids``."""
        ids, start = check_scored(token_ids, start, self._config.max_model_len)
        params = SamplingParams(max_tokens=0, prompt_logprobs=1, detokenize=False)
        prompt = self._check_prompt(ids[:-1], params)
        self._check_ids("token id", ids[-1:])
        request = self._make(None, prompt, params, self._num_seqs + num_before, index)
        seq = request.seqs[0]
        seq.targets, seq.first_target = ids[start:].astype(np.int32), start - 1
        return request

    def _make(self, prompt: str | None, ids: np.ndarray, params: SamplingParams, first_id: int,
              index: int = 0) -> Request:
        """The sequences of a request whose prompt and parameters are checked; the rest is checked here."""
        block_size = self._config.kvcache_block_size
        stop_ids = self._watch_maker.min_tokens_stop_ids(params)
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"min_tokens can hold back at most {MAX_STOP_IDS} end-of-sequence and stop ids, not {len(stop_ids)}."
            )
        if params.allowed_token_ids is not None and stop_ids and set(params.allowed_token_ids) <= set(stop_ids):
            raise RequestError(
                f"min_tokens={params.min_tokens} holds back every one of allowed_token_ids, which are all "
                "end-of-sequence or stop tokens."
            )
        if params.structured_outputs is not None or params.bad_words:
            stop_ids = ()  # the guide's mask holds them back
        seqs = [
            Sequence(ids, params, seq_id, block_size, self._seed(params, seq_id, i), stop_ids, first_id)
            for i, seq_id in enumerate(range(first_id, first_id + params.n))
        ]
        if params.prompt_logprobs is not None and len(ids) > 1:
            seqs[0].targets, seqs[0].first_target = ids[1:].astype(np.int32), 0
        watches = {seq.seq_id: watch for seq in seqs if (watch := self._watch_maker.make(seq)) is not None}
        return Request(prompt, seqs, watches, self._tokenizer, index)

    def _seed(self, params: SamplingParams, seq_id: int, index: int) -> int:
        if params.seed is None:
            return xxhash.xxh64_intdigest(f"request {seq_id}".encode(), seed=self._config.seed)
        return xxhash.xxh64_intdigest(f"seed {params.seed + index}".encode())

    # ---------------------------------------------------------------- life

    def start(self, request: Request, call: Call) -> list[Sequence]:
        """Register a request; return its sequences, for the scheduler."""
        request.call = call
        request.seqs[0].arrived_at = call.arrived_at or perf_counter()
        # the call's second: after an interrupt between them, ``abort`` must find in both what the call holds
        self._unfinished[str(request.request_id)] = call.unfinished[request.request_id] = request
        for seq in request.seqs:
            self._requests[seq.seq_id] = request
        self._watches.update(request.watches)
        self._num_seqs = max(self._num_seqs, request.seqs[-1].seq_id + 1)
        return request.seqs

    def update(self, batch: Batch, result: Any) -> list[Sequence]:
        """Look at the tokens of a step, where requests ask for it; return the sequences that a stop string ends."""
        if isinstance(batch, PrefillBatch) and result.prompt_logprobs is not None:
            stop = 0
            for seq, num_targets in batch.scored:
                start, stop = stop, stop + num_targets
                if seq.seq_id in self._requests:
                    # trimmed here: the prompt's next chunk may run beside requests that want fewer
                    rows = trimmed(result.prompt_logprobs[start:stop], seq.sampling_params.prompt_logprobs or 0)
                    self._requests[seq.seq_id].prompt_logprobs.append(rows)
        if not self._watches:
            return []
        stopped = []
        for i, seq_id in enumerate(batch.seq_ids.tolist()):
            watch = self._watches.get(seq_id)
            if watch is not None:
                logprobs = None if result.logprobs is None else result.logprobs[i]
                if watch.update(int(result.token_ids[i]), logprobs):
                    stopped.append(watch.seq)
        return stopped

    def masks(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Guided request slots of a batch, int32 [n], and the tokens each may sample next, int32 [n, ceil(V / 32)]."""
        req_indices, watches = [], []
        for req_idx, seq_id in zip(batch.req_indices.tolist(), batch.seq_ids.tolist(), strict=True):
            watch = self._watches.get(seq_id)
            if watch is not None and watch.guide is not None:
                req_indices.append(req_idx)
                watches.append(watch)
        return np.array(req_indices, np.int32), self._watch_maker.masks(watches)

    def finish(self, seqs: list[Sequence]) -> None:
        """Take in finished sequences; requests that are complete now go to their calls.

        Lists of ids are made here, while the device works: a million ids take the host 30 ms.
        """
        for seq in seqs:
            request, token_ids = self._requests.pop(seq.seq_id), seq.completion_token_ids
            watch = self._watches.pop(seq.seq_id, None)
            request.token_ids[seq.seq_id] = token_ids
            if watch is not None and watch.stop_text is not None:
                request.texts[seq.seq_id] = finished_text(watch.stop_text)
            elif request.call.detokenize:
                request.texts[seq.seq_id] = self._tokenizer.decode_later(text_ids(seq, token_ids), seq.sampling_params)
            if len(request.token_ids) == len(request.seqs):
                del request.call.unfinished[request.request_id], self._unfinished[str(request.request_id)]
                request.call.finished.append(request)
                self._metrics.finished(request.seqs[0])

    def abort(self, request: Request) -> list[Sequence]:
        """Forget an unfinished request; return its sequences that are not finished."""
        self._metrics.aborted(1)
        del request.call.unfinished[request.request_id], self._unfinished[str(request.request_id)]
        unfinished = [seq for seq in request.seqs if seq.seq_id in self._requests]
        for seq in unfinished:
            del self._requests[seq.seq_id]
            self._watches.pop(seq.seq_id, None)
        return unfinished

    def drop(self, drafts: Drafts) -> None:
        """Forget drafts, as ``abort`` forgets what they would have become."""
        self._metrics.aborted(len(drafts.left))
        drafts.left.clear()

    def find(self, request_id: int | str) -> Request | None:
        """The unfinished request of this id."""
        return self._unfinished.get(str(request_id))

    def is_empty(self) -> bool:
        """Whether every request that was started is finished."""
        return not self._unfinished

    def clear(self) -> None:
        """Drop all unfinished requests, and tell their callers."""
        self._metrics.aborted(len(self._unfinished))
        for request in self._unfinished.values():
            request.call.dropped = True
            request.call.unfinished.clear()
        self._unfinished.clear()
        self._requests.clear()
        self._watches.clear()

    # ---------------------------------------------------------------- checks

    def _check_ids(self, what: str, ids: np.ndarray) -> None:
        vocab_size = self._config.model_config.vocab_size
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            bad = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise RequestError(f"{what} {bad} is outside the vocabulary [0, {vocab_size}).")

    def _check(self, ids: np.ndarray, params: SamplingParams,
               are_known: bool = False) -> tuple[np.ndarray, SamplingParams]:
        """Prompt and parameters, truncated and resolved. ``are_known``: the ids are in the vocabulary."""
        ids = self._check_prompt(ids, params, are_known)
        if params.max_tokens is None:
            params = params.snapshot()
            params.max_tokens = max(self._max_tokens - len(ids), params.min_tokens, 1)
        self._check_params(len(ids), params)
        return ids, params

    def _check_prompt(self, ids: np.ndarray, params: SamplingParams, are_known: bool = False) -> np.ndarray:
        """The prompt's ids, truncated if the request asks for it, and fit to be computed (invariant 6)."""
        max_model_len = self._config.max_model_len
        if params.truncate_prompt_tokens is not None:
            keep = max_model_len - 1 if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            ids = ids[-keep:]
        if len(ids) == 0:
            raise RequestError("the prompt is empty; it must hold at least one token.")
        if not are_known:
            self._check_ids("token id", ids)
        longest = max_model_len if params.max_tokens == 0 else max_model_len - 1
        if len(ids) > longest:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; with max_model_len={max_model_len} at most "
                f"{longest} fit. Shorten it or raise max_model_len."
            )
        is_scored = params.max_tokens == 0 and params.prompt_logprobs is not None
        if is_scored and len(ids) > self._num_blocks * self._config.kvcache_block_size:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; the KV cache has {self._num_blocks} blocks of "
                f"{self._config.kvcache_block_size}. Make it larger (num_kvcache_blocks, gpu_memory_utilization)."
            )
        return ids

    def _check_params(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        config, n = self._config, num_prompt_tokens
        assert params.max_tokens is not None
        longest = min(n + params.max_tokens, config.max_model_len)
        # the last token's keys and values are never computed
        num_blocks = max(1, -(-(longest - 1) // config.kvcache_block_size))
        if params.max_tokens > 0 and num_blocks > self._num_blocks:
            raise RequestError(
                f"prompt ({n} tokens) and max_tokens={params.max_tokens} need {num_blocks} KV blocks of "
                f"{config.kvcache_block_size} tokens; the cache has {self._num_blocks}. Lower max_tokens, "
                "or make the cache larger (num_kvcache_blocks, gpu_memory_utilization)."
            )
        if n + params.max_tokens > config.max_model_len and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "max_tokens=%d is cut to %d by max_model_len=%d (the prompt has %d tokens). This is said once.",
                params.max_tokens, config.max_model_len - n, config.max_model_len, n,
            )  # fmt: skip


def finished_text(text: str) -> Future[str]:
    future: Future[str] = Future()
    future.set_result(text)
    return future


def text_ids(seq: Sequence, token_ids: list[int]) -> list[int]:
    """The ids that make the text: a token that ended it stays out, unless the request wants it."""
    params = seq.sampling_params
    if not params.detokenize:
        return []
    ends_early = seq.finish_reason == "stop" and not params.include_stop_str_in_output
    return token_ids[:-1] if ends_early else token_ids

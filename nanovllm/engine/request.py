"""The request layer: prompts and parameters become sequences, finished sequences become outputs.

Owns every check of a prompt and its parameters, the seeds, and the join of a request's sequences into one
``RequestOutput``. The scheduler sees sequences only.
"""

from array import array
from collections.abc import Iterable, KeysView, Mapping, Set
from collections.abc import Sequence as ListLike
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from nanovllm.config import Config
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.tokenizer import AsyncTokenizer
from nanovllm.errors import RequestError
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import MAX_STOP_IDS, SamplingParams

NON_SEQUENCES = (str, bytes, bytearray, memoryview, Mapping, Set)  # iterable, but no list of tokens or prompts


@dataclass
class Request:
    """One prompt, the sequences that complete it, and their results as they finish.

    Attributes:
        prompt: its text; None if it was given as token ids.
        seqs: in the order of ``RequestOutput.outputs``.
        token_ids, texts: of finished sequences, by seq_id; texts are futures, and absent if ``step`` was driven.
    """

    prompt: str | None
    seqs: list[Sequence]
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, Future[str]] = field(default_factory=dict)

    @property
    def request_id(self) -> int:
        return self.seqs[0].seq_id

    def output(self) -> RequestOutput:
        """Waits for the text."""
        outputs = []
        for index, seq in enumerate(self.seqs):
            assert seq.finish_reason is not None
            text, token_ids = self.texts[seq.seq_id].result(), self.token_ids[seq.seq_id]
            outputs.append(CompletionOutput(
                index, text, token_ids, finish_reason=seq.finish_reason, stop_reason=seq.stop_reason
            ))
        return RequestOutput(
            request_id=str(self.request_id),
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            num_cached_tokens=self.seqs[0].num_cached_tokens,
        )


class RequestProcessor:
    """Makes requests and joins their results; one per engine.

    Args:
        config: limits, and the engine's seed.
        num_kvcache_blocks: size of the KV cache.
        eos_token_ids: ids that end a sequence.
        tokenizer: for the text of completions.
    """

    def __init__(self, config: Config, num_kvcache_blocks: int, eos_token_ids: Iterable[int],
                 tokenizer: AsyncTokenizer):
        self._config = config
        self._num_blocks = num_kvcache_blocks
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = tokenizer
        self._num_seqs = 0  # started so far; the next seq_id
        self._requests: dict[int, Request] = {}  # by seq_id, while it is unfinished

    def make(self, prompt: str | None, token_ids: Any, params: SamplingParams, num_before: int = 0) -> Request:
        """A request that is sure to finish. It is not registered before ``start``.

        Args:
            prompt: the text of ``token_ids``, if the user gave text.
            num_before: sequences of requests that will be started before this one.

        Raises:
            RequestError: it can never be served.
        """
        return Request(prompt, [self._make_sequence(token_ids, params, self._num_seqs + num_before)])

    def make_all(self, prompts: ListLike[str | None], token_ids: ListLike[Any],
                 params: ListLike[SamplingParams]) -> list[Request]:
        """All requests or, if one can never be served, a RequestError with its index."""
        requests, num_before = [], 0
        for i, (prompt, ids, p) in enumerate(zip(prompts, token_ids, params, strict=True)):
            try:
                requests.append(self.make(prompt, ids, p, num_before))
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from None
            num_before += len(requests[-1].seqs)
        return requests

    def start(self, request: Request) -> list[Sequence]:
        """Register a request; return its sequences, for the scheduler."""
        for seq in request.seqs:
            self._requests[seq.seq_id] = request
        self._num_seqs += len(request.seqs)
        return request.seqs

    def finish(self, seqs: list[Sequence], detokenize: bool = True) -> list[Request]:
        """Take in finished sequences; return the requests that are complete now.

        Lists of ids are made here, while the device works: a million ids take the host 30 ms.
        """
        complete = []
        for seq in seqs:
            request, token_ids = self._requests.pop(seq.seq_id), seq.completion_token_ids
            request.token_ids[seq.seq_id] = token_ids
            if detokenize:
                request.texts[seq.seq_id] = self._tokenizer.decode_later(token_ids)
            if len(request.token_ids) == len(request.seqs):
                request.prompt_token_ids = seq.prompt_token_ids
                complete.append(request)
        return complete

    def clear(self) -> None:
        """Drop all unfinished requests."""
        self._requests.clear()

    def _make_sequence(self, token_ids: Any, params: SamplingParams, seq_id: int) -> Sequence:
        """A sequence that is sure to finish, or a RequestError (invariant 6)."""
        config, vocab_size = self._config, self._config.model_config.vocab_size
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be a SamplingParams, not {type(params).__name__}.")
        ids = as_token_ids(token_ids)
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
        # the last token's keys and values are never computed
        num_blocks = max(1, -(-(longest - 1) // config.kvcache_block_size))
        if params.max_tokens > 0 and num_blocks > self._num_blocks:
            raise RequestError(
                f"prompt ({len(ids)} tokens) and max_tokens={params.max_tokens} need {num_blocks} KV blocks of "
                f"{config.kvcache_block_size} tokens; the cache has {self._num_blocks}. Lower max_tokens, "
                "or make the cache larger (num_kvcache_blocks, gpu_memory_utilization)."
            )
        for stop_id in params.stop_token_ids:
            if stop_id >= vocab_size:
                raise RequestError(f"stop_token_ids: {stop_id} is outside the vocabulary [0, {vocab_size}).")
        stop_ids: tuple[int, ...] = ()
        if params.min_tokens:
            eos = () if params.ignore_eos else self._eos_token_ids
            stop_ids = tuple(dict.fromkeys((*params.stop_token_ids, *eos)))
            if len(stop_ids) > MAX_STOP_IDS:
                raise RequestError(
                    f"min_tokens can hold back at most {MAX_STOP_IDS} end-of-sequence and stop ids, "
                    f"not {len(stop_ids)}."
                )
        if params.seed is None:
            seed = xxhash.xxh64_intdigest(f"request {seq_id}".encode(), seed=config.seed)
        else:
            seed = xxhash.xxh64_intdigest(f"seed {params.seed}".encode())
        return Sequence(ids, params, seq_id, config.kvcache_block_size, seed, stop_ids)


def as_token_ids(token_ids: Any) -> np.ndarray:
    """A prompt as an integer array [n]; raises RequestError for anything but a flat list of integers."""
    rule = "a prompt must be a string or a flat list of integer token ids"
    if isinstance(token_ids, np.ndarray):
        ids = token_ids
    else:
        values = token_ids if isinstance(token_ids, (list, tuple)) else as_list(rule, token_ids)
        try:
            ids = np.array(array("q", values))  # faster than numpy's own conversion, and refuses floats
        except (TypeError, OverflowError):
            ids = np.empty(0, object)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(f"{rule}, not {token_ids!s:.100}.")
    return ids


def as_list(rule: str, given: Any) -> list:
    """``list(given)``; raises RequestError with the rule if it is no list of prompts, parameters or messages."""
    if isinstance(given, NON_SEQUENCES) and not isinstance(given, KeysView):  # keys are a set, but ordered
        raise RequestError(f"{rule}, not {given!s:.100}.")
    try:
        items = iter(given)
    except TypeError:
        raise RequestError(f"{rule}, not {given!s:.100}.") from None
    return list(items)  # an exception from the user's generator passes through

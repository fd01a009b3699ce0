"""From what a user gives to requests that are sure to finish (invariant 6), and to their sequences.

Owns the checks of prompts and parameters, the ids and the seeds. Knows nothing of queues.
"""

import logging
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np
import xxhash

from nanovllm.config import Config
from nanovllm.core import Sequence
from nanovllm.engine.prompts import Prompt, as_list, as_token_ids, split_prompt
from nanovllm.engine.request import Completion, Request
from nanovllm.engine.token_processor import TokenProcessors
from nanovllm.engine.tokenizer import AsyncTokenizer
from nanovllm.engine.variants import READOUTS
from nanovllm.errors import RequestError
from nanovllm.readouts import Readout
from nanovllm.sampling_params import MAX_STOP_IDS, SamplingParams

logger = logging.getLogger("nanovllm")
Encoded = tuple[str | None, Any]  # of a prompt: its text, if it has one, and what should be token ids
Params = SamplingParams | ListLike[SamplingParams] | None


class InputProcessor:
    """Makes requests and their sequences; one per engine.

    Args:
        config: limits, and the engine's seed.
        num_kvcache_blocks: size of the KV cache.
        tokenizer: for prompts that are text.
        token_processors: for sequences whose every token the host looks at.
    """

    def __init__(self, config: Config, num_kvcache_blocks: int, tokenizer: AsyncTokenizer,
                 token_processors: TokenProcessors):
        self.config, self._num_blocks = config, num_kvcache_blocks
        self._tokenizer, self._token_processors = tokenizer, token_processors
        self._num_seqs = 0  # the next seq_id
        self._has_warned = False

    # ---------------------------------------------------------------- requests

    def encode(self, prompts: ListLike[Prompt], first: int = 0) -> list[Encoded]:
        """Prompts with their token ids; a text that comes with ids is carried, and not encoded.

        ``first``: the index of the first one, for errors.
        """
        split = []
        for i, prompt in enumerate(prompts, first):
            try:
                split.append(split_prompt(prompt))
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}" if first + len(prompts) > 1 else str(error)) from None
        encoded = iter(self._tokenizer.encode([text if ids is None else None for text, ids in split], first=first))
        return [(text, next(encoded) if ids is None and text is not None else ids) for text, ids in split]

    def make(self, prompt: Prompt, params: SamplingParams, index: int = 0) -> Request:
        """A request with the engine's own copy of its parameters, see ``copy_of``.

        Raises:
            RequestError: it can never be served.
        """
        ((text, ids),) = self.encode([prompt])
        token_ids, params = self.checked(as_token_ids(ids), params)
        self.check_ids("token id", token_ids)
        return self.request(text, token_ids, params, index)

    def make_all(self, prompts: ListLike[Encoded], params: Params, is_checked: bool = False) -> list[Request]:
        """The requests of a call, whose parameters are one for all or one for each. ``is_checked``: they are our own.

        Raises:
            RequestError: one can never be served, with its index, or the counts differ. No id was given away.
        """
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        every = as_list("sampling_params must be a SamplingParams or a list of them", every)
        if len(every) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts but {len(every)} sampling_params; give one, or one for each prompt."
            )
        copies: dict[Any, SamplingParams] = {}  # requests with equal parameters share a copy
        last: Any = copies  # the parameters before: none yet
        checked = []
        for i, ((_, token_ids), given) in enumerate(zip(prompts, every, strict=True)):
            try:
                if given is not last:
                    last, key = given, given.key() if isinstance(given, SamplingParams) else None
                    if key not in copies:
                        copies[key] = given if is_checked else self.copy_of(given)
                checked.append(self.checked(as_token_ids(token_ids), copies[key]))
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from None
        try:
            self.check_ids("", np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in checked)]))
        except RequestError:
            for i, (ids, _) in enumerate(checked):  # slower
                self.check_ids(f"prompt {i}: token id", ids)
        return [
            self.request(text, ids, resolved, i)
            for i, ((text, _), (ids, resolved)) in enumerate(zip(prompts, checked, strict=True))
        ]

    def request(self, text: str | None, ids: np.ndarray, params: SamplingParams, index: int,
                readout: Readout | None = None) -> Request:
        """A request whose form is checked. ``readout``: by default the one that its parameters ask for, if any."""
        for wanted_by in READOUTS:
            readout = readout or wanted_by(params, ids)
        request = Request(self._num_seqs, text, ids, params, self._tokenizer, index, readout)
        self._num_seqs += params.n
        return request

    def make_completions(self, request: Request) -> None:
        """The sequences of a request that is to be queued."""
        params, first_id, block_size = request.params, request.request_id, self.config.kvcache_block_size
        # the mask of a constrained sequence holds them back
        stop_ids = () if params.is_constrained else self._token_processors.min_tokens_stop_ids(params)
        seqs = [
            Sequence(request.prompt_ids, params, seq_id, block_size, self._seed(params, seq_id, i), stop_ids, first_id)
            for i, seq_id in enumerate(range(first_id, first_id + params.n))
        ]
        if request.readout is not None and request.readout.rows(0, len(request.prompt_ids)):
            seqs[0].readout = request.readout
        request.completions = [Completion(seq, self._token_processors.make(seq)) for seq in seqs]

    def _seed(self, params: SamplingParams, seq_id: int, index: int) -> int:
        if params.seed is None:
            return xxhash.xxh64_intdigest(f"request {seq_id}".encode(), seed=self.config.seed)
        return xxhash.xxh64_intdigest(f"seed {params.seed + index}".encode())

    # ---------------------------------------------------------------- checks

    def copy_of(self, params: Any) -> SamplingParams:
        """A checked copy of a user's parameters, which nobody else changes."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be a SamplingParams, not {type(params).__name__}.")
        params, allowed = params.snapshot(), self.config.max_logprobs
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self.check_ids(f"{name}:", np.array(list(getattr(params, name) or ()), np.int64))
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and allowed != -1 and not 0 <= asked <= allowed:
                raise RequestError(f"{name}={asked} must be at most max_logprobs={allowed}; see LLM(max_logprobs=...).")
        stop_ids = self._token_processors.min_tokens_stop_ids(params)
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"min_tokens can hold back at most {MAX_STOP_IDS} end-of-sequence and stop ids, not {len(stop_ids)}."
            )
        if params.allowed_token_ids is not None and stop_ids and set(params.allowed_token_ids) <= set(stop_ids):
            raise RequestError(
                f"min_tokens={params.min_tokens} holds back every one of allowed_token_ids, which are all "
                "end-of-sequence or stop tokens."
            )
        self._token_processors.check(params)
        return params

    def check_ids(self, what: str, ids: np.ndarray) -> None:
        vocab_size = self.config.model_config.vocab_size
        unknown = ids[(ids < 0) | (ids >= vocab_size)]
        if len(unknown):
            raise RequestError(f"{what} {unknown[0]} is outside the vocabulary [0, {vocab_size}).")

    def checked(self, ids: np.ndarray, params: SamplingParams,
                is_computed: bool = False) -> tuple[np.ndarray, SamplingParams]:
        """Prompt and parameters, truncated and resolved. The keys and values of the last token are computed only where
        there is nothing to sample, and ``is_computed``, or prompt tokens are scored.
        """
        max_model_len, block_size = self.config.max_model_len, self.config.kvcache_block_size
        num_blocks = self._num_blocks
        if not (is_computed or self.config.model_config.has_lm_head):
            raise RequestError("this model has no LM head, so it predicts no tokens; see LLM.embed and LLM.classify.")
        if params.truncate_prompt_tokens is not None:
            keep = max_model_len - 1 if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            ids = ids[-keep:]
        n = len(ids)
        if n == 0:
            raise RequestError("the prompt is empty; it must hold at least one token.")
        longest = max_model_len if params.max_tokens == 0 else max_model_len - 1
        if n > longest:
            raise RequestError(
                f"the prompt has {n} tokens; with max_model_len={max_model_len} at most {longest} fit. Shorten it or "
                "raise max_model_len."
            )
        if params.max_tokens is None:
            params = params.snapshot()
            room = min(max_model_len, num_blocks * block_size + 1) - n
            params.max_tokens = max(room, params.min_tokens, 1)
        is_computed = is_computed or (params.max_tokens == 0 and params.prompt_logprobs is not None)
        if is_computed and n > num_blocks * block_size:
            raise RequestError(
                f"the prompt has {n} tokens; the KV cache has {num_blocks} blocks of {block_size}. Make it larger "
                "(num_kvcache_blocks, gpu_memory_utilization)."
            )
        needed = max(1, -(-(min(n + params.max_tokens, max_model_len) - 1) // block_size))
        if params.max_tokens > 0 and needed > num_blocks:
            raise RequestError(
                f"prompt ({n} tokens) and max_tokens={params.max_tokens} need {needed} KV blocks of {block_size} "
                f"tokens; the cache has {num_blocks}. Lower max_tokens, or make the cache larger (num_kvcache_blocks, "
                "gpu_memory_utilization)."
            )
        if n + params.max_tokens > max_model_len and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "max_tokens=%d is cut to %d by max_model_len=%d (the prompt has %d tokens). This is said once.",
                params.max_tokens, max_model_len - n, max_model_len, n,
            )  # fmt: skip
        return ids, params

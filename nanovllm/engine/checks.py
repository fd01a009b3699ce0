"""Checks of prompts and parameters: a request that passes them is sure to finish (invariant 6).

Owns the limits. Knows nothing of queues.
"""

import logging
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.token_processor import TokenProcessors
from nanovllm.errors import RequestError
from nanovllm.sampling_params import MAX_STOP_IDS, SamplingParams

logger = logging.getLogger("nanovllm")
MAX_COPIES = 1024
NO_LM_HEAD = "this model has no LM head, so it predicts no tokens; see LLM.embed and LLM.classify."
EMPTY = "the prompt is empty; it must hold at least one token."
TOO_LONG = (
    "the prompt has {n} tokens; with max_model_len={max_model_len} at most {longest} fit. Shorten it or raise "
    "max_model_len."
)
NO_ROOM_FOR_PROMPT = (
    "the prompt has {n} tokens; the KV cache has {num_blocks} blocks of {block_size}. Make it larger "
    "(num_kvcache_blocks, gpu_memory_utilization)."
)
NO_ROOM = (
    "prompt ({n} tokens) and max_tokens={params.max_tokens} need {needed} KV blocks of {block_size} tokens; the cache "
    "has {num_blocks}. Lower max_tokens, or make the cache larger (num_kvcache_blocks, gpu_memory_utilization)."
)
CUT = "max_tokens=%d is cut to %d by max_model_len=%d (the prompt has %d tokens). This is said once."


class Checks:
    """Limits of one engine: options, ``num_blocks`` of the KV cache, and the features of token processors."""

    def __init__(self, config: Config, num_blocks: int, token_processors: TokenProcessors):
        self.config, self._num_blocks, self.token_processors = config, num_blocks, token_processors
        self._has_warned = False
        self._copies: dict[Any, SamplingParams] = {}  # checked copies by the values of their parameters

    def checked_params(self, params: Any) -> SamplingParams:
        """A checked copy of a user's parameters, which nobody else changes; equal parameters share one."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be a SamplingParams, not {type(params).__name__}.")
        key = params.key()
        if key in self._copies:
            return self._copies[key]
        params = params.snapshot()
        self._check_params(params)
        if isinstance(key, tuple):  # else an object's identity, which another object may have later
            if len(self._copies) == MAX_COPIES:
                self._copies.clear()
            self._copies[key] = params
        return params

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            self.check_ids(f"{name}:", np.array(list(getattr(params, name) or ()), np.int64))
        allowed = self.config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(params, name)
            if k is not None and allowed != -1 and not 0 <= k <= allowed:
                raise RequestError(f"{name}={k} must be at most max_logprobs={allowed}; see LLM(max_logprobs={k}).")
        if params.min_tokens:
            self._check_min_tokens(params)
        if params.needs_token_processor:
            self.token_processors.check(params)

    def _check_min_tokens(self, params: SamplingParams) -> None:
        stop_ids = self.token_processors.min_tokens_stop_ids(params)
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"min_tokens can hold back at most {MAX_STOP_IDS} end-of-sequence and stop ids, not {len(stop_ids)}."
            )
        if params.allowed_token_ids is not None and stop_ids and set(params.allowed_token_ids) <= set(stop_ids):
            raise RequestError(
                f"min_tokens={params.min_tokens} holds back every one of allowed_token_ids, which are all "
                "end-of-sequence or stop tokens."
            )

    def check_ids(self, what: str, ids: np.ndarray) -> None:
        vocab_size = self.config.model_config.vocab_size
        unknown = ids[(ids < 0) | (ids >= vocab_size)]
        if len(unknown):
            raise RequestError(f"{what} {unknown[0]} is outside the vocabulary [0, {vocab_size}).")

    def resolve(self, ids: np.ndarray, params: SamplingParams,
                is_computed: bool = False) -> tuple[np.ndarray, SamplingParams]:
        """Prompt and parameters, truncated and resolved.

        ``is_computed``: the keys and values of the last prompt token are computed, although nothing is sampled.
        """
        max_model_len, block_size = self.config.max_model_len, self.config.kvcache_block_size
        num_blocks = self._num_blocks
        has_lm_head = is_computed or self.config.model_config.has_lm_head
        longest = max_model_len if params.max_tokens == 0 else max_model_len - 1
        if params.truncate_prompt_tokens is not None:
            keep = longest if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            ids = ids[-keep:]
        n = len(ids)
        if params.max_tokens is None:
            params = params.snapshot()
            params.max_tokens = max(min(max_model_len, num_blocks * block_size + 1) - n, params.min_tokens, 1)
        is_computed = is_computed or (params.max_tokens == 0 and params.prompt_logprobs is not None)
        needed = max(1, -(-(min(n + params.max_tokens, max_model_len) - 1) // block_size))
        for is_refused, reason in (
            (not has_lm_head, NO_LM_HEAD),
            (n == 0, EMPTY),
            (n > longest, TOO_LONG),
            (is_computed and n > num_blocks * block_size, NO_ROOM_FOR_PROMPT),
            (params.max_tokens > 0 and needed > num_blocks, NO_ROOM),
        ):
            if is_refused:
                raise RequestError(reason.format(
                    n=n, longest=longest, max_model_len=max_model_len, params=params, needed=needed,
                    num_blocks=num_blocks, block_size=block_size,
                ))  # fmt: skip
        if n + params.max_tokens > max_model_len and not self._has_warned:
            self._has_warned = True
            logger.warning(CUT, params.max_tokens, max_model_len - n, max_model_len, n)
        return ids, params

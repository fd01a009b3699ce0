"""Requests for a readout alone: prompts that are scored, or whose hidden states are pooled."""

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.prompts import Prompt, as_token_ids
from nanovllm.engine.request import Request
from nanovllm.errors import RequestError
from nanovllm.readouts.pooled_state import PooledState
from nanovllm.readouts.prompt_logprobs import PromptLogprobs
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import check, integer

SLICE = 256  # prompts that are tokenized at once, while the device works on those before


def make_scoring(inputs: InputProcessor, lists: ListLike[Any], starts: ListLike[Any]) -> list[Request]:
    """Requests for the log-probabilities of ``lists[i][starts[i]:]``, and nothing else.

    Raises:
        RequestError: as from ``InputProcessor.make_all``.
    """
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, detokenize=False)
    checked = []
    for i, (given, start) in enumerate(zip(lists, starts, strict=True)):
        try:
            ids, start = _check_scored(inputs, given, start)
            inputs.checked(ids[:-1], params)
        except RequestError as error:
            raise RequestError(f"list {i}: {error}") from None
        checked.append((ids, start))
    return [
        inputs.request(None, ids[:-1], params, i, PromptLogprobs(ids[start:].astype(np.int32), start - 1, num_top=1))
        for i, (ids, start) in enumerate(checked)
    ]


def _check_scored(inputs: InputProcessor, token_ids: Any, start: Any) -> tuple[np.ndarray, int]:
    """A list whose tokens from ``start`` on are to be scored, and the start."""
    ids = as_token_ids(token_ids)
    start = check("score", "start", start, integer("an integer"), RequestError)
    if not 1 <= start < len(ids):
        raise RequestError(
            f"start={start} must be in [1, {len(ids) - 1}] for {len(ids)} token ids: the first has nothing "
            "before it, and one at least must be scored."
        )
    limit = inputs.config.max_model_len + 1
    if len(ids) > limit:
        raise RequestError(
            f"the list has {len(ids)} token ids; with max_model_len={limit - 1} at most {limit} can be scored. "
            "Shorten it or raise max_model_len."
        )
    inputs.check_ids("token id", ids)
    return ids, start


def make_pooling(inputs: InputProcessor, prompts: ListLike[Prompt], pooling: str) -> Iterator[Request]:
    """Requests for the pooled hidden state of each prompt; made, and checked, as they are asked for.

    Raises:
        RequestError: a prompt can never be served, with its index; when its turn comes.
    """
    params = SamplingParams(max_tokens=0, detokenize=False)
    for first in range(0, len(prompts), SLICE):
        encoded = inputs.encode(prompts[first : first + SLICE], first)
        for i, (text, given) in enumerate(encoded, first):
            try:
                ids, _ = inputs.checked(as_token_ids(given), params, is_computed=True)
                inputs.check_ids("token id", ids)
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from None
            yield inputs.request(text, ids, params, i, PooledState(pooling, len(ids)))

"""``LLM.score`` and ``perplexity``: log-probabilities of given tokens. Owns the checks of their requests."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from typing import Any, cast

import numpy as np

from nanovllm.engine.callers import collect
from nanovllm.engine.guard import Guard
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.engine.text.prompts import Prompt, as_list, as_prompts, as_token_ids
from nanovllm.errors import RequestError
from nanovllm.messages import Attachment
from nanovllm.outputs import Score
from nanovllm.readouts.prompt_logprobs import PromptLogprobs
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import check, integer

SLICE = 256  # texts that are tokenized at once, while the device works on those before


class Scoring(LLMEngine):
    """Scores given tokens."""

    def score(self, token_id_lists: ListLike[ListLike[int]], start: int | ListLike[int] | None = None,
              use_tqdm: bool | Callable = True) -> list[Score]:
        """Compute log-probabilities of given tokens, each after all before it, in one prefill.

        If the model's logits are NaN, the log-probabilities are NaN too, and ``error`` says so.

        Args:
            token_id_lists: at least two ids each, at most ``max_model_len + 1``.
            start: the first token to score, for all lists or one for each; at least 1, the default. Earlier tokens
                may come from the prefix cache.
            use_tqdm: as in ``generate``.

        Raises:
            RequestError: a list can never be scored; nothing was computed.
        """
        lists = as_list("token_id_lists must be a list of lists of token ids", token_id_lists)
        starts = start if isinstance(start, (list, tuple)) else [1 if start is None else start] * len(lists)
        if len(starts) != len(lists):
            raise RequestError(f"{len(lists)} lists but {len(starts)} starts; give one, or one for each list.")
        with Guard(self):
            self.require_ready()
            requests = make_scoring(self._inputs, lists, starts)
            return collect(self, requests, scored, use_tqdm, desc="Scoring")

    def perplexity(self, texts: Prompt | ListLike[Prompt], use_tqdm: bool | Callable = True) -> list[float]:
        """Compute the perplexity of one text or many: exp of the mean negative log-probability of its tokens.

        Every token but the first counts, in natural logarithms, as in transformers' loss. The first token is the BOS if
        the tokenizer prepends one, else the text's own first token. Special tokens that the tokenizer appends count.
        The result is NaN for a text in which no token counts (empty, or a single token), and for one with NaN
        logits.

        Args:
            texts: as prompts of ``generate``, of at most ``max_model_len + 1`` tokens each. They are tokenized while
                the device works on those before, and only a window of them is held as tokens.
            use_tqdm: as in ``generate``.

        Raises:
            RequestError: a text can never be scored; the others of this call are dropped.
        """
        prompts = as_prompts(texts)
        with Guard(self):
            self.require_ready()
            requests = make_perplexity(self._inputs, prompts)
            return collect(self, [], perplexity_of, use_tqdm, requests, len(prompts), desc="Scoring")


def scored(request: Request) -> Score:
    return cast(PromptLogprobs, request.readout).score()


def perplexity_of(request: Request) -> float:
    return cast(PromptLogprobs, request.readout).perplexity()


def make_perplexity(inputs: InputProcessor, texts: ListLike[Prompt]) -> Iterator[Request]:
    """Requests for the log-probabilities of all tokens but the first; made, and checked, as they are asked for."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
    for first in range(0, len(texts), SLICE):
        for i, (_, given) in enumerate(inputs.encode(texts[first : first + SLICE], first), first):
            try:
                ids = as_token_ids(given)
                if isinstance(given, Attachment):
                    raise RequestError("perplexity is that of tokens alone; prompt_logprobs are those of any prompt.")
                inputs.checks.check_ids("token id", ids)
                if len(ids) > 1:
                    _check_scored(inputs, ids, 1)
                    inputs.checks.resolve(ids[:-1], params)
            except RequestError as error:
                raise RequestError(f"text {i}: {error}") from None
            yield inputs.request(None, ids[:-1], params, i, PromptLogprobs(ids[1:].astype(np.int32), 0, num_top=0))


def make_scoring(inputs: InputProcessor, lists: ListLike[Any], starts: ListLike[Any]) -> list[Request]:
    """Requests for the log-probabilities of ``lists[i][starts[i]:]``, and nothing else."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, detokenize=False)
    checked = []
    for i, (given, start) in enumerate(zip(lists, starts, strict=True)):
        try:
            ids, start = _check_scored(inputs, given, start)
            inputs.checks.resolve(ids[:-1], params)
        except RequestError as error:
            raise RequestError(f"list {i}: {error}") from None
        checked.append((ids, start))
    return [
        inputs.request(None, ids[:-1], params, i, PromptLogprobs(ids[start:].astype(np.int32), start - 1, num_top=1))
        for i, (ids, start) in enumerate(checked)
    ]


def _check_scored(inputs: InputProcessor, token_ids: Any, start: Any) -> tuple[np.ndarray, int]:
    """A list whose tokens from ``start`` on are to be scored, and the start."""
    try:
        ids = as_token_ids(token_ids)
    except RequestError:
        raise RequestError(
            f"it must be a flat list of integer token ids, not {token_ids!r:.100}. llm.tokenize makes them of texts."
        ) from None
    if len(ids) < 2:
        raise RequestError(
            f"it has {len(ids)} token ids: the first has nothing before it, and one at least must be scored. Give two."
        )
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
    inputs.checks.check_ids("token id", ids)
    return ids, start

"""Beam search, step by step over ``LLM.most_probable``: beams share their prefix through the prefix cache.

Owns which beams live on. The engine computes the next tokens of each.
"""

from collections.abc import Sequence as ListLike
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import FinishReason, LogprobsAt, RequestOutput
from nanovllm.sampling_params import Parameters
from nanovllm.validation import BOOLEAN, at_least, check_all, number, option, rules_of

if TYPE_CHECKING:
    from nanovllm.llm import LLM, Prompt


@dataclass
class BeamSearchParams(Parameters):
    """Parameters of a beam search. May be edited; checked when made and again when submitted.

    A completion of n tokens, an end-of-sequence token counted, has the score ``cum_logprob / n**length_penalty``. The
    result is that of transformers' ``generate(num_beams=beam_width, num_return_sequences=beam_width,
    early_stopping="never")``: the search ends when no running beam can still win. Transformers' default,
    ``early_stopping=False``, may end sooner if ``length_penalty`` is above 0. vLLM counts the prompt's tokens in n, and
    lets any beam end that has an end-of-sequence token among its 2 * beam_width best.

    Args:
        beam_width: beams that live on after each step, and sequences in the result.
        max_tokens: limit on generated tokens.
        ignore_eos: continue past end-of-sequence tokens.
        temperature: has no effect: log-probabilities are the model's own.
        length_penalty: in [-10, 10]; above 0 favours long completions, below 0 short ones.
        include_stop_str_in_output: keep the end-of-sequence token in ``tokens``.

    Raises:
        RequestError: a value is out of range.
    """

    beam_width: int = option(MISSING, at_least(1))
    max_tokens: int = option(MISSING, at_least(1))
    ignore_eos: bool = option(False, BOOLEAN)
    temperature: float = option(0.0, number("a finite number >= 0", lambda temperature: temperature >= 0))
    length_penalty: float = option(1.0, number("in [-10, 10]", lambda penalty: -10 <= penalty <= 10))
    include_stop_str_in_output: bool = option(False, BOOLEAN)

    def __post_init__(self) -> None:
        vars(self).update(check_all("BeamSearchParams", vars(self), rules_of(BeamSearchParams), RequestError))


@dataclass
class BeamSearchSequence:
    """One beam.

    Attributes:
        tokens: the prompt's token ids and the generated ones.
        logprobs: for each generated token, an end-of-sequence token included, the most probable ones at its place.
        cum_logprob: sum of the generated tokens' log-probabilities.
        text: of ``tokens``, special tokens included; None without a tokenizer.
        finish_reason: "stop" (an end-of-sequence token) or "length".
        stop_reason: the end-of-sequence token's id, or None.
    """

    tokens: list[int]
    logprobs: list[LogprobsAt] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass
class BeamSearchOutput:
    """The ``beam_width`` sequences of one prompt, the best first (fewer with a smaller vocabulary)."""

    sequences: list[BeamSearchSequence]


def beam_search(llm: "LLM", prompts: "ListLike[Prompt]", params: BeamSearchParams) -> list[BeamSearchOutput]:
    """Search the completions of all prompts; a step of all their beams is one call of the engine.

    Raises:
        RequestError: a prompt can never be served; nothing was computed.
        EngineError: the model's logits are NaN.
    """
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params must be a BeamSearchParams, not {type(params).__name__}.")
    params = replace(params)  # a checked copy
    eos = frozenset() if params.ignore_eos else frozenset(llm.eos_token_ids)
    # for each beam the step needs its best beam_width continuations, and beam_width of them that do not end it
    num_candidates = params.beam_width + len(eos)
    prompts = [llm.load_parts(prompt) for prompt in prompts]
    outputs = llm.most_probable(prompts, num_candidates)
    max_model_len = llm.config.max_model_len
    searches = running = [
        _Search(prompt, output.prompt_token_ids, params, eos, max_model_len)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    while running:
        next_tokens = map(_next_tokens, outputs)
        for search in running:
            search.step([next(next_tokens) for _ in search.running])
        running = [search for search in running if search.running]
        if running:
            beams = [search.prompt_of(beam) for search in running for beam in search.running]
            outputs = llm.most_probable(beams, num_candidates)
    found = [[beam for _, beam in search.finished] for search in searches]
    with suppress(RequestError):  # without a tokenizer there is no text
        for beam in chain.from_iterable(found):
            (beam.text,) = llm.detokenize([beam.tokens], skip_special_tokens=False)
    return [BeamSearchOutput(beams) for beams in found]


def _next_tokens(output: RequestOutput) -> LogprobsAt:
    (completion,) = output.outputs
    if completion.logprobs is None or completion.finish_reason == "error":
        raise EngineError(str(completion.stop_reason))
    return completion.logprobs[0]  # type: ignore[index]  # made when it is read


class _Search:
    """The beams of one prompt.

    Attributes:
        running: of equal length, the most probable first; empty when the search is over.
        finished: (score, beam), the best first, at most ``beam_width``.
    """

    def __init__(self, given: "Prompt", prompt: list[int], params: BeamSearchParams, eos: frozenset[int],
                 max_model_len: int):
        self._params, self._eos = params, eos
        others = given if isinstance(given, dict) else {}
        self._others = {key: others[key] for key in others if key not in ("prompt", "prompt_token_ids")}
        # a prompt without room for one token is refused by the engine, at the first step
        self._max_tokens = max(1, min(params.max_tokens, max_model_len - len(prompt)))
        self._num_tokens = 0  # generated by each running beam
        self.finished: list[tuple[float, BeamSearchSequence]] = []
        self.running = [BeamSearchSequence(prompt)]

    def prompt_of(self, beam: BeamSearchSequence) -> "Prompt":
        """The tokens of a beam as a prompt, with the images of the user's."""
        return {"prompt_token_ids": beam.tokens, **self._others} if self._others else beam.tokens

    def step(self, next_tokens: list[LogprobsAt]) -> None:
        """One token more; ``next_tokens`` are the candidates of each running beam."""
        width, self._num_tokens = self._params.beam_width, self._num_tokens + 1
        candidates = [
            (beam.cum_logprob + candidate.logprob, token, beam, logprobs)
            for beam, logprobs in zip(self.running, next_tokens, strict=True)
            for token, candidate in logprobs.items()
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        self.running = []
        is_last = self._num_tokens == self._max_tokens
        for place, (cum_logprob, token, parent, logprobs) in enumerate(candidates):
            is_eos = token in self._eos
            ends = is_eos or is_last
            if place >= width if ends else len(self.running) == width:
                continue  # worse than ``width`` others, which a finished sequence must not be, however short
            beam = BeamSearchSequence([*parent.tokens, token], [*parent.logprobs, logprobs], cum_logprob)
            if ends:
                self._finish(beam, is_eos)
            else:
                self.running.append(beam)
        self.finished.sort(key=lambda finished: -finished[0])
        del self.finished[width:]
        if self.running and len(self.finished) == width:
            # no running beam can get a higher score: log-probabilities are not above 0
            longest = self._max_tokens if self._params.length_penalty > 0 else self._num_tokens
            if self._score(self.running[0].cum_logprob, longest) <= self.finished[-1][0]:
                self.running = []

    def _finish(self, beam: BeamSearchSequence, is_eos: bool) -> None:
        beam.finish_reason, beam.stop_reason = ("stop", beam.tokens[-1]) if is_eos else ("length", None)
        if is_eos and not self._params.include_stop_str_in_output:
            beam.tokens.pop()
        self.finished.append((self._score(beam.cum_logprob, self._num_tokens), beam))

    def _score(self, cum_logprob: float, num_tokens: int) -> float:
        return cum_logprob / num_tokens**self._params.length_penalty

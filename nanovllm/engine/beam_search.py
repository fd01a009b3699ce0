"""Beam search, step by step over ``generate``: the prefix cache holds what the beams have in common.

Owns which beams live on. What may follow a list of tokens is the engine's to say.
"""

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, replace
from typing import Any

from nanovllm.engine.detokenizer import decode
from nanovllm.engine.prompts import as_token_ids
from nanovllm.errors import RequestError
from nanovllm.outputs import FinishReason, LogprobsAt
from nanovllm.sampling_params import Parameters
from nanovllm.validation import BOOLEAN, at_least, check_all, number, option, rules_of


@dataclass
class BeamSearchParams(Parameters):
    """What ``beam_search`` looks for. May be edited; checked when made and again when submitted.

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
    """Of one prompt: ``beam_width`` sequences, the best first (fewer, if the vocabulary has not as many)."""

    sequences: list[BeamSearchSequence]


def beam_search(most_probable: Callable[[list[list[int]], int], list[LogprobsAt]], token_ids: list[Any],
                params: BeamSearchParams, eos_token_ids: Iterable[int], max_model_len: int,
                tokenizer: Any) -> list[BeamSearchOutput]:
    """Search the completions of all prompts; a step of all their beams is one call of the engine.

    Args:
        most_probable: the engine; gives the k most probable next tokens of each list, the best first.
        token_ids: of the prompts.
        eos_token_ids: end a beam, unless ``params.ignore_eos``.
        max_model_len: limit of prompt plus completion.
        tokenizer: for the text, or None.

    Raises:
        RequestError: a prompt can never be served; nothing was computed.
    """
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params must be a BeamSearchParams, not {type(params).__name__}.")
    params = replace(params)  # a checked copy
    eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
    searches = []
    for i, ids in enumerate(token_ids):
        try:
            searches.append(_Search(as_token_ids(ids).tolist(), params, eos, max_model_len))
        except RequestError as error:
            raise RequestError(f"prompt {i}: {error}") from None
    # of one beam the step needs its best beam_width continuations and as many that do not end it
    num_candidates = params.beam_width + len(eos)
    while running := [search for search in searches if search.running]:
        beams = [beam for search in running for beam in search.running]
        candidates = iter(most_probable([beam.tokens for beam in beams], num_candidates))
        for search in running:
            search.step([next(candidates) for _ in search.running])
    return [BeamSearchOutput(search.result(tokenizer)) for search in searches]


class _Search:
    """The beams of one prompt.

    Attributes:
        running: of equal length, the most probable first; empty when the search is over.
    """

    def __init__(self, prompt: list[int], params: BeamSearchParams, eos: frozenset[int], max_model_len: int):
        self._params, self._eos = params, eos
        # a prompt without room for one token is refused by the engine, at the first step
        self._max_tokens = max(1, min(params.max_tokens, max_model_len - len(prompt)))
        self._num_tokens = 0  # generated by each running beam
        self._finished: list[tuple[float, BeamSearchSequence]] = []  # score, beam; the best first, at most beam_width
        self.running = [BeamSearchSequence(prompt)]

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
        self._finished.sort(key=lambda finished: -finished[0])
        del self._finished[width:]
        if self.running and len(self._finished) == width and self._best_possible() <= self._finished[-1][0]:
            self.running = []

    def _finish(self, beam: BeamSearchSequence, is_eos: bool) -> None:
        beam.finish_reason, beam.stop_reason = ("stop", beam.tokens[-1]) if is_eos else ("length", None)
        if is_eos and not self._params.include_stop_str_in_output:
            beam.tokens.pop()
        self._finished.append((self._score(beam.cum_logprob, self._num_tokens), beam))

    def _best_possible(self) -> float:
        """No running beam can get a higher score: log-probabilities are not above 0."""
        longest = self._params.length_penalty > 0
        return self._score(self.running[0].cum_logprob, self._max_tokens if longest else self._num_tokens)

    def _score(self, cum_logprob: float, num_tokens: int) -> float:
        return cum_logprob / num_tokens**self._params.length_penalty

    def result(self, tokenizer: Any) -> list[BeamSearchSequence]:
        beams = [beam for _, beam in self._finished]
        if tokenizer is not None:
            for beam in beams:
                beam.text = decode(tokenizer, beam.tokens, skip_special_tokens=False)
        return beams

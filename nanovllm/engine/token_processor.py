"""Token processors: stop strings, repetitions, log-probabilities, grammars, thoughts, logits processors.

Plain requests have no ``TokenProcessor``, and cost a step nothing.
"""

import logging
from array import array
from collections.abc import Callable
from functools import cached_property
from inspect import signature
from threading import get_ident
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.core import Sequence
from nanovllm.engine.repetition import REPETITION_DETECTED, RepetitionDetector
from nanovllm.engine.structured_outputs.token_masks import BadWords, Grammar, GrammarCompiler, mask_of, mask_of_all
from nanovllm.engine.text.detokenizer import special_tokens
from nanovllm.engine.text.reasoning import ReasoningMarks
from nanovllm.engine.text.stop_strings import StopStrings
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.engine.thinking import Marks, Thinking
from nanovllm.errors import EngineError, RequestError, as_request_error
from nanovllm.outputs import LogprobsAt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.packed_logprobs import MAX_BEFORE, Texts, logprobs_at, trimmed

logger = logging.getLogger("nanovllm")
NEVER_STOPS = (
    "stop=%r never stops: skip_special_tokens=True leaves the special token %r out of the text. Use "
    "stop_token_ids=[%d], or skip_special_tokens=False. This is said once."
)
CALLED_WITH = (
    ". It is called as f(token_ids, logits), or f(prompt_token_ids, token_ids, logits): with lists, and a tensor [V]. "
    "transformers' take batches of both: lambda ids, logits: processor(torch.tensor([ids]), logits[None])[0]"
)


class TokenProcessor:
    """One sequence whose every token the host looks at; a feature that its request does not use is None.

    Attributes:
        stop_text: the text, once a stop string has ended it.
        grammar, bad_words, thinking: what it may sample next, where that depends on its tokens. With a budget of
            thinking, the grammar begins after the thoughts.
    """

    def __init__(self, seq: Sequence, stop: StopStrings | None, texts: Texts | None = None,
                 grammar: Grammar | None = None, bad_words: BadWords | None = None, thinking: Thinking | None = None,
                 repetition: RepetitionDetector | None = None):
        self.seq, self.grammar, self.bad_words, self.thinking = seq, grammar, bad_words, thinking
        self._functions: list[Callable[[Any], Any]] | None = None  # its logits processors, once they are called
        self._stop, self._texts, self._num_logprobs = stop, texts, seq.sampling_params.num_logprobs
        self._repetition = repetition
        self._rows: list[np.ndarray] = []  # packed log-probabilities of each token; see ``utils/packed_logprobs.py``
        self._totals = [0.0]  # sums of the log-probabilities of the first 0, 1, ... tokens
        self.stop_text: str | None = None

    def update(self, token_id: int, logprobs: np.ndarray | None) -> bool:
        """Take in the next token and the packed row of its log-probabilities. Whether it completes a stop string or
        a repetition, or the grammar fails; then the sequence is marked as ended.
        """
        seq = self.seq
        if seq.finish_reason == "error":  # no token could be sampled
            return False
        if self._num_logprobs is not None:
            assert logprobs is not None
            self._rows.append(trimmed(logprobs, self._num_logprobs))
            self._totals.append(self._totals[-1] + float(logprobs[:1].view(np.float32)[0]))
        if seq.finish_reason == "stop":  # by this token, which is not part of the text
            return False
        if self.bad_words is not None:
            self.bad_words.accept(token_id)
        is_thought, error = self.thinking is not None and self.thinking.accept(token_id), None
        if self.grammar is not None and seq.finish_reason is None and not is_thought:
            error = error_of(self.grammar.accept, token_id)
        if error is not None:
            self.fail(error)
            return True
        found: tuple[str, str | None] | None = None
        was_finished = seq.finish_reason is not None
        try:
            found = None if self._stop is None else self._stop.update(token_id)
        except RequestError as failure:  # the tokenizer failed
            self.fail(failure)
            return not was_finished
        if found is None:
            is_repetition = self._repetition is not None and self._repetition.update(token_id)
            if not is_repetition or was_finished:  # "length" takes precedence, as in vLLM
                return False
            found = REPETITION_DETECTED, None
        (seq.stop_reason, self.stop_text), seq.finish_reason = found, "stop"
        return not was_finished

    @property
    def is_constrained(self) -> bool:
        """Whether its tokens decide which ones it may sample next."""
        return self.grammar is not None or self.bad_words is not None or self.thinking is not None

    @property
    def is_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.is_open

    @property
    def forced(self) -> int | None:
        """The token that it must sample next, if there is one."""
        return None if self.thinking is None else self.thinking.forced

    def process_logits(self, logits: Any) -> bool:
        """Call the logits processors on a tensor f32 [V], in place. False if one raises, which ends the sequence."""
        error = error_of(self._call_functions, logits)
        if error is None:
            return True
        hint = CALLED_WITH if isinstance(error, (TypeError, AttributeError)) else ""
        self.fail(error, "a logits processor failed", hint)
        return False

    def _call_functions(self, logits: Any) -> None:
        if self._functions is None:
            self._functions = [bound(each, self.seq) for each in self.seq.sampling_params.logits_processors or ()]
        for function in self._functions:
            result = function(logits)
            if getattr(result, "shape", None) != logits.shape:
                raise RequestError(
                    f"a logits processor must return the logits, a tensor of shape {list(logits.shape)}, not "
                    f"{result!s:.100}."
                )
            logits.copy_(result)

    def fail(self, error: BaseException, what: str = "the grammar failed while it was decoded", hint: str = "") -> None:
        """Mark the sequence as ended by an error of its grammar, or of a logits processor."""
        self.seq.finish_reason = "error"
        if isinstance(error, RequestError):
            self.seq.stop_reason = str(error)
        else:
            self.seq.stop_reason = f"{what} ({type(error).__name__}: {error!s:.500}){hint}"

    def logprobs(self, token_ids: list[int],
                 start: int = 0) -> tuple[float | None, Callable[[], list[LogprobsAt]] | None]:
        """Sum of the log-probabilities up to the last of the given tokens, which are ``start`` and following, and a
        function that lists theirs. None, None unless the request asked for them.
        """
        if self._num_logprobs is None:
            return None, None
        stop = start + len(token_ids)
        rows, texts, are_top = self._rows[start:stop], self._texts, self.seq.sampling_params.logprob_token_ids is None
        first = self.seq.num_prompt_tokens
        before = self.seq.tokens(first + max(0, start - MAX_BEFORE), first + start).tolist()
        return self._totals[stop], lambda: logprobs_at(np.array(rows), token_ids, texts, are_top, before)


class TokenProcessors:
    """Makes the processors of an engine, and holds their shared state."""

    def __init__(self, config: Config, tokenizer: AsyncTokenizer, eos_token_ids: tuple[int, ...]):
        self._config, self._vocab_size = config, config.model_config.vocab_size
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        if config.reasoning_start_str or config.reasoning_end_str:
            tokenizer.reasoning_marks = ReasoningMarks.alone(config.reasoning_start_str, config.reasoning_end_str)
        self._allowed: dict[bytes, np.ndarray] = {}
        self._has_warned = False
        self._thread_inside: int | None = None  # thread that is inside a logits processor

    def make(self, seq: Sequence) -> TokenProcessor | None:
        """The processor of a sequence, if it needs one. Sets its ``allowed_mask``."""
        params = seq.sampling_params
        if params.allowed_token_ids is not None:
            key = array("q", params.allowed_token_ids).tobytes()
            if key not in self._allowed:  # only one is kept: usually all requests have the same
                self._allowed = {key: mask_of(params.allowed_token_ids, self._vocab_size)}
            seq.allowed_mask = self._allowed[key]
        if not (params.ends_by_content or params.num_logprobs is not None or params.is_constrained
                or params.logits_processors or params.thinking_token_budget is not None):  # fmt: skip
            return None
        stop, grammar, bad_words, marks = self._parts(params)
        texts = self._tokenizer.texts if params.num_logprobs is not None and params.detokenize else None
        thinking = None
        if marks is not None:
            prompt = seq.tokens(0, seq.num_prompt_tokens)
            last_turn = prompt[np.flatnonzero(np.isin(prompt, self._boundaries)).max(initial=-1) + 1 :]
            thinking = Thinking(marks, params.thinking_token_budget or 0, last_turn)
        repetition = RepetitionDetector(params, self._config.max_model_len) if params.repetition_detection else None
        return TokenProcessor(seq, stop, texts, grammar, bad_words, thinking, repetition)

    def process_logits(self, processor: TokenProcessor, logits: Any) -> bool:
        """Call a sequence's logits processors; see ``TokenProcessor.process_logits``."""
        self._thread_inside = get_ident()
        try:
            return processor.process_logits(logits)
        finally:
            self._thread_inside = None

    def require_outside(self) -> None:
        """Raise EngineError inside a logits processor: its engine's step is half done, and takes no step within."""
        if self._thread_inside == get_ident():
            raise EngineError(
                "a logits processor called the engine that calls it, whose step is half done. Call it before or after "
                "the request, or give the processor an LLM of its own."
            )

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError where a part of a processor lacks a tokenizer, or the grammar is wrong."""
        if (error := error_of(self._parts, params)) is not None:
            refused = as_request_error(error)
            raise refused from refused.__cause__
        if params.stop and params.skip_special_tokens and not self._has_warned:
            tokenizer = self._required("stop")
            special = special_tokens(tokenizer, len(tokenizer)).items()
            never = [(string, *pair) for string in params.stop for pair in special if pair[0] and pair[0] in string]
            if never:
                self._has_warned = True
                logger.warning(NEVER_STOPS, *never[0])

    def _parts(self, params: SamplingParams
               ) -> tuple[StopStrings | None, Grammar | None, BadWords | None, Marks | None]:
        stop = grammar = bad_words = marks = None
        if params.stop:
            stop = StopStrings(self._required("stop"), params)
        if params.structured_outputs is not None:
            self._required("structured_outputs")
            grammar = self._grammars.compile(params.structured_outputs)
        if params.bad_words:
            bad_words = BadWords(self._required("bad_words"), params.bad_words, self._vocab_size)
        if params.thinking_token_budget is not None:
            marks = self._marks
        return stop, grammar, bad_words, marks

    def masks(self, processors: list[TokenProcessor]) -> tuple[np.ndarray, list[Sequence]]:
        """Compute the tokens that each constrained sequence may sample next.

        Returns:
            A bitmask int32 [n, ceil(V / 32)], and the sequences whose grammar fails, marked as ended.
        """
        bitmask = np.tile(mask_of_all(self._vocab_size), (len(processors), 1))
        failed = self._fill(processors, bitmask)
        eos = mask_of(self._eos_token_ids, self._vocab_size)
        for row, processor in zip(bitmask, processors, strict=True):
            seq = processor.seq
            if processor.bad_words is not None:
                processor.bad_words.apply(row)
            if processor.grammar is not None and processor.thinking is not None:
                if processor.is_thinking:
                    row &= ~eos  # the text that the grammar describes has not begun
                elif seq.num_completion_tokens == 0 and len(self._marks.start) == 1:
                    row |= mask_of(self._marks.start, self._vocab_size)  # the text may begin with thinking
            if seq.allowed_mask is not None:
                must_end = processor.grammar is not None
                row &= seq.allowed_mask | eos if must_end else seq.allowed_mask
            grammar = processor.grammar if seq.finish_reason is None else None
            if not row.any() and grammar is not None and grammar.may_end:
                row[:] = eos  # elsewhere no token can be sampled: the request contradicts itself
            if seq.num_completion_tokens < seq.sampling_params.min_tokens:
                longer = row & ~mask_of(self.min_tokens_stop_ids(seq.sampling_params), self._vocab_size)
                row[:] = longer if longer.any() else row  # a text that must end here may end
        return bitmask, failed

    def _fill(self, processors: list[TokenProcessor], bitmask: np.ndarray) -> list[Sequence]:
        """Fill row i for the grammar of sequence i, if it has one; returns the sequences whose grammar fails."""
        grammars = {i: each.grammar for i, each in enumerate(processors)
                    if each.grammar is not None and not each.is_thinking}  # fmt: skip
        if not grammars or error_of(self._grammars.fill, grammars, bitmask) is None:
            return []
        failed = []
        for i, grammar in grammars.items():  # one by one, to find the one at fault
            if (error := error_of(self._grammars.fill, {i: grammar}, bitmask)) is not None:
                bitmask[i] = 0
                processors[i].fail(error)
                failed.append(processors[i].seq)
        return failed

    def min_tokens_stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Ids that ``min_tokens`` holds back."""
        eos = () if params.ignore_eos else self._eos_token_ids
        return tuple(dict.fromkeys((*params.stop_token_ids, *eos))) if params.min_tokens else ()

    @cached_property
    def _marks(self) -> Marks:
        tokenizer, config = self._required("thinking_token_budget"), self._config
        return Marks.of(tokenizer, config.reasoning_start_str, config.reasoning_end_str, self._vocab_size)

    @cached_property
    def _boundaries(self) -> np.ndarray:
        """Special tokens besides the marks' own: after a prompt's last one, no user text can open a thought."""
        tokenizer, (start, _, ends) = self._required("thinking_token_budget"), self._marks
        return np.array([*{*special_tokens(tokenizer, len(tokenizer)).values()}.difference(start, *ends)], np.int32)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer.tokenizer, self._vocab_size, self._eos_token_ids)

    def _required(self, name: str) -> Any:
        tokenizer = self._tokenizer.tokenizer
        if tokenizer is None:
            raise RequestError(f"{name} needs a tokenizer, but the engine was made with skip_tokenizer_init=True.")
        return tokenizer


def bound(function: Any, seq: Sequence) -> Callable[[Any], Any]:
    """A logits processor as a function of the logits. With three parameters without defaults it takes the prompt."""
    if hasattr(function, "clone"):  # it may hold state
        function = function.clone()
    try:
        parameters = list(signature(function).parameters.values())
    except (TypeError, ValueError):  # the function is not written in Python
        parameters = []
    required = [p for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    ids = seq.prompt_token_ids if seq.attachment is None else seq.attachment.prompt_ids.tolist()
    prompt = [ids] if len(required) == 3 else []
    return lambda logits: function(*prompt, seq.completion_token_ids, logits)


def error_of(function: Callable, *args: Any) -> BaseException | None:
    """Call a grammar or a user's function; returns its exception, a panic of llguidance included. Interrupts pass."""
    try:
        function(*args)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return error
    return None

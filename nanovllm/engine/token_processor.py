"""What the host does with each token of a sequence whose request needs it: stop strings, log-probabilities, grammars.

Plain requests have no ``TokenProcessor``, and cost a step nothing.
"""

import logging
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.core import Sequence
from nanovllm.engine.logprobs import SampleLogprobs
from nanovllm.engine.stop_strings import StopStrings
from nanovllm.engine.structured import BadWordsGuide, Guide, GuideCompiler, Guides, bad_word_ids, mask_of
from nanovllm.engine.tokenizer import AsyncTokenizer
from nanovllm.errors import RequestError
from nanovllm.outputs import LogprobsAt
from nanovllm.sampling_params import SamplingParams

AnyGuide = Guide | Guides | BadWordsGuide
logger = logging.getLogger("nanovllm")


class TokenProcessor:
    """One sequence whose every token the host looks at; a feature that its request does not use is None.

    Attributes:
        stop_text: the text, once a stop string has ended it.
        guide: what it may sample next, where that depends on its tokens.
    """

    def __init__(self, seq: Sequence, stop: StopStrings | None, logprobs: SampleLogprobs | None,
                 guide: AnyGuide | None):
        self.seq, self.guide = seq, guide
        self._stop, self._logprobs = stop, logprobs
        self.stop_text: str | None = None

    def update(self, token_id: int, logprobs: np.ndarray | None) -> bool:
        """Take in the next token. Whether it completes a stop string, or the grammar fails; then the sequence is marked
        as ended.

        Args:
            logprobs: packed row of the token; see ``engine/logprobs.py``.
        """
        seq = self.seq
        if self._logprobs is not None:
            assert logprobs is not None
            self._logprobs.append(logprobs)
        if seq.finish_reason == "stop":  # by this token, which is not part of the text
            return False
        error = None
        if self.guide is not None and seq.finish_reason is None:
            error = error_of(self.guide.accept, token_id)
        if error is not None:
            self.fail(error)
            return True
        found = None if self._stop is None else self._stop.update(token_id)
        if found is None:
            return False
        seq.stop_reason, self.stop_text = found
        was_finished, seq.finish_reason = seq.finish_reason is not None, "stop"
        return not was_finished

    def fail(self, error: BaseException) -> None:
        """Mark the sequence as ended by an error of its grammar."""
        self.seq.finish_reason = "error"
        if isinstance(error, RequestError):
            self.seq.stop_reason = str(error)
        else:
            self.seq.stop_reason = f"the grammar failed while it was decoded ({type(error).__name__}: {error!s:.500})"
        logger.warning("request %d: %s", self.seq.group_id, self.seq.stop_reason)

    def logprobs(self, token_ids: list[int],
                 start: int = 0) -> tuple[float | None, Callable[[], list[LogprobsAt]] | None]:
        """Of tokens ``start`` and following, whose ids are given: see ``SampleLogprobs.between``. None, None unless the
        request asked for them.
        """
        if self._logprobs is None:
            return None, None
        return self._logprobs.between(start, start + len(token_ids), token_ids)


class TokenProcessors:
    """Makes the processors of an engine; what they share is made once."""

    def __init__(self, config: Config, tokenizer: AsyncTokenizer, eos_token_ids: tuple[int, ...]):
        self._vocab_size = config.model_config.vocab_size
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._compiler: GuideCompiler | None = None
        self._allowed: dict[bytes, np.ndarray] = {}

    def make(self, seq: Sequence) -> TokenProcessor | None:
        """The processor of a sequence, if it needs one. Sets its ``allowed_mask``.

        Raises:
            RequestError: there is no tokenizer for a stop string or a grammar, or the grammar is wrong.
        """
        params = seq.sampling_params
        if params.allowed_token_ids is not None:
            key = array("q", params.allowed_token_ids).tobytes()
            if key not in self._allowed:  # one is kept: usually all requests have the same
                self._allowed = {key: mask_of(params.allowed_token_ids, self._vocab_size)}
            seq.allowed_mask = self._allowed[key]
        if not params.stop and params.logprobs is None and not params.is_constrained:
            return None
        stop = StopStrings(self._required("stop"), params) if params.stop else None
        logprobs = None if params.logprobs is None else SampleLogprobs(params, self._tokenizer)
        guide = self._guide(params) if params.is_constrained else None
        return TokenProcessor(seq, stop, logprobs, guide)

    def check(self, params: SamplingParams) -> None:
        """Raises what ``make`` would raise for a sequence with these parameters."""
        if params.stop:
            self._required("stop")
        if params.is_constrained:
            self._guide(params)

    def masks(self, processors: list[TokenProcessor]) -> tuple[np.ndarray, list[Sequence]]:
        """The tokens that each guided sequence may sample next, int32 [n, ceil(V / 32)]; and those sequences whose
        grammar fails, which are marked.
        """
        words = np.zeros((len(processors), -(-self._vocab_size // 32)), np.int32)
        failed = self._fill(processors, words)
        eos = mask_of(self._eos_token_ids, self._vocab_size)
        for row, processor in zip(words, processors, strict=True):
            seq = processor.seq
            if seq.allowed_mask is not None:
                must_end = seq.sampling_params.structured_outputs is not None
                row &= seq.allowed_mask | eos if must_end else seq.allowed_mask
            if not row.any():  # its request contradicts itself: the text ends
                row[:] = eos
            if seq.num_completion_tokens < seq.sampling_params.min_tokens:
                longer = row & ~mask_of(self.min_tokens_stop_ids(seq.sampling_params), self._vocab_size)
                row[:] = longer if longer.any() else row  # where the text must end, it ends
        return words, failed

    def _fill(self, processors: list[TokenProcessor], words: np.ndarray) -> list[Sequence]:
        """Fill row i for the guide of sequence i; returns the sequences whose guide fails, whose rows are zero."""
        guides = [processor.guide for processor in processors]
        if not guides or error_of(self._guides.fill_all, guides, words) is None:
            return []
        failed = []
        for row, processor in zip(words, processors, strict=True):  # one by one: whose fault is it?
            if (error := error_of(self._guides.fill_all, [processor.guide], row[None])) is not None:
                row[:] = 0
                processor.fail(error)
                failed.append(processor.seq)
        return failed

    def min_tokens_stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Ids that ``min_tokens`` holds back."""
        eos = () if params.ignore_eos else self._eos_token_ids
        return tuple(dict.fromkeys((*params.stop_token_ids, *eos))) if params.min_tokens else ()

    @property
    def _guides(self) -> GuideCompiler:
        if self._compiler is None:
            self._compiler = GuideCompiler(self._tokenizer.tokenizer, self._vocab_size, self._eos_token_ids)
        return self._compiler

    def _guide(self, params: SamplingParams) -> AnyGuide:
        guides: list[Guide | BadWordsGuide] = []
        if params.structured_outputs is not None:
            self._required("structured_outputs")
            guides.append(self._guides.compile(params.structured_outputs))
        if params.bad_words:
            ids = bad_word_ids(self._required("bad_words"), list(params.bad_words))
            guides.append(BadWordsGuide(ids, self._vocab_size))
        return guides[0] if len(guides) == 1 else Guides(guides, self._eos_token_ids, self._vocab_size)

    def _required(self, name: str) -> Any:
        tokenizer = self._tokenizer.tokenizer
        if tokenizer is None:
            raise RequestError(f"{name} needs a tokenizer, but the engine was made with skip_tokenizer_init=True.")
        return tokenizer


def error_of(function: Callable, *args: Any) -> BaseException | None:
    """What a grammar's function raises, if it does. A panic of llguidance is no ``Exception``; interrupts pass."""
    try:
        function(*args)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return error
    return None

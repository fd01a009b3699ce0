"""Per-token host work of a sequence, where its request needs it: stop strings, log-probabilities, guides.

Plain requests have no ``Watch``, and cost a step nothing.
"""

import logging
from array import array
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.detokenizer import IncrementalDetokenizer, StopCandidates, StopChecker, decode_tokens
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.structured import BadWordsGuide, Guide, GuideCompiler, Guides, bad_word_ids, mask_of
from nanovllm.engine.tokenizer import AsyncTokenizer
from nanovllm.errors import RequestError
from nanovllm.outputs import Logprob, LogprobsAt
from nanovllm.sampling_params import GUIDED, LOGPROBS, SamplingParams

AnyGuide = Guide | Guides | BadWordsGuide
logger = logging.getLogger("nanovllm")


class Watch:
    """One sequence whose every token the host looks at.

    Attributes:
        stop_text: the text, once a stop string has ended it.
        guide: what it may sample next, where that depends on its tokens.
    """

    def __init__(self, seq: Sequence, tokenizer: AsyncTokenizer, detokenizer: IncrementalDetokenizer | None,
                 stop: StopChecker | None, guide: AnyGuide | None):
        self.seq, self.guide = seq, guide
        self._detokenizer = detokenizer  # for the stop strings
        self.stop_text: str | None = None
        self._tokenizer = tokenizer
        self._stop = stop
        self._logprobs: list[np.ndarray] = []  # a row of reference.token_logprobs for each token
        self._totals = [0.0]  # sums of the log-probabilities of the first 0, 1, ... tokens

    def update(self, token_id: int, logprobs: np.ndarray | None) -> bool:
        """Take in the next token. Whether it completes a stop string, or the grammar fails; then the sequence is marked
        as ended.
        """
        seq = self.seq
        if self.seq.sampling_params.logprobs is not None:
            assert logprobs is not None
            self._logprobs.append(trimmed(logprobs, self.seq.sampling_params.logprobs))
            self._totals.append(self._totals[-1] + float(logprobs[:1].view(np.float32)[0]))
        if seq.finish_reason == "stop":  # by this token, which is not part of the text
            return False
        error = None
        if self.guide is not None and seq.finish_reason is None:
            error = error_of(self.guide.accept, token_id)
        if error is not None:
            self.fail(error)
            return True
        found = None if self._stop is None else self._stop.update([token_id])
        if found is None:
            return False
        seq.stop_reason, length = found
        assert self._detokenizer is not None
        self.stop_text = self._detokenizer.text_now[:length]
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

    def logprobs(self, token_ids: list[int], start: int = 0,
                 stop: int | None = None) -> tuple[float | None, Callable[[], list[LogprobsAt]] | None]:
        """Sum of the log-probabilities of the first ``stop`` tokens, and what makes the list of tokens [start, stop),
        whose ids are given; None unless the request asked for them.
        """
        params = self.seq.sampling_params
        if params.logprobs is None:
            return None, None
        rows = self._logprobs[start:stop]
        total = self._totals[-1 if stop is None else stop]
        return total, lambda: logprobs_at(np.array(rows), token_ids, params.detokenize and self._tokenizer)


class WatchMaker:
    """Makes the watches of an engine; what they share is made once."""

    def __init__(self, config: Config, tokenizer: AsyncTokenizer, eos_token_ids: tuple[int, ...]):
        self._vocab_size = config.model_config.vocab_size
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._compiler: GuideCompiler | None = None
        self._candidates = StopCandidates(self._vocab_size)
        self._allowed: dict[bytes, np.ndarray] = {}

    def make(self, seq: Sequence) -> Watch | None:
        """The watch of a sequence, if it needs one. Sets its ``allowed_mask``.

        Raises:
            RequestError: there is no tokenizer for a stop string or a guide, or its grammar is wrong.
        """
        params = seq.sampling_params
        if params.allowed_token_ids is not None:
            key = array("q", params.allowed_token_ids).tobytes()
            if key not in self._allowed:  # one is kept: usually all requests have the same
                self._allowed = {key: mask_of(params.allowed_token_ids, self._vocab_size)}
            seq.allowed_mask = self._allowed[key]
        if not params.stop and not seq.features & (LOGPROBS | GUIDED):
            return None
        detokenizer = stop = None
        if params.stop:
            flags = params.skip_special_tokens, params.spaces_between_special_tokens
            detokenizer = IncrementalDetokenizer(self._required("stop"), *flags)
            include = params.include_stop_str_in_output
            stop = StopChecker(self._candidates, detokenizer, list(params.stop), include, params.min_tokens)
        guide = self._guide(params) if seq.features & GUIDED else None
        return Watch(seq, self._tokenizer, detokenizer, stop, guide)

    def check(self, params: SamplingParams) -> None:
        """Raises what ``make`` would raise for a sequence with these parameters."""
        if params.stop:
            self._required("stop")
        if params.is_constrained:
            self._guide(params)

    def masks(self, watches: list[Watch]) -> tuple[np.ndarray, list[Sequence]]:
        """The tokens that each guided sequence may sample next, int32 [n, ceil(V / 32)]; and those sequences whose
        grammar fails, which are marked.
        """
        words = np.zeros((len(watches), -(-self._vocab_size // 32)), np.int32)
        failed = self._fill(watches, words)
        eos = mask_of(self._eos_token_ids, self._vocab_size)
        for row, watch in zip(words, watches, strict=True):
            seq = watch.seq
            if seq.allowed_mask is not None:
                must_end = seq.sampling_params.structured_outputs is not None
                row &= seq.allowed_mask | eos if must_end else seq.allowed_mask
            if not row.any():  # its request contradicts itself: the text ends
                row[:] = eos
            if seq.num_completion_tokens < seq.sampling_params.min_tokens:
                longer = row & ~mask_of(self.min_tokens_stop_ids(seq.sampling_params), self._vocab_size)
                row[:] = longer if longer.any() else row  # where the text must end, it ends
        return words, failed

    def _fill(self, watches: list[Watch], words: np.ndarray) -> list[Sequence]:
        """Fill row i for the guide of watch i; returns the sequences whose guide fails, whose rows are zero."""
        if not watches or error_of(self._guides.fill_all, [watch.guide for watch in watches], words) is None:
            return []
        failed = []
        for row, watch in zip(words, watches, strict=True):  # one by one: whose fault is it?
            if (error := error_of(self._guides.fill_all, [watch.guide], row[None])) is not None:
                row[:] = 0
                watch.fail(error)
                failed.append(watch.seq)
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


def trimmed(rows: np.ndarray, num_logprobs: int) -> np.ndarray:
    """The first ``num_logprobs`` (-1 is all) alternatives of each row: another request may have asked for more.

    Rows are packed as by ``reference.token_logprobs``, int32 [..., 2 + 2k].
    """
    k = (rows.shape[-1] - 2) // 2
    if num_logprobs == -1 or num_logprobs >= k:
        return rows
    return np.concatenate([rows[..., : 2 + num_logprobs], rows[..., 2 + k : 2 + k + num_logprobs]], axis=-1)


def logprobs_at(rows: np.ndarray, token_ids: list[int], tokenizer: AsyncTokenizer | Literal[False]) -> list[LogprobsAt]:
    """One dict per token: the token itself, then the most probable ones.

    Args:
        rows: int32 [n, 2 + 2k], packed as by ``reference.token_logprobs``.
        token_ids: [n].
        tokenizer: for ``decoded_token``.
    """
    if not token_ids:
        return []
    k = (rows.shape[1] - 2) // 2
    values = np.ascontiguousarray(rows).view(np.float32)
    chosen, ranks = values[:, 0].tolist(), rows[:, 1].tolist()
    top_ids, top = rows[:, 2 : 2 + k].tolist(), values[:, 2 + k :].tolist()
    text: dict[int, str | None] = {}
    if tokenizer and tokenizer.tokenizer is not None:
        distinct = sorted({*token_ids, *(i for ids in top_ids for i in ids)})
        text = dict(zip(distinct, decode_tokens(tokenizer.tokenizer, distinct), strict=True))
    result = []
    for token_id, logprob, rank, ids, logprobs in zip(token_ids, chosen, ranks, top_ids, top, strict=True):
        entry = {token_id: Logprob(logprob, rank, text.get(token_id))}
        for place, (i, value) in enumerate(zip(ids, logprobs, strict=True), 1):
            if i not in entry:
                entry[i] = Logprob(value, place, text.get(i))
        result.append(entry)
    return result

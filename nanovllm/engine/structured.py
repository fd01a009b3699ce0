"""Which tokens may come next: bit masks for structured outputs, bad words and allowed tokens.

A *guide* follows one sequence. ``fill(words)`` writes its mask, int32 [ceil(vocab_size / 32)], bit ``id % 32`` of word
``id // 32`` set where the token is allowed; ``accept(token_id)`` appends a token. Grammars are llguidance's work; it
is an optional extra, imported when the first request needs it. Runs on the host, without torch.
"""

import logging
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nanovllm.engine.grammars import to_lark
from nanovllm.errors import RequestError
from nanovllm.sampling_params import StructuredOutputsParams

logger = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 256
NUM_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))  # that fill masks


def mask_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """The mask that allows ``token_ids`` only.

    Raises:
        RequestError: an id is not in the vocabulary.
    """
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    ids = np.array(list(token_ids), np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise RequestError(f"token id {bad} must be >= 0 and below the vocabulary's size, {vocab_size}.")
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def mask_of_all(vocab_size: int, num_words: int) -> np.ndarray:
    """The mask that allows the whole vocabulary, int32 [num_words]."""
    return np.packbits(np.arange(num_words * 32) < vocab_size, bitorder="little").view(np.int32)


def bad_word_ids(tokenizer: Any, words: str | Iterable[str] | None) -> list[list[int]]:
    """Token ids of each word as it begins a text and as it follows a space.

    Raises:
        RequestError: a word has no tokens.
    """
    words = [words] if isinstance(words, str) else list(words or ())
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        stem = word.lstrip() or word
        for text in (stem, f" {stem}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
        if () in found:
            raise RequestError(f"SamplingParams: bad_words={word!r} has no tokens.")
    return [list(ids) for ids in found]


class BadWordsGuide:
    """Forbids the last token of a bad word where the output ends in the tokens before it."""

    def __init__(self, sequences: Iterable[Sequence[int]], vocab_size: int):
        self._last_ids: dict[tuple[int, ...], list[int]] = {}  # what comes before -> what may not follow
        self._mask = mask_of_all(vocab_size, -(-vocab_size // 32))
        for *before, last in sequences:
            if before:
                self._last_ids.setdefault(tuple(before), []).append(last)
            else:
                _forbid(self._mask, last)
        self._lengths = sorted({len(before) for before in self._last_ids})
        self._output: tuple[int, ...] = ()  # its end

    def fill(self, words: np.ndarray) -> None:
        words[:] = self._mask
        for length in self._lengths:
            for token_id in self._last_ids.get(self._output[-length:], ()):
                _forbid(words, token_id)

    def accept(self, token_id: int) -> None:
        if self._lengths:
            self._output = (*self._output, token_id)[-self._lengths[-1] :]


def _forbid(words: np.ndarray, token_id: int) -> None:
    words.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)


class Guide:
    """Keeps one sequence in a grammar; ``GuideCompiler`` makes them."""

    def __init__(self, matcher: Any, compiler: "GuideCompiler"):
        self.matcher, self._compiler = matcher, compiler
        self._ended = False  # by an end-of-sequence token or an error

    def fill(self, words: np.ndarray) -> None:
        self._compiler.fill_all([self], words[None])

    def accept(self, token_id: int) -> None:
        if self._ended:
            return
        is_eos = token_id in self._compiler.eos_token_ids
        failed = self.matcher.is_error()  # in fill: a dead end, or a limit; its mask has end-of-sequence tokens only
        if not failed and not self.matcher.consume_token(token_id):
            failed = is_eos or self.matcher.stop_reason() in ("ParserTooComplex", "LexerTooComplex")
            assert failed, f"token {token_id} was not allowed: {_first_line(self.matcher)}"
        if failed:
            logger.warning(
                "structured output cut short: no token is left that the grammar accepts (allowed_token_ids, bad_words "
                "or min_tokens contradict it, or a limit of the grammar library: %s)", _first_line(self.matcher),
            )  # fmt: skip
        self._ended = failed or is_eos


class Guides:
    """Several guides for one sequence: a token must be allowed by all. If none is, the sequence may only end.

    Args:
        guides: at least one.
        eos_token_ids: allowed where the guides leave nothing.
    """

    def __init__(self, guides: Iterable[Any], eos_token_ids: Iterable[int], vocab_size: int):
        self.guides = list(guides)
        self._eos_mask = mask_of(eos_token_ids, vocab_size)

    def fill(self, words: np.ndarray) -> None:
        self.guides[0].fill(words)
        self.restrict(words)

    def restrict(self, words: np.ndarray) -> None:
        """Apply all guides but the first, whose mask ``words`` has."""
        other = np.empty_like(words)
        for guide in self.guides[1:]:
            guide.fill(other)
            words &= other
        if not words.any():
            words[:] = self._eos_mask

    def accept(self, token_id: int) -> None:
        for guide in self.guides:
            guide.accept(token_id)


class GuideCompiler:
    """Grammars and their guides for one tokenizer. Making it is cheap: the first ``compile`` reads the vocabulary.

    Args:
        tokenizer: a fast tokenizer, or None.
        vocab_size: of the model. Ids that the tokenizer does not have are never allowed, nor are special tokens.
        eos_token_ids: allowed where the text may end; where it must, nothing else is.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]):
        self.vocab_size, self.eos_token_ids = vocab_size, frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._llguidance: Any = None
        self._vocabulary: Any = None  # llguidance's
        self._surplus: np.ndarray | None = None  # a mask as wide as the tokenizer, if the model is narrower
        self._executor: Any = None
        self._matchers: dict[str, Any] = {}  # grammar -> matcher at its beginning; the last is the most recently used

    def compile(self, params: StructuredOutputsParams) -> Guide:
        """A guide at the beginning of a text. Compiled grammars are kept.

        Raises:
            RequestError: the grammar has an error, needs what llguidance does not have, or matches nothing.
        """
        if self._vocabulary is None:
            self._load()
        try:
            grammar = to_lark(params)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:  # of a structural tag's JSON
            raise _refused(params, f"it is malformed ({type(error).__name__}: {error})") from None
        except ValueError as error:
            raise _refused(params, str(error)) from None
        matcher = self._matchers.pop(grammar, None)
        if matcher is None:
            matcher = self._llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # which some errors wait for
            if matcher.is_error():
                raise _refused(params, _reason(matcher, params))
        self._matchers[grammar] = matcher
        if len(self._matchers) > MAX_CACHED_GRAMMARS:
            del self._matchers[next(iter(self._matchers))]
        return Guide(matcher.deep_copy(), self)

    def fill_all(self, guides: Sequence[Any], words: np.ndarray) -> None:
        """Fill row i of ``words``, int32 [len(guides), ceil(vocab_size / 32)], for guide i, with several threads."""
        assert words.dtype == np.int32 and words.shape == (len(guides), -(-self.vocab_size // 32))
        rows = words if self._surplus is None else np.empty((len(guides), self._surplus.size), np.int32)
        assert rows.flags.c_contiguous
        firsts = [guide.guides[0] if isinstance(guide, Guides) else guide for guide in guides]
        matchers = [(first.matcher, i) for i, first in enumerate(firsts) if isinstance(first, Guide)]
        if len(matchers) == 1:
            ((matcher, i),) = matchers
            matcher.unsafe_compute_mask_ptr(rows[i].ctypes.data, rows[i].nbytes)
        elif matchers:
            if self._executor is None:
                self._executor = self._llguidance.LLExecutor(NUM_THREADS)
            self._executor.unsafe_compute_mask_ptr(matchers, rows.ctypes.data, rows[0].nbytes, len(guides))
        if self._surplus is not None:
            words[:] = (rows & self._surplus)[:, : words.shape[1]]
        for row, guide, first in zip(words, guides, firsts, strict=True):
            if not isinstance(first, Guide):
                first.fill(row)
            if guide is not first:
                guide.restrict(row)

    def _load(self) -> None:
        """Import llguidance and give it the vocabulary: 1 to 2 s for 150,000 tokens."""
        if self._tokenizer is None:
            raise RequestError(
                "SamplingParams: structured_outputs needs a tokenizer, but the engine was made with "
                "skip_tokenizer_init=True."
            )
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(
                f"SamplingParams: structured_outputs needs llguidance ({error}): pip install 'nanovllm[structured]'."
            ) from None
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError(
                "SamplingParams: structured_outputs needs a fast tokenizer (tokenizer.json), not "
                f"{type(self._tokenizer).__name__}."
            )
        num_ids = max(backend.get_vocab().values()) + 1
        eos = sorted(i for i in self.eos_token_ids if i < num_ids)
        if not eos:
            raise RequestError(
                "SamplingParams: structured_outputs needs an end-of-sequence token, which the model does not have."
            )
        width = max(num_ids, self.vocab_size)
        self._llguidance = llguidance
        self._vocabulary = llguidance.LLTokenizer(backend.to_str(), n_vocab=width, eos_token=eos)
        if width > self.vocab_size:
            self._surplus = mask_of_all(self.vocab_size, -(-width // 32))


def _first_line(matcher: Any) -> str:
    return matcher.get_error().split("\n")[0]


def _reason(matcher: Any, params: StructuredOutputsParams) -> str:
    """llguidance's error without its state; without the Lark text that it quotes, too, unless that is the user's."""
    error = matcher.get_error().split("\n<state>")[0]
    if error.startswith("NoExtension"):
        return "it matches no text"
    if params.kind == "grammar" and "::=" not in str(params.grammar):
        return error.strip()
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", error.split("\n   1 | ")[0]).strip()


def _refused(params: StructuredOutputsParams, reason: str) -> RequestError:
    source = getattr(params, params.kind)
    return RequestError(f"StructuredOutputsParams: {params.kind}={source!r:.200} cannot be used: {reason}")

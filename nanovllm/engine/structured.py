"""Which tokens may come next: bit masks for structured outputs, bad words and allowed tokens.

A *guide* follows one sequence. ``fill(words)`` writes its mask, int32 [ceil(vocab_size / 32)], bit ``id % 32`` of word
``id // 32`` set where the token is allowed; ``accept(token_id)`` appends a token. Grammars are llguidance's work; it
is an optional extra, imported when the first request needs it. Runs on the host, without torch.
"""

import functools
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from nanovllm.engine.grammars import to_grammar
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
        self._ended = False  # by an end-of-sequence token

    def fill(self, words: np.ndarray) -> None:
        self._compiler.fill_all([self], words[None])

    def accept(self, token_id: int) -> None:
        if self._ended:
            return
        self._ended = token_id in self._compiler.eos_token_ids
        if not self.matcher.consume_token(token_id) and self._ended:
            logger.warning("structured output cut short: allowed_token_ids, bad_words or min_tokens contradict it.")
        self.check()

    def check(self) -> None:
        """Raise a RequestError if the grammar leads nowhere or exceeds a limit of llguidance: its mask is void then."""
        if self.matcher.is_error() and not self._ended:
            raise RequestError(f"structured_outputs: the grammar cannot be followed further: {_reason(self.matcher)}")


class Guides:
    """Several guides for one sequence: a token must be allowed by all. If none is, the sequence may only end.

    Args:
        guides: at least one. A grammar comes first.
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
        self._executor: Any = None  # llguidance's threads
        # parameters as JSON -> matcher at its grammar's beginning
        self._matcher = functools.lru_cache(MAX_CACHED_GRAMMARS)(self._new_matcher)

    def compile(self, params: StructuredOutputsParams) -> Guide:
        """A guide at the beginning of a text. Compiled grammars are kept.

        Raises:
            RequestError: the grammar has an error, needs what llguidance does not have, or matches nothing.
        """
        if self._vocabulary is None:
            self._load()
        try:
            values = {field.name: getattr(params, field.name) for field in fields(StructuredOutputsParams)}
            matcher = self._matcher(json.dumps(values))
        except (KeyError, TypeError, AttributeError, RecursionError) as error:  # no JSON, or not as it should be
            raise _refused(params, f"it is malformed ({type(error).__name__}: {error})") from None
        except ValueError as error:
            raise _refused(params, str(error)) from None
        return Guide(matcher.deep_copy(), self)

    def _new_matcher(self, params: str) -> Any:
        grammar = to_grammar(StructuredOutputsParams(**json.loads(params)))
        matcher = self._llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # which some errors wait for
        if matcher.is_error():
            raise ValueError(_reason(matcher))
        return matcher

    def fill_all(self, guides: Sequence[Any], words: np.ndarray) -> None:
        """Fill row i of ``words``, int32 [len(guides), ceil(vocab_size / 32)], for guide i, with several threads.

        Raises:
            RequestError: as by ``Guide.check``. The other rows are filled.
        """
        assert words.dtype == np.int32 and words.shape == (len(guides), -(-self.vocab_size // 32))
        rows = words if self._surplus is None else np.empty((len(guides), self._surplus.size), np.int32)
        assert rows.flags.c_contiguous
        firsts = [guide.guides[0] if isinstance(guide, Guides) else guide for guide in guides]
        matchers = [(first.matcher, i) for i, first in enumerate(firsts) if isinstance(first, Guide)]
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, rows.ctypes.data, rows[0].nbytes, len(guides))
        if self._surplus is not None:
            words[:] = (rows & self._surplus)[:, : words.shape[1]]
        for row, guide, first in zip(words, guides, firsts, strict=True):
            if not isinstance(first, Guide):
                first.fill(row)
            if guide is not first:
                guide.restrict(row)
        for first in firsts:
            if isinstance(first, Guide):
                first.check()

    def _load(self) -> None:
        """Import llguidance and give it the vocabulary: 1 to 2 s for 150,000 tokens."""
        needs = "SamplingParams: structured_outputs needs"
        if self._tokenizer is None:
            raise RequestError(f"{needs} a tokenizer, but the engine was made with skip_tokenizer_init=True.")
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(f"{needs} llguidance ({error}): pip install 'nanovllm[structured]'.") from None
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError(f"{needs} a fast tokenizer (tokenizer.json), not {type(self._tokenizer).__name__}.")
        num_ids = max(backend.get_vocab().values()) + 1
        eos = sorted(i for i in self.eos_token_ids if i < num_ids)
        if not eos:
            raise RequestError(f"{needs} an end-of-sequence token, which the model does not have.")
        width = max(num_ids, self.vocab_size)
        self._llguidance, self._executor = llguidance, llguidance.LLExecutor(NUM_THREADS)
        self._vocabulary = llguidance.LLTokenizer(backend.to_str(), n_vocab=width, eos_token=eos)
        if width > self.vocab_size:
            self._surplus = mask_of_all(self.vocab_size, -(-width // 32))


def _reason(matcher: Any) -> str:
    """llguidance's error without its state, and without the Lark that it quotes: it may not be the user's."""
    error = re.split(r"\n<state>|\n +\d+ \| ", matcher.get_error())[0].strip()
    return "it matches no text" if error.startswith("NoExtension") else error


def _refused(params: StructuredOutputsParams, reason: str) -> RequestError:
    source = getattr(params, params.kind)
    return RequestError(f"StructuredOutputsParams: {params.kind}={source!r:.200} cannot be used: {reason}")

"""Which tokens may come next: bitmasks for structured outputs, bad words and allowed tokens.

A bitmask is int32 [ceil(vocab_size / 32)], with bit ``id % 32`` of word ``id // 32`` set where the token is allowed.
Grammars are llguidance's work; it is an optional extra, imported when the first request needs it. Runs on the host,
without torch.
"""

import functools
import json
import os
import re
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import numpy as np

from nanovllm.engine.structured_outputs.grammars import to_grammar
from nanovllm.errors import RequestError
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.utils.time_limit import TimeLimitError, time_limit

MAX_CACHED_GRAMMARS = 256
NUM_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))  # threads that fill masks
LONGEST = 1_000_000  # longest grammar in bytes
SECONDS = 20.0  # limit for reading one; it interrupts only Python code
# llguidance resolves names recursively, and a stack overflow ends the process. A grammar takes up to 600 bytes of stack
# per byte (measured): a kilobyte is read on any thread, a longer grammar on a thread of its own.
SHORT, STACK_PER_BYTE = 1024, 1024
# Attributes to pass instead of pydantic models and type adapters, compiled expressions, enum members
PARTS = ("model_json_schema()", "json_schema()", "pattern", "value")


def mask_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """The bitmask that allows ``token_ids`` only."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    ids = np.array(list(token_ids), np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise RequestError(f"token id {bad} must be >= 0 and below the vocabulary's size, {vocab_size}.")
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def mask_of_all(vocab_size: int, num_words: int | None = None) -> np.ndarray:
    """The bitmask that allows the whole vocabulary; ``num_words`` if it is to be longer."""
    num_bits = (num_words or -(-vocab_size // 32)) * 32
    return np.packbits(np.arange(num_bits) < vocab_size, bitorder="little").view(np.int32)


class BadWords:
    """Forbids the last token of a bad word where the completion ends in the tokens before it.

    Each of ``words`` is forbidden as it begins a text, as it follows a space, and as it follows a line's end: some
    tokenizers put a space before a text.
    """

    def __init__(self, tokenizer: Any, words: Iterable[str], vocab_size: int):
        self._mask = mask_of_all(vocab_size)
        self._last_ids: dict[tuple[int, ...], list[int]] = {}  # preceding tokens -> tokens that may not follow
        found: dict[tuple[int, ...], None] = {}
        line_end = tokenizer.encode("\n", add_special_tokens=False)
        for word in words:
            stem = word.lstrip() or word
            for before, text in (([], stem), ([], f" {stem}"), (line_end, f"\n{stem}")):
                token_ids = tokenizer.encode(text, add_special_tokens=False)
                if token_ids[: len(before)] == before:
                    found[tuple(token_ids[len(before) :])] = None
            if () in found:
                raise RequestError(f"SamplingParams: bad_words={word!r} has no tokens.")
        for *before, last in found:
            if max((*before, last)) >= vocab_size:  # the model cannot generate it
                continue
            if before:
                self._last_ids.setdefault(tuple(before), []).append(last)
            else:
                _forbid(self._mask, last)
        self._lengths = sorted({len(before) for before in self._last_ids})
        self._output: tuple[int, ...] = ()  # last tokens of the output

    def apply(self, bitmask: np.ndarray) -> None:
        bitmask &= self._mask
        for length in self._lengths:
            for token_id in self._last_ids.get(self._output[-length:], ()):
                _forbid(bitmask, token_id)

    def accept(self, token_id: int) -> None:
        """Append a token."""
        if self._lengths:
            self._output = (*self._output, token_id)[-self._lengths[-1] :]


def _forbid(bitmask: np.ndarray, token_id: int) -> None:
    bitmask.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)


class Grammar:
    """The grammar of one sequence, and where in it the text is; ``GrammarCompiler`` makes and reads them."""

    def __init__(self, matcher: Any, eos_token_ids: frozenset[int], params: StructuredOutputsParams):
        self.matcher, self._eos_token_ids, self._params = matcher, eos_token_ids, params
        self._ended = False  # whether an end-of-sequence token has come

    def accept(self, token_id: int) -> None:
        """Append a token."""
        if self._ended:
            return
        self._ended = token_id in self._eos_token_ids
        self.matcher.consume_token(token_id)
        self.check()

    @property
    def may_end(self) -> bool:
        """Whether the text may end here."""
        return self._ended or self.matcher.is_accepting()

    def check(self) -> None:
        """Raise a RequestError if the grammar leads nowhere or exceeds a limit of llguidance: its mask is void then."""
        if self.matcher.is_error() and not self._ended:
            raise _refused(self._params, _reason(self.matcher), "followed further")


class GrammarCompiler:
    """Grammars for one tokenizer. Making it is cheap: the first ``compile`` reads the vocabulary.

    Args:
        tokenizer: a fast tokenizer, or None.
        vocab_size: of the model. Ids that the tokenizer does not have are never allowed, nor are special tokens.
        eos_token_ids: allowed where the text may end; where it must, nothing else is.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, frozenset(eos_token_ids)
        self._llguidance: Any = None
        self._vocabulary: Any = None  # the vocabulary in llguidance's form
        self._surplus: np.ndarray | None = None  # a mask as wide as the tokenizer, if the model is narrower
        self._executor: Any = None  # threads of llguidance
        # parameters as JSON -> matcher at the beginning of their grammar
        self._matcher = functools.lru_cache(MAX_CACHED_GRAMMARS)(self._new_matcher)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """A grammar at the beginning of a text. Compiled ones are kept.

        RequestError if it has an error, needs what llguidance does not have, or matches nothing.
        """
        if self._vocabulary is None:
            self._load()
        try:
            values = {field.name: getattr(params, field.name) for field in fields(StructuredOutputsParams)}
            matcher = self._matcher(json.dumps(values, ensure_ascii=False, default=_no_json).encode())
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise _refused(params, f"it holds {half!r}, a lone surrogate, which no text has; leave it out") from None
        except (KeyError, TypeError, AttributeError, RecursionError) as error:  # not JSON, or malformed
            raise _refused(params, f"it is malformed ({type(error).__name__}: {error})") from None
        except ValueError as error:
            raise _refused(params, str(error)) from None
        return Grammar(matcher.deep_copy(), self._eos_token_ids, params)

    def _new_matcher(self, params: bytes) -> Any:
        if len(params) <= SHORT:
            return self._read(params)
        if len(params) > LONGEST:
            raise ValueError(f"it has {len(params):,} bytes; at most {LONGEST:,} are read")
        before = threading.stack_size((16 << 20) + len(params) * STACK_PER_BYTE // 4096 * 4096)
        try:
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(self._read_in_time, params).result()
        except TimeLimitError:
            raise ValueError(f"it takes more than {SECONDS:g} s to read") from None
        finally:
            threading.stack_size(before)

    def _read_in_time(self, params: bytes) -> Any:
        with time_limit(SECONDS):
            return self._read(params)

    def _read(self, params: bytes) -> Any:
        """A matcher at the beginning of the grammar of ``params``; a ValueError if it matches nothing."""
        grammar = to_grammar(StructuredOutputsParams(**json.loads(params)))
        matcher = self._llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some errors appear only now
        if matcher.is_error():
            raise ValueError(_reason(matcher))
        return matcher

    def fill(self, grammars: dict[int, Grammar], bitmask: np.ndarray) -> None:
        """Fill rows of ``bitmask``, int32 [n, ceil(vocab_size / 32)], each for its grammar, with several threads.

        Raises:
            RequestError: as by ``Grammar.check``. The other rows are filled.
        """
        surplus, rows = self._surplus, list(grammars)
        filled = bitmask if surplus is None else np.empty((len(bitmask), surplus.size), np.int32)
        assert filled.dtype == np.int32 and filled.flags.c_contiguous
        matchers = [(grammar.matcher, row) for row, grammar in grammars.items()]
        self._executor.unsafe_compute_mask_ptr(matchers, filled.ctypes.data, filled[0].nbytes, len(filled))
        if surplus is not None:
            bitmask[rows] = (filled[rows] & surplus)[:, : bitmask.shape[1]]
        for grammar in grammars.values():
            grammar.check()

    def _load(self) -> None:
        """Import llguidance and give it the vocabulary: 1 to 2 s for 150,000 tokens."""
        needs = "SamplingParams: structured_outputs needs"
        if self._tokenizer is None:
            raise RequestError(f"{needs} a tokenizer, but the engine was made with skip_tokenizer_init=True.")
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(
                f"{needs} llguidance ({error}): pip install '.[structured]' in the checkout."
            ) from None
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError(f"{needs} a fast tokenizer (tokenizer.json), not {type(self._tokenizer).__name__}.")
        num_ids = max(backend.get_vocab().values()) + 1
        eos = sorted(i for i in self._eos_token_ids if i < num_ids)
        if not eos:
            raise RequestError(f"{needs} an end-of-sequence token, which the model does not have.")
        width = max(num_ids, self._vocab_size)
        self._llguidance, self._executor = llguidance, llguidance.LLExecutor(NUM_THREADS)
        self._vocabulary = llguidance.LLTokenizer(backend.to_str(), n_vocab=width, eos_token=eos)
        if width > self._vocab_size:
            self._surplus = mask_of_all(self._vocab_size, -(-width // 32))


def _no_json(x: Any) -> None:
    """Raise the error of an object that JSON has no form for, with the part of it that has one."""
    part = next((part for part in PARTS if hasattr(x, part.rstrip("()"))), None)
    if part is None and isinstance(x, type):
        raise ValueError(f"JSON has no form for {x!r:.100}; give pydantic.TypeAdapter({x.__name__}).json_schema()")
    if part is None:
        raise TypeError(f"Object of type {type(x).__name__} is not JSON serializable")
    raise ValueError(f"JSON has no form for {x!r:.100}; give its .{part}")


def _reason(matcher: Any) -> str:
    """llguidance's error without its state, and without the Lark that it quotes: it may not be the user's."""
    error = re.split(r"\n<state>|\n +\d+ \| ", matcher.get_error())[0].strip()
    return "it matches no text" if error.startswith("NoExtension") else error


def _refused(params: StructuredOutputsParams, reason: str, how: str = "used") -> RequestError:
    source = getattr(params, params.kind)
    try:
        shown = f"{source!r:.200}"
    except RecursionError:
        shown = "..."
    return RequestError(f"StructuredOutputsParams: {params.kind}={shown} cannot be {how}: {reason}")

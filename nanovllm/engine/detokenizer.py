"""Token ids to text, as they come: incremental detokenization and the search for stop strings.

Owns what single tokens are as text. Knows nothing of sequences, their parameters or the engine.

Text here is that of ``decode``: the tokenizer's own, but without the clean-up of spaces, which would change text
that was given out already.

    decoder of the tokenizer        text of a growing list of ids
    ByteLevel (Qwen, Llama 3, ...)  tokens are bytes; an incremental UTF-8 decoder gives the text
    any other (sentencepiece, ...)  a token's text depends on its predecessors (leading space, runs of byte tokens): a
                                    window of recent tokens is decoded again
"""

from bisect import bisect_left, bisect_right
from codecs import getincrementaldecoder
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no UTF-8; at the end perhaps an incomplete character
WINDOW, CONTEXT = 24, 6  # tokens: decoded again, and kept of them; a UTF-8 character has at most 4
MAX_TABLES = 32  # stop sets whose table is kept; V bytes each


def decode(tokenizer: Any, token_ids: list[int], skip_special_tokens: bool = True,
           spaces_between_special_tokens: bool = True) -> str:
    """The text of all the ids: what ``IncrementalDetokenizer`` gives piece by piece."""
    return tokenizer.decode(
        token_ids,
        skip_special_tokens=skip_special_tokens,
        spaces_between_special_tokens=spaces_between_special_tokens,
        clean_up_tokenization_spaces=False,
    )


def decode_tokens(tokenizer: Any, token_ids: Iterable[int]) -> list[str]:
    """The text of each id decoded alone, special tokens included; "" if it ends inside a UTF-8 character."""
    texts = _single_texts(tokenizer, len(tokenizer))
    return [texts[token_id] for token_id in token_ids]


class _SingleTexts(dict[int, str]):
    def __init__(self, tokenizer: Any):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = decode(self._tokenizer, [token_id], skip_special_tokens=False)
        text = self[token_id] = "" if text.endswith(REPLACEMENT) else text
        return text


@lru_cache(maxsize=4)  # tokenizers are compared by identity; tokens may be added to one
def _single_texts(tokenizer: Any, num_tokens: int) -> _SingleTexts:
    return _SingleTexts(tokenizer)


# ---------------------------------------------------------------- tokens as bytes


def _byte_level_alphabet() -> dict[int, str]:
    """Alphabet of byte-level BPE (GPT-2) -> Latin-1, for ``str.translate``.

    Printable bytes stand for themselves, the others are U+0100 and following; nothing else is of the alphabet.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: REPLACEMENT for byte in others} | {256 + i: chr(byte) for i, byte in enumerate(others)}


LATIN_1_OF = _byte_level_alphabet()


def _backend(tokenizer: Any) -> Any:
    """The tokenizer of the ``tokenizers`` library; None for one that is written in Python."""
    return getattr(tokenizer, "backend_tokenizer", None)


class _TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, of a byte-level tokenizer; filled as tokens are met. Unknown ids have none."""

    def __init__(self, backend: Any, skip_special_tokens: bool):
        super().__init__()
        self._backend = backend
        if skip_special_tokens:
            self.update((i, b"") for i, token in backend.get_added_tokens_decoder().items() if token.special)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        try:
            value = token.translate(LATIN_1_OF).encode("latin-1")
        except UnicodeEncodeError:  # an added token in plain text
            value = token.encode()
        self[token_id] = value
        return value


class _Tokens:
    """What the incremental decoders know of a tokenizer; shared by the requests.

    Attributes:
        token_bytes: of a byte-level tokenizer, else None.
        ids_with_text: of any other tokenizer: neither unknown nor left out.
        byte_ids: ids of byte tokens such as "<0xE4>". A run of them becomes text as a whole: one bad byte makes
            replacement characters of all, so the text of a run is certain only after its end.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool, spaces_between_special_tokens: bool):
        self._tokenizer, self._skip, self._spaces = tokenizer, skip_special_tokens, spaces_between_special_tokens
        self._by_bytes: dict[int, _TokensByBytes] = {}  # by V
        self.token_bytes: _TokenBytes | None = None
        backend = _backend(tokenizer)
        if backend is not None and type(backend.decoder).__name__ == "ByteLevel":
            self.token_bytes = _TokenBytes(backend, skip_special_tokens)
            return
        vocab = tokenizer.get_vocab()
        self.byte_ids = {vocab[name] for byte in range(256) if (name := f"<0x{byte:02X}>") in vocab}
        self.ids_with_text = set(vocab.values())
        if skip_special_tokens and backend is not None:
            self.ids_with_text -= {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        elif skip_special_tokens:
            self.ids_with_text -= set(tokenizer.all_special_ids)

    def decode(self, token_ids: list[int]) -> str:
        return decode(self._tokenizer, token_ids, self._skip, self._spaces)

    def completing(self, stop: Iterable[str], vocab_size: int) -> np.ndarray:
        """bool [V]: may the text first contain one of the strings after this token? True in doubt.

        A string is completed by a token that contains it or begins with the end of it. UTF-8 is self-synchronising,
        so bytes may be compared for characters.
        """
        table = np.zeros(vocab_size, bool)
        if any(REPLACEMENT in text for text in stop):
            return ~table
        if vocab_size not in self._by_bytes:
            self._by_bytes[vocab_size] = _TokensByBytes(*self._all_bytes(vocab_size))
        for text in stop:
            table[self._by_bytes[vocab_size].completing(text.encode())] = True
        table[self._by_bytes[vocab_size].in_doubt] = True
        return table

    def _all_bytes(self, vocab_size: int) -> tuple[list[bytes], list[int], list[int]]:
        """Bytes of the tokens, their ids, and the ids of tokens that may be any text.

        An id is there twice if it has two texts: at the beginning and after another token.
        """
        ids, backend = list(range(vocab_size)), _backend(self._tokenizer)
        if self.token_bytes is not None:
            return [self.token_bytes[i] for i in ids], ids, []
        if backend is None:
            return [], [], ids
        alone = backend.decode_batch([[i] for i in ids], skip_special_tokens=self._skip)
        first = next((i for i in ids if alone[i].isalnum() and i not in self.byte_ids), 0)
        after = backend.decode_batch([[first, i] for i in ids], skip_special_tokens=self._skip)
        in_doubt = [
            i for i, text in enumerate(after) if not text.startswith(alone[first]) or REPLACEMENT in text + alone[i]
        ]  # byte tokens
        return [text.encode() for text in (*alone, *(text[len(alone[first]) :] for text in after))], ids * 2, in_doubt


class _TokensByBytes:
    """The vocabulary as a dictionary of bytes to look in; ``in_doubt`` are the ids of tokens that may be any text."""

    def __init__(self, values: list[bytes], ids: list[int], in_doubt: list[int]):
        order = sorted(range(len(values)), key=values.__getitem__)
        self._values, self._ids = [values[i] for i in order], [ids[i] for i in order]
        # a byte that is nowhere in UTF-8 separates them, so nothing is found across two
        self._joined = b"\xff".join(self._values)
        self._begins = [0, *accumulate(len(value) + 1 for value in self._values)]
        self.in_doubt = in_doubt

    def completing(self, text: bytes) -> list[int]:
        """Ids of tokens that contain ``text`` or begin with an end of it."""
        found, at = [], self._joined.find(text)
        while at >= 0:
            i = bisect_right(self._begins, at)  # of the next token
            found.append(self._ids[i - 1])
            at = self._joined.find(text, self._begins[i])
        for start in range(1, len(text)):
            end = text[start:]
            first = bisect_left(self._values, end)
            last = bisect_left(self._values, end[:-1] + bytes([end[-1] + 1]), lo=first)  # in UTF-8 none is 255
            found += self._ids[first:last]
        return found


@lru_cache(maxsize=8)
def _tokens(tokenizer: Any, skip: bool, spaces: bool, num_tokens: int) -> _Tokens:
    return _Tokens(tokenizer, skip, spaces)


# ---------------------------------------------------------------- incremental detokenization


class _ByteStream:
    """Text of byte-level tokens."""

    def __init__(self, token_bytes: _TokenBytes):
        self._bytes_of = token_bytes.__getitem__
        self._utf8 = getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: list[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes_of, token_ids)))

    def held(self) -> str:
        return ""


class _Window:
    """Text by decoding recent tokens again: of the window's text, ``num_given`` characters were given out."""

    def __init__(self, tokens: _Tokens):
        self._tokens = tokens
        self._ids: list[int] = []
        self._num_given = 0

    def feed(self, token_ids: list[int]) -> str:
        # tokens without text are no context: after them alone, the next one would lose its leading space
        self._ids += [i for i in token_ids if i in self._tokens.ids_with_text]
        if not self._ids or self._ids[-1] in self._tokens.byte_ids:
            return ""
        text = self._tokens.decode(self._ids)
        end = max(self._num_given, len(text) - text.endswith(REPLACEMENT))
        new, self._num_given = text[self._num_given : end], end
        if len(self._ids) > WINDOW:
            self._shorten()
        return new

    def _shorten(self) -> None:
        self._ids = self._ids[-CONTEXT:]
        text = self._tokens.decode(self._ids)
        self._num_given = len(text) - text.endswith(REPLACEMENT)

    def held(self) -> str:
        return self._tokens.decode(self._ids)[self._num_given :].rstrip(REPLACEMENT)


class IncrementalDetokenizer:
    """Text of a growing list of token ids; a microsecond per token if the tokenizer is byte-level.

    ``text`` is a beginning of ``decode`` of all ids; ``text_now`` is all of it but for U+FFFD at its end.

    Args:
        tokenizer: a transformers tokenizer, or a ``FastTokenizer``.
        skip_special_tokens: leave them out.
        spaces_between_special_tokens: put spaces between them, if the tokenizer is one of those that can.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True):
        self.tokens = _tokens(tokenizer, skip_special_tokens, spaces_between_special_tokens, len(tokenizer))
        token_bytes = self.tokens.token_bytes
        self._stream = _Window(self.tokens) if token_bytes is None else _ByteStream(token_bytes)
        self._parts: list[str] = []
        self._num_chars = 0  # in the parts

    @property
    def text(self) -> str:
        """All that is certain so far: no later token changes it."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def feed(self, token_ids: list[int]) -> str:
        """The text that is certain now and was not before; "" while a UTF-8 character is incomplete."""
        new = self._stream.feed(token_ids)
        if new:
            self._parts.append(new)
            self._num_chars += len(new)
        return new

    @property
    def text_now(self) -> str:
        """``text`` and the complete characters of a run of byte tokens at its end, which the next token may change."""
        return self.text + self._stream.held()

    def end_of_text_now(self, num_chars: int) -> tuple[str, int]:
        """The end of ``text_now``, at least ``num_chars`` of ``text`` in it (all, if it has fewer); where it begins."""
        held, parts = self._stream.held(), []
        for part in reversed(self._parts):
            if num_chars <= 0:
                break
            parts.append(part)
            num_chars -= len(part)
        end = "".join(reversed(parts))
        return end + held, self._num_chars - len(end)


# ---------------------------------------------------------------- stop strings


class StopCandidates:
    """For sets of stop strings: the tokens that can complete one. Most tokens cannot, and cost one look at a table.

    Args:
        vocab_size: V, the model's; ids that the tokenizer does not know have no text.
    """

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._tables: OrderedDict[tuple, np.ndarray] = OrderedDict()  # least recently used first

    def table(self, tokens: _Tokens, stop: Iterable[str]) -> np.ndarray:
        """bool [V]; a superset."""
        key = tokens, frozenset(stop)
        if key not in self._tables:
            self._tables[key] = tokens.completing(key[1], self._vocab_size)
        if len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]


class StopChecker:
    """Finds stop strings in one completion as it grows.

    Only strings that end in the text of a token after the first ``min_tokens`` count. The first to be completed wins;
    of those that end at the same character, the first in the list.

    Args:
        candidates: the engine's.
        detokenizer: of this completion. The checker feeds it, and not before it has to.
        stop: non-empty strings.
        include: keep the stop string in the text.
        min_tokens: tokens whose text is not searched.

    Attributes:
        num_tokens: tokens seen; after a find up to the one that completes the string.
    """

    def __init__(self, candidates: StopCandidates, detokenizer: IncrementalDetokenizer, stop: list[str],
                 include: bool = False, min_tokens: int = 0):
        self._may_complete = candidates.table(detokenizer.tokens, stop)
        self._detokenizer, self._stop, self._include, self._min_tokens = detokenizer, stop, include, min_tokens
        self._longest = max(map(len, stop))
        self._pending: list[int] = []  # seen, but not fed
        self.num_tokens = 0

    def update(self, token_ids: list[int]) -> tuple[str, int] | None:
        """Take in new tokens, up to the first that completes a stop string: that string and how much of the
        detokenizer's ``text_now`` to keep; None if there is none."""
        for token_id in token_ids:
            self.num_tokens += 1
            self._pending.append(token_id)
            if self._may_complete[token_id] and self.num_tokens > self._min_tokens:
                found = self._search()
                if found is not None:
                    return found
        return None

    def _search(self) -> tuple[str, int] | None:
        """Look at the text that the last token adds."""
        detokenizer, last = self._detokenizer, self._pending.pop()
        if self._pending:
            detokenizer.feed(self._pending)
            self._pending = []
        held, begin = detokenizer.end_of_text_now(0)
        num_before = begin + len(held)
        new = detokenizer.feed([last])
        recent, begin = detokenizer.end_of_text_now(len(new) + self._longest - 1)
        best: tuple[int, int, str] | None = None  # end and start in recent, string
        for text in self._stop:
            start = recent.find(text, max(0, num_before - begin - len(text) + 1))
            if start >= 0 and (best is None or start + len(text) < best[0]):
                best = start + len(text), start, text
        if best is None:
            return None
        end, start, text = best
        return text, begin + (end if self._include else start)

"""Token ids to text: whole lists, single tokens, and tokens as they come, by the tokenizers library's ``DecodeStream``.

Knows nothing of sequences, their parameters or the engine. Text is that of the tokenizer's ``decode``, but without the
clean-up of spaces, which would change text that was given out already.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

from nanovllm.errors import as_request_error

REPLACEMENT = "\ufffd"  # written by decoders for bytes that are not UTF-8; at the end perhaps an incomplete character
PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
# GPT-2's alphabet: a token of a byte-level vocabulary has one character for each of its bytes
BYTE_OF = {byte if byte in PRINTABLE else next(beyond): byte for beyond in [count(0x100)] for byte in range(256)}


def decode(tokenizer: Any, token_ids: list[int], skip_special_tokens: bool = True,
           spaces_between_special_tokens: bool = True) -> str:
    """Decode all ids of a text that begins with them; raises RequestError whatever the tokenizer raises."""
    backend = backend_of(tokenizer)
    try:
        if backend is not None:  # transformers would check each id before the call
            return backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return tokenizer.decode(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,
        )
    except BaseException as error:  # a panic of tokenizers is not an Exception
        refused = as_request_error(error)
        raise refused from refused.__cause__


def decode_completion(tokenizer: Any, token_ids: list[int], *flags: bool) -> str:
    """Decode all ids to the text that ``IncrementalDetokenizer`` gives piece by piece; it follows a prompt's text."""
    space = _special_ids(tokenizer, len(tokenizer))[2]
    return decode(tokenizer, space + token_ids if space else token_ids, *flags)


def backend_of(tokenizer: Any) -> Any:
    """The tokenizers library's tokenizer that it wraps; None if it is written in Python."""
    return getattr(tokenizer, "backend_tokenizer", None)


class TokenText(NamedTuple):
    """A token decoded alone: its text, "" if it holds a part of a UTF-8 character, and its bytes."""

    text: str
    raw: bytes


def decode_tokens(tokenizer: Any, token_ids: Iterable[int]) -> list[TokenText]:
    """Decode each id alone, special tokens included."""
    num_tokens = len(tokenizer)
    return [_token_text(tokenizer, num_tokens, token_id) for token_id in token_ids]


@lru_cache(maxsize=1 << 18)  # tokenizers are compared by identity; tokens may be added to one
def _token_text(tokenizer: Any, num_tokens: int, token_id: int) -> TokenText:
    text = decode(tokenizer, [token_id], skip_special_tokens=False)
    if REPLACEMENT not in text:
        return TokenText(text, text.encode())
    backend = backend_of(tokenizer)
    name = tokenizer.convert_ids_to_tokens(token_id) if backend is None else backend.id_to_token(token_id)
    if token_id in _special_ids(tokenizer, num_tokens)[1]:
        return TokenText("", bytes([int(name[3:5], 16)]))
    if all(ord(character) in BYTE_OF for character in name):
        return TokenText("", bytes(BYTE_OF[ord(character)] for character in name))
    text = "" if text.endswith(REPLACEMENT) else text  # a vocabulary of another kind
    return TokenText(text, text.encode())


class IncrementalDetokenizer:
    """Text of a growing list of token ids, about a microsecond per token.

    Args:
        tokenizer: a transformers tokenizer, or a ``FastTokenizer``.
        skip_special_tokens: leave them out.
        spaces_between_special_tokens: put spaces between them, if the tokenizer is one of those that can.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True):
        self._options = tokenizer, skip_special_tokens, spaces_between_special_tokens
        self._backend = backend_of(tokenizer)
        if self._backend is not None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        special_ids, self._byte_ids, space = _special_ids(tokenizer, len(tokenizer))
        for token_id in space if self._backend is not None else ():
            self._stream.step(self._backend, token_id)
        self._skipped_ids = special_ids if skip_special_tokens else frozenset()
        self._context = space  # tokens of the last text that was given out
        self._pending: list[int] = []  # tokens after that text
        self._run: list[int] = []  # byte tokens at their end that the stream has not received

    def feed(self, token_id: int) -> str:
        """The text that is certain now, whatever follows, and was not before; "" inside a UTF-8 character."""
        if token_id in self._skipped_ids:  # they have no text; a long run of them would be decoded again and again
            return ""
        self._pending.append(token_id)
        if token_id in self._byte_ids:
            self._run.append(token_id)
            return ""
        new: str | None = None
        if self._backend is not None:
            try:  # one id takes half the time of a list
                new = self._stream.step(self._backend, [*self._run, token_id] if self._run else token_id)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a decoder changes text before the token, so the stream cannot go on
                self._backend = None
        if self._backend is None:
            new = self._pending_text()
        self._run = []
        if not new or new.endswith(REPLACEMENT):
            return ""
        self._context, self._pending = self._pending, []
        return new

    def held(self) -> str:
        """The complete characters after the text that was given out, which the next token may still change."""
        return self._pending_text().rstrip(REPLACEMENT) if self._pending else ""

    def _pending_text(self) -> str:
        tokenizer, skip, spaces = self._options
        before, text = (decode(tokenizer, ids, skip, spaces) for ids in (self._context, self._context + self._pending))
        return text[len(before) :]


@lru_cache(maxsize=8)
def special_tokens(tokenizer: Any, num_tokens: int) -> dict[str, int]:
    """The id of each special token by its text."""
    ids = sorted(_special_ids(tokenizer, num_tokens)[0])
    return dict(zip((token.text for token in decode_tokens(tokenizer, ids)), ids, strict=True))


@lru_cache(maxsize=8)
def _special_ids(tokenizer: Any, num_tokens: int) -> tuple[frozenset[int], frozenset[int], list[int]]:
    """Ids of special tokens; of byte tokens such as "<0xE4>"; and the space that the decoder strips, if it does.

    A run of byte tokens becomes text as a whole: one bad byte makes replacement characters of all, so its text is
    certain only after its end. Decoders of Llama 2's kind strip a text's first space, which encoding prepends. A
    completion begins no text: after a space to strip, it keeps its own.
    """
    backend = backend_of(tokenizer)
    if backend is None:
        special, find = tokenizer.all_special_ids, tokenizer.get_vocab().get
    else:
        special = (i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        find = backend.token_to_id
    byte_ids = frozenset(i for byte in range(256) if (i := find(f"<0x{byte:02X}>")) is not None)
    space = find("▁")
    is_stripped = space is not None and [decode(tokenizer, [space] * n) for n in (1, 2)] == ["", " "]
    return frozenset(special), byte_ids, [space] if is_stripped else []

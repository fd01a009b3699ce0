"""The fewest tokens that a text can have, known without tokenizing it (80 MB take a minute and 14 GB).

Owns the bound: the most characters that one token of a vocabulary can stand for. Owns also the bound on tokenizers that
make texts longer. Imports no tokenizer.
"""

import base64
import json
import math
from typing import Any

from nanovllm.errors import CheckpointError, RequestError

LONG = 1_000_000  # characters; shorter texts take less than a second and are not checked
WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
# Steps of a tokenizer.json -> most characters of a text that become one: NFC composes up to four (Unicode's table).
# Any other step may drop or replace characters, and then there is no bound.
NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
PRE_TOKENIZERS = ("ByteLevel", "Split", "Digits", "Metaspace", "Punctuation", "UnicodeScripts")
DROP_WHITESPACE = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")

MAX_GROWTH = 16  # most growth of a text in one part of a tokenizer; published parts stay below 5
PARTS = (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders"))
NFKC_GROWTH = 18  # characters that U+FDFA becomes; growth by Unicode's own forms is not counted
UTF8_BYTES = 4  # most bytes of a character; each byte becomes a character in a step named ByteLevel


def check_growth(tokenizer: Any, model_path: str) -> None:
    """Raise CheckpointError if a part of a tokenizer, a few bytes in its file, may multiply texts."""
    for part, inner in PARTS:
        if (step := getattr(getattr(tokenizer, "backend_tokenizer", None), part, None)) is None:
            continue
        try:
            steps = _steps(json.loads(step.__getstate__()), inner)
        except Exception:  # a step written in Python comes from no file
            continue
        if (growth := math.prod(map(_growth, steps))) > MAX_GROWTH:
            raise CheckpointError(
                f"the {part} of the tokenizer in {model_path} may make texts {growth:.3g} times as long; at most "
                f"{MAX_GROWTH} times are allowed."
            )


def _growth(step: dict[str, Any]) -> float:
    """The most characters that one character becomes in a step."""
    if step["type"] == "Prepend":  # the text may be a single character
        return 1 + len(step["prepend"])
    if step["type"] == "Replace":
        added, pattern = len(step["content"]), step["pattern"].get("String")
        # a regular expression, or the empty string, may match between all characters, and also one of them
        return max(1, added / len(pattern)) if pattern else 1 + added
    if step["type"] == "Precompiled":  # SentencePiece's: the size of a trie, the trie, and texts that end with a zero
        table = base64.b64decode(step["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return max(1, max(len(text.decode(errors="replace")) for text in texts) / NFKC_GROWTH)
    return UTF8_BYTES if step["type"] == "ByteLevel" else 1


class Lengths:
    """Refuses texts of any tokenizer by their characters."""

    def __init__(self) -> None:
        self._bound: tuple[int, int, bool] | None = None
        self._of: tuple[int, int] | None = None  # identity and size of the tokenizer, as tokens may be added

    def check(self, which: str, text: str, params: Any, max_model_len: int, tokenizer: Any) -> None:
        """Raise RequestError if the text cannot fit, unless its parameters, one or a list, cut it.

        ``which``: begins the error.
        """
        every = params if isinstance(params, (list, tuple)) else [params]
        if any(getattr(each, "truncate_prompt_tokens", None) is not None for each in every):
            return
        if self._of != (id(tokenizer), len(tokenizer)):
            self._of = id(tokenizer), len(tokenizer)
            self._bound = characters_per_token(getattr(tokenizer, "backend_tokenizer", None))
        if (fewest := fewest_tokens(text, self._bound)) > max_model_len:
            raise RequestError(
                f"{which}the text has {len(text):,} characters, which are at least {fewest:,} tokens; at most "
                f"{max_model_len=} fit. Shorten it or raise max_model_len."
            )


def fewest_tokens(text: str, bound: tuple[int, int, bool] | None) -> int:
    """A lower bound of the text's tokens; 0 without a bound."""
    if bound is None:
        return 0
    of_token, composed, drops_whitespace = bound
    num_characters = len(text) - sum(map(text.count, WHITESPACE)) if drops_whitespace else len(text)
    return num_characters // (of_token * (1 if text.isascii() else composed))


def characters_per_token(backend: Any) -> tuple[int, int, bool] | None:
    """The most characters of a token of a tokenizer of the ``tokenizers`` library; None without a bound.

    Returns:
        Characters of a token after the normalizer; characters of a text, if it is not ASCII, that this makes one; and
        whether any number of spaces may vanish between tokens.
    """
    if not hasattr(backend, "to_str"):
        return None
    parts = json.loads(backend.to_str())
    model, added = parts["model"], parts["added_tokens"]
    if model["type"] != "BPE":
        return None
    normalizers = _steps(parts["normalizer"], "normalizers")
    pre_tokenizers = _steps(parts["pre_tokenizer"], "pretokenizers")
    of_token, composed = max(map(len, [*model["vocab"], *(token["content"] for token in added)])), 1
    for step in normalizers:
        if step["type"] == "Replace" and step["content"] and "String" in step["pattern"]:
            of_token *= -(-len(step["pattern"]["String"]) // len(step["content"]))
        elif step["type"] in NORMALIZERS:
            composed *= NORMALIZERS[step["type"]]
        else:
            return None
    drops_whitespace = any(token["lstrip"] or token["rstrip"] for token in added)
    for step in pre_tokenizers:
        drops_whitespace |= step["type"] in DROP_WHITESPACE
        if step["type"] not in PRE_TOKENIZERS + DROP_WHITESPACE or step.get("behavior") == "Removed":
            return None
    by_bytes = [f"<0x{byte:02X}>" for byte in range(256)] if model["byte_fallback"] else [None]
    if any(step["type"] == "ByteLevel" for step in normalizers + pre_tokenizers):
        from tokenizers.pre_tokenizers import ByteLevel

        by_bytes = ByteLevel.alphabet()
    # else unknown characters vanish, or any number of them becomes one token
    return (of_token, composed, drops_whitespace) if all(map(model["vocab"].__contains__, by_bytes)) else None


def _steps(step: dict | None, inner: str) -> list[dict]:
    """A normalizer or pre-tokenizer as a list: of the steps of a sequence, which may be nested."""
    if step is None or step["type"] != "Sequence":
        return [step] if step else []
    return [each for part in step[inner] for each in _steps(part, inner)]

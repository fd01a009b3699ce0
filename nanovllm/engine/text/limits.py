"""Limits of texts and tokenizers: no input takes a minute or gigabytes before it is refused.

Owns the longest text, bounded by the tokens that fit, and the most that a tokenizer may make a text grow. Imports no
tokenizer.
"""

import base64
import json
import math
from typing import Any

from nanovllm.errors import CheckpointError, RequestError

MAX_CHARACTERS = 100_000_000  # longest text: a minute of tokenizing, and more tokens than any context
LONG = 1_000_000  # characters; shorter texts are tokenized within seconds and not checked
MAX_COMPOSED = 4  # most characters that NFC and NFKC compose into one (Unicode's table)
BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))

MAX_GROWTH = 16  # most growth of a text in one part of a tokenizer; published parts stay below 5
PARTS = (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders"))
NFKC_GROWTH = 18  # characters that U+FDFA becomes; growth by Unicode's own forms is not counted
UTF8_BYTES = 4  # most bytes of a character; each byte becomes a character in a step named ByteLevel


def check_length(which: str, text: str, fit: tuple[Any, int] | None, tokenizer: Any) -> None:
    """Raise RequestError if a long text cannot fit.

    Args:
        which: begins the error.
        fit: parameters, one or a list, and max_model_len; None for a text of any number of tokens.
    """
    if len(text) > MAX_CHARACTERS:
        raise RequestError(f"{which}the text has {len(text):,} characters; allowed are {MAX_CHARACTERS:,}.")
    if fit is None or _is_cut(fit[0]):
        return
    fewest, max_model_len = fewest_tokens(text, tokenizer), fit[1]
    if fewest > max_model_len:
        raise RequestError(
            f"{which}the text has {len(text):,} characters, which are at least {fewest:,} tokens; at most "
            f"{max_model_len=} fit. Shorten it or raise max_model_len."
        )


def _is_cut(params: Any) -> bool:
    """Whether the parameters, one or a list, cut a prompt that is too long."""
    every = params if isinstance(params, (list, tuple)) else [params]
    return any(getattr(each, "truncate_prompt_tokens", None) is not None for each in every)


def fewest_tokens(text: str, tokenizer: Any) -> int:
    """A lower bound of a text's tokens: as if each were the longest of the vocabulary.

    Blanks are not counted, because added tokens, normalizers and pre-tokenizers may drop any number of them. Returns 0
    for other models than BPE, in which a word or a run of unknown characters is one token, however long.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ != "BPE":
        return 0
    longest = max(map(len, backend.get_vocab()), default=1)  # 0.1 s, to save a minute
    num_characters = len(text) - sum(map(text.count, BLANKS))
    return num_characters // (longest if text.isascii() else MAX_COMPOSED * longest)


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


def _steps(step: dict | None, inner: str) -> list[dict]:
    """A normalizer or pre-tokenizer as a list: of the steps of a sequence, which may be nested."""
    if step is None or step["type"] != "Sequence":
        return [step] if step else []
    return [each for part in step[inner] for each in _steps(part, inner)]

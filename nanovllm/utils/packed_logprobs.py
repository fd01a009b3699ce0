"""Packed rows of log-probabilities, as the devices report them, and the dictionaries of an output.

A row is packed as by ``token_logprobs`` (sampling), int32 [2 + 2k]: log-probability and rank of the token itself, then
ids and log-probabilities of k others: the most probable ones, or those that its request names.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike

import numpy as np

from nanovllm.outputs import Logprob, LogprobsAt

# text and bytes of each token id, decoded alone; {} without a tokenizer. Part of a character has bytes but no text
Texts = Callable[[set[int]], Mapping[int, tuple[str, bytes]]]
UNKNOWN = None, None
MAX_BEFORE = 3  # tokens before a list that may hold the start of its first character: UTF-8 has up to four bytes


def trimmed(rows: np.ndarray, num_logprobs: int) -> np.ndarray:
    """The first ``num_logprobs`` (-1 is all) alternatives of each row: another request may have asked for more.

    Args:
        rows: int32 [..., 2 + 2k].
    """
    k = (rows.shape[-1] - 2) // 2
    if num_logprobs == -1 or num_logprobs >= k:
        return rows
    return np.concatenate([rows[..., : 2 + num_logprobs], rows[..., 2 + k : 2 + k + num_logprobs]], axis=-1)


def logprobs_at(rows: np.ndarray, token_ids: list[int], texts: Texts | None,
                are_top: bool = True, before: ListLike[int] = ()) -> list[LogprobsAt]:
    """One dict per token: the token itself, then the others.

    Args:
        rows: int32 [n, 2 + 2k].
        token_ids: [n].
        texts: for ``decoded_token``; None leaves it out.
        are_top: the others are the most probable ones, so their places are ranks.
        before: ids of the last tokens before these, at most MAX_BEFORE.
    """
    if not token_ids:
        return []
    k = (rows.shape[1] - 2) // 2
    values = np.ascontiguousarray(rows).view(np.float32)
    chosen, ranks = values[:, 0].tolist(), rows[:, 1].tolist()
    top_ids, top = rows[:, 2 : 2 + k].tolist(), values[:, 2 + k :].tolist()
    known = texts({*before, *token_ids, *(i for ids in top_ids for i in ids)}) if texts else {}
    result = []
    for token_id, logprob, rank, ids, logprobs in zip(token_ids, chosen, ranks, top_ids, top, strict=True):
        entry = {token_id: Logprob(logprob, rank, *known.get(token_id, UNKNOWN))}
        for place, (i, value) in enumerate(zip(ids, logprobs, strict=True), 1):
            if i not in entry:
                entry[i] = Logprob(value, place if are_top else None, *known.get(i, UNKNOWN))
        result.append(entry)
    if parts := {i: raw for i, (text, raw) in known.items() if raw and not text}:
        _complete_characters(result, token_ids, parts, before)
    return result


def _complete_characters(logprobs: list[LogprobsAt], token_ids: list[int], parts: dict[int, bytes],
                         before: ListLike[int]) -> None:
    """Set the text of tokens that hold parts of characters: the characters that each completes.

    Args:
        parts: the bytes of these tokens.
    """
    start, chosen = b"", Logprob(0.0)  # bytes of a character that may be completed; the entry of the last token
    for token_id, at in zip((*before, *token_ids), (*({} for _ in before), *logprobs), strict=True):
        for i in parts.keys() & at.keys():
            at[i].decoded_token = utf_8_decode(start + parts[i], "replace")[0]
        if token_id in parts:
            start += parts[token_id]
            start = start[utf_8_decode(start, "replace")[1] :]
        elif start:  # it stays incomplete
            start = b""
            chosen.decoded_token = f"{chosen.decoded_token}\ufffd"
        chosen = at.get(token_id, chosen)

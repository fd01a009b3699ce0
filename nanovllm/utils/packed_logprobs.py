"""Packed rows of log-probabilities, as the devices report them, and the dictionaries of an output.

A row is packed as by ``token_logprobs`` (sampling), int32 [2 + 2k]: log-probability and rank of the token itself, then
ids and log-probabilities of k others: the most probable ones, or those that its request names.
"""

from collections.abc import Callable

import numpy as np

from nanovllm.outputs import Logprob, LogprobsAt

Texts = Callable[[set[int]], dict[int, str]]  # the text of each token id, decoded alone; {} without a tokenizer


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
                are_top: bool = True) -> list[LogprobsAt]:
    """One dict per token: the token itself, then the others.

    Args:
        rows: int32 [n, 2 + 2k].
        token_ids: [n].
        texts: for ``decoded_token``; None leaves it out.
        are_top: the others are the most probable ones, so their places are ranks.
    """
    if not token_ids:
        return []
    k = (rows.shape[1] - 2) // 2
    values = np.ascontiguousarray(rows).view(np.float32)
    chosen, ranks = values[:, 0].tolist(), rows[:, 1].tolist()
    top_ids, top = rows[:, 2 : 2 + k].tolist(), values[:, 2 + k :].tolist()
    text = texts({*token_ids, *(i for ids in top_ids for i in ids)}) if texts else {}
    result = []
    for token_id, logprob, rank, ids, logprobs in zip(token_ids, chosen, ranks, top_ids, top, strict=True):
        entry = {token_id: Logprob(logprob, rank, text.get(token_id))}
        for place, (i, value) in enumerate(zip(ids, logprobs, strict=True), 1):
            if i not in entry:
                entry[i] = Logprob(value, place if are_top else None, text.get(i))
        result.append(entry)
    return result

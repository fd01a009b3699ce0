"""Prompts given as token ids, as arrays.

Owns what counts as a list of token ids. Most limits are checked in ``engine/request.py``.
"""

from array import array
from collections.abc import KeysView, Mapping, Set
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from nanovllm.errors import RequestError
from nanovllm.validation import check, integer

NON_SEQUENCES = (str, bytes, bytearray, memoryview, Mapping, Set)  # iterable, but no list of tokens or prompts


def as_token_ids(token_ids: Any) -> np.ndarray:
    """A prompt as an integer array [n], a copy; raises RequestError for anything but a flat list of integers."""
    rule = "a prompt must be a string or a flat list of integer token ids"
    if isinstance(token_ids, np.ndarray):
        ids = token_ids.copy()
    else:
        values = token_ids if isinstance(token_ids, (list, tuple)) else as_list(rule, token_ids)
        try:
            ids = np.array(array("q", values))  # faster than numpy's own conversion, and refuses floats
        except (TypeError, OverflowError):
            ids = np.empty(0, object)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(f"{rule}, not {token_ids!s:.100}.")
    return ids


def pack_prompts(prompts: ListLike[Any], vocab_size: int) -> list[np.ndarray] | None:
    """Each prompt as a view of one int64 array, all ids in the vocabulary; a third of the time they take one by one.

    None: one is no list or array of ids, or has an id outside the vocabulary, or all are empty: look at each.
    """
    packed, lengths = array("q"), []
    try:
        for ids in prompts:
            if isinstance(ids, (list, tuple)):
                packed.extend(array("q", ids))
            elif type(ids) is np.ndarray and ids.ndim == 1 and ids.dtype.kind in "iu":
                packed.frombytes(ids.astype(np.int64).tobytes())
            else:
                return None
            lengths.append(len(ids))
    except (TypeError, OverflowError):
        return None
    if not packed:
        return None
    flat, stops = np.frombuffer(packed, np.int64), np.cumsum(lengths).tolist()
    if flat.min() < 0 or flat.max() >= vocab_size:
        return None
    return [flat[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]


def check_scored(token_ids: Any, start: Any, max_model_len: int) -> tuple[np.ndarray, int]:
    """A list whose tokens from ``start`` on are to be scored, and the start."""
    ids = as_token_ids(token_ids)
    start = check("score", "start", start, integer("an integer"), RequestError)
    if not 1 <= start < len(ids):
        raise RequestError(
            f"start={start} must be in [1, {len(ids) - 1}] for {len(ids)} token ids: the first has nothing "
            "before it, and one at least must be scored."
        )
    limit = max_model_len + 1
    if len(ids) > limit:
        raise RequestError(
            f"the list has {len(ids)} token ids; with max_model_len={limit - 1} at most {limit} can be scored. "
            "Shorten it or raise max_model_len."
        )
    return ids, start


def as_list(rule: str, given: Any) -> list:
    """``list(given)``; raises RequestError with the rule if it is no list of prompts, parameters or messages."""
    if isinstance(given, NON_SEQUENCES) and not isinstance(given, KeysView):  # keys are a set, but ordered
        raise RequestError(f"{rule}, not {given!s:.100}.")
    try:
        items = iter(given)
    except TypeError:
        raise RequestError(f"{rule}, not {given!s:.100}.") from None
    return list(items)  # an exception from the user's generator passes through

"""Forms of prompts: one prompt, many, token ids. ``checks.py`` has their limits.

A prompt with images is ``{"prompt": ..., "multi_modal_data": {"image": image}}``, with one image or a list, and a
placeholder for each in the text. An image is a PIL image, a numpy array uint8 [H, W, 3], bytes, a data URL, or a path
or URL that an option of ``LLM`` allows.
"""

from array import array
from collections.abc import KeysView, Mapping, Set
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from nanovllm.errors import RequestError

Prompt = str | ListLike[int] | dict[str, Any]
NON_SEQUENCES = (str, bytes, bytearray, memoryview, Mapping, Set)  # iterable, but no list of tokens or prompts


def as_prompts(prompts: Any) -> list[Prompt]:
    return [prompts] if is_one_prompt(prompts) else as_list("prompts must be a string or a list", prompts)


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a prompt and not a collection of prompts."""
    if isinstance(prompts, (str, dict)):
        return True
    if getattr(prompts, "ndim", None) == 1:  # an array of numpy or torch, checked without importing torch
        return "int" in str(getattr(prompts, "dtype", ""))
    return isinstance(prompts, (list, tuple, range)) and len(prompts) > 0 and isinstance(prompts[0], (int, np.integer))


def split_prompt(prompt: Prompt) -> tuple[str | None, Any]:
    """Split a prompt into text and token ids; at least one of them is given."""
    if not isinstance(prompt, dict):
        return (prompt, None) if isinstance(prompt, str) else (None, prompt)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if (text is None and token_ids is None) or not isinstance(text, (str, type(None))):
        raise RequestError(
            'a prompt dictionary needs "prompt", a string, or "prompt_token_ids", a list of integers; '
            f"this one has {', '.join(map(repr, prompt)) or 'neither'}."
        )
    given = [key for key, value in prompt.items() if hasattr(value, "dtype") or value]  # an array has no truth value
    if others := [key for key in given if key not in ("prompt", "prompt_token_ids")]:
        raise RequestError(f"a prompt dictionary cannot have {', '.join(map(repr, others))}: text only.")
    return text, token_ids


def as_token_ids(token_ids: Any, rule: str = "a prompt must be a string or a flat list of integer token ids"
                 ) -> np.ndarray:
    """A prompt as an integer array [n], a copy; raises RequestError for anything but a flat list of integers."""
    token_ids = getattr(token_ids, "prompt_ids", token_ids)  # an Attachment has its prompt_ids
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim == 1 and token_ids.dtype.kind in "iu":
            return token_ids.copy()
    else:
        values = token_ids if isinstance(token_ids, (list, tuple)) else as_list(rule, token_ids)
        try:
            if len(values) and isinstance(values[0], bool):
                raise TypeError
            return np.asarray(array("q", values))  # faster than numpy's own conversion, and refuses floats
        except (TypeError, OverflowError):
            pass
    raise RequestError(f"{rule}, not {token_ids!s:.100}.")


def as_list(rule: str, given: Any) -> list:
    """``list(given)``; raises RequestError with the rule if it is no list of prompts, parameters or messages."""
    if isinstance(given, NON_SEQUENCES) and not isinstance(given, KeysView):  # keys are a set, but ordered
        raise RequestError(f"{rule}, not {given!s:.100}.")
    try:
        items = iter(given)
    except TypeError:
        raise RequestError(f"{rule}, not {given!s:.100}.") from None
    return list(items)  # an exception from the user's generator passes through

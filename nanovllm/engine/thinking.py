"""Budgets of thinking: limits on the tokens between the marks that a reasoning model writes around its thoughts.

Owns the count, and the tokens that must come next when the budget is spent. Knows ids, no logits; the device's half is
``sampling/forced.py``.
"""

from typing import Any, NamedTuple

import numpy as np

from nanovllm.engine.text.reasoning import THINK, ReasoningMarks
from nanovllm.errors import RequestError

NO_MARKS = (
    "thinking_token_budget needs the marks around this model's thoughts: its tokenizer has no tokens {} and {}. Give "
    "LLM(reasoning_start_str=..., reasoning_end_str=...)."
)

Ids = tuple[int, ...]


class Marks(NamedTuple):
    """The marks around thoughts as token ids.

    Attributes:
        start: opens a thought.
        end: closes it when the budget is spent; a phrase of transition may come before the mark.
        ends: any of these closes it: the same, and the mark alone, which the model writes.
    """

    start: Ids
    end: Ids
    ends: tuple[Ids, ...]

    @classmethod
    def of(cls, tokenizer: Any, start: str | None, end: str | None, vocab_size: int) -> "Marks":
        """From an engine's options. Raises RequestError where these are None and the tokenizer has not the usual ones.
        """
        given, texts = (start, end), (start or THINK.start, end or THINK.end)
        alone = ReasoningMarks.alone(start, end).end
        start_ids, end_ids, alone_ids = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (*texts, alone)
        )
        if any(option is None and len(ids) > 1 for option, ids in zip(given, (start_ids, end_ids), strict=True)):
            raise RequestError(NO_MARKS.format(*map(repr, THINK)))
        for text, ids in zip(texts, (start_ids, end_ids), strict=True):
            if not ids or max(ids) >= vocab_size:
                raise RequestError(f"thinking_token_budget: the model has no tokens for the mark {text!r:.100}.")
        return cls(start_ids, end_ids, tuple(dict.fromkeys((alone_ids, end_ids))))


class Thinking:
    """The thoughts of one sequence, which may begin in ``prompt_ids``, the last turn of its prompt.

    Tokens of all thoughts of the completion count together, and those of a thought that the prompt leaves open.

    Attributes:
        is_open: whether the next token belongs to a thought.
    """

    def __init__(self, marks: Marks, budget: int, prompt_ids: np.ndarray):
        self._marks = marks
        opened, closed = behind_last(marks.start, prompt_ids), max(behind_last(ids, prompt_ids) for ids in marks.ends)
        self.is_open = opened > closed
        self._left = budget - (len(prompt_ids) - opened if self.is_open else 0)
        longest = max(map(len, (marks.start, *marks.ends)))
        self._since = prompt_ids[max(opened, closed) :][-longest:].tolist()  # tokens behind the last mark
        self._last_ids = {ids[-1] for ids in (marks.start, *marks.ends)}

    def accept(self, token_id: int) -> bool:
        """Append a token; whether it is part of a thought or one of its marks."""
        was_open, marks = self.is_open, self._marks
        self._since.append(token_id)
        if token_id in self._last_ids and any(map(self._ends_with, marks.ends if was_open else (marks.start,))):
            self.is_open, self._since = not was_open, []
        elif was_open:
            self._left -= 1
        return was_open or self.is_open

    @property
    def forced(self) -> int | None:
        """The token that must come next, if the budget is spent: the end goes on from where the text has begun it."""
        if not self.is_open or self._left > 0:
            return None
        begun = ((ids, n) for ids in (self._marks.end, *self._marks.ends) for n in range(len(ids) - 1, 0, -1))
        return next((ids[n] for ids, n in begun if self._ends_with(ids[:n])), self._marks.end[0])

    def _ends_with(self, ids: Ids) -> bool:
        return tuple(self._since[-len(ids) :]) == ids


def behind_last(ids: Ids, tokens: np.ndarray) -> int:
    """The place behind the last occurrence of ``ids`` in ``tokens``, int [n]; 0 if there is none."""
    num_places = max(0, len(tokens) - len(ids) + 1)
    found = np.logical_and.reduce([tokens[i : i + num_places] == token_id for i, token_id in enumerate(ids)])
    return int(np.flatnonzero(found)[-1]) + len(ids) if found.any() else 0

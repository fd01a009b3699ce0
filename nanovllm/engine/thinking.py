"""Budgets of thinking: limits on the tokens between the marks that a reasoning model writes around its thoughts.

Owns the count, and the tokens that must come next when the budget is spent. Knows ids, no logits; the device's half is
``sampling/forced.py``.
"""

from typing import Any, NamedTuple

import numpy as np

from nanovllm.engine.text.reasoning import OTHERS, THINK, ReasoningMarks
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
        end: written when the budget is spent; a phrase may come before the mark, and text after it.
        ends: any of these, written by the model, closes a thought: the mark alone, and the same as ``end``.
    """

    start: Ids
    end: Ids
    ends: tuple[Ids, ...]

    @classmethod
    def of(cls, tokenizer: Any, start: str | None, end: str | None, vocab_size: int) -> "Marks":
        """From an engine's options. Raises RequestError where these are None and the tokenizer has not the usual ones.
        """

        def encode(text: str) -> Ids:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        usual = THINK
        if start is None and end is None:
            usual = next((pair for pair in (THINK, *OTHERS) if all(len(encode(mark)) == 1 for mark in pair)), THINK)
        given, texts = (start, end), (start or usual.start, end or usual.end)
        start_ids, end_ids, alone_ids = map(encode, (*texts, ReasoningMarks.alone(*texts).end))
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
        is_open: whether the next token belongs to a thought, or to the end that the spent budget writes.
    """

    def __init__(self, marks: Marks, budget: int, prompt_ids: np.ndarray):
        self._marks = marks
        opened, closed = behind_last(marks.start, prompt_ids), max(behind_last(ids, prompt_ids) for ids in marks.ends)
        self.is_open = opened > closed
        self._left = budget - (len(prompt_ids) - opened if self.is_open else 0)
        longest = max(map(len, (marks.start, *marks.ends)))
        self._since = prompt_ids[max(opened, closed) :][-longest:].tolist()  # tokens after the last mark
        self._last_ids = {ids[-1] for ids in (marks.start, *marks.ends)}
        alone = marks.ends[0]
        mark_at = max(0, behind_last(alone, np.array(marks.end)) - len(alone))
        self._ways = marks.end, marks.end[mark_at:], *marks.ends  # possible endings; the text may have begun one
        self._forced = self._end_from_here()  # tokens that must come next, whatever they spell

    def accept(self, token_id: int) -> bool:
        """Append a token; whether it is part of a thought or one of its marks."""
        was_open, marks = self.is_open, self._marks
        if self._forced:
            self._forced = self._forced[1:]
            if not self._forced:
                self.is_open, self._since = False, []
            return True
        self._since.append(token_id)
        if token_id in self._last_ids and any(map(self._ends_with, marks.ends if was_open else (marks.start,))):
            self.is_open, self._since = not was_open, []
        elif was_open:
            self._left -= 1
        self._forced = self._end_from_here()
        return was_open or self.is_open

    @property
    def forced(self) -> int | None:
        """The token that must come next, if the budget is spent."""
        return self._forced[0] if self._forced else None

    def _end_from_here(self) -> Ids:
        """The tokens that end the thought, if its budget is spent: the end goes on from where the text has begun it."""
        if not self.is_open or self._left > 0:
            return ()
        begun = ((ids, n) for ids in self._ways for n in range(len(ids) - 1, 0, -1))
        return next((ids[n:] for ids, n in begun if self._ends_with(ids[:n])), self._marks.end)

    def _ends_with(self, ids: Ids) -> bool:
        return tuple(self._since[-len(ids) :]) == ids


def behind_last(ids: Ids, tokens: np.ndarray) -> int:
    """The place after the last occurrence of ``ids`` in ``tokens``, int [n]; 0 if there is none."""
    num_places = max(0, len(tokens) - len(ids) + 1)
    found = np.logical_and.reduce([tokens[i : i + num_places] == token_id for i, token_id in enumerate(ids)])
    return int(np.flatnonzero(found)[-1]) + len(ids) if found.any() else 0

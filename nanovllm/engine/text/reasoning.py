"""Reasoning: the marks that stand around a model's thinking, and where they stand in a completion.

Owns the marks of published models. Knows nothing of requests.
"""

import re
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from nanovllm.engine.text.detokenizer import backend_of, decode, decode_completion, special_tokens
from nanovllm.outputs import ReasoningBlock
from nanovllm.sampling_params import StructuredOutputsParams

MAX_TAIL = 128  # tokens of a prompt that are decoded to find marks of several tokens
BOUNDARY, OWN = 1, 2  # kinds of token ids: special tokens that are no marks, and the marks
NOWHERE = -1, -1


class ReasoningMarks(NamedTuple):
    """Texts, of one token or several, around the thinking."""

    start: str
    end: str

    @classmethod
    def alone(cls, start: str | None, end: str | None) -> "ReasoningMarks":
        """From the options of an engine, whose end may have a phrase before the mark, and text after it.

        The mark that belongs to ``start`` is that of a published pair, or ``start`` with a slash (``</think>``), or
        else the last text in the brackets that ``start`` has.
        """
        start, end = start or THINK.start, end or THINK.end
        opening = start.strip() or start
        own = next((pair.end for pair in (THINK, *OTHERS) if pair.start == opening), f"{opening[:1]}/{opening[1:]}")
        if own in end:
            return cls(start, own)
        place = -1 if opening[:1].isalnum() else end.rfind(opening[:1])
        if place < 0:
            return cls(start, end.rstrip() or end)
        closing = opening[-1]
        stop = -1 if closing.isalnum() or closing == opening[0] else end.find(closing, place)
        return cls(start, end[place : stop + 1] if stop >= 0 else end[place:].strip())


THINK = ReasoningMarks("<think>", "</think>")  # Qwen3, DeepSeek-R1, GLM-4.5, SmolLM3, EXAONE 4, MiniMax-M2 and others
OTHERS = (
    ReasoningMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ReasoningMarks("[THINK]", "[/THINK]"),  # Ministral 3
    ReasoningMarks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),  # gpt-oss
)


def marks_of(tokenizer: Any) -> ReasoningMarks:
    """The marks whose first token the tokenizer has; else ``<think>`` and ``</think>``."""
    return next((marks for marks in OTHERS if _id_of(tokenizer, re.split("(?<=[]>])", marks.start)[0])), THINK)


def _id_of(tokenizer: Any, token: str) -> int | None:
    backend = backend_of(tokenizer)
    return (tokenizer.get_vocab().get if backend is None else backend.token_to_id)(token)


class ReasoningFinder:
    """Finds the thinking in the completions of a tokenizer's model."""

    def __init__(self, tokenizer: Any, marks: ReasoningMarks):
        self._tokenizer, self._marks = tokenizer, marks
        self._special = special_tokens(tokenizer, len(tokenizer))
        special = set(self._special.values())
        self._ids = [self._encode(mark) for mark in marks]
        own = {i for ids in self._ids for i in ids}
        self._are_tokens, self._are_skipped = all(len(ids) == 1 for ids in self._ids), bool(own & special)
        # kinds of token ids; ids are clipped to the last entry, which has neither kind
        self._kinds = np.zeros(max(special | own, default=0) + 2, np.int8)
        self._kinds[[*(special - own)]], self._kinds[[*own]] = BOUNDARY, OWN

    def _encode(self, mark: str) -> list[int]:
        token_id = _id_of(self._tokenizer, mark)
        return self._tokenizer([mark], add_special_tokens=False)["input_ids"][0] if token_id is None else [token_id]

    def _begins(self, prompt_ids: np.ndarray) -> str:
        """Whether a completion of the prompt begins "inside" the thinking, "after" it, or ("") elsewhere.

        A template may open the block, or close an empty one, after its last special token.
        """
        kinds = self._kinds.take(prompt_ids, mode="clip")
        first = int(np.flatnonzero(kinds == BOUNDARY).max(initial=-1)) + 1
        if self._are_tokens and not (kinds[first:] == OWN).any():
            return ""
        tail = prompt_ids[first if self._are_tokens else max(first, len(prompt_ids) - MAX_TAIL) :]
        text = decode(self._tokenizer, tail.tolist(), skip_special_tokens=False)
        start, end = map(text.rfind, self._marks)
        if start > end:  # unless a token that the marks also contain has ended the message (gpt-oss)
            behind = text[start + len(self._marks.start) :]
            return "" if any(token and token in behind for token in self._special) else "inside"
        return "after" if end >= 0 and not text[end + len(self._marks.end) :].strip() else ""

    def is_named_in(self, constraint: StructuredOutputsParams) -> bool:
        """Whether a constraint describes the thinking too: its source has the end mark, perhaps with backslashes."""
        return self._marks.end in str(getattr(constraint, constraint.kind)).replace("\\", "")

    def find(self, prompt_ids: np.ndarray, text: str, token_ids: list[int], *flags: bool,
             must_open: bool = False) -> ReasoningBlock | None:
        """Find the thinking in the text of a completion; None without one.

        A text that has the end mark alone began inside, unless its prompt closed the block.

        Args:
            prompt_ids: integers [num_prompt_tokens].
            text: of ``token_ids``, or its beginning.
            flags: of the text, ``skip_special_tokens`` and ``spaces_between_special_tokens``.
            must_open: only the prompt or the beginning of the text opens a block, as when a grammar follows it.
        """
        (start, behind_start), (end, behind_end) = self._marks_in(text, token_ids, *flags)
        begins = self._begins(prompt_ids)
        has_end, is_first = end >= 0, start >= 0 and not text[:start].strip()
        if not has_end:  # not yet, or never
            end = behind_end = len(text)
        if is_first or (start >= 0 and has_end and begins != "inside" and not must_open):
            return ReasoningBlock(start, behind_start, end, behind_end)
        if begins == "inside" or (has_end and begins != "after" and not must_open):
            return ReasoningBlock(0, 0, end, behind_end)
        return None

    def _marks_in(self, text: str, token_ids: list[int], *flags: bool) -> list[tuple[int, int]]:
        """Find the characters [begin, end) of the first start mark and of the first end mark; NOWHERE without one.

        A text without special tokens lacks marks of such. They stand where the text of the tokens before them ends.
        """
        where: Any = text
        marks: Any = self._marks
        place_of: Any = str.find
        if is_without := self._are_skipped and flags[:1] == (True,):
            where, marks, place_of = token_ids, self._ids, _place_of
        end = place_of(where, marks[1])
        start = place_of(where if end < 0 else where[:end], marks[0])

        def character(n: int) -> int:
            return min(len(text), len(decode_completion(self._tokenizer, token_ids[:n], *flags))) if is_without else n

        places = zip((start, end), map(len, marks), strict=True)
        return [(character(n), character(n + size)) if n >= 0 else NOWHERE for n, size in places]


def _place_of(token_ids: list[int], ids: list[int]) -> int:
    return next((i for i in range(len(token_ids) - len(ids) + 1) if token_ids[i : i + len(ids)] == ids), -1)


@lru_cache(maxsize=8)  # tokenizers are compared by identity; tokens may be added to one
def finder_of(tokenizer: Any, num_tokens: int, marks: ReasoningMarks | None) -> ReasoningFinder:
    """Make the finder of a tokenizer, once; without marks with the tokenizer's."""
    return ReasoningFinder(tokenizer, marks or marks_of(tokenizer))

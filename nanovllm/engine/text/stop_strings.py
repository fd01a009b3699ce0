"""Stop strings: the search for them in a text as it grows."""

from typing import Any

from nanovllm.engine.text.detokenizer import IncrementalDetokenizer
from nanovllm.sampling_params import SamplingParams


class StopStrings:
    """Finds the stop strings of a request in one completion.

    Only strings that end in the text of a token after the first ``min_tokens`` count. The first to be completed wins;
    of those that end at the same character, the first in the list.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams):
        flags = params.skip_special_tokens, params.spaces_between_special_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, *flags)
        self._stop, self._include = list(params.stop or ()), params.include_stop_str_in_output
        self._longest = max(map(len, self._stop))
        self._num_unsearched = params.min_tokens  # tokens to come
        self._text: list[str] = []  # certain text, in pieces
        self._end = ""  # end of the certain text, where a stop string may begin
        self._num_searched = 0  # characters searched so far in that end and in the uncertain text after it

    def update(self, token_id: int) -> tuple[str, str] | None:
        """Take in the next token: the stop string that it completes and the text to keep, or None."""
        new, held = self._detokenizer.feed(token_id), self._detokenizer.held()
        self._text.append(new)
        certain = self._end + new
        text = certain + held
        self._num_unsearched -= 1
        found = self._search(text) if self._num_unsearched < 0 else None
        if found is None:
            start = max(0, len(certain) - self._longest + 1)
            self._end, self._num_searched = certain[start:], len(text) - start
            return None
        string, num_kept = found
        whole = "".join(self._text) + held
        return string, whole[: len(whole) - len(text) + num_kept]

    def _search(self, text: str) -> tuple[str, int] | None:
        """The first string to end after ``_num_searched`` characters, and how much of the text to keep."""
        best: tuple[int, int, str] | None = None  # end, start
        for string in self._stop:
            start = text.find(string, max(0, self._num_searched - len(string) + 1))
            if start >= 0 and (best is None or start + len(string) < best[0]):
                best = start + len(string), start, string
        if best is None:
            return None
        end, start, string = best
        return string, end if self._include else start

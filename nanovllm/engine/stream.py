"""The tokens of one request as they arrive: each output holds the new ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanovllm.engine.request import Request
from nanovllm.engine.text.detokenizer import IncrementalDetokenizer
from nanovllm.outputs import CompletionOutput, RequestOutput


class DeltaStream:
    """Deltas of one request. Their texts, joined, are the text that ``generate`` gives; so are their token ids.

    A stop string is cut from the text, so the last characters are held back while one might begin there.
    """

    def __init__(self, request: Request):
        self._request = request
        self._num_sent = [0] * len(request.completions)  # tokens sent
        self._sent = [""] * len(request.completions)  # text sent
        self._unsent = [""] * len(request.completions)  # text to send
        params, tokenizer = request.params, request.tokenizer.tokenizer
        self._detokenizers = [
            IncrementalDetokenizer(tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens)
            for _ in request.completions
            if tokenizer is not None and params.detokenize
        ]
        self._held_back = max((len(text) - 1 for text in params.stop or ()), default=0)

    def delta(self, cumulative: bool = False) -> RequestOutput | None:
        """The tokens and text since the last call, or with ``cumulative`` all until now; None if nothing is new."""
        if self._request.num_unfinished == 0:
            return self._request.output() if cumulative else self._last()
        outputs, is_new = [], False
        for index, seq in enumerate(self._request.completions):
            start, stop, first = self._num_sent[index], seq.num_completion_tokens, seq.num_prompt_tokens
            if seq.finish_reason is not None and stop > start:
                stop -= 1  # the token that ended it may not belong to the text: the last delta tells
            token_ids = seq.tokens(first + start, first + stop).tolist()
            text = self._new_text(index, token_ids)
            self._num_sent[index], is_new = start + len(token_ids), is_new or len(token_ids) > 0
            if cumulative:
                start, text, token_ids = 0, self._sent[index], seq.tokens(first, first + stop).tolist()
            total, logprobs = self._logprobs(index, token_ids, start)
            find = self._reasoning(index, len(self._sent[index]) - len(text), seq.tokens(first, first + stop).copy())
            outputs.append(CompletionOutput(index, text, token_ids, total, logprobs, reasoning_block=find))
        return self._request.output_of(outputs, finished=False) if is_new else None

    def _last(self) -> RequestOutput:
        output = self._request.output()
        for index, whole in enumerate(output.outputs):
            start, first = self._num_sent[index], len(self._sent[index])
            token_ids = whole.token_ids[start:]
            text, (_, logprobs) = whole.text[first:], self._logprobs(index, token_ids, start)
            find = self._reasoning(index, first, whole.token_ids, whole.text)
            delta = replace(whole, text=text, token_ids=token_ids, logprobs=logprobs, reasoning_block=find)
            output.outputs[index] = delta
        return self._request.output_of(output.outputs)

    def _reasoning(self, index: int, first: int, token_ids: Any, text: str | None = None) -> Callable[..., Any]:
        """A function that finds the thinking in the text from the character ``first`` on.

        ``token_ids``: of the whole completion so far; its text is what was sent, or ``text``.
        """
        text = self._sent[index] if text is None else text
        find = self._request.tokenizer.reasoning_finder(self._request.prompt_ids, self._request.params)
        return lambda *of_delta: None if (block := find(text, token_ids)) is None else block.behind(first)

    def _new_text(self, index: int, token_ids: list[int]) -> str:
        """The text that is certain now and cannot begin a stop string."""
        if not self._detokenizers:
            return ""
        unsent = self._unsent[index] + "".join(map(self._detokenizers[index].feed, token_ids))
        end = max(0, len(unsent) - self._held_back)
        self._unsent[index] = unsent[end:]
        self._sent[index] += unsent[:end]
        return unsent[:end]

    def _logprobs(self, index: int, token_ids: list[int], start: int) -> tuple:
        processor = self._request.completions[index].processor
        return (None, None) if processor is None else processor.logprobs(token_ids, start)

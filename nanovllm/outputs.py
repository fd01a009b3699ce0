"""The result of ``generate``: one frozen ``RequestOutput`` per prompt.

nano-vllm's scripts read it as a mapping (``output["text"]``), vLLM's as an object (``output.outputs[0].text``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length"]
KEYS = ("text", "token_ids", "finish_reason")  # of the mapping


@dataclass(frozen=True)
class CompletionOutput:
    """The generated part of one request.

    Attributes:
        text: the generated text without special tokens ("" without a tokenizer).
        token_ids: the generated token ids, a stop token included.
        finish_reason: "stop" (an end-of-sequence or stop token) or "length".
        stop_reason: the id from ``stop_token_ids`` that ended it; None for end-of-sequence or length.
        index: always 0 (one completion per prompt).
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None = None
    index: int = 0


@dataclass(frozen=True, eq=False)
class RequestOutput(Mapping):
    """One finished request; also reads as the mapping "text", "token_ids", "finish_reason" of its completion.

    Compared and hashed by identity.

    Attributes:
        request_id: the request's id, unique in its engine, as text.
        prompt: the prompt's text; None if token ids were given.
        prompt_token_ids: the prompt's token ids.
        outputs: a list of one ``CompletionOutput``.
        num_cached_tokens: prompt tokens found in the prefix cache.
        finished: always True.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = True

    __eq__ = object.__eq__  # a mapping's would compare the completions of different requests
    __hash__ = object.__hash__

    def __getitem__(self, key: str) -> Any:
        if key not in KEYS:
            raise KeyError(key)
        return getattr(self.outputs[0], key)

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __len__(self) -> int:
        return len(KEYS)

"""What ``generate`` returns: one frozen ``RequestOutput`` per prompt.

It reads as the mapping ``{"text": ..., "token_ids": ...}`` that nano-vllm scripts expect, and as
the object with ``.outputs[0].text`` that vLLM scripts expect.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class CompletionOutput:
    """The generated part of one request.

    Attributes:
        text: the generated text, special tokens left out ("" without a tokenizer).
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
    """One finished request; also the mapping ``{"text", "token_ids", "finish_reason"}`` of its completion.

    It equals only itself, and can be hashed.

    Attributes:
        request_id: the id that ``add_request`` returned, as text.
        prompt: the prompt's text, or None if token ids were given.
        prompt_token_ids: the prompt as token ids.
        outputs: a list of one ``CompletionOutput``.
        num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        finished: always True.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = True

    __eq__ = object.__eq__  # a mapping's would compare what different requests got
    __hash__ = object.__hash__

    def __getitem__(self, key: str) -> Any:
        if key in ("text", "token_ids", "finish_reason"):
            return getattr(self.outputs[0], key)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(("text", "token_ids", "finish_reason"))

    def __len__(self) -> int:
        return 3

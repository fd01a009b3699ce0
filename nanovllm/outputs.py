"""Results of ``generate`` (one ``RequestOutput`` per prompt), ``embed``, ``classify`` and ``rerank``.

nano-vllm's scripts read a ``RequestOutput`` as a dictionary (``output["text"]``), vLLM's scripts read it as an object
(``output.outputs[0].text``).
"""

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, NamedTuple

from nanovllm.errors import EngineError

FinishReason = Literal["stop", "length", "error"]


@dataclass
class Logprob:
    """The log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the most probable token, counting tokens at least as probable.
        decoded_token: its text, decoded alone; None without a tokenizer. A character made of several tokens is the text
            of its last one, and the others have "".
        token_bytes: its bytes, also where they are a part of a character; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = field(default=None, repr=False, compare=False)  # vLLM's has no such field


LogprobsAt = dict[int, Logprob]  # at one position: token id -> Logprob; the token itself first, then the most probable


class Deferred:
    """A field whose value may be given as a function; the first read calls it.

    A million ``Logprob`` objects take a second, and most callers want a few of them.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = "_" + name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return None  # the dataclass's default
        value = vars(instance)[self._key]
        if callable(value):
            value = vars(instance)[self._key] = value()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._key] = value


class ReasoningBlock(NamedTuple):
    """Characters of a text: its thinking is [start, end), and its marks reach from ``opens`` to ``closes``."""

    opens: int
    start: int
    end: int
    closes: int

    def behind(self, first: int) -> "ReasoningBlock":
        """The block in the text from the character ``first`` on."""
        return ReasoningBlock(*(max(0, place - first) for place in self))


@dataclass
class CompletionOutput:
    """One completion of a request.

    Attributes:
        index: its place in ``RequestOutput.outputs``.
        text: the generated text ("" without a tokenizer).
        token_ids: the generated token ids, a stop token included.
        cumulative_logprob: sum of the tokens' log-probabilities; None unless ``logprobs`` was asked for.
        logprobs: for each token a dict ``token id -> Logprob``; None unless asked for.
        finish_reason: "stop" (an end-of-sequence or stop token, a stop string, or a repetition), "length", or "error"
            (its grammar or a logits processor failed while it was decoded, or its logits were NaN); None while
            unfinished.
        stop_reason: the stop token id or the stop string that ended it, "repetition_detected", or what failed; None for
            the end-of-sequence token.
        reasoning: the part of the text within the marks of the model's thinking, such as ``<think>`` and ``</think>``;
            all of it where the thinking has not ended; None without thinking.
        content: the rest of the text, without the marks.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: "list[LogprobsAt] | Callable[[], list[LogprobsAt]] | None" = Deferred()  # type: ignore[assignment]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: None = None
    reasoning_block: InitVar["Callable[[str, list[int]], ReasoningBlock | None] | ReasoningBlock | None"] = None

    def __post_init__(self, reasoning_block: Any) -> None:
        self._block = reasoning_block  # or a function of text and token ids, called on first use

    def _reasoning_block(self) -> ReasoningBlock | None:
        if self._block is not None and not isinstance(self._block, ReasoningBlock):
            self._block = self._block(self.text, self.token_ids)
        return self._block

    @property
    def reasoning(self) -> str | None:
        block = self._reasoning_block()
        return None if block is None else self.text[block.start : block.end]

    @property
    def content(self) -> str:
        block = self._reasoning_block()
        return self.text if block is None else self.text[: block.opens] + self.text[block.closes :]

    def finished(self) -> bool:
        return self.finish_reason is not None

    def __getstate__(self) -> dict[str, Any]:
        _ = self.logprobs, self._reasoning_block()  # functions cannot be pickled
        return vars(self)


@dataclass
class Score:
    """Log-probabilities of the tokens given to ``LLM.score``, from ``start`` on.

    Attributes:
        logprobs: natural logarithm of the probability of each.
        is_argmax: whether it is the most probable one at its place.
        error: why there are none, and all are NaN: the model's logits are.
    """

    logprobs: list[float]
    is_argmax: list[bool]
    error: str | None = None

    @property
    def total(self) -> float:
        return sum(self.logprobs)


@dataclass
class EmbeddingOutput:
    """``values``: fp32 [dimensions]."""

    values: Any

    @property
    def embedding(self) -> list[float]:
        return self.values.tolist()

    @property
    def hidden_size(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"  # as vLLM's, without thousands of numbers


@dataclass
class ClassificationOutput:
    """``probs``: of each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    """``score``: how well a document answers a query, in [0, 1]."""

    score: float


@dataclass
class PoolingRequestOutput:
    """One prompt of ``embed`` or ``classify``, or one document of ``rerank``.

    Attributes:
        request_id: unique in its engine, as text.
        outputs: the results; None if there is an error.
        prompt_token_ids: the prompt's token ids.
        num_cached_tokens: prompt tokens found in the prefix cache.
        prompt: its text; None if only token ids were given.
        index: the place of the prompt in its call.
        error: why there is no result: the model's hidden states are NaN.
        embedding: of ``embed``: an array fp32 [dimensions]; ``outputs.embedding`` is the same as a list.
    """

    request_id: str
    outputs: Any
    prompt_token_ids: "list[int] | Callable[[], list[int]]" = Deferred()  # type: ignore[assignment]
    num_cached_tokens: int = 0
    finished: bool = True
    prompt: str | None = None
    index: int = 0
    error: str | None = None

    @property
    def embedding(self) -> Any:
        if self.error is not None:
            raise EngineError(f"prompt {self.index}: {self.error}")
        return self.outputs.values


class RequestOutput(dict):
    """One request; as a dictionary the "text", "token_ids" and "finish_reason" of its first completion.

    Compared and hashed by identity. ``json.dumps`` writes the dictionary.

    Attributes:
        request_id: the request's id, unique in its engine, as text.
        index: the place of its prompt in the call.
        prompt: the prompt's text; None if only token ids were given.
        prompt_token_ids: the prompt's token ids.
        prompt_logprobs: for each prompt token a dict ``token id -> Logprob``, None for the first; None unless asked.
        outputs: one ``CompletionOutput`` for each of ``n``.
        num_cached_tokens: prompt tokens found in the prefix cache.
        finished: whether all completions are; False only for deltas of ``stream``.
        metrics: None.
    """

    prompt_token_ids = Deferred()
    prompt_logprobs = Deferred()

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int] | Callable[[], list[int]],
                 outputs: list[CompletionOutput], num_cached_tokens: int = 0, finished: bool = True,
                 prompt_logprobs: Any = None, index: int = 0):
        first = outputs[0]
        super().__init__(text=first.text, token_ids=first.token_ids, finish_reason=first.finish_reason)
        self.request_id, self.index, self.outputs, self.finished = request_id, index, outputs, finished
        self.prompt, self.prompt_token_ids, self.prompt_logprobs = prompt, prompt_token_ids, prompt_logprobs
        self.num_cached_tokens, self.metrics, self.lora_request = num_cached_tokens, None, None

    def __getattr__(self, name: str) -> Any:  # only called for missing attributes
        is_of_completion = name in (*CompletionOutput.__dataclass_fields__, "reasoning", "content")
        hint = f"; its first completion has: output.outputs[0].{name}" if is_of_completion else ""
        raise AttributeError(f"a RequestOutput has no attribute {name!r}{hint}.")

    __eq__ = object.__eq__  # a dictionary's would compare the completions of different requests
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        _ = self.prompt_token_ids, self.prompt_logprobs  # functions cannot be pickled
        return vars(self)

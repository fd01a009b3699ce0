"""One request: a prompt, the sequences that complete it, and their results.

Input and output processor fill it; the scheduler sees its sequences alone.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from nanovllm.core import Sequence
from nanovllm.engine.callers import Caller
from nanovllm.engine.loading import Loading
from nanovllm.engine.text.tokenizer import AsyncTokenizer, CompletionReasoning, done
from nanovllm.engine.token_processor import TokenProcessor
from nanovllm.messages import Attachment
from nanovllm.outputs import CompletionOutput, FinishReason, RequestOutput
from nanovllm.readouts import Readout
from nanovllm.sampling_params import SamplingParams


class Completion(Sequence):
    """A sequence with its result.

    Attributes:
        processor: looks at each of its tokens; None where nothing must.
        output_ids: its tokens, a list made when it finishes.
        text: the text of these, if somebody waits for it.
    """

    processor: TokenProcessor | None = None
    output_ids: list[int]
    text: Future[str] | None = None

    def decode(self, tokenizer: AsyncTokenizer) -> Future[str]:
        """The text of the finished sequence. A token that ended it stays out, unless the request wants it."""
        if self.processor is not None and self.processor.stop_text is not None:
            return done(self.processor.stop_text)
        params, token_ids = self.sampling_params, self.output_ids
        by_token = self.finish_reason == "stop" and not isinstance(self.stop_reason, str)  # else by a repetition
        ends_early = by_token and not params.include_stop_str_in_output
        return tokenizer.decode_later(token_ids[:-1] if ends_early else token_ids, params)

    def output(self, index: int, tokenizer: AsyncTokenizer, reasoning: CompletionReasoning) -> CompletionOutput:
        """The finished completion; waits for the text."""
        text, failure = tokenizer.decoded(self.text or self.decode(tokenizer))
        logprobs = (None, None) if self.processor is None else self.processor.logprobs(self.output_ids)
        reasons = (self.finish_reason, self.stop_reason) if failure is None else ("error", failure)
        return CompletionOutput(index, text, self.output_ids, *logprobs, *reasons, None, reasoning)


@dataclass(eq=False)
class Request:
    """One prompt, whose form and parameters are checked.

    Attributes:
        request_id: also the ``seq_id`` of its first sequence; those of the others follow.
        prompt: its text; None if it was given as token ids.
        prompt_ids: integers [num_prompt_tokens], a copy of the user's.
        index: the place of the prompt in its call.
        readout: results of the prompt besides tokens, or None.
        loading: inputs of the prompt besides tokens, while they load; then ``prompt_ids`` has placeholders.
        attachment: these inputs once they are loaded, or None.
        failure: finish and stop reason of a request that ends before it begins.
        completions: made when the request is queued; in the order of ``RequestOutput.outputs``.
        num_unfinished: completions of a queued request that are not finished.
    """

    request_id: int
    prompt: str | None
    prompt_ids: np.ndarray
    params: SamplingParams
    tokenizer: AsyncTokenizer
    index: int = 0
    readout: Readout | None = None
    loading: Loading | None = None
    attachment: Attachment | None = None
    failure: "tuple[FinishReason | None, str | None]" = (None, None)
    completions: list[Completion] = field(default_factory=list)
    num_unfinished: int = 0
    caller: Caller = None  # type: ignore[assignment]  # until it is registered
    arrived_at: float = 0.0  # perf_counter, in seconds

    @property
    def seq_ids(self) -> range:
        return range(self.request_id, self.request_id + self.params.n)

    @property
    def has_inputs(self) -> bool:
        """Whether the prompt has inputs besides tokens."""
        return self.loading is not None or self.attachment is not None

    @property
    def is_unfinished(self) -> bool:
        """Whether a registered request waits or runs: it is neither finished nor aborted nor dropped."""
        return self.request_id in self.caller.unfinished

    @property
    def has_text(self) -> bool:
        """Whether ``output`` need not wait, once the request is finished."""
        return all(completion.text is None or completion.text.done() for completion in self.completions)

    def output(self) -> RequestOutput:
        """The finished request; waits for the text."""
        reasoning, completions = self.tokenizer.reasoning_finder(self.prompt_ids, self.params), self.completions
        return self.output_of([each.output(i, self.tokenizer, reasoning) for i, each in enumerate(completions)])

    def output_of(self, outputs: list[CompletionOutput], finished: bool = True) -> RequestOutput:
        texts = self.tokenizer.texts if self.params.detokenize else None
        return RequestOutput(
            str(self.request_id), self.prompt, self.prompt_ids.tolist, outputs,
            self.completions[0].num_cached_tokens, finished, index=self.index,
            **self.readout.output_fields(texts) if self.readout is not None else {},
        )  # fmt: skip

"""One request: a prompt, the sequences that complete it, and their results; and who waits for it.

Input and output processor fill it; the scheduler sees its sequences only.
"""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from nanovllm.core import Sequence
from nanovllm.engine.logprobs import logprobs_at
from nanovllm.engine.token_processor import TokenProcessor
from nanovllm.engine.tokenizer import AsyncTokenizer
from nanovllm.errors import EngineError
from nanovllm.outputs import CompletionOutput, RequestOutput, Score
from nanovllm.sampling_params import SamplingParams

DROPPED = "these requests were dropped, because a step of this engine failed or was interrupted."


@dataclass(eq=False)
class Caller:
    """Who waits for requests: one ``generate``, one ``stream``, or all uses of ``add_request`` or of ``submit``."""

    unfinished: dict[int, "Request"] = field(default_factory=dict)  # by request_id
    finished: deque["Request"] = field(default_factory=deque)  # not yet taken by the caller
    num_queued: int = 0  # sequences that wait or run
    detokenize: bool = True  # in the background, as sequences finish
    dropped: bool = False  # the engine had to drop its requests

    def take(self) -> list["Request"]:
        """The requests that are finished and were not yet taken; EngineError if some were dropped."""
        if self.dropped:
            self.dropped = False
            raise EngineError(DROPPED)
        finished = list(self.finished)
        self.finished.clear()
        return finished


@dataclass(eq=False)
class Request:
    """One prompt, whose form and parameters are checked.

    Attributes:
        request_id: also the ``seq_id`` of its first sequence; those of the others follow.
        prompt: its text; None if it was given as token ids.
        prompt_ids: integers [num_prompt_tokens], a copy of the user's.
        index: the place of the prompt in its call.
        targets: token ids [n] whose log-probabilities prefill reports, or None; see ``Sequence``.
        seqs: made when the request is queued; in the order of ``RequestOutput.outputs``.
        processors: by seq_id, of the sequences whose every token the host looks at.
        token_ids, texts: of finished sequences, by seq_id; a text is a future, and absent if nobody waits for it.
        prompt_logprobs: of ``targets`` chunk by chunk, packed as by ``reference.token_logprobs``.
    """

    request_id: int
    prompt: str | None
    prompt_ids: np.ndarray
    params: SamplingParams
    tokenizer: AsyncTokenizer
    index: int = 0
    targets: np.ndarray | None = None
    first_target: int = 0
    caller: Caller = None  # type: ignore[assignment]  # until it is registered
    arrived_at: float = 0.0  # perf_counter, in seconds
    seqs: list[Sequence] = field(default_factory=list)
    processors: dict[int, TokenProcessor] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, Future[str]] = field(default_factory=dict)
    prompt_logprobs: list[np.ndarray] = field(default_factory=list)

    @property
    def has_text(self) -> bool:
        """Whether ``output`` need not wait, once the request is finished."""
        return all(text.done() for text in self.texts.values())

    def output(self) -> RequestOutput:
        """The finished request; waits for the text."""
        outputs = []
        for index, seq in enumerate(self.seqs):
            token_ids = self.token_ids[seq.seq_id]
            text = self.texts.get(seq.seq_id) or self.tokenizer.decode_later(text_ids(seq, token_ids), self.params)
            processor = self.processors.get(seq.seq_id)
            total, logprobs = (None, None) if processor is None else processor.logprobs(token_ids)
            outputs.append(
                CompletionOutput(index, text.result(), token_ids, total, logprobs, seq.finish_reason, seq.stop_reason)
            )
        return self.output_of(outputs)

    def output_of(self, outputs: list[CompletionOutput], finished: bool = True) -> RequestOutput:
        return RequestOutput(
            request_id=str(self.request_id),
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids.tolist,
            outputs=outputs,
            num_cached_tokens=self.seqs[0].num_cached_tokens,
            finished=finished,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self._prompt_logprobs,
            index=self.index,
        )

    def _prompt_logprobs(self) -> list:
        if not self.prompt_logprobs:  # a prompt of one token
            return [None]
        rows, ids = np.concatenate(self.prompt_logprobs), self.prompt_ids[1:].tolist()
        return [None, *logprobs_at(rows, ids, self.params.detokenize and self.tokenizer)]

    def score(self) -> Score:
        rows = np.concatenate(self.prompt_logprobs)
        values = np.ascontiguousarray(rows).view(np.float32)  # logprob, rank, best id, best logprob
        return Score(values[:, 0].tolist(), (values[:, 0] == values[:, 3]).tolist())


def text_ids(seq: Sequence, token_ids: list[int]) -> list[int]:
    """The ids that make the text: a token that ended it stays out, unless the request wants it."""
    params = seq.sampling_params
    if not params.detokenize:
        return []
    ends_early = seq.finish_reason == "stop" and not params.include_stop_str_in_output
    return token_ids[:-1] if ends_early else token_ids

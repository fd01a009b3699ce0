"""From the tokens of a step to finished requests.

Owns the unfinished requests. A plain sequence is looked at when it finishes. One whose every token the host must see
(stop strings, log-probabilities, grammars) has a ``TokenProcessor``.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from time import perf_counter
from typing import Any

import numpy as np

from nanovllm.core import Batch, PrefillBatch, Sequence, SequenceStatus
from nanovllm.engine.logprobs import trimmed
from nanovllm.engine.metrics import Metrics
from nanovllm.engine.request import Caller, Request, text_ids
from nanovllm.engine.token_processor import TokenProcessor, TokenProcessors
from nanovllm.engine.tokenizer import AsyncTokenizer


class OutputProcessor:
    """Joins the results of sequences into their requests; one per engine.

    Args:
        tokenizer: for the text of completions.
        token_processors: fills the masks of constrained sequences.
        metrics: told of requests that end.

    Attributes:
        unfinished: requests, by their id as text.
        num_not_queued: sequences of unfinished requests that the scheduler does not know yet.
    """

    def __init__(self, tokenizer: AsyncTokenizer, token_processors: TokenProcessors, metrics: Metrics | None = None):
        self._tokenizer, self._token_processors, self._metrics = tokenizer, token_processors, metrics or Metrics()
        self.unfinished: dict[str, Request] = {}
        self.num_not_queued = 0
        self._requests: dict[int, Request] = {}  # by seq_id, while the sequence is unfinished
        self._processors: dict[int, TokenProcessor] = {}  # the same, where every token is looked at
        self._constrained: dict[int, TokenProcessor] = {}  # and those of them that say what may be sampled

    def register(self, request: Request, caller: Caller) -> None:
        """From now on the request is one of the engine's, and may be aborted."""
        request.caller, request.arrived_at = caller, perf_counter()
        self.num_not_queued += request.params.n
        # the caller's second: after an interrupt between them, ``abort`` must find in both what the caller holds
        self.unfinished[str(request.request_id)] = caller.unfinished[request.request_id] = request

    def queued(self, request: Request) -> None:
        """The sequences of a registered request are made; those with nothing to compute are finished at once."""
        self.num_not_queued -= len(request.seqs)
        request.caller.num_queued += len(request.seqs)
        request.seqs[0].arrived_at = request.arrived_at
        for seq in request.seqs:
            self._requests[seq.seq_id] = request
        self._processors.update(request.processors)
        self._constrained.update((i, p) for i, p in request.processors.items() if p.guide is not None)
        done = [seq for seq in request.seqs if not seq.is_sampled and seq.targets is None]
        for seq in done:
            seq.status, seq.finish_reason = SequenceStatus.FINISHED, "length"
        self.finish(done)

    def is_empty(self) -> bool:
        """Whether every sequence that was queued is finished."""
        return not self._requests

    def update(self, batch: Batch, result: Any) -> list[Sequence]:
        """Look at the tokens of a step, where requests ask for it; return the sequences that end by that."""
        if isinstance(batch, PrefillBatch) and batch.targets is not None:
            stop = 0
            for seq_id, size in zip(batch.targets.seq_ids, batch.targets.sizes, strict=True):
                start, stop = stop, stop + size
                if (request := self._requests.get(seq_id)) is not None:
                    # trimmed here: the prompt's next chunk may run beside requests that want fewer
                    rows = trimmed(result.target_logprobs[start:stop], request.params.prompt_logprobs or 0)
                    request.prompt_logprobs.append(rows)
        ended = []
        for i, seq_id in enumerate(batch.seq_ids.tolist() if self._processors else ()):
            processor = self._processors.get(seq_id)
            if processor is not None:
                logprobs = None if result.logprobs is None else result.logprobs[i]
                if processor.update(int(result.token_ids[i]), logprobs):
                    ended.append(processor.seq)
        return ended

    def masks(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, list[Sequence]] | None:
        """Constrained request slots of a batch, int32 [n]; the tokens each may sample next, int32 [n, ceil(V / 32)];
        and the sequences that end because their grammar fails. None if no request of the engine is constrained.
        """
        if not self._constrained:
            return None
        req_indices, processors = [], []
        for req_idx, seq_id in zip(batch.req_indices.tolist(), batch.seq_ids.tolist(), strict=True):
            if (processor := self._constrained.get(seq_id)) is not None:
                req_indices.append(req_idx)
                processors.append(processor)
        return np.array(req_indices, np.int32), *self._token_processors.masks(processors)

    def finish(self, seqs: Iterable[Sequence]) -> None:
        """Take in finished sequences; requests that are complete now go to their callers.

        Lists of ids are made here, while the device works: a million ids take the host 30 ms.
        """
        for seq in seqs:
            request, token_ids = self._requests.pop(seq.seq_id), seq.completion_token_ids
            processor = self._pop_processor(seq)
            request.token_ids[seq.seq_id] = token_ids
            request.caller.num_queued -= 1
            if processor is not None and processor.stop_text is not None:
                request.texts[seq.seq_id] = finished_text(processor.stop_text)
            elif request.caller.detokenize:
                request.texts[seq.seq_id] = self._tokenizer.decode_later(text_ids(seq, token_ids), seq.sampling_params)
            if len(request.token_ids) == len(request.seqs):
                self._forget(request)
                request.caller.finished.append(request)
                self._metrics.finished(request.seqs[0])

    def abort(self, request: Request) -> list[Sequence]:
        """Forget an unfinished request; return its sequences that are not finished."""
        self._metrics.aborted(1)
        self._forget(request)
        if not request.seqs:
            self.num_not_queued -= request.params.n
        unfinished = [seq for seq in request.seqs if self._requests.pop(seq.seq_id, None) is not None]
        request.caller.num_queued -= len(unfinished)
        for seq in unfinished:
            self._pop_processor(seq)
        return unfinished

    def _pop_processor(self, seq: Sequence) -> TokenProcessor | None:
        self._constrained.pop(seq.seq_id, None)
        return self._processors.pop(seq.seq_id, None)

    def _forget(self, request: Request) -> None:
        del request.caller.unfinished[request.request_id], self.unfinished[str(request.request_id)]

    def clear(self) -> None:
        """Drop all unfinished requests, and tell their callers."""
        self._metrics.aborted(len(self.unfinished))
        for request in self.unfinished.values():
            request.caller.dropped = True
            request.caller.num_queued = 0
            request.caller.unfinished.clear()
        self.num_not_queued = 0
        for known in (self.unfinished, self._requests, self._processors, self._constrained):
            known.clear()


def finished_text(text: str) -> Future[str]:
    future: Future[str] = Future()
    future.set_result(text)
    return future

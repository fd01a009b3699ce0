"""From the tokens of a step to finished requests.

Owns the unfinished requests. A plain sequence is looked at when it finishes. One whose every token the host must see
(stop strings, log-probabilities, grammars) has a ``TokenProcessor``.
"""

import logging
from collections.abc import Iterable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from nanovllm.core import Batch, Sequence, SequenceStatus
from nanovllm.engine.callers import Caller
from nanovllm.engine.metrics import Metrics
from nanovllm.engine.request import Completion, Request
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.engine.token_processor import TokenProcessor, TokenProcessors
from nanovllm.readouts import Readout

logger = logging.getLogger("nanovllm")
NOT_FINITE = "{} of the prompt are NaN or infinite. The weights hold NaN, or overflow in this dtype."


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
        self._requests: dict[int, Request] = {}  # unfinished requests by seq_id
        self._processors: dict[int, TokenProcessor] = {}  # the same for sequences whose every token is examined

    def register(self, request: Request, caller: Caller) -> None:
        """From now on the request is one of the engine's, and may be aborted."""
        request.caller, request.arrived_at = caller, perf_counter()
        self.num_not_queued += request.params.n
        # the caller's second: after an interrupt between them, ``abort`` must find in both what the caller holds
        self.unfinished[str(request.request_id)] = caller.unfinished[request.request_id] = request

    def queued(self, request: Request) -> None:
        """A registered request is queued; its inputs may still load."""
        request.num_unfinished = request.params.n
        request.caller.num_queued += request.params.n
        for seq_id in request.seq_ids:
            self._requests[seq_id] = request

    def begin(self, request: Request) -> list[Sequence]:
        """Take over the new sequences of a queued request; returns the sequences to schedule.

        The others have nothing to compute and are finished at once.
        """
        completions, waiting, done = request.completions, list[Sequence](), list[Sequence]()
        self.num_not_queued -= len(completions)
        completions[0].arrived_at = request.arrived_at
        for seq in completions:
            if seq.processor is not None:
                self._processors[seq.seq_id] = seq.processor
            if seq.finish_reason is None and (seq.is_sampled or seq.readout is not None):
                waiting.append(seq)
            else:
                seq.status, seq.finish_reason = SequenceStatus.FINISHED, seq.finish_reason or "length"
                done.append(seq)
        if done:
            self.finish(done)
        return waiting

    def is_empty(self) -> bool:
        """Whether every request that was queued is finished."""
        return not self._requests

    @property
    def has_token_processors(self) -> bool:
        """Whether some request wants every token looked at."""
        return len(self._processors) > 0

    def update(self, batch: Batch, result: Any) -> list[Sequence]:
        """Process readouts, log-probabilities, stop strings and grammars of a step. Returns the sequences they end."""
        ended = self._read(batch, result) if batch.readouts else []
        return ended + self._process(batch, result) if self._processors else ended

    def _read(self, batch: Batch, result: Any) -> list[Sequence]:
        """Take in readouts; returns the sequences that end because theirs is not finite."""
        ended: list[Sequence] = []
        for message, values in zip(batch.readouts, result.readouts, strict=True):
            for seq_id, of_seq, is_finite in message.results(values):
                request = self._requests.get(seq_id)
                if request is not None and request.readout is not None:
                    request.readout.add_results(of_seq)
                    if not is_finite:
                        ended += self._fail(request, request.readout)
        return ended

    def _process(self, batch: Batch, result: Any) -> list[Sequence]:
        """Give tokens to their processors; returns the sequences that these end."""
        ended: list[Sequence] = []
        for i, seq_id in enumerate(batch.seq_ids.tolist()):
            if (processor := self._processors.get(seq_id)) is not None:
                logprobs = None if result.logprobs is None else result.logprobs[i]
                if processor.update(int(result.token_ids[i]), logprobs):
                    ended.append(processor.seq)
        return ended

    def _fail(self, request: Request, readout: Readout) -> list[Completion]:
        """Mark a request whose prompt has no results; returns the sequences that this ends."""
        readout.error = error = NOT_FINITE.format(readout.subject)
        for seq in request.completions:
            seq.finish_reason, seq.stop_reason = "error", error
        return [seq for seq in request.completions if seq.status is not SequenceStatus.FINISHED]

    def sampling_inputs(self, batch: Batch) -> tuple[Any, Any, list[Sequence]]:
        """The inputs of a batch's sampling that depend on the tokens before it, and the sequences that fail.

        Returns:
            Masks and forced tokens, or None, see ``masks``; a function that calls logits processors, or None; and a
            list of sequences to end once the sampling is launched, which that function extends.
        """
        failed: list[Sequence] = []
        masks = process = None
        if self._processors:
            rows = zip(batch.req_indices.tolist(), batch.seq_ids.tolist(), strict=True)
            found = {req_idx: self._processors[seq_id] for req_idx, seq_id in rows if seq_id in self._processors}
            if constrained := {req_idx: each for req_idx, each in found.items() if each.is_constrained}:
                *masks, failed = self.masks(constrained)
            if any(each.seq.sampling_params.logits_processors for each in found.values()):
                process = partial(self.process_logits, batch, failed)
        return masks, process, failed

    def masks(self, constrained: dict[int, TokenProcessor]
              ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Sequence]]:
        """Compute masks and forced tokens of constrained sequences, given by their request slots.

        Returns:
            Request slots, int32 [n]; their masks, int32 [n, ceil(V / 32)]; slots and the token that each must sample,
            int32 [m, 2]; and the sequences whose grammar fails.
        """
        masked = {req_idx: each for req_idx, each in constrained.items() if each.grammar or each.bad_words}
        forced = [(req_idx, token_id) for req_idx, each in constrained.items() if (token_id := each.forced) is not None]
        bitmask, failed = self._token_processors.masks([*masked.values()])
        return np.array([*masked], np.int32), bitmask, np.array(forced, np.int32).reshape(-1, 2), failed

    def process_logits(self, batch: Batch, failed: list[Sequence], rows: np.ndarray, logits: Any) -> None:
        """Call the logits processors of some of a batch's sequences on their logits, a tensor f32 [n, V], in place.

        Args:
            failed: sequences that end by what one of their functions raises are added here.
            rows: their places in the batch.
        """
        for row, values in zip(rows.tolist(), logits, strict=True):
            processor = self._processors.get(int(batch.seq_ids[row]))
            if processor is None or processor.seq.finish_reason is not None:  # its grammar has failed
                continue
            if not self._token_processors.process_logits(processor, values):
                failed.append(processor.seq)

    def finish(self, seqs: Iterable[Any]) -> None:
        """Take in finished sequences; requests that are complete now go to their callers.

        Lists of ids are made here, while the device works: a million ids take the host 30 ms.
        """
        for seq in seqs:
            request = self._pop(seq.seq_id)
            caller = request.caller
            if seq.finish_reason == "error":
                logger.warning("request %d: %s", request.request_id, seq.stop_reason)
            seq.output_ids = seq.completion_token_ids
            if caller.detokenize:
                seq.text = seq.decode(self._tokenizer)
            request.num_unfinished -= 1
            if request.num_unfinished == 0:
                self._forget(request)
                caller.finished.append(request)
                self._metrics.finished(request.completions[0])

    def abort(self, request: Request) -> list[Sequence]:
        """Forget an unfinished request; return its sequences that are not finished."""
        self._metrics.aborted(1)
        self._forget(request)
        if not request.completions:
            self.num_not_queued -= request.params.n
        unfinished = [seq_id for seq_id in request.seq_ids if seq_id in self._requests]
        for seq_id in unfinished:
            self._pop(seq_id)
        return [seq for seq in request.completions if seq.seq_id in unfinished]

    def _pop(self, seq_id: int) -> Request:
        """Forget a queued sequence; returns its request."""
        self._processors.pop(seq_id, None)
        request = self._requests.pop(seq_id)
        request.caller.num_queued -= 1
        return request

    def _forget(self, request: Request) -> None:
        del request.caller.unfinished[request.request_id], self.unfinished[str(request.request_id)]

    def clear(self) -> list[Request]:
        """Drop all unfinished requests, which are returned, and tell their callers."""
        dropped = list(self.unfinished.values())
        self._metrics.aborted(len(dropped))
        for request in dropped:
            request.caller.drop()
        self.num_not_queued = 0
        for known in (self.unfinished, self._requests, self._processors):
            known.clear()
        return dropped

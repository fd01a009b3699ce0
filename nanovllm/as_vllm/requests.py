"""Requests that have names and report their tokens step by step.

The only file here that uses more of nanovllm's engine than its public methods.
"""

from dataclasses import replace
from typing import Any

from nanovllm.as_vllm.sampling import RequestOutputKind, snapshots
from nanovllm.engine.stream import DeltaStream
from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, RequestOutput


class NamedRequest:
    """A request under the user's name for it, and what was reported of it. ``request_id`` is nanovllm's."""

    def __init__(self, llm: LLM, name: str, prompt: Any, params: Any):
        self.request_id = llm.add_request(prompt, snapshots(params))
        self._request = llm._added.unfinished[self.request_id]
        self._name, self._deltas = name, DeltaStream(self._request)
        self._kind = getattr(params, "output_kind", RequestOutputKind.CUMULATIVE)
        self._so_far = [CompletionOutput(index, "", []) for index in range(len(self._request.seqs))]

    def output(self, is_finished: bool) -> RequestOutput | None:
        """None if there is nothing new, or nothing to report before the end."""
        output: RequestOutput | None
        if self._kind is RequestOutputKind.DELTA:
            output = self._deltas.last() if is_finished else self._deltas.delta()
        elif is_finished:
            output = self._request.output()
        else:
            output = None if self._kind is RequestOutputKind.FINAL_ONLY else self._whole(self._deltas.delta())
        if output is not None:
            output.request_id = self._name
        return output

    def _whole(self, delta: RequestOutput | None) -> RequestOutput | None:
        """All that was reported until now, and the delta."""
        if delta is None:
            return None
        for i, (old, new) in enumerate(zip(self._so_far, delta.outputs, strict=True)):
            logprobs: Any = None if new.logprobs is None else [*(old.logprobs or []), *new.logprobs]  # type: ignore
            self._so_far[i] = replace(
                new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs
            )
        return self._request.output_of([replace(completion) for completion in self._so_far], finished=False)

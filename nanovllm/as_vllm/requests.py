"""Requests that have names and report their tokens step by step.

The only file here that uses more of nanovllm's engine than its public methods.
"""

from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import nanovllm.llm
from nanovllm.as_vllm.sampling import RequestOutputKind, snapshots
from nanovllm.engine.request import Request
from nanovllm.engine.stream import DeltaStream
from nanovllm.outputs import CompletionOutput, RequestOutput


class CoreLLM(nanovllm.llm.LLM):
    """nanovllm's engine, which also tells of requests that are not finished."""

    overlay: TemporaryDirectory | None = None  # its model directory, if config.json is overridden

    def track(self, name: str, prompt: Any, params: Any) -> "Tracked":
        """Queue a prompt."""
        number = self.add_request(prompt, snapshots(params))
        kind = getattr(params, "output_kind", RequestOutputKind.CUMULATIVE)
        return Tracked(name, self._added.unfinished[number], kind)


class Tracked:
    """A request under the user's name for it, and what was reported of it. ``request_id`` is nanovllm's."""

    def __init__(self, name: str, request: Request, kind: RequestOutputKind):
        self.request_id = request.request_id
        self._name, self._request, self._kind, self._deltas = name, request, kind, DeltaStream(request)
        self._so_far = [CompletionOutput(index, "", []) for index in range(len(request.seqs))]

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

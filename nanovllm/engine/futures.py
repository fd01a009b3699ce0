"""Requests whose callers hold a future: ``LLM.submit``.

Owns the futures that are not resolved yet. One is resolved between two steps, when its request's text is there.
"""

import weakref
from concurrent.futures import Future, wait
from time import monotonic
from typing import Any

from nanovllm.engine.request import DROPPED, Caller, Request
from nanovllm.errors import EngineError
from nanovllm.outputs import RequestOutput

POLL_S = 0.01  # while another thread steps the engine


class RequestFuture(Future[RequestOutput]):
    """A request's output to come. It cannot be cancelled, but aborted: ``llm.abort(future.request_id)``.

    ``result`` and ``exception`` step the engine, unless another thread does: then they wait for it.
    """

    def __init__(self, engine: Any, request_id: int):
        super().__init__()
        self.set_running_or_notify_cancel()
        self.request_id = request_id
        self._engine = weakref.ref(engine)  # which holds this future

    def result(self, timeout: float | None = None) -> RequestOutput:
        """The output; raises EngineError if the request was aborted, or dropped by a failed step.

        Raises:
            TimeoutError: it is not there after ``timeout`` seconds.
        """
        self._run(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What ``result`` would raise; None if it would return."""
        self._run(timeout)
        return super().exception(0)

    def _run(self, timeout: float | None) -> None:
        end = float("inf") if timeout is None else monotonic() + timeout
        while not self.done() and monotonic() < end:
            engine = self._engine()
            if engine is None:
                raise EngineError("the engine of this request is gone.")
            if not engine.try_advance():
                wait([self], min(POLL_S, end - monotonic()))


class Submitted(Caller):
    """The requests of ``submit``, and their futures."""

    def __init__(self) -> None:
        super().__init__()
        self._futures: dict[int, RequestFuture] = {}  # by request_id

    def future(self, engine: Any, request: Request) -> RequestFuture:
        future = self._futures[request.request_id] = RequestFuture(engine, request.request_id)
        return future

    def resolve(self, waits_for_text: bool = False) -> None:
        """Resolve the futures of requests that have ended; callbacks may use the engine."""
        while self.finished and (waits_for_text or self.finished[0].has_text):
            request = self.finished.popleft()
            future = self._futures.pop(request.request_id)
            try:
                future.set_result(request.output())
            except Exception as failure:  # of the tokenizer
                future.set_exception(failure)
        if len(self._futures) > len(self.unfinished) + len(self.finished):
            error = EngineError(DROPPED if self.dropped else "this request was aborted.")
            self.dropped = False
            known = {*self.unfinished, *(request.request_id for request in self.finished)}
            for request_id in self._futures.keys() - known:
                self._futures.pop(request_id).set_exception(error)

"""Requests whose callers hold a future: ``LLM.submit``. It is resolved between two steps, when the text is there."""

import weakref
from concurrent.futures import Future, wait
from time import monotonic
from typing import Any

from nanovllm.engine.callers import Caller
from nanovllm.engine.guard import Guard, InUseError, abandon
from nanovllm.engine.request import Request
from nanovllm.engine.stream import DeltaStream
from nanovllm.errors import EngineError
from nanovllm.outputs import RequestOutput

POLL_S = 0.01


class RequestFuture(Future[RequestOutput]):
    """A request's output to come.

    ``result`` and ``exception`` step the engine, unless another thread does: then they wait for it. Nothing else does:
    where ``as_completed``, ``wait`` or asyncio wait, some thread has to step; see ``EngineThread``.
    """

    def __init__(self, engine: Any, request: Request):
        super().__init__()
        self.request_id = request.request_id
        self._request = request
        self._deltas: DeltaStream | None = None
        self._engine = weakref.ref(engine)  # weak, because the engine holds this future

    def result(self, timeout: float | None = None) -> RequestOutput:
        """The output; raises EngineError if the request was aborted, or dropped by a failed step.

        Raises:
            TimeoutError: it is not there after ``timeout`` seconds.
        """
        self._run(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The exception that ``result`` would raise; None if it would return."""
        self._run(timeout)
        return super().exception(0)

    def cancel(self) -> bool:
        """Abort the request, whose ``result`` raises CancelledError then; False if it is finished.

        Any thread may call it; a step that another thread takes goes on, and still computes the request.
        """
        engine = self._engine()
        if engine is None or not engine.is_running:
            return super().cancel()
        engine.token_processors.require_outside()
        caller: Any = self._request.caller
        if self._request.num_unfinished == 0 or caller.futures.pop(self.request_id, None) is None:
            return self.cancelled()
        super().cancel()
        self.set_running_or_notify_cancel()
        abandon(engine, [self._request])
        return True

    def running(self) -> bool:
        """Whether it is not done; a queued request can be cancelled nevertheless."""
        return not self.done()

    def delta(self, cumulative: bool = False) -> RequestOutput | None:
        """The output since the last call, as from ``stream``; None if nothing is new. It takes no step.

        To be asked after any step, until an output is ``finished``. ``cumulative``: the output from the beginning.
        """
        if not self._request.completions:  # its turn has not come
            return None
        self._deltas = self._deltas or DeltaStream(self._request)
        output = self._deltas.delta(cumulative)
        caller: Any = self._request.caller
        if output is not None and output.finished and not self.done():
            caller.finished.remove(self._request)
            caller.resolve(self._request)
        return output

    def _run(self, timeout: float | None) -> None:
        end = float("inf") if timeout is None else monotonic() + timeout
        while not self.done() and monotonic() < end:
            engine = self._engine()
            if engine is None:
                raise EngineError("the engine of this request is gone.")
            try:
                with Guard(engine):
                    engine.advance()
            except InUseError:  # another thread is stepping the engine
                wait([self], min(POLL_S, end - monotonic()))


class Submitted(Caller):
    """All uses of ``LLM.submit``; futures are resolved between two steps, so their callbacks may use the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.futures: dict[int, RequestFuture] = {}  # by request id; whoever removes a future resolves it

    def between_steps(self, engine: Any, is_idle: bool) -> None:
        """Resolve the futures of finished requests whose text is there, in their order; when idle wait for the text."""
        while self.finished and (is_idle or self.finished[0].has_text):
            self.resolve(self.finished.popleft())

    def resolve(self, request: Request) -> None:
        """Give a finished request's future its output."""
        future = self.futures.pop(request.request_id, None)
        if future is None:  # cancelled
            return
        try:
            future.set_result(request.output())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as failure:  # a panic of the tokenizer is no Exception
            future.set_exception(failure)

    def refuse(self, request: Request, reason: str) -> None:
        if (future := self.futures.pop(request.request_id, None)) is not None:
            future.set_exception(EngineError(reason))

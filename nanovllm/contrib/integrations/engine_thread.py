"""An engine on a thread of its own, for callers on other threads: an asyncio loop, a pool of workers.

Owns the thread, on which calls of the engine and its steps take turns, and the futures of submitted requests.
"""

import os
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import get_ident
from typing import Any

from nanovllm.errors import EngineError, OutOfMemoryError, as_request_error
from nanovllm.llm import LLM, Prompt
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

ENDED = "the engine was shut down."


class EngineThread:
    """Starts an engine; then ``submit`` and ``call`` may be called from any thread, as often as one likes.

    If a rank dies or the device fails, the process exits with status 1, and its supervisor should start another.

    Args:
        model, **options: of ``LLM``, whose errors it raises.
        make: makes the engine from these; its ``step``, ``is_finished`` and ``exit`` are used as those of ``LLM``.

    Attributes:
        llm: the engine.
    """

    def __init__(self, model: str | None = None, *, make: Callable[..., Any] = LLM, **options: Any):
        # Runs calls in their order. A step is a call that queues the next step, so the calls queued before run between.
        self._thread = ThreadPoolExecutor(1, "nanovllm-engine")
        # for the engine's thread alone:
        self._is_stepping = False  # a step is queued
        self._unfinished: dict[Future, Future] = {}  # the engine's -> the caller's
        self._done: list[Future] = []  # the engine's
        self._ident = self._thread.submit(get_ident).result()
        self.llm = self._thread.submit(partial(make, model, **options)).result()

    def call(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Future:
        """Call a function on the engine's thread, between two steps.

        Requests that it adds are run. After ``exit`` the future has an EngineError.
        """
        called = self._queue(self._call, function, *args, **keywords)
        if called is None:
            called = Future()
            called.set_exception(EngineError(ENDED))
        return called

    def submit(self, prompt: Prompt, params: SamplingParams) -> "Future[RequestOutput]":
        """The output when it is finished; or RequestError, if the request can never be served.

        The future's ``cancel()`` drops the request.
        """
        future: Future[RequestOutput] = Future()
        self.call(self._submit, prompt, params, future).add_done_callback(partial(pass_on_error, future))
        return future

    def exit(self) -> None:
        """End the thread and the engine after the running step; unfinished requests end with an EngineError.

        It may be called again. The end of the process calls it, too.
        """
        ended = self._queue(self._end)
        if get_ident() != self._ident:
            if ended is not None:
                ended.result()
            self._thread.shutdown()

    def _queue(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Future | None:
        try:
            return self._thread.submit(function, *args, **keywords)
        except RuntimeError:  # after ``exit``, and while the interpreter ends
            return None

    # ---------------------------------------------------------------- on the engine's thread

    def _call(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        finally:
            self._step_later()

    def _submit(self, prompt: Prompt, params: SamplingParams, future: Future) -> None:
        try:
            submitted = self.llm.submit(prompt, params)
        except BaseException as error:
            refused = as_request_error(error)
            raise refused from refused.__cause__
        self._unfinished[submitted] = future
        submitted.add_done_callback(self._done.append)
        future.add_done_callback(partial(cancel_too, submitted))

    def _step_later(self) -> None:
        if not self._is_stepping and (self._unfinished or not self.llm.is_finished()):
            self._is_stepping = self._queue(self._step) is not None
            if not self._is_stepping:
                self._end()

    def _step(self) -> None:
        self._is_stepping = False
        try:
            self.llm.step()
        except BaseException as error:  # otherwise nobody would report it, and the callers would wait for ever
            is_lost = isinstance(error, RuntimeError) and not isinstance(error, (EngineError, OutOfMemoryError))
            if is_lost and self._queue(int) is not None:  # else the end of the interpreter made the step fail
                traceback.print_exc()
                os._exit(1)
            self._fail(error)
            return
        while self._done:
            submitted = self._done.pop()
            if (future := self._unfinished.pop(submitted, None)) is not None:
                resolve(future, None if submitted.cancelled() else submitted.exception() or submitted.result())
        self._step_later()

    def _fail(self, error: BaseException) -> None:
        for future in self._unfinished.values():
            resolve(future, error)
        self._unfinished.clear()

    def _end(self) -> None:
        self._thread.shutdown(wait=False)
        self._fail(EngineError(ENDED))
        self.llm.exit()


def pass_on_error(future: Future, called: Future) -> None:
    if (error := called.exception()) is not None:
        resolve(future, error)


def cancel_too(submitted: Future, future: Future) -> None:
    if future.cancelled():
        submitted.cancel()


def resolve(future: Future, result: Any) -> None:
    """Give a caller's future its output or exception, once, unless it is cancelled."""
    if future.set_running_or_notify_cancel():
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

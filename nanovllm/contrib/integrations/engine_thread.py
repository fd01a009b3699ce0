"""An engine on a thread of its own, for callers on other threads: an asyncio loop, a pool of workers.

Owns the thread and the hand-over of requests and outputs. An engine takes calls from one thread at a time.
"""

import os
import threading
import traceback
import weakref
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from nanovllm.errors import EngineError, NanoVLLMError, OutOfMemoryError, as_request_error
from nanovllm.llm import LLM, Prompt
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

ENDED = "the engine was shut down."


class EngineThread:
    """Starts an engine; then ``submit`` may be called from any thread, as often as one likes.

    A rank that dies, or a failure of the device, ends the process with status 1: who supervises it shall start another.

    Args:
        model, **options: of ``LLM``, whose errors it raises.
    """

    def __init__(self, model: str | None = None, **options: Any):
        self._inbox: SimpleQueue = SimpleQueue()
        self._has_ended = False
        started: Future[LLM] = Future()
        arguments = model, options, started
        self._thread = threading.Thread(target=self._main, args=arguments, daemon=True, name="nanovllm-engine")
        self._thread.start()
        self.llm = started.result()
        # before the interpreter closes executors, and ends daemon threads, which aborts the process within torch
        threading._register_atexit(exit_if_alive, weakref.ref(self))  # type: ignore[attr-defined]

    def submit(self, prompt: Prompt, params: SamplingParams) -> "Future[RequestOutput]":
        """The output when it is finished; or RequestError, if the request can never be served.

        The future's ``cancel()`` drops the request.
        """
        future: Future[RequestOutput] = Future()
        self._inbox.put((prompt, params, future))
        if self._has_ended:
            self._refuse_all()
        return future

    def exit(self) -> None:
        """End the thread and the engine after the running step; unfinished requests end with an EngineError.

        It may be called again. The end of the process calls it, too.
        """
        self._inbox.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _main(self, model: str | None, options: dict[str, Any], started: "Future[LLM]") -> None:
        try:
            llm = LLM(model, **options)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(llm)
        waiting: dict[Future, Future] = {}  # the engine's -> the caller's
        done: list[Future] = []  # of the engine's
        while True:
            while not waiting or not self._inbox.empty():  # with nothing to do, it sleeps here
                if (item := self._inbox.get()) is None:
                    self._has_ended = True
                    for future in waiting.values():
                        resolve(future, EngineError(ENDED))
                    self._refuse_all()
                    llm.exit()
                    return
                prompt, params, future = item
                try:
                    submitted = llm.submit(prompt, params)
                except BaseException as error:
                    resolve(future, error if isinstance(error, NanoVLLMError) else as_request_error(error))
                    continue
                submitted.add_done_callback(done.append)
                waiting[submitted] = future
                future.add_done_callback(partial(cancel_too, submitted))
            try:
                llm.step()
            except BaseException as error:  # nobody else would say it, and the callers would wait for ever
                if isinstance(error, RuntimeError) and not isinstance(error, (EngineError, OutOfMemoryError)):
                    traceback.print_exc()
                    os._exit(1)
                for future in waiting.values():
                    resolve(future, error)
                waiting.clear()
                done.clear()
            while done:
                finished = done.pop()
                if (of_caller := waiting.pop(finished, None)) is not None:
                    resolve(of_caller, None if finished.cancelled() else finished.exception() or finished.result())

    def _refuse_all(self) -> None:
        with suppress(Empty):
            while True:
                if (item := self._inbox.get_nowait()) is not None:
                    resolve(item[2], EngineError(ENDED))


def exit_if_alive(reference: "weakref.ref[EngineThread]") -> None:
    if (engine := reference()) is not None:
        engine.exit()


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

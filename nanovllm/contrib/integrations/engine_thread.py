"""An engine on a thread of its own, for callers on other threads: an asyncio loop, a pool of workers.

Owns the thread and the hand-over of requests and outputs. An engine takes calls from one thread at a time.
"""

import os
import traceback
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

from nanovllm.errors import EngineError, NanoVLLMError, OutOfMemoryError, as_request_error
from nanovllm.llm import LLM, Prompt
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams


class EngineThread:
    """Starts an engine; then ``submit`` may be called from any thread, as often as one likes.

    A rank that dies, or a failure of the device, ends the process with status 1: who supervises it shall start another.

    Args:
        model, **options: of ``LLM``, whose errors it raises.
    """

    def __init__(self, model: str | None = None, **options: Any):
        self._inbox: SimpleQueue = SimpleQueue()
        started: Future[LLM] = Future()
        Thread(target=self._main, args=(model, options, started), daemon=True, name="nanovllm-engine").start()
        self.llm = started.result()

    def submit(self, prompt: Prompt, params: SamplingParams) -> "Future[RequestOutput]":
        """The output when it is finished; or RequestError, if the request can never be served."""
        future: Future[RequestOutput] = Future()
        self._inbox.put((prompt, params, future))
        return future

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
                prompt, params, future = self._inbox.get()
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    submitted = llm.submit(prompt, params)
                    submitted.add_done_callback(done.append)
                    waiting[submitted] = future
                except BaseException as error:
                    future.set_exception(error if isinstance(error, NanoVLLMError) else as_request_error(error))
            try:
                llm.step()
            except BaseException as error:  # nobody else would say it, and the callers would wait for ever
                if isinstance(error, RuntimeError) and not isinstance(error, (EngineError, OutOfMemoryError)):
                    traceback.print_exc()
                    os._exit(1)
                for future in waiting.values():
                    future.set_exception(error)
                waiting.clear()
                done.clear()
            while done:
                future = waiting.pop(finished := done.pop())
                if (failure := finished.exception()) is None:
                    future.set_result(finished.result())
                else:
                    future.set_exception(failure)

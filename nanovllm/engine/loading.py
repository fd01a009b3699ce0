"""Queued requests with inputs besides tokens. They reach the scheduler once these are loaded, in their order.

Owns how many inputs load ahead of the scheduler. Knows neither callers nor the kinds of inputs.
"""

import os
from collections import deque
from collections.abc import Callable
from time import sleep
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.request import Request

NUM_THREADS = min(16, os.cpu_count() or 1)  # threads that load
MAX_AHEAD = 2 * NUM_THREADS  # inputs that load, or wait in the queue once they are loaded
POLL_S = 0.02  # interval at which an idle engine polls for loaded inputs


class LoadingQueue:
    """Requests with such inputs, first come, first served.

    Args:
        has_room: whether memory has room for further inputs.
    """

    def __init__(self, has_room: Callable[[], bool]):
        self._has_room = has_room
        self._waiting: deque[Request] = deque()  # requests whose inputs do not load yet
        self._loading: deque[Request] = deque()

    def add(self, request: "Request") -> None:
        self._waiting.append(request)
        self._begin()

    def between_steps(self, engine: "LLMEngine", is_idle: bool) -> None:
        """Schedule the requests whose inputs are loaded. An idle engine waits for them, ``POLL_S`` at most."""
        self._begin()
        while self._loading:
            request = self._loading[0]
            if request.is_unfinished:  # else it was aborted or dropped
                if request.loading is not None and not request.loading.is_ready(POLL_S if is_idle else 0.0):
                    return
                engine.schedule(request)
                is_idle = False
            self._loading.popleft()
            self._begin()
        if is_idle and engine.scheduler.waiting:  # for inputs that load again, after a preemption
            sleep(POLL_S / 10)

    def _begin(self) -> None:
        """Let inputs load as far as there is room; those of the first request always load."""
        while self._waiting and (not self._loading or (self._num_ahead < MAX_AHEAD and self._has_room())):
            request = self._waiting.popleft()
            if request.loading is not None:
                request.loading.begin()
            self._loading.append(request)

    @property
    def _num_ahead(self) -> int:
        return sum(request.loading.num_inputs for request in self._loading if request.loading is not None)

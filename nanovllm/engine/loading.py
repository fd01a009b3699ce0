"""The seam for prompts with inputs besides tokens: their requests reach the scheduler once the inputs are loaded.

Owns how many inputs load ahead of the scheduler. Knows neither callers nor the kinds of inputs, each of which has an
``Attachments`` (listed in ``variants.py``) and a message (``nanovllm.messages``).
"""

import os
from collections import deque
from collections.abc import Callable
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.messages import Attachment

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.request import Request

NUM_THREADS = min(16, os.cpu_count() or 1)  # threads that load
MAX_AHEAD = 2 * NUM_THREADS  # inputs that load, or wait in the queue once they are loaded
POLL_S = 0.02  # interval at which an idle engine polls for loaded inputs


class Loading:
    """Inputs of one prompt that load on threads.

    Attributes:
        prompt_ids: integers [T], with a placeholder for each input.
        num_inputs: inputs to load.
    """

    prompt_ids: np.ndarray
    num_inputs: int

    def begin(self) -> None:
        """Start to load; may be called again."""
        raise NotImplementedError

    def is_ready(self, timeout_s: float) -> bool:
        """Wait for at most this time; returns whether ``attachment`` would not wait."""
        raise NotImplementedError

    def attachment(self) -> Attachment:
        """The loaded inputs; waits for them. Raises RequestError for one that cannot be read."""
        raise NotImplementedError


class Attachments:
    """Encodes prompts that hold more than tokens, for one engine. The defaults take no such prompt.

    Attributes:
        placeholder: text of an input in a conversation, for chat templates that take strings.
    """

    placeholder = ""

    def takes(self, prompt: Any) -> bool:
        """Whether a prompt may hold other inputs; ``encode`` then takes it."""
        return False

    def encode(self, prompt: Any) -> tuple[str | None, Any]:
        """A prompt's text, and its ``Loading`` or, if it holds no other inputs, its token ids; raises RequestError."""
        raise NotImplementedError

    def loaded(self, prompt: Any) -> Any:
        """A prompt for several uses, with its inputs loaded; raises RequestError for one that cannot be read."""
        return prompt

    def split(self, conversation: Any) -> tuple[Any, dict[str, Any]]:
        """A conversation for the chat template, and the keys of a prompt that hold its other inputs."""
        return conversation, {}

    def placed(self, text: str) -> str:
        """The text of a conversation with other inputs, with the tokens that the model expects around each."""
        return text

    def has_room(self) -> bool:
        """Whether memory has room for further inputs."""
        return True


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
        waiting = engine.scheduler.waiting
        if waiting and waiting[0].attachment is not None and waiting[0].attachment.failure is not None:
            waiting[0].finish_reason, waiting[0].stop_reason = "error", waiting[0].attachment.failure
            engine.end([waiting[0]])
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
        """Let inputs load as far as there is room; the first request always loads its inputs."""
        while self._waiting and (not self._loading or (self._num_ahead < MAX_AHEAD and self._has_room())):
            request = self._waiting.popleft()
            if request.loading is not None:
                request.loading.begin()
            self._loading.append(request)

    @property
    def _num_ahead(self) -> int:
        return sum(request.loading.num_inputs for request in self._loading if request.loading is not None)

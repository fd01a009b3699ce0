"""Requests whose images are loading, in their order.

Owns the window: how many images load ahead of the scheduler. Knows neither callers nor the engine's loop.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.images.loading import MAX_PIXEL_BYTES, NUM_THREADS, ImageLoader
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.request import Request
from nanovllm.engine.text.prompts import as_token_ids
from nanovllm.errors import as_request_error

AHEAD = 2 * NUM_THREADS  # images being loaded, and requests waiting for theirs


@dataclass
class Draft:
    """A request whose images are not loaded yet; its form is checked.

    Attributes:
        request: with the placeholders of the user's prompt.
        sources, options: of ``ImageLoader.load``.
    """

    request: Request
    sources: list[Any]
    options: dict[str, Any]
    images: list[Future] = field(default_factory=list)

    def finish(self, inputs: InputProcessor, loader: ImageLoader) -> Request:
        """The request with its images, which are there; one that fails ends with the reason."""
        request = self.request
        try:
            given = loader.finish(request.prompt_ids, self.images)
            ids, params = inputs.checks.checked(as_token_ids(given), request.params)
            made = inputs.request(request.prompt, ids, params, request.index, given=given)
            request.prompt_ids, request.params, request.attachment = ids, params, given
            request.readout = made.readout
            inputs.make_completions(request)  # made here, because a failure in ``_queue`` would fail every request
        except BaseException as error:
            request.failure, request.readout, request.attachment = ("error", str(as_request_error(error))), None, None
        return request


class Turns:
    """Requests and drafts in their order; the images of the first ones are loading.

    Args:
        more: the next request or draft; None: there is none now.
    """

    def __init__(self, inputs: InputProcessor, loader: ImageLoader, more: Callable[[], Request | Draft | None]):
        self._inputs, self._loader, self._more = inputs, loader, more
        self._loading: deque[Request | Draft] = deque()

    def __bool__(self) -> bool:
        """Whether one is left."""
        self.fill()
        return len(self._loading) > 0

    def take(self, timeout_s: float = 0.0) -> Request | None:
        """The next request; None if there is none, or its images are not there in time."""
        self.fill()
        if not self._loading:
            return None
        first = self._loading[0]
        if isinstance(first, Draft):
            if wait(first.images, timeout_s).not_done:
                return None
            first = first.finish(self._inputs, self._loader)
        self._loading.popleft()
        return first

    def fill(self) -> None:
        """Begin to load images, as far as there is room."""
        while not self._loading or (self._num_ahead < AHEAD and self._loader.num_bytes < MAX_PIXEL_BYTES // 2):
            if (draft := self._more()) is None:
                return
            if isinstance(draft, Draft):
                draft.images = self._loader.load(draft.sources, draft.options)
            self._loading.append(draft)

    @property
    def _num_ahead(self) -> int:
        return sum(max(1, len(each.images)) if isinstance(each, Draft) else 1 for each in self._loading)

"""Prompts with images, which load on threads, a window ahead of the scheduler."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListLike
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.callers import Caller, collect
from nanovllm.engine.futures import RequestFuture
from nanovllm.engine.guard import Guard
from nanovllm.engine.images.factory import Refusal
from nanovllm.engine.images.messages import image_types, take_images
from nanovllm.engine.input_processor import Params
from nanovllm.engine.request import Request
from nanovllm.engine.text.chat_templates import NOT_TEXT
from nanovllm.engine.text.prompts import Prompt, as_prompts
from nanovllm.errors import RequestError
from nanovllm.messages import CANNOT_CUT
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.verbs.chat import Chat, Conversation
from nanovllm.verbs.streaming import Streaming

if TYPE_CHECKING:
    from nanovllm.engine.images.loading import ImageLoader
    from nanovllm.engine.images.turns import Draft

POLL_S = 0.02  # interval at which an idle engine polls for loaded images


class ImageVerbs(Chat, Streaming):
    """Takes prompts with images."""

    def generate(self, prompts: Prompt | ListLike[Prompt], sampling_params: Params = None,
                 use_tqdm: bool | Callable = True) -> list[RequestOutput]:
        """Complete one prompt or many.

        Args:
            prompts: a string, a list of token ids, or ``{"prompt": ...}`` / ``{"prompt_token_ids": ...}``; or a list.
                With images: ``{"prompt": ..., "multi_modal_data": {"image": image}}``, or a list of images, and a
                placeholder for each in the text. An image is a PIL image, a numpy array uint8 [H, W, 3], bytes, a
                data URL, or a path or URL that an option of ``LLM`` allows.
            sampling_params: one for all, or one for each prompt. Default ``get_default_sampling_params()``.
            use_tqdm: show a progress bar; or a function that makes one, called like ``tqdm``.

        Returns:
            One ``RequestOutput`` for each prompt, in their order. Where an image cannot be read, its ``finish_reason``
            is "error" and its ``stop_reason`` says why.

        Raises:
            RequestError: a prompt can never be served, or the counts differ; nothing was computed.
        """
        prompts = as_prompts(prompts)
        if self._loader is None or not any(map(self._loader.takes, prompts)):
            # an iterator, because a list of integers would be taken for one prompt
            return super().generate(iter(prompts), sampling_params, use_tqdm)  # type: ignore[arg-type]
        with Guard(self):
            self._require_ready()
            params = self.get_default_sampling_params() if sampling_params is None else sampling_params
            drafts: deque[Any] = deque()
            for i, given in enumerate(self._inputs.params_of(len(prompts), params)):
                try:
                    drafts.append(self._begin(prompts[i], self._inputs.checks.copy_of(given), i))
                except RequestError as error:
                    raise RequestError(f"prompt {i}: {error}" if len(prompts) > 1 else str(error)) from None
            in_turn = self._in_turn(drafts.popleft() for _ in range(len(drafts)))
            return collect(self, [], Request.output, use_tqdm, in_turn, len(prompts))

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestFuture:
        """Queue one prompt; see ``Streaming.submit``. It waits for no image: one that cannot be read makes an output
        whose ``finish_reason`` is "error".
        """
        if self._loader is None or not self._loader.takes(prompt):
            return super().submit(prompt, sampling_params)
        with Guard(self):
            self._require_ready()
            params = self.get_default_sampling_params() if sampling_params is None else sampling_params
            draft = self._begin(prompt, self._inputs.checks.copy_of(params), 0)
            request = draft.request
            request.num_unfinished = request.params.n
            self._register([request], self._submitted)
            future = self._submitted.futures[request.request_id] = RequestFuture(self, request)
            self._feeder.drafts.append(draft)
            self._feeder.turns.fill()
        return future

    def is_finished(self) -> bool:
        """Whether every queued request is reported, finished or dropped, and every future resolved."""
        return super().is_finished() and not (self._loader is not None and self._feeder.turns)

    def split_parts(self, conversation: Conversation) -> tuple[Conversation, dict[str, Any]]:
        """A conversation for the chat template, and the keys of a prompt that hold its images."""
        if isinstance(refusal := self._inputs.attachments, Refusal):
            for kind in image_types(conversation):
                raise RequestError(f"{NOT_TEXT.format(kind=repr(kind))} Note that {refusal}")
            return conversation, {}
        conversation, images = take_images(list(conversation))
        return conversation, {"multi_modal_data": {"image": images}} if images else {}

    def load_parts(self, prompt: Prompt) -> Prompt:
        """A prompt that is to be used several times, with its images loaded; raises RequestError."""
        if self._loader is None or not self._loader.takes(prompt):
            return prompt
        text, ids, given = self._loader.begin(prompt)
        images = self._loader.load(*given)
        self._loader.finish(ids, images)
        loaded = {"multi_modal_data": {"image": [image.result() for image in images]}}
        return {"prompt": text, "prompt_token_ids": ids, **loaded}

    @property
    def placeholder(self) -> str:
        return "" if self._loader is None else self._loader.vision.family.text

    def place_parts(self, text: str, others: dict[str, Any]) -> str:
        return self._loader.vision.placed(text) if others and self._loader is not None else text

    # ---------------------------------------------------------------- a window of images

    @property
    def _loader(self) -> "ImageLoader | None":
        return None if isinstance(self._inputs.attachments, Refusal) else self._inputs.attachments

    def _begin(self, prompt: Prompt, params: SamplingParams, index: int) -> Any:
        """A draft of a prompt with images, or else the request. Checks everything that needs no open image."""
        if self._loader is None or not self._loader.takes(prompt):
            return super()._begin(prompt, params, index)
        from nanovllm.engine.images.turns import Draft

        text, ids, given = self._loader.begin(prompt)
        self._inputs.checks.check_ids("token id", ids)
        self._check_length(ids, params)
        return Draft(self._inputs.request(text, ids, params, index), *given)

    def _check_length(self, ids: np.ndarray, params: SamplingParams) -> None:
        """Refuse a prompt that is too long already with one token for each image."""
        counted = params.snapshot()
        if params.max_tokens:  # cut here, because ``checked`` warns of it with the number of tokens
            counted.max_tokens = max(1, min(params.max_tokens, self.config.max_model_len - len(ids)))
        if len(self._inputs.checks.checked(ids, counted)[0]) < len(ids):
            raise RequestError(CANNOT_CUT)

    def _in_turn(self, requests: Iterable[Any]) -> Iterator[Any]:
        """Yield the requests as their images load; None if the next one's are not loaded and the engine has work."""
        if self._loader is None:
            yield from requests
            return
        from nanovllm.engine.images.turns import Turns

        iterator = iter(requests)
        turns, has_work = Turns(self._inputs, self._loader, lambda: next(iterator, None)), False
        while turns:
            request = turns.take(0.0 if has_work or not self.scheduler.is_finished() else POLL_S)
            has_work = request is not None
            yield request

    @cached_property
    def _feeder(self) -> "Feeder":
        self._callers.append(feeder := Feeder(self))
        return feeder


class Feeder(Caller):
    """Queues requests of ``submit`` between two steps, once their images are loaded; has no results of its own."""

    def __init__(self, engine: ImageVerbs):
        from nanovllm.engine.images.turns import Turns

        super().__init__()
        self._engine = weakref.ref(engine)  # the engine holds this feeder
        self.drafts: deque[Draft] = deque()
        loader: Any = engine._loader
        self.turns = Turns(engine._inputs, loader, lambda: self.drafts.popleft() if self.drafts else None)

    def between_steps(self, is_idle: bool) -> None:
        engine: Any = self._engine()
        while (request := self.turns.take(POLL_S if is_idle else 0.0)) is not None:
            if request.request_id in engine._submitted.unfinished:  # else it was aborted
                engine._queue([request], engine._submitted)
                is_idle = False

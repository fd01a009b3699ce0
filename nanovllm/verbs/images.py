"""``LLM.generate`` and ``chat`` with images: they are loaded on threads, a window ahead of the scheduler."""

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from typing import Any

from nanovllm.engine.callers import collect
from nanovllm.engine.guard import Guard
from nanovllm.engine.images.loading import MAX_PIXEL_BYTES, NUM_THREADS, ImageLoader
from nanovllm.engine.images.messages import take_images
from nanovllm.engine.input_processor import InputProcessor, Params
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.engine.text.prompts import Prompt, as_prompts, as_token_ids
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.verbs.chat import Conversation

AHEAD = 2 * NUM_THREADS  # images that are being loaded


class ImageVerbs(LLMEngine):
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
            use_tqdm: show a progress bar; or what makes one, called like ``tqdm``.

        Returns:
            One ``RequestOutput`` for each prompt, in their order. Where an image cannot be read, its ``finish_reason``
            is "error" and its ``stop_reason`` says why.

        Raises:
            RequestError: a prompt can never be served, or the counts differ; nothing was computed.
        """
        prompts, loader = as_prompts(prompts), self._inputs.attachments
        if not isinstance(loader, ImageLoader) or not any(map(loader.takes, prompts)):
            return super().generate(prompts, sampling_params, use_tqdm)
        with Guard(self):
            self._require_ready()
            params = self.get_default_sampling_params() if sampling_params is None else sampling_params
            drafts = drafts_of(self._inputs, loader, prompts, params)
            requests = in_turn(self._inputs, loader, drafts, self.scheduler.is_finished)
            return collect(self, [], Request.output, use_tqdm, requests, len(prompts))

    def split_parts(self, conversation: Conversation) -> tuple[Conversation, dict[str, Any]]:
        """A conversation for the chat template, and the keys of a prompt that hold its images."""
        if self._inputs.attachments is None:
            return conversation, {}
        conversation, images = take_images(list(conversation))
        return conversation, {"multi_modal_data": {"image": images}} if images else {}

    def place_parts(self, text: str, others: dict[str, Any]) -> str:
        loader = self._inputs.attachments
        return loader.vision.placed(text) if others and isinstance(loader, ImageLoader) else text


Draft = tuple[str | None, Any, Any, SamplingParams]  # of a request: text, token ids, sources of its images, parameters


def drafts_of(inputs: InputProcessor, loader: ImageLoader, prompts: ListLike[Any], params: Params) -> deque[Draft]:
    """Check all of a call that needs no image to be opened; raises RequestError."""
    drafts: deque[Draft] = deque()
    for i, (prompt, given) in enumerate(zip(prompts, inputs.params_of(len(prompts), params), strict=True)):
        try:
            params = inputs.checks.copy_of(given)
            if loader.takes(prompt):
                drafts.append((*loader.begin(prompt, processes=False), params))
            else:
                ((text, ids),) = inputs.encode([prompt])
                ids, params = inputs.checks.checked(as_token_ids(ids), params)
                inputs.checks.check_ids("token id", ids)
                drafts.append((text, ids, None, params))
        except RequestError as error:
            raise RequestError(f"prompt {i}: {error}" if len(prompts) > 1 else str(error)) from None
    return drafts


def in_turn(inputs: InputProcessor, loader: ImageLoader, drafts: deque[Draft],
            is_idle: Callable[[], bool]) -> Iterator[Request | None]:
    """The requests, as their images are there; None while the next one's are not, and the engine has work."""
    loading: deque[tuple[Draft, list]] = deque()
    index, num_given = 0, 0
    while drafts or loading:
        while drafts and (not loading or (sum(len(images) for _, images in loading) < AHEAD
                                          and loader.num_bytes < MAX_PIXEL_BYTES // 2)):  # fmt: skip
            draft = drafts.popleft()
            loading.append((draft, [] if draft[2] is None else loader.load(*draft[2])))
        (text, ids, sources, params), images = loading[0]
        if not all(image.done() for image in images) and (num_given or not is_idle()):
            num_given = 0
            yield None
            continue
        loading.popleft()
        try:
            given = ids if sources is None else loader.finish(ids, images)
            if sources is not None:
                ids, params = inputs.checks.checked(as_token_ids(given), params)
                inputs.checks.check_ids("token id", ids)
            request = inputs.request(text, ids, params, index, given=given)
        except RequestError as error:
            request = inputs.request(text, ids, params, index)
            request.failure, request.readout = ("error", str(error)), None
        index, num_given = index + 1, num_given + 1
        yield request

"""Whether an engine takes images, and why not. What loads them is imported by an engine that does."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union

from nanovllm.config import Config
from nanovllm.engine.images.messages import image_types
from nanovllm.engine.loading import Attachments
from nanovllm.engine.text.chat_templates import NOT_TEXT, is_empty
from nanovllm.engine.text.prompts import split_prompt
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.errors import CheckpointError, RequestError
from nanovllm.models.vision import VisionConfig

if TYPE_CHECKING:
    from nanovllm.engine.images.loading import ImageLoader

KEYS = ("multi_modal_data", "mm_processor_kwargs")
# Processor options for videos, and the choice among processors with equal results: neither changes an image.
NEUTRAL = ("do_sample_frames", "fps", "num_frames", "min_frames", "max_frames", "total_pixels", "video_fps",
           "video_metadata", "video_start", "video_end", "return_metadata", "videos_kwargs", "use_fast")  # fmt: skip


def has_keys(prompt: Any) -> bool:
    """Whether a prompt may have images: most have none, and this is asked of each."""
    return isinstance(prompt, dict) and ("multi_modal_data" in prompt or "mm_processor_kwargs" in prompt)


def data_of(data: Any) -> dict[str, Any]:
    """The ``multi_modal_data`` of a prompt by modality, without null or empty entries."""
    if not isinstance(data, (Mapping, type(None))):
        raise RequestError(f'multi_modal_data must be a dictionary such as {{"image": ...}}, not {data!r:.100}.')
    return {modality: given for modality, given in (data or {}).items() if not is_empty(given)}


def options_of(kwargs: Any) -> dict[str, Any]:
    """``mm_processor_kwargs`` without options that are null or change no image."""
    if not isinstance(kwargs, (Mapping, type(None))):
        raise RequestError(f"mm_processor_kwargs must be a dictionary, not {kwargs!r:.100}.")
    return {name: value for name, value in (kwargs or {}).items() if value is not None and name not in NEUTRAL}


class Refusal(Attachments):
    """Refuses prompts with images."""

    def __init__(self, reason: str):
        self._reason = reason

    def __str__(self) -> str:
        return f"this engine takes no images: {self._reason}."

    def takes(self, prompt: Any) -> bool:
        return has_keys(prompt)

    def split(self, conversation: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        for kind in image_types(conversation):
            raise RequestError(f"{NOT_TEXT.format(kind=repr(kind))} Note that {self}")
        return conversation, {}

    def encode(self, prompt: Mapping[str, Any]) -> tuple[str | None, Any]:
        given = [key for key, read in zip(KEYS, (data_of, options_of), strict=True) if read(prompt.get(key))]
        if given:
            keys = " and ".join(map(repr, given))
            raise RequestError(f"{self} So a prompt dictionary cannot have {keys}: text only.")
        return split_prompt({key: prompt[key] for key in prompt if key not in KEYS})


def make_images(config: Config, tokenizer: AsyncTokenizer) -> Union["ImageLoader", Refusal]:
    if config.language_model_only:
        return Refusal("it was made with language_model_only=True")
    vision = VisionConfig.of(config)
    if vision is None:
        return Refusal("this model has no vision tower")
    if missing := vision.missing():
        return Refusal(f"they need {missing}; pip install '.[vision]' in the checkout")
    if vision.num_whole > config.max_num_batched_tokens:
        return Refusal(
            f"one has {vision.num_whole} tokens, which attend each other both ways, and a launch takes "
            f"{config.max_num_batched_tokens}; raise max_num_batched_tokens"
        )
    from nanovllm.engine.images.loading import ImageLoader

    try:
        return ImageLoader(vision, config, tokenizer)
    except CheckpointError as error:  # the image processor is broken, but text does not need it
        return Refusal(str(error).rstrip("."))

"""Whether an engine takes images, and why not. What loads them is imported by an engine that does."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Union

from nanovllm.config import Config
from nanovllm.engine.text.tokenizer import AsyncTokenizer
from nanovllm.errors import CheckpointError, RequestError
from nanovllm.models.vision import VisionConfig

if TYPE_CHECKING:
    from nanovllm.engine.images.loading import ImageLoader

KEYS = ("multi_modal_data", "mm_processor_kwargs")


def has_images(prompt: Any) -> bool:
    given = [prompt.get(key) for key in KEYS] if isinstance(prompt, Mapping) else []
    return any(len(each) > 0 if isinstance(each, Mapping) else each is not None for each in given)


class Refusal:
    """Refuses prompts with images."""

    def __init__(self, reason: str):
        self._reason = reason

    takes = staticmethod(has_images)

    def encode(self, prompt: Mapping[str, Any]) -> NoReturn:
        raise RequestError(f"this engine takes no images: {self._reason}.")


def make_images(config: Config, tokenizer: AsyncTokenizer) -> Union["ImageLoader", Refusal, None]:
    """None for checkpoints without a vision tower that is supported."""
    if config.language_model_only:
        return Refusal("it was made with language_model_only=True")
    vision = VisionConfig.of(config)
    if vision is None:
        return None
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
    except CheckpointError as error:  # of its image processor, which text does not need
        return Refusal(str(error).rstrip("."))

"""The images of a conversation, in the forms of OpenAI's messages, of vLLM's and of transformers'."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.engine.text.chat_templates import IMAGE, OF_IMAGES, TEXT_TYPES, kind_of
from nanovllm.errors import RequestError
from nanovllm.validation import at_least, check

# type of a message part -> fields that may hold its image
IMAGE_PARTS = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image_pil": ("image_pil",),
    "image": ("image", *OF_IMAGES, "image_url"),
}
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")  # in pixels


@dataclass(frozen=True)
class SizedImage:
    """The source of an image, and options of the image processor that hold for it alone."""

    source: Any
    options: dict[str, int]


def image_types(conversation: Iterable[dict[str, Any]]) -> list[str | None]:
    """The types of the parts of a conversation that are images."""
    contents = (message.get("content") for message in conversation)
    return [kind_of(x)[0] for content in contents if isinstance(content, (list, tuple)) for x in content if is_image(x)]


def take_images(conversation: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Split a conversation into one for the chat template, with IMAGE for each, and their sources."""
    images: list[Any] = []
    messages = []
    for message in conversation:
        if isinstance(content := message.get("content"), (list, tuple)):
            message = {**message, "content": [_without_image(part, images) for part in content]}
        messages.append(message)
    return messages, images


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and kind_of(part)[0] in IMAGE_PARTS


def _without_image(part: Any, images: list[Any]) -> Any:
    kind, given = kind_of(part)
    if isinstance(part, str) or kind in TEXT_TYPES:
        return part
    if kind not in IMAGE_PARTS:
        types = " or ".join(map(repr, ("text", *IMAGE_PARTS)))
        raise RequestError(f"a part of a message must be text or an image: of type {types}, not {kind!r}.")
    source, options = part.get(given[0]) if given else None, dict(part)
    if isinstance(source, Mapping) and given == ["image_url"]:
        options |= source
        source = source.get("url")
    if source is None or len(given) > 1 or given[0] not in IMAGE_PARTS[kind]:
        also = f", not {' and '.join(map(repr, given))}" if source is not None else ""
        raise RequestError(f"a part of type {kind!r} must have {' or '.join(map(repr, IMAGE_PARTS[kind]))}{also}.")
    if given == ["base64"] and isinstance(source, str) and not source.startswith("data:"):
        source = f"data:image/any;base64,{source}"
    sizes = {name: options[name] for name in SIZES if options.get(name) is not None}
    for name, size in sizes.items():
        check("a part of a message", name, size, at_least(1), RequestError)
    images.append(SizedImage(source, sizes) if sizes else source)
    return IMAGE

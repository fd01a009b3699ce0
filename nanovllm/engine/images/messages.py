"""The images of a conversation, in the forms of OpenAI's messages, of vLLM's and of transformers'."""

from collections.abc import Mapping
from typing import Any

from nanovllm.errors import RequestError

# type of a part -> the fields that may hold its image
IMAGE_PARTS = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image_pil": ("image_pil",),
    "image": ("image", "url", "path", "base64"),
}


def take_images(conversation: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Split a conversation into one for the chat template, with {"type": "image"} for each, and their sources."""
    images: list[Any] = []
    messages = []
    for message in conversation:
        content = message.get("content")
        if isinstance(content, (list, tuple)) and any(map(is_image, content)):
            message = {**message, "content": [_without_image(part, images) for part in content]}
        messages.append(message)
    return messages, images


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def _without_image(part: Any, images: list[Any]) -> Any:
    if not is_image(part):
        return part
    fields = IMAGE_PARTS[part["type"]]
    given = [field for field in fields if part.get(field) is not None]
    if len(given) != 1:
        raise RequestError(f"a part of type {part['type']!r} must have {' or '.join(map(repr, fields))}.")
    source = part[given[0]]
    if given[0] == "image_url" and isinstance(source, Mapping):
        source = source.get("url")
    if given[0] == "base64" and isinstance(source, str):
        source = f"data:image/any;base64,{source}"
    images.append(source)
    return {"type": "image"}

"""Chat templates: the one that a checkpoint has, and the form in which it takes the content of messages.

Owns the parts of a message that are text. Renders nothing.
"""

import re
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError, RequestError
from nanovllm.utils.checkpoint import read_json

FORMATS = ("auto", "string", "openai")
IMAGE = {"type": "image"}  # a part of a message; the engine has the image itself
TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
# The content of a part is in one of these fields; others, such as "index" or "cache_control", change nothing.
FIELDS = ("text", "refusal", "image", "image_url", "image_pil", "video", "video_url", "audio", "audio_url",
          "input_audio")  # fmt: skip
NOT_TEXT = 'a part of a message must be {{"type": "text", "text": "..."}}, not {kind}.'
OF_IMAGES = ("url", "path", "base64")  # fields that hold the image of a part of type "image"
MAX_SOURCE = 1_000_000  # longest template that is parsed, in characters; the longest published ones have 20,000


def best_template(model_path: str, own: Any) -> Any:
    """The chat template of a checkpoint, or several by their names.

    For models with a vision tower it is the one that transformers' AutoProcessor takes: of ``processor_config.json``,
    else of ``chat_template.json``. Other models, and other checkpoints of such models, have the tokenizer's ``own``,
    which may be from ``chat_template.jinja``. Where it alone reads tools, it is the template of chats with tools.

    Raises:
        CheckpointError: a file is damaged.
    """
    config = Path(model_path, "config.json")
    if not config.is_file() or not read_json(config).get("vision_config"):
        return own
    template = _template_in(model_path, "processor_config.json") or _template_in(model_path, "chat_template.json")
    if template is None:
        return own or _template_in(model_path, "preprocessor_config.json")
    if isinstance(own, dict):
        return {**own, "default": template}
    if own and "tools" in variables(own) and "tools" not in variables(template):
        return {"default": template, "tool_use": own}
    return template


def _template_in(model_path: str, name: str) -> str | None:
    file = Path(model_path, name)
    template = read_json(file).get("chat_template") if file.is_file() else None
    if not isinstance(template, (str, type(None))):
        raise CheckpointError(f"{file}: chat_template must be a string, not {template!r:.100}.")
    return template


def variables(source: str) -> set[str]:
    """Names in the code of a template, such as "enable_thinking"."""
    code = re.findall(r"{[{%].*?(?:[%}]}|\Z)", source, re.DOTALL)
    return {name for block in code for name in re.findall(r"[^\W\d]\w*", block)}


@lru_cache(maxsize=64)
def takes_parts(source: str) -> bool:
    """Whether a template loops over the parts of a message's content; else it takes a string."""
    from nanovllm.engine.text.content_loops import loops_over_content

    return len(source) <= MAX_SOURCE and loops_over_content(source)


def with_contents(messages: ListLike[dict[str, Any]], are_parts: bool, placeholder: str) -> list[dict[str, Any]]:
    """Copies of messages whose contents have the form that a template takes; the caller's are not changed.

    Args:
        are_parts: give a content as a list of parts, else as a string.
        placeholder: the text that stands for an image in a string; "" if this engine takes no images.
    """
    return [{**m, "content": _content(m["content"], are_parts, placeholder)} if "content" in m else m for m in messages]


def _content(content: Any, are_parts: bool, placeholder: str) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if are_parts and content else content
    if not isinstance(content, (list, tuple)):
        return content
    parts = [_part(part) for part in content]
    if are_parts:
        return parts
    text = "\n".join(part["text"] for part in parts if part != IMAGE)
    num_images = parts.count(IMAGE)
    if num_images and not placeholder:
        raise RequestError("the chat template takes no parts of messages, so an image has no place in it.")
    # As in vLLM, images come before the text, unless the text has their placeholders.
    places = [placeholder] * (num_images - text.count(placeholder)) if num_images else []
    return "\n".join([*places, text] if text else places)


def _part(part: Any) -> dict[str, Any]:
    """A part as templates know it: text, or IMAGE."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind, fields = kind_of(part)
    if kind == "image" and not fields:
        return IMAGE
    if kind not in TEXT_TYPES or len(fields) != 1 or not isinstance(text := part[fields[0]], str):
        also = f" with {' and '.join(map(repr, fields))}" if len(fields) > 1 else ""
        raise RequestError(NOT_TEXT.format(kind=repr(kind) + also))
    return {"type": "text", "text": text}


def kind_of(part: Any) -> tuple[str | None, list[str]]:
    """The type of a part, by its only field where it names none, and the fields that have content.

    A field that is null is absent, as in Arrow's structs, where each part has the fields of all. So is an empty one
    that belongs to another type.
    """
    if not isinstance(part, Mapping):
        return type(part).__name__, []
    kind = part.get("type")
    if not isinstance(kind, (str, type(None))):
        return f"{kind!r:.100}", []
    names = FIELDS + OF_IMAGES if kind == "image" else FIELDS
    fields = [name for name in names if part.get(name) is not None]
    if kind is not None or len(fields) > 1:
        own = ("text" if kind in TEXT_TYPES else kind), kind
        fields = [name for name in fields if name in own or not is_empty(part[name])]
    return fields[0] if kind is None and len(fields) == 1 else kind, fields


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, tuple, Mapping)) and len(value) == 0)

"""A conversation as text, by the chat template of a checkpoint: Jinja in a sandbox, with what transformers adds to it.

Imported by the first chat.
"""

import json
from collections.abc import Sequence as ListLike
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# What versions of transformers treat differently in a message, and keywords that are no variables of the template
UNCERTAIN = {"reasoning_content", "reasoning", "thinking"}
NO_VARIABLES = {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
                "return_assistant_tokens_mask", "sanitize_control_tokens", "conversation"}  # fmt: skip
CONTINUED = "END_OF_THE_FINAL_MESSAGE "  # its space tells whether the template strips messages


def is_plain(messages: ListLike[dict], options: dict[str, Any]) -> bool:
    """Whether every version of transformers gives what ``render`` gives.

    Args:
        options: the keywords of ``apply_chat_template``.
    """
    odd = any(value is None or name in UNCERTAIN for message in messages for name, value in message.items())
    lists = [options.get(name) or [] for name in ("tools", "documents")]
    return (
        len(messages) > 0 and not odd and not NO_VARIABLES & options.keys() and _is_json([messages, options])
        and isinstance(options.get("continue_final_message", False), bool)
        and all(isinstance(items, (list, tuple)) and all(type(x) is dict for x in items) for items in lists)
    )  # fmt: skip


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _is_json(x) for key, x in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, float, bool)


def choose(known: str | dict[str, str] | None, chat_template: str | None, tools: list | None) -> str:
    """The source of the template that is meant by its name, its source, or nothing.

    Args:
        known: the tokenizer's template, or several by name.
    """
    by_name = known if isinstance(known, dict) else {}
    if chat_template is not None:
        return by_name.get(chat_template, chat_template)
    if isinstance(known, str):
        return known
    name = "tool_use" if tools is not None and "tool_use" in by_name else "default"
    if name not in by_name:
        raise ValueError(f"chat_template must name one of {', '.join(sorted(by_name))}; none is the default")
    return by_name[name]


def render(source: str, messages: ListLike[dict], /, *, tools: list | None = None, documents: list | None = None,
           add_generation_prompt: bool = False, continue_final_message: bool = False, **variables: Any) -> str:
    """The conversation as text.

    Raises:
        Exception: whatever the template raises.
    """
    final = messages[-1].get("content")
    if continue_final_message:
        if add_generation_prompt:
            raise ValueError("continue_final_message goes on with a message, add_generation_prompt begins one")
        if not isinstance(final, str) or "content" not in source:
            raise ValueError("continue_final_message needs a final message with content, and a template that takes it")
        messages = [*messages[:-1], {**messages[-1], "content": final + CONTINUED}]
    variables |= {"messages": messages, "tools": tools, "documents": documents}
    text = _compile(source).render(variables, add_generation_prompt=add_generation_prompt)
    if not continue_final_message:
        return text
    assert isinstance(final, str)
    end = text.rfind(CONTINUED.strip())
    if end < 0 or final.strip() not in text:
        raise ValueError("continue_final_message: the template drops or changes the final message")
    return text[:end] if text.startswith(CONTINUED, end) else text[:end].rstrip()


class Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is a block like any other."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PublicNamespace(Namespace):
    """Without names that begin with an underscore, as those of Python's internals do."""

    def __init__(*args: Any, **kwargs: Any):
        self, *given = args
        Namespace.__init__(self)
        for name, value in dict(*given, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
           sort_keys: bool = False) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache
def _compile(source: str) -> Template:
    """In a sandbox, for it came with the checkpoint."""
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {
        "raise_exception": raise_exception, "strftime_now": strftime_now, "namespace": PublicNamespace
    }  # fmt: skip
    return sandbox.from_string(source)

"""Tool calls of OpenAI's format: it has their arguments as JSON text, and chat templates want objects."""

import json
from typing import Any

from nanovllm.errors import RequestError


def with_parsed_arguments(messages: Any) -> Any:
    """Copies of the messages whose tool calls have their ``arguments`` parsed, as vLLM does it; empty text is ``{}``.

    Lists of conversations are walked, other values kept as they are.

    Raises:
        RequestError: the text of some arguments is not JSON.
    """
    if isinstance(messages, (list, tuple)):
        return [with_parsed_arguments(each) for each in messages]
    if not isinstance(messages, dict) or not isinstance(messages.get("tool_calls"), (list, tuple)):
        return messages
    return {**messages, "tool_calls": [parsed(call) for call in messages["tool_calls"]]}


def parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"]
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"the arguments of the tool call of {function.get('name')!r:.100} must be an object, or its JSON text, not "
            f"{text!r:.100} ({error})."
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}

"""Rows of a batch job: the request of a row, and the record that is written for it.

A plain row has a prompt or a conversation in a column. A line of OpenAI's batch format has a "body" and is answered in
that format.
"""

import json
import math
import time
from collections import deque
from collections.abc import Container
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from nanovllm.contrib.tool_calls import with_parsed_arguments
from nanovllm.errors import RequestError
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.validation import at_least, check

# fields of a body that change no token (--model decides), and fields that change none with these values
IGNORED = ("model", "user", "metadata", "store", "service_tier", "stream_options", "safety_identifier",
           "prompt_cache_key")  # fmt: skip
NEUTRAL: dict[str, tuple] = {
    "stream": (False,), "echo": (False,), "best_of": (1,), "suffix": ("",), "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False), "modalities": (["text"],),
}  # fmt: skip
IMAGES = ("images", "image")  # columns
COMPLETE, ERROR, CUT = 0, 1, 2  # ends of a row; CUT: a completion ended at max_tokens
CONTENTS = ("image", "url", "path", "base64", "image_url", "text")  # fields of a part that is no place of an image
TEMPLATE = ("tools", "add_generation_prompt", "continue_final_message", "chat_template")


class Row(NamedTuple):
    key: str | int  # its id
    values: dict[str, Any]
    error: RequestError | None = None  # why it cannot be served
    name: str = "custom_id"  # column the id comes from

    @property
    def is_openai(self) -> bool:
        return "body" in self.values


def row_of(values: dict[str, Any] | RequestError, number: int, id_column: str | None) -> Row:
    """The row with the id that its values have, or with its number in the input, from 0."""
    by_number = f"row-{number}"
    if isinstance(values, RequestError):
        return Row(by_number, {}, values)
    name = "custom_id" if "body" in values else id_column
    if name is None:
        name = next((name for name in ("custom_id", "id") if name in values), None)
    key = by_number if name is None else values.get(name)
    if isinstance(key, (str, int)) and not isinstance(key, bool) and key != "":
        error = next((value for value in values.values() if isinstance(value, RequestError)), None)
        return Row(key, values, error, name or "custom_id")
    return Row(by_number, values, RequestError(f"the row's {name!r} must be a text or an integer, not {key!r:.100}."))


def hash_of(key: str | int) -> int:
    return xxh3_64_intdigest(str(key).encode(errors="backslashreplace"))  # as an output holds it


def row_seed(seed: int | None, key: str | int) -> int:
    return hash_of(f"{seed or 0} {key}") >> 1


# ---------------------------------------------------------------- what is asked


def request_of(row: Row, args: Any) -> tuple[Any, dict[str, Any] | None, SamplingParams]:
    """A row's prompt, or its conversation with the variables of the chat template; and its parameters."""
    if row.error is not None:
        raise row.error
    template = dict(args.chat_template_kwargs)
    if row.is_openai:
        content, own, is_chat = openai_request(row.values, template)
        if is_chat and "max_tokens" not in args.sampling:
            own.setdefault("max_tokens", None)
    else:
        content, own, is_chat = plain_request(row.values, args)
    if is_chat and not (isinstance(content, list) and content and all(isinstance(m, dict) for m in content)):
        raise RequestError(f"messages must be a list of objects with role and content, not {content!r:.100}.")
    images = images_of(row.values)
    if is_chat:
        content = with_images(with_parsed_arguments(content), images)
    elif images:
        name = "prompt" if isinstance(content, str) else "prompt_token_ids"
        content = {name: content, "multi_modal_data": {"image": images}}
    template.setdefault("add_generation_prompt", not template.get("continue_final_message"))  # as in LLM.chat
    params = replace(args.base_params, **ready(own))
    if own.get("seed") in (None, -1):  # never from the engine's running number: a resumed job draws the same
        params.seed = row_seed(args.base_params.seed, row.key)
    return content, template if is_chat else None, params


def plain_request(values: dict[str, Any], args: Any) -> tuple[Any, dict[str, Any], bool]:
    """Prompt or messages of a row, its parameters, and whether it is a chat."""
    own = as_object("sampling_params", from_json("sampling_params", values.get("sampling_params") or {}))
    if (messages := values.get(args.messages_column)) not in (None, ""):  # "" is CSV's null
        return from_json(args.messages_column, messages), own, True
    prompt = values.get(args.prompt_column)
    if prompt is None or (prompt == "" and args.prompt):  # CSV's null
        prompt = args.prompt
        if prompt is not None and args.image_columns and not images_of(values):
            columns = " or ".join(map(repr, args.image_columns))
            raise RequestError(f"the row has no image in {columns}, and --prompt is for rows that have one; give it an "
                               "image, or a prompt of its own.")  # fmt: skip
    if prompt is None:
        raise RequestError(f"the row has neither {args.prompt_column!r} nor {args.messages_column!r}.")
    return [{"role": "user", "content": said(prompt)}] if args.chat else prompt, own, args.chat


def said(prompt: Any) -> Any:
    """The content of a user's message: a text, or a list of its parts; RequestError for other prompts."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(is_part, prompt))):
        return prompt
    kind, remedy = "", "Give each of several prompts a row of its own, and a conversation the column of messages."
    if isinstance(prompt, list) and prompt and all(isinstance(x, int) for x in prompt):
        kind, remedy = "the token ids ", "Give the text, or leave out --chat."
    raise RequestError(f"with --chat a prompt must be a text, not {kind}{prompt!r:.100}. {remedy}")


def is_part(part: Any) -> bool:
    """Whether a part of a message is given, not a whole message; its type may be missing."""
    return isinstance(part, dict) and "role" not in part


def openai_request(values: dict[str, Any], template: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
    """The same of a line of OpenAI's format; ``template`` gets the body's variables."""
    url, body = values.get("url", "/v1/chat/completions"), values["body"]
    is_chat, prompt = url == "/v1/chat/completions", "messages" if url == "/v1/chat/completions" else "prompt"
    if not is_chat and url != "/v1/completions":
        raise RequestError(f"url must be /v1/chat/completions or /v1/completions, not {url!r:.100}.")
    if not isinstance(body, dict):
        raise RequestError(f"body must be an object, not {body!r:.100}.")
    own = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, neutral in NEUTRAL.items():
        if own.get(name, neutral[0]) not in neutral:
            allowed = " or ".join(map(json.dumps, neutral))
            raise RequestError(f"the body's {name}={json.dumps(own[name]):.100} is not supported; {allowed} is.")
        own.pop(name, None)
    if prompt not in own:
        raise RequestError(f"the body has no {prompt!r}.")
    content = own.pop(prompt)
    if not is_chat and isinstance(content, list) and content and not isinstance(content[0], int):
        if len(content) > 1:
            raise RequestError("the body's prompt is a list of prompts; give each a line of its own.")
        (content,) = content
    if "max_completion_tokens" in own:
        own["max_tokens"] = check("the body", "max_completion_tokens", own.pop("max_completion_tokens"), at_least(0),
                                  RequestError)  # fmt: skip
    if is_chat:
        top = check("the body", "top_logprobs", own.pop("top_logprobs", 0), at_least(0), RequestError)
        if top and not own.get("logprobs"):
            raise RequestError(f'the body\'s top_logprobs={top} needs "logprobs": true beside it.')
        own["logprobs"] = top if own.get("logprobs") and not own.get("logprob_token_ids") else None
        template.update(as_object("chat_template_kwargs", own.pop("chat_template_kwargs", {})))
        template.update({name: own.pop(name) for name in TEMPLATE if name in own})
    form = own.pop("response_format", {"type": "text"})
    if form == {"type": "json_object"}:
        own["structured_outputs"] = {"json_object": True}
    elif isinstance(form, dict) and isinstance(form.get("json_schema"), dict):
        own["structured_outputs"] = {"json": form["json_schema"].get("schema", {})}
    elif form != {"type": "text"}:
        raise RequestError(f"response_format must be of type text, json_object or json_schema, not {form!r:.100}.")
    return content, own, is_chat


def images_of(values: dict[str, Any]) -> list[Any]:
    """The images of a row: one or a list, in CSV as JSON; each bytes, a path, a URL, or {"bytes", "path"}."""
    given = {name: values[name] for name in IMAGES if values.get(name) is not None}
    name = next((name for name, x in given.items() if not (isinstance(x, (str, list)) and not x)), "")
    images = given.get(name, [])
    if isinstance(images, str):
        images = from_json(name, images) if images.startswith("[") else [images] if images else []
    images = images if isinstance(images, list) else [images]
    if empty := [image for image in images if is_empty(image)]:
        raise RequestError(f"the row's {name!r} holds no image, but {empty[0]!r:.100}.")
    return images


def is_empty(image: Any) -> bool:
    """Whether a cell lacks its image: a null, NaN, or a dictionary of nulls, which data frames write for one."""
    if isinstance(image, dict):
        return image.get("bytes") is None and image.get("path") is None
    return image is None or (isinstance(image, str) and not image) or (isinstance(image, float) and image != image)


def with_images(messages: list[dict], images: list[Any]) -> list[dict]:
    """A conversation with a row's images in the places of {"type": "image"}, or before the first text of the user."""
    if not images:
        return messages
    parts = deque({"type": "image", "image": image} for image in images)
    messages = [dict(message) for message in messages]
    for message in messages:
        if isinstance(given := message.get("content"), list):
            message["content"] = [parts.popleft() if is_place(part) and parts else part for part in given]
    if len(parts) == len(images):
        first = next((message for message in messages if message.get("role") == "user"), messages[0])
        given = first.get("content")
        text = [] if given is None else [{"type": "text", "text": given}]
        first["content"] = [*parts, *(given if isinstance(given, list) else text)]
    elif parts:
        num_places = len(images) - len(parts)
        raise RequestError(f"the row has {len(images)} images, and its messages have places for {num_places}.")
    return messages


def is_place(part: Any) -> bool:
    """Whether a part is the place of an image; other fields, null or not, such as "index", change nothing."""
    if not isinstance(part, dict) or part.get("type") != "image":
        return False
    given = [part[name] for name in CONTENTS if part.get(name) is not None]
    return all(isinstance(value, str) and not value for value in given)


def ready(values: dict[str, Any]) -> dict[str, Any]:
    """JSON values as ``SamplingParams`` takes them."""
    values = dict(values)
    if isinstance(values.get("structured_outputs"), dict):
        values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
    if isinstance(values.get("logit_bias"), dict):
        values["logit_bias"] = {int(i) if str(i).isdecimal() else i: x for i, x in values["logit_bias"].items()}
    return values


def from_json(name: str, value: Any) -> Any:
    """A column that holds JSON as text, as in CSV."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the text in {name!r} is not JSON: {error}") from None


def as_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object, not {value!r:.100}.")
    return value


# ---------------------------------------------------------------- what is written


def record_of(row: Row, output: RequestOutput, params: SamplingParams, model: str) -> dict[str, Any]:
    first = output.outputs[0]
    if failed := [o.stop_reason for o in output.outputs if o.finish_reason == "error"]:
        return error_record(row, RequestError(str(failed[0])))
    counts = {"prompt_tokens": len(output.prompt_token_ids),
              "completion_tokens": sum(len(o.token_ids) for o in output.outputs)}  # fmt: skip
    if row.is_openai:
        return openai_record(row, output, counts, params, model)
    record: dict[str, Any] = {"custom_id": row.key, row.name: row.key, "text": first.text, **split_of(first),
                              "finish_reason": first.finish_reason, "stop_reason": first.stop_reason,
                              **counts}  # fmt: skip
    if params.n > 1 or params.num_logprobs is not None or not params.detokenize:
        names = ("text", "finish_reason", "stop_reason", "token_ids")
        record["outputs"] = [
            {**{name: getattr(o, name) for name in names}, **split_of(o), "logprobs": plain_logprobs(o.logprobs),
             "cumulative_logprob": None if o.cumulative_logprob == -math.inf else o.cumulative_logprob}
            for o in output.outputs
        ]  # fmt: skip
    if params.prompt_logprobs is not None:
        record["prompt_logprobs"] = plain_logprobs(output.prompt_logprobs)
    return {**record, "error": None}


def end_of(record: dict[str, Any]) -> int:
    """How a row ended, by its record: COMPLETE, ERROR or CUT. Parquet has nested values as JSON text."""
    if record.get("error") is not None:
        return ERROR
    response, outputs = (from_json(name, record.get(name)) for name in ("response", "outputs"))
    completions = response["body"]["choices"] if response else outputs or [record]
    return CUT if any(each.get("finish_reason") == "length" for each in completions) else COMPLETE


def is_incomplete(output: RequestOutput, params: SamplingParams, eos_token_ids: Container[int]) -> bool:
    """Whether a structured output did not end by itself: at max_tokens, at a stop string or token, or at a repetition.

    ``eos_token_ids``: a grammar allows them only where a text may end. The further ones are stop reasons.
    """
    ends = [(o.finish_reason, o.stop_reason is None or o.stop_reason in eos_token_ids) for o in output.outputs]
    return params.structured_outputs is not None and any(end != ("stop", True) for end in ends)


def split_of(output: CompletionOutput) -> dict[str, str]:
    """If the model has thought, the two parts of its text."""
    return {} if output.reasoning is None else {"reasoning": output.reasoning, "content": output.content}


def error_record(row: Row, error: Exception) -> dict[str, Any]:
    why = {"type": type(error).__name__, "message": str(error)}
    return {"custom_id": row.key, row.name: row.key, "response" if row.is_openai else "text": None, "error": why}


def openai_record(row: Row, output: RequestOutput, counts: dict[str, int], params: SamplingParams,
                  model: str) -> dict[str, Any]:
    is_chat = row.values.get("url") != "/v1/completions"
    logprobs, num_top = openai_logprobs if is_chat else completion_logprobs, params.num_logprobs or 0
    choices = [
        {"index": o.index, **({"message": {"role": "assistant", "content": o.text}} if is_chat else {"text": o.text}),
         "finish_reason": o.finish_reason, "logprobs": None if o.logprobs is None else logprobs(o, num_top)}
        for o in output.outputs
    ]  # fmt: skip
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{row.key}", "created": int(time.time()), "model": model,
        "object": "chat.completion" if is_chat else "text_completion", "choices": choices,
        "usage": {**counts, "total_tokens": sum(counts.values())},
    }  # fmt: skip
    response = {"status_code": 200, "request_id": f"request-{row.key}", "body": body}
    return {"id": f"batch-{row.key}", "custom_id": row.key, "response": response, "error": None}


def plain_logprobs(logprobs: Any) -> Any:
    """[{token id: {"logprob", "rank", "decoded_token"}}]"""
    return logprobs and [
        at and {i: {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
                for i, entry in at.items()} for at in logprobs
    ]  # fmt: skip


def completion_logprobs(output: CompletionOutput, num_top: int) -> dict[str, Any]:
    """Log-probabilities in the form of /v1/completions: columns. Offsets count in the tokens' joined texts."""
    found = [list(at.values()) for at in output.logprobs]  # type: ignore[union-attr]
    tokens = [chosen.decoded_token or "" for chosen, *_ in found]
    top: list[dict[str, float]] = [{} for _ in found]
    for each, entries in zip(top, found, strict=True):
        for at in sorted(entries, key=lambda at: at.rank or 0):  # if several ids have one text, keep the most probable
            each.setdefault(at.decoded_token or "", finite(at.logprob))
    return {
        "tokens": tokens, "token_logprobs": [finite(chosen.logprob) for chosen, *_ in found],
        "top_logprobs": top if num_top else None,
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)],
    }  # fmt: skip


def openai_logprobs(output: CompletionOutput, num_top: int) -> dict[str, Any]:
    """Log-probabilities in the form of /v1/chat/completions: a list of tokens."""

    def entry(at: Logprob) -> dict[str, Any]:
        return {"token": at.decoded_token, "logprob": finite(at.logprob), "bytes": list(at.token_bytes or b"")}

    content = []
    for chosen, *others in (list(at.values()) for at in output.logprobs):  # type: ignore[union-attr]
        top = sorted([chosen, *others], key=lambda at: at.rank or 0)[:num_top]
        content.append({**entry(chosen), "top_logprobs": [entry(at) for at in top]})
    return {"content": content}


def finite(logprob: float) -> float:
    """JSON has no -inf, the log-probability of a masked token; OpenAI's API writes -9999."""
    return max(logprob, -9999.0)

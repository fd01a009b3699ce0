"""Prompts in every form that vLLM takes, and the arguments beside them that must be left out."""

from collections.abc import Mapping
from typing import Any

from nanovllm.errors import RequestError

KEYS = ("prompt", "prompt_token_ids")
IGNORED_KEYS = ("cache_salt", "type")  # no value of theirs changes an output


def as_prompts(prompts: Any, prompt_token_ids: Any = None) -> list[Any]:
    """One prompt or many, in any form that vLLM takes, as a list of nanovllm's."""
    if prompt_token_ids is not None:
        ids = prompt_token_ids if len(prompt_token_ids) and hasattr(prompt_token_ids[0], "__len__") else [
            prompt_token_ids
        ]  # fmt: skip
        texts = [None] * len(ids) if prompts is None else [prompts] if isinstance(prompts, str) else list(prompts)
        if len(texts) != len(ids):
            raise RequestError(f"{len(texts)} prompts but {len(ids)} prompt_token_ids.")
        return [{"prompt": t, "prompt_token_ids": i} if t is not None else i for t, i in zip(texts, ids, strict=True)]
    if prompts is None:
        raise RequestError("generate: give prompts.")
    if isinstance(prompts, (str, Mapping)):
        prompts = [prompts]
    prompts = list(prompts)
    if prompts and not isinstance(prompts[0], (str, Mapping)) and not hasattr(prompts[0], "__len__"):
        prompts = [prompts]  # the ids of one
    return [as_prompt(prompt) for prompt in prompts]


def as_prompt(prompt: Any) -> Any:
    if not isinstance(prompt, Mapping):
        return prompt
    for key, value in prompt.items():
        if value and key not in (*KEYS, *IGNORED_KEYS):
            raise RequestError(f"a prompt with {key!r} is not supported by nanovllm; allowed: {', '.join(KEYS)}.")
    return {key: prompt[key] for key in KEYS if prompt.get(key) is not None}


def refuse_lora(lora_request: Any) -> None:
    """Raise RequestError unless it is None or a list of Nones."""
    for request in lora_request if isinstance(lora_request, (list, tuple)) else [lora_request]:
        if request is not None:
            raise RequestError(
                f"lora_request={request!r:.200}: LoRA adapters are not supported. Merge the adapter into the weights, "
                "and pass None."
            )


def refuse(method: str, **values: Any) -> None:
    """Raise RequestError for arguments that would change the result and are not supported."""
    for name, value in values.items():
        if isinstance(value, (list, tuple)) and not any(value):
            continue  # priorities of 0
        if value:
            raise RequestError(f"{method}: {name}={value!r:.200} is not supported by nanovllm; leave it out.")

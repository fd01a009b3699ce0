"""Prompts in every form that vLLM takes, and the arguments beside them that must be left out."""

from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.errors import RequestError

KEYS = ("prompt", "prompt_token_ids")
IGNORED_KEYS = ("cache_salt", "type")  # no value of theirs changes an output
NO_LORA = "LoRA adapters are not supported. Merge the adapter into the weights, and pass None."


def as_prompts(prompts: Any, prompt_token_ids: Any = None) -> Any:
    """One prompt or many, as nanovllm takes them; ids beside them are how they were given before dictionaries."""
    if prompt_token_ids is not None:
        are_many = len(prompt_token_ids) > 0 and hasattr(prompt_token_ids[0], "__len__")
        ids = prompt_token_ids if are_many else [prompt_token_ids]
        texts = [None] * len(ids) if prompts is None else [prompts] if isinstance(prompts, str) else list(prompts)
        if len(texts) != len(ids):
            raise RequestError(f"{len(texts)} prompts but {len(ids)} prompt_token_ids.")
        return [{"prompt": t, "prompt_token_ids": i} for t, i in zip(texts, ids, strict=True)]
    if prompts is None:
        raise RequestError("generate: give prompts.")
    is_one = isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable)
    return as_prompt(prompts) if is_one else [as_prompt(prompt) for prompt in prompts]


def as_prompt(prompt: Any) -> Any:
    """A dictionary without the keys that are empty, or change nothing; anything else as it is."""
    if not isinstance(prompt, Mapping):
        return prompt
    for key, value in prompt.items():
        if key not in (*KEYS, *IGNORED_KEYS) and value:
            raise RequestError(f"a prompt with {key!r} is not supported by nanovllm; allowed: {', '.join(KEYS)}.")
    return {key: prompt[key] for key in KEYS if prompt.get(key) is not None}


def refuse(method: str, **values: Any) -> None:
    """Raise RequestError for arguments that would change the result and are not supported."""
    for name, value in values.items():
        if any(value) if isinstance(value, (list, tuple)) else value:  # priorities of 0 change nothing
            advice = NO_LORA if name == "lora_request" else "is not supported by nanovllm; leave it out."
            raise RequestError(f"{method}: {name}={value!r:.200} {advice}")

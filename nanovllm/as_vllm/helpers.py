"""Small functions and types that vLLM's modules offer to scripts."""

import gc
import logging
import os
import random
import socket
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

from nanovllm.errors import EngineError


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    multi_modal_data: Any
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; ``prompt``, its text, is only carried to the output."""

    prompt_token_ids: list[int]
    prompt: str
    multi_modal_data: Any
    cache_salt: str


@dataclass
class LoRARequest:
    """Names an adapter. May be imported and made; a request with one is refused."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    long_lora_max_len: int | None = None
    base_model_name: str | None = None


def unsupported(name: str) -> type:
    """A class that may be imported, named in annotations and asked about by isinstance, but not made."""

    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        raise EngineError(f"vLLM's {name} is not supported by nanovllm, which stands in for vLLM here.")

    return type(name, (), {"__new__": refuse, "__doc__": "Not supported by nanovllm."})


def get_tokenizer(tokenizer_name: Any, *args: Any, tokenizer_mode: str = "auto", trust_remote_code: bool = False,
                  revision: str | None = None, download_dir: str | None = None, **kwargs: Any) -> Any:
    """The transformers tokenizer of a directory or hub id."""
    from transformers import AutoTokenizer

    kwargs.update({"use_fast": False} if tokenizer_mode == "slow" else {})
    return AutoTokenizer.from_pretrained(
        tokenizer_name, *args, trust_remote_code=trust_remote_code, revision=revision, cache_dir=download_dir, **kwargs
    )


def cached_get_tokenizer(*args: Any, **kwargs: Any) -> Any:
    return get_tokenizer(*args, **kwargs)


def resolve_hf_chat_template(tokenizer: Any, chat_template: str | None = None, tools: Any = None, *,
                             model_config: Any = None, trust_remote_code: bool | None = None) -> str | None:
    """The template that ``apply_chat_template`` would take; None if there is none."""
    if chat_template is not None:
        return chat_template
    try:
        return tokenizer.get_chat_template(chat_template, tools=tools)
    except ValueError:
        return None


def load_chat_template(chat_template: Any, *, is_literal: bool = False) -> str | None:
    """A template from a file; the text itself if there is no such file."""
    if chat_template is None or is_literal:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except OSError:
        return str(chat_template)


def random_uuid() -> str:
    return uuid.uuid4().hex


def get_open_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def get_ip() -> str:
    return "127.0.0.1"  # one host


def get_distributed_init_method(ip: str, port: int) -> str:
    return f"tcp://{ip}:{port}"


def set_random_seed(seed: int | None) -> None:
    """Seeds Python, numpy and torch. nanovllm's draws do not depend on them."""
    if seed is not None:
        import numpy as np
        import torch

        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage: an engine without references frees its memory and its workers."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def destroy_model_parallel() -> None:
    """Nothing to do: groups end with their engine."""


def destroy_distributed_environment() -> None:
    """Nothing to do: groups end with their engine."""


def get_tensor_model_parallel_rank() -> int:
    return 0  # of the process that runs the script


def register(*_: Any, **__: Any) -> None:
    raise EngineError("other models cannot be registered with nanovllm, which stands in for vLLM here.")


ModelRegistry = SimpleNamespace(register_model=register)


class Names(type):
    """A class each of whose attributes is its own name, as of an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class Settings(SimpleNamespace, metaclass=Names):
    """``CompilationConfig``, ``UsageContext`` and their like: any fields. They are hints on speed."""


class _Platform:
    """``current_platform``: CUDA or the CPU."""

    @property
    def device_type(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    device_name = device_type

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        return not self.is_cuda()

    def get_device_name(self, device_id: int = 0) -> str:
        import torch

        return torch.cuda.get_device_name(device_id) if self.is_cuda() else "cpu"

    def seed_everything(self, seed: int | None) -> None:
        set_random_seed(seed)

    def __getattr__(self, name: str) -> Callable[[], bool]:
        if name.startswith("is_"):  # is_rocm, is_tpu, is_xpu, ...
            return lambda: False
        raise AttributeError(f"nanovllm's current_platform has no {name!r}")


current_platform = _Platform()
ENVIRONMENT = {"VLLM_USE_V1": True, "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ENABLE_V1_MULTIPROCESSING": False}


def environment_variable(name: str) -> Any:
    """``vllm.envs.VLLM_...``: its text, a default, or None."""
    if not name.startswith("VLLM_"):
        raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")
    return os.environ.get(name, ENVIRONMENT.get(name))

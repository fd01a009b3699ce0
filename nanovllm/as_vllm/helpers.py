"""Small functions and types that vLLM's modules offer to scripts."""

import gc
import random
import socket
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import EngineError


@dataclass
class LoRARequest:
    """Names an adapter. May be imported and made; a request with one is refused."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    long_lora_max_len: int | None = None
    base_model_name: str | None = None


class Unsupported(type):
    """A class that may be imported, derived from and asked about by isinstance, but not made; nor has it methods."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        name = cls.__mro__[-2].__name__
        raise EngineError(f"vLLM's {name} is not supported by nanovllm, which stands in for vLLM here.")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return cls


class Settings(type):
    """A class with any fields, and any name as in an enumeration, such as ``CompilationConfig``: hints on speed."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


def get_tokenizer(tokenizer_name: Any, *args: Any, tokenizer_mode: str = "auto", download_dir: str | None = None,
                  **kwargs: Any) -> Any:
    """The transformers tokenizer of a directory or hub id."""
    from transformers import AutoTokenizer

    kwargs.update({"use_fast": False} if tokenizer_mode == "slow" else {})
    return AutoTokenizer.from_pretrained(tokenizer_name, *args, cache_dir=download_dir, **kwargs)


def resolve_hf_chat_template(tokenizer: Any, chat_template: str | None = None, tools: Any = None,
                             **_: Any) -> str | None:
    """The template that ``apply_chat_template`` would take; None if there is none."""
    if chat_template is not None:
        return chat_template
    try:
        return tokenizer.get_chat_template(chat_template, tools=tools)
    except ValueError:
        return None


def random_uuid() -> str:
    return uuid.uuid4().hex


def get_open_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def get_ip() -> str:
    return "127.0.0.1"  # one host


def set_random_seed(seed: int | None) -> None:
    """Seeds Python, numpy and torch. nanovllm's draws do not depend on them."""
    if seed is not None:
        import numpy as np
        import torch

        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage: an engine without references frees its memory and its workers."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def get_tensor_model_parallel_rank() -> int:
    return 0  # of the process that runs the script


class Platform:
    """``current_platform``: CUDA or the CPU."""

    seed_everything = staticmethod(set_random_seed)

    @property
    def device_type(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def get_device_name(self, device_id: int = 0) -> str:
        import torch

        return torch.cuda.get_device_name(device_id) if self.is_cuda() else "cpu"

    def __getattr__(self, name: str) -> Callable[[], bool]:
        if not name.startswith("is_"):  # is_cuda, is_cuda_alike, is_cpu; is_rocm, is_tpu and so on are never true
            raise AttributeError(f"nanovllm's current_platform has no {name!r}")
        return lambda: name[3:].removesuffix("_alike") == self.device_type


current_platform = Platform()

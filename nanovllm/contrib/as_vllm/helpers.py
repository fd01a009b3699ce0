"""Small functions and types that vLLM's modules offer to scripts."""

import gc
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError


@dataclass(frozen=True)
class LoRARequest:
    """Names a PEFT adapter by its path. It is read again where its files changed, or with ``load_inplace``."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"LoRARequest: lora_int_id={self.lora_int_id!r} must be at least 1.")
        if not self.lora_path:
            raise ValueError("LoRARequest: lora_path must be the directory, or the hub id, of a PEFT adapter.")

    adapter_id = property(lambda self: self.lora_int_id)
    name = property(lambda self: self.lora_name)
    path = local_path = property(lambda self: self.lora_path)


def get_tokenizer(tokenizer_name: Any, *args: Any, tokenizer_mode: str = "auto", download_dir: str | None = None,
                  **kwargs: Any) -> Any:
    """The transformers tokenizer of a directory or hub id."""
    from transformers import AutoTokenizer

    kwargs.update({"use_fast": False} if tokenizer_mode == "slow" else {})
    return AutoTokenizer.from_pretrained(tokenizer_name, *args, cache_dir=download_dir, **kwargs)


def resolve_hf_chat_template(tokenizer: Any, chat_template: Any = None, tools: Any = None, **_: Any) -> str | None:
    """The template that ``apply_chat_template`` would take; None if there is none."""
    try:
        return tokenizer.get_chat_template(chat_template, tools=tools)
    except ValueError:
        return None


def load_chat_template(chat_template: Any, *, is_literal: bool = False) -> str | None:
    """Read a template that is given as text, or by the path of its file.

    Raises:
        ConfigError: it reads like a path, and there is no such file.
    """
    if chat_template is None or is_literal:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a template is often too long for a path
        if isinstance(chat_template, Path) or not set(chat_template) & set("{}\n"):
            raise ConfigError(
                f"chat_template={str(chat_template)!r:.200} is neither a template nor a file that can be read: {error}."
            ) from None
        return chat_template


def convert_image_mode(image: Any, to_mode: str) -> Any:
    """A PIL image in another mode; RGBA as RGB is composited on white."""
    if image.mode == to_mode:
        return image
    if (image.mode, to_mode) != ("RGBA", "RGB"):
        return image.convert(to_mode)
    from PIL import Image

    page = Image.new("RGB", image.size, "white")
    page.paste(image, mask=image)
    return page


def rescale_image_size(image: Any, size_factor: float, transpose: int = -1) -> Any:
    """A PIL image with sides ``size_factor`` times as long, rounded down; then PIL's ``transpose``, unless negative."""
    rescaled = image.resize((int(image.width * size_factor), int(image.height * size_factor)))
    return rescaled if transpose < 0 else rescaled.transpose(transpose)


def random_uuid() -> str:
    return uuid.uuid4().hex


def get_open_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def set_random_seed(seed: int | None) -> None:
    """Seeds Python, numpy and torch. nanovllm's draws do not depend on them."""
    if seed is not None:
        from transformers import set_seed

        set_seed(seed)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage: an engine without references frees its memory and its workers."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


class Platform:
    """``current_platform``: CUDA or the CPU."""

    seed_everything = staticmethod(set_random_seed)

    def __getattr__(self, name: str) -> Any:
        import torch

        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "device_type":
            return device_type
        if name.startswith("is_"):  # is_cuda, is_cuda_alike, is_cpu; is_rocm, is_tpu and so on are never true
            return lambda: name[3:].removesuffix("_alike") == device_type
        raise AttributeError(f"nanovllm's stand-in for vLLM's current_platform has no {name!r}.")


current_platform = Platform()

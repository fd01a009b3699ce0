"""Device and dtype of a rank: their choice, torch's defaults while a model is built, out-of-memory errors."""

import os
from contextlib import contextmanager
from threading import Lock

import torch

from nanovllm.errors import ConfigError, OutOfMemoryError

DTYPE_LOCK = Lock()


def select_device(name: str, rank: int, num_ranks: int) -> torch.device:
    """The device of a rank; "auto" is CUDA if there is a device. Each rank needs a device of its own."""
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError("device='cuda': torch sees no CUDA device here. Use device='cpu' or 'auto'.")
    if torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} needs {num_ranks} CUDA devices; torch sees {torch.cuda.device_count()} "
            f"(CUDA_VISIBLE_DEVICES: {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})."
        )
    return torch.device("cuda", rank)


def select_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in; "auto" is the checkpoint's, float32 on the CPU, float16 on a GPU without bfloat16."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint
        if name == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
            name = "float16"
    return getattr(torch, name)


@contextmanager
def model_defaults(dtype: torch.dtype, device: torch.device):
    """Modules built within get this dtype and device. The default dtype is process-wide, hence the lock."""
    with DTYPE_LOCK:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                yield
        finally:
            torch.set_default_dtype(before)


@contextmanager
def translate_oom():
    """Re-raise an out-of-memory error of device or host as one that says which option to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        on_host = type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)  # torch has no class for it
        if not on_host and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            raise
        raise OutOfMemoryError(
            f"no room for the model: {error}\nFree memory on the device, lower max_num_batched_tokens, max_num_seqs, "
            "max_model_len or num_kvcache_blocks (if set), or spread the model over more devices "
            "(tensor_parallel_size)."
        ) from error

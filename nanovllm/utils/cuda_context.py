"""The CUDA context, created by a thread while torch is imported: each takes about a second, mostly without the GIL.

Nothing depends on it: a context that this thread has not created is created by torch.
"""

import ctypes
import os
import sys
from importlib import metadata
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.config import Config


def start_cuda_context(config: "Config", device: int) -> None:
    """Begin to create the context of a device that the engine will probably use; at once, before torch is imported."""
    if expects_nvidia(config):
        Thread(target=_create, args=(device,), daemon=True).start()


def expects_nvidia(config: "Config") -> bool:
    """Whether the engine will probably run on an NVIDIA GPU. torch, which knows, is not imported yet."""
    is_interpreted = os.environ.get("TRITON_INTERPRET", "0") != "0"
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    has_driver = sys.platform == "linux" and os.path.exists("/dev/nvidiactl")
    if config.device == "cpu" or not has_driver or is_interpreted or is_hidden:
        return False
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _create(device: int) -> None:
    """Retain the primary context, the one that torch uses."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(handle), device):
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)

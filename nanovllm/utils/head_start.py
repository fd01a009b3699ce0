"""What a start on an NVIDIA GPU does while torch is imported, which takes seconds.

Owns two threads, which mostly run without the GIL, and the decision whether to start a compile server. Nothing depends
on them: what they have not done is done when it is needed.
"""

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from typing import TYPE_CHECKING

from nanovllm.utils.compile_server import compile_server

if TYPE_CHECKING:
    from nanovllm.config import Config

LOGGER = logging.getLogger("nanovllm")
MIN_CPUS = 4  # for a compile server; below, threads compile as fast


@contextmanager
def head_start(config: "Config", rank: int) -> Iterator[None]:
    """To be entered by each rank before it imports torch. Inside, a server compiles kernels where that is faster."""
    if not expects_nvidia(config):
        yield
        return
    with compile_server(config) if len(os.sched_getaffinity(0)) >= MIN_CPUS else nullcontext():
        for work in (lambda: create_context(rank)), hash_triton:
            threading.Thread(target=work, daemon=True).start()
        yield


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


def create_context(device: int) -> None:
    """Create the primary CUDA context, the one that torch uses."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(handle), device):
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)


def hash_triton() -> None:
    """Triton's hash of itself, 400 MB, which it keeps in memory and puts into the key of every kernel."""
    try:
        from triton.runtime.cache import triton_key

        triton_key()
    except Exception:  # another version; what is wrong with Triton is told where it is needed
        LOGGER.debug("head start: Triton was not hashed", exc_info=True)

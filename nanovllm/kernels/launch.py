"""Triton: compilation and launch of kernels, device queries, zeroed counters. Knows nothing of the kernels themselves.

Programmatic dependent launch (PDL, sm_90 and later): a grid may start once every program of the previous one has
executed griddepcontrol.launch_dependents or exited, so its prologue overlaps the previous grid's tail. The wait
(griddepcontrol.wait) returns when that grid has completed and flushed its writes. Since every kernel waits, ordering is
transitive. Before the wait, read only memory that no kernel in flight writes (weights); after weights are written,
synchronize or launch a kernel without PDL first.

Exceptions: decode and prefix attention and norm_rope_store read request indices, lengths, block tables, prefix groups,
scales of the KV cache, positions and slots before the wait. So does a decode step of a recurrent layer, which also
reads the previous step's states. The embedding, an ordinary launch, separates them from their writers: it starts when
all earlier grids have completed, and no later grid starts before it. Programs of decode attention without work exit
without the wait; one always has work, so its grid waits, and signals launch_dependents only after that.

JIT specialization: Triton compiles another variant for an integer equal to 1 or divisible by 16, in about a second.
Integers that vary between steps (batch size, number of tokens) are in `do_not_specialize` where this costs no speed.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import build

compile_only: ContextVar[bool] = ContextVar("compile_only", default=False)  # per thread: other engines may serve


# On a Hopper GPU: run the kernels of other GPUs, with the shared memory of the smallest, so that one GPU tests both.
WITHOUT_HOPPER = os.environ.get("NANOVLLM_WITHOUT_HOPPER", "0") not in ("", "0")


_one_load = threading.Lock()


def _of_its_own(load):
    """``load(name, path)`` for one thread at a time, which returns the functions of the loaded module.

    Triton 3.5 and 3.6 build a launcher for each kernel, an extension module of the same name. Python loads such a
    module again into the object of the last one, whose function another thread may then take for its own kernel.
    """

    def load_alone(name, path):
        with _one_load:
            return SimpleNamespace(**vars(load(name, path)))

    return load_alone


if hasattr(build, "_load_module_from_path"):
    build._load_module_from_path = _of_its_own(build._load_module_from_path)


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and load them."""

    def submit(self, compile_kernel):  # type: ignore[override]
        return super().submit(lambda: _load(compile_kernel()))

    def __exit__(self, error, *_):
        self.shutdown(cancel_futures=error is not None)  # after Ctrl-C wait only for kernels that have begun


def _load(kernel):
    """Load a compiled kernel on the device: lazy module loading is illegal during CUDA graph capture.

    Triton 3.6 also builds the kernel's launcher here, with a C compiler, which takes as long as the compilation.
    """
    _ = kernel.run
    return kernel


@contextmanager
def parallel_compile(device: torch.device) -> Iterator[Callable[[], None]]:
    """Inside this context `launch` compiles kernels on threads instead of running them; the exit waits for them.

    The threads start when the yielded function is called, at the latest on exit: started earlier they compete with the
    launching thread for the GIL, and one second of launches takes seven. Outputs of the launches stay unwritten.
    """
    begin = threading.Event()

    def initialize():
        begin.wait()
        torch.cuda.set_device(device)

    has_async_mode = hasattr(triton, "AsyncCompileMode")  # before Triton 3.5 `launch` compiles kernel by kernel
    token = compile_only.set(True)
    try:
        with (
            _Compilers(initializer=initialize) as compilers,
            triton.AsyncCompileMode(compilers) if has_async_mode else nullcontext() as mode,
        ):
            try:
                yield begin.set
            except BaseException:
                if mode is not None:
                    mode.raw_futures.clear()  # its exit would wait for all
                raise
            finally:
                begin.set()
    finally:
        compile_only.reset(token)
        if has_async_mode:  # after a failed compilation Triton 3.6 leaves its mode active, and refuses the next
            triton.runtime._async_compile.active_mode.set(None)


def launch(kernel, grid, *args, **options):
    """Run ``kernel[grid](*args, **options)`` unless the grid is empty; inside `parallel_compile` only compile it."""
    if 0 in grid:
        return
    warmup = compile_only.get()
    compiled = kernel.run(*args, grid=grid, warmup=warmup, **options)
    if warmup and not hasattr(triton, "AsyncCompileMode"):
        _load(compiled)


@functools.cache
def launch_options(device, pdl=True):
    """Keyword arguments of a launch on `device`; with PDL if `pdl` and the hardware supports it."""
    # FMA contraction: Triton 3.9 warns if it is not set, 3.10 turns it off by default.
    options = {"USE_PDL": False, "enable_fp_fusion": True}
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if pdl and is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0):
        options |= {"USE_PDL": True, "launch_pdl": True}
    return options


@functools.cache
def is_sm90(device):
    """Whether the Gluon kernels can run on `device`: they use WGMMA and TMA of sm_90."""
    if WITHOUT_HOPPER:
        return False
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def num_sms(device):
    """Number of SMs; a small number for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def shared_kib(device):
    """KiB of shared memory that a program may use: 99 on RTX 30, 40 and 50, 163 on the A100, 227 on Hopper and B200."""
    if device.type != "cuda":
        return 227
    if WITHOUT_HOPPER:
        return 99
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >> 10  # ROCm has no such property


def has_large_shared_memory(device):
    """Whether a program may use 160 KB of shared memory, for the largest tiles: data-centre GPUs, not RTX 30 and 40."""
    return shared_kib(device) >= 160


def has_inline_asm(device):
    """Whether kernels may contain PTX: compiled on an NVIDIA GPU, not interpreted."""
    return device.type == "cuda" and torch.version.hip is None


# One tensor per device, never freed: captured graphs hold its address.
_NUM_COUNTERS = 1 << 16
_counters: dict[torch.device, torch.Tensor] = {}


def zero_counters(num: int, device: torch.device) -> torch.Tensor:
    """At least `num` zeros, i32. Kernels reset the counters they use, so all launches of a stream share them."""
    if num <= _NUM_COUNTERS:
        if device in _counters:
            return _counters[device]
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return _counters.setdefault(device, torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device))
    # If too many to keep, or first needed in a capture, which zeroes them only on replay: a tensor for this call.
    return torch.zeros(num, dtype=torch.int32, device=device)


@triton.jit
def pdl_launch_dependents(USE_PDL: tl.constexpr):
    """griddepcontrol.launch_dependents: once all programs have executed it, the next grid may start."""
    if USE_PDL:
        gdc_launch_dependents()


@triton.jit
def pdl_wait(USE_PDL: tl.constexpr):
    """griddepcontrol.wait: until the previous grid has completed and its writes are visible."""
    if USE_PDL:
        gdc_wait()

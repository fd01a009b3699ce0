"""Triton: what the model reads in a decode step, gathered from the row table; and how launches chain.

Owns `decode_inputs`, and what all kernels of a step share: how they are compiled and launched, what the device can
take, and its counters. Knows nothing of what the rows mean beyond the columns it is handed.

Programmatic dependent launch (Hopper and later): a kernel may start while its predecessor still runs, so that its
start-up overlaps. Every kernel launched with `launch_options` first calls `pdl_launch_dependents`, may then load what no
kernel writes (weights), and calls `pdl_wait` before it touches anything else. Waiting means that the
predecessor has finished, and by the same rule everything before it: the chain holds as long as every program waits.
Weights must be settled, then: a chain of kernels may not follow their writing without a synchronisation or an unchained
launch in between, for a successor may start before its predecessor has waited.
Decode attention reads lengths and tables early under the same condition, norm_rope_store and decode_qkv_gemm positions and
slots: in a step the embedding's launch lies between. Decode attention's programs without work end without waiting,
which is safe because one always has work; and it lets its successor start only after its own wait.

Triton compiles a kernel anew for an integer that is 1, or a multiple of 16, and one that is not. Where this gains
nothing and the integer changes from step to step (batch sizes, numbers of rows), kernels here opt out of it: every
variant costs a second at start-up, or in the middle of serving. At start-up the variants are compiled side by side
(`parallel_compile`); for this, kernels are launched through `launch`.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_parallel_compile: ContextVar[bool] = ContextVar("parallel_compile", default=False)  # of this thread: others may serve


class _Compilers(ThreadPoolExecutor):
    """Threads that make kernels ready to launch."""

    def submit(self, compile_kernel):  # type: ignore[override]
        return super().submit(lambda: load(compile_kernel()))


def load(kernel):
    """A compiled kernel, on the device. So a CUDA graph can be captured without having launched it before.

    To some versions of Triton, 3.6 among them, this also means to have a C compiler make a program that launches it,
    which takes as long again as compiling it.
    """
    _ = kernel.run
    return kernel


@contextmanager
def parallel_compile(device: torch.device) -> Iterator[Callable[[], None]]:
    """Launches within, through `launch`, do not run: their kernels are compiled side by side on threads.

    The threads begin when the function that it yields is called, and at the end at the latest: before, twenty of them
    would take turns at the interpreter with whoever launches, and make one second of launches seven.
    The end waits for them. What a launch would have written stays as it was, so nothing within may depend on it.
    """
    begin = threading.Event()

    def initialize():
        begin.wait()
        torch.cuda.set_device(device)

    token = _parallel_compile.set(True)
    active_mode = triton.runtime._async_compile.active_mode if hasattr(triton, "AsyncCompileMode") else None
    mode_before = None if active_mode is None else active_mode.get()
    try:
        with (
            _Compilers(initializer=initialize) as compilers,
            # Triton before 3.5 has no such mode: it compiles at once, one kernel after the other (see `launch`).
            triton.AsyncCompileMode(compilers) if hasattr(triton, "AsyncCompileMode") else nullcontext(),
        ):
            try:
                yield begin.set
            finally:
                begin.set()
    finally:
        _parallel_compile.reset(token)
        if active_mode is not None:
            active_mode.set(mode_before)  # Triton 3.6 leaves its own where a compilation failed, and refuses all others


def launch(kernel, grid, *args, **options):
    """``kernel[grid](*args, **options)``; inside `parallel_compile` the kernel is compiled for these arguments, not run."""
    compile_only = _parallel_compile.get()
    compiled = kernel.run(*args, grid=grid, warmup=compile_only, **options)
    if compile_only and not hasattr(triton, "AsyncCompileMode"):
        load(compiled)


@functools.cache
def launch_options(device, pdl=True):
    """Keyword arguments of a launch on `device`: pdl if it may be and the hardware can, plain otherwise."""
    # a * b + c as one instruction: once the default, Triton 3.9 warns where nobody asks for it and 3.10 turns it off.
    options = {"USE_PDL": False, "enable_fp_fusion": True}
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if pdl and is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0):
        options |= {"USE_PDL": True, "launch_pdl": True}
    return options


@functools.cache
def is_sm90(device):
    """Whether the kernels in Gluon run there: they need its tensor cores and its shared memory."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def num_sms(device):
    """How many programs run at once, at one to a multiprocessor; a small number for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def has_large_shared_memory(device):
    """Whether a program may have the 148 KB that the largest tiles take: data-centre GPUs, not RTX 30 and 40."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= 148 << 10  # torch for ROCm does not say


# Counters of a device, kept for good: captured graphs hold their address.
_NUM_COUNTERS = 1 << 16
_counters: dict[torch.device, torch.Tensor] = {}


def zero_counters(num: int, device: torch.device) -> torch.Tensor:
    """At least `num` zeros, i32. Every launch leaves them zero: one set serves all launches of a stream."""
    if num <= _NUM_COUNTERS:
        if device in _counters:
            return _counters[device]
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return _counters.setdefault(device, torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device))
    # Not worth keeping, or allocated inside a capture, where zeros only come true on replay: this call's own.
    return torch.zeros(num, dtype=torch.int32, device=device)


@triton.jit
def pdl_launch_dependents(USE_PDL: tl.constexpr):
    """Once all programs of this kernel have called this, the next kernel may take what room is left."""
    if USE_PDL:
        gdc_launch_dependents()


@triton.jit
def pdl_wait(USE_PDL: tl.constexpr):
    """Wait until the previous kernel is done and its writes are visible."""
    if USE_PDL:
        gdc_wait()

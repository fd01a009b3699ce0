"""Triton: what the model reads in a decode step, gathered from the row table; and how launches chain.

Owns `decode_inputs`, and what all kernels of a step share: how they are compiled and launched, what the device can
take, and its counters. Knows nothing of what the rows mean beyond the columns it is handed.

Programmatic dependent launch (Hopper and later): a kernel may start while its predecessor still runs, so that its
start-up overlaps. Every kernel launched with `launch_options` first calls `let_successor_start`, may then load what no
kernel writes (weights), and calls `after_predecessor` before it touches anything else. Waiting means that the
predecessor has finished, and by the same rule everything before it: the chain holds as long as every program waits.
Weights must be settled, then: a chain of kernels may not follow their writing without a synchronisation or an unchained
launch in between, for a successor may start before its predecessor has waited.
Decode attention reads lengths and tables early under the same condition, norm_rope_store and ring_qkv positions and
slots: in a step the embedding's launch lies between. Decode attention's programs without work end without waiting,
which is safe because one always has work; and it lets its successor start only after its own wait.

Triton compiles a kernel anew for an integer that is 1, or a multiple of 16, and one that is not. Where this gains
nothing and the integer changes from step to step (batch sizes, numbers of rows), kernels here opt out of it: every
variant costs a second at start-up, or in the middle of serving. At start-up the variants are compiled side by side
(`compiling_ahead`); for this, kernels are launched through `launcher`.
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

_compiling_ahead: ContextVar[bool] = ContextVar("compiling_ahead", default=False)  # of this thread: others may serve


class _Compilers(ThreadPoolExecutor):
    """Threads that make kernels ready to launch."""

    def submit(self, compile_kernel):  # type: ignore[override]
        return super().submit(lambda: loaded(compile_kernel()))


def loaded(kernel):
    """A compiled kernel, on the device. So a CUDA graph can be captured without having launched it before.

    To some versions of Triton, 3.6 among them, this also means to have a C compiler make a program that launches it,
    which takes as long again as compiling it.
    """
    _ = kernel.run
    return kernel


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[Callable[[], None]]:
    """Launches within, through `launcher`, do not run: their kernels are compiled side by side on threads.

    The threads begin when the function that it yields is called, and at the end at the latest: before, twenty of them
    would take turns at the interpreter with whoever launches, and make one second of launches seven.
    The end waits for them. What a launch would have written stays as it was, so nothing within may depend on it.
    """
    begin = threading.Event()

    def initialize():
        begin.wait()
        torch.cuda.set_device(device)

    token = _compiling_ahead.set(True)
    active_mode = triton.runtime._async_compile.active_mode if hasattr(triton, "AsyncCompileMode") else None
    mode_before = None if active_mode is None else active_mode.get()
    try:
        with (
            _Compilers(initializer=initialize) as compilers,
            # Triton before 3.5 has no such mode: it compiles at once, one kernel after the other (see `launcher`).
            triton.AsyncCompileMode(compilers) if hasattr(triton, "AsyncCompileMode") else nullcontext(),
        ):
            try:
                yield begin.set
            finally:
                begin.set()
    finally:
        _compiling_ahead.reset(token)
        if active_mode is not None:
            active_mode.set(mode_before)  # Triton 3.6 leaves its own where a compilation failed, and refuses all others


def launcher(kernel, grid):
    """What launches `kernel` as `kernel[grid]` does, or within `compiling_ahead` has it compiled for its arguments."""
    launch = functools.partial(kernel.run, grid=grid, warmup=_compiling_ahead.get())
    if _compiling_ahead.get() and not hasattr(triton, "AsyncCompileMode"):
        return lambda *args, **kwargs: loaded(launch(*args, **kwargs))
    return launch


@functools.cache
def launch_options(device, chained=True):
    """Keyword arguments of a launch on `device`: chained if it may be and the hardware can, plain otherwise."""
    # a * b + c as one instruction: once the default, Triton 3.9 warns where nobody asks for it and 3.10 turns it off.
    options = {"CHAINED": False, "enable_fp_fusion": True}
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if chained and is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0):
        options |= {"CHAINED": True, "launch_pdl": True}
    return options


@functools.cache
def is_hopper(device):
    """Whether the kernels in Gluon run there: they need its tensor cores and its shared memory."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def num_multiprocessors(device):
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
def let_successor_start(CHAINED: tl.constexpr):
    """Once all programs of this kernel have called this, the next kernel may take what room is left."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def after_predecessor(CHAINED: tl.constexpr):
    """Wait until the previous kernel is done and its writes are visible."""
    if CHAINED:
        gdc_wait()


@triton.jit(do_not_specialize=["batch_size"])
def decode_inputs_kernel(
    rows_ptr,  # i32[B]
    last_token_ptr,  # i32[R], strided
    length_ptr,  # i32[R], strided
    block_tables_ptr,  # i32[R, max_blocks]
    input_ids_ptr,  # i32[B], written here like the three below
    positions_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    batch_size,
    last_token_stride,
    length_stride,
    block_tables_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    CHAINED: tl.constexpr,
):
    let_successor_start(CHAINED)
    after_predecessor(CHAINED)
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = offs_b < batch_size
    rows = tl.load(rows_ptr + offs_b, mask=mask, other=0).to(tl.int64)
    length = tl.load(length_ptr + rows * length_stride, mask=mask, other=0)
    live = length > 0
    position = tl.maximum(length - 1, 0)
    token = tl.load(last_token_ptr + rows * last_token_stride, mask=live, other=0)
    block = tl.load(block_tables_ptr + rows * block_tables_stride + position // BLOCK_SIZE, mask=live, other=0)
    slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(input_ids_ptr + offs_b, token, mask=mask)
    tl.store(positions_ptr + offs_b, position, mask=mask)
    tl.store(slot_mapping_ptr + offs_b, slot, mask=mask)
    tl.store(context_lens_ptr + offs_b, length, mask=mask)


def decode_inputs(rows, last_token, length, block_tables, block_size):
    """See reference.decode_inputs. One launch; the four results share one allocation."""
    (batch_size,) = rows.shape
    # Each begins at a multiple of 16 bytes: a pointer that does not makes Triton compile its readers anew.
    padded = triton.cdiv(batch_size, 4) * 4
    # Zeros where the kernel does not run: the embedding and flash-attn follow the results nevertheless.
    allocate = torch.zeros if _compiling_ahead.get() else torch.empty
    results = allocate((4, padded), dtype=torch.int32, device=rows.device)[:, :batch_size]
    if batch_size > 0:
        block = 128
        launcher(decode_inputs_kernel, (triton.cdiv(batch_size, block),))(
            rows,
            last_token,
            length,
            block_tables,
            *results,
            batch_size,
            last_token.stride(0),
            length.stride(0),
            block_tables.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK_B=block,
            num_warps=block // 32,
            **launch_options(rows.device),
        )
    return tuple(results)

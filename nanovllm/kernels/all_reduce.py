"""Triton: one-shot all-reduce and all-gather of small tensors through peer memory (NVLink).

Owns the protocol between the ranks' kernels. Does not know how the memory is shared (``distributed/peer_memory.py``);
its twins are any all-reduce and all-gather.
"""

import triton
import triton.language as tl

from .launch import launch, launch_options, pdl_launch_dependents, pdl_wait


@triton.jit
def _buffer(buffers_ptr, rank, dtype: tl.constexpr):
    """A rank's buffer. An address loaded as an integer has no known alignment: without the hint, 2-byte accesses."""
    return tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def one_shot_kernel(
    x_ptr,  # [N]
    out_ptr,  # [N] or, with GATHER, [WORLD, N], written here
    buffers_ptr,  # i64[WORLD], address of each rank's buffer, [2, capacity] of x's type
    signal_pads_ptr,  # i64[WORLD], address of each rank's signal pad, i64[WORLD, PROGRAMS]: epochs announced to it
    epochs_ptr,  # i64[PROGRAMS], number of this rank's launches, incremented here
    abort_flag_ptr,  # i64[1], pinned host memory; nonzero: stop waiting
    numel, capacity,
    RANK: tl.constexpr, WORLD: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, POLLS: tl.constexpr,
    THREADS: tl.constexpr, GATHER: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Copy x to this rank's buffer, signal all ranks, wait for all signals, then sum (GATHER: copy) buffers by rank.

    Program i reads only elements that program i of each rank wrote, so it synchronizes only with those.

    Double buffering is safe: a rank writes buffer n + 2 only after the barrier of n + 1, which every rank enters after
    reading buffer n.
    """
    pdl_launch_dependents(USE_PDL)
    program = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    pdl_wait(USE_PDL)
    epoch = tl.load(epochs_ptr + program) + 1
    half = (epoch & 1) * capacity
    mine = _buffer(buffers_ptr, RANK, dtype) + half
    for start in range(program * BLOCK, numel, PROGRAMS * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(mine + offs, tl.load(x_ptr + offs, mask=offs < numel), mask=offs < numel)
    tl.debug_barrier()  # all threads have stored before one signals

    for rank in tl.static_range(WORLD):
        signal_pad = tl.load(signal_pads_ptr + rank).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(signal_pad + RANK * PROGRAMS + program, epoch, sem="release", scope="sys")
    my_signals = tl.load(signal_pads_ptr + RANK).to(tl.pointer_type(tl.int64)) + program
    for rank in tl.static_range(WORLD):
        seen = tl.atomic_add(my_signals + rank * PROGRAMS, 0, sem="acquire", scope="sys")
        polls = 0
        while seen < epoch:
            seen = tl.atomic_add(my_signals + rank * PROGRAMS, 0, sem="acquire", scope="sys")
            polls += 1
            if polls % POLLS == 0:  # every ~30 ms: host memory is slow  # noqa: SIM102 (`and` would always load)
                # Maximum over the threads: if they disagreed, some would leave the loop and the rest deadlock.
                if tl.max(tl.load(abort_flag_ptr + tl.zeros((THREADS,), tl.int32), volatile=True), 0) != 0:
                    seen = epoch
                    tl.store(my_signals + rank * PROGRAMS, 1 << 62)  # later launches do not wait at all
    tl.debug_barrier()  # all threads load after one has seen the last signal

    for start in range(program * BLOCK, numel, PROGRAMS * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(WORLD):
            part = tl.load(
                _buffer(buffers_ptr, rank, dtype) + half + offs, mask=offs < numel, other=0, cache_modifier=".cg"
            )
            if GATHER:
                tl.store(out_ptr + rank * numel + offs, part, mask=offs < numel)
            else:
                total += part.to(tl.float32)
        if not GATHER:
            tl.store(out_ptr + offs, total.to(dtype), mask=offs < numel)
    tl.store(epochs_ptr + program, epoch)


def one_shot(x, out, buffers, signal_pads, epochs, abort_flag, capacity, rank, world, gather=False, block=2048,
             num_warps=8):  # fmt: skip
    """out = sum of x over ranks, any shape, contiguous; with `gather` out [world, ...] = x of each rank.

    Every launch on one set of buffers has P programs, and every rank the same launches in the same order.

    Args:
        buffers, signal_pads: i64[world] on the device, addresses of each rank's buffer (2 * capacity elements) and of
            its signal pad (i64[world, P], zero at first).
        epochs: i64[P], zero at first.
        abort_flag: i64[1], pinned host memory. Nonzero lets this rank's launches return with undefined
            results. Set by the host: the driver loads no kernel while another one spins on a dead rank.
    """
    programs = epochs.numel()
    launch(
        one_shot_kernel, (programs,),
        x, out, buffers, signal_pads, epochs, abort_flag, x.numel(), capacity,
        RANK=rank, WORLD=world, PROGRAMS=programs, BLOCK=block, POLLS=1 << 16, THREADS=32 * num_warps, GATHER=gather,
        num_warps=num_warps, **launch_options(x.device),
    )  # fmt: skip
    return out

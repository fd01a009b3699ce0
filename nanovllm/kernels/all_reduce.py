"""Triton: small tensors of all ranks added up or gathered, in one launch, through memory that the GPUs read directly.

Owns the protocol between the ranks' kernels. Knows nothing of how that memory came to be shared
(``layers/parallel.py``); its plain twins are any all-reduce and all-gather.
"""

import triton
import triton.language as tl

from .launch import launch, launch_options, pdl_launch_dependents, pdl_wait


@triton.jit
def _buffer(buffers_ptr, rank, dtype: tl.constexpr):
    """A rank's buffer. Triton must be told that it is aligned, or it moves 2 bytes at a time instead of 16."""
    return tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def one_shot_kernel(
    x_ptr,  # [N], this rank's part of the sum
    out_ptr,  # [N], the sum, or [WORLD, N], written here
    buffers_ptr,  # i64[WORLD], addresses of every rank's buffer, [2, CAPACITY] of x's type
    marks_ptr,  # i64[WORLD], addresses of every rank's marks, i64[WORLD, PROGRAMS]
    epochs_ptr,  # i64[PROGRAMS], launches so far, of this rank
    released_ptr,  # i64[1] in the host's memory: not 0 once nobody shall wait any more
    numel,
    capacity,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    POLLS: tl.constexpr,
    THREADS: tl.constexpr,
    GATHER: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Publish this rank's part, tell every rank, wait until every rank has told, add up all parts in their order.

    Or, with GATHER, copy them side by side.

    A program publishes, and reads from the others, the same pieces, so programs wait only for their namesakes.
    Launches take the two halves of the buffer in turn: who publishes in launch n + 2 has heard from everybody in
    launch n + 1, so everybody has finished launch n, which read this half last.
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
    tl.debug_barrier()  # all threads have stored before one of them says so

    for rank in tl.static_range(WORLD):
        theirs = tl.load(marks_ptr + rank).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(theirs + RANK * PROGRAMS + program, epoch, sem="release", scope="sys")
    my_marks = tl.load(marks_ptr + RANK).to(tl.pointer_type(tl.int64)) + program
    for rank in tl.static_range(WORLD):
        told = tl.atomic_add(my_marks + rank * PROGRAMS, 0, sem="acquire", scope="sys")
        polls = 0
        while told < epoch:
            told = tl.atomic_add(my_marks + rank * PROGRAMS, 0, sem="acquire", scope="sys")
            polls += 1
            if polls % POLLS == 0:  # every 30 ms or so: the host's memory is far away  # noqa: SIM102 (`and` would load always)
                # The largest that any thread read: were they to disagree, some would wait here for the others for ever.
                if tl.max(tl.load(released_ptr + tl.zeros((THREADS,), tl.int32), volatile=True), 0) != 0:
                    told = epoch
                    tl.store(my_marks + rank * PROGRAMS, 1 << 62)  # later launches need not ask again
    tl.debug_barrier()  # all threads load after one of them has seen the last mark

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


def one_shot(x, out, buffers, marks, epochs, released, capacity, rank, world, gather=False, block=2048, num_warps=8):
    """out = sum over ranks of x, any shape, contiguous; with `gather` out [world, ...] = the x of each rank.

    buffers, marks: i64[world] on the device, addresses of each rank's buffer (2 * capacity elements) and of its
    marks (i64[world, P], zero at first); epochs i64[P] zero at first. Every launch on these must have P programs,
    and every rank the same launches in the same order.
    released: i64[1] in pinned memory. Set to 1 it lets this rank's launches pass, with any result. The host sets it
    without asking the driver, which may be blocked: it loads no kernel while another runs that waits for a dead rank.
    """
    programs = epochs.numel()
    launch(
        one_shot_kernel,
        (programs,),
        x, out, buffers, marks, epochs, released, x.numel(), capacity,
        RANK=rank, WORLD=world, PROGRAMS=programs, BLOCK=block, POLLS=1 << 16, THREADS=32 * num_warps, GATHER=gather,
        num_warps=num_warps, **launch_options(x.device),
    )  # fmt: skip
    return out

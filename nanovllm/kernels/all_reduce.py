"""Triton: all-reduce and all-gather through peer memory (NVLink).

Owns the protocol between the ranks' kernels: a rank stores its words in the others' memory and polls its own, one trip
and no signals. Does not know how the memory is shared (``distributed/peer_memory.py``); the references are any
all-reduce and all-gather.
"""

import triton
import triton.language as tl

from .launch import launch, launch_options, pdl_launch_dependents, pdl_wait

EMPTY = tl.constexpr(-1)  # a word that has not arrived: as 16- or 32-bit floats, NaNs that no operation returns
NAN = tl.constexpr(0x7FFF7FFF)  # sent in place of EMPTY: other NaNs, one of 32 bits or two of 16


@triton.jit
def push_kernel(
    x_ptr,  # [2 * num_words] of 16-bit floats, or [num_words] of 32-bit floats
    out_ptr,  # like x or, with GATHER, [WORLD, ...], written here
    buffers_ptr,  # i64[WORLD], address of each rank's buffer, i32[2, WORLD - 1, capacity]: words from each other rank
    launches_ptr,  # i64[capacity / BLOCK], launches of each program so far, incremented here; bit 62: aborted
    abort_flag_ptr,  # i64[1], pinned host memory; nonzero: stop waiting
    num_words, capacity,
    RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, POLLS: tl.constexpr,
    GATHER: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Push BLOCK words into the other ranks' buffers; take theirs out of this rank's, and sum (GATHER: copy) by rank.

    The words are their own signal: a buffer is EMPTY where nothing has arrived, and the reader of a word resets it to
    EMPTY. So no order is needed: .wt stores and volatile loads are relaxed, system scope, and 32-bit accesses are
    single, also as elements of a 128-bit access (PTX, "Vector data-types").

    Every rank makes the same launches in the same order, one at a time. Double buffering is safe: a rank stores the
    words of launch n + 2 after its launch n + 1, which received words from every rank. Each rank sent them after its
    launch n (griddepcontrol.wait), and that launch emptied the words that n + 2 fills.

    A grid larger than a device holds at once requires that programs start in the order of their numbers, as on all
    NVIDIA GPUs: then the lowest-numbered program that waits on any rank has been sent its words, or soon will be.

    A program pushes all BLOCK words even where x has fewer. BLOCK is at least THREADS: if several threads held copies
    of a word, each would load it, and some might find it already reset by another.
    """
    tl.static_assert(BLOCK >= THREADS)
    pdl_launch_dependents(USE_PDL)
    program = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    offs = program * BLOCK + tl.arange(0, BLOCK)
    exists = offs < num_words
    out_words = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + offs
    pdl_wait(USE_PDL)
    x = tl.load(x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + offs, mask=exists, other=0)
    launches = tl.load(launches_ptr + program) + 1
    half = (launches & 1) * (WORLD - 1) * capacity
    x = tl.where(x == EMPTY, NAN, x)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            target = _buffer(buffers_ptr, rank) + half + (RANK - (rank < RANK)) * capacity + offs
            tl.store(target, x, cache_modifier=".wt")

    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        part = x
        if rank != RANK:
            source = _buffer(buffers_ptr, RANK) + half + (rank - (rank > RANK)) * capacity + offs
            part = tl.load(source, volatile=True)
            missing = _is_missing(part, launches)
            polls = 0
            while missing:
                part = tl.load(source, volatile=True)
                missing = _is_missing(part, launches)
                polls += 1
                if polls % POLLS == 0:  # every ~30 ms: host memory is slow  # noqa: SIM102 (`and` would always load)
                    # Maximum over the threads: if they disagreed, some would leave the loop and the rest deadlock.
                    if tl.max(tl.load(abort_flag_ptr + tl.zeros((THREADS,), tl.int32), volatile=True), 0) != 0:
                        missing = False
                        launches |= 1 << 62  # this and later launches do not wait any more
            tl.store(source, tl.full((BLOCK,), EMPTY, tl.int32))
        if GATHER:
            tl.store(out_words + rank * num_words, part, mask=exists)
        elif dtype.primitive_bitwidth == 16:
            low += part.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
            high += (part >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        else:
            low += part.to(dtype, bitcast=True)
    if not GATHER:
        if dtype.primitive_bitwidth == 16:
            total = _pack(low.to(dtype), high.to(dtype))
        else:
            total = low.to(tl.int32, bitcast=True)
        tl.store(out_words, total, mask=exists)
    tl.store(launches_ptr + program, launches)


@triton.jit
def _buffer(buffers_ptr, rank):
    """A rank's buffer. An address loaded as an integer has no known alignment: without the hint, 4-byte accesses."""
    return tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _is_missing(words, launches):
    """Whether a word is EMPTY; False once aborted."""
    return tl.max(((words == EMPTY) & (launches < 1 << 62)).to(tl.int32), 0) != 0


@triton.jit
def _pack(low, high):
    """Two values of 16 bits as one word."""
    return (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


def push(x, out, buffers, launches, abort_flag, capacity, rank, world, gather=False, block=256, num_warps=4):
    """out = sum of x over ranks, may be x; with `gather` out [world, ...] = x of each rank.

    x has any shape, contiguous, of 16-bit or 32-bit floats, a multiple of 4 bytes. Sums are in fp32, rounded once, the
    same bits on all ranks. Gathered bits are those of x, but 32 set bits (one NaN or two) become another NaN.

    Every rank must make the same launches in the same order.

    Args:
        buffers: i64[world] on the device, address of each rank's buffer, i32[2, world - 1, capacity], at first EMPTY.
        launches: i64[capacity / block], zero at first.
        abort_flag: i64[1], pinned host memory. Nonzero lets this rank's launches return with undefined
            results. Set by the host: the driver loads no kernel while another one spins on a dead rank.
        capacity: largest number of 32-bit words of x, a multiple of `block`.
    """
    num_words = x.nbytes // 4
    assert x.is_floating_point() and x.nbytes % 4 == 0 and num_words <= capacity == block * launches.numel()
    launch(
        push_kernel, (triton.cdiv(num_words, block),),
        x, out, buffers, launches, abort_flag, num_words, capacity,
        RANK=rank, WORLD=world, BLOCK=block, THREADS=32 * num_warps, POLLS=1 << 16, GATHER=gather,
        num_warps=num_warps, **launch_options(x.device),
    )  # fmt: skip
    return out

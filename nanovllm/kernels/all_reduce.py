"""Triton: one-shot all-reduce and all-gather of small tensors through peer memory (NVLink).

Owns two protocols between the ranks' kernels: `one_shot` signals and reads (two round trips), `push_all_reduce` stores
each word together with its epoch in the other ranks' memory (one trip, twice the bytes); and `wait_for_epoch`, the wait
for what another rank's copy engine has written. Does not know how the memory is shared
(``distributed/peer_memory.py``); the twins of the sums are any all-reduce and all-gather.
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


@triton.jit
def sum_over_ranks(
    x,  # i32[...], this rank's words: two values of 16 bits, or one of 32 bits
    offs,  # [...], place of each word in the buffers
    epoch,  # i64, number of this launch for these words; bit 62: aborted
    buffers_ptr,  # i64[WORLD], address of each rank's buffer, i64[2, WORLD, capacity]: words from each source rank
    abort_flag_ptr,  # i64[1], pinned host memory; nonzero: stop waiting
    capacity, dtype: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, THREADS: tl.constexpr, POLLS: tl.constexpr,
):  # fmt: skip
    """Push words into all ranks' buffers, each 32 bits together with the 32-bit epoch; poll this rank's buffer until
    every word has the epoch. Returns the sums by rank, i32[...], and epoch, with bit 62 set if aborted.

    Data and epoch of a word arrive together: 64-bit accesses are single, also as elements of a 128-bit access (PTX,
    "Vector data-types"). So nothing else need be ordered: .wt stores and volatile loads are relaxed, system scope.

    A word has the same launches on all ranks, in the same order, and no more than one in flight on a rank. Double
    buffering is safe: a rank stores epoch n + 2 after its launch n + 1, which received the words of n + 1 from every
    rank, sent after that rank's launch n (griddepcontrol.wait), which has read epoch n. Each launch of a word stores
    it, so where n is awaited there is n - 2 or (n <= 2) zero: the epoch may wrap around.

    The tensors have at least THREADS elements. If threads held copies of one, each loaded for itself, some might see
    the word, leave the loop, and leave the others behind at its barrier.
    """
    tl.static_assert(dtype.is_floating())
    tl.static_assert(x.numel >= THREADS)
    received = _buffer(buffers_ptr, RANK, tl.int64)
    words = (epoch << 32) | (x.to(tl.int64) & 0xFFFFFFFF)
    half = (epoch & 1) * WORLD * capacity
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            target = _buffer(buffers_ptr, rank, tl.int64) + half + RANK * capacity + offs
            tl.store(target, words, cache_modifier=".wt")

    low = tl.zeros(x.shape, tl.float32)
    high = tl.zeros(x.shape, tl.float32)
    for rank in tl.static_range(WORLD):
        part = x
        if rank != RANK:
            source = received + half + rank * capacity + offs
            words = tl.load(source, volatile=True)
            missing = _is_missing(words, epoch)
            polls = 0
            while missing:
                words = tl.load(source, volatile=True)
                missing = _is_missing(words, epoch)
                polls += 1
                if polls % POLLS == 0:  # every ~30 ms: host memory is slow  # noqa: SIM102 (`and` would always load)
                    # Maximum over the threads: if they disagreed, some would leave the loop and the rest deadlock.
                    if tl.max(tl.load(abort_flag_ptr + tl.zeros((THREADS,), tl.int32), volatile=True), 0) != 0:
                        missing = False
                        epoch |= 1 << 62  # this and later launches do not wait any more
            part = words.to(tl.int32)
        if dtype.primitive_bitwidth == 16:
            low += part.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
            high += (part >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        else:
            low += part.to(dtype, bitcast=True)
    if dtype.primitive_bitwidth == 16:
        return pack(low.to(dtype), high.to(dtype)), epoch
    else:
        return low.to(tl.int32, bitcast=True), epoch


@triton.jit
def _is_missing(words, epoch):
    """Whether a word does not have its epoch; False once aborted."""
    missing = ((words >> 32).to(tl.int32) != epoch.to(tl.int32)) & (epoch < 1 << 62)
    return tl.max(tl.ravel(missing.to(tl.int32)), 0) != 0


@triton.jit
def pack(low, high):
    """Two values of 16 bits as one word i32."""
    return (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def push_kernel(
    x_ptr,  # [2 * num_words] of 16 bits, or [num_words] of 32 bits
    out_ptr,  # like x, written here
    buffers_ptr,  # as in sum_over_ranks
    epochs_ptr,  # i64[capacity / BLOCK], launches of each program so far, incremented here
    abort_flag_ptr,
    num_words, capacity,
    RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, POLLS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """A program sums BLOCK words, and pushes them all even where x has fewer: so they share one epoch."""
    pdl_launch_dependents(USE_PDL)
    program = tl.program_id(0)
    offs = program * BLOCK + tl.arange(0, BLOCK)
    exists = offs < num_words
    pdl_wait(USE_PDL)
    x = tl.load(x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + offs, mask=exists, other=0)
    epoch = tl.load(epochs_ptr + program) + 1
    total, epoch = sum_over_ranks(
        x, offs, epoch, buffers_ptr, abort_flag_ptr, capacity, x_ptr.dtype.element_ty,
        RANK, WORLD, THREADS, POLLS,
    )  # fmt: skip
    tl.store(out_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + offs, total, mask=exists)
    tl.store(epochs_ptr + program, epoch)


def push_all_reduce(x, out, buffers, epochs, abort_flag, capacity, rank, world, block=256, num_warps=4):
    """out = sum of x over ranks, any shape, contiguous, of 16-bit or 32-bit floats; a multiple of 4 bytes.

    Every rank has the same launches in the same order.

    Args:
        buffers: i64[world] on the device, address of each rank's buffer, i64[2, world, capacity], zero at first.
        epochs: i64[capacity / block], zero at first.
        abort_flag: as in `one_shot`.
        capacity: largest number of 32-bit words of x, a multiple of `block`.
    """
    num_words = x.nbytes // 4
    assert x.nbytes % 4 == 0 and num_words <= capacity == block * epochs.numel()
    launch(
        push_kernel, (triton.cdiv(num_words, block),),
        x, out, buffers, epochs, abort_flag, num_words, capacity,
        RANK=rank, WORLD=world, BLOCK=block, THREADS=32 * num_warps, POLLS=1 << 16,
        num_warps=num_warps, **launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["epoch"])
def wait_kernel(
    flag_ptr,  # i64[1], written by another rank's copy engine
    aborted_ptr,  # i64[1], set here: this and later launches do not wait
    abort_flag_ptr,  # i64[1], pinned host memory
    epoch,
    POLLS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """One program. What the flag announces was written before it, so the kernels behind this one may read it."""
    aborted = tl.load(aborted_ptr)
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    polls = 0
    while (seen != epoch) & (aborted == 0):
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % POLLS == 0:  # every ~30 ms: host memory is slow  # noqa: SIM102 (`and` would always load)
            # Maximum over the threads: if they disagreed, some would leave the loop and the rest deadlock.
            if tl.max(tl.load(abort_flag_ptr + tl.zeros((THREADS,), tl.int32), volatile=True), 0) != 0:
                aborted += 1
    tl.store(aborted_ptr, aborted)


def wait_for_epoch(flag, epoch, aborted, abort_flag):
    """Let the stream wait until flag == epoch; until the host sets `abort_flag`, from which on nothing waits.

    An ordinary launch: an event is waited for just before it, and PDL orders kernels.

    Args:
        flag: i64[1] on this device.
        epoch: a small positive integer.
        aborted: i64[1] on this device, zero at first; shared by all waits.
        abort_flag: as in `one_shot`.
    """
    launch(
        wait_kernel, (1,), flag, aborted, abort_flag, epoch,
        POLLS=1 << 16, THREADS=32, num_warps=1,
    )  # fmt: skip

"""Triton: prefill of the short convolution, in two launches.

    conv        program (block of channels, chunk): both gates and the convolution.
    store       the same program: the last inputs of a sequence, and of a chunk that is saved, to their rows.

Sequences and chunks are looked up on the device, so the grids depend on tensor sizes alone and fit CUDA graphs;
programs without tokens return. Only ``store`` writes rings, and ``conv`` has read them by then. Legend: reference.py.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from ..recurrent.reference import CHUNK
from .decode import strides

BLOCK = 64  # channels of a program


@triton.jit
def gated_inputs(u_ptr, offs, mask, N: tl.constexpr):
    """The products b x in u's dtype; ``offs`` are the offsets of b."""
    b = tl.load(u_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(u_ptr + 2 * N + offs, mask=mask, other=0.0).to(tl.float32)
    return (b * x).to(u_ptr.dtype.element_ty)


@triton.jit
def _conv_kernel(
    u_ptr,  # [T, 3 N], written by the input projection
    weight_ptr,  # [N, W]
    ring_ptr,  # [rows, W, N], or None
    positions_ptr, cu_seqlens_ptr, load_rows_ptr, bounds_ptr, seqs_ptr,  # i32
    y_ptr,  # [T, N], written here
    u_stride, ring_stride,
    N: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    chunk = tl.program_id(1)
    begin = tl.load(bounds_ptr + chunk)
    num_tokens = tl.load(bounds_ptr + chunk + 1) - begin
    if num_tokens <= 0:
        return
    seq = tl.load(seqs_ptr + chunk)
    num_before = begin - tl.load(cu_seqlens_ptr + seq)  # tokens of its sequence in this launch
    offs_n, offs_c = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :], tl.arange(0, C)[:, None]
    mask_n, mask_c = offs_n < N, offs_c < num_tokens
    u_ptr += begin.to(tl.int64) * u_stride

    # [C, BLOCK]
    y = tl.zeros([C, BLOCK], tl.float32)
    for i in tl.static_range(W):
        weight = tl.load(weight_ptr + offs_n * W + W - 1 - i, mask=mask_n, other=0.0).to(tl.float32)
        mask = mask_c & (offs_c - i >= -num_before) & mask_n
        y += gated_inputs(u_ptr, (offs_c - i) * u_stride + offs_n, mask, N).to(tl.float32) * weight
    if ring_ptr is not None:
        load_row = tl.load(load_rows_ptr + seq).to(tl.int64)
        if (load_row >= 0) & (num_before < W - 1):
            position = tl.load(positions_ptr + begin)
            ring_ptr += load_row * ring_stride
            for i in tl.static_range(1, W):  # W is added so that no dividend is negative
                weight = tl.load(weight_ptr + offs_n * W + W - 1 - i, mask=mask_n, other=0.0).to(tl.float32)
                mask = mask_c & (offs_c - i < -num_before) & mask_n
                ptrs = ring_ptr + (position + offs_c + W - i) % W * N + offs_n
                y += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) * weight
    c = tl.load(u_ptr + N + offs_c * u_stride + offs_n, mask=mask_c & mask_n, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + (begin.to(tl.int64) * N + offs_c * N + offs_n)
    tl.store(y_ptrs, (c * y).to(y_ptr.dtype.element_ty), mask=mask_c & mask_n)


@triton.jit
def store_inputs(
    u_ptr, ring_ptr, row, load_row, offs_n, start, end, position, u_stride, ring_stride,
    N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Store the last W - 1 inputs before token ``end`` of position ``position`` to the ring of ``row``.

    Inputs before token ``start`` come from the ring of ``load_row``, which may be the same row.
    """
    mask = offs_n < N
    for i in tl.static_range(1, W):
        slot = (position + W - i) % W * N + offs_n
        if end - i >= start:
            x = gated_inputs(u_ptr, (end - i) * u_stride + offs_n, mask, N)
        elif load_row >= 0:
            x = tl.load(ring_ptr + load_row * ring_stride + slot, mask=mask)
        else:
            x = tl.zeros(offs_n.shape, ring_ptr.dtype.element_ty)
        tl.store(ring_ptr + row * ring_stride + slot, x, mask=mask)


@triton.jit
def _store_kernel(
    u_ptr,  # [T, 3 N]
    ring_ptr,  # [rows, W, N], written here
    positions_ptr, cu_seqlens_ptr, rows_ptr, load_rows_ptr, first_chunks_ptr, bounds_ptr, seqs_ptr, save_rows_ptr,
    u_stride, ring_stride,
    N: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    chunk = tl.program_id(1)
    begin, end = tl.load(bounds_ptr + chunk).to(tl.int64), tl.load(bounds_ptr + chunk + 1).to(tl.int64)
    if begin >= end:
        return
    seq = tl.load(seqs_ptr + chunk)
    start, stop = tl.load(cu_seqlens_ptr + seq).to(tl.int64), tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64)
    load_row = tl.load(load_rows_ptr + seq).to(tl.int64)
    first = tl.load(positions_ptr + start) - start
    offs_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    save_row = tl.load(save_rows_ptr + chunk).to(tl.int64)
    # A first chunk of fewer than W - 1 tokens needs the ring of ``load_row``, which the program of the last chunk may
    # overwrite; so that program also stores the first chunk's snapshot.
    if (save_row >= 0) & ((end == stop) | (end - start >= W - 1)):
        store_inputs(u_ptr, ring_ptr, save_row, load_row, offs_n, start, end, first + end, u_stride, ring_stride, N, W)
    if end == stop:
        first_chunk = tl.load(first_chunks_ptr + seq)
        first_end = tl.load(bounds_ptr + first_chunk + 1).to(tl.int64)
        save_row = tl.load(save_rows_ptr + first_chunk).to(tl.int64)
        if (save_row >= 0) & (first_end < end) & (first_end - start < W - 1):
            store_inputs(
                u_ptr, ring_ptr, save_row, load_row, offs_n, start, first_end, first + first_end, u_stride,
                ring_stride, N, W,
            )  # fmt: skip
        row = tl.load(rows_ptr + seq).to(tl.int64)
        store_inputs(u_ptr, ring_ptr, row, load_row, offs_n, start, end, first + end, u_stride, ring_stride, N, W)


def prefill(u, weights, states, positions, chunks):
    """See reference.prefill. Reads nothing on the host: fit for CUDA graphs."""
    N, W = weights.conv.shape
    y = torch.empty((len(u), N), dtype=u.dtype, device=u.device)
    ring = None if states is None else states.conv
    u_stride, ring_stride = strides(u, weights, states)
    options = launch_options(u.device)
    launch(
        _conv_kernel, (triton.cdiv(N, BLOCK), len(chunks.seqs)),
        u, weights.conv, ring, positions, chunks.cu_seqlens, chunks.load_rows, chunks.bounds, chunks.seqs, y,
        u_stride, ring_stride, N=N, W=W, C=CHUNK, BLOCK=BLOCK, num_warps=4, **options,
    )  # fmt: skip
    if ring is not None:
        launch(
            _store_kernel, (triton.cdiv(N, 4 * BLOCK), len(chunks.seqs)),
            u, ring, positions, chunks.cu_seqlens, chunks.rows, chunks.load_rows, chunks.first_chunks, chunks.bounds,
            chunks.seqs, chunks.save_rows, u_stride, ring_stride, N=N, W=W, BLOCK=4 * BLOCK, num_warps=4, **options,
        )  # fmt: skip
    return y

"""Triton: prefill of Mamba-2, in chunks of 64 tokens (reference.mamba2_chunk), in two launches; norm.py has the third.

Owns the partition of the work and its scratch memory. Sequences and chunks are looked up on the device, so the grids
depend on tensor sizes alone and fit CUDA graphs; programs without tokens return.

    conv        program (block of channels, chunk): the convolution. Another program per chunk: time steps, decays.
    scan        program (rows of S, head, sequence): chunk after chunk, with its part of S in registers.

Only the scan writes states, each channel of a ring by one program, and only ``conv`` reads channels that other programs
write. Operands of tl.dot have the model's dtype, sums and S are fp32. Legend: reference.py.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from ..launch import has_large_shared_memory, launch, launch_options, num_sms, pdl_launch_dependents, pdl_wait
from ..recurrent.conv import conv_chunk, silu, store_states
from ..recurrent.reference import CHUNK
from .decode import load_or_zero, strides, time_step
from .norm import gate_and_norm


@triton.jit(do_not_specialize=["num_tokens"])
def _conv_kernel(
    u_ptr,  # [T, z | x | B | C | dt], written by the input projection
    conv_ptr, conv_bias_ptr, A_log_ptr, dt_bias_ptr,  # the weights
    ring_ptr,  # [rows, W, channels], or None
    positions_ptr, cu_seqlens_ptr, load_rows_ptr, bounds_ptr, seqs_ptr,  # i32
    xbc_ptr,  # [T, channels], written here
    dt_ptr, G_ptr,  # fp32 [H, T]: time steps, and sums of dt A over the chunk; written here
    num_tokens, u_stride, ring_stride,
    H: tl.constexpr, P: tl.constexpr, CHANNELS: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    block, chunk = tl.program_id(0), tl.program_id(1)
    begin = tl.load(bounds_ptr + chunk)
    count = tl.load(bounds_ptr + chunk + 1) - begin
    if count <= 0:
        return
    first = begin.to(tl.int64)
    u_ptr += first * u_stride + H * P
    offs_c = tl.arange(0, C)[:, None]
    mask = offs_c < count
    if block * BLOCK < CHANNELS:
        seq = tl.load(seqs_ptr + chunk)
        num_before = begin - tl.load(cu_seqlens_ptr + seq)
        position = tl.load(positions_ptr + begin)
        is_restored = False
        if ring_ptr is not None:
            load_row = tl.load(load_rows_ptr + seq).to(tl.int64)
            is_restored = (load_row >= 0) & (num_before < W - 1)
            ring_ptr += load_row * ring_stride
        channels = block * BLOCK + tl.arange(0, BLOCK)
        y = conv_chunk(
            u_ptr, conv_ptr, ring_ptr, channels, count, num_before, position, is_restored, u_stride, CHANNELS, W, C
        )
        y = silu(y + load_or_zero(conv_bias_ptr, channels)[None, :]).to(u_ptr.dtype.element_ty)
        tl.store(xbc_ptr + first * CHANNELS + offs_c * CHANNELS + channels[None, :], y, mask)
    else:
        heads = tl.arange(0, BLOCK_H)[None, :]
        is_head = heads < H
        dt_bias = tl.load(dt_bias_ptr + heads, mask=is_head, other=0.0).to(tl.float32)
        A = -tl.exp(tl.load(A_log_ptr + heads, mask=is_head, other=0.0).to(tl.float32))
        is_step = mask & is_head
        steps = tl.load(u_ptr + offs_c * u_stride + CHANNELS + heads, is_step, other=0.0)
        dt = time_step(steps.to(tl.float32), dt_bias)
        offs = heads.to(tl.int64) * num_tokens + first + offs_c
        tl.store(dt_ptr + offs, dt, is_step)
        tl.store(G_ptr + offs, tl.cumsum(tl.where(is_step, dt * A, 0.0), 0), is_step)


@triton.jit(do_not_specialize=["num_tokens"])
def _scan_kernel(
    u_ptr,  # [T, z | x | B | C | dt]
    D_ptr,  # fp32 [H]
    ring_ptr, state_ptr,  # [rows, W, channels], [rows, H, P, N], or None
    positions_ptr, cu_seqlens_ptr, rows_ptr, load_rows_ptr, first_chunks_ptr, bounds_ptr, save_rows_ptr,  # i32
    xbc_ptr, dt_ptr, G_ptr,  # see _conv_kernel
    y_ptr,  # [T, H P], written here
    num_tokens, u_stride, ring_stride, state_stride,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    CHANNELS: tl.constexpr = H * P + 2 * G * N
    DTYPE: tl.constexpr = u_ptr.dtype.element_ty
    head, seq = tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    stop = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64)
    if start >= stop:
        return
    group = head // (H // G)
    offs_c, offs_n = tl.arange(0, C), tl.arange(0, N)
    row_c, col_c = offs_c[:, None], offs_c[None, :]
    offs_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    x_channels, B_channels = head * P + offs_p, H * P + group * N + offs_n
    dt_ptr += head.to(tl.int64) * num_tokens
    G_ptr += head.to(tl.int64) * num_tokens
    u_ptr += H * P
    D = tl.load(D_ptr + head).to(tl.float32)

    state = tl.zeros([N, BLOCK_P], tl.float32)  # S^T: tensor cores of Hopper multiply 64 rows and more
    if state_ptr is not None:
        row, load_row = tl.load(rows_ptr + seq).to(tl.int64), tl.load(load_rows_ptr + seq).to(tl.int64)
        position = tl.load(positions_ptr + start)
        has_group = (head % (H // G) == 0) & (tl.program_id(0) == 0)
        state_ptr += head * (P * N)
        state_offs = offs_p[None, :] * N + offs_n[:, None]
        if load_row >= 0:
            state = tl.load(state_ptr + load_row * state_stride + state_offs).to(tl.float32)

    x_offs, B_offs = row_c * CHANNELS + x_channels[None, :], row_c * CHANNELS + B_channels[None, :]
    for chunk in range(tl.load(first_chunks_ptr + seq), tl.load(first_chunks_ptr + seq + 1)):
        begin = tl.load(bounds_ptr + chunk).to(tl.int64)
        end = tl.load(bounds_ptr + chunk + 1).to(tl.int64)
        count = (end - begin).to(tl.int32)
        mask = row_c < count
        # Written by conv: [C, BLOCK_P] of x, [C, N] of B and C, [C] of dt and G. Beyond the chunk x, B, C and dt are 0,
        # and G keeps its last value.
        x = tl.load(xbc_ptr + begin * CHANNELS + x_offs, mask=mask, other=0.0)
        B_ptrs = xbc_ptr + begin * CHANNELS + B_offs
        B = tl.load(B_ptrs, mask=mask, other=0.0)
        C_tile = tl.load(B_ptrs + G * N, mask=mask, other=0.0)
        G_last = tl.load(G_ptr + end - 1)
        G_rows = tl.load(G_ptr + begin + row_c, mask=mask, other=0.0)
        G_rows = tl.where(mask, G_rows, G_last)
        G_cols = tl.load(G_ptr + begin + col_c, mask=col_c < count, other=0.0)
        dt_rows = tl.load(dt_ptr + begin + row_c, mask=mask, other=0.0)
        dt_cols = tl.load(dt_ptr + begin + col_c, mask=col_c < count, other=0.0)

        scores = tl.dot(C_tile, tl.trans(B), input_precision=PRECISION)
        scores *= tl.exp(tl.where((row_c >= col_c) & (col_c < count), G_rows - G_cols, -float("inf"))) * dt_cols
        y = tl.dot(C_tile, state.to(DTYPE), input_precision=PRECISION) * tl.exp(G_rows)
        y = tl.dot(scores.to(DTYPE), x, y, input_precision=PRECISION)
        wide = x.to(tl.float32)
        tl.store(y_ptr + (begin * H + head) * P + row_c * (H * P) + offs_p[None, :], (y + D * wide).to(DTYPE), mask)
        added = (wide * (dt_rows * tl.exp(G_last - G_rows))).to(DTYPE)
        state = tl.dot(tl.trans(B), added, state * tl.exp(G_last), input_precision=PRECISION)
        if state_ptr is not None:
            save_row = tl.load(save_rows_ptr + chunk).to(tl.int64)
            if save_row >= 0:
                store_states(
                    state, state_ptr + save_row * state_stride + state_offs, u_ptr, ring_ptr, save_row, load_row,
                    x_channels, B_channels, has_group, start, end, position + (end - start).to(tl.int32), u_stride,
                    ring_stride, G * N, CHANNELS, W,
                )  # fmt: skip
    if state_ptr is not None:
        store_states(
            state, state_ptr + row * state_stride + state_offs, u_ptr, ring_ptr, row, load_row, x_channels, B_channels,
            has_group, start, stop, position + (stop - start).to(tl.int32), u_stride, ring_stride, G * N, CHANNELS, W,
        )  # fmt: skip


def scan_config(num_heads, head_dim, state_dim, dtype, device):
    """Rows of S per program of the scan, warps, and stages, for ``num_heads`` heads over all sequences.

    Few heads get small parts, so that the chains of chunks occupy more SMs. Many heads get large parts, which read B
    and C fewer times.
    """
    block_p = min(head_dim, 64 if num_heads * head_dim >= 64 * num_sms(device) else 32)
    if dtype.itemsize > 2 or not has_large_shared_memory(device):
        return min(block_p, 32), 4, 1
    return block_p, 4 if state_dim * block_p <= 8192 else 8, 2


def prefill(u, weights, states, positions, chunks):
    """See reference.prefill. Reads nothing on the host: fit for CUDA graphs."""
    num_heads, num_groups, head_dim, state_dim = weights.sizes
    channels, W = weights.conv.shape
    num_tokens, device = len(u), u.device
    y = torch.empty((num_tokens, num_heads * head_dim), dtype=u.dtype, device=device)
    xbc = torch.empty((num_tokens, channels), dtype=u.dtype, device=device)
    dt, G = torch.empty((2, num_heads, num_tokens), dtype=torch.float32, device=device)
    ring, state = states or (None, None)
    u_stride, ring_stride, state_stride = strides(u, weights, states)
    options = launch_options(device)
    block = gcd(channels, 64)  # 110 us for 16,384 tokens of 3,328 channels on an H200; with 128 channels 150
    launch(
        _conv_kernel, (channels // block + 1, len(chunks.seqs)),
        u, weights.conv, weights.conv_bias, weights.A_log, weights.dt_bias, ring, positions, chunks.cu_seqlens,
        chunks.load_rows, chunks.bounds, chunks.seqs, xbc, dt, G, num_tokens, u_stride, ring_stride,
        H=num_heads, P=head_dim, CHANNELS=channels, W=W, C=CHUNK, BLOCK=block,
        BLOCK_H=triton.next_power_of_2(num_heads), num_warps=4, **options,
    )  # fmt: skip
    block_p, num_warps, num_stages = scan_config(
        len(chunks.rows) * num_heads, head_dim, state_dim, u.dtype, device
    )
    launch(
        _scan_kernel, (head_dim // block_p, num_heads, len(chunks.rows)),
        u, weights.D, ring, state, positions, chunks.cu_seqlens, chunks.rows, chunks.load_rows, chunks.first_chunks,
        chunks.bounds, chunks.save_rows, xbc, dt, G, y, num_tokens, u_stride, ring_stride, state_stride,
        H=num_heads, G=num_groups, P=head_dim, N=state_dim, W=W, C=CHUNK, BLOCK_P=block_p,
        PRECISION="ieee" if u.dtype == torch.float32 else "tf32", num_warps=num_warps, num_stages=num_stages, **options,
    )  # fmt: skip
    return gate_and_norm(y, u, weights)

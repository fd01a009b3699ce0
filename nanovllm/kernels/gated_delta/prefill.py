"""Triton: prefill of the gated delta net, in chunks of 64 tokens (reference.delta_chunk), in four launches.

Owns the partition of the work and its scratch memory. Sequences and chunks are looked up on the device, so the grids
depend on tensor sizes alone and fit CUDA graphs; programs without tokens return.

    conv        program (head of q, k or v; chunk): the convolution, q and k of unit length.
    prepare     program (value head, chunk), what needs no state: decays G, T = (I + A)^-1, U, W, and P = q k^T * D.
    scan        program (rows of S, value head, sequence): chunk after chunk, with its part of S in registers.
    norm        the gated norm, which needs all of a head's o.

v, U, o and the result share a tensor: the program that overwrites a part is the only one that reads it. Only the scan
writes states, each channel of a ring by one program, and only ``conv`` reads channels that other programs write.

Operands of tl.dot have the model's dtype, sums and S are fp32. Offsets within a chunk are 32 bits wide, which saves
registers. Legend: reference.py.
"""

import torch
import triton
import triton.language as tl

from ..launch import has_large_shared_memory, launch, launch_options, num_sms, pdl_launch_dependents, pdl_wait
from ..recurrent.conv import conv_chunk, silu, store_states
from ..recurrent.reference import CHUNK
from .decode import gated_norm, inverse_length, log_decay, strides


@triton.jit
def _conv_kernel(
    u_ptr,  # [T, 2 HK K + 2 HV V], written by the input projection
    conv_ptr,  # [channels, W]
    ring_ptr,  # [rows, W, channels], or None
    positions_ptr, cu_seqlens_ptr, load_rows_ptr, bounds_ptr, seqs_ptr,  # i32
    qk_ptr, y_ptr,  # [T, 2 HK, K] and [T, HV, V]: q and k, v; written here
    u_stride, ring_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    CHANNELS: tl.constexpr = 2 * HK * K + HV * V
    head, chunk = tl.program_id(0), tl.program_id(1)
    begin = tl.load(bounds_ptr + chunk)
    num_tokens = tl.load(bounds_ptr + chunk + 1) - begin
    if num_tokens <= 0:
        return
    seq = tl.load(seqs_ptr + chunk)
    num_before = begin - tl.load(cu_seqlens_ptr + seq)
    position = tl.load(positions_ptr + begin)
    is_restored = False
    if ring_ptr is not None:
        load_row = tl.load(load_rows_ptr + seq).to(tl.int64)
        is_restored = (load_row >= 0) & (num_before < W - 1)
        ring_ptr += load_row * ring_stride
    first = begin.to(tl.int64)
    u_ptr += first * u_stride
    offs_c, offs_k, offs_v = tl.arange(0, C)[:, None], tl.arange(0, K), tl.arange(0, V)
    mask = offs_c < num_tokens
    if head < 2 * HK:
        x = conv_chunk(
            u_ptr, conv_ptr, ring_ptr, head * K + offs_k, num_tokens, num_before, position, is_restored, u_stride,
            CHANNELS, W, C,
        )  # fmt: skip
        x = silu(x).to(u_ptr.dtype.element_ty).to(tl.float32)
        x *= inverse_length(x, 1) * tl.where(head < HK, K**-0.5, 1.0)
        qk_ptrs = qk_ptr + (first * (2 * HK) + head) * K + offs_c * (2 * HK * K) + offs_k[None, :]
        tl.store(qk_ptrs, x.to(u_ptr.dtype.element_ty), mask)
    else:
        v_head = head - 2 * HK
        v = conv_chunk(
            u_ptr, conv_ptr, ring_ptr, 2 * HK * K + v_head * V + offs_v, num_tokens, num_before, position, is_restored,
            u_stride, CHANNELS, W, C,
        )  # fmt: skip
        v = silu(v).to(u_ptr.dtype.element_ty)
        tl.store(y_ptr + (first * HV + v_head) * V + offs_c * (HV * V) + offs_v[None, :], v, mask)


@triton.jit
def unit_lower_inverse(A, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A, of 2**LEVELS rows.

    Each level doubles the diagonal blocks: the inverse of [[X, 0], [B, Y]] is [[X', 0], [-Y' B X', Y']]. All
    intermediate results are inverses. The terms of the series I - A + A^2 - ... are not, and cancel: where a token
    repeats, powers of A reach 1e17.
    """
    row, col = tl.arange(0, 2**LEVELS)[:, None], tl.arange(0, 2**LEVELS)[None, :]
    T = tl.where(row == col, 1.0, 0.0) - tl.where(row >> 1 == col >> 1, A, 0.0)
    for LEVEL in tl.static_range(1, LEVELS):
        is_below = (row >> (LEVEL + 1) == col >> (LEVEL + 1)) & (row >> LEVEL != col >> LEVEL)
        B = tl.where(is_below, A, 0.0)
        T -= tl.dot(T, tl.dot(B, T, input_precision=PRECISION), input_precision=PRECISION)
    return T


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_kernel(
    ba_ptr,  # [T, 2 HV], written by the input projection
    A_log_ptr, dt_bias_ptr,  # fp32 [HV]
    bounds_ptr,  # i32[NC + 1]
    qk_ptr,  # [T, 2 HK, K], written by conv
    w_ptr, p_ptr, G_ptr,  # [T, HV, K], [T, HV, C], fp32 [HV, T]; written here
    y_ptr,  # [T, HV, V]: v, overwritten with U
    num_tokens, ba_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    head, chunk = tl.program_id(0), tl.program_id(1)
    begin = tl.load(bounds_ptr + chunk)
    count = tl.load(bounds_ptr + chunk + 1) - begin
    if count <= 0:
        return
    first = begin.to(tl.int64)
    offs_c, offs_k, offs_v = tl.arange(0, C), tl.arange(0, K)[None, :], tl.arange(0, V)[None, :]
    row, col, mask = offs_c[:, None], offs_c[None, :], offs_c < count

    # [C]; beyond the chunk beta is 0 and G the last
    ba_ptrs = ba_ptr + first * ba_stride + offs_c * ba_stride + head
    b, a = tl.load(ba_ptrs, mask=mask, other=0.0), tl.load(ba_ptrs + HV, mask=mask, other=0.0)
    beta = tl.where(mask, tl.sigmoid(b.to(tl.float32)), 0.0)
    A_log, dt_bias = tl.load(A_log_ptr + head).to(tl.float32), tl.load(dt_bias_ptr + head).to(tl.float32)
    G = tl.cumsum(tl.where(mask, log_decay(a.to(tl.float32), A_log, dt_bias), 0.0), 0)
    tl.store(G_ptr + head.to(tl.int64) * num_tokens + first + offs_c, G, mask=mask)

    # q and k [C, K], zeros beyond the chunk; the rest [C, C]
    q_ptrs = qk_ptr + (first * (2 * HK) + head // (HV // HK)) * K + row * (2 * HK * K) + offs_k
    q = tl.load(q_ptrs, mask=mask[:, None], other=0.0)
    k = tl.load(q_ptrs + HK * K, mask=mask[:, None], other=0.0)
    decay = tl.exp(tl.where(row >= col, G[:, None] - G[None, :], -float("inf")))
    p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
    tl.store(p_ptr + (first * HV + head) * C + row * (HV * C) + col, p.to(DTYPE), mask=mask[:, None])
    A = tl.where(row > col, tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None], 0.0)
    T = unit_lower_inverse(A, LEVELS, PRECISION)

    w = tl.dot((T * (beta * tl.exp(G))[None, :]).to(DTYPE), k, input_precision=PRECISION)
    tl.store(w_ptr + (first * HV + head) * K + row * (HV * K) + offs_k, w.to(DTYPE), mask=mask[:, None])
    y_ptrs = y_ptr + (first * HV + head) * V + row * (HV * V) + offs_v
    v = tl.load(y_ptrs, mask=mask[:, None], other=0.0)
    U = tl.dot((T * beta[None, :]).to(DTYPE), v, input_precision=PRECISION)
    tl.store(y_ptrs, U.to(DTYPE), mask=mask[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _scan_kernel(
    u_ptr,  # [T, 2 HK K + 2 HV V]
    ring_ptr, delta_ptr,  # [rows, W, channels], [rows, HV, V, K], or None
    positions_ptr, cu_seqlens_ptr, rows_ptr, load_rows_ptr, first_chunks_ptr, bounds_ptr, save_rows_ptr,  # i32
    qk_ptr, w_ptr, p_ptr, G_ptr,  # see _prepare_kernel
    y_ptr,  # [T, HV V]: U, overwritten with o
    num_tokens, u_stride, ring_stride, delta_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    CHANNELS: tl.constexpr = 2 * HK * K + HV * V
    DTYPE: tl.constexpr = u_ptr.dtype.element_ty
    head, seq = tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    stop = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64)
    if start >= stop:
        return
    key_head = head // (HV // HK)
    offs_c, offs_k = tl.arange(0, C), tl.arange(0, K)
    row_c = offs_c[:, None]
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    G_ptr += head.to(tl.int64) * num_tokens

    state = tl.zeros([K, BLOCK_V], tl.float32)  # S^T: tensor cores of Hopper multiply 64 rows and more
    if delta_ptr is not None:
        row, load_row = tl.load(rows_ptr + seq).to(tl.int64), tl.load(load_rows_ptr + seq).to(tl.int64)
        position = tl.load(positions_ptr + start)
        has_key_channels = (head % (HV // HK) == 0) & (tl.program_id(0) == 0)
        q_channels, v_channels = key_head * K + offs_k, 2 * HK * K + head * V + offs_v
        delta_ptr += head * (V * K)
        if load_row >= 0:
            state = tl.load(delta_ptr + load_row * delta_stride + offs_v[None, :] * K + offs_k[:, None]).to(tl.float32)

    q_offs, w_offs = row_c * (2 * HK * K) + offs_k[None, :], row_c * (HV * K) + offs_k[None, :]
    p_offs, y_offs = row_c * (HV * C) + offs_c[None, :], row_c * (HV * V) + offs_v[None, :]
    for chunk in range(tl.load(first_chunks_ptr + seq), tl.load(first_chunks_ptr + seq + 1)):
        begin = tl.load(bounds_ptr + chunk).to(tl.int64)
        end = tl.load(bounds_ptr + chunk + 1).to(tl.int64)
        mask = row_c < (end - begin).to(tl.int32)
        # Written by conv and prepare: [C, K] of w, q and k, [C, C] of p, [C, BLOCK_V] of U, [C] of G. Zeros beyond the
        # chunk, as in the columns of p.
        w = tl.load(w_ptr + (begin * HV + head) * K + w_offs, mask=mask, other=0.0)
        q_ptrs = qk_ptr + (begin * (2 * HK) + key_head) * K + q_offs
        q = tl.load(q_ptrs, mask=mask, other=0.0)
        k = tl.load(q_ptrs + HK * K, mask=mask, other=0.0)
        p = tl.load(p_ptr + (begin * HV + head) * C + p_offs, mask=mask, other=0.0)
        y_ptrs = y_ptr + (begin * HV + head) * V + y_offs
        U = tl.load(y_ptrs, mask=mask, other=0.0)
        G = tl.load(G_ptr + begin + row_c, mask=mask, other=0.0)
        G_last = tl.load(G_ptr + end - 1)

        operand = state.to(DTYPE)
        new = U.to(tl.float32) - tl.dot(w, operand, input_precision=PRECISION)
        o = tl.dot(q, operand, input_precision=PRECISION) * tl.exp(G)
        o = tl.dot(p, new.to(DTYPE), o, input_precision=PRECISION)
        tl.store(y_ptrs, o.to(DTYPE), mask=mask)
        new = (new * tl.exp(G_last - G)).to(DTYPE)
        state = tl.dot(tl.trans(k), new, state * tl.exp(G_last), input_precision=PRECISION)
        if delta_ptr is not None:
            save_row = tl.load(save_rows_ptr + chunk).to(tl.int64)
            if save_row >= 0:
                delta_ptrs = delta_ptr + save_row * delta_stride + offs_v[None, :] * K + offs_k[:, None]
                store_states(
                    state, delta_ptrs, u_ptr, ring_ptr, save_row, load_row, v_channels, q_channels, has_key_channels,
                    start, end, position + (end - start).to(tl.int32), u_stride, ring_stride, HK * K, CHANNELS, W,
                )  # fmt: skip
    if delta_ptr is not None:
        delta_ptrs = delta_ptr + row * delta_stride + offs_v[None, :] * K + offs_k[:, None]
        store_states(
            state, delta_ptrs, u_ptr, ring_ptr, row, load_row, v_channels, q_channels, has_key_channels, start, stop,
            position + (stop - start).to(tl.int32), u_stride, ring_stride, HK * K, CHANNELS, W,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_heads"])
def _norm_kernel(
    y_ptr,  # [T, HV V]: o, overwritten with the result
    u_ptr,  # [T, 2 HK K + 2 HV V]; z are the last HV V
    norm_ptr,  # [V]
    num_heads, u_stride, eps,
    CHANNELS: tl.constexpr, HV: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK of the T HV heads."""
    pdl_launch_dependents(USE_PDL)
    offs_v = tl.arange(0, V)[None, :]
    heads = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    mask = heads < num_heads
    weight = tl.load(norm_ptr + offs_v)
    z_ptrs = u_ptr + (heads // HV).to(tl.int64) * u_stride + CHANNELS + heads % HV * V + offs_v
    y_ptrs = y_ptr + heads.to(tl.int64) * V + offs_v
    pdl_wait(USE_PDL)
    # [BLOCK, V]
    o, z = tl.load(y_ptrs, mask=mask, other=0.0), tl.load(z_ptrs, mask=mask, other=0.0)
    tl.store(y_ptrs, gated_norm(o, z, weight, eps, 1), mask=mask)


def scan_config(num_heads, value_dim, dtype, device):
    """Rows of S per program of the scan (8 for each warp), and stages, for ``num_heads`` heads over all sequences.

    Few heads get small parts, so that the chains of chunks occupy more SMs. Many heads get large parts, which read q,
    k and W fewer times. Two stages take 140 KB of shared memory for heads of 128 in 16 bits.
    """
    block_v = 64 if num_heads * value_dim >= 64 * num_sms(device) else 32
    is_large = dtype.itemsize > 2 or not has_large_shared_memory(device)
    return min(32 if is_large else block_v, value_dim), 1 if is_large else 2


def prefill(u, ba, weights, states, positions, chunks):
    """See reference.prefill. Reads nothing on the host: fit for CUDA graphs."""
    num_key_heads, num_value_heads, key_dim, value_dim = weights.sizes
    channels, W = weights.conv.shape
    num_tokens, device = len(u), u.device
    y = torch.empty((num_tokens, num_value_heads * value_dim), dtype=u.dtype, device=device)
    qk = torch.empty((num_tokens, 2 * num_key_heads, key_dim), dtype=u.dtype, device=device)
    w = torch.empty((num_tokens, num_value_heads, key_dim), dtype=u.dtype, device=device)
    p = torch.empty((num_tokens, num_value_heads, CHUNK), dtype=u.dtype, device=device)
    G = torch.empty((num_value_heads, num_tokens), dtype=torch.float32, device=device)
    ring, delta = states or (None, None)
    u_stride, ba_stride, ring_stride, delta_stride = strides(u, ba, weights, states)
    sizes = {"HK": num_key_heads, "HV": num_value_heads, "K": key_dim, "V": value_dim, "C": CHUNK}
    options = launch_options(device)
    precision = "ieee" if u.dtype == torch.float32 else "tf32"
    launch(
        _conv_kernel, (2 * num_key_heads + num_value_heads, len(chunks.seqs)),
        u, weights.conv, ring, positions, chunks.cu_seqlens, chunks.load_rows, chunks.bounds, chunks.seqs, qk, y,
        u_stride, ring_stride, **sizes, W=W, num_warps=4, **options,
    )  # fmt: skip
    launch(
        _prepare_kernel, (num_value_heads, len(chunks.seqs)),
        ba, weights.A_log, weights.dt_bias, chunks.bounds, qk, w, p, G, y, num_tokens, ba_stride,
        **sizes, LEVELS=CHUNK.bit_length() - 1, PRECISION=precision, num_warps=4, **options,
    )  # fmt: skip
    block_v, num_stages = scan_config(len(chunks.rows) * num_value_heads, value_dim, u.dtype, device)
    launch(
        _scan_kernel, (value_dim // block_v, num_value_heads, len(chunks.rows)),
        u, ring, delta, positions, chunks.cu_seqlens, chunks.rows, chunks.load_rows, chunks.first_chunks,
        chunks.bounds, chunks.save_rows, qk, w, p, G, y,
        num_tokens, u_stride, ring_stride, delta_stride,
        **sizes, W=W, BLOCK_V=block_v, PRECISION=precision, num_warps=max(1, block_v // 8),
        num_stages=num_stages, **options,
    )  # fmt: skip
    num_heads, block = num_tokens * num_value_heads, 16
    launch(
        _norm_kernel, (triton.cdiv(num_heads, block),),
        y, u, weights.norm, num_heads, u_stride, weights.eps,
        CHANNELS=channels, HV=num_value_heads, V=value_dim, BLOCK=block, num_warps=4, **options,
    )  # fmt: skip
    return y

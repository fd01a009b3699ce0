"""Attention in both directions within packed segments, in Triton: a vision tower's images or windows.

Owns the tiles of a launch, the kernel, and the choice between it and the one for Hopper (packed_sm90.py).

A head of 72 or 80 is multiplied as 64 + 16 channels, not as 128.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from .paging import LOG2_E, LOWEST
from .reference import Segments

try:
    from . import packed_sm90
except ImportError:  # a Triton version whose Gluon was not tested
    packed_sm90 = None  # type: ignore[assignment]

SHORT = 64  # rows of a query tile where no segment is longer, as in windows; else twice as many


@triton.jit
def _packed_kernel(
    q_ptr, k_ptr, v_ptr,  # [T, H * D] each
    tiles_ptr,  # i32[N, 3]: first row of a query tile, begin and end of its segment
    out_ptr,  # [T, H * D]
    scale_log2e, stride_q, stride_k, stride_v, stride_out,
    HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """WIDTH + TAIL channels cover HEAD_SIZE."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    row, begin, end = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    channel = tl.program_id(1) * HEAD_SIZE
    offs_d = tl.arange(0, WIDTH)
    offs_m = row + tl.arange(0, BLOCK_M)
    rows, is_row = offs_m.to(tl.int64), (offs_m < end)[:, None]
    is_channel = (offs_d < HEAD_SIZE)[None, :]
    q_ptrs = q_ptr + channel + (rows * stride_q)[:, None]
    q = tl.load(q_ptrs + offs_d[None, :], mask=is_row & is_channel, other=0.0)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    if TAIL > 0:
        offs_t = WIDTH + tl.arange(0, TAIL)
        in_tail = (offs_t < HEAD_SIZE)[None, :]
        q_tail = tl.load(q_ptrs + offs_t[None, :], mask=is_row & in_tail, other=0.0)
        acc_tail = tl.zeros([BLOCK_M, TAIL], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for first in range(begin, end, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        is_key = (offs_n < end)[:, None]
        k_ptrs = k_ptr + channel + (offs_n.to(tl.int64) * stride_k)[:, None]
        v_ptrs = v_ptr + channel + (offs_n.to(tl.int64) * stride_v)[:, None]
        k = tl.load(k_ptrs + offs_d[None, :], mask=is_key & is_channel, other=0.0)
        v = tl.load(v_ptrs + offs_d[None, :], mask=is_key & is_channel, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if TAIL > 0:
            k_tail = tl.load(k_ptrs + offs_t[None, :], mask=is_key & in_tail, other=0.0)
            v_tail = tl.load(v_ptrs + offs_t[None, :], mask=is_key & in_tail, other=0.0)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=PRECISION)
        scores = tl.where((offs_n < end)[None, :], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2e)
        p = tl.exp2(scores * scale_log2e - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(p, 1)
        p = p.to(v.dtype)
        acc = tl.dot(p, v, acc * correction[:, None], input_precision=PRECISION)
        if TAIL > 0:
            acc_tail = tl.dot(p, v_tail, acc_tail * correction[:, None], input_precision=PRECISION)
        row_max = new_max
    out_ptrs = out_ptr + channel + (rows * stride_out)[:, None]
    scale = (1.0 / row_sum)[:, None]
    tl.store(out_ptrs + offs_d[None, :], (acc * scale).to(out_ptr.dtype.element_ty), mask=is_row & is_channel)
    if TAIL > 0:
        result = (acc_tail * scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptrs + offs_t[None, :], result, mask=is_row & in_tail)


@triton.jit
def _rotate_kernel(
    qkv_ptr,  # [T, 3 * H * D], q and k are overwritten here
    cos_sin_ptr,  # fp32 [T, D]
    stride,
    NUM_PAIRS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK pairs (x[i], x[i + D / 2]) of a token's q and k, which are 2 * H heads."""
    pdl_launch_dependents(USE_PDL)
    HALF: tl.constexpr = HEAD_SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = pair % HALF
    mask = pair < NUM_PAIRS
    cos_ptrs = cos_sin_ptr + token * HEAD_SIZE + d
    pdl_wait(USE_PDL)
    cos, sin = tl.load(cos_ptrs, mask=mask), tl.load(cos_ptrs + HALF, mask=mask)
    ptrs = qkv_ptr + token * stride + pair // HALF * HEAD_SIZE + d
    x_1, x_2 = tl.load(ptrs, mask=mask), tl.load(ptrs + HALF, mask=mask)
    dtype: tl.constexpr = x_1.dtype
    x_1, x_2 = x_1.to(tl.float32), x_2.to(tl.float32)
    tl.store(ptrs, (x_1 * cos - x_2 * sin).to(dtype), mask=mask)
    tl.store(ptrs + HALF, (x_2 * cos + x_1 * sin).to(dtype), mask=mask)


def rotate_qk(qkv, cos_sin, num_heads):
    """See reference.rotate_qk."""
    head_size = qkv.shape[1] // (3 * num_heads)
    num_pairs = num_heads * head_size
    block = min(2048, triton.next_power_of_2(num_pairs))
    launch(
        _rotate_kernel, (len(qkv), triton.cdiv(num_pairs, block)),
        qkv, cos_sin, qkv.stride(0), NUM_PAIRS=num_pairs, HEAD_SIZE=head_size, BLOCK=block,
        num_warps=4, **launch_options(qkv.device),
    )  # fmt: skip
    return qkv.unflatten(1, (3, num_heads, head_size)).unbind(1)


def packed_segments(bounds, device):
    """See reference.packed_segments."""
    rows = SHORT if max(end - begin for begin, end in pairwise(bounds)) <= SHORT else 2 * SHORT
    tiles = [[row, begin, end] for begin, end in pairwise(bounds) for row in range(begin, end, rows)]
    table = torch.tensor(tiles, dtype=torch.int32, pin_memory=device.type == "cuda")
    return Segments(bounds, rows, table.to(device, non_blocking=True))


class PackedConfig(NamedTuple):
    """Tile shape besides the rows of `Segments`. Measured for towers' pages (docs/experiments.md)."""

    block_n: int  # keys per tile
    num_warps: int
    num_stages: int


def packed_config(rows, head_size, itemsize):
    """Uses at most 98 KB of shared memory."""
    if itemsize > 2:
        return PackedConfig(32, 8, 1)
    if rows == SHORT:
        return PackedConfig(64, 4, 2)
    return PackedConfig(64 if head_size <= 80 else 32, 4, 3)


def packed_attention(q, k, v, segments, scale):
    """See reference.packed_attention."""
    _, num_heads, head_size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if packed_sm90 is not None and packed_sm90.supports(q, segments.rows):
        packed_sm90.packed_attention_sm90(q, k, v, segments.tiles, scale, out)
        return out
    width, tail = max(16, triton.next_power_of_2(head_size)), 0
    if 64 < head_size <= 80:
        width, tail = 64, 16
    config = packed_config(segments.rows, head_size, q.element_size())
    launch(
        _packed_kernel, (len(segments.tiles), num_heads),
        q, k, v, segments.tiles, out, scale * LOG2_E.value, q.stride(0), k.stride(0), v.stride(0), out.stride(0),
        HEAD_SIZE=head_size, WIDTH=width, TAIL=tail, BLOCK_M=segments.rows, BLOCK_N=config.block_n,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages, **launch_options(q.device),
    )  # fmt: skip
    return out

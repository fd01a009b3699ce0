"""Triton: the depthwise causal convolution before a recurrence, over a ring of inputs; functions that kernels call.

Owns the arithmetic of the sums, the form in which states are stored, and the slots of the ring [rows, W, CHANNELS]: the
input of position p is in slot p % W. A step writes only the slot that it does not read, so the programs of a token may
run in any order.
"""

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def as_stored(state, dtype: tl.constexpr):
    """Convert with saturation: the largest fp16 is 65,504. NaN stays NaN."""
    if dtype == tl.float16:
        state = tl.maximum(state, -65504.0, propagate_nan=tl.PropagateNan.ALL)
        state = tl.minimum(state, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return state.to(dtype)


@triton.jit
def conv_before(
    ring_ptr, conv_ptr, channels, age, position, AXIS: tl.constexpr, CHANNELS: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """The convolution's sum over the W - 1 tokens before ``position``, fp32 of the shape of ``channels`` less AXIS.

    ring_ptr: [W, CHANNELS], the inputs at those positions. age: 0, 1, ... along AXIS.
    """
    is_before = (age > 0) & (age < W)
    taps = tl.load(ring_ptr + (position + W - age) % W * CHANNELS + channels, mask=is_before, other=0.0)
    weights = tl.load(conv_ptr + channels * W + W - 1 - age, mask=is_before, other=0.0)
    return tl.sum(taps.to(tl.float32) * weights.to(tl.float32), AXIS)


@triton.jit
def conv_chunk(
    u_ptr, conv_ptr, ring_ptr, channels, num_tokens, num_before, position, is_restored, u_stride,
    CHANNELS: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The convolution's sums [C, N] over a chunk, of ``channels`` [N], fp32.

    u_ptr: the chunk's first token of ``num_tokens``, at ``position``; ``num_before`` tokens of its sequence precede it
    in this launch. ring_ptr: with ``is_restored``, the inputs before these.
    """
    offs_c = tl.arange(0, C)
    y = tl.zeros([C, channels.shape[0]], tl.float32)
    for i in tl.static_range(W):
        weight = tl.load(conv_ptr + channels * W + W - 1 - i).to(tl.float32)
        mask = (offs_c < num_tokens) & (offs_c - i >= -num_before)
        ptrs = u_ptr + (offs_c - i)[:, None] * u_stride + channels[None, :]
        y += tl.load(ptrs, mask=mask[:, None], other=0.0).to(tl.float32) * weight[None, :]
    if ring_ptr is not None and is_restored:
        for i in tl.static_range(1, W):
            weight = tl.load(conv_ptr + channels * W + W - 1 - i).to(tl.float32)
            mask = (offs_c < num_tokens) & (offs_c - i < -num_before)
            ptrs = ring_ptr + ((position + offs_c + W - i) % W)[:, None] * CHANNELS + channels[None, :]
            y += tl.load(ptrs, mask=mask[:, None], other=0.0).to(tl.float32) * weight[None, :]
    return y


@triton.jit
def store_inputs(
    u_ptr, ring_ptr, row, load_row, channels, start, end, position, u_stride, ring_stride,
    CHANNELS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Store ``channels`` of the last W - 1 inputs before token ``end`` of position ``position`` to the ring of ``row``.

    Inputs before token ``start`` come from the ring of ``load_row``, which may be the same row.
    """
    for i in tl.static_range(1, W):
        offs = (position + W - i) % W * CHANNELS + channels
        if end - i >= start:
            x = tl.load(u_ptr + (end - i) * u_stride + channels)
        elif load_row >= 0:
            x = tl.load(ring_ptr + load_row * ring_stride + offs)
        else:
            x = tl.zeros(channels.shape, ring_ptr.dtype.element_ty)
        tl.store(ring_ptr + row * ring_stride + offs, x)


@triton.jit
def store_states(
    state, state_ptrs, u_ptr, ring_ptr, row, load_row, own_channels, group_channels, has_group, start, end, position,
    u_stride, ring_stride, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Store this program's part of the states after token ``end`` - 1 in ``row``.

    own_channels: the inputs of its head. group_channels: with ``has_group``, those of the first input that heads share;
    the second lies GROUPS channels after it.
    """
    tl.store(state_ptrs, as_stored(state, state_ptrs.dtype.element_ty))
    store_inputs(
        u_ptr, ring_ptr, row, load_row, own_channels, start, end, position, u_stride, ring_stride, CHANNELS, W
    )
    if has_group:
        store_inputs(
            u_ptr, ring_ptr, row, load_row, group_channels, start, end, position, u_stride, ring_stride, CHANNELS, W
        )
        store_inputs(
            u_ptr, ring_ptr, row, load_row, GROUPS + group_channels, start, end, position, u_stride, ring_stride,
            CHANNELS, W,
        )  # fmt: skip

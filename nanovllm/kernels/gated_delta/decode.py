"""Triton: a decode step of the gated delta net in one launch, from the input projection's result to the gated norm.

Owns that launch, and the arithmetic of a token, which prefill.py shares. Knows nothing of requests or copies of states.

Program (value head, token) reads and writes the head's state [V, K] part by part, and loads the next part meanwhile.
With many sequences this traffic is the whole cost. Each value head of a key head computes q and k for itself; one of
them stores the inputs.

Legend: reference.py.
"""

import torch
import triton
import triton.language as tl

from ..launch import has_inline_asm, launch, launch_options, num_sms, pdl_launch_dependents, pdl_wait
from ..recurrent.conv import as_stored, conv_before, silu
from .reference import L2_EPS

L2_EPSILON = tl.constexpr(L2_EPS)


@triton.jit
def inverse_length(x, AXIS: tl.constexpr):
    """1 / the L2 norm along AXIS; the dimension is kept."""
    return tl.rsqrt(tl.sum(x * x, axis=AXIS, keep_dims=True) + L2_EPSILON)


@triton.jit
def log_decay(a, A_log, dt_bias):
    """g <= 0 of time steps before the softplus, all fp32."""
    x = a + dt_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(A_log) * softplus


@triton.jit
def gated_norm(o, z, weight, eps, AXIS: tl.constexpr):
    """RMSNorm of o along AXIS times silu(z). o, z and the result have the model's dtype."""
    wide = o.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=AXIS, keep_dims=True) / o.shape[AXIS] + eps)
    normalized = (wide * rstd).to(o.dtype).to(tl.float32)
    scaled = (normalized * weight.to(tl.float32)).to(weight.dtype)  # rounded as the product of two tensors in torch
    return (scaled.to(tl.float32) * silu(z.to(tl.float32))).to(o.dtype)


@triton.jit
def _decode_kernel(
    u_ptr,  # [B, 2 HK K + 2 HV V], written by the input projection
    ba_ptr,  # [B, 2 HV], likewise
    conv_ptr, A_log_ptr, dt_bias_ptr, norm_ptr,  # the weights
    ring_ptr,  # [rows, W, channels]; the token's slot is written here
    delta_ptr,  # [rows, HV, V, K], overwritten here
    positions_ptr, slot_mapping_ptr, req_indices_ptr,  # i32[B]
    y_ptr,  # [B, HV V], written here
    u_stride, ba_stride, ring_stride, delta_stride, eps,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_V: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    PARTS: tl.constexpr = V // BLOCK_V
    CHANNELS: tl.constexpr = 2 * HK * K + HV * V
    DTYPE: tl.constexpr = u_ptr.dtype.element_ty
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // (HV // HK)
    offs_k, offs_v = tl.arange(0, K), tl.arange(0, V)
    y_ptrs = y_ptr + token * (HV * V) + head * V + offs_v
    # Loaded before the wait (see launch.py): slots, request indices, positions, weights, and this layer's states.
    slot = tl.load(slot_mapping_ptr + token)
    row = tl.load(req_indices_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token)
    if slot < 0:
        pdl_wait(USE_PDL)
        tl.store(y_ptrs, tl.zeros([V], DTYPE))
        return

    # [BLOCK_V, K]: 16-byte vectors, a warp reads whole rows.
    state_ptrs = delta_ptr + row * delta_stride + head * (V * K)
    state_ptrs += tl.arange(0, BLOCK_V)[:, None] * K + offs_k[None, :]
    following = tl.load(state_ptrs)
    q_channels, k_channels = key_head * K + offs_k, HK * K + key_head * K + offs_k
    v_channels = 2 * HK * K + head * V + offs_v
    ring_ptr += row * ring_stride
    # Tiles of channels and taps. Their orientation, and the pair of v and z below, keep Triton from computing vectors
    # in the state's layout, in which a warp holds each element up to 32 times.
    age = tl.arange(0, TAPS)
    q_before = conv_before(ring_ptr, conv_ptr, q_channels[:, None], age[None, :], position, 1, CHANNELS, W)
    k_before = conv_before(ring_ptr, conv_ptr, k_channels[:, None], age[None, :], position, 1, CHANNELS, W)
    v_before = conv_before(ring_ptr, conv_ptr, v_channels[None, :], age[:, None], position, 0, CHANNELS, W)
    q_weight = tl.load(conv_ptr + q_channels * W + W - 1).to(tl.float32)
    k_weight = tl.load(conv_ptr + k_channels * W + W - 1).to(tl.float32)
    v_weight = tl.load(conv_ptr + v_channels * W + W - 1).to(tl.float32)
    A_log, dt_bias = tl.load(A_log_ptr + head).to(tl.float32), tl.load(dt_bias_ptr + head).to(tl.float32)
    norm = tl.load(norm_ptr + offs_v)

    pdl_wait(USE_PDL)
    u_ptr += token * u_stride
    ba_ptr += token * ba_stride
    q_input, k_input = tl.load(u_ptr + q_channels), tl.load(u_ptr + k_channels)
    pair = tl.arange(0, 2) * (CHANNELS - 2 * HK * K)
    v_input, z = tl.split(tl.trans(tl.load(u_ptr + v_channels[None, :] + pair[:, None])))
    beta = tl.sigmoid(tl.load(ba_ptr + head).to(tl.float32))
    decay = tl.exp(log_decay(tl.load(ba_ptr + HV + head).to(tl.float32), A_log, dt_bias))
    ring_ptr += position % W * CHANNELS
    tl.store(ring_ptr + v_channels, v_input)
    if head % (HV // HK) == 0:
        tl.store(ring_ptr + q_channels, q_input)
        tl.store(ring_ptr + k_channels, k_input)

    q = silu(q_before + q_input.to(tl.float32) * q_weight).to(DTYPE).to(tl.float32)
    k = silu(k_before + k_input.to(tl.float32) * k_weight).to(DTYPE).to(tl.float32)
    v = silu(v_before + v_input.to(tl.float32) * v_weight).to(DTYPE).to(tl.float32)
    q *= inverse_length(q, 0) * K**-0.5
    k *= inverse_length(k, 0)
    # o = S q of the new S, by both products with the old one: S leaves the registers as soon as it is updated.
    kq, part = tl.sum(k * q, 0), tl.arange(0, PARTS)[:, None]
    v, o = tl.reshape(v, [PARTS, BLOCK_V]), tl.zeros([PARTS, BLOCK_V], tl.float32)
    for i in tl.static_range(PARTS):
        state = following.to(tl.float32)
        if i + 1 < PARTS:
            following = tl.load(state_ptrs + (i + 1) * BLOCK_V * K)
        read, queried = tl.sum(state * k[None, :], 1), tl.sum(state * q[None, :], 1)
        error = beta * (tl.sum(tl.where(part == i, v, 0.0), 0) - decay * read)
        state = decay * state + error[:, None] * k[None, :]
        tl.store(state_ptrs + i * BLOCK_V * K, as_stored(state, delta_ptr.dtype.element_ty))
        o = tl.where(part == i, (decay * queried + error * kq)[None, :], o)
    tl.store(y_ptrs, gated_norm(tl.reshape(o, [V]).to(DTYPE), z, norm, eps, 0))


def takes_heads(key_dim, value_dim):
    """See reference.takes_heads. With heads of 16, prefill reads beyond shared memory (Triton 3.6, sm_90)."""
    return all(size >= 32 and size & (size - 1) == 0 for size in (key_dim, value_dim))


def decode_config(num_programs, key_dim, value_dim, delta, device):
    """Rows of S per part, warps, and registers per thread.

    One H200, 256 sequences of 32 heads of 128: 284 us in fp32, and 363 with whole states; 168 and 243 in fp16. One
    sequence: 4.3 and 3.7.
    """
    block_v = value_dim if num_programs <= num_sms(device) else min(32, value_dim)
    num_warps = max(1, min(8, key_dim * block_v // (2048 if block_v == value_dim else 1024)))
    return block_v, num_warps, 96 if delta.element_size() == 2 and block_v < value_dim else 128


def decode(u, ba, weights, states, positions, slot_mapping, req_indices):
    """See reference.decode. Reads nothing on the host: fit for CUDA graphs.

    The states are read before the PDL wait (see launch.py): a launch without PDL must lie between this one and the
    launch that wrote or copied them.
    """
    num_key_heads, num_value_heads, key_dim, value_dim = weights.sizes
    W = weights.conv.shape[1]
    y = torch.empty((len(u), num_value_heads * value_dim), dtype=u.dtype, device=u.device)
    block_v, num_warps, max_registers = decode_config(
        len(u) * num_value_heads, key_dim, value_dim, states.delta, u.device
    )
    options = launch_options(u.device)
    if has_inline_asm(u.device):  # not every backend knows this option
        options = {**options, "maxnreg": max_registers}
    launch(
        _decode_kernel, (num_value_heads, len(u)),
        u, ba, weights.conv, weights.A_log, weights.dt_bias, weights.norm, states.conv, states.delta, positions,
        slot_mapping, req_indices, y,
        *strides(u, ba, weights, states), weights.eps,
        HK=num_key_heads, HV=num_value_heads, K=key_dim, V=value_dim, W=W, TAPS=triton.next_power_of_2(W),
        BLOCK_V=block_v, num_warps=num_warps, **options,
    )  # fmt: skip
    return y


def strides(u, ba, weights, states):
    """Strides of a token in u and ba, and of a row in both states (0 without states); the rest is contiguous."""
    assert takes_heads(*weights.sizes[2:])
    assert u.stride(1) == ba.stride(1) == 1 and weights.conv.is_contiguous()
    if states is None:
        return u.stride(0), ba.stride(0), 0, 0
    assert states.conv[0].is_contiguous() and states.delta[0].is_contiguous()
    return u.stride(0), ba.stride(0), states.conv.stride(0), states.delta.stride(0)

"""Triton: a decode step of Mamba-2 in two launches: from the input projection to S C + D x, and norm.py's norm.

Owns the first launch, and the arithmetic of a time step, which prefill.py shares. Knows nothing of requests or copies
of states.

Program (head, token) reads and writes the head's state [P, N] part by part, and loads the next part meanwhile. With
many sequences this traffic is the whole cost. Each head of a group computes B and C for itself; one of them stores the
inputs. A step writes only the ring's slot that it does not read, so the programs of a token may run in any order.

Legend: reference.py.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, num_sms, pdl_launch_dependents, pdl_wait
from ..recurrent.conv import as_stored, conv_before, silu
from .norm import gate_and_norm


@triton.jit
def time_step(dt, dt_bias):
    """softplus(dt + dt_bias), all fp32."""
    x = dt + dt_bias
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def load_or_zero(ptr, offsets):
    """fp32 values at ptr + offsets; 0 if ptr is None."""
    return tl.zeros(offsets.shape, tl.float32) if ptr is None else tl.load(ptr + offsets).to(tl.float32)


@triton.jit
def _decode_kernel(
    u_ptr,  # [B, z | x | B | C | dt], written by the input projection
    conv_ptr, conv_bias_ptr, A_log_ptr, dt_bias_ptr, D_ptr,  # the weights
    ring_ptr,  # [rows, W, channels]; the token's slot is written here
    state_ptr,  # [rows, H, P, N], overwritten here
    positions_ptr, slot_mapping_ptr, req_indices_ptr,  # i32[B]
    y_ptr,  # [B, H P], written here
    u_stride, ring_stride, state_stride,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_P: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    PARTS: tl.constexpr = P // BLOCK_P
    CHANNELS: tl.constexpr = H * P + 2 * G * N
    DTYPE: tl.constexpr = u_ptr.dtype.element_ty
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = head // (H // G)
    offs_p, offs_n = tl.arange(0, P), tl.arange(0, N)
    y_ptrs = y_ptr + token * (H * P) + head * P + offs_p
    # Loaded before the wait (see launch.py): slots, request indices, positions, weights, and this layer's states.
    slot = tl.load(slot_mapping_ptr + token)
    row = tl.load(req_indices_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token)
    if slot < 0:
        pdl_wait(USE_PDL)
        tl.store(y_ptrs, tl.zeros([P], DTYPE))
        return

    # [BLOCK_P, N]: 16-byte vectors, a warp reads whole rows.
    state_ptrs = state_ptr + row * state_stride + head * (P * N)
    state_ptrs += tl.arange(0, BLOCK_P)[:, None] * N + offs_n[None, :]
    following = tl.load(state_ptrs)
    x_channels = head * P + offs_p
    B_channels = H * P + group * N + offs_n
    C_channels = B_channels + G * N
    ring_ptr += row * ring_stride
    age = tl.arange(0, TAPS)  # tiles of channels and taps, oriented as in gated_delta/decode.py
    x_before = conv_before(ring_ptr, conv_ptr, x_channels[None, :], age[:, None], position, 0, CHANNELS, W)
    B_before = conv_before(ring_ptr, conv_ptr, B_channels[:, None], age[None, :], position, 1, CHANNELS, W)
    C_before = conv_before(ring_ptr, conv_ptr, C_channels[:, None], age[None, :], position, 1, CHANNELS, W)
    x_before += load_or_zero(conv_bias_ptr, x_channels)
    B_before += load_or_zero(conv_bias_ptr, B_channels)
    C_before += load_or_zero(conv_bias_ptr, C_channels)
    x_weight = tl.load(conv_ptr + x_channels * W + W - 1).to(tl.float32)
    B_weight = tl.load(conv_ptr + B_channels * W + W - 1).to(tl.float32)
    C_weight = tl.load(conv_ptr + C_channels * W + W - 1).to(tl.float32)
    A_log, dt_bias = tl.load(A_log_ptr + head).to(tl.float32), tl.load(dt_bias_ptr + head).to(tl.float32)
    D = tl.load(D_ptr + head).to(tl.float32)

    pdl_wait(USE_PDL)
    u_ptr += token * u_stride + H * P
    x_input = tl.load(u_ptr + x_channels)
    B_input, C_input = tl.load(u_ptr + B_channels), tl.load(u_ptr + C_channels)
    dt = time_step(tl.load(u_ptr + CHANNELS + head).to(tl.float32), dt_bias)
    decay = tl.exp(-tl.exp(A_log) * dt)
    ring_ptr += position % W * CHANNELS
    tl.store(ring_ptr + x_channels, x_input)
    if head % (H // G) == 0:
        tl.store(ring_ptr + B_channels, B_input)
        tl.store(ring_ptr + C_channels, C_input)

    x = silu(x_before + x_input.to(tl.float32) * x_weight).to(DTYPE).to(tl.float32)
    B = silu(B_before + B_input.to(tl.float32) * B_weight).to(DTYPE).to(tl.float32)
    C = silu(C_before + C_input.to(tl.float32) * C_weight).to(DTYPE).to(tl.float32)
    # y = S C of the new S, computed from the product with the old one: S leaves the registers as soon as it is updated.
    BC, part = tl.sum(B * C, 0), tl.arange(0, PARTS)[:, None]
    x_parts, y = tl.reshape(x, [PARTS, BLOCK_P]), tl.zeros([PARTS, BLOCK_P], tl.float32)
    for i in tl.static_range(PARTS):
        state = following.to(tl.float32)
        if i + 1 < PARTS:
            following = tl.load(state_ptrs + (i + 1) * BLOCK_P * N)
        added = dt * tl.sum(tl.where(part == i, x_parts, 0.0), 0)
        queried = tl.sum(state * C[None, :], 1)
        state = decay * state + added[:, None] * B[None, :]
        tl.store(state_ptrs + i * BLOCK_P * N, as_stored(state, state_ptr.dtype.element_ty))
        y = tl.where(part == i, (decay * queried + added * BC)[None, :], y)
    tl.store(y_ptrs, (tl.reshape(y, [P]) + D * x).to(DTYPE))


def takes_heads(head_dim, state_dim):
    """See reference.takes_heads."""
    return all(size >= 32 and size & (size - 1) == 0 for size in (head_dim, state_dim))


def decode_config(num_programs, head_dim, state_dim, state, device):
    """Rows of S per part, and warps.

    One H200, 64 sequences of 48 heads of 64: states of 128 channels 54 us in fp32, 29 in fp16 (3.8 and 3.5 TB/s), of
    256 channels 110 in fp32; with whole heads 59, 42 and 168. One sequence: 2.2 with a whole head, 2.6 in parts.
    """
    if num_programs <= num_sms(device):
        return head_dim, max(1, min(8, state_dim * head_dim // 2048))
    block_p = max(1, min(head_dim, 1024 * state.element_size() // state_dim))
    return block_p, max(1, block_p * state_dim // 2048)


def decode(u, weights, states, positions, slot_mapping, req_indices):
    """See reference.decode. Reads nothing on the host: fit for CUDA graphs.

    The states are read before the PDL wait (see launch.py): a launch without PDL must lie between this one and the
    launch that wrote or copied them.
    """
    num_heads, num_groups, head_dim, state_dim = weights.sizes
    W = weights.conv.shape[1]
    y = torch.empty((len(u), num_heads * head_dim), dtype=u.dtype, device=u.device)
    block_p, num_warps = decode_config(len(u) * num_heads, head_dim, state_dim, states.ssm, u.device)
    launch(
        _decode_kernel, (num_heads, len(u)),
        u, weights.conv, weights.conv_bias, weights.A_log, weights.dt_bias, weights.D, *states, positions,
        slot_mapping, req_indices, y,
        *strides(u, weights, states),
        H=num_heads, G=num_groups, P=head_dim, N=state_dim, W=W, TAPS=triton.next_power_of_2(W),
        BLOCK_P=block_p, num_warps=num_warps, **launch_options(u.device),
    )  # fmt: skip
    return gate_and_norm(y, u, weights)


def strides(u, weights, states):
    """Strides of a token in u, and of a row in both states (0 without states); the rest is contiguous."""
    assert takes_heads(*weights.sizes[2:])
    assert u.stride(1) == 1 and weights.conv.is_contiguous()
    if states is None:
        return u.stride(0), 0, 0
    ring, state = states
    assert ring[0].is_contiguous() and state[0].is_contiguous()
    return u.stride(0), ring.stride(0), state.stride(0)

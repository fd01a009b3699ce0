"""Triton: a decode step of the short convolution in one launch: both gates, the convolution, and the ring's new input.

Program (block of channels, token). Legend: reference.py.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from ..recurrent.conv import conv_before

BLOCK = 256  # channels of a program


@triton.jit
def _decode_kernel(
    u_ptr,  # [B, 3 N], written by the input projection
    weight_ptr,  # [N, W]
    ring_ptr,  # [rows, W, N]; the token's slot is written here
    positions_ptr, slot_mapping_ptr, req_indices_ptr,  # i32[B]
    y_ptr,  # [B, N], written here
    u_stride, ring_stride,
    N: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(1).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask, channels = offs_n < N, tl.minimum(offs_n, N - 1)
    # Loaded before the wait (see launch.py): slots, request indices, positions, weights, and this layer's states.
    slot = tl.load(slot_mapping_ptr + token)
    position = tl.load(positions_ptr + token)
    ring_ptr += tl.load(req_indices_ptr + token).to(tl.int64) * ring_stride
    if slot < 0:
        pdl_wait(USE_PDL)
        tl.store(y_ptr + token * N + offs_n, tl.zeros([BLOCK], y_ptr.dtype.element_ty), mask=mask)
        return
    before = conv_before(ring_ptr, weight_ptr, channels[:, None], tl.arange(0, TAPS)[None, :], position, 1, N, W)
    weight = tl.load(weight_ptr + channels * W + W - 1).to(tl.float32)

    pdl_wait(USE_PDL)
    u_ptr += token * u_stride + channels
    b, c, x = tl.load(u_ptr), tl.load(u_ptr + N), tl.load(u_ptr + 2 * N)
    bx = (b.to(tl.float32) * x.to(tl.float32)).to(u_ptr.dtype.element_ty)
    tl.store(ring_ptr + position % W * N + offs_n, bx, mask=mask)
    y = c.to(tl.float32) * (before + bx.to(tl.float32) * weight)
    tl.store(y_ptr + token * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)


def decode(u, weights, states, positions, slot_mapping, req_indices):
    """See reference.decode. Reads nothing on the host: fit for CUDA graphs.

    The states are read before the PDL wait (see launch.py): a launch without PDL must lie between this one and the
    launch that wrote or copied them.
    """
    N, W = weights.conv.shape
    y = torch.empty((len(u), N), dtype=u.dtype, device=u.device)
    launch(
        _decode_kernel, (triton.cdiv(N, BLOCK), len(u)),
        u, weights.conv, states.conv, positions, slot_mapping, req_indices, y, *strides(u, weights, states),
        N=N, W=W, TAPS=triton.next_power_of_2(W), BLOCK=BLOCK, num_warps=4, **launch_options(u.device),
    )  # fmt: skip
    return y


def strides(u, weights, states):
    """Strides of a token in u, and of a row in the ring (0 without states); the rest is contiguous."""
    assert u.stride(1) == 1 and weights.conv.is_contiguous()
    if states is None:
        return u.stride(0), 0
    assert states.conv[0].is_contiguous()
    return u.stride(0), states.conv.stride(0)

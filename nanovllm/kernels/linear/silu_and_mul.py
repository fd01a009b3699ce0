"""Triton: products with an activated gate, squared ReLU, and soft caps.

act(gate) * up where no GEMM epilogue computes it, x * sigmoid(gate), relu(x)^2, and cap * tanh(x / cap).
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from .gemv import activate


def launch_by_rows(kernel, num_columns, x, *args, **constants):
    """Launch programs for each row of x, each with up to 1,024 of its `num_columns` columns."""
    assert x.stride(1) == 1
    block = min(1024, triton.next_power_of_2(num_columns))
    launch(
        kernel, (len(x), triton.cdiv(num_columns, block)), x, *args,
        **constants, BLOCK=block, num_warps=max(1, block // 256), **launch_options(x.device),
    )  # fmt: skip


@triton.jit
def act_and_mul_kernel(
    gate_ptr, up_ptr,  # [T, I], tokens strided, often halves of the gate-up projection's result
    y_ptr,  # [T, I] contiguous, written here
    gate_stride, up_stride,
    intermediate_size,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < intermediate_size
    gate = tl.load(gate_ptr + token * gate_stride + offs, mask=mask, other=0.0)
    up = tl.load(up_ptr + token * up_stride + offs, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    activated = activate(wide, ACT).to(gate.dtype)
    y = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(y_ptr + token * intermediate_size + offs, y, mask=mask)


def act_and_mul(x, act="silu", up=None):
    """See reference.act_and_mul."""
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    num_tokens, size = gate.shape
    assert up.shape == gate.shape and up.stride(1) == 1
    y = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    launch_by_rows(act_and_mul_kernel, size, gate, up, y, gate.stride(0), up.stride(0), size, ACT=act)
    return y


@triton.jit
def sigmoid_gate_kernel(
    x_ptr,  # [T, N] contiguous, written by attention; overwritten here
    gate_ptr,  # [T, N], tokens strided, written by the input projection
    gate_stride,
    num_features,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_features
    x = tl.load(x_ptr + token * num_features + offs, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + token * gate_stride + offs, mask=mask, other=0.0)
    sigmoid = tl.sigmoid(gate.to(tl.float32)).to(x.dtype)
    y = (x.to(tl.float32) * sigmoid.to(tl.float32)).to(x.dtype)
    tl.store(x_ptr + token * num_features + offs, y, mask=mask)


def sigmoid_gate(x, gate):
    """See reference.sigmoid_gate. Overwrites `x`."""
    num_features = x.shape[1]
    assert x.is_contiguous() and gate.stride(1) == 1
    launch_by_rows(sigmoid_gate_kernel, num_features, x, gate, gate.stride(0), num_features)
    return x


@triton.jit
def relu2_kernel(
    x_ptr,  # [T, N], tokens strided, written by a product; overwritten here
    x_stride, num_features, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ptrs = x_ptr + tl.program_id(0).to(tl.int64) * x_stride + offs
    x = tl.load(ptrs, mask=offs < num_features, other=0.0).to(tl.float32)
    y = tl.where(x < 0, 0.0, x)  # NaN stays NaN
    tl.store(ptrs, (y * y).to(x_ptr.dtype.element_ty), mask=offs < num_features)


def relu2(x):
    """See reference.relu2. Overwrites `x`."""
    launch_by_rows(relu2_kernel, x.shape[1], x, x.stride(0), x.shape[1])
    return x


@triton.jit
def soft_cap_kernel(
    x_ptr,  # [N, V], rows strided, written by the LM head; overwritten here
    x_stride, num_columns, cap, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ptrs = x_ptr + tl.program_id(0).to(tl.int64) * x_stride + offs
    x = tl.load(ptrs, mask=offs < num_columns, other=0.0)
    tanh = 2.0 * tl.sigmoid(2.0 / cap * x.to(tl.float32)) - 1.0
    tl.store(ptrs, (cap * tanh).to(x.dtype), mask=offs < num_columns)


def soft_cap(x, cap):
    """See reference.soft_cap. Overwrites `x`."""
    launch_by_rows(soft_cap_kernel, x.shape[1], x, x.stride(0), x.shape[1], float(cap))
    return x

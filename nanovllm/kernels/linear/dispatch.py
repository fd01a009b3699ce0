"""Triton: matrix products with the norm before and the activation, the residual or the rotation after fused in.

Owns `fused_linear` and `qkv_linear`, the choice between kernels and cuBLAS, and the kernel for one token; those for
a few and for thousands are in decode_gemm_sm90.py and prefill_gemm_sm90.py. Knows nothing of layers or shards; the plain twins
are in reference.py.

A decode step reads every weight once and does little else, so the kernels are built around the stream of weights:
enough programs to keep all of the memory busy, and each asks for its weights *before* it waits for the kernel that
makes its input (see inputs.py on pdl launches), because weights depend on nobody. What is left between the end of
one kernel and the end of the next is a load of x from L2, the arithmetic and a store: so everything that can be is
loaded before the wait, and the rest right after it.

N rows of the weight (outputs; twice as many as results where SiLU and a product follow), C channels, summed over.
I results per token: N, or N / 2 with silu_mul.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..launch import launch, launch_options, num_sms, pdl_launch_dependents, pdl_wait
from .norm import SplitKPartials, rms_norm
from .norm_rope_store import norm_rope_store
from .silu_and_mul import silu_and_mul

try:
    from . import decode_gemm_sm90, prefill_gemm_sm90
except ImportError:  # a version of Triton that they were not tried with
    prefill_gemm_sm90 = decode_gemm_sm90 = None  # type: ignore[assignment]


class GemvConfig(NamedTuple):
    """How the product of one token is cut into programs. It changes nothing but the order of sums."""

    block_n: int  # weight rows of a program
    block_c: int  # channels of one step of its loop
    num_warps: int
    max_registers: int | None = None  # of a thread


def gemv_config(num_rows, num_channels, itemsize):
    """The choice measured on an NVIDIA H200 with 16 bits."""
    num_bytes = num_rows * num_channels * itemsize
    block_c = max(8, triton.next_power_of_2(num_channels))
    if num_rows >= 12 * num_channels:  # an LM head
        if num_channels <= 1024:
            return GemvConfig(4, block_c, 1)
        return GemvConfig(2, 2048, 4) if num_channels % 2048 == 0 else GemvConfig(4, 512, 1)
    # Many small programs for many rows: the more of the next kernel's are there early, the better.
    if num_channels <= 1024:
        return GemvConfig(2, block_c, 1) if num_rows > 4096 else GemvConfig(4, block_c, 4)
    if num_bytes < 40e6:
        return GemvConfig(2, 2048 if num_channels % 2048 == 0 else min(block_c, 4096), 4)
    if num_rows < num_channels:
        return GemvConfig(2, 2048, 2)
    return GemvConfig(4, 512, 1) if num_bytes < 100e6 else GemvConfig(2, 1024, 1, 96)


def choose_decode_gemm(x, weight, allow_split_k):
    """The tiling of a ring product, or None where cuBLAS with unfused neighbours is as good or has to do."""
    num_tokens, num_channels = x.shape
    if decode_gemm_sm90 is None or not 2 <= num_tokens <= 256 or not decode_gemm_sm90.takes(x):
        return None
    return decode_gemm_sm90.decode_gemm_config(num_tokens, weight.shape[0], num_channels, allow_split_k, num_sms(x.device))


@triton.jit
def weight_rows(tile, num_results, SILU_MUL: tl.constexpr, BLOCK_N: tl.constexpr):
    """(weight rows i64, whether they exist) of a tile, [BLOCK_N]; with SILU_MUL half gate, then as many up rows."""
    local = tl.arange(0, BLOCK_N)
    if SILU_MUL:
        result = tile * (BLOCK_N // 2) + local % (BLOCK_N // 2)
        row = result + (local // (BLOCK_N // 2)) * num_results
    else:
        result = tile * BLOCK_N + local
        row = result
    return row.to(tl.int64), result < num_results


@triton.jit
def load_norm_weight(norm_weight_ptr, c, num_channels, HAS_NORM: tl.constexpr):
    if HAS_NORM:
        return tl.load(norm_weight_ptr + c, mask=c < num_channels, other=0.0).to(tl.float32)
    else:
        return 1.0


@triton.jit
def gemv_kernel(
    x_ptr,  # [1, C], written by the kernel before
    weight_ptr,  # [N, C] contiguous
    bias_ptr,  # [N], only with HAS_BIAS
    norm_weight_ptr,  # [C], only with HAS_NORM
    residual_ptr,  # [1, I], only with HAS_RESIDUAL
    y_ptr,  # [1, I], written here
    num_results,
    eps,
    NUM_CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N weight rows, all channels of the one token, by multiply and add.

    Channels are taken VECTOR at a time, what a thread loads at once and adds up by itself: it keeps one sum per vector
    and row, needs few registers, and so much of the next kernel fits beside this one and loads its weights.
    """
    pdl_launch_dependents(USE_PDL)
    tile = tl.program_id(0)
    BLOCK_I: tl.constexpr = BLOCK_N // 2 if SILU_MUL else BLOCK_N
    STEPS: tl.constexpr = (NUM_CHANNELS + BLOCK_C - 1) // BLOCK_C
    VECTOR: tl.constexpr = 8
    rows, exists = weight_rows(tile, num_results, SILU_MUL, BLOCK_N)
    c = tl.arange(0, BLOCK_C // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [BLOCK_C/V, V]
    weight_ptrs = weight_ptr + rows[:, None, None] * NUM_CHANNELS + c[None, :, :]  # [BLOCK_N, BLOCK_C/V, V]
    weight = tl.load(weight_ptrs, mask=exists[:, None, None] & (c < NUM_CHANNELS)[None, :, :], other=0.0)
    norm_weight = load_norm_weight(norm_weight_ptr, c, NUM_CHANNELS, HAS_NORM)
    offs_i = tile * BLOCK_I + tl.arange(0, BLOCK_I)

    pdl_wait(USE_PDL)
    residual = tl.zeros((BLOCK_I,), tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offs_i, mask=offs_i < num_results, other=0.0).to(tl.float32)
    product = tl.zeros((BLOCK_N, BLOCK_C // VECTOR), tl.float32)
    squares = tl.zeros((BLOCK_C // VECTOR,), tl.float32)
    for step in tl.static_range(STEPS):
        x = tl.load(x_ptr + c, mask=c < NUM_CHANNELS, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(x * x, axis=1)
            x *= norm_weight
        this_weight = weight
        c += BLOCK_C
        if step + 1 < STEPS:
            weight_ptrs += BLOCK_C
            weight = tl.load(weight_ptrs, mask=exists[:, None, None] & (c < NUM_CHANNELS)[None, :, :], other=0.0)
            norm_weight = load_norm_weight(norm_weight_ptr, c, NUM_CHANNELS, HAS_NORM)
        product += tl.sum(x[None, :, :] * this_weight.to(tl.float32), axis=2)
    total = tl.sum(product, axis=1)
    if HAS_NORM:
        total *= tl.rsqrt(tl.sum(squares) / NUM_CHANNELS + eps)
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, mask=exists, other=0.0).to(tl.float32)
    if SILU_MUL:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, BLOCK_I)), (1, 0)))
        total = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + offs_i, (total + residual).to(y_ptr.dtype.element_ty), mask=offs_i < num_results)


def fused_linear(x, weight, bias=None, norm_weight=None, eps=0.0, residual=None, silu_mul=False, allow_split_k=False):
    """See reference.fused_linear. May write over `residual`.

    x and residual: tensors, or what this function returned for another product: with `allow_split_k` that may be a
    SplitKPartials, if a sum to which the next norm adds is cheaper to make. It is a residual only after its norm was taken.
    Large products go to cuBLAS, which adds in place at no cost, with the norm apart; so is the activation, save on
    Hopper.
    """
    num_rows, num_channels = weight.shape
    num_tokens = count_tokens(x)
    assert norm_weight is not None or not isinstance(x, SplitKPartials)
    if isinstance(residual, SplitKPartials):
        assert residual.parts is None
        residual = residual.stream
    if num_tokens == 1:
        tiling = gemv_config(num_rows, num_channels, weight.element_size())
        return gemv(tiling, x, weight, bias, norm_weight, eps, residual, silu_mul)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    adds_only = residual is not None and bias is None and not silu_mul
    ring = choose_decode_gemm(x, weight, allow_split_k=adds_only and allow_split_k)
    if ring is not None and ring.splits > 1:
        parts = torch.empty((ring.splits, num_tokens, num_rows), dtype=torch.float32, device=x.device)
        return SplitKPartials(residual, decode_gemm_sm90.decode_gemm(ring, x, weight, parts))
    if ring is not None:
        num_results = num_rows // 2 if silu_mul else num_rows
        y = torch.empty((num_tokens, num_results), dtype=x.dtype, device=x.device)
        return decode_gemm_sm90.decode_gemm(ring, x, weight, y, bias, residual, silu_mul)
    if silu_mul and bias is None and residual is None and prefill_gemm_sm90 is not None and prefill_gemm_sm90.takes(x, weight):
        y = torch.empty((num_tokens, num_rows // 2), dtype=x.dtype, device=x.device)
        return prefill_gemm_sm90.prefill_gemm(x, weight, y, silu_mul=True)
    if adds_only:
        return torch.addmm(residual, x, weight.t(), out=residual)
    y = F.linear(x, weight, bias)
    if silu_mul:
        y = silu_and_mul(y)
    return y if residual is None else residual + y


def qkv_linear(x, weight, bias, norm_weight, eps, heads, pages_only=False):
    """See reference.qkv_linear. On Hopper the norm apart and the rest in one launch, save for some sizes."""
    if pages_only and count_tokens(x) > 1:
        x, norm_weight = rms_norm(x, norm_weight, eps), None
        q = None
        ring = choose_decode_gemm(x, weight, allow_split_k=False)
        if ring is not None and decode_gemm_sm90.takes_heads(ring, x, weight, heads.k_cache):
            q = decode_gemm_sm90.decode_qkv_gemm(ring, x, weight, bias, *heads)
        elif bias is None and prefill_gemm_sm90 is not None and prefill_gemm_sm90.takes_heads(x, weight, heads.k_cache):
            q = prefill_gemm_sm90.prefill_qkv_gemm(x, weight, *heads)
        if q is not None:
            return q.unflatten(1, (heads.num_heads, -1)), None, None
    return norm_rope_store(fused_linear(x, weight, bias, norm_weight, eps), *heads)


def count_tokens(x):
    return x.stream.shape[0] if isinstance(x, SplitKPartials) else x.shape[0]


def gemv(tiling, x, weight, bias, norm_weight, eps, residual, silu_mul):
    """fused_linear of one token."""
    num_tokens, num_channels = x.shape
    assert num_tokens == 1 and x.stride(1) == 1 and weight.is_contiguous()
    num_rows = weight.shape[0]
    num_results = num_rows // 2 if silu_mul else num_rows
    y = torch.empty((1, num_results), dtype=x.dtype, device=x.device)
    options = launch_options(x.device)
    if tiling.max_registers is not None and torch.version.hip is None:
        options = options | {"maxnreg": tiling.max_registers}
    launch(
        gemv_kernel,
        (triton.cdiv(num_rows, tiling.block_n),),
        x,
        weight,
        bias,
        norm_weight,
        residual,
        y,
        num_results,
        eps,
        NUM_CHANNELS=num_channels,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm_weight is not None,
        HAS_RESIDUAL=residual is not None,
        SILU_MUL=silu_mul,
        BLOCK_N=tiling.block_n,
        BLOCK_C=tiling.block_c,
        num_warps=tiling.num_warps,
        **options,
    )
    return y

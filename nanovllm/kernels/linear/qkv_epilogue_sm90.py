"""Gluon: per-head RMSNorm and rotary embedding of heads of 128 that lie in the accumulators of tensor cores.

Owns what the ends of `prefill_gemm_sm90.prefill_qkv_gemm` and `decode_gemm_sm90.decode_qkv_gemm` share. Their plain twin is
reference.norm_rope_store; results are rounded as its are, but for the product itself, which stays in fp32.

A head is given as its two halves [tokens, 64], in the layout of accumulators of 64 columns: where a thread holds d of a
head, it holds d + 64 too, which the rotation pairs with it. So nothing moves between threads, save for the sum of a
head's squares.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HEAD_SIZE = gl.constexpr(128)


@gluon.jit
def halves(x):
    """The left and the right half of accumulators x, whose columns a thread holds in both alike: nothing is moved."""
    rows: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], x.type.layout.warps_per_cta, [16, width, 16])
    left, right = gl.split(x.reshape([rows, 2, width]).permute((0, 2, 1)))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def look_up(positions_ptr, first, num_tokens, is_rotated, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """The positions of tokens first, first + 1, ... as heads' halves have them, [TOKENS]; -1 where none is needed."""
    pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_SIZE // 2, 16])
    token = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, pairs))
    return gl.load(positions_ptr + token, mask=(token < num_tokens) & is_rotated, other=-1)


@gluon.jit
def angles(cos_sin_ptr, position):
    """(cos, sin), [tokens, HEAD_SIZE / 2]; undefined where there is no position."""
    HALF: gl.constexpr = HEAD_SIZE // 2
    d = gl.arange(0, HALF, layout=gl.SliceLayout(0, position.type.layout.parent))
    ptrs = cos_sin_ptr + (position.to(gl.int64) * HEAD_SIZE)[:, None] + d[None, :]
    mask = (position >= 0)[:, None] & (d < HALF)[None, :]
    return gl.load(ptrs, mask=mask), gl.load(ptrs + HALF, mask=mask)


@gluon.jit
def norm_weights(weight_ptr, WARPS: gl.constexpr):
    """Both halves of a norm's weight, as heads' halves have them, [HEAD_SIZE / 2] each."""
    pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_SIZE // 2, 16])
    d = gl.arange(0, HEAD_SIZE // 2, layout=gl.SliceLayout(0, pairs))
    return gl.load(weight_ptr + d), gl.load(weight_ptr + HEAD_SIZE // 2 + d)


@gluon.jit
def norm(x_1, x_2, weights, eps, dtype: gl.constexpr):
    """The RMSNorm of heads, given and returned as their halves; rounded as the plain twin's."""
    weight_1 = weights[0].to(gl.float32)[None, :]
    weight_2 = weights[1].to(gl.float32)[None, :]
    rstd = gl.rsqrt(gl.sum(x_1 * x_1 + x_2 * x_2, 1) / HEAD_SIZE + eps)[:, None]
    x_1 = ((x_1 * rstd).to(dtype).to(gl.float32) * weight_1).to(dtype).to(gl.float32)
    x_2 = ((x_2 * rstd).to(dtype).to(gl.float32) * weight_2).to(dtype).to(gl.float32)
    return x_1, x_2


@gluon.jit
def rotate(x_1, x_2, cos, sin):
    return x_1 * cos - x_2 * sin, x_2 * cos + x_1 * sin

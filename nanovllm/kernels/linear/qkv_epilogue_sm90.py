"""Gluon: norm_rope_store as a GEMM epilogue, on heads in the accumulators of tensor cores (NVIDIA Hopper).

Owns the steps that decode_gemm_sm90.py and prefill_gemm_sm90.py share. The twin is reference.norm_rope_store; the
rounding is the same but for the product itself, which stays in fp32.

A head is a pair of halves [tokens, HEAD_SIZE / 2]. In this accumulator layout the thread that holds channel d of a head
also holds d + HEAD_SIZE / 2, its partner in the rotation. So only the head's sum of squares crosses threads.

A GEMM finishes UNIT features at a time: one head of 128, or two heads of 64 that are both of q, of k or of v.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..fp8 import E4M3

UNIT = gl.constexpr(128)


def supports(dtype, weight, epilogue):
    """Whether q, k and v of a Weight are whole units, and k and v go to contiguous caches of `dtype` or e4m3."""
    num_heads, num_kv_heads = epilogue.num_heads, epilogue.num_kv_heads
    head_size = len(weight.data) // (num_heads + 2 * num_kv_heads)
    k_cache, v_cache = epilogue.k_cache, epilogue.v_cache
    if k_cache is None or k_cache.numel() == 0 or head_size not in (64, 128):
        return False
    if num_heads * head_size % UNIT.value or num_kv_heads * head_size % UNIT.value:
        return False
    is_contiguous = k_cache.is_contiguous() and v_cache.is_contiguous() and epilogue.cos_sin.is_contiguous()
    return is_contiguous and k_cache.dtype == v_cache.dtype and k_cache.dtype in (dtype, E4M3)


def epilogue_arguments(epilogue):
    """A QKVEpilogue as arguments of a kernel, with scales only for an FP8 cache; without one None, and no heads."""
    if epilogue is None:
        return (None,) * 8 + (0, 0, None)
    is_fp8 = epilogue.k_cache.dtype == E4M3
    return epilogue._replace(kv_scale=epilogue.kv_scale if is_fp8 else None)


@gluon.jit
def quantize(x, scale):
    """x / scale as e4m3; the conversion saturates. NaN stays NaN."""
    return (x.to(gl.float32) * (1.0 / scale)).to(gl.float8e4nv)


@gluon.jit
def split_halves(x):
    """The left and right half of accumulators x. A thread holds the same columns of both: no data movement."""
    width: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], x.type.layout.warps_per_cta, [16, width, 16])
    left, right = gl.split(x.reshape([x.shape[0], 2, width]).permute((0, 2, 1)))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def join_halves(left, right):
    """The inverse of `split_halves`, in a layout of its own."""
    return gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def load_positions(
    positions_ptr, first_token, num_tokens, has_rope,
    HEAD_SIZE: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Positions [TOKENS] in the layout of a head's halves; -1 past the last token, and everywhere without has_rope."""
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_SIZE // 2, 16])
    token = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, half_layout))
    return gl.load(positions_ptr + token, mask=(token < num_tokens) & has_rope, other=-1)


@gluon.jit
def load_cos_sin(cos_sin_ptr, position, HEAD_SIZE: gl.constexpr):
    """(cos, sin), [tokens, HEAD_SIZE / 2]; undefined where the position is -1."""
    HALF: gl.constexpr = HEAD_SIZE // 2
    d = gl.arange(0, HALF, layout=gl.SliceLayout(0, position.type.layout.parent))
    ptrs = cos_sin_ptr + (position.to(gl.int64) * HEAD_SIZE)[:, None] + d[None, :]
    mask = (position >= 0)[:, None] & (d < HALF)[None, :]
    return gl.load(ptrs, mask=mask), gl.load(ptrs + HALF, mask=mask)


@gluon.jit
def load_norm_weight(weight_ptr, HEAD_SIZE: gl.constexpr, WARPS: gl.constexpr):
    """Both halves of a norm weight, [HEAD_SIZE / 2] each."""
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_SIZE // 2, 16])
    d = gl.arange(0, HEAD_SIZE // 2, layout=gl.SliceLayout(0, half_layout))
    return gl.load(weight_ptr + d), gl.load(weight_ptr + HEAD_SIZE // 2 + d)


@gluon.jit
def norm_head(x_1, x_2, norm_weight, eps, HEAD_SIZE: gl.constexpr, dtype: gl.constexpr):
    """RMSNorm of a head's halves, rounded to dtype after each step, as in the twin."""
    weight_1 = norm_weight[0].to(gl.float32)[None, :]
    weight_2 = norm_weight[1].to(gl.float32)[None, :]
    rstd = gl.rsqrt(gl.sum(x_1 * x_1 + x_2 * x_2, 1) / HEAD_SIZE + eps)[:, None]
    x_1 = ((x_1 * rstd).to(dtype).to(gl.float32) * weight_1).to(dtype).to(gl.float32)
    x_2 = ((x_2 * rstd).to(dtype).to(gl.float32) * weight_2).to(dtype).to(gl.float32)
    return x_1, x_2


@gluon.jit
def norm_rope_head(x_1, x_2, norm_weight, cos, sin, eps, HEAD_SIZE: gl.constexpr, HAS_NORM: gl.constexpr,
                   dtype: gl.constexpr):  # fmt: skip
    """QK-norm and rotation of a head's halves."""
    if HAS_NORM:
        x_1, x_2 = norm_head(x_1, x_2, norm_weight, eps, HEAD_SIZE, dtype)
    return x_1 * cos - x_2 * sin, x_2 * cos + x_1 * sin


@gluon.jit
def norm_rope(left, right, norm_weight, cos, sin, eps, HEAD_SIZE: gl.constexpr, HAS_NORM: gl.constexpr,
              dtype: gl.constexpr):  # fmt: skip
    """QK-norm and rotation of the halves of one head, or of two heads of half as many features."""
    if left.shape[1] == HEAD_SIZE:
        left = _norm_rope_whole_head(left, norm_weight, cos, sin, eps, HEAD_SIZE, HAS_NORM, dtype)
        right = _norm_rope_whole_head(right, norm_weight, cos, sin, eps, HEAD_SIZE, HAS_NORM, dtype)
    else:
        left, right = norm_rope_head(left, right, norm_weight, cos, sin, eps, HEAD_SIZE, HAS_NORM, dtype)
    return left, right


@gluon.jit
def _norm_rope_whole_head(x, norm_weight, cos, sin, eps, HEAD_SIZE: gl.constexpr, HAS_NORM: gl.constexpr,
                          dtype: gl.constexpr):  # fmt: skip
    x_1, x_2 = split_halves(x)
    x_1, x_2 = norm_rope_head(x_1, x_2, norm_weight, cos, sin, eps, HEAD_SIZE, HAS_NORM, dtype)
    return gl.convert_layout(join_halves(x_1, x_2), x.type.layout, assert_trivial=True)

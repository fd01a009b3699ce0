"""Triton helpers for both attention kernels: block-table lookup, KV slot addresses, and the layout they assume.

Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), in fp32 and base 2: the hardware has exp2.

Legend: T packed query tokens, B sequences of a decode batch, S sequences of a prefill, R request slots, H query heads,
K KV heads, GQA_GROUP = H / K, D head size, NB blocks of BS tokens.
"""

import triton
import triton.language as tl

from ...quantization.fp8.numbers import E4M3

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # initial running maximum, finite: -inf minus -inf would be NaN


def attention_shape(q, k_cache, v_cache):
    """(K, GQA_GROUP, D, BS) of a launch, after checking the layout that the kernels assume."""
    _, num_heads, head_size = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    gqa_group = num_heads // num_kv_heads
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == q.stride(2) == 1
    assert k_cache.dtype == v_cache.dtype in (q.dtype, E4M3)
    assert block_size % 16 == 0 and gqa_group * num_kv_heads == num_heads and gqa_group <= 16
    return num_kv_heads, gqa_group, head_size, block_size


@triton.jit
def load_block_ids(table_ptr, first, context, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """KV blocks of the tokens first .. first + BLOCK_N - 1: one i32 where a tile never spans two blocks, else one each.

    Loops look up the next tile's blocks while they load this tile: a load whose address is another load of the same
    iteration is not pipelined by Triton.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        block_ids = tl.load(table_ptr + first // BLOCK_SIZE, mask=first < context, other=0)
    else:
        position = first + tl.arange(0, BLOCK_N)
        # Table entries beyond the context are undefined: mask them.
        block_ids = tl.load(table_ptr + position // BLOCK_SIZE, mask=position < context, other=0)
    return block_ids


@triton.jit
def slot_offsets(
    block_ids, first, stride_block, STRIDE_SLOT: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Element offsets i64[BLOCK_N] of the tokens first .. first + BLOCK_N - 1 in the KV cache."""
    offs_n = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        # One base address plus constant distances: one register instead of one per token.
        base = block_ids.to(tl.int64) * stride_block + (first % BLOCK_SIZE) * STRIDE_SLOT
        offs = base + offs_n * STRIDE_SLOT
    else:
        offs = block_ids.to(tl.int64) * stride_block + (first + offs_n) % BLOCK_SIZE * STRIDE_SLOT
    return offs


@triton.jit
def soft_cap(scores, cap_scale):
    """tanh of scores times ``cap_scale`` / (2 log2 e); the scores unchanged if ``cap_scale`` is None."""
    if cap_scale is not None:
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap_scale) + 1.0)  # +-1 where exp2 is inf or 0
    return scores


def score_scales(scale, softcap):
    """(scale_log2e, cap_scale) of a launch: scores in base 2 are soft_cap(q k, cap_scale) * scale_log2e."""
    if softcap:
        return softcap * LOG2_E.value, 2 * LOG2_E.value * scale / softcap
    return scale * LOG2_E.value, None


@triton.jit
def load_sinks(sinks_ptr, heads, mask):
    """Attention sinks of query heads, in base 2."""
    return tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * LOG2_E


@triton.jit
def sink_weights(sinks, row_max):
    """Terms that sinks add to the sums of exp2(score - row_max). Finite even without keys, or far above all scores."""
    return tl.exp2(tl.minimum(sinks - row_max, 126.0))


@triton.jit
def widen(x, dtype: tl.constexpr):
    """Convert q of this dtype, or e4m3 keys or values, for a dot: to fp16, which holds e4m3 exactly, or to fp32.

    On sm_90 e4m3 to fp16 is one instruction for two values; to bf16 it is three.
    """
    return x.to(tl.float32 if dtype == tl.float32 else tl.float16)


@triton.jit
def widen_pairs(x):
    """Convert pairs of e4m3 neighbours, int16 [N, D / 2], to fp16 even and odd channels, [N, D / 2] each.

    A dot over N wants values of two rows in one register: a byte permutation brings them together before they are
    converted. Loaded as bytes they would come from shared memory one by one.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 rows;
        .reg .b16 even, odd;
        prmt.b32 rows, $2, 0, 0x3120;
        mov.b32 {even, odd}, rows;
        cvt.rn.f16x2.e4m3x2 $0, even;
        cvt.rn.f16x2.e4m3x2 $1, odd;
        }
        """,
        "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip

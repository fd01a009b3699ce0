"""Gluon: GEMM of many tokens on NVIDIA Hopper, persistent and warp-specialized, with a fused epilogue.

Owns `prefill_gemm`, with act_and_mul or norm_rope_store. dispatch.py decides when it is faster than cuBLAS.

One program per SM computes every num_programs-th tile of 128 tokens by 256 output features:

    producer (1 warp)              TMA loads of x and the weight into a pipeline of STAGES stages of 64 channels
    2 consumer warpgroups          64 tokens by 256 features each: wgmma, the epilogue in registers, TMA stores

Each stage has a full and an empty mbarrier, as in prefill_sm90.py of attention: copies arrive on `full`, consumers on
`empty` after their MMA. A consumer may run ahead by the length of the pipeline, so one's epilogue overlaps the other's
MMAs.

In a 64 x 256 accumulator the thread that holds column c also holds c + 32, c + 64 and c + 128. With act_and_mul one
half of a tile's columns is gate and the other up; otherwise the halves are two units of the QKV epilogue, each a head
of 128 or two of 64, and the rotation pairs the halves [tokens, D / 2] of a head. So only a head's sum of squares and
the largest magnitude of a quantized row cross threads.
The QKV epilogue rounds as reference.norm_rope_store does, except for the product itself, which stays in fp32.

x and weight may be e4m3, with a scale per token, or per token and 128 channels, and per output feature or block of
128 x 128 of the weight. act_and_mul can write such an x: a program has 128 of its channels. Hopper sums e4m3 products
in about 14 bits, so each stage of 128 channels is summed by itself and added to a sum in fp32: one half of the columns
after the other, to save registers; meanwhile the other consumer's MMA runs.

If the last tiles of gate and up in e4m3, with a scale per token and feature, would occupy at most half of the SMs, each
is cut into two half tiles of 64 outputs, and the last wave takes half the time. Not if the outputs are quantized.

M tokens, N output features, C input channels, I = N / 2; H query heads, K KV heads, D head size.
"""

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...quantization.fp8.numbers import E4M3, E4M3_MAX
from ..gluon_compat import hopper, mbarrier, thread_barrier, tma_load, tma_store, tma_store_wait
from ..launch import is_sm90, launch, launch_options, num_sms
from .gemv import sigmoid_argument
from .reference import Tokens

NUM_CONSUMERS = gl.constexpr(2)
CONSUMER_WARPS = gl.constexpr(4)
CONSUMER_M = gl.constexpr(64)  # tokens of a consumer
BLOCK_M = gl.constexpr(NUM_CONSUMERS.value * CONSUMER_M.value)
BLOCK_N = gl.constexpr(256)
LINE_BYTES = gl.constexpr(128)  # a row of a stage's channels: one line of the swizzled layout
STORE_N = gl.constexpr(64)  # columns of a TMA store
UNIT = gl.constexpr(128)  # features of q, k or v that the QKV epilogue finishes at a time: a head of 128, or two of 64
SWIZZLE = gl.constexpr(16)  # tiles along M before the next along N; 8 and 32 are as fast (docs/experiments.md)
LOG2_E = gl.constexpr(1.4426950408889634)
LARGEST = gl.constexpr(E4M3_MAX)


@gluon.jit
def tile_coords(tile, num_tiles_m, num_tiles_n):
    """(tile_m, tile_n) in an order in which concurrent programs share operands in L2."""
    first_m = tile // (SWIZZLE * num_tiles_n) * SWIZZLE
    size_m = gl.minimum(num_tiles_m - first_m, SWIZZLE)
    local = tile - first_m * num_tiles_n
    return first_m + local % size_m, local // size_m


@gluon.jit
def half_tile_coords(half, shape):
    """(tile_m, first output) of a half tile; half tiles are numbered after the whole ones."""
    num_tokens, num_tiles_n, _, num_whole = shape
    num_tiles_m = (num_tokens + BLOCK_M - 1) // BLOCK_M
    tile_m, tile_n = tile_coords(num_whole + half // 2, num_tiles_m, num_tiles_n)
    return tile_m, (tile_n * 2 + half % 2) * STORE_N


@gluon.jit
def num_half_tiles(shape):
    num_tokens, num_tiles_n, _, num_whole = shape
    return 2 * ((num_tokens + BLOCK_M - 1) // BLOCK_M * num_tiles_n - num_whole)


@gluon.jit
def load_tile(
    n, pipeline, x_desc, weight_desc, tile_m, feature, half_stride, num_steps, STAGES: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    """Load x, and twice WIDTH features of the weight. n: steps before this tile; returns the number after it."""
    x_smem, weight_smem, full, empty = pipeline
    BLOCK_C: gl.constexpr = x_smem.shape[2]
    for step in range(num_steps):
        stage = n % STAGES
        c = step * BLOCK_C
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), (BLOCK_M + 2 * WIDTH) * LINE_BYTES)
        for i in gl.static_range(NUM_CONSUMERS):
            x = x_smem.index(stage * NUM_CONSUMERS + i)
            tma_load(x_desc, [(tile_m * NUM_CONSUMERS + i) * CONSUMER_M, c], full.index(stage), x)
        weight = weight_smem.index(stage)
        tma_load(weight_desc, [feature, c], full.index(stage), weight.slice(0, WIDTH))
        tma_load(weight_desc, [feature + half_stride, c], full.index(stage), weight.slice(WIDTH, WIDTH))
        n += 1
    return n


@gluon.jit
def produce(pipeline, x_desc, weight_desc, half_desc, shape, tile_stride, half_stride, STAGES: gl.constexpr):
    num_tokens, num_tiles_n, num_steps, num_whole = shape
    num_tiles_m = (num_tokens + BLOCK_M - 1) // BLOCK_M
    n = 0  # steps over all tiles
    for tile in range(gl.program_id(0), num_whole, gl.num_programs(0)):
        tile_m, tile_n = tile_coords(tile, num_tiles_m, num_tiles_n)
        feature = tile_n * tile_stride
        n = load_tile(
            n, pipeline, x_desc, weight_desc, tile_m, feature, half_stride, num_steps, STAGES, BLOCK_N // 2
        )  # fmt: skip
    if half_desc is not None:
        for half in range(gl.program_id(0), num_half_tiles(shape), gl.num_programs(0)):
            tile_m, output = half_tile_coords(half, shape)
            n = load_tile(n, pipeline, x_desc, half_desc, tile_m, output, half_stride, num_steps, STAGES, STORE_N)


@gluon.jit
def fast_reciprocal(x):
    """1 / x in one instruction; error at most 1 ulp, 0 from 2**126 on."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def stage_output(staging, left, right, CONSUMER: gl.constexpr):
    """Two tiles [CONSUMER_M, STORE_N] from registers to the consumer's staging buffers, after the last TMA stores."""
    tma_store_wait(0)
    thread_barrier()
    staging.index(2 * CONSUMER).store(left.to(staging.dtype))
    staging.index(2 * CONSUMER + 1).store(right.to(staging.dtype))
    hopper.fence_async_shared()
    thread_barrier()


@gluon.jit
def store_output(y_desc, staging, token, column, CONSUMER: gl.constexpr):
    """Asynchronous TMA store of the consumer's staging buffers to y[token:, column:]."""
    tma_store(y_desc, [token, column], staging.index(2 * CONSUMER))
    tma_store(y_desc, [token, column + STORE_N], staging.index(2 * CONSUMER + 1))


@gluon.jit
def split_halves(x):
    """The left and right half of accumulators x. A thread holds the same columns of both: no data movement."""
    width: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], x.type.layout.warps_per_cta, [16, width, 16])
    left, right = gl.split(x.reshape([x.shape[0], 2, width]).permute((0, 2, 1)))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def scaled(total, scales, first_token, feature, num_tokens, bias_ptr, num_features,
           NUM_GROUPS: gl.constexpr, X_GROUPS: gl.constexpr):  # fmt: skip
    """Scale half a tile of sums of e4m3 products by the scales of its tokens and features, and add the bias."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [CONSUMER_WARPS, 1], [16, BLOCK_N // 2, 16])
    x_scale_ptr, weight_scale_ptr = scales
    total = gl.convert_layout(total, layout, assert_trivial=True)
    token = first_token + gl.arange(0, CONSUMER_M, layout=gl.SliceLayout(1, layout))
    if not X_GROUPS:
        total *= gl.load(x_scale_ptr + token, mask=token < num_tokens, other=0.0)[:, None]
    if NUM_GROUPS == 1:
        total *= gl.load(weight_scale_ptr + feature, mask=feature < num_features, other=0.0)[None, :]
    if bias_ptr is not None:
        total += gl.load(bias_ptr + feature, mask=feature < num_features, other=0.0).to(gl.float32)[None, :]
    return total


@gluon.jit
def plain_epilogue(half, residual, where, first_column, CONSUMER: gl.constexpr):
    """Store half a tile, [plus the residual]."""
    y_desc, staging, first_token, num_tokens = where
    left, right = split_halves(half)
    if residual[0] is not None:
        left = add_residual(left, residual, first_token, first_column, num_tokens)
        right = add_residual(right, residual, first_token, first_column + STORE_N, num_tokens)
    stage_output(staging, left, right, CONSUMER)
    store_output(y_desc, staging, first_token, first_column, CONSUMER)


@gluon.jit
def add_residual(x, residual, first_token, first_column, num_tokens):
    residual_ptr, residual_stride = residual
    token = first_token + gl.arange(0, CONSUMER_M, layout=gl.SliceLayout(1, x.type.layout))
    column = first_column + gl.arange(0, STORE_N, layout=gl.SliceLayout(0, x.type.layout))
    ptrs = residual_ptr + token.to(gl.int64)[:, None] * residual_stride + column[None, :]
    mask = (token < num_tokens)[:, None] & (column >= 0)[None, :]
    return x + gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def load_positions(positions_ptr, first_token, num_tokens, has_rope, HEAD_SIZE: gl.constexpr):
    """Positions [CONSUMER_M] in the layout of a head's halves; -1 past the last token and without has_rope."""
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [CONSUMER_WARPS, 1], [16, HEAD_SIZE // 2, 16])
    token = first_token + gl.arange(0, CONSUMER_M, layout=gl.SliceLayout(1, half_layout))
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
def load_norm_weight(weight_ptr, HEAD_SIZE: gl.constexpr):
    """Both halves of a norm weight, [HEAD_SIZE / 2] each."""
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [CONSUMER_WARPS, 1], [16, HEAD_SIZE // 2, 16])
    d = gl.arange(0, HEAD_SIZE // 2, layout=gl.SliceLayout(0, half_layout))
    return gl.load(weight_ptr + d), gl.load(weight_ptr + HEAD_SIZE // 2 + d)


@gluon.jit
def norm_rope_head(x_1, x_2, norm_weight, cos, sin, eps, HEAD_SIZE: gl.constexpr, dtype: gl.constexpr):
    """QK-norm and rotation of a head's halves, rounded to dtype after each step of the norm."""
    if norm_weight is not None:
        weight_1 = norm_weight[0].to(gl.float32)[None, :]
        weight_2 = norm_weight[1].to(gl.float32)[None, :]
        rstd = gl.rsqrt(gl.sum(x_1 * x_1 + x_2 * x_2, 1) / HEAD_SIZE + eps)[:, None]
        x_1 = ((x_1 * rstd).to(dtype).to(gl.float32) * weight_1).to(dtype).to(gl.float32)
        x_2 = ((x_2 * rstd).to(dtype).to(gl.float32) * weight_2).to(dtype).to(gl.float32)
    return x_1 * cos - x_2 * sin, x_2 * cos + x_1 * sin


@gluon.jit
def norm_rope_whole_head(x, norm_weight, cos, sin, eps, HEAD_SIZE: gl.constexpr, dtype: gl.constexpr):
    x_1, x_2 = split_halves(x)
    x_1, x_2 = norm_rope_head(x_1, x_2, norm_weight, cos, sin, eps, HEAD_SIZE, dtype)
    joined = gl.join(x_1, x_2).permute((0, 2, 1)).reshape([x.shape[0], x.shape[1]])
    return gl.convert_layout(joined, x.type.layout, assert_trivial=True)


@gluon.jit
def norm_rope(left, right, norm_weight, cos, sin, eps, HEAD_SIZE: gl.constexpr, dtype: gl.constexpr):
    """QK-norm and rotation of the halves of a unit: the halves of one head, or one head each."""
    if left.shape[1] == HEAD_SIZE:
        left = norm_rope_whole_head(left, norm_weight, cos, sin, eps, HEAD_SIZE, dtype)
        right = norm_rope_whole_head(right, norm_weight, cos, sin, eps, HEAD_SIZE, dtype)
    else:
        left, right = norm_rope_head(left, right, norm_weight, cos, sin, eps, HEAD_SIZE, dtype)
    return left, right


@gluon.jit
def quantize(x, scale):
    """x / scale as e4m3; the conversion saturates. NaN stays NaN."""
    return (x.to(gl.float32) * (1.0 / scale)).to(gl.float8e4nv)


@gluon.jit
def qkv_epilogue(
    units, cos, sin, epilogue, q_desc, staging, first_token, tile_n, num_tokens,
    CONSUMER: gl.constexpr, HEAD_SIZE: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
):  # fmt: skip
    """norm_rope_store of the two units of a tile, each a unit of q, k or v."""
    _, q_weight_ptr, k_weight_ptr, eps, _, _, slot_mapping_ptr, k_cache_ptr, v_cache_ptr, kv_scale_ptr = epilogue
    Q_UNITS: gl.constexpr = NUM_HEADS * HEAD_SIZE // UNIT
    KV_UNITS: gl.constexpr = NUM_KV_HEADS * HEAD_SIZE // UNIT
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = first_token + gl.arange(0, CONSUMER_M, layout=gl.SliceLayout(1, store_layout))
    d = gl.arange(0, STORE_N, layout=gl.SliceLayout(0, store_layout))
    slot = gl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(gl.int64)
    for i in gl.static_range(2):
        unit = 2 * tile_n + i
        left, right = split_halves(units[i])
        if unit < Q_UNITS + KV_UNITS:
            norm_weight = None
            if q_weight_ptr is not None:
                weight_ptr = q_weight_ptr
                if unit >= Q_UNITS:
                    weight_ptr = k_weight_ptr
                norm_weight = load_norm_weight(weight_ptr, HEAD_SIZE)
            left, right = norm_rope(left, right, norm_weight, cos, sin, eps, HEAD_SIZE, staging.dtype)
        stage_output(staging, left, right, CONSUMER)
        if unit < Q_UNITS:
            store_output(q_desc, staging, first_token, unit * UNIT, CONSUMER)
        else:
            cache_ptr = k_cache_ptr
            kv_unit = unit - Q_UNITS
            if kv_unit >= KV_UNITS:
                cache_ptr = v_cache_ptr
                kv_unit -= KV_UNITS
            ptrs = cache_ptr + ((slot * KV_UNITS + kv_unit) * UNIT)[:, None] + d[None, :]
            is_stored = (slot >= 0)[:, None] & (d < STORE_N)[None, :]
            if (Q_UNITS + 2 * KV_UNITS) % 2 != 0:  # the second unit of the last tile does not exist
                is_stored = is_stored & (kv_unit < KV_UNITS)
            if kv_scale_ptr is None:
                gl.store(ptrs, staging.index(2 * CONSUMER).load(store_layout), mask=is_stored)
                gl.store(ptrs + STORE_N, staging.index(2 * CONSUMER + 1).load(store_layout), mask=is_stored)
            else:
                # Scales of v follow those of k. A unit is one head, or its halves are two.
                scale_ptr = kv_scale_ptr + gl.minimum(unit - Q_UNITS, 2 * KV_UNITS - 1) * (UNIT // HEAD_SIZE)
                x_1 = quantize(staging.index(2 * CONSUMER).load(store_layout), gl.load(scale_ptr))
                gl.store(ptrs, x_1, mask=is_stored)
                scale_ptr += UNIT // HEAD_SIZE - 1
                x_2 = quantize(staging.index(2 * CONSUMER + 1).load(store_layout), gl.load(scale_ptr))
                gl.store(ptrs + STORE_N, x_2, mask=is_stored)


@gluon.jit
def quantize_tokens(x, scale_ptr, first_token, num_tokens):
    """Divide x [tokens, channels] by its tokens' scales, and store these; the largest magnitude becomes 448."""
    token = first_token + gl.arange(0, CONSUMER_M, layout=gl.SliceLayout(1, x.type.layout))
    amax = gl.maximum(gl.max(gl.abs(x), 1), 1e-12)
    gl.store(scale_ptr + token, amax * (1.0 / LARGEST), mask=token < num_tokens)
    return x * (LARGEST / amax)[:, None]


@gluon.jit
def product_alone(x, weight, registers):
    """x weight^T of a stage, in the registers of the previous product."""
    pending = hopper.warpgroup_mma(x, weight.permute((1, 0)), registers, use_acc=False, is_async=True)
    return hopper.warpgroup_mma_wait(0, [pending])


@gluon.jit
def in_scale(product, x_scale, weight_scale):
    """The product of a stage times the scales of its channels, if they have scales."""
    if weight_scale is not None:
        product *= weight_scale
    if x_scale is not None:
        product *= x_scale[:, None]
    return product


@gluon.jit
def features_of(first, half_stride, WIDTH: gl.constexpr):
    """The features of 128 columns: consecutive ones, or WIDTH of gate, then WIDTH of up, half_stride further on."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [CONSUMER_WARPS, 1], [16, BLOCK_N // 2, 16])
    column = gl.arange(0, BLOCK_N // 2, layout=gl.SliceLayout(0, layout))
    if WIDTH < BLOCK_N // 2:
        column = column % WIDTH + column // WIDTH * half_stride
    return first + column


@gluon.jit
def act_and_mul(gate, up, ACT_MUL: gl.constexpr):
    return gate * fast_reciprocal(1.0 + gl.exp2(sigmoid_argument(gate, ACT_MUL) * -LOG2_E)) * up


@gluon.jit
def consume_half_tiles(
    n, pipeline, staging, y_desc, shape, scales, half_stride,
    CONSUMER: gl.constexpr, ACT_MUL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consume half tiles: gate and up are the left half of a stage. n: steps over the tiles before."""
    x_smem, weight_smem, full, empty = pipeline
    num_tokens, num_tiles_n, num_steps, _ = shape
    HALF: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [CONSUMER_WARPS, 1], [16, HALF, 32])
    for half in range(gl.program_id(0), num_half_tiles(shape), gl.num_programs(0)):
        tile_m, output = half_tile_coords(half, shape)
        first_token = (tile_m * NUM_CONSUMERS + CONSUMER) * CONSUMER_M
        total = gl.zeros([CONSUMER_M, HALF], gl.float32, layout=layout)
        product = gl.zeros([CONSUMER_M, HALF], gl.float32, layout=layout)
        for _ in range(num_steps):
            stage = n % STAGES
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            x = x_smem.index(stage * NUM_CONSUMERS + CONSUMER)
            product = product_alone(x, weight_smem.index(stage).slice(0, HALF), product)
            thread_barrier()
            mbarrier.arrive(empty.index(stage))
            total += product
            n += 1
        if first_token < num_tokens:
            features = features_of(output, half_stride, STORE_N)
            both = scaled(total, scales, first_token, features, num_tokens, None, num_tiles_n * BLOCK_N, 1, False)
            gate, up = split_halves(both)
            y = act_and_mul(gate, up, ACT_MUL)
            tma_store_wait(0)
            thread_barrier()
            staging.index(2 * CONSUMER).store(y.to(staging.dtype))
            hopper.fence_async_shared()
            thread_barrier()
            tma_store(y_desc, [first_token, output], staging.index(2 * CONSUMER))


@gluon.jit
def consume(
    pipeline, staging, y_desc, shape, scales, y_scale_ptr, tile_stride, half_stride, residual, epilogue,
    HAS_HALVES: gl.constexpr, CONSUMER: gl.constexpr, NUM_GROUPS: gl.constexpr, X_GROUPS: gl.constexpr,
    ACT_MUL: gl.constexpr, HEAD_SIZE: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    x_smem, weight_smem, full, empty = pipeline
    num_tokens, num_tiles_n, num_steps, num_whole = shape
    num_features = num_tiles_n * BLOCK_N
    if HEAD_SIZE > 0:  # the last tile may lack its second unit
        num_features = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE
    bias_ptr, _, _, _, cos_sin_ptr, positions_ptr, _, _, _, _ = epilogue
    num_tiles_m = (num_tokens + BLOCK_M - 1) // BLOCK_M
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    IS_FP8: gl.constexpr = x_smem.dtype.primitive_bitwidth == 8
    HALF: gl.constexpr = BLOCK_N // 2
    fp8_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    n = 0  # steps over all tiles
    for tile in range(gl.program_id(0), num_whole, gl.num_programs(0)):
        tile_m, tile_n = tile_coords(tile, num_tiles_m, num_tiles_n)
        first_token = (tile_m * NUM_CONSUMERS + CONSUMER) * CONSUMER_M
        if HEAD_SIZE > 0:
            has_rope = 2 * tile_n < (NUM_HEADS + NUM_KV_HEADS) * HEAD_SIZE // UNIT
            position = load_positions(positions_ptr, first_token, num_tokens, has_rope, HEAD_SIZE)
        if IS_FP8:
            total_1 = gl.zeros([CONSUMER_M, HALF], gl.float32, layout=fp8_layout)
            total_2 = gl.zeros([CONSUMER_M, HALF], gl.float32, layout=fp8_layout)
            product = gl.zeros([CONSUMER_M, HALF], gl.float32, layout=fp8_layout)
            feature = tile_n * tile_stride
            if NUM_GROUPS > 1:
                scale_ptr_1 = scales[1] + feature * NUM_GROUPS
                scale_ptr_2 = scales[1] + gl.minimum(feature + half_stride, num_features - 1) * NUM_GROUPS
            token = first_token + gl.arange(0, CONSUMER_M, layout=gl.SliceLayout(1, fp8_layout))
            for step in range(num_steps):
                stage = n % STAGES
                x_scale, scale_1, scale_2 = None, None, None
                if NUM_GROUPS > 1:
                    scale_1, scale_2 = gl.load(scale_ptr_1 + step), gl.load(scale_ptr_2 + step)
                if X_GROUPS:
                    x_scale = gl.load(scales[0] + step * num_tokens + token, mask=token < num_tokens, other=0.0)
                mbarrier.wait(full.index(stage), (n // STAGES) & 1)
                x = x_smem.index(stage * NUM_CONSUMERS + CONSUMER)
                weight = weight_smem.index(stage)
                product = product_alone(x, weight.slice(0, HALF), product)
                total_1 += in_scale(product, x_scale, scale_1)
                product = product_alone(x, weight.slice(HALF, HALF), product)
                thread_barrier()
                mbarrier.arrive(empty.index(stage))
                total_2 += in_scale(product, x_scale, scale_2)
                n += 1
        else:
            acc = gl.zeros([CONSUMER_M, BLOCK_N], gl.float32, layout=acc_layout)
            if bias_ptr is not None:
                column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, acc_layout))
                feature = tile_n * BLOCK_N + column
                if ACT_MUL is not None:  # gate, then up
                    feature = tile_n * HALF + column % HALF + column // HALF * half_stride
                bias = gl.load(bias_ptr + feature, mask=feature < num_features, other=0.0)
                acc += bias.to(gl.float32)[None, :]
            for step in range(num_steps):
                stage = n % STAGES
                mbarrier.wait(full.index(stage), (n // STAGES) & 1)
                x = x_smem.index(stage * NUM_CONSUMERS + CONSUMER)
                acc = hopper.warpgroup_mma(x, weight_smem.index(stage).permute((1, 0)), acc, is_async=True)
                # One MMA stays in flight; the stage of the previous one is empty.
                acc = hopper.warpgroup_mma_wait(1, [acc])
                thread_barrier()
                mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), pred=step > 0)
                n += 1
            if HEAD_SIZE > 0:
                cos, sin = load_cos_sin(cos_sin_ptr, position, HEAD_SIZE)  # overlaps the last MMA
            acc = hopper.warpgroup_mma_wait(0, [acc])
            thread_barrier()
            mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES))

        # The branch also keeps ptxas from moving the epilogue's arithmetic before the arrival.
        if first_token < num_tokens:
            if IS_FP8:
                features = features_of(feature, 0, HALF)
                left = scaled(
                    total_1, scales, first_token, features, num_tokens, bias_ptr, num_features, NUM_GROUPS, X_GROUPS
                )
                features = features_of(feature + half_stride, 0, HALF)
                right = scaled(
                    total_2, scales, first_token, features, num_tokens, bias_ptr, num_features, NUM_GROUPS, X_GROUPS
                )
                if HEAD_SIZE > 0:
                    cos, sin = load_cos_sin(cos_sin_ptr, position, HEAD_SIZE)
            else:
                left, right = split_halves(acc)
            if HEAD_SIZE > 0:
                qkv_epilogue(
                    (left, right), cos, sin, epilogue, y_desc, staging, first_token, tile_n, num_tokens,
                    CONSUMER, HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS,
                )  # fmt: skip
            elif ACT_MUL is None:
                column = tile_n * BLOCK_N
                where = (y_desc, staging, first_token, num_tokens)
                plain_epilogue(left, residual, where, column, CONSUMER)
                plain_epilogue(right, residual, where, column + BLOCK_N // 2, CONSUMER)
            else:
                y = act_and_mul(left, right, ACT_MUL)
                if y_scale_ptr is not None:
                    y = quantize_tokens(y, y_scale_ptr + tile_n * num_tokens, first_token, num_tokens)
                y_1, y_2 = split_halves(y)
                stage_output(staging, y_1, y_2, CONSUMER)
                store_output(y_desc, staging, first_token, tile_n * (BLOCK_N // 2), CONSUMER)
    if HAS_HALVES:
        consume_half_tiles(n, pipeline, staging, y_desc, shape, scales, half_stride, CONSUMER, ACT_MUL, STAGES)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["num_tokens", "num_tiles_n", "num_steps", "num_whole"])
def prefill_gemm_kernel(
    x_desc,  # [M, C], in blocks of [CONSUMER_M, BLOCK_C], of 128 bytes a row
    weight_desc,  # [N, C], [BLOCK_N / 2, BLOCK_C]
    half_desc,  # likewise, [BLOCK_N / 4, BLOCK_C], for half tiles, with ACT_MUL and e4m3; or None: all are whole
    y_desc,  # [M, I], with HEAD_SIZE q [M, H * D], [CONSUMER_M, STORE_N]; written here
    num_tokens,
    num_tiles_n,
    num_steps,
    num_whole,  # number of whole tiles; each tile after them is two half tiles
    tile_stride,  # output features from one tile to the next
    half_stride,  # and from the first half of a tile to the second
    x_scale_ptr,  # fp32 [M], with X_GROUPS [C / 128, M]; only with e4m3
    weight_scale_ptr,  # fp32 [N, NUM_GROUPS], only with e4m3
    y_scale_ptr,  # fp32 [I / 128, M], None unless y is e4m3, with ACT_MUL; written here
    residual_ptr,  # [M, I], only with e4m3, or None
    residual_stride,
    bias_ptr,  # [N], not with ACT_MUL and e4m3, or None
    q_weight_ptr, k_weight_ptr,  # [D] each, or None
    eps,
    cos_sin_ptr,  # fp32 [max_position, D]; this and the next four only with HEAD_SIZE
    positions_ptr,  # [M]
    slot_mapping_ptr,  # i32[M]
    k_cache_ptr, v_cache_ptr,  # [slots, K, D], written here
    kv_scale_ptr,  # fp32 [2, K], None unless the cache is FP8
    NUM_GROUPS: gl.constexpr,  # scales along the channels: 1 per feature, or one a stage, per 128 features
    X_GROUPS: gl.constexpr,  # whether x has a scale per token and stage
    ACT_MUL: gl.constexpr,  # "silu" or "gelu_tanh", without HEAD_SIZE
    HEAD_SIZE: gl.constexpr,  # 0: act_and_mul, or with e4m3 neither
    NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_desc.dtype
    BLOCK_C: gl.constexpr = LINE_BYTES * 8 // dtype.primitive_bitwidth
    smem_layout: gl.constexpr = gl.NVMMASharedLayout(LINE_BYTES, dtype.primitive_bitwidth, 2)
    Y_BITS: gl.constexpr = y_desc.dtype.primitive_bitwidth
    y_layout: gl.constexpr = gl.NVMMASharedLayout(STORE_N * Y_BITS // 8, Y_BITS, 2)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * NUM_CONSUMERS, CONSUMER_M, BLOCK_C], smem_layout)
    weight_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_C], smem_layout)
    staging = gl.allocate_shared_memory(y_desc.dtype, [2 * NUM_CONSUMERS, CONSUMER_M, STORE_N], y_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NUM_CONSUMERS)
    hopper.fence_async_shared()
    if USE_PDL:
        gdc_wait()

    pipeline = (x_smem, weight_smem, full, empty)
    shape = (num_tokens, num_tiles_n, num_steps, num_whole)
    HAS_HALVES: gl.constexpr = half_desc is not None
    scales = (x_scale_ptr, weight_scale_ptr)
    residual = (residual_ptr, residual_stride)
    epilogue = (
        bias_ptr, q_weight_ptr, k_weight_ptr, eps, cos_sin_ptr, positions_ptr, slot_mapping_ptr, k_cache_ptr,
        v_cache_ptr, kv_scale_ptr,
    )  # fmt: skip
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gl.warp_specialize(
        [
            (consume, (
                pipeline, staging, y_desc, shape, scales, y_scale_ptr, tile_stride, half_stride, residual, epilogue,
                HAS_HALVES, ZERO, NUM_GROUPS, X_GROUPS, ACT_MUL, HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, STAGES,
            )),
            (consume, (
                pipeline, staging, y_desc, shape, scales, y_scale_ptr, tile_stride, half_stride, residual, epilogue,
                HAS_HALVES, ONE, NUM_GROUPS, X_GROUPS, ACT_MUL, HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, STAGES,
            )),
            (produce, (pipeline, x_desc, weight_desc, half_desc, shape, tile_stride, half_stride, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def supports(x, weight, is_qkv=False):
    """Whether `prefill_gemm` runs with these Tokens and Weight: whole tiles, or whole units with the QKV epilogue."""
    has_blocks = weight.scale is None or weight.has_whole_blocks()
    x, weight = x.data, weight.data
    num_features, num_channels = weight.shape
    return (
        has_blocks
        and is_sm90(x.device)
        and (x.element_size() == 2 or (x.element_size() == 1 and num_channels % LINE_BYTES.value == 0))
        and x.dtype == weight.dtype
        and num_channels % (LINE_BYTES.value // 2) == num_features % (UNIT if is_qkv else BLOCK_N).value == 0
        and x.stride(1) == 1
        and x.stride(0) * x.element_size() % 16 == x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        and weight.is_contiguous()
    )


def supports_qkv(x, weight, epilogue):
    """Whether norm_rope_store can be the epilogue: q, k and v are whole units, and k and v go to contiguous caches."""
    num_heads, num_kv_heads = epilogue.num_heads, epilogue.num_kv_heads
    head_size = len(weight.data) // (num_heads + 2 * num_kv_heads)
    k_cache, v_cache = epilogue.k_cache, epilogue.v_cache
    if k_cache is None or k_cache.numel() == 0 or head_size not in (64, 128) or epilogue.v_norm:
        return False
    if num_heads * head_size % UNIT.value or num_kv_heads * head_size % UNIT.value:
        return False
    is_contiguous = k_cache.is_contiguous() and v_cache.is_contiguous() and epilogue.cos_sin.is_contiguous()
    return is_contiguous and k_cache.dtype == v_cache.dtype and k_cache.dtype in (x.dtype, E4M3)


def idle_channels(x, weight):
    """Average idle time of an SM while the last tiles run, in channels of its tile."""
    num_tiles = triton.cdiv(len(x.data), BLOCK_M.value) * triton.cdiv(len(weight.data), BLOCK_N.value)
    waves = num_tiles / num_sms(x.data.device)
    return (math.ceil(waves) - waves) / math.ceil(waves) * x.data.shape[1]


def fills_one_wave(x, weight):
    """Whether the tiles span two rows and are about equal in number to the SMs."""
    num_tiles = 2 * triton.cdiv(len(weight.data), BLOCK_N.value)
    return BLOCK_M.value < len(x.data) <= 2 * BLOCK_M.value and 0.9 <= num_tiles / num_sms(x.data.device) <= 1


def fills_at_most_half(num_tokens, weight):
    """Whether the tiles occupy at most half of the SMs."""
    num_tiles = triton.cdiv(num_tokens, BLOCK_M.value) * triton.cdiv(len(weight.data), BLOCK_N.value)
    return 2 * num_tiles <= num_sms(weight.data.device)


def num_whole_tiles(num_tiles, num_programs):
    """Number of tiles that stay whole: all, unless halves of the last ones fit one wave, which takes half the time."""
    num_last = num_tiles % num_programs
    return num_tiles - num_last if 2 * num_last <= num_programs else num_tiles


def prefill_gemm(x, weight, act_mul=None, bias=None, epilogue=None, residual=None, quantized=False):
    """act_and_mul(x W^T [+ bias]), [M, I], of Tokens and a Weight, with intermediate results in fp32, where `supports`.

    With a QKVEpilogue: reference.norm_rope_store of the product [+ bias], unrounded; q [M, H, D].

    In e4m3, without act_mul and epilogue: the product [+ bias] [+ residual], and the residual is overwritten; x may
    have scales fp32 [C / 128, M]. ``quantized``, with act_mul: returns e4m3 Tokens with such scales.
    """
    (x, dtype, x_scale), (weight, weight_scale, *_) = x, weight
    (num_tokens, num_channels), num_features = x.shape, len(weight)
    *epilogue_args, num_heads, num_kv_heads, kv_scale, _ = epilogue or (None,) * 8 + (0, 0, None, False)
    head_size = 0 if epilogue is None else num_features // (num_heads + 2 * num_kv_heads)
    if epilogue is not None and epilogue.k_cache.dtype != E4M3:
        kv_scale = None
    assert act_mul is None or (residual is epilogue is None and (bias is None or x_scale is None))
    assert x_scale is not None or (residual is None and (act_mul is None) == (epilogue is not None))
    half_n, num_tiles_n = BLOCK_N.value // 2, triton.cdiv(num_features, BLOCK_N.value)
    num_outputs = num_heads * head_size if epilogue else num_features // 2 if act_mul else num_features
    block_c = LINE_BYTES.value // x.element_size()
    num_programs, num_tiles = num_sms(x.device), triton.cdiv(num_tokens, BLOCK_M.value) * num_tiles_n
    num_whole, half_desc = num_tiles, None
    if act_mul and x_scale is not None and x_scale.dim() == weight_scale.shape[1] == 1 and not quantized:
        num_whole, half_desc = num_whole_tiles(num_tiles, num_programs), descriptor(weight, half_n // 2, block_c)
    y, y_scale = residual, None
    if residual is None:
        y = torch.empty((num_tokens, num_outputs), dtype=E4M3 if quantized else dtype, device=x.device)
    if quantized:
        y_scale = torch.empty((num_outputs // half_n, num_tokens), dtype=torch.float32, device=x.device)
    launch(
        prefill_gemm_kernel, (min(num_programs, 2 * num_tiles - num_whole),),
        descriptor(x, CONSUMER_M.value, block_c), descriptor(weight, half_n, block_c), half_desc,
        descriptor(y, CONSUMER_M.value, STORE_N.value), num_tokens, num_tiles_n, num_channels // block_c, num_whole,
        half_n if act_mul else BLOCK_N.value, num_features // 2 if act_mul else half_n,
        x_scale, weight_scale, y_scale, residual, None if residual is None else residual.stride(0), bias,
        *epilogue_args, kv_scale,
        NUM_GROUPS=0 if weight_scale is None else weight_scale.shape[1],
        X_GROUPS=x_scale is not None and x_scale.dim() == 2, ACT_MUL=act_mul,
        HEAD_SIZE=head_size, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        STAGES=4, num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    if quantized:
        return Tokens(y, dtype, y_scale)
    return y if epilogue is None else y.unflatten(1, (num_heads, head_size))


def descriptor(x, *block):
    layout = gl.NVMMASharedLayout(block[1] * x.element_size(), 8 * x.element_size(), 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)

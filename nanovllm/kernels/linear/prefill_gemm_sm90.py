"""Gluon: GEMM of many tokens on NVIDIA Hopper, persistent and warp-specialized, with a fused epilogue.

Owns `prefill_gemm`, with silu_and_mul or norm_rope_store. dispatch.py decides when it is faster than cuBLAS.

One program per SM computes every num_programs-th tile of 128 tokens by 256 output features:

    producer (1 warp)              TMA loads of x and the weight into a pipeline of STAGES stages of 64 channels
    2 consumer warpgroups          64 tokens by 256 features each: wgmma, the epilogue in registers, TMA stores

Each stage has a full and an empty mbarrier, as in prefill_sm90.py of attention: copies arrive on `full`, consumers on
`empty` after their MMA. A consumer may run ahead by the length of the pipeline, so one's epilogue overlaps the other's
MMAs.

In a 64 x 256 accumulator the thread that holds column c also holds c + 64 and c + 128. With silu_and_mul one half of a
tile's columns is gate and the other up; otherwise the halves are two heads of 128, whose own halves the rotation pairs.
So only a head's sum of squares crosses threads.

M tokens, N output features, C input channels, I = N / 2; H query heads, K KV heads, D = 128.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_compat import hopper, mbarrier, thread_barrier, tma_load, tma_store, tma_store_wait
from ..launch import is_sm90, launch, launch_options, num_sms
from .qkv_epilogue_sm90 import HEAD_SIZE, load_cos_sin, load_norm_weight, load_positions, norm_head, split_halves

NUM_CONSUMERS = gl.constexpr(2)
CONSUMER_WARPS = gl.constexpr(4)
CONSUMER_M = gl.constexpr(64)  # tokens of a consumer
BLOCK_M = gl.constexpr(NUM_CONSUMERS.value * CONSUMER_M.value)
BLOCK_N = gl.constexpr(256)
BLOCK_C = gl.constexpr(64)  # channels of a stage: 128 bytes, a line of the swizzled layout
STORE_N = gl.constexpr(64)  # columns of a TMA store
SWIZZLE = gl.constexpr(16)  # tiles along M before the next along N; 8 and 32 are as fast (docs/experiments.md)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def tile_coords(tile, num_tiles_m, num_tiles_n):
    """(tile_m, tile_n) in an order in which concurrent programs share operands in L2."""
    first_m = tile // (SWIZZLE * num_tiles_n) * SWIZZLE
    size_m = gl.minimum(num_tiles_m - first_m, SWIZZLE)
    local = tile - first_m * num_tiles_n
    return first_m + local % size_m, local // size_m


@gluon.jit
def produce(pipeline, x_desc, weight_desc, shape, tile_stride, half_stride, STAGES: gl.constexpr):
    x_smem, weight_smem, full, empty = pipeline
    num_tokens, num_tiles_n, num_steps = shape
    num_tiles_m = (num_tokens + BLOCK_M - 1) // BLOCK_M
    HALF: gl.constexpr = BLOCK_N // 2
    n = 0  # steps over all tiles
    for tile in range(gl.program_id(0), num_tiles_m * num_tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_coords(tile, num_tiles_m, num_tiles_n)
        feature = tile_n * tile_stride
        for step in range(num_steps):
            stage = n % STAGES
            c = step * BLOCK_C
            mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (BLOCK_M + BLOCK_N) * BLOCK_C * 2)
            for i in gl.static_range(NUM_CONSUMERS):
                x = x_smem.index(stage * NUM_CONSUMERS + i)
                tma_load(x_desc, [(tile_m * NUM_CONSUMERS + i) * CONSUMER_M, c], full.index(stage), x)
            weight = weight_smem.index(stage)
            tma_load(weight_desc, [feature, c], full.index(stage), weight.slice(0, HALF))
            tma_load(weight_desc, [feature + half_stride, c], full.index(stage), weight.slice(HALF, HALF))
            n += 1


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
def qkv_epilogue(
    acc, cos, sin, epilogue, q_desc, staging, first_token, tile_n, num_tokens,
    CONSUMER: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """norm_rope_store of an accumulator of two heads, of q, k or v each."""
    q_weight_ptr, k_weight_ptr, eps, _, _, slot_mapping_ptr, k_cache_ptr, v_cache_ptr = epilogue
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = first_token + gl.arange(0, CONSUMER_M, layout=gl.SliceLayout(1, store_layout))
    d = gl.arange(0, STORE_N, layout=gl.SliceLayout(0, store_layout))
    slot = gl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(gl.int64)
    heads = split_halves(acc)
    for i in gl.static_range(2):
        head = 2 * tile_n + i
        x_1, x_2 = split_halves(heads[i])
        if head < NUM_HEADS + NUM_KV_HEADS:
            if HAS_NORM:
                weight_ptr = q_weight_ptr
                if head >= NUM_HEADS:
                    weight_ptr = k_weight_ptr
                x_1, x_2 = norm_head(x_1, x_2, load_norm_weight(weight_ptr, CONSUMER_WARPS), eps, staging.dtype)
            x_1, x_2 = x_1 * cos - x_2 * sin, x_2 * cos + x_1 * sin
        stage_output(staging, x_1, x_2, CONSUMER)
        if head < NUM_HEADS:
            store_output(q_desc, staging, first_token, head * HEAD_SIZE, CONSUMER)
        else:
            cache_ptr = k_cache_ptr
            kv_head = head - NUM_HEADS
            if kv_head >= NUM_KV_HEADS:
                cache_ptr = v_cache_ptr
                kv_head -= NUM_KV_HEADS
            ptrs = cache_ptr + ((slot * NUM_KV_HEADS + kv_head) * HEAD_SIZE)[:, None] + d[None, :]
            is_stored = (slot >= 0)[:, None] & (d < STORE_N)[None, :]
            gl.store(ptrs, staging.index(2 * CONSUMER).load(store_layout), mask=is_stored)
            gl.store(ptrs + STORE_N, staging.index(2 * CONSUMER + 1).load(store_layout), mask=is_stored)


@gluon.jit
def consume(
    pipeline, staging, y_desc, shape, epilogue,
    CONSUMER: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HAS_NORM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    x_smem, weight_smem, full, empty = pipeline
    num_tokens, num_tiles_n, num_steps = shape
    _, _, _, cos_sin_ptr, positions_ptr, _, _, _ = epilogue
    num_tiles_m = (num_tokens + BLOCK_M - 1) // BLOCK_M
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    n = 0  # steps over all tiles
    for tile in range(gl.program_id(0), num_tiles_m * num_tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_coords(tile, num_tiles_m, num_tiles_n)
        first_token = (tile_m * NUM_CONSUMERS + CONSUMER) * CONSUMER_M
        if NUM_HEADS > 0:
            has_rope = 2 * tile_n < NUM_HEADS + NUM_KV_HEADS
            position = load_positions(positions_ptr, first_token, num_tokens, has_rope, CONSUMER_M, CONSUMER_WARPS)
        acc = gl.zeros([CONSUMER_M, BLOCK_N], gl.float32, layout=acc_layout)
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
        if NUM_HEADS > 0:
            cos, sin = load_cos_sin(cos_sin_ptr, position)  # overlaps the last MMA
        acc = hopper.warpgroup_mma_wait(0, [acc])
        thread_barrier()
        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES))

        # The branch also keeps ptxas from moving the epilogue's arithmetic before the arrival.
        if first_token < num_tokens:
            if NUM_HEADS > 0:
                qkv_epilogue(
                    acc, cos, sin, epilogue, y_desc, staging, first_token, tile_n, num_tokens,
                    CONSUMER, NUM_HEADS, NUM_KV_HEADS, HAS_NORM,
                )  # fmt: skip
            else:
                gate, up = split_halves(acc)
                y_1, y_2 = split_halves(gate * fast_reciprocal(1.0 + gl.exp2(gate * -LOG2_E)) * up)
                stage_output(staging, y_1, y_2, CONSUMER)
                store_output(y_desc, staging, first_token, tile_n * (BLOCK_N // 2), CONSUMER)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["num_tokens", "num_tiles_n", "num_steps"])
def prefill_gemm_kernel(
    x_desc,  # [M, C], in blocks of [CONSUMER_M, BLOCK_C]
    weight_desc,  # [N, C], [BLOCK_N / 2, BLOCK_C]
    y_desc,  # [M, I], with NUM_HEADS q [M, H * D], [CONSUMER_M, STORE_N]; written here
    num_tokens,
    num_tiles_n,
    num_steps,
    tile_stride,  # output features from one tile to the next
    half_stride,  # and from the first half of a tile to the second
    q_weight_ptr, k_weight_ptr,  # [D] each, only with HAS_NORM
    eps,
    cos_sin_ptr,  # fp32 [max_position, D]; this and the next four only with NUM_HEADS
    positions_ptr,  # [M]
    slot_mapping_ptr,  # i32[M]
    k_cache_ptr, v_cache_ptr,  # [slots, K, D], written here
    NUM_HEADS: gl.constexpr,  # 0: silu_and_mul
    NUM_KV_HEADS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_desc.dtype
    smem_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * NUM_CONSUMERS, CONSUMER_M, BLOCK_C], smem_layout)
    weight_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_C], smem_layout)
    staging = gl.allocate_shared_memory(dtype, [2 * NUM_CONSUMERS, CONSUMER_M, STORE_N], smem_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NUM_CONSUMERS)
    hopper.fence_async_shared()
    if USE_PDL:
        gdc_wait()

    pipeline = (x_smem, weight_smem, full, empty)
    shape = (num_tokens, num_tiles_n, num_steps)
    epilogue = (
        q_weight_ptr, k_weight_ptr, eps, cos_sin_ptr, positions_ptr, slot_mapping_ptr, k_cache_ptr, v_cache_ptr
    )  # fmt: skip
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gl.warp_specialize(
        [
            (consume, (pipeline, staging, y_desc, shape, epilogue, ZERO, NUM_HEADS, NUM_KV_HEADS, HAS_NORM, STAGES)),
            (consume, (pipeline, staging, y_desc, shape, epilogue, ONE, NUM_HEADS, NUM_KV_HEADS, HAS_NORM, STAGES)),
            (produce, (pipeline, x_desc, weight_desc, shape, tile_stride, half_stride, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )


def supports(x, weight):
    """Whether `prefill_gemm` runs with these."""
    num_features, num_channels = weight.shape
    return (
        is_sm90(x.device)
        and x.element_size() == 2
        and x.dtype == weight.dtype
        and num_channels % BLOCK_C.value == num_features % BLOCK_N.value == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        and weight.is_contiguous()
    )


def prefill_gemm(x, weight, epilogue=None):
    """silu_and_mul(x W^T), [M, I], with intermediate results in fp32; weight [N, C], where `supports`.

    With a QKVEpilogue: reference.norm_rope_store of the product, unrounded; q [M, H, D].
    """
    (num_tokens, num_channels), num_features = x.shape, len(weight)
    *epilogue_args, num_heads, num_kv_heads = epilogue or (None,) * 8 + (0, 0)
    half_n, num_tiles_n = BLOCK_N.value // 2, num_features // BLOCK_N.value
    num_outputs = num_features // 2 if epilogue is None else num_heads * HEAD_SIZE.value
    y = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    launch(
        prefill_gemm_kernel, (min(num_sms(x.device), triton.cdiv(num_tokens, BLOCK_M.value) * num_tiles_n),),
        _descriptor(x, CONSUMER_M.value, BLOCK_C.value), _descriptor(weight, half_n, BLOCK_C.value),
        _descriptor(y, CONSUMER_M.value, STORE_N.value), num_tokens, num_tiles_n, num_channels // BLOCK_C.value,
        half_n if epilogue is None else BLOCK_N.value, num_features // 2 if epilogue is None else half_n,
        *epilogue_args, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HAS_NORM=epilogue_args[0] is not None,
        STAGES=4, num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return y if epilogue is None else y.unflatten(1, (num_heads, HEAD_SIZE.value))


def _descriptor(x, *block):
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), gl.NVMMASharedLayout(128, 16, 2))

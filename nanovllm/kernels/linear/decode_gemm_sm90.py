"""Gluon: GEMM of up to 256 tokens on NVIDIA Hopper, a multistage cp.async pipeline into wgmma.

Owns `decode_gemm` and its tiles. Knows nothing of layers, nor how split-K partials are reduced (norm.py).

Bound by reading the weight. Before griddepcontrol.wait (launch.py on PDL) a program requests the weight of all steps in
flight; the stages take nearly all shared memory of an SM. With few tokens most of the weight has arrived when x is
ready. Hence one wave of programs, at most one per SM. If the output features are too few to occupy the device, SPLIT_K
programs share the channels of a tile and write fp32 partials.

M tokens, N output features, C input channels; I outputs: N, or N / 2 with act_mul.
"""

import itertools
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..gluon_compat import async_load, commit_group, hopper, wait_group
from ..launch import is_sm90, launch, launch_options, num_sms
from .gemv import activate
from .norm import SplitKPartials

PIPELINE_BYTES = 200 << 10  # for the pipeline, of the 227 KB of shared memory per program
# Above 64 tokens cuBLAS is faster where a program reads more (H200, docs/experiments.md, "Linear").
MAX_PROGRAM_BYTES = 1.6e6
MAX_PROGRAMS_PER_SM = 3  # programs that share an SM, for e4m3 weights with many output features
MIN_STAGES = 4  # pipeline stages of each program


class DecodeGemmConfig(NamedTuple):
    """How a GEMM is cut into programs; changes only the order of summation."""

    block_m: int  # tokens of a program
    block_n: int  # output features of a program
    block_c: int  # channels of a stage
    split_k: int  # programs that share the channels of a tile
    stages: int
    num_warps: int


def decode_gemm_config(x, weight, allow_split_k):
    """The smallest tiles that fit the device in one wave and read little; None if another kernel is faster (H200).

    If no tiles fit the device in one wave, programs share SMs: in e4m3 only, and for more than 64 tokens only if no
    other kernel multiplies such a weight.
    """
    (num_tokens, num_channels), num_features, max_programs = x.data.shape, len(weight.data), num_sms(x.data.device)
    is_fp8 = weight.scale is not None
    unit = 128 if num_channels % 128 == 0 else 64  # channels of a stage
    if not supports(x.data, weight.data) or num_channels % unit != 0:
        return None
    num_units = num_channels // unit
    splits = (4, 2, 1) if allow_split_k else (1,)
    min_block_m = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    for block_m, block_n in ((min_block_m, 64), (min_block_m, 128), (128, 128)):
        num_programs = triton.cdiv(num_tokens, block_m) * triton.cdiv(num_features, block_n)
        per_sm = triton.cdiv(num_programs, max_programs)
        split_k = next(n for n in splits if n * num_programs <= max_programs * per_sm and num_units % n == 0)
        program_bytes = (block_m + block_n) * (num_channels // split_k) * x.data.element_size()
        reads_little = is_fp8 or num_tokens <= 64 or program_bytes <= MAX_PROGRAM_BYTES
        if (per_sm == 1 and reads_little) or (is_fp8 and num_tokens <= 64 and block_n == 128):
            break
    else:
        if not is_fp8 or (weight.has_whole_blocks() and num_features % 256 == 0):
            return None
    if is_fp8 and allow_split_k and split_k == 1 and num_tokens > 64 and num_channels >= 2 * num_features:
        # Larger tiles over half the channels read less of x and weight; the next norm reads two partials.
        for large_m in (64, 128):
            num_programs = 2 * triton.cdiv(num_tokens, large_m) * triton.cdiv(num_features, 128)
            if num_programs <= max_programs and num_channels % 256 == 0:
                block_m, block_n, split_k = large_m, 128, 2
                break
    split_c = num_channels // split_k
    # 256 channels in e4m3 halve the number of steps; with more tokens registers run out.
    is_wide = is_fp8 and weight.scale.shape[1] == 1 and split_c % 256 == 0 and block_m < 64
    channel_bytes = (block_m + block_n) * x.data.element_size()
    if is_fp8 and weight.scale.shape[1] > 1:
        channel_bytes += block_n // 32
    programs_per_sm = range(min(per_sm, MAX_PROGRAMS_PER_SM), 0, -1)
    for programs, block_c in itertools.product(programs_per_sm, (256, 128) if is_wide else (unit,)):
        stages = PIPELINE_BYTES // programs // (channel_bytes * block_c)
        if stages >= MIN_STAGES:
            break
    num_warps = 4 if block_m * block_n <= 8192 else 8
    return DecodeGemmConfig(block_m, block_n, block_c, split_k, min(stages, split_c // block_c), num_warps)


def supports(x, weight):
    """Whether `decode_gemm` takes these data tensors of Tokens and of a Weight."""
    is_aligned = x.stride(1) == 1 and x.stride(0) % 16 == x.data_ptr() % 16 == 0  # as far as Triton can prove
    is_narrow = x.element_size() <= 2 and x.dtype == weight.dtype
    return is_sm90(x.device) and is_aligned and is_narrow and weight.is_contiguous()


@gluon.jit
def output_features(tile, num_outputs, ACT_MUL: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Output features i64[BLOCK_N] of a tile; with ACT_MUL 8 of gate, the same 8 of up, and so on.

    In the accumulator a thread holds features n and n + 8, hence gate and up of one output. Features past the end
    repeat the last one and are not stored.
    """
    local = gl.arange(0, BLOCK_N, layout=layout)
    if ACT_MUL is not None:
        output = tile * (BLOCK_N // 2) + local // 16 * 8 + local % 8
        feature = gl.minimum(output, num_outputs - 1) + (local // 8 % 2) * num_outputs
    else:
        feature = gl.minimum(tile * BLOCK_N + local, num_outputs - 1)
    return feature.to(gl.int64)


@gluon.jit
def mma(weight_smem, x_smem, stage, acc, SWAP_AB: gl.constexpr, ACCUMULATE: gl.constexpr = True):
    """Add the product of one stage to acc, asynchronously; without ACCUMULATE only the product."""
    hopper.fence_async_shared()
    if SWAP_AB:
        weight, x = weight_smem.index(stage), x_smem.index(stage).permute((1, 0))
        return hopper.warpgroup_mma(weight, x, acc, use_acc=ACCUMULATE, is_async=True)
    else:
        x, weight = x_smem.index(stage), weight_smem.index(stage).permute((1, 0))
        return hopper.warpgroup_mma(x, weight, acc, use_acc=ACCUMULATE, is_async=True)


@gluon.jit
def along(vector_smem, layout: gl.constexpr, AXIS: gl.constexpr):
    """A vector in shared memory, to be broadcast along dimension AXIS of a tensor in `layout`."""
    vector = vector_smem.load(gl.SliceLayout(1 - AXIS, layout))
    if AXIS == 0:
        return vector[:, None]
    else:
        return vector[None, :]


@gluon.jit
def act_and_mul(acc, ACT_MUL: gl.constexpr, SWAP_AB: gl.constexpr):
    """act(gate) * up of accumulators in the order of `output_features`."""
    if SWAP_AB:
        pairs = acc.reshape((acc.shape[0] // 16, 2, 8, acc.shape[1])).permute((0, 2, 3, 1))
        gate, up = gl.split(pairs)
        return (activate(gate, ACT_MUL) * up).reshape((acc.shape[0] // 2, acc.shape[1]))
    else:
        pairs = acc.reshape((acc.shape[0], acc.shape[1] // 16, 2, 8)).permute((0, 1, 3, 2))
        gate, up = gl.split(pairs)
        return (activate(gate, ACT_MUL) * up).reshape((acc.shape[0], acc.shape[1] // 2))


@gluon.jit(do_not_specialize=["num_tokens"])
def decode_gemm_kernel(
    x_ptr,  # [M, C], tokens strided, written by the kernel before
    weight_ptr,  # [N, C] contiguous
    x_scale_ptr,  # fp32 [M], written by the kernel before; only with e4m3, and likewise the next
    weight_scale_ptr,  # fp32 [N, NUM_GROUPS]
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, I], tokens strided, or None
    y_ptr,  # [M, I], or partials fp32 [SPLIT_K, M, I]; written here
    num_tokens,
    num_outputs,
    x_stride,
    residual_stride,
    NUM_CHANNELS: gl.constexpr,  # a multiple of SPLIT_K * BLOCK_C
    NUM_GROUPS: gl.constexpr,  # scales per feature, in e4m3: 1, or one a stage; 0: x and weight have 16 bits
    ACT_MUL: gl.constexpr,  # "silu", "gelu_tanh" or None
    SPLIT_K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_C: gl.constexpr,
    STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """One program: BLOCK_M tokens, BLOCK_N output features, C / SPLIT_K channels."""
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = weight_ptr.dtype.element_ty
    BYTES: gl.constexpr = dtype.primitive_bitwidth // 8
    IS_FP8: gl.constexpr = NUM_GROUPS > 0
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_I: gl.constexpr = BLOCK_N // 2 if ACT_MUL is not None else BLOCK_N
    SPLIT_C: gl.constexpr = NUM_CHANNELS // SPLIT_K
    STEPS: gl.constexpr = SPLIT_C // BLOCK_C
    RESIDENT: gl.constexpr = STAGES >= STEPS  # no stage is reused
    PREFETCH: gl.constexpr = STEPS if RESIDENT else STAGES - 1  # steps in flight
    BUFFERS: gl.constexpr = STEPS if RESIDENT else STAGES
    # wgmma has M = 64 and N = 8 to 256: with fewer than 64 tokens the weight is operand A.
    SWAP_AB: gl.constexpr = BLOCK_M < 64
    FEATURES: gl.constexpr = 0 if SWAP_AB else 1  # dimensions of the accumulator
    TOKENS: gl.constexpr = 1 - FEATURES
    MMA_M: gl.constexpr = BLOCK_N if SWAP_AB else BLOCK_M
    MMA_N: gl.constexpr = BLOCK_M if SWAP_AB else BLOCK_N
    WARPS_M: gl.constexpr = 4 * min(WARPS // 4, MMA_M // 64)
    WARPS_N: gl.constexpr = WARPS // WARPS_M
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS_M, WARPS_N], [16, MMA_N // WARPS_N, 32 // BYTES]
    )
    LANES: gl.constexpr = min(16, BLOCK_C * BYTES // 16)  # threads of a warp along C, 16 bytes each
    load_layout: gl.constexpr = gl.BlockedLayout([1, 16 // BYTES], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    smem_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8 * BYTES, 2)
    weight_smem = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK_N, BLOCK_C], smem_layout)
    x_smem = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK_M, BLOCK_C], smem_layout)
    scale_layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    scale_smem_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if IS_FP8:
        SCALE_BUFFERS: gl.constexpr = BUFFERS if NUM_GROUPS > 1 else 1
        scale_smem = gl.allocate_shared_memory(gl.float32, [SCALE_BUFFERS, BLOCK_N], scale_smem_layout)
        x_scale_smem = gl.allocate_shared_memory(gl.float32, [1, BLOCK_M], scale_smem_layout)

    tile = gl.program_id(1)
    first_token = gl.program_id(0) * BLOCK_M
    split = gl.program_id(2)
    c = split * SPLIT_C + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, load_layout))
    features = output_features(tile, num_outputs, ACT_MUL, BLOCK_N, gl.SliceLayout(1, load_layout))
    weight_ptrs = weight_ptr + features[:, None] * NUM_CHANNELS + c[None, :]
    for step in gl.static_range(PREFETCH):
        async_load(weight_smem.index(step), weight_ptrs + step * BLOCK_C)
    if IS_FP8:
        scale_ptrs = weight_scale_ptr + NUM_GROUPS * output_features(tile, num_outputs, ACT_MUL, BLOCK_N, scale_layout)
        if NUM_GROUPS > 1:
            gl.static_assert(NUM_CHANNELS == NUM_GROUPS * BLOCK_C)
            scale_ptrs += split * STEPS
            for step in gl.static_range(PREFETCH):
                async_load(scale_smem.index(step), scale_ptrs + step)
        else:
            async_load(scale_smem.index(0), scale_ptrs)
    token = first_token + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, load_layout))
    x_ptrs = x_ptr + token.to(gl.int64)[:, None] * x_stride + c[None, :]
    x_mask = (token < num_tokens)[:, None] & (c < NUM_CHANNELS)[None, :]
    if USE_PDL:
        gdc_wait()
    if IS_FP8:
        x_scale_token = first_token + gl.arange(0, BLOCK_M, layout=scale_layout)
        async_load(x_scale_smem.index(0), x_scale_ptr + x_scale_token, mask=x_scale_token < num_tokens)
    for step in gl.static_range(PREFETCH):
        async_load(x_smem.index(step), x_ptrs + step * BLOCK_C, mask=x_mask)
        commit_group()

    acc = gl.zeros((MMA_M, MMA_N), gl.float32, layout=acc_layout)
    if RESIDENT and not IS_FP8:
        for step in gl.static_range(STEPS):
            wait_group(STEPS - 1 - step)
            acc = mma(weight_smem, x_smem, step, acc, SWAP_AB)
        acc = hopper.warpgroup_mma_wait(0, [acc])
    else:
        if IS_FP8:
            product = acc
        else:
            acc = hopper.warpgroup_mma_init(acc)
        weight_ptrs += PREFETCH * BLOCK_C
        x_ptrs += PREFETCH * BLOCK_C
        if NUM_GROUPS > 1:
            scale_ptrs += PREFETCH
        for step in range(STEPS):
            # All warps have finished the previous MMA, so its stage may be overwritten; this step's copies have landed.
            if not IS_FP8:
                acc = hopper.warpgroup_mma_init(hopper.warpgroup_mma_wait(0, [acc]))
            wait_group(PREFETCH - 1)
            if IS_FP8:
                pending = mma(weight_smem, x_smem, step % BUFFERS, product, SWAP_AB, ACCUMULATE=False)
            else:
                acc = mma(weight_smem, x_smem, step % BUFFERS, acc, SWAP_AB)
            if step + PREFETCH < STEPS:  # never with RESIDENT
                stage = (step + PREFETCH) % BUFFERS
                async_load(weight_smem.index(stage), weight_ptrs)
                async_load(x_smem.index(stage), x_ptrs, mask=x_mask)
                weight_ptrs += BLOCK_C
                x_ptrs += BLOCK_C
                if NUM_GROUPS > 1:
                    async_load(scale_smem.index(stage), scale_ptrs)
                    scale_ptrs += 1
            commit_group()
            if IS_FP8:
                # Hopper sums e4m3 products in about 14 bits. Only a stage is summed so, then added to a sum in fp32.
                product = hopper.warpgroup_mma_wait(0, [pending])
                if NUM_GROUPS > 1:
                    acc += product * along(scale_smem.index(step % BUFFERS), acc_layout, FEATURES)
                else:
                    acc += product
        if not IS_FP8:
            acc = hopper.warpgroup_mma_wait(0, [acc])

    if NUM_GROUPS == 1:
        acc *= along(scale_smem.index(0), acc_layout, FEATURES)
    if IS_FP8:
        acc *= along(x_scale_smem.index(0), acc_layout, TOKENS)
    if bias_ptr is not None:
        bias_features = output_features(tile, num_outputs, ACT_MUL, BLOCK_N, gl.SliceLayout(TOKENS, acc_layout))
        acc += gl.expand_dims(gl.load(bias_ptr + bias_features).to(gl.float32), TOKENS)
    if ACT_MUL is not None:
        acc = act_and_mul(acc, ACT_MUL, SWAP_AB)
    if SWAP_AB:
        acc = acc.permute((1, 0))
    VECTOR: gl.constexpr = 16 // (y_ptr.dtype.element_ty.primitive_bitwidth // 8)
    STORE_LANES: gl.constexpr = min(32, BLOCK_I // VECTOR)
    store_layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // STORE_LANES, STORE_LANES], [WARPS, 1], [1, 0])
    acc = gl.convert_layout(acc, store_layout)
    y_token = first_token + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, store_layout))
    i = tile * BLOCK_I + gl.arange(0, BLOCK_I, layout=gl.SliceLayout(0, store_layout))
    mask = (y_token < num_tokens)[:, None] & (i < num_outputs)[None, :]
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + y_token.to(gl.int64)[:, None] * residual_stride + i[None, :]
        acc += gl.load(residual_ptrs, mask=mask, other=0.0).to(gl.float32)
    offs = (split * num_tokens + y_token).to(gl.int64)[:, None] * num_outputs + i[None, :]
    gl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty), mask=mask)


def decode_gemm(config, x, weight, bias=None, residual=None, act_mul=None):
    """[residual +] [act_and_mul] (x W^T [+ bias]), [M, I], of Tokens and a Weight, both in e4m3 or of one dtype.

    With config.split_k > 1: SplitKPartials of residual + x W^T.
    """
    (x, dtype, x_scale), (weight, weight_scale, *_) = x, weight
    (num_tokens, num_channels), num_features = x.shape, len(weight)
    num_outputs = num_features // 2 if act_mul else num_features
    num_groups = 0 if weight_scale is None else weight_scale.shape[1]
    if config.split_k > 1:
        assert residual is not None and bias is None and act_mul is None
        y = torch.empty((config.split_k, num_tokens, num_outputs), dtype=torch.float32, device=x.device)
    else:
        y = torch.empty((num_tokens, num_outputs), dtype=dtype, device=x.device)
    assert weight_scale is None or weight_scale.is_contiguous()
    assert x.stride(1) == 1 and weight.is_contiguous() and (residual is None or residual.stride(1) == 1)
    adds_residual = residual is not None and config.split_k == 1
    launch(
        decode_gemm_kernel,
        (triton.cdiv(num_tokens, config.block_m), triton.cdiv(num_features, config.block_n), config.split_k),
        x, weight, x_scale, weight_scale, bias, residual if adds_residual else None, y,
        num_tokens, num_outputs, x.stride(0), residual.stride(0) if adds_residual else 0,
        NUM_CHANNELS=num_channels, NUM_GROUPS=num_groups, ACT_MUL=act_mul, SPLIT_K=config.split_k,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_C=config.block_c, STAGES=config.stages,
        num_warps=config.num_warps, **launch_options(x.device),
    )  # fmt: skip
    return SplitKPartials(residual, y) if config.split_k > 1 else y

"""Triton: the router's product, its choice of experts, and the rows of each expert.

Owns `router_partials`, `route` and `group_rows`. Where a shared expert is one of a token's, `route` computes its gate.

T tokens, E experts, k chosen experts of a token, C channels. Row t * k + j is choice j of token t.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from . import reference

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
ROUTER_CHANNELS = 256  # channels per program of the router's product: few experts would occupy few programs
ROUTER_SPLIT_K = 4  # programs along the channels for more tokens, each with a sum of its own
MAX_TOKENS_ROUTER = 256  # up to here a program of the router's product has 16 tokens and one step of channels
LOWEST = tl.constexpr(-3e38)
MAX_ROWS_SEARCHED = 8192  # by each expert in one step; more are counted first
BLOCK_ROWS = 256


class RouterConfig(NamedTuple):
    """How the router's product is cut into programs."""

    block_t: int  # tokens
    block_e: int  # experts
    block_c: int  # channels of a step
    steps: int


def router_config(num_tokens, num_channels, num_experts):
    if num_tokens <= MAX_TOKENS_ROUTER:
        return RouterConfig(16, 32, min(ROUTER_CHANNELS, max(16, triton.next_power_of_2(num_channels))), 1)
    block_e = min(128, max(16, triton.next_power_of_2(num_experts)))
    return RouterConfig(64, block_e, 64, triton.cdiv(num_channels, 64 * ROUTER_SPLIT_K))


@triton.jit(do_not_specialize=["num_tokens"])
def router_kernel(
    x_ptr,  # [T, C] contiguous, written by the kernel before
    weight_ptr,  # [E, C]
    bias_ptr,  # [E] or None
    partials_ptr,  # fp32 [SPLIT_K, T, E], written here
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: STEPS * BLOCK_C channels of BLOCK_E experts and BLOCK_T tokens. The first weights are loaded before
    the wait."""
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    split = tl.program_id(2)
    c = split * (STEPS * BLOCK_C) + tl.arange(0, BLOCK_C)
    inside = (c < NUM_CHANNELS)[None, :]
    weight_ptrs = weight_ptr + expert[:, None] * NUM_CHANNELS + c[None, :]
    weight = tl.load(weight_ptrs, mask=(expert < NUM_EXPERTS)[:, None] & inside, other=0.0)
    acc = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, mask=expert < tl.where(split == 0, NUM_EXPERTS, 0), other=0.0)
        acc += bias.to(tl.float32)[None, :]
    pdl_wait(USE_PDL)
    x_ptrs = x_ptr + token[:, None] * NUM_CHANNELS + c[None, :]
    x = tl.load(x_ptrs, mask=(token < num_tokens)[:, None] & inside, other=0.0)
    acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
    for step in range(BLOCK_C, STEPS * BLOCK_C, BLOCK_C):
        inside = (step + c < NUM_CHANNELS)[None, :]
        weight = tl.load(weight_ptrs + step, mask=(expert < NUM_EXPERTS)[:, None] & inside, other=0.0)
        x = tl.load(x_ptrs + step, mask=(token < num_tokens)[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
    offs = (split * num_tokens + token)[:, None] * NUM_EXPERTS + expert[None, :]
    tl.store(partials_ptr + offs, acc, mask=(token < num_tokens)[:, None] & (expert < NUM_EXPERTS)[None, :])


def router_partials(x, weight, bias=None):
    """Partial sums fp32 [SPLIT_K, T, E] of x [T, C] weight^T [+ bias], added by `route`.

    Products of 16-bit numbers are exact in fp32, so tokens and weights need no copies in fp32.
    """
    (num_tokens, num_channels), num_experts = x.shape, len(weight)
    assert x.is_contiguous() and weight.is_contiguous()
    config = router_config(num_tokens, num_channels, num_experts)
    split_k = triton.cdiv(num_channels, config.block_c * config.steps)
    partials = torch.empty((split_k, num_tokens, num_experts), dtype=torch.float32, device=x.device)
    launch(
        router_kernel, (triton.cdiv(num_tokens, config.block_t), triton.cdiv(num_experts, config.block_e), split_k),
        x, weight, bias, partials, num_tokens,
        NUM_EXPERTS=num_experts, NUM_CHANNELS=num_channels, BLOCK_T=config.block_t, BLOCK_E=config.block_e,
        BLOCK_C=config.block_c, STEPS=config.steps, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return partials


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits_ptr,  # [SPLIT_K, T, E] contiguous, partial sums, written by the kernel before
    bias_ptr,  # fp32 [E] or None
    slot_mapping_ptr,  # i32[T]
    scales_ptr,  # [E] or None
    x_ptr,  # [T, C], only with SHARED, written by a kernel before
    norm_weight_ptr, gate_ptr,  # [C] each, or None: x is normed, the shared expert has no gate
    ids_ptr,  # i32[T, k + SHARED], written here
    weights_ptr,  # fp32 [T, k + SHARED], written here
    num_tokens,
    routed_scale,
    sum_eps,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,  # a shared expert follows the chosen ones
    EPS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    DTYPE: tl.constexpr,  # the model's dtype, to which logits are rounded
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one token. Of equal scores the lowest expert wins."""
    pdl_launch_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    is_channel = offs_c < NUM_CHANNELS
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + offs_c, mask=is_channel, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + offs_c, mask=is_channel, other=0.0).to(tl.float32)
    pdl_wait(USE_PDL)
    share = 1.0
    if gate_ptr is not None:
        x = tl.load(x_ptr + token * NUM_CHANNELS + offs_c, mask=is_channel, other=0.0).to(tl.float32)
        if norm_weight_ptr is not None:
            rstd = tl.rsqrt(tl.sum(x * x, 0) / NUM_CHANNELS + EPS)
            x = ((x * rstd).to(DTYPE).to(tl.float32) * norm_weight).to(DTYPE).to(tl.float32)
        share = tl.sigmoid(tl.sum(x * gate, 0).to(DTYPE).to(tl.float32))
    is_padding = tl.load(slot_mapping_ptr + token) < 0
    offs_e, offs_k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    exists = offs_e < NUM_EXPERTS
    logits = tl.where(exists, 0.0, -float("inf"))
    for split in tl.static_range(SPLIT_K):
        offs = (split * num_tokens + token) * NUM_EXPERTS + offs_e
        logits += tl.load(logits_ptr + offs, mask=exists, other=0.0).to(tl.float32)
    logits = logits.to(DTYPE).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    left = scores
    if bias_ptr is not None:
        left += tl.load(bias_ptr + offs_e, mask=exists, other=0.0)
    left = tl.where(exists & (left == left), left, LOWEST)  # replaces NaN: ids stay distinct and valid
    left = tl.where(exists, left, -float("inf"))
    ids = tl.full((BLOCK_K,), -1, tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.argmax(left, 0, tie_break_left=True).to(tl.int32)
        chosen = offs_e == best
        ids = tl.where(offs_k == j, best, ids)
        weights = tl.where(offs_k == j, tl.sum(tl.where(chosen, scores, 0.0), 0), weights)
        left = tl.where(chosen, -float("inf"), left)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + sum_eps)
    weights *= routed_scale
    if scales_ptr is not None:
        weights *= tl.load(scales_ptr + ids, mask=offs_k < TOP_K, other=0.0).to(tl.float32)
    if SHARED:
        ids = tl.where(offs_k == TOP_K, NUM_EXPERTS, ids)
        weights = tl.where(offs_k == TOP_K, share, weights)
    offs = token * (TOP_K + SHARED) + offs_k
    tl.store(ids_ptr + offs, tl.where(is_padding, -1, ids), mask=offs_k < TOP_K + SHARED)
    tl.store(weights_ptr + offs, tl.where(is_padding, 0.0, weights), mask=offs_k < TOP_K + SHARED)


def route(logits, correction_bias, routing, slot_mapping, expert_scales=None, dtype=None, shared_gate=None):
    """See reference.route; logits also as partial sums fp32 [S, T, E], whose sum is rounded to `dtype`.

    shared_gate: (x, norm_weight, eps, gate_weight) of `add_shared_expert`, both weights or None. The shared expert
    follows as expert E, with the sigmoid of its gate as its weight, so ids and weights are [T, k + 1].
    """
    dtype = dtype or logits.dtype
    if routing.top_groups < routing.num_groups:
        assert shared_gate is None
        logits = logits.sum(0).to(dtype) if logits.dim() == 3 else logits
        return reference.route(logits, correction_bias, routing, slot_mapping, expert_scales)
    *_, num_tokens, num_experts = logits.shape
    assert logits.is_contiguous()
    x, norm_weight, eps, gate_weight = shared_gate or (None, None, 0.0, None)
    num_channels, num_chosen = 1 if gate_weight is None else x.shape[1], routing.top_k + (shared_gate is not None)
    ids = torch.empty((num_tokens, num_chosen), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=logits.device)
    launch(
        route_kernel, (num_tokens,), logits, correction_bias, slot_mapping, expert_scales,
        None if gate_weight is None else x, norm_weight, gate_weight, ids, weights, num_tokens,
        float(routing.routed_scale), float(routing.sum_eps),
        TOP_K=routing.top_k, SHARED=num_chosen > routing.top_k, EPS=eps, NUM_CHANNELS=num_channels,
        BLOCK_C=triton.next_power_of_2(num_channels), RENORMALIZE=routing.renormalize,
        SPLIT_K=len(logits) if logits.dim() == 3 else 1,
        NUM_EXPERTS=num_experts, SIGMOID=routing.scoring == "sigmoid", DTYPE=DTYPES[dtype],
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_K=triton.next_power_of_2(num_chosen), num_warps=1,
        **launch_options(logits.device),
    )  # fmt: skip
    return ids, weights


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def group_rows_kernel(
    ids_ptr,  # i32[num_rows], written by the kernel before
    rows_ptr,  # i32[E, capacity], written here
    counts_ptr,  # i32[E], written here
    num_rows,
    capacity,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one expert, which looks for its rows among all."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    expert = tl.program_id(0)
    rows_ptr += expert.to(tl.int64) * capacity
    offs = tl.arange(0, BLOCK)
    count = 0
    for first in range(0, num_rows, BLOCK):
        row = first + offs
        mine = (tl.load(ids_ptr + row, mask=row < num_rows, other=-1) == expert).to(tl.int32)
        tl.store(rows_ptr + count + tl.cumsum(mine, 0) - 1, row, mask=mine > 0)
        count += tl.sum(mine, 0)
    tl.store(counts_ptr + expert, count)


@triton.jit(do_not_specialize=["num_rows"])
def count_rows_kernel(
    ids_ptr,  # i32[num_rows], written by the kernel before
    counts_ptr,  # i32[blocks, E], written here
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: it counts the rows of each expert among BLOCK rows."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + row, mask=row < num_rows, other=-1)
    counts = tl.histogram(tl.where(ids < 0, NUM_EXPERTS, ids), BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + block * NUM_EXPERTS + bins, counts, mask=bins < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_blocks"])
def place_blocks_kernel(
    places_ptr,  # i32[blocks, E], counts of rows; overwritten with the sums over earlier blocks
    counts_ptr,  # i32[E], written here
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one expert."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    expert = tl.program_id(0)
    total = 0
    for first in range(0, num_blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        ptrs = places_ptr + block * NUM_EXPERTS + expert
        counts = tl.load(ptrs, mask=block < num_blocks, other=0)
        tl.store(ptrs, total + tl.cumsum(counts, 0) - counts, mask=block < num_blocks)
        total += tl.sum(counts, 0)
    tl.store(counts_ptr + expert, total)


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def place_rows_kernel(
    ids_ptr,  # i32[num_rows]
    places_ptr,  # i32[blocks, E], written by place_blocks_kernel
    rows_ptr,  # i32[E, capacity], written here
    num_rows,
    capacity,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK rows."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + row, mask=row < num_rows, other=-1)
    place = tl.load(places_ptr + block * NUM_EXPERTS + ids, mask=ids >= 0, other=0)
    for first in tl.static_range(0, BLOCK, PART):  # earlier rows of the block with the same expert
        other = block * BLOCK + first + tl.arange(0, PART)
        others = tl.load(ids_ptr + other, mask=other < num_rows, other=-1)
        is_before = (ids[:, None] == others[None, :]) & (other[None, :] < row[:, None])
        place += tl.sum(is_before.to(tl.int32), 1)
    tl.store(rows_ptr + ids.to(tl.int64) * capacity + place, row, mask=ids >= 0)


def group_rows(ids, num_experts):
    """The rows of each expert, i32[E, T] (the first counts[e] of expert e, ascending), and counts i32[E].

    A program for each expert searches few rows. Many are counted in blocks first: 98,304 rows of 64 experts take 16 us
    on an H200, and a search 54.
    """
    num_tokens, top_k = ids.shape
    num_rows, device = num_tokens * top_k, ids.device
    rows = torch.empty((num_experts, num_tokens), dtype=torch.int32, device=device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    options = launch_options(device)
    if num_rows <= MAX_ROWS_SEARCHED:
        # Three sizes: each is a compilation.
        block = 256 if num_rows <= 256 else 2048 if num_rows <= 2048 else MAX_ROWS_SEARCHED
        launch(
            group_rows_kernel, (num_experts,), ids, rows, counts, num_rows, num_tokens,
            BLOCK=block, num_warps=max(1, block // 512), **options,
        )  # fmt: skip
        return rows, counts
    num_blocks = triton.cdiv(num_rows, BLOCK_ROWS)
    places = torch.empty((num_blocks, num_experts), dtype=torch.int32, device=device)
    launch(
        count_rows_kernel, (num_blocks,), ids, places, num_rows, NUM_EXPERTS=num_experts, BLOCK=BLOCK_ROWS,
        BINS=triton.next_power_of_2(num_experts + 1), num_warps=4, **options,
    )  # fmt: skip
    launch(
        place_blocks_kernel, (num_experts,), places, counts, num_blocks, NUM_EXPERTS=num_experts, BLOCK=512,
        num_warps=4, **options,
    )  # fmt: skip
    launch(
        place_rows_kernel, (num_blocks,), ids, places, rows, num_rows, num_tokens, NUM_EXPERTS=num_experts,
        BLOCK=BLOCK_ROWS, PART=32, num_warps=4, **options,
    )  # fmt: skip
    return rows, counts

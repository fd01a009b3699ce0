"""Triton: top-k, top-p and min-p as one threshold per sequence, without a sort.

Owns `filter_thresholds`; its reference in nanovllm/sampling/filters.py defines the filters. Does not know how tokens
are drawn.

The threshold is found by bisection over keys: integers in the order of the floats they encode. The fp32 form of a bf16
logit has 16 zero bits, so its key is the upper half. Few logits are candidates: the maxima of segments of 32 logits
give a lower bound, and bisection runs over the compacted logits above it.

B sequences, V vocabulary, R request slots.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, num_sms, pdl_launch_dependents, pdl_wait, zero_counters

_BLOCK = 4096  # logits per iteration, and capacity of the candidate buffer
_SEGMENT = 32  # logits per maximum; 64 was slower on flat logits (docs/experiments.md, "Sampling")


@triton.jit
def to_key(x, SHIFT: tl.constexpr):
    """fp32 -> int32 in the same order, without the SHIFT lowest bits."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def from_key(key, SHIFT: tl.constexpr):
    """Inverse of `to_key` for floats whose SHIFT lowest bits are zero."""
    ordered = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def upper_middle(low, high):
    """(low + high + 1) // 2 without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def load_logits(ptr, offs, size):
    """fp32 logits; -inf past the end and for NaN."""
    x = tl.load(ptr + offs, mask=offs < size, other=-float("inf")).to(tl.float32)
    return tl.where(x == x, x, -float("inf"))


@triton.jit
def totals_at_or_above(
    ptr, size, key_1, key_2, key_3, largest, inv_temperature,
    SUM_EXP: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per key: the number of logits ptr[:size] that reach it, or their sum of exp((x - largest) / temperature)."""
    total_1 = tl.zeros((BLOCK,), tl.float32)
    total_2, total_3 = total_1, total_1
    for start in range(0, size, BLOCK):
        x = load_logits(ptr, start + tl.arange(0, BLOCK), size)
        key = to_key(x, SHIFT)
        weight = tl.full((BLOCK,), 1.0, tl.float32)
        if SUM_EXP:
            weight = tl.exp((x - largest) * inv_temperature)
        weight = tl.where(x > -float("inf"), weight, 0.0)
        total_1 += tl.where(key >= key_1, weight, 0.0)
        total_2 += tl.where(key >= key_2, weight, 0.0)
        total_3 += tl.where(key >= key_3, weight, 0.0)
    return tl.sum(total_1), tl.sum(total_2), tl.sum(total_3)


@triton.jit
def largest_key_reaching(
    ptr, size, low, high, goal, largest, inv_temperature,
    SUM_EXP: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key in low..high whose total (`totals_at_or_above`) reaches `goal`; `low` if there is none.

    Four-way search: an iteration costs one pass over the logits, however many keys it tests.
    """
    while low < high:
        key_2 = upper_middle(low, high)
        key_1 = upper_middle(low, key_2 - 1)
        key_3 = upper_middle(key_2, high)
        total_1, total_2, total_3 = totals_at_or_above(
            ptr, size, key_1, key_2, key_3, largest, inv_temperature, SUM_EXP, SHIFT, BLOCK
        )
        if total_3 >= goal:
            low = key_3
        elif total_2 >= goal:
            low = key_2
            high = key_3 - 1
        elif total_1 >= goal:
            low = key_1
            high = key_2 - 1
        else:
            high = key_1 - 1
    return low


@triton.jit
def segment_stats(
    logits_ptr, vocab_size, program, num_programs, inv_temperature, segment_max_ptr, block_stats_ptr, needs_sum_exp,
    SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum of every segment in this program's blocks; if needed, maximum and sum_exp of every block."""
    SEGMENTS: tl.constexpr = BLOCK // SEGMENT
    offs = tl.arange(0, BLOCK)
    prefetched = load_logits(logits_ptr, program * BLOCK + offs, vocab_size)
    for block in range(program, (vocab_size + BLOCK - 1) // BLOCK, num_programs):
        x = prefetched
        prefetched = load_logits(logits_ptr, (block + num_programs) * BLOCK + offs, vocab_size)
        segment_max = tl.max(tl.reshape(x, (SEGMENTS, SEGMENT)), axis=1)
        segment = block * SEGMENTS + tl.arange(0, SEGMENTS)
        tl.store(segment_max_ptr + segment, segment_max, mask=segment * SEGMENT < vocab_size)
        if needs_sum_exp:
            block_max = tl.max(segment_max)
            exp_logits = tl.where(x > -float("inf"), tl.exp((x - block_max) * inv_temperature), 0.0)
            tl.store(block_stats_ptr + 2 * block, block_max)
            tl.store(block_stats_ptr + 2 * block + 1, tl.sum(exp_logits))


@triton.jit
def segment_bound(segment_max, low, high, goal, largest, inv_temperature, SUM_EXP: tl.constexpr, SHIFT: tl.constexpr):
    """`largest_key_reaching` over the segment maxima alone: a lower bound of that over all logits."""
    keys = to_key(segment_max, SHIFT)
    weight = tl.full(segment_max.shape, 1.0, tl.float32)
    if SUM_EXP:
        weight = tl.exp((segment_max - largest) * inv_temperature)
    weight = tl.where(segment_max > -float("inf"), weight, 0.0)
    while low < high:
        middle = upper_middle(low, high)
        if tl.sum(tl.where(keys >= middle, weight, 0.0)) >= goal:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def gather_candidates(
    logits_ptr, vocab_size, segment_max, segments_ptr, candidates_ptr, low,
    SHIFT: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compact the logits with a key >= `low` into candidates[BLOCK]; returns their number, which may exceed BLOCK.

    In order of id, so that sums are reproducible. Reads only segments whose maximum passes.
    """
    passes = (to_key(segment_max, SHIFT) >= low) & (segment_max > -float("inf"))
    num_segments = tl.sum(passes.to(tl.int32))
    tl.store(segments_ptr + tl.cumsum(passes.to(tl.int32)) - 1, tl.arange(0, BLOCK_C), mask=passes)
    tl.debug_barrier()
    offs = tl.arange(0, BLOCK)
    num_candidates = 0
    for start in range(0, num_segments * SEGMENT, BLOCK):
        index = (start + offs) // SEGMENT
        segment = tl.load(segments_ptr + index, mask=index < num_segments, other=vocab_size)
        x = load_logits(logits_ptr, segment * SEGMENT + offs % SEGMENT, vocab_size)
        is_candidate = ((to_key(x, SHIFT) >= low) & (x > -float("inf"))).to(tl.int32)
        index = num_candidates + tl.cumsum(is_candidate) - 1
        tl.store(candidates_ptr + index, x, mask=(is_candidate > 0) & (index < BLOCK))
        num_candidates += tl.sum(is_candidate)
    tl.debug_barrier()
    return num_candidates


@triton.jit
def filter_thresholds_kernel(
    logits_ptr,  # [B, V], written by the LM head
    req_indices_ptr,  # i32[B]
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, length_ptr,  # sampling columns [R], with their strides
    segment_max_ptr,  # f32[B, segments], scratch like the next three
    segments_ptr,  # i32[B, segments]
    block_stats_ptr,  # f32[B, blocks, 2]: maximum, sum_exp relative to it
    candidates_ptr,  # [B, BLOCK] of logits
    counters_ptr,  # i32[B], zero between launches
    thresholds_ptr,  # f32[B], written here
    vocab_size, logits_stride, temperature_stride, top_k_stride, top_p_stride, min_p_stride, length_stride,
    SHIFT: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B, programs per sequence): all compute segment maxima, the last to finish finds the threshold.

    It bisects over the candidates, or, where more than BLOCK logits pass the bound (flat distributions), over all V.
    """
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    sequence, program, num_programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    req_idx = tl.load(req_indices_ptr + sequence).to(tl.int64)
    length = tl.load(length_ptr + req_idx * length_stride)
    temperature = tl.load(temperature_ptr + req_idx * temperature_stride)
    top_k = tl.load(top_k_ptr + req_idx * top_k_stride)
    top_p = tl.load(top_p_ptr + req_idx * top_p_stride)
    min_p = tl.load(min_p_ptr + req_idx * min_p_stride)
    logits_ptr += sequence.to(tl.int64) * logits_stride
    num_segments = (vocab_size + SEGMENT - 1) // SEGMENT
    num_blocks = (vocab_size + BLOCK - 1) // BLOCK
    minus_inf = -float("inf")

    has_top_k = (top_k > 0) & (top_k < vocab_size)
    has_top_p = top_p < 1.0
    has_min_p = min_p > 0.0
    if (temperature > 0.0) & (length > 0) & (has_top_k | has_top_p | has_min_p):
        inv_temperature = 1.0 / temperature
        segment_max_ptr += sequence * num_segments
        segments_ptr += sequence * num_segments
        block_stats_ptr += sequence * num_blocks * 2
        candidates_ptr += sequence * BLOCK
        needs_sum_exp = has_top_p & (has_top_k == 0)
        segment_stats(
            logits_ptr, vocab_size, program, num_programs, inv_temperature, segment_max_ptr, block_stats_ptr,
            needs_sum_exp, SEGMENT, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + sequence, 1, sem="acq_rel") == num_programs - 1:
            tl.store(counters_ptr + sequence, 0)
            tl.debug_barrier()
            segment = tl.arange(0, BLOCK_C)
            segment_max = tl.load(
                segment_max_ptr + segment, mask=segment < num_segments, other=minus_inf, cache_modifier=".cg"
            )
            largest = tl.max(segment_max)
            threshold = minus_inf
            if (has_top_k | has_top_p) & (largest > minus_inf):
                high = to_key(largest, SHIFT)
                low = to_key(minus_inf + tl.zeros_like(largest), SHIFT)
                sum_exp = 0.0
                if has_top_k:
                    # k segment maxima reach the bound, so k logits do: the k-th largest is not below it.
                    low = segment_bound(segment_max, low, high, top_k, largest, inv_temperature, False, SHIFT)
                else:
                    # Even V logits this far below the largest sum to less than the 1 - p that top-p cuts.
                    margin = tl.log((1.0 - top_p) / vocab_size) - 0.01
                    low = to_key(largest + margin * temperature, SHIFT)
                    # If the segment maxima alone reach p, all logits do. 1.0001 covers the rounding of sums.
                    block = tl.arange(0, BLOCK_S)
                    is_block, stats_ptrs = block < num_blocks, block_stats_ptr + 2 * block
                    block_max = tl.load(stats_ptrs, mask=is_block, other=minus_inf, cache_modifier=".cg")
                    block_sum = tl.load(stats_ptrs + 1, mask=is_block, other=0.0, cache_modifier=".cg")
                    scale = tl.exp((block_max - largest) * inv_temperature)
                    sum_exp = tl.sum(tl.where(block_max > minus_inf, block_sum * scale, 0.0))
                    goal = 1.0001 * top_p * sum_exp
                    low = segment_bound(segment_max, low, high, goal, largest, inv_temperature, True, SHIFT)

                num_candidates = gather_candidates(
                    logits_ptr, vocab_size, segment_max, segments_ptr, candidates_ptr, low,
                    SHIFT, SEGMENT, BLOCK, BLOCK_C,
                )
                source_ptr, size = candidates_ptr, num_candidates
                if num_candidates > BLOCK:
                    source_ptr, size = logits_ptr, vocab_size
                if has_top_k:
                    low = largest_key_reaching(
                        source_ptr, size, low, high, top_k, largest, inv_temperature, False, SHIFT, BLOCK
                    )
                    if has_top_p:
                        sum_exp, _, _ = totals_at_or_above(
                            source_ptr, size, low, low, low, largest, inv_temperature, True, SHIFT, BLOCK
                        )
                if has_top_p:
                    # A logit is kept while the sum_exp strictly above it is below p of the total: the last one kept
                    # is the largest whose sum_exp, itself included, reaches p.
                    low = largest_key_reaching(
                        source_ptr, size, low, high, top_p * sum_exp, largest, inv_temperature, True, SHIFT, BLOCK
                    )
                threshold = from_key(low, SHIFT)
            if has_min_p:
                threshold = tl.maximum(threshold, largest + temperature * tl.log(min_p))
            tl.store(thresholds_ptr + sequence, threshold)
    elif program == 0:
        tl.store(thresholds_ptr + sequence, minus_inf)


def filter_thresholds(logits, req_indices, state):
    """See filter_thresholds in nanovllm/sampling/filters.py."""
    batch_size, vocab_size = logits.shape
    assert logits.stride(1) == 1
    thresholds = torch.empty(batch_size, dtype=torch.float32, device=logits.device)
    if batch_size == 0:
        return thresholds
    num_segments, num_blocks = triton.cdiv(vocab_size, _SEGMENT), triton.cdiv(vocab_size, _BLOCK)
    num_programs = max(1, min(num_blocks, 2 * num_sms(logits.device) // batch_size))
    max_registers = {"maxnreg": 128} if torch.version.hip is None else {}  # two programs per SM
    launch(
        filter_thresholds_kernel, (batch_size, num_programs),
        logits, req_indices, state.temperature, state.top_k, state.top_p, state.min_p, state.length,
        thresholds.new_empty(batch_size, num_segments), req_indices.new_empty(batch_size, num_segments),
        thresholds.new_empty(batch_size, num_blocks, 2), logits.new_empty(batch_size, _BLOCK),
        zero_counters(batch_size, logits.device), thresholds, vocab_size, logits.stride(0),
        state.temperature.stride(0), state.top_k.stride(0), state.top_p.stride(0), state.min_p.stride(0),
        state.length.stride(0),
        SHIFT=16 if logits.dtype == torch.bfloat16 else 0, SEGMENT=_SEGMENT, BLOCK=_BLOCK,
        BLOCK_C=triton.next_power_of_2(num_segments), BLOCK_S=triton.next_power_of_2(num_blocks),
        num_warps=8, **max_registers, **launch_options(logits.device),
    )  # fmt: skip
    return thresholds

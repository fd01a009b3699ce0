"""Triton: top-k, top-p, min-p and forbidden ids, as one smallest logit per row, without a sort.

Owns `filter_thresholds`. Knows nothing of requests, nor of how tokens are drawn; reference.py has the plain twin and
says what the filters mean.

A row's threshold is found by bisection over keys: integers in the order of the floats they stand for. Logits of 16 bits
differ only in the upper half of their fp32 form, so their keys are the upper halves. Few logits of a row can be the
threshold, and the largest logits of its groups tell which.

B sequences, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from ..launch import (
    launch,
    launch_options,
    num_sms,
    pdl_launch_dependents,
    pdl_wait,
    zero_counters,
)

_BLOCK = 4096  # logits that thresholds are found from at a time, and most candidates that are set aside
_GROUP = 32  # logits of which the largest is kept, to find candidates by
_LINE = 128  # bytes of a cache line


@triton.jit
def to_key(x, SHIFT: tl.constexpr):
    """fp32 -> int32 in the same order, without its SHIFT lowest bits."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def from_key(key, SHIFT: tl.constexpr):
    """The fp32 whose key this is; the dropped bits are those of a number that fits 16 bits."""
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
def weights_at_or_above(
    ptr, size, key_1, key_2, key_3, largest, inv_temperature,
    MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each of three keys: how many of the logits ptr[:size] reach it; with MASS, the sum of their odds."""
    total_1 = tl.zeros((BLOCK,), tl.float32)
    total_2, total_3 = total_1, total_1
    for start in range(0, size, BLOCK):
        x = load_logits(ptr, start + tl.arange(0, BLOCK), size)
        key = to_key(x, SHIFT)
        weight = tl.full((BLOCK,), 1.0, tl.float32)
        if MASS:
            weight = tl.exp((x - largest) * inv_temperature)
        weight = tl.where(x > -float("inf"), weight, 0.0)
        total_1 += tl.where(key >= key_1, weight, 0.0)
        total_2 += tl.where(key >= key_2, weight, 0.0)
        total_3 += tl.where(key >= key_3, weight, 0.0)
    return tl.sum(total_1), tl.sum(total_2), tl.sum(total_3)


@triton.jit
def largest_key_reaching(
    ptr, size, low, high, goal, largest, inv_temperature,
    MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key in low..high whose weight (see above) reaches `goal`; `low` if there is none.

    Each turn looks at three keys that cut the range into four, because to read the logits takes longest.
    """
    while low < high:
        key_2 = upper_middle(low, high)
        key_1 = upper_middle(low, key_2 - 1)
        key_3 = upper_middle(key_2, high)
        weight_1, weight_2, weight_3 = weights_at_or_above(
            ptr, size, key_1, key_2, key_3, largest, inv_temperature, MASS, SHIFT, BLOCK
        )
        if weight_3 >= goal:
            low = key_3
        elif weight_2 >= goal:
            low = key_2
            high = key_3 - 1
        elif weight_1 >= goal:
            low = key_1
            high = key_2 - 1
        else:
            high = key_1 - 1
    return low


@triton.jit
def survey(
    logits_ptr, vocab_size, part, num_parts, inv_temperature, maxima_ptr, masses_ptr, has_mass,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of this program's blocks of a row: the largest logit of every GROUP, and if asked the block's mass.

    The mass is a pair: of the block's largest logit, and of the sum of odds, relative to it.
    """
    GROUPS: tl.constexpr = BLOCK // GROUP
    offs = tl.arange(0, BLOCK)
    following = load_logits(logits_ptr, part * BLOCK + offs, vocab_size)
    for block in range(part, (vocab_size + BLOCK - 1) // BLOCK, num_parts):
        x = following
        following = load_logits(logits_ptr, (block + num_parts) * BLOCK + offs, vocab_size)
        maxima = tl.max(tl.reshape(x, (GROUPS, GROUP)), axis=1)
        group = block * GROUPS + tl.arange(0, GROUPS)
        tl.store(maxima_ptr + group, maxima, mask=group * GROUP < vocab_size)
        if has_mass:
            largest = tl.max(maxima)
            odds = tl.where(x > -float("inf"), tl.exp((x - largest) * inv_temperature), 0.0)
            tl.store(masses_ptr + 2 * block, largest)
            tl.store(masses_ptr + 2 * block + 1, tl.sum(odds))


@triton.jit
def group_bound(
    maxima, low, high, goal, largest, inv_temperature, MASS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """The largest key in low..high that so many maxima reach, or with MASS such a sum of their odds; `low` if none."""
    keys = to_key(maxima, SHIFT)
    weight = tl.full(maxima.shape, 1.0, tl.float32)
    if MASS:
        weight = tl.exp((maxima - largest) * inv_temperature)
    weight = tl.where(maxima > -float("inf"), weight, 0.0)
    while low < high:
        middle = upper_middle(low, high)
        if tl.sum(tl.where(keys >= middle, weight, 0.0)) >= goal:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def gather_candidates(
    logits_ptr, vocab_size, maxima, groups_ptr, candidates_ptr, low,
    SHIFT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Logits with a key >= `low`, in order of id so that sums are the same in every run; how many there are.

    Of more than BLOCK only the first are stored. Only groups whose largest logit passes are read.
    """
    passes = (to_key(maxima, SHIFT) >= low) & (maxima > -float("inf"))
    num_groups = tl.sum(passes.to(tl.int32))
    tl.store(groups_ptr + tl.cumsum(passes.to(tl.int32)) - 1, tl.arange(0, BLOCK_G), mask=passes)
    tl.debug_barrier()
    offs = tl.arange(0, BLOCK)
    num_candidates = 0
    for start in range(0, num_groups * GROUP, BLOCK):
        place = (start + offs) // GROUP
        group = tl.load(groups_ptr + place, mask=place < num_groups, other=vocab_size)
        x = load_logits(logits_ptr, group * GROUP + offs % GROUP, vocab_size)
        passes_too = ((to_key(x, SHIFT) >= low) & (x > -float("inf"))).to(tl.int32)
        place = num_candidates + tl.cumsum(passes_too) - 1
        tl.store(candidates_ptr + place, x, mask=(passes_too > 0) & (place < BLOCK))
        num_candidates += tl.sum(passes_too)
    tl.debug_barrier()
    return num_candidates


@triton.jit
def filter_thresholds_kernel(
    logits_ptr,  # [B, V], written by the LM head; forbidden ids are overwritten with -inf here
    req_indices_ptr,  # i32[B]
    temperature_ptr,  # the row table's columns, each with its row stride
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    min_length_ptr,
    forbidden_ptr,
    length_ptr,
    maxima_ptr,  # f32[B, groups], like the next three uninitialised
    groups_ptr,  # i32[B, groups]
    masses_ptr,  # f32[B, blocks, 2]
    candidates_ptr,  # [B, BLOCK] of logits
    counters_ptr,  # i32[B], zero between launches
    thresholds_ptr,  # f32[B], written here
    vocab_start,
    vocab_size,
    logits_stride,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    min_length_stride,
    forbidden_stride,
    length_stride,
    NUM_FORBIDDEN: tl.constexpr,
    BLOCK_F: tl.constexpr,
    SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """A few programs per sequence survey its row; the last of them finds the threshold.

    It bisects over the candidates: all logits above a bound that provably lies below the threshold, found among the
    largest logits of the row's groups. Where more than BLOCK logits pass the bound (flat distributions), it bisects
    over the whole row instead.
    """
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    sequence, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(req_indices_ptr + sequence).to(tl.int64)
    length = tl.load(length_ptr + row * length_stride)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    top_k = tl.load(top_k_ptr + row * top_k_stride)
    top_p = tl.load(top_p_ptr + row * top_p_stride)
    min_p = tl.load(min_p_ptr + row * min_p_stride)
    min_length = tl.load(min_length_ptr + row * min_length_stride)
    logits_ptr += sequence.to(tl.int64) * logits_stride
    num_groups = (vocab_size + GROUP - 1) // GROUP
    num_blocks = (vocab_size + BLOCK - 1) // BLOCK
    minus_inf = -float("inf")

    if length < min_length:
        offs_f = tl.arange(0, BLOCK_F)
        listed = offs_f < NUM_FORBIDDEN
        ids = tl.load(forbidden_ptr + row * forbidden_stride + offs_f, mask=listed, other=-1)
        columns = ids - vocab_start
        inside = (ids >= 0) & (columns >= 0) & (columns < vocab_size)
        is_mine = columns // BLOCK % num_parts == part
        tl.store(logits_ptr + columns, minus_inf, mask=inside & is_mine)
        tl.debug_barrier()  # the loads below come from other threads

    has_top_k = (top_k > 0) & (top_k < vocab_size)
    has_top_p = top_p < 1.0
    has_min_p = min_p > 0.0
    if (temperature > 0.0) & (length > 0) & (has_top_k | has_top_p | has_min_p):
        inv_temperature = 1.0 / temperature
        maxima_ptr += sequence * num_groups
        groups_ptr += sequence * num_groups
        masses_ptr += sequence * num_blocks * 2
        candidates_ptr += sequence * BLOCK
        has_mass = has_top_p & (has_top_k == 0)
        survey(
            logits_ptr, vocab_size, part, num_parts, inv_temperature, maxima_ptr, masses_ptr, has_mass, GROUP, BLOCK
        )
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + sequence, 1, sem="acq_rel") == num_parts - 1:
            tl.store(counters_ptr + sequence, 0)
            tl.debug_barrier()
            group = tl.arange(0, BLOCK_G)
            maxima = tl.load(maxima_ptr + group, mask=group < num_groups, other=minus_inf, cache_modifier=".cg")
            largest = tl.max(maxima)
            threshold = minus_inf
            if (has_top_k | has_top_p) & (largest > minus_inf):
                high = to_key(largest, SHIFT)
                low = to_key(minus_inf + tl.zeros_like(largest), SHIFT)
                total_mass = 0.0
                if has_top_k:
                    # At least k groups hold a logit no smaller than the k-th largest of the groups' own maxima.
                    low = group_bound(maxima, low, high, top_k, largest, inv_temperature, False, SHIFT)
                else:
                    # Everything this far below the largest sums to less than the (1 - p) that may be cut.
                    spare = tl.log((1.0 - top_p) / vocab_size) - 0.01
                    low = to_key(largest + spare * temperature, SHIFT)
                    # And where the groups' maxima alone reach p, all logits do. A little more, for sums are rounded.
                    block = tl.arange(0, BLOCK_M)
                    is_block, pairs = block < num_blocks, masses_ptr + 2 * block
                    block_largest = tl.load(pairs, mask=is_block, other=minus_inf, cache_modifier=".cg")
                    block_mass = tl.load(pairs + 1, mask=is_block, other=0.0, cache_modifier=".cg")
                    scale = tl.exp((block_largest - largest) * inv_temperature)
                    total_mass = tl.sum(tl.where(block_largest > minus_inf, block_mass * scale, 0.0))
                    goal = 1.0001 * top_p * total_mass
                    low = group_bound(maxima, low, high, goal, largest, inv_temperature, True, SHIFT)

                num_candidates = gather_candidates(
                    logits_ptr, vocab_size, maxima, groups_ptr, candidates_ptr, low, SHIFT, GROUP, BLOCK, BLOCK_G
                )
                source_ptr, size = candidates_ptr, num_candidates
                if num_candidates > BLOCK:
                    source_ptr, size = logits_ptr, vocab_size
                if has_top_k:
                    low = largest_key_reaching(
                        source_ptr, size, low, high, top_k, largest, inv_temperature, False, SHIFT, BLOCK
                    )
                    if has_top_p:
                        total_mass, _, _ = weights_at_or_above(
                            source_ptr, size, low, low, low, largest, inv_temperature, True, SHIFT, BLOCK
                        )
                if has_top_p:
                    # A logit stays while the mass strictly above it is below p, so the last to stay is the largest
                    # that reaches p with its own mass counted in.
                    low = largest_key_reaching(
                        source_ptr, size, low, high, top_p * total_mass, largest, inv_temperature, True, SHIFT, BLOCK
                    )
                threshold = from_key(low, SHIFT)
            if has_min_p:
                threshold = tl.maximum(threshold, largest + temperature * tl.log(min_p))
            tl.store(thresholds_ptr + sequence, threshold)
    elif part == 0:
        tl.store(thresholds_ptr + sequence, minus_inf)


def filter_thresholds(logits, rows, columns, vocab_start=0):
    """See reference.filter_thresholds. A row without filters and forbidden ids costs its programs a few loads."""
    batch_size, vocab_size = logits.shape
    assert logits.stride(1) == 1 and columns.forbidden.stride(1) == 1
    thresholds = torch.empty(batch_size, dtype=torch.float32, device=logits.device)
    if batch_size == 0:
        return thresholds
    num_groups, num_blocks = triton.cdiv(vocab_size, _GROUP), triton.cdiv(vocab_size, _BLOCK)
    num_forbidden = columns.forbidden.shape[1]
    num_parts = max(1, min(num_blocks, 2 * num_sms(logits.device) // batch_size))
    if logits.data_ptr() % _LINE or logits.stride(0) * logits.element_size() % _LINE:
        num_parts = 1  # blocks share cache lines: a program could still see one as it was before another forbade an id
    options = launch_options(logits.device)
    if torch.version.hip is None:
        options = options | {"maxnreg": 128}  # so that two programs fit a multiprocessor
    launch(
        filter_thresholds_kernel,
        (batch_size, num_parts),
        logits,
        rows,
        columns.temperature,
        columns.top_k,
        columns.top_p,
        columns.min_p,
        columns.min_length,
        columns.forbidden,
        columns.length,
        thresholds.new_empty(batch_size, num_groups),
        rows.new_empty(batch_size, num_groups),
        thresholds.new_empty(batch_size, num_blocks, 2),
        logits.new_empty(batch_size, _BLOCK),
        zero_counters(batch_size, logits.device),
        thresholds,
        vocab_start,
        vocab_size,
        logits.stride(0),
        columns.temperature.stride(0),
        columns.top_k.stride(0),
        columns.top_p.stride(0),
        columns.min_p.stride(0),
        columns.min_length.stride(0),
        columns.forbidden.stride(0),
        columns.length.stride(0),
        NUM_FORBIDDEN=num_forbidden,
        BLOCK_F=triton.next_power_of_2(max(1, num_forbidden)),
        SHIFT=16 if logits.dtype == torch.bfloat16 else 0,
        GROUP=_GROUP,
        BLOCK=_BLOCK,
        BLOCK_G=triton.next_power_of_2(num_groups),
        BLOCK_M=triton.next_power_of_2(num_blocks),
        num_warps=8,
        **options,
    )
    return thresholds

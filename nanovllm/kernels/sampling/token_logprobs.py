"""Triton: log-probabilities of one token per row and of the most probable or named ones, in one pass over the logits.

Owns `token_logprobs`. The reference in nanovllm/sampling/token_logprobs.py defines it, and runs for many alternatives.

The pass leaves per block the sum of exponentials, and per group of 128 logits their maximum. Then one program per row
takes the most probable tokens one by one: each lies in the group with the largest maximum left, so only that group is
read again.

N rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch, launch_options, pdl_launch_dependents, pdl_wait
from .filters import from_key, to_key

_BLOCK = 4096  # logits per program of the pass
_GROUP = 128  # logits per maximum


@triton.jit
def load_row(row, scales_ptr, thresholds_ptr):
    """Scale and threshold of a row."""
    scale, threshold = 1.0, -float("inf")
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + row)
    if thresholds_ptr is not None:
        threshold = tl.load(thresholds_ptr + row)
    return scale, threshold


@triton.jit
def load_scaled(logits_ptr, offs, vocab_size, scale, threshold):
    """fp32 logits times the scale; -inf past the end, below the threshold and for NaN, which fails the comparison."""
    x = tl.load(logits_ptr + offs, mask=offs < vocab_size, other=-float("inf")).to(tl.float32)
    return tl.where(x >= threshold, x, -float("inf")) * scale


@triton.jit
def order_key(x):
    """`to_key` with equal keys for -0.0 and 0.0."""
    return to_key(tl.where(x == 0.0, 0.0, x), 0)


@triton.jit
def finite(largest):
    """0 for a maximum of -inf: x - maximum is then -inf, not NaN."""
    return tl.where(largest > -float("inf"), largest, 0.0)


@triton.jit
def block_stats_kernel(
    logits_ptr,  # [N, V], written by the LM head or by logits steps
    tokens_ptr,  # int[N]
    scales_ptr, thresholds_ptr,  # f32[N] or None
    stats_ptr,  # f32[N, blocks, 3], written here: maximum, sum_exp relative to it, number of logits >= the token's
    group_max_ptr,  # f32[N, groups], written here; None without top tokens
    vocab_size, num_groups, logits_stride,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (N, blocks)."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += row * logits_stride
    scale, threshold = load_row(row, scales_ptr, thresholds_ptr)
    token = tl.load(tokens_ptr + row)
    own = load_scaled(logits_ptr, token, vocab_size, scale, threshold)
    x = load_scaled(logits_ptr, offs, vocab_size, scale, threshold)
    if group_max_ptr is not None:
        group_max = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1)
        groups = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(group_max_ptr + row * num_groups + groups, group_max, mask=groups < num_groups)
    stats_ptr += (row * tl.num_programs(1) + block) * 3
    largest = tl.max(x)
    tl.store(stats_ptr, largest)
    tl.store(stats_ptr + 1, tl.sum(tl.exp(x - finite(largest))))
    tl.store(stats_ptr + 2, tl.sum(((x >= own) & (offs < vocab_size)).to(tl.int32)).to(tl.float32))


@triton.jit
def logprob_bits(x, largest, log_sum_exp):
    """Bits of the log-probability; -inf if it is NaN, because another logit is +inf."""
    logprob = (x - largest) - log_sum_exp
    return tl.where(logprob == logprob, logprob, -float("inf")).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["num_top", "num_named", "width"])
def token_logprobs_kernel(
    logits_ptr, tokens_ptr, scales_ptr, thresholds_ptr,  # as in block_stats_kernel
    stats_ptr, group_max_ptr,  # written by block_stats_kernel
    named_ptr,  # i32[N, num_named] or None
    packed_ptr,  # i32[N, 2 + 2 * width], written here
    vocab_size, num_blocks, num_groups, num_top, num_named, width, logits_stride,
    GROUP: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (N,): merges the blocks' stats, then gathers the named tokens, or takes the top ones in `num_top` rounds."""
    pdl_launch_dependents(USE_PDL)
    pdl_wait(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    packed_ptr += row * (2 + 2 * width)
    scale, threshold = load_row(row, scales_ptr, thresholds_ptr)
    token = tl.load(tokens_ptr + row)
    own = load_scaled(logits_ptr, token, vocab_size, scale, threshold)
    blocks = tl.arange(0, BLOCK_S)
    is_block = blocks < num_blocks
    stats_ptrs = stats_ptr + (row * num_blocks + blocks) * 3
    block_max = tl.load(stats_ptrs, mask=is_block, other=-float("inf"))
    block_sum = tl.load(stats_ptrs + 1, mask=is_block, other=0.0)
    num_at_or_above = tl.load(stats_ptrs + 2, mask=is_block, other=0.0)
    largest = finite(tl.max(block_max))
    sum_exp = tl.sum(block_sum * tl.exp(block_max - largest))
    log_sum_exp = tl.log(tl.where(sum_exp > 0.0, sum_exp, 1.0))
    tl.store(packed_ptr, logprob_bits(own, largest, log_sum_exp))
    tl.store(packed_ptr + 1, tl.sum(num_at_or_above.to(tl.int32)))

    if named_ptr is not None:
        nth = tl.arange(0, BLOCK_N)
        named = tl.load(named_ptr + row * num_named + nth, mask=nth < num_named, other=-1)
        x = load_scaled(logits_ptr, tl.maximum(named, 0), vocab_size, scale, threshold)
        tl.store(packed_ptr + 2 + nth, named, mask=named >= 0)
        tl.store(packed_ptr + 2 + width + nth, logprob_bits(x, largest, log_sum_exp), mask=named >= 0)
        num_top = tl.where(tl.max(named) >= 0, 0, num_top)

    if group_max_ptr is not None:
        empty = -(2**31)  # below the key of -inf: no logit of the group is left
        no_id = 2**31 - 1
        groups = tl.arange(0, BLOCK_G)
        is_group = groups < num_groups
        group_max = tl.load(group_max_ptr + row * num_groups + groups, mask=is_group, other=0.0)
        heads = tl.where(is_group, order_key(group_max), empty)  # key of the largest logit left in each group
        last_key, last_id = no_id, -1  # taken in the last round: all keys above, and equal ones up to this id, are gone
        for i in range(num_top):
            key = tl.max(heads)
            group = tl.min(tl.where(heads == key, groups, no_id))
            ids = group * GROUP + tl.arange(0, GROUP)
            keys = order_key(load_scaled(logits_ptr, ids, vocab_size, scale, threshold))
            is_left = (ids < vocab_size) & ((key < last_key) | (ids > last_id))
            id = tl.min(tl.where((keys == key) & is_left, ids, no_id))
            is_left = (ids < vocab_size) & ((keys < key) | ((keys == key) & (ids > id)))
            heads = tl.where(groups == group, tl.max(tl.where(is_left, keys, empty)), heads)
            last_key = key
            last_id = id
            tl.store(packed_ptr + 2 + i, id)
            tl.store(packed_ptr + 2 + width + i, logprob_bits(from_key(key, 0), largest, log_sum_exp))


def token_logprobs(logits, tokens, num_top, scales=None, thresholds=None, named=None):
    """See token_logprobs in nanovllm/sampling/token_logprobs.py. Two launches."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and num_top <= vocab_size
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    num_groups = triton.cdiv(vocab_size, _GROUP) if num_top > 0 else 1
    num_named = 0 if named is None else named.shape[1]
    width = max(num_top, num_named)
    packed = torch.empty((num_rows, 2 + 2 * width), dtype=torch.int32, device=logits.device)
    stats = torch.empty((num_rows, num_blocks, 3), dtype=torch.float32, device=logits.device)
    group_max = torch.empty((num_rows, num_groups), dtype=torch.float32, device=logits.device) if num_top > 0 else None
    row_inputs = logits, tokens, scales, thresholds
    options = dict(GROUP=_GROUP, num_warps=4, **launch_options(logits.device))
    launch(
        block_stats_kernel, (num_rows, num_blocks),
        *row_inputs, stats, group_max, vocab_size, num_groups, logits.stride(0), BLOCK=_BLOCK, **options,
    )  # fmt: skip
    launch(
        token_logprobs_kernel, (num_rows,),
        *row_inputs, stats, group_max, named, packed, vocab_size, num_blocks, num_groups, num_top, num_named, width,
        logits.stride(0), BLOCK_S=triton.next_power_of_2(num_blocks), BLOCK_G=triton.next_power_of_2(num_groups),
        BLOCK_N=triton.next_power_of_2(max(1, num_named)), **options,
    )  # fmt: skip
    return packed

"""Triton: from positions in a sequence to addresses in the paged KV cache, for the attention kernels.

Owns how the tokens of a tile are found, and the constants of their online softmax (Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867), which is kept in fp32, and in base 2 because the hardware has exp2.

Legend: T packed query tokens, B sequences of a decode batch, S sequences of a prefill, H query heads, K KV
heads, GROUP = H / K query heads that share a KV head, D head size, NB blocks of BS tokens each.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
# Start value of a running maximum: finite, so that "nothing seen yet" minus itself is 0 and not NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def load_block_ids(table_ptr, first, context, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of the tokens first .. first + BLOCK_N - 1: one i32 if a tile never spans two, else one each.

    The kernels' loops look up the pages of the next tile while they load this one. Looked up in the same
    iteration, they would be a load that a load waits for, and Triton would pipeline neither.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        pages = tl.load(table_ptr + first // BLOCK_SIZE, mask=first < context, other=0)
    else:
        position = first + tl.arange(0, BLOCK_N)
        # Table entries beyond the context may be anything: they are not followed.
        pages = tl.load(table_ptr + position // BLOCK_SIZE, mask=position < context, other=0)
    return pages


@triton.jit
def slot_offsets(
    pages, first, stride_block, STRIDE_SLOT: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Element offsets int64[BLOCK_N] of the tokens first .. first + BLOCK_N - 1, whose blocks are `pages`."""
    offs_n = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        # One address and constant distances from it: a register instead of one per row.
        base = pages.to(tl.int64) * stride_block + (first % BLOCK_SIZE) * STRIDE_SLOT
        offs = base + offs_n * STRIDE_SLOT
    else:
        offs = pages.to(tl.int64) * stride_block + (first + offs_n) % BLOCK_SIZE * STRIDE_SLOT
    return offs

"""Work items of the Gluon prefill attention (prefill_sm90.py): their ring, and the key tiles of each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_compat import mbarrier, thread_barrier

ROWS = gl.constexpr(64)  # per consumer
# KV head (-1: end of work), token of row 0, the sequence's first token and end, position of row 0
ITEM_FIELDS = gl.constexpr(5)
ITEM_STAGES = gl.constexpr(2)


@gluon.jit
def key_tiles(p0, token0, q_begin, q_end, WINDOW: gl.constexpr, GQA_GROUP: gl.constexpr, BLOCK_N: gl.constexpr):
    """(last key tile, number of key tiles) of a work item, p0 the position of its row 0."""
    TOKENS: gl.constexpr = 2 * ROWS // GQA_GROUP
    last = p0 // BLOCK_N
    if BLOCK_N % TOKENS != 0:  # the rows may end in a later tile than they begin in, but not beyond the context
        last = (p0 + gl.minimum(q_end - token0, TOKENS) - 1) // BLOCK_N
    num_tiles = last + 1
    if WINDOW > 0:
        # From the window of the first row that holds a token: blocks before it may be gone, and 0 * NaN is NaN.
        num_tiles -= gl.maximum(p0 + gl.maximum(q_begin - token0, 0) - WINDOW + 1, 0) // BLOCK_N
    return last, num_tiles


@gluon.jit
def part_range(
    PART: gl.constexpr, p0, last, num_tiles, WINDOW: gl.constexpr, GQA_GROUP: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Tiles begin .. end - 1, counted down from the last one, of a part of a consumer's key loop."""
    TOKENS: gl.constexpr = 2 * ROWS // GQA_GROUP
    begin = 1
    if BLOCK_N % TOKENS != 0:  # before it, tiles with keys after p0
        begin = gl.maximum(last - (p0 + 1) // BLOCK_N + 1, 1)
    end = num_tiles
    if WINDOW > 0:  # from it on, tiles with keys that the last row does not attend
        cut = (gl.maximum(p0 + TOKENS - WINDOW, 0) + BLOCK_N - 1) // BLOCK_N
        end = gl.maximum(gl.minimum(last - cut + 1, num_tiles), begin)
    if PART == 0:
        begin, end = 1, gl.minimum(begin, num_tiles)
    if PART == 2:
        begin, end = end, num_tiles
    return begin, end


@gluon.jit
def _load_field(work_items, index):
    return gl.sum(work_items.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def pop_work_item(work_items, item_full, item_empty, t):
    """Use t of the ring: read the work item, then release its slot."""
    slot = t % ITEM_STAGES
    mbarrier.wait(item_full.index(slot), (t // ITEM_STAGES) & 1)
    kv_head = _load_field(work_items, slot * ITEM_FIELDS)
    token0 = _load_field(work_items, slot * ITEM_FIELDS + 1)
    q_begin = _load_field(work_items, slot * ITEM_FIELDS + 2)
    q_end = _load_field(work_items, slot * ITEM_FIELDS + 3)
    p0 = _load_field(work_items, slot * ITEM_FIELDS + 4)
    thread_barrier()
    mbarrier.arrive(item_empty.index(slot))
    return kv_head, token0, q_begin, q_end, p0


@gluon.jit
def holds_token(m, token, q_begin, q_end, GQA_GROUP: gl.constexpr):
    """Which rows m of a work item hold a token of the sequence."""
    is_token = (token >= q_begin) & (token < q_end)
    if 2 * ROWS % GQA_GROUP != 0:  # the rows left over are those of the next work item
        is_token &= m < 2 * ROWS // GQA_GROUP * GQA_GROUP
    return is_token

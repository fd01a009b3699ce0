"""The Triton attention kernels against their plain twins in fp64, and the twins against the textbook formula.

One table has the calls of all kernels, with caches in the model's type and in FP8.

Kernels are compiled on a GPU, interpreted elsewhere. Every KV slot outside the contexts holds NaN, and so does every
output before the call: reading too much or writing too little fails.
"""

import pytest
import torch
from histories import at_night

from nanovllm.kernels import launch
from nanovllm.kernels.attention import decode, prefill, reference
from nanovllm.kernels.linear.reference import quantize

from . import DEVICE
from .table import call, each_once

pytestmark = pytest.mark.usefixtures("poisoned", "exact_fp8")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = [FP32, FP16] if DEVICE == "cpu" else [FP32, BF16, FP16]  # the interpreter multiplies bf16 as bit patterns
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 4e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
}


class PagedCache:
    """A poisoned KV cache that holds the given contexts in shuffled blocks, and the block tables that find them."""

    def __init__(self, contexts, num_kv_heads, head_size, block_size, dtype, seed=0, scale=None, device=DEVICE):
        scale = scale or (0.25 if head_size <= 256 else 0.0625)  # among larger scores fp32 itself errs by TOLERANCE
        generator = torch.Generator().manual_seed(seed)
        self.generator, self.dtype, self.head_size, self.scale, self.device = generator, dtype, head_size, scale, device
        num_blocks = [-(-context // block_size) for context in contexts]
        max_blocks = max(num_blocks) + 2
        total = sum(num_blocks) + 3
        free = torch.randperm(total, generator=generator).tolist()
        shape = (total, block_size, num_kv_heads, head_size)
        k, v = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        # Request slots in another order than the batch, in a wider table; entries beyond a context point nowhere.
        num_requests = len(contexts) + 2
        req_indices = torch.randperm(num_requests, generator=generator)[: len(contexts)]
        table = torch.full((num_requests, max_blocks + 3), -(10**6), dtype=torch.int32)
        for req_idx, context in zip(req_indices.tolist(), contexts, strict=True):
            for i in range(-(-context // block_size)):
                block, used = free.pop(), min(block_size, context - i * block_size)
                table[req_idx, 2 + i] = block
                k[block, :used] = torch.randn(used, num_kv_heads, head_size, generator=generator)
                v[block, :used] = torch.randn(used, num_kv_heads, head_size, generator=generator)
        self.k, self.v = k.to(device, dtype), v.to(device, dtype)
        self.kernel_options = {}  # that the kernels need for this kind of cache
        self.req_indices = req_indices.to(device, torch.int32)
        self.context_lens = torch.tensor(contexts, dtype=torch.int32, device=device)
        self.block_tables = table.to(device)[:, 2 : 2 + max_blocks]

    def queries(self, num_tokens, num_heads, num_kv_heads):
        """[num_tokens, num_heads, D]: the front of packed q, k, v heads; k and v are NaN."""
        width = num_heads + 2 * num_kv_heads
        packed = torch.full((num_tokens, width, self.head_size), torch.nan)
        packed[:, :num_heads] = torch.randn(num_tokens, num_heads, self.head_size, generator=self.generator)
        return packed.to(self.device, self.dtype)[:, :num_heads]

    def decode_args(self, q):
        max_context = max(1, int(self.context_lens.max()))
        return q, self.k, self.v, self.req_indices, self.context_lens, self.block_tables, self.scale, max_context

    def poison_blocks_before(self, firsts):
        """NaN in the blocks that lie before the first attended token of each sequence: their entries may be stale."""
        block_size = self.k.shape[1]
        for req_idx, first in zip(self.req_indices.tolist(), firsts, strict=True):
            for block in self.block_tables[req_idx, : first // block_size].tolist():
                self.k[block] = self.v[block] = torch.nan

    def oracle(self, op, *args, **options):
        return oracle(op, *args, **options)

    def tokens(self, i):
        """fp64 keys and values [context, K, D] of sequence i, read slot by slot."""
        table, block_size = self.block_tables[self.req_indices[i]], self.k.shape[1]
        slots = [(int(table[p // block_size]), p % block_size) for p in range(int(self.context_lens[i]))]
        return (torch.stack([cache[slot] for slot in slots]).double() for cache in (self.k, self.v))


def uneven_scales(num_kv_heads):
    """fp32 [2, K]: neither powers of two nor alike."""
    return 0.01 * torch.arange(1, 2 * num_kv_heads + 1, device=DEVICE).view(2, num_kv_heads).float() + 0.003


class FP8Cache(PagedCache):
    """A poisoned FP8 KV cache with uneven scales, and values that use most of e4m3's range."""

    def __init__(self, contexts, num_kv_heads, head_size, block_size, dtype, **options):
        super().__init__(contexts, num_kv_heads, head_size, block_size, dtype, **options)
        self.kv_scale = uneven_scales(num_kv_heads)
        self.kernel_options = {"kv_scale": self.kv_scale}
        self.k, self.v = (
            quantize(x.flatten(0, 1), scale).view(x.shape)
            for x, scale in zip((self.k.float(), self.v.float()), self.kv_scale, strict=True)
        )

    def oracle(self, op, q, k, v, *rest, **options):
        """The twin in fp64 on a cache that was dequantized as a whole: knows nothing of FP8."""
        k, v = (x.double() * scale.double()[:, None] for x, scale in zip((k, v), self.kv_scale, strict=True))
        return oracle(op, q, k, v, *rest, **options)


def oracle(op, q, k, v, *rest, **options):
    """The plain twin in fp64: no rounding of its own, whatever the dtype."""
    return op(q.double(), k.double(), v.double(), *rest, **options)


def check(cache, result, expected):
    assert torch.isfinite(expected).all(), "the reference read a poisoned slot"
    torch.testing.assert_close(result.float(), expected.float(), **TOLERANCE[cache.dtype])


def sinks_of(num_heads, dtype, device=DEVICE):
    """Below, among and above the scores of some tokens."""
    return torch.linspace(-3, 5, num_heads, dtype=dtype, device=device)


def scores_options(num_heads, dtype, sinks, softcap):
    """Options of the kernels that change what becomes of the scores."""
    return {"sinks": sinks_of(num_heads, dtype) if sinks else None, "softcap": softcap}


def check_decode(
    contexts, num_heads, num_kv_heads, head_size, block_size, dtype, window=0, sinks=False, softcap=0.0,
    make_cache=PagedCache,
):  # fmt: skip
    cache = make_cache(contexts, num_kv_heads, head_size, block_size, dtype)
    q = cache.queries(len(contexts), num_heads, num_kv_heads)
    args, options = cache.decode_args(q), scores_options(num_heads, dtype, sinks, softcap)
    expected = cache.oracle(reference.paged_decode_attention, *args, window=window, **options)
    if window:
        cache.poison_blocks_before([max(context - window, 0) for context in contexts])
    for _ in range(2):  # a launch must leave the counters as it found them
        result = decode.paged_decode_attention(*args, window=window, **cache.kernel_options, **options)
        check(cache, result, expected)
    return cache, args, expected


def prefill_of(new_and_context, num_heads, num_kv_heads, head_size, block_size, dtype, make_cache=PagedCache):
    """A cache, and the kernels' arguments up to the scale."""
    new, contexts = zip(*new_and_context, strict=True)
    cache = make_cache(contexts, num_kv_heads, head_size, block_size, dtype)
    cu_seqlens = torch.tensor([0, *new]).cumsum(0).to(DEVICE, torch.int32)
    q = cache.queries(sum(new), num_heads, num_kv_heads)
    return cache, (
        q, cache.k, cache.v, cu_seqlens, cache.req_indices, cache.context_lens, cache.block_tables, cache.scale,
    )  # fmt: skip


def check_prefill(
    new_and_context, num_heads, num_kv_heads, head_size, block_size, dtype, window=0, sinks=False, softcap=0.0,
    make_cache=PagedCache,
):  # fmt: skip
    cache, args = prefill_of(new_and_context, num_heads, num_kv_heads, head_size, block_size, dtype, make_cache)
    options, max_new = scores_options(num_heads, dtype, sinks, softcap), max(new for new, _ in new_and_context)
    expected = cache.oracle(reference.paged_prefill_attention, *args, max_new, window=window, **options)
    if window:
        firsts = (context - num_new - window + 1 for num_new, context in new_and_context)
        cache.poison_blocks_before([max(first, 0) for first in firsts])
    options |= {"window": window, **cache.kernel_options}
    for _ in range(1 if DEVICE == "cpu" else 3):  # no race, and nothing is left from launch to launch
        check(cache, prefill.paged_prefill_attention(*args, max_new, **options), expected)
    return cache, args, expected


def check_verify(contexts, num_rows, num_heads, num_kv_heads, head_size, block_size, dtype, window=0, **scores):
    """Of ``num_rows`` rows of each sequence the last are dead: none of the first, two of the second, and so on."""
    cache = PagedCache(contexts, num_kv_heads, head_size, block_size, dtype)
    lens = torch.zeros(len(contexts), num_rows, dtype=torch.int32)
    for i, context in enumerate(contexts):
        num_live = min(max(num_rows - 2 * i, 1), context)
        lens[i, :num_live] = torch.arange(context - num_live + 1, context + 1)
    q = cache.queries(lens.numel(), num_heads, num_kv_heads)
    args, options = cache.decode_args(q), scores_options(num_heads, dtype, **{"sinks": False, "softcap": 0.0, **scores})
    options |= {"row_lens": lens.flatten().to(DEVICE), "window": window}
    expected = oracle(reference.paged_decode_attention, *args, **options)
    if window:
        cache.poison_blocks_before([max(context - window - num_rows + 1, 0) for context in contexts])
    for _ in range(2):
        check(cache, decode.paged_decode_attention(*args, **options), expected)
    return cache, q, lens, expected


def check_sm90_prefill(spans, group, head_size, dtype, block_size, window=0, sinks=False):
    prefill_sm90 = pytest.importorskip("nanovllm.kernels.attention.prefill_sm90", exc_type=ImportError)
    if not launch.is_sm90(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    spans = SM90_SPANS[spans]
    _, args, _ = check_prefill(spans, 2 * group, 2, head_size, block_size, dtype, window, sinks)
    options = {"window": window, **scores_options(2 * group, dtype, sinks, 0.0)}
    q, k, max_seqlen_q = args[0], args[1], max(new for new, _ in spans)
    assert prefill_sm90.supports(q, k, max_seqlen_q) and not prefill_sm90.supports(q, k, max_seqlen_q, softcap=3.0)
    first = prefill.paged_prefill_attention(*args, max_seqlen_q, **options)
    for _ in range(3):  # no race, and nothing is left from launch to launch
        assert torch.equal(prefill.paged_prefill_attention(*args, max_seqlen_q, **options), first)
    torch.cuda.synchronize()
    assert launch.zero_counters(1, q.device).count_nonzero() == 0


# ----------------------------------------------------------------------------------------------- plain twins


def textbook(q, k, v, scale, window=0, sinks=None, softcap=0.0):
    """softmax(q k^T) v in fp64: q [N, H, D] are the last N of the tokens with keys and values [L, K, D]."""
    q, group, num_cached = q.double(), q.shape[1] // k.shape[1], len(k) - len(q)
    out = torch.empty_like(q)
    for i in range(len(q)):
        end = num_cached + i + 1
        begin = max(end - window, 0) if window else 0
        for head in range(q.shape[1]):
            scores = k[begin:end, head // group] @ q[i, head] * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:  # a key whose value is zero
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            out[i, head] = scores.softmax(0)[: end - begin] @ v[begin:end, head // group]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group, window, sinks, softcap", [
    (1, 0, 0, 0), (3, 0, 0, 0), (3, 1, 0, 0), (1, 20, 0, 0), (3, 37, 0, 0), (1, 64, 0, 0),
    (1, 0, 1, 0), (3, 0, 0, 2.0), (3, 20, 1, 2.0),
])  # fmt: skip
@pytest.mark.parametrize("block_size", [16, 48])
def test_twins_are_the_textbook_formula(block_size, group, window, sinks, softcap, dtype):
    """Whole prompts, a prefix, a chunk, one token, an empty context; q strided, out poisoned, in the model's dtype."""
    new_and_context = [(5, 5), (block_size, block_size), (33, 50), (1, 37), (1, 1), (0, 20), (0, 0)]
    new, contexts = zip(*new_and_context, strict=True)
    cache = PagedCache(contexts, 2, 24, block_size, dtype, device="cpu")
    cu_seqlens = torch.tensor([0, *new]).cumsum(0).int()
    rest = (cache.req_indices, cache.context_lens, cache.block_tables, cache.scale)
    q, last = cache.queries(sum(new), 2 * group, 2), cache.queries(len(contexts), 2 * group, 2)
    options = {"window": window, "softcap": softcap, "sinks": sinks_of(2 * group, dtype, "cpu") if sinks else None}
    out = reference.paged_prefill_attention(q, cache.k, cache.v, cu_seqlens, *rest, max(new), **options)
    last_out = reference.paged_decode_attention(*cache.decode_args(last), **options)
    for i, (begin, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        if contexts[i] == 0:
            assert last_out[i].count_nonzero() == 0
            continue
        k, v = cache.tokens(i)
        check(cache, out[begin:end], textbook(q[begin:end], k, v, cache.scale, **options))
        check(cache, last_out[i : i + 1], textbook(last[i : i + 1], k, v, cache.scale, **options))


def test_the_twin_of_a_long_prompt_takes_it_in_pieces(monkeypatch):
    monkeypatch.setattr(reference, "ROWS_AT_ONCE", 7)
    cache = PagedCache([33], 2, 24, 16, torch.float32, device="cpu")
    q, cu_seqlens, sinks = cache.queries(20, 6, 2), torch.tensor([0, 20]).int(), sinks_of(6, torch.float32, "cpu")
    rest = (cu_seqlens, cache.req_indices, cache.context_lens, cache.block_tables, cache.scale, 20)
    out = reference.paged_prefill_attention(q, cache.k, cache.v, *rest, window=9, sinks=sinks, softcap=1.5)
    check(cache, out, textbook(q, *cache.tokens(0), cache.scale, 9, sinks, 1.5))


# ------------------------------------------------------------------------------- the table: kernels against twins


UNEVEN = [20, 33, 250, 7, 0, 64, 48, 31]  # one long context among short ones
# a prefix hit, a chunk, one token after a prefix, nothing new, and a whole prompt, in one launch
SPANS = [(20, 84), (33, 65), (1, 77), (0, 16), (40, 40)]
WINDOWED = [(20, 84), (33, 165), (1, 77), (0, 16), (70, 70)]
AT_SIZE = [(700, 700), (64, 1088), (1, 1500), (333, 900)]
# (new tokens, context): whole prompts, prefixes, chunks, one token, nothing new; longest below and above 1024
SM90_SPANS = {
    "short": [(70, 70), (64, 300), (1, 77), (0, 16), (33, 97), (5, 5)],
    "ragged": [*AT_SIZE, (128, 128), (129, 129)],
    "long": [(2048, 2048), (1024, 3000), (17, 17)],
    "many": [(1 + 13 * i % 90, 1 + 13 * i % 90 + 7 * i % 200) for i in range(256)],
    "more than a launch takes": [(1 + 13 * i % 90, 1 + 13 * i % 90 + 7 * i % 200) for i in range(600)],
}
SCORES = [{"sinks": True}, {"softcap": 2.0}, {"sinks": True, "softcap": 2.0}]
HEADS = [(16, 2, 64, 0), (6, 2, 64, 33), (4, 2, 256, 7)]  # query heads, KV heads, head size, window
# gpt-oss; Gemma 2 27b, 9b and 2b
OTHER_SCORES = [(64, 8, 64, True, 0.0), (32, 16, 128, False, 3.0), (16, 8, 256, False, 3.0), (8, 4, 256, False, 3.0),
                (16, 4, 128, True, 3.0)]  # fmt: skip
# Gemma 4's heads of one size, then the other: 26B-A4B, 31B, E4B. Query heads, KV heads, head size, window
GEMMA_4 = [(16, 8, 256, 1024), (32, 16, 256, 1024), (8, 2, 256, 512),
           (16, 2, 512, 0), (32, 4, 512, 0), (8, 2, 512, 0)]  # fmt: skip
FP8 = {"make_cache": FP8Cache}


def many(num_seqs):
    return [1500 - 37 * i % 1400 for i in range(num_seqs)]


DECODES = [  # splits: arguments of ``cut``, where it is called
    *(call(check_decode, [0, 1, n - 1, n, n + 1, 0], 4, 2, 32, n, FP32) for n in (16, 48, *at_night(64, 256))),
    *(call(check_decode, [37, 5, 130], 2 * group, 2, 32, 16, FP32) for group in (1, 3, 8, *at_night(2, 4, 5, 7, 16))),
    call(check_decode, [1 + 7 * i % 50 for i in range(21)], 2, 1, 32, 16, FP32),  # above sixteen sequences
    *(call(check_decode, [70, 0, 3], 4, 2, D, 64, dtype)
      for D, dtype in each_once((32, 64, 80, 96, 128, 256, 512), TYPES)),
    *(call(check_decode, contexts, *heads, 32, n, dtype, splits={}) for (n, contexts, heads), dtype in each_once(
        [(16, [200, 0, 15, 16, 17, 90], (2, 1)), (256, [270, 1, 0, 100], (2, 1)), (16, [70, 0, 33], (4, 2))], TYPES)),
    # a merge of one partial result at a time, of some, of all at once
    *(call(check_decode, [130, 47, 1], group, 1, 128, 16, FP32, splits={"merged": merged})
      for group, merged in ((2, 4096), (5, 1), (7, 2048), (16, 16384))),
    # split lengths that begin and end inside sequences
    *(call(check_decode, UNEVEN, 2, 1, 32, 32, FP32, window=window, splits={"programs_per_sm": n})
      for n, window in ((1, 0), (2, 0), (3, 0), (3, 40))),
    # merges by a second kernel; it finds nothing to merge where no sequence is cut
    *(call(check_decode, contexts, 6, 2, D, 32, FP32, window=window, sinks=sinks, splits={"merge_apart": True, **more})
      for contexts, D, window, sinks, more in (
          (UNEVEN, 32, 0, True, {}), (UNEVEN, 80, 40, False, {"programs_per_sm": 3}), ([9, 0], 32, 0, False, {}),
          ([100, 70], 256, 0, False, {"kv_head_programs": 3}))),
    # windows of one token, less than a tile of 16 or 32 tokens, a tile, a tile and a bit, several tiles, all contexts
    *(call(check_decode, [130, 0, 1, 15, 64, 65], 2, 1, 32, n, FP32, window=window)
      for n, window in ((16, 1), (64, 7), (16, 32), (16, 33), (64, 64), (16, 500))),
    *(call(check_decode, [130, 47, 0, 1, 16], 7, 1, 32, n, FP32, window=window, splits={})
      for n, window in ((16, 1), (48, 16), (16, 33), *at_night((48, 7), (48, 100)))),
    *(call(check_decode, [70, 0, 3], *heads, 64, FP32, window=window, **scores)
      for (*heads, window), scores in each_once(HEADS, SCORES)),
    # sinks count once: splits that begin and end inside sequences; sequences of one split, of several, of none
    *(call(check_decode, UNEVEN, 3, 1, 32, 32, FP32, window=window, sinks=True, softcap=softcap,
           splits={"programs_per_sm": n}) for window, n, softcap in each_once((0, 40), (2, 16), (0.0, 2.0))),
    # FP8
    *(call(check_decode, [70, 0, 3], *heads, 16, dtype, **FP8)
      for heads, dtype in each_once([(2, 2, 32), (4, 2, 64), (8, 1, 128), (5, 1, 256), (8, 1, 512)], [FP32, FP16, BF16])
      ),
    *(call(check_decode, [70, 0, 3], *heads, 16, FP16, window=window, **scores, **FP8)
      for (*heads, window), scores in each_once([(16, 2, 64, 20), (4, 2, 256, 0)], SCORES)),
    *(call(check_decode, contexts, *heads, 32, n, FP16, window=window, splits={}, **FP8)
      for contexts, heads, n, window in (
          ([130, 47, 0, 1, 16], (3, 1), 16, 0), ([70, 0, 1], (6, 2), 256, 0), ([130, 47, 0, 1], (3, 1), 48, 33))),
    call(check_decode, [40, 5], 12, 2, 32, 16, FP16, splits={"programs_per_sm": 2, "kv_head_programs": 3}, **FP8),
    # on a GPU
    *(call(check_decode, contexts, 16, 8, 128, 256, dtype, gpu=True) for dtype in (BF16, FP16, FP32) for contexts in (
        [4096], [128] * 8, [4000] + [100] * 255, [100 + 37 * i % 1400 for i in range(256)], [33] * 600)),
    *(call(check_decode, many(num_seqs), *heads, 256, BF16, window=window, gpu=True)
      for num_seqs in (1, 8, 256) for window in (0, 128, 500)
      for heads in ((32, 8, 64), (28, 4, 128), (14, 2, 64), (8, 4, 256))),
    *(call(check_decode, many(num_seqs), *heads, 256, dtype, window, *scores, gpu=True)
      for num_seqs, dtype in ((1, BF16), (8, FP32), (256, BF16)) for window in (0, 128)
      for *heads, scores in [(*row[:3], row[3:]) for row in OTHER_SCORES]),
    *(call(check_decode, many(num_seqs), *heads, 256, dtype, window, gpu=True, **FP8)
      for num_seqs in (1, 8, 256) for dtype in (BF16, FP16) for window in (0, 500)
      for heads in ((16, 8, 128), (32, 8, 128), (14, 2, 64), (8, 4, 256))),
    *(call(check_decode, many(num_seqs), *heads, 256, BF16, window, *scores, gpu=True, **FP8)
      for num_seqs in (1, 8, 256) for window in (0, 128)
      for *heads, scores in [(*row[:3], row[3:]) for row in OTHER_SCORES]),
    *(call(check_decode, many(num_seqs), *heads, 256, BF16, window, gpu=True, **options)
      for num_seqs in (1, 8, 32, 256) for *heads, window in GEMMA_4 for options in ({}, FP8)),
    *(call(check_decode, [9000, 33, 4097], 16, 2, 512, n, dtype, gpu=True) for n, dtype in ((16, FP16), (256, FP32))),
]  # fmt: skip
VERIFIES = [
    *(call(check_verify, [1, 5, 40, 0, 67], num_rows, group, 1, 32, 16, FP32)
      for group, num_rows in ((1, 8), (2, 2), (7, 4), *at_night((3, 4), (4, 8), (8, 4), (16, 8)))),
    *(call(check_verify, contexts, 4, *heads, 32, n, FP32, splits={})
      for n, contexts, heads in ((16, [100, 3, 40], (6, 2)), (256, [270, 0, 17], (3, 1)))),
    *(call(check_verify, [100, 9, 65, 131], 4, 4, 2, 32, n, FP32, window=window)
      for n, window in ((16, 1), (16, 33), *at_night((64, 7), (48, 64), (16, 500)))),
    *(call(check_verify, [70, 3, 150], 4, 3, 1, 32, 16, FP32, window=window, sinks=True, softcap=softcap, splits={})
      for window, softcap in ((0, 0.0), (21, 2.0))),
    call(check_verify, [100, 9, 65, 131], 4, 4, 2, 32, 16, FP32, window=33, splits={"merge_apart": True}),
    *(call(check_verify, [33, 50, 9], 8, 4, 1, D, 16, dtype) for D, dtype in each_once((64, 80, 128, 256, 512), TYPES)),
    *(call(check_verify, many(num_seqs), 4, *heads, 256, BF16, window=window, gpu=True)
      for num_seqs in (1, 32) for *heads, window in GEMMA_4),
]  # fmt: skip
PREFILLS = [
    *(call(check_prefill, [(n, n) for n in lens], 4, 2, 32, block_size, FP32)  # whole prompts
      for block_size, lens in ((16, (1, 15, 17)), (48, (1, 47, 49)), (64, (1, 63, 65)), (256, (1, 70)))),
    *(call(check_prefill, SPANS, 4, 2, 32, n, FP32) for n in (16, 64)),
    *(call(check_prefill, [(19, 19), (7, 40)], 2 * group, 2, 32, 16, FP32)
      for group in (1, 3, 8, *at_night(2, 4, 5, 7, 16))),
    *(call(check_prefill, [(35, 35), (3, 70)], 4, 2, D, 64, dtype)
      for D, dtype in each_once((32, 64, 80, 128, 256, 512), TYPES)),
    *(call(check_prefill, [(150, 170)], group, 1, 32, 64, FP16) for group in (1, 2, 7)),  # more rows than a program's
    # tiles that the window cuts, tiles without a mask, tiles with both masks; whole prompts and prefix hits
    *(call(check_prefill, WINDOWED, 4, 2, 32, n, FP32, window)
      for n, window in ((16, 1), (64, 7), (16, 33), (64, 100), *at_night((16, 16), (64, 32), (16, 64), (16, 500)))),
    *(call(check_prefill, [(150, 170), (30, 300)], 14, 2, 32, 64, FP16, window) for window in (5, 128)),  # large tiles
    *(call(check_prefill, SPANS, *heads, 64, FP32, window, **scores)
      for (*heads, window), scores in each_once(HEADS, SCORES)),
    # FP8
    *(call(check_prefill, SPANS, 2 * group, 2, D, 16, dtype, window, **FP8)
      for (D, group, window), dtype in each_once([(32, 1, 0), (128, 3, 0), (64, 2, 40)], [FP32, FP16, BF16])),
    *(call(check_prefill, [(20, 84), (1, 77), (0, 16)], *heads, 16, FP16, window, **scores, **FP8)
      for (*heads, window), scores in each_once([(16, 2, 64, 20), (4, 2, 256, 0)], SCORES)),
    # on a GPU
    *(call(check_prefill, AT_SIZE, *heads, 256, dtype, window, *scores, gpu=True)
      for dtype in (BF16, FP32) for window in (0, 128)
      for *heads, scores in [(*row[:3], row[3:]) for row in OTHER_SCORES]),
    *(call(check_prefill, AT_SIZE, 16, 8, 128, n, BF16, gpu=True) for n in (16, 256)),
    *(call(check_prefill, SM90_SPANS[spans], *heads, 256, BF16, window, gpu=True, **options)
      for spans in ("short", "ragged", "long") for *heads, window in GEMMA_4 for options in ({}, FP8)),
    *(call(check_prefill, AT_SIZE, 16, 2, 512, n, dtype, gpu=True) for n, dtype in ((16, FP16), (256, FP32))),
    *(call(check_prefill, SM90_SPANS[spans], 2 * group, 2, D, 256, dtype, window, gpu=True, **FP8)
      for spans in SM90_SPANS for dtype in (BF16, FP16) for group, D, window in (
          (1, 64, 0), (2, 128, 0), (5, 64, 0), (8, 128, 0), (2, 128, 64), (7, 128, 100), (1, 64, 1))),
    *(call(check_prefill, SM90_SPANS[spans], *heads, 256, BF16, window, *scores, gpu=True, **FP8)
      for spans in ("short", "ragged") for window in (0, 128)
      for *heads, scores in [(*row[:3], row[3:]) for row in OTHER_SCORES]),
    *(call(check_sm90_prefill, spans, group, D, dtype, n, gpu=True)
      for spans in SM90_SPANS for group in (1, 2, 3, 4, 5, 7, 8, 16) for D in (64, 128)
      for dtype, n in ((BF16, 256), (FP16, 128))),
    *(call(check_sm90_prefill, spans, group, D, dtype, n, window, gpu=True)
      for D in (256, 512) for spans in SM90_SPANS for group, dtype, n, window in (
          (1, BF16, 256, 0), (2, FP16, 64, 1000), (7, BF16, 256, 1000), (8, BF16, 256, 1), (16, FP16, 64, 0))),
    # shorter than a query tile, a key tile, many key tiles; the parts of the key loop in every combination
    *(call(check_sm90_prefill, spans, group, D, BF16, 256, window, gpu=True) for spans in SM90_SPANS
      for group, D, window in ((1, 64, 200), (2, 128, 1), (2, 128, 64), (2, 128, 1000), (7, 128, 100))),
    *(call(check_sm90_prefill, spans, group, D, BF16, 256, window, sinks=True, gpu=True) for spans in SM90_SPANS
      for group, D, window in ((8, 64, 0), (8, 64, 128), (2, 128, 0), (7, 128, 100), (2, 256, 100), (8, 512, 0))),
]  # fmt: skip


@pytest.mark.parametrize("check, args, options, splits", [*DECODES, *VERIFIES, *PREFILLS])
def test_kernels(cut, check, args, options, splits):
    if splits is not None:
        cut(**splits)
    check(*args, **options)


# ---------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("num_seqs, group, num_kv_heads, head_size, sinks", [
    (2, 7, 1, 128, False), (2, 8, 2, 64, True),  # each program takes its own sinks
    *at_night((1, 8, 2, 128, False), (2, 4, 3, 128, False), (1, 8, 4, 128, False)),
])  # fmt: skip
def test_decode_of_large_groups_in_few_sequences(num_seqs, group, num_kv_heads, head_size, sinks):
    """Several programs share the query heads of a KV head."""
    assert decode.decode_config(num_seqs, num_kv_heads, group, head_size, 4).kv_head_programs > 1
    check_decode([300, 40][:num_seqs], num_kv_heads * group, num_kv_heads, head_size, 64, torch.float32, sinks=sinks)


@pytest.mark.parametrize("window", [0, 21])
def test_rows_of_a_verify_step_are_decode_steps(window):
    """Each attends what it would attend by itself, also in the plain twin."""
    cache, q, lens, expected = check_verify([40, 33, 70], 4, 6, 3, 32, 16, torch.float32, window)
    for row in range(4):
        cache.context_lens = lens[:, row].to(DEVICE)
        alone = reference.paged_decode_attention(*cache.decode_args(q[row::4]), window=window)
        check(cache, expected[row::4], alone)
    assert not expected[lens.flatten() == 0].any()


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_sinks_far_from_the_scores(cut, sink):
    """Far below they change nothing; far above nothing is left, and no number overflows to NaN."""
    cut()
    cache = PagedCache([200, 9], 1, 32, 16, torch.float32)
    q, sinks = cache.queries(2, 2, 1), torch.full((2,), sink, device=DEVICE)
    args, cu_seqlens = cache.decode_args(q), torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    expected = oracle(reference.paged_decode_attention, *args) if sink < 0 else torch.zeros_like(q)
    check(cache, decode.paged_decode_attention(*args, sinks=sinks), expected)
    check(cache, prefill.paged_prefill_attention(*args[:3], cu_seqlens, *args[3:-1], 1, sinks=sinks), expected)


def test_decode_of_an_empty_batch():
    cache = PagedCache([9, 20], 2, 32, 16, torch.float32)
    q = cache.queries(2, 4, 2)
    empty = decode.paged_decode_attention(
        q[:0], cache.k, cache.v, cache.req_indices[:0], cache.context_lens[:0], cache.block_tables, 1.0, 0
    )
    assert empty.shape == (0, 4, 32)


def test_decode_with_an_upper_bound_of_the_contexts():
    """Programs without a tile exit; the launch must not depend on them."""
    cache = PagedCache([9, 20], 2, 32, 16, torch.float32)
    *args, _ = cache.decode_args(cache.queries(2, 4, 2))
    check(cache, decode.paged_decode_attention(*args, 500), oracle(reference.paged_decode_attention, *args, 500))


def test_decode_large_scores_do_not_overflow(cut):
    """Scores of hundreds: the softmax must subtract the maximum within a split and between splits."""
    cut()
    cache = PagedCache([200, 40], 1, 32, 16, torch.float32, scale=40.0)
    args = cache.decode_args(cache.queries(2, 2, 1))
    expected = oracle(reference.paged_decode_attention, *args)
    result = decode.paged_decode_attention(*args).double()
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)


def test_decode_result_is_that_of_the_sequence_alone():
    """The other sequences of the batch shift the split boundaries, which changes only fp32 rounding."""
    cache, args, expected = check_decode([100, 333, 12], 4, 2, 32, 16, torch.float32)
    q, k, v, req_indices, context_lens, tables, scale, max_context = args
    for i in range(3):
        alone = decode.paged_decode_attention(
            q[i : i + 1], k, v, req_indices[i : i + 1], context_lens[i : i + 1], tables, scale, max_context
        )
        check(cache, alone, expected[i : i + 1])


# --------------------------------------------------------------------------------------------------- prefill


def test_prefill_in_chunks_is_the_whole():
    """Chunks of 13 tokens, each over the cache up to its end, give the result of one prefill."""
    cache, args, expected = check_prefill([(50, 50)], 4, 2, 32, 16, torch.float32)
    q, k, v, _, req_indices, _, tables, scale = args
    for begin in range(0, 50, 13):
        end = min(begin + 13, 50)
        cu_seqlens = torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE)
        context = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        chunk = prefill.paged_prefill_attention(
            q[begin:end], k, v, cu_seqlens, req_indices, context, tables, scale, end - begin
        )
        check(cache, chunk, expected[begin:end])


def test_prefill_of_one_token_is_decode():
    cache = PagedCache([1, 17, 100], 2, 32, 16, torch.float32)
    q = cache.queries(3, 4, 2)
    cu_seqlens = torch.arange(4, dtype=torch.int32, device=DEVICE)
    rest = (cache.req_indices, cache.context_lens, cache.block_tables, cache.scale)
    by_prefill = prefill.paged_prefill_attention(q, cache.k, cache.v, cu_seqlens, *rest, 1)
    by_decode = decode.paged_decode_attention(*cache.decode_args(q))
    torch.testing.assert_close(by_prefill, by_decode, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("window", [0, 21])
def test_prefill_padded(window):
    """As in CUDA graphs: sequences without tokens, tokens of no sequence, and a bound that no sequence reaches."""
    spans = [(20, 84), (1, 77), (40, 40), (0, 0), (0, 0)]
    cache, (q, k, v, cu_seqlens, *rest), expected = check_prefill(spans, 4, 2, 32, 16, torch.float32, window)
    padded = torch.cat([q, torch.full_like(q[:13], torch.nan)])
    out = prefill.paged_prefill_attention(padded, k, v, cu_seqlens, *rest, 90, window=window)
    check(cache, out[: len(q)], expected)


def test_sm90_prefill_of_more_sequences_than_a_launch_takes(monkeypatch):
    """The split into launches; the plain twin stands in for the kernel, which needs a Hopper GPU."""
    prefill_sm90 = pytest.importorskip("nanovllm.kernels.attention.prefill_sm90", exc_type=ImportError)
    assert prefill.prefill_sm90 is prefill_sm90
    spans = [(1 + i % 3, 1 + i % 3 + i % 2) for i in range(600)]
    cache, args = prefill_of(spans, 2, 1, 128, 64, torch.float16)
    expected, sizes = oracle(reference.paged_prefill_attention, *args, 3), []

    def run_twin(
        kernel, grid, q, k, v, kv_scale, sinks, cu_seqlens, req_indices, contexts, tables, out, counters, num_seqs,
        *_, **__
    ):  # fmt: skip
        sizes.append(num_seqs)
        cu_seqlens = cu_seqlens[: num_seqs + 1]
        new = slice(int(cu_seqlens[0]), int(cu_seqlens[-1]))
        out[new] = reference.paged_prefill_attention(
            q[new], k.base, v.base, cu_seqlens - cu_seqlens[0], req_indices[:num_seqs], contexts[:num_seqs], tables,
            args[-1], 3,
        )  # fmt: skip

    monkeypatch.setattr(prefill_sm90, "launch", run_twin)
    out = torch.full(expected.shape, torch.nan, dtype=cache.dtype, device=DEVICE)
    assert prefill_sm90.prefill_attention_sm90(*args, 3, 0, None, out) is out
    assert sizes == [256, 256, 88]
    check(cache, out, expected)


# --------------------------------------------------------------------------------------------- only on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("num_kv_heads, head_size", [(8, 128), (2, 512)])
@pytest.mark.parametrize("pdl", [False, True])
def test_decode_in_a_cuda_graph_follows_new_contexts(pdl, num_kv_heads, head_size, monkeypatch):
    """A graph captured at short contexts is replayed at longer ones, and its counters survive each replay."""
    monkeypatch.undo()  # poisoning would come between the kernels that overlap
    cache = PagedCache([900, 1300, 64, 2000], num_kv_heads, head_size, 256, torch.bfloat16)
    source = cache.queries(4, 16, num_kv_heads)
    q, full = source.clone(), cache.context_lens.clone()
    args = cache.decode_args(q)
    cache.context_lens.fill_(1)
    decode.paged_decode_attention(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if pdl:  # the previous kernel, with which this one overlaps, writes q
            q.copy_(source)
        result = decode.paged_decode_attention(*args, pdl=pdl)
    for shorter_by in (0, 63, 0, 17):
        cache.context_lens.copy_(full - shorter_by)
        result.fill_(torch.nan)
        if pdl:
            q.fill_(torch.nan)
        graph.replay()
        check(cache, result, oracle(reference.paged_decode_attention, source, *args[1:]))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("num_heads, num_kv_heads, head_size", [(16, 8, 128), (14, 2, 64), (8, 4, 256), (16, 2, 512)])
def test_prefill_in_a_cuda_graph_follows_new_lengths(num_heads, num_kv_heads, head_size, window, monkeypatch):
    """Captured with no sequence at all, as at start-up; replayed with one, with many, with padding."""
    monkeypatch.undo()  # poisoning would be captured
    contexts = [900, 1300, 64, 2000, 512, 30, 1, 0, 0, 0]
    cache = PagedCache(contexts, num_kv_heads, head_size, 256, torch.bfloat16)
    q = cache.queries(1024, num_heads, num_kv_heads)
    cu_seqlens = torch.zeros(len(contexts) + 1, dtype=torch.int32, device=DEVICE)
    args = (q, cache.k, cache.v, cu_seqlens, cache.req_indices, cache.context_lens, cache.block_tables, cache.scale)
    full = cache.context_lens.clone()
    cache.context_lens.zero_()
    prefill.paged_prefill_attention(*args, 512, window=window)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill.paged_prefill_attention(*args, 512, window=window)
    for new in ([512, 200, 64, 100, 1, 30, 1], [1], [0, 0, 64], [32] * 5, [500, 500]):
        num_seqs, num_tokens = len(new), sum(new)
        cache.context_lens.zero_()[:num_seqs] = full[:num_seqs]
        cu_seqlens.copy_(torch.tensor([0, *new] + [0] * (len(contexts) - num_seqs)).cumsum(0))
        out.fill_(torch.nan)
        graph.replay()
        expected = oracle(reference.paged_prefill_attention, q[:num_tokens], *args[1:], 512, window=window)
        check(cache, out[:num_tokens], expected)
    assert launch.zero_counters(1, q.device).count_nonzero() == 0

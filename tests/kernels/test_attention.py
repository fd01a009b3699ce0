"""The Triton attention kernels against their plain twins: compiled on a GPU, interpreted elsewhere.

Every slot of the cache that no context covers holds NaN, and so does every output before the call: a kernel
that reads too much or writes too little cannot pass.
"""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

pytest.importorskip("triton")

from nanovllm.kernels import decode_attention, inputs, prefill_attention, reference_attention  # noqa: E402

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device: too large for the interpreter")
BF16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies bf16 as bit patterns"),
)
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 4e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
}


class Pages:
    """A poisoned cache with the given contexts in shuffled blocks, and the row table that finds them."""

    def __init__(self, contexts, num_kv_heads, head_size, block_size, dtype, seed=0, scale=0.25):
        generator = torch.Generator().manual_seed(seed)
        self.generator, self.dtype, self.head_size, self.scale = generator, dtype, head_size, scale
        num_blocks = [-(-context // block_size) for context in contexts]
        max_blocks = max(num_blocks) + 2
        total = sum(num_blocks) + 3
        free = torch.randperm(total, generator=generator).tolist()
        shape = (total, block_size, num_kv_heads, head_size)
        k, v = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        # Rows in another order than the batch, inside a wider table; entries not owned point nowhere.
        num_rows = len(contexts) + 2
        rows = torch.randperm(num_rows, generator=generator)[: len(contexts)]
        table = torch.full((num_rows, max_blocks + 3), -(10**6), dtype=torch.int32)
        for row, context in zip(rows.tolist(), contexts, strict=True):
            for i in range(-(-context // block_size)):
                block, used = free.pop(), min(block_size, context - i * block_size)
                table[row, 2 + i] = block
                k[block, :used] = torch.randn(used, num_kv_heads, head_size, generator=generator)
                v[block, :used] = torch.randn(used, num_kv_heads, head_size, generator=generator)
        self.k, self.v = k.to(DEVICE, dtype), v.to(DEVICE, dtype)
        self.rows = rows.to(DEVICE, torch.int32)
        self.context_lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
        self.block_tables = table.to(DEVICE)[:, 2 : 2 + max_blocks]

    def queries(self, num_tokens, num_heads, num_kv_heads):
        """[num_tokens, num_heads, D]: the front of packed q, k, v rows; the rest of each row is NaN."""
        width = num_heads + 2 * num_kv_heads
        packed = torch.full((num_tokens, width, self.head_size), torch.nan)
        packed[:, :num_heads] = torch.randn(num_tokens, num_heads, self.head_size, generator=self.generator)
        return packed.to(DEVICE, self.dtype)[:, :num_heads]


def check(pages, result, expected):
    assert torch.isfinite(expected).all(), "the reference read a poisoned slot"
    torch.testing.assert_close(result.float(), expected.float(), **TOLERANCE[pages.dtype])


def check_decode(contexts, num_heads, num_kv_heads, head_size, block_size, dtype, **kwargs):
    pages = Pages(contexts, num_kv_heads, head_size, block_size, dtype)
    q = pages.queries(len(contexts), num_heads, num_kv_heads)
    args = (q, pages.k, pages.v, pages.rows, pages.context_lens, pages.block_tables, pages.scale)
    expected = reference_attention.paged_decode_attention(*args)
    poisoned = torch.full((len(contexts), num_heads, head_size), torch.nan, dtype=dtype, device=DEVICE)
    for _ in range(2):  # twice: a launch must leave the counters as it found them
        result = decode_attention.paged_decode_attention(*args, **kwargs, out=poisoned.clone())
        check(pages, result, expected)
    return pages, args, expected


def check_prefill(new_and_context, num_heads, num_kv_heads, head_size, block_size, dtype):
    new, contexts = zip(*new_and_context, strict=True)
    pages = Pages(contexts, num_kv_heads, head_size, block_size, dtype)
    cu_seqlens = torch.tensor([0, *new]).cumsum(0).to(DEVICE, torch.int32)
    q = pages.queries(sum(new), num_heads, num_kv_heads)
    args = (q, pages.k, pages.v, cu_seqlens, pages.rows, pages.context_lens, pages.block_tables, pages.scale)
    expected = reference_attention.paged_prefill_attention(*args, max(new))
    poisoned = torch.full((sum(new), num_heads, head_size), torch.nan, dtype=dtype, device=DEVICE)
    check(pages, prefill_attention.paged_prefill_attention(*args, max(new), out=poisoned), expected)
    return pages, args, expected


@pytest.fixture
def many_splits(monkeypatch):
    """Tiles of 16 tokens and about as many shares: every sequence of a few tiles is split."""
    config = decode_attention.DecodeConfig(block_n=16, num_warps=2, num_stages=2, programs_per_sm=16)
    monkeypatch.setattr(decode_attention, "decode_config", lambda *_: config)


# ---------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
def test_decode_around_block_boundaries(block_size):
    contexts = [0, 1, block_size - 1, block_size, block_size + 1, 0]
    check_decode(contexts, 4, 2, 32, block_size, torch.float32)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 16])
def test_decode_grouped_heads(group):
    check_decode([37, 5, 130], 2 * group, 2, 32, 16, torch.float32)


@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_decode_head_sizes_and_types(head_size, dtype):
    check_decode([70, 0, 3], 4, 2, head_size, 64, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize(
    ("block_size", "contexts"), [(16, [200, 0, 15, 16, 17, 90]), (256, [270, 1, 0, 100])]
)
def test_decode_many_splits(many_splits, block_size, contexts, dtype):
    check_decode(contexts, 4, 2, 32, block_size, dtype)


@pytest.mark.parametrize("group", [2, 5, 16])
def test_decode_many_splits_of_large_groups(many_splits, group):
    check_decode([200, 47, 1], group, 1, 128, 16, torch.float32)


@pytest.mark.parametrize("programs_per_sm", [1, 2, 3])
def test_decode_shares_that_hold_parts_of_several_sequences(monkeypatch, programs_per_sm):
    """One long context among short ones, at share lengths that begin and end inside sequences."""
    config = decode_attention.DecodeConfig(block_n=16, num_warps=2, num_stages=2, programs_per_sm=programs_per_sm)
    monkeypatch.setattr(decode_attention, "decode_config", lambda *_: config)
    check_decode([20, 33, 250, 7, 0, 64, 48, 31], 2, 1, 32, 32, torch.float32)


def test_decode_batch_above_sixteen():
    contexts = [1 + 7 * i % 50 for i in range(21)]
    check_decode(contexts, 2, 1, 32, 16, torch.float32, max_context=50)


def test_decode_without_out_and_empty_batch():
    pages = Pages([9, 20], 2, 32, 16, torch.float32)
    q = pages.queries(2, 4, 2)
    args = (pages.k, pages.v, pages.rows, pages.context_lens, pages.block_tables, pages.scale)
    expected = reference_attention.paged_decode_attention(q, *args)
    check(pages, decode_attention.paged_decode_attention(q, *args), expected)
    empty = decode_attention.paged_decode_attention(
        q[:0], pages.k, pages.v, pages.rows[:0], pages.context_lens[:0], pages.block_tables, 1.0
    )
    assert empty.shape == (0, 4, 32)


def test_decode_large_scores_do_not_overflow(many_splits):
    """Scores of hundreds: the softmax must subtract the maximum within a split and between splits."""
    pages = Pages([200, 40], 1, 32, 16, torch.float32, scale=40.0)
    q = pages.queries(2, 2, 1)
    args = (q, pages.k, pages.v, pages.rows, pages.context_lens, pages.block_tables, pages.scale)
    expected = reference_attention.paged_decode_attention(*args)
    torch.testing.assert_close(decode_attention.paged_decode_attention(*args), expected, rtol=1e-3, atol=1e-3)


def test_decode_result_is_that_of_the_sequence_alone():
    """Batch mates move the cuts between programs, and with them fp32 rounding only."""
    pages, args, expected = check_decode([100, 333, 12], 4, 2, 32, 16, torch.float32)
    q, k, v, rows, context_lens, tables, scale = args
    for i in range(3):
        alone = decode_attention.paged_decode_attention(
            q[i : i + 1], k, v, rows[i : i + 1], context_lens[i : i + 1], tables, scale
        )
        check(pages, alone, expected[i : i + 1])


# --------------------------------------------------------------------------------------------------- prefill


@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
def test_prefill_whole_prompts(block_size):
    lens = [1, block_size - 1, block_size + 1] if block_size < 256 else [1, 70]
    check_prefill([(n, n) for n in lens], 4, 2, 32, block_size, torch.float32)


@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill_after_a_prefix(block_size):
    """A prefix hit, a chunk, one token after a prefix, nothing new, and a whole prompt, in one launch."""
    check_prefill([(20, 84), (33, 65), (1, 77), (0, 16), (40, 40)], 4, 2, 32, block_size, torch.float32)


@pytest.mark.parametrize("group", [1, 2, 4, 5, 8, 16])
def test_prefill_grouped_heads(group):
    check_prefill([(19, 19), (7, 40)], 2 * group, 2, 32, 16, torch.float32)


@pytest.mark.parametrize("head_size", [32, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_prefill_head_sizes_and_types(head_size, dtype):
    check_prefill([(35, 35), (3, 70)], 4, 2, head_size, 64, dtype)


def test_prefill_more_rows_than_one_program_takes():
    check_prefill([(150, 170)], 2, 1, 32, 64, torch.float16)


def test_prefill_in_chunks_is_the_whole():
    """Chunks of 13 tokens, each over the pages that hold everything up to it, give what one prefill gives."""
    pages, args, expected = check_prefill([(50, 50)], 4, 2, 32, 16, torch.float32)
    q, k, v, _, rows, _, tables, scale = args
    for begin in range(0, 50, 13):
        end = min(begin + 13, 50)
        cu_seqlens = torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE)
        context = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        chunk = prefill_attention.paged_prefill_attention(
            q[begin:end], k, v, cu_seqlens, rows, context, tables, scale, end - begin
        )
        check(pages, chunk, expected[begin:end])


def test_prefill_of_one_token_is_decode():
    pages = Pages([1, 17, 100], 2, 32, 16, torch.float32)
    q = pages.queries(3, 4, 2)
    cu_seqlens = torch.arange(4, dtype=torch.int32, device=DEVICE)
    rest = (pages.rows, pages.context_lens, pages.block_tables, pages.scale)
    prefill = prefill_attention.paged_prefill_attention(q, pages.k, pages.v, cu_seqlens, *rest, 1)
    decode = decode_attention.paged_decode_attention(q, pages.k, pages.v, *rest)
    torch.testing.assert_close(prefill, decode, **TOLERANCE[torch.float32])


def test_hopper_prefill_of_more_sequences_than_a_launch_takes(monkeypatch):
    """How they are divided over launches, with the plain twin in the place of the kernel, which needs a Hopper."""
    hopper_prefill = pytest.importorskip("nanovllm.kernels.attention.prefill_sm90", exc_type=ImportError)
    spans = [(1 + i % 3, 1 + i % 3 + i % 2) for i in range(600)]
    _, args, expected = check_prefill(spans, 2, 1, 128, 64, torch.float16)
    sizes = []

    def launcher(kernel, grid):
        def launch(q, k, v, cu_seqlens, rows, contexts, tables, out, counters, num_seqs, *_, **options):
            sizes.append(num_seqs)
            cu_seqlens = cu_seqlens[: num_seqs + 1]
            new = slice(int(cu_seqlens[0]), int(cu_seqlens[-1]))
            out[new] = reference_attention.paged_prefill_attention(
                q[new], k.base, v.base, cu_seqlens - cu_seqlens[0], rows[:num_seqs], contexts[:num_seqs], tables,
                args[-1], 3,
            )  # fmt: skip

        return launch

    monkeypatch.setattr(hopper_prefill, "launcher", launcher)
    out = torch.full_like(expected, torch.nan)
    assert hopper_prefill.prefill_attention_sm90(*args, 3, out) is out
    assert sizes == [256, 256, 88]
    torch.testing.assert_close(out, expected)


# --------------------------------------------------------------------------------------------- only on a GPU


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "contexts",
    [[4096], [128] * 8, [4000] + [100] * 255, [100 + 37 * i % 1400 for i in range(256)], [33] * 600],
    ids=["one", "eight", "one long", "ragged", "many"],
)
def test_decode_at_size(contexts, dtype):
    check_decode(contexts, 16, 8, 128, 256, dtype)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 256])
def test_prefill_at_size(block_size):
    check_prefill([(700, 700), (64, 1088), (1, 1500), (333, 900)], 16, 8, 128, block_size, torch.bfloat16)


# (new tokens, context): whole prompts, prefixes, chunks, one token, nothing new; longest below and above 1024
HOPPER_SPANS = {
    "short": [(70, 70), (64, 300), (1, 77), (0, 16), (33, 97), (5, 5)],
    "ragged": [(700, 700), (64, 1088), (1, 1500), (333, 900), (128, 128), (129, 129)],
    "long": [(2048, 2048), (1024, 3000), (17, 17)],
    "many": [(1 + 13 * i % 90, 1 + 13 * i % 90 + 7 * i % 200) for i in range(256)],
    "more than a launch takes": [(1 + 13 * i % 90, 1 + 13 * i % 90 + 7 * i % 200) for i in range(600)],
}


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("spans", HOPPER_SPANS)
@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype, block_size", [(torch.bfloat16, 256), (torch.float16, 128)])
def test_hopper_prefill(spans, group, dtype, block_size):
    hopper_prefill = pytest.importorskip("nanovllm.kernels.attention.prefill_sm90", exc_type=ImportError)
    if not inputs.is_sm90(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    spans = HOPPER_SPANS[spans]
    _, args, _ = check_prefill(spans, 2 * group, 2, 128, block_size, dtype)
    q, k, max_seqlen_q = args[0], args[1], max(new for new, _ in spans)
    by_other = group == 1 and max_seqlen_q < 1024  # its tiles would be shorter than a run
    assert hopper_prefill.takes(q, k, max_seqlen_q) != by_other
    first = prefill_attention.paged_prefill_attention(*args, max_seqlen_q)
    for _ in range(3):  # no race, and nothing is left from launch to launch
        assert torch.equal(prefill_attention.paged_prefill_attention(*args, max_seqlen_q), first)
    if not by_other:
        torch.cuda.synchronize()
        assert inputs.zero_counters(1, q.device).count_nonzero() == 0


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_decode_in_a_cuda_graph_follows_new_contexts(pdl):
    """A graph captured at short contexts is replayed at longer ones, and its counters survive each replay."""
    pages = Pages([900, 1300, 64, 2000], 8, 128, 256, torch.bfloat16)
    source = pages.queries(4, 16, 8)
    q, full = source.clone(), pages.context_lens.clone()
    args = (q, pages.k, pages.v, pages.rows, pages.context_lens, pages.block_tables, pages.scale)
    pages.context_lens.fill_(1)
    decode_attention.paged_decode_attention(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if pdl:  # the launch before, which ours overlaps with, writes q
            q.copy_(source)
        result = decode_attention.paged_decode_attention(*args, pdl=pdl)
    for shorter_by in (0, 63, 0, 17):
        pages.context_lens.copy_(full - shorter_by)
        result.fill_(torch.nan)
        if pdl:
            q.fill_(torch.nan)
        graph.replay()
        check(pages, result, reference_attention.paged_decode_attention(source, *args[1:]))

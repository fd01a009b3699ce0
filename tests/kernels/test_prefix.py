"""Attention over shared prefixes: the Triton kernel against its plain twin, and decode attention that starts from it.

As in test_attention.py, whose cache this uses, every slot that nobody may read holds NaN, and so does every output and
all scratch memory before the call: states of sequences that share nothing stay NaN, and decode must not read them.
"""

import pytest
import torch
from histories import at_night

from nanovllm.kernels import launch
from nanovllm.kernels.attention import decode, prefix, reference
from nanovllm.kernels.attention.reference import SHARED_TOKENS, PrefixGroups

from . import DEVICE
from .table import call, each_once
from .test_attention import OTHER_SCORES, SCORES, TOLERANCE, TYPES, PagedCache, check, oracle, scores_options

pytestmark = pytest.mark.usefixtures("poisoned")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def shared_cache(groups, own, num_kv_heads, head_size, block_size, dtype, spare=0):
    """A cache, and the groups of its batch: of each (members, shared tokens), with ``own`` contexts that share nothing.

    Members have 1, 2, ... tokens of their own. Batch positions are shuffled; ``spare`` groups are unused.
    """
    contexts, owners = list(own), [None] * len(own)
    for group, (size, shared_len) in enumerate(groups):
        owners += [group] * size
        contexts += [shared_len + 1 + 37 * i % 90 for i in range(size)]
    order = torch.randperm(len(contexts), generator=torch.Generator().manual_seed(len(contexts))).tolist()
    contexts, owners = [contexts[i] for i in order], [owners[i] for i in order]
    cache = PagedCache(contexts, num_kv_heads, head_size, block_size, dtype)
    columns = {name: [] for name in ("members", "begins", "sizes", "lens", "owners")}
    for group, (size, shared_len) in enumerate(groups):
        members = [i for i, owner in enumerate(owners) if owner == group]
        rows, num_shared = cache.req_indices[members].tolist(), shared_len // block_size
        for row in rows[1:]:  # its own blocks there are read by nobody
            blocks = cache.block_tables[row, :num_shared].long()
            cache.k[blocks] = cache.v[blocks] = torch.nan
            cache.block_tables[row, :num_shared] = cache.block_tables[rows[0], :num_shared]
        values = members, [len(columns["members"])], [size], [shared_len], [rows[-1]]
        for column, new in zip(columns.values(), values, strict=True):
            column += new
    columns["members"] += [-(10**6)] * (len(contexts) - len(columns["members"]))
    for name in ("begins", "sizes", "lens", "owners"):
        columns[name] += [0] * spare
    shared_lens = [0 if owner is None else groups[owner][1] for owner in owners]
    columns = {"shared_lens": shared_lens, **columns}
    return cache, PrefixGroups(**{k: torch.tensor(v, dtype=torch.int32, device=DEVICE) for k, v in columns.items()})


def check_states(states, expected, is_member):
    """Equal up to the maximum, which any finite value may replace: compare the result and log2 of the whole sum."""
    (acc, stats), (expected_acc, expected_stats) = states, expected
    assert torch.isnan(acc[~is_member]).all() and torch.isnan(stats[~is_member]).all()
    acc, stats = (x[is_member].double() for x in (acc, stats))
    expected_acc, expected_stats = (x[is_member].double() for x in (expected_acc, expected_stats))
    assert torch.isfinite(expected_acc).all()
    return (
        (acc / stats[..., 1:], expected_acc / expected_stats[..., 1:]),
        (stats[..., 0] + stats[..., 1].log2(), expected_stats[..., 0] + expected_stats[..., 1].log2()),
    )


def check_shared(
    groups, own, num_heads, num_kv_heads, head_size, block_size, dtype, spare=2, launches=1, sinks=False, softcap=0.0
):
    cache, groups = shared_cache(groups, own, num_kv_heads, head_size, block_size, dtype, spare)
    q = cache.queries(len(cache.context_lens), num_heads, num_kv_heads)
    args = q, cache.k, cache.v, cache.block_tables, cache.scale, groups
    is_member = (groups.shared_lens > 0).cpu()
    wanted = tuple(x.cpu() for x in oracle(reference.prefix_attention, *args, softcap=softcap))
    decode_args, options = cache.decode_args(q), scores_options(num_heads, dtype, sinks, softcap)
    expected = oracle(reference.paged_decode_attention, *decode_args, **options)
    for _ in range(launches):
        states = tuple(x.cpu() for x in prefix.prefix_attention(*args, softcap=softcap))
        for actual, known in check_states(states, wanted, is_member):
            torch.testing.assert_close(actual, known, **TOLERANCE[dtype])
        check(cache, decode.paged_decode_attention(*decode_args, groups=groups, **options), expected)
    assert launch.zero_counters(1, q.device).count_nonzero() == 0


def test_the_twin_is_the_first_half_of_attention():
    """Merged with the attention of the own tokens by the textbook formula it is the whole."""
    cache, groups = shared_cache([(3, SHARED_TOKENS), (2, 2 * SHARED_TOKENS)], [70], 2, 24, 16, torch.float32)
    q = cache.queries(6, 6, 2)
    acc, stats = oracle(reference.prefix_attention, q, cache.k, cache.v, cache.block_tables, cache.scale, groups)
    whole = oracle(reference.paged_decode_attention, *cache.decode_args(q))
    for i, shared_len in enumerate(groups.shared_lens.tolist()):
        if shared_len == 0:
            continue
        k, v = (x[shared_len:].repeat_interleave(3, 1) for x in cache.tokens(i))
        scores = torch.einsum("hd,nhd->hn", q[i].double(), k) * cache.scale
        weights = scores.exp()
        prefix_weight = stats[i, :, 0].double().mul(torch.log(torch.tensor(2.0))).exp()
        total = prefix_weight * stats[i, :, 1] + weights.sum(1)
        sums = prefix_weight[:, None] * acc[i] + torch.einsum("hn,nhd->hd", weights, v)
        check(cache, sums / total[:, None], whole[i])


@pytest.fixture
def small_tiles(monkeypatch):
    """Several row tiles of a group and several splits of its keys; decode splits that begin inside sequences."""
    config = prefix.PrefixConfig(16, 64, num_warps=4, num_stages=2, programs_per_sm=3, split_tiles=2)
    monkeypatch.setattr(prefix, "prefix_config", lambda *_: config)
    apart = decode.DecodeConfig(32, 2, 2, programs_per_sm=3, merge_apart=True)
    monkeypatch.setattr(decode, "decode_config", lambda num_seqs, *_: apart._replace(merge_apart=num_seqs % 2 == 0))


GROUPS = [[(9, 640)], [(2, 512), (1, 128), (5, 256)], *at_night([(3, 1024), (4, 128)])]
AT_SIZE = [([(200, 512)], []), ([(24, 512)] * 8, []), ([(16, 8192)], [300] * 20),
           ([(i, 256) for i in range(8, 20)], [7])]  # fmt: skip
TWO, TWO_OWN = [(70, 1024), (9, 2048)], [100, 900]
CASES = [  # with splits in ``small_tiles``
    *(call(check_shared, [(size, SHARED_TOKENS)], [5, 0, 70], 4, 1, 32, 16, FP32)
      for size in (2, 31, *at_night(1, 7, 70))),
    *(call(check_shared, [(5, SHARED_TOKENS)], [20], 2 * group, 2, 32, 64, FP32)
      for group in (1, 3, 8, *at_night(2, 4, 7, 16))),
    *(call(check_shared, [(3, 2 * SHARED_TOKENS)], [1, 90], 4, 1, D, 64, dtype)
      for D, dtype in each_once((64, 80, 128, 512), TYPES)),
    # one group and several, of different lengths; tiles with one split beside others with many; counters are reset
    *(call(check_shared, groups, [0, 33, 100], 4, 1, 32, n, FP32, launches=2, splits={})
      for groups, n in each_once(GROUPS, (16, 128))),
    # a prefix counts no sink; the sequence does, once, whether its own tokens are one split or several
    *(call(check_shared, [(2, 512), (3, 128)], [0, 33, 100], 6, 2, 32, 16, FP32, **scores, splits={})
      for scores in SCORES),
    call(check_shared, [], [40, 3, 0], 4, 2, 32, 16, FP32),  # as a graph's launch may be: decode is plain
    # on a GPU
    *(call(check_shared, *groups, 16, 8, 128, 256, dtype, spare=20, launches=3, gpu=True)
      for groups in AT_SIZE for dtype in (BF16, FP16, FP32)),
    *(call(check_shared, TWO, TWO_OWN, 4 * group, 4, D, 256, BF16, launches=3, gpu=True)
      for group in (1, 2, 4, 7, 8, 16) for D in (64, 128, 256, 512)),
    *(call(check_shared, TWO, TWO_OWN, *heads, 256, BF16, 2, 3, sinks, softcap, gpu=True)
      for *heads, sinks, softcap in OTHER_SCORES),
]  # fmt: skip


@pytest.mark.parametrize("check, args, options, splits", CASES)
def test_kernels(request, check, args, options, splits):
    if splits is not None:
        request.getfixturevalue("small_tiles")
    check(*args, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_in_a_cuda_graph_that_follows_new_groups(pdl, monkeypatch):
    """A graph captured without groups is replayed with some, with others, and with none."""
    monkeypatch.undo()  # poisoning would come between the kernels that overlap
    cache, groups = shared_cache([(20, 1024), (9, 512)], [300, 64], 8, 128, 256, torch.bfloat16, spare=4)
    source = cache.queries(31, 16, 8)
    q, full = source.clone(), [column.clone() for column in groups]
    args = cache.decode_args(q)
    for column in groups:
        column.zero_()
    decode.paged_decode_attention(*args, groups=groups)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if pdl:  # the previous kernel, with which these overlap, writes q
            q.copy_(source)
        result = decode.paged_decode_attention(*args, pdl=pdl, groups=groups)
    expected = oracle(reference.paged_decode_attention, source, *args[1:])
    for num_kept in (2, 1, 0, 2):
        for column, values in zip(groups, full, strict=True):
            column.copy_(values)
        gone = groups.members[[0, 20, 29][num_kept] : 29].long()
        groups.shared_lens[gone] = groups.sizes[num_kept:] = 0
        result.fill_(torch.nan)
        if pdl:
            q.fill_(torch.nan)
        graph.replay()
        check(cache, result, expected)
    assert launch.zero_counters(1, q.device).count_nonzero() == 0


@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize("gqa_group", [1, 4])
def test_fp8_cache(gqa_group, dtype):
    """Keys' scales in the scores, values' at the end: of what the prefix left as of a sequence's own tokens."""
    cache, groups = shared_cache([(9, 2 * SHARED_TOKENS), (3, SHARED_TOKENS)], [5, 0, 70], 2, 32, 64, dtype, spare=1)
    q = cache.queries(len(cache.context_lens), 2 * gqa_group, 2)
    kv_scale = torch.tensor([[0.5, 2.0], [0.25, 4.0]], device=DEVICE)
    k, v = cache.k.to(torch.float8_e4m3fn), cache.v.to(torch.float8_e4m3fn)
    _, _, _, *rest = cache.decode_args(q)
    wide = ((x.float() * scale[:, None]).to(dtype) for x, scale in zip((k, v), kv_scale, strict=True))
    expected = oracle(reference.paged_decode_attention, q, *wide, *rest)
    actual = decode.paged_decode_attention(q, k, v, *rest, kv_scale=kv_scale, groups=groups)
    check(cache, actual, expected)
    plain = decode.paged_decode_attention(q, k, v, *rest, kv_scale=kv_scale)
    torch.testing.assert_close(actual, plain, **TOLERANCE[dtype])

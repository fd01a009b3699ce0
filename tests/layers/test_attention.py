"""The attention layer, its context and the choice of a backend."""

import pytest
import torch
from helpers import refuses

from nanovllm import ConfigError, kernels
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backends import select_backend
from nanovllm.layers.context import Context


@pytest.mark.parametrize(("args", "options", "text"), [
    *(((name, "cpu", torch.float32), {},
       f"attention_backend={name!r} needs a CUDA device; on the CPU use 'auto' or 'sdpa'.")
      for name in ("triton", "flash_attn")),
    (("triton", "cuda", torch.bfloat16, 32), {},
     "the model has 32 query heads for each KV head, and the kernels take at most 16."),
    # padded to 1,024, their tiles do not fit into shared memory: users saw Triton's OutOfResources at start
    *(((name, "cuda", torch.bfloat16), {"head_dim": size},
       f"attention_backend={name!r}: the model has heads of {size}, and the kernels take at most {most}. Use")
      for name, size, most in (("triton", 576, 512), ("flash_attn", 288, 256))),
    (("flash_attn", "cuda", torch.float32), {},
     "attention_backend='flash_attn' needs dtype bfloat16 or float16, not float32."),
    (("flash_attn", "cuda", torch.bfloat16), {"has_sinks": True},
     "attention_backend='flash_attn': the model has attention sinks, which flash-attn 2 does not know."),
])  # fmt: skip
def test_backends_that_are_refused(args, options, text):
    with refuses(text, ConfigError):
        select_backend(*args, **options)


@pytest.mark.parametrize("args, options", [
    (("auto", "cpu", torch.float32), {}), (("sdpa", "cpu", torch.float32), {}), (("sdpa", "cuda", torch.float32), {}),
    (("auto", "cuda", torch.bfloat16, 32), {}), (("auto", "cuda", torch.bfloat16), {"head_dim": 576}),
])  # fmt: skip
def test_references_are_the_backend_without_kernels(args, options):
    backend = select_backend(*args, **options)
    assert backend.ops is kernels.select("cpu") and not backend.capturable and not backend.captures_prefill


@pytest.mark.parametrize("head_dim", [256, 288, 512])
def test_kernels_are_the_backend_of_wide_heads(head_dim):
    pytest.importorskip("triton")
    for name in ("auto", "triton"):
        backend = select_backend(name, "cuda", torch.bfloat16, 8, head_dim)
        assert backend.ops is kernels.select("cuda") and backend.capturable and backend.captures_prefill


BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 6, 2, 8
NEW, CONTEXTS = [20, 3, 1], [20, 40, 17]  # a whole prompt, a chunk, one token


@pytest.fixture
def layer():
    """One layer over a filled cache."""
    attention = Attention(NUM_HEADS, HEAD_DIM, NUM_KV_HEADS, select_backend("auto", "cpu", torch.float32))
    attention.k_cache, attention.v_cache = torch.randn(2, 8, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return attention


@pytest.fixture
def prefill():
    """A prefill of which the first two sequences are sampled."""
    cu_seqlens_q, cu_seqlens_k = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (NEW, CONTEXTS))
    zeros = torch.zeros(sum(NEW), dtype=torch.int32)
    return Context(
        positions=zeros, slot_mapping=zeros, req_indices=torch.tensor([2, 0, 3], dtype=torch.int32),
        context_lens=torch.tensor(CONTEXTS, dtype=torch.int32),
        block_tables=torch.tensor([[4, 1, 7], [9, 9, 9], [3, 0, 9], [2, 5, 9]], dtype=torch.int32),
        max_context=max(CONTEXTS), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max(NEW),
        logits_indices=cu_seqlens_q[1:3].long() - 1,
    )  # fmt: skip


def test_last_tokens_only_is_the_end_of_the_prefill(layer, prefill):
    q = torch.randn(sum(NEW), NUM_HEADS, HEAD_DIM)
    every = layer(q, prefill)
    assert every.shape == (sum(NEW), NUM_HEADS * HEAD_DIM)
    last = prefill.last_tokens_only()
    assert prefill.is_prefill and not last.is_prefill
    torch.testing.assert_close(layer(q[prefill.logits_indices], last), every[prefill.logits_indices])


def test_tokens_as_single_query_sequences_are_the_prefill(layer, prefill):
    """The batch of a short prefill under a CUDA graph: a sequence per token, whose context ends with it."""
    q = torch.randn(sum(NEW), NUM_HEADS, HEAD_DIM)
    context_lens = torch.cat([torch.arange(c - n, c) + 1 for n, c in zip(NEW, CONTEXTS, strict=True)]).int()
    by_token = Context(
        positions=context_lens - 1, slot_mapping=prefill.slot_mapping, context_lens=context_lens,
        req_indices=prefill.req_indices.repeat_interleave(torch.tensor(NEW)), block_tables=prefill.block_tables,
        max_context=prefill.max_context,
    )  # fmt: skip
    torch.testing.assert_close(layer(q, by_token), layer(q, prefill))


def test_without_tokens_or_a_cache(layer, prefill):
    """A prefill that samples nothing; memory profiling, before the cache is allocated."""
    q = torch.randn(sum(NEW), NUM_HEADS, HEAD_DIM)
    assert layer(q[:0], prefill).shape == (0, NUM_HEADS * HEAD_DIM)
    layer.k_cache = layer.v_cache = torch.empty(0)
    assert layer(q, prefill).shape == (sum(NEW), NUM_HEADS * HEAD_DIM)

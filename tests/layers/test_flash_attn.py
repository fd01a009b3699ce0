"""The flash-attn backend, on a stand-in for the package: it is rarely installed where tests run."""

import sys
from types import ModuleType

import families
import pytest
import torch
from families import check_greedy, chosen
from helpers import Reference, generate, greedy, prompt_of

from nanovllm.errors import ConfigError
from nanovllm.layers.attention_backends import FlashAttentionBackend
from nanovllm.runner import parts
from nanovllm.runner.start import compile_kernels

ODD_SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 517,
}  # fmt: skip


def flash_attn_stand_in():
    """The two functions of flash-attn that are called, as its documentation describes them, in plain torch."""

    def attend(q, k, v, scale, window_size, softcap):
        """Causal, aligned at the end: q [M, H, D], k and v [L, K, D]; zeros where L is 0."""
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        allowed = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        if window_size[0] >= 0:
            allowed = allowed.triu(len(k) - len(q) - window_size[0])
        scores = torch.einsum("mhd,lhd->hml", q, k).mul(scale)
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        scores = scores.masked_fill(~allowed, -torch.inf)
        return torch.einsum("hml,lhd->mhd", scores.softmax(-1).nan_to_num(), v)

    def gather(cache, block_table, length):
        block_size = cache.shape[1]
        assert block_table.dtype == torch.int32 and block_size % 256 == 0 and length <= len(block_table) * block_size
        return cache[block_table[: -(-length // block_size)].long()].flatten(0, 1)[:length]

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale,
                               causal, window_size=(-1, -1), softcap=0.0, block_table=None):  # fmt: skip
        assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        out = torch.full_like(q, torch.nan)
        for i, length in enumerate(cu_seqlens_k.diff().tolist()):
            queries, keys = slice(*cu_seqlens_q[i : i + 2].tolist()), slice(*cu_seqlens_k[i : i + 2].tolist())
            assert queries.stop - queries.start <= max_seqlen_q and length <= max_seqlen_k
            context = (x[keys] if block_table is None else gather(x, block_table[i], length) for x in (k, v))
            out[queries] = attend(q[queries], *context, softmax_scale, window_size, softcap)
        return out

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal,
                                window_size=(-1, -1), softcap=0.0):  # fmt: skip
        assert causal and cache_seqlens.dtype == torch.int32 and q.shape[1] == 1
        return torch.stack([
            attend(q[i], gather(k_cache, table, length), gather(v_cache, table, length), softmax_scale, window_size,
                   softcap)
            for i, (table, length) in enumerate(zip(block_table, cache_seqlens.tolist(), strict=True))
        ])  # fmt: skip

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


@pytest.fixture
def flash_attn(monkeypatch):
    """Every engine of the test attends with the stand-in."""
    with monkeypatch.context() as patch:  # transformers looks for the package, too
        patch.setitem(sys.modules, "flash_attn", flash_attn_stand_in())
        backend = FlashAttentionBackend()
    monkeypatch.setattr(parts, "select_backend", lambda *_: backend)


@pytest.mark.usefixtures("flash_attn")
def test_against_transformers(make_checkpoint, make_llm):
    path = make_checkpoint(**ODD_SIZES)
    prompts = [prompt_of(length) for length in (1, 17, 100, 300)]  # chunks, two blocks
    prompts.append(prompts[-1])  # and a prefix hit
    check_greedy(make_llm(model=path, kvcache_block_size=256), Reference(path).model, prompts, 16, tolerance=3e-5)


@pytest.mark.usefixtures("flash_attn")
def test_windows_and_a_soft_cap(tmp_path, make_llm):
    model, prompts = families.make(tmp_path, "gemma2"), [list(range(2, 19)), list(range(100, 60, -1))]
    options = {"model": str(tmp_path), "max_model_len": 256, "kvcache_block_size": 256, "num_kvcache_blocks": 8}
    completions = generate(make_llm(**options), prompts, greedy(8))
    assert completions == chosen(model, prompts, completions)


@pytest.mark.usefixtures("flash_attn")
def test_warmup_within_the_block_tables(make_llm):
    """Compiling launches none of our kernels, but flash-attn runs: its contexts must fit the block tables."""
    llm = make_llm(kvcache_block_size=256, max_model_len=512, max_num_batched_tokens=2048)
    with torch.inference_mode():
        compile_kernels(llm.model_runner)


@pytest.mark.gpu
def test_without_the_package(make_llm):
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install '\.\[flash-attn\]' in the checkout"):
            make_llm(device="cuda", dtype="bfloat16", attention_backend="flash_attn", kvcache_block_size=256)
    else:
        pytest.skip("flash-attn is installed")

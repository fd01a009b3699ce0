"""The engine's logits and greedy tokens against Hugging Face's Qwen3, on random models of every shape.

The oracle is one plain forward pass over prompt and completion. (``generate`` would guess an attention
mask for prompts that hold the padding id.) The engine gets there by chunked prefill, pages of 16 tokens,
batches and one decode step per token.

Tolerances, on logits with a standard deviation (std) of about 0.8:

    fp32           1e-4 absolute, on the CPU and on a GPU (with TF32 off, as torch has it by default)
    bf16           error against the fp32 logits at most 1.25 times that of Hugging Face's own bf16 forward
                   (root mean square over all logits), and every logit within 0.1 std + 0.05 |logit|
                   of Hugging Face's bf16 one, roundings in another order being the only difference;
                   the same on the CPU and on a GPU for each backend: triton, sdpa, flash_attn
"""

import random
import sys
from types import ModuleType

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine import model_runner
from nanovllm.errors import ConfigError
from nanovllm.layers.attention import FlashAttentionBackend

NUM_DECODED = 31  # the first comes out of the prefill, 30 out of decode steps
LENGTHS = (1, 5, 16, 17, 33, 100)  # one token, a block's edge, more than one chunk of 64

SHAPES = {
    "1-layer-tied-group1": {
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "2-layers-untied-group2": {},  # the fixture's model: head_dim 32 where hidden / heads is 16
    "3-layers-bias-group4": {
        "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 16, "attention_bias": True,
    },
    "4-layers-tied-bias-group8": {
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64,
        "tie_word_embeddings": True, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "2-layers-group3-odd-sizes": {
        "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 403, "rms_norm_eps": 1e-3,
    },
    "yarn": {
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                            "rope_theta": 10_000.0},
    },
    "linear": {
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10_000.0},
    },
}  # fmt: skip


def make_prompts(vocab_size=400, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]


_references = {}


def hf_logits(path, token_ids, dtype=torch.float32, device="cpu"):
    """Hugging Face's logits after each of ``token_ids``: fp32 [len(token_ids), V] on the CPU."""
    from transformers import Qwen3ForCausalLM

    key = path, dtype, device
    if key not in _references:
        _references.clear()  # one model at a time
        _references[key] = Qwen3ForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    with torch.inference_mode():
        return _references[key](torch.tensor([token_ids], device=device)).logits[0].float().cpu()


def generate_with_logits(llm, prompts, max_tokens=NUM_DECODED):
    """Greedy completions, and for each prompt the logits its tokens were chosen from, fp32 [max_tokens, V].

    The rows of the engine's table tell whose logits they are: with room for all prompts at once, row i
    is prompt i. The hook needs a step that runs from Python, so not a CUDA graph.
    """
    assert llm.config.max_num_seqs >= len(prompts) and llm.model_runner.graphs is None
    logits_at = {}

    def record(_, inputs):
        logits, rows, columns = inputs[0].float().cpu(), inputs[1].cpu(), inputs[2]
        lengths = columns.length.cpu()
        for i, row in enumerate(rows.tolist()):
            logits_at[row, int(lengths[row])] = logits[i].clone()

    hook = llm.model_runner.sampler.register_forward_pre_hook(record)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    hook.remove()
    completions = [output["token_ids"] for output in outputs]
    assert len(logits_at) == len(prompts) * max_tokens
    return completions, [
        torch.stack([logits_at[i, len(prompt) + n] for n in range(max_tokens)])
        for i, prompt in enumerate(prompts)
    ]


def reference_for(path, prompt, completion, **options):
    """Hugging Face's logits before each token of ``completion``, [len(completion), V]."""
    return hf_logits(path, prompt + completion[:-1], **options)[len(prompt) - 1 :]


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_on_the_cpu(shape, make_checkpoint, make_llm):
    path = make_checkpoint(**SHAPES[shape])
    options = {"max_model_len": 256} if "max_position_embeddings" in SHAPES[shape] else {}
    prompts = make_prompts()
    completions, logits = generate_with_logits(make_llm(model=path, **options), prompts)
    if not SHAPES[shape].get("attention_bias"):
        assert len({token for completion in completions for token in completion}) > 10, (
            "too dull to show anything"
        )
    for prompt, completion, got in zip(prompts, completions, logits, strict=True):
        want = reference_for(path, prompt, completion)
        assert (got - want).abs().max() < 1e-4
        assert want.argmax(-1).tolist() == completion


def check_bf16(path, prompts, completions, logits, device):
    exact = [reference_for(path, p, c) for p, c in zip(prompts, completions, strict=True)]
    rounded = [
        reference_for(path, p, c, dtype=torch.bfloat16, device=device)
        for p, c in zip(prompts, completions, strict=True)
    ]
    exact, rounded, got = torch.cat(exact), torch.cat(rounded), torch.cat(logits)
    std = exact.std()
    assert (got - exact).square().mean().sqrt() < 1.25 * (rounded - exact).square().mean().sqrt()
    assert ((got - rounded).abs() < 0.1 * std + 0.05 * rounded.abs()).all()


BF16_SHAPES = ("2-layers-untied-group2", "4-layers-tied-bias-group8")


@pytest.mark.parametrize("shape", BF16_SHAPES)
def test_bf16_on_the_cpu(shape, make_checkpoint, make_llm):
    path, prompts = make_checkpoint(**SHAPES[shape]), make_prompts()
    llm = make_llm(model=path, dtype="bfloat16")
    check_bf16(path, prompts, *generate_with_logits(llm, prompts), device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("triton", "sdpa"))
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_on_the_gpu(shape, backend, make_checkpoint, make_llm):
    path, prompts = make_checkpoint(**SHAPES[shape]), make_prompts()
    llm = make_llm(model=path, device="cuda", dtype="float32", attention_backend=backend, enforce_eager=True,
                   max_model_len=256, num_kvcache_blocks=200)  # fmt: skip
    completions, logits = generate_with_logits(llm, prompts)
    for prompt, completion, got in zip(prompts, completions, logits, strict=True):
        want = reference_for(path, prompt, completion)
        assert (got - want).abs().max() < 1e-4
        assert want.argmax(-1).tolist() == completion


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("triton", "sdpa", "flash_attn"))
@pytest.mark.parametrize("shape", BF16_SHAPES)
def test_bf16_on_the_gpu(shape, backend, make_checkpoint, make_llm):
    if backend == "flash_attn":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    path, prompts = make_checkpoint(**SHAPES[shape]), make_prompts()
    llm = make_llm(model=path, device="cuda", dtype="bfloat16", attention_backend=backend, enforce_eager=True,
                   max_model_len=256, kvcache_block_size=256, num_kvcache_blocks=20)  # fmt: skip
    check_bf16(path, prompts, *generate_with_logits(llm, prompts), device="cuda")


def stand_in_for_flash_attn():
    """The two functions of flash-attn that are used, as its documentation describes them, in plain torch."""

    def attend(q, k, v, scale):
        """Causal, aligned at the end: q [M, H, D], k and v [L, K, D]; nothing is attended where L is 0."""
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        allowed = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = torch.einsum("mhd,lhd->hml", q, k).mul(scale).masked_fill(~allowed, -torch.inf)
        return torch.einsum("hml,lhd->mhd", scores.softmax(-1).nan_to_num(), v)

    def pages(cache, table, length):
        assert table.dtype == torch.int32 and cache.shape[1] % 256 == 0 and length <= len(table) * cache.shape[1]
        return cache[table[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale,
                               causal, block_table=None):  # fmt: skip
        assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        out = torch.full_like(q, torch.nan)
        for i, length in enumerate(cu_seqlens_k.diff().tolist()):
            new, old = slice(*cu_seqlens_q[i : i + 2].tolist()), slice(*cu_seqlens_k[i : i + 2].tolist())
            assert new.stop - new.start <= max_seqlen_q and length <= max_seqlen_k
            keys, values = (x[old] if block_table is None else pages(x, block_table[i], length) for x in (k, v))
            out[new] = attend(q[new], keys, values, softmax_scale)
        return out

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal):
        assert causal and cache_seqlens.dtype == torch.int32 and q.shape[1] == 1
        lengths = cache_seqlens.tolist()
        return torch.stack([
            attend(q[i], pages(k_cache, table, lengths[i]), pages(v_cache, table, lengths[i]), softmax_scale)
            for i, table in enumerate(block_table)
        ])  # fmt: skip

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def test_flash_attn_gets_what_it_is_documented_to_take(make_checkpoint, make_llm, monkeypatch):
    """The package is rarely installed where tests run, and its backend was then wired up unseen."""
    with monkeypatch.context() as patch:  # transformers, too, looks for the package
        patch.setitem(sys.modules, "flash_attn", stand_in_for_flash_attn())
        backend = FlashAttentionBackend()
    monkeypatch.setattr(model_runner, "select_backend", lambda *_: backend)
    path = make_checkpoint(**SHAPES["2-layers-group3-odd-sizes"])
    prompts = make_prompts() + [[5, 6, 7] * 100] * 2  # in chunks, over two blocks; and a twin with a hit
    completions, logits = generate_with_logits(make_llm(model=path, kvcache_block_size=256), prompts)
    for prompt, completion, got in zip(prompts, completions, logits, strict=True):
        want = reference_for(path, prompt, completion)
        assert (got - want).abs().max() < 1e-4
        assert want.argmax(-1).tolist() == completion
    # The rehearsal at a start on a GPU holds back our kernels, but not flash-attn: its contexts must fit the tables.
    llm = make_llm(model=path, kvcache_block_size=256, max_model_len=512, max_num_batched_tokens=2048)
    with torch.inference_mode():
        llm.model_runner.compile_kernels()


@pytest.mark.gpu
def test_flash_attn_without_the_package_is_a_clear_error(make_llm):
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'nanovllm\[flash-attn\]'"):
            make_llm(device="cuda", dtype="bfloat16", attention_backend="flash_attn", kvcache_block_size=256)
    else:
        pytest.skip("flash-attn is installed")

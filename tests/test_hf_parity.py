"""The engine's logits and greedy tokens against Hugging Face's Qwen3, on random models of every shape.

The oracle is one plain forward pass over prompt and completion. (``generate`` would guess an attention
mask for prompts that hold the padding id.) The engine gets there by chunked prefill, pages of 16 tokens,
batches and one decode step per token.

Tolerances, on logits with a standard deviation (std) of about 0.8:

    fp32, CPU      1e-4 absolute
    fp32, GPU      1e-3 absolute
    bf16           error against the fp32 logits at most 1.25 times that of Hugging Face's own bf16 forward
                   (root mean square over all logits), and every logit within 0.1 std + 0.05 |logit|
                   of Hugging Face's bf16 one, roundings in another order being the only difference
"""

import random

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.errors import ConfigError

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
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "linear"])
def test_fp32_on_the_gpu(shape, backend, make_checkpoint, make_llm):
    path, prompts = make_checkpoint(**SHAPES[shape]), make_prompts()
    llm = make_llm(model=path, device="cuda", dtype="float32", attention_backend=backend, enforce_eager=True,
                   max_model_len=256, num_kvcache_blocks=200)  # fmt: skip
    completions, logits = generate_with_logits(llm, prompts)
    for prompt, completion, got in zip(prompts, completions, logits, strict=True):
        want = reference_for(path, prompt, completion)
        assert (got - want).abs().max() < 1e-3
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


@pytest.mark.gpu
def test_flash_attn_without_the_package_is_a_clear_error(make_llm):
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'nanovllm\[flash-attn\]'"):
            make_llm(device="cuda", dtype="bfloat16", attention_backend="flash_attn", kvcache_block_size=256)
    else:
        pytest.skip("flash-attn is installed")

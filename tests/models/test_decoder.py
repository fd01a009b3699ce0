"""Logits and greedy tokens against transformers' Qwen3, on random models of every supported shape.

The oracle is one forward pass over prompt and completion. The engine gets there by chunked prefill, blocks of 16
tokens, batches, and one decode step per token. Logits have a standard deviation (std) of about 0.8. Tolerances:

    fp32    3e-5 of the largest logit, on the CPU and on a GPU (TF32 off, torch's default)
    bf16    RMS error against the fp32 logits at most 1.25 times that of transformers' own bf16 forward pass, and every
            logit within 0.1 std + 0.05 |logit| of transformers' bf16 one: only the order of roundings differs
"""

import random
from dataclasses import replace

import pytest
import torch
from families import check_greedy, in_16_bits
from helpers import Reference, gpu_param
from torch import nn

from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.layers.context import Context
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.models import decoder, kinds
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.loader import init_dummy_weights

TOLERANCE, NUM_DECODED = 3e-5, 31  # the first by the prefill, 30 by decode steps
LENGTHS = (1, 5, 16, 17, 33, 100)  # one token, a block's boundary, more than one chunk of 64

SHAPES = {
    "1-layer-tied-gqa1": {
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "2-layers-untied-gqa2": {},  # TINY: head_dim is not hidden_size / num_attention_heads
    "3-layers-bias-gqa4": {
        "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 16, "attention_bias": True,
    },
    "4-layers-tied-bias-gqa8": {
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64,
        "tie_word_embeddings": True, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "2-layers-gqa3-odd-sizes": {
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
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(400) for _ in range(length)] for length in LENGTHS]


def check_fp32(llm, path):
    return check_greedy(llm, Reference(path).model, PROMPTS, NUM_DECODED, TOLERANCE)


def check_bf16(llm, path, device):
    models = Reference(path).model, Reference(path, torch.bfloat16, device).model
    got, rounded, exact = in_16_bits(llm, *models, PROMPTS, NUM_DECODED)
    assert (got - exact).square().mean().sqrt() < 1.25 * (rounded - exact).square().mean().sqrt()
    assert ((got - rounded).abs() < 0.1 * exact.std() + 0.05 * rounded.abs()).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_on_the_cpu(shape, make_checkpoint, make_llm):
    path = make_checkpoint(**SHAPES[shape])
    completions = check_fp32(make_llm(model=path, max_model_len=256), path)
    if not SHAPES[shape].get("attention_bias"):  # with biases the model repeats itself
        assert len({token for completion in completions for token in completion}) > 10


class Shift(nn.Module):
    """A mixer by which each token sees the one before it."""

    name = "shift_attn"

    def __init__(self, config, layer, rope, backend, tp):
        super().__init__()
        self.in_proj = ReplicatedLinear(config.hidden_size, config.hidden_size)

    def forward(self, residual, norm, context):
        return residual + self.in_proj(residual, norm).roll(1, 0)


@torch.inference_mode()
def test_a_mixer_for_each_kind_of_layer(make_checkpoint, monkeypatch):
    """A layer of another kind needs a mixer in the table, and a name in checkpoints; nothing else knows it."""
    monkeypatch.setitem(kinds.MIXERS, "shift", f"{__name__}.Shift")
    config = read_model_config(make_checkpoint())
    layers = tuple(replace(layer, mixer="shift") for layer in config.layers)
    model = decoder.CausalLM(replace(config, layers=layers), None, SINGLE_RANK)
    init_dummy_weights(model, 0)
    assert dict(model.named_parameters()).keys() >= {f"model.layers.{i}.shift_attn.in_proj.weight" for i in range(2)}
    ids = torch.arange(5, dtype=torch.int32)
    context = Context(ids, ids, ids[:1], ids[:1], ids[None], 5)
    x = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        x = x + layer.shift_attn.in_proj(layer.input_layernorm(x)).roll(1, 0)
        x = layer.mlp(x, layer.post_attention_layernorm, context)
    torch.testing.assert_close(model(ids, context), model.model.norm(x))


BF16_SHAPES = ("2-layers-untied-gqa2", "4-layers-tied-bias-gqa8")


@pytest.mark.parametrize("shape", BF16_SHAPES)
def test_bf16_on_the_cpu(shape, make_checkpoint, make_llm):
    path = make_checkpoint(**SHAPES[shape])
    check_bf16(make_llm(model=path, dtype="bfloat16"), path, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("triton", "sdpa"))
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_on_the_gpu(shape, backend, make_checkpoint, make_llm):
    path = make_checkpoint(**SHAPES[shape])
    llm = make_llm(model=path, device="cuda", dtype="float32", attention_backend=backend, enforce_eager=True,
                   max_model_len=256, num_kvcache_blocks=200)  # fmt: skip
    check_fp32(llm, path)


@pytest.mark.parametrize("backend", [gpu_param(name) for name in ("triton", "sdpa", "flash_attn")])
@pytest.mark.parametrize("shape", BF16_SHAPES)
def test_bf16_on_the_gpu(shape, backend, make_checkpoint, make_llm):
    if backend == "flash_attn":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    path = make_checkpoint(**SHAPES[shape])
    llm = make_llm(model=path, device="cuda", dtype="bfloat16", attention_backend=backend, enforce_eager=True,
                   max_model_len=256, kvcache_block_size=256, num_kvcache_blocks=20)  # fmt: skip
    check_bf16(llm, path, "cuda")

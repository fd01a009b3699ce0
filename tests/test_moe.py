"""Mixtures of experts against transformers: the layer alone, then whole models on the CPU.

Random weights, fp32. transformers sums up experts in another order, so logits differ by some 1e-7 of their size.
"""

import copy
import importlib
import json
import shutil
from functools import cache
from types import SimpleNamespace

import families
import pytest
import torch
from helpers import generate, generate_with_logits, gpu_param, greedy, prompt_of, tokens_of, use_graphs_on_cpu
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.errors import CheckpointError
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.weight_loader import CheckpointTensor
from nanovllm.models import MODELS
from nanovllm.models.config import LayerConfig, MoEConfig
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import init_dummy_weights, load_model
from nanovllm.models.moe import SparseMoE

E, C = 8, 32
FIELDS = {"hidden_size": C, "num_attention_heads": 2, "num_key_value_heads": 1}
NAMED = {"num_experts": E, "num_experts_per_tok": 3}
# family -> (transformers' block, config, fields of it, our MoEConfig, our Family)
BLOCKS = {
    "qwen3_moe": (
        "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", {**NAMED, "moe_intermediate_size": 16, "norm_topk_prob": True},
        MoEConfig(E, 3, 16), MODELS["Qwen3MoeForCausalLM"],
    ),
    "mixtral": (
        "MixtralSparseMoeBlock", "MixtralConfig",
        {"num_local_experts": E, "num_experts_per_tok": 2, "intermediate_size": 24}, MoEConfig(E, 2, 24),
        MODELS["MixtralForCausalLM"],
    ),
    "olmoe": (
        "OlmoeSparseMoeBlock", "OlmoeConfig", {**NAMED, "intermediate_size": 20},
        MoEConfig(E, 3, 20, renormalize=False), MODELS["OlmoeForCausalLM"],
    ),
    "qwen2_moe": (
        "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig",
        {**NAMED, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 28},
        MoEConfig(E, 3, 16, renormalize=False, shared_size=28), MODELS["Qwen2MoeForCausalLM"],
    ),
    "glm4_moe": (
        "Glm4MoeMoE", "Glm4MoeConfig",
        {"n_routed_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2,
         "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.7},
        MoEConfig(E, 2, 16, routed_scale=1.7, num_groups=4, top_groups=2, shared_size=32), MODELS["Glm4MoeForCausalLM"],
    ),
}  # fmt: skip


def load(param, tensor, shard_id=None):
    param.weight_loader(param, CheckpointTensor.of("some.tensor", tensor), shard_id)


def hf_block(family, dtype=torch.float32):
    block_name, config_name, fields, moe, _ = BLOCKS[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(importlib.import_module("transformers"), config_name)(**FIELDS, **fields)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block = getattr(module, block_name)(config)
    for name, tensor in block.state_dict().items():
        nn.init.normal_(tensor, std=0.1 if "bias" in name else 0.3)
    return block.to(dtype).eval(), moe


def our_layer(family, block, merged=True, tp=TPGroup()):
    """The layer with the block's weights, loaded as the loader would: gate and up of an expert at once, or one by one.
    """
    (*_, moe, row), dtype = BLOCKS[family], block.experts.down_proj.dtype
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, dtype=dtype: torch.full(shape, torch.nan, dtype=dtype))
        config = SimpleNamespace(hidden_size=C, act="silu", moe=moe, family=row, fp8_block=lambda *_: None,
                                 mlp_bias=False, residual_scale=1.0, quant_method=None)  # fmt: skip
        layer = SparseMoE(config, LayerConfig(), tp)
    weights = {name.replace("shared_experts", "shared_expert"): t for name, t in block.state_dict().items()}
    for name, param in layer.named_parameters():
        if name == "experts.gate_up_proj":
            for e, both in enumerate(weights[name]):
                for i, part in [(None, both)] if merged else enumerate(both.chunk(2)):
                    load(param, part, (e, i))
        elif name == "experts.down_proj":
            for e, down in enumerate(weights[name]):
                load(param, down, (e, None))
        elif name == "shared_expert.gate_up_proj.weight":
            for i, part in enumerate(("gate_proj", "up_proj")):
                load(param, weights[f"shared_expert.{part}.weight"], i)
        elif hasattr(param, "weight_loader"):
            load(param, weights[name])
        else:
            param.copy_(weights[name])
    assert not any(param.isnan().any() for param in layer.parameters())
    return layer


def problem(num_tokens, dtype=torch.float32):
    norm = RMSNorm(C)
    norm.weight.data.normal_(1.0, 0.3)
    slot_mapping = torch.arange(num_tokens, dtype=torch.int32)
    context = SimpleNamespace(slot_mapping=slot_mapping, logits_indices=None)
    return torch.randn(num_tokens, C).to(dtype), norm.to(dtype), context


def relative_error(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("num_tokens", [1, 9, 100])
@pytest.mark.parametrize("family", BLOCKS)
@torch.inference_mode()
def test_layer(family, num_tokens):
    block, _ = hf_block(family)
    residual, norm, context = problem(num_tokens)
    want = block(norm(residual)[None])[0]
    for merged in (True, False):
        got = our_layer(family, block, merged)(residual.clone(), norm, context)
        assert relative_error(got - residual, want) < 2e-6


@pytest.mark.parametrize("family", BLOCKS)
@torch.inference_mode()
def test_layer_in_bf16(family):
    """Rounded where transformers rounds, or less often."""
    block, _ = hf_block(family, torch.bfloat16)
    layer = our_layer(family, block)
    residual, norm, context = problem(200, torch.bfloat16)
    if family == "glm4_moe":
        assert layer.gate.e_score_correction_bias.dtype == torch.float32
    rounded = block(norm(residual)[None])[0].float()
    difference = layer(residual, norm, context).float() - residual.float() - rounded
    assert difference.square().mean().sqrt() < 0.02 * rounded.std()


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("size", [2, 4])
@torch.inference_mode()
def test_ranks_add_up(family, size):
    """Each rank computes its part of every expert; the residual, which may be overwritten, is in rank 0's only."""
    block, _ = hf_block(family)
    residual, norm, context = problem(21)
    want = residual + block(norm(residual)[None])[0]
    for merged in (True, False):
        partial_sums = [
            our_layer(family, block, merged, TPGroup(rank, size))(residual.clone(), norm, context)
            for rank in range(size)
        ]  # fmt: skip
        assert relative_error(sum(partial_sums), want) < 2e-6


@torch.inference_mode()
def test_padding_and_the_last_layer_of_a_prefill():
    block, _ = hf_block("mixtral")
    layer, (residual, norm, context) = our_layer("mixtral", block), problem(6)
    whole = layer(residual, norm, context)
    context.slot_mapping = torch.tensor([3, -1, 4, 5, -1, 6], dtype=torch.int32)
    padded = layer(residual, norm, context)
    assert torch.equal(padded[[1, 4]], residual[[1, 4]])
    torch.testing.assert_close(padded[[0, 2, 3, 5]], whole[[0, 2, 3, 5]])
    context.logits_indices = torch.tensor([2, 5])
    torch.testing.assert_close(layer(residual[[2, 5]], norm, context), whole[[2, 5]])


@torch.inference_mode()
def test_wrong_shapes():
    layer = our_layer("mixtral", hf_block("mixtral")[0])
    gate_up, down = layer.experts.gate_up_proj, layer.experts.down_proj
    for param, shape, shard_id, expected in (
        (gate_up, (24, C), (0, None), [48, C]),
        (gate_up, (48, C), (0, 1), [24, C]),
        (down, (C, 23), (7, None), [C, 24]),
    ):
        with pytest.raises(CheckpointError) as error:
            load(param, torch.zeros(shape), shard_id)
        assert str(error.value) == f"tensor 'some.tensor' has shape {list(shape)}, expected {expected}."


def test_random_weights():
    layer = our_layer("glm4_moe", hf_block("glm4_moe")[0])
    init_dummy_weights(layer, seed=0)
    for param in layer.parameters():
        assert 0 < param.abs().max() < 0.2


# Whole models: the engine on checkpoints that transformers wrote.

MODELS = families.MOE_CASES
PROMPTS = [[token % 128 for token in prompt_of(n)] for n in (1, 5, 33, 100)]
PROMPTS.append(PROMPTS[-1][:80] + PROMPTS[2][:20])  # a prefix that is cached by then
NUM_DECODED = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(case) -> (transformers' model, path of its checkpoint)."""

    @cache
    def make(case):
        path = str(tmp_path_factory.mktemp(case))
        return families.make(path, case), path

    return make


@torch.inference_mode()
def logits_of(model, completions):
    """transformers' logits before each token of the completions."""
    return [
        model(torch.tensor([prompt + completion[:-1]], device=model.device)).logits[0, len(prompt) - 1 :].float().cpu()
        for prompt, completion in zip(PROMPTS, completions, strict=True)
    ]


def check(llm, model):
    """Greedy completions; each token is transformers' best, each logit within 1e-4 of the largest."""
    completions, logits = generate_with_logits(llm, PROMPTS, NUM_DECODED)
    for completion, got, want in zip(completions, logits, logits_of(model, completions), strict=True):
        assert relative_error(got, want[:, : got.shape[1]]) < 1e-4  # of rank 0's part of the vocabulary
        assert want.argmax(-1).tolist() == completion
    assert len({token for completion in completions for token in completion}) > 10
    return completions


@pytest.mark.parametrize("case", MODELS)
def test_model(case, models, make_llm):
    """Chunks of 64 tokens, a cached prefix, and then everything cached; preempted; in padded batches."""
    model, path = models(case)
    llm = make_llm(model=path)
    completions = check(llm, model)
    outputs = llm.generate(PROMPTS, greedy(NUM_DECODED), use_tqdm=False)
    assert tokens_of(outputs) == completions and outputs[-1].num_cached_tokens >= 80
    small = make_llm(model=path, max_model_len=64, num_kvcache_blocks=5)
    assert generate(small, PROMPTS[1:3], greedy(28)) == generate(llm, PROMPTS[1:3], greedy(28))
    assert small.scheduler.num_preemptions > 0
    padded = use_graphs_on_cpu(make_llm(model=path))
    assert generate(padded, PROMPTS, greedy(NUM_DECODED)) == completions


@pytest.mark.parametrize("size", [1, 2])
def test_transposed_experts(size, models, make_llm, tmp_path):
    """As Qwen3-VL-MoE is published; transformers 5 writes the usual order."""
    model, path = models("qwen3-vl-moe")
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    tensors = load_file(f"{path}/model.safetensors")
    swapped = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()}
    save_file(swapped, tmp_path / "model.safetensors", {"format": "pt"})
    check(make_llm(model=str(tmp_path), tensor_parallel_size=size), model)


@pytest.mark.parametrize("case, size", [("qwen3-moe", 2), ("glm4-moe", 4)])
def test_tensor_parallel(case, size, models, make_llm):
    """Without and with a shared expert. The other families' ranks are added up above."""
    model, path = models(case)
    check(make_llm(model=path, tensor_parallel_size=size), model)


@pytest.mark.gpu
@pytest.mark.parametrize("case", MODELS)
def test_model_on_the_gpu(case, models, make_llm):
    """fp32: eager, and then under CUDA graphs, with padding in the batches."""
    model, path = models(case)
    options = {"model": path, "device": "cuda", "dtype": "float32", "num_kvcache_blocks": 200}
    completions = check(make_llm(**options, enforce_eager=True), model)
    assert generate(make_llm(**options), PROMPTS, greedy(NUM_DECODED)) == completions


@pytest.mark.parametrize(
    "case, device", [("qwen3-moe", "cpu"), ("glm4-moe", "cpu"), *(gpu_param(case, "cuda") for case in MODELS)]
)
def test_bf16(case, device, models, make_llm):
    """A token's RMS error against fp32 is that of transformers' own bf16, at the first quartile: rounding changes the
    experts of other tokens, of up to half of them, and then their logits by more. That of gpt-oss depends on the seed:
    0.96 to 1.45 of transformers' with three on the CPU.
    """
    model, path = models(case)
    options = {"num_kvcache_blocks": 200, "enforce_eager": True} if device == "cuda" else {}
    llm = make_llm(model=path, device=device, dtype="bfloat16", **options)
    completions, logits = generate_with_logits(llm, PROMPTS, NUM_DECODED)
    exact, rounded = (
        torch.cat(logits_of(reference, completions))
        for reference in (model, copy.deepcopy(model).to(device, torch.bfloat16))
    )
    got, want = ((x - exact).square().mean(-1).sqrt().quantile(0.25) for x in (torch.cat(logits), rounded))
    assert got < (2.0 if case == "gpt-oss" else 1.25) * want


def edited(path, target, **fields):
    """A copy of a checkpoint with other fields in config.json."""
    shutil.copytree(path, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return str(target)


@pytest.mark.parametrize(
    "case, fields, message",
    [
        ("qwen3-moe", {"mlp_only_layers": []}, "unknown to the model"),
        ("qwen2-moe", {"decoder_sparse_step": 1}, "unknown to the model"),
        ("glm4-moe", {"first_k_dense_replace": 2}, "unknown to the model"),
        ("glm4-moe", {"n_shared_experts": 1}, "expected"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 0}, "unknown to the model"),
    ],
)
def test_fields_that_the_weights_contradict(case, fields, message, models, tmp_path):
    path = edited(models(case)[1], tmp_path / "edited", **fields)
    with pytest.raises(CheckpointError, match=message):
        load_model(CausalLM(read_model_config(path), None, SINGLE_RANK), path)


@pytest.mark.parametrize("case", MODELS)
def test_merged_expert_tensors(case, models, tmp_path):
    """transformers 5 writes one tensor of all experts if asked to."""
    model, path = models(case)
    model.save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any(name.endswith("experts.gate_up_proj") for name in file.keys())  # noqa: SIM118
    for tp in (SINGLE_RANK, TPGroup(1, 2)):
        first, second = (CausalLM(read_model_config(p), None, tp) for p in (path, str(tmp_path)))
        load_model(first, path)
        load_model(second, str(tmp_path))
        weights = second.state_dict()
        for name, tensor in first.state_dict().items():
            assert torch.equal(tensor, weights[name]), name


def test_layers_that_predict_further_tokens_are_skipped(models, tmp_path):
    """GLM's checkpoints end with a layer for speculation."""
    _, path = models("glm4-moe")
    copy = edited(path, tmp_path / "copy", num_nextn_predict_layers=1)
    tensors = load_file(f"{copy}/model.safetensors")
    extra = {f"model.layers.4.{name}": torch.zeros(1) for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")}
    save_file(tensors | extra, f"{copy}/model.safetensors")
    load_model(CausalLM(read_model_config(copy), None, SINGLE_RANK), copy)


def test_dummy_weights(models, make_llm):
    llm = make_llm(model=models("qwen3-moe")[1], load_format="dummy")
    assert len(generate(llm, PROMPTS[1:2], greedy(3))[0]) == 3

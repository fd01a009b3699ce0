"""Packed integers of AWQ, GPTQ, AutoRound and compressed-tensors: published checkpoints against transformers on the
dequantized weights, each rank's words against the formats' formulas, rules of configs, every refusal. 40 s."""

import itertools
import json
import re
from pathlib import Path

import families
import packed_checkpoints
import pytest
import torch
from families import check_greedy, hf_logits
from helpers import generate, greedy
from packed_checkpoints import SIZES, config_of
from safetensors.torch import load_file
from test_families import IDS, TOLERANCE, error, logits_of
from test_lora import train

from nanovllm import LLM, CheckpointError, ConfigError, EngineError
from nanovllm.contrib.as_vllm.options import to_nanovllm
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.linear.reference import Weight, fused_linear
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import WeightFiller, init_dummy_weights, load_model
from nanovllm.quantization.int4 import numbers as int4
from nanovllm.quantization.int4.rules import IntScheme
from nanovllm.quantization.int4.tensors import IntTensors, merged_name, scheme_of
from nanovllm.runner import packing
from nanovllm.runner.device import describe
from nanovllm.utils.checkpoint_tensor import CheckpointTensor

MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=80)
MORE = {
    "qwen3-moe": {**MOE, "mlp_only_layers": [0]}, "mixtral": {"num_local_experts": 4, "intermediate_size": 80},
    "qwen2-moe": {**MOE, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 96},
    "qwen3.5": dict(hidden_size=192, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, head_dim=32),
}  # fmt: skip
ASYMMETRIC, CHANNEL = {"symmetric": False}, {"size": 0}
# (family, layout, scheme), see ``packed_checkpoints.write``
CASES = [
    ("qwen3", "compressed-tensors", {}), ("qwen3", "compressed-tensors", ASYMMETRIC | {"size": 32}),
    ("qwen3", "compressed-tensors", CHANNEL), ("qwen3", "compressed-tensors", ASYMMETRIC | CHANNEL),
    ("qwen3", "compressed-tensors", {"size": 128, "dtype": torch.bfloat16}),
    ("qwen3", "compressed-tensors", {"bits": 8}),
    ("qwen3", "awq", {}), ("qwen3", "awq", CHANNEL), ("granite", "awq", {"size": 32}),
    ("qwen3", "gptq", {}), ("qwen3", "gptq", ASYMMETRIC), ("qwen3", "gptq", {"act_order": True}),
    ("qwen3", "gptq_v2", ASYMMETRIC | {"act_order": True, "size": 32}), ("phi3", "gptq", CHANNEL),
    ("qwen3", "gptq", {"bits": 8, "act_order": True}), ("glm4", "gptq_v2", {"bits": 8, **ASYMMETRIC}),
    ("llama-tied-biased", "auto-round", {"negative": True}), ("qwen3", "auto-round-awq", {"negative": True}),
    ("qwen3-moe", "gptq", {}), ("qwen2-moe", "compressed-tensors", ASYMMETRIC), ("mixtral", "awq", {}),
]  # fmt: skip


def name_of(case):
    family, form, scheme = case
    return "-".join([family, form, *(f"{name}={x}" for name, x in scheme.items())])


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """published(family, form, scheme) -> (path of a checkpoint, of its dequantized weights, transformers' model)."""
    made: dict = {}

    def make(*case):
        if (name := name_of(case)) not in made:
            family, form, scheme = case
            path, plain = (str(tmp_path_factory.mktemp(kind)) for kind in ("packed", "plain"))
            model = families.make(path, family, **SIZES | MORE.get(family, {}))
            with torch.inference_mode():
                packed_checkpoints.write(path, model, form, **scheme)
            model.save_pretrained(plain)
            made[name] = path, plain, model
        return made[name]

    return make


def built(path, tp=SINGLE_RANK, config=None):
    """The model of a checkpoint on one rank, filled; what is not loaded shows."""
    model = CausalLM(config or read_model_config(path), None, tp)
    for param in model.parameters():
        param.view(torch.uint8).fill_(0x7F)
    load_model(model, path)
    return model


def weights_of(model):
    """Weights of linear layers and experts by name, dequantized, channels in the order of the input."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, ReplicatedLinear):
            found[name] = module.as_weight()
        elif name.endswith(".experts"):
            found |= {f"{name}.{i}": weight for i, weight in enumerate(module.weights())}
    plain = {name: weight.dequantize(torch.float32) for name, weight in found.items()}
    for name, weight in found.items():
        if weight.order is not None:
            plain[name] = torch.empty_like(plain[name]).index_copy_(1, weight.order.long(), plain[name])
    return plain


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_logits_and_shards(case, published):
    """Logits are transformers'. Each rank's weights are, bit for bit, its shard of the dequantized model's."""
    path, plain, model = published(*case)
    assert error(logits_of(path), hf_logits(model, IDS)) < TOLERANCE
    scheme = case[2]
    for size in (1,) if scheme.get("act_order") else (1, 2, 4):
        for rank in range(size):
            tp = TPGroup(rank, size, None)
            engine = built(path, tp)
            assert not scheme.get("bits") or all(p.dtype != torch.int32 for p in engine.parameters())
            got, want = weights_of(engine), weights_of(built(plain, tp))
            for name in want:
                if scheme.get("negative"):
                    assert got[name].abs().equal(want[name].abs()), name  # 0 times a negative scale
                elif case[0] != "granite":  # its factor multiplies scales, and numbers there
                    assert got[name].equal(want[name]), f"{name} of rank {rank}"
                torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=0)


def test_bytes_that_stay(published):
    """Four bits and, with groups of 64, a quarter of one for scales; 352 channels have groups of 32 here."""
    path = published("qwen3", "gptq", {})[0]
    config = read_model_config(path)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = built(path)
    finally:
        torch.set_default_dtype(torch.float32)
    linears = [module for module in model.modules() if isinstance(module, ReplicatedLinear)]
    for layer in linears:
        size, numbers = 32 if layer.weight.shape[1] == 352 // 8 else 64, layer.weight.numel() * 8
        params = [param for name, param in layer.named_parameters() if name != "bias"]
        assert layer.weight.dtype == torch.int32 and layer.weight_scale.dtype == torch.bfloat16 and len(params) == 2
        assert sum(param.nbytes for param in params) == numbers // 2 + numbers // size * 2
    assert len(linears) == 8 and not config.fp8 and config.quant_method == "gptq"


@pytest.mark.parametrize("case", [
    ("qwen3", "gptq", {"act_order": True}), ("qwen3", "awq", {}), ("qwen2-moe", "compressed-tensors", ASYMMETRIC),
    ("qwen3.5", "gptq", {}),
], ids=name_of)  # fmt: skip
def test_greedy(case, published, make_llm):
    path, _, model = published(*case)
    llm = make_llm(model=path, max_model_len=256, num_kvcache_blocks=32)
    check_greedy(llm, model, [IDS[:1], IDS[:17], IDS[5:45]], 8, TOLERANCE)
    advice = "" if "moe" in case[0] else ", which dtype='bfloat16' avoids"
    assert f" with INT4 weights (dequantized in every step{advice});" in describe(llm.config, llm.model_runner)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [
    ("qwen3", "gptq", {"act_order": True}), ("qwen3", "awq", {}), ("qwen3-moe", "awq", {"size": 32}),
], ids=name_of)  # fmt: skip
def test_on_the_gpu(case, published, make_llm):
    """In fp32, eager and under CUDA graphs; in bf16 no token is far from the best."""
    path, _, model = published(*case)
    options = {"model": path, "device": "cuda", "max_model_len": 256, "num_kvcache_blocks": 200}
    prompts = [IDS[:1], IDS[:17], IDS[5:45] * 2]
    completions = generate(make_llm(**options, dtype="float32", enforce_eager=True), prompts, greedy(8))
    assert completions == families.chosen(model, prompts, completions)
    assert generate(make_llm(**options, dtype="float32"), prompts, greedy(8)) == completions
    llm = make_llm(**options, dtype="bfloat16")
    assert llm.model_runner.model.model.layers[1].self_attn.o_proj.weight.dtype == torch.int32
    assert max(families.worst_choices(model, prompts, generate(llm, prompts, greedy(8)))) < 0.2


def test_two_ranks(published, make_llm):
    """Each rank has 176 of 352 channels, which cut a group of 64."""
    path, _, model = published("qwen3", "awq", {})
    check_greedy(make_llm(model=path, max_model_len=256, tensor_parallel_size=2), model, [IDS[:17]], 6, TOLERANCE)


# ---------------------------------------------------------------- rules of configs

A, B = IntScheme("gptq", 4, 64, True), IntScheme("gptq", 8, 32, True)


def config_with(quantization, architecture="Qwen3ForCausalLM", num_layers=3, **more):
    from test_published_configs import model_config

    raw = dict(
        architectures=[architecture], hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128, max_position_embeddings=256,
        rms_norm_eps=1e-6, tie_word_embeddings=False, eos_token_id=1,
    )  # fmt: skip
    if "Moe" in architecture or architecture in ("MixtralForCausalLM", "GptOssForCausalLM"):
        raw |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    return model_config(raw | more | {"quantization_config": quantization})


def schemes(config, layer, *names):
    found = config.layers[layer].int_schemes
    return [scheme_of(found, name) for name in names]


Q, K, V, O, GATE, UP, DOWN = (
    *(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


PUBLISHED = {
    "Qwen/Qwen3-8B-AWQ": {
        "backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
        "group_size": 128, "modules_to_fuse": None, "modules_to_not_convert": None, "quant_method": "awq",
        "version": "gemm", "zero_point": True,
    },
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": {
        "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
        "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "quant_method": "gptq",
        "max_input_length": None, "model_seqlen": None, "module_name_preceding_first_block": None, "sym": True,
        "modules_in_block_to_quantize": None, "pad_token_id": None, "tokenizer": None, "true_sequential": True,
        "use_cuda_fp16": False, "use_exllama": True,
    },
    "TheBloke/Llama-2-7B-Chat-GPTQ": {
        "bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": True, "static_groups": False, "sym": True,
        "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model", "quant_method": "gptq",
    },
    "of GPTQModel": {
        "bits": 4, "dynamic": None, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False,
        "quant_method": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "true_sequential": True,
        "meta": {"quantizer": ["gptqmodel:2.0.0"], "damp_percent": 0.05, "static_groups": False},
    },
    "of AutoRound": {
        "autoround_version": "0.5.1", "batch_size": 4, "bits": 4, "data_type": "int", "dataset": "pile", "sym": True,
        "group_size": 128, "iters": 1000, "low_gpu_mem_usage": True, "nsamples": 512, "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq", "to_quant_block_names": "model.language_model.layers",
        "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
    },
    "AutoRound's AWQ": {
        "autoround_version": "0.5.1", "bits": 4, "data_type": "int", "group_size": 128, "iters": 200, "sym": True,
        "modules_to_not_convert": ["lm_head"], "quant_method": "awq", "version": "gemm", "zero_point": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    """The last field that a program writes must not refuse its files. Every layer is packed."""
    raw = PUBLISHED[name]
    config = config_with(raw, "Qwen3MoeForCausalLM" if not raw.get("desc_act") else "Qwen3ForCausalLM")
    if "to_quant_block_names" in raw:  # of a decoder beside a vision tower
        assert all(layer.int_schemes == () for layer in config.layers)
        text = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]})
        config = config_with(raw, "Qwen3VLForConditionalGeneration", **text)
    assert schemes(config, 0, Q, O, DOWN) == [schemes(config, 0, UP)[0]] * 3
    assert schemes(config, 0, Q)[0].group_size == 128 and schemes(config, 0, Q)[0].bits == 4


def test_dynamic_of_gptq():
    """The first rule that matches a name counts; parts of a merged layer that differ are 16 bits here."""
    config = config_with(config_of("gptq") | {"dynamic": {
        r"-:.*layers\.0\..*": {}, r"+:.*\.1\.self_attn\.v_proj": {"bits": 8, "group_size": 32},
        r".*layers\.1\.mlp\.down.*": {"group_size": 32}, r"-:.*down_proj": {}, r"-:.*layers\.2\.mlp\.up_proj": {},
    }})  # fmt: skip
    assert schemes(config, 0, Q, O, DOWN) == [None] * 3 and config.layers[0].int_schemes == ()
    assert schemes(config, 1, Q, K, V, GATE, DOWN) == [A, A, B, A, A._replace(group_size=32)]
    assert schemes(config, 2, V, GATE, UP, DOWN) == [A, A, None, None]
    of_1, of_2 = config.layers[1:]
    assert config.precision(of_1, "self_attn.qkv_proj") is None is config.precision(of_2, "mlp.gate_up_proj")
    assert config.precision(of_1, "mlp.gate_up_proj") == A == config.precision(of_2, "self_attn.qkv_proj")
    modules = [["self_attn.q_proj"], ["mlp.up_proj", "mlp.gate_proj"]]
    config = config_with(config_of("gptq") | {"modules_in_block_to_quantize": modules})
    assert schemes(config, 0, Q, K, O, GATE, UP, DOWN) == [A, None, None, A, A, None]


def test_extra_config_of_auto_round():
    config = config_with(config_of("auto-round") | {"extra_config": {
        "model.layers.0.self_attn.o_proj": {"bits": 16, "data_type": "float"},
        r".*\.1\.mlp\..*": {"bits": 8, "group_size": 32}, "model.layers.1.mlp.down_proj": {"sym": False},
    }, "block_name_to_quantize": "model.layers.0.,model.layers.1."})  # fmt: skip
    assert schemes(config, 0, Q, O, DOWN) == [A, None, A]
    assert schemes(config, 1, GATE, UP, DOWN) == [B, B, A._replace(symmetric=False)]
    assert config.layers[2].int_schemes == ()


def test_groups_and_targets_of_compressed_tensors():
    raw = config_of("compressed-tensors")
    weights = raw["config_groups"]["group_0"]["weights"]
    raw["config_groups"] |= {
        "group_1": {"targets": [r"re:.*self_attn\.(q|k|v)_proj"], "weights": weights | {"group_size": 32}},
        "group_2": {"targets": ["model.layers.1.mlp.down_proj"], "weights": weights | {"num_bits": 8}},
    }
    raw["ignore"] += [r"re:.*layers\.2\..*", "model.layers.0.mlp.up_proj"]
    config, a = config_with(raw), IntScheme("compressed-tensors", 4, 64, True)
    assert schemes(config, 0, Q, V, O, GATE, UP) == [a._replace(group_size=32)] * 2 + [a, a, None]
    assert schemes(config, 1, GATE, DOWN) == [a, a._replace(bits=8)] and config.layers[2].int_schemes == ()


@pytest.mark.parametrize("architecture, skipped, names", [
    ("Qwen3MoeForCausalLM", ["mlp.gate"], {"mlp.experts.3.up_proj", "mlp.experts.0.down_proj", Q}),
    ("MixtralForCausalLM", ["gate", "block_sparse_moe.experts.1"], {"mlp.experts.0.up_proj", Q}),
])  # fmt: skip
def test_awq_of_experts(architecture, skipped, names):
    raw = config_of("awq") | {"modules_to_not_convert": skipped}
    config = config_with(raw, architecture, num_local_experts=4)
    scheme = IntScheme("awq", 4, 64, False)
    assert schemes(config, 1, *names, "mlp.gate") == [scheme] * len(names) + [None]
    some = schemes(config, 1, "mlp.experts.1.up_proj", "mlp.experts.0.up_proj")
    is_kept = config.precision(config.layers[1], "mlp.experts.gate_up_proj") == scheme
    assert is_kept == (len(skipped) == 1) and some == [scheme if is_kept else None, scheme]


def test_names_beside_a_vision_tower():
    """Rules name modules as the checkpoint has them."""
    dynamic = {r"-:model\.language_model\.layers\.0\..*": {}, r"-:.*visual.*": {}}
    text = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]})
    config = config_with(config_of("gptq") | {"dynamic": dynamic}, "Qwen3VLForConditionalGeneration", **text)
    assert config.layers[0].int_schemes == () and schemes(config, 1, Q) == [A]


ATTENTION = [f"model.layers.0.{name}" for name in (Q, K, V)]
GATE_UP = [f"model.layers.{i}.{name}" for i in range(2) for name in (GATE, UP)]
IN_16_BITS = {"bits": 16, "data_type": "float"}


def groups(*given, ignore=()):
    """``given``: (targets, changes of the scheme) of each group."""
    of_groups = {}
    for i, (targets, scheme) in enumerate(given):
        (group,) = config_of("compressed-tensors", **scheme)["config_groups"].values()
        of_groups[f"group_{i}"] = group | {"targets": targets}
    return {"config_groups": of_groups, "ignore": ["lm_head", *ignore]}


# (family, layout, modules in 16 bits, a regular expression of others and their scheme), the rules that say so, and the
# number of linear layers that are dequantized as they load, of those that are packed in part
MIXED = {
    "compressed-tensors, targets by expressions, a layer ignored by exact names": (
        ("qwen3", "compressed-tensors", ATTENTION, "", {}),
        groups(([r"re:.*self_attn\..*", r"re:.*mlp\..*"], {}), ignore=ATTENTION), 0,
    ),
    "compressed-tensors, q, k, v in 8 bits by exact names": (
        ("qwen3", "compressed-tensors", [], r".*\.0\.self_attn\.[qkv]_proj", {"bits": 8}),
        groups(([r"re:.*self_attn.*", r"re:.*mlp.*"], {}), (ATTENTION, {"bits": 8})), 1,
    ),
    "compressed-tensors, v alone in 8 bits": (
        ("qwen3", "compressed-tensors", [], r".*\.0\.self_attn\.v_proj", {"bits": 8}),
        groups((["Linear"], {}), (ATTENTION[2:], {"bits": 8})), 1,
    ),
    "compressed-tensors, symmetric gate and up beside an asymmetric MLP": (
        ("qwen3", "compressed-tensors", [], r".*mlp\.(gate|up)_proj", {"symmetric": True}),
        groups(([r"re:.*self_attn.*", r"re:.*mlp\..*"], ASYMMETRIC), (GATE_UP, {})), 0,
    ),
    "compressed-tensors, experts of a layer in groups of 32 by exact names": (
        ("qwen3-moe", "compressed-tensors", [], r".*\.1\.mlp\.experts", {"size": 32}),
        groups((["Linear", r"re:.*mlp\.experts\..*"], {}), (
            [f"model.layers.1.mlp.experts.{e}.{x}_proj" for e in range(4) for x in ("gate", "up", "down")],
            {"size": 32},
        )), 0,
    ),
    "GPTQ, a negative rule of parts": (
        ("qwen3", "gptq", ATTENTION[:2], "", {}), {"dynamic": {r"-:.*\.0\.self_attn\.[qk]_proj$": {}}}, 1,
    ),
    "GPTQ, a negative rule of parts before one of all": (
        ("qwen3", "gptq", ATTENTION, r".*self_attn", {"size": 32}),
        {"dynamic": {r"-:.*\.0\.self_attn\.[qkv]_proj": {}, r"+:.*self_attn.*": {"group_size": 32}}}, 0,
    ),
    "GPTQ, a negative rule of all but o": (
        ("qwen3", "gptq", ATTENTION, "", {}), {"dynamic": {r"-:.*\.0\.self_attn\.(?!o_proj)": {}}}, 0,
    ),
    "GPTQ, v in 8 bits": (
        ("qwen3", "gptq", [], r".*\.1\.self_attn\.v_proj", {"bits": 8}),
        {"dynamic": {r"+:model\.layers\.1\.self_attn\.v_proj": {"bits": 8}}}, 1,
    ),
    "GPTQ, up in groups of 32": (
        ("qwen3", "gptq", [], r".*\.0\.mlp\.up_proj", {"size": 32}),
        {"dynamic": {r"+:model\.layers\.0\.mlp\.up_proj": {"group_size": 32}}}, 1,
    ),
    "GPTQ, modules that the checkpoint has merged": (
        ("phi3", "gptq", [f"model.layers.0.{x}" for x in ("self_attn.qkv_proj", "mlp.gate_up_proj")], "", {}),
        {"dynamic": {r"-:.*\.0\..*up_proj": {}, r"-:.*\.0\.self_attn\.qkv_proj": {}}}, 0,
    ),
    "AutoRound, exact names before expressions": (
        ("qwen3", "auto-round", ATTENTION, r".*self_attn", {"size": 32}),
        {"extra_config": dict.fromkeys(ATTENTION, IN_16_BITS) | {r".*self_attn.*": {"group_size": 32}}}, 0,
    ),
    "AutoRound, blocks": (
        ("qwen3", "auto-round", [f"model.layers.0.{x}" for x in (Q, K, V, O, GATE, UP, DOWN)], "", {}),
        {"block_name_to_quantize": "model.layers.1"}, 0,
    ),
    "AWQ, q alone in 16 bits": (
        ("qwen3", "awq", ATTENTION[:1], "", {}), {"modules_to_not_convert": ATTENTION[:1]}, 1,
    ),
    "AWQ, an expert in 16 bits": (
        ("qwen3-moe", "awq", [f"model.layers.1.mlp.experts.2.{x}_proj" for x in ("gate", "up", "down")], "", {}),
        {"modules_to_not_convert": ["model.layers.1.mlp.experts.2"]}, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_rules_name_the_checkpoints_modules(name, tmp_path):
    """Rules were also matched against merged layers, which the checkpoint does not have, and those counted first."""
    (family, form, skipped, pattern, own), rules, num_dequantized = MIXED[name]
    model = families.make(tmp_path, family, **SIZES | MORE.get(family, {}))
    scheme = ASYMMETRIC if "asymmetric" in name else {}
    with torch.inference_mode():
        packed_checkpoints.write(
            tmp_path, model, form, skipped=skipped, change=edit_config(**rules), **scheme,
            more=lambda module: own if own and re.match(pattern, module) else {},
        )  # fmt: skip
    assert error(logits_of(str(tmp_path)), hf_logits(model, IDS)) < TOLERANCE
    config = read_model_config(str(tmp_path))
    weights = {
        (i, merged_name(module)) for i, layer in enumerate(config.layers) for module, _ in layer.int_schemes
    }
    in_16_bits = [name for i, name in weights if config.precision(config.layers[i], name) is None]
    assert len(in_16_bits) == num_dequantized


def test_the_start_line_counts_dequantized_layers(tmp_path):
    model, module = families.make(tmp_path, "qwen3", **SIZES), "model.layers.1.self_attn.v_proj"
    rule = edit_config(dynamic={f"+:{re.escape(module)}": {"bits": 8}})
    with torch.inference_mode():
        packed_checkpoints.write(
            tmp_path, model, "gptq", more=lambda name: {"bits": 8} if name == module else {}, change=rule
        )
    with LLM(str(tmp_path), device="cpu", max_model_len=64, num_kvcache_blocks=4, skip_tokenizer_init=True) as llm:
        line = describe(llm.config, llm.model_runner)
        assert " with INT4 weights (1 of 8 dequantized at load; dequantized in" in line


NEUTRAL = {
    "pack_dtype": "int32", "data_type": "int", "lm_head": False, "quant_lm_head": False, "is_marlin_format": False,
    "act_bits": 16, "super_bits": None, "autoround_version": "0.9.0", "iters": 200, "global_compression_ratio": 1.4,
    "quantization_status": "compressed", "sparsity_config": {"format": "dense"}, "static_groups": False,
    "meta": {"quantizer": ["gptqmodel:5.0.0"]}, "dynamic": {}, "extra_config": {}, "desc_act": False, "ignore": [],
}  # fmt: skip
NOT_NEUTRAL = {
    "pack_dtype": "int64", "data_type": "fp", "lm_head": True, "quant_lm_head": True, "is_marlin_format": True,
    "act_bits": 8, "super_bits": 6, "quantization_status": "calibration",
}  # fmt: skip


@pytest.mark.parametrize("form", ["compressed-tensors", "awq", "gptq", "auto-round"])
def test_fields_of_other_formats(form):
    """Programs write several formats, and leave fields of one in the files of another, as pack_dtype beside AWQ."""
    raw = config_of(form)
    fields = {name: value for name, value in NEUTRAL.items() if name != "ignore" or form != "compressed-tensors"}
    assert config_with(fields | raw).layers == config_with(raw).layers
    for name, value in NOT_NEUTRAL.items():
        with pytest.raises(CheckpointError, match=rf"quantization_config: {name}={value!r} is not supported"):
            config_with(raw | {name: value})
    if form != "compressed-tensors":  # fields that choose modules are honoured in each
        config = config_with(raw | {"modules_to_not_convert": ["lm_head", "model.layers.0"]})
        assert [len(layer.int_schemes) > 0 for layer in config.layers] == [False, True, True]
        config = config_with(raw | {"modules_in_block_to_quantize": [["mlp.down_proj"]]})
        assert [name for name, _ in config.layers[1].int_schemes] == ["mlp.down_proj"]


# ---------------------------------------------------------------- refusals


def edit_config(**fields):
    return lambda tensors, config: config["quantization_config"].update(fields)


def put(name, value):
    def change(tensors, config):
        tensors[name] = value(tensors[name])

    return change


DOWN_1 = "model.layers.1.mlp.down_proj"


def add(kind, tensor):
    return lambda tensors, config: tensors.update({f"{DOWN_1}.{kind}": tensor})


def nibble(value):
    """All nibbles of a tensor of words."""
    return lambda words: torch.full_like(words, (value * 0x11111111 + 2**31) % 2**32 - 2**31)


WRONG = {  # the layout, a change of tensors or config, a part of the text
    "gptq zeros of v2": ("gptq", put(f"{DOWN_1}.qzeros", nibble(8)), f"'{DOWN_1}' has zeros from 9 to 9, expected 8"),
    "gptq_v2 zeros of v1": ("gptq_v2", put(f"{DOWN_1}.qzeros", nibble(7)), "has zeros from 7 to 7, expected 8"),
    "a zero of 15": ("gptq", lambda t, c: (edit_config(sym=False)(t, c), put(f"{DOWN_1}.qzeros", nibble(15))(t, c)),
                     f"'{DOWN_1}' has a zero that readers of checkpoint_format 'gptq' take for 0 or for 16."),
    "no scales": ("gptq", lambda t, c: t.pop(f"{DOWN_1}.scales"), f"{DOWN_1}.weight (there is {DOWN_1}.qweight, "),
    "no weight": ("awq", lambda t, c: t.pop(f"{DOWN_1}.qweight"), f"{DOWN_1}.weight (there is {DOWN_1}.qzeros, "),
    "fewer groups": ("awq", put(f"{DOWN_1}.scales", lambda t: t[:-1].clone()), "has scales of [192, 5] features"),
    "other zeros": ("awq", put(f"{DOWN_1}.qzeros", lambda t: t[:-1].clone()), "has zeros of [192, 5] features"),
    "NaN": ("gptq", put(f"{DOWN_1}.scales", lambda t: t * torch.nan), f"'{DOWN_1}.scales' has numbers from nan to nan"),
    "scales of integers": ("awq", put(f"{DOWN_1}.scales", lambda t: t.int()), "is of int32, expected floats"),
    "words of bytes": ("awq", put(f"{DOWN_1}.qweight", lambda t: t.view(torch.uint8)), "of uint8, expected int32"),
    "one dimension": ("awq", put(f"{DOWN_1}.qweight", lambda t: t.flatten()), "expected two dimensions"),
    "another shape": ("compressed-tensors", put(f"{DOWN_1}.weight_shape", lambda t: t + 8), "expected [200, 45]"),
    "fewer words": ("awq", put(f"{DOWN_1}.qweight", lambda t: t[:-8].clone()), "has 344 input channels, expected a"),
    "floats": ("awq", lambda t, c: t.update({f"{DOWN_1}.weight": torch.ones(192, 352)}),
               f"'{DOWN_1}.weight' is not of packed integers"),
    "zeros of symmetric ones": ("compressed-tensors", add("weight_zero_point", torch.ones(24, 6).int()),
                                f"'{DOWN_1}.weight_zero_point' is twice there, or unknown"),
    "an order that is denied": ("gptq", add("g_idx", (torch.arange(352) // 64).flip(0).int()),
                                f"'{DOWN_1}.g_idx' orders the channels, which quantization_config denies"),
    "a bias": ("gptq", add("bias", torch.ones(192)), f"'{DOWN_1}.bias' is not 0"),
    "a packed LM head": ("gptq", lambda t, c: t.update({"lm_head.qweight": t[f"{DOWN_1}.qweight"].clone()}),
                         "a packed LM head (lm_head.qweight) is not supported"),
    "a packed LM head of compressed-tensors": (
        "compressed-tensors", lambda t, c: (edit_config(ignore=[])(t, c), t.update({"lm_head.weight_packed": t.pop(
            "lm_head.weight").int()})), "a packed LM head (lm_head.weight_packed) is not supported"),
    "packed embeddings": ("awq", lambda t, c: t.update({"model.embed_tokens.qweight": t[f"{DOWN_1}.qweight"].clone()}),
                          "a packed module outside of decoder layers (model.embed_tokens.qweight) is not supported"),
    "a layer left out": ("awq", edit_config(modules_to_not_convert=[DOWN_1]), f"'{DOWN_1}.qweight' is twice there, or"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors(case, published, tmp_path):
    form, change, message = WRONG[case]
    path = families.copied(published("qwen3", form, {})[0], tmp_path, change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        built(path)


DAMAGES = [
    lambda t: t.mT, lambda t: t[:-1], lambda t: t[..., :-1], lambda t: t[:0], lambda t: t[..., :0], torch.flatten,
    lambda t: t[None], lambda t: t[0], lambda t: t.float() * torch.nan, lambda t: torch.cat((t, t)), lambda t: t.long(),
    *(lambda t, dtype=dtype: t.to(dtype) for dtype in (torch.uint8, torch.bool, torch.float8_e4m3fn, torch.int8)),
]  # fmt: skip


@pytest.mark.parametrize("form, scheme", [
    ("compressed-tensors", ASYMMETRIC | {"size": 32}), ("awq", {}), ("gptq", {"act_order": True}),
])  # fmt: skip
def test_damaged_tensors(form, scheme, published):
    """Each tensor of a module in each wrong shape or type: an error of ours, or the numbers are there."""
    path = published("qwen3", form, scheme)[0]
    tensors, model, refused = load_file(f"{path}/model.safetensors"), built(path), 0
    part = {name: t for name, t in tensors.items() if name.startswith(DOWN_1)}
    for name, damage in itertools.product(part, DAMAGES):
        damaged = damage(part[name]) if part[name].dim() > 1 else part[name][:-1]
        filler = WeightFiller(model)
        try:
            with torch.inference_mode():
                filler.fill_from({**part, name: damaged}.items(), "")
                filler.check_gathered("")
        except CheckpointError:
            refused += 1
    assert refused >= 3 * (len(DAMAGES) - 2)


@pytest.mark.parametrize("form, N", [("compressed-tensors", 5), ("compressed-tensors", 1), ("awq", 8), ("gptq", 8)])
@pytest.mark.parametrize("bits", [4, 8])
def test_modules_of_few_features(form, N, bits):
    """Their zeros are a column of words."""
    scheme = IntScheme(form, bits if form != "awq" else 4, 32, symmetric=False)
    codes, scales, zeros, made = packed_checkpoints.quantized(torch.randn(N, 96), 32, False, scheme.bits)
    parts = packed_checkpoints.LAYOUTS[form](codes, scales, zeros, symmetric=False, bits=scheme.bits)
    tensors = {kind: CheckpointTensor.of(kind, tensor) for kind, tensor in parts.items()}
    assert torch.equal(IntTensors("", scheme, tensors).dequantized().read(...), made)


def test_tensors_without_effect(published, tmp_path):
    """Biases of zeros, and the order of neighbours, as AutoGPTQ writes them; the module's tensors in two files."""
    path, plain, _ = published("qwen3", "gptq", {})
    more = {f"{DOWN_1}.bias": torch.zeros(192), f"{DOWN_1}.g_idx": (torch.arange(352) // 64).int()}
    path = families.copied(path, tmp_path, lambda tensors, config: tensors.update(more))
    tensors = load_file(f"{path}/model.safetensors")
    first = {name: tensors.pop(name) for name in list(tensors) if name.endswith("qzeros")}
    families.save(path, tensors, json.loads(Path(path, "config.json").read_text()))
    from safetensors.torch import save_file

    save_file(first, f"{path}/other.safetensors")
    got, want = weights_of(built(path)), weights_of(built(plain))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_parts_in_other_orders(tmp_path):
    """Of a merged layer, whose input is gathered once."""
    model = families.make(tmp_path, "qwen3", **SIZES)
    with torch.inference_mode():
        packed_checkpoints.write(tmp_path, model, "gptq", act_order=True)
    name = "model.layers.0.self_attn.k_proj.g_idx"
    path = families.copied(tmp_path, tmp_path / "other", put(name, lambda order: order.flip(0)))
    with pytest.raises(CheckpointError, match=r"orders the channels of its input \(g_idx\) otherwise than the layers"):
        built(path)
    path = families.copied(tmp_path, tmp_path / "sizes", put(name, lambda order: order * 0))
    with pytest.raises(CheckpointError, match="has groups that are not of 64 channels"):
        built(path)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 cuts the groups of weights that GPTQ has ordered"):
        read_model_config(str(tmp_path)).check_tensor_parallel(2)


FIELDS = {  # the layout -> its field, a value that is not supported
    "compressed-tensors": [("format", "marlin-24"), ("config_groups", {}), ("config_groups", 3), ("foo", 17)],
    "awq": [("bits", 8), ("version", "gemv"), ("version", "gemv_fast"), ("group_size", 100), ("zero_point", False),
            ("backend", "llm-awq"), ("foo", 17), ("w_bit", 8)],
    "gptq": [("bits", 3), ("bits", 2), ("group_size", None), ("group_size", 0), ("group_size", True), ("sym", None),
             ("desc_act", 5), ("checkpoint_format", "marlin"), ("format", "gptq_v2"), ("lm_head", True), ("foo", 17),
             ("dynamic", 3), ("dynamic", {"+:a": {"bits": 3}}), ("dynamic", {"+:a": {"foo": 1}}),
             ("is_marlin_format", True), ("pack_dtype", "int64"), ("modules_in_block_to_quantize", 4)],
    "auto-round": [("bits", 2), ("data_type", "mx_fp"), ("act_bits", 8), ("packing_format", "auto_round:fp8"),
                   ("super_bits", 6), ("extra_config", 1), ("extra_config", {"a": {"bits": 3}}), ("sym", 2),
                   ("extra_config", {"a": {"act_bits": 8}}), ("extra_config", {"a": {"foo": 8}}), ("foo", 17),
                   ("quant_lm_head", True), ("backend", "auto_round:exllamav2")],
}  # fmt: skip
WEIGHT_FIELDS = [
    ("num_bits", 3), ("type", "float"), ("strategy", "tensor"), ("group_size", 12), ("group_size", None), ("foo", 17),
    ("dynamic", True), ("actorder", "group"), ("actorder", "dynamic"), ("symmetric", "yes"),
    ("block_structure", [8, 8]),
]  # fmt: skip


@pytest.mark.parametrize("form", FIELDS)
def test_fields_that_are_refused(form):
    for name, value in FIELDS[form]:
        with pytest.raises(CheckpointError, match=rf"quantization_config: .*\b{name}\b.*is not supported\. Supp"):
            config_with(config_of(form) | {name: value})


def test_fields_of_weights_that_are_refused():
    for name, value in WEIGHT_FIELDS:
        raw = config_of("compressed-tensors")
        raw["config_groups"]["group_0"]["weights"][name] = value
        with pytest.raises(CheckpointError, match=rf"config_groups\.group_0\.weights\.{name}=.* is not supported"):
            config_with(raw)
    raw = config_of("compressed-tensors")
    raw["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int"}
    with pytest.raises(CheckpointError, match=r"group_0\.input_activations=\{'num_bits': 8.* is not supported"):
        config_with(raw)


def test_other_formats_are_refused_by_name(tmp_path):
    for method in ("bitsandbytes", "gguf", "hqq", "quip"):
        with pytest.raises(CheckpointError, match=f"quant_method='{method}' is not supported. Supported are .* 'awq'"):
            config_with({"quant_method": method, "load_in_4bit": True, "bits": 4})
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.Q4_K_M.gguf"):
        with pytest.raises(CheckpointError, match="' is GGUF, which is not read"):
            LLM(str(path))
    with pytest.raises(CheckpointError, match="gpt-oss in packed integers is not supported"):
        more = dict(num_local_experts=4, swiglu_limit=7.0, sliding_window=8)
        config_with(config_of("gptq"), "GptOssForCausalLM", **more)
    with pytest.raises(CheckpointError, match=r"desc_act of experts \(mlp.experts.gate_up_proj\) is not supported"):
        config_with(config_of("gptq", act_order=True), "Qwen3MoeForCausalLM")


def test_options_that_contradict_the_checkpoint(published):
    path = published("qwen3", "awq", {})[0]
    with pytest.raises(ConfigError, match=r"quantization='fp8', but the checkpoint's weights are integers .*\(awq\)"):
        LLM(path, quantization="fp8", device="cpu", skip_tokenizer_init=True)
    for name in ("awq", "awq_marlin"):
        assert "quantization" not in to_nanovllm({"model": path, "quantization": name})
    for name in ("gptq", "gptq_marlin", "auto-round", "compressed-tensors"):
        with pytest.raises(ConfigError, match=f"'{name}' names the quantization of a checkpoint, and {path} has 'a"):
            to_nanovllm({"model": path, "quantization": name})
    config = config_with(config_of("awq"), "LlamaForCausalLM")
    with pytest.raises(ConfigError, match="the groups of its packed integers would be cut"):
        config.check_padded_heads(64)


def test_an_adapter(published, tmp_path):
    """Merged before quantization it would be lost in rounding; after it there is nothing to add to."""
    path, plain, _ = published("qwen3", "gptq", {})
    train(plain, tmp_path / "adapter", r=2, lora_alpha=4, target_modules=["o_proj"])
    with pytest.raises(CheckpointError, match="is of packed integers, and an adapter is merged into 16-bit weights"):
        load_model(CausalLM(read_model_config(path), None, SINGLE_RANK), path, str(tmp_path / "adapter"))


# ---------------------------------------------------------------- between requests


def test_updates_and_sleep(published, make_llm, tmp_path):
    """Modules are replaced whole, and the order of channels stays the engine's, also where the weights are dropped."""
    path = published("qwen3", "gptq", {"act_order": True})[0]
    llm = make_llm(model=path, max_model_len=256, num_kvcache_blocks=16)
    prompts = [IDS[:17], IDS[5:30]]
    before, tensors = generate(llm, prompts, greedy(6)), load_file(f"{path}/model.safetensors")
    changed = {name: t * 1.5 if name.endswith("down_proj.scales") else t for name, t in tensors.items()}
    llm.update_weights(sorted(changed.items(), reverse=True))
    assert generate(llm, prompts, greedy(6)) != before
    part = {name: t for name, t in tensors.items() if "down_proj" in name}
    llm.update_weights(part, partial=True)
    assert generate(llm, prompts, greedy(6)) == before
    llm.sleep(level=2)
    llm.wake_up()
    with pytest.raises(EngineError, match=r"dropped by sleep\(level=2\)"):
        llm.generate(prompts, greedy(6))
    llm.update_weights(path)
    assert generate(llm, prompts, greedy(6)) == before
    with pytest.raises(CheckpointError, match=f"update_weights has {DOWN_1}.scales without the others that make"):
        llm.update_weights({f"{DOWN_1}.scales": tensors[f"{DOWN_1}.scales"]}, partial=True)
    with pytest.raises(CheckpointError, match=f"'{DOWN_1}.weight' is not of packed integers, as this layer is here"):
        llm.update_weights({f"{DOWN_1}.weight": torch.ones(192, 352)}, partial=True)
    assert generate(llm, prompts, greedy(6)) == before
    train(published("qwen3", "gptq", {"act_order": True})[1], tmp_path, r=2, lora_alpha=4, target_modules=["o_proj"])
    with pytest.raises(CheckpointError, match="is of packed integers, and an adapter is merged into 16-bit weights"):
        llm.update_weights(lora=tmp_path)
    assert generate(llm, prompts, greedy(6)) == before
    with pytest.raises(CheckpointError, match="or the weights before an update"):
        llm.update_weights({**part, f"{DOWN_1}.g_idx": part[f"{DOWN_1}.g_idx"].flip(0)}, partial=True)


def test_random_weights(published):
    for scheme in ({"act_order": True}, ASYMMETRIC):
        model = CausalLM(read_model_config(published("qwen3", "gptq", scheme)[0]), None, SINGLE_RANK)
        init_dummy_weights(model, seed=0)
        for weight in weights_of(model).values():
            assert 0.015 < weight.std() < 0.025


# ---------------------------------------------------------------- products on the CPU

needs_product = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch has no such product here"
)


def random_weight(N, C, size, symmetric, dtype=torch.bfloat16):
    codes = torch.randint(0, 16, (N, C), dtype=torch.uint8)
    scale = (torch.rand(N, C // size) * 0.01 + 0.001).to(dtype)
    zero = None if symmetric else torch.randint(0, 17, (N, C // size), dtype=torch.int8)
    words = int4.words_of(codes, int4.tile_of(size))
    exact = (codes.double() - (8 if zero is None else zero.double().repeat_interleave(size, 1)))
    return Weight(words, scale, zero=zero), exact * scale.double().repeat_interleave(size, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N, C, size, symmetric", [(3, 16, 8, True), (5, 96, 32, False), (4, 40, 40, True)])
def test_dequantized(N, C, size, symmetric, dtype):
    """Each number is rounded once."""
    weight, exact = random_weight(N, C, size, symmetric, dtype)
    assert torch.equal(weight.dequantize(dtype), exact.to(dtype)) and weight.num_channels == C
    assert torch.equal(int4.words_of(int4.codes_of(weight.data), 1), weight.data)


@needs_product
@pytest.mark.parametrize("N, C, size", [(48, 96, 32), (32, 192, 64), (16, 320, 160), (64, 512, 512), (16, 384, 128)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 7, int4.MAX_TOKENS_CPU, int4.MAX_TOKENS_CPU + 1])
def test_product(N, C, size, symmetric, num_tokens):
    weight, exact = random_weight(N, C, size, symmetric)
    weight = weight._replace(packed=int4.pack(weight.data, weight.scale, weight.zero))
    x, bias = torch.randn(num_tokens, C).bfloat16(), torch.randn(N).bfloat16()
    assert weight.packed is not None
    want = x.double() @ exact.T + bias.double()
    assert error(fused_linear(x, weight, bias).double(), want) < 0.01


def test_weights_without_a_product():
    for N, C, size, dtype in ((40, 64, 32, torch.bfloat16), (32, 48, 16, torch.bfloat16), (32, 64, 32, torch.float32)):
        weight, _ = random_weight(N, C, size, True, dtype)
        assert int4.pack(weight.data, weight.scale, None) is None


@needs_product
def test_an_engine_in_bf16(published, make_llm, monkeypatch):
    """Few tokens are multiplied by the packed copy; without room for one the weights are dequantized, and say the same
    but for rounding."""
    path, _, model = published("qwen3", "compressed-tensors", ASYMMETRIC | {"size": 32})
    llm = make_llm(model=path, dtype="bfloat16", max_model_len=256, num_kvcache_blocks=16)
    assert "INT4 weights (dequantized in steps of more than 48 tokens);" in describe(llm.config, llm.model_runner)
    layers = llm.model_runner.model.model.layers
    assert None not in (layers[0].mlp.gate_up_proj.packed, layers[0].mlp.down_proj.packed)
    prompts = [IDS[:30], IDS[:5]]
    got = generate(llm, prompts, greedy(4))
    monkeypatch.setattr(packing, "MAX_BYTES", 0)
    plain = make_llm(model=path, dtype="bfloat16", max_model_len=256, num_kvcache_blocks=16)
    assert plain.model_runner.model.model.layers[0].mlp.gate_up_proj.packed is None
    worst = max(families.worst_choices(model, prompts, got))
    assert worst < 0.1 and len(generate(plain, prompts, greedy(4))) == len(got)

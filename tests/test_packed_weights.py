"""Packed integers of AWQ, GPTQ, AutoRound and compressed-tensors: rules that say which modules are packed and how,
tensors that are damaged or without effect, products on the CPU. ``test_weight_formats.py`` has the rest.
"""

import itertools
import json
import re
from pathlib import Path

import families
import pytest
import torch
from helpers import generate, greedy
from quantized_checkpoints import (
    DOWN,
    FORMS,
    GATE,
    UP,
    IntScheme,
    K,
    O,
    Q,
    V,
    WeightFiller,
    built,
    config_of,
    dequantized_module,
    fields,
    make,
    put,
    quantized_config,
    rounded_to_ints,
    scheme_of,
    weights_of,
    write,
)
from safetensors.torch import load_file, save_file
from test_families import IDS, error
from test_lora import train

from nanovllm import LLM, CheckpointError, ConfigError
from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.kernels.linear.reference import Weight, fused_linear
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model
from nanovllm.quantization.int4 import numbers as int4
from nanovllm.runner import packing
from nanovllm.runner.device import describe

ASYMMETRIC, DOWN_1 = {"symmetric": False}, "model.layers.1.mlp.down_proj"


# ---------------------------------------------------------------- rules of configs

A, B = IntScheme("gptq", 4, 64, True), IntScheme("gptq", 8, 32, True)


def schemes(config, layer, *names):
    return [scheme_of(config.layers[layer].packed_schemes, name) for name in names]


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
    config = quantized_config(raw, "Qwen3MoeForCausalLM" if not raw.get("desc_act") else "Qwen3ForCausalLM")
    if "to_quant_block_names" in raw:  # of a decoder beside a vision tower
        assert all(layer.packed_schemes == () for layer in config.layers)
        config = quantized_config(raw, "Qwen3VLForConditionalGeneration", rope_parameters=families.MROPE)
    assert schemes(config, 0, Q, O, DOWN) == [schemes(config, 0, UP)[0]] * 3
    assert schemes(config, 0, Q)[0].group_size == 128 and schemes(config, 0, Q)[0].bits == 4


def test_dynamic_of_gptq():
    """The first rule that matches a name counts; parts of a merged layer that differ are 16 bits here."""
    config = quantized_config(config_of("gptq") | {"dynamic": {
        r"-:.*layers\.0\..*": {}, r"+:.*\.1\.self_attn\.v_proj": {"bits": 8, "group_size": 32},
        r".*layers\.1\.mlp\.down.*": {"group_size": 32}, r"-:.*down_proj": {}, r"-:.*layers\.2\.mlp\.up_proj": {},
    }})  # fmt: skip
    assert schemes(config, 0, Q, O, DOWN) == [None] * 3 and config.layers[0].packed_schemes == ()
    assert schemes(config, 1, Q, K, V, GATE, DOWN) == [A, A, B, A, A._replace(group_size=32)]
    assert schemes(config, 2, V, GATE, UP, DOWN) == [A, A, None, None]
    _, of_1, of_2, _ = config.layers
    assert config.precision(of_1, "self_attn.qkv_proj") is None is config.precision(of_2, "mlp.gate_up_proj")
    assert config.precision(of_1, "mlp.gate_up_proj") == A == config.precision(of_2, "self_attn.qkv_proj")
    modules = [["self_attn.q_proj"], ["mlp.up_proj", "mlp.gate_proj"]]
    config = quantized_config(config_of("gptq") | {"modules_in_block_to_quantize": modules})
    assert schemes(config, 0, Q, K, O, GATE, UP, DOWN) == [A, None, None, A, A, None]


def test_extra_config_of_auto_round():
    config = quantized_config(config_of("auto-round") | {"extra_config": {
        "model.layers.0.self_attn.o_proj": {"bits": 16, "data_type": "float"},
        r".*\.1\.mlp\..*": {"bits": 8, "group_size": 32}, "model.layers.1.mlp.down_proj": {"sym": False},
    }, "block_name_to_quantize": "model.layers.0.,model.layers.1."})  # fmt: skip
    assert schemes(config, 0, Q, O, DOWN) == [A, None, A]
    assert schemes(config, 1, GATE, UP, DOWN) == [B, B, A._replace(symmetric=False)]
    assert config.layers[2].packed_schemes == ()


def test_groups_and_targets_of_compressed_tensors():
    raw = config_of("compressed-tensors")
    weights = raw["config_groups"]["group_0"]["weights"]
    raw["config_groups"] |= {
        "group_1": {"targets": [r"re:.*self_attn\.(q|k|v)_proj"], "weights": weights | {"group_size": 32}},
        "group_2": {"targets": ["model.layers.1.mlp.down_proj"], "weights": weights | {"num_bits": 8}},
    }
    raw["ignore"] += [r"re:.*layers\.2\..*", "model.layers.0.mlp.up_proj"]
    config, a = quantized_config(raw), IntScheme("compressed-tensors", 4, 64, True)
    assert schemes(config, 0, Q, V, O, GATE, UP) == [a._replace(group_size=32)] * 2 + [a, a, None]
    assert schemes(config, 1, GATE, DOWN) == [a, a._replace(bits=8)] and config.layers[2].packed_schemes == ()


@pytest.mark.parametrize("architecture, skipped, names", [
    ("Qwen3MoeForCausalLM", ["mlp.gate"], {"mlp.experts.3.up_proj", "mlp.experts.0.down_proj", Q}),
    ("MixtralForCausalLM", ["gate", "block_sparse_moe.experts.1"], {"mlp.experts.0.up_proj", Q}),
])  # fmt: skip
def test_awq_of_experts(architecture, skipped, names):
    raw = config_of("awq") | {"modules_to_not_convert": skipped}
    config = quantized_config(raw, architecture, num_local_experts=4)
    scheme = IntScheme("awq", 4, 64, False)
    assert schemes(config, 1, *names, "mlp.gate") == [scheme] * len(names) + [None]
    some = schemes(config, 1, "mlp.experts.1.up_proj", "mlp.experts.0.up_proj")
    is_kept = config.precision(config.layers[1], "mlp.experts.gate_up_proj") == scheme
    assert is_kept == (len(skipped) == 1) and some == [scheme if is_kept else None, scheme]


def test_names_beside_a_vision_tower():
    """Rules name modules as the checkpoint has them."""
    dynamic = {r"-:model\.language_model\.layers\.0\..*": {}, r"-:.*visual.*": {}}
    config = quantized_config(
        config_of("gptq") | {"dynamic": dynamic}, "Qwen3VLForConditionalGeneration", rope_parameters=families.MROPE
    )
    assert config.layers[0].packed_schemes == () and schemes(config, 1, Q) == [A]


def test_the_start_line_counts_dequantized_layers(tmp_path):
    model, module = make(tmp_path, "qwen3"), "model.layers.1.self_attn.v_proj"
    rule = fields(dynamic={f"+:{re.escape(module)}": {"bits": 8}})
    write(tmp_path, model, "gptq", change=rule, own=lambda name: {"bits": 8} if name == module else {})
    with LLM(str(tmp_path), device="cpu", max_model_len=64, num_kvcache_blocks=4, skip_tokenizer_init=True) as llm:
        line = describe(llm.config, llm.model_runner)
        assert " with INT4 weights (1 of 8 dequantized at load; dequantized in" in line


NEUTRAL = {
    "pack_dtype": "int32", "data_type": "int", "lm_head": False, "quant_lm_head": False, "is_marlin_format": False,
    "act_bits": 16, "super_bits": None, "autoround_version": "0.9.0", "iters": 200, "global_compression_ratio": 1.4,
    "quantization_status": "compressed", "sparsity_config": {"format": "dense"}, "static_groups": False,
    "meta": {"quantizer": ["gptqmodel:5.0.0"]}, "dynamic": {}, "extra_config": {}, "desc_act": False, "ignore": [],
}  # fmt: skip
@pytest.mark.parametrize("form", ["compressed-tensors", "awq", "gptq", "auto-round"])
def test_neutral_fields_of_other_formats(form):
    """Programs write several formats, and leave fields of one in the files of another, as pack_dtype beside AWQ."""
    raw = config_of(form)
    assert quantized_config(NEUTRAL | raw).layers == quantized_config(raw).layers
    if form != "compressed-tensors":  # fields that choose modules are honoured in each
        config = quantized_config(raw | {"modules_to_not_convert": ["lm_head", "model.layers.0"]})
        assert [len(layer.packed_schemes) > 0 for layer in config.layers] == [False, True, True, True]
        config = quantized_config(raw | {"modules_in_block_to_quantize": [["mlp.down_proj"]]})
        assert [name for name, _ in config.layers[1].packed_schemes] == ["mlp.down_proj"]


# ---------------------------------------------------------------- tensors

DAMAGES = [
    lambda t: t.mT, lambda t: t[:-1], lambda t: t[..., :-1], lambda t: t[:0], lambda t: t[..., :0], torch.flatten,
    lambda t: t[None], lambda t: t[0], lambda t: t.float() * torch.nan, lambda t: torch.cat((t, t)), lambda t: t.long(),
    *(lambda t, dtype=dtype: t.to(dtype) for dtype in (torch.uint8, torch.bool, torch.float8_e4m3fn, torch.int8)),
]  # fmt: skip


@pytest.mark.parametrize("form, scheme", [
    ("compressed-tensors", ASYMMETRIC), ("awq", {}), ("gptq", {"act_order": True}),
])  # fmt: skip
def test_damaged_tensors(form, scheme, published):
    """Each tensor of a module in each wrong shape or type: an error of ours, or the numbers are there."""
    path = published("qwen3", form, **scheme)[0]
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
    *numbers, made = rounded_to_ints(torch.randn(N, 96), 32, False, scheme.bits)
    tensors = FORMS[form].scheme["layout"](*numbers, symmetric=False, bits=scheme.bits)
    assert torch.equal(dequantized_module(tensors, scheme), made)


def test_tensors_without_effect(published, tmp_path):
    """Biases of zeros, and the order of neighbours, as AutoGPTQ writes them; the module's tensors in two files."""
    path, plain, _ = published("qwen3", "gptq")
    more = {f"{DOWN_1}.bias": torch.zeros(192), f"{DOWN_1}.g_idx": (torch.arange(352) // 64).int()}
    path = families.copied(path, tmp_path, lambda tensors, config: tensors.update(more))
    tensors = load_file(f"{path}/model.safetensors")
    first = {name: tensors.pop(name) for name in list(tensors) if name.endswith("qzeros")}
    families.save(path, tensors, json.loads(Path(path, "config.json").read_text()))
    save_file(first, f"{path}/other.safetensors")
    got, want = weights_of(built(path)), weights_of(built(plain))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_parts_in_other_orders(published, tmp_path):
    """Of a merged layer, whose input is gathered once."""
    ordered = published("qwen3", "gptq", act_order=True)[0]
    name = "model.layers.0.self_attn.k_proj.g_idx"
    path = families.copied(ordered, tmp_path / "other", put(name, lambda order: order.flip(0)))
    with pytest.raises(CheckpointError, match=r"orders the channels of its input \(g_idx\) otherwise than the layers"):
        built(path)
    path = families.copied(ordered, tmp_path / "sizes", put(name, lambda order: order * 0))
    with pytest.raises(CheckpointError, match="has groups that are not of 64 channels"):
        built(path)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 cuts the groups of weights that GPTQ has ordered"):
        read_model_config(ordered).check_tensor_parallel(2)


def test_an_adapter(published, tmp_path):
    """Merged before quantization it would be lost in rounding; after it there is nothing to add to."""
    path, plain, _ = published("qwen3", "gptq")
    train(plain, tmp_path / "adapter", r=2, lora_alpha=4, target_modules=["o_proj"])
    with pytest.raises(CheckpointError, match="is of packed integers, and an adapter is merged into 16-bit weights"):
        load_model(CausalLM(read_model_config(path), None, SINGLE_RANK), path, str(tmp_path / "adapter"))


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
    path, _, model = published("qwen3", "compressed-tensors", size=32, **ASYMMETRIC)
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

"""FP8 weights: published checkpoints against transformers on the dequantized weights; quantized while loading against
the plain formula; which rows share scales; every refusal. 65 s."""

import copy
import json
import math
import re
import shutil
from dataclasses import replace

import families
import fp8_checkpoints
import pytest
import torch
from families import check_greedy, chosen
from fp8_checkpoints import FORMS, SIZES, compressed
from helpers import Reference, generate, generate_with_logits, greedy, prompt_of
from safetensors.torch import save_file
from test_families import IDS, TOLERANCE, error, hf_logits, logits_of

from nanovllm import LLM, CheckpointError, ConfigError, EngineError
from nanovllm.contrib.as_vllm.options import EngineArgs, start, to_nanovllm
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.linear.reference import QKVEpilogue, Weight
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import init_dummy_weights, load_model
from nanovllm.quantization.fields import linears
from nanovllm.quantization.fp8 import numbers as fp8_numbers
from nanovllm.quantization.fp8.numbers import quantize
from nanovllm.quantization.fp8.rules import Fp8
from nanovllm.quantization.fp8.tensors import quantized
from nanovllm.utils.checkpoint_tensor import CheckpointTensor

E4M3 = torch.float8_e4m3fn
LINEARS = list(linears(0))
PROMPTS = [IDS[:40], IDS[5:14], IDS[20:37]]
# merged in the checkpoint; tied; interleaved; biases; a factor of what is added; renamed tensors
CASES = ("qwen3", "llama-tied-biased", "phi3", "ernie4.5", "glm4", "granite", "gemma3")
PAIRS = [(case, "qwen") for case in CASES] + [("qwen3", form) for form in FORMS] + [
    ("phi3", "channel"), ("phi3", "auto_fp8"), ("glm4", "channel"), ("granite", "tensor"),
    ("qwen3-moe", "qwen"), ("qwen2-moe", "qwen"), ("glm4-moe", "channel"), ("mixtral", "auto_fp8"),
]  # fmt: skip
FEW = dict(num_experts_per_tok=2, moe_intermediate_size=160)
MORE = {  # experts whose last blocks are partial, and cut by ranks
    "gemma3": {"layer_types": families.MIXED[1:3]},
    "qwen3-moe": {**FEW, "num_experts": 4, "mlp_only_layers": [0]},
    "qwen2-moe": {
        **FEW, "num_experts": 4, "shared_expert_intermediate_size": 160, "decoder_sparse_step": 1,
        "hidden_size": 256,  # heads of 64, which a GPU does not pad
    },
    "glm4-moe": {**FEW, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "mixtral": {"num_local_experts": 4},
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """published(case, form) -> (path of an FP8 checkpoint, of its dequantized weights, transformers' model of them)."""
    made = {}

    def make(case, form):
        if (case, form) not in made:
            path, plain = (str(tmp_path_factory.mktemp(f"{case}-{form}-{kind}")) for kind in ("fp8", "plain"))
            model = families.make(path, case, **SIZES | MORE.get(case, {}))
            tensors = fp8_checkpoints.write(path, model, form)
            assert sum(tensor.dtype == E4M3 for tensor in tensors.values()) >= 8
            model.save_pretrained(plain)
            made[case, form] = path, plain, model
        return made[case, form]

    return make


@pytest.fixture
def edited(published, tmp_path):
    """edited(case, form, edit) -> path of a copy whose tensors and config ``edit(tensors, config)`` has changed."""

    return lambda case, form, edit: families.copied(published(case, form)[0], tmp_path, edit)


def check_logits(path, model):
    assert error(logits_of(str(path)), hf_logits(model, IDS)) < TOLERANCE


@pytest.mark.parametrize(("case", "form"), sorted(set(PAIRS)))
def test_logits(case, form, published):
    path, _, model = published(case, form)
    check_logits(path, model)


def test_transformers_reads_the_checkpoint(tmp_path):
    """It dequantizes where there is no GPU; it wants whole blocks."""
    from transformers import Qwen3ForCausalLM

    sizes = SIZES | dict(hidden_size=256, intermediate_size=384, head_dim=64)
    fp8_checkpoints.write(tmp_path, families.make(tmp_path, "qwen3", **sizes), "qwen")
    model = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map="cpu").eval()
    check_logits(tmp_path, model)


def built(path, tp=SINGLE_RANK, config=None):
    """The model of a checkpoint on one rank, filled."""
    model = CausalLM(config or read_model_config(path), None, tp)
    for param in model.parameters():
        param.view(torch.uint8).fill_(0x7F)  # NaN in e4m3; what is not loaded shows
    load_model(model, path)
    return model


def dequantized(model):
    """Parameters by name, FP8 ones as the products read them."""
    params = dict(model.named_parameters())
    return {
        name: Weight(param, params.get(f"{name}_scale")).dequantize(torch.float32)
        for name, param in params.items() if not name.endswith("_scale")
    }  # fmt: skip


def check_shards(path, plain, size, config=None):
    """Each rank's dequantized weights are those that the loader of 16-bit weights makes of the dequantized model."""
    for rank in range(size):
        tp = TPGroup(rank, size, None)
        got, want = dequantized(built(path, tp, config)), dequantized(built(plain, tp))
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=0, msg=f"{name} of rank {rank}")


@pytest.mark.combinations
@pytest.mark.parametrize(("case", "form"), [
    ("qwen3", "qwen"), ("qwen3", "channel"), ("qwen3", "tensor"), ("phi3", "deepseek"), ("phi3", "auto_fp8"),
    ("glm4", "block"), ("granite", "qwen"), ("granite", "channel"), ("qwen3-moe", "qwen"), ("glm4-moe", "channel"),
    ("qwen2-moe", "deepseek"), ("mixtral", "auto_fp8"),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_has_its_shard(case, form, size, published):
    """With four ranks blocks are cut, and KV heads replicated."""
    check_shards(*published(case, form)[:2], size)


@pytest.mark.parametrize(("case", "form"), [("qwen3", "qwen"), ("qwen2-moe", "qwen"), ("glm4-moe", "channel")])
def test_two_ranks(case, form, published, make_llm):
    path, _, model = published(case, form)
    prompts = [IDS[:17], IDS[5:30]]
    one, two = (
        generate(make_llm(model=path, max_model_len=256, tensor_parallel_size=size), prompts, greedy(8))
        for size in (1, 2)
    )  # fmt: skip
    assert one == two == chosen(model, prompts, one)


# ---------------------------------------------------------------- blocks

WIDE = dict(hidden_size=256, intermediate_size=768)  # blocks of 128, several to a layer


def block_ns(model):
    """Of the first layer's linear layers, in the order of LINEARS; each checked with the scales they have."""
    layer = model.model.layers[0]
    linears = [layer.get_submodule(name) for name in LINEARS]
    for linear in linears:
        blocks = linear.weight_scale.split(linear.block_n)
        assert all(torch.equal(block, block[:1].expand_as(block)) for block in blocks)
    return [linear.block_n for linear in linears]


@pytest.mark.parametrize(("case", "form", "sizes", "by_size"), [
    # ranks -> qkv, o, gate_up, down; "down" has all output features whatever the ranks
    ("qwen3", "qwen", dict(head_dim=64), {1: [128] * 4, 2: [64, 128, 128, 128], 4: [64, 128, 64, 128]}),
    ("qwen3", "block", dict(head_dim=128), {1: [128] * 4, 2: [128] * 4, 4: [128, 128, 64, 128]}),
    ("phi3", "deepseek", {}, {1: [128] * 4, 2: [64, 128, 128, 128]}),  # merged in the checkpoint
    # a head's rows are permuted: inside blocks, or across them
    ("glm4", "qwen", dict(head_dim=64, num_attention_heads=8, num_key_value_heads=4), {1: [128] * 4, 2: [128] * 4}),
    ("glm4", "qwen", dict(head_dim=256), {1: [1, 128, 128, 128]}),
    ("glm4", "qwen", dict(head_dim=96), {1: [1, 128, 128, 128]}),
    ("qwen3", "qwen", SIZES, {1: [64, 64, 64, 64], 2: [32, 64, 32, 64]}),
    ("qwen3", "channel", dict(head_dim=128), {1: [1] * 4, 2: [1] * 4}),
    ("qwen3", "tensor", dict(head_dim=128), {1: [1] * 4}),
])  # fmt: skip
def test_rows_that_share_scales(case, form, sizes, by_size, tmp_path):
    """As many as the kernels may count on, known before the weights are."""
    sizes = dict(num_hidden_layers=1, layer_types=None) | WIDE | sizes
    fp8_checkpoints.write(tmp_path, families.make(tmp_path, case, **sizes), form)
    for size, want in by_size.items():
        for rank in range(size):
            assert block_ns(built(str(tmp_path), TPGroup(rank, size, None))) == want, size
    if form == "qwen":
        model = CausalLM(read_model_config(str(tmp_path)), None, SINGLE_RANK)
        init_dummy_weights(model, 0)
        assert block_ns(model) == by_size[1]


def test_kernels_by_rows_that_share_scales(monkeypatch, tmp_path):
    """On Hopper many tokens meet the blocks in e4m3, but not those that a shard cuts."""
    pytest.importorskip("triton")
    from nanovllm.kernels.linear import dispatch

    if dispatch.prefill_gemm_sm90 is None:
        pytest.skip("no Gluon kernels")
    monkeypatch.setattr(dispatch, "is_sm90", lambda device: True)
    fp8_checkpoints.write(tmp_path, families.make(tmp_path, "qwen3", **SIZES | WIDE, head_dim=128), "qwen")
    for size, want in ((1, [True] * 4), (4, [True, True, False, False])):  # QKV of 384 features, down of 192 channels
        layer = CausalLM(read_model_config(str(tmp_path)), None, TPGroup(0, size, None)).model.layers[0]
        heads = 4 // size, max(1, 2 // size)
        cache = torch.zeros(1, 16, heads[1], 128, dtype=torch.bfloat16)
        epilogue = QKVEpilogue(None, None, 0.0, torch.zeros(16, 128), None, None, cache, cache, *heads)
        seen = []
        for name in LINEARS:
            linear = layer.get_submodule(name)
            linear.ops, linear.tp = WeightOf, SINGLE_RANK  # nothing to reduce
            x = torch.zeros(300, linear.weight.shape[1], dtype=torch.bfloat16)
            more = (None, epilogue) if "qkv" in name else ()
            weight, _ = linear(x, *more) if more else (linear(x), None)
            seen.append(dispatch.supports_w8a8(x, weight, *more[1:]))
        assert seen == want


class WeightOf:
    """Operations that return their weight."""

    @staticmethod
    def fused_linear(x, weight, *args, **options):
        return weight

    qkv_linear = fused_linear


@pytest.mark.parametrize(("form", "skipped"), [
    ("qwen", ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]),
    ("channel", ["re:.*\\.0\\.mlp.*", "model.layers.1.self_attn.o_proj"]),
    ("modelopt", ["*layers.1.self_attn*"]),
    ("auto_fp8", ["layers.0"]),
])  # fmt: skip
def test_layers_left_out(form, skipped, tmp_path):
    model = families.make(tmp_path, "qwen3", **SIZES)
    linears = {"self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}
    names = {  # by hand
        "qwen": skipped,
        "channel": [*(f"model.layers.0.mlp.{x}" for x in linears["mlp"]), "model.layers.1.self_attn.o_proj"],
        "modelopt": [f"model.layers.1.self_attn.{x}" for x in linears["self_attn"]],
        "auto_fp8": [f"model.layers.0.{part}.{x}" for part, xs in linears.items() for x in xs],
    }[form]

    def change(tensors, config):
        for key in ("modules_to_not_convert", "ignored_layers", "ignore"):
            if key in config["quantization_config"]:
                config["quantization_config"][key] = ["lm_head", *skipped]

    tensors = fp8_checkpoints.write(tmp_path, model, form, names, change)
    assert not any(tensors[f"{name}.weight"].dtype == E4M3 for name in names)
    check_logits(tmp_path, model)
    config = read_model_config(str(tmp_path))
    assert config.quantized() == config  # LLM(quantization="fp8") changes nothing


def test_every_kind_of_layer_is_compiled():
    config = families_config("Qwen3ForCausalLM", BLOCKS | {"modules_to_not_convert": ["model.layers.1.mlp"]})
    kinds = config.one_layer_of_each_kind()
    assert kinds.layers == tuple(config.layers[i] for i in (0, 1, 3))
    assert len({layer.fp8_linears for layer in kinds.layers}) == 2


@pytest.mark.parametrize("form", ["auto_fp8", "tensor", "modelopt", "qwen"])
def test_scales_of_the_kv_cache(form, published):
    for module in built(published("qwen3", form)[0]).modules():
        if isinstance(module, Attention):
            is_given = form != "qwen"
            assert module.kv_scale_is_given == [is_given] * 2
            assert module.kv_scale.tolist() == [
                [pytest.approx(fp8_checkpoints.KV_SCALES[which] if is_given else 1)] * 2 for which in "kv"
            ]  # fmt: skip


@pytest.mark.parametrize(("rank", "size", "heads"), [(0, 1, [0, 1]), (1, 2, [1]), (1, 4, [0]), (2, 4, [1])])
def test_scales_of_the_kv_cache_per_head(rank, size, heads, edited):
    """Each rank takes those of its KV heads, which may be replicas. Such a checkpoint was refused."""
    given = {"k": [0.25, 0.5], "v": [2.0, 3.0]}
    path = edited("qwen3", "tensor", lambda tensors, _: tensors.update({
        f"model.layers.1.self_attn.{which}_scale": torch.tensor(given[which]).reshape(2, 1, 1) for which in given
    }))  # fmt: skip
    attn = built(path, TPGroup(rank, size, None)).model.layers[1].self_attn.attn
    assert attn.kv_scale.tolist() == [[given[which][head] for head in heads] for which in "kv"]
    assert attn.kv_scale_is_given == [True, True]


def test_hf_quant_config(published, edited, tmp_path):
    """ModelOpt's older checkpoints have a file of their own instead of ``quantization_config``."""
    edited("qwen3", "modelopt", lambda _, config: config.pop("quantization_config"))
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    own = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    check_logits(tmp_path, published("qwen3", "modelopt")[2])
    quantization["quant_algo"] = "NVFP4"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(CheckpointError, match=r"quantization_config: quant_algo='NVFP4' is not supported\. Supported"):
        read_model_config(str(tmp_path))


def test_vision_prefix():
    """Names in the list may have a prefix that the family renames."""
    raw = {**fp8_checkpoints.deepseek(None), "modules_to_not_convert": ["language_model.model.layers.1.mlp"]}
    skips_by_regex = compressed("channel", ["re:language_model\\.model\\.layers\\.1\\.mlp"])
    for quantization in (raw, skips_by_regex):
        config = families_config("Gemma3ForConditionalGeneration", quantization)
        assert ["mlp.down_proj" in layer.fp8_linears for layer in config.layers] == [True, False, True, True]


def families_config(architecture, quantization, **more):
    from nanovllm.models.config_reader import model_config

    raw = {**families.BASE, "architectures": [architecture], "quantization_config": quantization, **more}
    return model_config({**raw, "torch_dtype": "bfloat16"})


# ---------------------------------------------------------------- refusals

GROUPS = compressed("channel")["config_groups"]
BLOCKS = fp8_checkpoints.deepseek(None)


def in_group(part, **changes):
    config = copy.deepcopy(compressed("channel"))
    config["config_groups"]["group_0"][part].update(changes)
    return config


SLOW = "regular expressions that take more than 1 s to match"


@pytest.mark.parametrize(("quantization", "what"), [
    ({"quant_method": "hqq", "bits": 4}, "quant_method='hqq'"),
    ({"quant_method": "gguf", "bits": 4}, "quant_method='gguf'"),
    ({"quant_method": "mxfp4"}, "quant_method='mxfp4'"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quant_method='bitsandbytes'"),
    ({"bits": 4}, "quant_method=None"),
    ("fp8", "'fp8'"),
    ({**BLOCKS, "fmt": "e5m2"}, "fmt='e5m2'"),
    ({**BLOCKS, "weight_block_size": [64, 128]}, "weight_block_size=[64, 128]"),
    ({**BLOCKS, "scale_fmt": "ue8m0"}, "scale_fmt='ue8m0'"),
    ({**BLOCKS, "dequantize": True}, "dequantize=True"),
    ({**BLOCKS, "modules_to_not_convert": "lm_head"}, "'lm_head' for the modules to leave out (not a list of names)"),
    ({**BLOCKS, "modules_to_not_convert": ["model.layers.1.self_attn.k_proj"]},
     "leaving out model.layers.1.self_attn.k_proj, but not all of self_attn.q_proj, self_attn.k_proj, "
     "self_attn.v_proj,"),
    ({**compressed("channel"), "format": "mixed-precision"}, "format='mixed-precision'"),
    ({**compressed("channel"), "format": "int-quantized"}, "format='int-quantized'"),
    (in_group("weights", num_bits=4), "config_groups.group_0.weights.num_bits=4"),
    (in_group("weights", type="int"), "config_groups.group_0.weights.type='int'"),
    (in_group("weights", strategy="group"), "config_groups.group_0.weights.strategy='group'"),
    (in_group("weights", symmetric=False), "config_groups.group_0.weights.symmetric=False"),
    (in_group("weights", block_structure=[64, 64]), "config_groups.group_0.weights.block_structure=[64, 64]"),
    (in_group("input_activations", type="int"), "config_groups.group_0.input_activations.type='int'"),
    ({**compressed("channel"), "config_groups": {}}, "config_groups={} (not one group)"),
    ({**compressed("channel"), "config_groups": {"g": {**GROUPS["group_0"], "targets": ["re:.*mlp.*"]}}},
     "config_groups.g.targets=['re:.*mlp.*']"),
    ({**compressed("channel"), "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme.type='int'"),
    ({**compressed("channel"), "transform_config": {"R1": 1}}, "transform_config={'R1': 1}"),
    ({**compressed("channel"), "sparsity_config": {"format": "sparse-24-bitmask"}},
     "sparsity_config.format='sparse-24-bitmask'"),
    ({**compressed("channel"), "sparsity_config": "dense"}, "sparsity_config='dense'"),  # was an AttributeError
    ({**compressed("channel"), "ignore": ["re:("]}, "the regular expression 're:(' (missing ), unterminated"),
    ({**compressed("channel"), "ignore": ["lm_head", "re:(([a-z.0-9_]*)*)*!"]}, SLOW),
    ({**BLOCKS, "modules_to_not_convert": ["re:.*gate$", "re:(model|\\w+|[.])+#"]}, SLOW),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'"),
], ids=str)  # fmt: skip
def test_refused_configs(quantization, what, monkeypatch):
    monkeypatch.setattr("nanovllm.utils.patterns.SECONDS", 1.0)
    with pytest.raises(CheckpointError) as info:
        families_config("Qwen3ForCausalLM", quantization)
    text = str(info.value)
    assert text.startswith(f"config.json: quantization_config: {what}")
    if "the regular" not in what:
        assert f"{what} is not supported. Supported are FP8 weights (e4m3) with a scale per tensor" in text
    assert text.endswith("or the 16-bit one, which LLM(quantization='fp8') quantizes as it loads.")


EXPERTS = "model.layers.1.mlp.experts.down_proj"
EXPERT = "model.layers.1.mlp.experts.3.down_proj"
O_PROJ = "model.layers.0.self_attn.o_proj"


def put(name, change, to=None):
    """An edit: the tensor ``name``, or ``to``, is ``change`` of the one that is there, or a new one."""
    return lambda tensors: tensors.update({to or name: change(tensors[name]) if callable(change) else change})


def put_experts(tensor):
    """An edit: one tensor of all experts in place of each expert's."""
    experts = EXPERTS.removesuffix("down_proj")

    def edit(tensors):
        for name in [name for name in tensors if name.startswith(experts) and name.endswith("down_proj.weight")]:
            del tensors[name]
        tensors[EXPERTS] = tensor

    return edit


GATE, V_SCALE = "model.layers.1.mlp.gate", "model.layers.1.self_attn.v_scale"
IN_BLOCKS, NOT_FP8 = "for quantization_config has blocks of 128 x 128.", "expected floats. This layer is not FP8 here."
REFUSED_TENSORS = {  # (case, form) -> [(edit, a part of the text)]
    ("qwen3", "qwen"): [
        (put(f"{O_PROJ}.weight", torch.Tensor.bfloat16),
         f"tensor '{O_PROJ}.weight' is of bfloat16, expected float8_e4m3fn. quantization_config in config.json does "
         "not leave it out."),
        (put(f"{O_PROJ}.weight", lambda t: t.view(torch.int8)), "is of int8, expected float8_e4m3fn."),
        (put(f"{O_PROJ}.weight", lambda t: t.float().to(torch.float8_e5m2)),
         "is of float8_e5m2, expected float8_e4m3fn."),
        (put("lm_head.weight", lambda t: t.to(E4M3)), f"tensor 'lm_head.weight' is of float8_e4m3fn, {NOT_FP8}"),
        (put("lm_head.weight_scale_inv", torch.ones(1, 2)),
         "tensor 'lm_head.weight_scale_inv' is twice there, or unknown to the model."),
        (lambda tensors: tensors.pop(f"{O_PROJ}.weight_scale_inv"),
         f"1 tensors are missing, among them {O_PROJ}.weight_scale."),
        *((put(f"{O_PROJ}.weight_scale_inv", torch.ones(shape)),
           f"tensor '{O_PROJ}.weight_scale_inv' has shape {shape}, expected [1] or [2, 1], {IN_BLOCKS}")
          for shape in ([3, 1], [192], [192, 1])),  # of rows, too: kernels may have been chosen for blocks
        (put(f"{O_PROJ}.weight_scale_inv", torch.ones(2, 1, dtype=torch.uint8)),
         f"tensor '{O_PROJ}.weight_scale_inv' is of uint8, expected floats."),
        *((put(f"{O_PROJ}.weight_scale_inv", lambda t, x=value: t.index_fill(0, torch.tensor([len(t) - 1]), x)),
           f"tensor '{O_PROJ}.weight_scale_inv' has numbers from {said}")
          for value, said in ((-0.5, "-0.5 to "), (math.nan, "nan to nan, not finite numbers >= 0."),
                              (math.inf, ""), (-math.inf, "-inf to "))),
        (put(f"{O_PROJ}.weight_zero_point", torch.ones(2, 1)), "_zero_point' is twice there, or unknown to the model."),
    ],
    ("qwen3", "channel"): [(put(f"{O_PROJ}.weight_scale", torch.ones(2, 1)),
                            f"tensor '{O_PROJ}.weight_scale' has shape [2, 1], expected [1] or [192, 1].")],
    ("qwen3", "tensor"): [
        (put(V_SCALE, torch.ones(3)), f"tensor '{V_SCALE}' has shape [3], expected [1] or [2]."),
        (put(V_SCALE, torch.tensor([1.0, -1.0])), f"tensor '{V_SCALE}' has -1.0, expected positive numbers."),
    ],
    ("qwen3-moe", "qwen"): [
        (lambda tensors: tensors.pop(f"{EXPERT}.weight_scale_inv"),
         f"1 tensors are missing, among them {EXPERT}.weight_scale."),
        (put(f"{EXPERT}.weight_scale_inv", torch.ones(1, 2)),
         f"tensor '{EXPERT}.weight_scale_inv' has shape [1, 2], expected [1] or [2, 2], {IN_BLOCKS}"),
        (put(f"{EXPERT}.weight", torch.Tensor.bfloat16), f"'{EXPERT}.weight' is of bfloat16, expected float8_e4m3fn."),
        (put(EXPERTS, torch.zeros(5, 192, 160).to(E4M3)), f"'{EXPERTS}' is twice there, or unknown to the model."),
        (put_experts(torch.zeros(5, 192, 160).to(E4M3)), "down_proj' has shape [5, 192, 160], expected [4, 192, 160]."),
        (put_experts(torch.zeros(4, 160, 192).to(E4M3)), f"'{EXPERTS}[0]' has shape [160, 192], expected [192, 160]."),
        (put(f"{GATE}.weight", lambda t: t.to(E4M3)), f"tensor '{GATE}.weight' is of float8_e4m3fn, {NOT_FP8}"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("case", "form", "edit", "text"), [
    (*key, *refusal) for key, refusals in REFUSED_TENSORS.items() for refusal in refusals
])  # fmt: skip
def test_refused_tensors(case, form, edit, text, edited):
    path = edited(case, form, lambda tensors, _: edit(tensors))
    with pytest.raises(CheckpointError) as info:
        built(path)
    assert text in str(info.value)


def test_fp8_without_a_config(edited):
    path = edited("qwen3", "qwen", lambda _, config: config.pop("quantization_config"))
    with pytest.raises(CheckpointError, match=r"is of float8_e4m3fn, expected floats|unknown to the model"):
        built(path)


# ---------------------------------------------------------------- quantized while loading


def rowwise(weight):
    """The plain formula: (data, scale [N, 1])."""
    scale = (weight.abs().amax(1, keepdim=True) * (1 / 448)).clamp(min=1e-12)
    return (weight / scale).to(E4M3), scale


def blockwise(weight):
    """The same of each block of 128 x 128; what it makes of the weight."""
    want = weight.clone()
    for rows in want.split(128):
        for block in rows.split(128, dim=1):
            data, scale = rowwise(block.reshape(1, -1))
            block.copy_((data.float() * scale).reshape(block.shape))
    return want


def test_quantize():
    weight = torch.randn(7, 300)
    weight[3] = 0
    data, scale = quantize(weight.bfloat16())
    want = rowwise(weight.bfloat16().float())
    assert torch.equal(data.float(), want[0].float()) and torch.equal(scale, want[1])


@pytest.mark.parametrize(("N", "C"), [(7, 300), (300, 7), (128, 256), (400, 260)])
def test_quantize_blocks(N, C, monkeypatch):
    """Also in several steps."""
    weight = torch.randn(N, C) * torch.rand(N, 1)
    want = blockwise(weight)
    for num_bytes in (64 << 20, 4 * C * 128 * 2, 1):
        monkeypatch.setattr(fp8_numbers, "ROWS_BYTES", num_bytes)
        data, scale = quantize(weight, 128)
        assert scale.shape == (-(-N // 128), -(-C // 128))
        spread = scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :C]
        assert torch.equal(data.float() * spread, want)


def quantize_linears(model, in_blocks=False):
    with torch.no_grad():
        for name, param in fp8_checkpoints.parts_of(model):
            if fp8_checkpoints.LINEAR.fullmatch(name):
                data, scale = rowwise(param.float())
                param.copy_(blockwise(param.float()) if in_blocks else data.float() * scale)


@pytest.fixture(scope="module", params=["dense", "experts"])
def online(request, make_checkpoint, tmp_path_factory):
    """(path of a 16-bit checkpoint, transformers' model of its quantized values; parameters after a training step, and
    the model of their quantized values).
    """
    if request.param == "dense":
        path = make_checkpoint()
        model = Reference(path).model
    else:
        path = str(tmp_path_factory.mktemp("mixture"))
        model = families.make(path, "qwen2-moe", **SIZES | MORE["qwen2-moe"])
    quantize_linears(model)
    new = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        for param in new.parameters():
            param.mul_(1 + 0.3 * torch.randn_like(param))
    weights = {name: param.detach().clone() for name, param in new.named_parameters()}
    quantize_linears(new)
    return path, model, weights, new


def check_tokens(llm, *models):
    """The engine's greedy tokens are those of the first model, and not those of the others."""
    completions = generate(llm, PROMPTS, greedy(8))
    for model in models:
        assert (completions == chosen(model, PROMPTS, completions)) == (model is models[0])


def test_online(online, make_llm):
    path, model, weights, _ = online
    llm = make_llm(model=path, max_model_len=256, quantization="fp8")
    check_greedy(llm, model, PROMPTS, 8, TOLERANCE)
    kinds = {name.removesuffix(".weight").split(".")[-1] for name, param in llm.model_runner.model.named_parameters()
             if param.dtype == E4M3}  # fmt: skip
    assert kinds == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    experts = [name for name in llm.model_runner.model.state_dict() if ".experts." in name and "scale" not in name]
    assert len(experts) == (4 if any(".experts." in name for name in weights) else 0)


@pytest.mark.combinations
@pytest.mark.parametrize("case", ["phi3", "glm4", "granite", "llama-tied-biased", "qwen2-moe", "glm4-moe"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("block", [0, 128])
def test_online_shards(case, size, block, tmp_path):
    """Ranks have the scales of a single one: those of whole rows, or of whole blocks where an engine of published ones
    is updated. Of several ranks, the 16-bit loader says the shards.
    """
    model = families.make(tmp_path, case, **SIZES | MORE.get(case, {}))
    path, plain = str(tmp_path), str(tmp_path / "plain")
    quantize_linears(model, in_blocks=block > 0)
    model.save_pretrained(plain)
    config = read_model_config(path).quantized()
    check_shards(path, plain, size, replace(config, fp8=block))


@pytest.mark.parametrize("size", [1, 2])
def test_online_experts_that_are_transposed(size, tmp_path):
    """As Qwen3-VL-MoE is published: what has a scale each is a row of the transposed tensor."""
    path, swapped = str(tmp_path / "usual"), tmp_path / "swapped"
    sizes = {name: size for name, size in SIZES.items() if name != "layer_types"}
    families.make(path, "qwen3-vl-moe", **sizes | FEW | {"num_experts": 4})
    swapped = families.copied(path, swapped, families.transpose_experts)
    config = read_model_config(path).quantized()
    for rank in range(size):
        usual, other = (built(p, TPGroup(rank, size, None), config) for p in (path, swapped))
        for (name, want), got in zip(usual.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name


def test_the_keyword_of_vllm():
    assert to_nanovllm({"quantization": "fp8"})["quantization"] == "fp8"
    assert "quantization" not in to_nanovllm({"quantization": None})


@pytest.mark.parametrize(("form", "name", "has"), [
    ("tensor", "compressed-tensors", "'compressed-tensors'"), ("modelopt", "modelopt", "'modelopt'"),
    ("qwen", "fp8", None), ("qwen", "modelopt", "'fp8'"), (None, "compressed-tensors", "none"),
])  # fmt: skip
def test_vllm_names_the_quantization_of_a_checkpoint(form, name, has, published, make_checkpoint):
    """vLLM takes the name of the checkpoint's own, where there is nothing to choose, and refuses another one."""
    path = make_checkpoint() if form is None else published("qwen3", form)[0]
    args = EngineArgs(model=path, quantization=name, max_model_len=128)
    options = {"quantization": name, "max_model_len": 128, "device": "cpu", "skip_tokenizer_init": True}
    if has not in (None, repr(name)):
        text = re.escape(f"LLM: quantization={name!r} names the quantization of a checkpoint, and {path} has {has}.")
        for make in (args.create_model_config, lambda: start(path, options)):
            with pytest.raises(ConfigError, match=text):
                make()
        return
    assert args.create_model_config().max_model_len == 128
    with start(path, options) as llm, start(path, {**options, "quantization": None}) as plain:
        assert generate(llm, [[5, 6, 7] * 7], greedy(4)) == generate(plain, [[5, 6, 7] * 7], greedy(4))


@pytest.mark.parametrize("more", [{}, dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96,
                                           shared_expert_intermediate_size=96)], ids=["dense", "experts"])  # fmt: skip
def test_dummy_weights(more):
    """As those of 16 bits: N(0, 0.02), the same for the same seed."""
    config = families_config("Qwen2MoeForCausalLM" if more else "Qwen3ForCausalLM", None, **more).quantized()
    models = [CausalLM(config, None, SINGLE_RANK) for _ in range(2)]
    for model in models:
        init_dummy_weights(model, 3)
    first, second = map(dequantized, models)
    for name, param in first.items():
        assert torch.equal(param, second[name])
        if "norm" not in name and param.numel() > 4096:
            assert abs(param.mean()) < 1e-3 and abs(param.std() - 0.02) < 1e-3, name


# ---------------------------------------------------------------- updates, sleep


@pytest.mark.parametrize("size", [1, 2])
def test_update_in_16_bits(size, online, make_llm):
    """Weights of a trainer, all experts in one tensor, are quantized as those of the checkpoint were; sleeping keeps
    them.
    """
    path, model, weights, new = online
    llm = make_llm(model=path, max_model_len=256, quantization="fp8", tensor_parallel_size=size)
    check_tokens(llm, model, new)
    addresses = [param.data_ptr() for param in llm.model_runner.model.parameters()]
    names = llm.update_weights(weights)
    if len(names) < 50:  # no experts, which are named one by one
        assert {name for name in names if not name.endswith("_scale")} == weights.keys()
    assert [param.data_ptr() for param in llm.model_runner.model.parameters()] == addresses
    check_tokens(llm, new, model)
    llm.sleep(level=1)
    llm.wake_up()
    check_tokens(llm, new)
    llm.sleep(level=2)
    llm.wake_up()
    with pytest.raises(EngineError, match=r"dropped by sleep\(level=2\): [0-9]+ tensors are missing"):
        llm.generate(PROMPTS, greedy(8))
    llm.update_weights(weights.items() if size == 1 else in_fp8(new))
    check_tokens(llm, new)


def in_fp8(model):
    """As a checkpoint with a scale for each output feature would have a model's weights."""
    pairs = {}
    for name, weight in fp8_checkpoints.parts_of(model):
        pairs[name] = weight
        if fp8_checkpoints.LINEAR.fullmatch(name):
            pairs[name], pairs[f"{name}_scale"] = rowwise(weight)
    return pairs


def test_update_in_fp8(online, make_llm):
    """Data and scales are taken as they are, together or not at all."""
    path, _, weights, new = online
    llm = make_llm(model=path, max_model_len=256, quantization="fp8")
    pairs, names = in_fp8(new), [f"{O_PROJ}.weight", f"{EXPERT}.weight"]
    llm.update_weights(pairs)
    check_tokens(llm, new)
    for name in names[: 1 + (names[1] in pairs)]:
        for half, other in ((name, f"{name}_scale"), (f"{name}_scale", name)):
            llm.update_weights({half: pairs[half]}, partial=True)  # tensor by tensor, as vLLM's load_weights
            with pytest.raises(EngineError, match=f"or its scale alone: 1 tensors are missing, among them {other}"):
                llm.generate(PROMPTS, greedy(8))
            llm.update_weights({other: pairs[other]}, partial=True)
    check_tokens(llm, new)
    name = f"{O_PROJ}.weight"
    with pytest.raises(CheckpointError, match=f"update_weights: [1-9] tensors are missing, among them {name}_scale"):
        llm.update_weights({key: pair for key, pair in pairs.items() if key != f"{name}_scale"})
    llm.update_weights(pairs)
    llm.update_weights({name: pairs[name], f"{name}_scale": pairs[f"{name}_scale"]}, partial=True)
    with pytest.raises(CheckpointError, match=r"weight_scale_inv' has shape \[1, 3\], expected \[1\] or \["):
        llm.update_weights({f"{name}_scale_inv": torch.ones(1, 3)}, partial=True)
    with pytest.raises(CheckpointError, match=f"tensor '{name}_scale' is twice there"):
        llm.update_weights([(name, weights[name]), (f"{name}_scale", pairs[f"{name}_scale"])], partial=True)
    llm.update_weights(weights)
    check_tokens(llm, new)


def test_update_of_blocks(published, make_llm):
    """A published engine takes 16 bits too, as the blocks that its kernels were chosen for."""
    path, _, model = published("qwen3", "qwen")
    llm, ids = make_llm(model=path, max_model_len=256), IDS[:30]
    assert block_ns(llm.model_runner.model) == [64] * 4
    _, (before,) = generate_with_logits(llm, [ids], 1)
    for scale in (torch.ones(192), torch.ones(192, 1)):  # of rows: kernels were chosen for blocks; nothing is written
        with pytest.raises(CheckpointError, match="_scale' has shape"):
            llm.update_weights({f"{O_PROJ}.weight_scale": scale}, partial=True)
    assert torch.equal(generate_with_logits(llm, [ids], 1)[1][0], before)
    new = copy.deepcopy(model)
    with torch.no_grad():
        for param in new.parameters():
            param.mul_(1.1)
    llm.update_weights(dict(new.named_parameters()))
    quantize_linears(new, in_blocks=True)
    _, (after,) = generate_with_logits(llm, [ids], 1)
    assert error(after, hf_logits(new, ids)[-1:]) < TOLERANCE < error(after, before)
    assert block_ns(llm.model_runner.model) == [64] * 4
    llm.update_weights(path)
    assert torch.equal(generate_with_logits(llm, [ids], 1)[1][0], before)
    assert llm.model_runner.model.model.layers[0].mlp.down_proj.weight_scale.shape == (192, 320 // 64)


# ---------------------------------------------------------------- accuracy


@pytest.mark.parametrize("rows", [64, 128])
def test_update_of_a_single_block(rows):
    """A tensor that is smaller than a block has one scale, in 16 bits too."""
    with torch.no_grad():
        layer, weight = MergedColumnParallelLinear(96, [rows, 200], precision=Fp8(128)), torch.randn(rows + 200, 96)
        for i, part in enumerate(weight.split([rows, 200])):
            for param, tensor in quantized(layer.weight, CheckpointTensor.of("w", part)):
                param.weight_loader(param, tensor, i)
    want = torch.cat([blockwise(part) for part in weight.split([rows, 200])])
    assert torch.equal(layer.weight.float() * layer.weight_scale.repeat_interleave(32, 1), want)


def test_the_demo_model_answers_as_before():
    """Prompts, and sums that training never saw."""
    from test_demo_model import check_answers, check_held_out_sums

    with LLM(device="cpu", quantization="fp8", quiet=True) as llm:
        check_answers(llm)
        check_held_out_sums(llm, 100)


# ---------------------------------------------------------------- experts


def moe_config(architecture="Qwen3MoeForCausalLM", num_experts=4, **quantization):
    experts = dict(num_experts=num_experts, num_experts_per_tok=2, moe_intermediate_size=32)
    return families_config(architecture, BLOCKS | quantization, **experts, shared_expert_intermediate_size=32)


@pytest.mark.parametrize(("architecture", "skipped", "left_out"), [  # of layer 0
    ("Qwen3MoeForCausalLM", ["lm_head", "model.layers.0.mlp.gate"], set()),
    ("Qwen3MoeForCausalLM", ["model.layers.0.mlp.experts"], {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
    ("Qwen3MoeForCausalLM", ["re:.*experts.*down_proj"], {"mlp.experts.down_proj"}),
    ("Qwen3MoeForCausalLM", [f"model.layers.0.mlp.experts.{e}.down_proj" for e in range(4)], {"mlp.experts.down_proj"}),
    ("Qwen2MoeForCausalLM", ["mlp.shared_expert_gate", "mlp.shared_expert"],
     {"mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj"}),
    ("Glm4MoeForCausalLM", ["model.layers.0.mlp.shared_experts"],  # renamed
     {"mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj"}),
    ("MixtralForCausalLM", ["model.layers.0.block_sparse_moe.gate"], set()),
    ("MixtralForCausalLM", [f"model.layers.0.block_sparse_moe.experts.{e}.w2" for e in range(4)],
     {"mlp.experts.down_proj"}),
])  # fmt: skip
def test_experts_left_out(architecture, skipped, left_out):
    config = moe_config(architecture, modules_to_not_convert=skipped)
    assert linears(4).keys() - config.layers[0].fp8_linears == left_out


def test_some_experts_left_out():
    name = "model.layers.1.mlp.experts.3.up_proj"
    with pytest.raises(CheckpointError) as info:
        moe_config(modules_to_not_convert=[name])
    some = "mlp.experts.0.gate_proj to mlp.experts.3.up_proj"
    assert f"leaving out {name}, but not all of {some}, is not supported." in str(info.value)


@pytest.mark.parametrize("left_out", [["shared_expert"], [f"experts.{e}" for e in range(4)]], ids=["shared", "routed"])
def test_logits_with_experts_left_out(left_out, tmp_path):
    model = families.make(tmp_path, "qwen2-moe", **SIZES | MORE["qwen2-moe"])
    names = [f"model.layers.{i}.mlp.{mlp}.{x}_proj" for i in (0, 1) for mlp in left_out for x in ("gate", "up", "down")]
    tensors = fp8_checkpoints.write(tmp_path, model, "qwen", names)
    assert {tensors[f"{name}.weight"].dtype for name in names} == {torch.float32}
    check_logits(tmp_path, model)


@pytest.mark.parametrize("form", ["qwen", "channel"])
def test_merged_experts_in_fp8(form, tmp_path):
    """One tensor of all experts' data and one of their scales, as transformers 5 holds them; of whole blocks."""
    path = str(tmp_path / "one by one")
    sizes = SIZES | MORE["qwen3-moe"] | dict(moe_intermediate_size=128)
    tensors, by_name = fp8_checkpoints.write(path, families.make(path, "qwen3-moe", **sizes), form), {}
    for name in [name for name in tensors if ".experts." in name]:
        prefix, _, rest = name.partition(".experts.")
        expert, part, kind = rest.split(".")
        by_name.setdefault((prefix, kind), {}).setdefault(int(expert), {})[part] = tensors.pop(name)
    for (prefix, kind), experts in by_name.items():
        suffix = kind.removeprefix("weight")
        gate_up = [torch.cat((experts[e]["gate_proj"], experts[e]["up_proj"])) for e in sorted(experts)]
        tensors[f"{prefix}.experts.gate_up_proj{suffix}"] = torch.stack(gate_up)
        tensors[f"{prefix}.experts.down_proj{suffix}"] = torch.stack([experts[e]["down_proj"] for e in sorted(experts)])
    shutil.copytree(path, tmp_path / "merged")
    save_file(tensors, tmp_path / "merged" / "model.safetensors")
    got, want = dequantized(built(str(tmp_path / "merged"))), dequantized(built(path))
    for name in want:
        assert torch.equal(got[name], want[name]), name


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "form"), [
    ("qwen3", None), ("qwen3", "qwen"), ("qwen3", "tensor"), ("qwen2-moe", None), ("qwen2-moe", "qwen"),
])  # fmt: skip
def test_the_gpu_loads_the_same_bytes(case, form, published, tmp_path):
    """Quantized while loading (None), and published."""
    if form is None:
        families.make(tmp_path, case, **SIZES | MORE.get(case, {}))
        path, config = str(tmp_path), read_model_config(str(tmp_path)).quantized()
    else:
        path, config = published(case, form)[0], None
    on_cpu = built(path, config=config)
    with torch.device("cuda"):
        on_gpu = built(path, config=config)
    for (name, want), got in zip(on_cpu.named_parameters(), on_gpu.parameters(), strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)), name


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "form"), [("qwen3-moe", "qwen"), ("qwen2-moe", "qwen"), ("glm4-moe", "channel")])
def test_experts_on_the_gpu(case, form, published, make_llm):
    """In fp32, which no kernel quantizes; eager, and then under CUDA graphs."""
    path, _, model = published(case, form)
    options = dict(model=path, device="cuda", dtype="float32", num_kvcache_blocks=200, max_model_len=256)
    prompts = [IDS[:3], IDS[:17], IDS[5:45]]
    completions = generate(make_llm(**options, enforce_eager=True), prompts, greedy(8))
    assert completions == chosen(model, prompts, completions)
    assert generate(make_llm(**options), prompts, greedy(8)) == completions


def relative_error(got, want):
    return ((got - want).square().mean() / want.square().mean()).sqrt().item()


@pytest.mark.gpu
@pytest.mark.parametrize("length", [40, 300, 700])
def test_blocks_of_a_prompt(length, make_llm, tmp_path, monkeypatch):
    """No weight is dequantized. Plain torch in bf16 with the inputs of its linear layers quantized token by token errs
    by 0.064 to 0.076. Block scales differ by a factor of up to 8: those of one weight, moved by a block, by 0.108 up.
    """
    from nanovllm.kernels.launch import is_sm90
    from nanovllm.kernels.linear import dispatch

    if dispatch.prefill_gemm_sm90 is None or not is_sm90(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    sizes = dict(hidden_size=512, intermediate_size=1024, head_dim=128, num_hidden_layers=2, vocab_size=512)
    model = families.make(tmp_path, "qwen3", **sizes, layer_types=None, max_position_embeddings=1024)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(7)  # so that layers add little, and their errors stay small
        for name, param in model.named_parameters():
            if fp8_checkpoints.LINEAR.fullmatch(name):
                factors = torch.exp2(torch.rand([n // 128 for n in param.shape], generator=generator) * 3 - 3.5)
                param.mul_(factors.repeat_interleave(128, 0).repeat_interleave(128, 1))
    fp8_checkpoints.write(tmp_path, model, "qwen")

    def unless_scaled(weight, dtype):
        assert weight.scale is None, f"a weight {list(weight.data.shape)} is dequantized"
        return weight

    monkeypatch.setattr(dispatch, "dequantized", unless_scaled)
    multiplied = []  # features of the products of blocks in the prefill GEMM
    original = dispatch.prefill_gemm_sm90.prefill_gemm

    def recorded(x, weight, *args, **options):
        multiplied.append((len(x.data), len(weight.data), weight.scale.shape[1]))
        return original(x, weight, *args, **options)

    monkeypatch.setattr(dispatch.prefill_gemm_sm90, "prefill_gemm", recorded)
    llm = make_llm(
        model=str(tmp_path), device="cuda", dtype="bfloat16", enforce_eager=True, max_num_batched_tokens=1024,
        max_model_len=1024, num_kvcache_blocks=128,
    )  # fmt: skip
    multiplied.clear()  # by start-up
    prompt = prompt_of(length)
    _, (got,) = generate_with_logits(llm, [prompt], 1)
    assert relative_error(got, hf_logits(model, prompt)[-1:]) < 0.1
    if length > 256:  # all of the first layer and QKV of the last, whose rest needs one token
        assert multiplied == [(length, *shape) for shape in ((1024, 4), (512, 4), (2048, 4), (512, 8), (1024, 4))]


@pytest.mark.gpu
def test_memory_while_loading(tmp_path):
    """The device never holds the 16-bit model: at most the FP8 one, and some tensors in 16 and 32 bits."""
    sizes = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=16)
    families.make(tmp_path, "qwen3", **sizes, layer_types=None).bfloat16().save_pretrained(tmp_path)
    config = read_model_config(str(tmp_path)).quantized()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = built(str(tmp_path), config=config)
        finally:
            torch.set_default_dtype(torch.float32)
    num_bytes = sum(param.nbytes for param in model.parameters())
    assert num_bytes < 0.55 * 2 * sum(p.numel() for name, p in model.named_parameters() if not name.endswith("_scale"))
    largest = 4 * 1024 * 4096
    assert torch.cuda.max_memory_allocated() - before < num_bytes + 8 * largest < 1.9 * num_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("options", ({}, {"enforce_eager": True}, {"dtype": "float16"}))
def test_the_gpu_answers_the_same(options):
    from test_demo_model import check_answers, check_held_out_sums

    with LLM(device="cuda", quantization="fp8", num_kvcache_blocks=256, quiet=True, **options) as llm:
        check_answers(llm)
        check_held_out_sums(llm)

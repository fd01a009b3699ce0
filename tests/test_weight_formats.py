"""Every format of quantized weights: logits, shards, engines, updates, and what is refused.

transformers with the dequantized weights is the oracle (``quantized_checkpoints.py``). ``test_fp8_weights.py`` and
``test_packed_weights.py`` have the rules of one kind of format.
"""

import copy
import math
import re

import families
import pytest
import quantized_checkpoints
import torch
from families import check_greedy, chosen, in_16_bits, worst_choices
from helpers import generate, greedy, refuses
from histories import at_night
from quantized_checkpoints import (
    DOWN,
    E4M3,
    FP8_FORMS,
    GATE,
    UP,
    K,
    O,
    Q,
    V,
    all_of,
    built,
    check_logits,
    check_shards,
    config_of,
    drop,
    fields,
    merged_name,
    put,
    quantized_config,
    weights_of,
)
from safetensors.torch import load_file, save_file
from test_families import IDS, TOLERANCE

from nanovllm import LLM, CheckpointError, ConfigError, EngineError, kernels
from nanovllm.contrib.as_vllm.options import EngineArgs, start, to_nanovllm
from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import init_dummy_weights
from nanovllm.quantization.mxfp4 import numbers as mxfp4
from nanovllm.runner.device import describe

PROMPTS = [IDS[:1], IDS[:17], IDS[5:45]]
ASYMMETRIC, CHANNEL, BF16 = {"symmetric": False}, {"size": 0}, {"dtype": torch.bfloat16}
KEPT = {"kept": True}  # experts stay MXFP4, as on a GPU
GPTQ, AWQ, ORDERED = ("qwen3", "gptq", {}), ("qwen3", "awq", {}), ("qwen3", "gptq", {"act_order": True})
# (family, form, scheme), see ``quantized_checkpoints.write``
FP8_SHARDS = [(*pair, {}) for pair in (
    ("qwen3", "qwen"), ("qwen3", "channel"), ("qwen3", "tensor"), ("phi3", "deepseek"), ("phi3", "auto_fp8"),
    ("glm4", "block"), ("granite", "qwen"), ("granite", "channel"), ("qwen3-moe", "qwen"), ("glm4-moe", "channel"),
    ("qwen2-moe", "deepseek"), ("mixtral", "auto_fp8"),
)]  # fmt: skip
INT_SHARDS = [
    ("qwen3", "compressed-tensors", {}), ("qwen3", "compressed-tensors", ASYMMETRIC | {"size": 32}),
    ("qwen3", "compressed-tensors", CHANNEL), ("qwen3", "compressed-tensors", ASYMMETRIC | CHANNEL),
    ("qwen3", "compressed-tensors", {"size": 128, **BF16}), ("qwen3", "compressed-tensors", {"bits": 8}),
    AWQ, ("qwen3", "awq", CHANNEL), ("granite", "awq", {"size": 32}), GPTQ, ("qwen3", "gptq", ASYMMETRIC),
    ("phi3", "gptq", CHANNEL), ("glm4", "gptq_v2", {"bits": 8, **ASYMMETRIC}),
    ("llama-tied-biased", "auto-round", {"negative": True}), ("qwen3", "auto-round-awq", {"negative": True}),
    ("qwen3-moe", "gptq", {}), ("qwen2-moe", "compressed-tensors", ASYMMETRIC), ("mixtral", "awq", {}),
]  # fmt: skip
IN_ORDER = [
    ORDERED, ("qwen3", "gptq_v2", ASYMMETRIC | {"act_order": True, "size": 32}),
    ("qwen3", "gptq", {"bits": 8, "act_order": True}),
]  # fmt: skip
MXFP4 = [("gpt-oss", "mxfp4", {}), ("gpt-oss", "mxfp4", KEPT)]
NVFP4 = ("qwen3", "nvfp4", {})
FP4_SHARDS = [
    NVFP4, ("qwen3", "modelopt-fp4", {}), ("qwen3", "dense-mxfp4", {}), ("phi3", "nvfp4", {}),
    ("granite", "modelopt-fp4", {}), ("qwen3-moe", "nvfp4", {}), ("qwen2-moe", "modelopt-fp4", {}),
    ("mixtral", "nvfp4", {}), ("qwen2-moe", "dense-mxfp4", {}),
]  # fmt: skip
INEXACT = "granite", "nvfp4"  # a factor of sums; a reciprocal in place of a quotient
# tied; merged in the checkpoint; interleaved; biases; a factor of each sum; renamed tensors
CASES = [*FP8_SHARDS, *INT_SHARDS, *IN_ORDER, *MXFP4, *FP4_SHARDS] + [(*pair, {}) for pair in (
    ("qwen3", "deepseek"), ("qwen3", "auto_fp8"), ("qwen3", "block"), ("qwen3", "modelopt"),
    ("llama-tied-biased", "qwen"), ("phi3", "qwen"), ("ernie4.5", "qwen"), ("glm4", "qwen"), ("gemma3", "qwen"),
    ("phi3", "channel"), ("glm4", "channel"), ("granite", "tensor"), ("qwen2-moe", "qwen"),
)]  # fmt: skip
# Four ranks cut blocks and groups, and replicate KV heads; experts of ``mixtral`` are not packed any more.
SHARDS = [(case, size) for case in FP8_SHARDS + INT_SHARDS + FP4_SHARDS for size in (4, *at_night(1, 2))]
SHARDS += [(case, size) for case in IN_ORDER + MXFP4 for size in (1, *((2,) if case in MXFP4 else ()))]
SHARDS += [(case, 2) for case in (("mixtral", "awq", {}), FP8_SHARDS[0]) if not at_night(1)]


def name_of(case):
    family, form, scheme = case if isinstance(case, tuple) else (str(case), "", {})
    return "-".join(filter(None, [family, form, *(f"{name}={x}" for name, x in scheme.items())]))


@pytest.fixture
def keeps(monkeypatch):
    """keeps(whether): experts stay MXFP4, as on a GPU."""
    return lambda whether: monkeypatch.setattr(kernels.select(), "takes_mxfp4", lambda: whether)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_logits(case, published, keeps):
    keeps(case[2] == KEPT)
    path, _, model = published(*case[:2], **case[2])
    check_logits(path, model)


@pytest.mark.parametrize(("case", "size"), SHARDS, ids=name_of)
def test_shards(case, size, published, keeps):
    """Bit for bit, but for ``INEXACT``: granite's factor multiplies scales, and numbers in the 16-bit model."""
    keeps(case[2] == KEPT)
    path, plain, _ = published(*case[:2], **case[2])
    check_shards(path, plain, size, is_exact=not {*INEXACT} & {*case[:2]})


STARTS = {  # form -> how the start names it
    "nvfp4": "NVFP4 weights (linear layers multiply copies in float32; scales of inputs not used)",
    "modelopt-fp4": "NVFP4 weights (linear layers multiply copies in float32; scales of inputs not used)",
    "dense-mxfp4": "MXFP4 weights (linear layers multiply copies in float32)",
}


@pytest.mark.parametrize(("case", "size"), [
    *((case, size) for size in (1, 2) for case in (
        ("qwen3", "qwen", {}), ("qwen2-moe", "qwen", {}), ("glm4-moe", "channel", {}), AWQ, MXFP4[0], NVFP4,
    )),
    (("qwen2-moe", "modelopt-fp4", {}), 1), (("qwen3", "dense-mxfp4", {}), 1), (("qwen3.5", "nvfp4", {}), 1),
    (ORDERED, 1), (("qwen2-moe", "compressed-tensors", ASYMMETRIC), 1), (("qwen3.5", "gptq", {}), 1), (MXFP4[1], 1),
], ids=name_of)  # fmt: skip
def test_engine(case, size, published, make_llm, keeps):
    keeps(case[2] == KEPT)
    path, _, model = published(*case[:2], **case[2])
    llm = make_llm(model=path, max_model_len=256, num_kvcache_blocks=32, tensor_parallel_size=size)
    completions = check_greedy(llm, model, PROMPTS, 8, TOLERANCE)
    assert len({token for tokens in completions for token in tokens}) > 5
    if case[1] in STARTS:
        assert f" with {STARTS[case[1]]};" in describe(llm.config, llm.model_runner)
    elif case[1] not in (*FP8_FORMS, "mxfp4"):
        advice = "" if "moe" in case[0] else ", which dtype='bfloat16' avoids"
        assert f" with INT4 weights (dequantized in every step{advice});" in describe(llm.config, llm.model_runner)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [
    ("qwen3-moe", "qwen", {}), ("qwen2-moe", "qwen", {}), ("glm4-moe", "channel", {}), ORDERED, AWQ,
    ("qwen3-moe", "awq", {"size": 32}), MXFP4[0], NVFP4, ("qwen2-moe", "modelopt-fp4", {}),
], ids=name_of)  # fmt: skip
def test_on_the_gpu(case, published, make_llm):
    """fp32, which no kernel quantizes, eager and under CUDA graphs. In bf16 no token is far from the best; errors of
    MXFP4 are those of transformers' bf16, in the median of the tokens.
    """
    path, _, model = published(*case[:2], **case[2])
    options = {"model": path, "device": "cuda", "max_model_len": 256, "num_kvcache_blocks": 200}
    prompts = [*PROMPTS[:2], PROMPTS[2] * 2]
    completions = generate(make_llm(**options, dtype="float32", enforce_eager=True), prompts, greedy(8))
    assert completions == chosen(model, prompts, completions)
    assert generate(make_llm(**options, dtype="float32"), prompts, greedy(8)) == completions
    if case[1] in FP8_FORMS:
        return
    llm = make_llm(**options, dtype="bfloat16", enforce_eager=case[1] == "mxfp4")
    layer = llm.model_runner.model.model.layers[1]
    if case[1] == "mxfp4":
        assert layer.mlp.experts.down_proj.dtype == torch.uint8
        *both, exact = in_16_bits(llm, model, copy.deepcopy(model).to("cuda", torch.bfloat16), prompts, 12)
        got, want = ((x - exact).square().mean(-1).sqrt().median() for x in both)
        assert got < 1.25 * want
    else:
        assert layer.self_attn.o_proj.weight.dtype == torch.int32
        assert max(worst_choices(model, prompts, generate(llm, prompts, greedy(8)))) < 0.2


def test_bytes_that_stay(published, keeps):
    """Four bits and, with groups of 64, a quarter of one for scales; 352 channels have groups of 32 here. MXFP4: 4.25.
    """
    config = read_model_config(published("qwen3", "gptq")[0])
    assert not config.fp8 and config.quant_method == "gptq"
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = built(published("qwen3", "gptq")[0])
    finally:
        torch.set_default_dtype(torch.float32)
    layers = [module for module in model.modules() if getattr(module, "weight_scale", None) is not None]
    for layer in layers:
        size, numbers = 32 if layer.weight.shape[1] == 352 // 8 else 64, layer.weight.numel() * 8
        params = [param for name, param in layer.named_parameters() if name != "bias"]
        assert layer.weight.dtype == torch.int32 and layer.weight_scale.dtype == torch.bfloat16 and len(params) == 2
        assert sum(param.nbytes for param in params) == numbers // 2 + numbers // size * 2
    assert len(layers) == 8
    keeps(True)
    path, plain, _ = published("gpt-oss", "mxfp4")
    kept, floats = ([p for name, p in built(each).named_parameters() if ".experts." in name and "bias" not in name]
                    for each in (path, plain))  # fmt: skip
    assert {param.dtype for param in kept} == {torch.uint8}
    assert sum(p.nbytes for p in kept) == sum(p.numel() for p in floats) * 17 // 32
    for scheme in ({"bits": 8}, {"bits": 8, "act_order": True}):  # dequantized as they load
        of_8_bits = built(published("qwen3", "gptq" if "act_order" in scheme else "compressed-tensors", **scheme)[0])
        assert all(param.dtype != torch.int32 for param in of_8_bits.parameters())


@pytest.mark.parametrize(("case", "low", "high"), [
    (("qwen3", None, {}), 0.019, 0.021), (("qwen2-moe", None, {}), 0.019, 0.021), (ORDERED, 0.015, 0.025),
    (("qwen3", "gptq", ASYMMETRIC), 0.015, 0.025), (MXFP4[1], 0.015, 0.03), (NVFP4, 0.018, 0.022),
    (("qwen2-moe", "modelopt-fp4", {}), 0.018, 0.022),
], ids=name_of)  # fmt: skip
def test_random_weights(case, low, high, published, keeps, tmp_path):
    """N(0, 0.02) as in 16 bits, the same for the same seed. Without a form: FP8, quantized while loading."""
    keeps(True)
    if case[1] is None:
        quantized_checkpoints.make(tmp_path, case[0])
        config = read_model_config(str(tmp_path)).quantized()
    else:
        config = read_model_config(published(*case[:2], **case[2])[0])
    models = [CausalLM(config, None, SINGLE_RANK) for _ in range(2)]
    for model in models:
        init_dummy_weights(model, 3)
    first, second = map(weights_of, models)
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        if "_proj" in name and "bias" not in name:
            assert low < weight.std() < high and abs(weight.mean()) < (1e-3 if case[1] is None else high), name


# ---------------------------------------------------------------- modules that are left out, or of another scheme

DOWN_1, O_PROJ = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.o_proj"
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


MLP_0, MLP_1 = ([f"model.layers.{i}.{name}" for name in (GATE, UP, DOWN)] for i in range(2))
ATTENTION_1 = [f"model.layers.1.{name}" for name in (Q, K, V, O)]
SHARED, ROUTED = (
    [f"model.layers.{i}.mlp.{mlp}.{x}_proj" for i in range(2) for mlp in part for x in ("gate", "up", "down")]
    for part in (["shared_expert"], [f"experts.{i}" for i in range(4)])
)
# (family, layout, modules in 16 bits, a regular expression of others and their scheme), the rules that say so, and the
# number of linear layers that are dequantized as they load, of those that are packed in part
MIXED = {
    "FP8, exact names": (
        ("qwen3", "qwen", [O_PROJ, *MLP_1[:2]], "", {}), {"modules_to_not_convert": ["lm_head", O_PROJ, *MLP_1[:2]]}, 0,
    ),
    "FP8, expressions": (
        ("qwen3", "channel", [O_PROJ, *MLP_0], "", {}), {"ignore": ["lm_head", r"re:.*\.0\.mlp.*", O_PROJ]}, 0,
    ),
    "FP8, asterisks": (("qwen3", "modelopt", ATTENTION_1, "", {}), {"ignore": ["lm_head", "*layers.1.self_attn*"]}, 0),
    "FP8, a layer": (
        ("qwen3", "auto_fp8", [*ATTENTION, O_PROJ, *MLP_0], "", {}), {"ignored_layers": ["lm_head", "layers.0"]}, 0,
    ),
    "FP8, a shared expert": (("qwen2-moe", "qwen", SHARED, "", {}), {}, 0),
    "FP8, routed experts": (("qwen2-moe", "qwen", ROUTED, "", {}), {}, 0),
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
    model, scheme = quantized_checkpoints.make(tmp_path, family), ASYMMETRIC if "asymmetric" in name else {}
    tensors = quantized_checkpoints.write(
        tmp_path, model, form, skipped, fields(**rules), **scheme,
        own=lambda module: own if own and re.match(pattern, module) else {},
    )  # fmt: skip
    assert all(tensors[f"{module}.weight"].dtype == torch.float32 for module in skipped)
    check_logits(tmp_path, model)
    config = read_model_config(str(tmp_path))
    assert form not in FP8_FORMS or config.quantized() == config  # LLM(quantization="fp8") changes nothing
    weights = {
        (i, merged_name(module)) for i, layer in enumerate(config.layers) for module, _ in layer.packed_schemes
    }
    in_16_bits = [name for i, name in weights if config.precision(config.layers[i], name) is None]
    assert len(in_16_bits) == num_dequantized


# ---------------------------------------------------------------- updates, sleep


@pytest.mark.parametrize(("case", "size"), [(ORDERED, 1), (MXFP4[0], 1), (MXFP4[0], 2)], ids=name_of)
def test_updates_and_sleep(case, size, published, make_llm, tmp_path):
    """Tensors in any order, a part of them, and the directory; also where the weights are dropped."""
    path, plain, model = published(*case[:2], **case[2])
    llm = make_llm(model=path, max_model_len=256, num_kvcache_blocks=16, tensor_parallel_size=size)
    before, tensors = generate(llm, PROMPTS, greedy(6)), load_file(f"{path}/model.safetensors")
    assert before == chosen(model, PROMPTS, before)
    ends = ("down_proj.scales", "down_proj_scales")
    changed = {name: t + 1 if t.dtype == torch.uint8 else t * 2 for name, t in tensors.items() if name.endswith(ends)}
    llm.update_weights(sorted((tensors | changed).items(), reverse=True))
    new = copy.deepcopy(model)
    with torch.no_grad():
        for name, param in new.named_parameters():
            param.mul_(2 if re.search(r"down_proj(\.weight)?$", name) else 1)
    completions = generate(llm, PROMPTS, greedy(6))
    assert completions == chosen(new, PROMPTS, completions) != before
    part = {name: t for name, t in tensors.items() if "down_proj" in name}
    llm.update_weights(part, partial=True)
    assert generate(llm, PROMPTS, greedy(6)) == before
    llm.sleep(level=2)
    llm.wake_up()
    with pytest.raises(EngineError, match=r"dropped by sleep\(level=2\)"):
        llm.generate(PROMPTS, greedy(6))
    llm.update_weights(path)
    assert generate(llm, PROMPTS, greedy(6)) == before
    if case != ORDERED:
        return
    for update, text in (
        ({f"{DOWN_1}.scales": tensors[f"{DOWN_1}.scales"]},
         f"update_weights has {DOWN_1}.scales without the others that make"),
        ({f"{DOWN_1}.weight": torch.ones(192, 352)},
         f"'{DOWN_1}.weight' is not of packed integers, as this layer is here"),
    ):  # fmt: skip
        with refuses(text, CheckpointError):
            llm.update_weights(update, partial=True)
    from test_lora import train

    train(plain, tmp_path, r=2, lora_alpha=4, target_modules=["o_proj"])
    with refuses("is of packed integers, and an adapter is merged into 16-bit weights", CheckpointError):
        llm.update_weights(lora=tmp_path)
    assert generate(llm, PROMPTS, greedy(6)) == before
    with refuses("or the weights before an update", CheckpointError):  # the order of channels stays the engine's
        llm.update_weights({**part, f"{DOWN_1}.g_idx": part[f"{DOWN_1}.g_idx"].flip(0)}, partial=True)


# ---------------------------------------------------------------- refused tensors

EXPERTS, EXPERT = "model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.3.down_proj"
V_SCALE, ROUTER = "model.layers.1.self_attn.v_scale", "model.layers.1.mlp.gate"
IN_BLOCKS, NOT_FP8 = "for quantization_config has blocks of 128 x 128.", "expected floats. This layer is not FP8 here."


def put_experts(tensor):
    """One tensor of all experts in place of each expert's."""

    def edit(tensors, config):
        prefix = EXPERTS.removesuffix("down_proj")
        for name in [name for name in tensors if name.startswith(prefix) and name.endswith("down_proj.weight")]:
            del tensors[name]
        tensors[EXPERTS] = tensor

    return edit


def down(kind, value):
    return put(f"{DOWN_1}.{kind}", value)


def nibble(value):
    """All nibbles of a tensor of words."""
    return lambda words: torch.full_like(words, (value * 0x11111111 + 2**31) % 2**32 - 2**31)


def copy_to(name, kind):
    return lambda tensors, config: tensors.update({f"{name}.{kind}": tensors[f"{DOWN_1}.{kind}"].clone()})


REFUSED_TENSORS = {  # (family, form) -> [(edit, a part of the text)]
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
        (drop(f"{O_PROJ}.weight_scale_inv"), f"1 tensors are missing, among them {O_PROJ}.weight_scale."),
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
        (lambda tensors, config: config.pop("quantization_config"), ""),
    ],
    ("qwen3", "channel"): [(put(f"{O_PROJ}.weight_scale", torch.ones(2, 1)),
                            f"tensor '{O_PROJ}.weight_scale' has shape [2, 1], expected [1] or [192, 1].")],
    ("qwen3", "tensor"): [
        (put(V_SCALE, torch.ones(3)), f"tensor '{V_SCALE}' has shape [3], expected [1] or [2]."),
        (put(V_SCALE, torch.tensor([1.0, -1.0])), f"tensor '{V_SCALE}' has -1.0, expected positive numbers."),
    ],
    ("qwen3-moe", "qwen"): [
        (drop(f"{EXPERT}.weight_scale_inv"), f"1 tensors are missing, among them {EXPERT}.weight_scale."),
        (put(f"{EXPERT}.weight_scale_inv", torch.ones(1, 2)),
         f"tensor '{EXPERT}.weight_scale_inv' has shape [1, 2], expected [1] or [2, 2], {IN_BLOCKS}"),
        (put(f"{EXPERT}.weight", torch.Tensor.bfloat16), f"'{EXPERT}.weight' is of bfloat16, expected float8_e4m3fn."),
        (put(EXPERTS, torch.zeros(5, 192, 160).to(E4M3)), f"'{EXPERTS}' is twice there, or unknown to the model."),
        (put_experts(torch.zeros(5, 192, 160).to(E4M3)), "down_proj' has shape [5, 192, 160], expected [4, 192, 160]."),
        (put_experts(torch.zeros(4, 160, 192).to(E4M3)), f"'{EXPERTS}[0]' has shape [160, 192], expected [192, 160]."),
        (put(f"{ROUTER}.weight", lambda t: t.to(E4M3)), f"tensor '{ROUTER}.weight' is of float8_e4m3fn, {NOT_FP8}"),
    ],
    ("qwen3", "gptq"): [
        (down("qzeros", nibble(8)), f"'{DOWN_1}' has zeros from 9 to 9, expected 8"),  # those of v2
        (all_of(fields(sym=False), down("qzeros", nibble(15))),
         f"'{DOWN_1}' has a zero that readers of checkpoint_format 'gptq' take for 0 or for 16."),
        (drop(f"{DOWN_1}.scales"), f"{DOWN_1}.weight (there is {DOWN_1}.qweight, "),
        (down("scales", lambda t: t * torch.nan), f"'{DOWN_1}.scales' has numbers from nan to nan"),
        (down("g_idx", (torch.arange(352) // 64).flip(0).int()),
         f"'{DOWN_1}.g_idx' orders the channels, which quantization_config denies"),
        (down("bias", torch.ones(192)), f"'{DOWN_1}.bias' is not 0"),
        (copy_to("lm_head", "qweight"), "a packed LM head (lm_head.qweight) is not supported"),
    ],
    ("qwen3", "gptq_v2"): [(down("qzeros", nibble(7)), "has zeros from 7 to 7, expected 8")],  # those of v1
    ("qwen3", "awq"): [
        (drop(f"{DOWN_1}.qweight"), f"{DOWN_1}.weight (there is {DOWN_1}.qzeros, "),
        (down("scales", lambda t: t[:-1].clone()), "has scales of [192, 5] features"),
        (down("qzeros", lambda t: t[:-1].clone()), "has zeros of [192, 5] features"),
        (down("scales", torch.Tensor.int), "is of int32, expected floats"),
        (down("qweight", lambda t: t.view(torch.uint8)), "of uint8, expected int32"),
        (down("qweight", torch.flatten), "expected two dimensions"),
        (down("qweight", lambda t: t[:-8].clone()), "has 344 input channels, expected a"),
        (down("weight", torch.ones(192, 352)), f"'{DOWN_1}.weight' is not of packed integers"),
        (copy_to("model.embed_tokens", "qweight"),
         "a packed module outside of decoder layers (model.embed_tokens.qweight) is not supported"),
        (fields(modules_to_not_convert=[DOWN_1]), f"'{DOWN_1}.qweight' is twice there, or"),
    ],
    ("qwen3", "compressed-tensors"): [
        (down("weight_shape", lambda t: t + 8), "expected [200, 45]"),
        (down("weight_zero_point", torch.ones(24, 6).int()), f"'{DOWN_1}.weight_zero_point' is twice there, or"),
        (all_of(fields(ignore=[]), lambda tensors, _: tensors.update(
            {"lm_head.weight_packed": tensors.pop("lm_head.weight").int()}
        )), "a packed LM head (lm_head.weight_packed) is not supported"),
    ],
    ("qwen3", "nvfp4"): [
        (down("weight_packed", lambda t: t[:, :-4].clone()), "has 344 input channels, expected a multiple of 16"),
        (down("weight_packed", lambda t: t.view(torch.int8)), "is of int8 and has shape [192, 176], expected bytes"),
        (down("weight_scale", lambda t: t[:, :-1].clone()), "has shape [192, 21], expected [192, 22]"),
        (down("weight_scale", lambda t: (-t.float()).to(E4M3)), f"'{DOWN_1}.weight_scale' has numbers from -"),
        (down("weight_scale", lambda t: (t.float() * math.nan).to(E4M3)), "numbers from nan to nan, not finite"),
        (down("weight_scale", torch.Tensor.float), f"'{DOWN_1}.weight_scale' is of float32, expected float8_e4m3fn"),
        *((down("weight_global_scale", torch.tensor(given)), f"'{DOWN_1}.weight_global_scale' has {said}, expected one")
          for given, said in (([-2.0], "-2"), ([0.0], "0"), ([math.nan], "nan"), ([1.0, 2.0], "shape [2]"))),
        (drop(f"{DOWN_1}.weight_global_scale"), f"{DOWN_1}.weight (there is {DOWN_1}.weight_packed, "),
        (down("weight", torch.ones(192, 352)), f"'{DOWN_1}.weight' is not of packed 4-bit floats"),
        (copy_to("lm_head", "weight_packed"), "a packed LM head (lm_head.weight_packed) is not supported"),
    ],
    ("qwen3", "modelopt-fp4"): [
        (down("weight", torch.ones(192, 352)), f"'{DOWN_1}.weight' is not of packed 4-bit floats"),
        (drop(f"{DOWN_1}.weight_scale_2"), f"{DOWN_1}.weight (there is {DOWN_1}.weight, "),
        (down("pre_quant_scale", torch.ones(352)), f"'{DOWN_1}.pre_quant_scale' is twice there, or unknown"),
        (fields(ignore=[DOWN_1]), f"'{DOWN_1}.weight' has shape [192, 176], expected [192, 352]"),
    ],
    ("qwen3", "dense-mxfp4"): [
        (down("weight_scale", lambda t: t.clone().fill_(255)), "has a scale of 255, which is NaN"),
        (down("weight_scale", lambda t: t.index_fill(1, torch.tensor([0]), 30)),
         "has scales of one feature that differ by more than a factor of 2 ** 22"),
    ],
    ("gpt-oss", "mxfp4"): [
        (drop(f"{EXPERTS}_scales"), "1 tensors are missing, among them "),
        (drop(f"{EXPERTS}_blocks"), "1 tensors are missing, among them "),
        (drop(f"{EXPERTS}_bias"), "down_proj_bias"),
        (put(f"{EXPERTS}_blocks", torch.Tensor.bfloat16), "expected uint8"),
        (put(f"{EXPERTS}_scales", lambda t: t.fill_(255)), "has a scale of 255, expected at most"),
        (put(f"{EXPERTS}_scales", lambda t: t[..., :1].contiguous()), "expected"),
        (put(f"{EXPERTS}_blocks", lambda t: t[:, :32].contiguous()), "expected"),
        (fields(modules_to_not_convert=["model.layers.1.mlp"]), "leaving out model.layers.1.mlp.experts"),
        (fields(group_size=16), "group_size=16 is not supported"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("family", "form", "edit", "text"), [
    (*key, *refusal) for key, refusals in REFUSED_TENSORS.items() for refusal in refusals
])  # fmt: skip
def test_refused_tensors(family, form, edit, text, published, keeps, tmp_path):
    path = families.copied(published(family, form)[0], tmp_path, edit)
    for is_kept in (False, True) if form == "mxfp4" else (False,):
        keeps(is_kept)
        with pytest.raises(CheckpointError, match=re.escape(text) or "is of float8_e4m3fn, expected fl|unknown to the"):
            built(path)


# ---------------------------------------------------------------- refused configs

SLOW = "regular expressions that take more than 0.2 s to match"
BLOCKS, FLOATS = config_of("deepseek"), config_of("channel")
QUANT_METHODS = [({"quant_method": method, **more}, f"quant_method={method!r}") for method, more in (
    ("hqq", {"bits": 4}), ("gguf", {"bits": 4}), ("bitsandbytes", {"load_in_8bit": True}), ("quip", {"bits": 4}),
    ("mxfp4", {}), (None, {"bits": 4}),
)]  # fmt: skip
FOREIGN = {  # fields that programs leave in the files of any format, with values that are not neutral
    "pack_dtype": "int64", "data_type": "fp", "lm_head": True, "quant_lm_head": True, "is_marlin_format": True,
    "act_bits": 8, "super_bits": 6, "quantization_status": "calibration",
}  # fmt: skip


def nested(config, path, value):
    """A copy with another value at the end of a path of names."""
    first, *rest = path
    return config | {first: nested(config[first], rest, value) if rest else value}


def refused(form, path, value):
    """A row of the table: the form's config with ``value`` at a dotted path, and the text for its innermost field."""
    config = nested(config_of(form), path.split("."), value)
    while isinstance(value, dict) and value and path in ("dynamic", "dynamic.+:a", "extra_config", "extra_config.a"):
        ((name, value),) = value.items()
        path += f".{name}"
    return config, f"{path}={value!r}"


GROUP = "config_groups.group_0"
REFUSED_CONFIGS = {  # kind -> [(quantization_config, start of the text, fields of the model's config)]
    "methods": [*QUANT_METHODS, ("fp8", "'fp8'")],
    "FP8 in blocks": [
        *(refused("deepseek", *field) for field in (
            ("fmt", "e5m2"), ("weight_block_size", [64, 128]), ("scale_fmt", "ue8m0"), ("dequantize", True),
        )),
        (BLOCKS | {"modules_to_not_convert": "lm_head"},
         "'lm_head' for the modules to leave out (not a list of names)"),
        (BLOCKS | {"modules_to_not_convert": ["model.layers.1.self_attn.k_proj"]},
         "leaving out model.layers.1.self_attn.k_proj, but not all of self_attn.q_proj, self_attn.k_proj, "
         "self_attn.v_proj,"),
        (BLOCKS | {"modules_to_not_convert": ["model.layers.1.mlp.experts.3.up_proj"]},
         "leaving out model.layers.1.mlp.experts.3.up_proj, but not all of mlp.experts.0.gate_proj to "
         "mlp.experts.3.up_proj,", {"architecture": "Qwen3MoeForCausalLM"}),
        (BLOCKS | {"modules_to_not_convert": ["re:.*gate$", "re:(model|\\w+|[.])+#"]}, SLOW),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'"),
    ],
    "FP8 of compressed-tensors": [
        *(refused("channel", *field) for field in (
            ("format", "mixed-precision"), ("format", "int-quantized"), (f"{GROUP}.weights.num_bits", 4),
            (f"{GROUP}.weights.type", "int"), (f"{GROUP}.weights.strategy", "group"),
            (f"{GROUP}.weights.symmetric", False), (f"{GROUP}.weights.block_structure", [64, 64]),
            (f"{GROUP}.input_activations.type", "int"), ("config_groups", {}), (f"{GROUP}.targets", ["re:.*mlp.*"]),
            ("transform_config", {"R1": 1}), ("sparsity_config", "dense"),  # the last was an AttributeError
        )),
        (FLOATS | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme.type='int'"),
        (FLOATS | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format='sparse-24-bitmask'"),
        (FLOATS | {"ignore": ["re:("]}, "the regular expression 're:(' (missing ), unterminated"),
        (FLOATS | {"ignore": ["lm_head", "re:(([a-z.0-9_]*)*)*!"]}, SLOW),
    ],
    "integers of compressed-tensors": [refused("compressed-tensors", *field) for field in (
        *FOREIGN.items(), ("config_groups", {}), ("config_groups", 3), ("foo", 17),
        (f"{GROUP}.input_activations", {"num_bits": 8, "type": "int"}),
        *((f"{GROUP}.weights.{name}", value) for name, value in (
            ("num_bits", 3), ("type", "float"), ("strategy", "tensor"), ("group_size", 12), ("group_size", None),
            ("foo", 17), ("dynamic", True), ("actorder", "group"), ("actorder", "dynamic"), ("symmetric", "yes"),
            ("block_structure", [8, 8]),
        )),
    )] + [refused("compressed-tensors", "format", "marlin-24")],
    "NVFP4 of compressed-tensors": [refused("nvfp4", *field) for field in (
        *FOREIGN.items(), ("config_groups", {}), ("foo", 17), (f"{GROUP}.input_activations.type", "int"),
        (f"{GROUP}.format", "pack-quantized"), *((f"{GROUP}.weights.{name}", value) for name, value in (
            ("num_bits", 8), ("type", "int"), ("group_size", 32), ("group_size", None), ("symmetric", False),
            ("strategy", "channel"), ("dynamic", True), ("foo", 17),
        )),
    )] + [
        refused("dense-mxfp4", f"{GROUP}.weights.group_size", 16),
        (config_of("nvfp4"), "gpt-oss in other 4-bit floats than its own MXFP4", {
            "architecture": "GptOssForCausalLM", "num_local_experts": 4, "swiglu_limit": 7.0, "sliding_window": 8,
        }),
    ],
    "NVFP4 of ModelOpt": [refused("modelopt-fp4", *field) for field in (
        ("kv_cache_quant_algo", "NVFP4"), ("group_size", 32), ("pre_quant_scale", True), ("foo", 17),
        (f"{GROUP}.weights.group_size", 32), (f"{GROUP}.weights.num_bits", 8), ("quant_algo", "NVFP4_AWQ"),
    )],
    "AWQ": [refused("awq", *field) for field in (
        *FOREIGN.items(), ("bits", 8), ("version", "gemv"), ("version", "gemv_fast"), ("group_size", 100),
        ("zero_point", False), ("backend", "llm-awq"), ("foo", 17), ("w_bit", 8),
    )],
    "GPTQ": [refused("gptq", *field) for field in (
        *FOREIGN.items(), ("bits", 3), ("bits", 2), ("group_size", None), ("group_size", 0), ("group_size", True),
        ("sym", None), ("desc_act", 5), ("checkpoint_format", "marlin"), ("foo", 17), ("dynamic", 3),
        ("dynamic", {"+:a": {"bits": 3}}), ("dynamic", {"+:a": {"foo": 1}}), ("modules_in_block_to_quantize", 4),
    )] + [
        (config_of("gptq") | {"format": "gptq_v2"}, "checkpoint_format='gptq' beside format='gptq_v2'"),
        (config_of("gptq"), "gpt-oss in packed integers", {
            "architecture": "GptOssForCausalLM", "num_local_experts": 4, "swiglu_limit": 7.0, "sliding_window": 8,
        }),
        (config_of("gptq", act_order=True), "desc_act of experts (mlp.experts.gate_up_proj)",
         {"architecture": "Qwen3MoeForCausalLM"}),
    ],
    "AutoRound": [refused("auto-round", *field) for field in (
        *FOREIGN.items(), ("bits", 2), ("data_type", "mx_fp"), ("packing_format", "auto_round:fp8"), ("sym", 2),
        ("extra_config", 1), ("extra_config", {"a": {"bits": 3}}), ("extra_config", {"a": {"act_bits": 8}}),
        ("extra_config", {"a": {"foo": 8}}), ("foo", 17), ("backend", "auto_round:exllamav2"),
    )],
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED_CONFIGS)
def test_refused_configs(kind, monkeypatch):
    reason, supported = r"( \(no.*\)| (with|beside) .*)?", "Supported are FP8 weights (e4m3) with a scale per tensor"
    for quantization, what, *more in REFUSED_CONFIGS[kind]:
        monkeypatch.setattr("nanovllm.utils.patterns.SECONDS", 0.2 if what == SLOW else 10.0)
        with pytest.raises(CheckpointError) as info:
            quantized_config(quantization, **dict(*more))
        text = str(info.value)
        start, end = (re.escape(x) for x in (f"config.json: quantization_config: {what}", supported))
        unknown = what.startswith("the regular")
        assert re.match(start + (".*" if unknown else rf"{reason} is not supported\. {end}"), text), (what, text)
        assert text.endswith("or the 16-bit one, which LLM(quantization='fp8') quantizes as it loads.")


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(("form", "name", "has"), [
    ("tensor", "compressed-tensors", True), ("modelopt", "modelopt", True), ("awq", "awq", True),
    ("awq", "awq_marlin", True), ("mxfp4", "mxfp4", True), ("nvfp4", "compressed-tensors", True),
    ("modelopt-fp4", "modelopt_fp4", True), ("qwen", "modelopt", "'fp8'"),
    (None, "compressed-tensors", "none"), ("mxfp4", "modelopt", "'mxfp4'"),
    *(("awq", name, "'awq'") for name in ("gptq", "gptq_marlin", "auto-round", "compressed-tensors")),
])  # fmt: skip
def test_vllm_names_the_quantization_of_a_checkpoint(form, name, has, published, make_checkpoint):
    """vLLM takes the name of the checkpoint's own, where there is nothing to choose, and refuses another one."""
    family = "gpt-oss" if form == "mxfp4" else "qwen3"
    path = make_checkpoint() if form is None else published(family, form)[0]
    keywords = {"model": path, "quantization": name, "max_model_len": 128}
    if has is True:
        assert to_nanovllm(keywords) == to_nanovllm(keywords | {"quantization": None})
        assert EngineArgs(**keywords).create_model_config().max_model_len == 128
        return
    options = {"quantization": name, "device": "cpu", "skip_tokenizer_init": True}
    text = f"LLM: quantization={name!r} names the quantization of a checkpoint, and {path} has {has}."
    for make in (EngineArgs(**keywords).create_model_config, lambda: start(path, options)):
        with refuses(text, ConfigError):
            make()


@pytest.mark.parametrize(("form", "name"), [("qwen", "fp8"), ("tensor", "compressed-tensors")])
def test_an_engine_by_vllms_keyword(form, name, published):
    path, options = published("qwen3", form)[0], {"max_model_len": 128, "device": "cpu"}
    with (start(path, {**options, "quantization": name, "skip_tokenizer_init": True}) as llm,
          start(path, {**options, "skip_tokenizer_init": True}) as plain):  # fmt: skip
        assert generate(llm, [[5, 6, 7] * 7], greedy(4)) == generate(plain, [[5, 6, 7] * 7], greedy(4))
    assert to_nanovllm({"quantization": "fp8"})["quantization"] == "fp8"
    assert "quantization" not in to_nanovllm({"quantization": None})


def test_options_that_contradict_the_checkpoint(published, make_llm, tmp_path):
    path = published("qwen3", "awq")[0]
    with pytest.raises(ConfigError, match=r"quantization='fp8', but the checkpoint's weights are integers .*\(awq\)"):
        make_llm(model=path, quantization="fp8")
    with refuses("the groups of its packed integers would be cut", ConfigError):
        config = quantized_config(config_of("awq"), "LlamaForCausalLM")
        config.check_padded_heads(config.head_dim, 2 * config.head_dim)
    with pytest.raises(ConfigError, match=r"quantization='fp8', but the checkpoint's weights are 4-bit floats \("):
        make_llm(model=published("qwen3", "modelopt-fp4")[0], quantization="fp8")
    path = published("gpt-oss", "mxfp4")[0]
    with refuses("tensor_parallel_size=4 must leave each rank a multiple of 32 of the 64", ConfigError):
        make_llm(model=path, tensor_parallel_size=4, num_kvcache_blocks=4)
    with refuses("quantization='fp8' is not supported for gpt-oss", ConfigError):
        make_llm(model=path, quantization="fp8")
    other = families.copied(path, tmp_path / "other", architectures=["MixtralForCausalLM"], swiglu_limit=None)
    with refuses("quant_method='mxfp4' is not supported", CheckpointError):
        read_model_config(other)
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.Q4_K_M.gguf"):
        with refuses("' is GGUF, which is not read", CheckpointError):
            LLM(str(path))


# ---------------------------------------------------------------- NVFP4


def test_compressed_tensors_own_unpacking(published):
    """Low nibble first, e2m1 times the quotient of both scales, in fp32: bit for bit. Parameters differ by an ulp."""
    path = published("qwen3", "nvfp4")[0]
    tensors, weights = load_file(f"{path}/model.safetensors"), weights_of(built(path))
    of_module = {kind: tensors[f"{DOWN_1}.{kind}"] for kind in ("weight_packed", "weight_scale", "weight_global_scale")}
    data, scale, divisor = of_module.values()
    codes = torch.empty(len(data), 2 * data.shape[1], dtype=torch.long)
    codes[:, 0::2], codes[:, 1::2] = data & 15, data >> 4
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat((table, -table))
    want = (table[codes].view(*scale.shape, 16) * (scale.float() / divisor)[..., None]).flatten(1)
    scheme = quantized_checkpoints.Fp4Scheme("nvfp4-pack-quantized")
    by_kind = {kind: quantized_checkpoints.CheckpointTensor.of(kind, tensor) for kind, tensor in of_module.items()}
    assert torch.equal(quantized_checkpoints.Fp4Tensors("", scheme, by_kind).dequantized().read(...), want)
    torch.testing.assert_close(weights[f"{DOWN_1}.weight"], want, rtol=2.5e-7, atol=0)


def test_parts_of_a_product_with_other_scales(tmp_path):
    """Q, K and V share a product, and each has its own scale of the tensor: merged scale by scale, exactly."""
    model = quantized_checkpoints.make(tmp_path, "qwen3")
    numbers = dict(zip("qkvgu", (2.0**-9, 0.0013, 0.0007, 0.00111, 0.0019), strict=True))
    quantized_checkpoints.write(
        tmp_path, model, "modelopt-fp4", own=lambda module: {"number": numbers.get(module.rpartition(".")[2][0])},
    )  # fmt: skip
    check_logits(tmp_path, model)
    layer = built(tmp_path).model.layers[0].self_attn.qkv_proj
    assert layer.weight_factor.unique().tolist() == sorted(torch.tensor([numbers[x] for x in "qkv"]).tolist())
    want = torch.cat([model.state_dict()[f"model.layers.0.{name}.weight"] for name in (Q, K, V)])
    assert torch.equal(layer.as_weight().dequantize(torch.float32), want)


def test_bytes_of_nvfp4(published):
    """4.5 bits for a number, and a factor for each feature; 352 channels cut by four are 16-bit numbers there."""
    path = published("qwen3", "nvfp4")[0]
    layer = built(path).model.layers[0].mlp.down_proj
    N, C = len(layer.weight), layer.weight.shape[1] * 8
    assert sum(param.nbytes for param in layer.parameters()) == N * C * 9 // 16 + N * 4
    layer = built(path, quantized_checkpoints.TPGroup(1, 4, None)).model.layers[0].mlp.down_proj
    assert layer.weight.shape == (192, 88) and layer.weight.dtype == torch.float32


def test_kv_scales_beside_nvfp4(published, make_llm):
    """ModelOpt's FP8 KV cache, whose scales are in the projections, with the weights of four bits."""
    path = published("qwen3", "modelopt-fp4")[0]
    attn = built(path).model.layers[1].self_attn.attn
    assert attn.kv_scale_is_given == [True, True]
    assert attn.kv_scale.unique().tolist() == sorted(torch.tensor([*quantized_checkpoints.KV_SCALES.values()]).tolist())
    llm = make_llm(model=path, kv_cache_dtype="fp8", num_kvcache_blocks=16, max_model_len=128)
    assert len(generate(llm, PROMPTS[:1], greedy(4))[0]) == 4


def test_nvfp4_modules_that_are_left_out(tmp_path):
    """By asterisks of ModelOpt, and a projection alone: its layer keeps the others in 16 bits, dequantized."""
    model = quantized_checkpoints.make(tmp_path, "qwen3")
    skipped = [*ATTENTION[:1], *MLP_1]
    rules = {"ignore": ["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp*"]}
    quantized_checkpoints.write(tmp_path, model, "modelopt-fp4", skipped, fields(**rules))
    check_logits(tmp_path, model)
    layers = built(tmp_path).model.layers
    kinds = [layers[0].self_attn.qkv_proj, layers[0].mlp.down_proj, layers[1].mlp.down_proj]
    assert [layer.weight.dtype for layer in kinds] == [torch.float32, torch.int32, torch.float32]


# ---------------------------------------------------------------- MXFP4


def test_every_byte():
    """Two numbers of each byte, in their places, by the definition of the format."""
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)  # [N, groups, 16]
    scale = torch.arange(120, 136, dtype=torch.uint8).view(8, 2)
    got = mxfp4.dequantized(mxfp4.repacked(blocks).flatten(1), scale, torch.float32).view(2, 8, 16, 2)
    factors = 2.0 ** (scale.T[..., None].float() - 127)
    for half, shift in ((0, 0), (1, 4)):
        want = [quantized_checkpoints.e2m1(int(byte) >> shift & 15) for byte in blocks.flatten()]
        assert torch.equal(got[..., half], torch.tensor(want).view(2, 8, 16) * factors)


def test_scales_in_another_file_before_their_blocks(published, tmp_path):
    path, _, model = published("gpt-oss", "mxfp4")
    scales = {}
    path = families.copied(path, tmp_path, lambda tensors, _: scales.update(
        {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scales")}
    ))  # fmt: skip
    save_file(scales, tmp_path / "a.safetensors")
    check_logits(path, model)


def test_in_bf16_they_are_exact(published, make_llm):
    path = published("gpt-oss", "mxfp4")[0]
    half, full = (make_llm(model=path, dtype=dtype, num_kvcache_blocks=16) for dtype in ("bfloat16", "float32"))
    assert "bfloat16 (MXFP4 experts dequantized);" in describe(half.config, half.model_runner)
    experts = [llm.model_runner.model.model.layers[1].mlp.experts for llm in (half, full)]
    for name in ("gate_up_proj", "down_proj"):
        weights = [getattr(e, name) for e in experts]
        assert weights[0].dtype == torch.bfloat16 and torch.equal(weights[0].float(), weights[1])


def test_floats_for_kept_experts(published, keeps):
    """As update_weights may be given them."""
    path, _, model = published("gpt-oss", "mxfp4")
    keeps(True)
    filler = quantized_checkpoints.WeightFiller(built(path))
    with refuses("expected", CheckpointError):
        filler.fill_from([(EXPERTS, model.state_dict()[EXPERTS])], "update_weights")



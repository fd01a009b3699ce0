"""PEFT adapters, merged as they load: weights and tokens of PEFT's own merged model. 30 s."""

import json
import warnings
from pathlib import Path

import families
import pytest
import quantized_checkpoints
import torch
from helpers import DEVICES, generate, greedy, prompt_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanovllm import CheckpointError, ConfigError, EngineError

PROMPTS = [prompt_of(40), prompt_of(9, seed=1)]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {  # case -> arguments of LoraConfig
    "attention": dict(r=4, lora_alpha=32, target_modules=ATTENTION),
    "all linear": dict(r=3, lora_alpha=16, target_modules="all-linear"),
    "rslora": dict(r=4, lora_alpha=6, use_rslora=True, target_modules=["down_proj", "gate_proj"]),
    "patterns": dict(
        r=4, lora_alpha=8, target_modules=r".*\.(q_proj|up_proj|o_proj)",
        rank_pattern={"q_proj": 2, r"layers\.1\.mlp.+": 6},
        alpha_pattern={r"layers\.1\.mlp\.up_proj": 40, "o_proj": 3},
    ),
    "whole modules": dict(r=2, lora_alpha=9, target_modules=["v_proj"], modules_to_save=["lm_head", "input_layernorm"]),
    "embedding and head": dict(r=2, lora_alpha=30, target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "fan_in_fan_out": dict(r=2, lora_alpha=30, target_modules=["o_proj"], fan_in_fan_out=True),
    "layers": dict(
        r=2, lora_alpha=30, target_modules=["q_proj", "up_proj", "model.layers.0.mlp.down_proj"],
        layers_to_transform=[1, 7], layers_pattern=["h", "layers"],
    ),
    "excluded": dict(r=2, lora_alpha=30, target_modules="all-linear", exclude_modules=["k_proj", "0.mlp.up_proj"]),
    "expressions": dict(
        r=2, lora_alpha=30, target_modules=r"(?i).*\.(Q|K|DOWN)_PROJ|nothing",
        exclude_modules=r"model\.layers\.0\.mlp\..*",
        rank_pattern={"^model.layers.1.self_attn.k_proj": 3, "nothing": 9}, alpha_pattern={"nothing": 9},
    ),
}


def train(base_path, path, seed=0, **config):
    """Write an adapter with random factors; return PEFT's merged model."""
    import peft

    model = AutoModelForCausalLM.from_pretrained(base_path, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT, about itself
        model = peft.get_peft_model(model, peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        if param.requires_grad or name.endswith(("embed_tokens.base_layer.weight", "lm_head.base_layer.weight")):
            param.data.normal_(float("norm" in name), 0.2, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
    if config.get("fan_in_fan_out"):  # PEFT has stored what it took
        edit(path, fan_in_fan_out=True)
    return model.merge_and_unload().eval()


def edit(path, **changes):
    file = Path(path, "adapter_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def copied(path, to, **changes):
    """A copy of an adapter, with changes of its config."""
    for file in Path(path).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    edit(to, **changes)
    return to


def write(path, factors):
    """An adapter of rank 2 with these tensors."""
    path.mkdir(exist_ok=True)
    save_file(factors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return path


def tokens(llm):
    return generate(llm, PROMPTS, greedy(8))


@torch.inference_mode()
def expected(model):
    return [model.generate(torch.tensor([p]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, len(p):].tolist()
            for p in PROMPTS]  # fmt: skip


def weights_of(llm):
    return {name: param.clone() for name, param in llm.model_runner.model.named_parameters()}


def assert_equal(llm, other, atol=2e-6):
    for name, param in llm.model_runner.model.named_parameters():
        torch.testing.assert_close(param, other[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ADAPTERS)
def test_as_peft_merges_it(case, device, make_checkpoint, make_llm, tmp_path):
    base = make_checkpoint()
    merged = train(base, tmp_path / "adapter", **ADAPTERS[case])
    merged.save_pretrained(tmp_path / "merged")
    options = {"device": device, "dtype": "float32"}
    want = weights_of(make_llm(model=str(tmp_path / "merged"), **options))
    plain = make_llm(model=base, **options)
    assert any(not torch.equal(want[name], param) for name, param in weights_of(plain).items())
    llm = make_llm(model=base, lora=tmp_path / "adapter", **options)
    assert_equal(llm, want)
    assert tokens(llm) == expected(merged)


@pytest.mark.parametrize("case", ["gemma3", "granite", "phi3", "glm4-moe", "lfm2"])
def test_families(case, make_llm, tmp_path):
    """Renamed tensors, scaled ones, merged ones; attention beside experts."""
    families.make(tmp_path / "base", case)
    targets = ["q_proj", "qkv_proj", "o_proj"] + ["gate_up_proj", "down_proj"] * ("moe" not in case)
    targets = ["q_proj", "in_proj", "out_proj", "w1", "w2"] if case == "lfm2" else targets
    train(tmp_path / "base", tmp_path / "adapter", target_modules=targets).save_pretrained(tmp_path / "merged")
    want = weights_of(make_llm(model=str(tmp_path / "merged"), max_model_len=128))
    assert_equal(make_llm(model=str(tmp_path / "base"), lora=str(tmp_path / "adapter"), max_model_len=128), want, 1e-5)


@pytest.fixture(scope="module")
def adapters(make_checkpoint, tmp_path_factory):
    """(base, {name: (path of an adapter, its tokens)}), which change different tensors."""
    base, made = make_checkpoint(), {}
    for seed, name in enumerate(("attention", "rslora")):
        path = tmp_path_factory.mktemp(name)
        made[name] = str(path), expected(train(base, path, seed, **ADAPTERS[name]))
    return base, made


@pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
def test_one_adapter_after_the_other(size, adapters, make_llm):
    """Never the sum of two; cached prefixes are forgotten; only the tensors that differ are read."""
    base, made = adapters
    (first, of_first), (second, of_second) = made["attention"], made["rslora"]
    llm = make_llm(model=base, lora=first, tensor_parallel_size=size)
    assert tokens(llm) == of_first
    names = llm.update_weights(lora=second)
    assert {name.split(".")[-2] for name in names} == {*ATTENTION, "down_proj", "gate_proj"}
    assert tokens(llm) == of_second
    assert llm.update_weights(lora=second) == {name for name in names if "_proj" in name and "mlp" in name}
    assert tokens(llm) == of_second
    llm.update_weights(lora=None)
    without = tokens(llm)
    assert without not in (of_first, of_second)
    llm.update_weights(lora=first)
    assert tokens(llm) == of_first
    llm.update_weights(base)
    assert tokens(llm) == without


def test_after_other_weights_the_base_is_the_checkpoint(adapters, make_llm):
    base, made = adapters
    path, of_adapter = made["attention"]
    llm = make_llm(model=base)
    norm = "model.layers.0.input_layernorm.weight"
    llm.update_weights({norm: torch.zeros(64)}, partial=True)
    assert norm in llm.update_weights(lora=path)
    assert tokens(llm) == of_adapter
    llm.sleep(2)
    llm.wake_up()
    llm.update_weights(lora=path)
    assert tokens(llm) == of_adapter


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "fp8"}], ids=["bfloat16", "fp8"])
def test_the_sum_is_rounded_once(options, adapters, make_llm, tmp_path):
    """As if the sum had been stored in fp32."""
    base, made = adapters
    path, _ = made["attention"]
    state, factors = load_file(Path(base, "model.safetensors")), load_file(Path(path, "adapter_model.safetensors"))
    for name in [name for name in factors if "lora_A" in name]:
        target = name.removeprefix("base_model.model.").replace("lora_A.", "")
        product = factors[name.replace("lora_A", "lora_B")].double() @ factors[name].double()
        state[target] = (state[target].double() + 8 * product).float()  # alpha / r
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(Path(base, "config.json").read_text())
    want = {name: p.float() for name, p in weights_of(make_llm(model=str(tmp_path), **options)).items()}
    got = {name: p.float() for name, p in weights_of(make_llm(model=base, lora=path, **options)).items()}
    for name in want:
        if name.endswith("scale"):
            torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=0)
        else:  # but for ties: the order of fp32 sums
            assert (got[name] == want[name]).float().mean() > 0.99, name


def test_fp8_weights(adapters, make_llm, tmp_path):
    """Quantized anew with each adapter; to a checkpoint in FP8 nothing is added."""
    base, made = adapters
    (first, _), (second, _) = made["attention"], made["rslora"]
    llm = make_llm(model=base, quantization="fp8", lora=first)
    want = {lora: weights_of(make_llm(model=base, quantization="fp8", lora=lora)) for lora in (second, None)}
    for lora, weights in want.items():
        llm.update_weights(lora=lora)
        assert all(torch.equal(p.float(), weights[name].float()) for name, p in weights_of(llm).items())
    (tmp_path / "config.json").write_text(Path(base, "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    quantized_checkpoints.write(tmp_path, model, "channel")
    with pytest.raises(CheckpointError, match=r"_proj.weight' is FP8, and an adapter is merged into 16-bit weights"):
        make_llm(model=str(tmp_path), lora=first)


def test_experts_and_merged_layers(make_llm, tmp_path):
    """Factors of each expert; and of q, k and v at once where the checkpoint has them so."""
    generator = torch.Generator().manual_seed(1)
    for case, modules in (
        ("qwen3-moe", ["mlp.experts.3.down_proj", "mlp.experts.0.gate_proj", "self_attn.k_proj", "mlp.gate"]),
        ("phi3", ["self_attn.qkv_proj", "mlp.gate_up_proj"]),
    ):
        path = tmp_path / case
        families.make(path, case)
        state, factors = load_file(path / "model.safetensors"), {}
        for module in modules:
            weight = state[f"model.layers.0.{module}.weight"]
            a, b = (torch.randn(shape, generator=generator) for shape in ((2, weight.shape[1]), (weight.shape[0], 2)))
            for letter, factor in zip("AB", (a, b), strict=True):
                factors[f"base_model.model.model.layers.0.{module}.lora_{letter}.weight"] = factor
            state[f"model.layers.0.{module}.weight"] = weight + 2 * b @ a
        llm = make_llm(model=str(path), lora=str(write(tmp_path / f"{case}-adapter", factors)), max_model_len=128)
        save_file(state, path / "model.safetensors", {"format": "pt"})
        assert_equal(llm, weights_of(make_llm(model=str(path), max_model_len=128)), 1e-5)


REFUSED = {  # case -> changes of adapter_config.json, error
    "dora": (dict(use_dora=True), "use_dora=True is not supported. Merge it by PEFT's merge_and_unload"),
    "bias": (dict(bias="all"), "bias='all' is not supported"),
    "lora_bias": (dict(lora_bias=True), "lora_bias=True is not supported"),
    "other": (dict(peft_type="IA3"), "peft_type='IA3' is not supported"),
    "pissa": (dict(init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
    "experts": (dict(target_parameters=["mlp.experts.gate_up_proj"]), r"target_parameters=\['mlp.experts.gate_up_pr"),
    "new field": (dict(use_novelty={"a": 1}), "use_novelty={'a': 1} is not supported"),
    # raw errors, or silently wrong numbers
    **{f"lora_alpha={value}": (dict(lora_alpha=value), "lora_alpha=.* must be a finite number")
       for value in (float("nan"), float("-inf"), "16", None, [8], True, -1e39, 10**400)},
    **{f"r={value}": (dict(r=value), "r=.* must be an integer >= 1 or None") for value in (0, -2, "2", 2.5)},
    **{f"alpha_pattern={value}": (dict(alpha_pattern=value), "alpha_pattern=.* must be an object of finite numbers")
       for value in ([8], "q_proj", {"q_proj": None}, {"q_proj": "4"}, {"q_proj": float("nan")})},
    "use_rslora": (dict(use_rslora="yes"), "use_rslora='yes' must be True or False or None"),
    "no pattern": (dict(alpha_pattern={"(q_proj": 4}), "alpha_pattern has the regular expression"),
    **{f"slow pattern {pattern}": (dict(alpha_pattern={pattern: 4}), "alpha_pattern has regular expressions that")
       for pattern in ("(([a-z.0-9_]*)*)*!", "(.|.|_)+x", "(\\w+\\.?)+#")},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_by_name(case, adapters, make_llm, tmp_path, monkeypatch):
    monkeypatch.setattr("nanovllm.utils.patterns.SECONDS", 1.0)
    base, made = adapters
    copied(made["attention"][0], tmp_path, **REFUSED[case][0])
    with pytest.raises(CheckpointError, match=REFUSED[case][1]):
        make_llm(model=base, lora=str(tmp_path))


CONTRADICTIONS = {  # changes of the config of an adapter of rank 4 of all projections of attention -> error
    "rank": (dict(r=5), "r=5 gives rank 5 to 'model.layers.0.self_attn.._proj', whose tensors have 4"),
    "no pattern": (dict(r=5, rank_pattern={"q_proj": 4}), "r=5 gives rank 5 to 'model.layers.0.self_attn.[kvo]_proj'"),
    "pattern": (dict(rank_pattern={r"layers\.1\..*k_proj": 2}), "rank_pattern=.* gives rank 2 to '.*1.self_attn.k_pro"),
    "one target": (dict(target_modules=["q_proj"]), "leaves out module '.*[kvo]_proj', and the adapter has tensors"),
    "no target": (dict(target_modules=[]), r"target_modules=\[\] leaves out module"),
    "part of a name": (dict(target_modules=["proj"]), "leaves out module"),
    "more targets": (dict(target_modules=[*ATTENTION, "up_proj"]), "names '.*0.mlp.up_proj', and .* no tensors"),
    "head": (dict(target_modules=[*ATTENTION, "lm_head"]), "names 'lm_head', and the adapter has no tensors"),
    "embedding": (dict(target_modules=r".*self_attn.*proj|.*embed_tokens"), "names 'model.embed_tokens', and"),
    "all-linear": (dict(target_modules="all-linear"), "target_modules='all-linear' names '.*mlp.down_proj'"),
    "expression": (dict(target_modules=r".*\.[qk]_proj"), "leaves out module '.*[vo]_proj'"),
    "a start": (dict(target_modules=r".*self_attn"), "leaves out module"),
    "excluded": (dict(exclude_modules=["v_proj"]), r"exclude_modules=\['v_proj'\] leaves out module '.*v_proj'"),
    "excluded layer": (dict(exclude_modules=r".*layers\.1\..*"), "exclude_modules=.* leaves out module '.*layers.1"),
    "saved": (dict(modules_to_save=["o_proj"]), r"modules_to_save=.* leaves out module '.*o_proj'"),
    "not saved": (dict(modules_to_save=["input_layernorm"]), "names 'input_layernorm', and the adapter has no tensors"),
    "layer": (dict(layers_to_transform=0), "layers_to_transform=0 leaves out module 'model.layers.1"),
    "layers": (dict(layers_to_transform=[1, 2]), r"layers_to_transform=\[1, 2\] leaves out module 'model.layers.0"),
    "pattern of layers": (dict(layers_to_transform=[0, 1], layers_pattern="h"), "layers_to_transform=.* leaves out"),
    "layers of an expression": (dict(target_modules=".*", layers_to_transform=1), "needs a list of target_modules"),
    "no layers": (dict(layers_pattern="layers"), "needs a list of target_modules, and layers_to"),
    "no expression": (dict(target_modules="(q_proj"), "target_modules has the regular expression"),
    "slow": (dict(exclude_modules=r"(([a-z.0-9_]*)*)*!"), "exclude_modules has regular expressions that take more"),
    "number": (dict(target_modules=5), "target_modules=5 must be a string, a list of strings or None"),
    "numbers": (dict(exclude_modules=[5]), "exclude_modules=.* must be a string, a list of strings or None"),
    "string": (dict(modules_to_save="lm_head"), "modules_to_save='lm_head' must be a list of strings or None"),
    "no layer": (dict(layers_to_transform=[-1]), "layers_to_transform=.* must be a layer, a list of layers or None"),
    "rank 0": (dict(rank_pattern={"q_proj": 0}), "rank_pattern=.* must be an object of integers >= 1"),
}


def test_a_config_that_contradicts_the_tensors(adapters, make_llm, tmp_path, monkeypatch):
    """It was merged as its tensors said, with a scale that nobody had trained; the engine keeps its weights."""
    monkeypatch.setattr("nanovllm.utils.patterns.SECONDS", 1.0)
    base, made = adapters
    path, of_adapter = made["attention"]
    llm = make_llm(model=base)
    before = tokens(llm)
    for case, (changes, message) in CONTRADICTIONS.items():
        copied(path, tmp_path, **changes)
        with pytest.raises(CheckpointError, match=message):
            llm.update_weights(lora=tmp_path)
            pytest.fail(case)
    with pytest.raises(CheckpointError, match="must be an object of integers"):
        make_llm(model=base, lora=tmp_path)
    assert tokens(llm) == before
    for changes in (dict(layers_to_transform=[0, 1]), dict(target_modules=None), dict(target_modules=".*self_attn.+")):
        llm.update_weights(lora=copied(path, tmp_path, **changes))
        assert tokens(llm) == of_adapter
        llm.update_weights(lora=None)
    factors = load_file(tmp_path / "adapter_model.safetensors")
    save_file({name: x for name, x in factors.items() if "layers.1" in name}, tmp_path / "adapter_model.safetensors")
    edit(tmp_path, layers_to_transform=[0, 1], target_modules=ATTENTION)
    with pytest.raises(CheckpointError, match=r"layers_to_transform=\[0, 1\] names 'model.layers.0.self_attn"):
        llm.update_weights(lora=tmp_path)
    edit(tmp_path, layers_to_transform=None)  # a layer without tensors stays as it is, for PEFT, too
    assert {name.split(".")[2] for name in llm.update_weights(lora=tmp_path)} == {"1"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["self_attn.v_proj.lora_A.weight", "mlp.up_proj.lora_B.weight", "input_layernorm.weight"]
)
def test_numbers_that_are_none(name, value, adapters, make_llm, tmp_path):
    """NaN factors gave finite, wrong tokens."""
    shapes = {"self_attn.v_proj": ((2, 64), (64, 2)), "mlp.up_proj": ((2, 64), (96, 2))}
    stem = "base_model.model.model.layers.1."
    factors = {f"{stem}input_layernorm.weight": torch.ones(64)}
    for module, (shape_a, shape_b) in shapes.items():
        factors |= {f"{stem}{module}.lora_A.weight": torch.zeros(shape_a)}
        factors |= {f"{stem}{module}.lora_B.weight": torch.zeros(shape_b)}
    factors[f"{stem}{name}"].view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=r"tensor '.*layers.1.* has numbers from .* not finite numbers\."):
        make_llm(model=adapters[0], lora=write(tmp_path, factors))


@pytest.mark.parametrize(("factors", "text"), [
    *(({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(2, 64, dtype=dtype)},
       "is of .* must be of F64") for dtype in (torch.int8, torch.bool, torch.complex64)),
    ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.full((2, 64), 1e25),
      "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": torch.full((96, 2), -1e25)},
     r"up_proj.weight with the adapter' has numbers from -inf to -inf, not finite"),
    ({}, "holds no tensor, so it would change nothing"),
    ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(0, 64),
      "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": torch.zeros(96, 0)}, "must have two matrices"),
])  # fmt: skip
def test_adapters_without_numbers(factors, text, adapters, make_llm, tmp_path):
    """Taken in silence, or a ZeroDivisionError."""
    with pytest.raises(CheckpointError, match=text):
        make_llm(model=adapters[0], lora=write(tmp_path, factors))


def test_adapters_that_do_not_fit(adapters, make_checkpoint, make_llm, tmp_path):
    """The engine runs on; after half a merge it says what it needs."""
    base, made = adapters
    path, of_adapter = made["attention"]
    llm = make_llm(model=base)
    before = tokens(llm)
    whole, attention = "base_model.model.model.layers.", "0.self_attn."
    for name, rows, message in (  # rows of B; none without B
        (f"{whole}7.self_attn.q_proj.lora_A.weight", 128, "has none of 1 tensors that the adapter ch"),
        (f"model.layers.{attention}q_proj.lora_A.weight", 0, "must have two matrices"),
        (f"{whole}{attention}q_proj.lora_magnitude_vector", 0, r"lora_magnitude_vector' is unknow"),
        (f"{whole}0.mlp.up_proj.lora_A.weight", 97, r"up_proj.lora_B.weight' has shape \[97, 2\], expected \[96, 2\]"),
        # the checkpoint has three tensors
        (f"{whole}{attention}qkv_proj.lora_A.weight", 256, r"has none of 1 tensors .*layers.0.self_attn.qkv_proj"),
    ):
        of_b = {name.replace("lora_A", "lora_B"): torch.zeros(rows, 2)} if rows else {}
        with pytest.raises(CheckpointError, match=message):
            llm.update_weights(lora=write(tmp_path / "wrong", {name: torch.zeros(2, 64), **of_b}))
        if rows not in (97, 256):  # refused before anything is written
            assert tokens(llm) == before
    with pytest.raises(EngineError, match="an update of the weights failed half way"):
        tokens(llm)
    llm.update_weights(lora=path)
    assert tokens(llm) == of_adapter
    with pytest.raises(CheckpointError, match=r"lora='/none' is not a directory .*holds adapter_config.json"):
        llm.update_weights(lora="/none")
    with pytest.raises(ConfigError, match="give weights, or lora"):
        llm.update_weights(base, lora=path)
    with pytest.raises(ConfigError, match="update_weights: lora=5 must be a path, a hub id or None"):
        llm.update_weights(lora=5)
    llm.add_request(PROMPTS[0], greedy(4))
    with pytest.raises(EngineError, match="needs an idle engine"):
        llm.update_weights(lora=path)
    with pytest.raises(ConfigError, match=r"lora=.* needs a checkpoint's weights; leave out"):
        make_llm(model=base, lora=path, load_format="dummy")
    tied = make_checkpoint(tie_word_embeddings=True)
    train(base, tmp_path / "head", **ADAPTERS["embedding and head"])
    with pytest.raises(CheckpointError, match="which are one tensor in this model"):
        make_llm(model=tied, lora=tmp_path / "head")

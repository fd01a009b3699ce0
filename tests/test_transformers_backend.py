"""Architectures without a row: transformers' modules with this library's attention, or a refusal that says why."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from histories import at_night
from quantized_checkpoints import LINEAR, write
from safetensors.torch import load_file, save_file
from transformers_architectures import PASSES, REFUSED, SMALL, V

from nanovllm import LLM, SamplingParams, kernels
from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.layers.attention_backends import select_backend
from nanovllm.models import MODELS
from nanovllm.quantization.fp8.numbers import quantize
from nanovllm.runner.device import describe
from nanovllm.transformers_backend import config as backend_config
from nanovllm.transformers_backend import proof
from nanovllm.transformers_backend.layers import MLP, Experts, Linear, Norm
from nanovllm.transformers_backend.model import TransformersCausalLM

NUM_DECODED = 8
OPTIONS = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "kvcache_block_size": 16,
           "max_model_len": 256, "quiet": True}  # fmt: skip
WAYS = {
    "chunked": {"num_kvcache_blocks": 64, "max_num_batched_tokens": 16, "max_num_seqs": 3},
    "plain": {"num_kvcache_blocks": 64},
    "preempted": {"num_kvcache_blocks": 9, "enable_prefix_caching": False},
    "speculated": {"num_kvcache_blocks": 64, "speculative_config": {"method": "ngram", "adaptive": False}},
}
IN_ALL_WAYS = {"DeepseekV3", *at_night("Cohere2", "Gemma3n")}
COMMITTED = 10  # architectures that each commit runs


def class_of(name):
    return getattr(transformers, name if hasattr(transformers, name) else f"{name}ForCausalLM")


@pytest.fixture(autouse=True)
def without_rows(monkeypatch):
    """Architectures of the table that have a row by now run on transformers' modules all the same."""
    for name in [*PASSES, *REFUSED]:
        monkeypatch.delitem(MODELS, class_of(name).__name__, raising=False)


def save(name, path, **fields):
    """A random checkpoint of a small model, and the model."""
    kind = class_of(name)
    known = PASSES.get(name) or REFUSED.get(name, ({},))[0]
    torch.manual_seed(7)
    fields = fields if "text_config" in fields else SMALL | known | fields
    model = kind._from_config(kind.config_class(**fields), attn_implementation="eager")
    with torch.no_grad():
        for param in model.float().eval().parameters():
            param.normal_(float(param.dim() == 1 and param.mean() > 0.5), 0.2 if param.dim() == 1 else 0.12)
    model.save_pretrained(path)
    return model


def start(path, **options):
    return LLM(str(path), **{"num_kvcache_blocks": 64, **OPTIONS, **options})


def tokens(path, prompts=((1, 2, 3),), **options):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with start(path, **options) as llm:
        return [x["token_ids"] for x in llm.generate([list(each) for each in prompts], params, use_tqdm=False)]


@pytest.mark.parametrize("name", [*list(PASSES)[:COMMITTED], *at_night(*list(PASSES)[COMMITTED:])])
def test_gives_transformers_tokens(name, tmp_path):
    model, generator = save(name, tmp_path), torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, V, (n,), generator=generator).tolist() for n in (1, 7, 30, 41)]
    prompts.append(prompts[2][:16] + prompts[0] * 5)
    expected, logprobs = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            for _ in range(NUM_DECODED):
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            expected.append(ids[0, len(prompt) :].tolist())
            of_all = model(ids, use_cache=False).logits[0].float().log_softmax(-1)[:-1]
            logprobs.append(of_all.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0])
    params = SamplingParams(temperature=0, max_tokens=NUM_DECODED, ignore_eos=True, logprobs=0)
    for way in WAYS if name in IN_ALL_WAYS else ("chunked",):
        with start(tmp_path, **WAYS[way]) as llm:
            for _ in range(2):  # the second finds prefixes
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert [x["token_ids"] for x in outputs] == expected, way
            assert (llm.metrics()["num_preemptions"] > 0) == (way == "preempted")
        for output, wanted in zip(outputs, logprobs, strict=True):
            pairs = zip(output.outputs[0].logprobs, output["token_ids"], strict=True)
            given = torch.tensor([at[token].logprob for at, token in pairs])
            assert torch.allclose(given, wanted, atol=2e-4)


@pytest.mark.parametrize("name", [*list(REFUSED)[:5], *at_night(*list(REFUSED)[5:])])
def test_refuses_by_name(name, tmp_path):
    fields, why = REFUSED[name]
    save(name, tmp_path, **fields)
    with pytest.raises(CheckpointError, match=why) as refused:
        start(tmp_path)
    assert name in str(refused.value) or "tensor" in str(refused.value)


# ---------------------------------------------------------------- faults put in by hand


def in_attention(**changed):
    """Attributes of one attention call: a factor, or what replaces them."""

    def spoil(model):
        for name, value in changed.items():
            layer = next(each for each in reversed(model.attentions) if getattr(each, name))
            setattr(layer, name, value(getattr(layer, name)))

    return spoil


def in_attend(change):
    """The arguments (q, k, v, sinks) of the last attention call."""

    def spoil(model):
        attend = model.attend

        def attend_wrongly(layer, q, k, v, context, sinks):
            if layer is model.attentions[-1]:
                q, k, v, sinks = change(q, k, v, sinks)
            return attend(layer, q, k, v, context, sinks)

        model.attend = attend_wrongly

    return spoil


def in_module(kind, change, keeps=bool):
    def spoil(model):
        change([module for module in model.model.modules() if isinstance(module, kind) and keeps(module)][-1])

    return spoil


def in_bias(layer):
    layer.forward = lambda x, product=layer.forward: product(x) - layer.bias


def in_weight(layer):
    layer.forward = lambda x, product=layer.forward: product(x) * 1.05


def in_act(mlp):
    mlp.act = "gelu_tanh"


def in_rotation(model):
    (rotation,) = model.model.rotations
    rotate = rotation.ops.rotate_heads
    rotation.ops = SimpleNamespace(rotate_heads=lambda x, cos, sin: rotate(x, cos, -sin))


def in_experts(experts):
    experts.forward = lambda x, ids, weights, product=experts.forward: product(x, ids, weights.flip(1))


def in_eps(norm):
    norm.eps += 0.1


CALL, MODULE = "attention of .* differs from transformers' own with", "differs from transformers' own module"
FAULTS = {
    "scale": ("Cohere2", in_attention(scale=lambda x: x * 1.1), CALL),
    "wider window": ("Cohere2", in_attention(window=lambda x: x + 1), CALL),
    "narrower window": ("Cohere2", in_attention(window=lambda x: x - 1), CALL),
    "wide window of a long model": ("Cohere2", in_attention(window=lambda x: x + 1), CALL),
    "rotated heads": ("Cohere2", in_attend(lambda q, k, v, sinks: (q.roll(1, 1), k, v, sinks)), CALL),
    "other KV heads": ("Cohere2", in_attend(lambda q, k, v, sinks: (q, k.flip(1), v.flip(1), sinks)), CALL),
    "values of keys": ("Cohere2", in_attend(lambda q, k, v, sinks: (q, k, k, sinks)), CALL),
    "dropped sinks": ("MiMoV2Flash", in_attend(lambda q, k, v, sinks: (q, k, v, None)), CALL),
    "no softcap in one layer": ("VaultGemma", in_attention(softcap=lambda x: 0.0), CALL),
    "smaller softcap": ("VaultGemma", in_attention(softcap=lambda x: x * 0.8), CALL),
    "no bias": ("StableLm", in_module(Linear, in_bias, lambda layer: layer.bias is not None), MODULE),
    "scaled product": ("Cohere2", in_module(Linear, in_weight), MODULE),
    "scaled MLP": ("Cohere2", in_module(MLP, in_weight), MODULE),
    "other activation": ("Cohere2", in_module(MLP, in_act), MODULE),
    "other experts' weights": ("Dots1", in_module(Experts, in_experts), MODULE),
    "experts' activation": ("Dots1", in_module(Experts, in_act), MODULE),
    "rotated the other way": ("Arcee", in_rotation, "the rotary embedding differs"),
    "epsilon": ("VaultGemma", in_module(Norm, in_eps), MODULE),
}
FIELDS = {"no bias": {"use_qkv_bias": True}, "wide window of a long model": {"sliding_window": 100}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def checkpoint(name, **fields):
        key = name, json.dumps(fields)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            save(name, made[key], **fields)
        return made[key]

    return checkpoint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_proof_finds_a_fault(fault, dtype, checkpoints, monkeypatch):
    """One fault in one layer; the same start without it passes."""
    (name, spoil, message), prove = FAULTS[fault], proof.prove
    path = checkpoints(name, **FIELDS.get(fault, {}))
    start(path, dtype=dtype, num_kvcache_blocks=8).exit()

    def prove_spoiled(model, *args):
        spoil(model)
        prove(model, *args)

    monkeypatch.setattr(proof, "prove", prove_spoiled)
    with pytest.raises(CheckpointError, match=message):
        start(path, dtype=dtype, num_kvcache_blocks=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_proof_finds_states_besides_keys_and_values(dtype, tmp_path, monkeypatch):
    """Its convolutions would mix the tokens of a batch, and forget those of the chunk before."""
    save("Lfm3", tmp_path)
    monkeypatch.setattr(backend_config, "STATELESS", {"conv", "full_attention"})
    with pytest.raises(CheckpointError, match="logits"):
        start(tmp_path, dtype=dtype)


# ---------------------------------------------------------------- the rest of the API


def test_weights_sleep_and_are_updated(tmp_path):
    """From pairs under the names of checkpoints, experts one by one; and from a directory."""
    first, second = (Path(tmp_path, name) for name in ("first", "second"))
    save("Dots1", first)
    other = save("Dots1", second)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(0.01)
    other.save_pretrained(second)
    expected = tokens(second)
    saved = load_file(second / "model.safetensors")
    assert any(name.endswith(".experts.3.up_proj.weight") for name in saved)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for source in (str(second), saved):
        with start(first) as llm:
            llm.sleep(2)
            llm.wake_up()
            llm.update_weights(source)
            assert [llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]["token_ids"]] == expected


def test_an_adapter_is_merged_by_the_names_of_linear_layers(tmp_path):
    base, adapter, merged = (Path(tmp_path, name) for name in ("base", "adapter", "merged"))
    model, generator = save("Cohere2", base), torch.Generator().manual_seed(0)
    names = ["model.layers.1.self_attn.q_proj", "model.layers.2.mlp.down_proj"]
    factors = {}
    for name in names:
        linear = model.get_submodule(name)
        a, b = (torch.randn(shape, generator=generator) for shape in ((4, linear.in_features),
                                                                      (linear.out_features, 4)))
        factors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        linear.weight.data += 2 * b @ a
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": names, "base_model_name_or_path": "",
    }))  # fmt: skip
    model.save_pretrained(merged)
    assert tokens(base, lora=str(adapter)) == tokens(merged) != tokens(base)


@pytest.mark.parametrize(("name", "kind"), [("Arcee", ""), ("Dots1", "float8_e4m3fn"), ("LongcatFlash", "float32")])
def test_fp8_quantizes_its_linear_layers(name, kind, tmp_path):
    """And experts, but no router, nor experts of a form of their own: LongCat has some that compute nothing."""
    save(name, tmp_path, head_dim=8 if name == "LongcatFlash" else 16)
    with start(tmp_path, quantization="fp8") as llm:
        given = llm.score([[1, 2, 3, 4, 5, 6, 7, 8]])[0].logprobs
        params = dict(llm.model_runner.model.named_parameters())
    dtypes = {str(x.dtype) for path, x in params.items() if path.endswith("experts.gate_up_proj")}
    assert dtypes == ({f"torch.{kind}"} if kind else set())
    of_linears = {path: x.dtype for path, x in params.items() if path.endswith(("q_proj.weight", "q_b_proj.weight"))}
    assert set(of_linears.values()) == {torch.float8_e4m3fn}
    routers = {x.dtype for path, x in params.items() if path.endswith((".router.classifier.weight", ".gate.weight"))}
    assert routers == ({torch.float32} if kind else set())
    if name == "LongcatFlash":  # rounding sends tokens to other experts
        return
    with start(tmp_path) as llm:
        expected = llm.score([[1, 2, 3, 4, 5, 6, 7, 8]])[0].logprobs
    given, expected = torch.tensor(given), torch.tensor(expected)
    assert 0 < (given - expected).abs().max() < 0.5


def change_config(path, **fields):
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | fields))


@pytest.mark.parametrize("block", [0, 128])
def test_fp8_checkpoints(block, tmp_path):
    """Its linear layers stay FP8, but the first MLP; the same weights in 16 bits give the same numbers."""
    given, wide = Path(tmp_path, "given"), Path(tmp_path, "wide")
    save("Cohere2", given, intermediate_size=192)
    save("Cohere2", wide, intermediate_size=192)
    tensors, stored = load_file(given / "model.safetensors"), {}
    for name, tensor in tensors.items():
        stored[name] = tensor
        if "_proj." in name and "layers.0.mlp" not in name:
            data, scale = quantize(tensor, block)
            spread = scale.repeat_interleave(block or 1, 0)[: len(tensor)]
            spread = spread.repeat_interleave(block or tensor.shape[1], 1)[:, : tensor.shape[1]]
            stored |= {name: data, f"{name}_scale_inv": scale}
            tensors[name] = data.float() * spread
    save_file(stored, given / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    change_config(given, quantization_config={
        "quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.0.mlp"],
        **({"weight_block_size": [block] * 2} if block else {}),
    })  # fmt: skip
    ids, logprobs = [[1, 2, 3, 4, 5, 6, 7, 8]], []
    for path in (given, wide):
        with start(path) as llm:
            logprobs.append(torch.tensor(llm.score(ids)[0].logprobs))
            dtypes = {str(param.dtype) for _, param in llm.model_runner.model.named_parameters()}
            assert ("torch.float8_e4m3fn" in dtypes) == (path == given)
    assert torch.allclose(*logprobs, atol=2e-4)
    if block == 0:
        assert tokens(given, tensor_parallel_size=2) == tokens(given)


# (class, form of ``quantized_checkpoints``, scheme, as the line at start calls it)
QUANTIZED = [
    ("Cohere2", "awq", {"size": 32}, "INT4"), ("Dots1", "nvfp4", {}, "NVFP4"), ("DeepseekV3", "qwen", {}, "FP8"),
    *at_night(
        ("Arcee", "gptq", {"act_order": True, "size": 32}, "INT4"), ("Cohere2", "gptq", {"act_order": True}, "INT4"),
        ("Cohere2", "compressed-tensors", {"symmetric": False}, "INT4"), ("Cohere2", "auto-round", {}, "INT4"),
        ("Cohere2", "modelopt-fp4", {}, "NVFP4"), ("Cohere2", "dense-mxfp4", {}, "MXFP4"),
        ("Cohere2", "compressed-tensors", {"bits": 8}, "integer"), ("Dots1", "gptq", {"bits": 8}, "integer"),
        ("DeepseekV3", "awq", {"size": 32}, "INT4"), ("Dots1", "gptq", {"size": 32}, "INT4"),
        ("Dots1", "dense-mxfp4", {}, "MXFP4"), ("Dots1", "modelopt-fp4", {}, "NVFP4"), ("Dots1", "channel", {}, "FP8"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "form", "scheme", "kind"), QUANTIZED)
def test_quantized_checkpoints(name, form, scheme, kind, tmp_path):
    """The dequantized weights in 16 bits give the same numbers; so do two ranks, which gather the same results."""
    given, wide = Path(tmp_path, "given"), Path(tmp_path, "wide")
    model = save(name, given)
    kept = [path for path, module in model.named_modules() if "proj" in path and type(module) is torch.nn.Linear]
    # the first MLP is left out, as some checkpoints have it; and linear layers whose names the helper does not know
    skipped = [path for path in kept if ".layers.0.mlp" in path or not LINEAR.fullmatch(f"{path}.weight")]
    write(given, model, form, skipped, **scheme)
    model.save_pretrained(wide)
    ids, logprobs = [[1, 2, 3, 4, 5, 6, 7, 8]], []
    for path in (given, wide):
        with start(path) as llm:
            logprobs.append(torch.tensor(llm.score(ids)[0].logprobs))
            line = describe(llm.config, llm.model_runner)
            assert (f" with {kind} weights" in line) == (path == given)
    assert torch.allclose(*logprobs, atol=2e-4)
    if not scheme.get("act_order"):
        assert tokens(given, tensor_parallel_size=2) == tokens(given)
        return
    with pytest.raises(CheckpointError, match=r"tensor_parallel_size=2 is not supported, since GPTQ has ordered"):
        start(given, tensor_parallel_size=2)


def test_quantized_experts_of_a_form_of_their_own_are_refused(tmp_path):
    """Their gate is clamped."""
    save("MiniMaxM3VL", tmp_path)
    change_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match=r"its experts are quantized, and the form of .*experts is its own"):
        start(tmp_path)


def test_options_that_are_refused(tmp_path):
    save("Arcee", tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 must divide the model's 2 KV heads"):
        start(tmp_path, tensor_parallel_size=4)
    for method in ("mxfp4", "bitsandbytes"):
        change_config(tmp_path, quantization_config={"quant_method": method})
        with pytest.raises(CheckpointError, match=f"quant_method='{method}' is not supported"):
            start(tmp_path)


def test_a_missing_tensor_is_no_random_one(tmp_path):
    save("Arcee", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing, among them model\.layers\.1\.self_attn\.o_proj\.weight"):
        start(tmp_path)


def test_a_head_of_its_own_in_a_tied_model_is_refused(tmp_path):
    """transformers then computes with the head; it was passed over, and the embedding taken in its place."""
    save("Arcee", tmp_path, tie_word_embeddings=True)
    expected = tokens(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    assert tokens(tmp_path) == expected  # a copy of the embedding
    head[V - 1, 0] += 1
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding"):
        start(tmp_path)


def test_an_end_token_that_is_none_is_refused(tmp_path):
    save("Arcee", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": -1}))
    with pytest.raises(CheckpointError, match="eos_token_id=-1 must be a token id"):
        start(tmp_path)


def test_an_old_transformers_is_refused(tmp_path, monkeypatch):
    save("Arcee", tmp_path)
    monkeypatch.setattr("transformers.__version__", "4.57.1")  # several copies are imported
    with pytest.raises(CheckpointError, match=r"needs transformers >= 5\.17, and 4\.57\.1 is installed"):
        start(tmp_path)


@pytest.mark.parametrize("name", [
    "Cohere2", "Dots1", *at_night("Nemotron", "DeepseekV3", "Glm4MoeLite", "Glm", "MiMoV2Flash"),
])  # fmt: skip
def test_two_ranks_share_linear_layers_and_experts(name, tmp_path):
    """By transformers' plan, and each rank has a part of every expert."""
    save(name, tmp_path)
    prompts = [list(range(2, 32)), [7]]
    assert tokens(tmp_path, prompts, tensor_parallel_size=2) == tokens(tmp_path, prompts)


def test_two_ranks_refuse_what_the_plan_shares_otherwise(tmp_path):
    save("LongcatFlash", tmp_path)
    with pytest.raises(CheckpointError, match=r"tensor_parallel_size=2 is not supported, since .*experts.* is "):
        start(tmp_path, tensor_parallel_size=2)


def test_the_line_at_start_tells_the_modules_and_their_cost(tmp_path):
    """Expanded latent attention takes 4 layers of 4 heads of twice 24 numbers a token."""
    save("DeepseekV3", tmp_path)
    with start(tmp_path) as llm:
        line = describe(llm.config, llm.model_runner)
    assert "with modules of transformers (1.5 KiB of KV cache a token in 16 bits) on the CPU" in line


def test_a_vision_language_model_takes_text_alone(tmp_path):
    """The line at start says so; neither its vision tower nor the tensors of that are loaded."""
    text = {"model_type": "cohere2", **SMALL, **PASSES["Cohere2"]}
    tower = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
             "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    model = save("AyaVisionForConditionalGeneration", tmp_path, text_config=text, vision_config=tower, image_token_id=9)
    assert any("vision_tower" in name for name in load_file(tmp_path / "model.safetensors"))
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        for _ in range(4):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert tokens(tmp_path) == [ids[0, 3:].tolist()]
    with start(tmp_path) as llm:
        assert " with modules of transformers (text alone, " in describe(llm.config, llm.model_runner)
        assert not any("vision_tower" in name for name, _ in llm.model_runner.model.named_parameters())


def test_layers_take_the_kernels_of_the_device(tmp_path, monkeypatch):
    """They are made on meta, and there the choice of kernels would be the references, on a GPU too."""
    save("Dots1", tmp_path)
    select = kernels.select

    def select_for(device_type=None, folder=""):
        ops = select(device_type, folder)
        return ops if folder else SimpleNamespace(**vars(ops), device=device_type or torch.get_default_device().type)

    monkeypatch.setattr(kernels, "select", select_for)
    with start(tmp_path) as llm:
        modules = [module for module in llm.model_runner.model.modules() if hasattr(module, "ops")]
        devices = {getattr(module.ops, "device", None) for module in modules}
    assert len(modules) > 20 and devices == {"cpu"}


@pytest.mark.parametrize("types", [("sliding", "sliding", "sliding", "full"), ("full", "sliding", "full", "full")])
def test_an_abridged_model_attends_as_the_whole_one(types, tmp_path):
    """Kernels are compiled with it: a kind of attention that it lacks would be compiled while the start waits."""
    layer_types = [f"{each}_attention" for each in types for _ in range(2)]
    save("Cohere2", tmp_path, num_hidden_layers=8, layer_types=layer_types)
    config = backend_config.read_config(str(tmp_path), "Cohere2ForCausalLM").for_length(64)
    whole, abridged = (
        TransformersCausalLM(each, select_backend("auto", "cpu", torch.float32), SINGLE_RANK)
        for each in (config, config.one_layer_of_each_kind())
    )
    assert len(abridged.calls) < len(whole.calls) == 8
    assert {call.window for call in abridged.calls} == {call.window for call in whole.calls}


def test_fields_outside_of_text_config(tmp_path):
    """Its class has defaults for them: fp32, and another token that ends an answer."""
    text = {"model_type": "mistral", **SMALL}
    outer = {"model_type": "llava", "dtype": "bfloat16", "eos_token_id": [7, 9], "image_token_id": 5}
    config = {"architectures": ["LlavaForConditionalGeneration"], **outer, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = backend_config.read_config(str(tmp_path), "LlavaForConditionalGeneration")
    assert (read.dtype, read.eos_token_ids) == ("bfloat16", (7, 9))

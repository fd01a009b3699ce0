"""FP8 weights: quantized while loading against the plain formula; which rows share scales; which layers are left out;
scales of a KV cache; updates. ``test_weight_formats.py`` has the logits and the refusals of published checkpoints.
"""

import copy
import json
import shutil
from dataclasses import replace

import families
import pytest
import quantized_checkpoints
import torch
from families import check_greedy, chosen, error, hf_logits
from helpers import Reference, generate, generate_with_logits, greedy, prompt_of
from quantized_checkpoints import (
    E4M3,
    KV_SCALES,
    LINEAR,
    CheckpointTensor,
    built,
    check_logits,
    check_shards,
    config_of,
    encoded,
    linears,
    make,
    quantized_config,
    rounded_to_fp8,
    weights_of,
    write,
)
from safetensors.torch import save_file
from test_families import IDS, TOLERANCE

from nanovllm import LLM, CheckpointError, EngineError
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.linear.reference import QKVEpilogue
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import init_dummy_weights
from nanovllm.quantization.fp8 import numbers as fp8_numbers
from nanovllm.quantization.fp8.numbers import quantize
from nanovllm.quantization.fp8.rules import Fp8
from nanovllm.quantization.fp8.tensors import quantized

LINEARS = list(linears(0))
PROMPTS = [IDS[:40], IDS[5:14], IDS[20:37]]
BLOCKS = config_of("deepseek")
O_PROJ = "model.layers.0.self_attn.o_proj"
EXPERT = "model.layers.1.mlp.experts.3.down_proj"


def test_transformers_reads_the_checkpoint(tmp_path):
    """It dequantizes where there is no GPU; it wants whole blocks."""
    from transformers import Qwen3ForCausalLM

    write(tmp_path, make(tmp_path, "qwen3", hidden_size=256, intermediate_size=384, head_dim=64), "qwen")
    model = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map="cpu").eval()
    check_logits(tmp_path, model)


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
    ("qwen3", "qwen", quantized_checkpoints.SIZES, {1: [64, 64, 32, 64], 2: [32, 64, 16, 64]}),
    ("qwen3", "channel", dict(head_dim=128), {1: [1] * 4, 2: [1] * 4}),
    ("qwen3", "tensor", dict(head_dim=128), {1: [1] * 4}),
])  # fmt: skip
def test_rows_that_share_scales(case, form, sizes, by_size, tmp_path):
    """As many as the kernels may count on, known before the weights are."""
    write(tmp_path, make(tmp_path, case, **WIDE | sizes | {"num_hidden_layers": 1}), form)
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
    write(tmp_path, make(tmp_path, "qwen3", **WIDE, head_dim=128), "qwen")
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


def test_every_kind_of_layer_is_compiled():
    config = quantized_config(BLOCKS | {"modules_to_not_convert": ["model.layers.1.mlp"]})
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
                [pytest.approx(KV_SCALES[which] if is_given else 1)] * 2 for which in "kv"
            ]  # fmt: skip


@pytest.mark.parametrize(("rank", "size", "heads"), [(0, 1, [0, 1]), (1, 2, [1]), (1, 4, [0]), (2, 4, [1])])
def test_scales_of_the_kv_cache_per_head(rank, size, heads, published, tmp_path):
    """Each rank takes those of its KV heads, which may be replicas. Such a checkpoint was refused."""
    given = {"k": [0.25, 0.5], "v": [2.0, 3.0]}
    path = families.copied(published("qwen3", "tensor")[0], tmp_path, lambda tensors, _: tensors.update({
        f"model.layers.1.self_attn.{which}_scale": torch.tensor(given[which]).reshape(2, 1, 1) for which in given
    }))  # fmt: skip
    attn = built(path, TPGroup(rank, size, None)).model.layers[1].self_attn.attn
    assert attn.kv_scale.tolist() == [[given[which][head] for head in heads] for which in "kv"]
    assert attn.kv_scale_is_given == [True, True]


def test_hf_quant_config(published, tmp_path):
    """ModelOpt's older checkpoints have a file of their own instead of ``quantization_config``."""
    path, _, model = published("qwen3", "modelopt")
    families.copied(path, tmp_path, lambda _, config: config.pop("quantization_config"))
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    own = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    check_logits(tmp_path, model)
    quantization["quant_algo"] = "W4A8_AWQ"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(CheckpointError, match=r"quantization_config: quant_algo='W4A8_AWQ' is not supported\. Suppor"):
        read_model_config(str(tmp_path))
    path, _, model = published("qwen3", "modelopt-fp4")
    families.copied(path, tmp_path, lambda _, config: config.pop("quantization_config"))
    quantization |= {"quant_algo": "NVFP4", "group_size": 16}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    check_logits(tmp_path, model)


def test_vision_prefix():
    """Names in the list may have a prefix that the family renames."""
    name = "language_model.model.layers.1.mlp"
    for quantization in (BLOCKS | {"modules_to_not_convert": [name]},
                         config_of("channel") | {"ignore": ["re:" + name.replace(".", "\\.")]}):  # fmt: skip
        config = quantized_config(quantization, "Gemma3ForConditionalGeneration")
        assert ["mlp.down_proj" in layer.fp8_linears for layer in config.layers] == [True, False, True, True]


# ---------------------------------------------------------------- quantized while loading


def test_quantize():
    weight = torch.randn(7, 300)
    weight[3] = 0
    data, scale = quantize(weight.bfloat16())
    want = rounded_to_fp8(weight.bfloat16())
    assert torch.equal(data.float(), want[0].float()) and torch.equal(scale, want[1])


@pytest.mark.parametrize(("N", "C"), [(7, 300), (300, 7), (128, 256), (400, 260)])
def test_quantize_blocks(N, C, monkeypatch):
    """Also in several steps."""
    weight = torch.randn(N, C) * torch.rand(N, 1)
    _, want_scale, want = rounded_to_fp8(weight, "block")
    for num_bytes in (64 << 20, 4 * C * 128 * 2, 1):
        monkeypatch.setattr(fp8_numbers, "ROWS_BYTES", num_bytes)
        data, scale = quantize(weight, 128)
        assert torch.equal(scale, want_scale)
        spread = scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :C]
        assert torch.equal(data.float() * spread, want)


def rounded(model, scales="channel"):
    """A checkpoint's tensors with fp32 scales; ``model`` gets the quantized weights."""
    return encoded(model, "channel", scales=scales, dtype=torch.float32)


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
        model = make(path, "qwen2-moe")
    rounded(model)
    new = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        for param in new.parameters():
            param.mul_(1 + 0.3 * torch.randn_like(param))
    weights = {name: param.detach().clone() for name, param in new.named_parameters()}
    rounded(new)
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
    model = make(tmp_path, case)
    path, plain = str(tmp_path), str(tmp_path / "plain")
    rounded(model, "block" if block else "channel")
    model.save_pretrained(plain)
    config = read_model_config(path).quantized()
    check_shards(path, plain, size, replace(config, fp8=block), is_exact=False)


@pytest.mark.parametrize("size", [1, 2])
def test_online_experts_that_are_transposed(size, tmp_path):
    """As Qwen3-VL-MoE is published: what has a scale each is a row of the transposed tensor."""
    path, swapped = str(tmp_path / "usual"), tmp_path / "swapped"
    sizes = {name: size for name, size in quantized_checkpoints.SIZES.items() if name != "layer_types"}
    families.make(path, "qwen3-vl-moe", **sizes | quantized_checkpoints.MOE)
    swapped = families.copied(path, swapped, families.transpose_experts)
    config = read_model_config(path).quantized()
    for rank in range(size):
        usual, other = (built(p, TPGroup(rank, size, None), config) for p in (path, swapped))
        for (name, want), got in zip(usual.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name


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
    llm.update_weights(weights.items() if size == 1 else rounded(copy.deepcopy(new)))
    check_tokens(llm, new)


def test_update_in_fp8(online, make_llm):
    """Data and scales are taken as they are, together or not at all."""
    path, _, weights, new = online
    llm = make_llm(model=path, max_model_len=256, quantization="fp8")
    pairs, names = rounded(copy.deepcopy(new)), [f"{O_PROJ}.weight", f"{EXPERT}.weight"]
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
    assert block_ns(llm.model_runner.model) == [64, 64, 32, 64]
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
    rounded(new, "block")
    _, (after,) = generate_with_logits(llm, [ids], 1)
    assert error(after, hf_logits(new, ids)[-1:]) < TOLERANCE < error(after, before)
    assert block_ns(llm.model_runner.model) == [64, 64, 32, 64]
    llm.update_weights(path)
    assert torch.equal(generate_with_logits(llm, [ids], 1)[1][0], before)
    assert llm.model_runner.model.model.layers[0].mlp.down_proj.weight_scale.shape == (192, 352 // 32)


# ---------------------------------------------------------------- accuracy


@pytest.mark.parametrize("rows", [64, 128])
def test_update_of_a_single_block(rows):
    """A tensor that is smaller than a block has one scale, in 16 bits too."""
    with torch.no_grad():
        layer, weight = MergedColumnParallelLinear(96, [rows, 200], precision=Fp8(128)), torch.randn(rows + 200, 96)
        for i, part in enumerate(weight.split([rows, 200])):
            for param, tensor in quantized(layer.weight, CheckpointTensor.of("w", part)):
                param.weight_loader(param, tensor, i)
    want = torch.cat([rounded_to_fp8(part, "block")[2] for part in weight.split([rows, 200])])
    assert torch.equal(layer.weight.float() * layer.weight_scale.repeat_interleave(32, 1), want)


def test_the_demo_model_answers_as_before():
    """Prompts, and sums that training never saw."""
    from test_demo_model import check_answers, check_held_out_sums

    with LLM(device="cpu", quantization="fp8", quiet=True) as llm:
        check_answers(llm)
        check_held_out_sums(llm, 25)


# ---------------------------------------------------------------- experts


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
    config = quantized_config(BLOCKS | {"modules_to_not_convert": skipped}, architecture)
    assert linears(4).keys() - config.layers[0].fp8_linears == left_out


@pytest.mark.parametrize("form", ["qwen", "channel"])
def test_merged_experts_in_fp8(form, tmp_path):
    """One tensor of all experts' data and one of their scales, as transformers 5 holds them; of whole blocks."""
    path = str(tmp_path / "one by one")
    tensors, by_name = write(path, make(path, "qwen3-moe", moe_intermediate_size=128), form), {}
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
    got, want = weights_of(built(tmp_path / "merged")), weights_of(built(path))
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
        make(tmp_path, case)
        path, config = str(tmp_path), read_model_config(str(tmp_path)).quantized()
    else:
        path, config = published(case, form)[0], None
    on_cpu = built(path, config=config)
    with torch.device("cuda"):
        on_gpu = built(path, config=config)
    for (name, want), got in zip(on_cpu.named_parameters(), on_gpu.parameters(), strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)), name


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
            if LINEAR.fullmatch(name):
                factors = torch.exp2(torch.rand([n // 128 for n in param.shape], generator=generator) * 3 - 3.5)
                param.mul_(factors.repeat_interleave(128, 0).repeat_interleave(128, 1))
    write(tmp_path, model, "qwen")

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

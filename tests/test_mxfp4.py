"""gpt-oss with experts in MXFP4: read exactly, kept where kernels take them, refused where they are not what they say.

transformers, with the weights that the format's specification makes of the bytes, is the oracle.
"""

import copy
import re

import families
import mxfp4_checkpoints
import pytest
import torch
from families import chosen, in_16_bits
from helpers import generate, greedy
from mxfp4_checkpoints import SIZES, e2m1
from safetensors.torch import load_file, save_file
from test_moe import NUM_DECODED, PROMPTS, check

from nanovllm import kernels
from nanovllm.contrib.as_vllm.options import to_nanovllm
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import WeightFiller, init_dummy_weights, load_model
from nanovllm.quantization.mxfp4 import numbers as mxfp4
from nanovllm.runner.device import describe


@pytest.fixture
def published(tmp_path):
    """published(change) -> (transformers' model, path of its checkpoint with MXFP4 experts)."""

    def make(**more):
        model = families.make(tmp_path, "gpt-oss", num_hidden_layers=2, **SIZES)
        with torch.inference_mode():
            mxfp4_checkpoints.write(tmp_path, model, **more)
        return model, str(tmp_path)

    return make


@pytest.fixture
def kept(monkeypatch):
    """Experts stay MXFP4, as on a GPU."""
    monkeypatch.setattr(kernels.select(), "takes_mxfp4", lambda: True)


def loaded(path, tp=SINGLE_RANK):
    model = CausalLM(read_model_config(path), None, tp)
    load_model(model, path)
    return model


def test_every_byte():
    """Two numbers of each byte, in their places, by the definition of the format."""
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)  # [N, groups, 16]
    scale = torch.arange(120, 136, dtype=torch.uint8).view(8, 2)
    got = mxfp4.dequantized(mxfp4.repacked(blocks).flatten(1), scale, torch.float32).view(2, 8, 32)
    for row in range(2):
        for group in range(8):
            for j in range(16):
                byte, factor = int(blocks[row, group, j]), 2.0 ** (int(scale[group, row]) - 127)
                assert got[row, group, 2 * j] == e2m1(byte & 15) * factor
                assert got[row, group, 2 * j + 1] == e2m1(byte >> 4) * factor


@pytest.mark.parametrize("size", [1, 2])
def test_model(size, published, make_llm):
    model, path = published()
    check(make_llm(model=path, tensor_parallel_size=size), model)


@pytest.mark.parametrize("tp", [SINGLE_RANK, TPGroup(0, 2), TPGroup(1, 2)])
def test_kept_experts_are_the_dequantized_ones(tp, published, kept, monkeypatch):
    _, path = published()
    model = loaded(path, tp)
    monkeypatch.setattr(kernels.select(), "takes_mxfp4", lambda: False)
    floats = loaded(path, tp)
    for ours, theirs in zip(model.model.layers, floats.model.layers, strict=True):
        for packed, plain in zip(ours.mlp.experts.weights(), theirs.mlp.experts.weights(), strict=True):
            assert packed.data.dtype == packed.scale.dtype == torch.uint8 and plain.scale is None
            assert torch.equal(packed.dequantize(torch.float32), plain.data)
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            assert torch.equal(getattr(ours.mlp.experts, name), getattr(theirs.mlp.experts, name))
    weights = [[p for name, p in m.named_parameters() if ".experts." in name and "bias" not in name]
               for m in (model, floats)]  # fmt: skip
    assert sum(p.nbytes for p in weights[0]) == sum(p.numel() for p in weights[1]) * 17 // 32  # 4.25 bits each


def test_an_engine_that_keeps_them(published, kept, make_llm):
    model, path = published()
    check(make_llm(model=path), model)


def test_scales_in_another_file_before_their_blocks(published, make_llm, tmp_path):
    def split(tensors, config):
        scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scales")}
        halves.append(scales)

    halves: list = []
    model, path = published(change=split)
    save_file(halves[0], tmp_path / "a.safetensors")
    check(make_llm(model=path), model)


def test_in_bf16_they_are_exact(published, make_llm):
    _, path = published()
    half, full = (make_llm(model=path, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert "bfloat16 (MXFP4 experts dequantized);" in describe(half.config, half.model_runner)
    experts = [llm.model_runner.model.model.layers[1].mlp.experts for llm in (half, full)]
    for name in ("gate_up_proj", "down_proj"):
        weights = [getattr(e, name) for e in experts]
        assert weights[0].dtype == torch.bfloat16 and torch.equal(weights[0].float(), weights[1])


@pytest.mark.gpu
def test_on_the_gpu(published, make_llm):
    """fp32, eager and under CUDA graphs; a token's RMS error in bf16 is that of transformers' bf16, in the median."""
    model, path = published()
    options = {"model": path, "device": "cuda", "num_kvcache_blocks": 200}
    llm = make_llm(**options, dtype="float32", enforce_eager=True)
    assert llm.model_runner.model.model.layers[0].mlp.experts.down_proj.dtype == torch.uint8
    completions = check(llm, model)
    assert generate(make_llm(**options, dtype="float32"), PROMPTS, greedy(NUM_DECODED)) == completions
    half = make_llm(**options, dtype="bfloat16", enforce_eager=True)
    rounded_model = copy.deepcopy(model).to("cuda", torch.bfloat16)
    *both, exact = in_16_bits(half, model, rounded_model, PROMPTS, NUM_DECODED)
    got, want = ((x - exact).square().mean(-1).sqrt().median() for x in both)
    assert got < 1.25 * want


@pytest.mark.parametrize("size", [1, 2])
def test_an_update(size, published, make_llm):
    """From the directory, and tensor by tensor, scales and blocks in any order."""
    model, path = published()
    llm = make_llm(model=path, tensor_parallel_size=size)
    tensors = load_file(f"{path}/model.safetensors")
    changed = {name: t + 1 if name.endswith("down_proj_scales") else t for name, t in tensors.items()}
    llm.update_weights(sorted(changed.items(), reverse=True))
    with torch.inference_mode():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj *= 2
    check(llm, model)
    llm.update_weights(path)
    with torch.inference_mode():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj /= 2
    completions = generate(llm, PROMPTS, greedy(NUM_DECODED))
    assert chosen(model, PROMPTS, completions) == completions


LAYER = "model.layers.1.mlp.experts."


def drop(name):
    return lambda tensors, config: tensors.pop(name)


def put(name, value):
    def change(tensors, config):
        tensors[name] = value(tensors[name])

    return change


def field(**fields):
    return lambda tensors, config: config["quantization_config"].update(fields)


WRONG = {
    "no scales": (drop(f"{LAYER}down_proj_scales"), "1 tensors are missing, among them "),
    "no blocks": (drop(f"{LAYER}gate_up_proj_blocks"), "1 tensors are missing, among them "),
    "no bias": (drop(f"{LAYER}down_proj_bias"), "down_proj_bias"),
    "blocks of bf16": (put(f"{LAYER}down_proj_blocks", lambda t: t.bfloat16()), "expected uint8"),
    "a scale of NaN": (put(f"{LAYER}down_proj_scales", lambda t: t.fill_(255)), "has a scale of 255, expected at most"),
    "fewer scales": (put(f"{LAYER}down_proj_scales", lambda t: t[..., :1].contiguous()), "expected"),
    "fewer blocks": (put(f"{LAYER}down_proj_blocks", lambda t: t[:, :32].contiguous()), "expected"),
    "layers left out": (field(modules_to_not_convert=["model.layers.1.mlp"]), "leaving out model.layers.1.mlp.experts"),
    "another field": (field(group_size=16), "group_size=16 is not supported"),
}


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_checkpoints(case, keeps, published, monkeypatch):
    change, message = WRONG[case]
    _, path = published(change=change)
    monkeypatch.setattr(kernels.select(), "takes_mxfp4", lambda: keeps)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        loaded(path)


def test_floats_for_kept_experts(published, kept):
    """As update_weights may be given them."""
    model, path = published()
    filler = WeightFiller(loaded(path))
    with pytest.raises(CheckpointError, match="expected"):
        filler.fill_from([(f"{LAYER}down_proj", model.state_dict()[f"{LAYER}down_proj"])], "update_weights")


def test_the_keyword_of_vllm(published):
    _, path = published()
    assert "quantization" not in to_nanovllm({"model": path, "quantization": "mxfp4"})
    with pytest.raises(ConfigError, match=f"'modelopt' names the quantization of a checkpoint, and {path} has 'mxfp4'"):
        to_nanovllm({"model": path, "quantization": "modelopt"})


def test_what_cannot_be(published, make_llm, tmp_path):
    _, path = published()
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 must leave each rank a multiple of 32 of the 64"):
        make_llm(model=path, tensor_parallel_size=4, num_kvcache_blocks=4)
    with pytest.raises(ConfigError, match="quantization='fp8' is not supported for gpt-oss"):
        make_llm(model=path, quantization="fp8")
    other = families.copied(path, tmp_path / "other", architectures=["MixtralForCausalLM"], swiglu_limit=None)
    with pytest.raises(CheckpointError, match="quant_method='mxfp4' is not supported"):
        read_model_config(other)


def test_random_weights(published, kept):
    _, path = published()
    model = CausalLM(read_model_config(path), None, SINGLE_RANK)
    init_dummy_weights(model, seed=0)
    for weight in model.model.layers[0].mlp.experts.weights():
        assert 0.015 < weight.dequantize(torch.float32).std() < 0.03

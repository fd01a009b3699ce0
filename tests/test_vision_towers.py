"""Towers of this library's layers give the features of transformers', from images of any sizes in one call."""

import random

import pytest
import torch
import vision_families
from helpers import needs

from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model
from nanovllm.models.vision import VisionConfig
from nanovllm.models.vision_tower import VisionTower

pytestmark = needs("engine.images")
BY_SIZES = "mistral3", "lighton_ocr"
FAMILIES = "qwen2_5_vl", "qwen3_vl", "qwen3_5", *BY_SIZES


@pytest.fixture
def other_sizes(monkeypatch):
    """Change the sizes of the families' towers."""

    def change(num_heads, head_size, **more):
        sizes = {"hidden_size": num_heads * head_size, **more}
        for name, value in (sizes | {"num_heads": num_heads}).items():
            monkeypatch.setitem(vision_families.TOWER, name, value)
        for name, value in (sizes | {"num_attention_heads": num_heads}).items():
            monkeypatch.setitem(vision_families.SIGLIP, name, value)

    return change


def tower_of(path, device="cpu", dtype=torch.float32):
    """A tower with the weights of a checkpoint."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            tower = VisionTower(VisionConfig.read(str(path)), str(path), dtype)
            decoder = CausalLM(read_model_config(path), None, SINGLE_RANK)
    finally:
        torch.set_default_dtype(torch.float32)
    load_model(decoder, str(path), extra=[tower])
    return tower


def images_of(sizes, patch=4, device="cpu"):
    """Random pixels of images with these frames, rows and columns of patches, in both forms that towers take."""
    by_patches = [{
        "pixel_values": torch.randn(frames * rows * columns, 6 * patch * patch, device=device),
        "image_grid_thw": torch.tensor([[frames, rows, columns]]),
    } for frames, rows, columns in sizes]  # fmt: skip
    by_sizes = [{
        "pixel_values": torch.randn(1, 3, patch * rows, patch * columns, device=device),
        "image_sizes": torch.tensor([[patch * rows, patch * columns]]),
    } for _, rows, columns in sizes]  # fmt: skip
    return by_patches, by_sizes


def features_of(model, images):
    """transformers' features of all images, one image a call, [N, (1 + deepstack layers) * C]."""
    found = []
    for image in images:
        device, dtype = model.device, model.dtype
        image = {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in image.items()}
        is_by_size = "image_sizes" in image
        if is_by_size:  # twice: transformers' Mistral 3 loses a dimension for a single token
            image = {name: torch.cat((x, x)) for name, x in image.items()}
        output = model.model.get_image_features(**image)
        columns = [output.pooler_output, *getattr(output, "deepstack_features", ())]
        features = torch.cat([x if isinstance(x, torch.Tensor) else torch.cat(x) for x in columns], dim=-1)
        found.append(features[: len(features) // (1 + is_by_size)])
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_features_are_those_of_transformers(family, seed, other_sizes, tmp_path):
    rng = random.Random(seed)
    other_sizes(rng.randint(1, 4), rng.choice([8, 12, 20]), intermediate_size=rng.randint(30, 140))
    model = vision_families.make_checkpoint(family, tmp_path, seed)
    tower = tower_of(tmp_path)
    assert tower.is_own
    frames = [1, 1, 1] if family in BY_SIZES else [1, 2, 1]
    sizes = [(count, 2 * rng.randint(1, 9), 2 * rng.randint(1, 9)) for count in frames]
    for grids in (sizes, [(1, 2, 2)]):
        images = images_of(grids)[family in BY_SIZES]
        expected = features_of(model, images)
        assert (tower(images) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family, field, value", [
    ("qwen2_5_vl", "hidden_act", "gelu"), ("qwen3_vl", "hidden_act", "silu"), ("mistral3", "hidden_act", "gelu"),
])  # fmt: skip
@torch.inference_mode()
def test_other_activations_are_transformers(family, field, value, tmp_path):
    vision_families.make_checkpoint(family, tmp_path)
    model = vision_families.FAMILIES[family]()
    setattr(model.config.vision_config, field, value)
    model = type(model)(model.config).float().eval()
    model.save_pretrained(tmp_path)
    tower = tower_of(tmp_path)
    assert not tower.is_own
    images = images_of([(1, 4, 6), (1, 2, 8)])[family == "mistral3"]
    expected = features_of(model, images)
    assert (tower(images) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("family, head_size", [
    ("qwen2_5_vl", 80), ("qwen3_vl", 72), ("qwen3_5", 72), ("mistral3", 64), ("lighton_ocr", 64),
])  # fmt: skip
@torch.inference_mode()
def test_features_in_bf16(family, head_size, other_sizes, tmp_path):
    """At most 1.5 times as far from fp32 as transformers' own in bf16, with images of all paths of the kernels."""
    other_sizes(4, head_size, intermediate_size=420)
    model = vision_families.FAMILIES[family]().float().eval()
    model.save_pretrained(tmp_path)
    model = model.bfloat16().cuda()
    tower = tower_of(tmp_path, "cuda", torch.bfloat16)
    sides = [(18, 18), (18, 14), (2, 2), (16, 18), (18, 18), (12, 18)]  # 1,408 patches
    images = images_of([(1, *each) for each in sides], device="cuda")[family in BY_SIZES]
    images = [{name: x.bfloat16() if x.is_floating_point() else x for name, x in each.items()} for each in images]
    theirs, ours = features_of(model, images).float(), tower(images).float()
    exact = features_of(model.float(), images)
    error, allowed = (ours - exact).norm(), (theirs - exact).norm()
    assert 0 < error <= 1.5 * allowed

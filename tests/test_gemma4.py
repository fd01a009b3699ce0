"""Gemma 4 with FP8 and packed weights, an FP8 KV cache, adapters, updates and sleep; and what it does not take.

Where two layers' heads, or what they store, differ. ``test_families.py`` and ``test_moe.py`` compare its logits.
"""

import families
import pytest
import quantized_checkpoints as checkpoints
import torch
from families import check_greedy
from helpers import generate, greedy, record_calls, refuses
from test_lora import train

from nanovllm.errors import CheckpointError
from nanovllm.runner import memory

PROMPTS = [list(range(3, 4)), list(range(5, 25)), list(range(2, 140, 3))]
CASES = ("gemma4", "gemma4-moe", "gemma4-e4b")
OPTIONS = {"max_model_len": 128, "num_kvcache_blocks": 32, "max_num_seqs": 4}


@pytest.mark.parametrize(("case", "form"), [
    ("gemma4", "tensor"), ("gemma4", "gptq"), ("gemma4", "modelopt-fp4"), ("gemma4-moe", "channel"),
    ("gemma4-moe", "compressed-tensors"), ("gemma4-e4b", "qwen"), ("gemma4-e4b", "auto-round-awq"),
])  # fmt: skip
def test_quantized_weights(case, form, published):
    """A module that is K and V at once has one tensor of codes, and one of scales; so have layers without either."""
    path, plain, model = published(case, form)
    checkpoints.check_logits(path, model)
    checkpoints.check_shards(path, plain, 2, is_exact=form not in ("tensor", "modelopt-fp4"))


def test_packed_modules_of_per_layer_inputs(tmp_path, monkeypatch):
    """They become 16 bits; in FP8 they are refused."""
    names = r"model\.layers\.\d+\.((self_attn|mlp)\.\w+_proj|per_layer_(input_gate|projection))\.weight"
    monkeypatch.setattr(checkpoints, "LINEAR", checkpoints.re.compile(names))
    for form in ("compressed-tensors", "channel"):
        model = checkpoints.make(tmp_path / form, "gemma4-e4b", hidden_size_per_layer_input=64)
        checkpoints.write(tmp_path / form, model, form)
        if form == "compressed-tensors":
            checkpoints.check_logits(tmp_path / form, model)
            continue
        with pytest.raises(CheckpointError, match=r"layers\.0\.per_layer_input_gate\.weight.*This layer is not FP8"):
            checkpoints.built(tmp_path / form)


@pytest.mark.parametrize("case", CASES)
def test_fp8_weights_of_16_bits(case, tmp_path, make_llm):
    model = families.make(tmp_path, case)
    checkpoints.encoded(model, "channel", scales="channel", dtype=torch.float32)  # the model gets the rounded weights
    check_greedy(make_llm(model=str(tmp_path), quantization="fp8", **OPTIONS), model, PROMPTS, 6, 2e-3)


@pytest.mark.parametrize("case", ["gemma4", "gemma4-e4b"])
def test_fp8_kv_cache(case, tmp_path, make_llm):
    """Each layer has scales for its own KV heads; blocks of both shapes take half of what 16 bits would."""
    families.make(tmp_path, case)
    llm = make_llm(model=str(tmp_path), kv_cache_dtype="fp8", **OPTIONS)
    tensors = llm.model_runner.kv_cache
    heads = {"gemma4": [(2, 16), (1, 32)], "gemma4-e4b": [(2, 16), (2, 32)]}[case]
    assert [tuple(x.shape[4:]) for x in tensors] == heads and {x.dtype for x in tensors} == {torch.float8_e4m3fn}
    block_size = llm.config.kvcache_block_size
    assert tensors.nbytes == 32 * memory.block_bytes(llm.model_runner.model, block_size, torch.float8_e4m3fn)
    tokens = generate(llm, PROMPTS, greedy(6))
    for layer in memory.attention_layers(llm.model_runner.model):
        stored = torch.stack([cache.float().abs().amax((0, 1, 3)) for cache in (layer.k_cache, layer.v_cache)])
        assert layer.kv_scale.shape == (2, layer.num_kv_heads) and (layer.kv_scale.log2() % 1 == 0).all()
        assert (stored > 8).all() and (stored < 448).all(), "neither lost nor saturated"
    two = make_llm(model=str(tmp_path), kv_cache_dtype="fp8", tensor_parallel_size=2, **OPTIONS)
    assert generate(two, PROMPTS, greedy(6)) == tokens


@pytest.mark.parametrize("case", CASES)
def test_update_sleep_and_wake_up(case, tmp_path, make_llm):
    """The last layers' attention is an earlier layer's, which is freed and allocated once."""
    families.make(tmp_path / "old", case)
    new = families.make(tmp_path / "new", case, seed=5)
    llm = make_llm(model=str(tmp_path / "old"), **OPTIONS)
    llm.update_weights((name, x) for name, x in new.state_dict().items() if name != "lm_head.weight")
    llm.sleep()
    llm.wake_up()
    check_greedy(llm, new, PROMPTS, 6)


@pytest.mark.parametrize("case", CASES)
def test_adapter(case, tmp_path, make_llm):
    """Of a layer whose keys are its values, a change of k_proj changes both."""
    families.make(tmp_path / "base", case)
    merged = train(tmp_path / "base", tmp_path / "adapter", r=3, lora_alpha=16, target_modules="all-linear")
    llm = make_llm(model=str(tmp_path / "base"), lora=str(tmp_path / "adapter"), **OPTIONS)
    check_greedy(llm, merged, PROMPTS, 6)


def test_layers_without_keys_compute_sampled_tokens_alone(tmp_path, make_llm):
    """In a prefill, unless each token is asked for; and their tensors in published files are passed over."""
    families.make(tmp_path / "plain", "gemma4-e4b")

    def edit(tensors, config):
        for i in (3, 4, 5):
            for name in ("k_proj", "v_proj", "k_norm"):
                tensors[f"model.layers.{i}.self_attn.{name}.weight"] = torch.full((2,), torch.nan)

    path = families.copied(tmp_path / "plain", tmp_path / "published", edit)
    options = {**OPTIONS, "max_num_batched_tokens": 128}
    tokens = generate(make_llm(model=str(tmp_path / "plain"), **options), PROMPTS, greedy(1))
    llm = make_llm(model=path, **options)
    layers = llm.model_runner.model.model.layers
    rows = [record_calls(layer, "forward") for layer in layers]
    assert generate(llm, PROMPTS, greedy(1)) == tokens
    assert [[len(x) for x in each] for each in rows] == [[sum(map(len, PROMPTS))]] * 3 + [[len(PROMPTS)]] * 3
    llm.generate(PROMPTS[1:2], greedy(1, prompt_logprobs=1), use_tqdm=False)
    assert len(rows[5][-1]) == len(PROMPTS[1])


def test_a_whole_checkpoint_as_text_alone(tmp_path, make_llm):
    """Tensors of its towers are passed over; audio and video are refused in any case."""
    families.make(tmp_path, "gemma4")

    def edit(tensors, config):
        for name in ("vision_tower.encoder.x", "embed_vision.x", "audio_tower.x", "embed_audio.x", "vision_embedder.x"):
            tensors[f"model.{name}"] = torch.zeros(1)
        for name in [name for name in tensors if name.startswith("model.layers.")]:
            tensors[name.replace("model.", "model.language_model.")] = tensors.pop(name)
        config["text_config"] = dict(config)
        config |= {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {"hidden_size": 32}}

    path = families.copied(tmp_path, tmp_path / "whole", edit)
    llm = make_llm(model=path, language_model_only=True, **OPTIONS)
    for modality in ("image", "audio", "video"):
        with refuses("takes no images: it was made with language_model_only=True."):
            llm.generate([{"prompt_token_ids": [3, 4], "multi_modal_data": {modality: object()}}], greedy(1))

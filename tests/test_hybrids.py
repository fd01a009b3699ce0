"""Models with recurrent layers (gated delta nets, short convolutions, Mamba-2) against transformers: logits, tokens.

Tolerance in fp32: 1e-5 of the largest logit; measured 4e-7. ``kernels/`` has tests of each kind's kernels,
``engine/test_snapshots.py`` of the prefix cache of states.
"""

import json
import random
from functools import cache
from pathlib import Path

import families
import pytest
import quantized_checkpoints
import torch
from families import check_greedy, error, hf_logits, logits_before, worst_choices
from helpers import generate, generate_with_logits, greedy
from safetensors.torch import load_file, save_file

from nanovllm import kernels
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.models.config_reader import read_model_config

TOLERANCE = 1e-5  # of the largest logit
RNG = random.Random(0)
IDS = [RNG.randrange(2, 140) for _ in range(400)]
# one token; less than a chunk of 64; more than two of them; a whole number of them
PROMPTS = [IDS[:1], IDS[3:40], IDS[5:155], IDS[20:148], IDS[7:207]]
NUM_DECODED = 12
OPTIONS = {"max_model_len": 320, "kvcache_block_size": 64, "num_kvcache_blocks": 40, "num_state_snapshots": 8}
NEMOTRON = dict(
    hidden_size=160, intermediate_size=320, moe_intermediate_size=64, moe_shared_expert_intermediate_size=96,
)  # fmt: skip


@pytest.fixture(scope="module")
def expected(checkpoint):
    """expected(case) -> greedy tokens of PROMPTS by transformers."""

    @cache
    def make(case):
        _, model = checkpoint(case)
        outputs = [
            model.generate(torch.tensor([ids]), max_new_tokens=NUM_DECODED, do_sample=False, eos_token_id=None,
                           pad_token_id=0)[0, len(ids):].tolist()
            for ids in PROMPTS
        ]  # fmt: skip
        return outputs

    return make


@pytest.mark.parametrize("case", families.HYBRID_CASES)
def test_logits(case, checkpoint, make_llm):
    """Of a prefill in chunks of 64, and of decode steps."""
    path, model = checkpoint(case)
    check_greedy(make_llm(model=path, **OPTIONS), model, PROMPTS, NUM_DECODED, TOLERANCE)


def test_the_next_turn_of_a_chat(checkpoint, make_llm):
    """It finds the whole blocks of its prompt, as the guide says; of 256 tokens, the default, there are none."""
    llm = make_llm(model=checkpoint("qwen3.5")[0], **OPTIONS)
    (answer,) = generate(llm, [IDS[:200]], greedy(20))
    (output,) = llm.generate([IDS[:200] + answer + IDS[:9]], greedy(1), use_tqdm=False)
    assert output.num_cached_tokens == 192


def test_a_hybrid_of_attention_alone_has_no_states(tmp_path, make_llm):
    """Such as Granite 4 Micro: its prompts are cached block by block, and it takes drafts."""
    families.make(tmp_path, "granite-mamba", layer_types=["attention"] * 2, num_hidden_layers=2)
    llm = make_llm(model=str(tmp_path), speculative_config={"method": "ngram"}, **OPTIONS)
    assert llm.config.model_config.recurrent is None and llm.config.speculates
    for num_cached in (0, 192):
        (output,) = llm.generate([IDS[:200]], greedy(4), use_tqdm=False)
        assert output.num_cached_tokens == num_cached


def test_prompt_logprobs(checkpoint, make_llm):
    path, model = checkpoint("qwen3.5")
    llm = make_llm(model=path, **OPTIONS)
    for output in llm.generate(PROMPTS[1:], greedy(1, prompt_logprobs=0), use_tqdm=False):
        ids = output.prompt_token_ids
        want = hf_logits(model, ids).log_softmax(-1)
        got = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        torch.testing.assert_close(torch.tensor(got), want[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0],
                                   atol=1e-4, rtol=0)  # fmt: skip


@pytest.mark.parametrize("case", ["qwen3.5", "lfm2", "granite-mamba-moe", "nemotron-h"])
def test_sleep_and_update(case, checkpoint, expected, make_llm, tmp_path):
    path, _ = checkpoint(case)
    llm = make_llm(model=path, **OPTIONS)
    generate(llm, PROMPTS, greedy(NUM_DECODED))
    llm.sleep(level=1)
    llm.wake_up()
    assert generate(llm, PROMPTS, greedy(NUM_DECODED)) == expected(case)
    other = families.make(tmp_path, case, seed=1)
    llm.update_weights(dict(other.state_dict()))
    want = other.generate(torch.tensor([PROMPTS[4]]), max_new_tokens=NUM_DECODED, do_sample=False, eos_token_id=None)
    assert generate(llm, PROMPTS[4:], greedy(NUM_DECODED)) == want[:, len(PROMPTS[4]) :].tolist()


def test_fp16_states(checkpoint, make_llm):
    """Half the bytes, and an error far below that of a model in 16 bits."""
    path, model = checkpoint("qwen3.5")
    llm = make_llm(model=path, state_dtype="float16", **OPTIONS)
    completions, logits = generate_with_logits(llm, PROMPTS, NUM_DECODED)
    errors = list(map(error, logits, logits_before(model, PROMPTS, completions)))
    assert 1e-6 < max(errors) < 1e-3


@pytest.mark.parametrize("case", ["qwen3.5", "lfm2-moe", "granite-mamba-moe", "falcon-h1", "nemotron-h"])
def test_quantized(case, checkpoint, make_llm):
    """FP8 weights, and an FP8 KV cache for the attention layers: the tokens of a model with these weights."""
    path, model = checkpoint(case)
    llm = make_llm(model=path, quantization="fp8", kv_cache_dtype="fp8", **OPTIONS)
    _, logits = generate_with_logits(llm, PROMPTS[2:3], 1)
    want = hf_logits(model, PROMPTS[2])[-1]
    assert error(logits[0], want) < 0.1


@pytest.mark.parametrize("form", ["gptq", "modelopt-fp4"])
def test_nemotron_refuses_weights_of_four_bits(form, tmp_path):
    quantized_checkpoints.write(tmp_path, families.make(tmp_path, "nemotron-h", **NEMOTRON), form)
    with pytest.raises(CheckpointError, match="quantized weights other than FP8 are not supported"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(("case", "form"), [
    ("qwen3.5", "qwen"), ("qwen3.5", "channel"), ("qwen3.5-moe", "qwen"), ("lfm2", "qwen"), ("lfm2", "gptq"),
    ("lfm2", "compressed-tensors"), ("falcon-h1", "qwen"), ("falcon-h1", "awq"),
    ("granite-mamba", "compressed-tensors"), ("granite-mamba-moe", "channel"), ("granite-mamba-moe", "gptq"),
    ("nemotron-h", "modelopt"), ("nemotron-h", "qwen"),
])  # fmt: skip
def test_quantized_checkpoint(case, form, make_llm, tmp_path):
    """Blocks of 128 rows lie across q, k and v, or both gates, or z and x; b and a stay in 16 bits.

    Granite's experts are no linear modules, so programs for packed integers pass them over and do not list them.
    """
    sizes, options = {"hidden_size": 192, "intermediate_size": 320}, {}
    if case.startswith("granite"):
        sizes = {"hidden_size": 256, "intermediate_size": 64, "shared_intermediate_size": 128, "mamba_n_heads": 16}
    if case == "nemotron-h":
        sizes = NEMOTRON
    model = families.make(tmp_path, case, **sizes)
    if case == "granite-mamba-moe":
        options["change"] = families.merge_experts
        if form == "gptq":
            names = [name.removesuffix(".weight") for name, _ in quantized_checkpoints.parts_of(model)]
            options["skipped"] = [name for name in names if ".experts." in name]
    quantized_checkpoints.write(tmp_path, model, form, **options)
    want = hf_logits(model, PROMPTS[2])[-1]
    for size in (1, 2):
        llm = make_llm(model=str(tmp_path), tensor_parallel_size=size, **OPTIONS)
        if size == 1:
            _, logits = generate_with_logits(llm, PROMPTS[2:3], 1)
            assert error(logits[0], want) < TOLERANCE
        assert generate(llm, PROMPTS[2:3], greedy(1)) == [[int(want.argmax())]]


def as_published(path, target, architecture):
    """The checkpoint as the hub has it: text_config, a vision tower, and layers for speculation."""
    raw = json.loads(Path(path, "config.json").read_text())
    raw["rope_parameters"] |= {"mrope_section": [1, 1, 2], "mrope_interleaved": True}
    raw |= {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}
    outer = {"architectures": [architecture], "model_type": "qwen3_5", "vision_config": {"a": 1}}
    Path(target, "config.json").write_text(json.dumps({**outer, "text_config": raw}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(f"{path}/model.safetensors").items()
    }
    tensors |= {"model.visual.blocks.0.attn.qkv.weight": torch.ones(2, 2), "mtp.fc.weight": torch.ones(2, 2)}
    save_file(tensors, Path(target, "model.safetensors"))


@pytest.mark.parametrize(("case", "architecture"), [
    ("qwen3.5", "Qwen3_5ForConditionalGeneration"), ("qwen3.5-moe", "Qwen3_5MoeForConditionalGeneration"),
])  # fmt: skip
def test_published_form(case, architecture, checkpoint, expected, make_llm, tmp_path):
    path, _ = checkpoint(case)
    as_published(path, tmp_path, architecture)  # with one tensor of a vision tower
    llm = make_llm(model=str(tmp_path), language_model_only=True, **OPTIONS)
    assert generate(llm, PROMPTS, greedy(NUM_DECODED)) == expected(case)


@pytest.mark.parametrize(("field", "value"), [
    ("attn_output_gate", False), ("output_gate_type", "sigmoid"), ("layer_scale", True),
    ("mamba_ssm_dtype", "bfloat16"), ("linear_num_value_heads", 5), ("layer_types", ["mamba"] * 4),
    ("hidden_act", "gelu_pytorch_tanh"), ("linear_conv_kernel_dim", 1),
])  # fmt: skip
def test_fields_that_change_the_numbers_are_refused(field, value, checkpoint, tmp_path):
    path = families.copied(checkpoint("qwen3.5")[0], tmp_path, **{field: value})
    with pytest.raises(CheckpointError, match="linear attention" if "heads" in field else field):
        read_model_config(path)


@pytest.mark.parametrize("case", ["qwen3.5", "qwen3.5-moe", "qwen3-next"])
@pytest.mark.parametrize("fields", [
    {"layer_types": ["linear_attention"] * 4}, {"layer_types": None, "full_attention_interval": 5},
])  # fmt: skip
def test_a_model_without_attention_is_refused(case, fields, checkpoint, tmp_path):
    """The size of a KV cache without layers was divided by."""
    path = families.copied(checkpoint(case)[0], tmp_path, **fields)
    with pytest.raises(CheckpointError, match=r"no layer is attention, by layer_types or full_attention_interval"):
        read_model_config(path)


def test_ranks_divide_the_key_heads(checkpoint, make_llm):
    with pytest.raises(ConfigError, match="must divide"):
        make_llm(model=checkpoint("qwen3.5")[0], tensor_parallel_size=4, **OPTIONS)


def test_heads_that_no_kernel_takes_are_refused_by_name(checkpoint, make_llm, monkeypatch):
    """As Nemotron-Nano-9B-v2's of 80 channels on a GPU."""
    path, _ = checkpoint("falcon-h1")
    monkeypatch.setattr(kernels.select("cpu", "mamba2"), "takes_heads", lambda head_dim, state_dim: False)
    with pytest.raises(ConfigError, match="heads of 32 with states of 64; the GPU's kernels take powers of two"):
        make_llm(model=path, **OPTIONS)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "options"), [
    ("qwen3.5", {}), ("qwen3.5", {"state_dtype": "float16"}), ("lfm2", {}), ("lfm2-moe", {}),
    *((case, {"quantization": "fp8", "kv_cache_dtype": "fp8"}) for case in ("qwen3.5", "lfm2", "lfm2-moe")),
])  # fmt: skip
def test_bf16_on_the_gpu(case, options, checkpoint, make_llm):
    """No token is far from the best one."""
    path, model = checkpoint(case)
    llm = make_llm(model=path, device="cuda", dtype="bfloat16", **OPTIONS, **options)
    completions = generate(llm, PROMPTS, greedy(NUM_DECODED))
    assert max(worst_choices(model, PROMPTS, completions)) < (0.6 if "quantization" in options else 0.25)

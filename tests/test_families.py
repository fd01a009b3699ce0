"""Every dense family against transformers: logits, greedy tokens, and that each switch of its row matters.

Logits come from one forward pass without an engine where that is enough. Tolerance in fp32: 1e-4 of the largest logit;
measured 2e-6. `tests/test_moe.py` has the mixtures of experts.
"""

import copy
import json
import random
from dataclasses import fields, replace
from pathlib import Path

import families
import pytest
import torch
from families import check_greedy, error, hf_logits, in_16_bits, worst_choices
from helpers import generate, greedy, tokens_of
from safetensors.torch import load_file, save_file

from nanovllm.distributed.group import SINGLE_RANK
from nanovllm.errors import CheckpointError
from nanovllm.layers.attention_backends import select_backend
from nanovllm.layers.context import Context
from nanovllm.models.config import LayerConfig, ModelConfig
from nanovllm.models.config_reader import read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model
from nanovllm.runner.memory import allocate_kv_cache

TOLERANCE = 1e-4  # of the largest logit
RNG = random.Random(0)
IDS = [RNG.randrange(2, 128) for _ in range(60)]
PROMPTS = [IDS[:1], IDS[:17], IDS[5:45]]  # with the tokens to come beyond every window, and one block
NUM_DECODED = 12
REPRESENTATIVES = ("llama", "qwen2-late-windows", "granite", "glm4", "gemma3", "olmo3", "ministral3",
                   "gemma2", "gpt-oss-attention", "gemma4", "gemma4-e4b")  # fmt: skip


@torch.inference_mode()
def logits_of(path, config=None, ids=IDS):
    """fp32 logits [len(ids), V] of a prefill; ``config`` instead of the checkpoint's own."""
    config = config or read_model_config(path).for_length(256)
    model = CausalLM(config, select_backend("auto", "cpu", torch.float32), SINGLE_RANK)
    load_model(model, path)
    allocate_kv_cache(model, 4, 16, torch.float32, torch.device("cpu"))
    positions = torch.arange(len(ids), dtype=torch.int32)
    bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
    context = Context(
        positions, positions, bounds[:1], bounds[1:], torch.arange(4, dtype=torch.int32)[None], len(ids),
        bounds, bounds, len(ids),
    )  # fmt: skip
    return model.compute_logits(model(torch.tensor(ids), context))


@pytest.mark.parametrize("case", families.CASES)
def test_logits(case, checkpoint):
    path, model = checkpoint(case)
    assert error(logits_of(path), hf_logits(model, IDS)) < TOLERANCE


@pytest.mark.parametrize("case", families.CASES)
def test_greedy_tokens(case, checkpoint, make_llm):
    path, model = checkpoint(case)
    # transformers chooses longrope's factors by the length of each sequence, this library by max_model_len
    groups = [(32, PROMPTS[:2]), (256, PROMPTS[2:])] if case == "phi3-longrope" else [(256, PROMPTS)]
    for max_model_len, prompts in groups:
        llm = make_llm(model=path, max_model_len=max_model_len, num_kvcache_blocks=32)
        check_greedy(llm, model, prompts, NUM_DECODED, TOLERANCE)


@pytest.mark.parametrize("case", ["gemma4", "ministral3", "phi3-longrope"])
def test_tables_of_rope_end_at_max_model_len(case, checkpoint, make_llm):
    """Requests that fill it, in chunks and with drafts, get the tokens and scores of an engine for longer ones."""
    path, _ = checkpoint(case)
    options = {"model": path, "num_kvcache_blocks": 32, "max_num_batched_tokens": 16,
               "speculative_config": {"method": "ngram", "adaptive": False}}  # fmt: skip
    prompts, whole = [IDS[:9] * 4, IDS], IDS + IDS[:4]
    short, long = (make_llm(**options, max_model_len=n) for n in (64, 256))
    ropes = short.model_runner.model.model.ropes
    assert all(len(x) == 64 for rope in ropes for x in (rope.cos_sin, rope.query_scales) if x is not None)
    tokens = generate(long, prompts, greedy(28))
    want = [each[: 64 - len(prompt)] for prompt, each in zip(prompts, tokens, strict=True)]
    assert generate(short, prompts, greedy(28)) == want and short.scheduler.counters()["spec_decode_num_drafts"] > 0
    (got,), (expected,) = short.score([whole]), long.score([whole])
    torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(expected.logprobs))


def test_every_logit_is_capped(checkpoint, make_llm):
    """Log-probabilities of prompts, of what is sampled, and scores are those of Gemma 2's capped logits."""
    path, model = checkpoint("gemma2")
    llm = make_llm(model=path, max_model_len=256, num_kvcache_blocks=32)
    (output,) = llm.generate([PROMPTS[2]], greedy(5, logprobs=1, prompt_logprobs=0), use_tqdm=False)
    completion = output.outputs[0]
    ids = PROMPTS[2] + list(completion.token_ids)
    want = hf_logits(model, ids)[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    entries = [*output.prompt_logprobs[1:], *completion.logprobs]
    got = [entry[token].logprob for entry, token in zip(entries, ids[1:], strict=True)]
    torch.testing.assert_close(torch.tensor(got), want, atol=1e-4, rtol=0)
    (score,) = llm.score([ids])
    torch.testing.assert_close(torch.tensor(score.logprobs), want, atol=1e-4, rtol=0)


def check_bf16(llm, model, prompts):
    """RMS error against the fp32 logits: at most 1.25 times that of transformers' bf16 forward pass."""
    rounded_model = copy.deepcopy(model).to(torch.bfloat16)
    got, rounded, exact = in_16_bits(llm, model, rounded_model, prompts, NUM_DECODED)
    assert (got - exact).square().mean() < 1.25**2 * (rounded - exact).square().mean()


@pytest.mark.parametrize("case", ["granite", "glm4", "gemma2", "gemma3", "gpt-oss-attention", "olmo3", "gemma4",
                                  "gemma4-e4b"])  # fmt: skip
def test_bf16(case, checkpoint, make_llm):
    """Folded factors, offsets and permutations cost no precision: 0.92 to 1.09 times transformers' error."""
    path, model = checkpoint(case)
    check_bf16(make_llm(model=path, dtype="bfloat16", max_model_len=256, num_kvcache_blocks=32), model, PROMPTS)


@pytest.mark.gpu
@pytest.mark.parametrize("case", families.CASES)
def test_bf16_on_the_gpu(case, checkpoint, make_llm):
    """Eager logits; with CUDA graphs, whose rounding may decide ties, no token is far from the best one."""
    path, model = checkpoint(case)
    # transformers chooses longrope's factors by the length of each sequence, this library by max_model_len
    prompts = PROMPTS[2:] if case == "phi3-longrope" else PROMPTS
    options = {"model": path, "device": "cuda", "dtype": "bfloat16", "max_model_len": 256, "num_kvcache_blocks": 32}
    with make_llm(**options, enforce_eager=True) as llm:
        check_bf16(llm, model, prompts)
    with make_llm(**options) as llm:
        completions = generate(llm, prompts, greedy(NUM_DECODED))
    assert max(worst_choices(model, prompts, completions)) < 0.25


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*REPRESENTATIVES, "phi3-mini"])
def test_fp32_on_the_gpu(case, checkpoint, expected, make_llm):
    """CUDA graphs give transformers' tokens, and the logits without them are its logits."""
    path, model = checkpoint(case)
    options = {"model": path, "device": "cuda", "dtype": "float32", "max_model_len": 256, "num_kvcache_blocks": 32}
    with make_llm(**options, enforce_eager=True) as llm:
        check_greedy(llm, model, PROMPTS, NUM_DECODED, TOLERANCE)
    with make_llm(**options) as llm:
        assert generate(llm, PROMPTS, greedy(NUM_DECODED)) == expected(case)


def test_text_of_a_model_with_vision(checkpoint, tmp_path):
    """Gemma 3 from 4B on: the decoder's configuration and tensors are a part of another model's."""
    path, model = checkpoint("gemma3")
    raw = json.loads(Path(path, "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": {"a": 1}}
    Path(tmp_path, "config.json").write_text(json.dumps({**outer, "text_config": raw, "eos_token_id": [1, 5]}))
    tensors = load_file(f"{path}/model.safetensors")
    vision = {"vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": torch.ones(2, 2),
              "multi_modal_projector.mm_soft_emb_norm.weight": torch.ones(2)}  # fmt: skip
    for prefix, kept in (("language_model.", vision), ("", {f"model.{name}": t for name, t in vision.items()})):
        # published: language_model.model.layers, vision_tower; by transformers 5: model.language_model.layers
        if prefix:  # a copy of the embedding, from a trainer
            kept = {**kept, "language_model.lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        named = {prefix + name if prefix else name.replace("model.", "model.language_model.", 1): tensor
                 for name, tensor in tensors.items()}  # fmt: skip
        save_file({**named, **kept}, tmp_path / "model.safetensors")
        assert error(logits_of(str(tmp_path)), hf_logits(model, IDS)) < TOLERANCE


def test_tensors_that_are_not_needed(checkpoint, tmp_path):
    """Old checkpoints hold rotary frequencies."""
    path, model = checkpoint("llama")
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    copy = families.copied(path, tmp_path, lambda tensors, _: tensors.update(old))
    assert error(logits_of(copy), hf_logits(model, IDS)) < TOLERANCE


def test_a_head_that_is_not_tied(checkpoint, tmp_path):
    """transformers takes it; here an error names the field. A copy of the embedding is fine."""
    path, model = checkpoint("granite")

    def with_head(factor):
        embedding = "model.embed_tokens.weight"
        return families.copied(path, tmp_path, lambda t, _: t.update({"lm_head.weight": t[embedding] * factor}))

    assert error(logits_of(with_head(1.0)), hf_logits(model, IDS)) < TOLERANCE
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding, but"):
        logits_of(with_head(1.1))


# -------------------------------------------------------------------- the engine's ways to the same tokens

WAYS = {
    "chunks": {"max_num_batched_tokens": 16},
    "prefix cache": {},
    "preemption": {"num_kvcache_blocks": 6},
}


@pytest.fixture(scope="module")
def expected(checkpoint):
    """expected(case) -> greedy tokens by transformers, without a cache."""

    def make(case):
        _, model = checkpoint(case)
        completions = [list(prompt) for prompt in PROMPTS]
        for tokens in completions:
            for _ in range(NUM_DECODED):
                tokens.append(int(hf_logits(model, tokens)[-1].argmax()))
        return [tokens[-NUM_DECODED:] for tokens in completions]

    return make


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", REPRESENTATIVES)
def test_same_tokens(case, way, checkpoint, expected, make_llm):
    options = {"max_model_len": 80, "num_kvcache_blocks": 32, "max_num_seqs": 4, **WAYS[way]}
    llm = make_llm(model=checkpoint(case)[0], **options)
    if way == "prefix cache":
        generate(llm, [prompt[:33] for prompt in PROMPTS], greedy(1))
    outputs = llm.generate(PROMPTS, greedy(NUM_DECODED), use_tqdm=False)
    assert tokens_of(outputs) == expected(case)
    assert (sum(output.num_cached_tokens for output in outputs) > 0) == (way == "prefix cache")
    assert (llm.scheduler.num_preemptions > 0) == (way == "preemption")


@pytest.mark.parametrize("case, size", [("llama-tied-biased", 2), ("gemma3", 2), ("olmo3", 4),
                                        ("gemma2", 2), ("gpt-oss-attention", 4), ("gemma4", 2),
                                        ("gemma4-e4b", 2)])  # fmt: skip
def test_ranks(case, size, checkpoint, expected, make_llm):
    """olmo3 on four ranks: two KV heads for each pair of them, and norms over all heads of all ranks. gpt-oss: each
    rank its sinks; gemma2: each its capped logits."""
    llm = make_llm(model=checkpoint(case)[0], max_model_len=80, num_kvcache_blocks=32, tensor_parallel_size=size)
    assert generate(llm, PROMPTS, greedy(NUM_DECODED)) == expected(case)


# -------------------------------------------------------------------- each switch matters

PLAIN = {
    "qkv_bias": False, "o_bias": False, "mlp_bias": False, "act": "silu", "qk_norm": "", "embed_scale": 1.0,
    "residual_scale": 1.0, "logit_scale": 1.0, "attention_softcap": 0.0, "logit_softcap": 0.0,
    "per_layer_size": 0,
}  # fmt: skip
PLAIN_FAMILY = {
    "pre_norm": True, "post_norm": False, "norm_offset": 0.0, "interleaved": False, "sinks": False, "v_norm": False,
}  # fmt: skip


def switched_off(config):
    """(name, the config without it) of each switch that differs from a plain Llama's."""
    for name, plain in PLAIN.items():
        if getattr(config, name) != plain:
            yield name, replace(config, **{name: plain})
    for name, plain in PLAIN_FAMILY.items():
        if getattr(config.family, name) != plain:
            yield name, replace(config, family=config.family._replace(**{name: plain}))
    if config.attention_scale != config.head_dim**-0.5:
        yield "attention_scale", replace(config, attention_scale=config.head_dim**-0.5)
    for name in ("keys_are_values", "shares_kv"):
        if any(getattr(layer, name) for layer in config.layers):
            yield name, with_layers(config, **{name: [False] * len(config.layers)})
    windows, ropes = config.windows, config.ropes
    if any(windows):
        yield "windows", with_layers(config, window=[0] * len(windows))
        yield "window", with_layers(config, window=[w and w - 1 for w in windows])
    if len(set(windows)) > 1:
        yield "windows' layers", with_layers(config, window=windows[1:] + windows[:1])
    if len(set(ropes)) > 1:
        yield "ropes' layers", with_layers(config, rope=ropes[1:] + ropes[:1])
        yield "one rope", with_layers(config, rope=[next(filter(None, ropes))] * len(ropes))
    for rope in filter(None, dict.fromkeys(ropes)):
        for name, other in other_ropes(rope, config.head_dim):
            yield f"rope: {name}", with_layers(config, rope=[other if r == rope else r for r in ropes])


def with_layers(config, **values):
    """Other values of one field of the layers."""
    ((name, values),) = values.items()
    layers = [replace(layer, **{name: value}) for layer, value in zip(config.layers, values, strict=True)]
    return replace(config, layers=tuple(layers))


def other_ropes(rope, head_dim):
    """(field, the rope with another value of it)."""
    yield "theta", replace(rope, theta=3 * rope.theta)
    if rope.partial_rotary_factor < 1:
        every = (1.0,) * (head_dim // 2)
        yield "partial_rotary_factor", replace(rope, partial_rotary_factor=1.0, short_factor=every, long_factor=every)
    changes = {
        "linear": {"factor": 3.0},
        "llama3": {"factor": 3.0, "low_freq_factor": 0.5, "high_freq_factor": 8.0, "original_max_position": 64},
        "yarn": {"factor": 3.0, "original_max_position": 64, "beta_fast": 1.5, "beta_slow": 0.1,
                 "attention_factor": 1.5, "truncate": not rope.truncate, "llama_4_scaling_beta": 0.5},
        "longrope": {"factor": 3.0, "original_max_position": 64, "attention_factor": 1.5, "is_long": False,
                     "long_factor": rope.short_factor},
    }  # fmt: skip
    for name, value in changes.get(rope.kind, {}).items():
        yield name, replace(rope, **{name: value})
    if rope.kind != "default":
        yield "kind", replace(rope, kind="default")


@pytest.mark.parametrize("case", families.CASES)
def test_each_switch_matters(case, checkpoint):
    """Without a switch the weights do not fit, or the logits are others."""
    path, model = checkpoint(case)
    config, want = read_model_config(path).for_length(256), hf_logits(model, IDS)
    tried = 0
    for name, changed in switched_off(config):
        try:
            got = logits_of(path, changed)
        except CheckpointError:
            assert name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "pre_norm", "post_norm", "sinks",
                            "per_layer_size", "keys_are_values", "shares_kv"), name  # fmt: skip
        else:
            assert error(got, want) > 1e-3, name
        tried += 1
    assert tried >= 1


def test_every_switch_is_tried(checkpoint):
    """Else a new field of the configuration, or of a family, would have no test above."""
    shape = {field.name for field in fields(ModelConfig)} - PLAIN.keys()
    assert shape == {
        "family", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings",
        "rms_norm_eps", "tie_word_embeddings", "attention_scale", "layers", "moe", "num_nextn_predict_layers", "dtype",
        "eos_token_ids", "quant_method", "fp8", "recurrent", "scales",  # FalconH1, in tests/test_hybrids.py
        "num_positions",  # test_tables_of_rope_end_at_max_model_len
        "has_lm_head", "num_labels", "activation", "label_tokens",  # tests/test_embed.py
    }  # fmt: skip
    of_layers = {field.name for field in fields(LayerConfig)}
    assert of_layers == {
        "mixer", "window", "rope", "mlp", "fp8_linears", "packed_schemes", "head_dim", "num_key_value_heads",
        "keys_are_values", "intermediate_size", "kind", "shares_kv",
    }  # fmt: skip
    names = {name for case in families.CASES for name, _ in switched_off(read_model_config(checkpoint(case)[0]))}
    assert names >= {*PLAIN, *PLAIN_FAMILY, "attention_scale", "windows", "ropes' layers", "keys_are_values",
                     "shares_kv"}  # fmt: skip

"""config.json: every field that would change the computation is honoured or refused."""

import re

import pytest
from conftest import TINY

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.models import MODELS
from nanovllm.models.config_reader import model_config
from nanovllm.models.rope import RopeScaling

RAW = {**TINY, "architectures": ["Qwen3ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# rule -> changes that break it; Python's TypeErrors came through, or values were taken for something else
KINDS = {
    "an integer >= 1": [
        *({"vocab_size": bad} for bad in (True, 512.0, "512", None)),
        *({"num_key_value_heads": bad} for bad in ("2", 2.0, 0, -2)),
        *({"head_dim": bad} for bad in ("32", -32)),
        *({"max_position_embeddings": bad} for bad in (None, "4096", 0)),
        *({"num_hidden_layers": bad} for bad in (0, 10**9)),
        {"original_max_position_embeddings": "64"},
    ],
    "a positive number": [
        *({"rms_norm_eps": bad} for bad in (None, "1e-6", -1e-6, float("nan"), [1e-6])),
        *({"rope_theta": bad} for bad in (None, "1e6", 0, float("inf"))),
        *({"factor": bad} for bad in ("2", 0, -2.0, True)),
        {"beta_fast": "32"},
        {"beta_slow": 0},
        {"attention_factor": "1"},
    ],
    "true or false": [{"tie_word_embeddings": "false"}, {"attention_bias": 0}],
    "an object": [{"rope_scaling": "linear"}, {"rope_parameters": ["yarn"]}],
    "a list of 'full_attention', 'sliding_attention' or 'linear_attention' (others are not supported)": [
        {"layer_types": 5},
        {"layer_types": ["full_attention", "mamba"]},
    ],
    "a token id or a list of them": [{"eos_token_id": bad} for bad in ("</s>", 1.0, [1, "2"], -1, True)],
    f"one of {', '.join(MODELS)} (others are not supported)": [
        {"architectures": bad}
        for bad in (["DeepseekV3ForCausalLM"], ["Lfm2ForCausalLM"],
                    ["HunYuanMoEV1ForCausalLM"], None, 5, [["Qwen3ForCausalLM"]])
    ],
    "'silu' or 'swish' or 'gelu_pytorch_tanh' (others are not supported)": [
        {"hidden_act": "gelu"}, {"hidden_act": "relu"}, {"hidden_act": None},
    ],
    "'bfloat16' or 'float16' or 'float32' (others are not supported)": [{"dtype": "float8_e4m3fn"}],
    "'default' or 'linear' or 'llama3' or 'yarn' or 'longrope' or 'dynamic' (others are not supported)": [
        {"rope_type": bad} for bad in ("proportional", ["yarn"])
    ],
}
IN_ROPE = ("rope_type", "original_max_position_embeddings", "factor", "beta_fast", "beta_slow", "attention_factor")


@pytest.mark.parametrize(("rule", "change"), [(rule, change) for rule in KINDS for change in KINDS[rule]], ids=str)
def test_refused_values(rule, change):
    ((name, value),) = change.items()
    raw = {**RAW, **change}
    if name in IN_ROPE:
        raw = {**RAW, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, **change}}
    with pytest.raises(CheckpointError, match=r"^config\.json: .*" + re.escape(f"{name}={value!r} must be {rule}")):
        model_config(raw)


@pytest.mark.parametrize(
    ("change", "text"),
    (
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic': alpha=None must be a"),
        ({"rope_scaling": {"type": "dynamic", "alpha": 2.0}}, "alpha=2.0 is not supported for this architecture."),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear': factor=None must be a positive number."),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0 must be a positive number"),
        ({"rope_scaling": {**YARN, "mscales": 0.7}}, "rope scaling 'yarn' with unsupported fields {'mscales': 0.7}."),
        ({"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta=0.1 is not supported for this"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
         "partial_rotary_factor=0.5 is not supported for this architecture."),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be absent or 1 for Qwen3ForCausalLM."),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 must be absent for Qwen3ForCausalLM."),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0 must be absent or 1 for Qwen3ForCausalLM."),
        ({"layer_types": ["sliding_attention", "full_attention"]},
         "layer_types has 'sliding_attention' without a sliding_window."),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers."),
        ({"rope_parameters": {**YARN, "rope_theta": 1}}, "rope scaling 'yarn': rope_theta=1 must be a number > 1."),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be shared by 3 KV heads."),
        ({"head_dim": 15}, "heads of size 15, 15 rotated; RoPE needs an even size."),
        ({"head_dim": None, "hidden_size": 60}, "heads of size 15"),
        ({"head_dim": None, "num_attention_heads": 128}, "heads of size 0"),
    ),
)
def test_fields_that_do_not_fit_together(change, text):
    with pytest.raises(CheckpointError, match=r"^config\.json: .*" + re.escape(text)):
        model_config({**RAW, **change})


@pytest.mark.parametrize("size", (3, 8))
def test_ranks_that_do_not_fit(size):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size} must divide the model's 4 attention heads"):
        model_config(RAW).check_tensor_parallel(size)


def test_kv_heads_that_do_not_fit_the_ranks():
    config = model_config({**RAW, "num_attention_heads": 12, "num_key_value_heads": 6})
    config.check_tensor_parallel(2)
    with pytest.raises(ConfigError, match="the model's 6 KV heads, or be a multiple"):
        config.check_tensor_parallel(4)


PUBLISHED = {  # config.json of Qwen3-0.6B
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_a_published_config():
    config = model_config(PUBLISHED)
    assert config.family is MODELS["Qwen3ForCausalLM"] and config.family.qk_norm
    assert set(config.ropes) == {RopeScaling(kind="default", theta=1e6, original_max_position=40960)}
    assert config.windows == (0,) * 28 and config.moe is None and config.attention_scale == 128**-0.5
    assert (config.dtype, config.head_dim, config.num_key_value_heads) == ("bfloat16", 128, 8)
    assert config.tie_word_embeddings is True and config.qkv_bias is False and config.eos_token_ids == (151645,)
    for size in (1, 2, 4, 8):
        config.check_tensor_parallel(size)


def test_defaults_of_fields_left_out_or_null():
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    minimal = {name: PUBLISHED[name] for name in ("architectures", *sizes)}
    nullable = dict.fromkeys(
        ("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "layer_types", "eos_token_id",
         "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "quantization_config", "use_sliding_window")
    )  # fmt: skip
    config = model_config(minimal)
    assert model_config({**minimal, **nullable}) == config
    assert (config.num_key_value_heads, config.head_dim, config.max_position_embeddings) == (16, 64, 32768)
    assert (config.tie_word_embeddings, config.o_bias, config.dtype) == (False, False, "float32")
    assert config.rms_norm_eps == 1e-6 and config.eos_token_ids == () and config.ropes[0].theta == 10_000


def test_several_eos_ids():
    assert model_config({**RAW, "eos_token_id": [1, 3]}).eos_token_ids == (1, 3)


def test_yarn_added_to_a_published_config():
    """Qwen's recipe for long contexts leaves max_position_embeddings at 40960, and longer prompts were refused."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert model_config({**PUBLISHED, "rope_scaling": scaling}).max_position_embeddings == 131072


def test_yarn_without_original_length_takes_the_models():
    given = {"rope_scaling": {**YARN, "original_max_position_embeddings": 2048}, "rope_theta": 1e6}
    absent = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e6, "max_position_embeddings": 2048}
    assert RopeScaling.from_json(given) == RopeScaling.from_json(absent)


@pytest.mark.parametrize(
    "rope",
    (
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        YARN,
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25},
    ),
)
def test_both_layouts_of_rope(rope):
    """One dict, as transformers 5 writes it, or ``rope_theta`` and ``rope_scaling`` apart."""
    new = RopeScaling.from_json({"rope_parameters": {**rope, "rope_theta": 1e4}})
    scaling = {("type" if name == "rope_type" else name): value for name, value in rope.items()}
    assert RopeScaling.from_json({"rope_theta": 1e4, "rope_scaling": scaling}) == new
    assert new.kind == rope["rope_type"] and new.theta == 1e4
    for name in ("factor", "beta_fast", "beta_slow", "attention_factor"):
        assert getattr(new, name) == rope.get(name, getattr(RopeScaling(), name))


def test_two_different_rope_scalings():
    """The recipe's dict beside the one that transformers 5 writes was ignored: the model ran unstretched."""
    new, old = {"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(CheckpointError, match=r"rope_parameters=.* and rope_scaling=.* differ; write all into"):
        RopeScaling.from_json({"rope_parameters": new, "rope_scaling": old})
    want = RopeScaling.from_json({"rope_parameters": new})
    assert RopeScaling.from_json({"rope_parameters": new, "rope_scaling": {"type": "default"}}) == want
    for other in (new, None, {}):
        assert RopeScaling.from_json({"rope_parameters": new, "rope_scaling": other}) == want
        assert RopeScaling.from_json({"rope_parameters": other, "rope_scaling": new}) == want


def test_a_rope_of_windows_that_is_left_out():
    """It was the family's rope_theta, 1e6, not rope_local_base_freq."""
    changes = {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"],
               "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}}  # fmt: skip
    assert [rope.theta for rope in model_config({**TINY, "rope_theta": 1e6, **changes}).ropes] == [1e4, 5e5]

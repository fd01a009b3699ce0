"""config.json: fields that change the computation are honoured. Those that are refused: ``test_refusals.py``."""

import pytest
from conftest import TINY

from nanovllm.errors import CheckpointError
from nanovllm.models import MODELS
from nanovllm.models.config_reader import model_config
from nanovllm.models.rope import RopeScaling

RAW = {**TINY, "architectures": ["Qwen3ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

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

"""config.json as published, of files older and newer than transformers 5: each reads to the right row; RoPE's forms.

Written by hand from the model cards' fields. Fields that change nothing here (dropout, initializer_range) are left out.
"""

import copy
import json
from dataclasses import replace

import pytest
from conftest import TINY

from nanovllm.errors import CheckpointError
from nanovllm.models import MODELS
from nanovllm.models.config import Scales
from nanovllm.models.config_reader import model_config
from nanovllm.models.recurrent.gated_delta_net.config import GatedDeltaConfig
from nanovllm.models.recurrent.mamba2.config import Mamba2Config
from nanovllm.models.recurrent.short_conv.config import ShortConvConfig
from nanovllm.models.rope import RopeScaling

SHARED = {"hidden_act": "silu", "torch_dtype": "bfloat16", "use_cache": True, "transformers_version": "4.45.0"}


def shape(hidden, intermediate, layers, heads, kv_heads, vocab, positions, eps, **more):
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": positions, "rms_norm_eps": eps, **more,
    }  # fmt: skip


def llama3(factor):
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip


def rope(theta, positions, kind="default", **more):
    return RopeScaling(kind, theta, original_max_position=positions, **more)


def moe(num_experts, top_k, expert_size, **more):
    return {"num_experts": num_experts, "top_k": top_k, "expert_size": expert_size, **more}


SHORT, LONG = [1.0 + 0.01 * i for i in range(48)], [1.0 + i for i in range(48)]
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
FACTORS = {"short_factor": tuple(SHORT), "long_factor": tuple(LONG), "factor": 32.0}
OLMO3_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
              "beta_slow": 1.0, "attention_factor": 1.2079441541679836}  # fmt: skip
GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                "beta_slow": 1.0, "truncate": False}  # fmt: skip
EVERY_SIXTH = lambda window, layers: tuple(0 if i % 6 == 5 else window for i in range(layers))  # noqa: E731
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MINISTRAL3 = rope(1e6, 16384, **{name: value for name, value in MINISTRAL3_ROPE.items() if name in (
    "factor", "mscale", "mscale_all_dim", "llama_4_scaling_beta")}, kind="yarn")  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA_LOCAL = rope(1e4, 131072)

DELTA = GatedDeltaConfig(16, 32, 128, 128, 4)
QWEN3_5 = {
    "attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish", "partial_rotary_factor": 0.25, "tie_word_embeddings": False, "eos_token_id": 248044,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
}  # fmt: skip
QWEN3_5_MOE = QWEN3_5 | shape(
    2048, None, 40, 16, 2, 248320, 262144, 1e-6, linear_num_value_heads=32, moe_intermediate_size=512,
    num_experts=256, num_experts_per_tok=8, shared_expert_intermediate_size=512,
)
del QWEN3_5_MOE["intermediate_size"]  # no layer is dense

GRANITE_H = shape(
    1536, 512, 40, 12, 4, 100352, 131072, 1e-5, attention_bias=False, attention_multiplier=0.0078125,
    embedding_multiplier=12, logits_scaling=6, residual_multiplier=0.22, normalization_function="rmsnorm",
    layer_types=["mamba"] * 5 + (["attention"] + ["mamba"] * 9) * 3 + ["attention"] + ["mamba"] * 4,
    mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64, mamba_d_state=128, mamba_expand=2,
    mamba_n_groups=1, mamba_n_heads=48, mamba_proj_bias=False, model_type="granitemoehybrid", rope_scaling=None,
    position_embedding_type="nope", rope_theta=10000, tie_word_embeddings=True, eos_token_id=100257,
)
GRANITE_H_READ = dict(
    head_dim=128, attention_scale=0.0078125, embed_scale=12.0, logit_scale=1 / 6, residual_scale=0.22,
    tie_word_embeddings=True, ropes=(None,) * 4, eos_token_ids=(100257,),
    recurrent=Mamba2Config(48, 1, 64, 128, 4, True, "gated", (1.0,) * 5, 1.0),
)
GRANITE_DENSE_READ = GRANITE_H_READ | {"family": MODELS["GraniteMoeHybridForCausalLM"].without_experts}
LFM2_LAYERS = ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)]
LFM2 = {
    "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
    "block_norm_eps": 1e-5, "block_use_swiglu": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048,
    "eos_token_id": 7, "hidden_size": 2048, "max_position_embeddings": 128000, "norm_eps": 1e-5,
    "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "use_pos_enc": True,
    "vocab_size": 65536,
}  # fmt: skip
LFM2_READ = {
    "intermediate_size": 8192, "head_dim": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "ropes": (rope(1e6, 128000),) * 6, "recurrent": ShortConvConfig(2048, 3),
}  # fmt: skip

GEMMA4 = {
    "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": False, "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "num_experts": None, "top_k_experts": None,
    "moe_intermediate_size": None, "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }, "sliding_window": 1024, "tie_word_embeddings": True, "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False, "vocab_size_per_layer_input": 262144,
}  # fmt: skip


GEMMA4_E = {
    "attention_k_eq_v": False, "hidden_size_per_layer_input": 256, "sliding_window": 512,
    "use_bidirectional_attention": None,
}  # fmt: skip


def gemma4(sizes, every=6, architecture="Gemma4ForConditionalGeneration", expected=None, **fields):
    """A published model: the text's fields, in their place, and what they are read to. Every n-th layer is full."""
    positions, layers = sizes["max_position_embeddings"], sizes["num_hidden_layers"]
    kinds = ["sliding_attention"] * (every - 1) + ["full_attention"]
    text = {**GEMMA4, **sizes, "layer_types": kinds * (layers // every), **fields}
    ropes = (*(rope(1e4, positions),) * (every - 1), rope(1e6, positions, "proportional", partial_rotary_factor=0.25))
    raw = text if architecture.endswith("CausalLM") else {"text_config": text, "vision_config": {}}
    family = MODELS[architecture] if text["enable_moe_block"] else MODELS[architecture]._replace(experts="")
    return architecture, raw, {
        "family": family, "eos_token_ids": (1,), "act": "gelu_tanh", "attention_scale": 1.0,
        "embed_scale": text["hidden_size"] ** 0.5, "head_dim": 512,
        "logit_softcap": 30.0, "tie_word_embeddings": True, "ropes": ropes * (layers // every),
        "windows": (*(text["sliding_window"],) * (every - 1), 0) * (layers // every), **(expected or {}),
    }  # fmt: skip


# model -> (architecture, published fields, what they are read to; the rest is a plain Llama)
PUBLISHED = {
    "Qwen3-0.6B": ("Qwen3ForCausalLM", shape(1024, 3072, 28, 16, 8, 151936, 40960, 1e-6, head_dim=128,
        tie_word_embeddings=True, attention_bias=False, attention_dropout=0.0, rope_theta=1000000, rope_scaling=None,
        sliding_window=None, use_sliding_window=False, max_window_layers=28, bos_token_id=151643, eos_token_id=151645,
        initializer_range=0.02, model_type="qwen3"), dict(head_dim=128, tie_word_embeddings=True, qk_norm="head",
        eos_token_ids=(151645,), rope=rope(1e6, 40960))),
    "Llama-3.2-1B": ("LlamaForCausalLM", shape(2048, 8192, 16, 32, 8, 128256, 131072, 1e-5, head_dim=64,
        tie_word_embeddings=True, attention_bias=False, mlp_bias=False, pretraining_tp=1, rope_theta=500000.0,
        rope_scaling=llama3(32.0), eos_token_id=128001), dict(head_dim=64, tie_word_embeddings=True,
        eos_token_ids=(128001,), rope=rope(5e5, 8192, "llama3", factor=32.0))),
    "Llama-3.1-8B-Instruct": ("LlamaForCausalLM", shape(4096, 14336, 32, 32, 8, 128256, 131072, 1e-5,
        tie_word_embeddings=False, attention_bias=False, mlp_bias=False, rope_theta=500000.0, rope_scaling=llama3(8.0),
        eos_token_id=[128001, 128008, 128009]), dict(head_dim=128, eos_token_ids=(128001, 128008, 128009),
        rope=rope(5e5, 8192, "llama3", factor=8.0))),
    "Qwen2.5-0.5B": ("Qwen2ForCausalLM", shape(896, 4864, 24, 14, 2, 151936, 32768, 1e-6, tie_word_embeddings=True,
        rope_theta=1000000.0, sliding_window=32768, max_window_layers=24, use_sliding_window=False, use_mrope=False,
        eos_token_id=151643), dict(head_dim=64, tie_word_embeddings=True, qkv_bias=True, rope=rope(1e6, 32768))),
    "Qwen2.5-7B": ("Qwen2ForCausalLM", shape(3584, 18944, 28, 28, 4, 152064, 131072, 1e-6, tie_word_embeddings=False,
        rope_theta=1000000.0, sliding_window=131072, max_window_layers=28, use_sliding_window=False,
        eos_token_id=151643), dict(head_dim=128, qkv_bias=True, rope=rope(1e6, 131072))),
    "Mistral-7B-v0.1": ("MistralForCausalLM", shape(4096, 14336, 32, 32, 8, 32000, 32768, 1e-5, rope_theta=10000.0,
        sliding_window=4096, tie_word_embeddings=False, eos_token_id=2), dict(head_dim=128, windows=(4096,) * 32,
        rope=rope(1e4, 32768))),
    "Mistral-7B-v0.3": ("MistralForCausalLM", shape(4096, 14336, 32, 32, 8, 32768, 32768, 1e-5, rope_theta=1000000.0,
        sliding_window=None, eos_token_id=2), dict(head_dim=128, rope=rope(1e6, 32768))),
    "Mistral-Nemo-Base-2407": ("MistralForCausalLM", shape(5120, 14336, 40, 32, 8, 131072, 128000, 1e-5, head_dim=128,
        rope_theta=1000000.0, sliding_window=None, eos_token_id=2), dict(head_dim=128, rope=rope(1e6, 128000))),
    "Phi-3-mini-4k-instruct": ("Phi3ForCausalLM", shape(3072, 8192, 32, 32, 32, 32064, 4096, 1e-5,
        original_max_position_embeddings=4096, rope_scaling=None, rope_theta=10000.0, sliding_window=2047,
        attention_bias=False, eos_token_id=32000), dict(head_dim=96, windows=(2047,) * 32, rope=rope(1e4, 4096))),
    "Phi-3-mini-128k-instruct": ("Phi3ForCausalLM", shape(3072, 8192, 32, 32, 32, 32064, 131072, 1e-5,
        original_max_position_embeddings=4096, rope_scaling={**LONGROPE, "type": "su"}, rope_theta=10000.0,
        sliding_window=262144, eos_token_id=32000), dict(head_dim=96, windows=(262144,) * 32,
        rope=rope(1e4, 4096, "longrope", **FACTORS))),
    "Phi-4-mini-instruct": ("Phi3ForCausalLM", shape(3072, 8192, 32, 24, 8, 200064, 131072, 1e-5,
        original_max_position_embeddings=4096, rope_scaling=LONGROPE, rope_theta=10000.0, partial_rotary_factor=0.75,
        sliding_window=262144, tie_word_embeddings=True, full_attn_mod=1, eos_token_id=199999), dict(head_dim=128,
        tie_word_embeddings=True, windows=(262144,) * 32,
        rope=rope(1e4, 4096, "longrope", partial_rotary_factor=0.75, **FACTORS))),
    "phi-4": ("Phi3ForCausalLM", shape(5120, 17920, 40, 40, 10, 100352, 16384, 1e-5,
        original_max_position_embeddings=16384, rope_scaling=None, rope_theta=250000, sliding_window=None,
        tie_word_embeddings=False, eos_token_id=100265), dict(head_dim=128, rope=rope(2.5e5, 16384))),
    "SmolLM3-3B": ("SmolLM3ForCausalLM", shape(2048, 11008, 36, 16, 4, 128256, 65536, 1e-6, rope_theta=5000000.0,
        rope_scaling=None, eos_token_id=128012, no_rope_layers=[1, 1, 1, 0] * 9, no_rope_layer_interval=4,
        layer_types=["full_attention"] * 36, sliding_window=None, use_sliding_window=False, max_window_layers=28,
        mlp_bias=False, attention_bias=False), dict(head_dim=128, tie_word_embeddings=True,
        ropes=(*(rope(5e6, 65536),) * 3, None) * 9)),
    "granite-3.3-8b-instruct": ("GraniteForCausalLM", shape(4096, 12800, 40, 32, 8, 49159, 131072, 1e-5,
        rope_theta=10000000.0, rope_scaling=None, eos_token_id=0, attention_bias=False, mlp_bias=False,
        attention_multiplier=0.0078125, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0,
        tie_word_embeddings=True), dict(head_dim=128, tie_word_embeddings=True, attention_scale=1 / 128,
        embed_scale=12.0, residual_scale=0.22, logit_scale=1 / 16, rope=rope(1e7, 131072))),
    "Seed-OSS-36B-Instruct": ("SeedOssForCausalLM", shape(5120, 27648, 64, 80, 8, 155136, 524288, 1e-6, head_dim=128,
        attention_bias=True, attention_out_bias=False, mlp_bias=False, rope_scaling={"rope_type": "default"},
        rope_theta=10000000.0, tie_word_embeddings=False, eos_token_id=2, residual_dropout=0.1), dict(head_dim=128,
        qkv_bias=True, rope=rope(1e7, 524288))),
    "ERNIE-4.5-0.3B-PT": ("Ernie4_5ForCausalLM", shape(1024, 3072, 18, 16, 2, 103424, 131072, 1e-5, head_dim=128,
        use_bias=False, rope_theta=500000.0, rope_scaling=None, tie_word_embeddings=True, eos_token_id=2),
        dict(head_dim=128, tie_word_embeddings=True, rope=rope(5e5, 131072))),
    "GLM-4-9B-0414": ("Glm4ForCausalLM", shape(4096, 13696, 40, 32, 2, 151552, 32768, 1e-5, head_dim=128,
        attention_bias=True, partial_rotary_factor=0.5, rope_theta=10000.0, tie_word_embeddings=False,
        eos_token_id=[151329, 151336, 151338]), dict(head_dim=128, qkv_bias=True,
        rope=rope(1e4, 32768, partial_rotary_factor=0.5), eos_token_ids=(151329, 151336, 151338))),
    "gemma-2b": ("GemmaForCausalLM", shape(2048, 16384, 18, 8, 1, 256000, 8192, 1e-6, head_dim=256, hidden_act="gelu",
        hidden_activation=None, rope_theta=10000.0, rope_scaling=None, attention_bias=False, eos_token_id=1),
        dict(head_dim=256, tie_word_embeddings=True, act="gelu_tanh", embed_scale=2048**0.5, rope=rope(1e4, 8192))),
    "gemma-2-27b": ("Gemma2ForCausalLM", shape(4608, 36864, 46, 32, 16, 256000, 8192, 1e-6, head_dim=128,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=144,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096, sliding_window_size=4096,
        rope_theta=10000.0, attention_bias=False, cache_implementation="hybrid", eos_token_id=1), dict(head_dim=128,
        tie_word_embeddings=True, act="gelu_tanh", embed_scale=4608**0.5, windows=(4096, 0) * 23,
        attention_scale=1 / 12, rope=rope(1e4, 8192), attention_softcap=50.0, logit_softcap=30.0)),
    "gemma-3-1b-it": ("Gemma3ForCausalLM", shape(1152, 6912, 26, 4, 1, 262144, 32768, 1e-6, head_dim=256,
        hidden_act=None, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, attn_logit_softcapping=None,
        final_logit_softcapping=None, sliding_window=512, sliding_window_pattern=6, rope_local_base_freq=10000,
        rope_theta=1000000, rope_scaling=None, attention_bias=False, cache_implementation="hybrid",
        eos_token_id=[1, 106]), dict(head_dim=256, tie_word_embeddings=True, act="gelu_tanh", embed_scale=1152**0.5,
        windows=EVERY_SIXTH(512, 26), attention_scale=1 / 16, eos_token_ids=(1, 106),
        ropes=tuple(rope(1e4, 32768) if w else rope(1e6, 32768) for w in EVERY_SIXTH(512, 26)))),
    "gemma-3-12b-it": ("Gemma3ForConditionalGeneration", {  # most fields are left to transformers' class
        "model_type": "gemma3", "mm_tokens_per_image": 256, "boi_token_index": 255999, "eos_token_id": [1, 106],
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
        "hidden_act": None,
        "text_config": {
            "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text", "num_attention_heads": 16,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }, {
        "head_dim": 256, "tie_word_embeddings": True, "act": "gelu_tanh", "embed_scale": 3840**0.5,
        "windows": EVERY_SIXTH(1024, 48), "attention_scale": 1 / 16, "vocab_size": 262208, "eos_token_ids": (1, 106),
        "ropes": tuple(
            GEMMA_LOCAL if w else rope(1e6, 131072, "linear", factor=8.0) for w in EVERY_SIXTH(1024, 48)
        ),
    }),
    "gemma-4-26B-A4B": gemma4(
        shape(2816, 2112, 30, 16, 8, 262144, 262144, 1e-6), enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704, num_global_key_value_heads=2,
        expected={"num_key_value_heads": 2, "moe": moe(128, 8, 704)},
    ),
    "gemma-4-31B": gemma4(
        shape(5376, 21504, 60, 32, 16, 262144, 262144, 1e-6), num_global_key_value_heads=4,
        expected={"num_key_value_heads": 4},
    ),
    "gemma-4-12B": gemma4(
        shape(3840, 15360, 48, 16, 8, 262144, 262144, 1e-6), num_global_key_value_heads=1,
        architecture="Gemma4UnifiedForConditionalGeneration", expected={"num_key_value_heads": 1},
    ),
    "gemma-4-12B, its text": gemma4(
        shape(3840, 15360, 48, 16, 8, 262144, 262144, 1e-6), num_global_key_value_heads=1,
        architecture="Gemma4UnifiedForCausalLM", expected={"num_key_value_heads": 1},
    ),
    "gemma-4-E4B": gemma4(
        shape(2560, 10240, 42, 8, 2, 262144, 131072, 1e-6), **GEMMA4_E, num_kv_shared_layers=18,
        expected={"per_layer_size": 256},
    ),
    "gemma-4-E2B": gemma4(
        shape(1536, 6144, 35, 8, 1, 262144, 131072, 1e-6), 5, **GEMMA4_E, num_kv_shared_layers=20,
        use_double_wide_mlp=True, expected={"per_layer_size": 256},
    ),
    "gemma-4-E2B, its text": gemma4(
        shape(1536, 6144, 35, 8, 1, 262144, 131072, 1e-6), 5, "Gemma4ForCausalLM", **GEMMA4_E,
        num_kv_shared_layers=20, use_double_wide_mlp=True, expected={"per_layer_size": 256},
    ),
    "gpt-oss-20b": ("GptOssForCausalLM", shape(2880, 2880, 24, 64, 8, 201088, 131072, 1e-5, head_dim=64,
        attention_bias=True, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12,
        initial_context_length=4096, rope_theta=150000, rope_scaling=GPT_OSS_YARN, tie_word_embeddings=False,
        num_local_experts=32, num_experts_per_tok=4, experts_per_token=4, router_aux_loss_coef=0.9, swiglu_limit=7.0,
        output_router_logits=False, eos_token_id=200002,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}),
        dict(quant_method="mxfp4", head_dim=64, windows=(128, 0) * 12, qkv_bias=True, o_bias=True,
        rope=rope(150_000.0, 4096, "yarn", factor=32.0, truncate=False),
        moe=moe(32, 4, 2880, swiglu_limit=7.0))),
    "OLMo-2-1124-7B": ("Olmo2ForCausalLM", shape(4096, 11008, 32, 32, 32, 100352, 4096, 1e-6, rope_theta=500000,
        rope_scaling=None, attention_bias=False, tie_word_embeddings=False, eos_token_id=100257), dict(head_dim=128,
        rope=rope(5e5, 4096))),
    "Olmo-3-1025-7B": ("Olmo3ForCausalLM", shape(4096, 11008, 32, 32, 32, 100278, 65536, 1e-6, rope_theta=500000,
        rope_scaling=OLMO3_YARN, sliding_window=4096, layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        attention_bias=False, eos_token_id=100257, tie_word_embeddings=False), dict(head_dim=128,
        windows=(4096, 4096, 4096, 0) * 8,
        ropes=(*(rope(5e5, 65536),) * 3, rope(5e5, 8192, "yarn", factor=8.0, attention_factor=1.2079441541679836),
        ) * 8)),
    "EXAONE-4.0-32B": ("Exaone4ForCausalLM", shape(5120, 27392, 64, 40, 8, 102400, 131072, 1e-5, head_dim=128,
        rope_theta=1000000, rope_scaling={**llama3(16.0)}, sliding_window=4096, sliding_window_pattern="LLLG",
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 16, eos_token_id=361, tie_word_embeddings=False),
        dict(head_dim=128, windows=(4096, 4096, 4096, 0) * 16,
        ropes=(*(rope(1e6, 8192, "llama3", factor=16.0),) * 3, None) * 16)),
    "Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", shape(2048, 6144, 48, 32, 4, 151936, 40960, 1e-6, head_dim=128,
        attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768,
        norm_topk_prob=True, num_experts=128, num_experts_per_tok=8, output_router_logits=False, rope_theta=1000000.0,
        rope_scaling=None, sliding_window=None, use_sliding_window=False, max_window_layers=48,
        router_aux_loss_coef=0.001, tie_word_embeddings=False, eos_token_id=151645), dict(head_dim=128,
        rope=rope(1e6, 40960), moe=moe(128, 8, 768))),
    "Qwen3-235B-A22B": ("Qwen3MoeForCausalLM", shape(4096, 12288, 94, 64, 4, 151936, 40960, 1e-6, head_dim=128,
        attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=1536,
        norm_topk_prob=True, num_experts=128, num_experts_per_tok=8, rope_theta=1000000.0, sliding_window=None,
        use_sliding_window=False, max_window_layers=94, eos_token_id=151645), dict(head_dim=128, rope=rope(1e6, 40960),
        moe=moe(128, 8, 1536))),
    "Ministral-3-8B-Instruct-2512": ("Mistral3ForConditionalGeneration", {
        "model_type": "mistral3", "tie_word_embeddings": False, "vision_config": {"model_type": "pixtral"},
        "text_config": shape(
            4096, 14336, 34, 32, 8, 131072, 262144, 1e-5, model_type="ministral3", head_dim=128, sliding_window=None,
            rope_parameters=MINISTRAL3_ROPE | {"beta_fast": 32.0, "beta_slow": 1.0, "type": "yarn"},
        ),
    }, {"head_dim": 128, "rope": MINISTRAL3}),
    "Ministral-3-8B, text alone": ("Ministral3ForCausalLM", shape(4096, 14336, 34, 32, 8, 131072, 262144, 1e-5,
        head_dim=128, rope_parameters=MINISTRAL3_ROPE), dict(head_dim=128, rope=MINISTRAL3)),
    "Qwen2-VL-7B-Instruct": ("Qwen2VLForConditionalGeneration", shape(3584, 18944, 28, 28, 4, 152064, 32768,
        1e-6, tie_word_embeddings=False, rope_theta=1000000.0, sliding_window=32768, max_window_layers=28,
        use_sliding_window=False, eos_token_id=151645, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        vision_config={"model_type": "qwen2_vl"}), dict(head_dim=128, qkv_bias=True, rope=rope(1e6, 32768))),
    "Qwen2.5-VL-7B-Instruct": ("Qwen2_5_VLForConditionalGeneration", shape(3584, 18944, 28, 28, 4, 152064, 128000,
        1e-6, tie_word_embeddings=False, rope_theta=1000000.0, sliding_window=32768, max_window_layers=28,
        use_sliding_window=False, eos_token_id=151645, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        vision_config={"model_type": "qwen2_5_vl"}), dict(head_dim=128, qkv_bias=True, rope=rope(1e6, 128000))),
    "Qwen3-VL-8B-Instruct": ("Qwen3VLForConditionalGeneration", {
        "model_type": "qwen3_vl", "tie_word_embeddings": False, "vision_config": {"model_type": "qwen3_vl"},
        "text_config": shape(
            4096, 12288, 36, 32, 8, 151936, 262144, 1e-6, head_dim=128, attention_bias=False, eos_token_id=151645,
            rope_theta=5000000, rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20],
                                              "rope_type": "default"}, model_type="qwen3_vl_text",
        ),
    }, {"head_dim": 128, "rope": rope(5e6, 262144)}),
    "Qwen3-VL-30B-A3B-Instruct": ("Qwen3VLMoeForConditionalGeneration", {
        "model_type": "qwen3_vl_moe", "tie_word_embeddings": False, "vision_config": {"model_type": "qwen3_vl_moe"},
        "text_config": shape(
            2048, 6144, 48, 32, 4, 151936, 262144, 1e-6, head_dim=128, attention_bias=False, eos_token_id=151645,
            decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
            num_experts=128, num_experts_per_tok=8, rope_theta=5000000, model_type="qwen3_vl_moe_text",
            rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        ),
    }, {
        "head_dim": 128, "rope": rope(5e6, 262144),
        "moe": moe(128, 8, 768),
    }),
    "LightOnOCR-1B-1025": ("LightOnOCRForConditionalGeneration", {
        "model_type": "mistral3", "image_token_id": 151655, "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "image_size": 1540},
        "text_config": shape(
            1024, 3072, 28, 16, 8, 151936, 8192, 1e-6, head_dim=128, attention_bias=False, rope_theta=1000000,
            rope_scaling=None, sliding_window=None, use_sliding_window=False, max_window_layers=28,
            layer_types=["full_attention"] * 28, tie_word_embeddings=True, model_type="qwen3",
        ),
    }, {"head_dim": 128, "rope": rope(1e6, 8192), "tie_word_embeddings": True, "qk_norm": "head"}),
    "LightOnOCR-2-1B": ("LightOnOcrForConditionalGeneration", {
        "model_type": "lighton_ocr", "image_token_id": 151655, "spatial_merge_size": 2, "tie_word_embeddings": True,
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "image_size": 1540},
        "text_config": shape(
            1024, 3072, 28, 16, 8, 151936, 16384, 1e-6, head_dim=128, attention_bias=False, sliding_window=None,
            use_sliding_window=False, max_window_layers=28, tie_word_embeddings=True, model_type="qwen3",
            rope_parameters={"rope_type": "default", "rope_theta": 1000000},
        ),
    }, {"head_dim": 128, "rope": rope(1e6, 16384), "tie_word_embeddings": True, "qk_norm": "head"}),
    "GLM-OCR": ("GlmOcrForConditionalGeneration", {
        "model_type": "glm_ocr", "tie_word_embeddings": False, "vision_config": {"model_type": "glm_ocr_vision"},
        "text_config": shape(
            1024, 4096, 16, 16, 8, 59392, 131072, 1e-5, head_dim=128, attention_bias=False, model_type="glm_ocr_text",
            num_nextn_predict_layers=1, eos_token_id=[59246, 59253], rope_parameters={
                "rope_type": "default", "rope_theta": 10000, "mrope_section": [16, 24, 24],
                "partial_rotary_factor": 1.0,
            },
        ),
    }, {"head_dim": 128, "rope": rope(1e4, 131072), "num_nextn_predict_layers": 1, "eos_token_ids": (59246, 59253)}),
    "GLM-4.1V-9B-Thinking": ("Glm4vForConditionalGeneration", {
        "model_type": "glm4v", "tie_word_embeddings": False, "vision_config": {"model_type": "glm4v"},
        "text_config": shape(
            4096, 13696, 40, 32, 2, 151552, 65536, 1e-5, attention_bias=True, model_type="glm4v_text",
            eos_token_id=[151329, 151336, 151338, 151348], partial_rotary_factor=0.5, rope_theta=10000.0,
            rope_scaling={"type": "default", "mrope_section": [8, 12, 12]},
        ),
    }, {"head_dim": 128, "qkv_bias": True, "rope": rope(1e4, 65536, partial_rotary_factor=0.5),
        "eos_token_ids": (151329, 151336, 151338, 151348)}),
    "PaddleOCR-VL": ("PaddleOCRVLForConditionalGeneration", shape(1024, 3072, 18, 16, 2, 103424, 131072, 1e-5,
        head_dim=128, compression_ratio=1.0, use_bias=False, tie_word_embeddings=False, rope_theta=500000,
        rope_scaling={"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}, use_3d_rope=True,
        rope_is_neox_style=True, weight_share_add_bias=True, model_type="paddleocr_vl", image_token_id=100295,
        vision_config={"model_type": "paddleocr_vl", "hidden_size": 1152, "image_size": 384, "patch_size": 14}),
        dict(head_dim=128, rope=rope(5e5, 131072), eos_token_ids=(2,))),
    "MiniMax-M2": ("MiniMaxM2ForCausalLM", shape(3072, 1536, 62, 48, 8, 200064, 196608, 1e-6, head_dim=128,
        num_experts_per_tok=8, num_local_experts=256, rope_theta=5000000, rotary_dim=64, scoring_func="sigmoid",
        use_qk_norm=True, use_routing_bias=True, qk_norm_type="per_layer", shared_intermediate_size=0,
        tie_word_embeddings=False, eos_token_id=200020), dict(head_dim=128,
        rope=rope(5e6, 196608, partial_rotary_factor=0.5),
        moe=moe(256, 8, 1536))),
    "Hy3": ("HYV3ForCausalLM", shape(4096, 13312, 80, 64, 8, 120832, 262144, 1e-5, head_dim=128, num_experts=192,
        num_experts_per_tok=8, num_shared_experts=1, moe_intermediate_size=1536, router_scaling_factor=2.826,
        first_k_dense_replace=1, rope_parameters={"rope_type": "default", "rope_theta": 11158840.0},
        num_nextn_predict_layers=1), dict(head_dim=128, rope=rope(11158840.0, 262144), num_nextn_predict_layers=1,
        moe=moe(192, 8, 1536, shared_size=1536, routed_scale=2.826),
        dense={0})),
    "ERNIE-4.5-21B-A3B-PT": ("Ernie4_5_MoeForCausalLM", shape(2560, 12288, 28, 20, 4, 103424, 131072, 1e-5,
        use_bias=False, rope_theta=500000.0, eos_token_id=2, tie_word_embeddings=True, moe_num_experts=64, moe_k=6,
        moe_num_shared_experts=2, moe_intermediate_size=1536, moe_layer_start_index=1, moe_layer_end_index=27,
        moe_layer_interval=1), dict(head_dim=128, tie_word_embeddings=True, rope=rope(5e5, 131072),
        moe=moe(64, 6, 1536, shared_size=3072), dense={0})),
    "Qwen1.5-MoE-A2.7B": ("Qwen2MoeForCausalLM", shape(2048, 5632, 24, 16, 16, 151936, 8192, 1e-6,
        decoder_sparse_step=1, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, norm_topk_prob=False,
        num_experts=60, num_experts_per_tok=4, rope_theta=1000000.0, sliding_window=32768, use_sliding_window=False,
        max_window_layers=21, eos_token_id=151643), dict(head_dim=128, rope=rope(1e6, 8192), qkv_bias=True,
        moe=moe(60, 4, 1408, renormalize=False, shared_size=5632))),
    "Mixtral-8x7B-v0.1": ("MixtralForCausalLM", shape(4096, 14336, 32, 32, 8, 32000, 32768, 1e-5,
        num_experts_per_tok=2, num_local_experts=8, rope_theta=1000000.0, output_router_logits=False,
        router_aux_loss_coef=0.02, sliding_window=None, eos_token_id=2), dict(head_dim=128, rope=rope(1e6, 32768),
        moe=moe(8, 2, 14336))),
    "OLMoE-1B-7B-0924": ("OlmoeForCausalLM", shape(2048, 1024, 16, 16, 16, 50304, 4096, 1e-5, num_experts=64,
        num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=None, rope_theta=10000.0, rope_scaling=None,
        attention_bias=False, eos_token_id=50279), dict(head_dim=128, rope=rope(1e4, 4096),
        moe=moe(64, 8, 1024, renormalize=False))),
    "GLM-4.5-Air": ("Glm4MoeForCausalLM", shape(4096, 10944, 46, 96, 8, 151552, 131072, 1e-5, head_dim=128,
        attention_bias=True, first_k_dense_replace=1, moe_intermediate_size=1408, n_group=1, n_routed_experts=128,
        n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, num_nextn_predict_layers=1,
        partial_rotary_factor=0.5, rope_theta=1000000, rope_scaling=None, routed_scaling_factor=1.0, topk_group=1,
        use_qk_norm=False, tie_word_embeddings=False, eos_token_id=[151329, 151336, 151338]), dict(head_dim=128,
        qkv_bias=True, rope=rope(1e6, 131072, partial_rotary_factor=0.5), num_nextn_predict_layers=1,
        eos_token_ids=(151329, 151336, 151338),
        moe=moe(128, 8, 1408, shared_size=1408), dense={0})),
    "GLM-4.5": ("Glm4MoeForCausalLM", shape(5120, 12288, 92, 96, 8, 151552, 131072, 1e-5, head_dim=128,
        attention_bias=True, first_k_dense_replace=3, moe_intermediate_size=1536, n_group=1, n_routed_experts=160,
        n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, num_nextn_predict_layers=1,
        partial_rotary_factor=0.5, rope_theta=1000000, routed_scaling_factor=2.5, topk_group=1, use_qk_norm=True,
        eos_token_id=[151329, 151336, 151338]), dict(head_dim=128, qkv_bias=True, qk_norm="head",
        rope=rope(1e6, 131072, partial_rotary_factor=0.5), num_nextn_predict_layers=1,
        moe=moe(160, 8, 1536, shared_size=1536, routed_scale=2.5),
        dense={0, 1, 2})),
    "Qwen3-Next-80B-A3B-Instruct": ("Qwen3NextForCausalLM", shape(2048, 5120, 48, 16, 2, 151936, 262144, 1e-6,
        head_dim=256, attention_bias=False, decoder_sparse_step=1, full_attention_interval=4, linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128,
        mlp_only_layers=[], moe_intermediate_size=512, norm_topk_prob=True, num_experts=512, num_experts_per_tok=10,
        partial_rotary_factor=0.25, rope_scaling=None, rope_theta=10000000, shared_expert_intermediate_size=512,
        tie_word_embeddings=False, eos_token_id=151645), dict(head_dim=256,
        ropes=(rope(1e7, 262144, partial_rotary_factor=0.25),) * 12, recurrent=DELTA,
        moe=moe(512, 10, 512, shared_size=512))),
    "Qwen3.6-27B": ("Qwen3_5ForConditionalGeneration", {
        "model_type": "qwen3_5", "image_token_id": 248056, "vision_config": {"model_type": "qwen3_5", "depth": 27},
        "text_config": QWEN3_5 | shape(5120, 17408, 64, 24, 4, 248320, 262144, 1e-6, linear_num_value_heads=48),
    }, {
        "head_dim": 256, "num_hidden_layers": 64, "hidden_size": 5120, "eos_token_ids": (248044,),
        "ropes": (rope(1e7, 262144, partial_rotary_factor=0.25),) * 16,
        "recurrent": replace(DELTA, num_value_heads=48),
    }),
    "Qwen3.5-9B, its text": ("Qwen3_5ForCausalLM", QWEN3_5 | shape(4096, 12288, 32, 16, 4, 248320, 262144, 1e-6,
        linear_num_value_heads=32), dict(head_dim=256, ropes=(rope(1e7, 262144, partial_rotary_factor=0.25),) * 8,
        recurrent=DELTA)),
    **{
        f"Qwen3.6-35B-A3B, {architecture}": (architecture, given, {
            "head_dim": 256, "num_hidden_layers": 40, "num_key_value_heads": 2, "intermediate_size": 512,
            "ropes": (rope(1e7, 262144, partial_rotary_factor=0.25),) * 10, "recurrent": DELTA,
            "moe": moe(256, 8, 512, shared_size=512),
        }) for architecture, given in (
            ("Qwen3_5MoeForCausalLM", QWEN3_5_MOE),
            ("Qwen3_5MoeForConditionalGeneration", {"model_type": "qwen3_5_moe", "text_config": QWEN3_5_MOE}),
        )
    },
    "granite-4.0-h-tiny": ("GraniteMoeHybridForCausalLM", GRANITE_H | {"intermediate_size": 512,
        "shared_intermediate_size": 1024, "num_local_experts": 64, "num_experts_per_tok": 6},
        GRANITE_H_READ | dict(moe=moe(64, 6, 512, shared_size=1024))),
    "granite-4.0-h-1b": ("GraniteMoeHybridForCausalLM", GRANITE_H | {"intermediate_size": 4096,
        "shared_intermediate_size": 4096, "num_local_experts": 0, "num_experts_per_tok": 0}, GRANITE_DENSE_READ),
    "granite-4.0-micro": ("GraniteMoeHybridForCausalLM", GRANITE_H | {"position_embedding_type": "rope",
        "rope_theta": 10000000, "layer_types": ["attention"] * 40, "shared_intermediate_size": 8192,
        "intermediate_size": 8192, "num_local_experts": 0, "num_experts_per_tok": 0},
        GRANITE_DENSE_READ | {"ropes": (rope(1e7, 131072),) * 40}),
    "Falcon-H1-0.5B": ("FalconH1ForCausalLM", shape(1024, 2048, 36, 8, 2, 32784, 16384, 1e-5, head_dim=64,
        attention_bias=False, attention_in_multiplier=1.0, attention_out_multiplier=0.9375, attn_layer_indices=None,
        embedding_multiplier=5.656854249492381, key_multiplier=0.390625, lm_head_multiplier=0.0390625,
        mamba_chunk_size=128, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64, mamba_d_ssm=1536,
        mamba_d_state=128, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=24, mamba_norm_before_gate=False,
        mamba_proj_bias=False, mamba_rms_norm=False, mamba_use_mlp=True, mlp_bias=False,
        mlp_multipliers=[0.8838834764831844, 0.5859375], model_type="falcon_h1", projectors_bias=False,
        rope_scaling=None, rope_theta=100000000000.0, ssm_in_multiplier=1.25, tie_word_embeddings=False,
        ssm_multipliers=[0.4, 0.2, 0.4, 0.5, 0.4], ssm_out_multiplier=0.23570226039551587),
        dict(head_dim=64, attention_scale=0.390625 / 8, embed_scale=5.656854249492381, logit_scale=0.0390625,
        scales=Scales(0.9375, 0.8838834764831844, 0.5859375), ropes=(rope(1e11, 16384),) * 36,
        recurrent=Mamba2Config(24, 1, 64, 128, 4, True, "", (0.5, 0.25, 0.5, 0.625, 0.5), 0.23570226039551587))),
    "Nemotron-3-Nano-30B-A3B": ("NemotronHForCausalLM", {
        "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128,
        "hidden_size": 2688, "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64,
        "mamba_hidden_act": "silu", "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "mlp_bias": False,
        "max_position_embeddings": 262144, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_group": 1,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_groups": 8, "norm_eps": 1e-05,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2, "partial_rotary_factor": 1.0,
        "residual_in_fp32": False, "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": None,
        "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_max": 0.1,
        "time_step_min": 0.001, "topk_group": 1, "use_bias": False, "use_conv_bias": True, "vocab_size": 131072},
        dict(head_dim=128, rms_norm_eps=1e-5, act="relu2", ropes=(None,) * 6, eos_token_ids=(2,),
        moe=moe(128, 6, 1856, shared_size=3712, routed_scale=2.5),
        recurrent=Mamba2Config(64, 8, 64, 128, 4, True, "gated", (1.0,) * 5, 1.0))),
    # The MLP has two thirds of the published width. The first release has older names, LFM2.5 those of today.
    "LFM2-1.2B": ("Lfm2ForCausalLM", LFM2 | {"block_ff_dim": 12288, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "rope_theta": 1000000.0}, LFM2_READ),
    "LFM2.5-1.2B-Instruct": ("Lfm2ForCausalLM", LFM2 | {"intermediate_size": 12288, "tie_embedding": True,
        "full_attn_idxs": None, "layer_types": LFM2_LAYERS, "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}, LFM2_READ),
    "LFM2-8B-A1B": ("Lfm2MoeForCausalLM", {"hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536, "max_position_embeddings": 128000,
        "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2,
        "conv_bias": False, "conv_L_cache": 3, "norm_eps": 1e-5, "norm_topk_prob": True, "use_expert_bias": True,
        "routed_scaling_factor": 1.0, "rope_theta": 1000000.0, "eos_token_id": 7,
        "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]},
        dict(head_dim=64, rms_norm_eps=1e-5, tie_word_embeddings=True, ropes=(rope(1e6, 128000),) * 6,
        recurrent=ShortConvConfig(2048, 3), moe=moe(32, 4, 1792), dense={0, 1})),
}  # fmt: skip
PLAIN_MOE = {
    "renormalize": True, "routed_scale": 1.0, "num_groups": 1, "top_groups": 1, "shared_size": 0, "swiglu_limit": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_published(model):
    architecture, raw, expected = PUBLISHED[model]
    config = model_config({**SHARED, "architectures": [architecture], **raw})
    family, layers = MODELS[architecture], config.num_hidden_layers
    plain = {
        "family": family, "qk_norm": family.qk_norm, "dtype": "bfloat16", "tie_word_embeddings": False,
        "qkv_bias": False, "o_bias": False, "mlp_bias": False, "act": "silu", "embed_scale": 1.0,
        "residual_scale": 1.0, "logit_scale": 1.0, "windows": (0,) * layers, "num_nextn_predict_layers": 0,
        "attention_scale": config.head_dim**-0.5, "attention_softcap": 0.0, "logit_softcap": 0.0,
    }  # fmt: skip
    raw = raw.get("text_config", raw)
    plain |= {name: raw[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                           "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
                                           "rms_norm_eps") if name in raw}  # fmt: skip
    expected = {**plain, **expected}
    moe, dense = expected.pop("moe", None), expected.pop("dense", set())
    if "rope" in expected:
        expected["ropes"] = (expected.pop("rope"),) * layers
    assert {name: getattr(config, name) for name in expected} == expected
    assert (config.moe is None) == (moe is None)
    assert moe is None or vars(config.moe) == {**PLAIN_MOE, **moe}
    assert moe is None or [layer.mlp != "dense" for layer in config.layers] == [i not in dense for i in range(layers)]


SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings", "moe_intermediate_size", "num_experts", "num_local_experts",
    "n_routed_experts", "num_experts_per_tok", "moe_num_experts", "eos_token_id", "head_dim", "vision_config",
    "text_config", "block_ff_dim", "shared_intermediate_size", "mamba_n_heads", "mamba_d_head", "mamba_d_state",
    "mamba_d_ssm", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "hybrid_override_pattern",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip


@pytest.mark.parametrize("kept", ["all", "sizes"])
@pytest.mark.parametrize("model", PUBLISHED)
def test_as_transformers_reads_it(model, kept):
    """What transformers makes of the file, written in today's fields, reads the same; also with nothing but sizes.

    Older files leave fields out, or name them otherwise.
    """
    import transformers

    architecture, raw, _ = PUBLISHED[model]
    sizes = SIZES if "mamba_n_heads" not in raw else (*SIZES, "layer_types")  # by default no layer attends
    raw = copy.deepcopy({**SHARED, **raw} if kept == "all" else {name: raw[name] for name in sizes if name in raw})
    if architecture.startswith("Mistral3"):  # transformers' default is tied, and gives way to an LM head in the files
        raw["tie_word_embeddings"] = False
    if architecture.startswith("Gemma3"):
        raw.pop("hidden_act", None)
    if (raw.get("rope_scaling") or {}).get("type") == "su":  # transformers 5 does not look beside this old name
        raw["rope_scaling"]["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    kind = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration").replace("OnOCR", "OnOcr")
    if architecture in ("Gemma3ForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Gemma4ForCausalLM",
                        "Gemma4UnifiedForCausalLM"):  # fmt: skip
        kind += "Text"
    today = json.loads(getattr(transformers, f"{kind}Config")(**copy.deepcopy(raw)).to_json_string(use_diff=False))
    want = model_config({**today, "architectures": [architecture]})
    got = model_config({**raw, "architectures": [architecture]})
    if architecture.startswith("Gemma4"):
        want = replace(want, dtype=got.dtype)
    if architecture == "Gemma3ForConditionalGeneration":  # the class drops the outer list
        want = replace(want, eos_token_ids=(1, 106), dtype=got.dtype)
    if architecture.startswith("PaddleOCR"):  # the class ties whatever the file says
        want = replace(want, tie_word_embeddings=got.tie_word_embeddings)
    assert vars(got) == vars(want)


def read(model, **changes):
    architecture, raw, _ = PUBLISHED[model]
    return model_config({**SHARED, "architectures": [architecture], **raw, **changes})


def test_every_family_is_published():
    assert {architecture for architecture, _, _ in PUBLISHED.values()} == MODELS.keys()


def test_ranks_that_fit():
    for size in (1, 2, 4, 8):
        read("Qwen3-0.6B").check_tensor_parallel(size)


def test_for_length():
    """Windows that hold a whole request are none, and one list of longrope's factors serves all lengths."""
    mistral = read("Mistral-7B-v0.1")
    assert mistral.for_length(4096).windows == (0,) * 32 and mistral.for_length(4097).windows == (4096,) * 32
    phi = read("Phi-4-mini-instruct")
    assert [phi.for_length(n).ropes[0].is_long for n in (4096, 4097)] == [False, True]
    assert not any(rope.is_long for rope in read("phi-4").for_length(16384).ropes)


def test_layers_of_the_warm_up():
    """One of each kind that runs other kernels, and the last."""
    gemma = read("gemma-3-1b-it").one_layer_of_each_kind()
    assert gemma.windows == (512, 0, 512) and [rope.theta for rope in gemma.ropes] == [1e4, 1e6, 1e4]
    air = read("GLM-4.5-Air").one_layer_of_each_kind()
    assert [layer.mlp for layer in air.layers] == ["dense", "experts", "experts"]
    assert read("Llama-3.2-1B").one_layer_of_each_kind().num_hidden_layers == 2


def test_layers_of_gemma4():
    """Heads, K = V, keys and values that layers share, and widths of their MLPs."""
    layers = read("gemma-4-26B-A4B").layers
    assert {(x.head_dim, x.num_key_value_heads, x.keys_are_values, bool(x.window)) for x in layers} == {
        (256, 8, False, True), (512, 2, True, False),
    }  # fmt: skip
    published = read("gemma-4-E2B")
    architecture, raw, _ = PUBLISHED["gemma-4-E2B"]
    ends_sliding = [*raw["text_config"]["layer_types"][:-1], "sliding_attention"]
    raw = {**raw, "architectures": [architecture], "text_config": {**raw["text_config"], "layer_types": ends_sliding}}
    assert model_config({**SHARED, **raw}) == published, "as in transformers"
    layers = published.layers
    assert [layer.shares_kv for layer in layers] == [False] * 15 + [True] * 20
    assert [layer.intermediate_size for layer in layers] == [6144] * 15 + [12288] * 20
    assert [layer.head_dim for layer in layers] == [256, 256, 256, 256, 512] * 7
    kept = published.one_layer_of_each_kind().layers
    assert [(layer.kind[:4], layer.shares_kv) for layer in kept] == [
        ("slid", False), ("full", False), ("full", False), ("slid", True), ("full", True),
    ]  # fmt: skip
    raw["text_config"]["rope_parameters"] = None
    assert model_config({**SHARED, **raw}).ropes == published.ropes, "null is the class's default"


def test_kinds_of_nemotron_that_compile_at_start():
    """A prefill keeps its last tokens alone from the last mixer on; attention before it takes them all."""
    layers = read("Nemotron-3-Nano-30B-A3B").one_layer_of_each_kind().layers
    assert [(layer.mixer, layer.mlp) for layer in layers] == [
        ("mamba2", ""), ("", "experts"), ("attention", ""), ("mamba2", ""), ("", "experts"),
    ]  # fmt: skip


def test_fields_that_other_hybrids_ignore():
    """Granite's class reads none of Falcon's factors, and takes its activation for the convolution, too."""
    architecture, raw, _ = next(row for row in PUBLISHED.values() if row[0] == "GraniteMoeHybridForCausalLM")
    raw = {**SHARED, **raw, "architectures": [architecture]}
    assert model_config({**raw, "mamba_norm_before_gate": True, "ssm_in_multiplier": 2.0}) == model_config(raw)
    with pytest.raises(CheckpointError, match="hidden_act='gelu_pytorch_tanh' is not supported here: only silu"):
        model_config({**raw, "hidden_act": "gelu_pytorch_tanh"})


@pytest.mark.parametrize(("name", "kind", "allowed"), [
    ("granite-4.0-h-tiny", "moe", "'mamba' or 'attention' or 'linear_attention' or 'full_attention'"),
    ("granite-4.0-h-1b", "hybrid", "'mamba' or 'attention' or 'linear_attention' or 'full_attention'"),
    ("Falcon-H1-0.5B", "only_mamba", "'hybrid'"),
    ("Nemotron-3-Nano-30B-A3B", "only_attention",
     "'mamba' or 'attention' or 'linear_attention' or 'full_attention' or 'moe' or 'mlp'"),
])  # fmt: skip
def test_kinds_of_layers_are_those_of_the_architecture(name, kind, allowed):
    """The library's own names, and kinds of other architectures with the same mixer, were taken as well."""
    with pytest.raises(CheckpointError, match=rf"layer_types=\['attention', '{kind}'\] must be a list of {allowed}"):
        read(name, layer_types=["attention", kind], layers_block_type=None)


@pytest.mark.parametrize(("fields", "message"), [
    ({"per_layer_config": {"full_attention": {"head_dim": 64}}}, "has 'full_attention', which is no layer"),
    ({"per_layer_config": {"35": {"head_dim": 64}}}, "has '35', which is no layer"),
    ({"num_kv_shared_layers": 32}, "leaves no layer of a kind with keys and values of its own"),
    ({"num_kv_shared_layers": 40}, "leaves no layer of a kind with keys and values of its own"),
    ({"vocab_size_per_layer_input": 1000}, "vocab_size_per_layer_input must be vocab_size"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' must be None or False or 'vision'"),
    ({"per_layer_config": {"3": {"sliding_window": 7}}}, "per_layer_config: 3 has unsupported fields"),
    ({"per_layer_config": {"3": {"head_dim": 0}}}, "per_layer_config: 3: head_dim=0 must be"),
    ({"per_layer_config": {"3": 7}}, "per_layer_config: 3: fields=7 must be an object"),
    ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "8 attention heads cannot be shared by 3 KV heads"),
])  # fmt: skip
def test_fields_of_gemma4_that_are_refused(fields, message):
    architecture, raw, _ = PUBLISHED["gemma-4-E2B"]
    with pytest.raises(CheckpointError, match=message):
        model_config({**raw, "architectures": [architecture], "text_config": {**raw["text_config"], **fields}})


def test_fields_without_effect():
    """Neutral values, names that no decoder reads, and a setting of the kernels (SmolLM3 has 2)."""
    fields = {"logit_scale": 1.0, "num_experts": 1, "parallel_attn": False, "mlp_multipliers": [1.0, 1.0],
              "attention_chunk_size": None, "pretraining_tp": 2, "unsloth_fixed": True}  # fmt: skip
    assert read("Llama-3.2-1B", **fields) == read("Llama-3.2-1B")


def test_defaults_of_fields_left_out_or_null():
    architecture, raw, _ = PUBLISHED["Qwen3-0.6B"]
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    minimal = {"architectures": [architecture], **{name: raw[name] for name in sizes}}
    nullable = dict.fromkeys(
        ("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "layer_types", "eos_token_id",
         "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "quantization_config", "use_sliding_window")
    )  # fmt: skip
    config = model_config(minimal)
    assert model_config({**minimal, **nullable}) == config
    assert (config.num_key_value_heads, config.head_dim, config.max_position_embeddings) == (16, 64, 32768)
    assert (config.tie_word_embeddings, config.o_bias, config.dtype) == (False, False, "float32")
    assert config.rms_norm_eps == 1e-6 and config.eos_token_ids == () and config.ropes[0].theta == 10_000


def test_yarn_added_to_a_published_config():
    """Qwen's recipe for long contexts leaves max_position_embeddings at 40960, and longer prompts were refused."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read("Qwen3-0.6B", rope_scaling=scaling).max_position_embeddings == 131072


def test_yarn_without_original_length_takes_the_models():
    given = {"rope_scaling": {**YARN, "original_max_position_embeddings": 2048}, "rope_theta": 1e6}
    absent = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e6, "max_position_embeddings": 2048}
    assert RopeScaling.from_json(given) == RopeScaling.from_json(absent)


@pytest.mark.parametrize("rope", [
    {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.5}, YARN,
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25},
])  # fmt: skip
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

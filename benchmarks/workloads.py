"""The requests that are timed, and model directories of the published sizes without weights.

Owns the definitions of the workloads. Knows nothing of engines, and
imports nothing heavy: ``bench.py`` times the imports of the engines.
"""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

HEADLINE_TOKENS = (142_827, 133_966)  # prompt and generated tokens of the headline at scale 1

# Qwen3: hidden_size, intermediate_size, layers, attention heads (8 KV heads of 128 everywhere), tied embeddings
QWEN3 = {
    "0.6b": (1024, 3072, 28, 16, True),
    "1.7b": (2048, 6144, 28, 16, True),
    "4b": (2560, 9728, 36, 32, True),
    "8b": (4096, 12288, 36, 32, False),
    "14b": (5120, 17408, 40, 40, False),
    "32b": (5120, 25600, 64, 64, False),
}


def _shape(architecture: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int,
           vocab: int, positions: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture], "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "vocab_size": vocab, "max_position_embeddings": positions, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "eos_token_id": 2, **more,
    }  # fmt: skip


def _llama3(factor: float) -> dict[str, Any]:
    return {"rope_theta": 500_000.0, "model_type": "llama",
            "rope_scaling": {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 8192}}  # fmt: skip


_GEMMA2: dict[str, Any] = {
    "model_type": "gemma2", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
_QWEN: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "eos_token_id": 151_645}


def _qwen3_5(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, value_heads: int,
             **more: Any) -> dict[str, Any]:
    """A gated delta net of 16 key heads in three of four layers, attention in the fourth."""
    shape = _shape("Qwen3_5ForCausalLM", hidden, intermediate, layers, heads, kv_heads, 256, 248_320, 262_144)
    return shape | {
        "model_type": "qwen3_5_text", "rms_norm_eps": 1e-6, "eos_token_id": 248_044, "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads, "full_attention_interval": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}, **more,
    }  # fmt: skip


def _lfm2(hidden: int, intermediate: int, layers: int, heads: int, attention: tuple[int, ...],
          **more: Any) -> dict[str, Any]:
    """Short convolutions of 3 tokens; attention in the layers ``attention``.

    From config.json of LiquidAI/LFM2-350M, LFM2-1.2B and LFM2-8B-A1B. The dense ones store 3/2 of ``intermediate``.
    """
    shape = _shape("Lfm2ForCausalLM", hidden, intermediate, layers, heads, 8, 64, 65_536, 128_000)
    return shape | {
        "model_type": "lfm2", "norm_eps": 1e-5, "rope_theta": 1_000_000.0, "eos_token_id": 7, "conv_L_cache": 3,
        "conv_bias": False, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True,
        "layer_types": ["full_attention" if i in attention else "conv" for i in range(layers)], **more,
    }  # fmt: skip


def _granite_h(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    """Granite 4 H, as config.json of ibm-granite/granite-4.0-h-tiny and -h-1b: Mamba-2 in 36 of 40 layers."""
    layers = ["mamba"] * 5 + (["attention"] + ["mamba"] * 9) * 3 + ["attention"] + ["mamba"] * 4
    shape = _shape("GraniteMoeHybridForCausalLM", hidden, intermediate, 40, heads, kv_heads, head_dim, 100_352, 131_072)
    return shape | {
        "model_type": "granitemoehybrid", "layer_types": layers, "mamba_n_heads": 48, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
        "position_embedding_type": "nope", "tie_word_embeddings": True, "eos_token_id": 100_257,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 1 / 128, **more,
    }  # fmt: skip


def _gemma4(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, full_kv_heads: int | None,
            positions: int = 262_144, **more: Any) -> dict[str, Any]:
    """Windows in five of six layers; full layers have heads of 512 and, with KV heads of their own, K = V."""
    shape = _shape("Gemma4ForCausalLM", hidden, intermediate, layers, heads, kv_heads, 256, 262_144, positions)
    return shape | {
        "model_type": "gemma4_text", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "eos_token_id": 1,
        "sliding_window": 1024, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * (layers // 6),
        "num_global_key_value_heads": full_kv_heads, "attention_k_eq_v": full_kv_heads is not None,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, **more,
    }  # fmt: skip


OTHERS = {  # published shapes of other families; model_type is for other engines
    "llama-3.2-1b": _shape("LlamaForCausalLM", 2048, 8192, 16, 32, 8, 64, 128_256, 131_072, **_llama3(32.0))
    | {"tie_word_embeddings": True},
    "llama-3.1-8b": _shape("LlamaForCausalLM", 4096, 14_336, 32, 32, 8, 128, 128_256, 131_072, **_llama3(8.0)),
    "qwen2.5-0.5b": _shape("Qwen2ForCausalLM", 896, 4864, 24, 14, 2, 64, 151_936, 32_768, model_type="qwen2")
    | _QWEN | {"tie_word_embeddings": True},
    "qwen2.5-7b": _shape("Qwen2ForCausalLM", 3584, 18_944, 28, 28, 4, 128, 152_064, 131_072, model_type="qwen2")
    | _QWEN,
    "mistral-nemo": _shape("MistralForCausalLM", 5120, 14_336, 40, 32, 8, 128, 131_072, 128_000, model_type="mistral",
                           rope_theta=1_000_000.0, sliding_window=None),
    "phi-3-mini": _shape("Phi3ForCausalLM", 3072, 8192, 32, 32, 32, 96, 32_064, 4096, model_type="phi3",
                         rope_theta=10_000.0, sliding_window=2047, original_max_position_embeddings=4096,
                         bos_token_id=1, eos_token_id=32_000, pad_token_id=32_000),
    "gemma-2-9b": _shape("Gemma2ForCausalLM", 3584, 14_336, 42, 16, 8, 256, 256_000, 8192, **_GEMMA2),
    "gemma-2-27b": _shape("Gemma2ForCausalLM", 4608, 36_864, 46, 32, 16, 128, 256_000, 8192, **_GEMMA2)
    | {"query_pre_attn_scalar": 144},
    "gemma-3-12b": _shape(
        "Gemma3ForCausalLM", 3840, 15_360, 48, 16, 8, 256, 262_208, 131_072, model_type="gemma3_text",
        rms_norm_eps=1e-6, sliding_window=1024, sliding_window_pattern=6, rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0, rope_scaling={"rope_type": "linear", "factor": 8.0},
        query_pre_attn_scalar=256, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True,
    ),
    "gemma-4-26b-a4b": _gemma4(2816, 2112, 30, 16, 8, 2, enable_moe_block=True, num_experts=128, top_k_experts=8,
                               moe_intermediate_size=704),
    "gemma-4-31b": _gemma4(5376, 21_504, 60, 32, 16, 4),
    "gemma-4-12b": _gemma4(3840, 15_360, 48, 16, 8, 1),
    "gemma-4-e4b": _gemma4(2560, 10_240, 42, 8, 2, None, 131_072, sliding_window=512, hidden_size_per_layer_input=256,
                           vocab_size_per_layer_input=262_144, num_kv_shared_layers=18),
    "olmo-3-7b": _shape(
        "Olmo3ForCausalLM", 4096, 11_008, 32, 32, 32, 128, 100_278, 65_536, model_type="olmo3", rms_norm_eps=1e-6,
        sliding_window=4096, rope_theta=500_000.0,
        rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
                      "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
    ),
    "qwen3-30b-a3b": _shape(
        "Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, 128, 151_936, 40_960, model_type="qwen3_moe", num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[],
    ) | _QWEN,
    "lfm2-350m": _lfm2(1024, 4608, 16, 16, (2, 5, 8, 10, 12, 14)),
    "lfm2-1.2b": _lfm2(2048, 8192, 16, 32, (2, 5, 8, 10, 12, 14)),
    "lfm2-8b-a1b": _lfm2(
        2048, 7168, 24, 32, (2, 6, 10, 14, 18, 21), architectures=["Lfm2MoeForCausalLM"], model_type="lfm2_moe",
        num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792, num_dense_layers=2,
    ),
    "granite-4-h-tiny": _granite_h(1536, 512, 12, 4, 128, shared_intermediate_size=1024, num_local_experts=64,
                                   num_experts_per_tok=6, logits_scaling=6.0),
    "granite-4-h-1b": _granite_h(1536, 4096, 12, 4, 128, shared_intermediate_size=4096, num_local_experts=0,
                                 num_experts_per_tok=0, logits_scaling=6.0),
    "nemotron-3-nano": _shape(  # config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
        "NemotronHForCausalLM", 2688, 1856, 52, 32, 2, 128, 131_072, 262_144, model_type="nemotron_h",
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", layer_norm_epsilon=1e-5,
        mamba_num_heads=64, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4, use_conv_bias=True,
        n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856, n_shared_experts=1,
        moe_shared_expert_intermediate_size=3712, routed_scaling_factor=2.5, mlp_hidden_act="relu2",
    ),
    "qwen3.5-0.8b": _qwen3_5(1024, 3584, 24, 8, 2, 16, tie_word_embeddings=True),
    "qwen3.5-9b": _qwen3_5(4096, 12_288, 32, 16, 4, 32),
    "qwen3.5-27b": _qwen3_5(5120, 17_408, 64, 24, 4, 48),
    "qwen3.5-35b-a3b": _qwen3_5(
        2048, 512, 40, 16, 2, 32, architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text",
        num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    ),
}  # fmt: skip
for _size, _layers, _experts in (("20b", 24, 32), ("120b", 36, 128)):
    OTHERS[f"gpt-oss-{_size}"] = _shape(
        "GptOssForCausalLM", 2880, 2880, _layers, 64, 8, 64, 201_088, 131_072, model_type="gpt_oss",
        eos_token_id=200_002, pad_token_id=199_999, attention_bias=True, num_local_experts=_experts,
        num_experts_per_tok=4, sliding_window=128, swiglu_limit=7.0, rope_theta=150_000,
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                      "original_max_position_embeddings": 4096},
        layer_types=["sliding_attention", "full_attention"] * (_layers // 2),
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ]},
    )  # fmt: skip
OTHERS["qwen3-30b-a3b-fp8"] = OTHERS["qwen3-30b-a3b"] | {  # the published FP8 weights
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
_IMAGES = {"image_token_id": 151_655, "video_token_id": 151_656, "vision_start_token_id": 151_652,
           "vision_end_token_id": 151_653}  # fmt: skip
_TOWER = {"in_channels": 3, "num_heads": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
VISION: dict[str, dict[str, Any]] = {  # shapes with a vision tower, and their image processors
    "qwen2.5-vl-7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", **_IMAGES,
        "text_config": OTHERS["qwen2.5-7b"] | {"model_type": "qwen2_5_vl_text", "max_position_embeddings": 128_000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        "vision_config": _TOWER | {"model_type": "qwen2_5_vl_vision", "depth": 32, "hidden_size": 1280,
            "intermediate_size": 3420, "out_hidden_size": 3584, "patch_size": 14, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu"},
        "processor": {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 12_845_056}},
    },
    "qwen3-vl-8b": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", **_IMAGES,
        "text_config": _shape("Qwen3VLTextModel", 4096, 12_288, 36, 32, 8, 128, 151_936, 262_144) | {
            "model_type": "qwen3_vl_text", "rms_norm_eps": 1e-6, "eos_token_id": 151_645,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
                                "mrope_interleaved": True}},
        "vision_config": _TOWER | {"model_type": "qwen3_vl_vision", "depth": 27, "hidden_size": 1152,
            "intermediate_size": 4304, "out_hidden_size": 4096, "patch_size": 16, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24], "hidden_act": "gelu_pytorch_tanh"},
        "processor": {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
                      "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    },
    "lightonocr-1b": {
        "architectures": ["LightOnOcrForConditionalGeneration"], "model_type": "lighton_ocr",
        "image_token_id": _IMAGES["image_token_id"], "spatial_merge_size": 2, "tie_word_embeddings": True,
        "text_config": _shape("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 128, 151_936, 16_384) | _QWEN | {
            "model_type": "qwen3", "tie_word_embeddings": True},
        "vision_config": {"model_type": "pixtral", "num_channels": 3, "hidden_size": 1024, "intermediate_size": 4096,
            "num_hidden_layers": 24, "num_attention_heads": 16, "head_dim": 64, "patch_size": 14, "image_size": 1540,
            "hidden_act": "silu", "rope_theta": 10_000.0},
        "processor": {"image_processor_type": "PixtralImageProcessor", "patch_size": 14,
                      "size": {"longest_edge": 1540}},
    },
}  # fmt: skip
SIZES = (*QWEN3, *OTHERS, *VISION)


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, how many tokens each of them generates, and which of them its rate counts."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]
    counts_prompts: bool  # the rate is of all tokens, not of generated ones
    embeds: bool = False  # the prompts are embedded; nothing is generated
    images: list[bytes] | None = None  # one for each prompt, encoded
    is_ready: bool = False  # their pixels are there before the time is taken

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)

    @property
    def num_counted_tokens(self) -> int:
        return self.num_output_tokens + self.counts_prompts * self.num_prompt_tokens

    def redrawn(self, repeat: int, vocab_size: int) -> "Workload":
        """The same lengths with other token ids, so that a repeat does not hit the prefix cache.

        Repeat 0 keeps the ids as they are (but inside the vocabulary).
        """
        num_ids = min(10_001, vocab_size)
        if self.images is not None:
            return replace(self, images=[page(i + 1009 * repeat) for i in range(len(self.images))])
        prompts = [[(token + 1009 * repeat) % num_ids for token in prompt] for prompt in self.prompts]
        return replace(self, prompts=prompts)


def headline(scale: int = 1) -> Workload:
    """256 prompts of 100 to 1,024 tokens, each with 100 to 1,024 tokens to generate."""
    rng = Random(0)  # the draws of ``random.seed(0)``
    num, shortest, longest = 256 // scale, 100 // scale, 1024 // scale
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(shortest, longest))] for _ in range(num)]
    workload = Workload("headline", prompts, [rng.randint(shortest, longest) for _ in range(num)], False)
    totals = workload.num_prompt_tokens, workload.num_output_tokens
    if scale == 1 and totals != HEADLINE_TOKENS:
        raise AssertionError(f"the headline draws {totals} tokens, not {HEADLINE_TOKENS}: the generator has changed")
    return workload


def single(scale: int = 1) -> Workload:
    """One prompt of 128 tokens, 512 to generate."""
    rng = Random(1)
    return Workload("single", [[rng.randint(0, 10_000) for _ in range(128 // scale)]], [512 // scale], False)


def prefill(scale: int = 1) -> Workload:
    """128 prompts of 2,048 tokens, one token to generate."""
    rng = Random(2)
    num = 128 // scale
    prompts = [[rng.randint(0, 10_000) for _ in range(2048 // scale)] for _ in range(num)]
    return Workload("prefill", prompts, [1] * num, True)


def sharedprefix(scale: int = 1) -> Workload:
    """512 prompts that begin with the same 1,024 tokens and go on with 64 of their own, 64 to generate."""
    rng = Random(3)
    num, own = 512 // scale, max(1, 64 // scale)
    common = [rng.randint(0, 10_000) for _ in range(1024 // scale)]
    prompts = [common + [rng.randint(0, 10_000) for _ in range(own)] for _ in range(num)]
    return Workload("sharedprefix", prompts, [own] * num, True)


def batch32(scale: int = 1) -> Workload:
    """32 prompts of 744 tokens, 512 to generate: a context of 1,000 tokens on average."""
    rng = Random(4)
    prompts = [[rng.randint(0, 10_000) for _ in range(744 // scale)] for _ in range(32)]
    return Workload("batch32", prompts, [512 // scale] * 32, False)


def batch256(scale: int = 1) -> Workload:
    """256 prompts of 128 tokens, 512 to generate."""
    rng = Random(6)
    prompts = [[rng.randint(0, 10_000) for _ in range(128 // scale)] for _ in range(256)]
    return Workload("batch256", prompts, [512 // scale] * 256, False)


def short(scale: int = 1) -> Workload:
    """2,048 prompts of 32 tokens, with 8 to 64 tokens to generate: requests come and go at every step."""
    rng = Random(5)
    num, length, longest = 2048 // scale, max(1, 32 // scale), max(1, 64 // scale)
    prompts = [[rng.randint(0, 10_000) for _ in range(length)] for _ in range(num)]
    return Workload("short", prompts, [rng.randint(max(1, 8 // scale), longest) for _ in range(num)], False)


def prefillshort(scale: int = 1) -> Workload:
    """16,384 prompts of 64 tokens, one token to generate."""
    rng = Random(6)
    num, length = 16_384 // scale, max(1, 64 // scale)
    prompts = [[rng.randint(0, 10_000) for _ in range(length)] for _ in range(num)]
    return Workload("prefillshort", prompts, [1] * num, True)


def embed(scale: int = 1) -> Workload:
    """Prompts like those of ``prefill``."""
    return as_embedding(prefill(scale), "embed")


def embedshort(scale: int = 1) -> Workload:
    """Prompts like those of ``prefillshort``."""
    return as_embedding(prefillshort(scale), "embedshort")


def embedmixed(scale: int = 1) -> Workload:
    """512 prompts of 8 to 1,024 tokens, half of them shorter than 91."""
    rng = Random(7)
    lengths = [max(1, round(8 * 128 ** rng.random()) // scale) for _ in range(512 // scale)]
    prompts = [[rng.randint(0, 10_000) for _ in range(length)] for length in lengths]
    return Workload("embedmixed", prompts, [0] * len(prompts), True, embeds=True)


def published(prompt_tokens: int, output_tokens: int, scale: int = 1) -> Workload:
    """A row of ``PUBLISHED``. The last requests run beside empty slots, so fewer requests give a lower rate."""
    rng = Random(prompt_tokens + output_tokens)
    num, length = PUBLISHED[prompt_tokens, output_tokens] // scale, max(1, prompt_tokens // scale)
    prompts = [[rng.randint(0, 10_000) for _ in range(length)] for _ in range(num)]
    name = f"published-{prompt_tokens}-{output_tokens}"
    return Workload(name, prompts, [max(1, output_tokens // scale)] * num, False)


def as_embedding(workload: Workload, name: str) -> Workload:
    """The same lengths with other tokens: the prefix cache may hold the prompts."""
    prompts = [[(token + 500) % 10_001 for token in prompt] for prompt in workload.prompts]
    return replace(workload, name=name, prompts=prompts, max_tokens=[0] * len(prompts), embeds=True)


def pages(scale: int = 1) -> Workload:
    """256 JPEG pages of 1,280 x 1,700 pixels, each with 32 tokens of text; 256 tokens to generate."""
    num, token = 256 // scale, _IMAGES["image_token_id"]
    prompts = [[_IMAGES["vision_start_token_id"], token, _IMAGES["vision_end_token_id"], *range(1000, 1032)]] * num
    return Workload("pages", prompts, [256 // scale] * num, False, images=[page(i, scale) for i in range(num)])


def readypages(scale: int = 1) -> Workload:
    """The same, with the pixels of all pages made before."""
    return replace(pages(scale), name="readypages", is_ready=True)


def page(seed: int, scale: int = 1) -> bytes:
    """A JPEG with lines of random words, as the scan of a page has."""
    from PIL import Image

    rng = Random(seed)
    width, height = 1280 // scale, 1700 // scale
    image = Image.new("RGB", (width, height), "white")
    for top in range(40, height - 40, 22):
        image.paste(_line(rng.randrange(64)), (rng.randint(20, 60), top))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


@cache
def _line(seed: int) -> Any:
    from PIL import Image, ImageDraw

    rng, image = Random(seed), Image.new("RGB", (1200, 20), "white")
    ImageDraw.Draw(image).text((0, 4), " ".join(f"{rng.getrandbits(28):x}" for _ in range(24)), fill="black")
    return image


GENERATION = headline, single, prefill, sharedprefix, batch32, batch256, short, prefillshort
# The table that TensorRT-LLM publishes of offline runs (performance overview: Llama-3.1-8B with FP8 weights and KV
# cache, 1,500 to 30,000 requests): tokens in and out -> requests of ours, as many as take a few minutes. The last two
# rows are of its table of gpt-oss.
PUBLISHED = {
    (128, 128): 3000, (128, 2048): 3000, (500, 2000): 3000, (1000, 1000): 3000, (2048, 128): 2000, (2048, 2048): 1500,
    (128, 4096): 1500, (1000, 2000): 1500, (5000, 500): 1000, (20000, 2000): 141, (8192, 1024): 300,
    (1024, 8192): 400,
}  # fmt: skip
# Options of these runs; see "How many sequences at once" in docs/guide.md. 16,896 tokens: a tile of 128 for each of 132
# SMs.
PUBLISHED_OPTIONS = {"max_num_seqs": 1024, "max_num_batched_tokens": 16_896, "gpu_memory_utilization": 0.95}
PUBLISHED_ROWS = {f"published-{i}-{o}": partial(published, i, o) for i, o in PUBLISHED}

WORKLOADS: dict[str, Callable[[int], Workload]] = {
    **{make.__name__: make for make in (*GENERATION, embed, embedshort, embedmixed)},
    **PUBLISHED_ROWS,
    "pages": pages,
    "readypages": readypages,
}


def write_model(directory: str | Path, size: str, quantization: str | None = None) -> str:
    """Write the ``config.json`` of a model of ``size``, a key of SIZES, maybe in "int4" or "nvfp4".

    Returns the directory.
    """
    shapes = OTHERS | VISION
    config = {"torch_dtype": "bfloat16", **(shapes[size] if size in shapes else qwen3(size))}
    if processor := config.pop("processor", None):
        processor = {"image_processor_type": "Qwen2VLImageProcessor", **processor}
        Path(directory, "preprocessor_config.json").write_text(json.dumps(processor))
    if quantization == "int4":  # symmetric groups of 128, as GPTQ's
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True,
                                         "desc_act": False, "dynamic": {"-:.*mlp.gate$": {}}}  # fmt: skip
    if quantization == "nvfp4":
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*mlp.gate"]}
    Path(directory, "config.json").write_text(json.dumps(config, indent=2))
    return str(directory)


def qwen3(size: str) -> dict:
    hidden, intermediate, layers, heads, tied = QWEN3[size]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
    }

"""The supported architectures: ``MODELS``, a row for each name that ``architectures`` of a ``config.json`` may have.

``decoder.py`` is the model of them all; a row names the differences, and the fields that published files leave out.
``config_reader.py`` reads ``config.json`` by it. Imports no torch.
"""

from nanovllm.models.families import (
    CORRECTION,
    EPS,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM,
    GPT_OSS,
    MINISTRAL3,
    MIXTRAL,
    OLMO2,
    POST,
    QWEN,
    QWEN3_5,
    QWEN3_NEXT,
    QWEN3_NEXT_MOE,
    VISION,
    Family,
)

MODELS = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(windows="all", reads=("sliding_window",), defaults={"sliding_window": 4096}),
    "Ministral3ForCausalLM": MINISTRAL3,
    "Mistral3ForConditionalGeneration": MINISTRAL3._replace(**VISION),
    "Phi3ForCausalLM": Family(
        windows="all", reads=("sliding_window", "partial_rotary_factor"),
        defaults=EPS | {"original_max_position_embeddings": 4096},
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False, **QWEN),
    "Qwen3ForCausalLM": Family(qk_norm="head", **QWEN),
    "Qwen2_5_VLForConditionalGeneration": Family(
        qkv_bias=True, o_bias=False, windows="late", reads=QWEN["reads"],
        defaults=QWEN["defaults"] | EPS | {"max_window_layers": 80, "rope_theta": 1e6, "num_key_value_heads": 8},
        **VISION,
    ),
    "Qwen3VLForConditionalGeneration": Family(qk_norm="head", defaults={"rope_theta": 5e5, "head_dim": 128}, **VISION),
    "HunYuanDenseV1ForCausalLM": Family(
        qk_norm="head", norms_rotated=True, reads=("alpha", "use_qk_norm"),
        defaults=EPS | {"max_position_embeddings": 2048},
        renamed=(("query_layernorm", "q_norm"), ("key_layernorm", "k_norm")),
    ),
    "SmolLM3ForCausalLM": Family(
        windows="unrotated", reads=("sliding_window", "use_sliding_window", "no_rope_layers"),
        defaults={"use_sliding_window": False, "no_rope_layer_interval": 4, "tie_word_embeddings": True,
                  "rope_theta": 2_000_000.0},
    ),
    "GraniteForCausalLM": Family(
        reads=("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        defaults={"attention_multiplier": 1.0},
    ),
    "SeedOssForCausalLM": Family(
        reads=("attention_out_bias",), defaults={"head_dim": 128, "attention_bias": True, "attention_out_bias": False}
    ),
    "Ernie4_5ForCausalLM": Family(
        interleaved=True, defaults=EPS | {"head_dim": 128, "rope_theta": 500_000.0, "tie_word_embeddings": True}
    ),
    "Glm4ForCausalLM": Family(
        o_bias=False, post_norm=True, interleaved=True, reads=("partial_rotary_factor",),
        defaults=GLM | {"attention_bias": True, "rms_norm_eps": 1.5625e-7, "eos_token_id": [151329, 151336, 151338]},
        renamed=(("post_self_attn_layernorm", "mixer_post_norm"), ("post_mlp_layernorm", "mlp_post_norm")),
    ),
    "GemmaForCausalLM": Family(norm_offset=1.0, embed_scaled=True, defaults=GEMMA),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3._replace(
        renamed=(("language_model.", ""), *GEMMA3.renamed), skipped=r".*(vision_tower|multi_modal_projector)\..*"
    ),
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO2._replace(
        windows="pattern", plain_window_rope=True, reads=("sliding_window",),
        defaults=EPS | {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500_000.0},
    ),
    "Exaone4ForCausalLM": Family(
        qk_norm="head", pre_norm=False, post_norm=True, windows="pattern", rotates_windows_only=True,
        reads=("sliding_window",), defaults=EPS | {"sliding_window": 4096, "sliding_window_pattern": 4},
        renamed=POST,
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm="head", experts="softmax", windows="all", reads=("sliding_window", "use_sliding_window"),
        defaults={"use_sliding_window": False, "sliding_window": 4096, "norm_topk_prob": False},
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=True, o_bias=False, experts="softmax", has_shared_gate=True, reads=("sliding_window",),
        defaults={"use_sliding_window": False, "norm_topk_prob": False, "shared_expert_intermediate_size": 5632},
    ),
    "MixtralForCausalLM": Family(
        experts="softmax", windows="all", reads=("sliding_window",), defaults=EPS | {"rope_theta": 1_000_000.0},
        renamed=MIXTRAL,
    ),
    "OlmoeForCausalLM": Family(qk_norm="full", experts="softmax", defaults=EPS | {"norm_topk_prob": False}),
    "Glm4MoeForCausalLM": Family(
        o_bias=False, experts="sigmoid", has_correction_bias=True,
        reads=("partial_rotary_factor", "use_qk_norm", "routed_scaling_factor", "n_group", "topk_group"),
        defaults=EPS | {"partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "n_shared_experts": 1,
                         "num_nextn_predict_layers": 1},
        renamed=((".shared_experts.", ".shared_expert."),),
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        qk_norm="head", experts="softmax", experts_transposed=True,
        defaults={"norm_topk_prob": True, "rope_theta": 5e5}, **VISION,
    ),
    "MiniMaxM2ForCausalLM": Family(
        qk_norm="full", experts="sigmoid", has_correction_bias=True, reads=("partial_rotary_factor", "use_qk_norm"),
        defaults={"head_dim": 128, "rope_theta": 5e6, "norm_topk_prob": True},
        renamed=(*MIXTRAL, (".mlp.e_score_correction_bias", CORRECTION)),
    ),
    "HYV3ForCausalLM": Family(
        qk_norm="head", experts="sigmoid", has_correction_bias=True, reads=("routed_scaling_factor",),
        defaults=EPS | {"head_dim": 128, "rope_theta": 11_158_840.0, "router_scaling_factor": 2.826,
                        "first_k_dense_replace": 1, "num_shared_experts": 1},
        renamed=((".shared_mlp.", ".shared_expert."), (".shared_experts.", ".shared_expert."),
                 (".router.gate.", ".gate."), (".mlp.expert_bias", CORRECTION),
                 (".mlp.e_score_correction_bias", CORRECTION)),
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        interleaved=True, experts="softmax", has_correction_bias=True,
        defaults=EPS | {"rope_theta": 500_000.0, "tie_word_embeddings": True, "moe_layer_start_index": 1,
                        "moe_num_shared_experts": 2, "moe_k": 6, "norm_topk_prob": True},
        renamed=((".gate.moe_statics.", ".gate."), (".moe_statics.", ".gate."),
                 (".shared_experts.", ".shared_expert.")),
    ),
    "GptOssForCausalLM": GPT_OSS,
    "Qwen3NextForCausalLM": QWEN3_NEXT._replace(**QWEN3_NEXT_MOE),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5._replace(**QWEN3_NEXT_MOE),
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5._replace(**QWEN3_NEXT_MOE),
}  # fmt: skip

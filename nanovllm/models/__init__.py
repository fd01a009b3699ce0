"""The supported architectures: ``MODELS``, a row for each name that ``architectures`` of a ``config.json`` may have.

``decoder.py`` is the model of them all; a row names the differences, and the fields that published files leave out.
``families.py`` describes its columns. First come the parts that several rows share.
``config_reader.py`` reads ``config.json`` by it. Imports no torch.
"""

from typing import Any

from nanovllm.models.families import TOWER, Family
from nanovllm.models.spellings import of_falcon_h1, of_granite_h, of_lfm2, of_nemotron_h

QWEN: dict[str, Any] = {
    "windows": "late", "reads": ("sliding_window", "use_sliding_window"),
    "defaults": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "vocab_size": 256_000,
    "eos_token_id": 1, "max_position_embeddings": 8192,
}  # fmt: skip
GEMMA_NORMS = (
    ("post_attention_layernorm", "mixer_post_norm"),
    ("pre_feedforward_layernorm", "post_attention_layernorm"),
    ("post_feedforward_layernorm", "mlp_post_norm"),
)
GEMMA3 = Family(
    qk_norm="head", post_norm=True, norm_offset=1.0, embed_scaled=True, windows="pattern", plain_window_rope=True,
    reads=("sliding_window", "rope_local_base_freq", "query_pre_attn_scalar"),
    defaults=GEMMA | {
        "sliding_window": 4096, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    renamed=GEMMA_NORMS,
)  # fmt: skip
GEMMA4 = Family(
    decoder="gemma4", qk_norm="head", v_norm=True, post_norm=True, embed_scaled=True, windows="pattern",
    experts="softmax", sparse_mlp="dense and experts",
    reads=(
        "sliding_window", "final_logit_softcapping", "attention_multiplier", "attention_k_eq_v", "global_head_dim",
        "num_global_key_value_heads", "per_layer_config", "num_kv_shared_layers", "use_double_wide_mlp",
        "hidden_size_per_layer_input", "enable_moe_block", "use_bidirectional_attention",
    ),
    defaults=GEMMA | {
        "attention_multiplier": 1.0, "sliding_window": 512, "sliding_window_pattern": 6, "global_head_dim": 512,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_144, "max_position_embeddings": 131_072,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    },
    renamed=(
        ("language_model.", ""), (".router.proj.", ".mlp.gate."), (".router.scale", ".mlp.gate_norm.weight"),
        (".router.per_expert_scale", ".mlp.expert_scales"), (".experts.", ".mlp.experts."),
        ("pre_feedforward_layernorm_2", "mlp.experts_norm"),
        ("post_feedforward_layernorm_1", "mlp_post_norm.dense_norm"),
        ("post_feedforward_layernorm_2", "mlp_post_norm.experts_norm"), *GEMMA_NORMS,
    ),
)  # fmt: skip
GEMMA4_UNIFIED = GEMMA4._replace(
    defaults=GEMMA4.defaults | {
        "sliding_window": 1024, "max_position_embeddings": 262_144, "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    },
)  # fmt: skip
GEMMA4_TOWERS: dict[str, Any] = {
    "renamed": (("vision_embedder.", "embed_vision."), (".multimodal_embedder.", "."), *GEMMA4.renamed),
    "tower": TOWER, "skipped": r"(?:model\.)?(?:audio_tower|embed_audio)\..+",
}  # fmt: skip
POST = (("post_attention_layernorm", "mixer_post_norm"), ("post_feedforward_layernorm", "mlp_post_norm"))
EPS = {"rms_norm_eps": 1e-5}
OLMO2 = Family(qk_norm="full", pre_norm=False, post_norm=True, defaults=EPS, renamed=POST)
VISION: dict[str, Any] = {
    # transformers has one module less around SigLIP since version 5
    "renamed": (("language_model.", ""), ("vision_tower.vision_model.", "vision_tower.")), "tower": TOWER,
}  # fmt: skip
QWEN2_VL = Family(
    qkv_bias=True, o_bias=False, windows="late", reads=QWEN["reads"],
    defaults=QWEN["defaults"] | EPS | {"max_window_layers": 80, "rope_theta": 1e6, "num_key_value_heads": 8}, **VISION,
)
GLM4_NORMS = (("post_self_attn_layernorm", "mixer_post_norm"), ("post_mlp_layernorm", "mlp_post_norm"))
GLM4V = Family(
    qkv_bias=True, o_bias=False, post_norm=True, interleaved=True, reads=("partial_rotary_factor",),
    defaults=EPS | {"rope_theta": 1e4}, renamed=VISION["renamed"] + GLM4_NORMS, tower=TOWER,
)
MIXTRAL = ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."))
CORRECTION = ".mlp.gate.e_score_correction_bias"
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MINISTRAL3 = Family(
    windows="all", reads=("sliding_window", "llama_4_scaling_beta"),
    defaults=EPS | {"head_dim": 128, "rope_parameters": MINISTRAL3_ROPE, "max_position_embeddings": 262_144,
                    "eos_token_id": 2},
)
QWEN3_NEXT = Family(
    qk_norm="head", norm_offset=1.0, recurrent="gated_delta_net", groups_delta_inputs=True, output_gate=True,
    reads=("partial_rotary_factor", "attn_output_gate"),
    defaults={
        "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    renamed=((".conv1d.weight", ".conv_weight"), ("in_proj_qkvz", "in_proj")), skipped=r"mtp\..*",
)
QWEN3_NEXT_MOE: dict[str, Any] = {
    "experts": "softmax", "has_shared_gate": True,
    "defaults": QWEN3_NEXT.defaults | {"shared_expert_intermediate_size": 512},
}  # fmt: skip
MAMBA2 = ((".conv1d.weight", ".conv_weight"), (".conv1d.bias", ".conv_bias"), (".mamba.norm.", ".mamba.gate_norm."))
GRANITE_MAMBA2 = Family(
    recurrent="mamba2", spelled=of_granite_h,
    reads=("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
           "position_embedding_type", "no_rope_layers"),
    defaults={
        "attention_multiplier": 1.0, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
        "mamba_d_conv": 4, "mamba_expand": 2, "shared_intermediate_size": 1024,
    },
    renamed=(*MAMBA2, (".shared_mlp.input_linear.", ".mlp.gate_up_proj."),
             (".shared_mlp.output_linear.", ".mlp.down_proj.")),
)
FALCON_H1 = Family(
    recurrent="mamba2", spelled=of_falcon_h1,
    reads=("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
           "attention_out_multiplier", "mlp_multipliers", "position_embedding_type", "no_rope_layers"),
    defaults=EPS | {
        "position_embedding_type": "rope", "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
        "mamba_d_conv": 4, "mamba_d_ssm": 1024, "mamba_rms_norm": False, "mamba_norm_before_gate": True,
        "max_position_embeddings": 8192, "eos_token_id": 2,
    },
    renamed=(*MAMBA2, (".feed_forward.", ".mlp."), ("pre_ff_layernorm", "post_attention_layernorm"),
             ("final_layernorm", "norm")),
)
QWEN3_5 = QWEN3_NEXT._replace(
    groups_delta_inputs=False,
    renamed=(("language_model.", ""), (".conv1d.weight", ".conv_weight")), skipped=r"mtp\..*", tower=TOWER,
)
LFM2 = Family(
    qk_norm="head", recurrent="short_conv", spelled=of_lfm2,
    defaults={"conv_L_cache": 3, "rope_theta": 1e6, "block_auto_adjust_ff_dim": True, "tie_word_embeddings": True,
              "max_position_embeddings": 128_000, "eos_token_id": 2},
    renamed=((".conv.conv.weight", ".conv.conv_weight"), ("operator_norm", "input_layernorm"),
             ("ffn_norm", "post_attention_layernorm"), ("embedding_norm", "norm"), (".feed_forward.", ".mlp."),
             *MIXTRAL[1:], (".self_attn.out_proj", ".self_attn.o_proj"), ("q_layernorm", "q_norm"),
             ("k_layernorm", "k_norm")),
)  # fmt: skip

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
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_VL,
    "Qwen3VLForConditionalGeneration": Family(qk_norm="head", defaults={"rope_theta": 5e5, "head_dim": 128}, **VISION),
    **dict.fromkeys(
        ("LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration"),  # transformers', and in files
        Family(qk_norm="head", **QWEN | {"defaults": QWEN["defaults"] | {"tie_word_embeddings": True}}, **VISION),
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
    "GraniteMoeHybridForCausalLM": GRANITE_MAMBA2._replace(
        experts="softmax", without_experts=GRANITE_MAMBA2,
        renamed=(*MAMBA2, (".shared_mlp.input_linear.", ".mlp.shared_expert.gate_up_proj."),
                 (".shared_mlp.output_linear.", ".mlp.shared_expert.down_proj."),
                 (".block_sparse_moe.router.layer.", ".mlp.gate."), (".block_sparse_moe.router.", ".mlp.gate."),
                 (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
                 (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
                 (".block_sparse_moe.", ".mlp.")),
    ),
    "FalconH1ForCausalLM": FALCON_H1,
    "NemotronHForCausalLM": Family(
        recurrent="mamba2", spelled=of_nemotron_h, ungated=True, experts="sigmoid", has_correction_bias=True,
        reads=("position_embedding_type", "no_rope_layers", "routed_scaling_factor", "n_group", "topk_group"),
        defaults=EPS | {
            "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
            "head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688, "mlp_hidden_act": "relu2", "max_position_embeddings": 4096,
        },
        renamed=(("backbone.", "model."), ("model.embeddings.", "model.embed_tokens."),
                 *((f".mixer.{name}", f".mamba.{name}") for name in ("in_proj", "out_proj", "A_log", "D", "dt_bias")),
                 *((old.replace(".conv1d", ".mixer.conv1d").replace(".mamba.", ".mixer."), f".mamba.{new}") for old, new
                   in ((".conv1d.weight", "conv_weight"), (".conv1d.bias", "conv_bias"), (".mamba.norm", "gate_norm"))),
                 *((f".mixer.{x}_proj.", f".self_attn.{x}_proj.") for x in "qkvo"),
                 (".mixer.shared_experts.", ".mlp.shared_expert."),
                 (".mixer.experts.up_proj", ".mlp.experts.gate_up_proj"), (".mixer.", ".mlp."),
                 ("model.norm_f.", "model.norm.")),
        skipped=r"mtp\..*",
    ),
    "SeedOssForCausalLM": Family(
        reads=("attention_out_bias",), defaults={"head_dim": 128, "attention_bias": True, "attention_out_bias": False}
    ),
    "Ernie4_5ForCausalLM": Family(
        interleaved=True, defaults=EPS | {"head_dim": 128, "rope_theta": 500_000.0, "tie_word_embeddings": True}
    ),
    "Glm4ForCausalLM": Family(
        o_bias=False, post_norm=True, interleaved=True, reads=("partial_rotary_factor",),
        defaults={"partial_rotary_factor": 0.5, "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-7,
                  "eos_token_id": [151329, 151336, 151338]},
        renamed=GLM4_NORMS,
    ),
    "Glm4vForConditionalGeneration": GLM4V,
    "GlmOcrForConditionalGeneration": GLM4V._replace(qkv_bias=False),
    "PaddleOCRVLForConditionalGeneration": Family(
        qkv_bias=False, o_bias=False,
        defaults=EPS | {"head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True, "eos_token_id": 2},
        renamed=(*VISION["renamed"], ("mlp_AR.", "model.projector.")), tower=TOWER,
        skipped=r".*(packing_position_embedding|vision_model\.head)\..*",  # transformers does without them, too
    ),
    "GemmaForCausalLM": Family(norm_offset=1.0, embed_scaled=True, defaults=GEMMA),
    "Gemma2ForCausalLM": Family(
        post_norm=True, norm_offset=1.0, embed_scaled=True, windows="pattern",
        reads=("sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
        defaults=GEMMA | {
            "sliding_window": 4096, "sliding_window_pattern": 2, "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "num_key_value_heads": 4,
        },
        renamed=GEMMA_NORMS,
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3._replace(renamed=VISION["renamed"] + GEMMA3.renamed, tower=TOWER),
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4._replace(**GEMMA4_TOWERS),
    "Gemma4UnifiedForCausalLM": GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": GEMMA4_UNIFIED._replace(**GEMMA4_TOWERS),
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
    "GptOssForCausalLM": Family(
        sinks=True, windows="pattern", experts="softmax", gpt_oss_experts=True,
        reads=("sliding_window", "swiglu_limit"),
        defaults=EPS | {
            "attention_bias": True, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2,
            "max_position_embeddings": 131_072, "swiglu_limit": 7.0,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0,
                                "original_max_position_embeddings": 4096, "truncate": False},
        },
        renamed=((".mlp.router.", ".mlp.gate."),),
    ),
    "Qwen3NextForCausalLM": QWEN3_NEXT._replace(**QWEN3_NEXT_MOE),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5._replace(**QWEN3_NEXT_MOE),
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5._replace(**QWEN3_NEXT_MOE),
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2._replace(
        experts="sigmoid", has_correction_bias=True, choice_eps=1e-6, reads=("routed_scaling_factor",),
        defaults=LFM2.defaults | {"block_auto_adjust_ff_dim": False, "num_dense_layers": 2},
        renamed=(*LFM2.renamed, (".mlp.expert_bias", CORRECTION)),
    ),
}  # fmt: skip

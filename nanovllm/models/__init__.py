"""The supported architectures: ``MODELS``, a row for each name that ``architectures`` of a ``config.json`` may have.

``decoder.py`` is the model of them all; a row says what is different, and what published files leave out. ``config.py``
reads ``config.json`` by it. Imports no torch.
"""

from typing import Any

from nanovllm.models.families import Family

_QWEN: dict[str, Any] = {
    "windows": "late", "reads": ("sliding_window", "use_sliding_window"),
    "defaults": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
}  # fmt: skip
_GEMMA: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "vocab_size": 256_000,
    "eos_token_id": 1, "max_position_embeddings": 8192,
}  # fmt: skip
_GEMMA3 = Family(
    qk_norm="head", post_norm=True, norm_offset=1.0, embed_scaled=True, windows="pattern", plain_window_rope=True,
    reads=("sliding_window", "rope_local_base_freq", "query_pre_attn_scalar"),
    defaults=_GEMMA | {
        "sliding_window": 4096, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    renamed=(
        ("post_attention_layernorm", "mixer_post_norm"),
        ("pre_feedforward_layernorm", "post_attention_layernorm"),
        ("post_feedforward_layernorm", "mlp_post_norm"),
    ),
)  # fmt: skip
_POST = (("post_attention_layernorm", "mixer_post_norm"), ("post_feedforward_layernorm", "mlp_post_norm"))
_EPS = {"rms_norm_eps": 1e-5}
_OLMO2 = Family(qk_norm="full", pre_norm=False, post_norm=True, defaults=_EPS, renamed=_POST)
_GLM = {"partial_rotary_factor": 0.5, "head_dim": 128}

MODELS = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(windows="all", reads=("sliding_window",), defaults={"sliding_window": 4096}),
    "Phi3ForCausalLM": Family(
        windows="all", reads=("sliding_window", "partial_rotary_factor"),
        defaults=_EPS | {"original_max_position_embeddings": 4096},
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False, **_QWEN),
    "Qwen3ForCausalLM": Family(qk_norm="head", **_QWEN),
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
        interleaved=True, defaults=_EPS | {"head_dim": 128, "rope_theta": 500_000.0, "tie_word_embeddings": True}
    ),
    "Glm4ForCausalLM": Family(
        o_bias=False, post_norm=True, interleaved=True, reads=("partial_rotary_factor",),
        defaults=_GLM | {"attention_bias": True, "rms_norm_eps": 1.5625e-7, "eos_token_id": [151329, 151336, 151338]},
        renamed=(("post_self_attn_layernorm", "mixer_post_norm"), ("post_mlp_layernorm", "mlp_post_norm")),
    ),
    "GemmaForCausalLM": Family(norm_offset=1.0, embed_scaled=True, defaults=_GEMMA),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3._replace(
        renamed=(("language_model.", ""), *_GEMMA3.renamed), skipped=r".*(vision_tower|multi_modal_projector)\..*"
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO2._replace(
        windows="pattern", plain_window_rope=True, reads=("sliding_window",),
        defaults=_EPS | {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500_000.0},
    ),
    "Exaone4ForCausalLM": Family(
        qk_norm="head", pre_norm=False, post_norm=True, windows="pattern", rotates_windows_only=True,
        reads=("sliding_window",), defaults=_EPS | {"sliding_window": 4096, "sliding_window_pattern": 4},
        renamed=_POST,
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
        experts="softmax", windows="all", reads=("sliding_window",), defaults=_EPS | {"rope_theta": 1_000_000.0},
        renamed=((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."),
                 (".w2.", ".down_proj.")),
    ),
    "OlmoeForCausalLM": Family(qk_norm="full", experts="softmax", defaults=_EPS | {"norm_topk_prob": False}),
    "Glm4MoeForCausalLM": Family(
        o_bias=False, experts="sigmoid", reads=("partial_rotary_factor", "use_qk_norm", "routed_scaling_factor",
                                                "n_group", "topk_group"),
        defaults=_EPS | {"partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "n_shared_experts": 1,
                         "num_nextn_predict_layers": 1},
        renamed=((".shared_experts.", ".shared_expert."),),
    ),
}  # fmt: skip

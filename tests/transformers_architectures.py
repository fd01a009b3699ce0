"""Architectures that were tried on transformers' modules: what a small model of each needs, and why others are refused.

One table. ``test_transformers_backend.py`` runs the first ten at each commit and all of them by night.
"""

V = 160
SMALL = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
WINDOWS = {"sliding_window": 8}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
           "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
       "num_key_value_heads": 4}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"

# transformers' class without "ForCausalLM" -> changes of SMALL; the first ten run at each commit
PASSES: dict[str, dict] = {
    "Cohere2": {**WINDOWS, "logit_scale": 0.3},  # a factor after the head, parallel MLP, LayerNorm
    "DeepseekV3": MLA | EXPERTS,  # values narrower than keys, a bias that chooses experts
    "Gemma4": {**WINDOWS, "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6,  # heads and KV heads differ
               "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": V,
               "hidden_size_per_layer_input": 8},
    "VaultGemma": {**WINDOWS, "head_dim": 16, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 5.0,
                   "query_pre_attn_scalar": 16},
    "MiMoV2Flash": {**WINDOWS, **EXPERTS, "head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 2},  # sinks
    "GPTNeoX": {"hidden_act": "gelu"},  # fused QKV, partial RoPE
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},  # a decoder within the decoder; learned positions
    "Dots1": {**WINDOWS, **EXPERTS, "head_dim": 16},
    "Apertus": {},  # an activation with parameters
    "StableLm": {},
}  # fmt: skip
# the same -> its fields, and why it cannot run
REFUSED: dict[str, tuple[dict, str]] = {
    "Lfm2": ({"layer_types": ["conv", FULL] * 2}, "every layer must be attention, and this model has conv"),
    "Falcon": ({}, "its attention does not go through transformers' AttentionInterface"),
    "Llama4": ({"head_dim": 16, "attention_chunk_size": 512, "num_local_experts": 2, "interleave_moe_layer_step": 1,
                "intermediate_size_mlp": 96, "attn_temperature_tuning": True}, "its attention counts positions itself"),
}  # fmt: skip

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

# fields that only classes with such layers read
ANY = WINDOWS | EXPERTS | {"num_experts": 8, "num_local_experts": 8}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}  # of classes that insist on integers

# transformers' class without "ForCausalLM" -> changes of SMALL; the first ten run at each commit
PASSES: dict[str, dict] = {
    "Cohere2": {**WINDOWS, "logit_scale": 0.3},  # a factor after the head, parallel MLP, LayerNorm
    "DeepseekV3": MLA | EXPERTS,  # values narrower than keys, a bias that chooses experts
    "Gemma3n": {**WINDOWS, "head_dim": 16, "num_hidden_layers": 5,  # layers share keys and values
                "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": V, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
                "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 5},
    "VaultGemma": {**WINDOWS, "head_dim": 16, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 5.0,
                   "query_pre_attn_scalar": 16},
    "MiMoV2Flash": {**WINDOWS, **EXPERTS, "head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 2},  # sinks
    "GPTNeoX": {"hidden_act": "gelu"},  # fused QKV, partial RoPE
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},  # a decoder within the decoder; learned positions
    "Dots1": {**WINDOWS, **EXPERTS, "head_dim": 16},
    # norms of q and k after RoPE, whose base is raised by alpha, as published; no row is for this
    "HunYuanDenseV1": {"head_dim": 16, "rope_theta": 1e4, "rope_parameters": None, "rope_scaling": {
        "type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }},
    "Apertus": {},  # an activation with parameters
    "StableLm": {},
    "AXK1": ANY | MLA, "DeepseekV2": ANY | MLA, "Glm4MoeLite": ANY | MLA, "Youtu": ANY | MLA,
    "MiniCPM3": MLA | {"num_key_value_heads": 4},
    "LongcatFlash": ANY | MLA | {"head_dim": 8},
    "GPT2LMHeadModel": {}, "CTRLLMHeadModel": {},
    "Helium": {"head_dim": 16}, "HunYuanMoEV1": ANY | {"head_dim": 16}, "Ministral": WINDOWS | {"head_dim": 16},
    "Cwm": WINDOWS | IDS, "Emu3": IDS, "ModernBertDecoder": {**IDS, "local_attention": 16},
    **dict.fromkeys((
        "Afmoe", "Arcee", "AriaText", "Beam", "BioGpt", "BitNet", "Cohere", "Cohere2Moe", "DiffLlama", "ExaoneMoe",
        "FlexOlmo", "Flint", "Fuyu", "GPTBigCode", "Glm", "GraniteMoe", "GraniteMoeSWA",
        "GraniteMoeShared", "GraniteSWA", "HyperCLOVAX", "Jais2", "JetMoe", "Kolibri1", "Laguna", "Mellum",
        "MiniMaxM3VL", "Moshi", "NanoChat", "Nemotron", "Olmo", "Persimmon", "Phi", "Phimoe", "SolarOpen", "Starcoder2",
    ), ANY),
}  # fmt: skip
NOT_ALL = "every layer must be attention, and this model has"
OUTSIDE = "its attention does not go through transformers' AttentionInterface"
OTHERS = "its tokens attend others than a window"
MIXES = "logits of a packed batch differ from transformers' own"
# the same -> its fields, and why it cannot run; the first five run at each commit
REFUSED: dict[str, tuple[dict, str]] = {
    "Lfm3": ({"layer_types": ["conv", FULL] * 2}, f"{NOT_ALL} conv"),
    "Falcon": ({}, OUTSIDE),
    "Llama4": ({"head_dim": 16, "attention_chunk_size": 512, "num_local_experts": 2, "interleave_moe_layer_step": 1,
                "intermediate_size_mlp": 96, "attn_temperature_tuning": True}, "its attention counts positions itself"),
    "Doge": ({}, "has a mask of its own"),
    "MBart": ({}, MIXES),  # positions of their own
    **{name: ({}, f"{NOT_ALL} {kind}") for name, kind in {
        "AXK2": "indexed_attention", "BailingHybrid": "linear_attention", "Bamba": "linear_attention",
        "DeepseekV32": "indexed_attention", "DeepseekV4": "compressed_sparse_attention",
        "FalconMamba": "linear_attention", "GlmMoeDsa": "indexed_attention",
        "HYV4": "indexed_attention", "Jamba": "linear_attention", "KimiLinear": "linear_attention",
        "Mamba": "linear_attention", "MiniMax": "linear_attention", "OlmoHybrid": "linear_attention",
        "RecurrentGemma": "linear_attention",
    }.items()},
    **{name: ({}, OUTSIDE) for name in (
        "BigBird", "Bloom", "CodeGen", "CpmAnt", "GPTJ", "GPTNeoXJapanese", "MegatronBert", "Mpt", "Mvp",
        "OpenAIGPTLMHeadModel", "RemBert", "RoFormer", "Rwkv", "TrOCR", "XGLM", "XLMWithLMHeadModel",
    )},
    **{name: ({}, OTHERS) for name in ("BertLMHeadModel", "Electra", "Ernie", "RoCBert")},
    **{name: ({}, MIXES) for name in ("Bart", "BlenderbotSmall", "Marian", "Pegasus")},
    "Llama4ForCausalLM": ({"head_dim": 16, "attention_chunk_size": 64, "num_local_experts": 2,
                           "interleave_moe_layer_step": 1, "intermediate_size_mlp": 96,
                           "no_rope_layers": [1, 1, 1, 1]}, OTHERS),
    "ArceeForCausalLM": ({"is_causal": False}, OTHERS),
    "HrmText": ({}, "needs a conversion"),
}  # fmt: skip

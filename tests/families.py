"""Tiny random checkpoints of every dense family, made by transformers, which is the oracle of the family tests.

Sizes are small, and what a family does otherwise is large enough to show: norm weights are 1 + 0.3 N (0.3 N where one
is added), windows are shorter than the prompts, and positions are scaled from an original length of 32.
"""

import json
import shutil
from pathlib import Path

import torch
from helpers import generate_with_logits
from safetensors.torch import load_file, save_file
from torch import nn

BASE = dict(
    vocab_size=144, hidden_size=64, intermediate_size=112, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, eos_token_id=1, bos_token_id=0, pad_token_id=0,
    tie_word_embeddings=False, rms_norm_eps=1e-5,
)  # fmt: skip
HEAD = dict(head_dim=32, hidden_size=80)  # no two sizes of a layer are equal: a transposition cannot hide
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=32)
MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2])
WIDE = {**MROPE, "mrope_section": [8, 4, 4]}  # of heads of HEAD
VISION = {"vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2,
                            "num_heads": 2, "intermediate_size": 48, "head_dim": 16, "image_size": 32,
                            "embed_dim": 32, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}}  # fmt: skip
OF_HEAD = {"vision_config": VISION["vision_config"] | {"out_hidden_size": 80}}  # as wide as the text of HEAD
OF_QWEN2_VL = {"vision_config": VISION["vision_config"] | {"hidden_size": 64}}  # of its tokens
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = [SLIDING, SLIDING, FULL, SLIDING]
GEMMA4 = {
    "hidden_size": 80, "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6, "sliding_window": 12,
    "layer_types": [SLIDING, SLIDING, FULL] * 2, "tie_word_embeddings": True, "final_logit_softcapping": 5.0,
}  # fmt: skip


def longrope(dims, **more):
    short = [1.0 + 0.05 * i for i in range(dims // 2)]
    return dict(rope_type="longrope", rope_theta=1e4, short_factor=short, long_factor=[3 * x for x in short], **more)


# case -> transformers' class, changes of BASE
CASES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {**HEAD, "rope_parameters": LLAMA3}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("Mistral", {**HEAD, "sliding_window": 12}),
    "mistral-nemo": ("Mistral", {**HEAD, "sliding_window": None, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-late-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {**HEAD, "attention_bias": True}),
    "phi3": ("Phi3", {"sliding_window": 12}),
    "phi3-mini": ("Phi3", {"hidden_size": 96, "sliding_window": 12}),  # heads of 24: padded where kernels want it
    "phi3-longrope": ("Phi3", {
        "original_max_position_embeddings": 32, "rope_parameters": {**longrope(12), "partial_rotary_factor": 0.75},
    }),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}),
    "granite": ("Granite", {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 3.0,
        "tie_word_embeddings": True,
    }),
    "seed-oss": ("SeedOss", {**HEAD, "attention_bias": True, "attention_out_bias": False}),
    "ernie4.5": ("Ernie4_5", {**HEAD, "use_bias": True, "tie_word_embeddings": True}),
    "glm4": ("Glm4", {**HEAD}),
    "gemma": ("Gemma", {**HEAD, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {
        **HEAD, "tie_word_embeddings": True, "sliding_window": 12, "query_pre_attn_scalar": 48,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0,
    }),
    "gemma3": ("Gemma3Text", {
        **HEAD, "tie_word_embeddings": True, "sliding_window": 12, "query_pre_attn_scalar": 48, "layer_types": MIXED,
        "rope_parameters": {
            FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    # K = V in full layers, which have larger heads, and fewer KV heads
    "gemma4": ("Gemma4Text", {
        **GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    }),
    # its last three layers share keys and values
    "gemma4-e4b": ("Gemma4Text", {
        **GEMMA4, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 144, "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    }),
    "gemma4-unified": ("Gemma4UnifiedText", {
        **GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    }),
    "ministral3": ("Ministral3", {**HEAD, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8,
                                                              "llama_4_scaling_beta": 0.3}}),
    "mistral3": ("Mistral3", {**HEAD, "model_type": "ministral3", **VISION, "rope_parameters": {
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }}),
    "qwen3-vl": ("Qwen3VL", {**HEAD, **OF_HEAD, "rope_parameters": WIDE}),
    "qwen2-vl": ("Qwen2VL", {**OF_QWEN2_VL, "rope_parameters": MROPE}),
    "qwen2.5-vl": ("Qwen2_5_VL", {**VISION, "rope_parameters": MROPE}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {
        "sliding_window": 12,
        "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
    }),
    # its attention, with an MLP in place of the experts
    "gpt-oss-attention": ("GptOss", {
        **HEAD, "num_local_experts": 8, "num_experts_per_tok": 3, "mlp_layer_types": ["dense"] * 4,
        "sliding_window": 12, "rope_parameters": {**YARN, "truncate": False},
    }),
    "exaone4": ("Exaone4", {**HEAD, "sliding_window": 12, "layer_types": MIXED}),
}  # fmt: skip
MOE = dict(num_experts=8, num_experts_per_tok=3)
MOE_CASES: dict[str, tuple[str, dict]] = {  # experts of 48 or 112 units, so that four ranks share them
    "gemma4-moe": ("Gemma4Text", {
        **CASES["gemma4"][1], "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3,
        "moe_intermediate_size": 48,
    }),
    "qwen3-moe": ("Qwen3Moe", {
        **HEAD, **MOE, "moe_intermediate_size": 48, "norm_topk_prob": True, "mlp_only_layers": [1],
    }),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "olmoe": ("Olmoe", MOE),
    "qwen2-moe": ("Qwen2Moe", {
        **MOE, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 72, "decoder_sparse_step": 2,
    }),
    "glm4-moe": ("Glm4Moe", {
        **HEAD, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.7,
        "n_group": 4, "topk_group": 2,
    }),
    "qwen3-vl-moe": ("Qwen3VLMoe", {**HEAD, **MOE, **OF_HEAD, "moe_intermediate_size": 48, "rope_parameters": WIDE}),
    "minimax-m2": ("MiniMaxM2", {
        **HEAD, "num_local_experts": 8, "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }),
    "hy3": ("HYV3", {**HEAD, **MOE, "moe_intermediate_size": 48, "num_shared_experts": 2,
                     "router_scaling_factor": 1.7, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}),
    "gpt-oss": ("GptOss", {
        **HEAD, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 12, "swiglu_limit": 0.7,
        "rope_parameters": {**YARN, "truncate": False},
    }),
    "ernie4.5-moe": ("Ernie4_5_Moe", {
        "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "moe_layer_end_index": 2,
    }),
}  # fmt: skip
# A gated delta net in three of four layers. No two sizes are equal.
HYBRID = dict(
    vocab_size=140, hidden_size=80, intermediate_size=120, head_dim=32, max_position_embeddings=1024,
    linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=32, linear_value_head_dim=64,
)  # fmt: skip
HYBRID_MOE = {**MOE, **HYBRID, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48}
HYBRID_CASES: dict[str, tuple[str, dict]] = {
    "qwen3.5": ("Qwen3_5Text", HYBRID),
    "qwen3.5-moe": ("Qwen3_5MoeText", HYBRID_MOE),
    "qwen3-next": ("Qwen3Next", {**HYBRID_MOE, "linear_conv_kernel_dim": 3, "mlp_only_layers": [1]}),
}
# Short convolutions in two of three layers. The MLP of "lfm2" has 96 units, two thirds of 120 rounded up.
SHORT_CONV = dict(
    vocab_size=140, hidden_size=80, intermediate_size=120, head_dim=32, max_position_embeddings=1024, norm_eps=1e-5,
    layer_types=["conv", "conv", FULL, "conv"],
)  # fmt: skip
SHORT_CONV_CASES: dict[str, tuple[str, dict]] = {
    "lfm2": ("Lfm2", {**SHORT_CONV, "block_multiple_of": 32, "conv_L_cache": 3}),
    "lfm2-moe": ("Lfm2Moe", {**SHORT_CONV, **MOE, "moe_intermediate_size": 40, "num_dense_layers": 1,
                             "conv_L_cache": 4, "routed_scaling_factor": 1.5}),
}  # fmt: skip
HYBRID_CASES |= SHORT_CONV_CASES

# Mamba-2 in three of four layers
MAMBA = dict(
    vocab_size=140, hidden_size=128, intermediate_size=48, max_position_embeddings=1024, num_key_value_heads=2,
    mamba_n_heads=8, mamba_d_head=32, mamba_d_state=64, mamba_n_groups=1,
)  # fmt: skip
GRANITE_MAMBA = {
    **MAMBA, "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3,
    "logits_scaling": 2.0, "shared_intermediate_size": 72, "num_local_experts": 8, "num_experts_per_tok": 3,
}
FALCON = {
    **MAMBA, "hidden_size": 80, "intermediate_size": 112, "mamba_d_ssm": 256, "head_dim": 32, "key_multiplier": 0.6,
    "embedding_multiplier": 2.0, "lm_head_multiplier": 0.7, "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8, "mlp_multipliers": [0.9, 1.3], "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.9, 1.1, 1.4, 0.8, 1.2], "ssm_out_multiplier": 1.5,
}
NEMOTRON = dict(
    vocab_size=140, hidden_size=80, intermediate_size=112, max_position_embeddings=1024, head_dim=32,
    mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=64, n_groups=2, conv_kernel=4, n_routed_experts=8,
    num_experts_per_tok=3, moe_intermediate_size=48, moe_shared_expert_intermediate_size=72, time_step_min=1e-9,
    routed_scaling_factor=1.7, num_hidden_layers=6,
    layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
)
HYBRID_CASES |= {
    "nemotron-h": ("NemotronH", NEMOTRON),
    "falcon-h1": ("FalconH1", FALCON),
    "falcon-h1-norm": ("FalconH1", {**FALCON, "mamba_n_groups": 2, "mamba_rms_norm": True}),
    "granite-mamba-moe": ("GraniteMoeHybrid", GRANITE_MAMBA),
    "granite-mamba": ("GraniteMoeHybrid", {**GRANITE_MAMBA, "num_local_experts": 0, "mamba_d_conv": 3}),
}


class DenseMLP(nn.Module):
    """In place of gpt-oss's experts."""

    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden_size, intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)), None


def make(path, name, seed=0, **more):
    """Write the checkpoint of a case, with ``more`` in its config, into ``path``; return transformers' model."""
    import transformers

    kind, changes = {**CASES, **MOE_CASES, **HYBRID_CASES}[name]
    fields, head = {**BASE, **changes, **more}, "ForCausalLM"
    if "vision_config" in fields:
        outer = {field: fields.pop(field) for field in ("vision_config", "tie_word_embeddings")}
        fields, head = {"text_config": fields, "image_token_id": 7, **outer}, "ForConditionalGeneration"
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, kind.removesuffix("Text") + head)._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    if name == "gpt-oss-attention":
        for layer in model.model.layers:
            layer.mlp = DenseMLP(config.hidden_size, config.intermediate_size)
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":  # of transformers 5.17, which knows 7.0 only
            module.limit = config.swiglu_limit
    generator = torch.Generator().manual_seed(seed)
    names = "correction_bias", "expert_bias", "layer_scalar"
    choice = [(n, b) for n, b in model.named_buffers() if any(name in n for name in names)]
    for param_name, p in [*model.named_parameters(), *choice]:
        std = 0.15
        if name in HYBRID_CASES:  # larger ones amplify rounding: in transformers too
            std = 1.0 if "embed" in param_name else 0.3 if p.dim() == 1 else 0.05
            std = 0.5 if ".conv.conv." in param_name or "mamba.conv1d.weight" in param_name else std
        p.data.normal_(0.0, 0.3 if "norm" in param_name else 2.0 if "sinks" in param_name else std, generator=generator)
        has_offset = kind in ("Gemma", "Gemma2", "Gemma3Text") or (
            kind.startswith(("Qwen3_5", "Qwen3Next")) and "linear_attn.norm" not in param_name
        )
        if ("norm" in param_name and not has_offset) or "scal" in param_name:
            p.data.add_(1.0)
    model.save_pretrained(path)
    return model.eval()


def save(path, tensors, config):
    """A checkpoint with these tensors, in one file, and this config.json in place of what ``path`` has."""
    for file in Path(path).glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, Path(path, "model.safetensors"), {"format": "pt"})
    Path(path, "config.json").write_text(json.dumps(config))


def copied(path, to, edit=lambda tensors, config: None, **fields):
    """The path of a copy of a checkpoint with other fields in config.json; ``edit`` changes tensors and config."""
    shutil.copytree(path, to, dirs_exist_ok=True)
    tensors = {name: tensor for file in Path(path).glob("*.safetensors") for name, tensor in load_file(file).items()}
    config = json.loads(Path(path, "config.json").read_text()) | fields
    edit(tensors, config)
    save(to, tensors, config)
    return str(to)


def transpose_experts(tensors, config):
    """As Qwen3-VL-MoE is published; transformers 5 writes the usual order."""
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()


def merge_experts(tensors, config):
    """As in Granite's files: a tensor of all experts' gates and ups, and one of all downs; likewise their scales."""
    for merged, parts in (("input_linear", ("gate_proj", "up_proj")), ("output_linear", ("down_proj",))):
        for name in [name for name in tensors if f".experts.0.{parts[0]}." in name]:
            prefix, _, kind = name.partition(f".experts.0.{parts[0]}.")
            tensors[f"{prefix}.{merged}.{kind}"] = torch.stack([
                torch.cat([tensors.pop(f"{prefix}.experts.{expert}.{part}.{kind}") for part in parts])
                for expert in range(config["num_local_experts"])
            ])


@torch.inference_mode()
def hf_logits(model, ids):
    """After each token: fp32 [len(ids), V] on the CPU."""
    return model(torch.tensor([ids], device=model.device)).logits[0].float().cpu()


def logits_before(model, prompts, completions):
    """transformers' logits before each token of the completions: fp32 [tokens, V] for each prompt."""
    pairs = zip(prompts, completions, strict=True)
    return [hf_logits(model, prompt + tokens)[len(prompt) - 1 : -1] for prompt, tokens in pairs]


def chosen(model, prompts, completions):
    """transformers' choice of each token."""
    return [logits.argmax(-1).tolist() for logits in logits_before(model, prompts, completions)]


def worst_choices(model, prompts, completions):
    """Of each completion: how far a token is below the best one at most, in standard deviations of the logits."""
    for logits, tokens in zip(logits_before(model, prompts, completions), completions, strict=True):
        own = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        yield float((logits.amax(1) - own).max() / logits.std())


def error(got, want):
    """The largest difference, in units of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def check_greedy(llm, model, prompts, num_tokens, tolerance=1e-4):
    """Greedy completions: each token is transformers' best, each logit within ``tolerance`` of the largest."""
    completions, logits = generate_with_logits(llm, prompts, num_tokens)
    for tokens, got, want in zip(completions, logits, logits_before(model, prompts, completions), strict=True):
        assert error(got, want[:, : got.shape[1]]) < tolerance  # of rank 0's part of the vocabulary
        assert want.argmax(-1).tolist() == tokens
    return completions


def in_16_bits(llm, model, rounded_model, prompts, num_tokens):
    """Logits of greedy completions [tokens, V]: the engine's, transformers' in 16 bits, ``model``'s in fp32."""
    completions, logits = generate_with_logits(llm, prompts, num_tokens)
    exact, rounded = (torch.cat(logits_before(each, prompts, completions)) for each in (model, rounded_model))
    return torch.cat(logits), rounded, exact

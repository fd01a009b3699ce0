"""The decoder-only transformer, one for all families; ``model_config.FAMILIES`` says where they differ.

Pre-norm layers add to a residual: ``residual += attention(norm(residual))``, ``residual += mlp(norm(residual))``. A
residual is a tensor [T, C] or, between a small split-K product and the next RMSNorm, ``SplitKPartials``.

Legend: T packed tokens, N sampled tokens, C hidden size, H query heads, K KV heads (of this rank), D head size.
"""

import re
from typing import ClassVar

import torch
from torch import nn

from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.linear.reference import QKVEpilogue
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.layers.context import Context
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import ModelConfig


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, rope: RotaryEmbedding, backend: AttentionBackend, tp: TPGroup):
        super().__init__()
        C, D, H, K = config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = QKVParallelLinear(C, D, H, K, config.qkv_bias, tp)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.rope = [rope]  # in a list: the table is a submodule of the model, not of each layer
        self.attn = Attention(self.qkv_proj.num_heads, D, self.qkv_proj.num_kv_heads, backend)
        self.o_proj = RowParallelLinear(H * D, C, config.o_bias, tp)
        self.eps = config.rms_norm_eps

    def forward(self, residual: torch.Tensor, norm: RMSNorm, context: Context,
                logits_indices: torch.Tensor | None = None) -> torch.Tensor:
        """residual [T, C] -> residual + attention(norm(residual)), [T, C]; [N, C] for ``logits_indices`` only."""
        epilogue = QKVEpilogue(
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
            self.rope[0].cos_sin,
            context.positions,
            context.slot_mapping,
            self.attn.k_cache,
            self.attn.v_cache,
            self.attn.num_heads,
            self.attn.num_kv_heads,
        )
        q = self.qkv_proj(residual, norm, epilogue)
        if logits_indices is not None:
            q, residual, context = q[logits_indices], residual[logits_indices], context.last_tokens_only()
        return self.o_proj(self.attn(q, context), residual=residual)


class MLP(nn.Module):
    """Gated: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, tp: TPGroup):
        super().__init__()
        C, I = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(C, [I, I], tp=tp)
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(I, C, tp=tp)

    def forward(self, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """residual [T, C] -> residual + mlp(norm(residual)), [T, C]."""
        return self.down_proj(self.gate_up_proj(residual, norm=norm, act_fn=self.act_fn), residual=residual)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, rope: RotaryEmbedding, backend: AttentionBackend, tp: TPGroup):
        super().__init__()
        self.self_attn = SelfAttention(config, rope, backend, tp)
        self.mlp = MLP(config, tp)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, residual: torch.Tensor, context: Context,
                logits_indices: torch.Tensor | None = None) -> torch.Tensor:
        residual = self.self_attn(residual, self.input_layernorm, context, logits_indices)
        return self.mlp(residual, self.post_attention_layernorm)


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, tp: TPGroup):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.rope = RotaryEmbedding(config.head_dim, config.max_position_embeddings, config.ropes[0])
        self.layers = nn.ModuleList(
            DecoderLayer(config, self.rope, backend, tp) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, context: Context) -> torch.Tensor:
        """input_ids [T] -> hidden states [T, C]; [N, C] with ``context.logits_indices``.

        In prefill the last layer, once its keys and values are stored, runs for the last token of each sequence only.
        """
        residual = self.embed_tokens(input_ids)
        *layers, last = self.layers
        for layer in layers:
            residual = layer(residual, context)
        return self.norm(last(residual, context, context.logits_indices))


class CausalLM(nn.Module):
    """A decoder and its LM head, built on torch's default device and dtype, weights uninitialised."""

    # checkpoint module -> (merged module, shard id)
    packed_modules_mapping: ClassVar = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: ModelConfig, backend: AttentionBackend, tp: TPGroup):
        super().__init__()
        self.model = Decoder(config, backend, tp)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp)
        # published checkpoints of tied models may carry a copy of the embedding under the head's name
        n = config.num_hidden_layers
        speculative = "|".join(map(str, range(n, n + config.num_nextn_predict_layers)))
        unused = [r".*rotary_emb\.inv_freq", config.family.skipped]
        unused += [rf"model\.layers\.({speculative})\..*"] if speculative else []
        unused += [r"lm_head\.weight"] if config.tie_word_embeddings else []
        self.unused_tensors = re.compile("|".join(filter(None, unused)))
        self.renamed_tensors = config.family.renamed
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, context: Context) -> torch.Tensor:
        return self.model(input_ids, context)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] -> logits of this rank's vocabulary shard, [N, V / size]."""
        return self.lm_head(hidden)

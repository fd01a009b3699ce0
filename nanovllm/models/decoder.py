"""Qwen3, dense: the shared layers put together.

T packed tokens, C hidden size, H query heads, K KV heads (of this rank), D head size. A stream is a tensor [T, C] or,
where a kernel leaves the sum to the next norm, what only norms and residuals understand (`kernels.norm.SplitKPartials`).
"""

from typing import ClassVar

import torch
from torch import nn

from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.linear.reference import QKVEpilogue
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.layers.context import get_context
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding, get_rope
from nanovllm.model_config import ModelConfig


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig, rope: RotaryEmbedding, backend: AttentionBackend, group: TPGroup):
        super().__init__()
        D = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, D, config.num_attention_heads, config.num_key_value_heads, config.attention_bias, group
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)
        self.rope = [rope]  # in a list: the table belongs to the model, not to each layer
        self.attn = Attention(self.num_heads, D, self.num_kv_heads, backend)
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * D, config.hidden_size, config.attention_bias, group
        )

    def forward(self, positions: torch.Tensor, stream: torch.Tensor, norm: RMSNorm,
                sampled: torch.Tensor | None = None) -> torch.Tensor:
        """positions [T], stream [T, C] -> stream + attention(norm(stream)), [T, C]; of ``sampled`` tokens, [N, C]."""
        heads = QKVEpilogue(
            self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.rope[0].cos_sin, positions,
            get_context().slot_mapping, self.attn.k_cache, self.attn.v_cache, self.num_heads, self.num_kv_heads,
        )  # fmt: skip
        q, k, v = self.qkv_proj(stream, norm=norm, heads=heads, pages_only=self.attn.reads_pages())
        out = self.attn(q, k, v, sampled)
        return self.o_proj(out, residual=stream if sampled is None else stream[sampled])


class Qwen3MLP(nn.Module):
    def __init__(self, config: ModelConfig, group: TPGroup):
        super().__init__()
        C, I = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(C, [I, I], group=group)
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(I, C, group=group)

    def forward(self, stream: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """stream [T, C] -> stream + mlp(norm(stream)), [T, C]."""
        return self.down_proj(self.gate_up_proj(stream, norm=norm, act_fn=self.act_fn), residual=stream)


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, rope: RotaryEmbedding, backend: AttentionBackend, group: TPGroup):
        super().__init__()
        self.self_attn = Qwen3Attention(config, rope, backend, group)
        self.mlp = Qwen3MLP(config, group)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: torch.Tensor, stream: torch.Tensor,
                sampled: torch.Tensor | None = None) -> torch.Tensor:
        """stream [T, C]: the residual stream, to which each half adds; it goes on for ``sampled`` tokens, if given."""
        stream = self.self_attn(positions, stream, self.input_layernorm, sampled)
        return self.mlp(stream, self.post_attention_layernorm)


class Qwen3Model(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, group: TPGroup):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)
        self.rope = get_rope(config.head_dim, config.max_position_embeddings, config.rope)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, self.rope, backend, group) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions [T] -> hidden states [T, C]; of a prefill those of the tokens that are sampled, [N, C].

        For of the other tokens nobody needs more than their keys and values.
        """
        stream = self.embed_tokens(input_ids)
        *layers, last = self.layers
        for layer in layers:
            stream = layer(positions, stream)
        return self.norm(last(positions, stream, get_context().sampled))


class Qwen3ForCausalLM(nn.Module):
    """Built on torch's default device and dtype, with weights not yet filled."""

    packed_modules_mapping: ClassVar = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: ModelConfig, backend: AttentionBackend, group: TPGroup):
        super().__init__()
        self.model = Qwen3Model(config, backend, group)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, group)
        # published checkpoints of tied models may carry a copy of the embedding under the head's name
        self.unused_weights = {"lm_head.weight"} if config.tie_word_embeddings else set()
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What forward gave for S tokens [S, C] -> logits of this rank's part of the vocabulary [S, V / size]."""
        return self.lm_head(hidden)

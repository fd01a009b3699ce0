"""The decoder-only transformer, one for all families; ``model_config.py`` has the switches where they differ.

Layers add to a residual: ``residual += attention(norm(residual))``, ``residual += mlp(norm(residual))``. Some families
also have a norm of what is added, or only that one. Differences that need no arithmetic of their own (the order of
rotated dimensions, factors, offsets) are folded into the weights when they are loaded.

A residual is a tensor [T, C] or, between a small split-K product and the next RMSNorm, ``SplitKPartials``.

Legend: T packed tokens, N sampled tokens, C hidden size, H query heads, K KV heads (of this rank), D head size.
"""

import re
from typing import ClassVar

import torch
from torch import nn

from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.linear.reference import QKVEpilogue
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.layers.context import Context
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.moe import SparseMoE
from nanovllm.layers.rotary_embedding import RotaryEmbedding, head_orders, padded_head_dim
from nanovllm.model_config import ModelConfig
from nanovllm.quantization import RENAMED_TENSORS, UNUSED_TENSORS


def hidden_norm(config: ModelConfig, wanted: bool) -> RMSNorm | None:
    """A norm of hidden states, if it is wanted."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, config.family.norm_offset) if wanted else None


def add_to_residual(linear: RowParallelLinear, x: torch.Tensor, residual: torch.Tensor,
                    post_norm: RMSNorm | None, leaves_sum: bool = False) -> torch.Tensor:
    """residual + linear(x), or residual + post_norm(linear(x)), [T, C].

    With ``leaves_sum`` this rank's summand: of that, or of linear(x) if there is a ``post_norm``.
    """
    if post_norm is None:
        return linear(x, residual=residual, leaves_sum=leaves_sum)
    y = linear(x, leaves_sum=leaves_sum)
    return y if leaves_sum else post_norm.add_to(residual, y)


def qk_norms(config: ModelConfig, qkv: QKVParallelLinear) -> tuple[RMSNorm | None, RMSNorm | None]:
    """The norms of q and k: of each head [D], or of all heads of all ranks, with weights for this rank's."""
    if not config.qk_norm:
        return None, None
    D, eps, offset = qkv.head_dim, config.rms_norm_eps, config.family.norm_offset
    if config.qk_norm == "head":
        return RMSNorm(D, eps, offset, order=qkv.head_order), RMSNorm(D, eps, offset, order=qkv.head_order)
    assert qkv.head_order is None, "a norm over all heads with permuted rotary dimensions"
    q_norm = RMSNorm(qkv.num_heads * D, eps, offset, shard=qkv.q_shard)
    return q_norm, RMSNorm(qkv.num_kv_heads * D, eps, offset, shard=qkv.kv_shard)


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, rope: RotaryEmbedding, backend: AttentionBackend, tp: TPGroup):
        super().__init__()
        C, D, H, K = config.hidden_size, padded_head_dim(config), config.num_attention_heads, config.num_key_value_heads
        order, v_order = head_orders(config.head_dim, D, config.ropes[layer], config.family.interleaved)
        fp8 = [config.fp8_block(layer, name) for name in ("self_attn.qkv_proj", "self_attn.o_proj")]
        self.qkv_proj = QKVParallelLinear(C, D, H, K, config.qkv_bias, tp, order, v_order, fp8[0])
        self.q_norm, self.k_norm = qk_norms(config, self.qkv_proj)
        self.full_qk_norms = (self.q_norm, self.k_norm) if config.qk_norm == "full" else None
        self.rope = [rope]  # in a list: the table is a submodule of the model, not of each layer
        self.attn = Attention(
            self.qkv_proj.num_heads, D, self.qkv_proj.num_kv_heads, backend, config.attention_scale,
            config.windows[layer],
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            H * D, C, config.o_bias, tp, scale=config.residual_scale, fp8_block=fp8[1], head_order=v_order
        )
        self.post_norm = hidden_norm(config, config.family.post_norm)
        self.eps = config.rms_norm_eps

    def forward(self, residual: torch.Tensor, norm: RMSNorm | None, context: Context,
                logits_indices: torch.Tensor | None = None) -> torch.Tensor:
        """residual [T, C] -> residual + attention(norm(residual)), [T, C]; [N, C] for ``logits_indices`` only."""
        q_norm, k_norm = (None, None) if self.full_qk_norms else (self.q_norm, self.k_norm)
        epilogue = QKVEpilogue(
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            self.eps,
            self.rope[0].cos_sin,
            context.positions,
            context.slot_mapping,
            self.attn.k_cache,
            self.attn.v_cache,
            self.attn.num_heads,
            self.attn.num_kv_heads,
            self.attn.kv_scale,
        )
        q = self.qkv_proj(residual, norm, epilogue, self.full_qk_norms)
        if logits_indices is not None:
            q, residual, context = q[logits_indices], residual[logits_indices], context.last_tokens_only()
        return add_to_residual(self.o_proj, self.attn(q, context), residual, self.post_norm, context.leaves_sums)


class MLP(nn.Module):
    """Gated: down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, layer: int, tp: TPGroup):
        super().__init__()
        C, I, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        fp8 = [config.fp8_block(layer, name) for name in ("mlp.gate_up_proj", "mlp.down_proj")]
        self.gate_up_proj = MergedColumnParallelLinear(C, [I, I], bias, tp, fp8[0])
        self.act = config.act
        self.down_proj = RowParallelLinear(I, C, bias, tp, scale=config.residual_scale, fp8_block=fp8[1])
        self.post_norm = hidden_norm(config, config.family.post_norm)

    def forward(self, residual: torch.Tensor, norm: RMSNorm | None, context: Context) -> torch.Tensor:
        """residual [T, C] -> residual + mlp(norm(residual)), [T, C]."""
        gated = self.gate_up_proj(residual, norm=norm, act=self.act)
        return add_to_residual(self.down_proj, gated, residual, self.post_norm, context.leaves_sums)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, rope: RotaryEmbedding, backend: AttentionBackend, tp: TPGroup):
        super().__init__()
        is_sparse = config.moe is not None and layer not in config.moe.dense_layers
        self.self_attn = SelfAttention(config, layer, rope, backend, tp)
        self.mlp = SparseMoE(config, tp) if is_sparse else MLP(config, layer, tp)
        self.input_layernorm = hidden_norm(config, config.family.pre_norm)
        self.post_attention_layernorm = hidden_norm(config, config.family.pre_norm)

    def forward(self, residual: torch.Tensor, context: Context,
                logits_indices: torch.Tensor | None = None) -> torch.Tensor:
        residual = self.self_attn(residual, self.input_layernorm, context, logits_indices)
        return self.mlp(residual, self.post_attention_layernorm, context)


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, tp: TPGroup):
        super().__init__()
        C, eps, family = config.hidden_size, config.rms_norm_eps, config.family
        ropes = config.ropes[: config.num_hidden_layers]
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, C, tp, config.embed_scale)
        tables = {  # layers share them
            rope: RotaryEmbedding(config.head_dim, config.max_position_embeddings, rope, padded_head_dim(config))
            for rope in dict.fromkeys(ropes)
        }
        self.ropes = nn.ModuleList(tables.values())
        self.layers = nn.ModuleList(DecoderLayer(config, i, tables[rope], backend, tp) for i, rope in enumerate(ropes))
        self.norm = RMSNorm(C, eps, family.norm_offset, config.logit_scale)

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
        self.fp8 = config.fp8
        self.renamed_tensors = config.family.renamed + RENAMED_TENSORS * (config.fp8 is not None)
        self.unused_tensors = re.compile("|".join(_unused_tensors(config)))
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, context: Context) -> torch.Tensor:
        return self.model(input_ids, context)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] -> logits of this rank's vocabulary shard, [N, V / size]."""
        return self.lm_head(hidden)


def _unused_tensors(config: ModelConfig) -> list[str]:
    """Regular expressions for names of tensors that checkpoints may hold and the model does without."""
    n = config.num_hidden_layers
    unused = [r".*rotary_emb\.inv_freq", config.family.skipped or r"(?!)"]
    unused += [rf"model\.layers\.{n + i}\..*" for i in range(config.num_nextn_predict_layers)]
    unused += [UNUSED_TENSORS] * (config.fp8 is not None)
    return unused + [r"(.*\.)?lm_head\.weight"] * config.tie_word_embeddings  # a copy of the embedding

"""The decoder-only transformer, one for all families; rows of ``MODELS`` have the switches where they differ.

Layers add to a residual: ``residual += mixer(norm(residual))``, ``residual += mlp(norm(residual))``. A mixer lets
tokens see each other; ``kinds.py`` has a table of mixers and MLPs. Some families also normalise the results, or only
these. Differences that need no arithmetic of their own (the order of rotated dimensions, factors, offsets) are folded
into the weights when they are loaded. Mixer and MLP return this rank's partial sum; the layer sums up over ranks.

A residual is a tensor [T, C] or, between some products and the next RMSNorm, ``SplitKPartials``.

Legend: T packed tokens, N sampled tokens, C hidden size, H query heads, K KV heads (of this rank), D head size.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.linear.reference import QKVEpilogue
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.layers.context import Context
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding, head_orders
from nanovllm.layers.weight_loader import Shard, Shards, row_loader
from nanovllm.models.config import LayerConfig, ModelConfig
from nanovllm.models.kinds import DECODERS, MIXERS, MLPS, load_kind
from nanovllm.quantization.weights import new_bias


class SelfAttention(nn.Module):
    """The mixer of attention layers."""

    name = "self_attn"  # name in checkpoints
    packed_modules_mapping: ClassVar = {f"{x}_proj": ("qkv_proj", x) for x in "qkv"}  # their module -> (ours, shard id)

    def __init__(self, config: ModelConfig, layer: LayerConfig, rope: RotaryEmbedding, backend: AttentionBackend,
                 tp: TPGroup):
        super().__init__()
        family, C, D = config.family, config.hidden_size, rope.head_dim
        H, K, eps = config.num_attention_heads, layer.num_stored_heads, config.rms_norm_eps
        kinds = [config.precision(layer, name) for name in ("self_attn.qkv_proj", "self_attn.o_proj")]
        orders = head_orders(layer.head_dim, D, rope.num_rotated, family.interleaved)
        self.qkv_proj = qkv = QKVParallelLinear(
            C, D, H, K, config.qkv_bias, tp, kinds[0], orders, family.output_gate, layer.keys_are_values
        )
        # norms of each head [D], or over the heads of all ranks, with the weights of this rank's heads
        shards = {"": [], "head": [Shard(D, 0, 1, orders.qk)] * 2, "full": [qkv.shards["q"], qkv.shards["k"]]}
        norms: list[Any] = [RMSNorm(x.num_rows, eps, family.norm_offset, shard=x) for x in shards[config.qk_norm]]
        self.q_norm, self.k_norm = norms or [None, None]
        self.full_qk_norms = tuple(norms) if config.qk_norm == "full" else None
        scale = config.residual_scale * config.scales.attention
        self.o_proj = RowParallelLinear(H * D, C, config.o_bias, tp, kinds[1], scale, orders.v)
        self.adds_residual = not family.post_norm
        self.attn = Attention(
            qkv.num_heads, D, qkv.num_kv_heads, backend, config.attention_scale, layer.window, qkv.shards["k"].place,
            config.attention_softcap,
        )  # fmt: skip
        self.sinks = new_bias(qkv.num_heads) if family.sinks else None
        if self.sinks is not None:
            self.sinks.weight_loader = row_loader(*qkv.shards["q"].place)  # type: ignore[attr-defined]
        weights: list[Any] = [norm.weight for norm in norms] if config.qk_norm == "head" else [None, None]
        self.query_scales = rope.query_scales
        # The epilogue of the QKV product; ``forward`` adds the step's tokens and the cache, which moves at a wake-up.
        self.qk = partial(
            QKVEpilogue, q_weight=weights[0], k_weight=weights[1], eps=eps, cos_sin=rope.cos_sin,
            num_heads=qkv.num_heads, num_kv_heads=qkv.num_kv_heads, kv_scale=self.attn.kv_scale, v_norm=family.v_norm,
        )  # fmt: skip

    def forward(self, residual: torch.Tensor, norm: RMSNorm | None, context: Context) -> torch.Tensor:
        """residual [T, C] -> this rank's partial sum of [residual +] attention(norm(residual)), [T, C] or [N, C].

        Only q comes back from the product of Q, K and V. It normalises and rotates q and k, and writes k and v to the
        slots of the KV cache, all in one kernel where there is one.
        """
        qk = self.qk(
            positions=context.rope_positions, slot_mapping=context.slot_mapping,
            k_cache=self.attn.k_cache, v_cache=self.attn.v_cache,
        )  # fmt: skip
        q, gate = self.qkv_proj(residual, norm, qk, self.full_qk_norms)
        if self.query_scales is not None:
            q = q * self.query_scales[context.positions.long(), None, None]
        if context.logits_indices is not None:  # keys and values of the other tokens are stored by now
            q, residual = q[context.logits_indices], residual[context.logits_indices]
            gate = None if gate is None else gate[context.logits_indices]
            context = context.last_tokens_only()
        o = self.attn(q, context, self.sinks)
        if gate is not None:
            o = self.qkv_proj.ops.sigmoid_gate(o, gate)
        return self.o_proj(o, residual=residual if self.adds_residual else None)


class MLP(nn.Module):
    """Gated: down(act(gate(x)) * up(x)). A shared expert has a ``size`` and no bias; its owner adds it up."""

    packed_modules_mapping: ClassVar = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}

    def __init__(self, config: ModelConfig, layer: LayerConfig, tp: TPGroup, name: str = "mlp", size: int = 0):
        super().__init__()
        C, I, bias = config.hidden_size, size or layer.intermediate_size, config.mlp_bias and not size
        kinds = [config.precision(layer, f"{name}.{part}") for part in ("gate_up_proj", "down_proj")]
        up = Shard(I // tp.size, tp.rank, tp.size)
        shards = Shards({0: up._replace(scale=config.scales.gate), 1: up})
        self.gate_up_proj = MergedColumnParallelLinear(C, shards, bias, tp, kinds[0])
        self.act = config.act
        self.down_proj = RowParallelLinear(I, C, bias, tp, kinds[1], config.residual_scale * config.scales.mlp)
        self.adds_residual = not config.family.post_norm

    def hidden(self, x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        """x [T, C] -> act(gate(x)) * up(x) of norm(x), [T, I], for ``down_proj``."""
        return self.gate_up_proj(x, norm=norm, act=self.act, reader=self.down_proj)

    def forward(self, residual: torch.Tensor, norm: RMSNorm | None, context: Context) -> torch.Tensor:
        """residual [T, C] -> this rank's partial sum of [residual +] mlp(norm(residual)), [T, C]."""
        return self.down_proj(self.hidden(residual, norm), residual=residual if self.adds_residual else None)


class DecoderLayer(nn.Module):
    """A mixer and an MLP, or one of them, each between its norms. Sums their results over ranks."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, rope: RotaryEmbedding | None,
                 backend: AttentionBackend, tp: TPGroup):
        super().__init__()
        family = config.family

        def norm(is_there: bool) -> RMSNorm | None:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, family.norm_offset) if is_there else None

        self.tp, self.sublayers = tp, []  # (module, names of the norms before and after)
        is_alone = not (layer.mixer and layer.mlp)
        if layer.mixer:
            mixer = load_kind(MIXERS[layer.mixer])(config, layer, rope, backend, tp)
            for name, part in (getattr(mixer, "parts", {}) | {mixer.name: mixer}).items():
                setattr(self, name, part)
            before = "norm" if is_alone else "input_layernorm"
            setattr(self, before, norm(family.pre_norm))
            self.mixer_post_norm = norm(family.post_norm)
            self.sublayers.append((mixer.name, before, "mixer_post_norm"))
        if layer.mlp:
            self.mlp = load_kind(MLPS[layer.mlp])(config, layer, tp)
            before = "norm" if is_alone else "post_attention_layernorm"
            setattr(self, before, norm(family.pre_norm))
            self.mlp_post_norm = norm(family.post_norm)
            self.sublayers.append(("mlp", before, "mlp_post_norm"))

    def forward(self, residual: torch.Tensor, context: Context) -> torch.Tensor:
        """residual [T, C] -> [T, C]; [N, C] with ``context.logits_indices``."""
        for name, before, after in self.sublayers:
            norm, post_norm = getattr(self, before), getattr(self, after)
            y = self.tp.all_reduce(getattr(self, name)(residual, norm, context))
            if post_norm is not None:  # otherwise the sublayer has added the residual
                if name != "mlp" and context.logits_indices is not None:  # the last mixer of a prefill
                    residual = residual[context.logits_indices]
                y = post_norm.add_to(residual, y)
            residual = y
        return residual


class Decoder(nn.Module):
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, config: ModelConfig, backend: AttentionBackend, tp: TPGroup):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp, config.embed_scale)
        tables = {}  # shared by layers
        for rope, head_dim in dict.fromkeys((layer.rope, layer.head_dim) for layer in config.attention_layers):
            D = kernels.select().padded_head_dim(head_dim)
            config.check_padded_heads(head_dim, D)
            scaled: Any = (*rope.frequencies(head_dim), rope.query_scales(config.num_positions)) if rope else ()
            tables[rope, head_dim] = RotaryEmbedding(D, config.num_positions, *scaled)
        self.ropes = nn.ModuleList(tables.values())
        self.layers = nn.ModuleList(
            self.layer_class(config, x, tables.get((x.rope, x.head_dim)), backend, tp) for x in config.layers
        )
        self.last_storing = config.last_storing
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.family.norm_offset, config.logit_scale)

    def forward(self, input_ids: torch.Tensor, context: Context) -> torch.Tensor:
        """input_ids [T] -> hidden states [T, C]; [N, C] with ``context.logits_indices``.

        In prefill, the last layer with a mixer runs for the last token of each sequence only, once its keys and values
        are stored; so do the layers after it.
        """
        residual, every_token = self.embed_tokens(input_ids), context.all_tokens()
        for i, layer in enumerate(self.layers):
            residual = layer(residual, every_token if i < self.last_storing else context)
        return self.norm(residual)


class CausalLM(nn.Module):
    """A decoder and its head, of tokens or labels, built on torch's default device and dtype, weights uninitialised."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, tp: TPGroup):
        super().__init__()
        self.config, self.model = config, load_kind(DECODERS[config.family.decoder])(config, backend, tp)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, softcap=config.logit_softcap)
        if config.tie_word_embeddings or not config.has_lm_head:  # nobody reads it without an LM head
            self.lm_head.weight = self.model.embed_tokens.weight
        if config.num_labels:
            self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False).requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, context: Context) -> torch.Tensor:
        return self.model(input_ids, context)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] -> logits of this rank's vocabulary shard, [N, V / size]."""
        return self.lm_head(hidden)

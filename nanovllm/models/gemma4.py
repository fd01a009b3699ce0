"""Gemma 4: embeddings of each layer, layers that share keys and values, and an MLP beside the experts.

Owns the additions to the layers of ``decoder.py``. A layer's result is multiplied by its ``layer_scalar``. In E2B and
E4B, each layer has its own embedding of each token (per-layer inputs), and the last layers attend to the keys and
values of earlier ones: in a prefill, only the tokens to sample from pass these layers.

Legend: T packed tokens, N sampled tokens, C hidden size, L layers, P size of a per-layer input.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.moe.reference import Routing
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.layers.context import Context
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.config import LayerConfig, ModelConfig
from nanovllm.models.decoder import MLP, Decoder, DecoderLayer
from nanovllm.models.moe import Experts, Router

PER_LAYER = "per_layer_inputs"  # key of ``Context.tensors``, [T, L, P]


class DenseAndExperts(MLP):
    """An MLP and a mixture of experts that both read the residual, each with its own norms before and after.

    The router reads the normed residual. A learned scale for each expert multiplies the routing weight.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, tp: TPGroup):
        super().__init__(config, layer, tp)
        assert config.moe is not None
        C, eps = config.hidden_size, config.rms_norm_eps
        self.tp, self.ops, self.routing = tp, kernels.select(), Routing(config.moe.top_k)
        self.gate_norm, self.experts_norm = RMSNorm(C, eps, scale=C**-0.5), RMSNorm(C, eps)
        self.gate = Router(config.family, config.moe.num_experts, C)
        self.expert_scales = nn.Parameter(torch.empty(config.moe.num_experts), requires_grad=False)
        self.experts = Experts(config, config.moe, layer, tp)

    def forward(self, residual: torch.Tensor, norm: RMSNorm | None, context: Context) -> Any:
        """residual [T, C] -> this rank's partial sums of MLP and experts: [2, T, C], on a single rank two tensors."""
        slot_mapping = context.slot_mapping
        if len(residual) < len(slot_mapping):  # the last layer of a prefill
            slot_mapping = slot_mapping[context.logits_indices]
        dense = super().forward(residual, norm, context)
        experts = self.ops.fused_moe(
            residual, self.experts_norm.weight, self.experts_norm.eps, self.gate.weight, None, *self.experts.weights(),
            self.routing, slot_mapping, self.act, add_residual=False, router_norm_weight=self.gate_norm.weight,
            expert_scales=self.expert_scales,
        )  # fmt: skip
        return (dense, experts) if self.tp.size == 1 else torch.stack((dense, experts))


class BranchNorm(RMSNorm):
    """The norms after ``DenseAndExperts``: one for each branch, and one for their sum."""

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        self.dense_norm, self.experts_norm = RMSNorm(size, eps), RMSNorm(size, eps)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [T, C] + norm(norms of x [2, T, C])."""
        dense, experts = x
        return self.ops.add_branch_norms(
            dense, experts, self.dense_norm.weight, self.experts_norm.weight, self.weight, self.eps, residual,
            self.sum_scale,
        )  # fmt: skip


class Gemma4Layer(DecoderLayer):
    index: int  # the layer's place in the decoder

    def __init__(self, config: ModelConfig, layer: LayerConfig, rope: RotaryEmbedding | None,
                 backend: AttentionBackend, tp: TPGroup):
        super().__init__(config, layer, rope, backend, tp)
        C, P, eps = config.hidden_size, config.per_layer_size, config.rms_norm_eps
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        if layer.mlp == "dense and experts":
            self.mlp_post_norm = BranchNorm(C, eps)
        last = self.mlp_post_norm
        if P:
            self.per_layer_input_gate, self.per_layer_projection = (
                ReplicatedLinear(C, P, tp=tp), ReplicatedLinear(P, C, tp=tp)
            )  # fmt: skip
            last, self.ops = RMSNorm(C, eps), kernels.select()
            self.post_per_layer_input_norm = last
        if last is not None:
            last.sum_scale = self.layer_scalar

    def forward(self, residual: torch.Tensor, context: Context) -> torch.Tensor:
        residual = super().forward(residual, context)
        if PER_LAYER in context.tensors:
            of_layer = context.tensors[PER_LAYER][:, self.index]
            if len(residual) < len(of_layer):  # the last layer of a prefill
                of_layer = of_layer[context.logits_indices]
            y = self.ops.act_and_mul(self.per_layer_input_gate(residual), "gelu_tanh", of_layer)
            y = self.per_layer_projection(y)
            residual = self.post_per_layer_input_norm.add_to(residual, y)
        return residual


class Gemma4Decoder(Decoder):
    layer_class: ClassVar[type[DecoderLayer]] = Gemma4Layer

    def __init__(self, config: ModelConfig, backend: AttentionBackend, tp: TPGroup):
        super().__init__(config, backend, tp)
        C, L, P = config.hidden_size, config.num_hidden_layers, config.per_layer_size
        storing: dict[str, Attention] = {}  # the last attention of each kind that stores keys and values
        layers: Any = self.layers
        for i, (of_layer, layer) in enumerate(zip(config.layers, layers, strict=True)):
            layer.index = i
            if of_layer.shares_kv:  # the layer computes and norms q alone
                layer.self_attn.attn, layer.self_attn.k_norm = storing[of_layer.kind], layer.self_attn.q_norm
            storing[of_layer.kind] = layer.self_attn.attn
        self.per_layer_size = P
        if P:
            # the sum of both is divided by sqrt(2); the norm undoes the projection's division by sqrt(C)
            self.embed_tokens_per_layer = VocabParallelEmbedding(config.vocab_size, L * P, tp, (P / 2) ** 0.5)
            self.per_layer_model_projection = ReplicatedLinear(C, L * P, tp=tp)
            self.per_layer_projection_norm = RMSNorm(P, config.rms_norm_eps * C, scale=0.5**0.5)

    def forward(self, input_ids: torch.Tensor, context: Context) -> torch.Tensor:
        """input_ids [T] -> hidden states [T, C]; [N, C] with ``context.logits_indices``."""
        residual = self.embed_tokens(input_ids)
        if self.per_layer_size:
            inputs = self.per_layer_inputs(input_ids, residual)
            context = replace(context, tensors={**context.tensors, PER_LAYER: inputs})
        every_token, storing = context.all_tokens(), self.layers[: self.last_storing + 1]
        for layer in storing[:-1]:
            residual = layer(residual, every_token)
        residual = storing[-1](residual, context)
        if context.logits_indices is not None:
            context = of_last_tokens(context, context.logits_indices)
        for layer in self.layers[self.last_storing + 1 :]:
            residual = layer(residual, context)
        return self.norm(residual)

    def per_layer_inputs(self, input_ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Embeddings of the tokens for each layer, mixed with a projection of their embeddings: [T, L, P]."""
        P = self.per_layer_size
        of_tokens, projected = self.embed_tokens_per_layer(input_ids), self.per_layer_model_projection(embeddings)
        mixed = self.per_layer_projection_norm.add_to(of_tokens.view(-1, P), projected.view(-1, P))
        return mixed.view(len(input_ids), -1, P)


def of_last_tokens(context: Context, rows: torch.Tensor) -> Context:
    """The context of the tokens ``rows`` alone, for layers that store nothing."""
    rope_rows = None if context.rope_rows is None else context.rope_rows[rows]
    tensors = {name: x[rows] if name == PER_LAYER else x for name, x in context.tensors.items()}
    return replace(
        context.last_tokens_only(), positions=context.positions[rows], slot_mapping=context.slot_mapping[rows],
        rope_rows=rope_rows, tensors=tensors,
    )  # fmt: skip

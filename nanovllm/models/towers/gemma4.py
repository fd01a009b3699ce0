"""The vision tower of Gemma 4, and the embedder of patches that its 12B has in place of one.

Parameters have the names of transformers' classes, which are the tests' oracle.

The patches of a token are neighbours (``blocks.py``). T patches of a launch, N tokens, P pixels of a patch's side, k
patches of a token's side, C hidden size, H heads, D head size.
"""

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nanovllm import kernels
from nanovllm.kernels.attention.reference import Segments
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.models.towers.blocks import on, positions_of, rope_theta
from nanovllm.utils.checkpoint_tensor import CheckpointTensor

LIMITS = {"input_min": -torch.inf, "input_max": torch.inf, "output_min": -torch.inf, "output_max": torch.inf}
Grid = tuple[int, int, int]  # one frame, rows and columns of patches


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of the last dimension without a weight, in fp32."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps)


class Gemma4Tower(nn.Module):
    pixel_dtype: ClassVar = torch.float32  # they are shifted before they are rounded

    def __init__(self, config: Any):
        super().__init__()
        c = config.vision_config
        self.config, self.vision_tower = config, Gemma4Vision(c)
        self.embed_vision = Projection(c.hidden_size, config.text_config.hidden_size, c.rms_norm_eps)

    def forward(self, images: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Patches of images -> features of their tokens. The grids are on the host, the rest on the device."""
        return self.embed_vision(self.vision_tower(*patches_of(images)))


class UnifiedTower(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.config, self.embed_vision = config, PatchEmbedder(config.vision_config, config.text_config.hidden_size)

    def forward(self, images: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """As of ``Gemma4Tower``."""
        return self.embed_vision(*patches_of(images))


def patches_of(images: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, list[Grid]]:
    """The patches of all images, channels first, [T, 3 * P * P], and their grids."""
    grids = [tuple(grid) for image in images for grid in image["image_grid_thw"].tolist()]
    return torch.cat([image["pixel_values"] for image in images]), grids


class Projection(nn.Module):
    """Maps states [N, C] to features [N, output size]."""

    def __init__(self, num_in: int, num_out: int, eps: float):
        super().__init__()
        self.eps, self.embedding_projection = eps, nn.Linear(num_in, num_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.embedding_projection.weight
        return F.linear(normed(x, self.eps).to(weight.dtype), weight)


class PatchEmbedder(nn.Module):
    """A product of a token's pixels and learned positions, between norms; and a projection."""

    def __init__(self, c: Any, num_out: int):
        super().__init__()
        self.merge, self.patch_size, self.eps = c.pooling_kernel_size, c.patch_size, c.rms_norm_eps
        width = 3 * (c.patch_size * c.pooling_kernel_size) ** 2
        self.patch_ln1, self.patch_ln2 = nn.LayerNorm(width), nn.LayerNorm(c.mm_embed_dim)
        self.patch_dense, self.pos_norm = nn.Linear(width, c.mm_embed_dim), nn.LayerNorm(c.mm_embed_dim)
        self.pos_embedding = nn.Parameter(torch.empty(c.mm_posemb_size, 2, c.mm_embed_dim))
        self.embedding_projection = nn.Linear(c.mm_embed_dim, num_out, bias=False)

    def forward(self, patches: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """Patches [T, 3 * P * P] -> features [N, output size]."""
        k, P = self.merge, self.patch_size
        tokens = patches.view(-1, k, k, 3, P, P).permute(0, 1, 4, 2, 5, 3).flatten(1)  # rows, columns, channels
        places = np.concatenate([positions_of(rows // k, columns // k, 1) for _, rows, columns in grids])
        rows, columns = on(patches.device, places).long().unbind(1)
        x = self.patch_ln2(self.patch_dense(self.patch_ln1(tokens)))
        x = self.pos_norm(x + self.pos_embedding[columns, 0] + self.pos_embedding[rows, 1])
        return self.embedding_projection(normed(x, self.eps).to(x.dtype))


class PatchProjection(nn.Module):
    """A product of a patch's pixels, and learned embeddings of its column and its row."""

    def __init__(self, c: Any):
        super().__init__()
        self.input_proj = nn.Linear(3 * c.patch_size**2, c.hidden_size, bias=False)
        self.position_embedding_table = nn.Parameter(torch.empty(2, c.position_embedding_size, c.hidden_size))

    def forward(self, patches: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Patches [T, 3 * P * P], numbers from 0 to 1, and rows and columns, int64 [T, 2] -> [T, C]."""
        weight, (by_column, by_row) = self.input_proj.weight, self.position_embedding_table
        channels_last = (2 * patches - 1).to(weight.dtype).unflatten(1, (3, -1)).transpose(1, 2).flatten(1)
        return F.linear(channels_last, weight) + (by_column[places[:, 1]] + by_row[places[:, 0]])


class Gemma4Vision(nn.Module):
    def __init__(self, c: Any):
        super().__init__()
        self.config, self.ops, self.patch_embedder = c, kernels.select(), PatchProjection(c)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))})
        if c.standardize:
            self.std_bias, self.std_scale = (nn.Parameter(torch.zeros(c.hidden_size)) for _ in range(2))

    def forward(self, patches: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """Patches [T, 3 * P * P] -> states [N, C], the mean of each token's patches."""
        c, device = self.config, patches.device
        frames = [positions_of(rows, columns, c.pooling_kernel_size) for _, rows, columns in grids]
        places = on(device, np.concatenate(frames)).long()
        cos_sin = self.cos_sin(places)
        segments = self.ops.packed_segments(np.cumsum([0, *map(len, frames)]).tolist(), device)
        x = self.patch_embedder(patches, places)
        for layer in self.encoder["layers"].children():
            x = layer(x, cos_sin, segments)
        pooled = x.float().view(-1, c.pooling_kernel_size**2, c.hidden_size).mean(1) * c.hidden_size**0.5
        if c.standardize:
            pooled = (pooled - self.std_bias.float()) * self.std_scale.float()
        return pooled.to(x.dtype)

    def cos_sin(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, fp32 [T, 1, 2, D / 4], of columns and rows, which turn by the same frequencies."""
        size = self.config.head_dim // 2
        exponents = torch.arange(0, size, 2, device=places.device).float() / size
        angles = places.flip(1)[:, None, :, None] / rope_theta(self.config) ** exponents
        return angles.cos(), angles.sin()


class Layer(nn.Module):
    def __init__(self, c: Any):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm, self.post_attention_layernorm, self.pre_feedforward_layernorm, \
            self.post_feedforward_layernorm = (RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(4))  # fmt: skip

    def forward(self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor],
                segments: Segments) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        x = self.post_attention_layernorm.add_to(x, self.self_attn(self.input_layernorm(x), cos_sin, segments))
        return self.post_feedforward_layernorm.add_to(x, self.mlp(self.pre_feedforward_layernorm(x)))


class Attention(nn.Module):
    """Attention of a layer, in both directions, with norms of q, k and v."""

    def __init__(self, c: Any):
        super().__init__()
        self.head_dim, self.eps, self.ops = c.head_dim, c.rms_norm_eps, kernels.select()
        self.copies = c.num_attention_heads // c.num_key_value_heads
        widths = (c.head_dim * heads for heads in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads))
        self.q_proj, self.k_proj, self.v_proj = (ClippedLinear(c, c.hidden_size, width) for width in widths)
        self.o_proj = ClippedLinear(c, c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps), RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor],
                segments: Segments) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        q, k, v = (proj(x).unflatten(1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (
            turned(normed(each, self.eps) * norm.weight.float(), *cos_sin).to(x.dtype)
            for each, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        v = normed(v, self.eps).to(x.dtype)
        k, v = (each.repeat_interleave(self.copies, 1) if self.copies > 1 else each for each in (k, v))
        return self.o_proj(self.ops.packed_attention(q, k, v, segments, 1.0).flatten(1))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, H, D]: the first half by columns and the second by rows, each half as a head of its own."""
    first, second = x.unflatten(2, (2, 2, -1)).unbind(3)  # [T, H, 2, D / 4] each
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=3).flatten(2)


class MLP(nn.Module):
    def __init__(self, c: Any):
        super().__init__()
        from transformers.activations import ACT2FN

        self.gate_proj, self.up_proj = (ClippedLinear(c, c.hidden_size, c.intermediate_size) for _ in range(2))
        self.down_proj, self.act = ClippedLinear(c, c.intermediate_size, c.hidden_size), ACT2FN[c.hidden_activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class ClippedLinear(nn.Module):
    """A linear layer that limits its inputs and outputs, in towers that have limits."""

    input_min: nn.Parameter | None
    input_max: nn.Parameter
    output_min: nn.Parameter
    output_max: nn.Parameter

    def __init__(self, c: Any, num_in: int, num_out: int):
        super().__init__()
        self.linear = nn.Linear(num_in, num_out, bias=False)
        for name, limit in LIMITS.items():
            self.register_parameter(name, scalar(limit) if c.use_clipped_linears else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs] -> [T, outputs]."""
        if self.input_min is None:
            return self.linear(x)
        return self.linear(x.clamp(self.input_min, self.input_max)).clamp(self.output_min, self.output_max)


def scalar(value: float) -> nn.Parameter:
    """A parameter [] with this value until it is loaded."""
    param = nn.Parameter(torch.tensor(value), requires_grad=False)

    def load(target: torch.Tensor, loaded: CheckpointTensor, shard_id: Any = None) -> None:
        target.copy_(loaded.fit([]).read(...))

    param.weight_loader = load  # type: ignore[attr-defined]
    return param

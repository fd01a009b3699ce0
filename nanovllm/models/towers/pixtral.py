"""Pixtral's vision tower and its projector, as Mistral 3 and LightOnOCR have them, of this library's layers.

Parameters have the names of transformers' classes, which are the tests' oracle. Attention is within an image.

T patches of a launch, N tokens, P pixels of a patch's side, C hidden size, D head size.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nanovllm import kernels
from nanovllm.kernels.attention.reference import Segments
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from nanovllm.layers.weight_loader import Shard, Shards
from nanovllm.models.towers.blocks import GatedMLP, attention, cos_sin_of, on, positions_of, rope_theta

EPS = 1e-5  # in the tower's norms


class PixtralTower(nn.Module):
    """Tower and projector. ``names``: their names in transformers' model, where the checkpoint has them, too."""

    def __init__(self, config: Any, names: tuple[str, str]):
        super().__init__()
        self.config, self.names = config, names
        self.add_module(names[0], PixtralVision(config.vision_config, config.spatial_merge_size))
        self.add_module(names[1], Projector(config))

    def forward(self, images: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Pixels [images, 3, height, width] on the device -> features of their tokens [N, output size]."""
        tower, projector = map(self.get_submodule, self.names)
        return projector(tower([image for each in images for image in each["pixel_values"]]))


class PixtralVision(nn.Module):
    def __init__(self, c: Any, merge: int):
        super().__init__()
        self.config, self.merge, self.ops = c, merge, kernels.select()
        self.patch_conv = nn.Conv2d(c.num_channels, c.hidden_size, c.patch_size, stride=c.patch_size, bias=False)
        self.ln_pre = RMSNorm(c.hidden_size, EPS)
        self.transformer = nn.ModuleDict({"layers": nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))})

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        """Pixels [3, height, width] of each image -> [T, C]; the patches of a token are neighbours."""
        size, device = self.config.patch_size, images[0].device
        sizes = [(image.shape[1] // size, image.shape[2] // size) for image in images]
        patches = torch.cat([self.patches(image, *each) for image, each in zip(images, sizes, strict=True)])
        positions = np.concatenate([positions_of(*each, self.merge) for each in sizes])
        bounds = np.cumsum([0, *(rows * columns for rows, columns in sizes)]).tolist()
        segments = self.ops.packed_segments(bounds, device)
        cos_sin = self.cos_sin(positions, device)
        x = self.ln_pre(F.linear(patches, self.patch_conv.weight.flatten(1)))
        for layer in self.transformer["layers"].children():
            x = layer(x, cos_sin, segments)
        return x

    def patches(self, image: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Pixels [3, height, width] -> patches [rows * columns, 3 * P * P]."""
        size, merge = self.config.patch_size, self.merge
        shape = -1, rows // merge, merge, size, columns // merge, merge, size
        blocks = image[:, : rows * size, : columns * size].reshape(shape)
        return blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1)

    def cos_sin(self, positions: np.ndarray, device: torch.device) -> torch.Tensor:
        """Cosines and sines, fp32 [T, D], of rows and columns, int32 [T, 2], whose frequencies take turns."""
        size = self.config.hidden_size // self.config.num_attention_heads
        frequencies = 1.0 / rope_theta(self.config) ** (torch.arange(0, size, 2, device=device).float() / size)
        return cos_sin_of(on(device, positions), frequencies[::2], frequencies[1::2])


class Layer(nn.Module):
    def __init__(self, c: Any):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(c.hidden_size, EPS), RMSNorm(c.hidden_size, EPS)
        self.attention, self.feed_forward = Attention(c), GatedMLP(c.hidden_size, c.intermediate_size, bias=False)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, segments: Segments) -> torch.Tensor:
        x = self.attention(self.attention_norm(x), x, cos_sin, segments)
        return self.feed_forward(self.ffn_norm(x), x)


class Attention(nn.Module):
    def __init__(self, c: Any):
        super().__init__()
        self.packed_modules_mapping = {f"{name}_proj": ("qkv_proj", name) for name in "qkv"}
        shards = Shards({name: Shard(c.hidden_size, 0, 1) for name in "qkv"})
        self.qkv_proj = MergedColumnParallelLinear(c.hidden_size, shards)
        self.o_proj = ReplicatedLinear(c.hidden_size, c.hidden_size)
        self.num_heads, self.ops = c.num_attention_heads, kernels.select()

    def forward(self, x: torch.Tensor, residual: torch.Tensor, cos_sin: torch.Tensor,
                segments: Segments) -> torch.Tensor:
        """residual + attention of x, all [T, C]."""
        return self.o_proj(attention(self.ops, self.qkv_proj(x), self.num_heads, cos_sin, segments), residual=residual)


class PatchMerger(nn.Module):
    def __init__(self, size: int, merge: int):
        super().__init__()
        self.area, self.merging_layer = merge**2, ReplicatedLinear(size * merge**2, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [N, C]. The layer takes a token's numbers channel by channel."""
        return self.merging_layer(x.view(-1, self.area, x.shape[1]).transpose(1, 2).flatten(1))


class Projector(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        size, text = config.vision_config.hidden_size, config.text_config
        bias = getattr(config, "multimodal_projector_bias", False)
        self.norm = RMSNorm(size, text.rms_norm_eps)
        self.patch_merger = PatchMerger(size, config.spatial_merge_size)
        self.linear_1 = ReplicatedLinear(size, text.hidden_size, bias=bias)
        self.linear_2 = ReplicatedLinear(text.hidden_size, text.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.gelu(self.linear_1(self.patch_merger(self.norm(x)))))

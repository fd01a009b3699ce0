"""The vision towers of Qwen2.5-VL and of Qwen3-VL, which Qwen3.5 and 3.6 share, of this library's layers.

Parameters have the names of transformers' classes, which are the tests' oracle.

Attention is within a frame; in most layers of Qwen2.5-VL within a window, so that its patches are in the order of
windows, and its tokens row by row again at the end.

T patches of a launch, N tokens, P numbers in a patch, C hidden size, H heads, D head size.
"""

from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nanovllm import kernels
from nanovllm.kernels.attention.reference import Segments
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.models.towers.blocks import GatedMLP, attention, cos_sin_of, on, positions_of, rope_theta

EPS = 1e-6  # in all norms
Grid = tuple[int, int, int]  # frames, rows and columns of patches


class QwenTower(nn.Module):
    """A tower as ``visual``, its name in transformers' model of a whole checkpoint."""

    def __init__(self, config: Any, kind: "type[QwenVision]"):
        super().__init__()
        self.config, self.visual = config, kind(config.vision_config)

    def forward(self, images: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Patches of images -> features of their tokens. The grids are on the host, the rest on the device."""
        grids = [tuple(grid) for image in images for grid in image["image_grid_thw"].tolist()]
        return self.visual(torch.cat([image["pixel_values"] for image in images]), grids)


class Attention(nn.Module):
    """Attention of a block, in both directions."""

    def __init__(self, c: Any):
        super().__init__()
        self.qkv = ReplicatedLinear(c.hidden_size, 3 * c.hidden_size, bias=True)
        self.proj = ReplicatedLinear(c.hidden_size, c.hidden_size, bias=True)
        self.num_heads, self.ops = c.num_heads, kernels.select()

    def forward(self, x: torch.Tensor, residual: torch.Tensor, cos_sin: torch.Tensor,
                segments: Segments) -> torch.Tensor:
        """residual + attention of x, all [T, C]."""
        output = attention(self.ops, self.qkv(x), self.num_heads, cos_sin, segments)
        return self.proj(output, residual=residual)


class Block(nn.Module):
    def __init__(self, norms: tuple[nn.Module, nn.Module], attn: nn.Module, mlp: nn.Module):
        super().__init__()
        (self.norm1, self.norm2), self.attn, self.mlp = norms, attn, mlp

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, segments: Segments) -> torch.Tensor:
        x = self.attn(self.norm1(x), x, cos_sin, segments)
        return self.mlp(self.norm2(x), x)


class QwenVision(nn.Module):
    """A tower; its kinds give blocks and mergers."""

    has_patch_bias: ClassVar[bool] = True

    def __init__(self, c: Any):
        super().__init__()
        self.config, self.ops = c, kernels.select()
        size = c.temporal_patch_size, c.patch_size, c.patch_size
        self.patch_embed = nn.ModuleDict({
            "proj": nn.Conv3d(c.in_channels, c.hidden_size, size, stride=size, bias=self.has_patch_bias)
        })  # fmt: skip

    def embed(self, patches: torch.Tensor) -> torch.Tensor:
        """A convolution whose stride is its kernel's size, as a product: [T, P] -> [T, C]."""
        proj: Any = self.patch_embed["proj"]
        return F.linear(patches, proj.weight.flatten(1), proj.bias)

    def cos_sin(self, positions: np.ndarray, device: torch.device) -> torch.Tensor:
        """Cosines and sines, fp32 [T, D], of rows and columns, int32 [T, 2], which turn by the same frequencies."""
        size = self.config.hidden_size // self.config.num_heads // 2
        frequencies = 1.0 / rope_theta(self.config) ** (torch.arange(0, size, 2, device=device).float() / size)
        return cos_sin_of(on(device, positions), frequencies, frequencies)


class Qwen2_5Vision(QwenVision):
    has_patch_bias = False

    def __init__(self, c: Any):
        super().__init__(c)
        self.blocks = nn.ModuleList(
            Block((RMSNorm(c.hidden_size, EPS), RMSNorm(c.hidden_size, EPS)), Attention(c),
                  GatedMLP(c.hidden_size, c.intermediate_size, bias=True))
            for _ in range(c.depth)
        )
        self.merger = Qwen2_5Merger(c)

    def forward(self, patches: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """Patches [T, P] -> features [N, output size]."""
        c, device = self.config, patches.device
        merge, area = c.spatial_merge_size, c.spatial_merge_size**2
        side = c.window_size // merge // c.patch_size
        # each frame's tokens in the order of its windows
        frames = [(rows, columns) for count, rows, columns in grids for _ in range(count)]
        orders, sizes = zip(*(windows(rows // merge, columns // merge, side) for rows, columns in frames), strict=True)
        starts = np.cumsum([0, *map(len, orders)])
        order = np.concatenate([each + start for each, start in zip(orders, starts, strict=False)])
        of_patches = (order[:, None] * area + np.arange(area)).ravel()
        positions = np.concatenate([positions_of(*frame, merge) for frame in frames])
        cos_sin = self.cos_sin(positions[of_patches], device)
        of_frames = self.ops.packed_segments((starts * area).tolist(), device)
        of_windows = self.ops.packed_segments((np.cumsum([0, *np.concatenate(sizes)]) * area).tolist(), device)
        x = self.embed(patches).index_select(0, on(device, of_patches))
        for i, block in enumerate(self.blocks):
            x = block(x, cos_sin, of_frames if i in c.fullatt_block_indexes else of_windows)
        features = self.merger(x)
        return torch.empty_like(features).index_copy_(0, on(device, order), features)


class Qwen2_5Merger(nn.Module):
    def __init__(self, c: Any):
        super().__init__()
        size = c.hidden_size * c.spatial_merge_size**2
        self.ln_q = RMSNorm(c.hidden_size, EPS)
        self.mlp = nn.ModuleDict({
            "0": ReplicatedLinear(size, size, bias=True), "2": ReplicatedLinear(size, c.out_hidden_size, bias=True),
        })  # fmt: skip
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [N, output size]."""
        return self.mlp["2"](F.gelu(self.mlp["0"](self.ln_q(x).view(-1, self.size))))


class Qwen3Vision(QwenVision):

    def __init__(self, c: Any):
        super().__init__(c)
        self.pos_embed = nn.Embedding(c.num_position_embeddings, c.hidden_size)
        self.blocks = nn.ModuleList(
            Block((nn.LayerNorm(c.hidden_size, EPS), nn.LayerNorm(c.hidden_size, EPS)), Attention(c), MLP(c))
            for _ in range(c.depth)
        )
        self.merger = Qwen3Merger(c, c.hidden_size)
        self.deepstack = tuple(getattr(c, "deepstack_visual_indexes", None) or ())
        if self.deepstack:
            width = c.hidden_size * c.spatial_merge_size**2
            self.deepstack_merger_list = nn.ModuleList(Qwen3Merger(c, width) for _ in self.deepstack)

    def forward(self, patches: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """Patches [T, P] -> features [N, (1 + deepstack layers) * output size]."""
        merge, device = self.config.spatial_merge_size, patches.device
        frames = [(rows, columns) for count, rows, columns in grids for _ in range(count)]
        positions = np.concatenate([positions_of(*frame, merge) for frame in frames])
        cos_sin = self.cos_sin(positions, device)
        bounds = np.cumsum([0, *(rows * columns for rows, columns in frames)]).tolist()
        segments = self.ops.packed_segments(bounds, device)
        x = self.embed(patches) + self.learned_positions(frames, device)
        deep = []
        for i, block in enumerate(self.blocks):
            x = block(x, cos_sin, segments)
            if i in self.deepstack:
                deep.append(self.deepstack_merger_list[self.deepstack.index(i)](x))
        return torch.cat([self.merger(x), *deep], dim=1) if deep else self.merger(x)

    def learned_positions(self, frames: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
        """Learned positions [T, C]: between the four nearest of a square table, whose corners are the frame's."""
        table, side = self.pos_embed.weight, int(self.config.num_position_embeddings**0.5)
        places, shares = zip(*(neighbours(*each, self.config.spatial_merge_size, side) for each in frames), strict=True)
        places, shares = on(device, np.concatenate(places)), on(device, np.concatenate(shares))
        summed = F.embedding_bag(places, table.float(), per_sample_weights=shares, mode="sum")
        return summed.to(table.dtype)


class MLP(nn.Module):
    """GELU in its tanh form."""

    def __init__(self, c: Any):
        super().__init__()
        self.linear_fc1 = ReplicatedLinear(c.hidden_size, c.intermediate_size, bias=True)
        self.linear_fc2 = ReplicatedLinear(c.intermediate_size, c.hidden_size, bias=True)
        self.ops = kernels.select()

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x = self.ops.gelu_linear(x, self.linear_fc1.weight, self.linear_fc1.bias)
        return self.linear_fc2(x, residual=residual)


class Qwen3Merger(nn.Module):
    """``norm_size``: C, or the size of a token if the norm comes after merging."""

    def __init__(self, c: Any, norm_size: int):
        super().__init__()
        self.size = c.hidden_size * c.spatial_merge_size**2
        self.norm = nn.LayerNorm(norm_size, EPS)
        self.linear_fc1 = ReplicatedLinear(self.size, self.size, bias=True)
        self.linear_fc2 = ReplicatedLinear(self.size, c.out_hidden_size, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [N, output size]."""
        x = self.norm(x.view(-1, *self.norm.normalized_shape)).view(-1, self.size)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


@lru_cache(32)
def windows(rows: int, columns: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The order of a frame's tokens by windows of at most ``side`` x ``side``, and the tokens of each window."""
    row, column = np.indices((rows, columns)) // side
    number = (row * -(-columns // side) + column).ravel()
    return np.argsort(number, kind="stable"), np.bincount(number)


@lru_cache(32)
def neighbours(rows: int, columns: int, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Nearest entries of a table [side * side] for each patch of a frame, int64 [n, 4], and their shares, fp32."""
    places = positions_of(rows, columns, merge) * (side - 1) / np.maximum([rows - 1, columns - 1], 1)
    first = np.floor(places).astype(np.int64)
    rest = (places - first).astype(np.float32)
    ends = np.stack((first, np.minimum(first + 1, side - 1)), axis=1)  # [n, 2, row and column]
    shares = np.stack((1 - rest, rest), axis=1)
    entries = ends[:, :, None, 0] * side + ends[:, None, :, 1]
    weights = shares[:, :, None, 0] * shares[:, None, :, 1]
    return entries.reshape(-1, 4), weights.reshape(-1, 4)

"""The vision tower of a checkpoint: transformers' modules, filled by its tensors.

A tower turns images into features of the language model's hidden size, one row for each of their tokens. Further
columns are added to the outputs of its first layers (deepstack, arXiv:2406.04334).
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.models.vision import TENSORS, VisionConfig
from nanovllm.utils.checkpoint import LOADING_LOCK, open_tensors

DUMMY_STD = 0.02


def packed_attention() -> str:
    """The name for transformers of attention within many images or windows by one launch: torch's flash attention.

    transformers' "sdpa" launches a kernel for each; a page has hundreds of windows in each layer.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn  # since torch 2.10
    except ImportError:
        return "sdpa"
    from transformers import AttentionInterface

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> Any:
        """q, k, v [1, H, T, D] -> [1, T, H, D]."""
        assert kwargs["scaling"] == q.shape[-1] ** -0.5 and not kwargs.get("is_causal")
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        bounds, longest = kwargs["cu_seq_lens_q"].to(torch.int32), kwargs["max_length_q"]
        output: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest)
        return output.unsqueeze(0), None

    name = "nanovllm_flash"  # transformers gives bounds to names with "flash"
    AttentionInterface.register(name, attend)
    return name


class VisionTower(nn.Module):
    """Args:
    vision: of the checkpoint.
    model_path: its directory.
    dtype: to compute in.
    """

    def __init__(self, vision: VisionConfig, model_path: str, dtype: torch.dtype):
        super().__init__()
        with LOADING_LOCK:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(model_path)
            family = vision.family
            module: Any = import_module(f"transformers.models.{family.module}.modeling_{family.module}")
        tower = getattr(module, family.tower)
        self.visual = tower._from_config(config.vision_config, attn_implementation="sdpa", dtype=dtype)
        if dtype != torch.float32 and torch.get_default_device().type == "cuda":
            # behind the constructor, which would look for the package flash-attn
            self.visual.config._attn_implementation = packed_attention()
        self.visual.eval().requires_grad_(False)
        self.dtype = dtype

    def forward(self, images: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Pixels of images, on the device -> features [tokens of all, (1 + deepstack layers) * C]."""
        patches = torch.cat([image["pixel_values"] for image in images]).to(self.dtype)
        grids = torch.cat([image["image_grid_thw"] for image in images])
        output = self.visual(patches, grid_thw=grids)
        return torch.cat([output.pooler_output, *getattr(output, "deepstack_features", ())], dim=-1)

    def blank(self, num_tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Pixels of an image of about this number of tokens, two rows of them."""
        merge, patch = self.visual.spatial_merge_size, next(iter(self.visual.patch_embed.parameters()))[0].numel()
        grid = torch.tensor([[1, 2 * merge, num_tokens // 2 * merge]], device=device)
        return {"pixel_values": torch.zeros(int(grid.prod()), patch, device=device), "image_grid_thw": grid}

    def load(self, model_path: str) -> None:
        """Fill it from the safetensors files: every parameter once, every tensor of the tower used."""
        left = dict(self.visual.named_parameters())
        for file in sorted(Path(model_path).glob("*.safetensors")):
            with open_tensors(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no mapping)
                    if (match := TENSORS.fullmatch(name)) is None:
                        continue
                    param = left.pop(match[1], None)
                    if param is None:
                        raise CheckpointError(f"{file}: {name} is no tensor of this vision tower, or comes twice.")
                    tensor = tensors.get_tensor(name)
                    if tensor.shape != param.shape or not tensor.is_floating_point() or tensor.itemsize < 2:
                        raise CheckpointError(
                            f"{file}: {name} is {tensor.dtype} {list(tensor.shape)}; the vision tower takes 16 or 32 "
                            f"bits and {list(param.shape)}."
                        )
                    param.copy_(tensor)
        if left:
            raise CheckpointError(f"{model_path} lacks tensors of its vision tower: {', '.join(list(left)[:5])}.")

    @torch.no_grad()
    def pad_mlps(self) -> None:
        """Pad gated MLPs with zeros to multiples of 64 units: tensor cores take other sizes at half their rate.

        Qwen2.5-VL's have 3,420.
        """
        for mlp in self.visual.modules():
            if not all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
                continue
            missing = -mlp.down_proj.in_features % 64
            for name, padding in (("gate_proj", (0, 0, 0, missing)), ("up_proj", (0, 0, 0, missing)),
                                  ("down_proj", (0, missing))):  # fmt: skip
                linear = getattr(mlp, name)
                linear.weight = nn.Parameter(F.pad(linear.weight, padding), requires_grad=False)
                if linear.bias is not None and name != "down_proj":
                    linear.bias = nn.Parameter(F.pad(linear.bias, (0, missing)), requires_grad=False)

    def init_dummy(self, seed: int) -> None:
        """Random weights."""
        generator = torch.Generator(next(self.parameters()).device).manual_seed(seed)
        for name, param in self.visual.named_parameters():
            param.normal_(0, DUMMY_STD, generator=generator)
            if "norm" in name and name.endswith("weight"):
                param.add_(1)

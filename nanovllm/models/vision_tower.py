"""The vision tower of a checkpoint: one of ``towers``, or transformers' model without its layers of text.

``loader.py`` fills it. A tower turns images into features of the language model's hidden size, one row for each of
their tokens. Further columns are added to the outputs of its first layers (deepstack, arXiv:2406.04334).
"""

import math
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.layers.weight_loader import copy_shard
from nanovllm.models.families import TOWER
from nanovllm.models.towers import tower_of
from nanovllm.models.vision import VisionConfig
from nanovllm.models.vision_rules import check_sizes
from nanovllm.utils.checkpoint import LOADING_LOCK, files_to_read, open_tensors
from nanovllm.utils.checkpoint_tensor import CheckpointTensor

DUMMY_STD = 0.02
SIZES = ("image_grid_thw", "image_sizes")  # sizes of images, under either name


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

    name = "nanovllm_flash"  # transformers passes sequence bounds to names with "flash"
    AttentionInterface.register(name, attend)
    return name


def tower_builder(vision: VisionConfig, model_path: str, dtype: torch.dtype) -> Callable[[], Any]:
    """A function that builds a tower of this library, or transformers' model with a language model of no layers."""
    with LOADING_LOCK:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model_path)
    check_sizes(config, vision)
    family = vision.family
    if own := tower_of(family.module, config):
        return own
    with LOADING_LOCK:
        module: Any = import_module(f"transformers.models.{family.module}.modeling_{family.module}")
    text = config.text_config
    text.num_hidden_layers, text.layer_types, text.vocab_size, text.pad_token_id = 0, [], 1, None
    for part in (config, text, config.vision_config):
        part.initializer_range = DUMMY_STD  # the file may have any number; the weights are replaced
    return partial(getattr(module, family.model)._from_config, config, attn_implementation="sdpa", dtype=dtype)


def count_weights(model_path: str) -> int:
    """Count the numbers in the tensors of a checkpoint's vision tower and projector."""
    total = 0
    for file in files_to_read(model_path):
        with open_tensors(file, "pt") as tensors:
            names = [name for name in tensors.keys() if re.fullmatch(TOWER, name)]  # noqa: SIM118
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return total


class VisionTower(nn.Module):
    """Computes the features of images.

    Args:
        vision: of the checkpoint.
        model_path: its directory.
        dtype: to compute in.
        is_dummy: its weights will be random.

    Raises:
        CheckpointError: transformers cannot build it, or its tensors are fewer than it needs.
    """

    def __init__(self, vision: VisionConfig, model_path: str, dtype: torch.dtype, is_dummy: bool = False):
        super().__init__()
        try:
            build = tower_builder(vision, model_path, dtype)
            with torch.device("meta"):  # allocates nothing for weights that the checkpoint may not have
                num_weights = sum(x.numel() for x in build().parameters())
        except CheckpointError:
            raise
        except Exception as error:  # any class: transformers reads numbers that a stranger wrote
            raise CheckpointError(
                f"config.json: transformers cannot build the vision tower ({type(error).__name__}: {error!s:.500})."
            ) from error
        if not is_dummy and num_weights > 2 * (num_given := count_weights(model_path)):
            raise CheckpointError(
                f"config.json: vision_config has a tower of {num_weights:,} weights; {model_path} has {num_given:,}."
            )
        self.model = build()
        self.is_own = not hasattr(self.model, "language_model")
        packs = not self.is_own and hasattr(self.model, "visual") and dtype != torch.float32
        if packs and torch.get_default_device().type == "cuda":
            # set after the constructor, which would look for the package flash-attn
            self.model.visual.config._attn_implementation = packed_attention()
        self.model.eval().requires_grad_(False)
        if not self.is_own:
            del self.model.language_model
        self.dtype, self._vision = dtype, vision
        convolutions = [x for x in self.model.modules() if isinstance(x, (nn.Conv2d, nn.Conv3d))]
        shape = convolutions[0].weight.shape[1:] if convolutions else torch.Size((3 * vision.patch_size**2,))
        self._patch = shape if len(shape) == 3 else (shape.numel(),)  # shape of a patch among pixels
        self._side = vision.patch_size * vision.merge_size  # size of a token in pixels

    def forward(self, images: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Pixels of images -> features on the tower's device, [tokens of all, (1 + deepstack layers) * C].

        If an image has a ``table`` [3, 256], its pixels are 8-bit levels (see ``numbers_of``).
        """
        device, side = next(self.parameters()).device, self._side
        dtype = getattr(self.model, "pixel_dtype", self.dtype)
        pixels = [image["pixel_values"].to(device, non_blocking=True) for image in images]
        for i, image in enumerate(images):
            if "table" in image:
                table = image["table"].to(device, non_blocking=True).to(dtype)
                pixels[i] = numbers_of(pixels[i], table, self._patch if len(self._patch) == 1 else pixels[i].shape[1:])
        pixels = [x.to(dtype) for x in pixels]
        if self.is_own:
            return self.model([image | {"pixel_values": x} for image, x in zip(images, pixels, strict=True)])
        if len(images) == 1 and pixels[0].shape == (1, 3, side, side):
            return self(images * 2)[:1]  # transformers' Mistral 3 loses a dimension for a single token
        if self._vision.family.by_sizes or self._vision.num_whole:
            # [1, 3, H, W]: the tower leaves out the padding by the sizes
            height, width = (max(x.shape[side] for x in pixels) for side in (2, 3))
            pixels = [F.pad(x, (0, width - x.shape[3], 0, height - x.shape[2])) for x in pixels]
        sizes = {name: torch.cat([x[name] for x in images]).to(device) for name in SIZES if name in images[0]}
        output = self.model.get_image_features(torch.cat(pixels), **sizes)
        columns = [output.pooler_output, *getattr(output, "deepstack_features", ())]
        # [tokens, C] for each image, or for all images in some versions of transformers
        columns = [each.flatten(0, -2) if isinstance(each, torch.Tensor) else torch.cat(each) for each in columns]
        return torch.cat(columns, dim=-1)

    def blank(self, num_tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Pixels of about this number of tokens: one image with two rows of them, or several of the largest size."""
        merge, side = self._vision.merge_size, self._side
        if columns := self._vision.image_size // side:
            num_images, side = -(-num_tokens // columns**2), columns * side
            sizes = {"image_sizes": torch.full((num_images, 2), side)} if self._vision.family.by_sizes else {}
            return {"pixel_values": torch.zeros(num_images, 3, side, side, device=device), **sizes}
        if longest := self._vision.max_side // merge:
            side = min(32, longest, math.isqrt(num_tokens))
            grid = torch.tensor([[1, merge * side, merge * side]] * -(-num_tokens // side**2))
        else:
            grid = torch.tensor([[1, 2 * merge, num_tokens // 2 * merge]], device=device)
        pixels = torch.zeros(int(grid.prod(1).sum()), *self._patch, device=device)
        return {"pixel_values": pixels, "image_grid_thw": grid}

    @torch.no_grad()
    def pad_mlps(self) -> None:
        """Pad gated MLPs with zeros to multiples of 64 units: tensor cores take other sizes at half their rate.

        Qwen2.5-VL's have 3,420. Their checkpoint tensors are padded as they are loaded.
        """
        for mlp in self.model.modules():
            if not all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
                continue
            missing = -getattr(mlp.down_proj, "linear", mlp.down_proj).in_features % 64
            for name, padding in (("gate_proj", (0, 0, 0, missing)), ("up_proj", (0, 0, 0, missing)),
                                  ("down_proj", (0, missing))):  # fmt: skip
                linear = getattr(getattr(mlp, name), "linear", getattr(mlp, name))
                linear.weight = padded(linear.weight, padding)
                if linear.bias is not None and name != "down_proj":
                    linear.bias = padded(linear.bias, (0, missing))

    def init_dummy(self, seed: int) -> None:
        """Random weights."""
        generator = torch.Generator(next(self.parameters()).device).manual_seed(seed)
        for name, param in self.model.named_parameters():
            if param.dim() == 0:
                continue  # a limit of activations
            param.normal_(0, DUMMY_STD, generator=generator)
            if "norm" in name and name.endswith("weight"):
                param.add_(1)


def numbers_of(levels: torch.Tensor, table: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Look up the numbers of 8-bit levels [n, 3, ...] in a table [3, 256]; returns [n, *shape].

    If ``shape`` is larger than the levels, patches have several frames, which are copies.
    """
    first = 256 * torch.arange(3, dtype=torch.int32, device=levels.device).view(-1, *[1] * (levels.dim() - 2))
    numbers = table.flatten().index_select(0, (levels + first).flatten()).view(levels.shape)
    if levels.shape[1:] == shape:
        return numbers
    return numbers.unsqueeze(2).expand(-1, -1, shape[0] // numbers[0].numel(), -1).flatten(1)


def padded(param: torch.Tensor, padding: tuple[int, ...]) -> nn.Parameter:
    """The parameter with zeros around it, ``padding`` as for ``F.pad``; it is loaded from tensors without them."""
    shape, larger = param.shape, nn.Parameter(F.pad(param, padding), requires_grad=False)

    def load(target: torch.Tensor, loaded: CheckpointTensor, shard_id: Any = None) -> None:
        plain = target.new_empty(shape)
        copy_shard(plain, loaded)
        target.copy_(F.pad(plain, padding))

    larger.weight_loader = load  # type: ignore[attr-defined]
    return larger

"""The image processor of a checkpoint: transformers', without its last steps if the tower can do them.

A processor resizes 8-bit pixels, then turns each level of a channel into a number: rescaling and normalization. Numbers
take 4 times the memory of levels, or 8 times if a patch has two frames. Threads that write so much slow down each other
and the launches. So threads stop at levels, and the tower looks up the numbers (``VisionTower``).

Gemma 4's processor pads its rows of patches; ``in_grid`` gives them the form of other processors.
"""

from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from nanovllm.errors import CheckpointError
from nanovllm.models.vision import VisionConfig
from nanovllm.utils.checkpoint import LOADING_LOCK
from nanovllm.validation import did_you_mean

AS_LEVELS = {"do_rescale": False, "do_normalize": False}
PIXELS = {"min_pixels": None, "max_pixels": None}  # bounds that some processors have beside ``size``, and prefer


class ImageProcessor:
    """Calls transformers' processor with fixed options.

    Args:
        model_path: directory of the checkpoint.
        options: keyword arguments of the processor.
        vision: configuration of the checkpoint's vision tower.

    Attributes:
        given: transformers' processor.
        table: numbers of the levels of each channel, f32 [3, 256]; None if the processor does more than a lookup.

    Raises:
        TypeError: an option is unknown or has a wrong value.
    """

    def __init__(self, model_path: str, options: dict[str, Any], vision: VisionConfig):
        self.given, self._vision = make_processor(model_path, options, vision.family.processor), vision
        self.table = None
        try:
            self.table = self._table()
        except Exception:  # other processors may raise anything; they compute the numbers themselves
            return

    def __call__(self, image: Any) -> dict[str, Any]:
        """The tensors of an RGB image. If they have a ``table``, ``pixel_values`` are levels: uint8 [n, 3, ...]."""
        return self.numbers(image) if self.table is None else {**self._levels(image), "table": self.table}

    def numbers(self, image: Any, **options: Any) -> dict[str, Any]:
        """The tensors of an RGB image, all steps done."""
        tensors = dict(self.given(images=[image], return_tensors="pt", **options))
        return in_grid(tensors, self._vision) if "image_position_ids" in tensors else tensors

    def _levels(self, image: Any, **options: Any) -> dict[str, Any]:
        """Levels of an image, [1, 3, rows, columns], or of its patches, [n, 3, pixels]: further frames are copies."""
        import torch

        tensors = self.numbers(image, **AS_LEVELS, **options)
        levels = tensors["pixel_values"].numpy()
        if levels.ndim == 2:
            levels = levels.reshape(len(levels), 3, -1, self._vision.patch_size**2)[:, :, 0]
        return tensors | {"pixel_values": torch.from_numpy(levels.astype(np.uint8))}  # torch would start threads

    def _table(self) -> Any:
        """The table if it gives the processor's numbers for a resized image of noise, else None."""
        import torch
        from PIL import Image

        from nanovllm.models.vision_tower import numbers_of

        side = self._vision.patch_size * self._vision.merge_size
        side *= -(-16 // side)  # at least 256 pixels: each channel has each level
        ramp = np.broadcast_to(np.arange(side**2).reshape(side, side, 1), (side, side, 3))
        noise = np.random.default_rng(0).integers(0, 256, (2 * side + 3, 3 * side + 5, 3))
        ramp, noise = (Image.fromarray(pixels.astype(np.uint8)) for pixels in (ramp, noise))
        levels = self._levels(ramp, do_resize=False)["pixel_values"]
        numbers = self.numbers(ramp, do_resize=False)["pixel_values"]
        if numbers.dim() == 2:
            numbers = numbers.view(len(levels), 3, -1, levels.shape[2])[:, :, 0]
        table = torch.zeros(3, 256)
        for channel in range(3):
            table[channel, levels[:, channel].long()] = numbers[:, channel]
        numbers = self.numbers(noise)["pixel_values"]
        found = numbers_of(self._levels(noise)["pixel_values"], table, numbers.shape[1:])
        return table if torch.equal(found, numbers) else None


def in_grid(tensors: dict[str, Any], vision: VisionConfig) -> dict[str, Any]:
    """The tensors of one image from a processor that pads rows of patches (Gemma 4's), in the form of the others.

    Patches [n, 3 * P * P] without padding, channels first, those of a token after each other; and their grid.
    """
    import torch

    places, merge = tensors["image_position_ids"][0].numpy(), vision.merge_size
    columns, rows = (places.max(axis=0) + 1).tolist()
    if rows % merge or columns % merge:
        raise ValueError(f"it has {rows} x {columns} patches, which make no squares of {merge} x {merge}")
    patches = tensors["pixel_values"][0, : rows * columns].numpy()
    patches = patches.reshape(rows // merge, merge, columns // merge, merge, vision.patch_size**2, 3)
    patches = np.ascontiguousarray(patches.transpose(0, 2, 1, 3, 5, 4)).reshape(rows * columns, -1)
    return {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.tensor([[1, rows, columns]])}


def make_processor(model_path: str, options: dict[str, Any], name: str = "") -> Any:
    """transformers' image processor, based on torchvision or else PIL; raises TypeError for a wrong option.

    ``name``: of its class for torchvision, in transformers.models; "": the checkpoint's.
    """
    with LOADING_LOCK:
        from transformers import AutoImageProcessor
        from transformers.utils import is_torchvision_available

        backend = "torchvision" if is_torchvision_available() else "pil"
        try:
            if name:
                module, _, kind = name.rpartition(".")
                kind += "" if backend == "torchvision" else "Pil"
                load = getattr(import_module(f"transformers.models.{module}"), kind).from_pretrained
            else:
                load = partial(AutoImageProcessor.from_pretrained, backend=backend)
            processor = load(model_path, **deepcopy(options))  # processors write into ``size``
            known = processor.valid_kwargs.__annotations__
            if "size" in options and PIXELS.keys() <= known.keys():  # the file's bounds were put in its place
                processor = load(model_path, **deepcopy(PIXELS | options))
        except Exception as error:
            if options:  # without options the processor is already loaded
                raise TypeError(f"{error!s:.300}") from None
            raise CheckpointError(f"the image processor of {model_path} cannot be loaded: {error!s:.500}") from None
    for name in options:
        if name not in known:
            raise TypeError(f"the image processor has no option {name!r}.{did_you_mean(name, known)}")
    return processor

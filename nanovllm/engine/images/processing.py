"""The image processor of a checkpoint: transformers', without its last steps if the tower can do them.

A processor resizes 8-bit pixels, then turns each level of a channel into a number: rescaling and normalization. Numbers
take 4 times the memory of levels, or 8 times if a patch has two frames. Threads that write so much slow down each other
and the launches. So threads stop at levels, and the tower looks up the numbers (``VisionTower``).
"""

from typing import Any

import numpy as np

from nanovllm.errors import CheckpointError
from nanovllm.models.vision import VisionConfig
from nanovllm.utils.checkpoint import LOADING_LOCK
from nanovllm.validation import did_you_mean

AS_LEVELS = {"do_rescale": False, "do_normalize": False}


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
        self.given, self._vision, self.table = make_processor(model_path, options), vision, None
        try:
            self.table = self._table()
        except Exception:  # other processors may raise anything; they compute the numbers themselves
            return

    def __call__(self, image: Any) -> dict[str, Any]:
        """The tensors of an RGB image. If they have a ``table``, ``pixel_values`` are levels: uint8 [n, 3, ...]."""
        return self._run(image) if self.table is None else {**self._levels(image), "table": self.table}

    def _run(self, image: Any, **options: Any) -> dict[str, Any]:
        return dict(self.given(images=[image], return_tensors="pt", **options))

    def _levels(self, image: Any, **options: Any) -> dict[str, Any]:
        """Levels of an image, [1, 3, rows, columns], or of its patches, [n, 3, pixels]: further frames are copies."""
        import torch

        tensors = self._run(image, **AS_LEVELS, **options)
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
        numbers = self._run(ramp, do_resize=False)["pixel_values"]
        if numbers.dim() == 2:
            numbers = numbers.view(len(levels), 3, -1, levels.shape[2])[:, :, 0]
        table = torch.zeros(3, 256)
        for channel in range(3):
            table[channel, levels[:, channel].long()] = numbers[:, channel]
        numbers = self._run(noise)["pixel_values"]
        found = numbers_of(self._levels(noise)["pixel_values"], table, numbers.shape[1:])
        return table if torch.equal(found, numbers) else None


def make_processor(model_path: str, options: dict[str, Any]) -> Any:
    """transformers' image processor, based on torchvision or else PIL; raises TypeError for a wrong option."""
    with LOADING_LOCK:
        from transformers import AutoImageProcessor
        from transformers.utils import is_torchvision_available

        backend = "torchvision" if is_torchvision_available() else "pil"
        try:
            processor = AutoImageProcessor.from_pretrained(model_path, backend=backend, **options)
        except Exception as error:
            if options:  # without options the processor is already loaded
                raise TypeError(f"{error!s:.300}") from None
            raise CheckpointError(f"the image processor of {model_path} cannot be loaded: {error!s:.500}") from None
    known = processor.valid_kwargs.__annotations__
    for name in options:
        if name not in known:
            raise TypeError(f"the image processor has no option {name!r}.{did_you_mean(name, known)}")
    return processor

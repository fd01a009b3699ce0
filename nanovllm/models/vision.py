"""The vision towers of ``MODELS``: which architecture has which, and how its images become tokens and positions.

The language model is ``decoder.py``, as for text. The tower is transformers' (``vision_tower.py``). Importing this
imports neither torch nor transformers.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nanovllm.errors import CheckpointError
from nanovllm.utils.checkpoint import read_json, tensor_names
from nanovllm.validation import Rule, at_least, by_field, check, check_all, integer, list_of, optional

if TYPE_CHECKING:
    from nanovllm.config import Config

OBJECT = Rule("an object", lambda x: isinstance(x, dict))
SMALL = integer("an integer from 1 to 4096", lambda n: 1 <= n <= 4096)
RULES = by_field(("image_token_id", at_least(0)), ("spatial_merge_size patch_size", SMALL))
TENSORS = re.compile(r"(?:model\.)?visual\.(.+)")  # of the tower, in checkpoints
INDEXES = list_of(at_least(0), "a list of layers")


class TowerFamily(NamedTuple):
    """How the images of an architecture become tokens."""

    module: str  # of transformers.models
    tower: str  # a class there
    mrope: str = ""  # order of the frequencies of three-dimensional positions: "interleaved", "sections"; "": none
    section: tuple[int, ...] = ()  # default of ``mrope_section``


TOWERS = {
    "Qwen2_5_VLForConditionalGeneration": TowerFamily(
        "qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "sections", (16, 24, 24)
    ),
    "Qwen3VLForConditionalGeneration": TowerFamily("qwen3_vl", "Qwen3VLVisionModel", "interleaved", (24, 20, 20)),
    "Qwen3VLMoeForConditionalGeneration": TowerFamily(
        "qwen3_vl_moe", "Qwen3VLMoeVisionModel", "interleaved", (24, 20, 20)
    ),
    "Qwen3_5ForConditionalGeneration": TowerFamily("qwen3_5", "Qwen3_5VisionModel", "interleaved", (11, 11, 10)),
    "Qwen3_5MoeForConditionalGeneration": TowerFamily(
        "qwen3_5_moe", "Qwen3_5MoeVisionModel", "interleaved", (11, 11, 10)
    ),
}


class VisionConfig(NamedTuple):
    """The tower of a checkpoint.

    Attributes:
        image_token_id: the placeholder of a prompt, and of each token of an image.
        merge_size: patches of a side of the square that becomes a token.
        patch_size: pixels of a side of a patch.
        num_deepstack: layers whose outputs get features of their own added, the first ones.
        section: rotary frequencies that turn with time, height and width; () for plain positions.
    """

    family: TowerFamily
    image_token_id: int
    merge_size: int
    patch_size: int
    num_deepstack: int
    section: tuple[int, ...]

    @classmethod
    def of(cls, config: "Config") -> "VisionConfig | None":
        """Of an engine's checkpoint; None where that has no tower that is supported, or the user wants none."""
        return None if config.language_model_only else cls.read(config.model_path, config.load_format == "dummy")

    @classmethod
    def read(cls, model_path: str, is_dummy: bool = False) -> "VisionConfig | None":
        raw = read_json(Path(model_path, "config.json"))
        names = raw.get("architectures")
        family = TOWERS.get(str(names[0])) if isinstance(names, list) and names else None
        if family is None or not raw.get("vision_config"):
            return None
        names = [name for file in sorted(Path(model_path).glob("*.safetensors")) for name in tensor_names(file)]
        if not is_dummy and not any(map(TENSORS.fullmatch, names)):
            return None  # its language model was saved alone
        vision = check("config.json", "vision_config", raw["vision_config"], OBJECT, CheckpointError)
        text = check("config.json", "text_config", raw.get("text_config") or raw, OBJECT, CheckpointError)
        sizes = check_all("config.json", {**vision, **raw}, RULES, CheckpointError)
        layers = vision.get("deepstack_visual_indexes") or []
        layers = check("config.json", "deepstack_visual_indexes", layers, INDEXES, CheckpointError)
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        section = check("config.json", "rope_parameters", rope, OBJECT, CheckpointError).get("mrope_section")
        rule = optional(Rule("a list of three sizes", lambda x: INDEXES.accepts(x) and len(x) == 3))
        section = check("config.json", "mrope_section", section, rule, CheckpointError) or family.section
        return cls(
            family, sizes["image_token_id"], sizes["spatial_merge_size"], sizes["patch_size"], len(layers),
            tuple(section) if family.mrope else (),
        )  # fmt: skip

    def missing(self) -> str:
        """The package that images need and that is not installed; "" if all are."""
        if find_spec("PIL") is None:
            return "pillow"
        return "" if find_spec(f"transformers.models.{self.family.module}") else "a newer transformers"

    def num_tokens(self, grid: np.ndarray) -> int:
        """Of an image with ``grid`` (frames, rows, columns) of patches."""
        return int(grid.prod()) // self.merge_size**2

    def axes(self) -> np.ndarray:
        """The axis of positions, 0 to 2, by which each rotary frequency turns; int64 [r / 2]."""
        time, height, width = self.section
        if self.family.mrope == "sections":
            return np.repeat([0, 1, 2], self.section)
        axes = np.zeros(time + height + width, np.int64)
        for axis, size in ((1, height), (2, width)):
            axes[axis : 3 * size : 3] = axis
        return axes

    def positions(self, is_image: np.ndarray, grids: list[np.ndarray]) -> np.ndarray:
        """Rotary positions of a prompt by time, height and width, int32 [3, T].

        A text's token advances all three by one, an image by its longer side. ``is_image``: bool [T].
        """
        found, at, next_position = np.empty((3, len(is_image)), np.int32), 0, 0
        firsts = np.cumsum([0, *map(self.num_tokens, grids)])[:-1]  # of each image, among the tokens of images
        for start, grid in zip(np.flatnonzero(is_image)[firsts].tolist(), grids, strict=True):
            frames, rows, columns = grid[0], grid[1] // self.merge_size, grid[2] // self.merge_size
            stop, text = start + self.num_tokens(grid), start - at
            found[:, at:start] = np.arange(next_position, next_position + text)
            next_position += text
            found[:, start:stop] = np.indices((frames, rows, columns)).reshape(3, -1) + next_position
            next_position += max(rows, columns)
            at = stop
        found[:, at:] = np.arange(next_position, next_position + len(is_image) - at)
        return found

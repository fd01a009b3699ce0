"""The vision towers of ``MODELS``: which architecture has which, and how its images become tokens and positions.

The language model is ``decoder.py``, as for text. The tower is this library's or transformers' (``vision_tower.py``).
Importing this imports neither torch nor transformers.
"""

import math
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanovllm.errors import CheckpointError, RequestError
from nanovllm.models import MODELS
from nanovllm.models.families import TOWER
from nanovllm.models.vision_rules import check_fields
from nanovllm.utils.checkpoint import files_to_read, read_json, tensor_names
from nanovllm.validation import Rule, at_least, by_field, check, check_all, integer, list_of, optional

if TYPE_CHECKING:
    from nanovllm.config import Config

OBJECT = Rule("an object", lambda x: isinstance(x, dict))
SMALL = integer("an integer from 1 to 4096", lambda n: 1 <= n <= 4096)
RULES = by_field(("image_token_id", at_least(0)),
                 ("spatial_merge_size patch_size temporal_patch_size mm_tokens_per_image", SMALL),
                 ("image_size", integer("an integer from 0 to 4096", lambda n: 0 <= n <= 4096)))  # fmt: skip
POOLED_RULES = by_field(("image_token_id pad_token_id", at_least(0)), ("patch_size pooling_kernel_size", SMALL),
                        ("position_embedding_size mm_posemb_size", at_least(1)))  # fmt: skip
INDEXES = list_of(at_least(0), "a list of layers")
# layers in which the tokens of an image attend each other both ways, by ``use_bidirectional_attention``
KINDS: dict[str, tuple[str, ...]] = {
    "": (), "vision": ("sliding_attention",), "all": ("full_attention", "sliding_attention"),
}  # fmt: skip


class TowerFamily(NamedTuple):
    """How the images of an architecture become tokens."""

    module: str  # module in transformers.models
    model: str  # a class there, which has ``get_image_features``
    mrope: str = ""  # frequency order of three-dimensional positions: "interleaved", "sections"; "": none
    section: tuple[int, ...] = ()  # default of ``mrope_section``
    # Default of ``mm_tokens_per_image``: tokens of every image, which attend to each other both ways; 0: by its size.
    num_tokens: int = 0
    # The tower takes squares of ``pooling_kernel_size`` patches as a token. The image processor gives patches row by
    # row, with padding, and their places. The name of the field for the most places on an axis, and its default.
    places: tuple[str, int] | None = None
    processor: str = ""  # image processor in place of the checkpoint's, in transformers.models
    marks: tuple[str, ...] = ()  # tokens after each row of an image, and after its last row
    by_sizes: bool = False  # its tower takes pixels [1, 3, height, width] and the sizes of images, no list of patches
    temporal: int = 2  # default of ``temporal_patch_size``
    has_mask: bool = False  # its attention takes a mask between all patches of a call
    deepstack: tuple[int, ...] = ()  # default of ``deepstack_visual_indexes``; (): the family has none
    placeholder: tuple[str, str] | None = None  # in texts: a regular expression, and the text that replaces a match
    text: str = "<|vision_start|><|image_pad|><|vision_end|>"  # an image in chat templates that take strings


GLM_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
GEMMA4: dict[str, Any] = {
    # a placeholder alone, and with the tokens around an image
    "placeholder": (r"<\|image\|>(?!(<\|image\|>)*<image\|>)", "<|image><|image|><image|>"), "text": "<|image|>",
}
TOWERS = {
    "Qwen2VLForConditionalGeneration": TowerFamily("qwen2_vl", "Qwen2VLModel", "sections", (16, 24, 24)),
    "Qwen2_5_VLForConditionalGeneration": TowerFamily("qwen2_5_vl", "Qwen2_5_VLModel", "sections", (16, 24, 24)),
    "Qwen3VLForConditionalGeneration": TowerFamily(
        "qwen3_vl", "Qwen3VLModel", "interleaved", (24, 20, 20), deepstack=(8, 16, 24)
    ),
    "Qwen3VLMoeForConditionalGeneration": TowerFamily(
        "qwen3_vl_moe", "Qwen3VLMoeModel", "interleaved", (24, 20, 20), deepstack=(8, 16, 24)
    ),
    "Qwen3_5ForConditionalGeneration": TowerFamily("qwen3_5", "Qwen3_5Model", "interleaved", (11, 11, 10)),
    "Qwen3_5MoeForConditionalGeneration": TowerFamily("qwen3_5_moe", "Qwen3_5MoeModel", "interleaved", (11, 11, 10)),
    "Gemma3ForConditionalGeneration": TowerFamily(
        "gemma3", "Gemma3Model", num_tokens=256, placeholder=(
            "<start_of_image>(?!<image_soft_token>)", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
        ), text="<start_of_image>",
    ),
    "Mistral3ForConditionalGeneration": TowerFamily(
        "mistral3", "Mistral3Model", marks=("[IMG_BREAK]", "[IMG_END]"), by_sizes=True, has_mask=True, text="[IMG]",
    ),
    **dict.fromkeys(
        ("LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration"),  # transformers', and in files
        TowerFamily("lighton_ocr", "LightOnOcrModel", by_sizes=True, has_mask=True, text="<|image_pad|>"),
    ),
    "Glm4vForConditionalGeneration": TowerFamily("glm4v", "Glm4vModel", "sections", (8, 12, 12), text=GLM_IMAGE),
    "GlmOcrForConditionalGeneration": TowerFamily("glm_ocr", "GlmOcrModel", "sections", (8, 12, 12), text=GLM_IMAGE),
    "Gemma4ForConditionalGeneration": TowerFamily("gemma4", "", places=("position_embedding_size", 10240), **GEMMA4),
    # its own processor needs torchvision; they differ in who joins the patches of a token
    "Gemma4UnifiedForConditionalGeneration": TowerFamily(
        "gemma4_unified", "", places=("mm_posemb_size", 1120), processor="gemma4.Gemma4ImageProcessor", **GEMMA4
    ),
    "PaddleOCRVLForConditionalGeneration": TowerFamily(
        "paddleocr_vl", "PaddleOCRVLModel", "sections", (16, 24, 24), temporal=1,
        text="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    ),
}  # fmt: skip


class VisionConfig(NamedTuple):
    """The tower of a checkpoint.

    Attributes:
        image_token_id: the placeholder of a prompt, and of each token of an image.
        merge_size: patches of a side of the square that becomes a token.
        patch_size: pixels of a side of a patch.
        image_size: pixels of a side of the largest image; 0: no limit.
        num_whole: tokens of every image, if all images have one size; else 0.
        num_deepstack: layers whose outputs get features of their own added, the first ones.
        section: rotary frequencies that turn with time, height and width; () for plain positions.
        processor_sizes: options that the image processor must have; {} where ``grid`` checks its pixels.
        both_ways: kinds of layers in which the tokens of an image attend each other both ways, so that a launch takes
            all or none.
        max_side: patches of a side of the largest image; 0: no limit.
        fed_token_id: the decoder's input at the tokens of images. Features replace its embedding; its per-layer inputs
            count.
    """

    family: TowerFamily
    image_token_id: int
    merge_size: int
    patch_size: int
    image_size: int
    num_whole: int
    num_deepstack: int
    section: tuple[int, ...]
    processor_sizes: dict[str, int]
    both_ways: tuple[str, ...]
    max_side: int
    fed_token_id: int

    @classmethod
    def of(cls, config: "Config") -> "VisionConfig | None":
        """The vision settings of an engine's checkpoint; None without a supported tower, or if the user wants none."""
        if config.language_model_only or (vision := cls.read(config.model_path, config.load_format == "dummy")) is None:
            return None
        model, section = config.model_config, vision.section
        for field, token in (("image_token_id", vision.image_token_id), ("pad_token_id", vision.fed_token_id)):
            if token >= model.vocab_size:
                raise CheckpointError(f"config.json: {field}={token} must be below vocab_size={model.vocab_size}.")
        for rope in filter(None, model.ropes):
            if section and 2 * sum(section) != (size := rope.rotated_dims(model.head_dim)):
                raise CheckpointError(
                    f"config.json: mrope_section={list(section)} must sum to {size // 2}, half the rotary dimensions."
                )
        return vision

    @classmethod
    def read(cls, model_path: str, is_dummy: bool = False) -> "VisionConfig | None":
        raw = read_json(Path(model_path, "config.json"))
        names = raw.get("architectures")
        name = str(names[0]) if isinstance(names, list) and names else ""
        family = TOWERS.get(name)
        if family is None or not raw.get("vision_config"):
            return None
        names = [name for file in files_to_read(model_path) for name in tensor_names(file)]
        if not is_dummy and not any(re.fullmatch(TOWER, name) for name in names):
            return None  # its language model was saved alone
        vision = check("config.json", "vision_config", raw["vision_config"], OBJECT, CheckpointError)
        check_fields(raw, vision)
        text = check("config.json", "text_config", raw.get("text_config") or raw, OBJECT, CheckpointError)
        if family.places:
            return cls._pooled(family, raw, vision, {**MODELS[name].defaults, "pad_token_id": 0, **text})
        defaults = {
            "image_token_id": raw.get("image_token_index"), "spatial_merge_size": 2, "image_size": 0,
            "temporal_patch_size": family.temporal, "mm_tokens_per_image": family.num_tokens or 1,
        }  # fmt: skip
        sizes = check_all("config.json", {**defaults, **vision, **raw}, RULES, CheckpointError)
        if family.mrope:
            sizes["image_size"] = 0  # images have any size, whatever the field of some files says
        if family.num_tokens:
            rows = sizes["image_size"] // sizes["patch_size"]
            sizes["spatial_merge_size"] = max(1, rows // math.isqrt(sizes["mm_tokens_per_image"]))
        layers = vision.get("deepstack_visual_indexes", family.deepstack) if family.deepstack else ()
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        section = check("config.json", "rope_parameters", rope, OBJECT, CheckpointError).get("mrope_section")
        rule = optional(Rule("a list of three sizes", lambda x: INDEXES.accepts(x) and len(x) == 3))
        section = check("config.json", "mrope_section", section, rule, CheckpointError) or family.section
        patches = {
            "patch_size": sizes["patch_size"], "merge_size": sizes["spatial_merge_size"],
            "temporal_patch_size": sizes["temporal_patch_size"],
        }  # fmt: skip
        return cls(
            family, sizes["image_token_id"], sizes["spatial_merge_size"], sizes["patch_size"],
            sizes["image_size"], sizes["mm_tokens_per_image"] if family.num_tokens else 0, len(layers or ()),
            tuple(section) if family.mrope else (), patches if family.mrope else {},
            KINDS["all" if family.num_tokens else ""], 0, sizes["image_token_id"],
        )  # fmt: skip

    @classmethod
    def _pooled(cls, family: TowerFamily, raw: dict[str, Any], vision: dict[str, Any],
                text: dict[str, Any]) -> "VisionConfig":
        """Read the settings of a family with ``places``."""
        assert family.places
        field, default = family.places
        given = {"patch_size": 16, "pooling_kernel_size": 3, field: default, **vision}
        given |= {"image_token_id": raw.get("image_token_id"), "pad_token_id": text["pad_token_id"]}
        rules = {name: rule for name, rule in POOLED_RULES.items() if name in given}
        sizes = check_all("config.json", given, rules, CheckpointError)
        merge, patch_size = sizes["pooling_kernel_size"], sizes["patch_size"]
        max_side = sizes[field] * (merge if field == "mm_posemb_size" else 1)  # the table of 12B has places of tokens
        return cls(
            family, sizes["image_token_id"], merge, patch_size, 0, 0, 0, (),
            {"patch_size": patch_size, "pooling_kernel_size": merge},
            KINDS[text.get("use_bidirectional_attention") or ""], max_side, sizes["pad_token_id"],
        )  # fmt: skip

    def missing(self) -> str:
        """The package that images need and that is not installed; "" if all are."""
        if find_spec("PIL") is None:
            return "pillow"
        return "" if find_spec(f"transformers.models.{self.family.module}") else "a newer transformers"

    @property
    def processor_options(self) -> dict[str, Any]:
        """Options of the image processor besides the checkpoint's own."""
        return {"patch_size": self.patch_size * self.merge_size} if self.family.by_sizes else {}

    def grid(self, pixels: Mapping[str, Any]) -> np.ndarray:
        """Count the frames, rows and columns of patches in the tensors of one image; raises RequestError."""
        if "image_grid_thw" in pixels:
            grid = pixels["image_grid_thw"][0].numpy()
            if self.max_side and grid.max() > self.max_side:
                raise RequestError(
                    f"the image has {grid[1]} x {grid[2]} patches; the tower takes {self.max_side} on a side."
                )
            return grid
        num_images, _, *sides = pixels["pixel_values"].shape  # height and width
        rows, columns = (side // self.patch_size for side in sides)
        allowed = range(self.image_size if self.num_whole else 1, self.image_size + 1)
        is_taken = all(side in allowed for side in sides) and not (rows % self.merge_size or columns % self.merge_size)
        if num_images > 1 or not is_taken:
            raise RequestError(
                f"options of the image processor make {num_images} image(s) of {sides[0]} × {sides[1]} pixels; the "
                f"tower takes one of {'' if self.num_whole else 'at most '}{self.image_size} × {self.image_size}, in "
                f"squares of {self.merge_size * self.patch_size}."
            )
        return np.array([1, rows, columns])

    def num_tokens(self, grid: np.ndarray) -> int:
        """Tokens of an image with ``grid`` (frames, rows, columns) of patches."""
        return int(grid.prod()) // self.merge_size**2

    def layout(self, grid: np.ndarray, marks: list[int]) -> np.ndarray:
        """The ids of an image in a prompt. ``marks``: the ids of ``TowerFamily.marks``."""
        ids = np.full(self.num_tokens(grid), self.image_token_id)
        if not marks:
            return ids
        columns = grid[2] // self.merge_size
        rows = np.insert(ids.reshape(-1, columns), columns, marks[0], axis=1)
        rows[-1, -1] = marks[1]
        return rows.ravel()

    def placed(self, text: str) -> str:
        """The text of a prompt with images, and with all that a tokenizer needs around each of them."""
        return text if self.family.placeholder is None else re.sub(*self.family.placeholder, text)

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
        firsts = np.cumsum([0, *map(self.num_tokens, grids)])[:-1]  # first token of each image, among image tokens
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

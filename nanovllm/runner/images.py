"""Images on one rank: the tower, the features of a prefill, and rotary positions in three dimensions.

A prefill with images replaces the embeddings of their tokens by features, and adds further ones after the first
layers, by hooks that are there during this launch alone. Rank 0 has the tower; a sum over ranks takes the features to
the others. Three-dimensional positions of image tokens get rows of their own at the end of the tables of RoPE. A text
behind images has plain positions with a shift, which its decode steps add, too.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.core import Batch, PrefillBatch
from nanovllm.layers.context import Context
from nanovllm.messages.images import ImagePart, ImageRows
from nanovllm.models.decoder import CausalLM
from nanovllm.models.vision import VisionConfig
from nanovllm.models.vision_tower import VisionTower
from nanovllm.runner.device import model_defaults, select_device, select_dtype
from nanovllm.runner.image_attention import Block, attending_both_ways, blocks_of
from nanovllm.runner.inputs import DecodeInputs
from nanovllm.runner.launchers import DecodeLauncher, PrefillLauncher
from nanovllm.runner.part import Launcher, Part, Rank, Step
from nanovllm.runner.request_state import RequestState
from nanovllm.sampling.feature import Arrays, Tensors

MAX_PATCHES = 65536  # patches per call of the tower, unless one image has more: 1 to 3 GiB of activations
COMPILED_SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 1024)  # image tokens; products are chosen by their number
UNKNOWN = np.iinfo(np.int32).min  # a shift on the device after an interrupted step


class VisionPart(Part):
    """Images of prefills.

    Attributes:
        tower: on rank 0.
        shifts: int32 [R + 1], of each request slot: from the place of its next token to its rotary position.
    """

    def __init__(self, rank: Rank, vision: VisionConfig, state: RequestState, tower: VisionTower | None):
        self._rank, self._vision = rank, vision
        self.module = self.tower = tower
        self.shifts = torch.zeros(rank.config.max_num_seqs + 1, dtype=torch.int32, device=rank.device)
        self._shifts_on_host = np.zeros(rank.config.max_num_seqs + 1, np.int32)
        self._first_row = rank.config.model_config.num_positions - rank.config.max_num_batched_tokens
        self._axes = torch.from_numpy(vision.axes()).to(rank.device) if vision.section else None
        self._features: torch.Tensor | None = None  # features of the images in the batch being launched
        self._blocks: list[Block] = []  # its images, whose tokens attend to each other both ways
        self._cut: dict[bytes, torch.Tensor] = {}  # features of an image whose last tokens are in the next chunk
        self.launchers: tuple[Launcher, ...] = (VisionLauncher(state.block_tables, self),)

    @classmethod
    def fitted(cls, rank: Rank) -> Config:
        """With rows in the tables of RoPE for the image tokens of a launch."""
        config, vision = rank.config, VisionConfig.of(rank.config)
        if vision is None or vision.missing() or not vision.section:
            return config
        model, fitting = config.model_config, copy.copy(config)
        size = model.num_positions + config.max_num_batched_tokens
        vars(fitting)["model_config"] = replace(model, num_positions=size)  # bypasses the frozen __setattr__
        return fitting

    @classmethod
    def make(cls, rank: Rank, state: RequestState, decode: DecodeLauncher) -> "VisionPart | None":
        vision = VisionConfig.of(rank.config)
        if vision is None or vision.missing():
            return None
        part = cls(rank, vision, state, make_tower(rank, vision) if rank.tp.rank == 0 else None)
        if vision.section:
            decode.inputs = ShiftedInputs(decode.inputs, part.shifts)
        return part

    # ---------------------------------------------------------------- a step

    def prepare(self, batch: Batch, arrays: Arrays) -> None:
        if not isinstance(batch, PrefillBatch):
            return
        if self._vision.section:
            shifts = np.zeros(len(batch.starts), np.int32)
            for place, part in batch.messages.get(ImagePart, ()):
                shifts[place] = part.shift
            rows, values = batch.req_indices, shifts[batch.sampled_from]
            changed = self._shifts_on_host[rows] != values
            if changed.any():
                self._shifts_on_host[rows] = values
                arrays["shifted_rows"], arrays["shifts"] = rows[changed], values[changed]
        if ImagePart in batch.messages:
            is_image = batch.token_ids < 0
            arrays["input_ids"] = np.where(is_image, np.int32(self._vision.fed_token_id), batch.token_ids)
            arrays["image_rows"] = np.flatnonzero(is_image).astype(np.int32)
            if self._vision.both_ways:
                self._blocks = blocks_of(batch, arrays["image_rows"], arrays["positions"])
            if self._vision.section:
                self._prepare_positions(batch, is_image, arrays)

    def _prepare_positions(self, batch: PrefillBatch, is_image: np.ndarray, arrays: Arrays) -> None:
        """Rows of the tables of RoPE for all tokens; and of the image tokens, which have rows of their own, [3, n]."""
        positions = np.tile(arrays["positions"], (3, 1))
        ends = np.cumsum(batch.stops - batch.starts)
        for place, part in batch.messages[ImagePart]:
            positions[:, ends[place] - part.positions.shape[1] : ends[place]] = part.positions
        arrays["image_positions"] = positions[:, is_image].ravel()
        arrays["rope_rows"] = positions[0]
        arrays["rope_rows"][is_image] = np.arange(np.count_nonzero(is_image)) + self._first_row

    def write(self, batch: Batch, tensors: Tensors) -> None:
        if "shifts" in tensors:
            self.shifts.index_copy_(0, tensors["shifted_rows"].long(), tensors["shifts"])
        self._features = None
        if "image_rows" in tensors and len(tensors["image_rows"]):
            rows = [each for _, part in batch.messages[ImagePart] for each in part.rows]
            if self.tower is not None:
                features = self._features_of(self.tower, rows)
            else:
                shape = sum(map(len, rows)), self._width
                features = torch.zeros(shape, dtype=self._rank.dtype, device=self._rank.device)
            self._features = self._rank.tp.all_reduce(features)

    @property
    def _most_tokens(self) -> int:
        """Most image tokens that the tower takes at once."""
        config, num_patches = self._rank.config, MAX_PATCHES // (4 if self._vision.family.has_mask else 1)
        return min(num_patches // self._vision.merge_size**2, max(config.max_num_batched_tokens, config.max_model_len))

    @property
    def _width(self) -> int:
        return self._rank.config.model_config.hidden_size * (1 + self._vision.num_deepstack)

    def _features_of(self, tower: VisionTower, rows: list[ImageRows]) -> torch.Tensor:
        """Run the tower for images that come first in this batch; features of the rows, [n, width]."""
        known = self._cut
        new = {each.digest: each for each in rows if each.digest not in known}
        for group in groups(list(new.values()), self._most_tokens):
            features = tower([each.pixels.tensors for each in group]).split([each.num_tokens for each in group])
            known |= {each.digest: of_one for each, of_one in zip(group, features, strict=True)}
        self._cut = {each.digest: known[each.digest] for each in rows if each.stop < each.num_tokens}
        return torch.cat([known[each.digest][each.start : each.stop] for each in rows])

    def forward(self, model: CausalLM, input_ids: torch.Tensor, context: Context) -> torch.Tensor:
        """A forward pass of a prefill with images."""
        tensors = context.tensors
        if "rope_rows" in tensors:
            self._write_rope_rows(model, tensors["image_positions"].view(3, -1))
            context = replace(context, rope_rows=tensors["rope_rows"])
        if self._features is None:  # this chunk is all text
            return model(input_ids, context)
        rows, kinds = tensors["image_rows"].long(), self._vision.both_ways
        with replaced(model, rows, self._features), attending_both_ways(model, self._blocks, kinds):
            return model(input_ids, context)

    def _write_rope_rows(self, model: CausalLM, positions: torch.Tensor) -> None:
        """Put cosines and sines of image tokens with these positions, [3, n], after the others."""
        config, stop = self._rank.config.model_config, self._first_row + positions.shape[1]
        if not positions.numel():
            return
        assert self._axes is not None
        scalings = [rope for rope in dict.fromkeys(config.ropes) if rope is not None]
        ropes: Any = model.model.ropes
        for scaling, rope in zip(scalings, ropes, strict=True):
            frequencies, scale = scaling.frequencies(config.head_dim)
            angles = positions[self._axes].T.float() * frequencies.to(positions.device)  # [n, r / 2]
            cos, sin = rope.cos_sin[self._first_row : stop].chunk(2, dim=-1)
            cos[:, : angles.shape[1]], sin[:, : angles.shape[1]] = angles.cos() * scale, angles.sin() * scale

    def reset(self) -> None:
        self._features, self._cut = None, {}
        self._shifts_on_host[:] = UNKNOWN

    def compile(self) -> None:
        """Issue the launches of the tower for small images, for a page and for the most patches."""
        if self.tower is not None and self.tower.is_own:
            for num_tokens in (*COMPILED_SIZES, self._most_tokens):
                self.tower([self.tower.blank(num_tokens, self._rank.device)])

    # ---------------------------------------------------------------- memory

    def reserved_bytes(self, model: CausalLM) -> int:
        """Bytes for the tower on the most patches that it takes at once, and for the features of a launch."""
        if self._rank.device.type == "cpu":
            return 0
        config = self._rank.config
        features = (config.max_num_batched_tokens + self._most_tokens) * self._width * self._rank.dtype.itemsize
        if self.tower is None:
            return features
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.tower([self.tower.blank(self._most_tokens, self._rank.device)])
        torch.cuda.synchronize()
        return features + torch.cuda.max_memory_allocated() - before

    def describe(self) -> str:
        if self.tower is None:
            return ""
        return f", images by {sum(x.nbytes for x in self.tower.parameters()) / 2**30:,.2f} GiB of vision tower"


class VisionLauncher(PrefillLauncher):
    """Takes prefills of prompts with images."""

    def __init__(self, block_tables: torch.Tensor, part: VisionPart):
        super().__init__(block_tables)
        self._part = part

    def takes(self, batch: Batch, arrays: Arrays) -> bool:
        return ImagePart in batch.messages

    def compile(self, model: CausalLM) -> None:
        self._part.compile()

    def run(self, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        model: Any = partial(self._part.forward, step.model)
        return super().run(step._replace(model=model))


class ShiftedInputs(DecodeInputs):
    """Inputs of decode steps with the rotary positions of texts after images."""

    def __init__(self, inputs: DecodeInputs, shifts: torch.Tensor):
        vars(self).update(vars(inputs))
        self._shifts = shifts

    def __call__(self, size: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Context]:
        input_ids, context = super().__call__(size, *args, **kwargs)
        shifts = self._shifts[context.req_indices.long()].repeat_interleave(len(context.positions) // size)
        return input_ids, replace(context, rope_rows=context.positions + shifts)


def pixel_form(config: Config) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Pixels as the tower takes them: in its dtype; for a GPU in pinned memory, from which copies wait for nobody.

    A table of numbers stays in fp32: Gemma 4's tower doubles them and subtracts 1, which would double their rounding.
    """
    device = select_device(config.device, 0, config.tensor_parallel_size)
    dtype, pins = select_dtype(config.dtype, config.model_config.dtype, device), device.type == "cuda"

    def convert(pixels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converted = {}
        for name, x in pixels.items():
            if x.is_floating_point() and name != "table":
                converted[name] = torch.empty(x.shape, dtype=dtype, pin_memory=pins).copy_(x)
            else:
                converted[name] = torch.empty(x.shape, dtype=x.dtype, pin_memory=pins)
                np.copyto(converted[name].numpy(), x.numpy())  # torch would start its own threads in each of ours
        return converted

    return convert


def make_tower(rank: Rank, vision: VisionConfig) -> VisionTower:
    """A tower with random weights, until the checkpoint is loaded."""
    config = rank.config
    with model_defaults(rank.dtype, rank.device):
        tower = VisionTower(vision, config.model_path, rank.dtype, is_dummy=config.load_format == "dummy")
    if rank.device.type == "cuda":
        tower.pad_mlps()
    if config.load_format == "dummy":
        tower.init_dummy(config.seed)
    return tower


def groups(rows: list[ImageRows], max_tokens: int) -> Iterator[list[ImageRows]]:
    """Images in order, as many at once as have at most ``max_tokens``, or one."""
    group: list[ImageRows] = []
    for each in rows:
        if group and sum(image.num_tokens for image in group) + each.num_tokens > max_tokens:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


@contextmanager
def replaced(model: CausalLM, rows: torch.Tensor, features: torch.Tensor) -> Iterator[None]:
    """Within, the embeddings of tokens ``rows`` are features, [n, C], and further ones are added after layers."""
    of_embedding, *of_layers = features.split(model.config.hidden_size, dim=-1)

    def add(values: torch.Tensor, module: Any, args: Any, residual: Any) -> None:
        # SplitKPartials are yet to be summed, and the order of additions is free
        getattr(residual, "residual", residual).index_add_(0, rows, values)

    def put(module: Any, args: Any, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings.index_copy(0, rows, of_embedding)

    layers = model.model.layers[: len(of_layers)]
    assert len(of_layers) < len(model.model.layers), "the last layer computes the last tokens alone"
    hooks = [model.model.embed_tokens.register_forward_hook(put)]
    hooks += [
        layer.register_forward_hook(partial(add, values)) for layer, values in zip(layers, of_layers, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

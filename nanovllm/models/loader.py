"""Fills a model's parameters from safetensors files, from tensors in memory, or with random numbers.

Owns the match between checkpoint tensors and parameters: every parameter filled, every tensor used, every shape equal,
or a ``CheckpointError``. How a tensor is sharded over ranks stands beside its layer (``weight_loader``).
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.kernels.fp8 import E4M3
from nanovllm.layers.quantization import Scales, quantized
from nanovllm.layers.weight_loader import CheckpointTensor, copy_shard
from nanovllm.models.quantization_config import EXPERT_PARTS, KV_SCALES
from nanovllm.utils.checkpoint import read_json

DUMMY_STD = 0.02  # of random weights, as transformers initialises
DUMMY_FP8_STD, DUMMY_ROWS = 64.0, 1024  # of the data of FP8 weights, where e4m3 ends at 448; rows drawn at once


class WeightFiller:
    """Fills a model's parameters in place, a checkpoint tensor at a time.

    The model says: in ``packed_modules_mapping`` the parts of its merged layers, e.g.
    ``{"q_proj": ("qkv_proj", "q")}``; in ``renamed_tensors`` pairs (in the checkpoint, here) of parts of names; in
    ``unused_tensors`` a regular expression of names to skip. A checkpoint may also hold a merged layer as one tensor.
    An FP8 weight is filled by FP8 data and its scale, or by a 16-bit tensor, which is quantized and counts as both.

    Args:
        quantizes: False: a 16-bit tensor for an FP8 weight is an error.

    Attributes:
        missing: checkpoint tensors not given yet, by their names here.
        filled: those given.
    """

    def __init__(self, model: Any, quantizes: bool = True):
        self._quantizes, self._renamed, self._unused = quantizes, model.renamed_tensors, model.unused_tensors
        self._params: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._parts = {name: _parts(name, param, model.packed_modules_mapping) for name, param in self._params.items()}
        # checkpoint tensor -> its parameter, and the shard id in there
        self._targets = {part: (name, shard_id) for name, parts in self._parts.items() for part, shard_id in parts}
        self._attentions = {
            name.removesuffix(".attn"): module for name, module in model.named_modules()
            if hasattr(module, "load_kv_scale")
        }  # fmt: skip
        self.missing = set(self._targets)
        self.filled: set[str] = set()
        self.device = str(next(iter(self._params.values())).device)

    def fill(self, tensor: CheckpointTensor, source: str) -> None:
        """Raises CheckpointError, with nothing written: unknown, there before, or of another shape."""
        if self._unused.fullmatch(tensor.name):
            return
        name = tensor.name
        for old, new in self._renamed:
            name = name.replace(old, new)
        if (match := re.fullmatch(KV_SCALES, name)) and match[1] in self._attentions:
            self._attentions[match[1]].load_kv_scale(match[2] or match[3], tensor)
            return
        parts, shard_id = [name], None
        if name in self._targets:
            name, shard_id = self._targets[name]
        else:  # stored as it is merged here, or unknown
            parts = [part for part, _ in self._parts.get(name, [])]
        param: Any = self._params.get(name)
        is_scale = hasattr(param, "group_size")
        quantizes = param is not None and param.dtype == E4M3 and self._quantizes and not tensor.is_fp8()
        if quantizes:
            parts = [*parts, *(f"{part}_scale" for part in parts)]
        if param is None or not self.missing.issuperset(parts):
            raise CheckpointError(f"{source}: tensor {tensor.name!r} is twice there, or unknown to the model.")
        pieces = [(tensor, shard_id)]
        if ".experts." in name and shard_id is None:  # of all experts
            pieces = [(piece, (expert, None)) for expert, piece in enumerate(tensor.entries(len(param)))]
        for piece, shard_id in pieces:
            writes = [(param, Scales.of_param(param, piece) if is_scale else piece)]
            for target, loaded in quantized(param, piece) if quantizes else writes:
                if hasattr(target, "weight_loader"):
                    target.weight_loader(target, loaded, shard_id)
                else:  # replicated on every rank
                    copy_shard(target, loaded)
        self.missing.difference_update(parts)
        self.filled.update(parts)

    def fill_from_files(self, path: str | Path) -> None:
        """Every tensor of the safetensors files in a directory, or of one file; CheckpointError if unreadable."""
        from safetensors import SafetensorError, safe_open

        files = _weight_files(Path(path))
        if not files:
            raise CheckpointError(f"{path} holds no *.safetensors file (other weight formats are not read).")
        for file in files:
            try:
                with safe_open(file, "pt", device=self.device) as tensors:
                    for name in tensors.keys():  # noqa: SIM118 (not a dict)
                        self.fill(CheckpointTensor.of(name, tensors.get_slice(name)), file.name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} cannot be read ({error}); is the download complete?") from error

    def fill_from(self, weights: Iterable[tuple[str, torch.Tensor]], source: str) -> None:
        """Every tensor of pairs (name, tensor)."""
        for name, tensor in weights:
            self.fill(CheckpointTensor.of(name, tensor.detach()), source)

    def check_complete(self, source: str, advice: str = "") -> None:
        if self.missing:
            some = ", ".join(sorted(self.missing)[:5])
            raise CheckpointError(f"{source}: {len(self.missing)} tensors are missing, among them {some}{advice}.")


def _parts(name: str, param: nn.Parameter, packed: dict[str, tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The checkpoint tensors of a parameter, with their shard ids. Those of experts have shard ids (expert, part)."""
    prefix, _, merged = name.rpartition(".experts.")
    if prefix:
        suffix = "weight_scale" if merged.endswith("_scale") else "weight"
        return [
            (f"{prefix}.experts.{expert}.{part}.{suffix}", (expert, shard_id)) for expert in range(len(param))
            for shard_id, part in enumerate(EXPERT_PARTS[merged.removesuffix("_scale")])
        ]  # fmt: skip
    shards = [
        (name.replace(f".{merged}.", f".{part}."), shard_id)
        for part, (merged, shard_id) in packed.items() if f".{merged}." in name
    ]  # fmt: skip
    return shards or [(name, None)]


def load_model(model: Any, path: str) -> None:
    """Fill ``model`` from the safetensors files in directory ``path``. ``model.fp8``: its ``FP8Weights``, or None.

    Raises:
        CheckpointError: no or unreadable files; a tensor missing, unknown, duplicate or of another shape.
    """
    filler = WeightFiller(model, quantizes=model.fp8 is None or not model.fp8.in_checkpoint)
    filler.fill_from_files(path)
    filler.check_complete(path)


def _weight_files(path: Path) -> list[Path]:
    """The files that the index names, else all: other files may hold the same weights in other layouts.

    ``model.safetensors`` counts in any case: it may be newer than the index. A file stands for itself.
    """
    if path.is_file():
        return [path]
    files, index = sorted(path.glob("*.safetensors")), path / "model.safetensors.index.json"
    weight_map = read_json(index).get("weight_map") if index.is_file() else None
    names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    if not names.intersection(file.name for file in files):  # no index, or a stale one
        return files
    return [file for file in files if file.name in names or file.name == "model.safetensors"]


def init_dummy_weights(model: nn.Module, seed: int) -> None:
    """Random weights of the scale of an untrained model: norms 1, everything else N(0, DUMMY_STD).

    FP8 weights are drawn in pieces, so that the device never holds them in another type.
    """
    params = list(model.named_parameters())
    generator = torch.Generator(params[0][1].device).manual_seed(seed)
    for name, param in params:
        if "norm" in name:
            param.fill_(1.0)
        elif hasattr(param, "group_size"):
            param.fill_(DUMMY_STD / DUMMY_FP8_STD)
        elif param.dtype == E4M3:
            for rows in param.flatten(0, -2).split(DUMMY_ROWS):
                drawn = torch.empty(rows.shape, dtype=torch.float32, device=param.device)
                rows.copy_(drawn.normal_(0.0, DUMMY_FP8_STD, generator=generator))
        else:
            param.normal_(0.0, DUMMY_STD, generator=generator)

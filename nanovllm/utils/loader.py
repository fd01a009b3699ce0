"""Fills a model's parameters from safetensors files, from tensors in memory, or with random numbers.

Owns the match between checkpoint tensors and parameters: every parameter filled, every tensor used, every shape equal,
or a ``CheckpointError``. How a tensor is sharded over ranks stands beside its layer (``weight_loader``).
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.kernels.fp8 import E4M3
from nanovllm.quantization import BLOCK, KV_SCALES
from nanovllm.utils.checkpoint import read_json
from nanovllm.utils.fp8 import Quantized, Scales, check_is

DUMMY_STD = 0.02  # of random weights, as transformers initialises
DUMMY_FP8_STD, DUMMY_ROWS = 64.0, 1024  # of the data of FP8 weights, where e4m3 ends at 448; rows drawn at once


class CheckpointTensor(NamedTuple):
    """A tensor under its name in the checkpoint.

    ``lazy``: safetensors' PySafeSlice of an open file, where indexing reads only the slice; or ``InMemory``.
    """

    name: str
    lazy: Any

    def is_fp8(self) -> bool:
        return bool(self.lazy.get_shape()) and self.lazy[:1,].dtype == E4M3


class InMemory:
    """A tensor with the interface of a safetensors slice."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.detach()

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


class Rows:
    """A lazy tensor's rows ``[start : start + count]``."""

    def __init__(self, lazy: Any, start: int, count: int):
        self.lazy, self.start, self.count = lazy, start, count

    def get_shape(self) -> list[int]:
        return [self.count, *self.lazy.get_shape()[1:]]

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        begin, end, _ = index[0].indices(self.count)
        return self.lazy[(slice(self.start + begin, self.start + end), *index[1:])]


def split_rows(loaded: CheckpointTensor, sizes: list[int]) -> list[CheckpointTensor]:
    """The parts of a tensor that has several layers' rows one after the other.

    Raises:
        CheckpointError: the tensor has not as many rows as they.
    """
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if isinstance(loaded.lazy, Scales):  # not yet a scale for each row
        lazies: list[Any] = [loaded.lazy.part(*part, sum(sizes)) for part in zip(starts, sizes, strict=True)]
        return [CheckpointTensor(loaded.name, lazy) for lazy in lazies]
    shape = list(loaded.lazy.get_shape())
    if shape[0] != sum(sizes):
        raise CheckpointError(f"tensor {loaded.name!r} has shape {shape}, expected {[sum(sizes), *shape[1:]]}.")
    return [CheckpointTensor(loaded.name, Rows(loaded.lazy, *part)) for part in zip(starts, sizes, strict=True)]


def copy_checked(param: torch.Tensor, loaded: CheckpointTensor, dim: int = 0, start: int = 0, total: int = 1) -> None:
    """Copy ``loaded[start : start + param.shape[dim]]`` (along ``dim``) into ``param``.

    Raises:
        CheckpointError: the tensor is not ``total`` times the size of ``param`` along ``dim``, or not of floats, or one
            of tensor and ``param`` is FP8.
    """
    lazy, expected = loaded.lazy, list(param.shape)
    expected[dim] *= total
    if isinstance(lazy, Scales):
        lazy = lazy.fit(loaded.name, expected)
    shape = list(lazy.get_shape())
    if shape != expected:
        raise CheckpointError(f"tensor {loaded.name!r} has shape {shape}, expected {expected}.")
    shard = lazy[(slice(None),) * dim + (slice(start, start + param.shape[dim]),)]
    check_is(shard, param.dtype, loaded.name)
    param.copy_(shard)


def copy_heads(param: torch.Tensor, loaded: CheckpointTensor, order: list[int] | None, dim: int, shard: int,
               num_shards: int) -> None:
    """Copy part ``shard`` of the heads that ``loaded`` has along ``dim`` into ``param``, their dimensions in ``order``.

    In the order -1 stands for zeros: heads in ``param`` are padded. None: as they are.

    Raises:
        CheckpointError: as ``copy_checked``.
    """
    if order is None:
        copy_checked(param, loaded, dim, shard * param.shape[dim], num_shards)
        return
    heads = param.unflatten(dim, (-1, len(order)))
    head_dim = max(order) + 1  # in the checkpoint: every dimension of its heads is in the order
    part = param.new_empty([*param.shape[:dim], heads.shape[dim] * head_dim, *param.shape[dim + 1 :]])
    copy_checked(part, loaded, dim, shard * part.shape[dim], num_shards)
    part = part.unflatten(dim, (-1, head_dim)).movedim(dim + 1, 0)  # [head_dim, ...]
    with_zeros = torch.cat((part, torch.zeros_like(part[:1])))
    heads.movedim(dim + 1, 0).copy_(with_zeros[order])


class TensorNames:
    """Which parameters of ``model`` checkpoint tensors fill.

    The model says: in ``packed_modules_mapping`` the parts of its merged layers, e.g.
    ``{"q_proj": ("qkv_proj", "q")}``; in ``renamed_tensors`` pairs (in the checkpoint, here) of parts of names; in
    ``unused_tensors`` a regular expression of names to skip. A checkpoint may also hold a merged layer as one tensor.
    """

    def __init__(self, model: Any):
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.renamed, self.unused = model.renamed_tensors, model.unused_tensors
        modules = dict(model.named_modules())
        self.attentions = {  # and the shard of the KV heads that this rank has
            name: (module.attn, module.qkv_proj.kv_shard) for name, module in modules.items()
            if hasattr(getattr(module, "attn", None), "set_kv_scale")
        }  # fmt: skip
        packed = model.packed_modules_mapping
        self.parts = {name: _parts(name, param, packed) for name, param in self.params.items()}
        self.targets = {part: (name, shard_id) for name, parts in self.parts.items() for part, shard_id in parts}

    def is_unused(self, name: str) -> bool:
        return self.unused.fullmatch(name) is not None

    def find(self, name: str) -> tuple[nn.Parameter, Any, list[str]] | None:
        """The parameter of checkpoint tensor ``name``, the shard id, and the ``targets`` it fills; None if unknown."""
        for old, new in self.renamed:
            name = name.replace(old, new)
        if name in self.targets:
            param_name, shard_id = self.targets[name]
            return self.params[param_name], shard_id, [name]
        if name in self.params:  # stored as it is merged here
            return self.params[name], None, [part for part, _ in self.parts[name]]
        return None

    def kv_scale(self, name: str) -> tuple[Any, tuple[int, int], str]:
        """The attention whose keys or values ("k", "v", "kv") a tensor scales, and its shard; None for any other."""
        for old, new in self.renamed:
            name = name.replace(old, new)
        match = re.fullmatch(KV_SCALES, name)
        if match is None or match[1] not in self.attentions:
            return None, (0, 1), ""
        return *self.attentions[match[1]], match[2] or match[3]


def _parts(name: str, param: nn.Parameter, packed: dict[str, tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The checkpoint tensors of a parameter, with their shard ids. Those of experts have shard ids (expert, part)."""
    prefix, _, merged = name.rpartition(".experts.")
    if prefix:
        of_one = {"gate_up_proj": (("gate_proj", 0), ("up_proj", 1)), "down_proj": (("down_proj", None),)}[merged]
        return [
            (f"{prefix}.experts.{expert}.{part}.weight", (expert, shard_id))
            for expert in range(len(param)) for part, shard_id in of_one
        ]  # fmt: skip
    shards = [
        (name.replace(f".{merged}.", f".{part}."), shard_id)
        for part, (merged, shard_id) in packed.items() if f".{merged}." in name
    ]  # fmt: skip
    return shards or [(name, None)]


class WeightFiller:
    """Fills a model's parameters in place, a checkpoint tensor at a time; see ``TensorNames``.

    An FP8 weight is filled by FP8 data and its scale, or by a 16-bit tensor, which is quantized and counts as both.

    Args:
        quantizes: False: a 16-bit tensor for an FP8 weight is an error.

    Attributes:
        missing: checkpoint tensors not given yet, by their names here.
        filled: those given.
    """

    def __init__(self, model: nn.Module, quantizes: bool = True):
        self._names, self._quantizes = TensorNames(model), quantizes
        self.missing = set(self._names.targets)
        self.filled: set[str] = set()
        self.device = str(next(iter(self._names.params.values())).device)

    def fill(self, tensor: CheckpointTensor, source: str) -> None:
        """Raises CheckpointError, with nothing written: unknown, there before, or of another shape."""
        if self._names.is_unused(tensor.name) or self._is_kv_scale(tensor):
            return
        param, shard_id, parts = self._names.find(tensor.name) or (None, None, [])
        writes: list[tuple[Any, CheckpointTensor]] = [(param, tensor)]
        if param is not None and param.dtype == E4M3 and self._quantizes and not tensor.is_fp8():
            parts = [*parts, *(f"{part}_scale" for part in parts)]
            writes = quantized(param, tensor)
        if param is None or not self.missing.issuperset(parts):
            raise CheckpointError(f"{source}: tensor {tensor.name!r} is twice there, or unknown to the model.")
        for target, loaded in writes:
            if hasattr(target, "group_size"):
                loaded = loaded._replace(lazy=Scales(loaded.lazy, target.group_size))
            if hasattr(target, "weight_loader"):
                target.weight_loader(target, loaded, shard_id)
            else:  # replicated on every rank
                copy_checked(target, loaded)
        self.missing.difference_update(parts)
        self.filled.update(parts)

    def _is_kv_scale(self, tensor: CheckpointTensor) -> bool:
        """Whether it is a scale of the KV cache, which the attention then has; for all heads, or for each KV head."""
        attention, (shard, num_shards), which = self._names.kv_scale(tensor.name)
        if attention is None:
            return False
        shape, num_heads = tensor.lazy.get_shape(), attention.kv_scale.shape[1] * num_shards
        if math.prod(shape) not in (1, num_heads):
            raise CheckpointError(f"tensor {tensor.name!r} has shape {list(shape)}, expected [1] or [{num_heads}].")
        value = tensor.lazy[...]
        check_is(value, torch.float32, tensor.name)
        for number in value.flatten().tolist():
            if not 0 < number < math.inf:
                raise CheckpointError(f"tensor {tensor.name!r} has {number}, expected positive numbers.")
        scales = value.float().reshape(-1).expand(num_heads).chunk(num_shards)[shard]
        for name in which:
            attention.set_kv_scale(name, scales)
        return True

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
                        self.fill(CheckpointTensor(name, tensors.get_slice(name)), file.name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} cannot be read ({error}); is the download complete?") from error

    def fill_from(self, weights: Iterable[tuple[str, torch.Tensor]], source: str) -> None:
        """Every tensor of pairs (name, tensor)."""
        for name, tensor in weights:
            self.fill(CheckpointTensor(name, InMemory(tensor)), source)

    def check_complete(self, source: str) -> None:
        if self.missing:
            some = ", ".join(sorted(self.missing)[:5])
            raise CheckpointError(f"{source}: {len(self.missing)} tensors are missing, among them {some}.")


def quantized(param: Any, tensor: CheckpointTensor) -> list[tuple[Any, CheckpointTensor]]:
    """What to write for a 16-bit tensor: (data of an FP8 weight, ...), (its scale, ...)."""
    if len(tensor.lazy.get_shape()) != 2:
        return [(param, tensor)]  # its shape will be refused
    both = Quantized(tensor.lazy, BLOCK if param.scale.group_size else 0, tensor.name, param.device)
    return [(target, tensor._replace(lazy=both.part(i))) for i, target in enumerate((param, param.scale))]


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
            for rows in param.split(DUMMY_ROWS):
                drawn = torch.empty(rows.shape, dtype=torch.float32, device=param.device)
                rows.copy_(drawn.normal_(0.0, DUMMY_FP8_STD, generator=generator))
        else:
            param.normal_(0.0, DUMMY_STD, generator=generator)

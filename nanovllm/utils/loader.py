"""Fills a model's parameters from safetensors files, from tensors in memory, or with random numbers.

Owns the match between checkpoint tensors and parameters: every parameter filled, every tensor used, every shape equal,
or a ``CheckpointError``. How a tensor is sharded over ranks stands beside its layer (``weight_loader``).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.utils.checkpoint import read_json

DERIVED = "rotary_emb.inv_freq"  # in old checkpoints and some state dicts; follows from config.json
DUMMY_STD = 0.02  # of random weights, as transformers initialises


class CheckpointTensor(NamedTuple):
    """A tensor under its name in the checkpoint.

    ``lazy``: safetensors' PySafeSlice of an open file, where indexing reads only the slice; or ``InMemory``.
    """

    name: str
    lazy: Any


class InMemory:
    """A tensor with the interface of a safetensors slice."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.detach()

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def copy_checked(param: torch.Tensor, loaded: CheckpointTensor, dim: int = 0, start: int = 0, total: int = 1) -> None:
    """Copy ``loaded[start : start + param.shape[dim]]`` (along ``dim``) into ``param``.

    Raises:
        CheckpointError: the tensor is not ``total`` times the size of ``param`` along ``dim``, or not of floats.
    """
    shape, expected = list(loaded.lazy.get_shape()), list(param.shape)
    expected[dim] *= total
    if shape != expected:
        raise CheckpointError(f"tensor {loaded.name!r} has shape {shape}, expected {expected}.")
    shard = loaded.lazy[(slice(None),) * dim + (slice(start, start + param.shape[dim]),)]
    if not shard.is_floating_point():  # quantized: copy_ would convert the integers without an error
        dtype = str(shard.dtype).removeprefix("torch.")
        raise CheckpointError(f"tensor {loaded.name!r} is of {dtype}, expected floats.")
    param.copy_(shard)


class WeightFiller:
    """Fills a model's parameters in place, a checkpoint tensor at a time.

    The model maps checkpoint names to its merged layers in ``packed_modules_mapping``, e.g.
    ``{"q_proj": ("qkv_proj", "q")}``, and lists checkpoint tensors to skip in ``unused_weights``.

    Attributes:
        missing: names of the tensors not given yet -> (parameter name, shard id).
        filled: names of those given.
    """

    def __init__(self, model: nn.Module):
        self._params = dict(model.named_parameters())
        self._unused: set[str] = model.unused_weights  # type: ignore[assignment]
        self.missing = _expected_tensors(self._params, model.packed_modules_mapping)  # type: ignore[arg-type]
        self.filled: set[str] = set()
        self.device = str(next(iter(self._params.values())).device)

    def fill(self, tensor: CheckpointTensor, source: str) -> None:
        """Raises CheckpointError, with nothing written: unknown, there before, or of another shape."""
        name = tensor.name
        if name in self._unused or name.endswith(DERIVED):
            return
        if name not in self.missing:
            raise CheckpointError(f"{source}: tensor {name!r} is twice there, or unknown to the model.")
        param_name, shard_id = self.missing[name]
        param = self._params[param_name]
        if hasattr(param, "weight_loader"):
            param.weight_loader(param, tensor, shard_id)
        else:  # replicated on every rank
            copy_checked(param, tensor)
        del self.missing[name]
        self.filled.add(name)

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


def load_model(model: nn.Module, path: str) -> None:
    """Fill ``model`` from the safetensors files in directory ``path``.

    Raises:
        CheckpointError: no or unreadable files; a tensor missing, unknown, duplicate or of another shape.
    """
    filler = WeightFiller(model)
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


def _expected_tensors(params: dict[str, nn.Parameter], packed: dict[str, tuple[str, Any]]) -> dict[str, tuple]:
    """Checkpoint tensor name -> (parameter name, shard id)."""
    expected: dict[str, tuple] = {}
    for name in params:
        shards = {
            name.replace(f".{merged}.", f".{part}."): (name, shard_id)
            for part, (merged, shard_id) in packed.items()
            if f".{merged}." in name
        }
        expected |= shards or {name: (name, None)}
    return expected


def init_dummy_weights(model: nn.Module, seed: int) -> None:
    """Random weights of the scale of an untrained model: norms 1, everything else N(0, DUMMY_STD)."""
    params = list(model.named_parameters())
    generator = torch.Generator(params[0][1].device).manual_seed(seed)
    for name, param in params:
        if "norm" in name:
            param.fill_(1.0)
        else:
            param.normal_(0.0, DUMMY_STD, generator=generator)

"""Fills a model's parameters from safetensors files, or with random numbers.

Owns the match between checkpoint tensors and parameters: every parameter filled, every tensor
used, every shape equal, or a ``CheckpointError`` that names the culprit. How a tensor is split
over ranks stands beside the layer it belongs to (``weight_loader``).
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.utils.checkpoint import read_json

DUMMY_STD = 0.02  # of random weights, as transformers initialises


class CheckpointTensor:
    """A named tensor in an open safetensors file; slicing reads only what is asked for."""

    def __init__(self, name: str, lazy: Any):
        self.name = name
        self._lazy = lazy
        self.shape = tuple(lazy.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._lazy[index]


def copy_checked(param: torch.Tensor, loaded: CheckpointTensor, dim: int = 0, start: int = 0, total: int = 1) -> None:
    """Copy ``loaded[start : start + param.shape[dim]]`` (along ``dim``) into ``param``.

    ``total`` such parts make up the checkpoint's tensor; any other shape is a CheckpointError.
    """
    expected = list(param.shape)
    expected[dim] *= total
    if list(loaded.shape) != expected:
        raise CheckpointError(f"tensor {loaded.name!r} has shape {list(loaded.shape)}, expected {expected}.")
    index = (slice(None),) * dim + (slice(start, start + param.shape[dim]),)
    part = loaded[index]
    if not part.is_floating_point():  # of a quantized or broken model; as numbers they would pass for weights
        dtype = str(part.dtype).removeprefix("torch.")
        raise CheckpointError(f"tensor {loaded.name!r} is of {dtype}, expected floats.")
    param.copy_(part)


def default_weight_loader(param: nn.Parameter, loaded: CheckpointTensor, shard_id: None = None) -> None:
    """For parameters that every rank holds whole."""
    copy_checked(param, loaded)


def load_model(model: nn.Module, path: str) -> None:
    """Fill ``model`` from the ``*.safetensors`` files in directory ``path``, of several those that its index names.

    The model names the parts of its merged layers in ``packed_modules_mapping``, e.g.
    ``{"q_proj": ("qkv_proj", "q")}``, and the tensors it does without in ``unused_weights``.

    Raises:
        CheckpointError: no or unreadable files; a tensor missing, surplus, twice or of another shape.
    """
    from safetensors import SafetensorError, safe_open

    files = _weight_files(Path(path))
    if not files:
        raise CheckpointError(f"{path} holds no *.safetensors file (other weight formats are not read).")
    params = dict(model.named_parameters())
    device = str(next(iter(params.values())).device)
    packed: dict[str, tuple[str, Any]] = model.packed_modules_mapping  # type: ignore[assignment]
    missing = _expected_tensors(params, packed)
    for file in files:
        try:
            with safe_open(file, "pt", device=device) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    if name in model.unused_weights:  # type: ignore[operator]
                        continue
                    if name not in missing:
                        raise CheckpointError(f"{file.name}: tensor {name!r} is twice there, or unknown to the model.")
                    param_name, shard_id = missing.pop(name)
                    param = params[param_name]
                    loader = getattr(param, "weight_loader", default_weight_loader)
                    loader(param, CheckpointTensor(name, tensors.get_slice(name)), shard_id)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); is the download complete?") from error
    if missing:
        some = ", ".join(sorted(missing)[:5])
        raise CheckpointError(f"{path}: {len(missing)} tensors are missing, among them {some}.")


def _weight_files(path: Path) -> list[Path]:
    """All of them; if an index names some, those, for others beside them hold the same weights in other layouts.

    But ``model.safetensors`` is not left out: whether it or the index is newer cannot be told.
    """
    files, index = sorted(path.glob("*.safetensors")), path / "model.safetensors.index.json"
    weight_map = read_json(index).get("weight_map") if index.is_file() else None
    names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    if not names.intersection(file.name for file in files):  # a leftover of files that were put together
        return files
    return [file for file in files if file.name in names or file.name == "model.safetensors"]


def _expected_tensors(params: dict[str, nn.Parameter], packed: dict[str, tuple[str, Any]]) -> dict[str, tuple]:
    """Checkpoint tensor name -> (parameter name, shard id)."""
    expected: dict[str, tuple] = {}
    for name in params:
        parts = [(part, merged, shard) for part, (merged, shard) in packed.items() if f".{merged}." in name]
        for part, merged, shard in parts:
            expected[name.replace(f".{merged}.", f".{part}.")] = (name, shard)
        if not parts:
            expected[name] = (name, None)
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

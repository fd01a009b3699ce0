"""Reads sentence-transformers' files beside the weights: how a checkpoint pools hidden states into embeddings."""

import json
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.utils.checkpoint import read_json

# in a Pooling module's config.json -> here; newer files have one field, "pooling_mode", older ones a flag for each mode
MODES = {"lasttoken": "last", "cls": "cls", "mean": "mean"}
FLAGS = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}


def read_pooling(model_path: str) -> tuple[str, bool]:
    """Read ``modules.json`` and the Pooling module's ``config.json``; without these files it is ("last", True).

    Returns:
        The kind of ``POOLING`` (readouts/pooled_state.py), of which hidden states an embedding is the mean; and whether
        embeddings are divided by their L2 norm, unless a call says otherwise.
    """
    path = Path(model_path, "modules.json")
    if not path.is_file():
        return "last", True
    kind, normalize = "last", False
    for module in _read_list(path):
        name = str(module.get("type")).rpartition(".")[2]
        if name == "Pooling":
            kind = _kind(Path(model_path, str(module.get("path")), "config.json"))
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise CheckpointError(f"{path}: module {name!r} is not supported, only Transformer, Pooling and Normalize.")
    return kind, normalize


def _kind(path: Path) -> str:
    config = read_json(path)
    given = config.get("pooling_mode")
    modes = given if isinstance(given, list) else [given] if given else []
    modes = modes or [FLAGS.get(flag, flag) for flag, on in config.items() if flag.startswith("pooling_mode_") and on]
    if len(modes) != 1 or modes[0] not in MODES:
        given = " + ".join(map(str, modes)) or "without a mode"
        raise CheckpointError(f"{path}: pooling {given} is not supported, only one of {', '.join(MODES)}.")
    if modes[0] != "lasttoken" and config.get("include_prompt") is False:
        raise CheckpointError(f"{path}: include_prompt=false is not supported: instructions count like other tokens.")
    return MODES[modes[0]]


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path} holds no list of modules.")
    return modules

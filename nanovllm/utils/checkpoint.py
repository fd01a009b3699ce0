"""Finds a checkpoint and reads its small JSON files.

Owns the way from a model's name to a local directory, and what ``config.json`` and
``generation_config.json`` say. Knows nothing of tensors (``utils/loader.py`` does).
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.model_config import FIELDS, ModelConfig, checked, token_ids
from nanovllm.models import MODELS

DEMO_MODEL = Path(__file__).resolve().parent.parent / "assets" / "demo"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")


def resolve_model(model: str | os.PathLike | None, revision: str | None = None, weights: bool = True) -> str:
    """Return the local directory of ``model``.

    Args:
        model: a directory, a hub id, or None for the bundled demo model.
        revision: branch, tag or commit of a hub id.
        weights: False fetches the small files only.

    Raises:
        ConfigError: a revision of a directory.
        CheckpointError: no such directory, it may not be looked at, or the hub cannot provide it (the cache and
            ``HF_HUB_OFFLINE`` are honoured).
    """
    try:
        path = DEMO_MODEL if model is None else Path(model).expanduser()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        mode = 0
    except (OSError, RuntimeError) as error:  # no permission, a name too long, the home of a user who is unknown
        why = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise CheckpointError(f"model={str(model)!r:.300}: it cannot be looked up: {why}.") from error
    if stat.S_ISDIR(mode):
        if revision is not None:
            raise ConfigError(f"revision={revision!r}: {path} is a directory; only a model of the hub has revisions.")
        return str(path)
    if mode:
        raise CheckpointError(f"model={str(model)!r} is a file; give the directory that holds config.json.")
    if not HUB_ID.fullmatch(str(model)) or str(model).startswith("."):
        raise CheckpointError(f"model={str(model)!r}: there is no such directory, and it is not a hub id.")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [*SMALL_FILES, "*.safetensors"] if weights else [*SMALL_FILES]
    try:
        return snapshot_download(str(model), revision=revision, allow_patterns=patterns)
    except LocalEntryNotFoundError as error:
        why = "it is not in the local cache and the hub cannot be reached (or HF_HUB_OFFLINE is set)"
        raise CheckpointError(f"model={str(model)!r}: no such directory, and {why}.") from error
    except Exception as error:  # errors of the HTTP client come through as they are, and versions use different ones
        raise CheckpointError(f"model={str(model)!r}: no such directory, and the hub says: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return content


def read_model_config(model_path: str) -> ModelConfig:
    """Read ``config.json``; raises CheckpointError if it is missing or names another architecture."""
    path = Path(model_path) / "config.json"
    try:
        raw = read_json(path)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CheckpointError(f"{model_path} holds no config.json; is it a model's directory?") from None
        raise
    architectures = raw.get("architectures") or []
    if architectures not in [[name] for name in MODELS]:
        raise CheckpointError(
            f"{path}: architectures={architectures}; supported: {', '.join(MODELS)}."
        )
    return ModelConfig.from_json(raw)


def read_eos_token_ids(model_path: str, config: ModelConfig) -> set[int]:
    """End-of-sequence ids of ``generation_config.json``, else of ``config.json``."""
    path = Path(model_path) / "generation_config.json"
    raw = read_json(path) if path.is_file() else {}
    eos = checked(raw, {"eos_token_id": FIELDS["eos_token_id"]}, str(path))["eos_token_id"]
    return set(config.eos_token_ids if eos is None else token_ids(eos))

"""Locates a checkpoint and reads its small JSON files. ``utils/loader.py`` reads the tensors."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.model_config import TOKEN_IDS, ModelConfig
from nanovllm.validation import check

DEMO_MODEL = Path(__file__).resolve().parent.parent / "assets" / "demo"
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")


def resolve_model(model: str | os.PathLike | None, revision: str | None = None, weights: bool = True) -> str:
    """Return the local directory of ``model`` (see ``Config``), after a download if it is a hub id not in the cache.

    Without ``weights`` the download leaves out the safetensors.

    Raises:
        ConfigError: a revision of a directory.
        CheckpointError: neither a readable directory nor a hub id, or the hub cannot provide it.
    """
    given = f"model={str(model)!r:.300}"
    try:
        path = DEMO_MODEL if model is None else Path(model).expanduser()
        mode, why = path.stat().st_mode, "it is a file"
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such user's home; ValueError: a NUL in it
        mode, why = 0, str(getattr(error, "strerror", None) or error).rstrip(".")
    if stat.S_ISDIR(mode):
        if revision is not None:
            raise ConfigError(f"revision={revision!r}: {path} is a directory; only a model of the hub has revisions.")
        return str(path)
    if mode or not HUB_ID.fullmatch(str(model)):
        raise CheckpointError(
            f"{given} is not a directory ({why}), nor a hub id; give the directory that holds config.json."
        )

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [*SMALL_FILES, "*.safetensors"] if weights else [*SMALL_FILES]
    try:
        return snapshot_download(str(model), revision=revision, allow_patterns=patterns)
    except LocalEntryNotFoundError:
        hub = "it is not in the local cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set)."
    except Exception as error:  # errors of the HTTP client pass through, and their classes depend on its version
        hub = f"the hub says: {error}"
    raise CheckpointError(f"{given} is not a directory ({why}); as a hub id: {hub}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{path} cannot be read ({why}); is it a model's directory, and the download complete?"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return content


def read_model_config(model_path: str) -> ModelConfig:
    return ModelConfig.from_json(read_json(Path(model_path, "config.json")))


def read_eos_token_ids(model_path: str, config: ModelConfig) -> set[int]:
    """End-of-sequence ids of ``generation_config.json``, else of ``config.json``."""
    path = Path(model_path, "generation_config.json")
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    if eos is None:
        return set(config.eos_token_ids)
    return set(check(str(path), "eos_token_id", eos, TOKEN_IDS, CheckpointError))

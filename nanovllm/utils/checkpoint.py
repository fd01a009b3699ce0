"""Locates a checkpoint, chooses its weight files, reads its small JSON files. ``models/loader.py`` reads weights."""

import json
import os
import re
import stat
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.sampling_params import RULES as SAMPLING_RULES
from nanovllm.validation import Rule, at_least, check, list_of

DEMO_MODEL = Path(__file__).resolve().parent.parent / "assets" / "demo"
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
MAX_JSON_BYTES = 256 << 20  # the largest published, an index of all tensors, has 10 MiB
LOADING_LOCK = RLock()  # imported by two threads at once, transformers lacks its classes in one of them
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
# copies of the weights that a hub's repository may have: in folders, and in Mistral's own layout
UNREAD, MISTRALS = "*/*.safetensors", "consolidated*.safetensors"
# beginnings of the names of files beside the weights: the same ones in Mistral's layout, an adapter, notes of macOS
BESIDE = "consolidated", "adapter_model", "._"
TEMPLATES = "additional_chat_templates"  # a folder that transformers reads
ID = at_least(0)
IDS = list_of(ID, "a token id or a list of them")
TOKEN_IDS = Rule(
    IDS.allowed, lambda x: ID.accepts(x) or IDS.accepts(x), lambda x: IDS.convert([x] if ID.accepts(x) else x)
)
# sampling defaults in generation_config.json: their name there -> in SamplingParams. As in vLLM do_sample is not one.
SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def resolve_model(
    model: str | os.PathLike | None, revision: str | None = None, weights: bool = True, option: str = "model",
    cache_dir: str | None = None,
) -> str:
    """Return the local directory of ``model`` (see ``Config``), after a download if it is a hub id not in the cache.

    Args:
        revision: of a hub model; a directory has none, and ignores it.
        weights: False leaves the safetensors out of the download.
        option: the name of the option of ``LLM`` that gave ``model``, for errors.
        cache_dir: of hub models; None is the hub library's.

    Raises:
        CheckpointError: neither a readable directory nor a hub id, the hub cannot provide it, or ``check_files``.
    """
    given = f"{option}={str(model)!r:.300}"
    try:
        path = DEMO_MODEL if model is None else Path(model).expanduser()
        mode, why = path.stat().st_mode, "it is a file"
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such user's home; ValueError: a NUL in it
        mode, why = 0, str(getattr(error, "strerror", None) or error).rstrip(".")
    is_directory = stat.S_ISDIR(mode)
    has_gguf = is_directory and not (path / "config.json").exists() and any(path.glob("*.gguf"))
    if option == "model" and (has_gguf or (mode and path.suffix == ".gguf")):
        raise CheckpointError(
            f"{given} is GGUF, which is not read. Give the model's directory of safetensors: in 16 bits, in FP8, or in "
            "four bits as AWQ, GPTQ, AutoRound or compressed-tensors store them."
        )
    if is_directory:
        check_files(path)
        return str(path)
    if mode or not HUB_ID.fullmatch(str(model)):
        file = {"model": "config.json", "lora": "adapter_config.json"}.get(option, "tokenizer.json")
        raise CheckpointError(
            f"{given} is not a directory ({why}), nor a hub id; give the directory that holds {file}."
        )

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [*SMALL_FILES, "*.safetensors"] if weights else [*SMALL_FILES]
    fetch = partial(snapshot_download, str(model), revision=revision, cache_dir=cache_dir, allow_patterns=patterns)
    try:
        directory = fetch(ignore_patterns=[UNREAD, MISTRALS])
        if weights and not any(Path(directory).glob("*.safetensors")):  # there may be no other layout
            return fetch(ignore_patterns=[UNREAD])
        return directory
    except LocalEntryNotFoundError:
        hub = "it is not in the local cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set)."
        if option == "model":
            hub += " LLM() without a model runs the bundled demo model."
    except Exception as error:  # errors of the HTTP client pass through, and their classes depend on its version
        hub = f"the hub says: {error}"
    raise CheckpointError(f"{given} is not a directory ({why}); as a hub id: {hub}")


def check_files(path: Path) -> None:
    """Raise CheckpointError if a file of a checkpoint is a FIFO, a socket or a device, which may never end.

    Libraries open some of the files by themselves, so all are checked before.
    """
    for folder in (path, path / TEMPLATES):
        try:
            files = list(folder.iterdir())
        except OSError:  # absent, or unreadable, as the first file to be read will say
            continue
        for file in files:
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise CheckpointError(f"{file} is no regular file; a checkpoint has no FIFOs, sockets or devices.")


def read_json(path: Path, kind: type = dict) -> Any:
    """A small JSON file that holds a ``kind``, dict or list. Raises CheckpointError for anything else."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")  # reading a FIFO would wait for ever
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{path} cannot be read ({why}); is it a model's directory, and the download complete?"
        ) from None
    if not isinstance(content, kind):
        raise CheckpointError(f"{path} holds no JSON {'object' if kind is dict else 'list'}.")
    return content


def folder_within(model_path: str, name: Any, source: Path) -> Path:
    """The folder of a checkpoint that ``source`` names; CheckpointError if it lies elsewhere."""
    root = Path(model_path).resolve()
    try:
        folder = Path(root, "" if name is None else name).resolve()
        folder.exists()  # Git keeps no empty ones; OSError where the name is too long
        if folder.is_relative_to(root):
            return folder
    except (TypeError, ValueError, OSError, RuntimeError):  # no string; a NUL in it; too long; a loop of links
        pass
    raise CheckpointError(f"{source}: {name!r:.300} must be the path of a folder within the checkpoint.")


def open_tensors(file: Path, framework: str, device: str = "cpu") -> Any:
    """An open safetensors file, as ``safe_open`` gives it. Raises SafetensorError or OSError."""
    from safetensors import safe_open

    if file.exists() and not file.is_file():
        raise OSError("it is no regular file")  # opening a FIFO would wait for ever
    return safe_open(file, framework, device=device)


def tensor_names(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file; none if it is damaged, which loading it reports."""
    from safetensors import SafetensorError

    try:
        with open_tensors(file, "np") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError):
        return []


def weight_files(path: Path) -> list[Path]:
    """The files that the index names, else all that hold other tensors than ``model.safetensors``.

    Other files may hold the same weights in other layouts. A file stands for itself.

    Raises:
        CheckpointError: a file of the index is missing, or ``model.safetensors`` has its tensors, too.
    """
    if path.exists() and not path.is_dir():
        return [path]
    files, single = sorted(path.glob("*.safetensors")), path / "model.safetensors"
    index = path / "model.safetensors.index.json"
    weight_map = read_json(index).get("weight_map") if index.is_file() else None
    names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    absent = names.difference(file.name for file in files)
    if absent == names:  # no index, or a stale one
        if names and not files:
            raise CheckpointError(f"{index} names {min(names)}, which is not there; is the download complete?")
        used = [file for file in files if not file.name.startswith(BESIDE)] or files
        given = set(tensor_names(single)) if single in used else set()
        # as transformers does, take model.safetensors where another file has the same tensors
        return [file for file in used if file == single or given.isdisjoint(tensor_names(file))]
    if absent and not single.exists():
        raise CheckpointError(f"{index} names {min(absent)}, which is not there; is the download complete?")
    if single.name not in names and not set(tensor_names(single)).isdisjoint(weight_map or ()):
        raise CheckpointError(
            f"{path} has the weights twice: in {single.name}, and in the files that {index.name} names, such as "
            f"{min(names - absent)}. Remove the older: that file, or the index and its files."
        )
    return [file for file in files if file.name in names or file == single]


def files_to_read(path: str | Path) -> list[Path]:
    """The same to look at the tensors' names: all files where it raises an error, which loading them reports."""
    try:
        return weight_files(Path(path))
    except CheckpointError:
        return sorted(Path(path).glob("*.safetensors"))


def read_eos_token_ids(model_path: str, of_config: Iterable[int]) -> list[int]:
    """End-of-sequence ids of ``generation_config.json``, else ``of_config``, the ids of ``config.json``."""
    path, raw = _read_generation_config(model_path)
    eos = raw.get("eos_token_id")
    if eos is None:
        return list(of_config)
    return list(check(str(path), "eos_token_id", eos, TOKEN_IDS, CheckpointError))


def read_generation_config(model_path: str) -> dict[str, Any]:
    """The sampling defaults of ``generation_config.json`` as keywords of ``SamplingParams``; {} without the file.

    Raises:
        CheckpointError: the file is damaged, or a value is none that ``SamplingParams`` takes.
    """
    path, raw = _read_generation_config(model_path)
    given = {name: raw[name] for name in SAMPLING_FIELDS if raw.get(name) is not None}
    try:
        return {
            SAMPLING_FIELDS[name]: check(str(path), name, value, SAMPLING_RULES[SAMPLING_FIELDS[name]], CheckpointError)
            for name, value in given.items()
        }
    except CheckpointError as error:
        raise CheckpointError(f"{error} LLM(generation_config='vllm') ignores these defaults.") from None


def _read_generation_config(model_path: str) -> tuple[Path, dict[str, Any]]:
    path = Path(model_path, "generation_config.json")
    return path, read_json(path) if path.is_file() else {}

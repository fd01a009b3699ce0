"""From vLLM's keywords to a running engine: its context length, overrides of config.json, data-parallel devices."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nanovllm.llm
from nanovllm.as_vllm import options
from nanovllm.engine.request import Request
from nanovllm.errors import ConfigError
from nanovllm.models.config import read_model_config
from nanovllm.utils import checkpoint


class CoreLLM(nanovllm.llm.LLM):
    """nanovllm's engine, which also tells of requests that are not finished."""

    overlay: TemporaryDirectory | None = None  # its model directory, if config.json is overridden

    def request_of(self, number: int) -> Request:
        return self._added.unfinished[number]

    def advance(self) -> list[Request]:
        """One step; returns the requests of ``add_request`` that it finished."""
        self._step()
        return self._take(self._added)


def start(model: str, keywords: dict[str, Any]) -> CoreLLM:
    """The engine that vLLM's keywords ask for.

    Without ``max_model_len`` it is the model's own context length, or what the KV cache holds if that is less.
    """
    given = options.to_nanovllm({"model": model, **keywords})
    claim_devices(given.get("tensor_parallel_size", 1))
    if keywords.get("download_dir") and not Path(model).is_dir():
        model = download(model, given.get("revision"), keywords["download_dir"])
    path = checkpoint.resolve_model(model, given.get("revision"), weights=given.get("load_format") != "dummy")
    overrides = config_overrides(keywords)
    overlay = overlaid(path, overrides) if overrides else None
    options.leave_to_checkpoint(given, overlay.name if overlay else path)
    max_model_len = keywords.get("max_model_len")
    is_default = max_model_len in (None, -1, "auto")
    if is_default:
        max_model_len = read_model_config(overlay.name if overlay else path).max_position_embeddings
    llm = CoreLLM(overlay.name if overlay else model, max_model_len=max_model_len, **given)
    llm.overlay = overlay
    capacity = llm.model_runner.num_kvcache_blocks * llm.config.kvcache_block_size
    if is_default and capacity < llm.config.max_model_len:
        # the engine's tables are wider than needed now, and every check of a request reads this value
        vars(llm.config).update(max_model_len=capacity)
    return llm


def download(model: str, revision: str | None, directory: str) -> str:
    """The path of a hub model in a cache of the user's choice."""
    from huggingface_hub import snapshot_download

    patterns = [*checkpoint.SMALL_FILES, "*.safetensors"]
    return snapshot_download(model, revision=revision, cache_dir=directory, allow_patterns=patterns)


def config_overrides(keywords: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that the keywords replace."""
    overrides = keywords.get("hf_overrides") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"LLM: hf_overrides={overrides!r:.100} must be a dictionary of fields of config.json.")
    rope = {name: keywords[name] for name in ("rope_scaling", "rope_theta") if keywords.get(name)}
    return {**overrides, **rope}


def overlaid(path: str, overrides: dict[str, Any]) -> TemporaryDirectory:
    """A directory with links to the files of ``path``, and another config.json."""
    directory = TemporaryDirectory(prefix="nanovllm-")
    for file in Path(path).iterdir():
        if file.name != "config.json":
            (Path(directory.name) / file.name).symlink_to(file.resolve())
    config = {**checkpoint.read_json(Path(path, "config.json")), **overrides}
    Path(directory.name, "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def claim_devices(size: int) -> None:
    """In one of several data-parallel processes (``VLLM_DP_SIZE``), see only the devices of its rank.

    A launcher may have chosen them already; then fewer are visible than all ranks need.
    """
    rank = os.environ.get("VLLM_DP_RANK_LOCAL", os.environ.get("VLLM_DP_RANK", ""))
    if int(os.environ.get("VLLM_DP_SIZE", "1")) < 2 or not rank.isdigit():
        return
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = list(map(str, range(torch.cuda.device_count()))) if visible is None else visible.split(",")
    mine = devices[int(rank) * size : (int(rank) + 1) * size]
    if len(devices) >= int(os.environ["VLLM_DP_SIZE"]) * size and not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)

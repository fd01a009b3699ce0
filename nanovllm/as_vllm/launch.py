"""From vLLM's keywords to a running engine: its context length, overrides of config.json, data-parallel devices."""

import json
import os
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanovllm.as_vllm import options
from nanovllm.errors import ConfigError
from nanovllm.llm import LLM
from nanovllm.models.config import read_model_config
from nanovllm.utils import checkpoint


def start(model: str, keywords: dict[str, Any]) -> LLM:
    """The engine that vLLM's keywords ask for.

    Without ``max_model_len`` it is the model's own context length, or what the KV cache holds if that is less.
    """
    options.check(keywords)
    claim_devices(keywords.get("tensor_parallel_size") or 1)
    has_weights, download_dir = keywords.get("load_format") != "dummy", keywords.get("download_dir")
    path = checkpoint.resolve_model(model, keywords.get("revision"), has_weights, cache_dir=download_dir)
    overlay = overlaid(path, keywords)
    if overlay is not None:
        path = overlay.name
    if overlay is not None or download_dir:
        model = path
    max_model_len = keywords.get("max_model_len")
    if is_default := max_model_len in (None, -1, "auto"):
        max_model_len = read_model_config(path).max_position_embeddings
    llm = LLM(model, max_model_len=max_model_len, **options.to_nanovllm({**keywords, "model": model}))
    if overlay is not None:
        weakref.finalize(llm, overlay.cleanup)
    capacity = llm.model_runner.num_kvcache_blocks * llm.config.kvcache_block_size
    if is_default and capacity < llm.config.max_model_len:
        # the engine's tables are wider than needed now, and every check of a request reads this value
        vars(llm.config).update(max_model_len=capacity)
    return llm


def overlaid(path: str, keywords: dict[str, Any]) -> TemporaryDirectory | None:
    """A directory with links to the files of ``path`` and the config.json that keywords change; None if they do not."""
    overrides = keywords.get("hf_overrides") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"LLM: hf_overrides={overrides!r:.100} must be a dictionary of fields of config.json.")
    overrides = {**overrides, **{n: keywords[n] for n in ("rope_scaling", "rope_theta") if keywords.get(n)}}
    if not overrides:
        return None
    directory = TemporaryDirectory(prefix="nanovllm-")
    for file in Path(path).iterdir():
        if file.name != "config.json":
            Path(directory.name, file.name).symlink_to(file.resolve())
    config = {**checkpoint.read_json(Path(path, "config.json")), **overrides}
    Path(directory.name, "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def claim_devices(size: int) -> None:
    """In one of several data-parallel processes (``VLLM_DP_SIZE``), see only the devices of its rank.

    A launcher may have chosen them already; then fewer are visible than all ranks need.
    """
    rank = os.environ.get("VLLM_DP_RANK_LOCAL", os.environ.get("VLLM_DP_RANK", ""))
    num_ranks = int(os.environ.get("VLLM_DP_SIZE", "1"))
    if num_ranks < 2 or not rank.isdigit():
        return
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = list(map(str, range(torch.cuda.device_count()))) if visible is None else visible.split(",")
    if len(devices) >= num_ranks * size and not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[int(rank) * size : (int(rank) + 1) * size])

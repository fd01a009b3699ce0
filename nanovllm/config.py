"""Every option of the engine, validated before anything is loaded.

Owns the options, their defaults and the checks that need no device. Reads the checkpoint's
``config.json`` (plain JSON: transformers is not imported for it).
"""

import difflib
import os
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.model_config import ModelConfig
from nanovllm.utils.checkpoint import read_model_config, resolve_model

DEFAULT_MAX_MODEL_LEN = 4096
DTYPES = ("auto", "bfloat16", "float16", "float32")
ATTENTION_BACKENDS = ("auto", "flash_attn", "triton", "sdpa")


def _choice(name: str, given: object, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ConfigError(f"{name}={given!r}: allowed are {', '.join(map(repr, allowed))}.")


def _integer(name: str, given: object, at_least: int) -> int:
    """As Python's int: one of numpy's would overflow sooner or later."""
    if not isinstance(given, Integral) or isinstance(given, bool) or given < at_least:  # type: ignore[operator]
        raise ConfigError(f"{name}={given!r}: must be an integer >= {at_least}.")
    return int(given)


@dataclass
class Config:
    """Options of ``LLM(model, **options)``.

    Args:
        model: a local directory, a hub id such as "Qwen/Qwen3-0.6B", or None for the bundled demo model.
        max_num_batched_tokens: most tokens in one launch (longer prompts are computed in chunks).
        max_num_seqs: most sequences that run at once.
        max_model_len: most tokens of one sequence, prompt and completion together. Default 4096, or as many as
            the model has positions for, if these are fewer.
        gpu_memory_utilization: share of the device's memory that weights, activations and KV cache may take
            together with what other processes hold.
        tensor_parallel_size: number of devices the model is spread over, 1 to 8.
        enforce_eager: no CUDA graphs and no run-ahead; slower, easier to debug.
        kvcache_block_size: tokens per KV block, a multiple of 16 (of 256 with flash-attn).
        num_kvcache_blocks: size of the KV pool in blocks; -1 takes what memory allows.
        device: "auto" (a CUDA device if there is one), "cuda" or "cpu".
        dtype: "auto" (the checkpoint's; float32 on CPU, float16 on a GPU without bfloat16), "bfloat16", "float16" or
            "float32".
        attention_backend: "auto" (what measured fastest), "flash_attn", "triton" or "sdpa".
        load_format: "auto" (safetensors) or "dummy" (random weights from config.json alone).
        enable_prefix_caching: reuse the keys and values of equal prompt beginnings.
        seed: of the engine, in [0, 2**63); requests without a seed of their own draw from it.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: let the tokenizer run code that comes with the checkpoint.
        skip_tokenizer_init: load no tokenizer; prompts and outputs are token ids.

    Raises:
        ConfigError: an option is unknown or out of range.
        CheckpointError: the model cannot be found, or is not of a supported architecture.
    """

    model: str | None = None
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = None  # type: ignore[assignment]  # an int once made; the default depends on the model
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int = 256
    num_kvcache_blocks: int = -1
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    load_format: str = "auto"
    enable_prefix_caching: bool = True
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    # derived: where the checkpoint lies and what its config.json says
    model_path: str = field(init=False)
    model_config: ModelConfig = field(init=False)

    @classmethod
    def from_options(cls, model: str | None, options: dict[str, Any]) -> "Config":
        """Build from keyword options; an unknown one is an error that names the nearest known name."""
        known = [f.name for f in fields(cls) if f.init]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise ConfigError(
                    f"LLM() has no option {name!r}. Did you mean {near!r}? Options: {', '.join(known)}."
                )
        return cls(model, **options)

    def __post_init__(self) -> None:
        if self.model is not None and not (isinstance(self.model, (str, os.PathLike)) and str(self.model)):
            raise ConfigError(f"model={self.model!r}: must be a path, a hub id or None.")
        self.max_num_batched_tokens = _integer("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        self.max_num_seqs = _integer("max_num_seqs", self.max_num_seqs, 1)
        if self.max_model_len is not None:
            self.max_model_len = _integer("max_model_len", self.max_model_len, 2)
        self.tensor_parallel_size = _integer("tensor_parallel_size", self.tensor_parallel_size, 1)
        self.kvcache_block_size = _integer("kvcache_block_size", self.kvcache_block_size, 16)
        self.seed = _integer("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise ConfigError(f"seed={self.seed}: must be below 2**63.")
        if self.tensor_parallel_size > 8:
            raise ConfigError(f"tensor_parallel_size={self.tensor_parallel_size}: allowed are 1 to 8.")
        if self.kvcache_block_size % 16:
            raise ConfigError(f"kvcache_block_size={self.kvcache_block_size}: must be a multiple of 16.")
        if self.attention_backend == "flash_attn" and self.kvcache_block_size % 256:
            raise ConfigError(
                f"kvcache_block_size={self.kvcache_block_size}: flash-attn needs a multiple of 256. "
                "Use 256, or attention_backend='triton'."
            )
        automatic = self.num_kvcache_blocks == -1
        self.num_kvcache_blocks = -1 if automatic else _integer("num_kvcache_blocks", self.num_kvcache_blocks, 1)
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} is larger than max_num_batched_tokens="
                f"{self.max_num_batched_tokens}: one decode step takes a token of every sequence. "
                "Lower the first or raise the second."
            )
        share = self.gpu_memory_utilization
        if not isinstance(share, Real) or isinstance(share, bool) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization={share!r}: must be in (0, 1].")
        self.gpu_memory_utilization = float(share)
        self.dtype = str(self.dtype).removeprefix("torch.")
        _choice("dtype", self.dtype, DTYPES)
        _choice("device", self.device, ("auto", "cuda", "cpu"))
        _choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _choice("load_format", self.load_format, ("auto", "dummy"))
        for name in ("enforce_eager", "enable_prefix_caching", "trust_remote_code", "skip_tokenizer_init"):
            _choice(name, getattr(self, name), (True, False))  # type: ignore[arg-type]

        self.model_path = resolve_model(self.model, self.revision, weights=self.load_format != "dummy")
        self.model_config = read_model_config(self.model_path)
        self.model_config.check_tensor_parallel(self.tensor_parallel_size)
        limit = self.model_config.max_position_embeddings
        if self.max_model_len is None:
            self.max_model_len = min(DEFAULT_MAX_MODEL_LEN, limit)
        if self.max_model_len > limit:
            raise ConfigError(f"max_model_len={self.max_model_len}: the model has positions for {limit} tokens.")

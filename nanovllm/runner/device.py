"""Device, dtype and CPU threads of a rank: their choice, their description, torch's defaults while a model is built,
out-of-memory errors.
"""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import torch

from nanovllm.config import Config
from nanovllm.errors import ConfigError, OutOfMemoryError
from nanovllm.models.config import ModelConfig
from nanovllm.runner.packing import describe_packed

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

DTYPE_LOCK = Lock()
# glibc maps tensors of 32 MiB and more afresh each time; the page faults of their first writes
# cost 10 to 30 % of a prefill of 16,384 tokens. Smaller launches lose nothing from 512 tokens on.
CPU_LAUNCH_TOKENS = 1024
# Weights of a layer, on one rank, from which torch's threads pay. On two idle cores two threads gain nothing in the
# decode steps of layers of 3.1 million, 1.9 times in their prefills; at 0.8 million (the demo model) 12 %. Where one of
# the cores is busy they lose: a thread without a core holds up every operation, which at this size takes microseconds.
THREADED_LAYER_WEIGHTS = 2_000_000


def select_device(name: str, rank: int, num_ranks: int) -> torch.device:
    """The device of a rank; "auto" is CUDA if there is a device. Each rank needs a device of its own."""
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError("device='cuda': torch sees no CUDA device here. Use device='cpu' or 'auto'.")
    if torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} needs {num_ranks} CUDA devices; torch sees {torch.cuda.device_count()} "
            f"(CUDA_VISIBLE_DEVICES: {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})."
        )
    return torch.device("cuda", rank)


def select_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """Choose the dtype to compute in; "auto" is the checkpoint's, where the device has instructions for it.

    Else it is float32 on a CPU, always so for float16, and float16 on a GPU without bfloat16.
    """
    if name == "auto":
        name = checkpoint
        if device.type == "cpu":
            name = "bfloat16" if checkpoint == "bfloat16" and has_fast_bfloat16() else "float32"
        elif checkpoint == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
            name = "float16"
    return getattr(torch, name)


def has_fast_bfloat16() -> bool:
    """Whether this CPU has instructions for products in bfloat16."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check() for check in checks if check is not None)


def with_fitting_launches(config: Config, device: torch.device) -> Config:
    """The options with a ``max_num_batched_tokens`` that the device's memory likes."""
    largest = max(CPU_LAUNCH_TOKENS, config.max_num_seqs)
    if device.type != "cpu" or config.max_num_batched_tokens <= largest:
        return config
    fitting = copy.copy(config)
    vars(fitting)["max_num_batched_tokens"] = largest  # bypasses the frozen __setattr__
    return fitting


def describe(config: Config, runner: "ModelRunner") -> str:
    """One line about an engine: model, device, dtype, KV cache and limits. ``config`` as it was given."""
    device, dtype, num_blocks = runner.device, runner.rank.dtype, runner.num_kvcache_blocks
    num_seqs, states = runner.config.max_num_seqs, "".join(part.describe() for part in runner.parts)
    if num_seqs < config.max_num_seqs:
        states += f" (not {config.max_num_seqs:,}: they take half of what the weights leave)"
    num_ranks = config.tensor_parallel_size
    times = f"{num_ranks} × " if num_ranks > 1 else ""
    if device.type == "cuda":
        where = times + torch.cuda.get_device_name(device)
    else:
        why = f" (torch {torch.__version__} sees no CUDA device)" if config.device == "auto" else ""
        where = f"{times or 'the '}CPU{why}"
    weights = "" if config.model_config.fp8 is None else " with FP8 weights"
    if config.model_config.quant_method == "mxfp4":
        weights = " with MXFP4 experts" if device.type == "cuda" else " (MXFP4 experts dequantized)"
    if config.model_config.has_packed_weights():
        weights = describe_packed(runner.model, device)
    model = "the demo model" if config.model is None else str(config.model)
    model += config.model_config.describe(runner)
    adapter = "" if config.lora is None else f" with adapter {config.lora}"
    fp8 = "" if config.kv_cache_dtype == "auto" else "FP8 "
    return (
        f"nanovllm: {model}{adapter} on {where}, {str(dtype).removeprefix('torch.')}{weights}; {fp8}KV cache of "
        f"{num_blocks * config.kvcache_block_size:,} tokens; max_model_len {config.max_model_len:,}, "
        f"max_num_seqs {num_seqs:,}{states}"
    )


@contextmanager
def on_threads(num_threads: int, default: int) -> Iterator[None]:
    """Run torch's operations on ``num_threads``. A setting that is not ``default`` is the user's, and kept."""
    if torch.get_num_threads() != default:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(default)


def step_threads(model: ModelConfig, device: torch.device,
                 num_ranks: int) -> Callable[[], AbstractContextManager[None]]:
    """Choose a rank's threads on the CPU: one for a small model, else its share of torch's. Returns a step's context.

    A setting of the user's counts: OMP_NUM_THREADS, MKL_NUM_THREADS or torch.set_num_threads.
    """
    num_threads = torch.get_num_threads()
    is_chosen = os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS")
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # torch's default may be the number of physical cores
    if device.type != "cpu" or is_chosen or num_threads not in (num_cpus, num_cpus // 2):
        return nullcontext
    pays = layer_weights(model) >= THREADED_LAYER_WEIGHTS * num_ranks
    return partial(on_threads, max(1, num_threads // num_ranks) if pays else 1, num_threads)


def layer_weights(model: ModelConfig) -> int:
    """Count the weights in the matrices of one decoder layer that a token passes."""
    heads = 2 * model.num_attention_heads + 2 * model.attention_layers[0].num_key_value_heads  # Q, K, V and the output
    units = model.intermediate_size
    if model.moe is not None:
        units = model.moe.top_k * model.moe.expert_size + model.moe.shared_size
    return model.hidden_size * (heads * model.attention_layers[0].head_dim + 3 * units)


@contextmanager
def model_defaults(dtype: torch.dtype, device: torch.device):
    """Modules built within get this dtype and device. The default dtype is process-wide, hence the lock."""
    with DTYPE_LOCK:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                yield
        finally:
            torch.set_default_dtype(before)


@contextmanager
def translate_oom():
    """Re-raise an out-of-memory error of device or host as one that says which option to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        on_host = type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)  # torch has no class for it
        if not on_host and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            raise
        raise OutOfMemoryError(
            f"no room for the model: {error}\nFree memory on the device, lower max_num_batched_tokens, max_num_seqs, "
            "max_model_len or num_kvcache_blocks (if set), or spread the model over more devices "
            "(tensor_parallel_size)."
        ) from error

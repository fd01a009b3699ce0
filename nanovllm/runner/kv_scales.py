"""FP8 KV cache: whether it can run here, and the scales of keys and values.

Owns the calibration. Knows nothing of the kernels: they store value / scale, saturated, and read it times the scale.

Scales are measured at start-up and after an update of the weights, in one prefill of fixed tokens, which stores its
keys and values in the model's dtype. Measured in the first request's prefill they would make every later output
depend on that request (invariant 7). e4m3 is a floating-point format: a scale need only keep values below 448 and most
of them above 2**-6, a range of 14 binades. So a wide headroom costs nothing, and a power of two rounds nothing.
"""

import logging
from collections.abc import Sequence as ListLike

import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.layers.context import Context
from nanovllm.quantization.fp8.numbers import E4M3, E4M3_MAX
from nanovllm.runner.memory import allocate_kv_cache, attention_layers
from nanovllm.runner.part import Part, Rank, one_sequence

logger = logging.getLogger("nanovllm")

CALIBRATION_TOKENS = 256
HEADROOM = 8  # the largest measured value is stored as 28 to 56, out of 448


def select_kv_dtype(config: Config, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the KV cache for ``kv_cache_dtype``; "auto" is the model's.

    Raises:
        ConfigError: the device has no e4m3.
    """
    if config.kv_cache_dtype == "auto":
        return dtype
    option = f"kv_cache_dtype={config.kv_cache_dtype!r}"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is not None or capability < (8, 9):
            raise ConfigError(
                f"{option} needs an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper), not "
                f"{torch.cuda.get_device_name(device)} ({capability[0]}.{capability[1]}). Use kv_cache_dtype='auto'."
            )
    return E4M3


def calibrate(rank: Rank, model: nn.Module, parts: ListLike[Part]) -> None:
    """Set each layer's ``kv_scale`` in place, unless the weights just loaded gave it; nothing without an FP8 KV cache.

    Needs the weights, and not the KV cache, whose content no longer fits the scales. ``parts`` add their arrays.
    """
    config, device = rank.config, rank.device
    if config.kv_cache_dtype == "auto":
        return
    layers = attention_layers(model)
    is_given = [layer.kv_scale_is_given for layer in layers]
    for layer in layers:
        layer.kv_scale_is_given = [False, False]  # the next weights may come without
    if all(map(all, is_given)):
        return
    num_tokens = min(CALIBRATION_TOKENS, config.max_num_batched_tokens, config.max_model_len)
    num_blocks = -(-num_tokens // config.kvcache_block_size)
    caches = [(layer.k_cache, layer.v_cache) for layer in layers]
    allocate_kv_cache(model, num_blocks, config.kvcache_block_size, rank.dtype, device)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
    # spread over the vocabulary by the golden ratio, in no order
    input_ids = (positions.long() * 2654435769 % 2**32 * config.model_config.vocab_size >> 32).int()
    cu_seqlens = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    try:
        model(input_ids, Context(
            positions, positions, cu_seqlens[:1], cu_seqlens[1:],
            torch.arange(num_blocks, dtype=torch.int32, device=device)[None], num_tokens,
            cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=num_tokens,
            logits_indices=cu_seqlens[1:].long() - 1, tensors=one_sequence(rank, parts, num_tokens),
        ))  # fmt: skip
        largest = [  # [2, K] for each layer
            torch.stack([cache.abs().amax(dim=(0, 1, 3)) for cache in (layer.k_cache, layer.v_cache)]).float()
            for layer in layers
        ]
    finally:
        for layer, (k_cache, v_cache) in zip(layers, caches, strict=True):
            layer.k_cache, layer.v_cache = k_cache, v_cache
    for layer, given, values in zip(layers, is_given, largest, strict=True):
        scales = (values * (HEADROOM / E4M3_MAX)).log2().ceil().exp2()
        scales.masked_fill_((values == 0) | ~values.isfinite(), 1.0)
        for i in range(2):
            if not given[i]:
                layer.kv_scale[i] = scales[i]


def warn_of_outliers(config: Config) -> None:
    """FP8 rounds keys to 4 significant bits; without a norm some channels may be so large that it shows."""
    if config.kv_cache_dtype != "auto" and not config.model_config.qk_norm:
        logger.warning(
            "kv_cache_dtype=%r: the model has no query/key norms, and outliers in the keys of such models (Qwen2.5) "
            "can ruin its answers; compare them with those of kv_cache_dtype='auto'.", config.kv_cache_dtype,
        )  # fmt: skip

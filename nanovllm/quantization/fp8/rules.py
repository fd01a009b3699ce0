"""FP8 by ``config.json``: which linear layers are stored as e4m3, and how many numbers share a scale.

Every field that changes the numbers is honoured or refused. Imports no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.quantization.fields import ANY, E4M3, check_fields, linears, refusal, skipped_modules

if TYPE_CHECKING:
    from nanovllm.models.families import Family

BLOCK = 128  # published blocks are 128 x 128
RENAMED_TENSORS = (("_scale_inv", "_scale"),)  # (in the checkpoint, here); both multiply
# Tensors of quantized checkpoints that are not needed. Products take x in 16 bits or with per-token scales, so static
# scales of x are unused; attention computes in 16 bits, so scales of queries and probabilities are unused.
UNUSED_TENSORS = r".*\.(input_scale|q_scale|prob_output_scale|q_proj\.output_scale)"
# Scales of an FP8 KV cache: for keys, for values, or for both.
KV_SCALES = r"(.*\.self_attn)\.(?:(?:attn\.|k_proj\.|v_proj\.)?(k|v|kv)_scale|(k|v)_proj\.output_scale)"
# Allowed values of fields, by ``quant_method``: for the files of DeepSeek, Qwen and AutoFP8, of llm-compressor, and of
# NVIDIA.
FORMATS = "float-quantized", "naive-quantized"
FORMS: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": ANY, "fmt": (None, "e4m3"), "activation_scheme": (None, "dynamic", "static"),
        "weight_block_size": (None, [BLOCK, BLOCK]), "modules_to_not_convert": ANY, "ignored_layers": ANY,
        "kv_cache_scheme": (None, "static"), "scale_fmt": (None, "float"), "expert_dtype": (None, "fp8"),
    },
    "compressed-tensors": {
        "quant_method": ANY, "format": FORMATS, "quantization_status": (None, "compressed", "frozen"),
        "config_groups": ANY, "ignore": ANY, "kv_cache_scheme": E4M3, "global_compression_ratio": ANY, "version": ANY,
        "sparsity_config": {"format": (None, "dense")},
    },
    "modelopt": {
        "quant_method": ANY, "quant_algo": ("FP8",), "kv_cache_quant_algo": (None, "FP8"), "exclude_modules": ANY,
        "ignore": ANY, "config_groups": ANY, "kv_cache_scheme": E4M3, "producer": ANY,
    },
}  # fmt: skip
SYMMETRIC = E4M3 | {"symmetric": (None, True)}
GROUP = {  # without input_activations only weights are FP8
    "targets": (["Linear"],), "weights": ANY, "input_activations": SYMMETRIC, "format": (None, *FORMATS),
}  # fmt: skip
WEIGHTS = SYMMETRIC | {
    "strategy": ("tensor", "channel", "block"), "dynamic": (None, False), "actorder": (None,), "group_size": (None,),
}  # fmt: skip


@dataclass(frozen=True)
class Fp8:
    """How a weight is stored: e4m3 and scales."""

    block: int  # width and height of the square that shares a scale; 0: each output feature has one


def read(quantization: dict[str, Any], family: "Family", num_layers: int, num_experts: int,
         files: Sequence[Path]) -> tuple[int | None, list[dict[str, Any]]]:
    """``fp8`` of a ``ModelConfig``, and ``fp8_linears`` of each ``LayerConfig``."""
    block = read_block(quantization)
    modules = linears(num_experts, family.recurrent, family.ungated).items()
    names = [f"model.layers.{i}.{x}" for i in range(num_layers) for name, parts in modules for x in (name, *parts)]
    is_skipped = skipped_modules(quantization, family, names)
    layers = [
        frozenset(name for name, parts in modules if not _all_or_none(f"model.layers.{i}.", name, parts, is_skipped))
        for i in range(num_layers)
    ]
    return block, [{"fp8_linears": names} for names in layers]


def schemes(quantization: dict[str, Any], family: "Family", modules: list[str]) -> dict[str, Fp8 | None]:
    block, is_skipped = read_block(quantization), skipped_modules(quantization, family, modules)
    return {name: None if is_skipped(name) else Fp8(block) for name in modules}


def read_block(quantization: dict[str, Any]) -> int:
    """Width and height of the square of weights that share a scale; 0: a scale for each output feature."""
    method = quantization["quant_method"]
    check_fields("", quantization, FORMS[method], is_closed=True)
    in_blocks = quantization.get("weight_block_size")
    if method == "compressed-tensors":
        in_blocks = _read_group(quantization) == "block"
    return BLOCK if in_blocks else 0


def _read_group(raw: dict[str, Any]) -> str:
    """The strategy of the weights in the files of llm-compressor: "tensor", "channel" or "block"."""
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise refusal(f"config_groups={groups!r:.100} (not one group)")
    ((name, group),) = groups.items()
    where = f"config_groups.{name}."
    check_fields(where, group, GROUP, is_closed=True)
    weights = group.get("weights")
    check_fields(f"{where}weights.", weights, WEIGHTS)
    in_blocks = weights["strategy"] == "block"
    check_fields(f"{where}weights.", weights, {"block_structure": ([BLOCK, BLOCK],) if in_blocks else (None,)})
    return weights["strategy"]


def _all_or_none(prefix: str, name: str, parts: tuple[str, ...], is_skipped: Callable[[str], bool]) -> bool:
    """Whether a linear layer is left out; its parts share one product, so they are FP8 together."""
    if is_skipped(prefix + name):
        return True
    skipped = [part for part in parts if is_skipped(prefix + part)]
    if skipped and len(skipped) < len(parts):
        some = ", ".join(parts) if len(parts) < 4 else f"{parts[0]} to {parts[-1]}"
        raise refusal(f"leaving out {prefix}{skipped[0]}, but not all of {some},")
    return bool(skipped)

"""NVFP4 by ``config.json``: compressed-tensors' "nvfp4-pack-quantized" and ModelOpt's, and MXFP4 of any linear layer.

Weights stay in four bits and activations in 16 (W4A16), so the stored scales of inputs are not used. Every field that
changes the weights is honoured or refused. Imports no torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.quantization.fields import ANY, E4M3, check_fields, refusal, skipped_modules
from nanovllm.quantization.int4.rules import NEUTRAL, Schemes, by_targets, packed_layers

if TYPE_CHECKING:
    from nanovllm.models.families import Family

KINDS = {  # by layout: suffixes of a module's tensors, codes and scales first
    "nvfp4-pack-quantized": ("weight_packed", "weight_scale", "weight_global_scale"),  # the last one divides
    "mxfp4-pack-quantized": ("weight_packed", "weight_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),  # the last one multiplies
}
GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32, "modelopt": 16}  # channels of a scale, by layout
UNUSED_TENSORS = r".*\.(input_scale|input_global_scale|q_scale|prob_output_scale|q_proj\.output_scale)"
# Inputs are rounded to 4 or 8 bits by the program that quantized them; not here.
INPUTS: dict[str, Any] = {"num_bits": (4, 8), "type": ("float",)}
WEIGHTS: dict[str, Any] = {
    "num_bits": (4,), "type": ("float",), "symmetric": (None, True), "strategy": (None, "tensor_group", "group"),
    "dynamic": (None, False), "actorder": (None, "weight", "static"), "block_structure": (None,), "observer": ANY,
    "observer_kwargs": ANY, "scale_dtype": ANY, "zp_dtype": ANY,
}  # fmt: skip
GROUP: dict[str, Any] = {
    "targets": ANY, "weights": ANY, "input_activations": INPUTS, "output_activations": (None,), "format": ANY,
}  # fmt: skip
COMPRESSED_TENSORS: dict[str, Any] = NEUTRAL | {
    "format": ANY, "config_groups": ANY, "ignore": ANY, "kv_cache_scheme": E4M3, "version": ANY,
}
MODELOPT: dict[str, Any] = NEUTRAL | {
    "quant_algo": ANY, "kv_cache_quant_algo": (None, "FP8"), "group_size": (None, 16), "exclude_modules": ANY,
    "ignore": ANY, "config_groups": ANY, "kv_cache_scheme": E4M3, "producer": ANY, "has_zero_point": (None, False),
    "pre_quant_scale": (None, False),
}  # fmt: skip


class Fp4Scheme(NamedTuple):
    """How a checkpoint stores a module of e2m1 codes."""

    layout: str  # a key of ``KINDS``
    has_input_scales: bool = False  # the products here do without them

    @property
    def bits(self) -> int:
        return 4

    @property
    def act_order(self) -> bool:
        return False

    @property
    def noun(self) -> str:
        return "4-bit floats"

    @property
    def unused_tensors(self) -> str:
        return UNUSED_TENSORS

    @property
    def kinds(self) -> tuple[str, ...]:
        return KINDS[self.layout]

    @property
    def group_size(self) -> int:
        return GROUPS[self.layout]

    def needed(self) -> set[str]:
        return set(self.kinds)


def read(quantization: dict[str, Any], family: "Family", num_layers: int, num_experts: int,
         files: Sequence[Path]) -> tuple[None, list[dict[str, Any]]]:
    """``packed_schemes`` of each ``LayerConfig``."""
    if family.gpt_oss_experts:
        raise refusal("gpt-oss in other 4-bit floats than its own MXFP4")
    layers = packed_layers(schemes, quantization, family, num_layers, num_experts, files)
    return None, [{"packed_schemes": tuple(layer)} for layer in layers]


def schemes(quantization: dict[str, Any], family: "Family", modules: list[str]) -> Schemes:
    reader = of_modelopt if quantization["quant_method"] == "modelopt" else of_compressed_tensors
    return reader(quantization, family, modules)


def of_compressed_tensors(raw: dict[str, Any], family: "Family", names: list[str]) -> Schemes:
    check_fields("", raw, COMPRESSED_TENSORS, is_closed=True)
    return by_targets(raw, family, names, lambda group, where: scheme_of_group(group, where, raw["format"]))


def scheme_of_group(group: Any, where: str, layout: str) -> Fp4Scheme:
    fields = GROUP | {"format": (None, layout)} if layout != "modelopt" else GROUP
    check_fields(where, group, fields, is_closed=True)
    # ModelOpt's groups lack some fields, which None allows
    check_fields(f"{where}weights.", group.get("weights"), WEIGHTS | {"group_size": (GROUPS[layout],)}, is_closed=True)
    return Fp4Scheme(layout, group.get("input_activations") is not None)


def of_modelopt(raw: dict[str, Any], family: "Family", names: list[str]) -> Schemes:
    """By ``config_groups``, or without them every linear layer that is not left out."""
    check_fields("", raw, MODELOPT, is_closed=True)
    if raw.get("config_groups"):
        return by_targets(raw, family, names, lambda group, where: scheme_of_group(group, where, "modelopt"))
    is_skipped = skipped_modules(raw, family, names)
    scheme = Fp4Scheme("modelopt", raw["quant_algo"] == "NVFP4")
    return {name: None if is_skipped(name) else scheme for name in names}

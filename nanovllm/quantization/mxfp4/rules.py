"""MXFP4 by ``config.json``: all experts of a model, and nothing else. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.quantization.fields import ANY, check_fields, refusal, skipped_modules

if TYPE_CHECKING:
    from nanovllm.models.families import Family

GROUP = 32  # channels of a scale
FORM = {"quant_method": ANY, "modules_to_not_convert": ANY, "dequantize": ANY}


@dataclass(frozen=True)
class Mxfp4:
    """How experts are stored: e2m1 and a scale for each group of channels."""


def read(quantization: dict[str, Any], family: "Family", num_layers: int, num_experts: int,
         files: Sequence[Path]) -> tuple[None, list[dict[str, Any]]]:
    """Nothing for a ``ModelConfig`` or a ``LayerConfig``: the format's name says it all."""
    if not family.gpt_oss_experts:
        schemes(quantization, family, [])
    check_fields("", quantization, FORM, is_closed=True)
    names = [f"model.layers.{i}.mlp.experts" for i in range(num_layers)]
    for name in filter(skipped_modules(quantization, family, names), names):
        raise refusal(f"leaving out {name}")
    return None, [{}] * num_layers


def schemes(quantization: dict[str, Any], family: "Family", modules: list[str]) -> Any:
    raise refusal(f"quant_method={quantization['quant_method']!r:.100}")

"""Weight formats, a folder each. Owns the table of the formats that a ``config.json`` may name; imports no torch.

    rules.py    ``read``: which linear layers have the format, and their scheme; ``schemes``: the
                schemes of given modules; imports no torch
    tensors.py  ``new_weight``: the parameters of a scheme; the checkpoint tensors that fill them
    numbers.py  the stored form, ``dequantized``: reference of the kernels

``fields.py`` has what the rules share; ``packed.py`` gathers the tensors of ``int4`` and ``nvfp4``. Layers and loader
ask ``weights.py``, which has the table of schemes.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.quantization.fields import refusal

if TYPE_CHECKING:
    from nanovllm.models.families import Family

MAX_EXPERTS = 200_000  # limit for all layers: a damaged number must not fill the memory with names
FORMATS = {  # quant_method, and "format" or "quant_algo" where one method has several -> folder
    ("fp8", None): "fp8", ("modelopt", None): "fp8", ("compressed-tensors", None): "fp8",
    ("compressed-tensors", "pack-quantized"): "int4", ("awq", None): "int4", ("gptq", None): "int4",
    ("auto-round", None): "int4", ("mxfp4", None): "mxfp4", ("compressed-tensors", "nvfp4-pack-quantized"): "nvfp4",
    ("compressed-tensors", "mxfp4-pack-quantized"): "nvfp4", ("modelopt", "NVFP4"): "nvfp4",
    ("modelopt", "W4A16_NVFP4"): "nvfp4",
}  # fmt: skip


def read_quantization(raw: dict[str, Any], family: "Family",
                      files: Sequence[Path]) -> tuple[str | None, int | None, list[dict[str, Any]]]:
    """``quant_method`` and ``fp8`` of a ``ModelConfig``, and the fields of each ``LayerConfig`` that say more.

    ``files``: of the weights, [] where they are random.

    Raises:
        CheckpointError: it has a ``quantization_config``, but none of a supported format.
    """
    quantization = raw.get("quantization_config") or raw.get("compression_config") or {}  # second: in old files
    num_layers, num_experts = raw["num_hidden_layers"], raw["num_experts"] if family.experts else 0
    if not isinstance(quantization, dict):
        raise refusal(f"{quantization!r:.100}")
    if not quantization:
        return None, None, [{}] * num_layers
    if num_layers * num_experts > MAX_EXPERTS:
        raise refusal(f"{num_layers} layers of {num_experts} experts")
    rules = rules_of(quantization)
    return str(quantization["quant_method"]), *rules.read(quantization, family, num_layers, num_experts, files)


def read_schemes(quantization: dict[str, Any], family: "Family", modules: list[str]) -> dict[str, Any]:
    """Schemes of ``modules``; None: 16 bits. For decoders with other modules than ``fields.linears``.

    Raises:
        CheckpointError: the format is not supported, or not for linear layers.
    """
    return rules_of(quantization).schemes(quantization, family, modules)


def rules_of(quantization: dict[str, Any]) -> Any:
    """The ``rules.py`` of the format that a ``quantization_config`` names, imported alone to keep the start short."""
    method = str(quantization.get("quant_method"))
    form = str(quantization.get("format", quantization.get("quant_algo")))
    folder = FORMATS.get((method, form)) or FORMATS.get((method, None))
    if folder is None:
        raise refusal(f"quant_method={quantization.get('quant_method')!r:.100}")
    return import_module(f"nanovllm.quantization.{folder}.rules")

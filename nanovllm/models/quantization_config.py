"""Finds the quantized weights of a model: FP8 linear layers and MXFP4 experts; ``packed_config.py``: 4-bit integers.

The source is ``quantization_config`` of ``config.json``, or ``LLM(quantization="fp8")``. Every field that changes the
numbers is honoured or refused. Imports no torch; ``layers/quantization.py`` has the tensors.
"""

import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.errors import CheckpointError
from nanovllm.models.families import Family
from nanovllm.utils.patterns import first_matches

MAX_EXPERTS = 200_000  # limit for all layers: a damaged number must not fill the memory with names
BLOCK = 128  # published blocks are 128 x 128
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # all experts -> one expert
RENAMED_TENSORS = (("_scale_inv", "_scale"),)  # (in the checkpoint, here); both multiply
# Tensors of quantized checkpoints that are not needed. Products take x in 16 bits or with per-token scales, so static
# scales of x are unused; attention computes in 16 bits, so scales of queries and probabilities are unused.
UNUSED_TENSORS = r".*\.(input_scale|q_scale|prob_output_scale|q_proj\.output_scale)"
# Scales of an FP8 KV cache: for keys, for values, or for both.
KV_SCALES = r"(.*\.self_attn)\.(?:(?:attn\.|k_proj\.|v_proj\.)?(k|v|kv)_scale|(k|v)_proj\.output_scale)"
SUPPORTED = (
    "Supported are FP8 weights (e4m3) with a scale per tensor, per output feature or per block of 128 x 128, as "
    "quant_method 'fp8', 'compressed-tensors' or 'modelopt' stores them; integers of 4 bits, or of 8, which become 16, "
    "of 'compressed-tensors' (pack-quantized), 'awq' (gemm), 'gptq' and 'auto-round'; and gpt-oss's experts in MXFP4. "
    "Take such a checkpoint, or the 16-bit one, which LLM(quantization='fp8') quantizes as it loads."
)
# Allowed values of fields, by ``quant_method``: for the files of DeepSeek, Qwen and AutoFP8, of llm-compressor, of
# NVIDIA, and of gpt-oss. ANY: read elsewhere, or without effect on the numbers. A nested table holds the fields of an
# object, which may be absent.
ANY = ...
E4M3 = {"num_bits": (8,), "type": ("float",)}
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
    "mxfp4": {"quant_method": ANY, "modules_to_not_convert": ANY, "dequantize": ANY},
}  # fmt: skip
PACKED_METHODS = "awq", "gptq", "auto-round", "compressed-tensors"  # the last one with its format "pack-quantized"
MXFP4_GROUP = 32  # channels per scale
SYMMETRIC = E4M3 | {"symmetric": (None, True)}
GROUP = {  # without input_activations only weights are FP8
    "targets": (["Linear"],), "weights": ANY, "input_activations": SYMMETRIC, "format": (None, *FORMATS),
}  # fmt: skip
WEIGHTS = SYMMETRIC | {
    "strategy": ("tensor", "channel", "block"), "dynamic": (None, False), "actorder": (None,), "group_size": (None,),
}  # fmt: skip
SKIPPED = "modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore"  # lists of modules to leave out


class PackedInts(NamedTuple):
    """How a checkpoint stores a module of packed integers."""

    layout: str  # tensor layout: "compressed-tensors", "awq", "gptq", or "gptq_v2"
    bits: int  # 4 or 8
    group_size: int  # channels per scale; 0: a whole row
    symmetric: bool  # codes are relative to half their range, else each group has a zero
    act_order: bool = False  # ``g_idx`` says which group a channel belongs to


def linears(num_experts: int, has_recurrent: bool = False) -> dict[str, tuple[str, ...]]:
    """Linear layers of a decoder layer -> the modules that checkpoints may hold instead.

    A model with experts (0: dense) has the layers of both MLPs and experts; likewise with recurrent layers.
    """
    names: dict[str, tuple[str, ...]] = {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj": (),
    }  # fmt: skip
    if has_recurrent:
        names |= {
            "linear_attn.in_proj": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"), "linear_attn.out_proj": (),
        }  # fmt: skip
    for mlp in ("mlp", "mlp.shared_expert") if num_experts else ("mlp",):
        names |= {f"{mlp}.gate_up_proj": (f"{mlp}.gate_proj", f"{mlp}.up_proj"), f"{mlp}.down_proj": ()}
    for merged, parts in EXPERT_PARTS.items() if num_experts else ():
        names[f"mlp.experts.{merged}"] = tuple(
            f"mlp.experts.{expert}.{part}" for expert in range(num_experts) for part in parts
        )
    return names


def read_quantization(raw: dict[str, Any], family: Family,
                      files: Sequence[Path]) -> tuple[str | None, int | None, list[dict[str, Any]]]:
    """``quant_method`` and ``fp8`` of a ``ModelConfig``, and the fields of each ``LayerConfig`` that say more.

    ``files``: of the weights, [] where they are random.

    Raises:
        CheckpointError: it has a ``quantization_config``, but not of ``SUPPORTED``.
    """
    quantization = raw.get("quantization_config") or raw.get("compression_config") or {}  # second: in old files
    num_layers = raw["num_hidden_layers"]
    nothing: list[dict[str, Any]] = [{}] * num_layers
    if not isinstance(quantization, dict):
        raise refusal(f"{quantization!r:.100}")
    if not quantization:
        return None, None, nothing
    method, num_experts = quantization.get("quant_method"), raw["num_experts"] if family.experts else 0
    if num_layers * num_experts > MAX_EXPERTS:
        raise refusal(f"{num_layers} layers of {num_experts} experts")
    *always_packed, compressed_tensors = PACKED_METHODS
    is_packed = method == compressed_tensors and quantization.get("format") == "pack-quantized"
    if is_packed or method in always_packed:
        from nanovllm.models.packed_config import read_packed

        packed = read_packed(quantization, family, num_layers, num_experts, files)
        return method, None, [{"packed": of_layer} for of_layer in packed]
    if method not in tuple(FORMS) or (method == "mxfp4" and not family.gpt_oss_experts):
        raise refusal(f"quant_method={method!r:.100}")
    check_fields("", quantization, FORMS[method], is_closed=True)
    if method == "mxfp4":
        names = [f"model.layers.{i}.mlp.experts" for i in range(num_layers)]
        for name in filter(skipped_modules(quantization, family, names), names):
            raise refusal(f"leaving out {name}")
        return method, None, nothing
    in_blocks = quantization.get("weight_block_size")
    if method == "compressed-tensors":
        in_blocks = _read_group(quantization) == "block"
    modules = linears(num_experts, bool(family.recurrent)).items()
    names = [f"model.layers.{i}.{x}" for i in range(num_layers) for name, parts in modules for x in (name, *parts)]
    is_skipped = skipped_modules(quantization, family, names)
    layers = [
        frozenset(name for name, parts in modules if not _all_or_none(f"model.layers.{i}.", name, parts, is_skipped))
        for i in range(num_layers)
    ]
    return method, BLOCK if in_blocks else 0, [{"fp8_linears": names} for names in layers]


def skipped_modules(quantization: dict[str, Any], family: Family, modules: list[str]) -> Callable[[str], bool]:
    """Whether one of ``modules`` is left out."""
    skipped = []
    for names in filter(None, map(quantization.get, SKIPPED)):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise refusal(f"{names!r:.100} for the modules to leave out (not a list of names)")
        skipped += names
    return _matcher(skipped, family.renamed, modules)


def refusal(what: str) -> CheckpointError:
    return CheckpointError(f"config.json: quantization_config: {what} is not supported. {SUPPORTED}")


def check_fields(where: str, raw: Any, fields: dict[str, Any], is_closed: bool = False) -> None:
    """Every field has one of its allowed values; None among them is also that of an absent one.

    ``is_closed``: there are no others with a value.
    """
    if not isinstance(raw, dict):
        raise refusal(f"{where[:-1]}={raw!r:.100}")
    others = {name: () for name in raw if is_closed and name not in fields and raw[name] not in (None, False, {}, [])}
    for name, allowed in {**others, **fields}.items():
        value = raw.get(name)
        if isinstance(allowed, dict):
            if value is not None:
                check_fields(f"{where}{name}.", value, allowed)
        elif allowed is not ANY and value not in allowed:
            raise refusal(f"{where}{name}={value!r:.100}")


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


def spellings(name: str, renamed: tuple[tuple[str, str], ...]) -> list[str]:
    """The names that a module may have in a checkpoint, also if it has a vision tower besides the decoder."""
    prefixes = [old for old, new in renamed if not new]
    found = [f"{name}.", *(f"{prefix}{name}." for prefix in prefixes)]  # the renamed part may be the last one
    found += [f"model.{prefix}{name.removeprefix('model.')}." for prefix in prefixes]
    for old, new in reversed(renamed):
        found += [each.replace(new, old) for each in found if new and new in each]
    return [each.removesuffix(".") for each in found]


def _matcher(patterns: list[str], renamed: tuple[tuple[str, str], ...], modules: list[str]) -> Callable[[str], bool]:
    """A test of whether one of the patterns names one of ``modules``.

    A pattern is "re:" and a regular expression of the beginning of its name; a name with asterisks; or dotted parts of
    its name, wherever they stand in it.
    """
    if not patterns:
        return lambda name: False
    regexes = {pattern: pattern[3:] for pattern in patterns if pattern.startswith("re:")}
    try:
        found = first_matches(regexes, [each for name in modules for each in spellings(name, renamed)])
    except ValueError as error:
        raise refusal(str(error)) from None
    plain = [pattern.strip(".") for pattern in patterns if pattern not in regexes]
    compiled = [re.compile(translate(pattern)) for pattern in plain if "*" in pattern]
    dotted = {pattern for pattern in plain if "*" not in pattern}  # lists are long, and experts many

    def is_named(name: str) -> bool:
        parts = name.split(".")
        ends = range(1, len(parts) + 1)
        runs = (".".join(parts[start:end]) for end in ends for start in range(end)) if dotted else ()
        return name in found or not dotted.isdisjoint(runs) or any(regex.match(name) for regex in compiled)

    return lambda name: any(is_named(each) for each in spellings(name, renamed))


def _all_or_none(prefix: str, name: str, parts: tuple[str, ...], is_skipped: Callable[[str], bool]) -> bool:
    """Whether a linear layer is left out; its parts share one product, so they are FP8 together."""
    if is_skipped(prefix + name):
        return True
    skipped = [part for part in parts if is_skipped(prefix + part)]
    if skipped and len(skipped) < len(parts):
        some = ", ".join(parts) if len(parts) < 4 else f"{parts[0]} to {parts[-1]}"
        raise refusal(f"leaving out {prefix}{skipped[0]}, but not all of {some},")
    return bool(skipped)

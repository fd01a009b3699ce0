"""Which weights of a model are FP8: ``quantization_config`` of ``config.json``, or ``LLM(quantization="fp8")``.

Every field that changes the numbers is honoured or refused. Imports no torch; ``layers/quantization.py`` has the
tensors.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.models.families import Family

BLOCK = 128  # published blocks are 128 x 128
# linear layers of a decoder layer -> the modules that checkpoints may hold instead
LINEARS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": (),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": (),
}
RENAMED_TENSORS = ((".weight_scale_inv", ".weight_scale"),)  # (in the checkpoint, here); both multiply
# Tensors of quantized checkpoints that are not needed: products take x in 16 bits or with scales of each token, so no
# static scale of x; and attention computes in 16 bits, so none of queries and probabilities.
UNUSED_TENSORS = r".*\.(input_scale|q_scale|prob_output_scale|q_proj\.output_scale)"
# Scales of an FP8 KV cache: of keys, of values, or of both.
KV_SCALES = r"(.*\.self_attn)\.(?:(?:attn\.|k_proj\.|v_proj\.)?(k|v|kv)_scale|(k|v)_proj\.output_scale)"
SUPPORTED = (
    "Supported are FP8 weights (e4m3) with a scale per tensor, per output feature or per block of 128 x 128, as "
    "quant_method 'fp8', 'compressed-tensors' or 'modelopt' stores them. Take such a checkpoint, or the 16-bit one, "
    "which LLM(quantization='fp8') quantizes as it loads."
)
NO_EXPERTS = "is not available for mixtures of experts yet; load the 16-bit checkpoint without it"


@dataclass(frozen=True)
class FP8Weights:
    """FP8 weights of a decoder.

    Attributes:
        layers: of each decoder layer, the names of its FP8 linear layers; keys of ``LINEARS``.
        block: a scale is that of so many output features and as many input channels; 0: of one output feature.
        in_checkpoint: the checkpoint has them in FP8; else they are quantized as they load.
        method: ``quant_method`` of the checkpoint.
    """

    layers: tuple[frozenset[str], ...]
    block: int = 0
    in_checkpoint: bool = False
    method: str | None = None

    @classmethod
    def of_all(cls, num_layers: int) -> "FP8Weights":
        return cls((frozenset(LINEARS),) * num_layers)

    @classmethod
    def from_json(cls, raw: dict[str, Any], family: Family) -> "FP8Weights | None":
        """Read the ``quantization_config`` of a ``config.json``; None without one.

        Raises:
            CheckpointError: something else than the FP8 weights of ``SUPPORTED``.
        """
        quantization = raw.get("quantization_config") or raw.get("compression_config")  # the second in old files
        if not quantization:
            return None
        if not isinstance(quantization, dict):
            raise _refusal(f"{quantization!r:.100}")
        method = quantization.get("quant_method")
        if not isinstance(method, str) or method not in READERS:
            raise _refusal(f"quant_method={method!r:.100}")
        block, skipped = READERS[method](quantization)
        if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
            raise _refusal(f"{skipped!r:.100} for the modules to leave out (not a list of names)")
        is_skipped = _matcher(skipped, family.renamed)
        layers = [
            frozenset(name for name in LINEARS if not _all_or_none(f"model.layers.{i}.", name, is_skipped))
            for i in range(raw["num_hidden_layers"])
        ]
        if family.experts:
            raise CheckpointError(f"config.json: quantization_config: FP8 {NO_EXPERTS}.")
        return cls(tuple(layers), block, in_checkpoint=True, method=method)


def _refusal(what: str) -> CheckpointError:
    return CheckpointError(f"config.json: quantization_config: {what} is not supported. {SUPPORTED}")


def _require(raw: dict[str, Any], where: str = "", **allowed: tuple) -> None:
    """Every field has one of its allowed values; None among them is also that of an absent one."""
    for name, values in allowed.items():
        if raw.get(name) not in values:
            raise _refusal(f"{where}{name}={raw.get(name)!r:.100}")


def _only(raw: dict[str, Any], *known: str, where: str = "") -> None:
    """No field with a value but those that are known."""
    for name, value in raw.items():
        if name not in known and value not in (None, False, {}, []):
            raise _refusal(f"{where}{name}={value!r:.100}")


def _read_fp8(raw: dict[str, Any]) -> tuple[int, Any]:
    """(block, modules to leave out) of the form of DeepSeek's and Qwen's files, and of AutoFP8's."""
    _only(raw, "quant_method", "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert",
          "ignored_layers", "kv_cache_scheme", "scale_fmt", "expert_dtype")  # fmt: skip
    _require(raw, scale_fmt=(None, "float"), expert_dtype=(None, "fp8"))
    _require(raw, fmt=(None, "e4m3"), activation_scheme=(None, "dynamic", "static"), kv_cache_scheme=(None, "static"),
             weight_block_size=(None, [BLOCK, BLOCK]))  # fmt: skip
    block = BLOCK if raw.get("weight_block_size") else 0
    skipped = [raw.get(name) or [] for name in ("modules_to_not_convert", "ignored_layers")]
    wrong = [names for names in skipped if not isinstance(names, list)]
    return block, wrong[0] if wrong else [name for names in skipped for name in names]


def _read_compressed_tensors(raw: dict[str, Any]) -> tuple[int, Any]:
    """The same of llm-compressor's files."""
    _only(raw, "quant_method", "format", "quantization_status", "config_groups", "ignore", "kv_cache_scheme",
          "global_compression_ratio", "version", "sparsity_config")  # fmt: skip
    formats = "float-quantized", "naive-quantized"
    _require(raw, format=formats, quantization_status=(None, "compressed", "frozen"))
    sparsity = raw.get("sparsity_config") or {}
    _require(sparsity, "sparsity_config.", format=(None, "dense"))
    _check_kv_cache(raw.get("kv_cache_scheme"))
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _refusal(f"config_groups={groups!r:.100} (not one group)")
    (name, group), *_ = groups.items()
    where = f"config_groups.{name}."
    if not isinstance(group, dict):
        raise _refusal(f"{where[:-1]}={group!r:.100}")
    _only(group, "targets", "weights", "input_activations", "format", where=where)
    _require(group, where, targets=(["Linear"],), format=(None, *formats))
    for part in ("weights", "input_activations"):
        part_where, values = f"{where}{part}.", group.get(part)
        if part == "input_activations" and values is None:  # weights alone are FP8
            continue
        if not isinstance(values, dict):
            raise _refusal(f"{part_where[:-1]}={values!r:.100}")
        _require(values, part_where, num_bits=(8,), type=("float",), symmetric=(None, True))
    weights = group["weights"]
    _require(weights, f"{where}weights.", strategy=("tensor", "channel", "block"), dynamic=(None, False),
             actorder=(None,), group_size=(None,),
             block_structure=([BLOCK, BLOCK],) if weights.get("strategy") == "block" else (None,))  # fmt: skip
    return BLOCK if weights["strategy"] == "block" else 0, raw.get("ignore") or []


def _read_modelopt(raw: dict[str, Any]) -> tuple[int, Any]:
    """The same of NVIDIA's files; ``hf_quant_config.json`` has the first of the two lists' names."""
    _only(raw, "quant_method", "quant_algo", "kv_cache_quant_algo", "exclude_modules", "ignore", "config_groups",
          "kv_cache_scheme", "producer")  # fmt: skip
    _require(raw, quant_algo=("FP8",), kv_cache_quant_algo=(None, "FP8"))
    _check_kv_cache(raw.get("kv_cache_scheme"))
    return 0, raw.get("exclude_modules") or raw.get("ignore") or []


def _check_kv_cache(scheme: Any) -> None:
    """Scales of FP8 keys and values are ``KV_SCALES``; other forms may have other tensors."""
    if scheme is None:
        return
    if not isinstance(scheme, dict):
        raise _refusal(f"kv_cache_scheme={scheme!r:.100}")
    _require(scheme, "kv_cache_scheme.", num_bits=(8,), type=("float",))


READERS = {"fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors, "modelopt": _read_modelopt}


def _matcher(patterns: list[str], renamed: tuple[tuple[str, str], ...]) -> Callable[[str], bool]:
    """Whether a module is named by one of the patterns: "re:" and a regular expression of the beginning of its name; a
    name with asterisks; or dotted parts of its name, wherever they stand in it.
    """
    prefixes = ["", *(old for old, new in renamed if not new)]  # in the checkpoint
    compiled = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                compiled.append(re.compile(pattern[3:]))
            except re.error as error:
                raise _refusal(f"the regular expression {pattern!r:.100} ({error})") from None
            continue
        for old, new in renamed:
            pattern = pattern.replace(old, new)
        compiled.append(
            re.compile(translate(pattern) if "*" in pattern else rf"(.*\.)?{re.escape(pattern)}(\..*)?\Z")
        )
    return lambda name: any(regex.match(prefix + name) for regex in compiled for prefix in prefixes)


def _all_or_none(prefix: str, name: str, is_skipped: Callable[[str], bool]) -> bool:
    """Whether a linear layer is left out; its parts share one product, so they are FP8 together."""
    parts = [part for part in LINEARS[name] if is_skipped(prefix + part)]
    if is_skipped(prefix + name) or (parts and len(parts) == len(LINEARS[name])):
        return True
    if parts:
        raise _refusal(f"leaving out {prefix}{parts[0]}, but not all of {', '.join(LINEARS[name])},")
    return False

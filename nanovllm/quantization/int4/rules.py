"""Group-quantized integers by ``config.json``: compressed-tensors' "pack-quantized", AWQ, GPTQ and AutoRound.

Each module of a checkpoint has its own bits, groups and zeros, or is left in 16 bits. Every field that changes the
numbers is honoured or refused. Rules are matched against the checkpoint's own modules; only then are parts merged.
Imports no torch.
"""

import re
from collections.abc import Callable, Sequence
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.quantization.fields import ANY, E4M3, check_fields, linears, refusal, skipped_modules, spellings
from nanovllm.utils.checkpoint import tensor_names
from nanovllm.utils.patterns import first_matches

if TYPE_CHECKING:
    from nanovllm.models.families import Family

FLAG, UNSET = (True, False), (None, False)
BLOCKS = "block_name_to_quantize", "to_quant_block_names", "quant_block_list"  # names in the versions of AutoRound
WHICH = *BLOCKS, "modules_in_block_to_quantize", "modules_to_not_convert"  # fields of AWQ, GPTQ and AutoRound
IN_16_BITS = (None, 16, 32)
# Fields without effect on the stored numbers, in files of any format. ANY: notes of the programs that quantized;
# otherwise the values that change nothing.
NEUTRAL: dict[str, Any] = dict.fromkeys((
    "quant_method", "model_name_or_path", "model_file_base_name", "damp_percent", "damp_auto_increment",
    "static_groups", "true_sequential", "act_group_aware", "tokenizer", "dataset", "model_seqlen",
    "module_name_preceding_first_block", "batch_size", "pad_token_id", "max_input_length", "cache_block_outputs",
    "use_cuda_fp16", "use_exllama", "exllama_config", "max_fused_seq_len", "fuse_max_seq_len", "modules_to_fuse",
    "do_fuse", "disable_exllama", "meta", "inference_only", "cache_examples_on_gpu", "mse", "quantizer",
    "autoround_version", "iters", "lr", "minmax_lr", "low_gpu_mem_usage", "seqlen", "nsamples", "enable_quanted_input",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "gradient_accumulate_steps", "amp", "scale_dtype", "provider",
    "sampler", "method", "supported_types", "static_attention_granularity", "static_kv_granularity",
    "global_compression_ratio", "act_group_size", "act_sym", "act_data_type", "act_dynamic",
), ANY) | {
    "pack_dtype": (None, "int32"), "data_type": (None, "int"), "is_marlin_format": UNSET, "lm_head": UNSET,
    "quant_lm_head": UNSET, "act_bits": IN_16_BITS, "super_bits": (None,), "super_group_size": (None,),
    "quantization_status": (None, "compressed", "frozen"), "sparsity_config": {"format": (None, "dense")},
}  # fmt: skip
OF_GPTQ: dict[str, Any] = NEUTRAL | dict.fromkeys(WHICH, ANY) | {
    "bits": (4, 8), "group_size": ANY, "sym": FLAG, "desc_act": (None, *FLAG), "dynamic": ANY, "backend": ANY,
    "checkpoint_format": (None, "gptq", "gptq_v2"), "format": (None, "gptq", "gptq_v2"),
}  # fmt: skip
OF_AWQ: dict[str, Any] = NEUTRAL | dict.fromkeys(WHICH, ANY) | {
    "bits": (4,), "group_size": ANY, "zero_point": (None, True), "version": (None, "gemm", "GEMM"),
    "format": (None, "gemm"), "backend": (None, "autoawq", "auto"), "desc_act": UNSET, "sym": (None, *FLAG),
    "checkpoint_format": (None, "gemm"),
}  # fmt: skip
# packing_format -> layout of the tensors; without a name, AutoGPTQ's
PACKINGS = {
    None: "gptq", "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2", "auto_round:auto_awq": "awq", "auto_round:awq": "awq",
}  # fmt: skip
OF_LAYER: dict[str, Any] = NEUTRAL | {
    "bits": ANY, "group_size": ANY, "sym": (None, *FLAG), "data_type": (None, "int", "float"), "in_blocks": ANY,
    "fixed_by_user": ANY,
}  # fmt: skip
OF_AUTO_ROUND: dict[str, Any] = OF_LAYER | dict.fromkeys(WHICH, ANY) | {
    "bits": (4, 8), "data_type": (None, "int"), "packing_format": tuple(PACKINGS), "extra_config": ANY,
    "backend": (None, "auto"),  # in old versions it is the layout
}  # fmt: skip
WEIGHTS: dict[str, Any] = {
    "num_bits": (4, 8), "type": ("int",), "symmetric": (None, *FLAG), "strategy": ("group", "channel"),
    "group_size": ANY, "dynamic": (None, False), "actorder": (None, "weight", "static"), "block_structure": (None,),
    "observer": ANY, "observer_kwargs": ANY, "scale_dtype": ANY, "zp_dtype": ANY,
}  # fmt: skip
GROUP: dict[str, Any] = {
    "targets": ANY, "weights": ANY, "input_activations": (None,), "output_activations": (None,),
    "format": (None, "pack-quantized"),
}  # fmt: skip
COMPRESSED_TENSORS: dict[str, Any] = NEUTRAL | {
    "format": ("pack-quantized",), "config_groups": ANY, "ignore": ANY, "kv_cache_scheme": E4M3, "version": ANY,
}
DYNAMIC = ("bits", "group_size", "sym", "desc_act")  # fields of a module in GPTQ's ``dynamic``
# Modules that may be integers in a checkpoint and are 16 bits here.
OTHERS = (
    "linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate",
    "per_layer_input_gate", "per_layer_projection",
)  # fmt: skip
# Tensors of modules outside of decoder layers, which are 16 bits in every supported checkpoint.
OUTSIDE = re.compile(r"(?:.*\.)?(?:lm_head|embed_tokens|score)\.(?:qweight|weight_packed)")
REGEX_SIGNS = frozenset("*+?^$()[]{}|\\")


KINDS = {  # by layout: suffixes of a module's tensors, codes, scales and zeros first
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"),
    "awq": ("qweight", "scales", "qzeros"),
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "gptq_v2": ("qweight", "scales", "qzeros", "g_idx"),
}


class IntScheme(NamedTuple):
    """How a checkpoint stores a module of group-quantized integers."""

    layout: str  # tensor layout: "compressed-tensors", "awq", "gptq", or "gptq_v2"
    bits: int  # 4 or 8
    group_size: int  # channels per scale; 0: a whole row
    symmetric: bool  # codes are relative to half their range, else each group has a zero
    act_order: bool = False  # ``g_idx`` says which group a channel belongs to

    @property
    def noun(self) -> str:
        """The noun for the codes, in errors."""
        return "integers"

    @property
    def unused_tensors(self) -> str:
        """A regular expression of tensors that such checkpoints have and the model does without."""
        return "(?!)"

    @property
    def kinds(self) -> tuple[str, ...]:
        return KINDS[self.layout]

    def needed(self) -> set[str]:
        """Kinds of a module's tensors that are read together. GPTQ's ``g_idx`` without an order is checked by itself.
        """
        kinds = set(self.kinds)
        if self.layout == "compressed-tensors" and self.symmetric:
            kinds.discard("weight_zero_point")
        return kinds if self.act_order else kinds - {"g_idx"}


Schemes = dict[str, Any]  # scheme by module; None: 16 bits


def read(quantization: dict[str, Any], family: "Family", num_layers: int, num_experts: int,
         files: Sequence[Path]) -> tuple[None, list[dict[str, Any]]]:
    reader = READERS[quantization["quant_method"]]
    layers = packed_layers(reader, quantization, family, num_layers, num_experts, files)
    in_order = [name for layer in layers for name, scheme in layer if scheme.act_order and ".experts." in name]
    if family.gpt_oss_experts or in_order:
        what = "gpt-oss in packed integers" if family.gpt_oss_experts else f"desc_act of experts ({in_order[0]})"
        raise refusal(what)
    return None, [{"packed_schemes": tuple(layer)} for layer in layers]


def schemes(quantization: dict[str, Any], family: "Family", modules: list[str]) -> Schemes:
    return READERS[quantization["quant_method"]](quantization, family, modules)


def packed_layers(reader: "Reader", quantization: dict[str, Any], family: "Family", num_layers: int, num_experts: int,
                  files: Sequence[Path]) -> list[list[tuple[str, Any]]]:
    """``packed_schemes`` of each ``LayerConfig``. A merged layer replaces its parts if they are alike.

    ``files``: of the weights. They tell which layers the checkpoint itself has merged; without them it has the parts.
    """
    tensors = [name for file in files for name in tensor_names(file)]
    if outside := [name for name in tensors if OUTSIDE.fullmatch(name)]:
        head = "a packed LM head" if "lm_head" in outside[0] else "a packed module outside of decoder layers"
        raise refusal(f"{head} ({outside[0]})")
    kinds: dict[str, set[str]] = {}  # module -> suffixes of its tensors
    for name in tensors:
        stem, _, kind = name.rpartition(".")
        for each in (stem, f"model.{stem}"):  # the first is its name in a decoder saved alone
            kinds.setdefault(each, set()).add(kind)
    modules = linears(num_experts, family.recurrent) | dict.fromkeys(OTHERS, ())
    own: dict[tuple[int, str], list[str]] = {}  # (layer, linear layer here) -> the checkpoint's modules
    for i, (name, parts) in product(range(num_layers), modules.items()):
        prefix = f"model.layers.{i}."
        spelled = (each.removesuffix(".weight") for each in spellings(prefix + name, family.renamed))
        wholes = [kinds[each] for each in spelled if each in kinds]
        if ".experts." in name and {"weight"} in wholes:
            continue  # one tensor of all experts is no Linear, which rules are about: it has 16 bits
        own[i, name] = [prefix + part for part in (parts if parts and not wholes else [name])]
    schemes = reader(quantization, family, list(chain(*own.values())))
    layers: list[list[tuple[str, Any]]] = [[] for _ in range(num_layers)]
    for (i, name), names in own.items():
        found = [(each.removeprefix(f"model.layers.{i}."), schemes[each]) for each in names]
        if len({scheme for _, scheme in found}) == 1:
            found = [(name, found[0][1])]
        layers[i] += [(module, scheme) for module, scheme in found if scheme is not None]
    return layers


def matches(regexes: dict[str, str], family: "Family", names: list[str]) -> dict[str, str]:
    """Map each of ``names`` that a regular expression matches to the first such expression, as it was given."""
    spelled = {spelling: name for name in names for spelling in spellings(name, family.renamed)}
    try:
        found = first_matches(regexes, list(spelled))
    except ValueError as error:
        raise refusal(str(error)) from None
    order = {given: i for i, given in enumerate(regexes)}
    result: dict[str, str] = {}
    for spelling, given in found.items():
        name = spelled[spelling]
        result[name] = min(result.get(name, given), given, key=order.__getitem__)
    return result


def group_size_of(where: str, value: Any) -> int:
    """Channels of a group; 0: all of a row."""
    if value == -1 or (isinstance(value, int) and value is not True and value > 0 and value % 8 == 0):
        return max(value, 0)
    raise refusal(f"{where}={value!r:.100} (not -1 or a multiple of 8)")


def of_awq(raw: dict[str, Any], family: "Family", names: list[str]) -> Schemes:
    given = dict(raw)
    for old, new in (("w_bit", "bits"), ("q_group_size", "group_size")):
        if old in given and given.setdefault(new, given[old]) != given.pop(old):
            raise refusal(f"{old}={raw[old]!r:.100} beside {new}={raw[new]!r:.100}")
    check_fields("", given, OF_AWQ, is_closed=True)
    scheme = IntScheme("awq", 4, group_size_of("group_size", given.get("group_size")), symmetric=False)
    is_chosen = chosen_modules(raw, family, names)
    return {name: scheme if is_chosen(name) else None for name in names}


def of_gptq(raw: dict[str, Any], family: "Family", names: list[str]) -> Schemes:
    check_fields("", raw, OF_GPTQ, is_closed=True)
    layouts = {raw[name] for name in ("checkpoint_format", "format") if raw.get(name)}
    if len(layouts) > 1:
        raise refusal(f"checkpoint_format={raw['checkpoint_format']!r} beside format={raw['format']!r}")
    layout = layouts.pop() if layouts else "gptq"

    def scheme(fields: dict[str, Any], where: str) -> IntScheme:
        size = group_size_of(f"{where}group_size", fields.get("group_size"))
        is_ordered = bool(fields.get("desc_act")) and size > 0
        return IntScheme(layout, int(fields["bits"]), size, bool(fields["sym"]), is_ordered)

    default, dynamic = scheme(raw, ""), raw.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(fields, dict) for fields in dynamic.values()):
        raise refusal(f"dynamic={dynamic!r:.100} (not an object of objects)")
    overrides: dict[str, IntScheme | None] = {}
    for pattern, fields in dynamic.items():
        where = f"dynamic.{pattern}."
        if pattern.startswith("-:"):
            overrides[pattern] = None
        else:
            allowed = {name: (*OF_GPTQ[name], None) if OF_GPTQ[name] is not ANY else ANY for name in DYNAMIC}
            check_fields(where, fields, allowed, is_closed=True)
            overrides[pattern] = scheme(raw | {name: x for name, x in fields.items() if x is not None}, where)
    found = matches({pattern: re.sub(r"^[+-]:", "", pattern) for pattern in dynamic}, family, names)
    is_chosen = chosen_modules(raw, family, names)
    return {name: overrides[found[name]] if name in found else default if is_chosen(name) else None for name in names}


def of_auto_round(raw: dict[str, Any], family: "Family", names: list[str]) -> Schemes:
    check_fields("", raw, OF_AUTO_ROUND, is_closed=True)
    layout, extra = PACKINGS[raw.get("packing_format")], raw.get("extra_config") or {}

    def scheme(fields: dict[str, Any], where: str) -> IntScheme | None:
        check_fields(where, fields, OF_LAYER, is_closed=True)
        merged: dict[str, Any] = {name: raw.get(name) for name in ("bits", "group_size", "sym", "data_type")}
        merged |= {name: x for name, x in fields.items() if x is not None}
        if merged["bits"] in (16, 32) or merged["data_type"] == "float":
            return None
        check_fields(where, merged, {"bits": (4, 8) if layout != "awq" else (4,)})
        size, symmetric = group_size_of(f"{where}group_size", merged["group_size"]), merged["sym"] in (None, True)
        return IntScheme(layout, int(merged["bits"]), size, symmetric)

    if not isinstance(extra, dict):
        raise refusal(f"extra_config={extra!r:.100} (not an object)")
    overrides = {name: scheme(fields, f"extra_config.{name}.") for name, fields in extra.items()}
    # like AutoRound's readers: a key without signs of a regular expression is a whole name
    regexes = {name: f"(?:.*)(?:{name})" if REGEX_SIGNS & set(name) else re.escape(name) + "$"
               for name in sorted(overrides, key=lambda name: bool(REGEX_SIGNS & set(name)))}  # fmt: skip
    found, is_chosen, default = matches(regexes, family, names), chosen_modules(raw, family, names), scheme({}, "")
    return {name: overrides[found[name]] if name in found else default if is_chosen(name) else None for name in names}


def of_compressed_tensors(raw: dict[str, Any], family: "Family", names: list[str]) -> Schemes:
    def scheme(group: dict[str, Any], where: str) -> IntScheme:
        check_fields(where, group, GROUP, is_closed=True)
        weights = group.get("weights")
        check_fields(f"{where}weights.", weights, WEIGHTS, is_closed=True)
        assert weights is not None
        size = 0
        if weights["strategy"] == "group":
            size = group_size_of(f"{where}weights.group_size", weights.get("group_size"))
        elif weights.get("group_size") not in (None, -1):
            raise refusal(f"{where}weights.group_size={weights['group_size']!r:.100} with strategy 'channel'")
        return IntScheme("compressed-tensors", int(weights["num_bits"]), size, weights.get("symmetric") in (None, True))

    check_fields("", raw, COMPRESSED_TENSORS, is_closed=True)
    return by_targets(raw, family, names, scheme)


def by_targets(raw: dict[str, Any], family: "Family", names: list[str], scheme: Callable[..., Any]) -> Schemes:
    """Schemes by ``config_groups`` and ``ignore``. ``scheme`` makes one of a group and the path of its fields."""
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refusal(f"config_groups={groups!r:.100} (no groups)")
    targets: Schemes = {}  # a later group overrides a target, as in compressed-tensors
    for key, group in groups.items():
        where = f"config_groups.{key}."
        made = scheme(group, where)
        targets |= dict.fromkeys(flat(group.get("targets"), f"{where}targets"), made)
    by_name = sorted(targets, key=lambda target: (target.startswith("re:"), target))
    regexes = {t: t[3:] if t.startswith("re:") else re.escape(t) + "$" for t in by_name if t != "Linear"}
    found, is_skipped = matches(regexes, family, names), skipped_modules(raw, family, names)
    default = targets.get("Linear")
    return {
        name: None if is_skipped(name) else targets[found[name]] if name in found else default for name in names
    }  # fmt: skip


def flat(value: Any, where: str) -> list[str]:
    """Names of a list, of lists in it, or of a text with commas; [] for None."""
    if value is None:
        return []
    if isinstance(value, str):
        return [name.strip() for name in value.split(",")]
    if not isinstance(value, list):
        raise refusal(f"{where}={value!r:.100} (not a list of names)")
    return [name for each in value for name in flat(each, where)]


def chosen_modules(raw: dict[str, Any], family: "Family", modules: list[str]) -> Callable[[str], bool]:
    """Test whether the fields of ``WHICH`` choose a module: in a block, of an ending there, not left out; none: all."""
    blocks = [name for key in BLOCKS for name in flat(raw.get(key), key)]
    ends = flat(raw.get("modules_in_block_to_quantize"), "modules_in_block_to_quantize")
    is_skipped = skipped_modules(raw, family, modules)

    def is_chosen(name: str) -> bool:
        names = spellings(name, family.renamed)
        in_blocks = not blocks or any(each.startswith(block) for each in names for block in blocks)
        return in_blocks and (not ends or any(each.endswith(f".{end}") for each in names for end in ends)) and (
            not is_skipped(name)
        )

    return is_chosen


Reader = Callable[[dict[str, Any], "Family", list[str]], Schemes]
READERS: dict[str, Reader] = {
    "awq": of_awq, "gptq": of_gptq, "auto-round": of_auto_round, "compressed-tensors": of_compressed_tensors,
}  # fmt: skip

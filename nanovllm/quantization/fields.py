"""Shared rules of the weight formats for ``quantization_config`` in ``config.json``.

Owns the linear layers of a decoder layer, the fields that leave modules out, and the refusal of a field's value. Each
field that changes the numbers is honoured or refused. Imports no torch.
"""

import re
from collections.abc import Callable
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from nanovllm.errors import CheckpointError
from nanovllm.utils.patterns import first_matches

if TYPE_CHECKING:
    from nanovllm.models.families import Family

EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # all experts -> one expert
SUPPORTED = (
    "Supported are FP8 weights (e4m3) with a scale per tensor, per output feature or per block of 128 x 128, as "
    "quant_method 'fp8', 'compressed-tensors' or 'modelopt' stores them; integers of 4 bits, or of 8, which become 16, "
    "of 'compressed-tensors' (pack-quantized), 'awq' (gemm), 'gptq' and 'auto-round'; NVFP4 of 'compressed-tensors' "
    "(nvfp4-pack-quantized) and 'modelopt'; MXFP4 of 'compressed-tensors' (mxfp4-pack-quantized); and gpt-oss's "
    "experts in MXFP4. "
    "Take such a checkpoint, or the 16-bit one, which LLM(quantization='fp8') quantizes as it loads."
)
# In tables of a field's allowed values; a nested table holds the fields of an object, which may be absent.
ANY = ...  # read elsewhere, or without effect on the numbers
E4M3 = {"num_bits": (8,), "type": ("float",)}
SKIPPED = "modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore"  # lists of modules to leave out


# Linear layers of mixers with states that may be quantized: ``Family.recurrent`` -> layers, as in ``linears``.
MIXER_LINEARS: dict[str, dict[str, tuple[str, ...]]] = {
    "gated_delta_net": {
        "linear_attn.in_proj": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"), "linear_attn.out_proj": (),
    },
    "mamba2": {"mamba.in_proj": (), "mamba.out_proj": ()},
    "short_conv": {"conv.in_proj": (), "conv.out_proj": ()},
}  # fmt: skip


def linears(num_experts: int, recurrent: str = "", ungated: bool = False) -> dict[str, tuple[str, ...]]:
    """Linear layers of a decoder layer -> the modules that checkpoints may hold instead.

    A model with experts (0: dense) has the layers of both MLPs and experts; likewise with recurrent layers.
    ``ungated``: MLPs and experts have no gate.
    """
    names: dict[str, tuple[str, ...]] = {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj": (),
    }  # fmt: skip
    names |= MIXER_LINEARS.get(recurrent, {})
    for mlp in ("mlp", "mlp.shared_expert") if num_experts else ("mlp",):
        gated = {f"{mlp}.gate_up_proj": (f"{mlp}.gate_proj", f"{mlp}.up_proj")}
        names |= {**({f"{mlp}.up_proj": ()} if ungated else gated), f"{mlp}.down_proj": ()}
    for merged, parts in EXPERT_PARTS.items() if num_experts else ():
        names[f"mlp.experts.{merged}"] = tuple(
            f"mlp.experts.{expert}.{part}" for expert in range(num_experts) for part in parts[-1 if ungated else 0 :]
        )
    return names


def skipped_modules(quantization: dict[str, Any], family: "Family", modules: list[str]) -> Callable[[str], bool]:
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

"""A PEFT adapter as changes of checkpoint tensors: W + scale B A, computed in fp32 as W is read.

Owns ``adapter_config.json``: each field is honoured, has no effect on the numbers, or is refused; and the
adapter's tensors. A rank reads the rows of B and the columns of A that its part of W needs. Knows no parameters:
``loader.py`` finds the tensor that a change belongs to.

Legend: N output features, C input channels, r rank of the adapter.
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import CheckpointError
from nanovllm.layers.weight_loader import CheckpointTensor
from nanovllm.utils.checkpoint import open_tensors, read_json
from nanovllm.utils.patterns import first_matches
from nanovllm.validation import BOOLEAN, Rule, at_least, check_all, number, optional

Change = Callable[[CheckpointTensor], CheckpointTensor]

FLOAT32_MAX = torch.finfo(torch.float32).max
DTYPES = ("F64", "F32", "F16", "BF16")
PREFIX = "base_model.model."
FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
READ = ("peft_type", "lora_alpha", "use_rslora", "alpha_pattern", "init_lora_weights", "bias")
# Without effect here. The adapter's tensors say which modules it changes, and with which ranks. Its targets are linear
# layers, where PEFT takes fan_in_fan_out as False.
NO_EFFECT = (
    "r", "rank_pattern", "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform",
    "layers_pattern", "fan_in_fan_out", "lora_dropout", "inference_mode", "base_model_name_or_path", "revision",
    "task_type", "auto_mapping", "peft_version", "megatron_core", "qalora_group_size", "ensure_weight_tying",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
)  # fmt: skip
FINITE = number("a finite number of 32 bits", lambda x: abs(x) <= FLOAT32_MAX)
RULES = {
    "r": optional(at_least(1)),
    "lora_alpha": FINITE,
    "use_rslora": optional(BOOLEAN),
    "alpha_pattern": optional(Rule(
        "an object of finite numbers of 32 bits", lambda x: isinstance(x, dict) and all(map(FINITE.accepts, x.values()))
    )),
}  # fmt: skip
KEEPS_BASE = (None, True, False, "gaussian", "orthogonal", "eva")  # initialisations that leave the base's weights alone
ADVICE = "Merge it by PEFT's merge_and_unload(), save the model, and give that directory as the model."


def read_adapter(path: str, device: str) -> dict[str, Change]:
    """The changes that an adapter makes, by the names of the base's tensors.

    Args:
        path: a directory with ``adapter_config.json`` and ``adapter_model.safetensors``.
        device: that tensors are read to.

    Raises:
        CheckpointError: a file is missing or damaged, or the adapter is of a kind that is not supported.
    """
    from safetensors import SafetensorError

    config, file = read_config(path), Path(path, "adapter_model.safetensors")
    changes: dict[str, Change] = {}
    factors: dict[tuple[str, bool], dict[str, CheckpointTensor]] = {}  # (module, is an embedding) -> A, B
    try:
        tensors = open_tensors(file, "pt", device)
        read = {
            name: CheckpointTensor.of(name, tensors.get_slice(name)).at_least(-sys.float_info.max)
            for name in tensors.keys()  # noqa: SIM118
        }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); other formats of adapters are not.") from error
    if not read:
        raise CheckpointError(f"{file} holds no tensor, so it would change nothing; is the download complete?")
    for name, tensor in read.items():
        if (dtype := tensors.get_slice(name).get_dtype()) not in DTYPES:
            raise CheckpointError(f"{file}: tensor {name!r} is of {dtype}, and must be of {', '.join(DTYPES)}.")
        target = name.removeprefix(PREFIX)
        if match := FACTOR.fullmatch(target):
            factors.setdefault((match[1], bool(match[2])), {})[match[3]] = tensor
        elif target == name or ".lora_" in target:
            raise CheckpointError(f"{file}: tensor {name!r} is unknown. {ADVICE}")
        else:  # of modules_to_save, or the base of an embedding, to which the product is added
            changes[target.replace(".base_layer.", ".")] = partial(_replaced, tensor)
    alphas = alphas_of(config, file, [module for module, _ in factors])
    for (module, is_embedding), pair in factors.items():
        if len(pair) < 2 or any(len(factor.shape) != 2 or 0 in factor.shape for factor in pair.values()):
            raise CheckpointError(f"{file}: module {module!r} must have two matrices, lora_A and lora_B. {ADVICE}")
        a, b = pair["A"], pair["B"]
        scale = alphas[module] / (a.shape[0] ** 0.5 if config.get("use_rslora") else a.shape[0])
        if is_embedding:  # its weight [V, C] += (B A)^T
            a, b = b.transposed(), a.transposed()
        name = f"{module}.weight"
        changes[name] = partial(_merged, a, b, scale, changes.get(name))
    return changes


def read_config(path: str) -> dict[str, Any]:
    """``adapter_config.json``; CheckpointError if the adapter does anything but add a product to weights."""
    file = Path(path, "adapter_config.json")
    config = read_json(file)
    wrong = [name for name, value in config.items() if value and name not in (*READ, *NO_EFFECT)]
    wrong += [name for name, allowed in (("peft_type", ("LORA",)), ("bias", (None, "none")),
                                         ("init_lora_weights", KEEPS_BASE))
              if config.get(name) not in allowed]  # fmt: skip
    if wrong:
        given = ", ".join(f"{name}={config.get(name)!r:.100}" for name in wrong)
        raise CheckpointError(f"{file}: {given} is not supported. {ADVICE}")
    return check_all(str(file), {"lora_alpha": 8, **config}, RULES, CheckpointError)


def alphas_of(config: dict[str, Any], file: Path, modules: list[str]) -> dict[str, float]:
    """``lora_alpha`` of each module, or the number of the first pattern in ``alpha_pattern`` that names it."""
    numbers = config["alpha_pattern"] or {}
    try:
        found = first_matches({pattern: rf"(.*\.)?({pattern})$" for pattern in numbers}, modules)
    except ValueError as error:
        raise CheckpointError(f"{file}: alpha_pattern has {error}. {ADVICE}") from None
    return {module: numbers[found[module]] if module in found else config["lora_alpha"] for module in modules}


def _merged(a: CheckpointTensor, b: CheckpointTensor, scale: float, replacement: Change | None,
            base: CheckpointTensor) -> CheckpointTensor:
    """W + scale B A: a [r, C], b [N, r], base [N, C]."""
    base = base if replacement is None else replacement(base)
    if base.is_fp8():
        raise CheckpointError(
            f"tensor {base.name!r} is FP8, and an adapter is merged into 16-bit weights. Take the 16-bit checkpoint; "
            "LLM(quantization='fp8') quantizes the sum."
        )
    rank = a.shape[0]
    a.fit([rank, *base.shape[1:]])
    b.fit([*base.shape[:1], rank])

    def read(index: tuple[slice, ...]) -> torch.Tensor:
        rows, columns = (*index, slice(None))[:2]
        wide = base.read(index).float()
        return torch.addmm(wide, b.read((rows,)).float(), a.read((slice(None), columns)).float(), alpha=scale)

    # factors that are finite may have a product that is not
    return CheckpointTensor(f"{base.name} with the adapter", base.shape, read).at_least(-sys.float_info.max)


def _replaced(by: CheckpointTensor, base: CheckpointTensor) -> CheckpointTensor:
    return by.fit(base.shape)

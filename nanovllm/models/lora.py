"""A PEFT adapter as changes of checkpoint tensors: W + scale B A, computed in fp32 as W is read.

Owns the adapter's tensors; ``lora_config.py`` owns its config. A rank reads the rows of B and the columns of A that its
part of W needs. Knows no parameters: ``loader.py`` finds the tensor that a change belongs to.

Legend: N output features, C input channels, r rank of the adapter.
"""

import re
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch

from nanovllm.errors import CheckpointError
from nanovllm.models.lora_config import ADVICE, Targets, read_config
from nanovllm.utils.checkpoint import open_tensors
from nanovllm.utils.checkpoint_tensor import CheckpointTensor

Change = Callable[[CheckpointTensor], CheckpointTensor]

DTYPES = ("F64", "F32", "F16", "BF16")
PREFIX = "base_model.model."
FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")


def read_adapter(path: str, device: str, base: Collection[str]) -> dict[str, Change]:
    """The changes that an adapter makes, by the names of the base's tensors.

    Args:
        path: a directory with ``adapter_config.json`` and ``adapter_model.safetensors``.
        device: that tensors are read to.
        base: names of the base's tensors.

    Raises:
        CheckpointError: a file is missing or damaged, its files contradict each other, or the adapter is of a kind that
            is not supported.
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
        else:  # a module of modules_to_save, or the base of an embedding, to which the product is added
            changes[target.replace(".base_layer.", ".")] = partial(_replaced, tensor)
    for (module, _), pair in factors.items():
        if len(pair) < 2 or any(len(factor.shape) != 2 or 0 in factor.shape for factor in pair.values()):
            raise CheckpointError(f"{file}: module {module!r} must have two matrices, lora_A and lora_B. {ADVICE}")
    ranks = {module: pair["A"].shape[0] for (module, _), pair in factors.items()}
    targets = Targets(config, Path(path, "adapter_config.json"))
    targets.check(ranks, changes.keys(), base)
    alphas = targets.numbers("alpha_pattern", "lora_alpha", list(ranks))
    for (module, is_embedding), pair in factors.items():
        a, b = pair["A"], pair["B"]
        scale = alphas[module] / (a.shape[0] ** 0.5 if config["use_rslora"] else a.shape[0])
        if is_embedding:  # its weight [V, C] += (B A)^T
            a, b = b.transposed(), a.transposed()
        name = f"{module}.weight"
        changes[name] = partial(_merged, a, b, scale, changes.get(name))
    return changes


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

    # finite factors may have an infinite product
    return CheckpointTensor(f"{base.name} with the adapter", base.shape, read).at_least(-sys.float_info.max)


def _replaced(by: CheckpointTensor, base: CheckpointTensor) -> CheckpointTensor:
    return by.fit(base.shape)

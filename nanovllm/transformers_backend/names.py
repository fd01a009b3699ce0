"""Names of checkpoint tensors for a model of transformers, by transformers' own table of renamings and conversions.

The only conversion it accepts is the merge of experts; ``models/loader.py`` writes each expert's tensor to its place.
The tensors of a quantized module are renamed like its weight.
"""

import re
from itertools import chain
from typing import Any

import torch

from nanovllm.errors import CheckpointError
from nanovllm.layers.weight_loader import copy_shard
from nanovllm.quantization.fields import EXPERT_PARTS
from nanovllm.quantization.fp8.rules import KV_SCALES, RENAMED_TENSORS
from nanovllm.quantization.int4.rules import KINDS as OF_INTEGERS
from nanovllm.quantization.nvfp4.rules import KINDS as OF_FLOATS
from nanovllm.quantization.nvfp4.rules import UNUSED_TENSORS

# Ends of the names of a quantized module's tensors; the codes, or with ModelOpt a scale, show that it is packed.
PACKED = {kind for kinds in (*OF_INTEGERS.values(), *OF_FLOATS.values()) for kind in kinds} - {"weight"}
CODES = {"qweight", "weight_packed", "weight_scale_2"}
# Buffers that old versions saved, and scales of quantized checkpoints that this library measures or does without.
NEVER_USED = [r"rotary_emb\.inv_freq$", r"\.masked_bias$", f"{UNUSED_TENSORS}$", f"{KV_SCALES}$"]
MERGES = ["MergeModulelist", "Concatenate"]  # operations that make one tensor of the gate's and the up projections


class Names:
    """Renames checkpoint tensors to this model's parameters. ``model``: transformers' model.

    Attributes:
        unused_modules: modules whose tensors are passed over.
        copies_of_embedding: names of the input embedding besides its first one; the loader compares their tensors.
    """

    def __init__(self, model: Any):
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        self.unused_modules: set[str] = set()
        transforms = get_model_conversion_mapping(model)
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
        every = dict(model.named_parameters(remove_duplicate=False))
        self._tied = every.keys() - dict(model.named_parameters()).keys()
        embedding = model.get_input_embeddings().weight
        self.copies_of_embedding = {name for name in self._tied if every[name] is embedding}
        for name in list(every):  # parts of a merged product
            every |= {name.replace(".gate_up_proj.", f".{part}."): every[name] for part in ("gate_proj", "up_proj")}
        self._known = every.keys()
        self._rename = lambda name: rename_source_key(name, renamings, self._converters, model.base_model_prefix, every)
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        ignored = [list(getattr(part, "_keys_to_ignore_on_load_unexpected", None) or ()) for part in parts]
        self._unused = re.compile("|".join(f"(?:{each})" for each in [*NEVER_USED, *chain(*ignored)]))
        for name, param in model.named_parameters():
            if param.dim() == 0:
                param.weight_loader = fill_number
            if ".experts." in name and not hasattr(param, "is_merged"):  # experts that are not this library's
                has_parts = name.rpartition(".experts.")[2] in EXPERT_PARTS
                param.is_merged, param.is_one_tensor = not has_parts, param.dim() != 3
                if param.dim() == 3:
                    param.weight_loader = fill_expert

    def here(self, name: str) -> str:
        """The name here of a checkpoint tensor; "" if the model does without it.

        Raises:
            CheckpointError: transformers would convert it by other operations than a merge of experts.
        """
        for old, new in RENAMED_TENSORS:  # scales of FP8 weights
            name = name.replace(old, new)
        stem, _, kind = name.rpartition(".")
        if kind in PACKED and stem and name not in self._known:
            whole = self.here(f"{stem}.weight")
            return whole and f"{whole.removesuffix('.weight')}.{kind}"
        renamed, pattern = self._rename(name)
        is_unused = any(map(self._unused.search, (name, renamed))) and renamed not in self._known
        is_in_tower = any(renamed.startswith(f"{module}.") for module in self.unused_modules)
        if renamed in self._tied - self.copies_of_embedding or is_unused or is_in_tower:
            return ""
        if pattern is None:
            return renamed
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        operations = [type(each).__name__ for each in converter.operations]
        prefix, _, merged = renamed.rpartition(".experts.")
        expert = re.search(r"\.experts\.(\d+)\.", name)
        parts = EXPERT_PARTS.get(merged, ())
        if expert is None or not parts or operations != MERGES[: len(parts)]:
            what = f"a conversion that is not supported ({', '.join(operations)})"
            raise CheckpointError(f"tensor {name!r} needs {what}.")
        return f"{prefix}.experts.{expert[1]}.{parts[converter.source_patterns.index(pattern)]}.weight"


def fill_number(param: torch.Tensor, loaded: Any, shard_id: Any = None) -> None:
    """Fill a parameter without dimensions."""
    param.copy_(loaded.fit([]).read(...))


def fill_expert(param: torch.Tensor, loaded: Any, shard_id: Any) -> None:
    """Fill the rows of one expert, (expert, part), of a parameter [E, N, C]; part None: all of its rows."""
    expert, part = shard_id
    rows = param[expert]
    if part is not None and loaded.shape[0] != len(rows):  # gate and up projection
        rows = rows.chunk(2)[part]
    copy_shard(rows, loaded)

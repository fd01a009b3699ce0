"""Fills a model's parameters from safetensors files, from tensors in memory, or with random numbers.

Owns the match between checkpoint tensors and parameters: every parameter filled, every tensor used, every shape equal,
or a ``CheckpointError``. An adapter changes tensors as they are read (``lora.py``). How a tensor is sharded over ranks
stands beside its layer (``weight_loader``).
"""

import re
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.layers.weight_loader import copy_shard
from nanovllm.models.lora import Change, read_adapter
from nanovllm.models.lora_config import ADVICE
from nanovllm.quantization.fields import EXPERT_PARTS
from nanovllm.quantization.fp8.numbers import E4M3
from nanovllm.quantization.fp8.rules import KV_SCALES
from nanovllm.quantization.fp8.tensors import read_kv_scales
from nanovllm.quantization.packed import fitting, scheme_in
from nanovllm.quantization.weights import WeightReader, randomize, writes
from nanovllm.utils.checkpoint import open_tensors, tensor_names, weight_files
from nanovllm.utils.checkpoint_tensor import CheckpointTensor

DIGEST_ROWS = 4096  # rows in memory at once, of an LM head or of the embedding that it should equal
DUMMY_STD = 0.02  # standard deviation of random weights, as in transformers


class WeightFiller:
    """Fills a model's parameters in place, a checkpoint tensor at a time.

    ``packed_modules_mapping`` of a module has the parts of its merged layers, e.g. ``{"q_proj": ("qkv_proj", "q")}``; a
    checkpoint may also hold a merged layer as one tensor. ``ModelConfig`` has the names to replace and to skip.
    An FP8 weight is filled by FP8 data and its scale, or by a 16-bit tensor, which is quantized and counts as both.

    Args:
        extra: modules that the checkpoint has besides the decoder, with their names there: its vision tower. Without
            them their tensors are passed over.
        quantizes: False: a 16-bit tensor for an FP8 weight is an error.
        adapter: directory of a PEFT adapter, which is merged into the tensors.
        base: directory of the checkpoint that the tensors of a merge are from.
        only: checkpoint tensors to fill besides the adapter's, by their names here; None: all.
    """

    def __init__(self, model: Any, extra: Collection[nn.Module] = (), quantizes: bool = True,
                 adapter: str | None = None, base: str = "", only: set[str] | None = None):
        config = model.config
        self._quantizes, self._renamed = quantizes, config.renamed_tensors()
        self._checkpoint_name = getattr(model, "checkpoint_name", None)  # a model may have rules of its own
        self.unused = re.compile(config.unused_tensors(has_tower=len(extra) > 0))
        params: dict[str, nn.Parameter] = dict(model.named_parameters())
        of_extra = {self._renamed_here(name): param for module in extra for name, param in module.named_parameters()}
        self._tower, params = re.compile(config.family.tower or "(?!)"), params | of_extra
        packed: dict[str, tuple[str, Any]] = {}
        for module in (*model.modules(), *(each for tower in extra for each in tower.modules())):
            packed |= getattr(module, "packed_modules_mapping", {})
        # checkpoint tensor -> its parameter, the shard id in there, and its own name, or the names of its merged parts
        self._targets: dict[str, tuple[Any, Any, list[str]]] = {}
        halves = {id(half) for param in params.values() for half in getattr(param, "halves", ())}
        for name, param in params.items():
            if id(param) in halves:  # filled together with the weight
                continue
            parts = _parts(name, param, packed)
            self._targets.setdefault(name, (param, None, [part for part, _ in parts]))
            self._targets |= {part: (param, shard_id, [part]) for part, shard_id in parts}
        self._attentions = {
            name.removesuffix(".attn"): module for name, module in model.named_modules()
            if hasattr(module, "set_kv_scale")
        }  # fmt: skip
        # checkpoints of a decoder alone have them at the top, under their names there
        self._parts_of_model = {f"model.{name.split('.')[1]}." for name in params if name.startswith("model.")}
        is_tied = config.tie_word_embeddings and config.has_lm_head
        self._embedding = model.model.embed_tokens if is_tied else None
        # tensors that transformers ties to it, by their names here
        self._copies: Collection[str] = getattr(model, "copies_of_embedding", ())
        self._tied: Any = None if self._embedding is None else self._embedding.weight
        if self._copies:
            self._tied = model.model.get_input_embeddings().weight
        self._head_digests: torch.Tensor | None = None
        self.device = str(next(iter(params.values())).device)
        self._adapter, self._changes = adapter, {} if adapter is None else self._read_adapter(adapter, base)
        names = {part for name in self._changes for part in self._targets[name][2]}
        # Names here of checkpoint tensors:
        self.adapted = names | {f"{name}_scale" for name in names} & set(self._targets)  # the adapter changes them
        self._only = None if only is None else only | self.adapted
        schemes, of_layers = getattr(model, "schemes", None), [layer.packed_schemes for layer in config.layers]
        scheme_of = partial(scheme_in, of_layers) if schemes is None else schemes.get
        self._reader = WeightReader(scheme_of, self._targets)
        every = {part for _, _, parts in self._targets.values() for part in parts}
        self.missing = every if self._only is None else set(self._only)  # names still to be given
        self.filled: set[str] = set()  # names given

    def fill(self, tensor: CheckpointTensor, source: str) -> None:
        """Raises CheckpointError, with nothing written: unknown, there before, or of another shape."""
        if self.unused.fullmatch(self._whole_name(tensor.name)):
            # with ``only``, the head is the checkpoint's, which was compared at the start
            if self._embedding is not None and tensor.name.endswith("lm_head.weight") and self._only is None:
                (N, C), size = self._embedding.weight.shape, self._embedding.tp.size
                mine = tensor.fit([N * size, C]).rows(self._embedding.vocab_start, N, N * size)
                self._head_digests = row_digests(mine, self._embedding.weight)
            return
        if not (name := self._name_here(tensor.name)):
            return
        if name in self._copies:
            if self._only is None:
                self._head_digests = row_digests(tensor.fit([*self._tied.shape]), self._tied)
            return
        if (whole := self._reader.take(name, tensor)) is None:
            return
        name, tensor, packed = whole
        if (match := re.fullmatch(KV_SCALES, name)) and match[1] in self._attentions:
            attention = self._attentions[match[1]]
            part, total = attention.kv_shard
            scales = read_kv_scales(tensor, attention.num_kv_heads * total)
            attention.set_kv_scale(match[2] or match[3], scales.chunk(total)[part])
            return
        param, shard_id, parts = self._targets.get(name, (None, None, []))
        if self._only is not None and parts and self._only.isdisjoint(parts):
            return
        tensor, packed = fitting(param, tensor, packed, name in self._changes)
        if name in self._changes:
            tensor = self._changes.pop(name)(tensor)
        quantizes = param is not None and param.dtype == E4M3 and self._quantizes and not tensor.is_fp8()
        if quantizes:
            parts = [*parts, *(f"{part}_scale" for part in parts)]
        if param is None or not self.missing.issuperset(parts):
            raise CheckpointError(f"{source}: tensor {tensor.name!r} is twice there, or unknown to the model.")
        pieces = [(tensor, shard_id)]
        is_one = getattr(param, "is_one_tensor", False)  # the expert is a module
        if ".experts." in name and shard_id is None and not is_one:  # one tensor for all experts
            pieces = [(piece, (expert, None)) for expert, piece in enumerate(tensor.entries(len(param)))]
        for piece, shard_id in pieces:
            if quantizes and hasattr(param, "in_rows"):  # it has a scale for each row here
                piece = param.in_rows(piece)
            for target, loaded in writes(param, piece, packed, quantizes):
                if hasattr(target, "weight_loader"):
                    target.weight_loader(target, loaded, shard_id)
                else:  # replicated on every rank
                    copy_shard(target, loaded)
        self.missing.difference_update(parts)
        self.filled.update(parts)

    def _whole_name(self, name: str) -> str:
        part = self._renamed_here(f"model.{name.partition('.')[0]}.")
        return f"model.{name}" if part in self._parts_of_model else name

    def _name_here(self, name: str) -> str:
        if self._checkpoint_name is not None:
            return self._checkpoint_name(name)
        return self._renamed_here(self._whole_name(name))

    def _renamed_here(self, name: str) -> str:
        for old, new in self._renamed:
            name = name.replace(old, new)
        return name

    def _read_adapter(self, path: str, base: str) -> dict[str, Change]:
        """An adapter's changes by the names of tensors here."""
        names = [name for file in weight_files(Path(base)) for name in tensor_names(file)]
        names = [name for name in names if not self.unused.fullmatch(self._whole_name(name))]
        changes = {self._name_here(name): change for name, change in read_adapter(path, self.device, names).items()}
        tied = {"lm_head.weight", "model.embed_tokens.weight"} & changes.keys()
        if tied and "lm_head.weight" not in self._targets:
            raise CheckpointError(
                f"{path} changes {' and '.join(sorted(tied))}, which are one tensor in this model. Train the adapter "
                "without them, or merge it by PEFT and save a model whose embeddings are not tied."
            )
        self._check_used({name for name in changes if name not in self._targets or self._tower.fullmatch(name)}, path)
        return changes

    def _check_used(self, names: set[str], path: str) -> None:
        if names:
            some, hint = ", ".join(sorted(names)[:5]), "Is it an adapter of this model?"
            if any(map(self._tower.fullmatch, names)):
                hint = f"An adapter cannot change the vision tower here. {ADVICE}"
            raise CheckpointError(
                f"{path}: the decoder, or its checkpoint, has none of {len(names)} tensors that the adapter changes, "
                f"among them {some}. {hint}"
            )

    def fill_from_files(self, path: str | Path) -> None:
        """Every tensor of the safetensors files in a directory, or of one file; CheckpointError if unreadable."""
        from safetensors import SafetensorError

        files = weight_files(Path(path))
        if not files:
            raise CheckpointError(
                f"{path} holds no *.safetensors file (other weight formats are not read); is the download complete?"
            )
        for file in files:
            try:
                with open_tensors(file, "pt", self.device) as tensors:
                    for name in tensors.keys():  # noqa: SIM118 (not a dict)
                        self.fill(CheckpointTensor.of(name, tensors.get_slice(name)), file.name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} cannot be read ({error}); is the download complete?") from error

    def fill_from(self, weights: Iterable[tuple[str, torch.Tensor]], source: str) -> None:
        """Every tensor of pairs (name, tensor)."""
        for name, tensor in weights:
            self.fill(CheckpointTensor.of(name, tensor.detach()), source)

    def check_complete(self, source: str, advice: str = "") -> None:
        """Raises CheckpointError: a tensor is missing, or ``lm_head.weight`` is no copy of the tied embedding."""
        if self._head_digests is not None:
            given = row_digests(CheckpointTensor.of("", self._tied.detach()), self._tied)
            if not torch.equal(self._head_digests, given):
                raise CheckpointError(
                    f"{source}: lm_head.weight is not the embedding, but config.json ties them. If the model has one "
                    'of its own, write "tie_word_embeddings": false into config.json.'
                )
        self._check_used(set(self._changes), str(self._adapter))
        if self.missing:
            some, half = ", ".join(sorted(self.missing)[:5]), self._reader.gathered.half_given()
            advice += f" (there is {half})" if half else ""
            raise CheckpointError(f"{source}: {len(self.missing)} tensors are missing, among them {some}{advice}.")
        self.check_gathered(source)

    def check_gathered(self, source: str) -> None:
        """Raises CheckpointError: a module has some of the tensors that make its weight, and lacks others."""
        if half := self._reader.gathered.half_given():
            raise CheckpointError(f"{source} has {half}; give all of them together.")


def row_digests(matrix: CheckpointTensor, like: torch.Tensor) -> torch.Tensor:
    """A number for each row, int64 [N], of a matrix [N, C] in the dtype of ``like`` [N, C], read a chunk at a time.

    It stands for a matrix that may be overwritten before the one to compare comes: a sum of the row's words modulo
    2^64, with random odd weights, so that a change of one word is always seen.
    """
    (N, C), device = like.shape, like.device
    padding = -C % 8  # to whole words
    num_words = (C + padding) * like.element_size() // 8
    weights = torch.randint(2**62, (num_words,), generator=torch.Generator("cpu").manual_seed(0), device="cpu") * 2 + 1
    weights, digests = weights.to(device), []
    for first in range(0, N, DIGEST_ROWS):
        rows = matrix.read((slice(first, first + DIGEST_ROWS),)).to(like).contiguous()
        words = (F.pad(rows, (0, padding)) if padding else rows).view(torch.int64)
        digests.append((words * weights).sum(1))
    return torch.cat(digests)


def _parts(name: str, param: nn.Parameter, packed: dict[str, tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The checkpoint tensors of a parameter, with their shard ids; for experts these are (expert, part)."""
    prefix, _, merged = name.rpartition(".experts.")
    if prefix and not getattr(param, "is_merged", False):
        suffix = "weight_scale" if merged.endswith("_scale") else "weight"
        return [
            (f"{prefix}.experts.{expert}.{part}.{suffix}", (expert, shard_id)) for expert in range(len(param))
            for shard_id, part in enumerate(getattr(param, "parts", ()) or EXPERT_PARTS[merged.removesuffix("_scale")])
        ]  # fmt: skip
    shards = [
        (name.replace(f".{merged}.", f".{part}."), shard_id)
        for part, (merged, shard_id) in packed.items()
        if f".{merged}." in name and shard_id in getattr(param, "shard_ids", (shard_id,))
    ]  # fmt: skip
    return shards or [(name, None)]


def load_model(model: Any, path: str, adapter: str | None = None, extra: Collection[nn.Module] = ()) -> set[str]:
    """Fill ``model``, and the modules of ``extra``, from the safetensors files in directory ``path``.

    Returns:
        The checkpoint tensors that the adapter in directory ``adapter`` has changed.

    Raises:
        CheckpointError: no or unreadable files; a tensor missing, unknown, duplicate or of another shape.
    """
    filler = WeightFiller(model, extra, model.config.quant_method is None, adapter, path)
    filler.fill_from_files(path)
    filler.check_complete(path)
    return filler.adapted


def init_dummy_weights(model: nn.Module, seed: int) -> None:
    """Random weights of the scale of an untrained model: norms 1, everything else N(0, DUMMY_STD).

    Quantized weights have about this standard deviation; those of four bits have random codes. Factors are 1.
    """
    params = list(model.named_parameters())
    generator = torch.Generator(params[0][1].device).manual_seed(seed)
    for name, param in params:
        if "norm" in name or name.endswith(("layer_scalar", "expert_scales")):
            param.fill_(1.0)
        elif not randomize(name, param, DUMMY_STD, generator):
            param.normal_(0.0, DUMMY_STD, generator=generator)

"""Transformers' modules as this library runs them: parameters on meta, MLPs, linear layers and norms exchanged.

An exchange needs no trust: a class of norms or MLPs is exchanged if its numbers agree with this library's reference.
``proof.py`` compares every exchanged module again once the weights are there.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.linear import reference
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from nanovllm.layers.weight_loader import copy_bias, copy_shard, row_loader
from nanovllm.quantization.fields import skipped_modules
from nanovllm.quantization.fp8.numbers import dequantized
from nanovllm.quantization.fp8.rules import Fp8
from nanovllm.transformers_backend.config import TransformersConfig, refusal
from nanovllm.transformers_backend.rotation import exchange_rotations
from nanovllm.utils.checkpoint import LOADING_LOCK
from nanovllm.utils.checkpoint_tensor import CheckpointTensor

TOLERANCE = 1e-5  # relative difference of an fp32 norm or MLP to the reference
# Styles of transformers' plans that are replicated here: the head, whose logits are cut; and embeddings and norms.
REPLICATED = ("colwise_gather_output", "replicated_with_grad_allreduce", "embedding_rowwise", "local_params")
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


class Linear(ReplicatedLinear):
    """This library's linear layer in the place of ``nn.Linear``: any leading dimensions, one argument.

    Args:
        style: how ranks share it, as transformers' plans call it: "colwise" shards output features, "rowwise" input
            features, and the results are summed up; "" replicates it.
    """

    def __init__(self, given: Any, precision: Any, tp: TPGroup = SINGLE_RANK, style: str = ""):
        sizes = {"out": given.out_features, "in": given.in_features}
        if style:
            sizes["out" if style == "colwise" else "in"] //= tp.size
        with torch.device("meta"):
            super().__init__(sizes["in"], sizes["out"], given.bias is not None, tp, precision)
        self.in_features, self.out_features, self.style = sizes["in"], sizes["out"], style
        for name in ("weight", "bias") if precision is None and (not style or tp.size == 1) else ():
            if (param := getattr(given, name)) is not None:  # the same parameter: it may be tied
                param.weight_loader = self.weight_loader
                self.register_parameter(name, param)

    def weight_loader(self, param: nn.Parameter, loaded: CheckpointTensor, shard_id: Any = None) -> None:
        if self.style == "rowwise" and param.dim() == 1:
            copy_bias(param, loaded, self.tp.rank)
        elif self.style:
            copy_shard(param, loaded, int(self.style == "rowwise"), self.tp.rank, self.tp.size)
        else:
            copy_shard(param, loaded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x [..., in_features] -> [..., out_features]."""
        y = self._summed(super().forward(x.reshape(-1, self.in_features).contiguous()))
        return y.view(*x.shape[:-1], self.out_features)

    def _summed(self, y: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(y) if self.style == "rowwise" else y

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """The same by plain PyTorch, x [T, in_features]; FP8 weights dequantized."""
        bias: Any = self.bias
        return self._summed(F.linear(x, as_plain(self, x.dtype), bias))


class Norm(RMSNorm):
    """This library's RMSNorm in the place of one of transformers, ``given``, with any leading dimensions."""

    def __init__(self, given: Any, eps: float, offset: float):
        self.size = len(given.weight)
        with torch.device("meta"):
            super().__init__(self.size, eps, offset)
        self._given = (given,)  # no submodule: its weight is on meta
        self.weight_type = given.weight.dtype
        if offset == 0:
            given.weight.weight_loader = self.weight_loader
            self.register_parameter("weight", given.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        return super().forward(x.reshape(-1, self.size)).view(x.shape)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """The same by transformers' module."""
        weight = (self.weight - self.offset).to(self.weight_type)
        return functional_call(self._given[0], {"weight": weight}, (x,))


class MLP(nn.Module):
    """This library's gated MLP in the place of one of transformers, ``given``: one product of gate and up.

    Args:
        act: of the gate, "silu" or "gelu_tanh".
        precisions: schemes of gate, up (the same) and down.
        tp: ranks that share it; a single one replicates it.
    """

    packed_modules_mapping: ClassVar = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}

    def __init__(self, given: Any, act: str, precisions: list[Any], tp: TPGroup):
        super().__init__()
        self._given, self.act, self.tp = (given,), act, tp
        gate, down = given.gate_proj, given.down_proj
        self.size = gate.in_features
        with torch.device("meta"):
            sizes = [gate.out_features] * 2
            self.gate_up_proj = MergedColumnParallelLinear(self.size, sizes, gate.bias is not None, tp, precisions[0])
            self.down_proj = RowParallelLinear(sizes[0], down.out_features, down.bias is not None, tp, precisions[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        flat = x.reshape(-1, self.size).contiguous()
        gated = self.gate_up_proj(flat, act=self.act, reader=self.down_proj)
        return self.tp.all_reduce(self.down_proj(gated)).view(*x.shape[:-1], -1)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """The same by transformers' module; FP8 weights dequantized."""
        gate_up, down = self.gate_up_proj, self.down_proj
        weights: dict[str, Any]
        merged, weights = as_plain(gate_up, x.dtype), {"down_proj.weight": as_plain(down, x.dtype)}
        if down.bias is not None:
            weights["down_proj.bias"] = down.bias
        for i, name in enumerate(("gate_proj", "up_proj")):
            weights[f"{name}.weight"] = merged.chunk(2)[i]
            if (bias := gate_up.bias) is not None:
                weights[f"{name}.bias"] = bias.chunk(2)[i]  # type: ignore[operator]
        return self.tp.all_reduce(functional_call(self._given[0], weights, (x,)))


def as_plain(layer: ReplicatedLinear, dtype: torch.dtype) -> torch.Tensor:
    """A layer's weight in 16 or 32 bits."""
    return layer.weight if layer.weight_scale is None else dequantized(layer.weight, layer.weight_scale, dtype)


def gated_act(module: Any) -> str:
    """The activation with which the reference of a gated MLP gives the numbers of ``module``; "": none does."""
    linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    params = {name for name, _ in module.named_parameters()}
    if linears.keys() != {"gate_proj", "up_proj", "down_proj"} or list(module.buffers()):
        return ""
    if params - {f"{name}.{kind}" for name in linears for kind in ("weight", "bias")}:
        return ""
    gate, up = linears["gate_proj"], linears["up_proj"]
    if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
        return ""
    random = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), device="cpu", dtype=torch.float32)
    shapes = {"gate_proj": (6, 5), "up_proj": (6, 5), "down_proj": (5, 6)}  # linear layers take weights of any shape
    weights = {f"{name}.weight": random(*shape) for name, shape in shapes.items()}
    weights |= {f"{name}.bias": random(shapes[name][0]) for name, each in linears.items() if each.bias is not None}
    x = 3 * random(7, 5)
    merged = [F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")) for name in ("gate_proj", "up_proj")]
    try:
        theirs = functional_call(module, weights, (x,))
    except (RuntimeError, TypeError, ValueError):  # it takes other arguments
        return ""
    for act in ("silu", "gelu_tanh"):
        gated = reference.act_and_mul(torch.cat(merged, -1), act)
        ours = F.linear(gated, weights["down_proj.weight"], weights.get("down_proj.bias"))
        is_tensor = isinstance(theirs, torch.Tensor) and theirs.shape == ours.shape
        if is_tensor and (theirs - ours).abs().max() <= TOLERANCE * ours.abs().max():
            return act
    return ""


def norm_offset(module: Any, eps: float) -> float | None:
    """The offset with which the reference of RMSNorm gives the numbers of ``module``; None: no offset does."""
    generator = torch.Generator("cpu").manual_seed(0)
    random = partial(torch.randn, generator=generator, device="cpu", dtype=torch.float32)
    x, weight = random(5, len(module.weight)), random(len(module.weight))
    x = x * x.new_tensor([1e-3, 0.1, 1.0, 3.0, 50.0])[:, None]
    with torch.device("cpu"):
        theirs = functional_call(module, {"weight": weight}, (x,))
    for offset in (0.0, 1.0):
        ours = reference.rms_norm(x, weight + offset, eps)
        if theirs.shape == ours.shape and (theirs - ours).abs().max() <= TOLERANCE * ours.abs().max():
            return offset
    return None


def exchange(model: Any, config: TransformersConfig, tp: TPGroup) -> None:
    """Put this library's gated MLPs, linear layers and RMSNorms in the place of transformers' that compute the same."""
    head, offsets = model.get_output_embeddings(), dict[Any, float | None]()
    linears = [path for path, module in model.named_modules() if type(module) is nn.Linear and module is not head]
    is_skipped = skipped_modules(dict(config.skipped), config.family, linears)
    is_fp8 = {path for path in linears if config.fp8 is not None and not is_skipped(path)}

    def precision(path: str) -> Fp8 | None:
        return Fp8(config.fp8 or 0) if path in is_fp8 else None

    if config.quant_method and any(".experts." in name and x.dim() == 3 for name, x in model.named_parameters()):
        raise refusal(config.architecture, "its experts are FP8. Take the 16-bit checkpoint")
    plan = dict(getattr(model, "_tp_plan", None) or {})
    if tp.size > 1:
        share(model, plan, config, tp)
    styles, acts = ("colwise", "colwise", "rowwise"), dict[Any, str]()
    done: set[str] = set()  # paths of MLPs
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if parent in done:
            continue
        exchanged: nn.Module | None = None
        if isinstance(getattr(module, "gate_proj", None), nn.Linear):
            kind = type(module), repr(getattr(module, "act_fn", None))
            if kind not in acts:
                acts[kind] = gated_act(module)
            parts = [style_of(plan, f"{path}.{part}", tp.size) for part in ("gate_proj", "up_proj", "down_proj")]
            group = tp if tuple(parts) == styles else None if any(parts) else SINGLE_RANK
            precisions = [precision(f"{path}.{part}") for part in ("gate_proj", "up_proj", "down_proj")]
            if acts[kind] and group is not None and precisions[0] == precisions[1]:
                exchanged = MLP(module, acts[kind], precisions, group)
                done.add(path)
        elif type(module) is nn.Linear:
            style = style_of(plan, path, tp.size) if module is not head else ""
            exchanged = Linear(module, precision(path), tp, style)
        elif is_rms_norm(module):
            eps = next((value for each in EPS_NAMES if isinstance(value := getattr(module, each, None), float)), None)
            if eps is not None:
                norm = type(module), len(module.weight), eps
                if norm not in offsets:
                    offsets[norm] = norm_offset(module, eps)
                if (offset := offsets[norm]) is not None:
                    exchanged = Norm(module, eps, offset)
        if exchanged is not None:
            exchanged.train(module.training)
            setattr(model.get_submodule(parent), name, exchanged)


def style_of(plan: dict[str, str], path: str, size: int) -> str:
    """How a plan of transformers shares a module or a parameter; "": it is the same on every rank."""
    style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path), "") if size > 1 else ""
    return "" if style in REPLICATED else style


def share(model: Any, plan: dict[str, str], config: TransformersConfig, tp: TPGroup) -> None:
    """Shard parameters of single heads over ranks; ``exchange`` shards the linear layers.

    Raises:
        CheckpointError: the plan shares something in a way that is not supported, or there is none.
    """

    def refuse(why: str) -> None:
        raise refusal(config.architecture, f"tensor_parallel_size={tp.size} is not supported, since {why}")

    if "colwise" not in plan.values():
        refuse("transformers has no plan for it")
    linears = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
    for path, module in [*model.named_modules(), *model.named_parameters(remove_duplicate=False)]:
        style = style_of(plan, path, tp.size)
        if not style or (path in linears and style in ("colwise", "rowwise")):
            continue
        if style != "colwise" or not isinstance(module, nn.Parameter) or module.dim() != 1 or len(module) % tp.size:
            refuse(f"{path} is {style}")
        parent, _, name = path.rpartition(".")  # a number for each head, such as a sink
        part = nn.Parameter(torch.empty(len(module) // tp.size, dtype=module.dtype, device="meta"), requires_grad=False)
        part.weight_loader = row_loader(tp.rank, tp.size)  # type: ignore[attr-defined]
        setattr(model.get_submodule(parent), name, part)


def is_rms_norm(module: nn.Module) -> bool:
    params = dict(module.named_parameters())
    is_alone = params.keys() == {"weight"} and params["weight"].dim() == 1 and not list(module.buffers())
    return "RMSNorm" in type(module).__name__ and is_alone


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that this thread makes get parameters without memory; buffers are computed as usual."""
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta" and threading.get_ident() == thread:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build(config: TransformersConfig, dtype: torch.dtype, device: torch.device, tp: TPGroup) -> Any:
    """Transformers' model of a configuration, with this library's layers and uninitialised weights on ``device``.

    Persistent buffers, which checkpoints hold, become parameters.
    """
    with LOADING_LOCK:
        import transformers
    kind: Any = getattr(transformers, config.architecture)
    if not kind._can_set_attn_implementation():
        raise refusal(config.architecture, "its attention does not go through transformers' AttentionInterface")
    if getattr(kind, "_is_stateful", False):
        raise refusal(config.architecture, "its layers keep states besides keys and values")
    raw = transformers.AutoConfig.from_pretrained(config.model_path, trust_remote_code=False)
    if type(raw) is not kind.config_class:
        raw = kind.config_class.from_pretrained(config.model_path)
    vars(raw).pop("quantization_config", None)  # this library's layers read it
    try:
        with parameters_on_meta():
            model = kind._from_config(raw, dtype=dtype, attn_implementation="eager")
    except (OSError, ValueError, RuntimeError, ImportError, TypeError, AttributeError, LookupError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise refusal(config.architecture, f"transformers cannot make it ({error!r:.300})") from error
    model = model.eval().requires_grad_(False)
    keep_wide(model, dtype)
    exchange(model, config, tp)
    model.rotations = exchange_rotations(model)
    if config.is_abridged:
        abridge(model)
    materialize(model, device)
    return model


def keep_wide(model: Any, dtype: torch.dtype) -> None:
    """Turn persistent buffers into parameters; the weights that transformers keeps in fp32 are so here."""
    wide = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        wide |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    saved = model.state_dict().keys()
    for path, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if f"{path}.{name}" in saved and buffer.is_floating_point():
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
        for name, param in list(module.named_parameters(recurse=False)):
            if wide.intersection(f"{path}.{name}".split(".")):
                setattr(module, name, nn.Parameter(param.float(), requires_grad=False))


def abridge(model: nn.Module) -> None:
    """Leave the first decoder layer of each kind, and the last one, of every list of layers."""
    for module in list(model.modules()):
        for name, layers in list(module.named_children()):
            if not isinstance(layers, nn.ModuleList) or name not in ("layers", "h", "blocks"):
                continue
            kinds: dict[Any, nn.Module] = {}
            for layer in layers:
                shapes = tuple((at, param.shape) for at, param in layer.named_parameters())
                kinds.setdefault((shapes, getattr(layer, "attention_type", None)), layer)
            *_, last = layers
            setattr(module, name, nn.ModuleList({id(layer): layer for layer in (*kinds.values(), last)}.values()))


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give every parameter memory on ``device``; a tied one once. Buffers go there, too."""
    made: dict[int, nn.Parameter] = {}

    def moved(param: nn.Parameter) -> nn.Parameter:
        if id(param) not in made:
            data = torch.empty_like(param, device=device) if param.is_meta else param.to(device)
            made[id(param)] = nn.Parameter(data, requires_grad=False)
            attributes = vars(param).items()  # an FP8 weight has its scale
            vars(made[id(param)]).update({k: moved(v) if isinstance(v, nn.Parameter) else v for k, v in attributes})
        return made[id(param)]

    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, moved(param))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))

"""Transformers' modules as this library runs them: parameters on meta, linear layers and RMSNorms exchanged.

An exchange needs no trust: a class of norms is exchanged if its numbers agree with this library's reference, and
``proof.py`` compares every exchanged module again once the weights are there.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from nanovllm.kernels.linear import reference
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.quantization.fp8.rules import Fp8
from nanovllm.transformers_backend.config import TransformersConfig, refusal
from nanovllm.utils.checkpoint import LOADING_LOCK

NORM_TOLERANCE = 1e-5  # relative difference of an fp32 RMSNorm to the reference
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


class Linear(ReplicatedLinear):
    """This library's linear layer in the place of ``nn.Linear``: any leading dimensions, one argument."""

    def __init__(self, given: Any, precision: Any):
        with torch.device("meta"):
            super().__init__(given.in_features, given.out_features, given.bias is not None, precision=precision)
        self.in_features, self.out_features = given.in_features, given.out_features
        for name in ("weight", "bias") if precision is None else ("bias",):
            if (param := getattr(given, name)) is not None:  # the same parameter: it may be tied
                param.weight_loader = self.weight_loader
                self.register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x [..., in_features] -> [..., out_features]."""
        y = super().forward(x.reshape(-1, self.in_features).contiguous())
        return y.view(*x.shape[:-1], self.out_features)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """The same by plain PyTorch, x [T, in_features]; FP8 weights dequantized."""
        weight: Any = self.weight
        if self.weight_scale is not None:
            weight = (weight.float() * self.weight_scale).to(x.dtype)
        bias: Any = self.bias
        return F.linear(x, weight, bias)


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
        if theirs.shape == ours.shape and (theirs - ours).abs().max() <= NORM_TOLERANCE * ours.abs().max():
            return offset
    return None


def exchange(model: Any, config: TransformersConfig) -> None:
    """Put this library's linear layers and RMSNorms in the place of transformers', where they compute the same."""
    head, offsets = model.get_output_embeddings(), dict[Any, float | None]()
    precision = Fp8(config.fp8 or 0) if config.quantizes else None
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        exchanged: nn.Module | None = None
        if type(module) is nn.Linear:
            exchanged = Linear(module, None if module is head else precision)
        elif is_rms_norm(module):
            eps = next((value for each in EPS_NAMES if isinstance(value := getattr(module, each, None), float)), None)
            if eps is not None:
                kind = type(module), len(module.weight), eps
                if kind not in offsets:
                    offsets[kind] = norm_offset(module, eps)
                if (offset := offsets[kind]) is not None:
                    exchanged = Norm(module, eps, offset)
        if exchanged is not None:
            exchanged.train(module.training)
            setattr(model.get_submodule(parent), name, exchanged)


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


def build(config: TransformersConfig, dtype: torch.dtype, device: torch.device) -> Any:
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
    try:
        with parameters_on_meta():
            model = kind._from_config(raw, dtype=dtype, attn_implementation="eager")
    except (OSError, ValueError, RuntimeError, ImportError, TypeError, AttributeError, LookupError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise refusal(config.architecture, f"transformers cannot make it ({error!r:.300})") from error
    model = model.eval().requires_grad_(False)
    keep_wide(model, dtype)
    exchange(model, config)
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

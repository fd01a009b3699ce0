"""Build transformers' model with parameters on meta, and exchange its MLPs, experts, linear layers and norms.

An exchange needs no trust: a class of norms, MLPs or experts is exchanged if its numbers agree with this library's
reference. ``proof.py`` compares every exchanged module again once the weights are loaded.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from nanovllm import kernels
from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.kernels.linear import reference
from nanovllm.kernels.moe.reference import chosen_experts
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.weight_loader import row_loader
from nanovllm.quantization import read_schemes
from nanovllm.quantization.fields import EXPERT_PARTS
from nanovllm.quantization.fp8.rules import Fp8
from nanovllm.transformers_backend.config import TransformersConfig, refusal
from nanovllm.transformers_backend.layers import MLP, Experts, Linear, Norm, looping
from nanovllm.transformers_backend.names import CODES, Names
from nanovllm.transformers_backend.rotation import exchange_rotations
from nanovllm.utils.checkpoint import LOADING_LOCK, files_to_read, tensor_names

TOLERANCE = 1e-5  # relative difference of an fp32 norm or MLP to the reference
# Styles of transformers' plans that are replicated here: the head, as each rank cuts its part of the logits; embeddings
# and norms; and layers with whole inputs and results on every rank.
REPLICATED = (
    "colwise_gather_output", "rowwise_split_input", "mla_kv_a_proj", "replicated_with_grad_allreduce",
    "embedding_rowwise", "local_params",
)  # fmt: skip
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


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
    except (RuntimeError, TypeError, ValueError):  # the module takes other arguments
        return ""
    for act in ("silu", "gelu_tanh"):
        gated = reference.act_and_mul(torch.cat(merged, -1), act)
        ours = F.linear(gated, weights["down_proj.weight"], weights.get("down_proj.bias"))
        is_tensor = isinstance(theirs, torch.Tensor) and theirs.shape == ours.shape
        if is_tensor and (theirs - ours).abs().max() <= TOLERANCE * ours.abs().max():
            return act
    return ""


def experts_act(module: Any) -> str:
    """The activation with which the reference of experts gives the numbers of ``module``; "": none does."""
    params = dict(module.named_parameters())
    if params.keys() != set(EXPERT_PARTS) or list(module.buffers()) or any(x.dim() != 3 for x in params.values()):
        return ""
    num_experts, num_features, size = module.gate_up_proj.shape
    if module.down_proj.shape != (num_experts, size, num_features // 2):
        return ""
    random = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), device="cpu", dtype=torch.float32)
    shapes = zip(EXPERT_PARTS, ((2, 12, 5), (2, 5, 6)), strict=True)
    weights, x = {name: random(*shape) for name, shape in shapes}, 3 * random(7, 5)
    chosen = torch.tensor([[0, 1], [1, 0]] * 4, device="cpu")[:7], random(7, 2).abs()
    module.forward = looping(module)
    try:
        with torch.device("cpu"):
            theirs = functional_call(module, weights, (x, *chosen))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # the module takes other arguments
        return ""
    finally:
        del module.forward
    gate_up, down = map(reference.Weight, weights.values())
    for act in ("silu", "gelu_tanh"):
        ours = chosen_experts(x, gate_up, down, chosen[0].int(), chosen[1], act)
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
    """Exchange experts, gated MLPs, linear layers and RMSNorms for this library's, where both compute the same.

    ``model.schemes`` gets the packed schemes of modules, by their names here.
    """
    head, offsets = model.get_output_embeddings(), dict[Any, float | None]()
    experts = {path: module for path, module in model.named_modules() if has_experts(module)}
    schemes = schemes_of(model, config, [*experts, *(
        path for path, module in model.named_modules() if type(module) is nn.Linear and module is not head
    )])  # fmt: skip
    model.schemes = {path: scheme for path, scheme in schemes.items() if scheme and not isinstance(scheme, Fp8)}
    exchange_experts(model, experts, schemes, config, tp)
    plan = dict(getattr(model, "_tp_plan", None) or {})
    if tp.size > 1:
        share(model, plan, config, tp)

    def precision(path: str) -> Any:
        return in_few_bits(schemes.get(path))

    styles, acts = ("colwise", "colwise", "rowwise"), dict[Any, str]()
    done: set[str] = set()  # paths of MLPs
    for path, module in list(model.named_modules()):
        if path.rpartition(".")[0] in done:
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
                if (scheme := model.schemes.get(f"{path}.gate_proj")) is not None:
                    model.schemes[f"{path}.gate_up_proj"] = scheme
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
            replace_module(model, path, exchanged)


def replace_module(model: nn.Module, path: str, exchanged: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    exchanged.train(model.training)
    part: Any
    for part in exchanged.modules():
        if hasattr(part, "ops"):
            part.ops = kernels.select()  # for the model's device; the module was made on meta
    setattr(model.get_submodule(parent), name, exchanged)


def has_experts(module: Any) -> bool:
    """Whether a module has the weights of all experts in one tensor."""
    return isinstance(getattr(module, "gate_up_proj", None), nn.Parameter) and module.gate_up_proj.dim() == 3


def in_few_bits(scheme: Any) -> Any:
    """The scheme if it is FP8 or has four bits, else None: the weights become 16 bits here."""
    return scheme if isinstance(scheme, Fp8) or (scheme is not None and scheme.bits == 4) else None


def schemes_of(model: Any, config: TransformersConfig, linears: list[str]) -> dict[str, Any]:
    """Schemes of linear layers by their names here; experts have theirs as ``X.gate_up_proj``, and each one's parts.

    The rules of ``quantization_config`` say how a module is packed, and the files' tensors say which are packed.
    """
    quantization = config.quantization
    experts = {path: len(module.gate_up_proj) for path in linears if has_experts(module := model.get_submodule(path))}
    parts = {
        f"{path}.{merged}": [f"{path}.{i}.{part}" for i in range(count) for part in EXPERT_PARTS[merged]]
        for path, count in experts.items() for merged in EXPERT_PARTS
    }  # fmt: skip
    modules = [*(path for path in linears if path not in experts), *chain(*parts.values())]
    mlps = tuple(f"{path.rpartition('.')[0]}." for path in experts)
    routers = {
        path for path in linears if path not in experts and path.startswith(mlps)
        and not hasattr(model.get_submodule(path.rpartition(".")[0]), "down_proj")
    }  # fmt: skip
    if not quantization:
        scheme = None if config.fp8 is None else Fp8(config.fp8)
        return {path: None if path in routers else scheme for path in (*modules, *parts)}
    schemes = read_schemes(quantization, config.family, modules)
    if config.fp8 is not None:  # a router in 16 bits would be quantized by the loader
        schemes |= dict.fromkeys(routers)
    elif (files := files_to_read(config.model_path)):
        names, tensors = Names(model), chain(*map(tensor_names, files))
        packed = {names.here(name).rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in CODES}
        schemes = {path: scheme if path in packed else None for path, scheme in schemes.items()}
    for merged, names_of in parts.items():
        found = {schemes[each] for each in names_of}
        if len(found) > 1:
            raise refusal(config.architecture, f"the experts of {merged} are quantized in several ways")
        (schemes[merged],) = found
    return schemes


def exchange_experts(model: Any, experts: dict[str, Any], schemes: dict[str, Any], config: TransformersConfig,
                     tp: TPGroup) -> None:
    """Exchange experts for this library's. Other forms remain transformers', on a single rank in 16 bits.

    Raises:
        CheckpointError: the checkpoint has quantized experts of another form.
    """
    acts = dict[Any, str]()
    for path, module in experts.items():
        kind = type(module), repr(getattr(module, "act_fn", None))
        if kind not in acts:
            acts[kind] = experts_act(module)
        precisions = [in_few_bits(schemes[f"{path}.{part}"]) for part in EXPERT_PARTS]
        if acts[kind] and module.gate_up_proj.shape[1] // 2 % tp.size == 0 and path.endswith("experts"):
            replace_module(model, path, Experts(module, acts[kind], (precisions[0], precisions[1]), config, tp))
        elif any(precisions) and config.quantization:
            raise refusal(config.architecture, f"its experts are quantized, and the form of {path} is its own")


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
    if act_order := [path for path, scheme in model.schemes.items() if scheme.act_order]:
        refuse(f"GPTQ has ordered the channels of {act_order[0]} by their activations (desc_act)")
    linears = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
    experts = {path for path, module in model.named_modules() if isinstance(module, Experts)}
    for path, module in [*model.named_modules(), *model.named_parameters(remove_duplicate=False)]:
        style = style_of(plan, path, tp.size)
        if not style or (path in linears and style in ("colwise", "rowwise")):
            continue
        if not experts.isdisjoint((path, path.rpartition(".")[0])):  # each rank has a part of every expert
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
    vars(raw).pop("quantization_config", None)  # ``exchange`` reads it
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
    """Leave the last decoder layer of each kind of every list of layers: it is the one whose KV later layers share."""
    for module in list(model.modules()):
        for name, layers in list(module.named_children()):
            if not isinstance(layers, nn.ModuleList) or name not in ("layers", "h", "blocks"):
                continue
            config: Any = getattr(module, "config", None)
            types = getattr(config, "layer_types", None) or ()
            types = list(types) if len(types) == len(layers) else [None] * len(layers)
            kinds: dict[Any, int] = {}
            for i, layer in enumerate(layers):
                shapes = tuple((at, param.shape) for at, param in layer.named_parameters())
                kinds[shapes, types[i], getattr(layer, "attention_type", None)] = i
            kept = sorted(kinds.values())
            setattr(module, name, nn.ModuleList(layers[i] for i in kept))
            if any(types):  # the mask of a layer is found by its place in the list
                config.layer_types = [types[i] for i in kept]


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give every parameter memory on ``device``; a tied one once. Buffers go there, too."""
    made: dict[int, Any] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            if not isinstance(value, nn.Parameter):  # an order of channels: the identity until it is loaded
                made[id(value)] = torch.arange(len(value), dtype=value.dtype, device=device)
                return made[id(value)]
            data = torch.empty_like(value, device=device) if value.is_meta else value.to(device)
            made[id(value)] = nn.Parameter(data, requires_grad=False)
            # a quantized weight has attributes such as its scale
            vars(made[id(value)]).update({name: moved(each) for name, each in vars(value).items()})
        return made[id(value)]

    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, moved(param))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, moved(buffer) if buffer.is_meta else buffer.to(device))
        if isinstance(module, ReplicatedLinear):
            module.zero_order_factor = moved(module.zero_order_factor)

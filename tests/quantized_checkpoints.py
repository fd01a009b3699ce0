"""Quantized checkpoints as the hub has them, made from a family's random model by plain torch, and their oracle.

``write`` rounds a model's weights to a format of ``FORMS``. The model gets the dequantized weights back, so
transformers computes in fp32 what the checkpoint says. Everything is packed from the formats' definitions, not by the
library's code. The oracle compares logits with that model's, and each rank's weights with those of its 16-bit
checkpoint.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import families
import torch
import torch.nn.functional as F
from families import error, hf_logits
from test_families import IDS, TOLERANCE, logits_of

from nanovllm.distributed.group import SINGLE_RANK, TPGroup
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.models.config_reader import model_config, read_model_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import WeightFiller, load_model
from nanovllm.quantization.fields import linears
from nanovllm.quantization.int4.rules import IntScheme
from nanovllm.quantization.int4.tensors import IntTensors
from nanovllm.quantization.nvfp4.rules import Fp4Scheme
from nanovllm.quantization.nvfp4.tensors import Fp4Tensors
from nanovllm.quantization.packed import merged_name, scheme_of
from nanovllm.utils.checkpoint_tensor import CheckpointTensor

__all__ = [  # the library's names, for tests: they are imported here only
    "CheckpointTensor", "Fp4Scheme", "Fp4Tensors", "IntScheme", "IntTensors", "TPGroup", "WeightFiller", "linears",
    "merged_name", "scheme_of",
]  # fmt: skip
E4M3 = torch.float8_e4m3fn
# The last blocks of 128 are partial, and so is the last group of 64 channels of down_proj.
SIZES = dict(hidden_size=192, intermediate_size=352, num_hidden_layers=2, layer_types=None)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=160)  # ranks cut the experts' blocks
MORE = {
    "gemma3": {"layer_types": families.MIXED[1:3]},
    "gemma4": {"layer_types": families.MIXED[1:3]},
    "gemma4-moe": {"layer_types": families.MIXED[1:3]},
    "gemma4-e4b": {"num_hidden_layers": 6, "layer_types": families.GEMMA4["layer_types"]},
    "qwen3-moe": {**MOE, "mlp_only_layers": [0]},
    "qwen2-moe": {  # heads of 64, which a GPU does not pad
        **MOE, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 160, "hidden_size": 256,
    },
    "glm4-moe": {**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 80},  # four ranks have 20 channels, which no word ends
    "qwen3.5": {"num_hidden_layers": 4, "head_dim": 32},
    "gpt-oss": {"hidden_size": 96, "intermediate_size": 64},  # multiples of 32
}
LINEAR = re.compile(
    r"model\.layers\.\d+\.((self_attn|mlp(\.shared_experts?|\.experts\.\d+)?|experts\.\d+)\.\w+_proj"
    r"|linear_attn\.(in_proj_qkv|in_proj_z|in_proj_qkvz|out_proj)|(conv|mamba)\.(in|out)_proj|feed_forward\.w[123]"
    r"|mixer\.(shared_experts\.|experts\.\d+\.)?\w+_proj|feed_forward\.\w+_proj|shared_mlp\.(in|out)put_linear"
    r"|block_sparse_moe\.experts\.\d+\.\w+_proj)\.weight"
)
Q, K, V, O = (f"self_attn.{x}_proj" for x in "qkvo")
GATE, UP, DOWN = (f"mlp.{x}_proj" for x in ("gate", "up", "down"))
SKIPPED = "modules_to_not_convert", "ignored_layers", "ignore"
KV_SCALES = {"k": 0.02, "v": 0.03}
AWQ_FEATURES = [0, 2, 4, 6, 1, 3, 5, 7]  # features of a word's nibbles, from the lowest


def make(path, family, **sizes):
    """transformers' model of a family, in the sizes of these tests; its 16-bit checkpoint is at ``path``."""
    return families.make(path, family, **SIZES | MORE.get(family, {}) | sizes)


# ---------------------------------------------------------------- numbers


def rounded_to_fp8(weight, scales="channel", dtype=torch.float32):
    """e4m3 [N, C], scales as stored, and the fp32 weight that they make.

    ``scales``: one per "block" of 128 x 128, per output "channel", or one, as "tensor" [1] or "scalar" [].
    """
    N, C = weight.shape
    height, width = {"block": (128, 128), "channel": (1, C)}.get(scales, (N, C))
    largest = [torch.stack([x.abs().max() for x in row.split(width, 1)]) for row in weight.float().split(height)]
    scale = (torch.stack(largest) * (1 / 448)).clamp(min=1e-12).to(dtype)
    spread = scale.float().repeat_interleave(height, 0)[:N].repeat_interleave(width, 1)[:, :C]
    data = (weight.float() / spread).clamp(-448, 448).to(E4M3)
    return data, scale.reshape({"tensor": (1,), "scalar": ()}.get(scales, scale.shape)), data.float() * spread


def rounded_to_ints(weight, size=64, symmetric=True, bits=4, negative=False, groups=None, dtype=torch.float16):
    """Codes int64 [N, C], scales and zeros [N, G], and the fp32 weight that they make. ``groups``: one per channel."""
    N, C = weight.shape
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    groups = torch.arange(C) // (size or C) if groups is None else groups
    parts = [weight[:, groups == group] for group in range(int(groups.max()) + 1)]
    low, high = (torch.stack([bound(part) for part in parts], 1) for bound in (
        lambda part: part.amin(1).clamp(max=0), lambda part: part.amax(1).clamp(min=0),
    ))  # fmt: skip
    scales = torch.maximum(-low / middle, high / (middle - 1)) if symmetric else (high - low) / (top - 1)
    scales = (scales * (1 - 2 * (torch.arange(N) % 2) if negative else torch.ones(N))[:, None]).to(dtype)
    # no zero of 0, which files of GPTQ v1 cannot have
    zeros = torch.full_like(low, middle) if symmetric else (-low / scales.float()).round().clamp(1, top)
    of_channel = scales.float()[:, groups]
    codes = ((weight / of_channel).round() + zeros[:, groups]).clamp(0, top)
    return codes.long(), scales, zeros.long(), (codes - zeros[:, groups]) * of_channel


def words(numbers, bits):
    """int32 [..., ceil(n / per word)] of numbers [..., n], the first in the lowest bits."""
    per_word = 32 // bits
    numbers = F.pad(numbers.long(), (0, -numbers.shape[-1] % per_word)).unflatten(-1, (-1, per_word))
    total = (numbers << bits * torch.arange(per_word)).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def e2m1(code):
    """The number of four bits: a sign, two bits of exponent, one of mantissa."""
    sign, exponent, mantissa = (-1) ** (code >> 3), code >> 1 & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


# ---------------------------------------------------------------- tensors of a module


def fp8(module, weight, name="weight_scale", static=False, kv_in_projections=False, **scheme):
    """``static``: scales of the inputs, too, and of an FP8 KV cache, beside the projections or the attention."""
    data, scale, made = rounded_to_fp8(weight, **scheme)
    tensors = {f"{module}.weight": data, f"{module}.{name}": scale}
    if static:
        parent, _, kind = module.rpartition(".")
        tensors[f"{module}.input_scale"] = torch.tensor(0.01)
        if (number := KV_SCALES.get(kind[0])) and kv_in_projections:
            tensors[f"{module}.{kind[0]}_scale"] = torch.tensor(number)
        elif number:
            tensors[f"{parent}.{kind[0]}_scale"] = torch.tensor([number])
    return tensors, made


def ints(module, weight, layout, act_order=False, **scheme):
    if act_order:  # one order for the layers that share an input
        key = re.sub(r"[qkv]_proj$|(gate|up)_proj$", "", module)
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(crc32(key.encode())))
        scheme["groups"] = (torch.arange(weight.shape[1]) // scheme.get("size", 64))[order]
    *numbers, made = rounded_to_ints(weight, **scheme)
    tensors = layout(*numbers, **scheme)
    return {f"{module}.{kind}": tensor.contiguous() for kind, tensor in tensors.items()}, made


def compressed_tensors(codes, scales, zeros, symmetric=True, bits=4, **_):
    shape = torch.tensor(codes.shape)
    tensors = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": shape}
    return tensors if symmetric else tensors | {"weight_zero_point": words(zeros.T, bits).T}


def awq(codes, scales, zeros, **_):
    def by_eight(numbers):  # [rows, N]
        return words(numbers.unflatten(1, (-1, 8))[..., AWQ_FEATURES].flatten(1), 4)

    return {"qweight": by_eight(codes.T), "scales": scales.T, "qzeros": by_eight(zeros.T)}


def gptq(codes, scales, zeros, bits=4, less=1, groups=None, **_):
    tensors = {"qweight": words(codes, bits).T, "scales": scales.T, "qzeros": words(zeros.T - less, bits)}
    return tensors if groups is None else tensors | {"g_idx": groups.int()}


def gptq_v2(*args, **scheme):
    return gptq(*args, **scheme, less=0)


def rounded_to_nvfp4(weight, number=None):
    """Codes [N, C], e4m3 scales [N, C / 16], the tensor's scale, which multiplies, and the fp32 weight they make."""
    groups = weight.float().unflatten(1, (-1, 16))
    largest = groups.abs().amax(2)
    number = (largest.max() / (6 * 448) if number is None else torch.tensor(number)).float().reshape(1)
    scales = (largest / 6 / number).clamp(max=448).to(E4M3)
    spread = (scales.float() * number)[..., None]
    table = torch.tensor([e2m1(code) for code in range(16)])
    codes = (groups[..., None] / spread[..., None].clamp(min=1e-30) - table).abs().argmin(-1)
    return codes.flatten(1), scales, number, (table[codes] * spread).flatten(1)


def nvfp4(module, weight, **_):
    """llm-compressor's: the tensor's scale divides."""
    codes, scales, number, _ = rounded_to_nvfp4(weight)
    divisor = 1 / number
    numbers = torch.tensor([e2m1(code) for code in range(16)])[codes].unflatten(1, (-1, 16))
    made = (numbers * (scales.float() / divisor)[..., None]).flatten(1)
    tensors = {"weight_packed": in_bytes(codes), "weight_scale": scales, "weight_global_scale": divisor,
               "input_global_scale": torch.tensor([300.0])}  # fmt: skip
    return {f"{module}.{kind}": tensor for kind, tensor in tensors.items()}, made


def nvfp4_of_modelopt(module, weight, number=None, **_):
    codes, scales, number, made = rounded_to_nvfp4(weight, number)
    kind, more = module.rpartition(".")[2][0], {"input_scale": torch.tensor(0.01)}
    if module.endswith(("k_proj", "v_proj")):
        more[f"{kind}_scale"] = torch.tensor(KV_SCALES[kind])
    tensors = {"weight": in_bytes(codes), "weight_scale": scales, "weight_scale_2": number.reshape(()), **more}
    return {f"{module}.{kind}": tensor for kind, tensor in tensors.items()}, made


def dense_mxfp4(module, weight, **_):
    """llm-compressor's MXFP4: no scale of the tensor."""
    tensors, made = mxfp4(module, weight[None].mT)
    blocks, scales = tensors[f"{module}_blocks"][0], tensors[f"{module}_scales"][0]
    return {f"{module}.weight_packed": blocks.flatten(1), f"{module}.weight_scale": scales}, made[0].T


def in_bytes(codes):
    """Two codes a byte, the first in its lower half."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def mxfp4(module, weight, **_):
    """[E, C, N] -> blocks [E, N, C / 32, 16] and scales [E, N, C / 32]; OCP Microscaling Formats 1.0."""
    numbers, groups = torch.tensor([e2m1(code) for code in range(16)]), weight.mT.unflatten(2, (-1, 32))
    exponents = groups.abs().amax(3).log2().floor() - 2  # the largest becomes 4 to 8
    codes = (groups[..., None] / 2 ** exponents[..., None, None] - numbers).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4  # two channels a byte, the first in the lower half
    made = numbers[codes.int()] * 2 ** exponents[..., None]
    return {f"{module}_blocks": blocks, f"{module}_scales": (exponents + 127).to(torch.uint8)}, made.flatten(2).mT


# ---------------------------------------------------------------- quantization_config


def deepseek(model, **_):
    return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def qwen(model, **_):
    """Qwen/Qwen3-8B-FP8: the same, and every module that is not FP8 by name."""
    ends = "norm.weight", ".mlp.gate.weight", ".shared_expert_gate.weight"
    names = [name.removesuffix(".weight") for name, _ in model.named_parameters() if name.endswith(ends)]
    return deepseek(model) | {"modules_to_not_convert": ["lm_head", *names]}


def auto_fp8(model, **_):
    """neuralmagic/Meta-Llama-3-8B-Instruct-FP8: a scale per tensor, and static ones of the inputs."""
    return {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}


def modelopt(model, **_):
    """nvidia/Llama-3.1-8B-Instruct-FP8."""
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    return {
        "config_groups": {"group_0": {"input_activations": scheme, "targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"], "quant_algo": "FP8", "kv_cache_scheme": scheme,
        "producer": {"name": "modelopt", "version": "0.29.0"}, "quant_method": "modelopt",
    }  # fmt: skip


def llm_compressor(form, inputs=None, kv_cache=None, **weights):
    scheme = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
        "observer": "minmax", "observer_kwargs": {}, "symmetric": True, "type": "float",
    }  # fmt: skip
    group = {"input_activations": inputs and scheme | inputs, "output_activations": None, "targets": ["Linear"],
             "weights": scheme | weights}  # fmt: skip
    return {
        "config_groups": {"group_0": group}, "format": form, "global_compression_ratio": 1.4636, "ignore": ["lm_head"],
        "kv_cache_scheme": kv_cache, "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


def float_quantized(model, scales="channel", static=False, **_):
    """RedHatAI's; Qwen3-8B-FP8-dynamic has a scale per channel."""
    kv_cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    return llm_compressor(
        "float-quantized", {"dynamic": True, "observer": None, "strategy": "token"}, kv_cache if static else None,
        strategy=scales, block_structure=[128, 128] if scales == "block" else None,
    )  # fmt: skip


def pack_quantized(model, size=64, symmetric=True, bits=4, **_):
    """RedHatAI/Qwen3-8B-quantized.w4a16."""
    return llm_compressor(
        "pack-quantized", actorder="weight", group_size=size or None, num_bits=bits, observer="mse",
        strategy="group" if size else "channel", symmetric=symmetric, type="int",
    )  # fmt: skip


def nvfp4_pack_quantized(model, **_):
    """RedHatAI/Qwen3-8B-NVFP4."""
    return llm_compressor(
        "nvfp4-pack-quantized", {"num_bits": 4, "dynamic": "local", "strategy": "tensor_group", "group_size": 16},
        num_bits=4, strategy="tensor_group", group_size=16, observer="static_minmax",
    )  # fmt: skip


def mxfp4_pack_quantized(model, **_):
    return llm_compressor(
        "mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32, scale_dtype="torch.uint8",
    )  # fmt: skip


def modelopt_fp4(model, **_):
    """nvidia/Qwen3-8B-NVFP4."""
    scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "config_groups": {"group_0": {"input_activations": scheme, "weights": scheme, "targets": ["Linear"]}},
        "ignore": ["lm_head"], "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.37.0"},
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "quant_method": "modelopt",
    }  # fmt: skip


def auto_awq(model, size=64, **_):
    """Qwen/Qwen3-8B-AWQ."""
    return {
        "bits": 4, "group_size": size or -1, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    }  # fmt: skip


def auto_round(model, layout, size=64, symmetric=True, bits=4, **_):
    """Intel's."""
    return {
        "bits": bits, "group_size": size or -1, "sym": symmetric, "data_type": "int", "iters": 200,
        "autoround_version": "0.9.0", "block_name_to_quantize": "model.layers", "quant_method": "auto-round",
        "packing_format": f"auto_round:auto_{layout.__name__}",
    }  # fmt: skip


def auto_gptq(model, layout, size=64, symmetric=True, bits=4, act_order=False, **_):
    return {
        "bits": bits, "group_size": size or -1, "desc_act": act_order, "sym": symmetric, "static_groups": False,
        "damp_percent": 0.01, "true_sequential": True, "model_name_or_path": None, "lm_head": False,
        "quant_method": "gptq", "checkpoint_format": layout.__name__,
    }  # fmt: skip


def gpt_oss(model, **_):
    """openai/gpt-oss-20b."""
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"modules_to_not_convert": names, "quant_method": "mxfp4"}


# ---------------------------------------------------------------- checkpoints


class Form(NamedTuple):
    config: object  # (model, **scheme) -> quantization_config
    encode: object  # (module, weight, **scheme) -> (its tensors by name, the fp32 weight that they make)
    scheme: dict = {}  # noqa: RUF012  never changed


BF16 = {"dtype": torch.bfloat16}
FORMS = {
    "qwen": Form(qwen, fp8, {"scales": "block", "name": "weight_scale_inv", **BF16}),
    "deepseek": Form(deepseek, fp8, {"scales": "block", "name": "weight_scale_inv"}),
    "auto_fp8": Form(auto_fp8, fp8, {"scales": "scalar", "static": True}),
    "channel": Form(float_quantized, fp8, {"scales": "channel", **BF16}),
    "tensor": Form(float_quantized, fp8, {"scales": "tensor", "static": True}),
    "block": Form(float_quantized, fp8, {"scales": "block", **BF16}),
    "modelopt": Form(modelopt, fp8, {"scales": "scalar", "static": True, "kv_in_projections": True}),
    "compressed-tensors": Form(pack_quantized, ints, {"layout": compressed_tensors}),
    "awq": Form(auto_awq, ints, {"layout": awq, "symmetric": False}),
    "gptq": Form(auto_gptq, ints, {"layout": gptq}),
    "gptq_v2": Form(auto_gptq, ints, {"layout": gptq_v2}),
    "auto-round": Form(auto_round, ints, {"layout": gptq}),
    "auto-round-awq": Form(auto_round, ints, {"layout": awq}),
    "mxfp4": Form(gpt_oss, mxfp4),
    "nvfp4": Form(nvfp4_pack_quantized, nvfp4),
    "modelopt-fp4": Form(modelopt_fp4, nvfp4_of_modelopt),
    "dense-mxfp4": Form(mxfp4_pack_quantized, dense_mxfp4),
}
FP8_FORMS = [form for form in FORMS if FORMS[form].encode is fp8]


def config_of(form, model=None, **scheme):
    """``quantization_config`` as published files have it."""
    return FORMS[form].config(model, **FORMS[form].scheme | scheme)


def parts_of(model):
    """(name in a checkpoint, tensor): experts one by one, as views of the model's tensors."""
    for name, param in model.state_dict().items():
        prefix, _, merged = name.rpartition(".experts.")
        for expert, weight in enumerate(param if prefix else ()):
            parts = ("gate_proj", "up_proj") if merged == "gate_up_proj" else (merged,)
            for part, tensor in zip(parts, weight.chunk(len(parts)), strict=True):
                yield f"{prefix}.experts.{expert}.{part}.weight", tensor
        if not prefix:
            yield name, param


@torch.no_grad()
def encoded(model, form, skipped=(), own=lambda module: {}, **scheme):
    """A checkpoint's tensors; ``model`` gets the dequantized weights."""
    encode, scheme, tensors = FORMS[form].encode, FORMS[form].scheme | scheme, {}
    is_mxfp4 = form == "mxfp4"
    for name, param in model.state_dict().items() if is_mxfp4 else parts_of(model):
        module = name.removesuffix(".weight")
        is_quantized = name.endswith((".gate_up_proj", ".down_proj")) if is_mxfp4 else LINEAR.fullmatch(name)
        if is_quantized and module not in skipped:
            found, made = encode(module, param, **scheme | own(module))
            tensors |= found
            param.copy_(made)
        elif not (model.config.tie_word_embeddings and name == "lm_head.weight"):
            tensors[name] = param.clone()
    return tensors


def write(path, model, form, skipped=(), change=lambda tensors, config: None, own=lambda module: {}, **scheme):
    """Quantize ``model``'s checkpoint at ``path`` in place; ``model`` gets the dequantized weights.

    Args:
        skipped: modules to leave in 16 bits.
        change: edits tensors and config before they are written.
        own: changes of the scheme for a module.
        scheme: FP8 has ``scales`` and their ``dtype``. Integers have the ``size`` of a group (0: all channels),
            ``symmetric``, ``bits``, ``negative`` scales, ``act_order``, and the ``dtype`` of the scales.
    """
    tensors = encoded(model, form, skipped, own, **scheme)
    config = json.loads(Path(path, "config.json").read_text())
    config["quantization_config"] = quantization = config_of(form, model, **scheme)
    for key in quantization.keys() & set(SKIPPED) if skipped else ():
        quantization[key] = [*(quantization[key] or ["lm_head"]), *skipped]
    change(tensors, config)
    families.save(path, tensors, config)
    return tensors


# ---------------------------------------------------------------- edits of a checkpoint, for ``families.copied``


def put(name, value):
    """The tensor ``name`` is ``value``, or what a function makes of the one that is there."""

    def edit(tensors, config):
        tensors[name] = value(tensors[name]) if callable(value) else value

    return edit


def drop(name):
    return lambda tensors, config: tensors.pop(name)


def fields(**changes):
    return lambda tensors, config: config["quantization_config"].update(changes)


def all_of(*edits):
    return lambda tensors, config: [edit(tensors, config) for edit in edits]


# ---------------------------------------------------------------- the oracle


def quantized_config(quantization, architecture="Qwen3ForCausalLM", **more):
    """A ModelConfig with this ``quantization_config``, without a checkpoint."""
    raw = families.BASE | {"torch_dtype": "bfloat16", "architectures": [architecture]}
    if "Moe" in architecture or architecture in ("MixtralForCausalLM", "GptOssForCausalLM"):
        raw |= MOE | dict(moe_intermediate_size=32, shared_expert_intermediate_size=32)
    return model_config(raw | more | {"quantization_config": quantization})


def built(path, tp=SINGLE_RANK, config=None):
    """The model of a checkpoint on one rank, filled; every byte that is not loaded is NaN."""
    model = CausalLM(config or read_model_config(str(path)), None, tp)
    for param in model.parameters():
        param.view(torch.uint8).fill_(0x7F)
    load_model(model, str(path))
    return model


def weights_of(model):
    """Every parameter by its name, dequantized, channels in the checkpoint's order."""
    params = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, ReplicatedLinear):
            found = {"weight": module.as_weight()}
        elif name.endswith(".experts"):
            found = dict(zip(("gate_up_proj", "down_proj"), module.weights(), strict=True))
        else:
            continue
        for part, weight in found.items():
            for suffix in ("_scale", "_zero", "_factor"):
                params.pop(f"{name}.{part}{suffix}", None)
            params[f"{name}.{part}"] = plain = weight.dequantize(torch.float32)
            if weight.order is not None:
                params[f"{name}.{part}"] = torch.empty_like(plain).index_copy_(1, weight.order.long(), plain)
    return params


def check_logits(path, model):
    assert error(logits_of(str(path)), hf_logits(model, IDS)) < TOLERANCE


def check_shards(path, plain, size, config=None, is_exact=True):
    """Each rank's weights are those that the loader of 16-bit weights makes of the dequantized checkpoint."""
    for rank in range(size):
        tp = TPGroup(rank, size, None)
        got, want = weights_of(built(path, tp, config)), weights_of(built(plain, tp))
        assert got.keys() == want.keys()
        for name in want:
            assert not is_exact or torch.equal(got[name], want[name]), f"{name} of rank {rank}"
            torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=0, msg=f"{name} of rank {rank}")


def dequantized_module(tensors, scheme):
    """What the library makes of one module's tensors."""
    by_kind = {kind: CheckpointTensor.of(kind, tensor) for kind, tensor in tensors.items()}
    return IntTensors("", scheme, by_kind).dequantized().read(...)

"""Checkpoints of packed integers as the hub has them, made from a family's random model by plain torch.

Each weight is rounded to the nearest code; the model it comes from gets the dequantized weights back, so that
transformers computes in fp32 what the checkpoint says. Words are packed and weights are dequantized number by number
from the formats' definitions, not by the library's code.
"""

import json
import re
from pathlib import Path

import families
import torch
from fp8_checkpoints import parts_of

# No two dimensions are equal, and the last group of 64 channels of down_proj is ragged.
SIZES = dict(hidden_size=192, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
             num_key_value_heads=2, layer_types=None)  # fmt: skip
LINEAR = re.compile(
    r"model\.layers\.\d+\.((self_attn|mlp(\.shared_experts?|\.experts\.\d+)?)\.\w+_proj"
    r"|linear_attn\.(in_proj_qkv|in_proj_z|in_proj_qkvz|out_proj))\.weight"
)
AWQ_FEATURES = [0, 2, 4, 6, 1, 3, 5, 7]  # of the nibbles of a word, from the lowest


def words(numbers, per_word):
    """int32 [..., n / per_word] of numbers [..., n], the first in the lowest bits."""
    bits = 32 // per_word
    total = torch.zeros(*numbers.shape[:-1], -(-numbers.shape[-1] // per_word), dtype=torch.int64)
    for i in range(numbers.shape[-1]):
        total[..., i // per_word] += numbers[..., i].long() << (bits * (i % per_word))
    return torch.where(total >= 2**31, total - 2**32, total).int()


def quantized(weight, size, symmetric, bits=4, negative=False, groups=None, dtype=torch.float16):
    """Codes int64 [N, C], scales and zeros [N, G], and fp32 [N, C] that they make. ``groups``: of each channel."""
    N, C = weight.shape
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    groups = torch.arange(C) // (size or C) if groups is None else groups
    count = int(groups.max()) + 1
    scales, zeros, codes = torch.empty(N, count, dtype=dtype), torch.empty(N, count), torch.empty(N, C)
    for group in range(count):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = torch.maximum(-low / middle, high / (middle - 1)) if symmetric else (high - low) / (top - 1)
        sign = 1 - 2 * (torch.arange(N) % 2) if negative else 1
        scales[:, group] = (scale * sign).to(dtype)
        wide = scales[:, group].float()
        # without a zero of 0, which files of GPTQ v1 cannot have
        zeros[:, group] = middle if symmetric else (-(low if not negative else low.abs()) / wide).round().clamp(1, top)
        codes[:, groups == group] = ((part / wide[:, None]).round() + zeros[:, group, None]).clamp(0, top)
    made = torch.empty(N, C)
    for channel in range(C):
        group = int(groups[channel])
        made[:, channel] = (codes[:, channel] - zeros[:, group]) * scales[:, group].float()
    return codes.long(), scales, zeros.long(), made


def compressed_tensors(codes, scales, zeros, symmetric, bits=4, **_):
    N, C = codes.shape
    tensors = {"weight_packed": words(codes, 32 // bits), "weight_scale": scales, "weight_shape": torch.tensor([N, C])}
    return tensors if symmetric else tensors | {"weight_zero_point": words(zeros.T, 32 // bits).T}


def awq(codes, scales, zeros, symmetric, **_):
    def by_eight(numbers):  # [rows, N]
        return words(numbers.unflatten(1, (-1, 8))[..., AWQ_FEATURES].flatten(1), 8)

    return {"qweight": by_eight(codes.T), "scales": scales.T, "qzeros": by_eight(zeros.T)}


def gptq(codes, scales, zeros, symmetric, bits=4, less=1, groups=None, **_):
    tensors = {"qweight": words(codes, 32 // bits).T, "scales": scales.T, "qzeros": words(zeros.T - less, 32 // bits)}
    return tensors if groups is None else tensors | {"g_idx": groups.int()}


def gptq_v2(*args, **more):
    return gptq(*args, **more | {"less": 0})


def config_of(form, size=64, symmetric=True, bits=4, act_order=False, **_):
    """``quantization_config`` as published files have it."""
    group_size = size or -1
    if form == "compressed-tensors":  # RedHatAI/Qwen3-8B-quantized.w4a16
        weights = {
            "actorder": "weight", "block_structure": None, "dynamic": False, "group_size": size or None,
            "num_bits": bits, "observer": "mse", "observer_kwargs": {}, "strategy": "group" if size else "channel",
            "symmetric": symmetric, "type": "int",
        }  # fmt: skip
        group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
        return {
            "config_groups": {"group_0": group}, "format": "pack-quantized", "ignore": ["lm_head"],
            "global_compression_ratio": None, "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }  # fmt: skip
    if form == "awq":  # Qwen/Qwen3-8B-AWQ
        return {
            "bits": 4, "group_size": group_size, "modules_to_not_convert": None, "quant_method": "awq",
            "version": "gemm", "zero_point": True,
        }  # fmt: skip
    if form.startswith("auto-round"):  # Intel's
        return {
            "bits": bits, "group_size": group_size, "sym": symmetric, "data_type": "int", "iters": 200,
            "autoround_version": "0.9.0", "block_name_to_quantize": "model.layers", "quant_method": "auto-round",
            "packing_format": {"auto-round": "auto_round:auto_gptq", "auto-round-awq": "auto_round:auto_awq"}[form],
        }  # fmt: skip
    return {
        "bits": bits, "group_size": group_size, "desc_act": act_order, "sym": symmetric, "static_groups": False,
        "damp_percent": 0.01, "true_sequential": True, "model_name_or_path": None, "lm_head": False,
        "quant_method": "gptq", "checkpoint_format": form,
    }  # fmt: skip


LAYOUTS = {
    "compressed-tensors": compressed_tensors, "awq": awq, "gptq": gptq, "gptq_v2": gptq_v2, "auto-round": gptq,
    "auto-round-awq": awq,
}  # fmt: skip


def write(path, model, form, skipped=(), change=lambda tensors, config: None, more=lambda name: {}, **scheme):
    """Quantize ``model``'s checkpoint at ``path`` in place; ``model`` gets the dequantized weights.

    ``scheme``: size of a group, 0: all channels; symmetric, bits, negative (scales), act_order, dtype (of scales).
    ``more``: changes of it for a module. ``skipped``: modules to leave in 16 bits. ``change`` edits tensors and config.
    """
    path, tensors = Path(path), {}
    scheme = {"size": 64, "symmetric": form not in ("awq",)} | scheme
    orders: dict = {}
    for name, param in parts_of(model):
        module = name.removesuffix(".weight")
        if not LINEAR.fullmatch(name) or module in skipped:
            if not (model.config.tie_word_embeddings and name == "lm_head.weight"):
                tensors[name] = param.clone()
            continue
        own = scheme | more(module)
        if own.pop("act_order", False):  # of the input, which q, k and v have in common
            key = re.sub(r"\w+_proj$", str(module.endswith(("o_proj", "down_proj"))), module)
            groups, generator = torch.arange(param.shape[1]) // own["size"], torch.Generator().manual_seed(len(orders))
            own["groups"] = orders.setdefault(key, groups[torch.randperm(len(groups), generator=generator)])
        fields = {key: own[key] for key in own.keys() & {"size", "symmetric", "bits", "negative", "groups", "dtype"}}
        codes, scales, zeros, made = quantized(param, **fields)
        param.copy_(made)
        layout = LAYOUTS[form](codes, scales, zeros, **own)
        tensors |= {f"{module}.{kind}": tensor.contiguous() for kind, tensor in layout.items()}
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = config_of(form, **scheme)
    for key in ("modules_to_not_convert", "ignore"):
        if skipped and key in config["quantization_config"]:
            config["quantization_config"][key] = ["lm_head", *skipped]
    change(tensors, config)
    families.save(path, tensors, config)
    return tensors

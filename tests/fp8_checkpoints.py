"""FP8 checkpoints as the hub has them, made from a family's random model by plain torch; see ``families.py``.

Weights are quantized one by one, in the forms of published files; the model they come from gets the dequantized weights
back, so that transformers computes in fp32 what the checkpoint says.
"""

import json
import re
from pathlib import Path

import families
import torch

# the last blocks of 128 are partial
SIZES = dict(hidden_size=192, intermediate_size=320, num_hidden_layers=2, layer_types=None)
KV_SCALES = {"k": 0.02, "v": 0.03}
LINEAR = re.compile(
    r"model\.layers\.\d+\.((self_attn|mlp(\.shared_experts?|\.experts\.\d+)?)\.\w+_proj"
    r"|linear_attn\.(in_proj_qkv|in_proj_z|in_proj_qkvz|out_proj))\.weight"
)


def qwen(model):
    """Qwen/Qwen3-8B-FP8: blocks, and every module that is not one of them by name."""
    ends = "norm.weight", ".mlp.gate.weight", ".shared_expert_gate.weight"
    names = [name.removesuffix(".weight") for name, _ in model.named_parameters() if name.endswith(ends)]
    return {
        "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head", *names],
        "quant_method": "fp8", "weight_block_size": [128, 128],
    }  # fmt: skip


def deepseek(model):
    """The same with fp32 scales and no list."""
    return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def auto_fp8(model):
    """neuralmagic/Meta-Llama-3-8B-Instruct-FP8: a scale per tensor, and static ones of the inputs."""
    return {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}


def compressed(strategy, ignore=("lm_head",), kv_cache=None, **weights):
    """RedHatAI's: Qwen3-8B-FP8-dynamic has a scale per channel."""
    scheme = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
        "observer": "minmax", "observer_kwargs": {}, "strategy": strategy, "symmetric": True, "type": "float",
    }  # fmt: skip
    return {
        "config_groups": {
            "group_0": {
                "input_activations": {**scheme, "dynamic": True, "observer": None, "strategy": "token"},
                "output_activations": None, "targets": ["Linear"], "weights": {**scheme, **weights},
            },
        },
        "format": "float-quantized", "global_compression_ratio": 1.4636, "ignore": list(ignore),
        "kv_cache_scheme": kv_cache, "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


def channel(model):
    return compressed("channel", ["lm_head", "re:.*visual.*"])


def tensor(model):
    return compressed("tensor", kv_cache={
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False,
    })  # fmt: skip


def block(model):
    return compressed("block", block_structure=[128, 128])


def modelopt(model):
    """nvidia/Llama-3.1-8B-Instruct-FP8."""
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    return {
        "config_groups": {"group_0": {"input_activations": scheme, "targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"], "quant_algo": "FP8", "kv_cache_scheme": scheme,
        "producer": {"name": "modelopt", "version": "0.29.0"}, "quant_method": "modelopt",
    }  # fmt: skip


# form -> (its quantization_config, granularity, dtype of scales, their name, whether it has scales of inputs and KV)
FORMS = {
    "qwen": (qwen, "block", torch.bfloat16, "weight_scale_inv", False),
    "deepseek": (deepseek, "block", torch.float32, "weight_scale_inv", False),
    "auto_fp8": (auto_fp8, "scalar", torch.float32, "weight_scale", True),
    "channel": (channel, "channel", torch.bfloat16, "weight_scale", False),
    "tensor": (tensor, "tensor", torch.float32, "weight_scale", True),
    "block": (block, "block", torch.bfloat16, "weight_scale", False),
    "modelopt": (modelopt, "scalar", torch.float32, "weight_scale", True),
}


def quantize(weight, granularity, scale_dtype):
    """e4m3 [N, C], scales as stored, and the fp32 weight that they make."""
    N, C = weight.shape
    rows, columns = {"block": (128, 128), "channel": (1, C)}.get(granularity, (N, C))
    data, wide = torch.empty(N, C, dtype=torch.float8_e4m3fn), torch.empty(N, C)
    scales = torch.empty(-(-N // rows), -(-C // columns), dtype=scale_dtype)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[part].abs().max() / 448
            scale = scales[i, j].float()
            data[part] = (weight[part] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            wide[part] = data[part].float() * scale
    shapes = {"tensor": (1,), "scalar": ()}
    return data, scales.reshape(shapes.get(granularity, scales.shape)), wide


def parts_of(model):
    """(name in a checkpoint, tensor): those of experts one by one, views of the model's."""
    for name, param in model.state_dict().items():
        prefix, _, merged = name.rpartition(".experts.")
        for expert, weight in enumerate(param if prefix else ()):
            parts = ("gate_proj", "up_proj") if merged == "gate_up_proj" else ("down_proj",)
            for part, tensor in zip(parts, weight.chunk(len(parts)), strict=True):
                yield f"{prefix}.experts.{expert}.{part}.weight", tensor
        if not prefix:
            yield name, param


def write(path, model, form, skipped=(), change=lambda tensors, config: None):
    """Quantize ``model``'s checkpoint at ``path`` in place; ``model`` gets the dequantized weights.

    ``skipped``: modules to leave in 16 bits. ``change`` edits tensors and config before they are written.
    """
    make_config, granularity, scale_dtype, scale_name, has_static = FORMS[form]
    path, tensors = Path(path), {}
    tied = model.config.tie_word_embeddings
    for name, param in parts_of(model):
        module = name.removesuffix(".weight")
        if LINEAR.fullmatch(name) and module not in skipped:
            tensors[name], tensors[f"{module}.{scale_name}"], wide = quantize(param, granularity, scale_dtype)
            param.copy_(wide)
            if has_static:
                tensors[f"{module}.input_scale"] = torch.tensor(0.01)
                kind = module.split(".")[-1][0]
                if kind in "kv" and form == "modelopt":
                    tensors[f"{module}.{kind}_scale"] = torch.tensor(KV_SCALES[kind])
                elif kind in "kv":
                    tensors[f"{module.rpartition('.')[0]}.{kind}_scale"] = torch.tensor([KV_SCALES[kind]])
        elif not (tied and name == "lm_head.weight"):
            tensors[name] = param.clone()
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantization = make_config(model)
    for key in ("modules_to_not_convert", "ignored_layers", "ignore"):
        if key in quantization:
            quantization[key] = [*quantization[key], *skipped]
    change(tensors, config)
    families.save(path, tensors, config)
    return tensors

"""gpt-oss checkpoints with experts in MXFP4 as they are published, made from a random model by plain torch.

Written from the format's specification (OCP Microscaling Formats 1.0), not from the library's code: an e2m1 is decoded
by its sign, exponent and mantissa.
"""

import json
from pathlib import Path

import families
import torch

SIZES = dict(hidden_size=96, intermediate_size=64)  # multiples of 32
CONFIG = {  # openai/gpt-oss-20b
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip


def e2m1(code):
    """The number of four bits."""
    sign, exponent, mantissa = (-1) ** (code >> 3), code >> 1 & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


NUMBERS = torch.tensor([e2m1(code) for code in range(16)])


def quantize(weight):
    """fp32 [E, N, C] -> blocks [E, N, C / 32, 16], scales [E, N, C / 32] and the fp32 weight that they make."""
    groups = weight.unflatten(2, (-1, 32))
    exponents = groups.abs().amax(3).log2().floor() - 2  # the largest becomes 4 to 8
    scaled = groups / 2 ** exponents[..., None]
    codes = (scaled[..., None] - NUMBERS).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4  # two channels a byte, the first in the lower half
    wide = NUMBERS[codes.int()] * 2 ** exponents[..., None]
    return blocks, (exponents + 127).to(torch.uint8), wide.flatten(2)


def write(path, model, change=lambda tensors, config: None):
    """Quantize the experts of ``model``'s checkpoint at ``path`` in place; ``model`` gets the dequantized weights.

    ``change`` edits tensors and config before they are written.
    """
    path, tensors = Path(path), {}
    for name, param in model.state_dict().items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], wide = quantize(param.mT)
            param.copy_(wide.mT)
        else:
            tensors[name] = param.clone()
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": dict(CONFIG)}
    change(tensors, config)
    families.save(path, tensors, config)
    return tensors

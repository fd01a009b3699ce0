"""Rotary position embedding (RoPE, arXiv:2104.09864): frequencies and the table of cosines and sines.

The rotation itself is fused into the kernels that store keys. D is the head size.
"""

import math

import torch
from torch import nn

from nanovllm.model_config import RopeScaling


class RotaryEmbedding(nn.Module):
    """Holds ``cos_sin`` fp32 [max_position, D]: cosines of the D/2 angles, then their sines."""

    def __init__(self, head_dim: int, max_position: int, rope: RopeScaling):
        super().__init__()
        inverse_frequencies, scale = _frequencies(head_dim, rope)
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies.to(positions.device))
        self.register_buffer("cos_sin", torch.cat((angles.cos(), angles.sin()), -1) * scale, persistent=False)
        self.cos_sin: torch.Tensor


def _frequencies(head_dim: int, rope: RopeScaling) -> tuple[torch.Tensor, float]:
    """Inverse frequencies fp32 [D/2], on the CPU whatever the default device, and the scale of the table."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    base = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return base, 1.0
    if rope.kind == "linear":
        return base / rope.factor, 1.0

    # YaRN: high frequencies stay, low ones are interpolated, with a linear ramp over the dimensions between
    def dimension_of(rotations: float) -> float:
        """The dimension that turns this often within the original context."""
        wavelength_ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength_ratio) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_of(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_of(rope.beta_slow)), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, device="cpu") - low) / max(high - low, 1e-3)).clamp(0, 1)
    interpolated = base / rope.factor * ramp + base * (1 - ramp)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return interpolated, scale

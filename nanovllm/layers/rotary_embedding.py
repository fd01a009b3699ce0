"""Rotary position embedding (RoPE, arXiv:2104.09864): frequencies, table of cosines and sines, order of dimensions.

The kernels that store keys rotate one way only: pairs (j, j + D/2) of a head, by a table with an angle for each. Heads
that are rotated in part, or in other pairs, have their rows of Q and K permuted at load; their scores stay the same.
Heads of a size that the kernels do not take are padded with zeros, also at load (``head_orders``): those of Q and K add
nothing to a score, and those of V meet zeros in the output projection.

D is the head size here, r the number of rotated dimensions of the checkpoint's heads.
"""

import math

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.model_config import ModelConfig
from nanovllm.rope import RopeScaling


def padded_head_dim(config: ModelConfig) -> int:
    """D, for the kernels of torch's default device.

    Raises:
        ConfigError: zeros in the heads would change the model's numbers.
    """
    padded = kernels.select().padded_head_dim(config.head_dim)
    config.check_padded_heads(padded)
    return padded


def head_orders(head_dim: int, padded: int, rope: RopeScaling | None,
                interleaved: bool) -> tuple[list[int] | None, list[int] | None]:
    """The dimensions of a checkpoint's head in our order, -1 for padding; None: as they are.

    The first order is that of Q and K, whose first r dimensions are rotated, in pairs (i, i + r/2) or, ``interleaved``,
    (2i, 2i + 1); the rest gets the angle 0. The second is that of V and of the output projection's input.
    """
    r = 0 if rope is None else rope.rotated_dims(head_dim)
    v_order = [*range(head_dim), *[-1] * (padded - head_dim)]
    pairs = [(i, i + 1) for i in range(0, r, 2)] if interleaved else [(i, i + r // 2) for i in range(r // 2)]
    pairs += zip(v_order[r::2], v_order[r + 1 :: 2], strict=True)
    order = [first for first, _ in pairs] + [second for _, second in pairs]
    if head_dim < padded:
        return order, v_order
    return None if r == 0 or (r == head_dim and not interleaved) else order, None


class RotaryEmbedding(nn.Module):
    """Holds ``cos_sin`` fp32 [max_position, D]: cosines of the D/2 angles, then their sines. NoPE: all angles are 0."""

    def __init__(self, head_dim: int, max_position: int, rope: RopeScaling | None, padded: int | None = None):
        super().__init__()
        angles = torch.zeros(max_position, (padded or head_dim) // 2)
        cos, sin = angles.cos(), angles.sin()
        if rope is not None:
            r = rope.rotated_dims(head_dim)
            inverse_frequencies, scale = _frequencies(r, rope)
            positions = torch.arange(max_position, dtype=torch.float32)
            angles = torch.outer(positions, inverse_frequencies.to(positions.device))
            cos[:, : r // 2], sin[:, : r // 2] = angles.cos() * scale, angles.sin() * scale
        self.register_buffer("cos_sin", torch.cat((cos, sin), -1), persistent=False)
        self.cos_sin: torch.Tensor


def _frequencies(num_dims: int, rope: RopeScaling) -> tuple[torch.Tensor, float]:
    """Inverse frequencies fp32 [r/2], on the CPU whatever the default device, and the scale of the table."""
    exponents = torch.arange(0, num_dims, 2, dtype=torch.float32, device="cpu") / num_dims
    base = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return base, 1.0
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":  # as YaRN, with a ramp over the rotations within the original context
        rotations = rope.original_max_position * base / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        kept = ((rotations - low) / (high - low)).clamp(0, 1)
        return base * (kept + (1 - kept) / rope.factor), 1.0
    if rope.kind == "longrope":
        divisors = torch.tensor(rope.long_factor if rope.is_long else rope.short_factor, device="cpu")
        scale = rope.attention_factor
        if scale is None:
            log_original = math.log(rope.original_max_position)
            scale = math.sqrt(1 + math.log(rope.factor) / log_original) if rope.factor > 1 else 1.0
        return base / divisors, scale

    # YaRN: high frequencies stay, low ones are interpolated, with a linear ramp over the dimensions between
    def dimension_of(rotations: float) -> float:
        """The dimension that turns this often within the original context."""
        wavelength_ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return num_dims * math.log(wavelength_ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_dims - 1)
    ramp = ((torch.arange(num_dims // 2, device="cpu") - low) / max(high - low, 1e-3)).clamp(0, 1)
    interpolated = base / rope.factor * ramp + base * (1 - ramp)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return interpolated, scale

"""Rotary position embedding (RoPE, arXiv:2104.09864): the table of cosines and sines, and the order of dimensions.

The kernels that store keys rotate one way only: pairs (j, j + D/2) of a head, by a table with an angle for each. Heads
that are rotated in part, or in other pairs, have their rows of Q and K permuted at load; their scores stay the same.
Heads of a size that the kernels do not take are padded with zeros, also at load: zeros of Q and K add nothing to a
score, and zeros of V meet zeros in the output projection.

D is the head size here, r the number of rotated dimensions of the checkpoint's heads.
"""

import torch
from torch import nn

from nanovllm.layers.weight_loader import HeadOrders


def head_orders(head_dim: int, padded: int, r: int, interleaved: bool) -> HeadOrders:
    """The orders of heads whose first ``r`` dimensions are rotated, in pairs (i, i + r/2) or, ``interleaved``,
    (2i, 2i + 1). The other dimensions get the angle 0.
    """
    v_order = [*range(head_dim), *[-1] * (padded - head_dim)]
    pairs = [(i, i + 1) for i in range(0, r, 2)] if interleaved else [(i, i + r // 2) for i in range(r // 2)]
    pairs += zip(v_order[r::2], v_order[r + 1 :: 2], strict=True)
    order = [first for first, _ in pairs] + [second for _, second in pairs]
    if head_dim < padded:
        return HeadOrders(order, v_order)
    return HeadOrders(None if r == 0 or (r == head_dim and not interleaved) else order)


class RotaryEmbedding(nn.Module):
    """Holds ``cos_sin`` fp32 [max_position, D]: cosines of the D/2 angles, then their sines.

    Args:
        frequencies: inverse ones of the first angles, fp32 [r/2]. The other angles are 0; None: all of them (NoPE).
        scale: multiplies the cosines and sines of these angles.
        query_scales: factors of queries by position, [max_position]; None: all are 1.
    """

    def __init__(self, head_dim: int, max_position: int, frequencies: torch.Tensor | None = None, scale: float = 1.0,
                 query_scales: torch.Tensor | None = None):
        super().__init__()
        self.head_dim, self.num_rotated = head_dim, 0 if frequencies is None else 2 * len(frequencies)
        angles = torch.zeros(max_position, head_dim // 2)
        cos, sin = angles.cos(), angles.sin()
        if frequencies is not None:
            positions = torch.arange(max_position, dtype=torch.float32)
            angles = torch.outer(positions, frequencies.to(positions.device))
            cos[:, : len(frequencies)], sin[:, : len(frequencies)] = angles.cos() * scale, angles.sin() * scale
        self.register_buffer("cos_sin", torch.cat((cos, sin), -1), persistent=False)
        self.cos_sin: torch.Tensor
        scales = None if query_scales is None else query_scales.to(self.cos_sin.device, torch.get_default_dtype())
        self.register_buffer("query_scales", scales, persistent=False)
        self.query_scales: torch.Tensor | None

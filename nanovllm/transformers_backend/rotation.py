"""Rotary embedding in one kernel, in the place of a model's own function of the same numbers.

transformers' attention calls ``apply_rotary_pos_emb``, a dozen passes over q and k. An attention module whose function
rotates halves of whole heads runs its own forward code with ``Rotation`` under that name.
"""

import inspect
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.kernels.linear import reference

NAME = "apply_rotary_pos_emb"
PARAMETERS = ["q", "k", "cos", "sin"]  # first parameters of the function
TOLERANCE = 1e-6  # relative difference in fp32 of a function that is exchanged


class Rotation:
    """Rotates q and k [1, heads, T, D] by cosines and sines [1, T, D]; ``theirs`` takes every other call."""

    def __init__(self, theirs: Any):
        self.theirs, self.ops = theirs, kernels.select()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any,
                 **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shape = 1, q.shape[2], q.shape[3]
        if args or kwargs or not cos.shape == sin.shape == shape or k.shape[2:] != q.shape[2:]:
            return self.theirs(q, k, cos, sin, *args, **kwargs)
        cos, sin = cos[0].contiguous(), sin[0].contiguous()
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
        rotated = [self.ops.rotate_heads(x[0].transpose(0, 1), cos, sin).transpose(0, 1)[None] for x in (q, k)]
        return rotated[0], rotated[1]


def random_inputs(head_dim: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """q, k, cosines and sines of five tokens; the two halves of a head have cosines of their own."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = (1, 4, 5, head_dim), (1, 2, 5, head_dim), (1, 5, head_dim), (1, 5, head_dim)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def rotates_halves(function: Any) -> bool:
    """Whether a function's numbers are the reference's."""
    if not isinstance(function, FunctionType) or list(inspect.signature(function).parameters)[:4] != PARAMETERS:
        return False
    q, k, cos, sin = random_inputs(16, torch.float32, torch.device("cpu"))
    try:
        theirs = function(q, k, cos, sin)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    ours = [reference.rotate_heads(x[0].transpose(0, 1), cos[0], sin[0]).transpose(0, 1)[None] for x in (q, k)]
    return len(theirs) == 2 and all(
        x.shape == y.shape and (x - y).abs().max() <= TOLERANCE for x, y in zip(theirs, ours, strict=True)
    )


def exchange_rotations(model: nn.Module) -> list[Rotation]:
    """Let attention modules call a ``Rotation`` that computes the same; returns the rotations in use."""
    rotations: dict[Any, Rotation | None] = {}
    for module in model.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
            continue
        theirs = forward.__globals__.get(NAME)
        if theirs not in rotations:
            rotations[theirs] = Rotation(theirs) if rotates_halves(theirs) else None
        if (rotation := rotations[theirs]) is not None:
            names = {**forward.__globals__, NAME: rotation}
            copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
            copy.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(copy, module)
    return [rotation for rotation in rotations.values() if rotation is not None]

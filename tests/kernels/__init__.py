"""Shared by the kernels' tests. Kernels are compiled where there is a GPU, under Triton's interpreter elsewhere."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


def randn(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def rand(*shape, dtype=torch.float32):
    return torch.rand(*shape, device=DEVICE).to(dtype)


def make_cos_sin(max_position, head_dim):
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=DEVICE).float() / head_dim)
    angles = torch.arange(max_position, device=DEVICE).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def make_epilogue(num_tokens, num_heads, num_kv_heads, head_dim, dtype, with_norm=True, kv_scale=None):
    """What follows a product to Q, K and V: random positions and slots; every third token is not stored.

    The caches hold sevens, in ``dtype``; with ``kv_scale`` NaN in e4m3.
    """
    from nanovllm.kernels.linear.reference import QKVEpilogue

    num_blocks = num_tokens // 16 + 3
    positions = torch.randint(0, 500, (num_tokens,), device=DEVICE, dtype=torch.int32)
    slots = torch.randperm(num_blocks * 16, device=DEVICE)[:num_tokens].int()
    slots[2::3] = -1
    weights = (torch.randn(2, head_dim, device=DEVICE) / 4 + 1).to(dtype) if with_norm else (None, None)
    shape = (2, num_blocks, 16, num_kv_heads, head_dim)
    caches = torch.full(shape, 7.0 if kv_scale is None else torch.nan, device=DEVICE)
    caches = caches.to(dtype if kv_scale is None else torch.float8_e4m3fn)
    cos_sin = make_cos_sin(500, head_dim)
    return QKVEpilogue(*weights, EPS, cos_sin, positions, slots, *caches, num_heads, num_kv_heads, kv_scale)


def another(epilogue, dtype=None):
    """The same for another run, with caches of its own; in another type if asked."""
    names = ("q_weight", "k_weight", "k_cache", "v_cache")
    tensors = {name: getattr(epilogue, name) for name in names if getattr(epilogue, name) is not None}
    return epilogue._replace(**{name: tensor.clone().to(dtype or tensor.dtype) for name, tensor in tensors.items()})


def make_options(num_tokens, num_features, num_channels, dtype, norm=False, bias=False, act_mul=None, residual=False):
    """Options of ``fused_linear``."""
    return dict(
        bias=randn(num_features, dtype=dtype) if bias else None,
        norm_weight=rand(num_channels, dtype=dtype) if norm else None,
        eps=EPS,
        residual=randn(num_tokens, num_features // 2 if act_mul else num_features, dtype=dtype) if residual else None,
        act_mul=act_mul,
    )


def widened(values):
    """In fp32."""
    return {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def sm90_module(name):
    """A module of Gluon kernels; skips the test without a Hopper GPU or with an untested version of Triton."""
    from nanovllm.kernels.launch import is_sm90

    module = pytest.importorskip(f"nanovllm.kernels.linear.{name}", exc_type=ImportError)
    if not is_sm90(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    return module

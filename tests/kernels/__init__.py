"""Shared by the kernels' tests. Kernels are compiled where there is a GPU, under Triton's interpreter elsewhere."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


def randn(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def rand(*shape, dtype=torch.float32):
    return torch.rand(*shape, device=DEVICE).to(dtype)


def sm90_module(name):
    """A module of Gluon kernels; skips the test without a Hopper GPU or with an untested version of Triton."""
    from nanovllm.kernels.launch import is_sm90

    module = pytest.importorskip(f"nanovllm.kernels.linear.{name}", exc_type=ImportError)
    if not is_sm90(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    return module

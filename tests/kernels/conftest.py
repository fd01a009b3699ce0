"""Fixtures of the kernels' tests."""

import importlib.util
from functools import partial

import pytest
import torch
from helpers import interpret_fp8_exactly

if importlib.util.find_spec("triton") is None:  # these import it
    names = "attention dispatch elementwise fp8_kv fp8_linear gated_delta int4_linear linear moe_kernels prefix"
    names += " mamba2 short_conv"
    collect_ignore = [f"test_{name}.py" for name in names.split()]


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that a kernel's host code allocates holds NaN, or a large negative integer."""
    torch.manual_seed(0)

    def poison(allocate, *args, **kwargs):
        tensor = allocate(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -123456)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, partial(poison, getattr(torch, name)))


@pytest.fixture
def exact_fp8(monkeypatch):
    """Triton's interpreter rounds to e4m3 as a GPU does."""
    if not torch.cuda.is_available():
        interpret_fp8_exactly(monkeypatch)


@pytest.fixture
def cut(monkeypatch):
    """cut(...) -> decode attention in tiles of 16 tokens, by default in about as many splits: every sequence of a few
    tiles is cut."""
    from nanovllm.kernels.attention import decode

    def make(programs_per_sm=16, **more):
        config = decode.DecodeConfig(block_n=16, num_warps=2, num_stages=2, programs_per_sm=programs_per_sm, **more)
        monkeypatch.setattr(decode, "decode_config", lambda *_: config)

    return make

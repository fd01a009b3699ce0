"""Backends that cannot run: the error says why and which one can."""

import re

import pytest
import torch

from nanovllm import ConfigError
from nanovllm.layers.attention import SDPABackend, select_backend


def refuses(text):
    return pytest.raises(ConfigError, match=re.escape(text))


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_backends_that_need_a_gpu(name):
    with refuses(f"attention_backend={name!r} needs a CUDA device; on the CPU use 'auto' or 'sdpa'."):
        select_backend(name, "cpu", torch.float32, 256, 128)


@pytest.mark.parametrize("name", ["auto", "triton", "sdpa"])
def test_head_size_on_cuda(name):
    """Users saw an assertion of the kernels."""
    with refuses("the model's head_dim=96 is not a power of two: it runs only with device='cpu'."):
        select_backend(name, "cuda", torch.bfloat16, 256, 96)


def test_more_query_heads_than_the_kernels_take():
    with refuses("the model has 32 query heads for each KV head, and the kernels take at most 16."):
        select_backend("triton", "cuda", torch.bfloat16, 256, 128, 32)
    assert isinstance(select_backend("auto", "cuda", torch.bfloat16, 256, 128, 32), SDPABackend)

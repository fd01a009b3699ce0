"""Linear layers with the operations they fuse."""

import pytest
import torch
from helpers import DEVICES

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ReplicatedLinear


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [1, 5])  # on a GPU the norm is fused into the GEMV, or a kernel before the GEMM
def test_norm_leaves_the_residual_alone(device, num_tokens):
    """``x.float()`` is ``x`` itself in fp32, and the norm then scaled the residual in place."""
    torch.manual_seed(0)
    with torch.device(device):
        norm, linear = RMSNorm(64, eps=1e-6), ReplicatedLinear(64, 64)
        norm.weight.data.normal_()
        linear.weight.data.normal_()
        x = torch.randn(num_tokens, 64)
    before = x.clone()
    normed = before * (before.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight
    torch.testing.assert_close(norm(x), normed)
    assert torch.equal(x, before)
    product = normed @ linear.weight.T
    torch.testing.assert_close(linear(x, norm=norm), product, rtol=1e-4, atol=1e-4)
    assert torch.equal(x, before)
    # x as its own residual may be overwritten, but by the sum only
    total = linear(x, norm=norm, residual=x)
    torch.testing.assert_close(total, before + product, rtol=1e-4, atol=1e-4)
    assert torch.equal(x, before) or torch.equal(x, total)

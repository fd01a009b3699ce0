"""Packed weights on the CPU: the products of the plain ones, and never those of weights that are gone."""

import pytest
import torch
import torch.nn.functional as F
from helpers import generate, greedy, prompt_of

from nanovllm.kernels.linear.reference import Weight, fused_linear, pack
from nanovllm.runner import packing

pytestmark = pytest.mark.skipif(pack(torch.zeros(2, 2)) is None, reason="torch has no packed products here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
def test_products(dtype, num_tokens):
    x, w, bias = (torch.randn(shape).to(dtype) for shape in ((num_tokens, 48), (80, 48), (80,)))
    packed = pack(w)
    if packed is None:
        pytest.skip("no bfloat16 here")
    result = fused_linear(x, Weight(w, packed=packed), bias)
    exact = F.linear(x.double(), w.double(), bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


def test_packed_or_not(make_llm, monkeypatch):
    """Models above the limit are not packed, and say the same."""
    prompts = [prompt_of(40), prompt_of(9, seed=1)]
    llm = make_llm(device="cpu")
    assert llm.model_runner.model.lm_head.packed is not None
    expected = generate(llm, prompts, greedy(8))
    monkeypatch.setattr(packing, "MAX_BYTES", 0)
    llm = make_llm(device="cpu")
    assert llm.model_runner.model.lm_head.packed is None
    assert generate(llm, prompts, greedy(8)) == expected


def test_updated_weights_are_packed_anew(make_llm):
    llm = make_llm(device="cpu")
    layer = llm.model_runner.model.model.layers[0].mlp.down_proj
    name = "model.layers.0.mlp.down_proj.weight"
    llm.update_weights([(name, torch.randn(layer.weight.shape))], partial=True)
    assert layer.packed is None  # the old one must not be used
    generate(llm, [prompt_of(5)], greedy(1))
    x = torch.randn(3, layer.weight.shape[1])
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), x @ layer.weight.T, rtol=1e-4, atol=1e-4)
    assert layer.packed is not None

"""The embedding, or a rank's part: the Triton kernel against its twin, and the ranks' sum against the whole table."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import embedding, reference

from . import DEVICE

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens, hidden_size, size, scale", [(0, 64, 2, 1.0), (1, 1536, 2, 1.0), (37, 50, 4, 8.5)])
def test_embed(num_tokens, hidden_size, size, scale, dtype):
    rows = 30
    weight = torch.randn(size * rows, hidden_size, device=DEVICE).to(dtype)
    input_ids = torch.randint(0, size * rows, (num_tokens + 1,), device=DEVICE, dtype=torch.int32)[1:]
    input_ids[:2] = torch.tensor([rows, rows - 1])[:num_tokens]
    total = torch.zeros(num_tokens, hidden_size, device=DEVICE, dtype=dtype)
    for rank in range(size):
        part = input_ids, weight[rank * rows : (rank + 1) * rows], rank * rows, scale
        expected, actual = reference.embed(*part), embedding.embed(*part)
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0)  # the interpreter truncates to bf16
        total += actual
    expected = F.embedding(input_ids, weight) * scale
    torch.testing.assert_close(total, expected, rtol=2**-7, atol=0)
    for ops in (reference, embedding):  # a rank that holds all
        torch.testing.assert_close(ops.embed(input_ids, weight, None, scale), expected, rtol=2**-7, atol=0)

"""The table of cosines and sines against transformers'."""

import pytest
import torch

from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.rope import RopeScaling

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": YARN,
    "yarn, published for Qwen3": {**YARN, "original_max_position_embeddings": 32768},
    "yarn, other ramp": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, given attention factor": {**YARN, "attention_factor": 1.25},
    "yarn, factor 1": {**YARN, "factor": 1.0},
}


def cos_sin(rope, theta, head_dim, num_positions):
    scaling = RopeScaling.from_json({"rope_parameters": {**rope, "rope_theta": theta}})
    return RotaryEmbedding(head_dim, num_positions, scaling).cos_sin


def hf_cos_sin(rope, theta, head_dim, num_positions):
    """[num_positions, head_dim] in our layout."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=64, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=131072,
        rope_parameters={**rope, "rope_theta": theta},
    )  # fmt: skip
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions).unsqueeze(0))
    return torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)


@pytest.mark.parametrize("head_dim", (32, 128))
@pytest.mark.parametrize("theta", (10_000.0, 1_000_000.0))
@pytest.mark.parametrize("name", ROPES)
def test_against_transformers(name, theta, head_dim):
    got, want = (table(ROPES[name], theta, head_dim, 1000) for table in (cos_sin, hf_cos_sin))
    # an angle of 1000 rad has a rounding error of 6e-5
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)
    torch.testing.assert_close(got[:16], want[:16], atol=2e-6, rtol=0)


def test_the_scalings_differ():
    """Otherwise the test above would show nothing."""
    tables = [cos_sin(rope, 1e4, 32, 100) for name, rope in ROPES.items() if name != "yarn, factor 1"]
    for i, one in enumerate(tables):
        assert all((one - other).abs().max() > 1e-2 for other in tables[:i])

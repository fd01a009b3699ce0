"""The table of cosines and sines against transformers'."""

import pytest
import torch

from nanovllm.kernels.linear import reference
from nanovllm.layers.rotary_embedding import RotaryEmbedding, head_orders
from nanovllm.models.rope import RopeScaling

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 16.0}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": YARN,
    "yarn, published for Qwen3": {**YARN, "original_max_position_embeddings": 32768},
    "yarn, other ramp": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, given attention factor": {**YARN, "attention_factor": 1.25},
    "yarn, factor 1": {**YARN, "factor": 1.0},
    "yarn, a ramp between dimensions": {**YARN, "truncate": False},
    "llama3": LLAMA3,
    "llama3, published": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3, other borders": {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 8.0},
    "longrope": LONGROPE,
    "longrope, given attention factor": {**LONGROPE, "attention_factor": 1.25},
}


def parameters(rope, theta, head_dim):
    if rope["rope_type"] == "longrope":
        short = [1 + i / 50 for i in range(head_dim // 2)]
        rope = {**rope, "short_factor": short, "long_factor": [2 * x for x in short]}
    return {**rope, "rope_theta": theta}


def cos_sin(rope, theta, head_dim, num_positions):
    scaling = RopeScaling.from_json({"rope_parameters": parameters(rope, theta, head_dim)})
    return RotaryEmbedding(head_dim, num_positions, *scaling.for_length(num_positions).frequencies(head_dim)).cos_sin


def hf_cos_sin(rope, theta, head_dim, num_positions):
    """[num_positions, head_dim] in our layout."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=64, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=131072,
        rope_parameters=parameters(rope, theta, head_dim),
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


def test_longrope_takes_the_short_factors_up_to_the_original_length():
    short, want = (table(LONGROPE, 1e4, 32, 64) for table in (cos_sin, hf_cos_sin))
    torch.testing.assert_close(short, want)
    assert (short - cos_sin(LONGROPE, 1e4, 32, 65)[:64]).abs().max() > 0.1


@pytest.mark.parametrize("padded", [16, 18, 32])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.75, 1.0])
def test_permuted_heads_have_the_same_scores(share, interleaved, padded):
    """A head rotated in part, or in neighbouring pairs, against a rotation of all pairs (j, j + D/2) by the table."""
    rope, size = RopeScaling(theta=100.0, partial_rotary_factor=share) if share else None, 16
    q, k, v = torch.randn(3, 20, size)
    plain = cos_sin({"rope_type": "default"}, 100.0, r := int(share * size), 20)
    cos, sin = plain.chunk(2, dim=-1)

    def rotated(x):
        x = x.clone()
        first, second = (x[:, 0:r:2], x[:, 1:r:2]) if interleaved else x[:, :r].chunk(2, dim=-1)
        a, b = first * cos - second * sin, second * cos + first * sin
        first[:], second[:] = a, b
        return x

    def ordered(x, order):
        return x if order is None else torch.cat((x, torch.zeros(20, 1)), 1)[:, order]

    order, v_order = head_orders(size, padded, r, interleaved)
    assert (order is None) == (padded == size and (share == 0 or (share == 1 and not interleaved)))
    table = RotaryEmbedding(padded, 20, *(rope.frequencies(size) if rope else ())).cos_sin.chunk(2, dim=-1)
    permuted = [reference.rotate(ordered(x, order), *table) for x in (q, k)]
    assert permuted[0].shape == (20, padded)
    torch.testing.assert_close(torch.einsum("id,jd->ij", *permuted), rotated(q) @ rotated(k).T)
    assert torch.equal(ordered(v, v_order)[:, :size], v) and not ordered(v, v_order)[:, size:].any()


def test_no_positions():
    assert torch.equal(RotaryEmbedding(4, 3).cos_sin, torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 3))
    assert head_orders(4, 4, 0, interleaved=True) == (None, None)

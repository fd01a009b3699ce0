"""Kernels that are neither products nor attention nor sampling against their twins: one table.

Compiled where there is a GPU, under Triton's interpreter elsewhere. Whatever a kernel allocates holds NaN first, so
that an element it forgets to write cannot pass; so does the memory around its arguments (table.py).
"""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import embedding, step_inputs
from nanovllm.kernels import reference as other_reference
from nanovllm.kernels.attention import packed
from nanovllm.kernels.attention import reference as attention_reference
from nanovllm.kernels.linear import norm, norm_rope_store, reference, rotate_heads, silu_and_mul
from nanovllm.kernels.linear.norm import SplitKPartials
from nanovllm.kernels.moe import reference as moe_reference
from nanovllm.kernels.moe import shared_expert

from . import DEVICE, EPS, make_epilogue, rand, randn
from .table import DTYPES, Row, cases_of, check_row, ids, inside

pytestmark = pytest.mark.usefixtures("poisoned")
ROWS = [(0, 64), (1, 64), (5, 100), (3, 1030)]  # tokens and channels: none, a power of two, neither
WIDE = [(0, 8), (1, 8), (3, 100), (2, 1500)]
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter truncates to bf16


def norm_of_partials(x, partials, weight, eps):
    """The kernel adds split-K partials to their residual, then takes its norm."""
    partial = SplitKPartials(x, partials)
    y = norm.rms_norm(partial, weight, eps)
    assert len(partial) == len(x) and partial.residual is x
    last = torch.tensor([len(x) - 1], device=DEVICE)
    assert torch.equal(partial[last], x[last])
    return y


def twin_of_partials(x, partials, weight, eps):
    x.copy_(x.float() + partials.sum(0))
    return reference.rms_norm(x, weight, eps)


def qk_norm_args(dtype, num_tokens, q_size, k_size, given):
    """``given``: the mean squares are those of more heads than this rank's."""
    qkv = inside(randn(num_tokens, q_size + 2 * k_size, dtype=dtype), 0, 5)
    mean_squares = 1 + randn(2, num_tokens).square() if given else None
    return qkv, randn(q_size, dtype=dtype), randn(k_size, dtype=dtype), EPS, mean_squares


def soft_cap_args(dtype, num_rows, num_columns):
    """Numbers far below the cap, about it, and far beyond it."""
    x = randn(num_rows, num_columns, dtype=dtype) * 40
    x[:, ::7] *= 1e-3
    x[:, 3] = 4e4
    return inside(x, 0, 5), 30.0


def norm_rope_store_args(dtype, num_tokens, num_heads, num_kv_heads, head_dim, with_norm=True, with_cache=True,
                         v_norm=False):
    qkv = inside(randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype), 0, 8)
    epilogue = make_epilogue(num_tokens, num_heads, num_kv_heads, head_dim, dtype, with_norm)
    if not with_cache:
        epilogue = epilogue._replace(k_cache=epilogue.k_cache[:0], v_cache=epilogue.v_cache[:0])
    return qkv, *epilogue._replace(v_norm=v_norm)


def rotate_heads_args(dtype, num_tokens, num_heads, head_dim, is_transposed):
    """``is_transposed``: heads come before tokens in memory, as after a norm of each head; else they are columns."""
    x = inside(randn(num_tokens, num_heads * head_dim, dtype=dtype), 0, 8).unflatten(1, (num_heads, head_dim))
    if is_transposed:
        x = randn(num_heads, num_tokens, head_dim, dtype=dtype).transpose(0, 1)
    return x, randn(num_tokens, head_dim, dtype=dtype), randn(num_tokens, head_dim)


def rotated_in_place(qkv, cos_sin, num_heads):
    """The kernel's results are views of its argument."""
    q, k, v = packed.rotate_qk(qkv, cos_sin, num_heads)
    starts = [x.storage_offset() - qkv.storage_offset() for x in (q, k, v)]
    assert starts == [i * num_heads * q.shape[2] for i in range(3)]
    return qkv


def embed_args(dtype, num_tokens, hidden_size, start, scale):
    """A rank's part of 120 ids, 30 rows, among them its first and the last before it; no start: all ids."""
    input_ids = ids(num_tokens + 1, 30 if start is None else 120)[1:]
    if start is not None:
        input_ids[:2] = torch.tensor([start, start - 1])[:num_tokens].clamp(min=0)
    return input_ids, randn(30, hidden_size, dtype=dtype), start, scale


def decode_inputs_args(dtype, batch_size, num_requests=140, block_size=16):
    """Columns of one table; padding requests, the last token of a block and the first of the next."""
    table = 1 + ids(num_requests * 12, 98).view(num_requests, 12)
    length = table[:, 1]
    length.remainder_(10 * block_size)
    length[:3] = torch.tensor([0, block_size, block_size + 1])
    req_indices = torch.randperm(num_requests, device=DEVICE)[:batch_size].int()
    req_indices[:3] = torch.arange(len(req_indices[:3]))
    return req_indices, table[:, 0], length, table[:, 2:], block_size


def aligned_decode_inputs(*args):
    results = step_inputs.decode_inputs(*args)
    assert all(x.data_ptr() % 16 == 0 for x in results)  # otherwise other variants of the readers would be compiled
    return results


TABLE = {
    "rms_norm": Row(
        norm.rms_norm, reference.rms_norm,
        lambda dtype, T, C: (inside(randn(T, C, dtype=dtype)), rand(C, dtype=dtype), EPS), ROWS,
    ),
    "rms_norm of split-K partials": Row(
        norm_of_partials, twin_of_partials,
        lambda dtype, K, T, C: (inside(randn(T, C, dtype=dtype), 0, 6), randn(K, T, C), rand(C, dtype=dtype), EPS),
        [(1, 1, 64), (4, 5, 100), (2, 3, 1030)],
    ),
    "add_post_norm": Row(  # a weight in fp32: an offset was added to it; three roundings of numbers up to 4
        norm.add_post_norm, reference.add_post_norm,
        lambda dtype, T, C, weight_dtype: (
            inside(3 * randn(T, C, dtype=dtype), 1, 1), rand(C, dtype=weight_dtype), EPS,
            inside(randn(T, C, dtype=dtype), 0, 6),
        ),
        [(*rows, dtype) for rows, dtype in zip(ROWS, 2 * DTYPES, strict=True)] + [(5, 100, torch.bfloat16)],
        scale=3, overwrites=3,
    ),
    "add_post_norm, scaled": Row(
        norm.add_post_norm, reference.add_post_norm,
        lambda dtype, T, C: (
            inside(3 * randn(T, C, dtype=dtype), 1, 1), rand(C, dtype=dtype), EPS,
            inside(randn(T, C, dtype=dtype), 0, 6), rand(1, dtype=dtype),
        ),
        [(0, 64), (1, 64), (5, 100)], scale=3, overwrites=3,
    ),
    "add_branch_norms": Row(
        norm.add_branch_norms, reference.add_branch_norms,
        lambda dtype, T, C: (
            inside(3 * randn(T, C, dtype=dtype), 1, 1), inside(randn(T, C, dtype=dtype), 2, 0),
            rand(C, dtype=dtype), rand(C, dtype=dtype), rand(C, dtype=dtype), EPS,
            inside(randn(T, C, dtype=dtype), 0, 6), rand(1, dtype=dtype),
        ),
        [(0, 64), (1, 64), (5, 100)], scale=4, overwrites=6,
    ),
    "qk_rms_norm": Row(
        norm.qk_rms_norm, reference.qk_rms_norm, qk_norm_args,
        [(0, 64, 64, True), (1, 64, 32, False), (1, 64, 32, True), (5, 96, 32, False), (3, 1024, 1024, True)],
        scale=3, overwrites=0,
    ),
    **{
        f"act_and_mul, {act}": Row(
            lambda x, act=act: silu_and_mul.act_and_mul(x, act), lambda x, act=act: reference.act_and_mul(x, act),
            lambda dtype, T, I: (inside(randn(T, 2 * I, dtype=dtype) * 2, 0, 5),), WIDE,
        )
        for act in ("silu", "gelu_tanh")
    },
    "act_and_mul of two tensors": Row(
        lambda gate, up: silu_and_mul.act_and_mul(gate, "gelu_tanh", up),
        lambda gate, up: reference.act_and_mul(gate, "gelu_tanh", up),
        lambda dtype, T, I: (inside(randn(T, I, dtype=dtype) * 2, 0, 5), inside(randn(T, I, dtype=dtype), I, 8)), WIDE,
    ),
    "sigmoid_gate": Row(
        silu_and_mul.sigmoid_gate, reference.sigmoid_gate,
        lambda dtype, T, N: (randn(T, N, dtype=dtype), inside(randn(T, N, dtype=dtype) * 4, 5, N)), WIDE, overwrites=0,
    ),
    "relu2": Row(
        silu_and_mul.relu2, reference.relu2, lambda dtype, T, N: (inside(randn(T, N, dtype=dtype), 3, 7),), WIDE,
        overwrites=0,
    ),
    "soft_cap": Row(silu_and_mul.soft_cap, reference.soft_cap, soft_cap_args, WIDE, overwrites=0),
    "norm_rope_store": Row(
        norm_rope_store.norm_rope_store, reference.norm_rope_store, norm_rope_store_args,
        [(0, 5, 2, 32), (1, 5, 2, 32), (6, 5, 2, 32), (5, 4, 2, 16, False), (5, 4, 2, 16, True, False),
         (5, 4, 2, 16, True, True, True), (5, 4, 2, 16, False, True, True),
         (5, 4, 0, 16), (70, 3, 1, 16)],  # no KV heads; larger programs
        scale=2, overwrites=0,
    ),
    "norm_rope_store at model size": Row(
        norm_rope_store.norm_rope_store, reference.norm_rope_store, norm_rope_store_args,
        [(T, 16, 8, 128) for T in (1, 64, 4097)], scale=2, overwrites=0, dtypes=[torch.bfloat16], gpu=True,
    ),
    "rotate_heads": Row(
        rotate_heads.rotate_heads, reference.rotate_heads, rotate_heads_args,
        [(0, 5, 32, True), (1, 5, 32, False), (6, 3, 24, True), (70, 17, 16, False)],
    ),
    "rotate_qk": Row(
        rotated_in_place, lambda *args: torch.stack(attention_reference.rotate_qk(*args), 1).flatten(1),
        lambda dtype, T, H, D: (inside(randn(T, 3 * H * D, dtype=dtype), 0, 8), randn(T, D), H),
        [(0, 3, 16), (5, 3, 12), (3, 16, 72), (2, 16, 80)], scale=2, overwrites=0,
    ),
    "embed": Row(
        embedding.embed, other_reference.embed, embed_args,
        [(0, 64, 30, 1.0), (1, 1536, 30, 1.0), (37, 50, 0, 8.5), (37, 50, 90, 8.5), (37, 50, None, 8.5)],
    ),
    "decode_inputs": Row(
        aligned_decode_inputs, other_reference.decode_inputs, decode_inputs_args, [(0,), (1,), (7,), (130,)],
        dtypes=[torch.int32],
    ),
    "add_shared_expert": Row(
        shared_expert.add_shared_expert, moe_reference.add_shared_expert,
        lambda dtype, T, C, has_gate, add_residual: (
            randn(T, C, dtype=dtype), inside(randn(T, C, dtype=dtype), 0, C), randn(C, dtype=dtype), EPS,
            randn(1, C, dtype=dtype) if has_gate else None, add_residual,
        ),
        [(5, 72, True, False), (5, 72, True, True), (5, 72, False, True), (5, 72, False, False)],
        scale=4, overwrites=0, dtypes=[torch.float32, HALF],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, case, dtype", cases_of(TABLE), ids=str)
def test_kernel(name, case, dtype):
    check_row(TABLE[name], case, dtype)


# Twins against formulas written elsewhere.


@pytest.mark.parametrize("num_tokens, hidden_size, size, scale", [(0, 64, 2, 1.0), (1, 1536, 2, 1.0), (37, 50, 4, 8.5)])
def test_embed_twin_of_all_ranks_together_is_the_embedding(num_tokens, hidden_size, size, scale):
    weight, input_ids = randn(size * 30, hidden_size), ids(num_tokens, size * 30)
    expected = F.embedding(input_ids, weight) * scale
    parts = (other_reference.embed(input_ids, part, 30 * i, scale) for i, part in enumerate(weight.chunk(size)))
    torch.testing.assert_close(sum(parts), expected)
    torch.testing.assert_close(other_reference.embed(input_ids, weight, None, scale), expected)


def test_decode_inputs_twin_agrees_with_the_definition():
    req_indices, last_token, length, block_tables, block_size = args = decode_inputs_args(None, 130)
    results = other_reference.decode_inputs(*args)
    assert all(x.dtype == torch.int32 for x in results)
    for i, req_idx in enumerate(req_indices.tolist()):
        n = int(length[req_idx])
        slot = int(block_tables[req_idx, (n - 1) // block_size]) * block_size + (n - 1) % block_size
        wanted = (int(last_token[req_idx]), n - 1, slot, n) if n > 0 else (0, 0, -1, 0)
        assert tuple(int(result[i]) for result in results) == wanted


def test_qk_rms_norm_twin_is_two_norms():
    qkv, q_weight, k_weight, *_ = qk_norm_args(torch.float32, 5, 96, 32, False)
    q, k, v = qkv.split([96, 32, 32], dim=1)
    alone = [reference.rms_norm(q, q_weight, EPS), reference.rms_norm(k, k_weight, EPS), v]
    torch.testing.assert_close(reference.qk_rms_norm(qkv, q_weight, k_weight, EPS), torch.cat(alone, dim=1))

"""Inputs of a decode step: the Triton kernel against its twin, and both against the definition."""

import pytest
import torch

from nanovllm.kernels import reference, step_inputs

from . import DEVICE


@pytest.mark.parametrize("batch_size", [0, 1, 7, 130])
def test_decode_inputs(batch_size):
    num_requests, block_size = 140, 16
    table = torch.randint(1, 99, (num_requests, 12), device=DEVICE, dtype=torch.int32)
    last_token, length, block_tables = table[:, 0], table[:, 1], table[:, 2:]
    length.remainder_(10 * block_size)
    length[:3] = torch.tensor([0, block_size, block_size + 1])
    req_indices = torch.randperm(num_requests, device=DEVICE)[:batch_size].int()
    req_indices[:3] = torch.arange(len(req_indices[:3]))
    actual = step_inputs.decode_inputs(req_indices, last_token, length, block_tables, block_size)
    expected = reference.decode_inputs(req_indices, last_token, length, block_tables, block_size)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.int32 and torch.equal(a, e)
        assert a.data_ptr() % 16 == 0  # another alignment would compile other variants of the readers
    for i, req_idx in enumerate(req_indices.tolist()):
        n = int(length[req_idx])
        slot = int(block_tables[req_idx, (n - 1) // block_size]) * block_size + (n - 1) % block_size
        wanted = (int(last_token[req_idx]), n - 1, slot, n) if n > 0 else (0, 0, -1, 0)
        assert tuple(int(result[i]) for result in expected) == wanted

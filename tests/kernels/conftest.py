"""Shared by the kernels' tests."""

import pytest
import torch


@pytest.fixture
def poisoned(monkeypatch):
    """torch.empty is filled with NaN, or with a large negative integer."""
    torch.manual_seed(0)
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -123456)

    monkeypatch.setattr(torch, "empty", poisoned_empty)

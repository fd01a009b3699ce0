"""One step in flight: what arrives and what stops while the device works, and what a decode step sends."""

import pytest
from helpers import DEVICES, generate, greedy, prompt_of, record_calls, run_ahead


@pytest.mark.parametrize("device", DEVICES)
def test_decode_sends_only_changes(make_llm, device):
    """In the middle of a block the host sends nothing, or it could not run ahead of the device."""
    llm = run_ahead(make_llm(device=device))
    sent = record_calls(llm.model_runner, "write", argument=1)
    launched = record_calls(llm.model_runner.decode, "run")
    generate(llm, [prompt_of(n) for n in (3, 14, 20)], greedy(60))
    assert len(launched) == 59
    updates = [tensors for tensors in sent if tensors and "input_ids" not in tensors]
    assert all(tensors.keys() == {"state_indices", "state_values"} for tensors in updates)
    sizes = [len(tensors["state_values"]) for tensors in updates]
    # the batch, at first all of its positions; then a block for each 16 tokens of each sequence
    assert sizes[0] >= 3 and len(sizes) <= 1 + 3 * 4 and max(sizes[1:]) <= 3
